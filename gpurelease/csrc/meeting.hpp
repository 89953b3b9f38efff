// The store that the members of a group meet on while its backend is built again.
//
// A backend is built in a thread of ours, and waits there for its other members, in the group's store. That store's
// client is the user's: its time-out is theirs, and whoever waits on it holds up whoever else asks it. So until the
// backend is there, everything goes over a client of ours, under the same keys, and a wait can be called off: a build
// that was given up ends, and never touches what is not ours. From then on it is the PrefixStore that it would have been
// without us.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

namespace gpurelease {

using c10d::PrefixStore;
using c10d::Store;
using StorePtr = c10::intrusive_ptr<Store>;
using Bytes = std::vector<uint8_t>;

class Meeting : public PrefixStore {
 public:
  Meeting(std::string prefix, StorePtr groups_own, StorePtr client)
      : PrefixStore(prefix, std::move(groups_own)), ours_(c10::make_intrusive<PrefixStore>(prefix, std::move(client))) {}

  // The backend is there: from now on the group's own store serves it.
  void settle() {
    std::lock_guard<std::mutex> lock(mutex_);
    ours_.reset();
  }

  // Nobody wants the backend any more: whoever waits here stops.
  void call_off() { called_off_ = true; }

  // The keys that this process has written here, for it to delete them when the backend is gone.
  std::set<std::string> keys() {
    std::lock_guard<std::mutex> lock(mutex_);
    return keys_;
  }

  void set(const std::string& key, const Bytes& value) override {
    note(key);
    if (auto ours = this->ours()) return ours->set(key, value);
    PrefixStore::set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    note(key);
    if (auto ours = this->ours()) return ours->compareSet(key, expected, desired);
    return PrefixStore::compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    auto ours = this->ours();
    if (!ours) return PrefixStore::get(key);
    wait_there(*ours, {key}, Store::kNoTimeout);
    return ours->get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    note(key);
    if (auto ours = this->ours()) return ours->add(key, value);
    return PrefixStore::add(key, value);
  }
  bool deleteKey(const std::string& key) override {
    if (auto ours = this->ours()) return ours->deleteKey(key);
    return PrefixStore::deleteKey(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    if (auto ours = this->ours()) return ours->check(keys);
    return PrefixStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys) override {
    auto ours = this->ours();
    if (!ours) return PrefixStore::wait(keys);
    wait_there(*ours, keys, Store::kNoTimeout);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    auto ours = this->ours();
    if (!ours) return PrefixStore::wait(keys, timeout);
    wait_there(*ours, keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    note(key);
    if (auto ours = this->ours()) return ours->append(key, value);
    PrefixStore::append(key, value);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    auto ours = this->ours();
    if (!ours) return PrefixStore::multiGet(keys);
    wait_there(*ours, keys, Store::kNoTimeout);
    return ours->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    for (const auto& key : keys) note(key);
    if (auto ours = this->ours()) return ours->multiSet(keys, values);
    PrefixStore::multiSet(keys, values);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void note(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(joinKey(key));
  }

  StorePtr ours() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ours_;
  }

  // Asks again and again, ever more rarely, and not more than 20 times a second: a wait in the server holds the client
  // and cannot be called off, and each one that times out has torch write two lines of warnings.
  void wait_there(Store& ours, const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
    const auto start = Clock::now();
    while (!ours.check(keys)) {
      TORCH_CHECK_WITH(DistError, !called_off_, "gpurelease has given up building this backend");
      const auto waited = Clock::now() - start;
      TORCH_CHECK_WITH(
          DistStoreError, timeout == kNoTimeout || waited < timeout, "no ", keys.front(), " in the store in time");
      std::this_thread::sleep_for(std::clamp<Clock::duration>(waited / 16, kShortest, kLongest));
    }
  }

  static constexpr std::chrono::microseconds kShortest{200};
  static constexpr std::chrono::milliseconds kLongest{50};

  std::mutex mutex_;
  std::set<std::string> keys_;
  StorePtr ours_;
  std::atomic<bool> called_off_{false};
};

}  // namespace gpurelease
