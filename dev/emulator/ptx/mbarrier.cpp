#include "mbarrier.h"

#include "forms.h"
#include "shared_memory.h"

namespace ptx {
namespace {

constexpr int64_t most_bytes = (1 << 20) - 1;  // the largest count of an mbarrier
constexpr uint32_t most_arrivals = most_bytes;

// Ends the phase if no arrival and no byte is pending.
void end_phase(Cluster &cluster, MBarrier &b) {
    if (b.pending || b.expected != b.arrived) return;
    b.phase++;
    b.over = b.last;
    b.pending = b.count, b.expected = b.arrived = 0;
    b.now.known.set(b.agent, b.phase);  // a warp that waits for this phase learns of its copies
    b.ended.join(b.now);
    cluster.events++;
}

std::string state_of(const MBarrier &b) {
    std::string text = format("phase %u of it has %d of %d arrivals", b.phase, b.count - b.pending, b.count);
    if (b.expected != b.arrived || b.expected)
        text += format(" and %lld bytes of the %lld that arrivals expect", static_cast<long long>(b.arrived),
                       static_cast<long long>(b.expected));
    return text;
}

uint32_t address_of(Warp &w, const Instruction &i, int operand, int lane) {
    return w.values<uint32_t>(i.operands[operand])[lane] + uint32_t(i.offsets[0]);
}

void expect_bytes(Warp &w, int lane, MBarrier &b, uint32_t bytes) {
    b.expected += bytes;
    if (b.expected - b.arrived > most_bytes)
        w.fail(lane, format("%lld bytes expected at an mbarrier\n  fix: at most %lld", static_cast<long long>(b.expected),
                            static_cast<long long>(most_bytes)));
}

// [address], arrivals of a phase
void initialise(Warp &w, const Instruction &i) {
    Cluster &cluster = *w.block->cluster;
    Warp::each_lane(w.active, [&](int l) {
        const uint32_t address = address_of(w, i, 0, l), count = w.values<uint32_t>(i.operands[1])[l];
        shared_place(w, l, address, 8);
        if (&place_of(w, l, address).block != w.block) w.fail(l, "initialises an mbarrier of another block");
        if (count < 1 || count > most_arrivals) w.fail(l, format("an mbarrier for %u arrivals", count));
        if (w.block->mbarriers.count(address & 0xff'ffff)) w.fail(l, shared_text(address) + " is an mbarrier already");
        note_write(w, l, address, 8);
        note_mbarrier(w, l, address, true);
        MBarrier &b = w.block->mbarriers[address & 0xff'ffff];
        b.agent = cluster.agents++;
        b.initialiser = w.agent, b.initialised = w.time();
        b.count = b.pending = int(count);
    });
}
void invalidate(Warp &w, const Instruction &i) {
    Warp::each_lane(w.active, [&](int l) {
        const uint32_t address = address_of(w, i, 0, l);
        if (mbarrier_at(w, l, address).expected) w.fail(l, "ends an mbarrier that copies are to complete on");
        w.block->mbarriers.erase(address & 0xff'ffff);
        note_mbarrier(w, l, address, false);
    });
}

enum class Arrival { counted, expecting, dropping };

// {state,} [address] {, arrivals or bytes}; `relaxed` publishes none of this warp's earlier accesses.
template <Arrival arrival, bool returns, bool argument, bool relaxed> void arrive(Warp &w, const Instruction &i) {
    alignas(64) uint64_t state[lanes] = {};
    Warp::each_lane(w.active, [&](int l) {
        const uint32_t address = address_of(w, i, returns, l);
        MBarrier &b = mbarrier_at(w, l, address);
        const uint32_t n = argument ? w.values<uint32_t>(i.operands[returns + 1])[l] : 1;
        const int arrivals = arrival == Arrival::expecting ? 1 : int(n);
        state[l] = b.phase;
        if (arrival == Arrival::expecting) expect_bytes(w, l, b, n);
        if (arrivals > b.pending)
            w.fail(l, format("arrives at the mbarrier at %s more often than the %d times of its initialisation",
                             shared_text(address).c_str(), b.count));
        if (relaxed) b.now.announced.join(w.view.announced);
        else b.now.join(w.view);
        if (arrival == Arrival::dropping) b.count -= arrivals;
        b.pending -= arrivals;
        b.last = std::max(b.last, w.timing.now() + (&place_of(w, l, address).block == w.block ? 0 : cluster_cycles));
        w.block->cluster->events++;
        end_phase(*w.block->cluster, b);
    });
    w.advance();
    if (returns) w.write(i.operands[0], state);
}
// [address], bytes
template <bool expects> void change_bytes(Warp &w, const Instruction &i) {
    Warp::each_lane(w.active, [&](int l) {
        MBarrier &b = mbarrier_at(w, l, address_of(w, i, 0, l));
        const uint32_t bytes = w.values<uint32_t>(i.operands[1])[l];
        if (expects) expect_bytes(w, l, b, bytes);
        else complete_bytes(*w.block->cluster, b, bytes, w.timing.now());
    });
}

// p, [address], the phase's parity or a state {, time limit}. The warp waits until the phase requested by one of its lanes has ended.
template <bool parity, bool relaxed> void wait(Warp &w, const Instruction &i) {
    uint32_t done = 0;
    int lane = 0;
    float ended = 0;
    const MBarrier *lacking = nullptr;
    Warp::each_lane(w.active, [&](int l) {
        const uint32_t address = address_of(w, i, 1, l);
        if (&place_of(w, l, address).block != w.block) w.fail(l, "waits at an mbarrier of another block");
        const MBarrier &b = mbarrier_at(w, l, address);
        const bool over = parity ? (b.phase & 1) != (w.values<uint32_t>(i.operands[2])[l] & 1)
                                 : b.phase != uint32_t(w.values<uint64_t>(i.operands[2])[l]);
        if (!over) lacking = &b, lane = l;
        else {
            done |= 1u << l;
            ended = std::max(ended, b.over);
            if (!relaxed) w.learn(b.ended);
        }
    });
    if (!done && !std::exchange(w.expired, false))
        return w.stall([&w, lacking, address = address_of(w, i, 1, lane)] {
            return format("waits for the mbarrier at %s: %s", shared_text(address).c_str(), state_of(*lacking).c_str());
        });
    if (done) wait_until(w, ended), w.block->cluster->events++;
    w.write_predicate(i.operands[0], done);
}
}  // namespace

MBarrier &mbarrier_at(Warp &w, int lane, uint32_t address) {
    Block &block = place_of(w, lane, address).block;
    const uint32_t own = address & 0xff'ffff;
    const auto found = block.mbarriers.find(own);
    if (found == block.mbarriers.end()) w.fail(lane, "no mbarrier has been initialised at " + shared_text(address));
    MBarrier &b = found->second;
    if (b.initialiser != w.agent && b.initialised > w.view.known.of(b.initialiser) &&
        b.initialised > w.view.announced.of(b.initialiser))
        w.fail(lane, format("the mbarrier at %s is initialised by another warp, with no barrier in between",
                            shared_text(address).c_str()));
    return b;
}

MBarrier &mbarrier_of_copy(Warp &w, int lane, uint32_t address) {
    MBarrier &b = mbarrier_at(w, lane, address);
    if (b.initialised > w.view.proxied.of(b.initialiser) && b.initialised > w.view.announced.of(b.initialiser))
        w.fail(lane, format("a copy is to complete on the mbarrier at %s, which was initialised with no fence.mbarrier_init or "
                            "fence.proxy.async in between",
                            shared_text(address).c_str()));
    return b;
}

void complete_bytes(Cluster &cluster, MBarrier &b, int64_t bytes, float cycle) {
    b.arrived += bytes;
    b.last = std::max(b.last, cycle);
    cluster.events++;
    end_phase(cluster, b);
}

void add_mbarriers(Forms &forms) {
    forms["mbarrier.init 2"] = {initialise, Pipe::shared, 0, {4, 4}};
    forms["mbarrier.inval 1"] = {invalidate, Pipe::shared, 0, {4}};
    const auto add = [&]<bool relaxed>(const std::string &order) {
        using enum Arrival;
        forms["mbarrier.arrive" + order + " 2"] = {arrive<counted, true, false, relaxed>, Pipe::shared, 1, {8, 4}};
        forms["mbarrier.arrive" + order + " 3"] = {arrive<counted, true, true, relaxed>, Pipe::shared, 1, {8, 4, 4}};
        forms["mbarrier.arrive_drop" + order + " 2"] = {arrive<dropping, true, false, relaxed>, Pipe::shared, 1, {8, 4}};
        forms["mbarrier.arrive_drop" + order + " 3"] = {arrive<dropping, true, true, relaxed>, Pipe::shared, 1, {8, 4, 4}};
        forms["mbarrier.arrive.expect_tx" + order + " 3"] = {arrive<expecting, true, true, relaxed>, Pipe::shared, 1, {8, 4, 4}};
        for (const char *way : {"try", "test"}) {
            const std::string name = format("mbarrier.%s_wait", way);
            for (const int n : {3, 4}) {
                std::vector<uint8_t> by_parity = {0, 4, 4}, by_state = {0, 4, 8};
                if (n == 4) by_parity.push_back(4), by_state.push_back(4);
                forms[name + ".parity" + order + format(" %d", n)] = {wait<true, relaxed>, Pipe::shared, 1, by_parity};
                forms[name + order + format(" %d", n)] = {wait<false, relaxed>, Pipe::shared, 1, by_state};
            }
        }
    };
    add.operator()<false>(""), add.operator()<true>(".relaxed");
    for (const char *order : {"", ".relaxed"}) {
        forms[format("mbarrier.expect_tx%s 2", order)] = {change_bytes<true>, Pipe::shared, 0, {4, 4}};
        forms[format("mbarrier.complete_tx%s 2", order)] = {change_bytes<false>, Pipe::shared, 0, {4, 4}};
    }
}
}  // namespace ptx
