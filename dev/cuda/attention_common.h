// Shared by the ladders of attention: a packed row of ragged documents, dealt to ranks, and its accessors for the simple versions.
#pragma once
#include <utility>

#include "../../llmc/ops/attention.cuh"
#include "../../test/reference_attention.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {
using namespace attention;

// ---- kernels -----------------------------------------------------------------------------------------------------------------

// The arguments of attention_forward_part (llmc/ops/attention.h): some of the queries and some of the keys.
struct Part : AttentionInputs<bf16> {
    Pieces q_pieces, k_pieces;

    // Return rows of D values; h is the number of a query head.
    __device__ const bf16 *query(size_t row, size_t h) const { return q.data + row * q.stride + h * shape.D; }
    __device__ const bf16 *key(size_t row, size_t h) const { return k.data + row * k.stride + h / shape.group() * shape.D; }
    __device__ const bf16 *value(size_t row, size_t h) const { return v.data + row * v.stride + h / shape.group() * shape.D; }
};

// Calls f(local row) for the positions [begin, end) in the pieces, in order.
template <class F> __device__ void for_each_row(const Pieces &pieces, int begin, int end, F f) {
    Tiles tiles{pieces, begin, end, 1 << 20};
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile))
        for (int i = 0; i < tile.size(); i++) f(size_t(tile.row + i));
}

__device__ inline float dot(const bf16 *a, const bf16 *b, size_t D) {
    float sum = 0;
    for (size_t d = 0; d < D; d++) sum += float(a[d]) * float(b[d]);
    return sum;
}

// A row of D values spread over a warp: its lane l holds columns l, l + 32, ... and zeros beyond D.
struct WarpRow {
    static constexpr int columns = int(max_D) / 32;
    float x[columns];

    __device__ static WarpRow load(const bf16 *row, size_t D) {
        WarpRow out;
        for (int c = 0; c < columns; c++) {
            const size_t d = threadIdx.x % 32 + c * 32;
            out.x[c] = d < D ? float(row[d]) : 0.0f;
        }
        return out;
    }
    __device__ float dot(const WarpRow &other) const {  // the result is in all lanes
        float sum = 0;
        for (int c = 0; c < columns; c++) sum += x[c] * other.x[c];
        return warp_sum(sum);
    }
    __device__ void add(float factor, const WarpRow &other, float keep = 1) {  // row = keep * row + factor * other
        for (int c = 0; c < columns; c++) x[c] = x[c] * keep + factor * other.x[c];
    }
    template <class F> __device__ void for_each(size_t D, F f) const {  // f(column, value)
        for (int c = 0; c < columns; c++)
            if (const size_t d = threadIdx.x % 32 + c * 32; d < D) f(d, x[c]);
    }
};

// ---- parts that are merged, in any order --------------------------------------------------------------------------------------

inline void begin_sums(CudaBf16 dev, float *out32, float *lse, const AttentionShape &shape) {
    const size_t rows = shape.H * shape.T;
    clear_floats(dev, out32, rows * shape.D);
    launch(dev, fill_kernel<float>, Grid{ceil_div(rows, flat_threads)}, flat_threads, 0, lse, -INFINITY, rows);
}
inline void add_part(CudaBf16 dev, float *out32, float *lse, const Part &part) {
    attention_forward_part<bf16>(dev, nullptr, out32, lse, part, part.q_pieces, part.k_pieces, {});
}

// While this object exists, the shipped version uses the kernels for every GPU, also on Hopper (llmc/ops/attention_hopper.h).
struct WithoutHopper {
    const HopperKernels *const unit = std::exchange(hopper_kernels, nullptr);
    ~WithoutHopper() { hopper_kernels = unit; }
};

// ---- inputs ------------------------------------------------------------------------------------------------------------------

inline const std::vector<Size> attention_sizes = {
    {"T", "tokens of the packed row", 4096, 512},
    {"documents", "in it, of growing lengths: the first of several is one token", 1, 1},
    {"ranks", "that hold the row, in turn there and back", 1, 1},
    {"window", "keys that a query sees at most", 4096, 512},
    {"H", "query heads", 32, 8},
    {"KV", "key and value heads", 8, 2},
    {"D", "head size", 128, 128}};
inline const std::vector<Sizes> attention_checked = {
    {1, 1, 1, 1, 1, 1, 8},       // one token
    {67, 1, 1, 67, 2, 2, 64},    // one document
    {150, 5, 1, 150, 7, 1, 64},  // GQA
    {40, 2, 1, 40, 2, 1, 192},   // wide heads
    {141, 4, 1, 24, 7, 1, 80},   // a window
    {270, 3, 2, 270, 2, 1, 24},  // two parts each, several blocks
    {101, 3, 3, 24, 2, 1, 128},  // three, with a window
    {70, 2, 1, 70, 1, 1, 256},   // the largest heads
};

