// Instructions that the lanes of a warp execute together: shuffles, votes, mma. PTX ISA, "Parallel Synchronization", "Warp-Level Matrix".
#include <algorithm>
#include <cmath>

#include "tensor_core.h"
#include "warp.h"

namespace ptx {
namespace {

// Every active lane must name exactly the active lanes; bits of lanes missing from a small block are ignored.
void need_mask(Warp &w, const uint32_t *masks) {
    Warp::each_lane(w.active, [&](int l) {
        if ((masks[l] & w.exist) != w.active)
            w.fail(l, format("the mask is %#x, but the lanes that are here are %#x", masks[l], w.active));
    });
}

// The source lane: at an index, a distance up or down, or with bits of the lane number flipped. Operand c holds the segments and the last lane.
enum class Shuffle { up, down, bfly, idx };
// d{|p}, a, b, c, mask. p: the source lane is in the segment
template <Shuffle mode, bool says> void shuffle(Warp &w, const Instruction &i) {
    const auto source = [&](int n) { return w.values<uint32_t>(i.operands[1 + says + n]); };
    const uint32_t *value = source(0), *distance = source(1), *clamp = source(2);
    need_mask(w, source(3));
    alignas(64) uint32_t result[lanes] = {};
    uint32_t valid = 0;
    Warp::each_lane(w.active, [&](int l) {
        const int b = int(distance[l] & 31), segment = int(clamp[l] >> 8 & 31);
        const int first = l & segment, last = first | (int(clamp[l] & 31) & ~segment);
        int from = l;
        if (mode == Shuffle::up) from = l - b;
        if (mode == Shuffle::down) from = l + b;
        if (mode == Shuffle::bfly) from = l ^ b;
        if (mode == Shuffle::idx) from = first | (b & ~segment);
        const bool inside = mode == Shuffle::up ? from >= last : from <= last;
        if (!inside) from = l;
        if (!(w.active >> from & 1)) w.fail(l, format("reads lane %d, which is not here", from));
        result[l] = value[from];
        valid |= uint32_t(inside) << l;
    });
    w.write(i.operands[0], result);
    if (says) w.write_predicate(i.operands[1], valid);
}
template <Shuffle mode> void add_shuffle(Forms &forms, const std::string &name) {
    forms["shfl.sync." + name + ".b32 5"] = {shuffle<mode, false>, Pipe::warp, 1, {4, 4, 4, 4, 4}};
    forms["shfl.sync." + name + ".b32 6"] = {shuffle<mode, true>, Pipe::warp, 2, {4, 0, 4, 4, 4, 4}};
}

enum class Vote { any, all, ballot };
template <Vote mode> void vote(Warp &w, const Instruction &i) {
    need_mask(w, w.values<uint32_t>(i.operands[2]));
    const uint32_t votes = w.predicate(i.operands[1]) & w.active;
    if constexpr (mode == Vote::ballot) {
        alignas(64) uint32_t result[lanes];
        std::fill(result, result + lanes, votes);
        w.write(i.operands[0], result);
    } else w.write_predicate(i.operands[0], (mode == Vote::any ? votes != 0 : votes == w.active) ? ~0u : 0);
}

// d = a op a op ..., over all active lanes
template <class T, class F> void reduce(Warp &w, const Instruction &i) {
    need_mask(w, w.values<uint32_t>(i.operands[2]));
    const T *a = w.values<T>(i.operands[1]);
    T sum = a[std::countr_zero(w.active)];
    Warp::each_lane(w.active & (w.active - 1), [&](int l) { sum = F()(sum, a[l]); });
    alignas(64) T result[lanes];
    std::fill(result, result + lanes, sum);
    w.write(i.operands[0], result);
}
template <class T, class F> void add_reduction(Forms &forms, const std::string &name, F) {
    forms["redux.sync." + name] = {reduce<T, F>, Pipe::warp, 1, {4, 4, 4}};
}

void active_lanes(Warp &w, const Instruction &i) {
    alignas(64) uint32_t result[lanes];
    std::fill(result, result + lanes, w.active);
    w.write(i.operands[0], result);
}

void sync_warp(Warp &w, const Instruction &i) {
    need_mask(w, w.values<uint32_t>(i.operands[0]));
    w.sync_lanes();
}

// ---- mma.m16n8k16: bf16 products, float sums --------------------------------------------------------------------------------------

constexpr int M = 16, N = 8, K = 16;
struct Fragments {
    double a[M][K], b[K][N], d[M][N];
};

// Calls f(lane, register, row, column) for the first element of each register of a fragment of 8 x 8 tiles, column by column of tiles:
// lane 4 g + t holds row g and the columns from 2 t on.
template <class F> void each_register(int registers, F f) {
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < registers; r++) f(l, r, l / 4 + r % 2 * 8, l % 4 * 2 + r / 2 * 8);
}

Fragments read_fragments(Warp &w, const Instruction &i) {
    Fragments f;
    const auto bf16_halves = [](uint32_t bits, double &low, double &high) {
        low = double(std::bit_cast<float>(bits << 16)), high = double(std::bit_cast<float>(bits & 0xffff'0000));
    };
    each_register(4, [&](int l, int r, int row, int column) {
        bf16_halves(w.values<uint32_t>(i.operands[4 + r])[l], f.a[row][column], f.a[row][column + 1]);
    });
    for (int l = 0; l < lanes; l++)  // a register of B holds two rows of a column
        for (int r = 0; r < 2; r++) {
            const int row = l % 4 * 2 + r * 8;
            bf16_halves(w.values<uint32_t>(i.operands[8 + r])[l], f.b[row][l / 4], f.b[row + 1][l / 4]);
        }
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < 4; r++) f.d[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2] = double(w.values<float>(i.operands[10 + r])[l]);
    return f;
}

void mma(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    Fragments f = read_fragments(w, i);
    for (int row = 0; row < M; row++) add_products<K, N>(f.a[row], f.b, f.d[row]);
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < 4; r++) w.values<float>(i.operands[r])[l] = float(f.d[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2]);
}
}  // namespace

