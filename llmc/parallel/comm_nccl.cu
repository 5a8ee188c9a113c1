#include "comm_nccl.h"

#include <unistd.h>

#include "../core/gpu.h"
#include "../core/memory.cuh"
#include "mesh.h"

#ifdef LLMC_EMULATE
#define LLMC_NCCL  // the emulator's
void select_gpu(Comm &) {}
#else
void select_gpu(Comm &host) {
    int count = 0, device = 0;
    std::string gpus;  // their bus ids
    agree(host, [&] {
        cuda_check(cudaGetDeviceCount(&count), "no GPU");
        for (int i = 0; i < count; i++) {
            char place[32];
            cuda_check(cudaDeviceGetPCIBusId(place, sizeof(place), i), "a GPU does not tell its place");
            gpus += format("%s ", place);
        }
    });
    const auto all_hosts = host.gather(host_name()), all_gpus = host.gather(gpus);
    agree(host, [&] {
        device = pick_gpu(all_hosts, all_gpus, size_t(host.rank), count);
        need_kernels(query_gpus(), size_t(device));
        cuda_check(cudaSetDevice(device), "the GPU cannot be used");
    });
}
#endif

#ifndef LLMC_NCCL
std::unique_ptr<Comm> make_gpu_comm(Comm &host, cudaStream_t, double) {
    agree(host, [&] {
        die("%d ranks with a GPU each, but this program was built without NCCL\n  fix: .venv/bin/pip install nvidia-nccl-cu13 (or NVIDIA's packages "
            "libnccl2 libnccl-dev), then make probe && make; or --device cpu",
            host.size);
    });
    return nullptr;
}
#else
#ifndef LLMC_EMULATE
#include <nccl.h>
#endif

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "watched_calls.h"

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
static constexpr Seconds watch_period(0.1);
static constexpr unsigned abort_seconds = 10;  // the time that aborting may take

static void nccl_check(const char *call, ncclResult_t result, ncclComm_t comm) {
    if (result == ncclSuccess) return;
    const char *more = ncclGetLastError(comm);
    die("%s: %s%s%s\n  fix: NCCL_DEBUG=INFO in the environment says more", call, ncclGetErrorString(result),
        more && *more ? ": " : "", more ? more : "");
}

namespace {

// The stream of a rank's communicators, the calls in flight on it, and the thread that watches them.
class NcclQueue {
  public:
    NcclQueue(cudaStream_t compute, double timeout) : compute_(compute), timeout_(timeout), ready_(make_event()) {
        cuda_check(cudaGetDevice(&device_), "no current GPU");
        watchdog_ = std::thread([this] { watch(); });
    }
    ~NcclQueue() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_one();
        watchdog_.join();
        for (const Call &call : under_way_.calls) release(call);
        for (cudaEvent_t event : idle_) cudaEventDestroy(event);
        cudaEventDestroy(ready_);
    }

    void join(ncclComm_t comm) {
        std::lock_guard lock(mutex_);
        comms_.push_back(comm);
    }
    void leave(ncclComm_t comm) {
        std::lock_guard lock(mutex_);
        std::erase(comms_, comm);
    }

    // Calls f(stream), which queues work, as one call. The id is never 0.
    uint64_t add(const std::string &what, const std::function<void(cudaStream_t)> &f) {
        cuda_check(cudaEventRecord(ready_, compute_), "marking the compute stream");
        cuda_check(cudaStreamWaitEvent(stream_, ready_), "waiting for the compute stream");
        Call &call = begin(what);
        f(stream_);
        std::lock_guard lock(mutex_);
        cuda_check(cudaEventRecord(call.done, stream_), "marking the communication stream");
        call.queued = true;
        return call.id;
    }

    // Makes the compute stream wait for a call. A call that is no longer in flight is done.
    void wait(uint64_t id) {
        std::lock_guard lock(mutex_);
        for (const Call &call : under_way_.calls)
            if (call.id == id) cuda_check(cudaStreamWaitEvent(compute_, call.done), "waiting for the communication stream");
    }

  private:
    using Call = WatchedCalls<cudaEvent_t>::Call;

