#include "wgmma.h"

#include "../../../llmc/core/dtype.h"
#include "forms.h"
#include "shared_memory.h"
#include "tensor_core.h"

namespace ptx {
namespace {

constexpr int group_warps = 4, rows = 16;  // rows per warp
constexpr uint32_t word = 16;              // bytes
constexpr int k_bytes = 32;                // bytes of a row of A or a column of B in one operation

// ---- operands ---------------------------------------------------------------------------------------------------------------------

struct Bf16 {
    using Bits = uint16_t;
    static double value(uint16_t bits) { return double(std::bit_cast<float>(uint32_t(bits) << 16)); }
};
struct F16 {
    using Bits = uint16_t;
    static double value(uint16_t bits) { return double(std::bit_cast<_Float16>(bits)); }
};
struct Tf32 {  // a float whose last 13 bits are ignored
    using Bits = uint32_t;
    static double value(uint32_t bits) { return double(std::bit_cast<float>(bits & ~uint32_t(0x1fff))); }
};
template <int exponent_bits, int mantissa_bits> double of_eight_bits(uint8_t bits) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
    const double one = 1 << mantissa_bits;
    const double size = exponent ? std::ldexp(1 + mantissa / one, exponent - bias) : std::ldexp(mantissa / one, 1 - bias);
    return bits & 0x80 ? -size : size;
}
struct E4m3 {  // no infinity
    using Bits = uint8_t;
    static double value(uint8_t bits) { return (bits & 0x7f) == 0x7f ? NAN : of_eight_bits<4, 3>(bits); }
};
struct E5m2 {
    using Bits = uint8_t;
    static double value(uint8_t bits) {
        if ((bits & 0x7c) == 0x7c) return bits & 3 ? NAN : bits & 0x80 ? -INFINITY : INFINITY;
        return of_eight_bits<5, 2>(bits);
    }
};

// A matrix in shared memory, defined by its descriptor. Its rows are rows of A or columns of B, with K along them. CUTLASS (mma_sm90_desc.hpp) lists
// the layouts.
class Matrix {
  public:
    Matrix(uint64_t d, bool turned, uint32_t element)
        : start_(uint32_t(d & 0x3fff) << 4),
          leading_(uint32_t(d >> 16 & 0x3fff) << 4),
          stride_(uint32_t(d >> 32 & 0x3fff) << 4),
          mask_(std::array<uint32_t, 4>{0, 7, 3, 1}[d >> 62]),
          element_(element),
          turned_(turned) {}

    uint32_t address(uint32_t row, uint32_t k) const {
        const uint32_t of_word = word / element_, span = word * (mask_ + 1);
        if (!turned_) {  // K is contiguous
            if (!mask_) return start_ + row / 8 * stride_ + k / of_word * leading_ + row % 8 * word + k % of_word * element_;
            return swizzle(start_ + row / 8 * stride_ + row % 8 * span + k * element_);
        }
        const uint32_t wide = span / element_;
        if (!mask_) return start_ + row / of_word * stride_ + k / 8 * leading_ + k % 8 * word + row % of_word * element_;
        return swizzle(start_ + row / wide * leading_ + k / 8 * stride_ + k % 8 * span + row % wide * element_);
    }
    // Appends the words that hold the rows [first, end).
    void add_words(std::vector<uint32_t> &words, uint32_t first, uint32_t end) const {
        const uint32_t of_word = word / element_, K = k_bytes / element_;
        for (uint32_t row = first; row < end; row += turned_ ? of_word : 1)
            for (uint32_t k = 0; k < K; k += turned_ ? 1 : of_word) words.push_back(address(row, k) & ~(word - 1));
    }

