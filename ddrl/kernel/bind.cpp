// The Python module ddrl._kernel: each subject binds itself in a file of its own.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_channels(nb::module_& module);
void bind_distribution(nb::module_& module);
void bind_learner(nb::module_& module);
void bind_replay(nb::module_& module);

NB_MODULE(_kernel, module) {
    nb::set_leak_warnings(
        false);  // long-lived objects are frozen for the collector's sake, and live until the process ends
    module.doc() =
        "C++ kernel of ddrl: channels in shared memory, codecs, the replay store, the learner's inner loops, and the "
        "queue of ad mixing.";
    bind_channels(module);
    bind_distribution(module);
    bind_learner(module);
    bind_replay(module);
}
