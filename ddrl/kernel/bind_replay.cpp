#include <nanobind/nanobind.h>
void bind_replay(nanobind::module_&) {}
