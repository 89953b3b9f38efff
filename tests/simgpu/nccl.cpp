// NCCL between the processes of one machine: ranks meet, and exchange bytes, through files in $SIMGPU_DIR.
// Communicators are counted, hold device memory, and remember what they were made with.
#include <fcntl.h>
#include <nccl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "simgpu.h"

using simgpu::Captured;
using simgpu::Clock;
using simgpu::current_device;
using simgpu::goes_wrong;
using simgpu::setting;

struct ncclComm {
  std::string id, config;  // the same on all ranks; as JSON
  int rank, size, device;
  int made_on = current_device();
  size_t suspendable = 0, persistent = 0;
  bool suspended = false;
  long suspensions = 0;
  std::atomic<bool> aborted{false}, gone{false};
  std::atomic<int> captured{0};  // collectives in graphs that exist
  int registered = 0;            // memory that was registered with it
  int priority = 0;              // of the stream of its last collective
  long collectives = 0, splits = 0;
  std::map<int, long> sent, received;
  Clock::time_point busy_until{};
};

namespace {

std::mutex mutex_;
std::set<ncclComm*> alive;
std::atomic<long> created{0}, destroyed{0}, suspends{0}, resumes{0}, misused{0}, killed{0}, simulated{0};

// --------------------------------------------------------------------------------- files through which ranks meet

std::string path_of(const std::string& name) {
  const char* value = getenv("SIMGPU_DIR");
  std::string folder = value ? value : "/dev/shm/simgpu";
  mkdir(folder.c_str(), 0777);
  return folder + "/" + name;
}

void put(const std::string& name, const void* from, size_t bytes) {
  std::string path = path_of(name), unfinished = path + ".tmp";
  FILE* file = fopen(unfinished.c_str(), "wb");
  if (!file || fwrite(from, 1, bytes, file) != bytes) perror("simgpu: a file to meet through");
  if (file) fclose(file);
  rename(unfinished.c_str(), path.c_str());
}

// Waits for another rank's file, for SIMGPU_TIMEOUT unless said else. False: it did not come.
bool get(const std::string& name, std::vector<char>& into, const ncclComm* comm = nullptr, double seconds = 0) {
  std::string path = path_of(name);
  if (seconds <= 0) seconds = setting("SIMGPU_TIMEOUT", 60);
  auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (int tries = 0;; ++tries) {
    if (FILE* file = fopen(path.c_str(), "rb")) {
      fseek(file, 0, SEEK_END);
      into.resize(ftell(file));
      rewind(file);
      bool whole = fread(into.data(), 1, into.size(), file) == into.size();
      fclose(file);
      return whole;
    }
    if (comm && comm->aborted) return false;
    if (Clock::now() > deadline) {
      fprintf(stderr, "simgpu: pid %d waited in vain for %s\n", getpid(), name.c_str());
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(tries < 200 ? 20 : 500));
  }
}

void drop(const std::string& name) { unlink(path_of(name).c_str()); }

// Waits until all ranks of a communicator have come to one point.
bool meet(const ncclComm& comm, const std::string& point, double seconds = 0) {
  std::vector<char> nothing;
  put(comm.id + "." + point + "." + std::to_string(comm.rank), "", 0);
  for (int rank = 0; rank < comm.size; ++rank)
    if (!get(comm.id + "." + point + "." + std::to_string(rank), nothing, nullptr, seconds)) return false;
  return true;
}

// ----------------------------------------------------------------------------------------------------- arithmetic

struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  BFloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = word >> 16;
  }
  operator float() const {
    uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};

