// grouped_matmul_forward: rows of group e times the matrix of group e,  out[r,o] = sum_i x[r,i] w[e,o,i]
// Contract: llmc/ops/grouped_matmul.h
//
// The product of a layer of experts: x has each token's row once for each expert of the token, sorted by expert. Timed with 16384
// rows, 64 experts, IC 2048 and OC 768 in bf16, a layer of Qwen3-30B-A3B with half of its experts: 2 R IC OC = 52 GFLOP for any sizes
// of the groups. matmul.cu explains a single product; this ladder explains many products of unequal sizes, which only the GPU
// knows.
#include "../../llmc/ops/grouped_matmul.cuh"
#include "../../test/reference_matmul.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

struct Groups {
    std::vector<int32_t> starts;  // of the groups, and R
    RowGroups on_gpu;
    size_t IC, OC;
};

// ---- version 1: a launch for each group ----------------------------------------------------------------------------------------
//
// A thread computes one output, a block 16 x 16. The host needs the sizes, so it waits for the router, and then the GPU waits for the
// host. The launches run one after another, and a group of a few rows has a few blocks, so most of the GPU is idle.

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
    for (size_t e = 0; e < g.on_gpu.E; e++) {
        const size_t begin = size_t(g.starts[e]), n = size_t(g.starts[e + 1]) - begin;
        launch(dev, grouped_matmul_forward_kernel1<X>, Grid{ceil_div(n, 16), ceil_div(g.OC, 16)}, 256, 0, out + begin * g.OC,
               x + begin * g.IC, w + e * g.OC * g.IC, n, g.IC, g.OC);
    }
}

// ---- version 2: a work list ----------------------------------------------------------------------------------------------------
//
// One launch, with blocks numbered across all groups: group e has ceil(n_e / 16) tiles of rows, and tile b belongs to the first group
// at which the running sum of tiles exceeds b. The list is never stored: each warp computes the running sums of 32 groups with
// shuffles, and finds the first one above b with a vote (find_group, llmc/ops/grouped_matmul.cuh). The sizes stay on the
// GPU.
//
// The number of blocks must be known at the launch, and the host knows only R and E. A group of n rows has at most n / 16 full tiles
// and one partial tile, so all groups have at most R / 16 + min(E, R) tiles. Blocks without a tile exit at once.
//
// A block runs the instructions of version 1 and the search, but the blocks of all groups run at the same time.

template <class X>
__global__ void grouped_matmul_forward_kernel2(X *out, const X *x, const X *w, const int32_t *starts, size_t E, size_t IC,
                                               size_t OC) {
    const auto [e, first] = find_group(starts, E, blockIdx.x, 16);
    if (e == E) return;
    const size_t begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin;
    outputs_of_block(out + begin * OC, x + begin * IC, w + e * OC * IC, first, n, IC, OC);
}

template <class X> void grouped_matmul2(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    const size_t tiles = g.on_gpu.R / 16 + std::min(g.on_gpu.E, g.on_gpu.R);
    launch(dev, grouped_matmul_forward_kernel2<X>, Grid{tiles, ceil_div(g.OC, 16)}, 256, 0, out, x, w, g.on_gpu.starts,
           g.on_gpu.E, g.IC, g.OC);
}

// ---- version 3: tiles of mma.sync ----------------------------------------------------------------------------------------------
//
// The shipped kernel without its pipeline: a block computes 64 x 128 outputs, and slabs of 64 bytes of each row pass through shared
// memory, one at a time. A tile has 64 rows instead of 128 (matmul 4), because groups are small: unused rows of a tile cost as much as
// others, on average half a tile per group. With 256 rows per group, as in the timed shape, the unused rows add one
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
           Grid{grouped_row_tiles<X>(g.on_gpu), ceil_div(g.OC, GroupedTile<X>::columns)}, GroupedTile<X>::threads,
           sizeof(typename GroupedShared<X>::Stage), out, x, w, g.on_gpu.starts, g.on_gpu.E, g.IC, g.OC);
}

// ---- version 4: llmc/ops/grouped_matmul.cuh ------------------------------------------------------------------------------------
//
// Shared memory has three slabs: during the products of one, the next two are loaded (matmul 5), with one barrier per slab.
// Blocks with the same columns of a group read the same part of its matrix from L2. If every group has one tile, each matrix is read
// once, and its bytes are the limit.
//
// A quarter of the wavefronts are bank conflicts. Rows of shared memory are 80 bytes apart, so that the eight rows of an ldmatrix are
// in different banks. But eight neighbouring threads of a copy write two rows, bytes 0 to 63 and 80 to 143, and the last 16 bytes are
// in the banks of the first 16. Swizzled rows of 64 bytes (matmul 4) would have no conflicts.

template <class X> void grouped_matmul4(Cuda<X> dev, X *out, const X *x, const X *w, const Groups &g) {
    grouped_matmul_forward(dev, out, x, w, g.on_gpu, g.IC, g.OC);
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

    static std::vector<int32_t> growing(size_t R, size_t E) {  // as from a router: some experts have many rows, some none
        std::vector<int32_t> out;
        for (size_t e = 0; e <= E; e++) out.push_back(int32_t(R * e * e / (E * E)));
        return out;
    }

    static constexpr void (*versions[])(Cuda<X>, X *out, const X *x, const X *w, const Groups &) = {
        grouped_matmul1, grouped_matmul2, grouped_matmul3, grouped_matmul4};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), d_x.data(), d_w.data(), {starts, {d_starts.data(), E, R}, IC, OC});
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
               "tiles of mma.sync, one slab at a time", "shipped: three slabs in flight"}});
}  // namespace CUDA_BACKEND::workshop
