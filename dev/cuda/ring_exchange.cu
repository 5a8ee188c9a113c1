// out of one layer's attention over a row split over P ranks, forward                         Contract: llmc/parallel/ring.h, mode ring
//
// What overlaps with what, when K and V go around a ring. The ranks are virtual: they share one device, on which each has arrays of its
// own, and a hop is a copy from a rank's array to its neighbour's. All compute on one stream, with the shipped kernels. So the
// schedules are real, but a copy takes from the same memory that the kernels use: between devices there is more to gain.
//
// Timed with 16384 tokens in 8 documents of growing lengths, 4 ranks, 32 query heads, 8 key heads, D 128. FLOP are counted as for
// attention_forward: the least bytes of any version. T tokens, b bytes of an element; R row-hops (KeyTravel in llmc/parallel/split.h).
//
//   version                                   bytes copied            with one link a rank it would take
//   1 compute, then exchange                  2*KV*D*b * T*(P-1)      computing + copying
//   2 the next block on a second stream       2*KV*D*b * T*(P-1)      the longer one of each hop
//   3 only what a rank ahead needs            2*KV*D*b * R            the same of fewer bytes; and no kernels that see nothing
//   4 shipped: the calls of a communicator    2*KV*D*b * R            the same, where the communicator works by events (NCCL)
#include "../../llmc/ops/layout.cuh"
#include "../../llmc/parallel/ring.h"
#include "../../llmc/parallel/slices.cuh"
#include "attention_common.h"

namespace CUDA_BACKEND::workshop {

class Event {
  public:
    Event() { cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "no event"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;

    void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "an event"); }  // all that is in it by now
    void hold_up(cudaStream_t stream) { cuda_check(cudaStreamWaitEvent(stream, event_), "waiting for an event"); }

  private:
    cudaEvent_t event_ = nullptr;
};

// A packed row dealt to ranks, zigzag; arrays hold the ranks' parts, one after the other.
struct RingRow {
    AttentionCase problem;
    size_t ranks, T, H, KV, D, row, width;  // T of a rank; row of qkv, width of a row of [k | v]
    SequenceSplit split;
    KeyTravel everything;            // as if every query saw every key
    AttentionValues<bf16> in;        // by global position
    DeviceArray<bf16> qkv, blocks;   // (ranks, T, row), (ranks, 2, T, width)
    DeviceArray<bf16> out;           // (ranks, T, H, D)
    DeviceArray<float> out32, lse;   // (ranks, T, H, D), (ranks, H, T)
    DeviceArray<int32_t> first_key;  // of the whole row
    CudaStream copies;
    Event computed, arrived;

    explicit RingRow(const Sizes &sizes)
        : problem(attention_case(sizes)),
          ranks(sizes[2]),
          T(checked_part(problem.T(), ranks)),
          H(problem.H),
          KV(problem.KV),
          D(problem.D),
          row((H + 2 * KV) * D),
          width(2 * KV * D),
          split(deal_row(problem, ranks)),
          everything(whole_blocks(split)),
          in(problem),
          qkv(to_ranks(in.qkv)),
          blocks(ranks * 2 * T * width),
          out(ranks * T * H * D),
          out32(ranks * T * H * D),
          lse(ranks * H * T),
          first_key(problem.first_key()) {}

    size_t behind(size_t rank, size_t hops) const { return (rank + ranks - hops) % ranks; }
    bf16 *block(size_t rank, size_t hop) { return blocks.data() + (2 * rank + hop % 2) * T * width; }
    Heads<const bf16> view(size_t rank, size_t head) { return {qkv.data() + rank * T * row + head * D, row}; }

