// Streams, events and NCCL for the emulator (simt.h). A call that puts work into a stream is done when it returns, as if the GPU were never
// behind the host; while a RandomStreams lives, a stream that is created runs as a GPU's does: later, beside other streams.
//
// Its work then waits until a host thread has to wait for some of it: cudaStreamSynchronize, cudaEventSynchronize, a copy to the host. That thread
// runs streams, its own and other ranks', one piece of work after the other. Which stream goes on is random, by the seed, and it
// often goes on for long, so that one stream is far ahead of another one. Only the order of each stream and events hold it up. So what an event is
// missing for goes wrong: an array is overwritten too early, or read before it is written. In all orders a correct program gives the same.
//
// Copies from memory that is not pinned take the bytes at the call, and copies to it wait, as CUDA's do. NCCL joins ranks that are threads. A
// collective begins when all ranks' streams have come to it, and sums in the order of ranks.
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
struct Queue;  // the work of a stream that has not been done
using Recording = std::vector<std::function<void()>>;

struct Event {
    bool done = false;
    std::chrono::steady_clock::time_point at;
};

// Puts work into the stream. Null is the stream of a host that waits for everything.
void enqueue(cudaStream_t stream, std::function<void()> work);

void add_known(uintptr_t p, size_t bytes);  // memory of the device, or pinned
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
    unsigned order = 0;                              // of the threads of its kernels: simt.h
    emulated::simt::Queue *queue = nullptr;          // null: work is done when it is put in
    emulated::simt::Recording *recording = nullptr;  // takes the work instead
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

cudaError_t cudaMalloc(void **p, size_t bytes);  // of the exact size, filled with NaN
cudaError_t cudaFree(void *p);                   // waits as cudaDeviceSynchronize does
cudaError_t cudaMallocHost(std::byte **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);  // the machine's
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t = nullptr);
template <class T> cudaError_t cudaMalloc(T **p, size_t bytes) { return cudaMalloc(reinterpret_cast<void **>(p), bytes); }

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
// The priority takes no effect: streams run in any order.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority);
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();  // waits for the streams of this thread, and for others if they do not wait for it

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

// A graph runs its work in the order in which it was recorded, and what waits for another stream cannot be recorded.
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
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *state) { return *state = ncclSuccess; }
inline const char *ncclGetLastError(ncclComm_t) { return ""; }
inline const char *ncclGetErrorString(ncclResult_t) { return "no error"; }
ncclResult_t ncclGroupStart();  // of ncclSend and ncclRecv, which are only allowed in groups
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
std::unique_ptr<Comm> join_processes(Comm &host);  // in place of NCCL: emulated_processes.h; null if the ranks are threads
}  // namespace CUDA_BACKEND
