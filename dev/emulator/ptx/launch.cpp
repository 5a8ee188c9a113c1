// Launches: runs the clusters of blocks one after another and sums their counts.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "execute.h"

namespace ptx {

DeviceMemory::Allocation DeviceMemory::at_or_before(uintptr_t address) const {
    auto after = allocations_.upper_bound(address);
    if (after == allocations_.begin()) return {};
    const auto found = std::prev(after);
    return {found->first, found->second};
}

void Count::operator+=(const Count &other) {
    executed += other.executed, threads += other.threads;
    requests += other.requests, sectors += other.sectors, lines += other.lines;
    shared_requests += other.shared_requests;
    wavefronts += other.wavefronts, least_wavefronts += other.least_wavefronts;
    flop += other.flop;
}
void Counts::multiply(double factor) {
    const auto grow = [&](auto &...numbers) { ((numbers = uint64_t(std::llround(double(numbers) * factor))), ...); };
    for (Count &c : instructions)
        grow(c.executed, c.threads, c.requests, c.sectors, c.lines, c.shared_requests, c.wavefronts, c.least_wavefronts);
    grow(barriers, divergent_branches, traffic.l2, traffic.bulk);
}
Count Counts::total() const {
    Count sum;
    for (const Count &c : instructions) sum += c;
    return sum;
}

std::array<Count, pipes> Counts::by_pipe(const Kernel &kernel) const {
    std::array<Count, pipes> sums;
    for (size_t n = 0; n < instructions.size(); n++) {
        Count &sum = sums[size_t(kernel.code[n].pipe)];
        sum += instructions[n];
        sum.flop += instructions[n].executed * kernel.code[n].flop;
    }
    return sums;
}

// Moves in nvcc's PTX are free: the machine code renames registers, and reads parameters as operands.
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
        const double work = double(c.executed) * double(i.work);
        if (i.pipe == Pipe::special) add(Unit::special, work), add(Unit::fp32, all - work);
        else if (!i.accumulators.empty()) add(Unit::wgmma, all * double(i.work));
        else if (unit_of[size_t(i.pipe)] != Unit::issue) add(unit_of[size_t(i.pipe)], all * double(i.work));
        add(Unit::access, double(c.requests) + double(c.shared_requests));
        add(Unit::shared, double(c.wavefronts) + double(c.lines));
    }
    return demand;
}

namespace {

// ---- the start of a block ---------------------------------------------------------------------------------------------------------

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
    if (name == "%cluster_ctarank") return block.rank;
    if (name == "%cluster_nctarank") return uint32_t(block.cluster->blocks.size());
    if (name == "%smid") return block.number % 132;
    if (name == "%nsmid") return 132;
    const unsigned wide = block.cluster->shape[axis];
    if (name.rfind("%cluster_ctaid", 0) == 0) return block.index[axis] % wide;
    if (name.rfind("%cluster_nctaid", 0) == 0) return wide;
    if (name.rfind("%clusterid", 0) == 0) return block.index[axis] / wide;
    if (name.rfind("%nclusterid", 0) == 0) return launch.grid[axis] / wide;
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
    w.block = &block, w.number = number, w.instruction = kernel.code.data(), w.registers_of_thread = kernel.registers;
    w.agent = block.rank * block.warps.size() + size_t(number);
    w.group = block.cluster->warps + block.rank * ceil_div(block.warps.size(), size_t(4)) + size_t(number) / 4;
    w.sync_lanes();
    if (kernel.uses_wgmma) w.uses.resize(size_t(kernel.slots));
    for (const Preset &p : kernel.presets)
        if (kernel.uses_wgmma) w.uses[size_t(p.slot)].constant = true;
    w.registers = block.registers + size_t(number) * size_t(kernel.slots) * slot_bytes;
    const unsigned threads = std::min(unsigned(launch.threads.count()) - unsigned(number) * lanes, unsigned(lanes));
    w.live = w.exist = threads == lanes ? ~0u : (1u << threads) - 1;
    w.paths = {{w.live, 0, int(kernel.code.size())}};
    for (const Preset &p : kernel.presets) preset(w, p);
    if (launch.count_memory) w.timing.ready.resize(size_t(kernel.slots)), w.looped.resize(size_t(kernel.looped));
}

// Returns a cluster at its start. `number` is its position in the grid; `started` clusters have started before it.
std::unique_ptr<Cluster> start_cluster(Running &running, const Extent &shape, size_t number, size_t started) {
    const Kernel &kernel = *running.kernel;
    const Launch &launch = *running.launch;
    auto cluster = std::make_unique<Cluster>();
    cluster->running = &running, cluster->shape = shape;
    cluster->blocks.resize(shape.count());
    const size_t warps = ceil_div(launch.threads.count(), size_t(lanes)), blocks = cluster->blocks.size();
    cluster->warps = warps * blocks;
    cluster->readers = cluster->agents = cluster->warps + ceil_div(warps, size_t(4)) * blocks;
    const size_t register_bytes = warps * size_t(kernel.slots) * slot_bytes;
    cluster->registers.reset(static_cast<uint8_t *>(aligned_alloc(slot_bytes, register_bytes * blocks)));
    memset(cluster->registers.get(), 0xff, register_bytes * blocks);  // NaN
    const size_t wide = launch.grid.x / shape.x, high = launch.grid.y / shape.y;
    for (size_t n = 0; n < blocks; n++) {
        Block &block = cluster->blocks[n];
        block.running = &running, block.cluster = cluster.get(), block.rank = unsigned(n);
        block.number = uint32_t(started * blocks + n + 1);
        block.index[0] = unsigned(number % wide) * shape.x + block.rank % shape.x;
        block.index[1] = unsigned(number / wide % high) * shape.y + block.rank / shape.x % shape.y;
        block.index[2] = unsigned(number / wide / high) * shape.z + block.rank / shape.x / shape.y;
        block.shared.assign(kernel.static_shared + launch.shared, 0xff);  // NaN
        block.local.assign(warps * lanes * kernel.local_bytes, 0xff);
        block.cells.resize(ceil_div(block.shared.size(), size_t(kernel.cell_bytes)));
        block.reads.resize(block.cells.size() * cluster->readers);
        block.registers = cluster->registers.get() + n * register_bytes;
        block.warps.resize(warps);
        for (size_t w = 0; w < warps; w++) start_warp(block, int(w));
    }
    return cluster;
}