    // Block 0 of each rank: its rows of [k | v]; rows that travel farthest come first.
    void pack(CudaBf16 dev, const KeyTravel &travel) {
        for (size_t r = 0; r < ranks; r++)
            for (const KeyTravel::Stop &stop : travel.block(r)) {
                if (stop.hops == 0) break;
                const bf16 *from = view(r, H).data + stop.piece.offset * row;  // v lies right behind k
                copy_rows(dev, block(r, 0) + stop.packed * width, width, from, row, stop.piece.end - stop.piece.begin, width);
            }
    }
    // Every rank's queries against the block that has made `hop` hops to it; hop 0 is its own.
    void attend(CudaBf16 dev, const KeyTravel &travel, size_t hop) {
        for (size_t r = 0; r < ranks; r++) {
            if (!travel.sees(r, behind(r, hop))) continue;
            const Heads<const bf16> k = hop ? Heads<const bf16>{block(r, hop), width} : view(r, H);
            const AttentionInputs<bf16> in{view(r, 0), k, {k.data + KV * D, k.stride}, first_key.data(), {}, problem.shape(T)};
            attention_forward_part(dev, out.data() + r * T * H * D, out32.data() + r * T * H * D, lse.data() + r * H * T, in,
                                   split.pieces[r], hop ? travel.keys(behind(r, hop), hop) : split.pieces[r],
                                   {hop == 0, hop == travel.last_hop(r)});
        }
    }
    // Every block makes hop number `hop`, from 1.
    void exchange(cudaStream_t stream, const KeyTravel &travel, size_t hop) {
        for (size_t r = 0; r < ranks; r++) {
            const size_t bytes = travel.rows(behind(r, hop), hop) * width * sizeof(bf16);
            cuda_check(cudaMemcpyAsync(block(r, hop), block(behind(r, 1), hop - 1), bytes, cudaMemcpyDeviceToDevice, stream),
                       "a hop");
        }
    }

  private:
    static size_t checked_part(size_t T, size_t ranks) {
        if (T % (pieces_per_rank * ranks))
            die("%zu tokens cannot be dealt to %zu ranks\n  fix: a multiple of %zu", T, ranks, pieces_per_rank * ranks);
        return T / ranks;
    }
    static SequenceSplit deal_row(const AttentionCase &problem, size_t ranks) {
        const LayerKind kinds[] = {{problem.window, 1}};
        return split_sequence(Layout::zigzag, problem.offsets(), problem.T(), ranks, kinds,
                              {problem.H, problem.KV, problem.D, 2, 1e12, 1e10});
    }
    static KeyTravel whole_blocks(const SequenceSplit &split) {
        const size_t pieces = pieces_per_rank * split.ranks, size = split.T / pieces;
        std::vector<size_t> owner(pieces);
        for (size_t r = 0; r < split.ranks; r++)
            for (size_t position : split.positions(r)) owner[position / size] = r;
        return KeyTravel(std::vector<uint64_t>(pieces * pieces, 1), owner, split.ranks, size);
    }
    std::vector<bf16> to_ranks(const std::vector<bf16> &rows) const {
        std::vector<bf16> out;
        for (size_t r = 0; r < ranks; r++)
            for (size_t p : split.positions(r)) out.insert(out.end(), &rows[p * row], &rows[p * row] + row);
        return out;
    }
};

// ---- version 1: compute, then exchange -----------------------------------------------------------------------------------------
//
// One stream does one after the other. A rank still needs two blocks, as it receives one while it sends another.

void ring_exchange1(CudaBf16 dev, RingRow &x) {
    x.pack(dev, x.everything);
    for (size_t hop = 0; hop < x.ranks; hop++) {
        if (hop) x.exchange(dev.stream, x.everything, hop);
        x.attend(dev, x.everything, hop);
    }
}

// ---- version 2: the next block on a second stream --------------------------------------------------------------------------------
//
// A block is only read, by the kernels and by the hop that takes it on: both can go on at once. What may not: a hop overwrites the
// block before last, so it waits until the kernels are done with that; and the kernels wait until their block is there. Two events
// say so, and the host never waits.

void overlapped(CudaBf16 dev, RingRow &x, const KeyTravel &travel) {
    x.pack(dev, travel);
    for (size_t hop = 0; hop <= travel.max_hops(); hop++) {
        if (hop < travel.max_hops()) {
            x.computed.record(dev.stream);
            x.computed.hold_up(x.copies);
            x.exchange(x.copies, travel, hop + 1);
            x.arrived.record(x.copies);
        }
        x.attend(dev, travel, hop);
        if (hop < travel.max_hops()) x.arrived.hold_up(dev.stream);
    }
}

void ring_exchange2(CudaBf16 dev, RingRow &x) { overlapped(dev, x, x.everything); }

// ---- version 3: only what a rank ahead needs -------------------------------------------------------------------------------------
//
// Causality and borders of documents make most blocks useless to most ranks. A piece of a block stops at the last rank that sees a
// key of it; pieces are packed by falling number of hops, so what goes on is the front of the block, in one copy.

