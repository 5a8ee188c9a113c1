// Streams, events and NCCL for the emulator (simt.h). By default, work enqueued in a stream has run when the call returns. A stream that is created
// during the lifetime of a RandomStreams runs asynchronously, like a GPU's: later, and interleaved with other streams.
//
// Its work starts when a host thread must wait for some of it: cudaStreamSynchronize, cudaEventSynchronize, a copy to the host. That thread then
// runs streams, its own and other ranks', one piece of work after another. The seed selects a random stream, often for many pieces in a row, so one
// stream can run far ahead of another. Only events and the order within a stream constrain it. So a missing event shows: an array is
// overwritten too early, or read before it is written. A correct program gives the same results in all orders.
//
// As in CUDA, copies from pageable memory read the bytes at the call, and copies to it wait.
//
// NCCL (nccl.cpp) joins ranks that are threads. A collective begins when the streams of all ranks have reached it, and sums in the order of ranks. What
// NCCL would answer with a hang or wrong numbers is an error with the calls of both ranks: another order of calls, count, type or root, a call that a
// rank never makes, ranks that wait for each other, slices that overlap, a second stream.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../../llmc/core/device.h"

struct Comm;

inline namespace CUDA_BACKEND {
namespace simt {
struct Queue;  // the pending work of a stream
using Recording = std::vector<std::function<void()>>;

struct Event {
    bool done = false;
    std::chrono::steady_clock::time_point at;
};

// Enqueues work in the stream. The null stream runs it at once.
void enqueue(cudaStream_t stream, std::function<void()> work);
// Enqueues work that may have to wait for other streams: until it returns true, it blocks its stream and is called again. No two pieces of work run at
// the same time.
void enqueue_until(cudaStream_t stream, std::function<bool()> work);

void add_known(uintptr_t p, size_t bytes);  // device memory, or pinned memory
void remove_known(uintptr_t p);
}  // namespace simt

class RandomStreams {  // one at a time
  public:
    explicit RandomStreams(unsigned seed);
    ~RandomStreams();
    RandomStreams(const RandomStreams &) = delete;
    RandomStreams &operator=(const RandomStreams &) = delete;
};
}  // namespace CUDA_BACKEND

struct CUstream_st {
    unsigned order = 0;                              // the order in which threads of its kernels run, see simt.h
    emulated::simt::Queue *queue = nullptr;          // null: work runs when it is enqueued
    emulated::simt::Recording *recording = nullptr;  // if set, records the work instead
    int priority = 0;
};

inline namespace CUDA_BACKEND {
// ---- CUDA's names -----------------------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDefault = 0, cudaEventDisableTiming = 2;

cudaError_t cudaMalloc(void **p, size_t bytes);  // allocates the exact size, filled with NaN
cudaError_t cudaFree(void *p);                   // waits as cudaDeviceSynchronize does
cudaError_t cudaMallocHost(std::byte **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);  // of the machine
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t = nullptr);
template <class T> cudaError_t cudaMalloc(T **p, size_t bytes) { return cudaMalloc(reinterpret_cast<void **>(p), bytes); }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
// The priority has no effect: streams run in any order.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();  // waits for this thread's streams, and for other streams unless they wait for this thread

struct CUevent_st {
    std::shared_ptr<simt::Event> last = {};  // the last recording; null: never recorded
};
using cudaEvent_t = CUevent_st *;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end);

// A graph runs its work in the order of recording. Waits for other streams cannot be recorded.
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
using cudaGraph_t = simt::Recording *;
using cudaGraphExec_t = simt::Recording *;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }

// ---- NCCL's -----------------------------------------------------------------------------------------------------------------------

enum ncclResult_t { ncclSuccess };
enum ncclDataType_t { ncclFloat32, ncclFloat64, ncclBfloat16, ncclInt32, ncclInt64, ncclUint8 };
enum ncclRedOp_t { ncclSum };
struct ncclUniqueId {
    uint64_t number;
};
struct NcclRank;
using ncclComm_t = NcclRank *;

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
inline ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclCommFinalize(ncclComm_t comm);
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) { return *state = ncclSuccess; }
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
inline const char *ncclGetErrorString(ncclResult_t) { return "no error"; }
ncclResult_t ncclGroupStart();  // ncclSend and ncclRecv are only allowed in groups
ncclResult_t ncclGroupEnd();
ncclResult_t ncclSend(const void *data, size_t n, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclRecv(void *data, size_t n, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *send, void *recv, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream);
ncclResult_t ncclAllGather(const void *send, void *recv, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream);
std::unique_ptr<Comm> join_processes(Comm &host);  // replaces NCCL: emulated_processes.h; null if the ranks are threads
}  // namespace CUDA_BACKEND
