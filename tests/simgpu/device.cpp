// Stands in for the CUDA runtime and driver. Device memory is host memory and is counted per device; copies, memsets
// and their order are real; kernels do nothing; everything runs at once, on the calling thread. See README.rst.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "simgpu.h"

namespace {
using Clock = std::chrono::steady_clock;
constexpr int kMaxDevices = 64;
struct Allocation {
  size_t bytes;
  int device;
};
struct Event {
  Clock::time_point at;
};
std::mutex mutex_;
std::map<char*, Allocation> allocations;
size_t used[kMaxDevices];
std::atomic<bool> touched[kMaxDevices];  // a real device would have got a context
std::atomic<bool> capturing{false};
thread_local int device_ = 0;
int devices() { return static_cast<int>(simgpu::setting("SIMGPU_DEVICES", 8)); }
size_t total() { return static_cast<size_t>(simgpu::setting("SIMGPU_TOTAL_MB", 81920)) << 20; }
}  // namespace

namespace simgpu {
int current_device() { return device_; }
void touch_current_device() { touched[device_] = true; }
void take(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  used[device] += bytes;
  touched[device] = true;
}
void give_back(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  used[device] -= bytes;
}
}  // namespace simgpu

extern "C" {
// For tests, through ctypes.CDLL(None).
size_t simgpu_used_bytes(int device) {
  std::lock_guard<std::mutex> guard(mutex_);
  return used[device];
}
int simgpu_touched(int device) { return touched[device]; }
void simgpu_set_capturing(int on) { capturing = on != 0; }

#define OK return cudaSuccess
cudaError_t cudaGetDeviceCount(int* n) {
  *n = (int)devices();
  OK;
}
cudaError_t cudaGetDevice(int* d) {
  *d = device_;
  OK;
}
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
  device_ = d;
  OK;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "SimGPU");
  p->totalGlobalMem = total();
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerBlock = 65536;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->l2CacheSize = 50 << 20;
  p->unifiedAddressing = 1;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = a == cudaDevAttrComputeCapabilityMajor ? 9
       : a == cudaDevAttrMultiProcessorCount  ? 132
       : a == cudaDevAttrMaxThreadsPerBlock   ? 1024
                                              : 0;
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 0;
  OK;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { OK; }
cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d + 1);
  OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* a, int* b) {
  *a = 0;
  *b = -5;
  OK;
}
cudaError_t cudaDeviceSynchronize() {
  touched[device_] = true;
  OK;
}
cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  OK;
}
cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) {
  *e = (cudaEvent_t) new Event{};
  OK;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return cudaEventCreate(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  OK;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  ((Event*)e)->at = Clock::now();
  OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t) { OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { OK; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = std::chrono::duration<float, std::milli>(((Event*)b)->at - ((Event*)a)->at).count();
  OK;
}
cudaError_t cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (used[device_] + n > total()) return cudaErrorMemoryAllocation;
  if (posix_memalign(p, 512, n ? n : 512)) return cudaErrorMemoryAllocation;
  allocations[(char*)*p] = {n, device_};
  used[device_] += n;
  touched[device_] = true;
  OK;
}
cudaError_t cudaFree(void* p) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto it = allocations.find((char*)p);
  if (it != allocations.end()) {
    used[it->second.device] -= it->second.bytes;
    allocations.erase(it);
    free(p);
  }
  OK;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  return posix_memalign(p, 512, n ? n : 512) ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
  free(p);
  OK;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { OK; }
cudaError_t cudaHostUnregister(void*) { OK; }
cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  touched[device_] = true;
  std::lock_guard<std::mutex> guard(mutex_);
  *t = total();
  *f = *t - used[device_];
  OK;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  std::lock_guard<std::mutex> guard(mutex_);
  auto it = allocations.upper_bound((char*)p);
  if (it != allocations.begin()) {
    --it;
    if ((char*)p < it->first + std::max<size_t>(it->second.bytes, 1)) {
      a->type = cudaMemoryTypeDevice;
      a->device = it->second.device;
      a->devicePointer = (void*)p;
      OK;
    }
  }
  a->type = cudaMemoryTypeUnregistered;
  a->device = -1;
  a->hostPointer = (void*)p;
  OK;
}
cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  memmove(d, s, n);
  OK;
}
cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t) {
  memmove(d, s, n);
  OK;
}
cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t) {
  memmove(d, s, n);
  OK;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { OK; }
cudaError_t cudaMemset(void* d, int v, size_t n) {
  memset(d, v, n);
  OK;
}
cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t) {
  memset(d, v, n);
  OK;
}
static std::atomic<long> streams{1};
cudaError_t cudaStreamCreate(cudaStream_t* s) {
  *s = (cudaStream_t)(streams++ * 64);
  OK;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return cudaStreamCreate(s); }
