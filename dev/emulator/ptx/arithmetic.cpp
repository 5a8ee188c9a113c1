// Lanewise arithmetic instructions. PTX ISA, "Integer", "Floating Point", "Comparison", "Logic", "Data Movement".
#include <limits>

#include "../../../llmc/ops/fp8.h"
#include "forms.h"

namespace ptx {
namespace {

// ---- floats -----------------------------------------------------------------------------------------------------------------------

// x y + z rounded down or toward zero. The product of two floats is exact in double, and so is the sum with its error.
enum class Rounding { down, to_zero };
template <Rounding rounding> float fma_directed(float x, float y, float z) {
    const double product = double(x) * double(y), sum = product + double(z), part = sum - product;
    if (!std::isfinite(sum)) return float(sum);
    const double error = (product - (sum - part)) + (double(z) - part);
    float nearest = float(sum);
    const double over = double(nearest) - sum;
    const bool above = over > 0 || (over == 0 && error < 0), below = over < 0 || (over == 0 && error > 0);
    if (above && (rounding == Rounding::down || nearest > 0)) nearest = std::nextafterf(nearest, -INFINITY);
    if (below && rounding == Rounding::to_zero && nearest < 0) nearest = std::nextafterf(nearest, INFINITY);
    return nearest;
}

// Approximate instructions have a relative error, here half of the manual's bound. A hash of the argument's bits chooses its sign. Results that are
// exact on a GPU are exact here.
float approximate(float x, double exact, double error) {
    if (!std::isfinite(exact) || exact == 0) return float(exact);
    const bool up = std::bit_cast<uint32_t>(x) * 2654435761u >> 31;
    return float(exact * (1 + (up ? error : -error) * 0.5));
}
float exp2_approximate(float x, double error) {
    return std::nearbyint(x) == x ? std::exp2(x) : approximate(x, std::exp2(double(x)), error);
}
float log2_approximate(float x) {  // near 1 the error is absolute
    const double exact = std::log2(double(x));
    if (std::nearbyint(exact) == exact || exact != exact) return float(exact);
    return approximate(x, exact, 0x1p-22 / std::min(1.0, std::fabs(exact)));
}
float wave_approximate(float x, double exact) {  // a sine or cosine, whose error is absolute
    return exact == 0 ? float(exact) : approximate(x, exact, 0x1p-21 / std::fabs(exact));
}
float divide_approximate(float a, float b) {  // the quotient of large divisors is 0
    if (std::fabs(b) > 0x1p126f && !std::isinf(b)) return a * 0;
    return approximate(a, double(a) / double(b), 0x1p-23);
}
double reciprocal_approximate_64(double x) {  // only the upper half of the result's bits
    return std::bit_cast<double>(std::bit_cast<uint64_t>(1 / x) & ~0xffff'ffffull);
}

// x y + z, of which every rounding to at least two bits fewer is that of the exact value: if it is not exact, its last bit is set.
float fma_to_odd(float x, float y, float z) {
    const float down = fma_directed<Rounding::down>(x, y, z), up = -fma_directed<Rounding::down>(-x, y, -z);
    return std::bit_cast<uint32_t>(up) & 1 ? up : down;
}

float bf16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
uint32_t bf16_bits(float x) {  // to nearest, ties to even
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

uint16_t exp2_bf16(uint16_t x) { return uint16_t(bf16_bits(flush(exp2_approximate(flush(bf16_value(x)), 0x1p-7)))); }
uint16_t fma_bf16(uint16_t x, uint16_t y, uint16_t z) {
    return uint16_t(bf16_bits(fma_to_odd(bf16_value(x), bf16_value(y), bf16_value(z))));
}
// f of both halves of registers
template <class F> struct OfPairs {
    template <class... S> uint32_t operator()(S... pairs) const {
        return uint32_t(F()(uint16_t(pairs >> 16)...)) << 16 | F()(uint16_t(pairs)...);
    }
};

uint16_t f16_bits(float x) { return std::bit_cast<uint16_t>(_Float16(x)); }

// If one argument is NaN, the result is the other.
template <class T> T smaller(T a, T b) { return b != b ? a : a != a ? b : std::min(a, b); }
template <class T> T larger(T a, T b) { return b != b ? a : a != a ? b : std::max(a, b); }

template <class T> void add_floats(Forms &forms, const std::string &type) {
    const Pipe pipe = sizeof(T) == 8 ? Pipe::fp64 : Pipe::fp32;
    for (const std::string rounding : {"", ".rn"}) {
        forms["add" + rounding + "." + type] = form<T, T, T>(pipe, [](T a, T b) { return a + b; });
        forms["sub" + rounding + "." + type] = form<T, T, T>(pipe, [](T a, T b) { return a - b; });
        forms["mul" + rounding + "." + type] = form<T, T, T>(pipe, [](T a, T b) { return a * b; });
    }
    forms["fma.rn." + type] = form<T, T, T, T>(pipe, [](T a, T b, T c) { return std::fma(a, b, c); });
    forms["fma.rn." + type + ", a b - c"] = form<T, T, T, T>(pipe, [](T a, T b, T c) { return std::fma(a, b, -c); });
    forms["fma.rn." + type + ", c - a b"] = form<T, T, T, T>(pipe, [](T a, T b, T c) { return std::fma(-a, b, c); });
    forms["min." + type] = form<T, T, T>(pipe, [](T a, T b) { return smaller(a, b); });
    forms["max." + type] = form<T, T, T>(pipe, [](T a, T b) { return larger(a, b); });
    forms["neg." + type] = form<T, T>(pipe, [](T a) { return -a; });
    forms["abs." + type] = form<T, T>(pipe, [](T a) { return std::fabs(a); });
    forms["copysign." + type] = form<T, T, T>(pipe, [](T a, T b) { return std::copysign(b, a); });
    forms["div.rn." + type] = form<T, T, T>(Pipe::special, [](T a, T b) { return a / b; });
    forms["rcp.rn." + type] = form<T, T>(Pipe::special, [](T a) { return 1 / a; });
    forms["sqrt.rn." + type] = form<T, T>(Pipe::special, [](T a) { return std::sqrt(a); });
    const auto test = [&](const std::string &name, Form f) { forms["setp." + name + "." + type] = f; };
    // if either is NaN: false, and with `u` true
    test("ltu", comparison<T>(pipe, [](T a, T b) { return !(a >= b); }));
    test("leu", comparison<T>(pipe, [](T a, T b) { return !(a > b); }));
    test("gtu", comparison<T>(pipe, [](T a, T b) { return !(a <= b); }));
    test("geu", comparison<T>(pipe, [](T a, T b) { return !(a < b); }));
    test("equ", comparison<T>(pipe, [](T a, T b) { return !(a < b || a > b); }));
    test("neu", comparison<T>(pipe, [](T a, T b) { return !(a == b); }));
    test("num", comparison<T>(pipe, [](T a, T b) { return a == a && b == b; }));
    test("nan", comparison<T>(pipe, [](T a, T b) { return a != a || b != b; }));
    test("ne", comparison<T>(pipe, [](T a, T b) { return a < b || a > b; }));
}

void add_functions(Forms &forms) {
    forms["fma.rm.f32"] = form<float, float, float, float>(
        Pipe::fp32, [](float a, float b, float c) { return fma_directed<Rounding::down>(a, b, c); });
    forms["add.rz.f32"] =
        form<float, float, float>(Pipe::fp32, [](float a, float b) { return fma_directed<Rounding::to_zero>(a, 1, b); });
    const auto special = [&](const std::string &name, auto f) { forms[name + ".f32"] = form<float, float>(Pipe::special, f); };
    special("ex2.approx", [](float a) { return exp2_approximate(a, 0x1p-22); });
    special("lg2.approx", [](float a) { return log2_approximate(a); });
    special("sin.approx", [](float a) { return wave_approximate(a, std::sin(double(a))); });
    special("cos.approx", [](float a) { return wave_approximate(a, std::cos(double(a))); });
    special("tanh.approx", [](float a) { return approximate(a, std::tanh(double(a)), 0x1p-11); });
    special("sqrt.approx", [](float a) { return approximate(a, std::sqrt(double(a)), 0x1p-23); });
    special("rsqrt.approx", [](float a) { return approximate(a, 1 / std::sqrt(double(a)), 0x1p-23); });
    special("rcp.approx", [](float a) { return approximate(a, 1 / double(a), 0x1p-23); });
    forms["div.approx.f32"] = form<float, float, float>(Pipe::special, [](float a, float b) { return divide_approximate(a, b); });
    forms["div.full.f32"] =
        form<float, float, float>(Pipe::special, [](float a, float b) { return approximate(a, double(a) / double(b), 0x1p-22); });
    forms["rcp.approx.ftz.f64"] = form<double, double>(Pipe::special, [](double a) { return reciprocal_approximate_64(a); });
    forms["cvt.f32.f32"] = form<float, float>(Pipe::fp32, [](float a) { return a; });  // with .ftz it flushes
    forms["cvt.f32.bf16"] = form<float, uint16_t>(Pipe::convert, [](uint16_t a) { return bf16_value(a); });
    forms["cvt.f32.f16"] = form<float, uint16_t>(Pipe::convert, [](uint16_t a) { return float(std::bit_cast<_Float16>(a)); });
    forms["cvt.rn.f16.f32"] = form<uint16_t, float>(Pipe::convert, [](float a) { return f16_bits(a); });
    forms["cvt.rn.f16x2.f32"] = form<uint32_t, float, float>(
        Pipe::convert, [](float upper, float lower) { return uint32_t(f16_bits(upper)) << 16 | f16_bits(lower); });
    forms["cvt.sat.f32.f32"] = form<float, float>(Pipe::fp32, [](float a) { return a > 0 ? std::min(a, 1.0f) : 0.0f; });
    forms["cvt.rn.bf16.f32"] = form<uint16_t, float>(Pipe::convert, [](float a) { return uint16_t(bf16_bits(a)); });
    forms["cvt.rn.bf16x2.f32"] = form<uint32_t, float, float>(
        Pipe::convert, [](float upper, float lower) { return bf16_bits(upper) << 16 | bf16_bits(lower); });
    forms["cvt.rn.satfinite.e4m3x2.f32"] = form<uint16_t, float, float>(Pipe::convert, [](float upper, float lower) {
        return uint16_t(fp8_code(fp8_nearest(upper)) << 8 | fp8_code(fp8_nearest(lower)));
    });
}

// Instructions that not every GPU has.
void add_newer(Forms &forms) {
    const auto add = [&](const std::string &name, int architecture, Form f) {
        f.architecture = architecture;
        forms[name] = f;
    };
    using Half = uint16_t;
    using Pair = uint32_t;
    const auto fma = [](Half a, Half b, Half c) { return fma_bf16(a, b, c); };
    const auto exp2 = [](Half a) { return exp2_bf16(a); };
    add("fma.rn.bf16", 80, form<Half, Half, Half, Half>(Pipe::fp32, fma));
    add("fma.rn.bf16x2", 80, form<Pair, Pair, Pair, Pair>(Pipe::fp32, OfPairs<decltype(fma)>()));
    add("ex2.approx.ftz.bf16", 90, form<Half, Half>(Pipe::special, exp2));
    add("ex2.approx.ftz.bf16x2", 90, form<Pair, Pair>(Pipe::special, OfPairs<decltype(exp2)>()));
    add("min.f32 4", 100,
        form<float, float, float, float>(Pipe::fp32, [](float a, float b, float c) { return smaller(smaller(a, b), c); }));
    add("max.f32 4", 100,
        form<float, float, float, float>(Pipe::fp32, [](float a, float b, float c) { return larger(larger(a, b), c); }));
}

// ---- integers ---------------------------------------------------------------------------------------------------------------------

template <class T> T quotient(T a, T b) {  // also called with the arbitrary values of inactive lanes
    if (b == 0) return T(~T(0));
    return std::is_signed_v<T> && b == T(-1) ? T(0 - std::make_unsigned_t<T>(a)) : T(a / b);
}
template <class T> T remainder_of(T a, T b) { return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b); }

// Instructions whose result or name depends on the sign.
template <class T> void add_integers(Forms &forms, const std::string &type) {
    using U = std::make_unsigned_t<T>;  // its sums wrap around
    const Pipe pipe = Pipe::integer;
    forms["add." + type] = form<U, U, U>(pipe, [](U a, U b) { return a + b; });
    forms["sub." + type] = form<U, U, U>(pipe, [](U a, U b) { return a - b; });
    forms["neg." + type] = form<U, U>(pipe, [](U a) { return U(0) - a; });
    forms["abs." + type] = form<U, T>(pipe, [](T a) { return a < 0 ? U(0) - U(a) : U(a); });
    forms["min." + type] = form<T, T, T>(pipe, [](T a, T b) { return std::min(a, b); });
    forms["max." + type] = form<T, T, T>(pipe, [](T a, T b) { return std::max(a, b); });
    forms["mul.lo." + type] = form<U, U, U>(pipe, [](U a, U b) { return uint64_t(a) * b; });
    forms["mad.lo." + type] = form<U, U, U, U>(pipe, [](U a, U b, U c) { return uint64_t(a) * b + c; });
    forms["div." + type] = form<T, T, T>(pipe, [](T a, T b) { return quotient(a, b); });
    forms["rem." + type] = form<T, T, T>(pipe, [](T a, T b) { return remainder_of(a, b); });
    forms["shr." + type] = form<T, T, uint32_t>(pipe, [](T a, uint32_t n) {
        return n < 8 * sizeof(T) ? T(a >> n) : a < 0 ? T(~T(0)) : T(0);
    });
    if constexpr (sizeof(T) < 8) {
        using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                                        std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
        forms["mul.hi." + type] = form<T, T, T>(pipe, [](T a, T b) { return (Wide(a) * Wide(b)) >> 8 * sizeof(T); });
        forms["mul.wide." + type] = form<Wide, T, T>(pipe, [](T a, T b) { return Wide(a) * Wide(b); });
        forms["mad.wide." + type] = form<Wide, T, T, Wide>(pipe, [](T a, T b, Wide c) { return Wide(a) * Wide(b) + c; });
    } else {
        using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        forms["mul.hi." + type] = form<T, T, T>(pipe, [](T a, T b) { return T(Wide(a) * Wide(b) >> 64); });
    }
}

template <class T> void add_comparisons(Forms &forms, const std::string &type) {  // for any type
    const Pipe pipe = type == "f64" ? Pipe::fp64 : type == "f32" ? Pipe::fp32 : Pipe::integer;
    const auto test = [&](const std::string &name, Form f) { forms.try_emplace("setp." + name + "." + type, f); };
    test("eq", comparison<T>(pipe, [](T a, T b) { return a == b; }));
    test("ne", comparison<T>(pipe, [](T a, T b) { return a != b; }));
    test("lt", comparison<T>(pipe, [](T a, T b) { return a < b; }));
    test("le", comparison<T>(pipe, [](T a, T b) { return a <= b; }));
    test("gt", comparison<T>(pipe, [](T a, T b) { return a > b; }));
    test("ge", comparison<T>(pipe, [](T a, T b) { return a >= b; }));
}

// Bit operations and moves, named after the types of their size.
template <class U> void add_bits(Forms &forms, const std::vector<std::string> &types) {
    for (const std::string &type : types) {
        forms["mov." + type] = form<U, U>(Pipe::move, [](U a) { return a; });
        forms["selp." + type] = {select<U>, Pipe::integer, 1, {sizeof(U), sizeof(U), sizeof(U), 0}};
    }
    const std::string type = types[0];
    forms["and." + type] = form<U, U, U>(Pipe::integer, [](U a, U b) { return a & b; });
    forms["or." + type] = form<U, U, U>(Pipe::integer, [](U a, U b) { return a | b; });
    forms["xor." + type] = form<U, U, U>(Pipe::integer, [](U a, U b) { return a ^ b; });
    forms["not." + type] = form<U, U>(Pipe::integer, [](U a) { return ~a; });
    forms["shl." + type] =
        form<U, U, uint32_t>(Pipe::integer, [](U a, uint32_t n) { return n < 8 * sizeof(U) ? U(uint64_t(a) << n) : U(0); });
}

// Packs two halves into one register, {a, b} -> d; unpack() is the inverse.
template <class Part, class Whole> void pack(Warp &w, const Instruction &i) {
    const auto join = [](Part low, Part high) { return Whole(low) | Whole(high) << 8 * sizeof(Part); };
    lanewise<decltype(join), Whole, Part, Part>(w, i);
}
template <class Part, class Whole> void unpack(Warp &w, const Instruction &i) {
    alignas(64) Part low[lanes], high[lanes];
    const Whole *whole = w.values<Whole>(i.operands[2]);
    for (int l = 0; l < lanes; l++) low[l] = Part(whole[l]), high[l] = Part(whole[l] >> 8 * sizeof(Part));
    w.write(i.operands[0], low);
    w.write(i.operands[1], high);
}

template <class U> U lowest_bits(uint32_t n) { return n < 8 * sizeof(U) ? (U(1) << n) - 1 : ~U(0); }
template <class U> U insert_field(U a, U b, uint32_t position, uint32_t length) {  // inserts the lowest bits of a into b
    position &= 255, length &= 255;
    if (position >= 8 * sizeof(U)) return b;
    const U mask = U(lowest_bits<U>(length) << position);
    return U((b & ~mask) | (U(a << position) & mask));
}
template <class T> T extract_field(T a, uint32_t position, uint32_t length) {  // sign-extends beyond the last bit
    using U = std::make_unsigned_t<T>;
    position &= 255, length &= 255;
    constexpr uint32_t bits = 8 * sizeof(T);
    if (length == 0) return 0;
    const U field = position < bits ? U(U(a) >> position) & lowest_bits<U>(length) : U(0);
    const uint32_t last = std::min(position + length - 1, bits - 1), width = last >= position ? last - position + 1 : 0;
    const bool negative = std::is_signed_v<T> && U(a) >> last & 1;
    return T(negative ? field | ~lowest_bits<U>(width) : field);
}
template <class U> U reverse_bits(U a) {
    U reversed = 0;
    for (size_t k = 0; k < 8 * sizeof(U); k++) reversed = U(reversed << 1 | (a >> k & 1));
    return reversed;
}
uint32_t look_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {  // applied bit by bit
    uint32_t result = 0;
    for (uint32_t n = 0; n < 8; n++)
        if (table >> n & 1) result |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return result;
}

// Each four bits of `select` choose one of the eight bytes of a and b; if the fourth bit is set, the result is eight copies of that byte's sign.
uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t select) {
    const uint64_t both = uint64_t(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t choice = select >> 4 * i & 15, byte = uint32_t(both >> 8 * (choice & 7)) & 0xff;
        out |= (choice & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return out;
}

template <class U, class S> void add_bit_functions(Forms &forms, const std::string &bits) {
    const Pipe pipe = Pipe::integer;
    forms["bfi.b" + bits] =
        form<U, U, U, uint32_t, uint32_t>(pipe, [](U a, U b, uint32_t at, uint32_t n) { return insert_field(a, b, at, n); });
    forms["bfe.u" + bits] =
        form<U, U, uint32_t, uint32_t>(pipe, [](U a, uint32_t at, uint32_t n) { return extract_field(a, at, n); });
    forms["bfe.s" + bits] =
        form<S, S, uint32_t, uint32_t>(pipe, [](S a, uint32_t at, uint32_t n) { return extract_field(a, at, n); });
    forms["brev.b" + bits] = form<U, U>(pipe, [](U a) { return reverse_bits(a); });
    forms["popc.b" + bits] = form<uint32_t, U>(pipe, [](U a) { return std::popcount(a); });
    forms["clz.b" + bits] = form<uint32_t, U>(pipe, [](U a) { return std::countl_zero(a); });
}

void add_special_bits(Forms &forms) {
    using U = uint32_t;
    forms["mov.b32 pack"] = {pack<uint16_t, uint32_t>, Pipe::move, 1, {4, 2, 2}};
    forms["mov.b64 pack"] = {pack<uint32_t, uint64_t>, Pipe::move, 1, {8, 4, 4}};
    forms["mov.b32 unpack"] = {unpack<uint16_t, uint32_t>, Pipe::move, 2, {2, 2, 4}};
    forms["mov.b64 unpack"] = {unpack<uint32_t, uint64_t>, Pipe::move, 2, {4, 4, 8}};
    add_bit_functions<uint32_t, int32_t>(forms, "32"), add_bit_functions<uint64_t, int64_t>(forms, "64");
    forms["lop3.b32"] = form<U, U, U, U, U>(Pipe::integer, [](U a, U b, U c, U table) { return look_up(a, b, c, table); });
    const auto funnel = [&](const std::string &name, auto f) {
        forms["shf." + name + ".b32"] = form<U, U, U, U>(Pipe::integer, f);
    };
    funnel("l.wrap", [](U a, U b, U n) { return U(((uint64_t(b) << 32 | a) << (n & 31)) >> 32); });
    funnel("r.wrap", [](U a, U b, U n) { return U((uint64_t(b) << 32 | a) >> (n & 31)); });
    funnel("l.clamp", [](U a, U b, U n) { return n > 31 ? a : U(((uint64_t(b) << 32 | a) << n) >> 32); });
    funnel("r.clamp", [](U a, U b, U n) { return n > 31 ? b : U((uint64_t(b) << 32 | a) >> n); });
    forms["prmt.b32"] = form<U, U, U, U>(Pipe::integer, [](U a, U b, U select) { return permute_bytes(a, b, select); });
    forms["cvt.s16.s8"] = form<int16_t, int16_t>(Pipe::integer, [](int16_t a) { return int16_t(int8_t(a)); });  // of the low byte
    forms["bfind.shiftamt.u32"] = form<U, U>(Pipe::integer, [](U a) { return a ? U(std::countl_zero(a)) : ~0u; });
    forms["mov.pred"] = logic<1>(Pipe::move, [](U a) { return a; });
    forms["not.pred"] = logic<1>(Pipe::integer, [](U a) { return ~a; });
    forms["and.pred"] = logic<2>(Pipe::integer, [](U a, U b) { return a & b; });
    forms["or.pred"] = logic<2>(Pipe::integer, [](U a, U b) { return a | b; });
    forms["xor.pred"] = logic<2>(Pipe::integer, [](U a, U b) { return a ^ b; });
}

// ---- conversions ------------------------------------------------------------------------------------------------------------------

template <class D, class S> D truncated(S x) {  // saturating conversion to an integer; NaN becomes 0
    if (x != x) return 0;
    if (x <= S(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    if (x >= S(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    return D(x);
}

template <class S> void add_conversions_from(Forms &forms, const std::string &from) {
    const auto to = [&]<class D>(D, const std::string &type) {
        constexpr bool float_to = std::is_floating_point_v<D>, float_from = std::is_floating_point_v<S>;
        const Pipe pipe = float_to || float_from ? Pipe::convert : Pipe::integer;
        if constexpr (!float_to && float_from) {
            forms["cvt.rzi." + type + "." + from] = form<D, S>(pipe, [](S a) { return truncated<D>(a); });
            forms["cvt.rni." + type + "." + from] = form<D, S>(pipe, [](S a) { return truncated<D>(std::nearbyint(a)); });
            forms["cvt.rmi." + type + "." + from] = form<D, S>(pipe, [](S a) { return truncated<D>(std::floor(a)); });
            forms["cvt.rpi." + type + "." + from] = form<D, S>(pipe, [](S a) { return truncated<D>(std::ceil(a)); });
        } else {
            const bool exact = !float_to || (float_from && sizeof(D) > sizeof(S));
            forms["cvt." + std::string(exact ? "" : "rn.") + type + "." + from] = form<D, S>(pipe, [](S a) { return D(a); });
        }
    };
    to(int16_t(), "s16"), to(uint16_t(), "u16"), to(int32_t(), "s32"), to(uint32_t(), "u32");
    to(int64_t(), "s64"), to(uint64_t(), "u64"), to(float(), "f32"), to(double(), "f64");
}

template <class T> void add_type(Forms &forms, const std::string &type) {
    if constexpr (std::is_floating_point_v<T>) {
        add_floats<T>(forms, type);
        forms["cvt.rzi." + type + "." + type] = form<T, T>(Pipe::convert, [](T a) { return std::trunc(a); });
        forms["cvt.rni." + type + "." + type] = form<T, T>(Pipe::convert, [](T a) { return std::nearbyint(a); });
        forms["cvt.rmi." + type + "." + type] = form<T, T>(Pipe::convert, [](T a) { return std::floor(a); });
        forms["cvt.rpi." + type + "." + type] = form<T, T>(Pipe::convert, [](T a) { return std::ceil(a); });
    } else add_integers<T>(forms, type);
    add_comparisons<T>(forms, type);
    add_conversions_from<T>(forms, type);
}
}  // namespace

void add_arithmetic(Forms &forms) {
    add_type<int16_t>(forms, "s16"), add_type<uint16_t>(forms, "u16"), add_type<int32_t>(forms, "s32");
    add_type<uint32_t>(forms, "u32"), add_type<int64_t>(forms, "s64"), add_type<uint64_t>(forms, "u64");
    add_type<float>(forms, "f32"), add_type<double>(forms, "f64");
    add_comparisons<uint16_t>(forms, "b16"), add_comparisons<uint32_t>(forms, "b32"), add_comparisons<uint64_t>(forms, "b64");
    add_bits<uint16_t>(forms, {"b16", "u16", "s16"});
    add_bits<uint32_t>(forms, {"b32", "u32", "s32", "f32"});
    add_bits<uint64_t>(forms, {"b64", "u64", "s64", "f64"});
    add_special_bits(forms);
    add_functions(forms);
    add_newer(forms);
}
}  // namespace ptx
