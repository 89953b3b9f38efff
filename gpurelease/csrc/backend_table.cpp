// The one thing that torch does not let Python do: take the backends of a ProcessGroup out of its table and put
// others in, while every handle to the group stays the same object.
//
// c10d::ProcessGroup is a container. Its members `deviceTypeToBackend_` and so on say which Backend serves which
// device type; they are protected, and `_register_backend` ignores a second backend of one type. `Table` below
// derives from ProcessGroup only to name these members (a pointer to a protected member may be formed through a
// derived class); no Table is ever made. The members and the virtual functions used here are the same in torch
// 2.11 to 2.15.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10d::Backend;
using c10d::ProcessGroup;
using BackendType = ProcessGroup::BackendType;
using BackendPtr = c10::intrusive_ptr<Backend>;
// Device type ("cuda"), backend type (a BackendType as a number), backend.
using Entry = std::tuple<std::string, int, BackendPtr>;
using Entries = std::vector<Entry>;

struct Table : ProcessGroup {
  static auto& devices(ProcessGroup& g) { return g.*(&Table::deviceTypes_); }
  static auto& types(ProcessGroup& g) { return g.*(&Table::deviceTypeToBackendType_); }
  static auto& by_device(ProcessGroup& g) { return g.*(&Table::deviceTypeToBackend_); }
  static auto& by_type(ProcessGroup& g) { return g.*(&Table::backendTypeToBackend_); }
};

// Names the protected member that holds a backend's completion hook, in the same way.
struct Hook : Backend {
  static auto& of(Backend& b) { return b.*(&Hook::onCompletionHook_); }
};

// Stands where a released backend stood. It knows rank and size (from torch 2.14 `pg.size()` asks the default
// backend), and keeps what would be lost with the backend it stands for: its options, so that a time-out that is set
// meanwhile counts, and its completion hook.
// Everything else is the base class's refusal, "Backend NAME does not support allreduce": NAME says the rest. So a
// collective that a later torch adds is refused as well.
class Placeholder : public Backend {
 public:
  Placeholder(int rank, int size, std::string name, Backend& like)
      : Backend(rank, size), name_(std::move(name)) {
    onCompletionHook_ = Hook::of(like);
    try {
      options_ = like.getBackendOptions();
    } catch (const c10::Error&) {  // a backend that has none, as most out-of-tree ones
    }
  }

  const std::string getBackendName() const override { return name_; }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    TORCH_CHECK(options_, "Backend ", name_, " has no options");
    return options_;
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    TORCH_CHECK(options_, "Backend ", name_, " has no time-out to set");
    options_->timeout = timeout;
  }

  void waitForPendingWorks() override {}  // asked by destroy_process_group() of a group that has a hook

 private:
  const std::string name_;
  c10::intrusive_ptr<Options> options_;
};

BackendPtr placeholder(int rank, int size, std::string name, Backend& like) {
  return c10::make_intrusive<Placeholder>(rank, size, std::move(name), like);
}

void copy_hook(Backend& from, Backend& to) {
  if (from.hasHooks()) {
    {
      py::gil_scoped_release without_gil;
      to.waitForPendingWorks();  // else the hook would hear of the collective that connected the backend
    }
    to.registerOnCompletionHook(std::function(Hook::of(from)));
  }
}

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

std::pair<int, Entries> read_table(ProcessGroup& group) {
  Entries entries;
  for (const auto& [device, type] : Table::types(group)) {
    auto found = Table::by_device(group).find(device);
    if (found != Table::by_device(group).end()) {
      entries.emplace_back(c10::DeviceTypeName(device, /*lower_case=*/true), static_cast<int>(type), found->second);
    }
  }
  return {static_cast<int>(group.getBackendType()), std::move(entries)};
}

// Entries that stay under their device type are overwritten in place, so that a thread that reads the table at this
// moment finds the old backend or the new one. The caller keeps the old ones alive until such a reader is gone.
void write_table(ProcessGroup& group, int default_type, const std::vector<std::tuple<std::string, int, Backend*>>& entries) {
  TORCH_CHECK(!entries.empty(), "a group's table must have an entry: its name is kept there");
  const std::string name = group.getGroupName(), description = group.getGroupDesc();
  std::unordered_set<c10::DeviceType> devices;
  std::unordered_set<BackendType> types;
  for (const auto& [device_name, type_number, raw] : entries) {
    const auto device = c10::Device(device_name).type();
    const auto type = static_cast<BackendType>(type_number);
    auto backend = BackendPtr::reclaim_copy(raw);
    // A group's name is its first backend's: without it functional collectives no longer find the group.
    backend->setGroupUid(name);
    backend->setGroupDesc(description);
    backend->setBoundDeviceId(group.getBoundDeviceId());
    devices.insert(device);
    types.insert(type);
    Table::devices(group).insert(device);
    Table::types(group)[device] = type;
    Table::by_device(group)[device] = backend;
    Table::by_type(group)[type] = backend;
  }
  group.setDefaultBackend(static_cast<BackendType>(default_type));
  std::erase_if(Table::devices(group), [&](auto device) { return !devices.count(device); });
  std::erase_if(Table::types(group), [&](const auto& item) { return !devices.count(item.first); });
  std::erase_if(Table::by_device(group), [&](const auto& item) { return !devices.count(item.first); });
  std::erase_if(Table::by_type(group), [&](const auto& item) { return !types.count(item.first); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("built_for") = GPURELEASE_TORCH_VERSION;
  // Without the GIL: a backend that loses its last reference here may wait for a thread of its own that wants it.
  m.def("read_table", &read_table, py::call_guard<py::gil_scoped_release>(), py::arg("group"));
  m.def("write_table", &write_table, py::call_guard<py::gil_scoped_release>(), py::arg("group"),
        py::arg("default_type"), py::arg("entries"));
  // With the GIL: a hook may be a Python function, of which these make another reference.
  m.def("placeholder", &placeholder, py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("like"));
  m.def("copy_hook", &copy_hook, py::arg("from_backend"), py::arg("to_backend"));
  define_suspending<Backend>(m);
}