    static cudaEvent_t make_event() {
        cudaEvent_t event = nullptr;
        cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "no event");
        return event;
    }

    Call &begin(const std::string &what) {
        std::lock_guard lock(mutex_);
        while (idle_.size() < 2) idle_.push_back(make_event());
        const cudaEvent_t begins = idle_.back(), done = idle_.end()[-2];
        cuda_check(cudaEventRecord(begins, stream_), "marking the communication stream");
        idle_.resize(idle_.size() - 2);
        return under_way_.calls.emplace_back(Call{++last_id_, what, begins, done, false, {}});
    }
    void release(const Call &call) { idle_.insert(idle_.end(), {call.begins, call.done}); }

    // True if the device has reached the event. Errors of earlier kernels also appear here; all later calls would wait forever.
    static bool reached(cudaEvent_t event) {
        const cudaError_t state = cudaEventQuery(event);
        if (state != cudaErrorNotReady) cuda_check_kernels(state);
        return state == cudaSuccess;
    }

    void watch() {
        cudaSetDevice(device_);
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, watch_period, [&] { return stop_; })) {
            try {
                check_calls();
            } catch (const Error &error) {
                end_process(error.what());
            }
        }
    }

    void check_calls() {
        const Call *late = under_way_.late(Clock::now(), Seconds(timeout_), reached, [&](const Call &call) { release(call); });
        for (ncclComm_t comm : comms_) {
            ncclResult_t state = ncclSuccess;
            nccl_check("ncclCommGetAsyncError", ncclCommGetAsyncError(comm, &state), comm);
            nccl_check(under_way_.calls.empty() ? "NCCL" : under_way_.calls.front().what.c_str(), state, comm);
        }
        if (late)
            die("%s is not done after --comm_timeout %g seconds: another rank has not come so far\n  fix: raise --comm_timeout "
                "if a rank is only slow; --debug compares the ranks' calls",
                late->what.c_str(), timeout_);
    }

    // An abort can hang as well; then the alarm ends the process.
    [[noreturn]] void end_process(const std::string &message) {
        fflush(stdout);
        fprintf(stderr, "%s\n", message.c_str());
        fflush(stderr);
        alarm(abort_seconds);
        for (ncclComm_t comm : comms_) ncclCommAbort(comm);
        std::_Exit(1);
    }

    const cudaStream_t compute_;
    const double timeout_;
    CudaStream stream_{StreamPriority::urgent};
    cudaEvent_t ready_;
    int device_ = 0;
    std::mutex mutex_;  // guards all members below
    WatchedCalls<cudaEvent_t> under_way_;
    std::vector<cudaEvent_t> idle_;
    std::vector<ncclComm_t> comms_;
    uint64_t last_id_ = 0;
    bool stop_ = false;
    std::condition_variable wake_;
    std::thread watchdog_;
};

ncclDataType_t nccl_type(SliceType type) {
    switch (type) {
        case SliceType::f32: return ncclFloat32;
        case SliceType::f64: return ncclFloat64;
        case SliceType::bf16: return ncclBfloat16;
        case SliceType::i32: return ncclInt32;
        case SliceType::i64: return ncclInt64;
        case SliceType::u8: return ncclUint8;
    }
    die("no such type of slice: %d", int(type));
}

}  // namespace

