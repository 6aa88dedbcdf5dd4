// MPI's C functions by the addresses that mpi4py has loaded: nothing is linked. A handle of MPI is a pointer in some
// libraries and an int in others.
#pragma once

namespace ddrl {

template <class Handle>
struct MpiCalls {
    int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*issend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
    int (*testsome)(int, Handle*, int*, int*, void*);
    int (*grequest_start)(int (*)(void*, void*), int (*)(void*), int (*)(void*, int), void*, Handle*);
    int (*grequest_complete)(Handle);
    Handle comm;
    void* ignored;  // MPI_STATUSES_IGNORE
};

}  // namespace ddrl
