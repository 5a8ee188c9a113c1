// Waiting time for weights at ZeRO stage 3, over a link that moves bytes while ranks compute: with a layer's gather started when the layer needs its
// weights, and started one layer earlier, as in the decoder.
//
//   ./gathers
//
// The two ranks are threads, and the link is simulated: the bytes arrive at once, but a gather stays in flight for the time that the received bytes
// would take at the link's rate, one gather after another. Sums of gradients take no time, but wait for all earlier gathers, as on NCCL's stream.
// (Threads have no such link: their cores make the copies, and cannot compute at the same time.)
#define LLMC_NO_MAIN
#include "../../train_llama.cu"

#include <thread>

#include "../../test/wrapped_comm.h"
#include "bench.h"

using Instant = std::chrono::steady_clock::time_point;
static Instant now() { return std::chrono::steady_clock::now(); }

class LinkComm final : public WrappedComm {
  public:
    // bytes_a_second: 0 means an infinitely fast link     ahead: a gather starts at its start(), not at its wait()
    LinkComm(Comm &comm, double bytes_a_second, bool ahead) : WrappedComm(comm), rate_(bytes_a_second), ahead_(ahead) {}

    Request start(const std::function<void()> &f) override {
        received_ = 0;
        f();
        gathers_.push_back({received_, {}});
        if (ahead_) send(gathers_.back());
        return Request(this, gathers_.size());
    }
    double waited() const { return waited_; }  // seconds

  protected:
    void do_all_gather(Slice send, Slice recv) override {
        WrappedComm::do_all_gather(send, recv);
        received_ += double(recv.bytes() - send.bytes());
    }
    void do_wait(uint64_t id) override {
        const Instant begin = now();
        Gather &gather = gathers_[id - 1];
        if (!ahead_) send(gather);
        std::this_thread::sleep_until(gather.arrives);
        waited_ += std::chrono::duration<double>(now() - begin).count();
    }

  private:
    struct Gather {
        double bytes;
        Instant arrives;
    };
    void send(Gather &gather) {
        const std::chrono::duration<double> takes(rate_ > 0 ? gather.bytes / rate_ : 0);
        free_ = gather.arrives = std::max(now(), free_) + std::chrono::duration_cast<Instant::duration>(takes);
    }

    const double rate_;
    const bool ahead_;
    double received_ = 0, waited_ = 0;
    Instant free_ = now();  // when the link becomes free
    std::vector<Gather> gathers_;
};

struct Timed {
    double seconds, waited;
};

// Returns the time of the fastest of several steps; each rank has one row.
static Timed step(const ModelConfig &config, const Row &row, double bytes_a_second, bool ahead) {
    Timed best{INFINITY, 0};
    run_threads(2, {}, [&](Comm &threads) {
        const ContextPtr context = make_context();
        LinkComm comm(threads, bytes_a_second, ahead);
        ModelLimits limits;
        limits.row_tokens = limits.positions = row.T;
        limits.ranks.world = 2, limits.ranks.rank = size_t(comm.rank), limits.ranks.zero_stage = 3;
        Mesh mesh(comm, 1);
        Llama<CpuBf16> model({1, context.get()}, config, limits);
        model.allocate(mesh, false, false);
        model.initialise(1);
        for (int round = 0; round < 4; round++) {
            const double before = comm.waited();
            threads.barrier();
            const double took = seconds([&] { model.zero_gradients(), model.accumulate(row, 1e-3f, true); });
            if (comm.rank == 0 && took < best.seconds) best = {took, comm.waited() - before};
        }
        return 0;
    });
    return best;
}

int main() {
    heading("weights that are gathered", 2);
    ModelConfig config = preset("smollm2-135m");
    config.L = 16, config.window.resize(config.L);
    config.V = 16384;                             // the ratio of embedding to layer is the same as in Llama 3.1 8B
    const std::vector<int32_t> document(512, 5);  // token 5, 512 times
    const Row row = make_row({document}, {std::vector<uint8_t>(document.size(), 1)});
    const Table table = llama_table(config);
    const auto parameters = [&](size_t unit) { return double(table.units[unit].end - table.units[unit].begin); };
    const double bytes = parameters(1) * sizeof(bf16) / 2;  // received by a rank for one layer
    const double alone = step(config, row, 0, true).seconds;
    // Seconds per layer in the forward pass. Unit 0 is the head.
    const double layer = alone / (3 * (double(config.L) + parameters(0) / parameters(1)));
    printf("%zu layers, 2 ranks, rows of %zu tokens, bf16; %.0f ms a step without a link\n\n", config.L, row.T, 1e3 * alone);
    printf("a layer's gather, of its    when needed          ahead\n");
    printf("forward pass, about         waits   ms a step    waits   ms a step\n");
    for (const double share : {0.25, 0.5, 1.0, 2.0}) {
        const double rate = bytes / (share * layer);
        const Timed needed = step(config, row, rate, false), ahead = step(config, row, rate, true);
        printf("%15.2f %15.1f %% %9.0f %9.1f %% %9.0f\n", share, 100 * needed.waited / needed.seconds, 1e3 * needed.seconds,
               100 * ahead.waited / ahead.seconds, 1e3 * ahead.seconds);
    }
}