void ring_exchange3(CudaBf16 dev, RingRow &x) { overlapped(dev, x, x.split.travel[0]); }

// ---- version 4: shipped ----------------------------------------------------------------------------------------------------------
//
// llmc/parallel/ring.h: the same schedule, but each rank is a program of its own, and exchange() and wait() of a communicator stand
// for copies and events. It runs on anything that has them. Over NCCL they are events on streams again; here, where ranks are threads
// that share the device, each exchange makes the host wait for the stream, and version 3 shows what that costs.

void ring_exchange4(CudaBf16 dev, RingRow &x) {
    run_threads(int(x.ranks), {}, [&](Comm &comm) {
        const size_t r = size_t(comm.rank);
        comm.memory = device_slices(dev.stream);
        Payload payload;
        RingAttention ring{comm, SpMode::ring, 0, x.split, x.split.travel[0], payload};
        const AttentionInputs<bf16> in{x.view(r, 0), x.view(r, x.H),      x.view(r, x.H + x.KV), x.first_key.data(),
                                       {},           x.problem.shape(x.T)};
        ring_attention_forward(dev, ring, x.out.data() + r * x.T * x.H * x.D, x.out32.data() + r * x.T * x.H * x.D,
                               x.lse.data() + r * x.H * x.T, in, {x.block(r, 0), nullptr});
        return 0;
    });
}

template <class X> struct RingExchange : RingRow {
    explicit RingExchange(const Sizes &sizes) : RingRow(sizes) {}

    static constexpr void (*versions[])(CudaBf16, RingRow &) = {ring_exchange1, ring_exchange2, ring_exchange3, ring_exchange4};
    void run(CudaBf16 dev, size_t version) { versions[version - 1](dev, *this); }

    void check(Check &check) const {
        const size_t all_T = problem.T(), C = H * D;
        const auto got_out = out.values();
        const auto got_lse = lse.values();
        std::vector<bf16> out_rows(all_T * C);
        std::vector<float> lse_rows(H * all_T);
        for (size_t r = 0; r < ranks; r++) {
            const auto positions = split.positions(r);
            for (size_t t = 0; t < T; t++) {
                std::copy_n(&got_out[(r * T + t) * C], C, &out_rows[positions[t] * C]);
                for (size_t h = 0; h < H; h++) lse_rows[h * all_T + positions[t]] = got_lse[(r * H + h) * T + t];
            }
        }
        const AttentionReference ref = attention_reference(problem, widen(in.qkv));
        check("lse", lse_rows, ref.lse, lse_error<bf16>(problem, ref));
        check(
            "out", relative(widen(out_rows), ref.out_size), relative(ref.out, ref.out_size),
            2 * lse_error<bf16>(problem, ref) + sum_error_of<bf16>(all_T) + 2 * unit_roundoff<bf16>);  // of P, and of the result
    }
    Work work() const {
        double pairs = 0;
        const auto first = problem.first_key();
        for (size_t p = 0; p < problem.T(); p++) pairs += double(p + 1 - size_t(first[p]));
        return {.flops = 4 * pairs * double(H * D)};
    }
};

static const Ladder<RingExchange, bf16> ladder(
    {.name = "ring_exchange",
     .sizes = {{"T", "tokens of the packed row, a multiple of 8 for each rank", 16384, 512},
               {"documents", "in it, as for attention_forward", 8, 8},
               {"ranks", "that hold the row", 4, 4},
               {"window", "keys that a query sees at most", 16384, 512},
               {"H", "query heads", 32, 8},
               {"KV", "key and value heads", 8, 2},
               {"D", "head size", 128, 128}},
     .checked = {{8, 1, 1, 8, 1, 1, 8},      // a rank alone
                 {64, 1, 4, 64, 2, 1, 8},    // every block is needed somewhere
                 {96, 3, 3, 96, 4, 2, 16},   // documents
                 {128, 6, 4, 24, 3, 1, 64},  // and a window: some are not
                 {160, 2, 2, 160, 2, 2, 24}},
     .ideas = {"compute, then exchange", "the next block on a second stream", "only what a rank ahead needs",
               "shipped: the calls of a communicator"}});
}  // namespace CUDA_BACKEND::workshop
