// Helpers for tests of ops: random inputs, and the comparison with a float64 reference, which prints the measured and the allowed error.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "../llmc/core/device.h"
#include "../llmc/core/floats.h"
#include "../llmc/core/rng.h"

using CpuDevices = testing::Types<CpuF32, CpuBf16>;

template <class Dev> Dev make_device(int threads = 2) {  // one context per type for the whole test program
    static ContextPtr ctx = make_context();
    return Dev{threads, ctx.get()};
}

// Largest relative error of rounding to nearest: 2^-p for p significant bits.
template <class X> constexpr double unit_roundoff = sizeof(X) == 2 ? 0x1p-8 : 0x1p-24;

// n values of mean + deviation * N(0,1), rounded to X: op and reference get the same numbers.
template <class X> std::vector<X> random_values(size_t n, uint32_t stream, double deviation = 1, double mean = 0) {
    const Random random{1, Purpose::test, stream};
    std::vector<X> out(n);
#pragma omp parallel for if (n > 1 << 20)  // timed arrays may be large
    for (size_t i = 0; i < n; i++) out[i] = X(float(mean + deviation * random.normal(i)));
    return out;
}

template <class X> std::vector<double> widen(const std::vector<X> &v) {
    std::vector<double> out(v.size());
    for (size_t i = 0; i < v.size(); i++) out[i] = double(float(v[i]));
    return out;
}
inline std::vector<double> widen(const std::vector<double> &v) { return v; }

// An array for a CPU device: copied in from a vector, or full of NaN.
template <class T> struct HostArray : std::vector<T> {
    explicit HostArray(size_t n) : std::vector<T>(n) {
        std::fill_n(reinterpret_cast<unsigned char *>(this->data()), n * sizeof(T), 0xff);
    }
    explicit HostArray(const std::vector<T> &v) : std::vector<T>(v) {}
    const std::vector<T> &values() const { return *this; }
};

// The arrays of a Floats<X> on the host.
template <class X> struct HostFloats {
    HostArray<X> rounded;
    HostArray<int16_t> lower;

    explicit HostFloats(const std::vector<float> &values) : rounded(values.size()), lower(Floats<X>::halves ? values.size() : 0) {
        for (size_t i = 0; i < values.size(); i++) where().store(i, values[i]);
    }
    HostFloats(const std::vector<X> &rounded, const std::vector<int16_t> &lower) : rounded(rounded), lower(lower) {}

    Floats<X> where() { return {rounded.data(), lower.data()}; }
    std::vector<float> values() {
        std::vector<float> out(rounded.size());
        for (size_t i = 0; i < out.size(); i++) out[i] = where().load(i);
        return out;
    }
};

template <class T> double largest(const std::vector<T> &v) {
    double out = 0;
    for (const T &e : v) out = std::max(out, std::abs(double(e)));
    return out;
}

// Largest absolute difference; infinite if there is a NaN.
template <class A, class B> double worst_difference(const std::vector<A> &got, const std::vector<B> &want) {
    EXPECT_EQ(got.size(), want.size());
    double worst = 0;
    for (size_t i = 0; i < std::min(got.size(), want.size()); i++) {
        const double d = std::abs(double(got[i]) - double(want[i]));
        worst = d == d ? std::max(worst, d) : INFINITY;
    }
    return worst;
}

// `allowed` is absolute. It is derived (roundoff of the storage type times the growth of errors in the op), not tuned.
template <class A, class B>
void expect_close(const char *what, const std::vector<A> &got, const std::vector<B> &want, double allowed) {
    const auto g = widen(got), w = widen(want);
    const double worst = worst_difference(g, w);
    printf("  %-40s %.2g of %.2g allowed\n", what, worst, allowed);
    EXPECT_LE(worst, allowed) << what;
}

// Expects the same bits in all calls, for example for each number of threads: compares later results with the first one.
class SameBits {
    std::vector<unsigned char> first_;

  public:
    template <class... T> bool hold(const std::vector<T> &...arrays) {
        std::vector<unsigned char> bits;
        const auto append = [&](const auto &v) {
            const auto *p = reinterpret_cast<const unsigned char *>(v.data());
            bits.insert(bits.end(), p, p + v.size() * sizeof v[0]);
        };
        (append(arrays), ...);
        if (first_.empty()) first_ = bits;
        return bits == first_;
    }
    template <class... T> void operator()(const std::vector<T> &...arrays) { EXPECT_TRUE(hold(arrays...)) << "the bits differ"; }
};
