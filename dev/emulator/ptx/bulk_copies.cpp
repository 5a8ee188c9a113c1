#include "bulk_copies.h"

#include "../../../llmc/core/dtype.h"
#include "device_memory.h"
#include "forms.h"
#include "mbarrier.h"
#include "memory.h"
#include "shared_memory.h"
#include "tensor_map.h"

namespace ptx {
namespace {

constexpr uint32_t word = 16;  // bytes: the alignment of all TMA transfers

// ---- the bytes of a copy ----------------------------------------------------------------------------------------------------------

// Returns the lane that starts a copy. Several lanes may start a store with the same operands, which has the same effect.
int starter(Warp &w, const Instruction &i, bool stores) {
    const int first = std::countr_zero(w.active);
    for (int n = 0; n < i.reads && std::popcount(w.active) > 1; n++)
        Warp::each_lane(w.active, [&](int l) {
            const auto same = [&](const auto *values) { return values[l] == values[first]; };
            if (!stores || !(n ? same(w.values<uint32_t>(i.operands[n])) : same(w.values<uint64_t>(i.operands[n]))))
                w.fail(l, "several threads start this copy\n  fix: elect one");
        });
    return first;
}

TensorMap map_at(Warp &w, int lane, uint64_t address) {
    const std::vector<uint8_t> &parameters = *w.block->running->parameters;
    TensorMap map;
    if (address % 64) w.fail(lane, format("the tensor map at %#zx is not aligned to 64", size_t(address)));
    const uint64_t at = address - param_window;
    if (at + sizeof map <= parameters.size()) memcpy(&map, parameters.data() + at, sizeof map);
    else
        for (size_t n = 0; n < sizeof map; n++) reinterpret_cast<uint8_t *>(&map)[n] = *readable(w, lane, address + n, 1);
    if (map.magic != TensorMap::mark) w.fail(lane, "reads a tensor map that cuTensorMapEncodeTiled has not made");
    return map;
}

// Returns the pieces of a box, row by row. Elements outside the array are read as zeros and are not written.
std::vector<Piece> pieces_of(const TensorMap &map, uint32_t shared, const int *corner) {
    const uint32_t element = bytes_of(map.element), mask = (1u << map.swizzle) - 1;
    const uint32_t row_bytes = map.row_bytes(), rows = map.box_bytes() / row_bytes;
    std::vector<Piece> pieces;
    for (uint32_t row = 0; row < rows; row++) {
        uint64_t from = map.base;
        bool inside = true;
        for (uint32_t d = 1, rest = row; d < map.rank; rest /= map.box[d], d++) {
            const int64_t x = corner[d] + int64_t(rest % map.box[d]);
            inside &= x >= 0 && uint64_t(x) < map.dims[d];
            from += uint64_t(x) * map.strides[d - 1];
        }
        for (uint32_t at = 0; at < row_bytes; at += word) {
            const int64_t first = corner[0] * int64_t(element) + at,
                          end = int64_t(map.dims[0] * element);  // byte offsets in the row
            const int64_t skipped = std::clamp<int64_t>(-first, 0, word), until = std::clamp<int64_t>(end - first, 0, word);
            Piece p{swizzled(shared + row * row_bytes + at, mask), 0, 0, 0};
            if (inside && skipped < until)
                p.from = uint8_t(skipped), p.to = uint8_t(until), p.global = from + uint64_t(first + skipped);
            pieces.push_back(p);
        }
    }
    return pieces;
}
std::vector<Piece> pieces_of(uint32_t shared, uint64_t global, uint32_t bytes) {
    std::vector<Piece> pieces;
    for (uint32_t at = 0; at < bytes; at += word) pieces.push_back({shared + at, global + at, 0, word});
    return pieces;
}

void check_global(Warp &w, int lane, const std::vector<Piece> &pieces) {
    DeviceMemory::Allocation &last = w.block->running->last;
    for (const Piece &p : pieces) {
        const size_t bytes = size_t(p.to - p.from);
        if (!bytes || last.holds(p.global, bytes)) continue;
        last = w.block->running->memory->at_or_before(p.global);
        if (!last.holds(p.global, bytes)) w.fail(lane, format("copies %zu bytes at ", bytes) + describe(w, p.global));
    }
}
// Counts the wavefronts of the copy's reads or writes of shared memory, in `blocks` blocks.
void count_shared(Warp &w, const std::vector<Piece> &pieces, int blocks) {
    if (!w.block->running->launch->count_memory) return;
    const uint64_t wavefronts = ceil_div(pieces.size() * word, 128) * uint64_t(blocks);
    w.count().wavefronts += wavefronts, w.count().least_wavefronts += wavefronts;
}
void count_global(Warp &w, const std::vector<Piece> &pieces, bool writes) {
    if (!w.block->running->launch->count_memory) return;
    std::vector<uint64_t> addresses;
    for (const Piece &p : pieces)
        if (p.from < p.to) addresses.push_back(p.global), addresses.push_back(p.global + p.to - p.from - 1);
    count_bulk(w, addresses, writes);
}

uint8_t *bytes_at(Cluster &cluster, unsigned rank, uint32_t shared) {
    return cluster.blocks[rank].shared.data() + (shared & 0xff'ffff) - shared_base;
}

// ---- to shared memory: it completes on an mbarrier --------------------------------------------------------------------------------

void start_inward(Warp &w, int lane, std::vector<Piece> pieces, uint32_t to, uint32_t mbarrier, uint32_t ranks, bool between) {
    Cluster &cluster = *w.block->cluster;
    BulkCopy copy{.warp = &w, .instruction = w.instruction, .lane = lane, .pieces = std::move(pieces), .between_blocks = between};
    const Block &home = place_of(w, lane, to).block;
    if (&place_of(w, lane, mbarrier).block != &home) w.fail(lane, "copies to one block, and to the mbarrier of another");
    if (!ranks) ranks = 1u << home.rank;
    if (ranks >> cluster.blocks.size())
        w.fail(lane, format("copies to the blocks %#x of a cluster of %zu", ranks, cluster.blocks.size()));
    if (!between) {
        check_global(w, lane, copy.pieces);
        for (const Piece &p : copy.pieces)
            if (p.from < p.to) note_bulk_access(w, lane, p.global, uint32_t(p.to - p.from), BulkUse::read);
    }
    for (unsigned r = 0; r < cluster.blocks.size(); r++) {
        if (!(ranks >> r & 1)) continue;
        const uint32_t block = r == w.block->rank ? 0 : (r + 1) << 24, own = mbarrier & 0xff'ffff;
        const MBarrier &b = mbarrier_of_copy(w, lane, block | own);
        copy.targets.push_back({r, own, b.phase});
        for (const Piece &p : copy.pieces) {
            const uint32_t at = block | (p.shared & 0xff'ffff);
            shared_place(w, lane, at, word);
            note_async_departure(w, lane, at, word);
        }
    }
    if (between)
        for (const Piece &p : copy.pieces)
            shared_place(w, lane, uint32_t(p.global), word), note_async_read(w, lane, uint32_t(p.global), word);
    else count_global(w, copy.pieces, false);
    count_shared(w, copy.pieces, std::popcount(ranks) + between);
    copy.done = time_bulk_copy(w, copy.pieces.size() * word, between ? cluster_cycles : w.timing.memory);
    cluster.inward.push_back(std::make_shared<BulkCopy>(std::move(copy)));
}

// [shared], [map, {x, y, ...}], [mbarrier] {, blocks}
template <int rank, bool multicast> void load_box(Warp &w, const Instruction &i) {
    const int lane = starter(w, i, false);
    const TensorMap map = map_at(w, lane, w.values<uint64_t>(i.operands[1])[lane] + uint64_t(i.offsets[1]));
    if (map.rank != rank) w.fail(lane, format("a copy of rank %d by a tensor map of rank %d", rank, map.rank));
    int corner[rank];
    for (int d = 0; d < rank; d++) corner[d] = int(w.one(i.operands[2 + d]));
    const uint32_t to = w.one(i.operands[0]) + uint32_t(i.offsets[0]),
                   mbarrier = w.one(i.operands[2 + rank]) + uint32_t(i.offsets[2]);
    if (to % 128) w.fail(lane, shared_text(to) + " is not aligned to 128, as a box of TMA must be");
    uint32_t ranks = 0;
    if (multicast) ranks = w.values<uint16_t>(i.operands[3 + rank])[lane];
    if (multicast && !ranks) w.fail(lane, "copies to no block");
    start_inward(w, lane, pieces_of(map, to, corner), to, mbarrier, ranks, false);
}

// [shared], [device memory or another block's shared], bytes, [mbarrier] {, blocks}
template <bool between, bool multicast> void load_bytes(Warp &w, const Instruction &i) {
    using Address = std::conditional_t<between, uint32_t, uint64_t>;
    const int lane = starter(w, i, false);
    const uint32_t to = w.one(i.operands[0]) + uint32_t(i.offsets[0]), bytes = w.one(i.operands[2]),
                   mbarrier = w.one(i.operands[3]) + uint32_t(i.offsets[2]);
    const uint64_t from = uint64_t(w.values<Address>(i.operands[1])[lane]) + uint64_t(i.offsets[1]);
    if (!bytes || bytes % word || to % word || from % word)
        w.fail(lane, format("copies %u bytes\n  fix: bytes and addresses that are multiples of 16", bytes));
    const uint32_t ranks = multicast ? w.values<uint16_t>(i.operands[4])[lane] : 0;
    start_inward(w, lane, pieces_of(to, from, bytes), to, mbarrier, ranks, between);
}

// ---- from shared memory: groups of the thread -------------------------------------------------------------------------------------

template <class T, class Narrow = T> void add_elements(uint8_t *to, const uint8_t *from, size_t bytes) {
    for (size_t n = 0; n + sizeof(Narrow) <= bytes; n += sizeof(Narrow)) {
        Narrow x, y;
        memcpy(&x, to + n, sizeof x), memcpy(&y, from + n, sizeof y);
        x = Narrow(T(x) + T(y));
        memcpy(to + n, &x, sizeof x);
    }
}
void add_or_copy(Sum sum, uint8_t *to, const uint8_t *from, size_t bytes) {
    switch (sum) {
        case Sum::none: memcpy(to, from, bytes); break;
        case Sum::f32: add_elements<float>(to, from, bytes); break;
        case Sum::f16: add_elements<float, _Float16>(to, from, bytes); break;
        case Sum::bf16: add_elements<float, bf16>(to, from, bytes); break;
        case Sum::s32:
        case Sum::u32: add_elements<uint32_t>(to, from, bytes); break;
    }
}

void start_outward(Warp &w, int lane, std::vector<Piece> pieces, Sum sum) {
    BulkCopy copy{.warp = &w,
                  .instruction = w.instruction,
                  .lane = lane,
                  .pieces = std::move(pieces),
                  .group = w.bulk_groups[lane],
                  .sum = sum};
    check_global(w, lane, copy.pieces);
    std::erase_if(copy.pieces, [](const Piece &p) { return p.from == p.to; });
    const BulkUse use = sum == Sum::none                     ? BulkUse::write
                        : sum == Sum::s32 || sum == Sum::u32 ? BulkUse::add
                                                             : BulkUse::add_floats;
    for (const Piece &p : copy.pieces) {
        const uint8_t *from = shared_place(w, lane, p.shared, word) + p.from, *const end = from + p.to - p.from;
        note_async_read(w, lane, p.shared, word);
        const bool zeros = std::all_of(from, end, [](uint8_t byte) { return byte == 0; });
        if (sum == Sum::none || !zeros)
            note_bulk_access(w, lane, p.global, uint32_t(end - from), use);  // added zeros change no sum
    }
    count_global(w, copy.pieces, true);
    count_shared(w, copy.pieces, 1);
    copy.done = time_bulk_copy(w, copy.pieces.size() * word, 0);
    w.outward.push_back(std::make_shared<BulkCopy>(std::move(copy)));
}

// [map, {x, y, ...}], [shared]
template <int rank, bool adds> void store_box(Warp &w, const Instruction &i) {
    const int lane = starter(w, i, !adds);
    const TensorMap map = map_at(w, lane, w.values<uint64_t>(i.operands[0])[lane] + uint64_t(i.offsets[0]));
    if (map.rank != rank) w.fail(lane, format("a copy of rank %d by a tensor map of rank %d", rank, map.rank));
    int corner[rank];
    for (int d = 0; d < rank; d++) corner[d] = int(w.one(i.operands[1 + d]));
    const uint32_t from = w.one(i.operands[1 + rank]) + uint32_t(i.offsets[1]);
    if (from % 128) w.fail(lane, shared_text(from) + " is not aligned to 128, as a box of TMA must be");
    Sum sum = Sum::none;
    if (adds) switch (map.element) {
            case Element::f32:
            case Element::f32_ftz: sum = Sum::f32; break;
            case Element::f16: sum = Sum::f16; break;
            case Element::bf16: sum = Sum::bf16; break;
            case Element::u32: sum = Sum::u32; break;
            case Element::s32: sum = Sum::s32; break;
            default: w.fail(lane, "adds elements of this type, which the interpreter does not");
        }
    start_outward(w, lane, pieces_of(map, from, corner), sum);
}

// [device memory], [shared], bytes
template <Sum sum> void store_bytes(Warp &w, const Instruction &i) {
    const int lane = starter(w, i, sum == Sum::none);
    const uint64_t to = w.values<uint64_t>(i.operands[0])[lane] + uint64_t(i.offsets[0]);
    const uint32_t from = w.one(i.operands[1]) + uint32_t(i.offsets[1]), bytes = w.one(i.operands[2]);
    if (!bytes || bytes % word || to % word || from % word)
        w.fail(lane, format("copies %u bytes\n  fix: bytes and addresses that are multiples of 16", bytes));
    start_outward(w, lane, pieces_of(from, to, bytes), sum);
}

void commit(Warp &w, const Instruction &) {
    Warp::each_lane(w.active, [&](int l) { w.bulk_groups[l]++; });
}

// Waits until at most this number of the lane's latest groups are in flight; with `reads`, until the others have read shared memory. The interpreter
// lets a copy read as late as it may.
template <bool reads> void wait(Warp &w, const Instruction &i) {
    const int64_t pending = w.one(i.operands[0]);
    float done = 0;
    std::erase_if(w.outward, [&](const std::shared_ptr<BulkCopy> &c) {
        if (!(w.active >> c->lane & 1) || int64_t(c->group) >= int64_t(w.bulk_groups[c->lane]) - pending) return false;
        for (const Piece &p : c->pieces) {
            if (!c->has_read) {
                const uint8_t *from = bytes_at(*w.block->cluster, w.block->rank, p.shared);
                add_or_copy(c->sum, reinterpret_cast<uint8_t *>(p.global), from + p.from, size_t(p.to - p.from));
                end_async_read(w, p.shared, word, w.agent, w.time());
            }
            if (!reads) end_bulk_write(w, p.global, uint32_t(p.to - p.from));
        }
        if (!c->has_read) done = std::max(done, c->done + (reads ? 0 : l2_cycles));
        c->has_read = true;
        return !reads;
    });
    wait_until(w, done);
}
void nothing(Warp &, const Instruction &) {}

template <int rank> void add_boxes(Forms &forms) {
    const std::string name = format("async.bulk.tensor.%dd", rank), complete = ".mbarrier::complete_tx::bytes";
    std::vector<uint8_t> load = {4, 8}, store = {8};
    load.insert(load.end(), rank, 4), store.insert(store.end(), rank, 4);
    std::vector<uint8_t> prefetch = store;
    load.push_back(4), store.push_back(4);
    for (const char *to : {"shared::cluster", "shared"})
        forms["cp." + name + "." + to + ".global" + complete] = {load_box<rank, false>, Pipe::copy, 0, load};
    load.push_back(2);
    forms["cp." + name + ".shared::cluster.global" + complete + ".multicast::cluster"] = {load_box<rank, true>, Pipe::copy, 0,
                                                                                          load};
    forms["cp." + name + ".global.shared.bulk_group"] = {store_box<rank, false>, Pipe::copy, 0, store};
    forms["cp.reduce." + name + ".global.shared.add.bulk_group"] = {store_box<rank, true>, Pipe::copy, 0, store};
    forms[format("cp.async.bulk.prefetch.tensor.%dd.L2.global", rank)] = {nothing, Pipe::copy, 0, prefetch};
    if constexpr (rank < TensorMap::most_dimensions) add_boxes<rank + 1>(forms);
}
}  // namespace

void land(Cluster &cluster, size_t n) {
    const std::shared_ptr<BulkCopy> copy = cluster.inward[n];
    cluster.inward.erase(cluster.inward.begin() + long(n));
    Warp &w = *copy->warp;
    for (const BulkCopy::Target &target : copy->targets) {
        Block &block = cluster.blocks[target.rank];
        MBarrier &b = block.mbarriers.at(target.mbarrier);
        if (b.phase != target.phase) {
            w.instruction = copy->instruction;
            w.fail(copy->lane,
                   format("the transaction bytes at the mbarrier at %s do not add up: its phase %u has ended before this "
                          "copy of %zu bytes has landed\n  fix: arrivals that expect the bytes of all copies of a phase",
                          shared_text(target.mbarrier).c_str(), target.phase, copy->pieces.size() * word));
        }
        for (const Piece &p : copy->pieces) {
            uint8_t *const to = bytes_at(cluster, target.rank, p.shared);
            const unsigned home = uint32_t(p.global) >> 24 ? (uint32_t(p.global) >> 24) - 1 : w.block->rank;
            if (copy->between_blocks) memcpy(to, bytes_at(cluster, home, uint32_t(p.global)), word);
            else {
                memset(to, 0, word);
                memcpy(to + p.from, reinterpret_cast<const uint8_t *>(p.global), size_t(p.to - p.from));
            }
            note_async_landing(block, (p.shared & 0xff'ffff) - shared_base, word, b.agent, b.phase + 1);
        }
        complete_bytes(cluster, b, int64_t(copy->pieces.size() * word), copy->done);
    }
    if (copy->between_blocks)
        for (const Piece &p : copy->pieces) end_async_read(w, uint32_t(p.global), word, w.agent, w.time());
}

void check_bulk_copies(Warp &w, uint32_t leaving) {
    for (const std::shared_ptr<BulkCopy> &c : w.outward)
        if (leaving >> c->lane & 1 && !c->has_read)
            w.fail(c->lane,
                   format("returns before the copy of line %d has read shared memory\n  fix: commit_group and wait_group",
                          c->instruction->line));
}

void check_inward_copies(Block &block) {
    View view;
    for (const Warp &w : block.warps) view.join(w.view);
    for (const std::shared_ptr<BulkCopy> &c : block.cluster->inward)
        for (const BulkCopy::Target &target : c->targets)
            if (target.rank == block.rank)
                block.warps[0].fail(
                    0, format("the block ends before the copy of line %d to its shared memory has landed\n  fix: wait "
                              "for its mbarrier",
                              c->instruction->line));
    for (const Cell &cell : block.cells)
        if (cell.thread / lanes >= block.cluster->warps && cell.written > view.known.of(cell.thread / lanes))
            block.warps[0].fail(0,
                                format("the block ends, and none of its threads has waited for the copy of line %u", cell.line));
}

void add_bulk_copies(Forms &forms) {
    const std::string complete = ".mbarrier::complete_tx::bytes";
    for (const char *to : {"shared::cluster", "shared"})
        forms[std::string("cp.async.bulk.") + to + ".global" + complete] = {
            load_bytes<false, false>, Pipe::copy, 0, {4, 8, 4, 4}};
    forms["cp.async.bulk.shared::cluster.global" + complete + ".multicast::cluster"] = {
        load_bytes<false, true>, Pipe::copy, 0, {4, 8, 4, 4, 2}};
    forms["cp.async.bulk.shared::cluster.shared" + complete] = {load_bytes<true, false>, Pipe::copy, 0, {4, 4, 4, 4}};
    forms["cp.async.bulk.global.shared.bulk_group"] = {store_bytes<Sum::none>, Pipe::copy, 0, {8, 4, 4}};
    const std::string reduce = "cp.reduce.async.bulk.global.shared.bulk_group.add.";
    forms[reduce + "f32"] = {store_bytes<Sum::f32>, Pipe::copy, 0, {8, 4, 4}};
    forms[reduce + "noftz.f16"] = {store_bytes<Sum::f16>, Pipe::copy, 0, {8, 4, 4}};
    forms[reduce + "noftz.bf16"] = {store_bytes<Sum::bf16>, Pipe::copy, 0, {8, 4, 4}};
    forms[reduce + "s32"] = {store_bytes<Sum::s32>, Pipe::copy, 0, {8, 4, 4}};
    forms[reduce + "u32"] = {store_bytes<Sum::u32>, Pipe::copy, 0, {8, 4, 4}};
    forms["cp.async.bulk.prefetch.L2.global"] = {nothing, Pipe::copy, 0, {8, 4}};
    add_boxes<1>(forms);
    forms["cp.async.bulk.commit_group"] = {commit, Pipe::copy, 0, {}};
    forms["cp.async.bulk.wait_group"] = {wait<false>, Pipe::copy, 0, {4}};
    forms["cp.async.bulk.wait_group.read"] = {wait<true>, Pipe::copy, 0, {4}};
    for (const char *space : {"", ".param"}) forms[format("prefetch%s.tensormap", space)] = {nothing, Pipe::control, 0, {8}};
}
}  // namespace ptx
