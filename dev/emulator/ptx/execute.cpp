// Launches: blocks one after the other, their warps in turn until each waits at a barrier, a warp's lanes in lockstep.
#include <algorithm>
#include <chrono>
#include <random>

#include "warp.h"

namespace ptx {

DeviceMemory::Allocation DeviceMemory::at_or_before(uintptr_t address) const {
    auto after = allocations_.upper_bound(address);
    if (after == allocations_.begin()) return {};
    const auto found = std::prev(after);
    return {found->first, found->second};
}

void Count::operator+=(const Count &other) {
    executed += other.executed, threads += other.threads;
    requests += other.requests, sectors += other.sectors;
    wavefronts += other.wavefronts, least_wavefronts += other.least_wavefronts;
}
Count Counts::total() const {
    Count sum;
    for (const Count &c : instructions) sum += c;
    return sum;
}

std::array<Count, pipes> Counts::by_pipe(const Kernel &kernel) const {
    std::array<Count, pipes> sums;
    for (size_t n = 0; n < instructions.size(); n++) sums[size_t(kernel.code[n].pipe)] += instructions[n];
    return sums;
}

// nvcc's moves cost nothing: the machine code renames registers, and reads parameters as operands.
Demand Counts::demand(const Kernel &kernel) const {
    static constexpr Unit unit_of[pipes] = {Unit::issue,   Unit::integer, Unit::fp32,  Unit::fp64,  Unit::special, Unit::tensor,
                                            Unit::convert, Unit::issue,   Unit::issue, Unit::issue, Unit::issue,   Unit::issue};
    Demand demand{};
    const auto add = [&](Unit unit, double n) { demand[size_t(unit)] += n; };
    for (size_t n = 0; n < instructions.size(); n++) {
        const Count &c = instructions[n];
        const Instruction &i = kernel.code[n];
        if (!c.executed || i.pipe == Pipe::move) continue;
        const double all = double(c.executed) * i.machine;
        add(Unit::issue, all);
        if (i.pipe == Pipe::special) add(Unit::special, double(c.executed)), add(Unit::fp32, all - double(c.executed));
        else if (unit_of[size_t(i.pipe)] != Unit::issue) add(unit_of[size_t(i.pipe)], all);
        add(Unit::shared, double(c.wavefronts) + double(c.sectors) / 4);
    }
    return demand;
}

// x runs fastest, also over the lanes of a warp.
Extent Block::thread(int number) const {
    const Extent &all = running->launch->threads;
    const unsigned n = unsigned(number);
    return {n % all.x, n / all.x % all.y, n / all.x / all.y};
}

Count &Warp::count() const {
    const Running &r = *block->running;
    return r.counts->instructions[size_t(instruction - r.kernel->code.data())];
}

void Warp::fail(int lane, const std::string &what) const {
    const Running &r = *block->running;
    const Extent &grid = r.launch->grid, &threads = r.launch->threads, at = block->thread(number * lanes + lane);
    const std::string thread = threads.y * threads.z == 1 ? std::to_string(at.x) : format("(%u,%u,%u)", at.x, at.y, at.z);
    die("%s\n  line %d of the PTX: %s\n  block (%u,%u,%u), thread %s of %s, launched as %u x %u x %u blocks of %s threads",
        what.c_str(), instruction->line, r.kernel->text[size_t(instruction - r.kernel->code.data())].c_str(), block->index[0],
        block->index[1], block->index[2], thread.c_str(), r.kernel->name.c_str(), grid.x, grid.y, grid.z, threads.text().c_str());
}

void Warp::need_all_lanes() const {
    if (active != ~0u) fail(0, format("only the lanes %#x are here", active));
}

namespace {

// ---- a warp -----------------------------------------------------------------------------------------------------------------------

// The taken and the fall-through path run one after the other, up to the instruction where both join.
void branch(Warp &w, const Instruction &i, uint32_t taken) {
    Path &path = w.paths.back();
    if (taken == path.mask) path.at = i.target;
    else if (!taken) path.at++;
    else {
        w.block->running->counts->divergent_branches++;
        const Path jump{taken, i.target, i.join}, fall{path.mask & ~taken, path.at + 1, i.join};
        if (path.join == i.join && w.paths.size() > 1) w.paths.pop_back();  // a loop that lanes leave one by one
        else path.at = i.join;
        w.paths.push_back(jump.at > fall.at ? jump : fall);
        w.paths.push_back(jump.at > fall.at ? fall : jump);
    }
}

void leave(Warp &w, uint32_t mask) {
    w.live &= ~mask;
    for (Path &path : w.paths) path.mask &= ~mask;
    for (const Copy &copy : w.copies)
        if (mask >> copy.lane & 1) w.fail(copy.lane, "returns before its cp.async has landed");
}

int uniform(const Warp &w, int slot) {  // an operand that all lanes must have in common
    const uint32_t *values = const_cast<Warp &>(w).values<uint32_t>(slot), first = values[std::countr_zero(w.active)];
    Warp::each_lane(w.active, [&](int l) {
        if (values[l] != first) w.fail(l, "the lanes differ");
    });
    return int(first);
}

void join(Clock &clock, const Clock &other) {
    for (size_t n = 0; n < clock.size(); n++) clock[n] = std::max(clock[n], other[n]);
}

// What bar.red tells every thread of the votes of all.
void write_reduction(Warp &w, const Barrier &barrier) {
    const Instruction &i = *w.instruction;
    if (i.reduction == Reduction::popc) {
        alignas(64) uint32_t result[lanes];
        std::fill(result, result + lanes, uint32_t(barrier.votes));
        w.write(i.operands[3], result);
    } else if (i.reduction != Reduction::none) {
        const bool holds = i.reduction == Reduction::all ? barrier.votes == barrier.voters : barrier.votes > 0;
        w.write_predicate(i.operands[3], holds ? ~0u : 0);
    }
}

// The warp arrives, and waits unless it is bar.arrive. The last arrival wakes the waiting warps.
void arrive(Warp &w, const Instruction &i) {
    Block &block = *w.block;
    if (w.active != w.live) w.fail(std::countr_zero(w.active), format("a barrier for the lanes %#x of %#x", w.active, w.live));
    const int id = uniform(w, i.operands[0]), all = int(block.warps.size()) * lanes;
    const int expected = i.reads > 1 ? uniform(w, i.operands[1]) : all;
    if (id < 0 || id > 15 || expected <= 0 || expected % lanes || expected > all)
        w.fail(0, format("barrier %d for %d threads of %d", id, expected, all));
    Barrier &barrier = block.barriers[id];
    if (!barrier.arrived) barrier = {0, expected, Clock(block.warps.size()), 0, 0};
    if (barrier.expected != expected) w.fail(0, format("barrier %d for %d threads and for %d", id, barrier.expected, expected));
    Clock &own = block.clocks[size_t(w.number)];
    join(barrier.clock, own);
    own[size_t(w.number)]++;
    barrier.arrived += lanes;
    if (i.reduction != Reduction::none)
        barrier.voters += std::popcount(w.active), barrier.votes += std::popcount(w.active & w.predicate(i.operands[2]));
    if (i.control == Control::barrier) w.waits_at = id;
    if (barrier.arrived < expected) return;
    block.running->counts->barriers++;
    barrier.arrived = 0;
    for (Warp &other : block.warps)
        if (other.waits_at == id) {
            other.waits_at = -1;
            write_reduction(other, barrier);
            join(block.clocks[size_t(other.number)], barrier.clock);
        }
}

// Until it waits or has returned.
void run_warp(Warp &w) {
    const Kernel &kernel = *w.block->running->kernel;
    Count *const counts = w.block->running->counts->instructions.data();
    while (!w.paths.empty() && w.waits_at < 0) {
        Path &path = w.paths.back();
        if (!path.mask || (path.at == path.join && w.paths.size() > 1)) {
            w.paths.pop_back();
            continue;
        }
        const Instruction &i = kernel.code[size_t(path.at)];
        w.instruction = &i;
        w.active = path.mask;
        if (i.guard >= 0) w.active &= i.guard_negated ? ~w.predicate(i.guard) : w.predicate(i.guard);
        Count &count = counts[path.at];
        count.executed++, count.threads += uint64_t(std::popcount(i.control == Control::branch ? path.mask : w.active));
        if (i.control == Control::branch) {
            branch(w, i, w.active);
            continue;
        }
        path.at++;
        if (!w.active) continue;
        if (i.control == Control::none) i.run(w, i);
        else if (i.control == Control::leave) leave(w, w.active);
        else arrive(w, i);
    }
}

// ---- a block ----------------------------------------------------------------------------------------------------------------------

uint32_t special(const Block &block, const std::string &name, int warp, int lane) {
    const Launch &launch = *block.running->launch;
    const int axis = name.back() - 'x';
    const uint32_t own = 1u << lane;
    if (name == "%laneid") return uint32_t(lane);
    if (name == "%warpid") return uint32_t(warp);
    if (name == "%nwarpid") return uint32_t(block.warps.size());
    if (name == "WARP_SZ") return lanes;
    if (name == "%lanemask_eq") return own;
    if (name == "%lanemask_lt") return own - 1;
    if (name == "%lanemask_le") return own | (own - 1);
    if (name == "%lanemask_gt") return ~(own | (own - 1));
    if (name == "%lanemask_ge") return ~(own - 1);
    if (name == "%dynamic_smem_size") return uint32_t(launch.shared);
    if (name.rfind("%tid", 0) == 0) return block.thread(warp * lanes + lane)[axis];
    if (name.rfind("%ntid", 0) == 0) return launch.threads[axis];
    return name.rfind("%ctaid", 0) == 0 ? block.index[axis] : launch.grid[axis];
}

void preset(Warp &w, const Preset &p) {
    for (int l = 0; l < lanes; l++) {
        const uint64_t bits = p.special.empty() ? p.bits : special(*w.block, p.special, w.number, l);
        if (p.bytes == 8) w.values<uint64_t>(p.slot)[l] = bits;
        else if (p.bytes == 2) w.values<uint16_t>(p.slot)[l] = uint16_t(bits);
        else w.values<uint32_t>(p.slot)[l] = uint32_t(bits);
    }
}

void start_warp(Block &block, int number) {
    const Launch &launch = *block.running->launch;
    const Kernel &kernel = *block.running->kernel;
    Warp &w = block.warps[size_t(number)];
    w = Warp();
    w.block = &block, w.number = number, w.instruction = kernel.code.data();
    w.registers = block.registers + size_t(number) * size_t(kernel.slots) * slot_bytes;
    const unsigned threads = std::min(unsigned(launch.threads.count()) - unsigned(number) * lanes, unsigned(lanes));
    w.live = w.exist = threads == lanes ? ~0u : (1u << threads) - 1;
    w.paths = {{w.live, 0, int(kernel.code.size())}};
    for (const Preset &p : kernel.presets) preset(w, p);
}

void start_block(Block &block) {
    const size_t warps = block.warps.size(), cells = ceil_div(block.shared.size(), size_t(block.running->kernel->cell_bytes));
    std::fill(block.shared.begin(), block.shared.end(), 0xff);  // NaN
    std::fill(block.local.begin(), block.local.end(), 0xff);
    block.cells.assign(cells, Cell());
    block.reads.assign(cells * warps, 0);
    block.clocks.assign(warps, Clock(warps));
    for (Barrier &barrier : block.barriers) barrier = Barrier();
    for (size_t n = 0; n < warps; n++) block.clocks[n][n] = 1, start_warp(block, int(n));
}

void run_block(Block &block, std::mt19937 &random) {
    start_block(block);
    std::vector<Warp *> order;
    for (Warp &w : block.warps) order.push_back(&w);
    const auto ran = [](const Warp *w) { return w->paths.empty(); };
    while (!std::all_of(order.begin(), order.end(), ran)) {
        std::shuffle(order.begin(), order.end(), random);
        bool progress = false;
        for (Warp *w : order)
            if (!w->paths.empty() && w->waits_at < 0) run_warp(*w), progress = true;
        if (progress) continue;
        for (Warp *w : order)
            if (!w->paths.empty()) w->fail(0, format("waits at barrier %d for threads that do not come", w->waits_at));
    }
}

std::vector<uint8_t> pack(const Kernel &kernel, const std::vector<const void *> &arguments) {
    if (arguments.size() != kernel.parameters.size())
        die("%s takes %zu arguments, not %zu", kernel.name.c_str(), kernel.parameters.size(), arguments.size());
    std::vector<uint8_t> packed(kernel.parameter_bytes);
    for (size_t n = 0; n < arguments.size(); n++)
        memcpy(packed.data() + kernel.parameters[n].offset, arguments[n], kernel.parameters[n].bytes);
    return packed;
}

// What the CUDA Programming Guide allows, "Compute Capabilities".
void check(const Kernel &kernel, const Launch &launch) {
    const auto refuse = [&](const std::string &what, const std::string &fix) {
        die("%s does not start: %s\n  fix: %s", kernel.name.c_str(), what.c_str(), fix.c_str());
    };
    const Extent &grid = launch.grid, &threads = launch.threads;
    if (threads.count() < 1 || threads.count() > 1024 || threads.z > 64)
        refuse("blocks of " + threads.text() + " threads", "at most 1024, and 64 in z");
    if (grid.count() < 1 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        refuse("a grid of " + grid.text() + " blocks", "at most 2147483647 x 65535 x 65535, and one at least");
    if (launch.shared + kernel.static_shared > kernel.max_shared)
        refuse(format("%zu bytes of shared memory a block, of which %zu are static", launch.shared + kernel.static_shared,
                      kernel.static_shared),
               format("at most %u on the GPU that the PTX is for", kernel.max_shared));
}

// While it lives, the variables of the kernel's module are memory that kernels may touch.
class ModuleMemory {
  public:
    ModuleMemory(const Kernel &kernel, DeviceMemory &memory) : kernel_(kernel), memory_(memory) {
        for (const Variable *v : kernel.variables) memory.add(v->memory.get(), v->bytes);
    }
    ~ModuleMemory() {
        for (const Variable *v : kernel_.variables) memory_.remove(v->memory.get());
    }

  private:
    const Kernel &kernel_;
    DeviceMemory &memory_;
};
}  // namespace

Counts run(const Kernel &kernel, const Launch &launch, const std::vector<const void *> &arguments, DeviceMemory &memory) {
    check(kernel, launch);
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<uint8_t> parameters = pack(kernel, arguments);
    Counts counts;
    counts.instructions.resize(kernel.code.size());
    Running running{&kernel, &launch, &memory, &parameters, &counts};
    Block block;
    block.running = &running;
    block.shared.resize(kernel.static_shared + launch.shared);
    block.warps.resize(ceil_div(launch.threads.count(), size_t(lanes)));
    block.local.resize(block.warps.size() * lanes * kernel.local_bytes);
    const ModuleMemory variables(kernel, memory);
    const size_t register_bytes = block.warps.size() * size_t(kernel.slots) * slot_bytes;
    const std::unique_ptr<uint8_t, decltype(&free)> registers(static_cast<uint8_t *>(aligned_alloc(slot_bytes, register_bytes)),
                                                              free);
    memset(registers.get(), 0xff, register_bytes);  // NaN
    block.registers = registers.get();
    std::mt19937 random(1);
    Demand before{};
    for (auto &[x, y, z] = block.index; z < launch.grid.z; z++)
        for (y = 0; y < launch.grid.y; y++)
            for (x = 0; x < launch.grid.x; x++) {
                block.number++;
                run_block(block, random);
                if (!launch.count_memory) continue;
                const Demand now = counts.demand(kernel);
                Demand &of_block = counts.demands.emplace_back();
                for (size_t n = 0; n < units; n++) of_block[n] = now[n] - before[n];
                before = now;
            }
    counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return counts;
}
}  // namespace ptx