std::vector<uint8_t> pack(const Kernel &kernel, const std::vector<const void *> &arguments) {
    if (arguments.size() != kernel.parameters.size())
        die("%s takes %zu arguments, not %zu", kernel.name.c_str(), kernel.parameters.size(), arguments.size());
    std::vector<uint8_t> packed(kernel.parameter_bytes);
    for (size_t n = 0; n < arguments.size(); n++)
        memcpy(packed.data() + kernel.parameters[n].offset, arguments[n], kernel.parameters[n].bytes);
    return packed;
}

Extent cluster_of(const Kernel &kernel, const Launch &launch) {
    const unsigned *own = kernel.cluster;
    return launch.cluster.count() ? launch.cluster : Extent{own[0], own[1], own[2]};
}

// Checks the limits of the CUDA Programming Guide, "Compute Capabilities".
void check(const Kernel &kernel, const Launch &launch) {
    const auto refuse = [&](const std::string &what, const std::string &fix) {
        die("%s does not start: %s\n  fix: %s", kernel.name.c_str(), what.c_str(), fix.c_str());
    };
    const Extent &grid = launch.grid, &threads = launch.threads;
    if (threads.count() < 1 || threads.count() > 1024 || threads.z > 64)
        refuse("blocks of " + threads.text() + " threads", "at most 1024, and 64 in z");
    if (grid.count() < 1 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        refuse("a grid of " + grid.text() + " blocks", "at most 2147483647 x 65535 x 65535, and one at least");
    const Extent cluster = cluster_of(kernel, launch);
    if (cluster.count() > 16 || grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z)
        refuse("clusters of " + cluster.text() + " blocks in a grid of " + grid.text(),
               "at most 8 blocks, or 16 where the kernel allows it, and a whole number of clusters");
    const uint32_t most_shared = max_shared_of(kernel.architecture);
    if (launch.shared + kernel.static_shared > most_shared)
        refuse(format("%zu bytes of shared memory a block, of which %zu are static", launch.shared + kernel.static_shared,
                      kernel.static_shared),
               format("at most %u on the GPU that the PTX is for", most_shared));
}

// During its lifetime, kernels may access the variables of the kernel's module.
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
    const ModuleMemory variables(kernel, memory);
    const Extent shape = cluster_of(kernel, launch);
    std::mt19937 random(1);
    Demand before{};
    const auto note_work = [&](const Cluster &cluster) {  // includes the work of clusters that it waited for
        const Demand now = counts.demand(kernel);
        for (const Block &block : cluster.blocks) {
            BlockWork &work = counts.blocks.emplace_back();
            for (size_t n = 0; n < units; n++) work.demand[n] = (now[n] - before[n]) / double(cluster.blocks.size());
            for (const Warp &w : block.warps) work.latency = std::max(work.latency, double(w.timing.begin));
        }
        before = now;
    };
    const size_t clusters = launch.grid.count() / shape.count();
    const size_t sample = launch.sample ? std::min(launch.sample, clusters) : clusters;
    const auto first_of = [&](size_t part) { return part * clusters / sample; };
    const auto drawn = [&](size_t part) { return first_of(part) + random() % (first_of(part + 1) - first_of(part)); };
    size_t next = drawn(0);
    std::map<size_t, std::unique_ptr<Cluster>> started;  // unfinished clusters, by position in the grid
    for (size_t ran = 0; ran < sample; ran++) {
        const size_t number = launch.last_first ? clusters - 1 - next : next;
        if (ran + 1 < sample) next = drawn(ran + 1);
        running.scale = double(clusters) / double(launch.sample ? ran + 1 : clusters);
        started[number] = start_cluster(running, shape, number, ran);
        for (auto at = started.begin(); at != started.end();) {
            const bool first = at == started.begin() && (!launch.last_first || ran + 1 == sample);  // of the unfinished ones
            if (!run_cluster(*at->second, random, !first)) {
                ++at;
                continue;
            }
            if (launch.count_memory) note_work(*at->second);
            started.erase(at);
            at = started.begin();
        }
    }
    const double clusters_of_one = double(clusters) / double(sample);
    counts.multiply(clusters_of_one);
    for (const auto &[begin, touched] : running.touched.all()) {  // skipped blocks may touch the same sectors
        const double most = double(touched.sectors.size()) * 32;
        counts.traffic.read += uint64_t(std::min(double(touched.read) * clusters_of_one, most));
        counts.traffic.written += uint64_t(std::min(double(touched.written) * clusters_of_one, most));
    }
    counts.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return counts;
}
}  // namespace ptx
