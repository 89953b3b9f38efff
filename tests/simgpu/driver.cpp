// The CUDA driver, and what code compiled by nvcc calls when it is loaded and when it launches. Contexts are those that
// device.cpp has counted. The rest of the driver is there to be found, and declines: nothing under test needs it.
#include <cuda_runtime_api.h>

#include "simgpu.h"

namespace {

constexpr int kNotSupported = 801;
int something;  // whose address stands for handles that nobody looks into

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = simgpu::device_count();
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = simgpu::in_use(device);
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = simgpu::in_use(simgpu::current_device()) ? &something : nullptr;
  return 0;
}
int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "simgpu has no driver";
  return 0;
}

#define DECLINES(name) \
  int name() { return kNotSupported; }
DECLINES(cuCtxFromGreenCtx)
DECLINES(cuCtxPopCurrent)
DECLINES(cuCtxPushCurrent)
DECLINES(cuCtxSetCurrent)
DECLINES(cuDeviceGet)
DECLINES(cuDeviceGetUuid)
DECLINES(cuDevicePrimaryCtxRetain)
DECLINES(cuFuncGetAttribute)
DECLINES(cuFuncSetAttribute)
DECLINES(cuFuncSetCacheConfig)
DECLINES(cuGetErrorName)
DECLINES(cuGreenCtxCreate)
DECLINES(cuLaunchCooperativeKernel)
DECLINES(cuLaunchKernel)
DECLINES(cuLaunchKernelEx)
DECLINES(cuLinkAddData)
DECLINES(cuLinkAddData_v2)
DECLINES(cuLinkComplete)
DECLINES(cuLinkCreate)
DECLINES(cuLinkCreate_v2)
DECLINES(cuLinkDestroy)
DECLINES(cuMemAddressFree)
DECLINES(cuMemAddressReserve)
DECLINES(cuMemCreate)
DECLINES(cuMemExportToShareableHandle)
DECLINES(cuMemGetAddressRange)
DECLINES(cuMemGetAddressRange_v2)
DECLINES(cuMemGetAllocationGranularity)
DECLINES(cuMemImportFromShareableHandle)
DECLINES(cuMemMap)
DECLINES(cuMemRelease)
DECLINES(cuMemSetAccess)
DECLINES(cuMemUnmap)
DECLINES(cuModuleGetFunction)
DECLINES(cuModuleLoad)
DECLINES(cuModuleLoadData)
DECLINES(cuModuleLoadDataEx)
DECLINES(cuModuleUnload)
DECLINES(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DECLINES(cuPointerGetAttribute)
DECLINES(cuStreamWriteValue32)
DECLINES(cuTensorMapEncodeTiled)
#undef DECLINES

static int declines() { return kNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(declines);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --------------------------------------------------------------------------------------------- what nvcc's output calls

void** __cudaRegisterFatBinary(void*) { return reinterpret_cast<void**>(&something); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local LaunchConfiguration pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void*) {
  *kernel = reinterpret_cast<cudaKernel_t>(&something);
  return cudaSuccess;
}

}  // extern "C"
