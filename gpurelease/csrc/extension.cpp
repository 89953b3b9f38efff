// What torch does not let Python do, in three files: table.hpp and shell.hpp (take the backends of a ProcessGroup out of
// its table and put others in, while every handle to the group stays the same object), and meeting.hpp (where new ones
// meet); and what Python itself cannot do: guard.hpp.
#include "guard.hpp"
#include "meeting.hpp"
#include "shell.hpp"
#include "table.hpp"

#include <pybind11/stl.h>

namespace gpurelease {

// Suspending and resuming are rendezvous of a communicator's ranks (NCCL's mem_manager.cc). torch's own bindings keep
// the GIL meanwhile, so that a rank whose peer does not come could not even say so. From torch 2.12.
template <class B>
constexpr bool suspends = requires(B& backend) { backend.suspend(); };

template <class B>
void define_suspending(py::module& m) {
  if constexpr (suspends<B>) {
    m.def("suspend", [](B& backend) { backend.suspend(); }, py::call_guard<py::gil_scoped_release>(), py::arg("backend"));
    m.def("resume", [](B& backend) { backend.resume(); }, py::call_guard<py::gil_scoped_release>(), py::arg("backend"));
  }
}

c10::intrusive_ptr<Shell> make_shell(Backend& live, std::string refusal, Backend::Options* options) {
  auto kept = options ? c10::intrusive_ptr<Backend::Options>::reclaim_copy(options) : nullptr;
  return c10::make_intrusive<Shell>(live, std::move(refusal), std::move(kept));
}

// Groups that somebody holds in Python and that are not in torch.distributed's books. pybind11 knows all its objects.
py::list groups_held(const py::type& group_type) {
  py::list found;
  py::detail::with_internals([&](py::detail::internals& internals) {
    for (const auto& [address, instance] : internals.registered_instances) {
      if (reinterpret_cast<PyObject*>(Py_TYPE(instance)) == group_type.ptr()) {
        found.append(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(instance)));
      }
    }
  });
  return found;
}

}  // namespace gpurelease

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace gpurelease;
  m.attr("built_for") = GPURELEASE_TORCH_VERSION;
  m.def("read_table", &read_table, py::arg("group"));
  m.def("write_table", &write_table, py::arg("group"), py::arg("rows"), py::arg("devices"));
  m.def("split_count", [](ProcessGroup& group) { return Table::splits(group); }, py::arg("group"));
  m.def(
      "wait_for_pending_works",  // torch 2.11 has it for groups only
      [](Backend& backend) { backend.waitForPendingWorks(); },
      py::call_guard<py::gil_scoped_release>(),
      py::arg("backend"));
  m.def("groups_held", &groups_held, py::arg("group_type"));

  py::class_<Shell, c10::intrusive_ptr<Shell>, Backend>(m, "Shell")
      .def_property_readonly("options", &Shell::getBackendOptions)
      .def("pass_on", &Shell::pass_on, py::arg("to"))  // with the GIL: a hook may be a Python function
      .def_readwrite("timing", &Shell::timing);
  m.def("make_shell", &make_shell, py::arg("live"), py::arg("refusal"), py::arg("options"));

  py::class_<Meeting, c10::intrusive_ptr<Meeting>, PrefixStore>(m, "Meeting")
      .def(py::init<std::string, StorePtr, StorePtr>(), py::arg("prefix"), py::arg("groups_own"), py::arg("client"))
      .def("settle", &Meeting::settle)
      .def("call_off", &Meeting::call_off)
      .def("keys", &Meeting::keys);

  define_suspending<Backend>(m);
  define_guarded(m);
}
