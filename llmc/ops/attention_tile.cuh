// Shared by the attention kernels: the rows of a block, tiles of heads in shared memory, products on tensor cores.
//
// A block owns a tile of rows (queries, or keys) and walks over tiles of the other kind, which are loaded into shared memory in two stages. Its four
// warps own 16*m rows each and keep their scores in registers: the accumulators of one mma.m16n8k16 product, rounded to bf16, are the left operand of
// the next product, so P and dS never go to memory. In each 16 x 8 accumulator lane 4*g + t of a warp holds c[0], c[1] = (g, 2t), (g, 2t + 1) and
// c[2], c[3] = (g + 8, 2t), (g + 8, 2t + 1).
#pragma once
#include <cstdint>

#include "../core/launch.cuh"
#include "attention_types.h"
#include "ptx.cuh"
#include "warp.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

// ---- rows of a block

struct TileRows {  // the rows of a tile: global positions [begin, end); local row `row` stores the first
    int begin, end, row;
    __device__ int size() const { return end - begin; }
    __device__ bool empty() const { return begin >= end; }
};

// The rows of a block. Queries see only keys that are between the same two cuts.
struct BlockRows : TileRows {
    int from, to;  // the last cut at or before the rows, and the first cut after them
    int before;    // the end of the previous block's rows, at least `from`
};

// The number of blocks of a launch: one for each `size` rows of each piece, and one more for each cut, which divides at most one tile.
inline size_t count_blocks(const Pieces &pieces, const TileCuts &cuts, size_t size) {
    size_t count = cuts.capacity;
    for (size_t i = 0; i < pieces.count; i++) count += ceil_div(pieces.piece[i].end - pieces.piece[i].begin, size);
    return count;
}
// Returns the rows of block n. Pieces are cut first, and then divided into `size` rows; block 0 has the first rows, or the last ones if `backwards`.
// The last blocks may be surplus and have no rows. Whole warps call this function: their lanes examine 32 cuts at a time.
__device__ inline BlockRows nth_block(const Pieces &pieces, const TileCuts &cuts, unsigned n, int size, bool backwards = false) {
    const int capacity = int(cuts.capacity);
    for (int first = 0; first <= capacity; first += 32) {
        const int lane = int(threadIdx.x) % 32,
                  i = backwards ? capacity - first - lane : first + lane;  // between cuts i - 1 and i
        const bool valid = 0 <= i && i <= capacity;
        int from = valid && i > 0 ? cuts.at[i - 1] : 0, to = !valid ? 0 : i < capacity ? cuts.at[i] : INT32_MAX;
        const auto tiles_of = [&](const Piece &p) {
            return (max(min(int(p.end), to) - max(int(p.begin), from), 0) + size - 1) / size;
        };
        int tiles = 0;
        for (size_t p = 0; p < pieces.count; p++) tiles += tiles_of(pieces.piece[p]);
        const int found = int(lane_of_item(unsigned(tiles), unsigned(min(capacity + 1 - first, 32)), n));
        if (found == 32) continue;
        from = __shfl_sync(all_lanes, from, found), to = __shfl_sync(all_lanes, to, found);
        int tile = backwards ? __shfl_sync(all_lanes, tiles, found) - 1 - int(n) : int(n), before = from;
        for (const Piece *p = pieces.piece;; p++) {
            const int here = tiles_of(*p);
            const int begin = max(int(p->begin), from) + tile * size, end = min(int(p->end), to);
            if (tile < here)
                return {{begin, min(begin + size, end), int(p->offset) + begin - int(p->begin)}, from, to, tile ? begin : before};
            if (here) before = end;
            tile -= here;
        }
    }
    return {};
}

// Walks over the rows of the pieces at positions [first, last), in tiles of at most `size` rows.
struct Tiles {
    const Pieces &pieces;
    int first, last, size;
    int i = -1;  // the piece that the last tile belongs to