class NcclComm final : public Comm {
  public:
    // own_host owns `host` if that was made for this communicator.
    NcclComm(Comm &host, cudaStream_t compute, std::shared_ptr<NcclQueue> queue, std::unique_ptr<Comm> own_host = nullptr)
        : Comm(host.rank, host.size), own_host_(std::move(own_host)), host_(host), compute_(compute), queue_(std::move(queue)) {
        memory = {[] {},
                  [=](void *to, const void *from, size_t bytes) {
                      cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, compute), "a copy");
                  }};
        ncclUniqueId id = {};
        agree(host, [&] {
            if (rank == 0) nccl_check("ncclGetUniqueId", ncclGetUniqueId(&id), nullptr);
        });
        // As text, because nvcc 13.0 does not compile a vector of this unnamed struct.
        const auto ids = host.gather(std::string(reinterpret_cast<const char *>(&id), sizeof(id)));
        memcpy(&id, ids[0].data(), sizeof(id));
        queue_->add(format("rank %d: ncclCommInitRank", rank),
                    [&](cudaStream_t) { call("ncclCommInitRank", ncclCommInitRank(&comm_, size, id, rank)); });
        queue_->join(comm_);
    }

    // Destruction is a collective call, unless an exception causes it.
    ~NcclComm() override {
        queue_->leave(comm_);
        bool done = false;
        if (!std::uncaught_exceptions()) try {
                queue_->add(format("rank %d: ncclCommFinalize", rank),
                            [&](cudaStream_t) { call("ncclCommFinalize", ncclCommFinalize(comm_)); });
                done = ncclCommDestroy(comm_) == ncclSuccess;
            } catch (const Error &error) {
                fprintf(stderr, "%s\n", error.what());
            }
        if (!done) ncclCommAbort(comm_);
    }

    Request start(const std::function<void()> &f) override {
        const DoNotWait guard(do_not_wait_);
        last_ = 0;
        f();
        return last_ ? Request(this, last_) : Request();
    }

  protected:
    void do_all_reduce_sum(Slice data) override {
        collective([&](cudaStream_t stream) {
            call("ncclAllReduce", ncclAllReduce(data.data, data.data, data.count, nccl_type(data.type), ncclSum, comm_, stream));
        });
    }
    void do_reduce_scatter_sum(Slice send, Slice recv) override {
        collective([&](cudaStream_t stream) {
            call("ncclReduceScatter",
                 ncclReduceScatter(send.data, recv.data, recv.count, nccl_type(recv.type), ncclSum, comm_, stream));
        });
    }
    void do_all_gather(Slice send, Slice recv) override {
        collective([&](cudaStream_t stream) {
            call("ncclAllGather", ncclAllGather(send.data, recv.data, send.count, nccl_type(send.type), comm_, stream));
        });
    }
    void do_all_to_all(Slice send, Slice recv) override {
        const size_t n = send.count / size_t(size);
        collective([&](cudaStream_t stream) {
            group([&] {
                for (size_t r = 0; r < size_t(size); r++) {
                    send_to(int(r), send.part(r * n, n), stream);
                    receive_from(int(r), recv.part(r * n, n), stream);
                }
            });
        });
    }
    void do_broadcast(Slice data, int root) override {
        collective([&](cudaStream_t stream) {
            call("ncclBroadcast", ncclBroadcast(data.data, data.data, data.count, nccl_type(data.type), root, comm_, stream));
        });
    }
    Request do_exchange(Slice send, int to, Slice recv, int from) override {
        if (!send.count && !recv.count) return {};
        return {this, queue([&](cudaStream_t stream) {
                    group([&] {
                        if (send.count) send_to(to, send, stream);
                        if (recv.count) receive_from(from, recv, stream);
                    });
                })};
    }
    void do_exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv) override {
        const size_t n = send.size() / size_t(size);
        collective([&](cudaStream_t stream) {
            group([&] {
                for (size_t i = 0; i < send.size(); i++) {
                    if (send[i].count) send_to(int(i / n), send[i], stream);
                    if (recv[i].count) receive_from(int(i / n), recv[i], stream);
                }
            });
        });
    }
    void do_wait(uint64_t id) override { queue_->wait(id); }
    void withdraw(uint64_t) noexcept override {}  // no call can be cancelled; cudaFree waits until the memory is unused
    std::unique_ptr<Comm> do_split(int color, int key) override {
        auto part = host_.split(color, key);
        Comm &host = *part;
        return std::make_unique<NcclComm>(host, compute_, queue_, std::move(part));
    }
    void gather_host(const void *own, size_t bytes, void *all) override { host_.gather_host(own, bytes, all); }
    void enter(const Stamp &stamp) override {
        now_ = stamp;
        host_.enter(stamp);
    }

  private:
    struct DoNotWait {
        bool &flag;
        explicit DoNotWait(bool &flag) : flag(flag) { flag = true; }
        ~DoNotWait() { flag = false; }
    };

    void call(const char *name, ncclResult_t result) { nccl_check(name, result, comm_); }
    uint64_t queue(const std::function<void(cudaStream_t)> &f) {
        return queue_->add(format("rank %d: %s", rank, now_.text().c_str()), f);
    }
    void collective(const std::function<void(cudaStream_t)> &f) {
        last_ = queue(f);
        if (!do_not_wait_) queue_->wait(last_);
    }

    void group(const std::function<void()> &f) {
        call("ncclGroupStart", ncclGroupStart());
        try {
            f();
        } catch (...) {
            ncclGroupEnd();
            throw;
        }
        call("ncclGroupEnd", ncclGroupEnd());
    }
    void send_to(int to, Slice s, cudaStream_t stream) {
        call("ncclSend", ncclSend(s.data, s.count, nccl_type(s.type), to, comm_, stream));
    }
    void receive_from(int from, Slice s, cudaStream_t stream) {
        call("ncclRecv", ncclRecv(s.data, s.count, nccl_type(s.type), from, comm_, stream));
    }

    const std::unique_ptr<Comm> own_host_;
    Comm &host_;
    const cudaStream_t compute_;
    const std::shared_ptr<NcclQueue> queue_;
    ncclComm_t comm_ = nullptr;
    Stamp now_;
    bool do_not_wait_ = false;  // true within start()
    uint64_t last_ = 0;         // the id of the last collective
};

std::unique_ptr<Comm> make_gpu_comm(Comm &host, cudaStream_t compute, double timeout) {
#ifdef LLMC_EMULATE  // its NCCL joins threads
    if (auto processes = join_processes(host)) return processes;
#endif
    auto comm = std::make_unique<NcclComm>(host, compute, std::make_shared<NcclQueue>(compute, timeout));
    comm->check = host.check;
    return comm;
}
#endif
