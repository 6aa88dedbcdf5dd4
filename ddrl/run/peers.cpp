// Leaves out of MPI_Init what a rank asks about the other ranks of its host.
//
// There Open MPI asks PMIx for the locality and the address of every rank of the host, so the ranks together ask as
// often as the square of their number, though most of them never talk to each other. What it needs of a rank of another
// host it asks for with the first message between them. Here PMIx's answer to the question which ranks are on this host
// becomes this rank alone: it talks to the others as to ranks of other hosts.
//
// Imported with RTLD_GLOBAL before MPI is, this PMIx_Get is found in place of PMIx's own, to which it passes every
// question on. Types, numbers and the key are those of pmix_common.h.

#include <Python.h>

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Value {
    std::uint16_t type;
    char* string;  // the first member of a union
};

using Get = int(const void* process, const char* key, const void* directives, std::size_t count, Value** value);

constexpr int SUCCESS = 0;
constexpr int NOT_SUPPORTED = -47;
constexpr std::uint16_t STRING = 3;
constexpr const char* LOCAL_PEERS = "pmix.lpeers";  // of a job: its ranks on this host, separated by commas

}  // namespace

extern "C" {

// PMIx's own function, as the library that asks finds it by itself.
static Get* real_get(void* caller) {
    Dl_info place;
    if (dladdr(caller, &place) == 0) return nullptr;
    void* library = dlopen(place.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    Get* get = reinterpret_cast<Get*>(dlsym(library, "PMIx_Get"));  // its own, or that of a library that it needs
    dlclose(library);
    return get;
}

__attribute__((visibility("default"))) int PMIx_Get(const void* process, const char* key, const void* directives,
                                                    std::size_t count, Value** value) {
    static Get* const get = real_get(__builtin_return_address(0));
    if (get == nullptr) return NOT_SUPPORTED;
    const int status = get(process, key, directives, count, value);
    const char* rank = std::getenv("PMIX_RANK");
    if (status != SUCCESS || rank == nullptr || key == nullptr || std::strcmp(key, LOCAL_PEERS) != 0) return status;
    if ((*value)->type == STRING) {
        std::free((*value)->string);
        (*value)->string = strdup(rank);
    }
    return status;
}

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_peers", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__peers() { return PyModule_Create(&definition); }

}  // extern "C"
