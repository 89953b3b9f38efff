// What can be set on a live ProcessGroupNCCL and is not told: without it these settings would be lost with it.
//
// A module of its own, for it needs the headers of NCCL and CUDA, which torch's wheels for CUDA bring and others may
// lack: setup.py builds it where they are found. Private members are named through an explicit instantiation, in which
// the language lets anybody name them; they are the same in torch 2.11 to 2.15, and the second ProcessGroupNCCL came
// with 2.14.
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#if __has_include(<torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>)
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#define HAS_SECOND_NCCL
#endif
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <pybind11/functional.h>

namespace {

template <class Member, typename Member::Type pointer>
struct Names {
  friend typename Member::Type pointer_to(Member) { return pointer; }
};

#define PRIVATE_MEMBER(NAME, CLASS, TYPE, MEMBER) \
  struct NAME {                                   \
    using Type = TYPE CLASS::*;                   \
    friend Type pointer_to(NAME);                 \
  };                                              \
  template struct Names<NAME, &CLASS::MEMBER>;

using First = c10d::ProcessGroupNCCL;
PRIVATE_MEMBER(Timing, First, std::atomic<bool>, enableTiming_)
PRIVATE_MEMBER(NanCheck, First, bool, enableNanCheck_)
PRIVATE_MEMBER(Coalescing, First, int, coalescing_state_)
PRIVATE_MEMBER(Uid, First, size_t, local_id_)

#ifdef HAS_SECOND_NCCL
using Second = c10d::nccl2::ProcessGroupNCCL;
using Hooks = std::unordered_map<int64_t, c10d::AbortHook>;
PRIVATE_MEMBER(AbortHooks, Second, Hooks, abortHooks_)

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
// What answers collectivesTimingEnabled() is not exported.
using EventPool = c10d::nccl2::NCCLEventPool;
PRIVATE_MEMBER(Events, Second, std::shared_ptr<EventPool>, event_pool_)
PRIVATE_MEMBER(EventTiming, EventPool, std::atomic<bool>, timing_enabled_)
bool is_timed(Second& second) { return ((*(second.*pointer_to(Events()))).*pointer_to(EventTiming())).load(); }
#else
bool is_timed(Second& second) { return second.collectivesTimingEnabled(); }
#endif
#endif

// Whether collectives are timed, whether tensors are checked for NaN (None: it has no such check of its own), whether a
// coalescing block is open, and the abort hooks.
py::tuple read_settings(c10d::Backend& backend) {
  py::dict hooks;
  if (auto* first = dynamic_cast<First*>(&backend)) {
    // These lie side by side: if this one is not what torch says it is, the headers are not those of this torch.
    TORCH_CHECK((*first).*pointer_to(Uid()) == first->getUid(), "gpurelease was built with other headers than torch's");
    return py::make_tuple(
        ((*first).*pointer_to(Timing())).load(),
        (*first).*pointer_to(NanCheck()),
        (*first).*pointer_to(Coalescing()) != 0,
        hooks);
  }
#ifdef HAS_SECOND_NCCL
  if (auto* second = dynamic_cast<Second*>(&backend)) {
    for (const auto& [id, hook] : (*second).*pointer_to(AbortHooks())) {
      hooks[py::int_(id)] = py::cpp_function(hook);
    }
    return py::make_tuple(is_timed(*second), py::none(), false, hooks);
  }
#endif
  return py::make_tuple(false, py::none(), false, hooks);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("built_for") = GPURELEASE_TORCH_VERSION;
  m.def("read", &read_settings, py::arg("backend"));
}