  private:
    uint32_t swizzle(uint32_t a) const { return a ^ (a >> 7 & mask_) << 4; }
    uint32_t start_, leading_, stride_, mask_, element_;
    bool turned_;
};

void check_descriptor(Warp &w, uint64_t d) {
    constexpr uint64_t unused = 0x3ff1'c000'c000'c000, base_offset = 0x000e'0000'0000'0000;
    if (d & unused) w.fail(0, format("%#zx is not a matrix descriptor: reserved bits are set", size_t(d)));
    if (d & base_offset) w.fail(0, format("the descriptor %#zx has a base offset, which is not interpreted", size_t(d)));
}

// ---- registers --------------------------------------------------------------------------------------------------------------------

int line_of_user(const Warp &w, int slot) {  // of an operation in flight that uses the slot
    for (const auto &g : w.wgmmas) {
        const Instruction &i = *g->instruction;
        if (std::find(i.accumulators.begin(), i.accumulators.end(), slot) != i.accumulators.end()) return i.line;
        if (g->from_registers && std::find(i.operands, i.operands + 4, slot) != i.operands + 4) return i.line;
    }
    return 0;
}

void need_fence(Warp &w, int slot) {
    if (w.fences == 0) w.fail(0, "no wgmma.fence precedes the first wgmma");
    if (w.uses[size_t(slot)].fences >= w.fences && !w.uses[size_t(slot)].constant)
        w.fail(
            0,
            "uses a register that another instruction has accessed since the last wgmma.fence\n  fix: put a fence behind the access; in "
            "C++, asm volatile(\"\" : \"+r\"(x) :: \"memory\") in front of the fence, so that the compiler moves no access behind it");
}
void use_registers(Warp &w, const Instruction &i, bool from_registers, int change) {
    const auto add = [change](uint16_t &count) { count = uint16_t(count + change); };
    for (const int slot : i.accumulators) add(w.uses[size_t(slot)].written);
    for (int r = 0; from_registers && r < 4; r++) add(w.uses[size_t(i.operands[r])].read);
}
void check_registers(Warp &w, const Instruction &i, bool from_registers) {
    for (const int slot : i.accumulators)  // consecutive operations on the same sums need no fence
        if (!w.uses[size_t(slot)].written) need_fence(w, slot);
    for (int r = 0; from_registers && r < 4; r++) {
        if (w.uses[size_t(i.operands[r])].written)
            w.fail(0,
                   format("reads a sum of the wgmma of line %d, which has not been waited for", line_of_user(w, i.operands[r])));
        need_fence(w, i.operands[r]);
    }
}

// ---- the operations ---------------------------------------------------------------------------------------------------------------

template <class A, class B> constexpr int depth = k_bytes / sizeof(typename A::Bits);
// Sums of products of 8-bit numbers keep 14 bits: DeepSeek-V3 Technical Report, section 3.5.2.
template <class A> constexpr int spare_bits = sizeof(typename A::Bits) == 1 ? -10 : 2;

template <class T> double value_at(const Warp &w, uint32_t address) {
    typename T::Bits bits;
    memcpy(&bits, w.block->shared.data() + address - shared_base, sizeof bits);
    return T::value(bits);
}

// Computes an operation from the parts of its four warps.
template <class A, class B> void compute(Warp *const *warps, const std::shared_ptr<Wgmma> *parts) {
    constexpr int K = depth<A, B>, columns = 8;
    const Wgmma &first = *parts[0];
    const Matrix b_matrix(first.b, first.b_turned, sizeof(typename B::Bits));
    const Matrix a_matrix(first.a, first.a_turned, sizeof(typename A::Bits));
    const int n = int(first.instruction->accumulators.size()) * 2;
    double a[group_warps * rows][K] = {}, b[K][columns];
    for (int warp = 0; warp < group_warps; warp++) {
        constexpr int packed = 4 / sizeof(typename A::Bits);  // elements per register
        if (!first.from_registers)
            for (int r = warp * rows; r < (warp + 1) * rows; r++)
                for (int k = 0; k < K; k++) a[r][k] = value_at<A>(*warps[0], a_matrix.address(uint32_t(r), uint32_t(k)));
        else
            for (int l = 0; l < lanes; l++)
                for (int r = 0; r < 4; r++)
                    for (int h = 0; h < packed; h++) {
                        const auto bits = typename A::Bits(parts[warp]->registers[r][l] >> (h * 32 / packed));
                        a[warp * rows + l / 4 + r % 2 * 8][l % 4 * packed + r / 2 * 4 * packed + h] = A::value(bits);
                    }
    }
    for (int column = 0; column < n; column += columns) {
        for (int k = 0; k < K; k++)
            for (int c = 0; c < columns; c++) {
                b[k][c] = value_at<B>(*warps[0], b_matrix.address(uint32_t(column + c), uint32_t(k)));
                if (first.negative) b[k][c] = -b[k][c];
            }
        for (int row = 0; row < group_warps * rows; row++) {
            Warp &w = *warps[row / rows];
            const int upper = row % rows / 8, lane = row % 8 * 4;
            const auto sum = [&](int c) -> float & {
                const int slot = first.instruction->accumulators[size_t(column / 2 + upper * 2 + c % 2)];
                return w.values<float>(slot)[lane + c / 2];
            };
            double d[columns] = {};
            for (int c = 0; first.keep && c < columns; c++) d[c] = double(sum(c));
            add_products<K, columns>(a[row], b, d, spare_bits<A>);
            for (int c = 0; c < columns; c++) sum(c) = float(d[c]);
        }
    }
}

// {sums}, A as a descriptor or 4 registers, B, whether to keep the sums, signs of A and B {, whether A} {and B are transposed}
template <class A, class B, bool registers> void start(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    const auto g = std::make_shared<Wgmma>();
    g->instruction = &i, g->group = w.wgmma_groups, g->from_registers = registers;
    check_registers(w, i, registers);
    const auto descriptor = [&](int operand) { return w.values<uint64_t>(i.operands[operand])[0]; };
    int at = 0;
    if (registers)
        for (; at < 4; at++) memcpy(g->registers[at], w.values<uint32_t>(i.operands[at]), sizeof g->registers[at]);
    else check_descriptor(w, g->a = descriptor(at++));
    check_descriptor(w, g->b = descriptor(at++));
    g->keep = w.predicate(i.operands[at++]) & 1;
    const int signs = int(w.one(i.operands[at])) * int(w.one(i.operands[at + 1]));
    g->negative = signs < 0, at += 2;
    if (at < i.reads && !registers) g->a_turned = w.one(i.operands[at++]) != 0;
    if (at < i.reads) g->b_turned = w.one(i.operands[at]) != 0;

    // Each warp marks the rows of A that are its own, and a quarter of B.
    const uint32_t warp = uint32_t(w.number % group_warps), n = uint32_t(i.accumulators.size()) * 2;
    if (!registers) Matrix(g->a, g->a_turned, sizeof(typename A::Bits)).add_words(g->words, warp * rows, (warp + 1) * rows);
    const uint32_t first = n / 8 * warp / group_warps * 8, end = n / 8 * (warp + 1) / group_warps * 8;
    Matrix(g->b, g->b_turned, sizeof(typename B::Bits)).add_words(g->words, first, end);
    for (const uint32_t address : g->words) shared_place(w, 0, address, word), note_async_read(w, 0, address, word);
    use_registers(w, i, registers, 1);
    g->done = time_wgmma(w, i);
    w.wgmmas.push_back(g);
    const size_t wavefronts = ceil_div(g->words.size() * word, 128);
    if (w.block->running->launch->count_memory) w.count().wavefronts += wavefronts, w.count().least_wavefronts += wavefronts;
}

using Compute = void (*)(Warp *const *warps, const std::shared_ptr<Wgmma> *parts);
std::map<Handler, Compute> &computations() {
    static std::map<Handler, Compute> all;
    return all;
}

void fence(Warp &w, const Instruction &) { w.need_all_lanes(), w.fences++; }
void commit(Warp &w, const Instruction &) { w.need_all_lanes(), w.wgmma_groups++; }

// Computes the operations of the groups below `until` that are still in flight, from the parts of the four warps.
void compute_groups(Warp &w, Warp *const *warps, uint64_t until) {
    for (size_t n = 0; n < w.wgmmas.size() && w.wgmmas[n]->group < until; n++) {
        if (w.wgmmas[n]->computed) continue;
        std::shared_ptr<Wgmma> parts[group_warps];
        for (int k = 0; k < group_warps; k++) {
            for (const auto &g : warps[k]->wgmmas)
                if (!g->computed && !parts[k]) parts[k] = g;
            const Wgmma *p = parts[k].get(), &own = *w.wgmmas[n];
            if (!p || p->instruction != own.instruction || p->a != own.a || p->b != own.b || p->keep != own.keep)
                w.fail(0, format("warp %d of the warpgroup has not started the wgmma of line %d with the same descriptors",
                                 warps[k]->number, own.instruction->line));
        }
        computations().at(parts[0]->instruction->run)(warps, parts);
        for (const auto &p : parts) {
            for (const uint32_t address : p->words) end_async_read(w, address, word, w.group, uint32_t(p->group) + 1);
            p->computed = true;
        }
    }
}

// Waits until at most this number of groups is in flight. A group can end only after all four warps have started their parts.
void wait(Warp &w, const Instruction &i) {
    w.need_all_lanes();
    const int64_t until = int64_t(w.wgmma_groups) - int64_t(w.one(i.operands[0]));
    const size_t first = size_t(w.number) / group_warps * group_warps;
    if (w.block->warps.size() < first + group_warps) w.fail(0, "wgmma in a block whose last warpgroup has not four warps");
    Warp *warps[group_warps];
    for (size_t n = 0; n < group_warps; n++) {
        warps[n] = &w.block->warps[first + n];
        if (int64_t(warps[n]->wgmma_groups) < until)
            return w.stall([&w, late = warps[n]] {
                return format("waits for a group of wgmma that warp %d of warp %d's warpgroup has not committed", late->number,
                              w.number);
            });
    }
    if (until > 0) compute_groups(w, warps, uint64_t(until)), w.view.known.set(w.group, uint32_t(until));
    while (!w.wgmmas.empty() && int64_t(w.wgmmas.front()->group) < until) {
        use_registers(w, *w.wgmmas.front()->instruction, w.wgmmas.front()->from_registers, -1);
        wait_until(w, w.wgmmas.front()->done);
        w.wgmmas.pop_front();
    }
}

template <class A, class B> void add_products_of(Forms &forms, const std::string &types) {
    constexpr bool turns = sizeof(typename A::Bits) == 2;  // only 16-bit operands may be transposed
    const std::string name = format("wgmma.mma_async.sync.aligned.k%d.f32.%s", depth<A, B>, types.c_str());
    std::vector<uint8_t> shared = {8, 8, 0, 4, 4}, registers = {4, 4, 4, 4, 8, 0, 4, 4};
    if (turns) shared.insert(shared.end(), 2, 4), registers.push_back(4);
    forms[name] = {start<A, B, false>, Pipe::tensor, 0, shared};
    forms[name + " registers"] = {start<A, B, true>, Pipe::tensor, 0, registers};
    computations()[start<A, B, false>] = computations()[start<A, B, true>] = compute<A, B>;
}
}  // namespace

