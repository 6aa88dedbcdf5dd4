// Python face of the replay kernel: ddrl._kernel.ReplayCore. ddrl.replay.experience is its only user.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_replay_core.hpp"

namespace nb = nanobind;
using namespace ddrl::replay;

void bind_replay(nb::module_& module) {
    nb::exception<Misfit>(module, "Misfit", PyExc_TypeError);
    nb::class_<ReplayCore>(module, "ReplayCore", "The replay kernel; ddrl.replay.ExperienceReplay is its face.")
        .def(nb::init<const std::vector<ddrl::bind::ColumnEntry>&, const std::array<std::size_t, 4>&, u64, u32, bool,
                      u32, u32, nb::object, u64, u32, const std::string&>(),
             nb::kw_only(), nb::arg("table"), nb::arg("row"), nb::arg("capacity"), nb::arg("pick_len"),
             nb::arg("short_picks"), nb::arg("n_step"), nb::arg("burn_in"), nb::arg("eviction"), nb::arg("seed"),
             nb::arg("shift"), nb::arg("file"))
        .def("new_episode", &ReplayCore::new_episode)
        .def("record", &ReplayCore::record, nb::arg("handle"), nb::arg("count"), nb::arg("values"),
             nb::arg("finals").none(), nb::arg("ending"),
             nb::sig("def record(self, handle: int, count: int, values: tuple[typing.Any, ...], "
                     "finals: typing.Any | None, ending: int) -> int"))
        .def("cut", &ReplayCore::cut, nb::arg("handle"))
        .def("record_rows", &ReplayCore::record_rows, nb::arg("rows"))
        .def("cut_streams", &ReplayCore::cut_streams)
        .def_static("selector_defaults", &ReplayCore::selector_defaults, nb::arg("kind"))
        .def("add_selector", &ReplayCore::add_selector, nb::arg("kind"), nb::arg("parameters"))
        .def("add_foreign_selector", &ReplayCore::add_foreign_selector, nb::arg("selector"))
        .def("keep_selectors", &ReplayCore::keep_selectors, nb::arg("count"))
        .def("set_importance_exponent", &ReplayCore::set_importance_exponent, nb::arg("selector"), nb::arg("exponent"))
        .def("get_batch", &ReplayCore::get_batch, nb::arg("batch_size"), nb::arg("selector"), nb::arg("make"),
             nb::sig("def get_batch(self, batch_size: int, selector: int, make: typing.Callable[[int], object]) -> "
                     "typing.Any"))
        .def("sample", &ReplayCore::sample, nb::arg("batch_size"), nb::arg("selector"), nb::arg("discount"),
             nb::arg("make"),
             nb::sig("def sample(self, batch_size: int, selector: int, discount: float, make: typing.Callable[[int], "
                     "object]) -> typing.Any"))
        .def("sample_sequences", &ReplayCore::sample_sequences, nb::arg("batch_size"), nb::arg("selector"),
             nb::arg("discount"), nb::arg("make"),
             nb::sig("def sample_sequences(self, batch_size: int, selector: int, discount: float, make: "
                     "typing.Callable[[int], object]) -> typing.Any"))
        .def("set_priority", &ReplayCore::set_priority, nb::arg("selector"), nb::arg("pick_epi"), nb::arg("pick_pos"),
             nb::arg("priority"))
        .def("list_picks", &ReplayCore::list_picks, nb::arg("handles"), nb::arg("positions"))
        .def("law", &ReplayCore::law, nb::arg("selector"), nb::arg("probability"))
        .def_prop_ro("records", &ReplayCore::records)
        .def_prop_ro("episodes", &ReplayCore::episodes)
        .def_prop_ro("picks", &ReplayCore::picks)
        .def_prop_ro("nbytes", &ReplayCore::nbytes)
        .def("check", &ReplayCore::check)
        .def("serialize", &ReplayCore::serialize, nb::arg("configuration"), nb::arg("progress").none())
        .def("unserialize", &ReplayCore::unserialize, nb::arg("data"), nb::arg("configuration"),
             nb::arg("progress").none())
        .def("save", &ReplayCore::save, nb::arg("path"), nb::arg("configuration"), nb::arg("increment"),
             nb::arg("progress").none())
        .def("load", &ReplayCore::load, nb::arg("paths"), nb::arg("configuration"), nb::arg("progress").none());
}