void add_warp_operations(Forms &forms) {
    add_shuffle<Shuffle::up>(forms, "up");
    add_shuffle<Shuffle::down>(forms, "down");
    add_shuffle<Shuffle::bfly>(forms, "bfly");
    add_shuffle<Shuffle::idx>(forms, "idx");
    forms["vote.sync.any.pred"] = {vote<Vote::any>, Pipe::warp, 1, {0, 0, 4}};
    forms["vote.sync.all.pred"] = {vote<Vote::all>, Pipe::warp, 1, {0, 0, 4}};
    forms["vote.sync.ballot.b32"] = {vote<Vote::ballot>, Pipe::warp, 1, {4, 0, 4}};
    add_reduction<uint32_t>(forms, "add.u32", [](uint32_t a, uint32_t b) { return a + b; });
    forms["redux.sync.add.s32"] = forms["redux.sync.add.u32"];
    add_reduction<uint32_t>(forms, "min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
    add_reduction<uint32_t>(forms, "max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
    add_reduction<int32_t>(forms, "min.s32", [](int32_t a, int32_t b) { return std::min(a, b); });
    add_reduction<int32_t>(forms, "max.s32", [](int32_t a, int32_t b) { return std::max(a, b); });
    add_reduction<uint32_t>(forms, "and.b32", [](uint32_t a, uint32_t b) { return a & b; });
    add_reduction<uint32_t>(forms, "or.b32", [](uint32_t a, uint32_t b) { return a | b; });
    add_reduction<uint32_t>(forms, "xor.b32", [](uint32_t a, uint32_t b) { return a ^ b; });
    forms["activemask.b32"] = {active_lanes, Pipe::warp, 1, {4}};
    forms["bar.warp.sync"] = {sync_warp, Pipe::warp, 0, {4}};
    forms["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = {mma, Pipe::tensor, 4, std::vector<uint8_t>(14, 4)};
}
}  // namespace ptx