// In machine code a move only renames a register, so the copy counts as accessed when its source was.
void note_registers(Warp &w, const Instruction &i) {
    if (!i.accumulators.empty()) return;
    const bool renames = i.pipe == Pipe::move && !i.move && i.writes == 1 && i.reads == 1;
    for (int n = 0; n < i.writes + i.reads; n++) {
        RegisterUse &use = w.uses[size_t(i.operands[n])];
        if (use.written)
            w.fail(0, format("accesses a sum of the wgmma of line %d, which has not been waited for",
                             line_of_user(w, i.operands[n])));
        if (use.read && n < i.writes)
            w.fail(0, format("overwrites a register that the wgmma of line %d still reads", line_of_user(w, i.operands[n])));
        if (!renames && !use.constant) use.fences = w.fences;
    }
    if (renames) {
        const RegisterUse &source = w.uses[size_t(i.operands[1])];
        w.uses[size_t(i.operands[0])].fences = source.constant ? 0 : source.fences;
    }
}

void add_wgmma(Forms &forms) {
    add_products_of<Bf16, Bf16>(forms, "bf16.bf16");
    add_products_of<F16, F16>(forms, "f16.f16");
    add_products_of<Tf32, Tf32>(forms, "tf32.tf32");
    add_products_of<E4m3, E4m3>(forms, "e4m3.e4m3");
    add_products_of<E4m3, E5m2>(forms, "e4m3.e5m2");
    add_products_of<E5m2, E4m3>(forms, "e5m2.e4m3");
    add_products_of<E5m2, E5m2>(forms, "e5m2.e5m2");
    forms["wgmma.fence.sync.aligned"] = {fence, Pipe::control, 0, {}};
    forms["wgmma.commit_group.sync.aligned"] = {commit, Pipe::control, 0, {}};
    forms["wgmma.wait_group.sync.aligned"] = {wait, Pipe::control, 0, {4}};
}
}  // namespace ptx
