// Loads, stores, atomics, cp.async and ldmatrix. An address is checked before the host touches it.
#include <algorithm>

#include "shared_memory.h"

namespace ptx {
namespace {

enum class Space { global, shared, param, generic };

// ---- where an address lies --------------------------------------------------------------------------------------------------------

// "+ 4096 of 4096 bytes of argument 2, float const*"
std::string describe(const Warp &w, uint64_t address) {
    const Running &r = *w.block->running;
    const auto found = r.memory->at_or_before(address);
    if (!found.bytes) return format("%#zx, which no allocation holds", size_t(address));
    std::string argument = "an allocation";
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

uint8_t *global_place(Warp &w, int lane, uint64_t address, uint32_t bytes) {
    DeviceMemory::Allocation &last = w.block->running->last;  // most accesses are in the same allocation as the one before
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

// Whether an access goes through L1, which holds the block's reads; writes go through it to L2.
enum class Way { read, read_past_l1, write };

void count_traffic(Warp &w, uint64_t sector, Way way) {
    constexpr uint64_t bytes = 32;
    Running &r = *w.block->running;
    if (!r.last.holds(sector * bytes, 1) && !r.last.holds(sector * bytes + bytes - 1, 1))
        r.last = r.memory->at_or_before(sector * bytes + bytes - 1);
    TouchedSectors::Sector &touched = r.touched.at(r.last, sector);
    Traffic &traffic = r.counts->traffic;
    if (way == Way::write) {
        if (!touched.written) traffic.written += bytes;
        touched.written = true, traffic.l2 += bytes;
    } else {
        if (!touched.read && !touched.written) traffic.read += bytes;
        touched.read = true;
        if (way == Way::read_past_l1 || touched.block != w.block->number) traffic.l2 += bytes;
        if (way == Way::read) touched.block = w.block->number;
    }
}

void count_sectors(Warp &w, const uint64_t *addresses, uint32_t mask, Way way) {
    uint64_t sectors[lanes];  // a lane touches one: its bytes are aligned
    int n = 0;
    Warp::each_lane(mask, [&](int l) { sectors[n++] = addresses[l] / 32; });
    std::sort(sectors, sectors + n);
    n = int(std::unique(sectors, sectors + n) - sectors);
    Count &count = w.count();
    count.requests++;
    count.sectors += uint64_t(n);
    for (int s = 0; s < n; s++) count_traffic(w, sectors[s], way);
}

uint8_t *noted_shared_place(Warp &w, int lane, uint32_t address, uint32_t bytes, bool writes) {
    uint8_t *const place = shared_place(w, lane, address, bytes);
    if (writes) note_write(w, lane, address, bytes);
    else note_read(w, lane, address, bytes);
    return place;
}

// Returns by lane the host addresses of the active lanes' accesses, after checking, recording and counting them.
template <Space space, bool writes> void places(Warp &w, const Instruction &i, int slot, uint8_t **at) {
    using Address = std::conditional_t<space == Space::shared, uint32_t, uint64_t>;
    const uint32_t bytes = uint32_t(i.bytes) * i.vector;
    alignas(64) Address address[lanes];
    for (int l = 0; l < lanes; l++) address[l] = Address(w.values<Address>(slot)[l] + Address(i.offsets[0]));
    uint32_t in_shared = 0;
    Warp::each_lane(w.active, [&](int l) {
        const bool in_window = space == Space::generic && uint64_t(address[l]) - shared_window < max_shared + shared_base;
        if (space == Space::shared || in_window) {
            at[l] = noted_shared_place(w, l, uint32_t(address[l]), bytes, writes);
            in_shared |= 1u << l;
        } else at[l] = space == Space::param ? param_place(w, l, address[l], bytes) : global_place(w, l, address[l], bytes);
    });
    if (!w.block->running->launch->count_memory || space == Space::param) return;
    if (in_shared) {
        alignas(64) uint32_t offset[lanes];
        for (int l = 0; l < lanes; l++) offset[l] = uint32_t(address[l]);
        count_wavefronts(w, offset, in_shared, bytes);
    }
    if constexpr (space != Space::shared)
        if (w.active & ~in_shared) count_sectors(w, address, w.active & ~in_shared, writes ? Way::write : Way::read);
}

// ---- ld, st -----------------------------------------------------------------------------------------------------------------------

// Memory holds an M, the register an R, which is the same or wider.
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
    places<space, false>(w, i, i.operands[i.vector], at);
    for (int v = 0; v < i.vector; v++) {
        i.move(w.values<uint8_t>(i.operands[v]), at, w.active);
        Warp::each_lane(w.active, [&](int l) { at[l] += i.bytes; });
    }
}
// [address] = {r, ...}
template <Space space> void store(Warp &w, const Instruction &i) {
    uint8_t *at[lanes];
    places<space, true>(w, i, i.operands[0], at);
    for (int v = 0; v < i.vector; v++) {
        i.move(w.values<uint8_t>(i.operands[1 + v]), at, w.active);
        Warp::each_lane(w.active, [&](int l) { at[l] += i.bytes; });
    }
}

// A register may be wider than the type; the name of such a form ends with its bytes: "ld.global.u16 4".
template <class M, class R> void add_moves(Forms &forms, const std::string &type) {
    const std::string wider = sizeof(M) == sizeof(R) ? "" : format(" %zu", sizeof(R));
    for (const uint8_t vector : {1, 2, 4}) {
        const std::string values = (vector == 1 ? "." : format(".v%d.", vector)) + type + wider;
        const auto add = [&](const std::string &space, Handler loads, Handler stores, uint8_t address, Pipe pipe) {
            std::vector<uint8_t> loaded(vector, sizeof(R)), stored(vector + 1, sizeof(R));
            loaded.push_back(address), stored[0] = address;
            forms["ld" + space + values] = {loads, pipe, vector, loaded, load_lanes<M, R>, sizeof(M), vector};
            if (stores) forms["st" + space + values] = {stores, pipe, 0, stored, store_lanes<M, R>, sizeof(M), vector};
        };
        add("", load<Space::generic>, store<Space::generic>, 8, Pipe::global);
        add(".global", load<Space::global>, store<Space::global>, 8, Pipe::global);
        add(".global.nc", load<Space::global>, nullptr, 8, Pipe::global);  // through the read-only cache
        add(".shared", load<Space::shared>, store<Space::shared>, 4, Pipe::shared);
        add(".param", load<Space::param>, nullptr, 8, Pipe::move);
    }
}

// ---- between spaces ---------------------------------------------------------------------------------------------------------------

enum class Cast { to_shared, from_shared, global };
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
    // As a read, since atomics of several warps do not race with each other; of L2's traffic the write is not counted.
    places<space, false>(w, i, i.operands[first], at);
    const T *a = w.values<T>(i.operands[first + 1]);
    alignas(64) T old[lanes];
    Warp::each_lane(w.active, [&](int l) {  // lanes that meet go one after the other
        memcpy(&old[l], at[l], sizeof(T));
        const T now = F()(old[l], a[l]);
        memcpy(at[l], &now, sizeof(T));
    });
    if (returns) w.write(i.operands[0], old);
}
template <class T, class F> void add_atomic(Forms &forms, const std::string &name, F) {
    const uint8_t n = sizeof(T);
    forms["atom.global." + name] = {atomic<Space::global, T, F, true>, Pipe::global, 1, {n, 8, n}, nullptr, n};
    forms["red.global." + name] = {atomic<Space::global, T, F, false>, Pipe::global, 0, {8, n}, nullptr, n};
    forms["atom.shared." + name] = {atomic<Space::shared, T, F, true>, Pipe::shared, 1, {n, 4, n}, nullptr, n};
}

// ---- cp.async, ldmatrix -----------------------------------------------------------------------------------------------------------

// [shared], [global], size, bytes read of the source; the rest is zeros. The copy does not land before its wait.
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
}
void wait_for_copies(Warp &w,
                     const Instruction &i) {  // until at most this number of the most recent groups is in flight
    std::erase_if(w.copies, [&](const Copy &copy) {
        const bool lands = w.active >> copy.lane & 1 && int64_t(copy.group) < int64_t(w.committed[copy.lane]) - i.offsets[0];
        if (lands) {
            memcpy(shared_place(w, copy.lane, copy.to, uint32_t(copy.bytes)), copy.data, size_t(copy.bytes));
            note_landing(w, copy.lane, copy.to, uint32_t(copy.bytes));
        }
        return lands;
    });
}

// {r, ...} = [address]: 8x8 matrices of 2 bytes an element; lane 8 n + g has the address of row g of matrix n.
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

void add_memory_operations(Forms &forms) {
    add_moves<uint8_t, uint16_t>(forms, "u8"), add_moves<uint8_t, uint32_t>(forms, "u8");
    add_moves<int8_t, int16_t>(forms, "s8"), add_moves<int8_t, int32_t>(forms, "s8");
    for (const char *type : {"u16", "b16"})
        add_moves<uint16_t, uint16_t>(forms, type), add_moves<uint16_t, uint32_t>(forms, type);
    add_moves<int16_t, int16_t>(forms, "s16"), add_moves<int16_t, int32_t>(forms, "s16");
    for (const char *type : {"u32", "b32", "f32", "s32"}) add_moves<uint32_t, uint32_t>(forms, type);
    add_moves<uint32_t, uint64_t>(forms, "u32"), add_moves<int32_t, int64_t>(forms, "s32");
    for (const char *type : {"u64", "b64", "f64", "s64"}) add_moves<uint64_t, uint64_t>(forms, type);

    forms["cvta.to.global.u64"] = forms["cvta.global.u64"] = {convert_address<Cast::global>, Pipe::move, 1, {8, 8}};
    forms["cvta.to.shared.u64"] = {convert_address<Cast::to_shared>, Pipe::move, 1, {8, 8}};
    forms["cvta.shared.u64"] = {convert_address<Cast::from_shared>, Pipe::move, 1, {8, 8}};

    add_atomic<uint32_t>(forms, "add.u32", [](uint32_t x, uint32_t a) { return x + a; });
    add_atomic<uint64_t>(forms, "add.u64", [](uint64_t x, uint64_t a) { return x + a; });
    add_atomic<float>(forms, "add.f32", [](float x, float a) { return x + a; });
    add_atomic<uint32_t>(forms, "max.u32", [](uint32_t x, uint32_t a) { return std::max(x, a); });
    add_atomic<uint32_t>(forms, "min.u32", [](uint32_t x, uint32_t a) { return std::min(x, a); });
    add_atomic<uint32_t>(forms, "exch.b32", [](uint32_t, uint32_t a) { return a; });

    for (const char *cache : {"cg", "ca"})
        forms[format("cp.async.%s.shared.global", cache)] = {copy_async, Pipe::copy, 0, {4, 8, 4}};
    forms["cp.async.commit_group"] = {commit_copies, Pipe::copy, 0, {}};
    forms["cp.async.wait_group"] = {wait_for_copies, Pipe::copy, 0, {}};
    add_ldmatrix<1>(forms), add_ldmatrix<2>(forms), add_ldmatrix<4>(forms);
}
}  // namespace ptx
