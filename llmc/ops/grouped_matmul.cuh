// Grouped products on CUDA. Contract and formulas: grouped_matmul.h.
#pragma once
#include "grouped_matmul.h"
#include "ptx.cuh"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// A block computes a tile of an output, `rows` by `columns`, with four warps in a square. Tiles of both factors pass through shared memory, with
// `depth` terms of the sum per stage and `stages` stages in flight.
template <class X> struct GroupedTile {
    static constexpr unsigned rows = 64, columns = 128, depth = 64 / sizeof(X), vector = 16 / sizeof(X), stages = 3;
    static constexpr unsigned warps = 4, threads = warps * 32;
    // A row of shared memory is padded by one vector, so the eight rows that ldmatrix reads at once are in different banks.
    static constexpr unsigned room(unsigned side) {
        const unsigned along = side * (depth + vector), across = depth * (side + vector);
        return along > across ? along : across;
    }
};
template <class X> struct GroupedShared {
    struct Stage {
        X a[GroupedTile<X>::room(GroupedTile<X>::rows)], b[GroupedTile<X>::room(GroupedTile<X>::columns)];
    } stage[GroupedTile<X>::stages];
};

// One factor of a product: element (i, k) is data[i * ld + k] if the sum runs along its rows (`along`), else data[k * ld + i]. i < extent.
template <class X, bool along> struct GroupedFactor {
    const X *data;
    size_t ld, extent;

    // Copies elements i in [i0, i0 + side), k in [k0, k0 + depth) to shared memory, in the same order, with zeros beyond extent and K.
    template <bool wide, unsigned side> __device__ void load(X *to, size_t i0, size_t k0, size_t K) const {
        using Tile = GroupedTile<X>;
        constexpr unsigned N = wide ? Tile::vector : 1, inner = along ? Tile::depth : side, vectors = side * Tile::depth / N;
#pragma unroll(wide ? 4 : 8)  // loads in flight at once
        for (unsigned v = threadIdx.x; v < vectors; v += Tile::threads) {
            const unsigned outer = v / (inner / N), at = v % (inner / N) * N;
            const size_t i = i0 + (along ? outer : at), k = k0 + (along ? at : outer);
            X *place = to + outer * (inner + Tile::vector) + at;
            const bool valid = i < extent && k < K;
            const X *from = data + (valid ? along ? i * ld + k : k * ld + i : 0);
            if constexpr (wide) cp_async_16(place, from, valid);
            else *place = valid ? *from : X(0.0f);
        }
    }

    // Element (i, k) of a tile in shared memory.
    template <unsigned side> __device__ static const X *at(const X *tile, unsigned i, unsigned k) {
        return tile +
               (along ? i * (GroupedTile<X>::depth + GroupedTile<X>::vector) + k : k * (side + GroupedTile<X>::vector) + i);
    }

    // Loads four 8 x 8 matrices of (i, k) such that a lane holds pairs along k. Odd matrices begin at i0 + 8, matrices 2 and 3 at k0 + 8; with
    // `across` the other way round.
    template <unsigned side> __device__ static void read(uint32_t (&r)[4], const X *tile, unsigned i0, unsigned k0, bool across) {
        const unsigned lane = threadIdx.x % 32, matrix = lane / 8, first = matrix % 2 * 8, second = matrix / 2 * 8;
        const unsigned i = i0 + (across ? second : first), k = k0 + (across ? first : second);
        if constexpr (along) ldmatrix_x4(r, at<side>(tile, i + lane % 8, k));
        else ldmatrix_x4_trans(r, at<side>(tile, i, k + lane % 8));
    }
};

// The sums of a warp, for half of the tile's rows and columns, in the layout of mma_m16n8k16: [row / 16][column / 8].
struct GroupedSums {
    float d[2][8][4];
};

