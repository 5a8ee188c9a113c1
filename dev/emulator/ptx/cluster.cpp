// Clusters of blocks, proxy fences, and the other small instructions that are new on sm_90.
#include "forms.h"
#include "shared_memory.h"

namespace ptx {
namespace {

void nothing(Warp &, const Instruction &) {}

// ---- the barrier of a cluster: arrive, and later wait -------------------------------------------------------------------------------

template <bool relaxed> void arrive(Warp &w, const Instruction &) {
    Cluster &cluster = *w.block->cluster;
    if (w.active != w.live) w.fail(std::countr_zero(w.active), format("a barrier for the lanes %#x of %#x", w.active, w.live));
    if (w.cluster_arrivals != w.cluster_waits) w.fail(0, "arrives at the cluster's barrier twice, with no wait in between");
    if (relaxed) cluster.now.announced.join(w.view.announced);
    else cluster.now.join(w.view);
    cluster.last = std::max(cluster.last, w.timing.now() + cluster_cycles);
    w.sync_lanes();
    w.cluster_arrivals++;
    cluster.events++;
}
// Threads that have returned count as arrived.
void wait(Warp &w, const Instruction &) {
    Cluster &cluster = *w.block->cluster;
    if (w.cluster_arrivals == w.cluster_waits) w.fail(0, "waits at the cluster's barrier without arriving at it");
    const Warp *late = nullptr;
    for (const Block &block : cluster.blocks)
        for (const Warp &other : block.warps)
            if (!other.paths.empty() && other.cluster_arrivals <= cluster.phase) late = &other;
    if (!late && w.cluster_arrivals > cluster.phase) {
        cluster.phase++, cluster.over = cluster.last, cluster.ended.join(cluster.now), cluster.now = View(), cluster.events++;
        w.block->running->counts->barriers++;
    }
    if (w.cluster_arrivals > cluster.phase)
        return w.stall([late] {
            return format("waits at the cluster's barrier for warp %d of block %u of the cluster", late->number,
                          late->block->rank);
        });
    w.cluster_waits = w.cluster_arrivals;
    wait_until(w, cluster.over);
    w.learn(cluster.ended);
}

// ---- addresses in other blocks ----------------------------------------------------------------------------------------------------

// d = the address in block b that corresponds to address a of the own block
template <class Address> void map_address(Warp &w, const Instruction &i) {
    const Address *a = w.values<Address>(i.operands[1]);
    alignas(64) Address d[lanes];
    Warp::each_lane(w.active, [&](int l) {
        const uint32_t rank = w.values<uint32_t>(i.operands[2])[l];
        if (rank >= w.block->cluster->blocks.size())
            w.fail(l, format("block %u of a cluster of %zu", rank, w.block->cluster->blocks.size()));
        d[l] = (a[l] & ~Address(0xff00'0000)) | Address(rank + 1) << 24;
    });
    w.write(i.operands[0], d);
}
template <class Address> void rank_of(Warp &w, const Instruction &i) {
    const Address *a = w.values<Address>(i.operands[1]);
    alignas(64) uint32_t d[lanes];
    for (int l = 0; l < lanes; l++) d[l] = uint32_t(a[l]) >> 24 ? (uint32_t(a[l]) >> 24) - 1 : w.block->rank;
    w.write(i.operands[0], d);
}

// ---- fences -----------------------------------------------------------------------------------------------------------------------

// Makes earlier writes through the generic proxy visible to the async proxy: this warp's, and those of other warps that happened before.
template <bool shared, bool global> void fence_proxy(Warp &w, const Instruction &) {
    if (shared) w.view.proxied.join(w.view.known);
    if (global) w.view.elsewhere_proxied.join(w.view.elsewhere);
    w.advance();
}
void fence_mbarriers(Warp &w, const Instruction &) {
    w.view.announced.join(w.view.known);
    w.advance();
}

// ---- warps ------------------------------------------------------------------------------------------------------------------------

// leader|p, mask: p is true in one of the lanes
void elect(Warp &w, const Instruction &i) {
    const uint32_t mask = w.one(i.operands[2]) & w.exist;
    if (mask != w.active)
        w.fail(std::countr_zero(w.active), format("the mask is %#x, but the lanes that are here are %#x", mask, w.active));
    const uint32_t leader = uint32_t(std::countr_zero(w.active));
    alignas(64) uint32_t d[lanes];
    std::fill(d, d + lanes, leader);
    w.write(i.operands[0], d);
    w.write_predicate(i.operands[1], 1u << leader);
}

// setmaxnreg: a warpgroup releases or takes registers. An increase waits until the block has enough free registers. If no directive determines the
// registers of a thread at the start, ptxas drops the instruction, with the remark C7508.
template <bool more> void set_registers(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    const uint32_t n = w.one(i.operands[0]), before = w.registers_of_thread;
    if (n < 24 || n > 256 || n % 8) w.fail(0, format("setmaxnreg %u\n  fix: use a multiple of 8 from 24 to 256", n));
    if (!before) return;
    if (more ? n < before : n > before)
        w.fail(0, format("setmaxnreg.%s to %u registers from %u", more ? "inc" : "dec", n, before));
    const std::vector<Warp> &warps = w.block->warps;
    uint32_t all = n;
    for (const Warp &other : warps)
        if (&other != &w) all += other.registers_of_thread;
    const uint32_t of_block =
        w.block->running->kernel->registers * uint32_t(warps.size());  // per lane; the block gets no registers from elsewhere
    if (more && all > of_block)
        return w.stall([n, all, of_block] {
            return format("setmaxnreg waits for %u registers a thread: the block would have %u of %u", n, all * lanes,
                          of_block * lanes);
        });
    float &given_back = w.block->given_back;
    if (more) wait_until(w, given_back);
    else given_back = std::max(given_back, w.timing.now());
    w.registers_of_thread = n;
    w.block->cluster->events++;
}

// [address], {r, ...}: the reverse of ldmatrix
template <int matrices, bool transposed> void store_matrices(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    alignas(64) uint32_t address[lanes] = {};
    for (int l = 0; l < 8 * matrices; l++) {
        address[l] = w.values<uint32_t>(i.operands[0])[l] + uint32_t(i.offsets[0]);
        uint16_t row[8];
        for (int c = 0; c < 8; c++) {
            const int holder = transposed ? c * 4 + l % 8 / 2 : l % 8 * 4 + c / 2, half = transposed ? l % 2 : c % 2;
            row[c] = uint16_t(w.values<uint32_t>(i.operands[1 + l / 8])[holder] >> (16 * half));
        }
        memcpy(shared_place(w, l, address[l], 16), row, 16);
        note_write(w, l, address[l], 16);
    }
    if (w.block->running->launch->count_memory) count_wavefronts(w, address, matrices == 4 ? ~0u : (1u << 8 * matrices) - 1, 16);
}
template <int matrices> void add_stmatrix(Forms &forms) {
    const std::vector<uint8_t> widths(matrices + 1, 4);
    const std::string name = format("stmatrix.sync.aligned.m8n8.x%d", matrices);
    forms[name + ".shared.b16"] = {store_matrices<matrices, false>, Pipe::shared, 0, widths};
    forms[name + ".trans.shared.b16"] = {store_matrices<matrices, true>, Pipe::shared, 0, widths};
}
}  // namespace

void add_clusters(Forms &forms) {
    for (const char *order : {"", ".release"})
        forms[format("bar.cluster.arrive%s", order)] = {arrive<false>, Pipe::control, 0, {}};
    forms["bar.cluster.arrive.relaxed"] = {arrive<true>, Pipe::control, 0, {}};
    for (const char *order : {"", ".acquire"}) forms[format("bar.cluster.wait%s", order)] = {wait, Pipe::control, 0, {}};
    forms["mapa.shared::cluster.u32"] = {map_address<uint32_t>, Pipe::integer, 1, {4, 4, 4}};
    forms["mapa.u64"] = {map_address<uint64_t>, Pipe::integer, 1, {8, 8, 4}};
    forms["getctarank.shared::cluster.u32"] = {rank_of<uint32_t>, Pipe::integer, 1, {4, 4}};
    forms["getctarank.u64"] = {rank_of<uint64_t>, Pipe::integer, 1, {4, 8}};

    forms["fence.proxy.async"] = {fence_proxy<true, true>, Pipe::control, 0, {}};
    for (const char *space : {"shared", "shared::cluster"})
        forms[format("fence.proxy.async.%s", space)] = {fence_proxy<true, false>, Pipe::control, 0, {}};
    forms["fence.proxy.async.global"] = {fence_proxy<false, true>, Pipe::control, 0, {}};
    forms["fence.mbarrier_init.release.cluster"] = {fence_mbarriers, Pipe::control, 0, {}};
    for (const char *what : {"wait", "launch_dependents"})  // launches run one after another
        forms[format("griddepcontrol.%s", what)] = {nothing, Pipe::control, 0, {}};

    forms["elect.sync"] = {elect, Pipe::warp, 2, {4, 0, 4}};
    forms["setmaxnreg.inc.sync.aligned.u32"] = {set_registers<true>, Pipe::control, 0, {4}};
    forms["setmaxnreg.dec.sync.aligned.u32"] = {set_registers<false>, Pipe::control, 0, {4}};
    forms["nanosleep.u32"] = {nothing, Pipe::control, 0, {4}};
    add_stmatrix<1>(forms), add_stmatrix<2>(forms), add_stmatrix<4>(forms);
}
}  // namespace ptx
