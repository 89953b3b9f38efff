// Stands in for NCCL between the processes of one machine: ranks meet and exchange bytes through files in $SIMGPU_DIR.
// Communicators are counted, hold device memory, and can be made to fail or to wait. See README.rst.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "simgpu.h"

using simgpu::setting;

namespace {
using Clock = std::chrono::steady_clock;

std::string dir() {
  const char* v = getenv("SIMGPU_DIR");
  std::string d = v ? v : "/dev/shm/simgpu";
  mkdir(d.c_str(), 0777);
  return d;
}

// What a test has asked to go wrong in this process: the next calls of one name fail, or wait first.
struct Fault {
  std::string call;
  int times = 0;
  int delay_ms = 0;
} fault;
std::mutex fault_mutex;

// Returns whether this call is to fail, after the delay that was asked for.
bool goes_wrong(const char* call) {
  int delay = 0;
  bool fails = false;
  {
    std::lock_guard<std::mutex> guard(fault_mutex);
    if (fault.times > 0 && fault.call == call) {
      --fault.times;
      delay = fault.delay_ms;
      fails = delay == 0;
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(delay));
  return fails;
}
}  // namespace

struct ncclComm {
  std::string id;
  int rank, n, dev;
  long seq = 0, splits = 0;
  bool suspended = false, aborted = false;
  std::map<int, long> sendseq, recvseq;
  size_t dyn, persist;
};
namespace {
std::atomic<long> live{0}, created{0}, destroyed{0}, suspends{0}, resumes{0};
std::atomic<size_t> comm_bytes{0};
thread_local int group_depth = 0;
struct Op {
  std::function<void()> post, done;
};
thread_local std::vector<Op> queue_;
thread_local ncclResult_t group_err = ncclSuccess;

void put(const std::string& name, const void* p, size_t n) {
  std::string f = dir() + "/" + name, t = f + ".tmp";
  FILE* h = fopen(t.c_str(), "wb");
  if (n) fwrite(p, 1, n, h);
  fclose(h);
  rename(t.c_str(), f.c_str());
}
bool get(const std::string& name, std::vector<char>& out, const ncclComm* c = nullptr, double limit = 0) {
  std::string f = dir() + "/" + name;
  auto t0 = Clock::now();
  if (limit <= 0) limit = setting("SIMGPU_TIMEOUT", 60);
  for (int i = 0;; ++i) {
    FILE* h = fopen(f.c_str(), "rb");
    if (h) {
      fseek(h, 0, SEEK_END);
      long n = ftell(h);
      rewind(h);
      out.resize(n);
      size_t r = n ? fread(out.data(), 1, n, h) : 0;
      (void)r;
      fclose(h);
      return true;
    }
    if (c && c->aborted) return false;
    if (std::chrono::duration<double>(Clock::now() - t0).count() > limit) {
      fprintf(stderr, "simgpu: pid %d timed out waiting for %s\n", getpid(), name.c_str());
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(i < 200 ? 20 : 500));
  }
}
void drop(const std::string& name) { unlink((dir() + "/" + name).c_str()); }
size_t esize(ncclDataType_t t) {
  switch (t) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}
template <class T>
void red(T* a, const T* b, size_t n, int op) {
  for (size_t i = 0; i < n; ++i) switch (op) {
      case ncclProd:
        a[i] *= b[i];
        break;
      case ncclMax:
        a[i] = std::max(a[i], b[i]);
        break;
      case ncclMin:
        a[i] = std::min(a[i], b[i]);
        break;
      default:
        a[i] += b[i];
    }
}
float bf(uint16_t v) {
  uint32_t u = (uint32_t)v << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
void reduce(char* a, const char* b, size_t n, ncclDataType_t t, int op) {
  switch (t) {
    case ncclFloat32:
      red((float*)a, (const float*)b, n, op);
      break;
    case ncclFloat64:
      red((double*)a, (const double*)b, n, op);
      break;
    case ncclInt32:
      red((int32_t*)a, (const int32_t*)b, n, op);
      break;
    case ncclUint32:
      red((uint32_t*)a, (const uint32_t*)b, n, op);
      break;
    case ncclInt64:
      red((int64_t*)a, (const int64_t*)b, n, op);
      break;
    case ncclUint64:
      red((uint64_t*)a, (const uint64_t*)b, n, op);
      break;
    case ncclInt8:
      red((int8_t*)a, (const int8_t*)b, n, op);
      break;
    case ncclUint8:
      red((uint8_t*)a, (const uint8_t*)b, n, op);
      break;
    case ncclBfloat16:
      for (size_t i = 0; i < n; ++i) {
        float x = bf(((uint16_t*)a)[i]), y = bf(((const uint16_t*)b)[i]);
        red(&x, &y, 1, op);
        uint32_t u;
        memcpy(&u, &x, 4);
        ((uint16_t*)a)[i] = u >> 16;
      }
      break;
    default:
      break;
  }
}
void avg(char* a, size_t n, ncclDataType_t t, int k) {
  if (t == ncclFloat32)
    for (size_t i = 0; i < n; ++i) ((float*)a)[i] /= k;
  if (t == ncclFloat64)
    for (size_t i = 0; i < n; ++i) ((double*)a)[i] /= k;
}
std::string nm(const ncclComm* c, long seq, int rank) {
  return c->id + "." + std::to_string(seq) + "." + std::to_string(rank);
}

ncclResult_t submit(Op op) {
  if (group_depth) {
    queue_.push_back(std::move(op));
    return ncclSuccess;
  }
  group_err = ncclSuccess;
  op.post();
  op.done();
  return group_err;
}
// Every rank contributes `bytes` and then sees everyone's contribution.
ncclResult_t exchange(ncclComm* c, const void* src, size_t bytes,
                      std::function<void(std::vector<std::vector<char>>&)> fin) {
  if (c->suspended) return ncclInvalidUsage;
  if (c->aborted) return ncclInvalidUsage;
  long seq = c->seq++;
  return submit({[=] { put(nm(c, seq, c->rank), src, bytes); },
                 [=] {
                   std::vector<std::vector<char>> all(c->n);
                   for (int r = 0; r < c->n; ++r)
                     if (!get(nm(c, seq, r), all[r], c)) {
                       group_err = ncclSystemError;
                       return;
                     }
                   fin(all);
                   if (seq) drop(nm(c, seq - 1, c->rank));
                 }});
}
void born(ncclComm* c) {
  c->dyn = (size_t)setting("SIMGPU_COMM_DYN_MB", 256) << 20;
  c->persist = (size_t)setting("SIMGPU_COMM_PERSIST_MB", 64) << 20;
  if (c->n == 1) c->dyn = 0;
  simgpu::take(c->dev, c->dyn + c->persist);
  comm_bytes += c->dyn + c->persist;
  ++live;
  ++created;
  std::this_thread::sleep_for(std::chrono::milliseconds(setting("SIMGPU_INIT_MS", 0)));
}
void dead(ncclComm* c) {
  size_t b = (c->suspended ? 0 : c->dyn) + c->persist;
  simgpu::give_back(c->dev, b);
  comm_bytes -= b;
  --live;
  ++destroyed;
}
bool meet(ncclComm* c, const char* what, double limit = 0) {
  put(c->id + "." + what + "." + std::to_string(c->rank), "", 0);
  std::vector<char> b;
  for (int r = 0; r < c->n; ++r)
    if (!get(c->id + "." + what + "." + std::to_string(r), b, nullptr, limit)) return false;
  return true;
}
ncclResult_t init(ncclComm_t* out, int n, const std::string& id, int rank) {
  simgpu::touch_current_device();
  if (goes_wrong("init")) return ncclSystemError;
  auto* c = new ncclComm;
  c->id = id;
  c->rank = rank;
  c->n = n;
  c->dev = simgpu::current_device();
  if (!meet(c, "init")) {
    delete c;
    return ncclSystemError;
  }
  born(c);
  *out = c;
  return ncclSuccess;
}
}  // namespace

extern "C" {
// For tests, through ctypes.CDLL(None).
void simgpu_fault(const char* call, int times, int delay_ms) {
  std::lock_guard<std::mutex> guard(fault_mutex);
  fault.call = call;
  fault.times = times;
  fault.delay_ms = delay_ms;
}
long simgpu_live_comms() { return live; }
long simgpu_created_comms() { return created; }
long simgpu_destroyed_comms() { return destroyed; }
long simgpu_suspends() { return suspends; }
long simgpu_resumes() { return resumes; }
size_t simgpu_comm_bytes() { return comm_bytes; }

ncclResult_t ncclGetVersion(int* v) {
  *v = setting("SIMGPU_NCCL_VERSION", 23007);
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* u) {
  std::random_device rd;
  memset(u, 0, sizeof *u);
  snprintf(u->internal, sizeof u->internal, "c%08x%08x", rd(), rd());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId u, int r, ncclConfig_t*) {
  return init(c, n, u.internal, r);
}
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId u, int r) { return init(c, n, u.internal, r); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int r, int, ncclUniqueId* u, ncclConfig_t*) {
  return init(c, n, u->internal, r);
}
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  int me[2] = {color, key};
  long k = c->splits++;
  std::string base = c->id + ".s" + std::to_string(k);
  put(base + "." + std::to_string(c->rank), me, sizeof me);
  std::vector<std::pair<int, int>> in;
  std::vector<char> b;
  for (int r = 0; r < c->n; ++r) {
    if (!get(base + "." + std::to_string(r), b, c)) return ncclSystemError;
    int* v = (int*)b.data();
    if (v[0] == color) in.push_back({v[1], r});
  }
  if (color == NCCL_SPLIT_NOCOLOR) {
    *out = nullptr;
    return ncclSuccess;
  }
  std::sort(in.begin(), in.end());
  auto* s = new ncclComm;
  s->id = base + "x" + std::to_string(color);
  s->n = in.size();
  s->dev = simgpu::current_device();
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i].second == c->rank) s->rank = i;
  born(s);
  *out = s;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) {
  simgpu::touch_current_device();
  if (goes_wrong("destroy")) return ncclSystemError;
  // NCCL's own destroy is an intra-node rendezvous: SIMGPU_DESTROY_MEETS=1 keeps that.
  if (setting("SIMGPU_DESTROY_MEETS", 0) && !meet(c, "bye", setting("SIMGPU_DESTROY_TIMEOUT", 20))) {
    fprintf(stderr, "simgpu: destroy of %s hung\n", c->id.c_str());
    _exit(66);
  }
  dead(c);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t c) {
  simgpu::touch_current_device();
  if (goes_wrong("abort")) return ncclSystemError;
  if (setting("SIMGPU_DESTROY_MEETS", 0) && !meet(c, "bye", setting("SIMGPU_DESTROY_TIMEOUT", 20))) {
    fprintf(stderr, "simgpu: abort of %s hung\n", c->id.c_str());
    _exit(66);
  }
  c->aborted = true;
  dead(c);
  return ncclSuccess;
}
ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclSuccess; }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)
ncclResult_t ncclCommSuspend(ncclComm_t c, int) {
  if (c->suspended) return ncclInvalidUsage;
  c->suspended = true;
  ++suspends;
  comm_bytes -= c->dyn;
  simgpu::give_back(c->dev, c->dyn);
  return ncclSuccess;
}
ncclResult_t ncclCommResume(ncclComm_t c) {
  if (!c->suspended) return ncclInvalidUsage;
  c->suspended = false;
  ++resumes;
  comm_bytes += c->dyn;
  simgpu::take(c->dev, c->dyn);
  return ncclSuccess;
}
ncclResult_t ncclCommMemStats(ncclComm_t c, ncclCommMemStat_t s, uint64_t* v) {
  *v = s == ncclStatGpuMemSuspend     ? c->dyn
       : s == ncclStatGpuMemSuspended ? c->suspended
       : s == ncclStatGpuMemPersist   ? c->persist
                                      : c->dyn + c->persist;
  return ncclSuccess;
}
#endif
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* e) {
  *e = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
  *n = c->n;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) {
  *r = c->rank;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t r) { return r ? "simgpu nccl error" : "no error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group_depth) return ncclSuccess;
  group_err = ncclSuccess;
  auto q = std::move(queue_);
  queue_.clear();
  for (auto& o : q) o.post();
  for (auto& o : q) o.done();
  return group_err;
}
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclSuccess; }
ncclResult_t ncclAllReduce(const void* s, void* d, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t) {
  return exchange(c, s, n * esize(t), [=](auto& all) {
    std::vector<char> a = all[0];
    for (int r = 1; r < c->n; ++r) reduce(a.data(), all[r].data(), n, t, op);
    if (op == ncclAvg) avg(a.data(), n, t, c->n);
    memcpy(d, a.data(), a.size());
  });
}
ncclResult_t ncclReduce(const void* s, void* d, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
                        cudaStream_t st) {
  return exchange(c, s, n * esize(t), [=](auto& all) {
    if (c->rank != root) return;
    std::vector<char> a = all[0];
    for (int r = 1; r < c->n; ++r) reduce(a.data(), all[r].data(), n, t, op);
    if (op == ncclAvg) avg(a.data(), n, t, c->n);
    memcpy(d, a.data(), a.size());
  });
}
ncclResult_t ncclBroadcast(const void* s, void* d, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) {
  return exchange(c, s, c->rank == root ? n * esize(t) : 0,
                  [=](auto& all) { memcpy(d, all[root].data(), all[root].size()); });
}
ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) {
  return ncclBroadcast(b, b, n, t, root, c, st);
}
ncclResult_t ncclAllGather(const void* s, void* d, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) {
  return exchange(c, s, n * esize(t), [=](auto& all) {
    size_t b = n * esize(t);
    for (int r = 0; r < c->n; ++r) memcpy((char*)d + r * b, all[r].data(), b);
  });
}
ncclResult_t ncclGather(const void* s, void* d, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t) {
  return exchange(c, s, n * esize(t), [=](auto& all) {
    if (c->rank == root)
      for (int r = 0; r < c->n; ++r) memcpy((char*)d + r * n * esize(t), all[r].data(), n * esize(t));
  });
}
ncclResult_t ncclReduceScatter(const void* s, void* d, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                               cudaStream_t) {
  return exchange(c, s, n * c->n * esize(t), [=](auto& all) {
    size_t b = n * esize(t), o = c->rank * b;
    std::vector<char> a(all[0].begin() + o, all[0].begin() + o + b);
    for (int r = 1; r < c->n; ++r) reduce(a.data(), all[r].data() + o, n, t, op);
    if (op == ncclAvg) avg(a.data(), n, t, c->n);
    memcpy(d, a.data(), b);
  });
}
ncclResult_t ncclAlltoAll(const void* s, void* d, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t) {
  return exchange(c, s, n * c->n * esize(t), [=](auto& all) {
    size_t b = n * esize(t);
    for (int r = 0; r < c->n; ++r) memcpy((char*)d + r * b, all[r].data() + c->rank * b, b);
  });
}
ncclResult_t ncclSend(const void* s, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) {
  if (c->suspended || c->aborted) return ncclInvalidUsage;
  std::string f =
      c->id + ".p" + std::to_string(c->rank) + "-" + std::to_string(peer) + "." + std::to_string(c->sendseq[peer]++);
  return submit({[=] { put(f, s, n * esize(t)); }, [] {}});
}
ncclResult_t ncclRecv(void* d, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t) {
  if (c->suspended || c->aborted) return ncclInvalidUsage;
  std::string f =
      c->id + ".p" + std::to_string(peer) + "-" + std::to_string(c->rank) + "." + std::to_string(c->recvseq[peer]++);
  return submit({[] {},
                 [=] {
                   std::vector<char> b;
                   if (!get(f, b, c)) {
                     group_err = ncclSystemError;
                     return;
                   }
                   memcpy(d, b.data(), std::min(b.size(), n * esize(t)));
                   drop(f);
                 }});
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* o, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  *o = ncclSum;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclMemAlloc(void** p, size_t n) { return cudaMalloc(p, n) ? ncclSystemError : ncclSuccess; }
ncclResult_t ncclMemFree(void* p) {
  cudaFree(p);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** h) {
  *h = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
}
