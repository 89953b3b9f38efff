// What the two halves of the double share: device.cpp stands in for the CUDA runtime, nccl.cpp for NCCL.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace simgpu {

// A number from the environment, read at every call: ranks are forked, and set theirs afterwards.
inline long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : otherwise;
}

int current_device();
// Notes that the calling thread's current device was used: a real one would have got a context.
void touch_current_device();
// Memory that a communicator holds on a device.
void take(int device, size_t bytes);
void give_back(int device, size_t bytes);

}  // namespace simgpu
