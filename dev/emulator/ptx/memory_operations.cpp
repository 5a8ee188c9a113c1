// Loads, stores, atomics, cp.async and ldmatrix. Each address is checked before the host accesses it.
#include <algorithm>

#include "../../../llmc/core/dtype.h"
#include "../transactions.h"
#include "device_memory.h"
#include "forms.h"
#include "memory.h"
#include "shared_memory.h"

namespace ptx {
namespace {

enum class Space { global, constant, shared, cluster, local, param, generic };

// ---- the space of an address ------------------------------------------------------------------------------------------------------

uint8_t *global_place(Warp &w, int lane, uint64_t address, uint32_t bytes) {
    DeviceMemory::Allocation &last = w.block->running->last;  // most accesses hit the previous access's allocation
    if (!last.holds(address, bytes)) last = w.block->running->memory->at_or_before(address);
    if (!last.holds(address, bytes)) w.fail(lane, format("%u bytes at ", bytes) + describe(w, address));
    if (address % bytes) w.fail(lane, describe(w, address) + format(" is not aligned to %u", bytes));
    return reinterpret_cast<uint8_t *>(address);
}

uint8_t *param_place(Warp &w, int lane, uint64_t address, uint32_t bytes) {
    const std::vector<uint8_t> &parameters = *w.block->running->parameters;
    const uint64_t at = address - param_window;
    if (at >= parameters.size() || at + bytes > parameters.size())
        w.fail(lane, format("%u bytes at %zd of %zu bytes of parameters", bytes, ssize_t(at), parameters.size()));
    if (at % bytes) w.fail(lane, format("byte %zu of the parameters is not aligned to %u", size_t(at), bytes));
    return const_cast<uint8_t *>(parameters.data()) + at;
}

uint8_t *local_place(Warp &w, int lane, uint64_t address, uint32_t bytes) {
    const size_t own = w.block->running->kernel->local_bytes;
    const uint64_t at = address - local_window;
    if (at >= own || at + bytes > own)
        w.fail(lane, format("%u bytes at %zd of local memory, of which a thread has %zu", bytes, ssize_t(at), own));
    if (at % bytes) w.fail(lane, format("byte %zu of local memory is not aligned to %u", size_t(at), bytes));
    return w.block->local.data() + size_t(w.number * lanes + lane) * own + at;
}

// The path of an access. L1 holds the sectors that the block has read; writes go through to L2, and atomics are executed in L2.
enum class Way { read, read_past_l1, write, update };
constexpr bool stores(Way way) { return way == Way::write || way == Way::update; }

void count_traffic(Warp &w, uint64_t sector, Way way) {
    constexpr uint64_t bytes = 32;
    Running &r = *w.block->running;
    if (!r.last.holds(sector * bytes, 1) && !r.last.holds(sector * bytes + bytes - 1, 1))
        r.last = r.memory->at_or_before(sector * bytes + bytes - 1);
    TouchedSectors::Touched &of_allocation = r.touched.in(r.last);
    TouchedSectors::Sector &touched = of_allocation.sectors[sector - r.last.begin / bytes];
    const bool in_l2 = touched.read || touched.written, in_l1 = way == Way::read && touched.block == w.block->number;
    if (way != Way::write) {
        if (!in_l2) of_allocation.read += bytes;
        // Another block may already have loaded the sector into L2. In a sample of blocks that is only known on average, from the reads per byte.
        // Blocks that all run at once wait for the same bytes together.
        constexpr size_t threads_at_once = 132 * 2048;  // of an H100
        const bool at_once = r.launch->grid.count() * r.launch->threads.count() <= threads_at_once;
        const double bytes_there = double(of_allocation.sectors.size() * bytes);
        const float share = at_once ? 1 : float(std::min(1.0, bytes_there / (double(of_allocation.read) * r.scale)));
        const float dram = l2_cycles + share * (dram_cycles - l2_cycles);
        const bool there = in_l2 && !(at_once && way == Way::read && touched.block != w.block->number);
        w.timing.memory = std::max(w.timing.memory, in_l1 ? l1_cycles : there ? l2_cycles : dram);
    }
    if (stores(way) && !touched.written) of_allocation.written += bytes;
    if (!in_l1) r.counts->traffic.l2 += bytes;
    if (way == Way::read) touched.block = w.block->number;
    (stores(way) ? touched.written : touched.read) = true;
}

void count_request(Warp &w, uint64_t *sectors, size_t n, Way way) {
    n = transactions::different(sectors, n);
    Count &count = w.count();
    count.requests++;
    count.sectors += n;
    for (size_t s = 0; s < n; s++) count.lines += s == 0 || sectors[s] / 4 != sectors[s - 1] / 4;
    for (size_t s = 0; s < n; s++) count_traffic(w, sectors[s], way);
}
void count_sectors(Warp &w, const uint64_t *addresses, uint32_t mask, Way way) {
    uint64_t sectors[lanes];  // one per lane, because accesses are aligned
    size_t n = 0;
    Warp::each_lane(mask, [&](int l) { sectors[n++] = addresses[l] / 32; });
    count_request(w, sectors, n, way);
}

// Local memory is interleaved: word k is contiguous over the lanes of a warp. Stores go to L2 and stay there; loads hit L1.
void count_local(Warp &w, const uint64_t *addresses, uint32_t mask, uint32_t bytes, Way way) {
    std::vector<uint64_t> sectors;
    Warp::each_lane(mask, [&](int l) {
        for (uint32_t at = 0; at < bytes; at += 4) sectors.push_back((addresses[l] + at) / 4 * (lanes / 8) + uint64_t(l) / 8);
    });
    std::sort(sectors.begin(), sectors.end());
    const size_t n = size_t(std::unique(sectors.begin(), sectors.end()) - sectors.begin());
    Count &count = w.count();
    count.requests++, count.sectors += n, count.lines += ceil_div(n, size_t(4));
    if (way != Way::read) w.block->running->counts->traffic.l2 += 32 * n;
}

uint8_t *noted_shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes, Way way) {
    uint8_t *const place = shared_place(w, lane, address, bytes);
    (way == Way::write ? note_write : way == Way::update ? note_update : note_read)(w, lane, address, bytes);
    return place;
}

// Checks, records and counts the accesses of the active lanes, and returns their host addresses, by lane.
template <Space space, Way way> void places(Warp &w, const Instruction &i, int slot, uint8_t **at) {
    constexpr bool shared = space == Space::shared || space == Space::cluster;
    using Address = std::conditional_t<shared, uint32_t, uint64_t>;
    const uint32_t bytes = uint32_t(i.bytes) * i.vector;
    alignas(64) Address address[lanes];
    for (int l = 0; l < lanes; l++) address[l] = Address(w.values<Address>(slot)[l] + Address(i.offsets[0]));
    uint32_t in_shared = 0, in_local = 0;
    Warp::each_lane(w.active, [&](int l) {
        const auto in_window = [&](uint64_t window, uint64_t size) {
            return space == Space::generic && uint64_t(address[l]) - window < size;
        };
        if (shared || in_window(shared_window, uint64_t(1) << 32)) {
            if (space == Space::shared && uint32_t(address[l]) >> 24)
                w.fail(l, shared_text(uint32_t(address[l])) + " as if it were the own block's\n  fix: .shared::cluster");
            at[l] = noted_shared_place(w, l, uint32_t(address[l]), bytes, way);
            in_shared |= 1u << l;
        } else if (space == Space::local || in_window(local_window, local_window)) {
            at[l] = local_place(w, l, address[l], bytes);
            in_local |= 1u << l;
        } else if (space == Space::param) at[l] = param_place(w, l, address[l], bytes);
        else {
            at[l] = global_place(w, l, address[l], bytes);
            if (w.block->running->kernel->uses_tma) note_device_access(w, l, address[l], bytes, stores(way));
        }
    });
    if (!w.block->running->launch->count_memory || space == Space::param || space == Space::constant) return;
    if (in_shared) {
        alignas(64) uint32_t offset[lanes];
        for (int l = 0; l < lanes; l++) offset[l] = uint32_t(address[l]);
        if (i.looped >= 0) count_looped(w, w.looped[size_t(i.looped)], offset, in_shared, i.joined);
        else if (i.joined) count_joined(w, offset, in_shared, bytes, i.joined);
    }
    if constexpr (!shared) {
        if (in_local) count_local(w, address, in_local, bytes, way);
        if (const uint32_t rest = w.active & ~in_shared & ~in_local) count_sectors(w, address, rest, way);
    }
}

// ---- ld, st -----------------------------------------------------------------------------------------------------------------------

// Memory holds an M; the register holds an R, which is the same type or wider.
template <class M, class R> void load_lanes(void *slot, uint8_t *const *at, uint32_t mask) {
    Warp::each_lane(mask, [&](int l) {
        M value;
        memcpy(&value, at[l], sizeof value);
        static_cast<R *>(slot)[l] = R(value);
    });
}
template <class M, class R> void store_lanes(void *slot, uint8_t *const *at, uint32_t mask) {
    Warp::each_lane(mask, [&](int l) {
        const M value = M(static_cast<R *>(slot)[l]);
        memcpy(at[l], &value, sizeof value);
    });
}

// {r, ...} = [address]
template <Space space> void load(Warp &w, const Instruction &i) {
    uint8_t *at[lanes];
    places<space, Way::read>(w, i, i.operands[i.vector], at);
    for (int v = 0; v < i.vector; v++) {
        i.move(w.values<uint8_t>(i.operands[v]), at, w.active);
        Warp::each_lane(w.active, [&](int l) { at[l] += i.bytes; });
    }
}
// ld.acquire, with which a loop polls for another block's store. Reading the same value again stalls the warp while other warps can proceed.
void poll(Warp &w, const Instruction &i) {
    const int lane = std::countr_zero(w.active);
    Polled now{&i, w.values<uint64_t>(i.operands[i.vector])[lane] + uint64_t(i.offsets[0])};
    memcpy(&now.value, global_place(w, lane, now.address, i.bytes), i.bytes);
    if (now == w.polled && !std::exchange(w.expired, false))
        return w.stall([] { return "loads a value of device memory again and again, which no block stores that runs now"; });
    w.polled = now;
    Warp::each_lane(w.active,
                    [&](int l) { note_acquire(w, w.values<uint64_t>(i.operands[i.vector])[l] + uint64_t(i.offsets[0])); });
    load<Space::global>(w, i);
}
// [address] = {r, ...}
template <Space space> void store(Warp &w, const Instruction &i) {
    uint8_t *at[lanes];
    places<space, Way::write>(w, i, i.operands[0], at);
    for (int v = 0; v < i.vector; v++) {
        i.move(w.values<uint8_t>(i.operands[1 + v]), at, w.active);
        Warp::each_lane(w.active, [&](int l) { at[l] += i.bytes; });
    }
}

// st.release
void publish(Warp &w, const Instruction &i) {
    store<Space::global>(w, i);
    Warp::each_lane(w.active, [&](int l) { note_release(w, w.values<uint64_t>(i.operands[0])[l] + uint64_t(i.offsets[0])); });
}

// A register may be wider than the type; the name of that form ends with the register's bytes: "ld.global.u16 4".
template <class M, class R> void add_moves(Forms &forms, const std::string &type) {
    const std::string wider = sizeof(M) == sizeof(R) ? "" : format(" %zu", sizeof(R));
    for (const uint8_t vector : {1, 2, 4, 8}) {
        const bool widest = vector * sizeof(M) == 32;  // words of device memory only
        if (vector == 8 && !widest) continue;
        const int architecture = widest ? 100 : 0;
        const std::string values = (vector == 1 ? "." : format(".v%d.", vector)) + type + wider;
        const auto add = [&](const std::string &space, Handler loads, Handler stores, uint8_t address, Pipe pipe) {
            std::vector<uint8_t> loaded(vector, sizeof(R)), stored(vector + 1, sizeof(R));
            loaded.push_back(address), stored[0] = address;
            if (loads)
                forms["ld" + space + values] = {loads,     pipe,   vector,  loaded,      load_lanes<M, R>,
                                                sizeof(M), vector, nullptr, architecture};
            if (stores)
                forms["st" + space + values] = {stores,    pipe,   0,       stored,      store_lanes<M, R>,
                                                sizeof(M), vector, nullptr, architecture};
        };
        add("", load<Space::generic>, store<Space::generic>, 8, Pipe::global);
        add(".global", load<Space::global>, store<Space::global>, 8, Pipe::global);
        add(".acquire.global", poll, nullptr, 8, Pipe::global);
        add(".release.global", nullptr, publish, 8, Pipe::global);
        add(".global.nc", load<Space::global>, nullptr, 8, Pipe::global);  // through the read-only cache
        if (widest) continue;
        add(".shared", load<Space::shared>, store<Space::shared>, 4, Pipe::shared);
        add(".shared::cluster", load<Space::cluster>, store<Space::cluster>, 4, Pipe::shared);
        add(".local", load<Space::local>, store<Space::local>, 8, Pipe::local);
        add(".param", load<Space::param>, nullptr, 8, Pipe::move);
        add(".const", load<Space::constant>, nullptr, 8, Pipe::move);
    }
}

// ---- between spaces ---------------------------------------------------------------------------------------------------------------

enum class Cast { to_shared, from_shared, none };  // in the other spaces, addresses are already generic
template <Cast cast> void convert_address(Warp &w, const Instruction &i) {
    alignas(64) uint64_t result[lanes];
    const uint64_t *a = w.values<uint64_t>(i.operands[1]);
    for (int l = 0; l < lanes; l++)
        result[l] = a[l] + (cast == Cast::to_shared ? -shared_window : cast == Cast::from_shared ? shared_window : 0);
    if (cast == Cast::to_shared)
        Warp::each_lane(w.active, [&](int l) {
            if (result[l] >> 32) w.fail(l, format("%#zx is no address of shared memory", size_t(a[l])));
        });
    w.write(i.operands[0], result);
}

// ---- atomics: d = [address], [address] = f(d, a) ----------------------------------------------------------------------------------

template <Space space, class T, class F, bool returns> void atomic(Warp &w, const Instruction &i) {
    uint8_t *at[lanes];
    const int first = returns;
    places<space, Way::update>(w, i, i.operands[first], at);
    const T *a = w.values<T>(i.operands[first + 1]);
    alignas(64) T old[lanes];
    Warp::each_lane(w.active, [&](int l) {  // lanes with the same address run one after another
        memcpy(&old[l], at[l], sizeof(T));
        const T now = F()(old[l], a[l]);
        memcpy(at[l], &now, sizeof(T));
    });
    if (returns) w.write(i.operands[0], old);
}

// d = [address]; if d is a, [address] = b
template <Space space, class T> void compare_and_swap(Warp &w, const Instruction &i) {
    uint8_t *at[lanes];
    places<space, Way::update>(w, i, i.operands[1], at);
    const T *a = w.values<T>(i.operands[2]), *b = w.values<T>(i.operands[3]);
    alignas(64) T old[lanes];
    Warp::each_lane(w.active, [&](int l) {
        memcpy(&old[l], at[l], sizeof(T));
        if (old[l] == a[l]) memcpy(at[l], &b[l], sizeof(T));
    });
    w.write(i.operands[0], old);
}

// Calls f for each space, with the template argument, the name, the bytes of an address and the pipe.
template <class F> void each_space(F f) {
    f.template operator()<Space::global>(".global", 8, Pipe::global);
    f.template operator()<Space::generic>("", 8, Pipe::global);
    f.template operator()<Space::shared>(".shared", 4, Pipe::shared);
    f.template operator()<Space::cluster>(".shared::cluster", 4, Pipe::shared);
}
// Device memory may use a different function.
template <class T, class F, class Global = F> void add_atomic(Forms &forms, const std::string &name, F, Global = {}) {
    constexpr uint8_t n = sizeof(T);
    each_space([&]<Space space>(const std::string &where, uint8_t address, Pipe pipe) {
        using G = std::conditional_t<space == Space::shared || space == Space::cluster, F, Global>;
        forms["atom" + where + "." + name] = {atomic<space, T, G, true>, pipe, 1, {n, address, n}, nullptr, n};
        forms["red" + where + "." + name] = {atomic<space, T, G, false>, pipe, 0, {address, n}, nullptr, n};
    });
}
template <class T> void add_swaps(Forms &forms, const std::string &type) {
    constexpr uint8_t n = sizeof(T);
    each_space([&]<Space space>(const std::string &where, uint8_t address, Pipe pipe) {
        forms["atom" + where + ".cas." + type] = {compare_and_swap<space, T>, pipe, 1, {n, address, n, n}, nullptr, n};
    });
}
template <class T> void add_integer_atomics(Forms &forms, const std::string &type) {
    using U = std::make_unsigned_t<T>;
    add_atomic<U>(forms, "add." + type, [](U x, U a) { return x + a; });
    add_atomic<T>(forms, "min." + type, [](T x, T a) { return std::min(x, a); });
    add_atomic<T>(forms, "max." + type, [](T x, T a) { return std::max(x, a); });
}
template <class U> void add_bit_atomics(Forms &forms, const std::string &type) {
    add_atomic<U>(forms, "and." + type, [](U x, U a) { return x & a; });
    add_atomic<U>(forms, "or." + type, [](U x, U a) { return x | a; });
    add_atomic<U>(forms, "xor." + type, [](U x, U a) { return x ^ a; });
    add_atomic<U>(forms, "exch." + type, [](U, U a) { return a; });
}

// Atomic float additions in device memory flush subnormal numbers to 0; additions in shared memory, and of 16-bit floats, do not.
template <class Half> uint32_t add_pairs(uint32_t x, uint32_t a) {
    const auto value = [](uint32_t bits) { return float(std::bit_cast<Half>(uint16_t(bits))); };
    const auto sum = [&](uint32_t p, uint32_t q) { return uint32_t(std::bit_cast<uint16_t>(Half(value(p) + value(q)))); };
    return sum(x, a) | sum(x >> 16, a >> 16) << 16;
}
void add_float_atomics(Forms &forms) {
    const auto add = [](float x, float a) { return x + a; };
    add_atomic<float>(forms, "add.f32", add, Flushed<decltype(add)>());
    add_atomic<double>(forms, "add.f64", [](double x, double a) { return x + a; });
    add_atomic<uint32_t>(forms, "add.noftz.bf16x2", [](uint32_t x, uint32_t a) { return add_pairs<bf16>(x, a); });
    add_atomic<uint32_t>(forms, "add.noftz.f16x2", [](uint32_t x, uint32_t a) { return add_pairs<_Float16>(x, a); });
    add_atomic<uint16_t>(forms, "add.noftz.bf16", [](uint16_t x, uint16_t a) { return uint16_t(add_pairs<bf16>(x, a)); });
    add_atomic<uint16_t>(forms, "add.noftz.f16", [](uint16_t x, uint16_t a) { return uint16_t(add_pairs<_Float16>(x, a)); });
}

void nothing(Warp &, const Instruction &) {}

// ---- cp.async, ldmatrix -----------------------------------------------------------------------------------------------------------

// [shared], [global], size, bytes read from the source; the rest becomes zeros. The copy lands at its wait, not earlier.
void copy_async(Warp &w, const Instruction &i) {
    const uint32_t *to = w.values<uint32_t>(i.operands[0]), *read = w.values<uint32_t>(i.operands[2]);
    alignas(64) uint64_t from[lanes];
    alignas(64) uint32_t where[lanes];
    uint32_t readers = 0;
    Warp::each_lane(w.active, [&](int l) {
        from[l] = w.values<uint64_t>(i.operands[1])[l] + uint64_t(i.offsets[1]);
        Copy copy{l, i.bytes, w.committed[l], to[l] + uint32_t(i.offsets[0]), {}};
        where[l] = copy.to;
        uint8_t *const place = shared_place(w, l, copy.to, i.bytes);
        if (read[l] > i.bytes) w.fail(l, format("reads %u bytes for a copy of %u", read[l], i.bytes));
        if (from[l] % i.bytes) w.fail(l, describe(w, from[l]) + format(" is not aligned to %u", i.bytes));
        if (read[l]) memcpy(copy.data, global_place(w, l, from[l], i.bytes), read[l]), readers |= 1u << l;
        note_departure(w, l, copy.to, i.bytes);
        memset(place, 0xff, i.bytes);  // until it lands
        w.copies.push_back(copy);
    });
    if (!w.block->running->launch->count_memory) return;
    if (readers) count_sectors(w, from, readers, Way::read_past_l1);
    count_wavefronts(w, where, w.active, i.bytes);
}
void commit_copies(Warp &w, const Instruction &) {
    Warp::each_lane(w.active, [&](int l) { w.committed[l]++; });
    w.timing.commit();
}
void wait_for_copies(Warp &w,
                     const Instruction &i) {  // waits until at most this number of the latest groups is in flight
    w.timing.wait(size_t(i.offsets[0]));
    std::erase_if(w.copies, [&](const Copy &copy) {
        const bool lands = w.active >> copy.lane & 1 && int64_t(copy.group) < int64_t(w.committed[copy.lane]) - i.offsets[0];
        if (lands) {
            memcpy(shared_place(w, copy.lane, copy.to, uint32_t(copy.bytes)), copy.data, size_t(copy.bytes));
            note_landing(w, copy.lane, copy.to, uint32_t(copy.bytes));
        }
        return lands;
    });
}

// {r, ...} = [address]: 8x8 matrices of 2-byte elements; lane 8 n + g has the address of row g of matrix n.
template <int matrices, bool transposed> void load_matrices(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    alignas(64) uint32_t address[lanes];
    uint16_t row[lanes][8];
    for (int l = 0; l < 8 * matrices; l++) {
        address[l] = w.values<uint32_t>(i.operands[matrices])[l] + uint32_t(i.offsets[0]);
        memcpy(row[l], shared_place(w, l, address[l], 16), 16);
        note_read(w, l, address[l], 16);
    }
    for (int n = 0; n < matrices; n++)
        for (int l = 0; l < lanes; l++) {
            const int g = l / 4, t = l % 4 * 2;
            const auto element = [&](int r, int c) { return uint32_t(transposed ? row[8 * n + c][r] : row[8 * n + r][c]); };
            w.values<uint32_t>(i.operands[n])[l] = element(g, t) | element(g, t + 1) << 16;
        }
    if (w.block->running->launch->count_memory) count_wavefronts(w, address, matrices == 4 ? ~0u : (1u << 8 * matrices) - 1, 16);
}
template <int matrices> void add_ldmatrix(Forms &forms) {
    std::vector<uint8_t> widths(matrices + 1, 4);
    const std::string name = format("ldmatrix.sync.aligned.m8n8.x%d", matrices);
    forms[name + ".shared.b16"] = {load_matrices<matrices, false>, Pipe::shared, matrices, widths};
    forms[name + ".trans.shared.b16"] = {load_matrices<matrices, true>, Pipe::shared, matrices, widths};
}
}  // namespace

