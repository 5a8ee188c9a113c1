// grouped_matmul_forward: rows of group e times the matrix of group e,  out[r,o] = sum_i x[r,i] w[e,o,i]
// Contract: llmc/ops/grouped_matmul.h
//
// A layer of experts: each token's row is there once for each expert that the router chose, sorted by expert. Timed with 16384
// rows, 64 experts, IC 2048 and OC 768 in bf16, which is a layer of Qwen3-30B-A3B with half its experts: 2 R IC OC = 52 GFLOP,
// whatever the sizes of the groups. A product alone is matmul.cu's lesson; this ladder's is that there are many, of unequal
// sizes, and that only the GPU knows them.
#include "../../llmc/ops/grouped_matmul.cuh"
#include "../../test/reference_matmul.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

struct Groups {
    std::vector<int32_t> starts;  // of the groups, and R
    const int32_t *d_starts;      // the same on the GPU
    size_t R, IC, OC;

    size_t count() const { return starts.size() - 1; }
};

// ---- version 1: a launch for each group ----------------------------------------------------------------------------------------
//
// A thread computes an output, 16 x 16 of them a block. The host must know the sizes, so it waits for the router, and then the
// GPU waits for the host. Launches run one after the other, and a group of a few rows is a few blocks: most of the GPU is idle.

template <class X> __device__ void outputs_of_block(X *out, const X *x, const X *w, size_t t0, size_t n, size_t IC, size_t OC) {
    const size_t t = t0 + threadIdx.x / 16, o = blockIdx.y * size_t(16) + threadIdx.x % 16;
    if (t >= n || o >= OC) return;
    float sum = 0;
    for (size_t i = 0; i < IC; i++) sum += float(x[t * IC + i]) * float(w[o * IC + i]);
    out[t * OC + o] = sum;
}

template <class X>
__global__ void grouped_matmul_forward_kernel1(X *out, const X *x, const X *w, size_t n, size_t IC, size_t OC) {
    outputs_of_block(out, x, w, blockIdx.x * size_t(16), n, IC, OC);
}

template <class X> void grouped_matmul1(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    for (size_t e = 0; e < g.count(); e++) {
        const size_t begin = size_t(g.starts[e]), n = size_t(g.starts[e + 1]) - begin;
        launch(dev, grouped_matmul_forward_kernel1<X>, Grid{ceil_div(n, 16), ceil_div(g.OC, 16)}, 256, 0, out + begin * g.OC,
               x + begin * g.IC, w + e * g.OC * g.IC, n, g.IC, g.OC);
    }
}

// ---- version 2: a work list ----------------------------------------------------------------------------------------------------
//
// One launch. Its blocks are numbered through all groups: group e has ceil(n_e / 16) tiles of rows, and tile b belongs to the
// first group whose tiles and those before it are more than b. Nobody writes the list down: each warp adds up the tiles of 32
// groups by shuffles and asks by a vote which group is the first beyond b (find_group, llmc/ops/grouped_matmul.cuh). The sizes
// stay on the GPU.
//
// How many blocks? The host knows R and E alone. A group of n rows has at most n / 16 whole tiles and one more, so all have at
// most R / 16 + min(E, R); the blocks that find no tile end at once.
//
// The instructions are those of version 1 and the search, but the blocks of all groups run at the same time.

template <class X>
__global__ void grouped_matmul_forward_kernel2(X *out, const X *x, const X *w, const int32_t *starts, size_t E, size_t IC,
                                               size_t OC) {
    const auto [e, first] = find_group(starts, E, blockIdx.x, 16);
    if (e == E) return;
    const size_t begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin;
    outputs_of_block(out + begin * OC, x + begin * IC, w + e * OC * IC, first, n, IC, OC);
}

template <class X> void grouped_matmul2(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    const size_t tiles = g.R / 16 + std::min(g.count(), g.R);
    launch(dev, grouped_matmul_forward_kernel2<X>, Grid{tiles, ceil_div(g.OC, 16)}, 256, 0, out, x, w, g.d_starts, g.count(),
           g.IC, g.OC);
}

// ---- version 3: tiles of mma.sync ----------------------------------------------------------------------------------------------
//
// The parts of the shipped kernel, without its pipeline: a block computes 64 x 128 outputs, and slabs of 64 bytes of each row
// pass through shared memory, one at a time. Tiles of 64 rows, not matmul 4's 128, because groups are small: rows that a tile has
// too many cost as much as others, half a tile a group on average. With 256 rows a group, as in the timed shape, that is one
// eighth.

