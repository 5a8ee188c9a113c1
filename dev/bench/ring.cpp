// Cost of dividing attention among ranks: one rank with all threads compared to ranks with one thread each, on the same cores.
//
//   ./ring [threads]
//
// Ranks are threads. `rate` is the time of the single rank divided by the time of the ranks together: 1 if copies, messages and waiting ranks cost
// nothing. A time is the best of several rounds; every round times all lines of a table in turn, so other work on the machine slows
// them down equally.
#include "../../llmc/parallel/ring.h"

#include "bench.h"

using X = float;

struct Model {
    size_t H, KV, D;
    size_t row() const { return (H + 2 * KV) * D; }
    AttentionShape shape(size_t T) const { return {T, H, KV, D, 0.125f}; }
};

// A rank's share of a layer.
struct Share {
    size_t T;
    ContextPtr context;
    CpuF32 dev;
    std::vector<X> qkv, dout, out, dqkv, values;
    std::vector<float> out32, lse, dq32, dk32, dv32, delta, scratch, floats;

    Share(const Model &m, size_t T, int threads, RingBufferSizes buffers)
        : T(T),
          context(make_context()),
          dev{threads, context.get()},
          qkv(noise<X>(T * m.row(), 1)),
          dout(noise<X>(T * m.H * m.D, 2)),
          out(T * m.H * m.D),
          dqkv(qkv.size()),
          values(buffers.values),
          out32(out.size()),
          lse(m.H * T),
          dq32(out.size()),
          dk32(T * m.KV * m.D),
          dv32(dk32.size()),
          delta(lse.size()),
          scratch(attention_scratch(dev, m.shape(T))),
          floats(buffers.floats) {}
};

// Attention of one layer over the ranks of a ring.
class RingBench {
  public:
    RingBench(const Model &model, const std::vector<size_t> &documents, size_t ranks, int threads, SpMode mode)
        : model_(model), mode_(mode) {
        Row row{};
        row.doc_offsets = {0};
        for (size_t length : documents) {
            lo_.insert(lo_.end(), length, int32_t(row.T));
            row.doc_offsets.push_back(row.T += length);
        }
        const LayerKind kinds[] = {{0, 1}};
        const AttentionCost cost{model.H, model.KV, model.D, sizeof(X), 5e10, 5e9};  // the values of ranks_of() for CPUs
        split_ = mode == SpMode::ulysses ? split_sequence(Layout::contiguous, row, ranks, kinds, cost)
                                         : choose_split(row, ranks, kinds, cost);
        const auto buffers = ring_attention_buffers(mode, ranks, head_stride, model.shape(split_.local_T()), true);
        for (size_t r = 0; r < ranks; r++) shares_.emplace_back(model, split_.local_T(), threads, buffers);
    }

    void forward() {
        forward_bytes_ = each_rank([](RingAttention &ring, Share &s, const AttentionInputs<X> &in, RingBuffers<X> buffers) {
            ring_attention_forward(s.dev, ring, s.out.data(), s.out32.data(), s.lse.data(), in, buffers);
        });
    }
    void backward() {
        backward_bytes_ = each_rank([](RingAttention &ring, Share &s, const AttentionInputs<X> &in, RingBuffers<X> buffers) {
            ring_attention_backward(s.dev, ring, s.dqkv.data(), {s.dq32.data(), s.dk32.data(), s.dv32.data()}, s.delta.data(),
                                    s.scratch.data(), in, s.out.data(), s.dout.data(), s.lse.data(), buffers);
        });
    }
    size_t sent_bytes() const { return forward_bytes_ + backward_bytes_; }  // by all ranks together
    const SequenceSplit &split() const { return split_; }

  private:
    static constexpr size_t head_stride = 1;

    template <class F> size_t each_rank(F pass) {  // returns the bytes sent
        std::vector<Payload> payloads(shares_.size());
        run_threads(int(shares_.size()), {}, [&](Comm &comm) {
            Share &s = shares_[size_t(comm.rank)];
            const auto [H, KV, D] = model_;
            const auto head = [&](size_t h) { return Heads<const X>{s.qkv.data() + h * D, model_.row()}; };
            const AttentionInputs<X> in{head(0), head(H), head(H + KV), lo_.data(), {}, model_.shape(s.T)};
            RingAttention ring{comm, mode_, head_stride, split_, split_.travel[0], {}, payloads[size_t(comm.rank)]};
            pass(ring, s, in, {s.values.data(), s.floats.data()});
            return 0;
        });
        size_t sent = 0;
        for (const Payload &p : payloads) sent += p.kv + p.dkv;
        return sent;
    }

    Model model_;
    SpMode mode_;
    std::vector<int32_t> lo_;
    SequenceSplit split_;
    std::vector<Share> shares_;
    size_t forward_bytes_ = 0, backward_bytes_ = 0;
};

static void table(const Model &model, const std::vector<size_t> &documents, int ranks, int rounds) {
    printf("\n%zu query and %zu KV heads of %zu, f32, %zu document%s of %zu tokens\n", model.H, model.KV, model.D,
           documents.size(), documents.size() > 1 ? "s" : "", documents[0]);
    printf("                  layout          forward s   rate  backward s   rate  both: rate    MB sent\n");
    std::vector<std::pair<const char *, std::unique_ptr<RingBench>>> lines;
    const auto add = [&](const char *name, int ranks, int threads, SpMode mode) {
        lines.emplace_back(name, std::make_unique<RingBench>(model, documents, ranks, threads, mode));
    };
    add("one rank", 1, ranks, SpMode::ring);
    add("ring", ranks, 1, SpMode::ring);
    add("gather", ranks, 1, SpMode::gather);
    if (model.H % size_t(ranks) == 0) add("ulysses", ranks, 1, SpMode::ulysses);

    std::vector<Job> works;
    for (const auto &line : lines) {
        works.push_back([bench = line.second.get()] { bench->forward(); });
        works.push_back([bench = line.second.get()] { bench->backward(); });
    }
    const auto t = fastest(rounds, works);
    for (size_t i = 0; i < lines.size(); i++) {
        const double forward = t[2 * i], backward = t[2 * i + 1];
        const RingBench &bench = *lines[i].second;
        printf("%-16s  %-14s %10.3f %6.2f  %10.3f %6.2f %11.2f %10.1f\n", lines[i].first, name_of(bench.split().layout), forward,
               t[0] / forward, backward, t[1] / backward, (t[0] + t[1]) / (forward + backward),
               double(bench.sent_bytes()) * 1e-6);
    }
    if (model.H % size_t(ranks)) printf("%-16s  %zu query heads cannot be dealt to %d ranks\n", "ulysses", model.H, ranks);
}

int main(int argc, char **argv) {
    const int ranks = threads_argument(argc, argv);
    heading("attention over ranks", ranks);
    for (const auto &[model, tokens] : {std::pair{Model{9, 3, 64}, 16384}, {Model{8, 4, 64}, 8192}}) {
        const size_t T = round_up(size_t(tokens), pieces_per_rank * size_t(ranks));
        std::vector<size_t> short_ones(T / 100, 100);
        if (T % 100) short_ones.push_back(T % 100);
        table(model, {T}, ranks, 3);
        table(model, short_ones, ranks, 20);
    }
}