// sums += a b over one stage.
template <class X, bool a_along, bool b_along>
__device__ void grouped_multiply(GroupedSums &sums, const typename GroupedShared<X>::Stage &stage, unsigned row,
                                 unsigned column) {
    using Tile = GroupedTile<X>;
    using A = GroupedFactor<X, a_along>;
    using B = GroupedFactor<X, b_along>;
    if constexpr (sizeof(X) == 2) {
#pragma unroll
        for (unsigned k = 0; k < Tile::depth; k += 16) {
            uint32_t a[2][4], b[4][4];
            for (unsigned i = 0; i < 2; i++) A::template read<Tile::rows>(a[i], stage.a, row + i * 16, k, false);
            for (unsigned j = 0; j < 4; j++) B::template read<Tile::columns>(b[j], stage.b, column + j * 16, k, true);
            for (unsigned i = 0; i < 2; i++)
                for (unsigned j = 0; j < 8; j++) mma_m16n8k16(sums.d[i][j], a[i], {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]});
        }
    } else {
        const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        for (unsigned k = 0; k < Tile::depth; k++) {
            float a[4], b[16];
            for (unsigned i = 0; i < 4; i++) a[i] = *A::template at<Tile::rows>(stage.a, row + i * 8 + g, k);
            for (unsigned j = 0; j < 16; j++)
                b[j] = *B::template at<Tile::columns>(stage.b, column + j / 2 * 8 + 2 * t + j % 2, k);
            for (unsigned i = 0; i < 4; i++)
                for (unsigned j = 0; j < 16; j++) sums.d[i / 2][j / 2][i % 2 * 2 + j % 2] += a[i] * b[j];
        }
    }
}

// Computes the tile at (i0, j0) of out (a.extent, b.extent) = or += sum_k a(i, k) b(j, k).
template <class X, bool wide, class Out, bool a_along, bool b_along>
__device__ void grouped_product(Out *out, size_t ld, GroupedFactor<X, a_along> a, GroupedFactor<X, b_along> b, size_t i0,
                                size_t j0, size_t K, bool accumulate) {
    using Tile = GroupedTile<X>;
    constexpr unsigned ahead = Tile::stages - 1;
    auto &shared = shared_mem<GroupedShared<X>>();
    const auto load = [&](size_t step) {
        auto &stage = shared.stage[step % Tile::stages];
        if (step * Tile::depth < K) {
            a.template load<wide, Tile::rows>(stage.a, i0, step * Tile::depth, K);
            b.template load<wide, Tile::columns>(stage.b, j0, step * Tile::depth, K);
        }
        cp_async_commit();
    };
    const unsigned warp = threadIdx.x / 32, row = warp / 2 * (Tile::rows / 2), column = warp % 2 * (Tile::columns / 2);
    GroupedSums sums = {};
    for (unsigned step = 0; step < ahead; step++) load(step);
    for (size_t step = 0; step * Tile::depth < K; step++) {
        cp_async_wait<ahead - 1>();
        __syncthreads();  // all threads see this stage, and all have read the stage that is loaded next
        load(step + ahead);
        grouped_multiply<X, a_along, b_along>(sums, shared.stage[step % Tile::stages], row, column);
    }
    const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (unsigned i = 0; i < 4; i++)
        for (unsigned j = 0; j < 16; j++) {
            const size_t r = i0 + row + i * 8 + g, c = j0 + column + j / 2 * 8 + 2 * t + j % 2;
            if (r >= a.extent || c >= b.extent) continue;
            Out &place = out[r * ld + c];
            const float sum = sums.d[i / 2][j / 2][i % 2 * 2 + j % 2];
            place = accumulate ? float(place) + sum : sum;
        }
}

// Groups have any sizes, and only the device knows them. The work list is implicit: the tiles of all groups are numbered consecutively, and a block
// finds its tile by its number. All warps of a block search, 32 groups at a time. Blocks after the last tile have no work.
struct GroupOfTile {
    size_t group, first;  // E if there is no tile; the tile's first row in its group
};
__device__ inline GroupOfTile find_group(const int32_t *starts, size_t E, unsigned tile, unsigned rows) {
    const unsigned lane = threadIdx.x % 32;
    for (size_t e0 = 0; e0 < E; e0 += 32) {
        const size_t e = e0 + lane;
        const unsigned tiles = e < E ? (unsigned(starts[e + 1] - starts[e]) + rows - 1) / rows : 0,
                       found = lane_of_item(tiles, unsigned(min(E - e0, size_t(32))), tile);
        if (found < 32) return {e0 + found, size_t(tile) * rows};
    }
    return {E, 0};
}

// A block computes a tile of rows of one group. The kernel executes 2 R IC OC FLOP and reads each matrix once for every 64 rows.
template <class X, bool wide>
__global__ void __launch_bounds__(GroupedTile<X>::threads)
    grouped_matmul_forward_kernel1(X *out, const X *x, const X *w, const int32_t *starts, size_t E, size_t IC, size_t OC,
                                   size_t ld, bool accumulate) {
    const auto [e, first] = find_group(starts, E, blockIdx.x, GroupedTile<X>::rows);
    if (e == E) return;
    const size_t begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin;
    grouped_product<X, wide>(out + begin * ld, ld, GroupedFactor<X, true>{x + begin * IC, IC, n},
                             GroupedFactor<X, true>{w + e * OC * IC, IC, OC}, first, blockIdx.y * size_t(GroupedTile<X>::columns),
                             IC, accumulate);
}