template <class X, bool wide>
__global__ void __launch_bounds__(GroupedTile<X>::threads)
    grouped_matmul_forward_kernel3(X *out, const X *x, const X *w, const int32_t *starts, size_t E, size_t IC, size_t OC) {
    using Tile = GroupedTile<X>;
    using Factor = GroupedFactor<X, true>;
    auto &slab = shared_mem<typename GroupedShared<X>::Stage>();
    const auto [e, first] = find_group(starts, E, blockIdx.x, Tile::rows);
    if (e == E) return;
    const size_t begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin, o0 = blockIdx.y * size_t(Tile::columns);
    const Factor a{x + begin * IC, IC, n}, b{w + e * OC * IC, IC, OC};
    const unsigned warp = threadIdx.x / 32, row = warp / 2 * (Tile::rows / 2), column = warp % 2 * (Tile::columns / 2);
    GroupedSums sums = {};
    for (size_t k0 = 0; k0 < IC; k0 += Tile::depth) {
        a.template load<wide, Tile::rows>(slab.a, first, k0, IC);
        b.template load<wide, Tile::columns>(slab.b, o0, k0, IC);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        grouped_multiply<X, true, true>(sums, slab, row, column);
        __syncthreads();
    }
    const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 16; j++) {
            const size_t r = first + row + i * 8 + g, c = o0 + column + j / 2 * 8 + 2 * t + j % 2;
            if (r < n && c < OC) out[(begin + r) * OC + c] = sums.d[i / 2][j / 2][i % 2 * 2 + j % 2];
        }
}

template <class X> void grouped_matmul3(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    launch(dev,
           grouped_is_wide(g.IC, g.OC, x, w) ? grouped_matmul_forward_kernel3<X, true> : grouped_matmul_forward_kernel3<X, false>,
           Grid{grouped_row_tiles<X>(g.count(), g.R), ceil_div(g.OC, GroupedTile<X>::columns)}, GroupedTile<X>::threads,
           sizeof(typename GroupedShared<X>::Stage), out, x, w, g.d_starts, g.count(), g.IC, g.OC);
}

// ---- version 4: llmc/ops/grouped_matmul.cuh ------------------------------------------------------------------------------------
//
// Three slabs of shared memory: while one is multiplied the next two are on their way (matmul 5), and one barrier a slab is left.
// Blocks with the same columns of a group read the same part of its matrix from L2; with a group per tile it is read once, and
// then the matrices' bytes are the limit.
//
// A quarter of the wavefronts are conflicts: rows of shared memory are 80 bytes apart, so that eight rows that ldmatrix reads are
// in different banks, but eight neighbours of a copy write two rows, bytes 0 to 63 and 80 to 143, of which the last 16 are in the
// banks of the first. Swizzled rows of 64 bytes (matmul 4) would have none.

template <class X> void grouped_matmul4(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    grouped_matmul_forward(dev, out, x, w, g.d_starts, g.count(), g.R, g.IC, g.OC);
}

template <class X> struct GroupedMatmul {
    std::vector<int32_t> starts;
    size_t R, E, IC, OC;
    std::vector<X> x, w;
    DeviceArray<X> d_x, d_w, out;
    DeviceArray<int32_t> d_starts;

    explicit GroupedMatmul(const Sizes &s)
        : starts(growing(s[0], s[1])),
          R(s[0]),
          E(s[1]),
          IC(s[2]),
          OC(s[3]),
          x(random_values<X>(R * IC, 1)),
          w(random_values<X>(E * OC * IC, 2)),
          d_x(x),
          d_w(w),
          out(R * OC),
          d_starts(starts) {}

    static std::vector<int32_t> growing(size_t R, size_t E) {  // as routers do it: some experts get much, some nothing
        std::vector<int32_t> out;
        for (size_t e = 0; e <= E; e++) out.push_back(int32_t(R * e * e / (E * E)));
        return out;
    }

    static constexpr void (*versions[])(Cuda<X>, X *out, const X *x, const X *w, const Groups &) = {
        grouped_matmul1, grouped_matmul2, grouped_matmul3, grouped_matmul4};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), d_x.data(), d_w.data(), {starts, d_starts.data(), R, IC, OC});
    }
    void check(Check &check) const {
        const auto part = [](const auto &of, size_t first, size_t n) {
            const auto begin = of.begin() + ptrdiff_t(first);
            return std::vector(begin, begin + ptrdiff_t(n));
        };
        const auto got = out.values();
        for (size_t e = 0; e < E; e++) {
            const size_t r = size_t(starts[e]), n = size_t(starts[e + 1]) - r;
            const Sums want =
                product_reference(part(x, r * IC, n * IC), IC, 1, part(w, e * OC * IC, OC * IC), 1, IC, {}, n, OC, IC);
            check(format("out of group %zu", e).c_str(), part(got, r * OC, n * OC), want.value, allowed<X>(want, IC));
        }
    }
    Work work() const { return {.flops = 2.0 * double(R) * double(IC) * double(OC)}; }
};

static const Ladder<GroupedMatmul, float, bf16> ladder(
    {.name = "grouped_matmul",
     .sizes = {{"R", "rows", 16384, 512},
               {"E", "groups, from one with few rows to one with many", 64, 8},
               {"IC", "input channels", 2048, 256},
               {"OC", "output channels", 768, 256}},
     .checked = {{1, 1, 5, 3}, {7, 4, 24, 40}, {90, 40, 16, 9}, {150, 2, 72, 131}},
     .ideas = {"a launch for each group, a thread per output", "one launch: blocks find their group",
               "tiles of mma.sync, one slab at a time", "shipped: three slabs on their way"}});
}  // namespace CUDA_BACKEND::workshop