    __device__ TileRows after(TileRows tile) {  // empty after the last tile
        int end = i < 0 ? tile.end : min(int(pieces.piece[i].end), last);
        while (tile.end >= end && ++i < int(pieces.count)) {
            const Piece p = pieces.piece[i];
            end = min(int(p.end), last);
            tile = {first, max(int(p.begin), first), int(p.offset) + first - int(p.begin)};
        }
        return {tile.end, min(tile.end + size, end), tile.row + tile.size()};
    }
    __device__ TileRows front() { return after({0, 0, 0}); }
};

// No query from first_unseeing on sees any of the keys. Within a piece both ends of [first_key[p], p] grow with p.
__device__ inline int first_unseeing(const int32_t *first_key, const BlockRows &keys, const Pieces &q_pieces) {
    int i = int(q_pieces.count) - 1, seeing, unseeing;
    for (;; i--) {  // to the last piece with a query that sees one
        seeing = max(keys.begin, int(q_pieces.piece[i].begin)), unseeing = min(int(q_pieces.piece[i].end), keys.to);
        if (i == 0 || (seeing < unseeing && first_key[seeing] < keys.end)) break;
    }
    while (seeing < unseeing) {
        const int p = seeing + (unseeing - seeing) / 2;
        if (first_key[p] < keys.end) seeing = p + 1;
        else unseeing = p;
    }
    return seeing;
}

// ---- tiles in shared memory

// A tile of rows of D bf16 in shared memory. The 16-byte chunks of a row are permuted, so the eight rows of a column that ldmatrix reads at once
// are in eight different groups of four banks: chunk c of row r is stored at c ^ (r % 8), or at c ^ (r / 2 % 4) if a row is an odd number of half
// lines of 128 bytes.
template <int rows, int D> struct Tile {
    static constexpr int group = D % 64 == 0 ? 8 : 4;  // the number of chunks that are permuted among themselves
    alignas(128) bf16 data[rows * D];
    HOST_DEVICE bf16 *chunk(int r, int c) { return data + r * D + (c ^ (group == 8 ? r % 8 : r / 2 % 4)) * 8; }
    // Steps from chunk (r, c) to (r, c + even), for c 0 or 1, which costs less than computing the address again.
    HOST_DEVICE static bf16 *right(bf16 *at, int even) {
        return reinterpret_cast<bf16 *>(reinterpret_cast<uintptr_t>(at) ^ even % group * 16) + even / group * group * 8;
    }
};

// Starts to copy rows of one head, where x points at row 0 and D <= width. The rest of the tile becomes 0.
template <int threads, int rows, int width>
__device__ void load(Tile<rows, width> &tile, Heads<const bf16> x, TileRows tile_rows, size_t D) {
    constexpr int group = Tile<rows, width>::group,
                  step = threads / group;  // a multiple of 8 rows, which have the same permutation
    const int r0 = int(threadIdx.x) / group, c0 = int(threadIdx.x) % group;
    bf16 *to = tile.chunk(r0, c0);
    const bf16 *from = x.data + size_t(unsigned(tile_rows.row + r0)) * unsigned(x.stride) + c0 * 8;
#pragma unroll
    for (int r = 0; r < rows; r += step, from += step * x.stride)
        if (r0 + r < rows)
#pragma unroll
            for (int c = 0; c < width / 8; c += group) {
                const bool valid = r0 + r < tile_rows.size() && (c0 + c) * 8 < int(D);
                cp_async_16(to + r * width + c * 8, from + c * 8, valid);
            }
}

// ---- products of tiles. A warp holds 16*m rows as c[m][columns / 8][4]

// c (16*m, N) = rows row0 ... of a (rows, D) times b (N, D)^T
template <int m, int N, int rows, int D>
__device__ void product_transposed(float (&c)[m][N / 8][4], Tile<rows, D> &a, int row0, Tile<N, D> &b) {
    const int lane = threadIdx.x % 32;
    bf16 *a_at = a.chunk(row0 + lane % 16, lane / 16), *b_at = b.chunk(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][n][e] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[m][4];
#pragma unroll
        for (int i = 0; i < m; i++) ldmatrix_x4(left[i], a.right(a_at, k * 2) + i * 16 * D);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right, b.right(b_at, k * 2) + n * 16 * D);
