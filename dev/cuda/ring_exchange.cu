// out of one layer's attention over a row split over P ranks, forward                         Contract: llmc/parallel/ring.h, mode ring
//
// Schedules that overlap the kernels with the copies of K and V around a ring. The ranks are virtual: they share one device, where each
// rank has its own arrays, and a hop copies from a rank's array to its neighbour's. All ranks compute on one stream with the shipped
// kernels. The schedules are real, but copies and kernels share one memory; with several devices the overlap gains more.
//
// Timed with 16384 tokens in 8 documents of growing lengths, 4 ranks, 32 query heads, 8 key heads, D 128. FLOP are counted as for
// attention_forward. In the table T is the number of tokens, b the bytes of an element, R the row-hops (KeyTravel in llmc/parallel/split.h).
//
//   version                                   bytes copied            time with one link per rank
//   1 compute, then exchange                  2*KV*D*b * T*(P-1)      computing + copying
//   2 the next block on a second stream       2*KV*D*b * T*(P-1)      max(computing, copying) of each hop
//   3 only what later ranks need              2*KV*D*b * R            the same with fewer bytes, without fully masked kernels
//   4 shipped: the calls of a communicator    2*KV*D*b * R            as 3 if the communicator uses events (NCCL)
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

    void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "an event"); }  // after its work so far
    void hold_up(cudaStream_t stream) { cuda_check(cudaStreamWaitEvent(stream, event_), "waiting for an event"); }

  private:
    cudaEvent_t event_ = nullptr;
};

// A packed row dealt to ranks in the zigzag layout. The arrays hold the parts of all ranks in order of rank.
struct RingRow {
    AttentionCase problem;
    size_t ranks, T, H, KV, D, row, width;  // tokens per rank; elements of a row of qkv, and of [k | v]
    SequenceSplit split;
    KeyTravel everything;            // for queries that see all keys
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

    // Packs each rank's rows of [k | v] into its block 0, the rows with the most hops first.
    void pack(CudaBf16 dev, const KeyTravel &travel) {
        for (size_t r = 0; r < ranks; r++)
            for (const KeyTravel::Stop &stop : travel.block(r)) {
                if (stop.hops == 0) break;
                const bf16 *from = view(r, H).data + stop.piece.offset * row;  // v follows k in memory
                copy_rows(dev, block(r, 0) + stop.packed * width, width, from, row, stop.piece.end - stop.piece.begin, width);
            }
    }
    // Attends, on every rank, from its queries to the block that arrived after `hop` hops; hop 0 is the rank's own block.
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
    // Copies every block to the next rank, as hop number `hop` >= 1.
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
            die("%zu tokens cannot be dealt to %zu ranks\n  fix: use a multiple of %zu", T, ranks, pieces_per_rank * ranks);
        return T / ranks;
    }
    static SequenceSplit deal_row(const AttentionCase &problem, size_t ranks) {
        const LayerKind kinds[] = {{problem.window, 1}};
        return split_sequence(Layout::zigzag, problem.outline(), ranks, kinds, {problem.H, problem.KV, problem.D, 2, 1e12, 1e10});
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
// One stream runs kernels and copies in turn. A rank needs two blocks, because it receives one while it sends the other.

void ring_exchange1(CudaBf16 dev, RingRow &x) {
    x.pack(dev, x.everything);
    for (size_t hop = 0; hop < x.ranks; hop++) {
        if (hop) x.exchange(dev.stream, x.everything, hop);
        x.attend(dev, x.everything, hop);
    }
}

// ---- version 2: the next block on a second stream --------------------------------------------------------------------------------
//
// The kernels and the next hop only read a block, so both can run at the same time. But a hop overwrites the block of the previous
// kernels, so the copy waits until these kernels are done, and the next kernels wait until their block has arrived. Two events order
// the streams, and the host never waits.

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

// ---- version 3: only what later ranks need -------------------------------------------------------------------------------------
//
// With a causal mask and several documents most ranks see only a part of most blocks. A piece of a block stops at the last rank that
// sees one of its keys. Pieces are sorted by falling number of hops, so each hop is one copy of the front of the block.

void ring_exchange3(CudaBf16 dev, RingRow &x) { overlapped(dev, x, x.split.travel[0]); }

// ---- version 4: shipped ----------------------------------------------------------------------------------------------------------
//
// llmc/parallel/ring.h: the same schedule, but each rank is a separate program that calls exchange() and wait() of a communicator
// instead of copies and events, so it runs on any communicator. Over NCCL these calls use events on streams again. Here the ranks are
// threads that share the device, and each exchange makes the host wait for the stream; the difference to version 3 is the cost.

void ring_exchange4(CudaBf16 dev, RingRow &x) {
    run_threads(int(x.ranks), {}, [&](Comm &comm) {
        const size_t r = size_t(comm.rank);
        comm.memory = device_slices(dev.stream);
        Payload payload;
        RingAttention ring{comm, SpMode::ring, 0, x.split, x.split.travel[0], {}, payload};
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
     .checked = {{8, 1, 1, 8, 1, 1, 8},      // one rank
                 {64, 1, 4, 64, 2, 1, 8},    // every block makes all hops
                 {96, 3, 3, 96, 4, 2, 16},   // several documents
                 {128, 6, 4, 24, 3, 1, 64},  // with a window: some blocks are not needed
                 {160, 2, 2, 160, 2, 2, 24}},
     .ideas = {"compute, then exchange", "the next block on a second stream", "only what later ranks need",
               "shipped: the calls of a communicator"}});
}  // namespace CUDA_BACKEND::workshop
