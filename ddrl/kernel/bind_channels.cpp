#include <nanobind/nanobind.h>
void bind_channels(nanobind::module_&) {}