template <class X, bool wide>
__global__ void __launch_bounds__(GroupedTile<X>::threads)
    grouped_matmul_backward_input_kernel1(X *dx, const X *dout, const X *w, const int32_t *starts, size_t E, size_t IC, size_t OC,
                                          size_t ld, bool accumulate) {
    const auto [e, first] = find_group(starts, E, blockIdx.x, GroupedTile<X>::rows);
    if (e == E) return;
    const size_t begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin;
    grouped_product<X, wide>(dx + begin * IC, IC, GroupedFactor<X, true>{dout + begin * ld, ld, n},
                             GroupedFactor<X, false>{w + e * OC * IC, IC, IC}, first,
                             blockIdx.y * size_t(GroupedTile<X>::columns), OC, accumulate);
}

// A block computes a tile of the gradient of one group's matrix, over all rows of the group.
template <class X, bool wide>
__global__ void __launch_bounds__(GroupedTile<X>::threads)
    grouped_matmul_backward_weight_kernel1(float *dw, const X *dout, const X *x, const int32_t *starts, size_t IC, size_t OC,
                                           bool accumulate, size_t ld) {
    const size_t e = blockIdx.z, begin = size_t(starts[e]), n = size_t(starts[e + 1]) - begin;
    grouped_product<X, wide>(dw + e * OC * IC, IC, GroupedFactor<X, false>{dout + begin * ld, ld, OC},
                             GroupedFactor<X, false>{x + begin * IC, IC, IC}, blockIdx.y * size_t(GroupedTile<X>::rows),
                             blockIdx.x * size_t(GroupedTile<X>::columns), n, accumulate);
}

template <class X> bool grouped_is_wide(size_t IC, size_t OC, const X *a, const X *b, size_t ld = 0) {
    constexpr int N = GroupedTile<X>::vector;
    return IC % N == 0 && ld % N == 0 && fit_vectors<N>(OC, a, b);
}
template <class X> size_t grouped_row_tiles(RowGroups of) {
    return of.R / GroupedTile<X>::rows + std::min(of.E, of.R);
}  // at most

template <class X>
void grouped_matmul_forward(Cuda<X> dev, X *out, const X *x, const X *w, RowGroups groups, size_t IC, size_t OC, size_t ld = 0,
                            bool accumulate = false) {
    launch(dev,
           grouped_is_wide(IC, OC, x, w) ? grouped_matmul_forward_kernel1<X, true> : grouped_matmul_forward_kernel1<X, false>,
           Grid{grouped_row_tiles<X>(groups), ceil_div(OC, GroupedTile<X>::columns)}, GroupedTile<X>::threads,
           sizeof(GroupedShared<X>), out, x, w, groups.starts, groups.E, IC, OC, ld ? ld : OC, accumulate);
}

template <class X>
void grouped_matmul_backward_input(Cuda<X> dev, X *dx, const X *dout, const X *w, RowGroups groups, size_t IC, size_t OC,
                                   size_t ld = 0, bool accumulate = false) {
    launch(dev,
           grouped_is_wide(IC, OC, dout, w, ld) ? grouped_matmul_backward_input_kernel1<X, true>
                                                : grouped_matmul_backward_input_kernel1<X, false>,
           Grid{grouped_row_tiles<X>(groups), ceil_div(IC, GroupedTile<X>::columns)}, GroupedTile<X>::threads,
           sizeof(GroupedShared<X>), dx, dout, w, groups.starts, groups.E, IC, OC, ld ? ld : OC, accumulate);
}

template <class X>
void grouped_matmul_backward_weight(Cuda<X> dev, float *dw, const X *dout, const X *x, RowGroups groups, size_t IC, size_t OC,
                                    bool accumulate, size_t ld = 0) {
    launch(dev,
           grouped_is_wide(IC, OC, dout, x, ld) ? grouped_matmul_backward_weight_kernel1<X, true>
                                                : grouped_matmul_backward_weight_kernel1<X, false>,
           Grid{ceil_div(IC, GroupedTile<X>::columns), ceil_div(OC, GroupedTile<X>::rows), groups.E}, GroupedTile<X>::threads,
           sizeof(GroupedShared<X>), dw, dout, x, groups.starts, IC, OC, accumulate, ld ? ld : OC);
}
}  // namespace CUDA_BACKEND