inline AttentionCase attention_case(const Sizes &s) {
    const size_t T = s[0], documents = s[1], ranks = s[2], window = s[3], H = s[4], KV = s[5], D = s[6];
    if (T == 0 || documents == 0 || documents > T || ranks == 0 || (ranks > 1 && 2 * ranks > T))
        die("%zu tokens cannot be %zu documents on %zu ranks\n  fix: at least 1 of each, a token per document, 2 tokens per rank",
            T, documents, ranks);
    if (KV == 0 || H == 0 || H % KV) die("%zu query heads cannot share %zu key heads\n  fix: H a multiple of KV", H, KV);
    check_head_size(D);
    AttentionCase problem{{documents == 1 ? T : 1}, window, H, KV, D};
    for (size_t i = 1, begin = 1; i < documents; i++) {
        const size_t end = 1 + (T - 1) * i * i / ((documents - 1) * (documents - 1));
        problem.documents.push_back(end - begin);
        begin = end;
    }
    return problem;
}

// A packed row dealt to ranks. The arrays hold the parts of all ranks in order of rank.
struct AttentionRow {
    AttentionCase problem;
    size_t T, H, KV, D;
    AttentionShape shape;
    std::vector<Pieces> ranks;
    std::vector<size_t> first;       // the first row of each rank
    std::vector<size_t> global;      // the global position of each row
    AttentionValues<bf16> in;        // by global position
    DeviceArray<bf16> qkv;           // (T, (H+2*KV)*D)
    DeviceArray<int32_t> first_key;  // (T)
    DeviceArray<int32_t> cuts;

    explicit AttentionRow(const Sizes &sizes)
        : problem(attention_case(sizes)),
          T(problem.T()),
          H(problem.H),
          KV(problem.KV),
          D(problem.D),
          shape(problem.shape(T)),
          ranks(deal(T, sizes[2], sizes[2] == 1 ? 1 : 2 * sizes[2], true)),
          global(positions(ranks, first)),
          in(problem),
          qkv(to_ranks(in.qkv, (H + 2 * KV) * D)),
          first_key(problem.first_key()),
          cuts(problem.cuts()) {}

    Part part(size_t q_rank, size_t k_rank) {
        const auto heads = [&](size_t rank, size_t head) {
            const size_t stride = (H + 2 * KV) * D;
            return Heads<const bf16>{qkv.data() + first[rank] * stride + head * D, stride};
        };
        return {{heads(q_rank, 0), heads(k_rank, H), heads(k_rank, H + KV), first_key.data(), {cuts.data(), cuts.size()}, shape},
                ranks[q_rank],
                ranks[k_rank]};
    }
    // Calls f(part, first row of its queries, first row of its keys) for each pair of ranks.
    template <class F> void for_each_part(F f) {
        for (size_t q = 0; q < ranks.size(); q++)
            for (size_t k = 0; k < ranks.size(); k++) f(part(q, k), first[q], first[k]);
    }
    double pairs() const {  // number of pairs of a query and a visible key
        double sum = 0;
        const auto first_key = problem.first_key();
        for (size_t p = 0; p < T; p++) sum += double(p + 1 - size_t(first_key[p]));
        return sum;
    }

    // Convert rows of n values from the order of global positions to the order on the device, and back.
    template <class V> std::vector<V> to_ranks(const std::vector<V> &rows, size_t n) const {
        std::vector<V> out(rows.size());
        for (size_t t = 0; t < T; t++) std::copy_n(&rows[global[t] * n], n, &out[t * n]);
        return out;
    }
    template <class V> std::vector<V> from_ranks(const std::vector<V> &rows, size_t n) const {
        std::vector<V> out(rows.size());
        for (size_t t = 0; t < T; t++) std::copy_n(&rows[t * n], n, &out[global[t] * n]);
        return out;
    }

  private:
    static std::vector<size_t> positions(const std::vector<Pieces> &ranks, std::vector<size_t> &first) {
        std::vector<size_t> out;
        for (const Pieces &pieces : ranks) {
            first.push_back(out.size());
            for (size_t i = 0; i < pieces.count; i++)
                for (size_t p = pieces.piece[i].begin; p < pieces.piece[i].end; p++) out.push_back(p);
        }
        return out;
    }
};

}  // namespace CUDA_BACKEND::workshop
