// Implements the emulator's streams, events and copies (streams.h).
#include "simt.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace CUDA_BACKEND {
namespace simt {

// Work returns true when it is done. Otherwise it waits for other streams: it blocks its stream and is called again later.
struct Queue {
    std::thread::id owner = std::this_thread::get_id();
    bool random;
    std::deque<std::function<bool()>> work = {};
};

namespace {

struct Scheduler {
    std::mutex lock;  // guards all members; held while work runs
    std::condition_variable changed;
    std::vector<Queue *> queues;  // queues at the front run first
    bool random = false;          // for streams created from now on
    std::minstd_rand chance;
    std::string failure;  // message of the first work that threw

    // The order of streams changes once in eight pieces of work, so one stream runs ahead of the others for a while.
    bool step() {
        if (chance() % 8 == 0) std::shuffle(queues.begin(), queues.end(), chance);
        for (Queue *queue : queues) {
            if (queue->work.empty()) continue;
            bool done = true;
            try {
                done = queue->work.front()();
            } catch (const std::exception &error) {
                if (failure.empty()) failure = error.what();
            }
            if (!done) continue;
            queue->work.pop_front();
            changed.notify_all();
            return true;
        }
        return false;
    }

    template <class Done> void run_until(Done done) {
        std::unique_lock guard(lock);
        while (failure.empty() && !done())
            if (!step()) changed.wait_for(guard, std::chrono::milliseconds(100));
        if (!failure.empty()) die("%s", failure.c_str());
    }

    bool own_done() const {
        const auto own = std::this_thread::get_id();
        return std::all_of(queues.begin(), queues.end(), [&](const Queue *q) { return q->owner != own || q->work.empty(); });
    }

    // Runs this thread's streams to their end, and all others as far as possible, because ranks may share a device.
    void run_all() {
        run_until([&] { return own_done(); });
        const std::lock_guard guard(lock);
        while (step()) {}
        if (!failure.empty()) die("%s", failure.c_str());
    }
};

Scheduler &scheduler() {  // never destroyed: streams of static objects use it until the program ends
    static Scheduler *const s = new Scheduler;
    return *s;
}

bool runs_later(cudaStream_t stream) { return stream && stream->queue && stream->queue->random; }

}  // namespace

void enqueue_until(cudaStream_t stream, std::function<bool()> work) {
    if (stream && stream->recording) die("a wait for another stream cannot be recorded");
    Queue *const queue = stream ? stream->queue : nullptr;
    Scheduler &s = scheduler();
    if (!queue) return s.run_until(work);
    {
        const std::lock_guard guard(s.lock);
        queue->work.push_back(std::move(work));
        s.changed.notify_all();
    }
    if (!queue->random) s.run_until([&] { return queue->work.empty(); });
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
    if (stream && stream->recording) return stream->recording->push_back(std::move(work));
    if (!runs_later(stream)) return work();
    enqueue_until(stream, [work = std::move(work)] { return work(), true; });
}

}  // namespace simt

using namespace simt;

RandomStreams::RandomStreams(unsigned seed) {
    Scheduler &s = scheduler();
    const std::lock_guard guard(s.lock);
    if (s.random) die("two RandomStreams at a time");
    s.random = true, s.chance.seed(seed + 1), s.failure.clear();
}
RandomStreams::~RandomStreams() {
    const std::lock_guard guard(scheduler().lock);
    scheduler().random = false, scheduler().failure.clear();
}

// ---- streams and events -------------------------------------------------------------------------------------------------------------

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = stream->priority, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    Scheduler &s = scheduler();
    const std::lock_guard guard(s.lock);
    *stream = new CUstream_st{.queue = new Queue{.random = s.random}, .priority = priority};
    s.queues.push_back((*stream)->queue);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (stream && stream->recording) die("nothing can wait for a stream that is recorded");
    if (runs_later(stream)) scheduler().run_until([&] { return stream->queue->work.empty(); });
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return scheduler().run_all(), cudaSuccess; }

// Called by destructors. On a failing rank other ranks would otherwise wait forever for its work.
static void finish() {
    Scheduler &s = scheduler();
    if (std::uncaught_exceptions()) {
        const std::lock_guard guard(s.lock);
        if (!s.own_done() && s.failure.empty()) s.failure = "another rank has failed";
    }
    try {
        s.run_all();
    } catch (const Error &) {  // thrown again when a host thread waits
        const std::lock_guard guard(s.lock);
        for (Queue *queue : s.queues)
            if (queue->owner == std::this_thread::get_id()) queue->work.clear();
    }
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    finish();
    {
        const std::lock_guard guard(scheduler().lock);
        std::erase(scheduler().queues, stream->queue);
        if (scheduler().queues.empty()) scheduler().failure.clear();
    }
    delete stream->queue;
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return *event = new CUevent_st, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->last = std::make_shared<Event>();
    enqueue(stream, [last = event->last] { last->done = true, last->at = std::chrono::steady_clock::now(); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event) {
    if (event->last) enqueue_until(stream, [last = event->last] { return last->done; });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->last) scheduler().run_until([last = event->last] { return last->done; });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const std::lock_guard guard(scheduler().lock);
    return !event->last || event->last->done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->last->at - begin->last->at).count();
    return cudaSuccess;
}

// ---- graphs -------------------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    return stream->recording = new Recording, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    return *graph = std::exchange(stream->recording, nullptr), cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    return *executable = new Recording(*graph), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    for (const auto &work : *graph) enqueue(stream, work);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }

// ---- copies -------------------------------------------------------------------------------------------------------------------------

namespace {

// Memory that needs no staging in copies: device memory or pinned memory.
struct Known {
    std::mutex lock;
    std::map<uintptr_t, size_t> bytes;
} known;

bool is_known(const void *p) {
    const std::lock_guard guard(known.lock);
    const auto after = known.bytes.upper_bound(uintptr_t(p));
    if (after == known.bytes.begin()) return false;
    const auto &[begin, bytes] = *std::prev(after);
    return uintptr_t(p) < begin + bytes;
}

}  // namespace

void simt::add_known(uintptr_t p, size_t bytes) {
    const std::lock_guard guard(known.lock);
    known.bytes[p] = bytes;
}
void simt::remove_known(uintptr_t p) {
    finish();
    const std::lock_guard guard(known.lock);
    known.bytes.erase(p);
}

cudaError_t cudaMallocHost(std::byte **p, size_t bytes) {
    *p = static_cast<std::byte *>(malloc(bytes));
    if (!*p) return cudaErrorMemoryAllocation;
    return add_known(uintptr_t(*p), bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void *p) { return remove_known(uintptr_t(p)), free(p), cudaSuccess; }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    if (!runs_later(stream) || is_known(from)) {
        enqueue(stream, [=] { memcpy(to, from, bytes); });
    } else {
        const auto *const first = static_cast<const std::byte *>(from);
        enqueue(stream, [=, staged = std::vector<std::byte>(first, first + bytes)] { memcpy(to, staged.data(), bytes); });
    }
    return is_known(to) ? cudaSuccess : cudaStreamSynchronize(stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind);
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t stream) {
    if (bytes) enqueue(stream, [=] { memset(to, byte, bytes); });
    return cudaSuccess;
}
}  // namespace CUDA_BACKEND