#pragma unroll
            for (int i = 0; i < m; i++) {
                mma_m16n8k16(c[i][2 * n], left[i], {right[0], right[1]});
                mma_m16n8k16(c[i][2 * n + 1], left[i], {right[2], right[3]});
            }
        }
    }
}

// c (16*m, D) += a (16*m, K) b (K, D), where a comes from accumulators
template <int m, int K, int D>
__device__ void product_add(float (&c)[m][D / 8][4], const uint32_t (&a)[m][K / 16][4], Tile<K, D> &b) {
    const int lane = threadIdx.x % 32;
    bf16 *b_at = b.chunk(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, b.right(b_at, n * 2) + k * 16 * D);
#pragma unroll
            for (int i = 0; i < m; i++) {
                mma_m16n8k16(c[i][2 * n], a[i][k], {right[0], right[1]});
                mma_m16n8k16(c[i][2 * n + 1], a[i][k], {right[2], right[3]});
            }
        }
}

// Accumulators as the left operand of a product: two 16 x 8 accumulators make one 16 x 16 operand.
template <int m, int K> __device__ void round_to_operand(uint32_t (&a)[m][K / 16][4], const float (&c)[m][K / 8][4]) {
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int k = 0; k < K / 16; k++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                a[i][k][e] = pack_bf16(c[i][2 * k + e / 2][e % 2 * 2], c[i][2 * k + e / 2][e % 2 * 2 + 1]);
}

// ---- the mask

// The 16*m queries of one warp, from row0 of the block on. `first_key` is the block's array in shared memory.
template <int m> struct Queries {
    const int *first_key;
    int row0, begin, end;  // row0 of the block; positions [begin, end), none if end <= begin

    // Fills first_key (all rows of the block) and needs a __syncthreads before it is used.
    __device__ Queries(TileRows block, int *first_key, const int32_t *all_first_keys) : first_key(first_key) {
        const int i = threadIdx.x;
        row0 = i / 32 * 16 * m;
        begin = block.begin + row0, end = min(begin + 16 * m, block.end);
        // A row beyond the block sees no key.
        if (i < int(blockDim.x) / 32 * 16 * m) first_key[i] = i < block.size() ? all_first_keys[block.begin + i] : INT32_MAX;
    }
    __device__ bool see_none_of(TileRows keys) const { return begin >= end || keys.begin >= end || keys.end <= first_key[row0]; }
    __device__ bool see_all_of(TileRows keys) const {
        return keys.end - 1 <= begin && keys.begin >= first_key[row0 + end - begin - 1];
    }
    // The row within the block of this lane's accumulators [i][.][2*r] and [i][.][2*r + 1].
    __device__ int row(int i, int r) const { return row0 + 16 * i + 8 * r + int(threadIdx.x) % 32 / 4; }

    template <int N> __device__ void mask(float (&scores)[m][N / 8][4], TileRows keys) const {
#pragma unroll
        for (int i = 0; i < m; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = keys.begin + int(threadIdx.x) % 4 * 2 + e % 2;  // for n = 0
                const int p = begin - row0 + row(i, e / 2), first = first_key[row(i, e / 2)] - key;
                const int last = min(p, keys.end - 1) - key;
#pragma unroll
                for (int n = 0; n < N / 8; n++)
                    if (8 * n < first || 8 * n > last) scores[i][n][e] = -INFINITY;
            }
    }
};

// ---- the running result

// Merges the log-sum-exp of a part into *lse and returns the weight of out += weight * (out of the part - out). All lanes of a warp call it;
// several lanes may have the same row, and one of them writes.
__device__ inline float merge_lse(float *lse, float part, bool valid, bool writes) {
    const float before = valid ? *lse : 0.0f, whole = fmaxf(before, part) + log1pf(expf(-fabsf(before - part)));
    __syncwarp();  // all have read lse
    if (valid && writes) *lse = whole;
    return expf(part - whole);
}

}  // namespace CUDA_BACKEND
}  // namespace attention
