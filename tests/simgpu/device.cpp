// The CUDA runtime. Device memory is host memory, and is counted per device. Copies and memsets are real and done at
// once, on the calling thread; kernels do nothing. Time is kept: a stream is busy for as long as the collectives on it
// are said to take, and events, queries and synchronisation go by that.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "simgpu.h"

using simgpu::Captured;
using simgpu::Clock;
using simgpu::current_device;
using simgpu::goes_wrong;
using simgpu::use;

namespace {

struct Allocation {
  size_t bytes;
  int device;
};
struct Stream {
  int device = 0, priority = 0;
  Clock::time_point busy_until{};
  Captured* capture = nullptr;
};
struct Event {
  Clock::time_point recorded{}, ready{};
  Captured* capture = nullptr;
};
struct UserObject {
  void* object;
  cudaHostFn_t destroy;
};

std::recursive_mutex mutex_;
using Guard = std::lock_guard<std::recursive_mutex>;
std::map<char*, Allocation> allocations;
size_t used[simgpu::kMaxDevices];
std::atomic<bool> used_at_all[simgpu::kMaxDevices];
Stream default_streams[simgpu::kMaxDevices];
std::set<Stream*> streams;
std::set<Event*> events;  // so that one that is used when it is gone is an error, and no memory is written to
thread_local int device_ = 0;

size_t total_bytes() { return static_cast<size_t>(simgpu::setting("SIMGPU_TOTAL_MB", 81920)) << 20; }

Stream& stream_of(cudaStream_t handle) {
  // 0, 1 and 2 are the default, the legacy and the per-thread stream of the current device.
  if (reinterpret_cast<uintptr_t>(handle) > 2) return *reinterpret_cast<Stream*>(handle);
  use(device_);
  return default_streams[device_];
}
Event* event_of(cudaEvent_t handle) {
  Guard guard(mutex_);
  auto* event = reinterpret_cast<Event*>(handle);
  return events.count(event) ? event : nullptr;
}
Captured& captured_of(void* handle) { return *static_cast<Captured*>(handle); }

void wait_until(Clock::time_point done) { std::this_thread::sleep_until(done); }

void lose_owner(Captured& captured) {
  {
    Guard guard(mutex_);
    if (--captured.owners > 0) return;
  }
  for (auto& call : captured.when_gone) call();
  delete &captured;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
  use(device_);
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t fill(void* at, int value, size_t bytes) {
  use(device_);
  memset(at, value, bytes);
  return cudaSuccess;
}

cudaError_t aligned(void** at, size_t bytes) {
  return posix_memalign(at, 512, bytes ? bytes : 512) ? cudaErrorMemoryAllocation : cudaSuccess;
}

}  // namespace

namespace simgpu {

int device_count() { return static_cast<int>(setting("SIMGPU_DEVICES", 8)); }
int current_device() { return device_; }
void use(int device) { used_at_all[device] = true; }
bool in_use(int device) { return device >= 0 && device < kMaxDevices && used_at_all[device]; }

bool take(int device, size_t bytes) {
  Guard guard(mutex_);
  use(device);
  if (used[device] + bytes > total_bytes()) return false;
  used[device] += bytes;
  return true;
}
void give_back(int device, size_t bytes) {
  Guard guard(mutex_);
  used[device] -= bytes;
}

Captured* capture_of(cudaStream_t handle) {
  Guard guard(mutex_);
  Stream& stream = stream_of(handle);
  if (stream.capture && !stream.capture->open) stream.capture = nullptr;
  return stream.capture;
}
int priority_of(cudaStream_t handle) { return stream_of(handle).priority; }
Clock::time_point work_on(cudaStream_t handle) {
  Guard guard(mutex_);
  Stream& stream = stream_of(handle);
  stream.busy_until =
      std::max(stream.busy_until, Clock::now()) + std::chrono::milliseconds(setting("SIMGPU_COLLECTIVE_MS", 0));
  return stream.busy_until;
}

}  // namespace simgpu

extern "C" {

// For tests, through ctypes.
size_t simgpu_used_bytes(int device) {
  Guard guard(mutex_);
  return used[device];
}
int simgpu_touched(int device) { return simgpu::in_use(device); }

// ---------------------------------------------------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = simgpu::device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = device_;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simgpu::device_count()) return cudaErrorInvalidDevice;
  use(device_ = device);  // from CUDA 12 this makes the device's context
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "SimGPU");
  properties->totalGlobalMem = total_bytes();
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->regsPerBlock = 65536;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrMultiProcessorCount  ? 132
           : attribute == cudaDevAttrMaxThreadsPerBlock   ? 1024
                                                          : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  snprintf(id, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  use(device_);
  if (goes_wrong("synchronize")) return cudaErrorIllegalAddress;
  Clock::time_point done = default_streams[device_].busy_until;
  {
    Guard guard(mutex_);
    for (Stream* stream : streams)
      if (stream->device == device_) done = std::max(done, stream->busy_until);
  }
  wait_until(done);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory"
         : error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
         : error                            ? "an error of simgpu"
                                            : "no error";
}
const char* cudaGetErrorName(cudaError_t error) { return error ? "simgpuError" : "cudaSuccess"; }

// ----------------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** at, size_t bytes) {
  Guard guard(mutex_);
  if (goes_wrong("malloc") || !simgpu::take(device_, bytes)) return cudaErrorMemoryAllocation;
  if (aligned(at, bytes)) return cudaErrorMemoryAllocation;
  allocations[static_cast<char*>(*at)] = {bytes, device_};
  return cudaSuccess;
}
cudaError_t cudaFree(void* at) {
  use(device_);
  Guard guard(mutex_);
  auto found = allocations.find(static_cast<char*>(at));
  if (found != allocations.end()) {
    simgpu::give_back(found->second.device, found->second.bytes);
    allocations.erase(found);
    free(at);
  }
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  use(device_);
  return aligned(at, bytes);
}
cudaError_t cudaFreeHost(void* at) {
  free(at);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  use(device_);
  Guard guard(mutex_);
  *total = total_bytes();
  *free_bytes = *total - used[device_];
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  memset(attributes, 0, sizeof *attributes);
  void* pointer = const_cast<void*>(at);
  Guard guard(mutex_);
  auto next = allocations.upper_bound(static_cast<char*>(pointer));
  if (next != allocations.begin()) {
    auto found = std::prev(next);
    if (pointer < found->first + std::max<size_t>(found->second.bytes, 1)) {
      attributes->type = cudaMemoryTypeDevice;
      attributes->device = found->second.device;
      attributes->devicePointer = pointer;
      return cudaSuccess;
    }
  }
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  attributes->hostPointer = pointer;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return fill(at, value, bytes); }
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) { return fill(at, value, bytes); }
cudaError_t cudaGetSymbolAddress(void** at, const void* symbol) {
  *at = const_cast<void*>(symbol);
  return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  use(device_);
  auto* stream = new Stream;
  stream->device = device_;
  stream->priority = priority;
  Guard guard(mutex_);
  streams.insert(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // torch keeps its streams for good
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return Clock::now() < stream_of(stream).busy_until ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  wait_until(stream_of(stream).busy_until);
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = simgpu::priority_of(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  Guard guard(mutex_);
  Event* event = event_of(of);
  if (!event) return cudaErrorInvalidResourceHandle;
  Stream& stream = stream_of(handle);
  stream.busy_until = std::max(stream.busy_until, event->ready);
  if (event->capture) stream.capture = event->capture;  // it joins the capture
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* about, unsigned) {
  callback(stream, cudaSuccess, about);
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* about) {
  function(about);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  use(device_);
  Guard guard(mutex_);
  auto* event = new Event;
  events.insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Guard guard(mutex_);
  Event* event = event_of(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  events.erase(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  Captured* capture = simgpu::capture_of(stream);
  Guard guard(mutex_);
  Event* event = event_of(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  Clock::time_point now = Clock::now();
  *event = {now, std::max(now, stream_of(stream).busy_until), capture};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Guard guard(mutex_);
  Event* event = event_of(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  return Clock::now() < event->ready ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Clock::time_point ready;
  {
    Guard guard(mutex_);
    Event* event = event_of(handle);
    if (!event) return cudaErrorInvalidResourceHandle;
    ready = event->ready;
  }
  wait_until(ready);
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  Guard guard(mutex_);
  Event *first = event_of(from), *second = event_of(to);
  if (!first || !second) return cudaErrorInvalidResourceHandle;
  *milliseconds = std::chrono::duration<float, std::milli>(second->ready - first->ready).count();
  return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------------- graphs
// Only collectives are captured, and made again at a launch; copies are made once, while they are captured.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Guard guard(mutex_);
  stream_of(stream).capture = new Captured;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Guard guard(mutex_);
  Captured* captured = simgpu::capture_of(stream);
  if (!captured) return cudaErrorIllegalState;
  captured->open = false;
  for (Stream* other : streams)
    if (other->capture == captured) other->capture = nullptr;
  for (Stream& other : default_streams)
    if (other.capture == captured) other.capture = nullptr;
  *graph = reinterpret_cast<cudaGraph_t>(captured);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = simgpu::capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t* dependencies) {
  Captured* captured = simgpu::capture_of(stream);
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = reinterpret_cast<uintptr_t>(captured);
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(captured);
  if (dependencies) *dependencies = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  Guard guard(mutex_);
  ++captured_of(graph).owners;
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (auto& call : captured_of(executable).calls) call();
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = captured_of(graph).calls.size();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  lose_owner(captured_of(graph));
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  lose_owner(captured_of(executable));
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object, cudaHostFn_t destroy, unsigned, unsigned) {
  *handle = reinterpret_cast<cudaUserObject_t>(new UserObject{object, destroy});
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned, unsigned) {
  UserObject* object = reinterpret_cast<UserObject*>(handle);
  captured_of(graph).when_gone.push_back([object] { object->destroy(object->object); });
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------- kernels

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  use(device_);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  use(device_);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  use(device_);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 8;
  return cudaSuccess;
}

}  // extern "C"