std::string describe(const Warp &w, uint64_t address) {
    const Running &r = *w.block->running;
    const auto found = r.memory->at_or_before(address);
    if (!found.bytes || address >= shared_window) return format("%#zx, which no allocation holds", size_t(address));
    std::string argument = "an allocation";
    for (const Variable *v : r.kernel->variables)
        if (found.begin == uintptr_t(v->memory.get())) argument = v->name;
    for (size_t n = 0; n < r.kernel->parameters.size(); n++) {
        const Parameter &p = r.kernel->parameters[n];
        for (size_t at = p.offset; at + 8 <= p.offset + p.bytes; at += 8) {  // a structure may hold several pointers
            uint64_t pointer;
            memcpy(&pointer, r.parameters->data() + at, 8);
            if (found.holds(pointer, 1))
                argument = format("argument %zu", n) + (n < r.kernel->types.size() ? ", " + r.kernel->types[n] : "");
        }
    }
    return format("byte %zu of the %zu bytes of %s", size_t(address - found.begin), found.bytes, argument.c_str());
}

void count_bulk(Warp &w, const std::vector<uint64_t> &addresses, bool writes) {
    std::vector<uint64_t> sectors;
    for (const uint64_t address : addresses) sectors.push_back(address / 32);
    Traffic &traffic = w.block->running->counts->traffic;
    const uint64_t lines = w.count().lines, before = traffic.l2;
    count_request(w, sectors.data(), sectors.size(), writes ? Way::write : Way::read_past_l1);
    w.count().lines = lines;  // L1 is not involved; shared memory traffic is counted in wavefronts
    traffic.bulk += traffic.l2 - before;
}