cudaError_t cudaStreamDestroy(cudaStream_t) { OK; }
cudaError_t cudaStreamQuery(cudaStream_t) { OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) {
  *p = 0;
  OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *s = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { OK; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* u, unsigned) {
  f(s, cudaSuccess, u);
  OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* u) {
  f(u);
  OK;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { OK; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { OK; }
cudaError_t cudaGetLastError() { OK; }
cudaError_t cudaPeekAtLastError() { OK; }
const char* cudaGetErrorString(cudaError_t e) { return e ? "simgpu error" : "no error"; }
const char* cudaGetErrorName(cudaError_t e) { return e ? "simgpuError" : "cudaSuccess"; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->binaryVersion = a->ptxVersion = 90;
  OK;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 8;
  OK;
}
cudaError_t cudaGetSymbolAddress(void** p, const void* s) {
  *p = (void*)s;
  OK;
}
// The driver API is there to be found, and declines: nothing under test needs it.
static int driver_declines() { return 801; }
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* v) {
  *v = 13000;
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return 0;
}
int cuDeviceGetCount(int* n) {
  *n = (int)devices();
  return 0;
}
int cuCtxGetCurrent(void** c) {
  *c = (void*)&devices;
  return 0;
}
int cuDeviceGetAttribute(int* v, int, int) {
  *v = 0;
  return 0;
}
int cuDeviceGetUuid() { return 801; }
int cuDevicePrimaryCtxRetain() { return 801; }
int cuFuncSetCacheConfig() { return 801; }
int cuGetErrorName() { return 801; }
int cuLaunchCooperativeKernel() { return 801; }
int cuLinkAddData_v2() { return 801; }
int cuMemGetAddressRange_v2() { return 801; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor() { return 801; }
int cuPointerGetAttribute() { return 801; }
int cuTensorMapEncodeTiled() { return 801; }
int cuCtxFromGreenCtx() { return 801; }
int cuCtxPopCurrent() { return 801; }
int cuCtxPushCurrent() { return 801; }
int cuCtxSetCurrent() { return 801; }
int cuDeviceGet() { return 801; }
int cuGreenCtxCreate() { return 801; }
int cuMemAddressFree() { return 801; }
int cuMemAddressReserve() { return 801; }
int cuMemCreate() { return 801; }
int cuMemExportToShareableHandle() { return 801; }
int cuMemGetAddressRange() { return 801; }
int cuMemGetAllocationGranularity() { return 801; }
int cuMemImportFromShareableHandle() { return 801; }
int cuMemMap() { return 801; }
int cuMemRelease() { return 801; }
int cuMemSetAccess() { return 801; }
int cuMemUnmap() { return 801; }
int cuModuleLoadData() { return 801; }
int cuModuleLoadDataEx() { return 801; }
int cuModuleGetFunction() { return 801; }
int cuModuleUnload() { return 801; }
int cuLaunchKernel() { return 801; }
int cuLaunchKernelEx() { return 801; }
int cuLinkCreate() { return 801; }
int cuLinkComplete() { return 801; }
int cuLinkDestroy() { return 801; }
int cuLinkAddData() { return 801; }
int cuFuncGetAttribute() { return 801; }
int cuFuncSetAttribute() { return 801; }
int cuStreamWriteValue32() { return 801; }
int cuGetErrorString(int, const char** s) {
  *s = "simgpu driver stub";
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** p, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* r) {
  *p = (void*)driver_declines;
  if (r) *r = cudaDriverEntryPointSuccess;
  OK;
}
static int dummy;
void** __cudaRegisterFatBinary(void*) { return (void**)&dummy; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
static thread_local struct {
  dim3 g, b;
  size_t s;
  void* st;
} cfg;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, void* st) {
  cfg = {g, b, s, st};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  *g = cfg.g;
  *b = cfg.b;
  *s = cfg.s;
  *(void**)st = cfg.st;
  OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void*) {
  *k = (cudaKernel_t)&dummy;
  OK;
}
}
