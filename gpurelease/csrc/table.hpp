// A group's table: which Backend serves which device type.
//
// c10d::ProcessGroup is a container. Its members `deviceTypeToBackend_` and so on are protected, and
// `_register_backend` ignores a second backend of one type. `Table` derives from ProcessGroup only to name these
// members (a pointer to a protected member may be formed through a derived class); no Table is ever made. The members
// and the virtual functions used here are the same in torch 2.11 to 2.15.
//
// Other threads look backends up at any time, most of them without the GIL: every collective does, and from torch 2.14
// get_rank() too. So
// * a backend is replaced in place: whoever reads finds the old one or the new one. The caller keeps the old one alive
//   until such a reader has a reference of its own;
// * no key of a map is ever erased, and none is added but once: "cpu", to a WORLD that did not serve it, when Gloo first
//   stands in for it. libstdc++ links the new node in without moving the others, as there are fewer than its smallest
//   number of buckets, 13;
// * the default backend type stays what it is: what stands in for WORLD is put under WORLD's own type;
// * `deviceTypes_`, which only Python reads, changes under the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <vector>

namespace gpurelease {

using c10d::Backend;
using c10d::ProcessGroup;
using BackendType = ProcessGroup::BackendType;
using BackendPtr = c10::intrusive_ptr<Backend>;
// Device type ("cuda"), backend type (a BackendType as a number), backend.
using Row = std::tuple<std::string, int, BackendPtr>;

struct Table : ProcessGroup {
  static auto& devices(ProcessGroup& g) { return g.*(&Table::deviceTypes_); }
  static auto& types(ProcessGroup& g) { return g.*(&Table::deviceTypeToBackendType_); }
  static auto& by_device(ProcessGroup& g) { return g.*(&Table::deviceTypeToBackend_); }
  static auto& by_type(ProcessGroup& g) { return g.*(&Table::backendTypeToBackend_); }
  static auto& splits(ProcessGroup& g) { return g.*(&Table::splitCounter_); }
};

// The rows that the group was made with: `deviceTypeToBackendType_` is never changed.
inline std::vector<Row> read_table(ProcessGroup& group) {
  std::vector<Row> rows;
  for (const auto& [device, type] : Table::types(group)) {
    auto found = Table::by_device(group).find(device);
    if (found != Table::by_device(group).end()) {
      rows.emplace_back(c10::DeviceTypeName(device, /*lower_case=*/true), static_cast<int>(type), found->second);
    }
  }
  return rows;
}

// A group's name is that of the first backend in its table: one without it and functional collectives no longer find
// the group. Only what is on no table yet is given a name, since others may read it there.
inline void name_after(ProcessGroup& group, Backend& backend) {
  if (backend.getGroupUid() != group.getGroupName()) {
    backend.setGroupUid(group.getGroupName());
  }
  if (backend.getGroupDesc() != group.getGroupDesc()) {
    backend.setGroupDesc(group.getGroupDesc());
  }
  if (backend.getBoundDeviceId() != group.getBoundDeviceId()) {
    backend.setBoundDeviceId(group.getBoundDeviceId());
  }
}

// Puts rows in the places of those that are there, and says which device types Python is told of. With the GIL.
inline void write_table(
    ProcessGroup& group,
    const std::vector<std::tuple<std::string, int, Backend*>>& rows,
    const std::vector<std::string>& devices) {
  std::vector<BackendPtr> old;  // they may end here, after all is written
  for (const auto& [device, type, raw] : rows) {
    name_after(group, *raw);
  }
  for (const auto& [device, type, raw] : rows) {
    auto backend = BackendPtr::reclaim_copy(raw);
    auto& by_device = Table::by_device(group)[c10::Device(device).type()];
    old.push_back(by_device);
    by_device = backend;
    auto by_type = Table::by_type(group).find(static_cast<BackendType>(type));
    if (by_type != Table::by_type(group).end()) {
      old.push_back(by_type->second);
      by_type->second = std::move(backend);
    }
  }
  std::unordered_set<c10::DeviceType> told;
  for (const auto& device : devices) {
    told.insert(c10::Device(device).type());
  }
  Table::devices(group) = std::move(told);
  py::gil_scoped_release without_gil;  // a backend that ends may wait for a thread of its own that wants it
  old.clear();
}

}  // namespace gpurelease