const uint8_t *readable(Warp &w, int lane, uint64_t address, uint32_t bytes) {
    return address - local_window < local_window ? local_place(w, lane, address, bytes) : global_place(w, lane, address, bytes);
}

void add_memory_operations(Forms &forms) {
    add_moves<uint8_t, uint16_t>(forms, "u8"), add_moves<uint8_t, uint32_t>(forms, "u8");
    add_moves<int8_t, int16_t>(forms, "s8"), add_moves<int8_t, int32_t>(forms, "s8");
    for (const char *type : {"u16", "b16"})
        add_moves<uint16_t, uint16_t>(forms, type), add_moves<uint16_t, uint32_t>(forms, type);
    add_moves<int16_t, int16_t>(forms, "s16"), add_moves<int16_t, int32_t>(forms, "s16");
    for (const char *type : {"u32", "b32", "f32", "s32"}) add_moves<uint32_t, uint32_t>(forms, type);
    add_moves<uint32_t, uint64_t>(forms, "u32"), add_moves<int32_t, int64_t>(forms, "s32");
    for (const char *type : {"u64", "b64", "f64", "s64"}) add_moves<uint64_t, uint64_t>(forms, type);

    for (const char *space : {"global", "const", "local", "param"})
        for (const char *way : {"cvta.", "cvta.to."})
            forms[std::string(way) + space + ".u64"] = {convert_address<Cast::none>, Pipe::move, 1, {8, 8}};
    forms["cvta.to.shared.u64"] = {convert_address<Cast::to_shared>, Pipe::move, 1, {8, 8}};
    forms["cvta.shared.u64"] = {convert_address<Cast::from_shared>, Pipe::move, 1, {8, 8}};

    add_integer_atomics<int32_t>(forms, "s32"), add_integer_atomics<uint32_t>(forms, "u32");
    add_integer_atomics<int64_t>(forms, "s64"), add_integer_atomics<uint64_t>(forms, "u64");
    add_bit_atomics<uint32_t>(forms, "b32"), add_bit_atomics<uint64_t>(forms, "b64");
    add_swaps<uint16_t>(forms, "b16"), add_swaps<uint32_t>(forms, "b32"), add_swaps<uint64_t>(forms, "b64");
    add_atomic<uint32_t>(forms, "inc.u32", [](uint32_t x, uint32_t a) { return x >= a ? 0 : x + 1; });
    add_atomic<uint32_t>(forms, "dec.u32", [](uint32_t x, uint32_t a) { return x == 0 || x > a ? a : x - 1; });
    add_float_atomics(forms);

    for (const char *cache : {"cg", "ca"})
        forms[format("cp.async.%s.shared.global", cache)] = {copy_async, Pipe::copy, 0, {4, 8, 4}};
    forms["cp.async.commit_group"] = {commit_copies, Pipe::copy, 0, {}};
    forms["cp.async.wait_group"] = forms["cp.async.wait_all"] = {wait_for_copies, Pipe::copy, 0, {}};
    // Blocks run one after another and warps one at a time, so all threads see the same order of memory; caches are not simulated.
    for (const char *level : {"cta", "gl", "sys"}) forms[format("membar.%s", level)] = {nothing, Pipe::control, 0, {}};
    for (const char *order : {"sc", "acq_rel"})
        for (const char *scope : {"cta", "cluster", "gpu", "sys"})
            forms[format("fence.%s.%s", order, scope)] = {nothing, Pipe::control, 0, {}};
    for (const char *level : {"L1", "L2"}) forms[format("prefetch.global.%s", level)] = {nothing, Pipe::control, 0, {8}};
    forms["createpolicy.fractional.b64"] = form<uint64_t, float>(Pipe::control, [](float) { return 0; });  // a hint to L2
    add_ldmatrix<1>(forms), add_ldmatrix<2>(forms), add_ldmatrix<4>(forms);
}
}  // namespace ptx