size_t size_of(ncclDataType_t type) {
  switch (type) {
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

std::map<int, double> premultiplied;  // reductions that were made by ncclRedOpCreatePreMulSum

template <class T>
void reduce_as(void* into, const std::vector<const char*>& parts, size_t count, int op) {
  T* result = static_cast<T*>(into);
  for (size_t i = 0; i < count; ++i) {
    T value = reinterpret_cast<const T*>(parts[0])[i];
    for (size_t part = 1; part < parts.size(); ++part) {
      T other = reinterpret_cast<const T*>(parts[part])[i];
      value = op == ncclProd  ? T(value * other)
              : op == ncclMax ? std::max(value, other)
              : op == ncclMin ? std::min(value, other)
                              : T(value + other);
    }
    if (op == ncclAvg) value = T(value / static_cast<T>(static_cast<float>(parts.size())));
    if (premultiplied.count(op)) value = T(value * premultiplied[op]);
    result[i] = value;
  }
}

ncclResult_t reduce(void* into, const std::vector<const char*>& parts, size_t count, ncclDataType_t type, int op) {
  switch (type) {
    case ncclInt8: reduce_as<int8_t>(into, parts, count, op); break;
    case ncclUint8: reduce_as<uint8_t>(into, parts, count, op); break;
    case ncclInt32: reduce_as<int32_t>(into, parts, count, op); break;
    case ncclUint32: reduce_as<uint32_t>(into, parts, count, op); break;
    case ncclInt64: reduce_as<int64_t>(into, parts, count, op); break;
    case ncclUint64: reduce_as<uint64_t>(into, parts, count, op); break;
    case ncclFloat32: reduce_as<float>(into, parts, count, op); break;
    case ncclFloat64: reduce_as<double>(into, parts, count, op); break;
    case ncclBfloat16: reduce_as<BFloat16>(into, parts, count, op); break;
    default: return ncclInvalidArgument;
  }
  return ncclSuccess;
}

// --------------------------------------------------------------------------------------------- calls on a stream

// What a rank has to say in a collective, and what it does once it has heard the others.
struct Call {
  std::function<void()> say;
  std::function<ncclResult_t()> hear;
};
thread_local int group_depth = 0;
thread_local std::vector<std::function<Call()>> grouped;  // what is launched at the end of the group
std::atomic<int> in_flight[simgpu::kMaxDevices];             // collectives that wait for other ranks, by device

ncclResult_t make(const std::vector<Call>& calls) {
  auto& waiting = in_flight[current_device()];
  ++waiting;
  for (auto& call : calls) call.say();
  ncclResult_t result = ncclSuccess;
  for (auto& call : calls) {
    ncclResult_t own = call.hear();
    if (own != ncclSuccess) result = own;
  }
  --waiting;
  return result;
}

bool usable(const ncclComm* comm) {
  if (comm && !comm->gone && !comm->aborted && !comm->suspended) return true;
  ++misused;
  fprintf(stderr, "simgpu: a communicator was used that is %s\n", comm && comm->suspended ? "suspended" : "gone");
  return false;
}

// Makes a call now, at the end of the group that is open, or at every launch of the graph that is being captured.
ncclResult_t on_stream(ncclComm* comm, cudaStream_t stream, const char* kind, std::function<Call()> prepare) {
  if (!usable(comm)) return ncclInvalidUsage;
  if (goes_wrong(kind)) return ncclSystemError;
  simgpu::use(comm->device);
  simgpu::use(current_device());
  comm->priority = simgpu::priority_of(stream);
  if (Captured* captured = simgpu::capture_of(stream)) {
    ++comm->captured;
    captured->calls.push_back([=] {
      if (usable(comm)) make({prepare()});
    });
    captured->when_gone.push_back([=] { --comm->captured; });
    return ncclSuccess;
  }
  auto launch = [=] {
    comm->busy_until = simgpu::work_on(stream);
    return prepare();
  };
  if (!group_depth) return make({launch()});
  grouped.push_back(launch);
  return ncclSuccess;
}

using Parts = std::vector<std::vector<char>>;

// Every rank contributes bytes, and then sees what everyone contributed.
ncclResult_t collective(ncclComm* comm, cudaStream_t stream, const void* from, size_t bytes,
                        std::function<ncclResult_t(Parts&)> finish) {
  return on_stream(comm, stream, "collective", [=] {
    long number = comm->collectives++;
    auto name = [=](long which, int rank) {
      return comm->id + "." + std::to_string(which) + "." + std::to_string(rank);
    };
    Call call;
    call.say = [=] { put(name(number, comm->rank), from, bytes); };
    call.hear = [=] {
      Parts parts(comm->size);
      for (int rank = 0; rank < comm->size; ++rank)
        if (!get(name(number, rank), parts[rank], comm)) return ncclSystemError;
      if (number) drop(name(number - 1, comm->rank));  // all have read it: they have come to this one
      return finish(parts);
    };
    return call;
  });
}

std::vector<const char*> pointers(const Parts& parts, size_t offset = 0) {
  std::vector<const char*> result;
  for (auto& part : parts) result.push_back(part.data() + offset);
  return result;
}

std::string message_name(const ncclComm* comm, int from, int to, long number) {
  return comm->id + ".p" + std::to_string(from) + "-" + std::to_string(to) + "." + std::to_string(number);
}

// ------------------------------------------------------------------------------------------------------- lifetime

std::string json_of(const ncclConfig_t* config) {
  if (!config) return "null";
  std::ostringstream out;
  auto text = [](const char* value) { return value ? "\"" + std::string(value) + "\"" : std::string("null"); };
  auto number = [](int value) { return value == NCCL_CONFIG_UNDEF_INT ? "null" : std::to_string(value); };
  out << "{\"blocking\": " << number(config->blocking) << ", \"cga_cluster_size\": " << number(config->cgaClusterSize)
      << ", \"min_ctas\": " << number(config->minCTAs) << ", \"max_ctas\": " << number(config->maxCTAs)
      << ", \"split_share\": " << number(config->splitShare) << ", \"net_name\": " << text(config->netName) << "}";
  return out.str();
}

// With SIMGPU_INIT_WAITS, waits until no collective is in flight on a device: to make a communicator, NCCL allocates and
// copies, and the device may do that only once its kernels are done.
bool device_is_done(int device) {
  auto deadline = Clock::now() + std::chrono::seconds(setting("SIMGPU_TIMEOUT", 60));
  while (setting("SIMGPU_INIT_WAITS", 0) && in_flight[device] > 0) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Gives a communicator its memory, and counts it. Deletes it if there is no memory.
ncclResult_t bring_up(ncclComm* comm, const ncclConfig_t* config, const char* how, ncclComm_t* out) {
  simgpu::use(current_device());
  comm->device = current_device();
  comm->config = json_of(config);
  comm->persistent = static_cast<size_t>(setting("SIMGPU_COMM_PERSIST_MB", 64)) << 20;
  if (comm->size > 1) comm->suspendable = static_cast<size_t>(setting("SIMGPU_COMM_DYN_MB", 256)) << 20;
  static thread_local std::minstd_rand random(std::random_device{}());
  long jitter = setting("SIMGPU_INIT_JITTER_MS", 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(setting("SIMGPU_INIT_MS", 0) + (jitter ? random() % jitter : 0)));
  if (!device_is_done(comm->device)) {
    delete comm;
    return ncclSystemError;
  }
  if (!simgpu::take(comm->device, comm->suspendable + comm->persistent)) {
    delete comm;
    return ncclUnhandledCudaError;
  }
  simgpu::log(how, comm->id, comm->rank, comm->size, comm->device);
  ++created;
  std::lock_guard<std::mutex> guard(mutex_);
  alive.insert(*out = comm);
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t* out, int size, const char* id, int rank, const ncclConfig_t* config) {
  simgpu::use(current_device());
  if (goes_wrong("init")) return ncclSystemError;
  auto* comm = new ncclComm;
  comm->id = id;
  comm->rank = rank;
  comm->size = size;
  if (meet(*comm, "init")) return bring_up(comm, config, "init", out);
  delete comm;
  return ncclSystemError;
}

// Takes a communicator down. The object stays, so that whoever uses it later is found out.
ncclResult_t take_down(ncclComm* comm, const char* how) {
  if (!comm || comm->gone) {
    ++misused;
    return ncclInvalidArgument;
  }
  // NCCL makes the communicator's device current, and then again the one that was.
  simgpu::use(comm->device);
  simgpu::use(current_device());
  if (goes_wrong(how)) return ncclSystemError;
  // NCCL waits, without end, until no CUDA graph has captured any of its collectives.
  auto deadline = Clock::now() + std::chrono::seconds(setting("SIMGPU_TIMEOUT", 60));
  while (comm->captured > 0 && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (comm->captured > 0) return ncclSystemError;
  if (setting("SIMGPU_DESTROY_MEETS", 0) && !meet(*comm, "bye", setting("SIMGPU_DESTROY_TIMEOUT", 20))) {
    fprintf(stderr, "simgpu: %s of %s hung\n", how, comm->id.c_str());
    _exit(66);
  }
  simgpu::give_back(comm->device, (comm->suspended ? 0 : comm->suspendable) + comm->persistent);
  comm->gone = true;
  ++destroyed;
  simgpu::log(how, comm->id, comm->rank, comm->size, comm->device);
  std::lock_guard<std::mutex> guard(mutex_);
  alive.erase(comm);
  return ncclSuccess;
}

bool can_suspend() { return setting("SIMGPU_NCCL_VERSION", 23007) >= 22907; }

// Memory may be registered with a suspended communicator: NCCL only writes it down.
bool there(const ncclComm* comm) {
  if (comm && !comm->gone) return true;
  ++misused;
  return false;
}

ncclResult_t register_with(ncclComm* comm, void** handle) {
  if (!there(comm) || comm->aborted) return ncclInvalidUsage;
  ++comm->registered;
  *handle = comm;
  return ncclSuccess;
}

ncclResult_t deregister_from(ncclComm* comm) {
  if (!there(comm)) return ncclInvalidUsage;
  --comm->registered;
  return ncclSuccess;
}

}  // namespace

extern "C" {

// ---------------------------------------------------------------------------------------- for tests, through ctypes

long simgpu_created_comms() { return created; }
long simgpu_destroyed_comms() { return destroyed; }
long simgpu_simulated() { return simulated; }
long simgpu_suspends() { return suspends; }
long simgpu_resumes() { return resumes; }
// Calls on communicators that are gone or suspended.
long simgpu_misused() { return misused; }
// Collectives that were not done when their communicator was aborted.
long simgpu_killed() { return killed; }
long simgpu_live_comms() {
  std::lock_guard<std::mutex> guard(mutex_);
  return alive.size();
}
size_t simgpu_comm_bytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  size_t bytes = 0;
  for (auto* comm : alive) bytes += (comm->suspended ? 0 : comm->suspendable) + comm->persistent;
  return bytes;
}
// The communicators that are alive, as JSON.
const char* simgpu_communicators() {
  static thread_local std::string result;
  std::ostringstream out;
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto* comm : alive) {
    out << (out.tellp() > 0 ? ", " : "") << "{\"id\": \"" << comm->id << "\", \"rank\": " << comm->rank
        << ", \"size\": " << comm->size << ", \"device\": " << comm->device << ", \"made_on\": " << comm->made_on
        << ", \"priority\": " << comm->priority << ", \"registered\": " << comm->registered
        << ", \"collectives\": " << comm->collectives << ", \"config\": " << comm->config << "}";
  }
  result = "[" + out.str() + "]";
  return result.c_str();
}

// ---------------------------------------------------------------------------------------------------- communicators

ncclResult_t ncclGetVersion(int* version) {
  *version = setting("SIMGPU_NCCL_VERSION", 23007);
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "c%08x%08x", random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return init(comm, size, id.internal, rank, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return init(comm, size, id.internal, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int size, int rank, int, ncclUniqueId* id,
                                      ncclConfig_t* config) {
  return init(comm, size, id->internal, rank, config);
}
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
  if (!usable(parent)) return ncclInvalidUsage;
  if (goes_wrong("split")) return ncclSystemError;
  int mine[2] = {color, key};
  std::string base = parent->id + ".s" + std::to_string(parent->splits++);
  put(base + "." + std::to_string(parent->rank), mine, sizeof mine);
  std::vector<std::pair<int, int>> members;  // key, rank in the parent
  for (int rank = 0; rank < parent->size; ++rank) {
    std::vector<char> bytes;
    if (!get(base + "." + std::to_string(rank), bytes, parent)) return ncclSystemError;
    const int* theirs = reinterpret_cast<const int*>(bytes.data());
    if (theirs[0] == color) members.push_back({theirs[1], rank});
  }
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  auto* comm = new ncclComm;
  comm->id = base + "x" + std::to_string(color);
  comm->size = members.size();
  for (size_t rank = 0; rank < members.size(); ++rank)
    if (members[rank].second == parent->rank) comm->rank = rank;
  return bring_up(comm, config, "split", out);
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (!usable(comm)) return ncclInvalidUsage;
  if (goes_wrong("finalize")) return ncclSystemError;
  std::this_thread::sleep_until(comm->busy_until);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return take_down(comm, "destroy"); }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm && Clock::now() < comm->busy_until) ++killed;
  ncclResult_t result = take_down(comm, "abort");
  if (comm) comm->aborted = true;
  return result;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclUnhandledCudaError ? "unhandled cuda error" : result ? "simgpu nccl error" : "no error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 7)
// As NCCL's own, both are a rendezvous of the communicator's ranks; a rank that fails does so before it.
ncclResult_t ncclCommSuspend(ncclComm_t comm, int) {
  if (!usable(comm) || !can_suspend()) return ncclInvalidUsage;
  if (goes_wrong("suspend")) return ncclSystemError;
  if (!meet(*comm, "suspend" + std::to_string(comm->suspensions))) return ncclSystemError;
  comm->suspended = true;
  ++suspends;
  simgpu::give_back(comm->device, comm->suspendable);
  simgpu::log("suspend", comm->id, comm->rank, comm->size, comm->device);
  return ncclSuccess;
}
ncclResult_t ncclCommResume(ncclComm_t comm) {
  if (!comm->suspended) return ncclInvalidUsage;
  if (goes_wrong("resume")) return ncclSystemError;
  if (!simgpu::take(comm->device, comm->suspendable)) return ncclUnhandledCudaError;
  comm->suspended = false;
  if (!meet(*comm, "resume" + std::to_string(comm->suspensions++))) return ncclSystemError;
  ++resumes;
  simgpu::log("resume", comm->id, comm->rank, comm->size, comm->device);
  return ncclSuccess;
}
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t which, uint64_t* value) {
  if (!can_suspend()) return ncclInvalidUsage;
  *value = which == ncclStatGpuMemSuspend     ? comm->suspendable
           : which == ncclStatGpuMemSuspended ? comm->suspended
           : which == ncclStatGpuMemPersist   ? comm->persistent
                                              : comm->suspendable + comm->persistent;
  return ncclSuccess;
}
#endif

// ----------------------------------------------------------------------------------------------------------- memory

ncclResult_t ncclMemAlloc(void** at, size_t bytes) {
  return cudaMalloc(at, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* at) {
  cudaFree(at);
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void*, size_t, void** handle) {
  return register_with(comm, handle);
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) { return deregister_from(comm); }
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void*, size_t, ncclWindow_t* window, int) {
  return register_with(comm, reinterpret_cast<void**>(window));
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t) { return deregister_from(comm); }

// ------------------------------------------------------------------------------------------------------ collectives

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) return ncclInvalidUsage;
  if (--group_depth) return ncclSuccess;
  std::vector<Call> calls;
  for (auto& launch : grouped) calls.push_back(launch());
  grouped.clear();
  return make(calls);
}
// Nothing of the group is launched.
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) {
  if (group_depth == 0) return ncclInvalidUsage;
  ++simulated;
  if (--group_depth == 0) grouped.clear();
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, stream, from, count * size_of(type),
                    [=](Parts& parts) { return reduce(to, pointers(parts), count, type, op); });
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return collective(comm, stream, from, count * size_of(type), [=](Parts& parts) {
    return comm->rank == root ? reduce(to, pointers(parts), count, type, op) : ncclSuccess;
  });
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return collective(comm, stream, from, bytes * comm->size, [=](Parts& parts) {
    return reduce(to, pointers(parts, bytes * comm->rank), count, type, op);
  });
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = comm->rank == root ? count * size_of(type) : 0;
  return collective(comm, stream, from, bytes, [=](Parts& parts) {
    memcpy(to, parts[root].data(), parts[root].size());
    return ncclSuccess;
  });
}
ncclResult_t ncclBcast(void* at, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(at, at, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return collective(comm, stream, from, bytes, [=](Parts& parts) {
    for (int rank = 0; rank < comm->size; ++rank) memcpy(static_cast<char*>(to) + rank * bytes, parts[rank].data(), bytes);
    return ncclSuccess;
  });
}
ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return collective(comm, stream, from, bytes, [=](Parts& parts) {
    for (int rank = 0; rank < comm->size && comm->rank == root; ++rank)
      memcpy(static_cast<char*>(to) + rank * bytes, parts[rank].data(), bytes);
    return ncclSuccess;
  });
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  size_t bytes = count * size_of(type);
  return collective(comm, stream, from, bytes * comm->size, [=](Parts& parts) {
    for (int rank = 0; rank < comm->size; ++rank)
      memcpy(static_cast<char*>(to) + rank * bytes, parts[rank].data() + comm->rank * bytes, bytes);
    return ncclSuccess;
  });
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return on_stream(comm, stream, "send", [=] {
    std::string name = message_name(comm, comm->rank, peer, comm->sent[peer]++);
    return Call{[=] { put(name, from, count * size_of(type)); }, [] { return ncclSuccess; }};
  });
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return on_stream(comm, stream, "recv", [=] {
    std::string name = message_name(comm, peer, comm->rank, comm->received[peer]++);
    return Call{[] {}, [=] {
                  std::vector<char> bytes;
                  if (!get(name, bytes, comm)) return ncclSystemError;
                  memcpy(to, bytes.data(), std::min(bytes.size(), count * size_of(type)));
                  drop(name);
                  return ncclSuccess;
                }};
  });
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t,
                                      ncclComm_t) {
  double factor = type == ncclFloat64    ? *static_cast<double*>(scalar)
                  : type == ncclFloat32  ? *static_cast<float*>(scalar)
                  : type == ncclBfloat16 ? static_cast<float>(*static_cast<BFloat16*>(scalar))
                                         : 0;
  if (factor == 0) return ncclInvalidArgument;
  static int next = ncclNumOps;
  premultiplied[next] = factor;
  *op = static_cast<ncclRedOp_t>(next++);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t) {
  premultiplied.erase(op);
  return ncclSuccess;
}

// --------------------------------------------------------- what torch links, and nothing under test calls: refused
ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclInvalidUsage; }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) { return ncclInvalidUsage; }
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
ncclResult_t ncclCommGrow(ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId*) { return ncclInvalidUsage; }
#endif

}  // extern "C"
