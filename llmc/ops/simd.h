// Vectors of floats, vectorised loops over arrays, and elementary functions of vectors and floats. They have no branches and no calls, only
// arithmetic and selects, so GCC can vectorise them inside `#pragma omp simd` loops, unlike calls to libm.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "../core/dtype.h"

namespace simd {

#ifdef __AVX512F__
constexpr size_t lanes = 16;
#else
constexpr size_t lanes = 8;
#endif
typedef float Vector __attribute__((vector_size(lanes * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(lanes * sizeof(float))));

// Loads a vector from elements of any type at p, which must be aligned to the vector.
typedef Vector Stored __attribute__((may_alias));
inline Vector load_vector(const void *p) { return *static_cast<const Stored *>(p); }
inline void store_vector(void *p, Vector v) { *static_cast<Stored *>(p) = v; }

// Calls body<V>(i) until all n elements are covered. A call covers the elements of one V from i on: a Vector or, at the end, a float.
template <class Body> void for_each(size_t n, Body body) {
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) body.template operator()<Vector>(i);
    for (; i < n; i++) body.template operator()<float>(i);
}

// load and store convert between elements and floats in such a body. Unlike a loop vectorised by GCC, they prefetch 1 KiB ahead, because the CPU's
// prefetcher does not continue across rows; and they round to bf16 by an instruction if the CPU has one (it rounds values below 2^-126 to 0).
typedef Vector Floats __attribute__((aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(lanes * sizeof(uint16_t)), aligned(2), may_alias));

inline Bits widened(Halves h) {
#ifdef __AVX512F__
    return Bits(_mm512_maskz_cvtepu16_epi32(0xffff, __m256i(h)));
#else
    return __builtin_convertvector(h, Bits);
#endif
}
template <class V, class X> V load(const X *x) {
    if constexpr (std::is_same_v<V, float>) return *x;
    else {
        __builtin_prefetch(reinterpret_cast<const char *>(x) + 1024);
        if constexpr (std::is_same_v<X, float>) return *reinterpret_cast<const Floats *>(x);
        else return std::bit_cast<V>(widened(*reinterpret_cast<const Halves *>(x)) << 16);
    }
}
template <class X> void store(X *x, float v) { *x = v; }
inline void store(float *x, Vector v) { *reinterpret_cast<Floats *>(x) = v; }
inline void store(bf16 *x, Vector v) {
#ifdef __AVX512BF16__
    *reinterpret_cast<Halves *>(x) = Halves(_mm512_cvtneps_pbh(__m512(v)));
#else
    const Bits u = std::bit_cast<Bits>(v), rounded = v == v ? u + 0x7fff + (u >> 16 & 1) : u | 0x400000;
    *reinterpret_cast<Halves *>(x) = __builtin_convertvector(rounded >> 16, Halves);
#endif
}

}  // namespace simd

// exp(x) to 1 unit in the last place. Results below 2^-126 are 0 (so exp(-inf) = 0), above the largest float +inf; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; exp(r) by the polynomial of Cephes' expf (Moshier), then n is added to its exponent.
template <class F> inline F fast_exp(F x) {  // F: float or simd::Vector
    using Word = std::conditional_t<sizeof(F) == sizeof(float), uint32_t, simd::Bits>;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x / ln 2) in the low bits of the sum
    const F shifted = x * 1.44269504f + magic, n = shifted - magic;
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts: n times the first is exact
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const F scaled = std::bit_cast<F>(std::bit_cast<Word>(p) + (std::bit_cast<Word>(shifted) << 23));
    const F positive = x >= -87.33654f ? scaled : F{};
    return x <= 88.72283f ? positive : x + INFINITY;  // NaN takes the second arm, and stays NaN there
}

// log(x) of a normal positive float, within 2^-23 of the larger of 1 and |log(x)|; finite for 0, so that 0 log 0 = 0. x = 2^n m with
// sqrt(1/2) <= m < sqrt(2); log(m) by the polynomial of Cephes' logf (Moshier).
inline float fast_log(float x) {
    const int32_t bits = std::bit_cast<int32_t>(x), exponent = (bits - 0x3f3504f3) >> 23;  // 0x3f3504f3: sqrt(1/2)
    const float n = float(exponent), f = std::bit_cast<float>(bits - (exponent << 23)) - 1, square = f * f;
    float p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const float rest = p * f * square - n * 2.12194440e-4f - 0.5f * square;  // ln 2 in two parts, as above
    return f + rest + n * 0.693359375f;
}

// exp(x) with a relative error of 4e-6, for values that are then rounded to bf16: 2^x = 2^floor(x) 2^(x - floor(x)), with a polynomial for the
// latter.
inline simd::Vector rough_exp(simd::Vector x) {
#ifdef __AVX512DQ__
    const __m512 t = __m512(x * 1.44269504f);
    const simd::Vector f(_mm512_maskz_reduce_ps(0xffff, t, _MM_FROUND_TO_NEG_INF));  // t - floor(t)
    const simd::Vector p = (((f * 1.3534167e-2f + 5.2011464e-2f) * f + 2.4144275e-1f) * f + 6.9300383e-1f) * f + 1.0000026f;
    return simd::Vector(_mm512_maskz_scalef_ps(0xffff, __m512(p), t));  // p 2^floor(t)
#else
    return fast_exp(x);
#endif
}

namespace simd {

// Permutes the lanes of one vector, or selects lanes from two: lane l of the result is lane from(l) of (a, b).
template <class From, size_t... l> inline Vector choose(Vector a, Vector b, From from, std::index_sequence<l...>) {
    return Vector{(from(l) < lanes ? a : b)[from(l) % lanes]...};
}
template <class From> inline Vector choose(Vector a, Vector b, From from) {
    return choose(a, b, from, std::make_index_sequence<lanes>());
}

inline float largest(Vector v) {  // the largest lane
    const auto fold = [&]<size_t half>() {
        const Vector other = choose(v, v, [](size_t l) { return l ^ half; });
        v = v > other ? v : other;
    };
    if constexpr (lanes == 16) fold.template operator()<8>();
    fold.template operator()<4>();
    fold.template operator()<2>();
    fold.template operator()<1>();
    return v[0];
}

// Exchanges rows[i][j] and rows[j][i], by exchanging the off-diagonal halves of ever smaller squares.
inline void transpose_square(Vector (&rows)[lanes]) {
    const auto exchange = [&]<size_t half>() {
#pragma GCC unroll 16
        for (size_t i = 0; i < lanes; i++) {
            if (i & half) continue;
            const Vector a = rows[i], b = rows[i + half];
            rows[i] = choose(a, b, [](size_t l) { return l & half ? lanes + l - half : l; });
            rows[i + half] = choose(a, b, [](size_t l) { return l & half ? lanes + l : l + half; });
        }
    };
    if constexpr (lanes == 16) exchange.template operator()<8>();
    exchange.template operator()<4>();
    exchange.template operator()<2>();
    exchange.template operator()<1>();
}

}  // namespace simd
