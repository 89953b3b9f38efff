// What stands in a group's table while its backend is released.
//
// It knows rank and size (from torch 2.14 `pg.size()` asks the default backend), and keeps all that was set on the live
// backend and would be lost with it: this file is the one list of that. What is set meanwhile counts too.
//
// Everything else is the base class's refusal, "Backend NAME does not support allreduce": NAME says the rest. So a
// collective that a later torch adds is refused as well.
#pragma once

#include "table.hpp"

#include <functional>
#include <map>
#include <set>

namespace gpurelease {

// Names protected members of c10d::Backend, as Table does.
struct Live : Backend {
  static auto& hook(Backend& b) { return b.*(&Live::onCompletionHook_); }
};

// From torch 2.14.
template <class B>
constexpr bool meets_over_group = requires(B& b) { b.setUsePgForSymmMemRendezvous(b.getUsePgForSymmMemRendezvous()); };

class Shell : public Backend {
 public:
  // `refusal` is what the shell calls itself in errors. `options` are the backend's own, or a copy of them, or null.
  Shell(Backend& live, std::string refusal, c10::intrusive_ptr<Options> options)
      : Backend(live.getRank(), live.getSize()), refusal_(std::move(refusal)), options_(std::move(options)) {
    onCompletionHook_ = Live::hook(live);
    keep_rendezvous<Backend>(live, *this);
  }

  // Sets on a new backend what was set on the old one, or since on the shell; or on the old one what was set since.
  void pass_on(Backend& to) {
    if (hasHooks() && !to.hasHooks()) {
      {
        py::gil_scoped_release without_gil;
        to.waitForPendingWorks();  // else the hook would hear of the collective that connected the backend
      }
      to.registerOnCompletionHook(std::function(onCompletionHook_));
    }
    keep_rendezvous<Backend>(*this, to);
    if (timing) {
      to.enableCollectivesTiming();
    }
#ifdef C10D_BACKEND_HAS_HOOKS
    for (const auto& [id, hook] : abort_hooks) {
      to.registerAbortHook(id, hook);
    }
    for (auto id : unregistered_) {
      to.unregisterAbortHook(id);
    }
#endif
  }

  const std::string getBackendName() const override { return refusal_; }

  c10::intrusive_ptr<Options> getBackendOptions() override {
    TORCH_CHECK(options_, "Backend ", refusal_, " has no options");
    return options_;
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    TORCH_CHECK(options_, "Backend ", refusal_, " has no time-out to set");
    options_->timeout = timeout;
  }

  void enableCollectivesTiming() override { timing = true; }

  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override {
    onCompletionHook_ = std::move(hook);
  }

  void waitForPendingWorks() override {}  // asked by destroy_process_group() of a group that has a hook

  bool timing = false;
#ifdef C10D_BACKEND_HAS_HOOKS
  std::map<int64_t, c10d::AbortHook> abort_hooks;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    abort_hooks[id] = std::move(hook);
    unregistered_.erase(id);
  }
  void unregisterAbortHook(int64_t id) override {
    abort_hooks.erase(id);
    unregistered_.insert(id);
  }
#endif

 private:
  template <class B>
  static void keep_rendezvous(B& from, B& to) {
    if constexpr (meets_over_group<B>) {
      to.setUsePgForSymmMemRendezvous(from.getUsePgForSymmMemRendezvous());
    }
  }

#ifdef C10D_BACKEND_HAS_HOOKS
  std::set<int64_t> unregistered_;
#endif
  const std::string refusal_;
  const c10::intrusive_ptr<Options> options_;
};

}  // namespace gpurelease
