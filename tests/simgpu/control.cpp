// What a test has in its hands: settings, faults and delays at chosen calls, and a log.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "simgpu.h"

namespace {

struct Fault {
  std::string call;
  int after, times;  // goes wrong `times` times, once `after` calls have gone well
  int delay_ms;      // 0: the call fails; else it only comes late
};
std::mutex mutex_;
std::vector<Fault> faults;

}  // namespace

namespace simgpu {

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atol(value) : otherwise;
}

bool goes_wrong(const char* call) {
  int delay_ms = 0;
  bool fails = false;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& fault : faults) {
      if (fault.call != call || fault.times == 0) continue;
      if (fault.after > 0) {
        --fault.after;
        continue;
      }
      --fault.times;
      delay_ms += fault.delay_ms;
      fails |= fault.delay_ms == 0;
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
  return fails;
}

void log(const char* what, const std::string& about, int rank, int size, int device) {
  const char* path = std::getenv("SIMGPU_LOG");
  if (!path) return;
  char line[512];
  int length = snprintf(line, sizeof line, "%d %s %s %d %d %d %d\n", getpid(), what, about.c_str(), rank, size, device,
                        current_device());
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (file < 0) return;
  if (write(file, line, length) != length) perror("simgpu: the log");
  close(file);
}

}  // namespace simgpu

extern "C" {

// Makes calls of one name fail or, with a delay, come late. See README.rst for the names.
void simgpu_fault(const char* call, int after, int times, int delay_ms) {
  std::lock_guard<std::mutex> guard(mutex_);
  faults.push_back({call, after, times, delay_ms});
}

}  // extern "C"
