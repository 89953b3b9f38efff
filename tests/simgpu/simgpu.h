// What the parts of the double share:
//   control.cpp  settings, faults and delays, the log: what a test has in its hands
//   device.cpp   the CUDA runtime
//   driver.cpp   the CUDA driver, and what the code that nvcc compiled calls
//   nccl.cpp     NCCL
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace simgpu {

using Clock = std::chrono::steady_clock;

// ------------------------------------------------------------------------------------------------------ control.cpp

// A number from the environment, read at every call: ranks are forked, and set theirs afterwards.
long setting(const char* name, long otherwise);
// Waits if a test asked for a delay at this call, and returns whether it asked for a failure.
bool goes_wrong(const char* call);
// Writes a line to the file $SIMGPU_LOG, if there is one.
void log(const char* what, const std::string& about, int rank, int size, int device);

// ------------------------------------------------------------------------------------------------------- device.cpp

constexpr int kMaxDevices = 64;
int device_count();
int current_device();
// Notes that a device was used: a real one would have a context now.
void use(int device);
bool in_use(int device);
// Memory of a device. False: there is not enough.
bool take(int device, size_t bytes);
void give_back(int device, size_t bytes);

// What is captured into a graph. The graph and all that is instantiated from it are owners of the same one.
struct Captured {
  bool open = true;                              // still being captured
  int owners = 1;
  std::vector<std::function<void()>> calls;      // made at every launch
  std::vector<std::function<void()>> when_gone;  // made when the last owner is destroyed
};
// The capture that a stream takes part in, or null.
Captured* capture_of(cudaStream_t stream);
int priority_of(cudaStream_t stream);
// Adds work to a stream, of SIMGPU_COLLECTIVE_MS; returns when it will be done.
Clock::time_point work_on(cudaStream_t stream);

}  // namespace simgpu
