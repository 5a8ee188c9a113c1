// dequantise: converts weights of 4 or 8 bits to X for a product                                    Contract: llmc/ops/dequantise.h
// Timed with the gate and up projections of Llama-3 8B in 4 bits. For each weight the op reads 0.516 bytes and writes sizeof(X): 2.5 bytes
// in bf16, where a copy moves 4.
#include "../../llmc/ops/dequantise.cuh"
#include "../../llmc/ops/quantise.h"
#include "../../test/reference_dequantise.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per weight ----------------------------------------------------------------------------------------------
//
// Each thread reads a byte of codes and uses half of it. Like the 63 other threads of its block of weights, it computes the magnitude of this
// block with three dependent loads. It writes 2 bytes. In 8 bits it finds its row with a 64-bit division. `values` are the 16 NF4 values, in memory.

template <class X> __global__ void dequantise_kernel1(X *out, const float *values, Quantised q) {
    const size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (i >= q.count()) return;
    if (q.bits == 8) out[i] = float(int8_t(q.codes[i])) * q.scales[i / q.columns];
    else out[i] = values[nf4_code(q.codes, i)] * nf4_magnitude(q, i / nf4_block);
}

template <class X> void dequantise1(Cuda<X> dev, X *out, const float *values, Quantised q) {
    launch(dev, dequantise_kernel1<X>, Grid{ceil_div(q.count(), 256)}, 256, 0, out, values, q);
}

// ---- version 2: a thread per 8 weights ---------------------------------------------------------------------------------------------
//
// Eight weights of a block, or of a row, share a load of codes, a magnitude, and in bf16 a store of 16 bytes. The limit is one load of `values`
// per weight, not the memory bandwidth: lanes that read different elements of a table need separate wavefronts.

template <class X> __global__ void dequantise_kernel2(X *out, const float *values, Quantised q) {
    constexpr int N = 8;
    const size_t first = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
    if (first >= q.count()) return;
    Vec<X, N> w;
    if (q.bits == 8) {
        const auto codes = Vec<int8_t, N>::load(reinterpret_cast<const int8_t *>(q.codes) + first);
        const float scale = q.scales[first / q.columns];
        for (int i = 0; i < N; i++) w[i] = float(codes[i]) * scale;
    } else {
        const auto codes = Vec<uint8_t, N / 2>::load(q.codes + first / 2);
        const float m = nf4_magnitude(q, first / nf4_block);
        for (int i = 0; i < N; i++) w[i] = values[nf4_code(codes.v, size_t(i))] * m;
    }
    w.store(out + first);
}

template <class X> void dequantise2(Cuda<X> dev, X *out, const float *values, Quantised q) {
    if (q.columns % 8) return dequantise1(dev, out, values, q);
    launch(dev, dequantise_kernel2<X>, Grid{ceil_div(q.count(), 256 * 8)}, 256, 0, out, values, q);
}

// ---- version 3: llmc/ops/dequantise.cuh ----------------------------------------------------------------------------------------
//
// The 16 values are in 16 banks of shared memory, so all lanes of a warp can read any of them at once; the memory bandwidth is the limit. With
// 8 bits a dimension of the grid is the row, without a division.

template <class X> void dequantise3(Cuda<X> dev, X *out, const float *, Quantised q) { dequantise(dev, out, q); }

template <class X> struct Dequantise {
    int bits;
    size_t rows, columns;
    QuantisedArrays q;
    DeviceArray<uint8_t> codes, magnitudes;
    DeviceArray<float> scales, of, values;
    DeviceArray<X> out;

    explicit Dequantise(const Sizes &s)
        : bits(bits_of(s[0])),
          rows(s[1]),
          columns(s[2]),
          q(quantise(bits, random_values<X>(rows * columns, 1), columns)),
          codes(q.codes),
          magnitudes(q.magnitudes),
          scales(q.scales),
          of(std::vector<float>(fractions(true).of, fractions(true).of + Fractions::count)),
          values(nf4_values()),
          out(rows * columns) {}

    static int bits_of(size_t bits) {
        if (bits != 4 && bits != 8) die("weights of %zu bits are not supported\n  fix: 4 or 8 bits", bits);
        return int(bits);
    }

    static std::vector<float> nf4_values() {
        std::vector<float> values;
        for (int code = 0; code < 16; code++) values.push_back(nf4_value(code));
        return values;
    }

    static constexpr void (*versions[])(Cuda<X>, X *out, const float *values, Quantised q) = {dequantise1, dequantise2,
                                                                                              dequantise3};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), values.data(),
                              {bits, rows, columns, codes.data(), magnitudes.data(), scales.data(), of.data()});
    }

    void check(Check &check) const {
        const std::vector<double> want = dequantise_reference(bits, q, rows, columns);
        check("out", out.values(), want, dequantise_error<X>(bits, q, want));
    }

    Work work() const {
        return {.bytes = double(q.codes.size() + q.magnitudes.size() + q.scales.size() * sizeof(float)) +
                         double(rows * columns * sizeof(X))};
    }
};

static const Ladder<Dequantise, float, bf16> ladder(
    {.name = "dequantise",
     .sizes = {{"bits", "of a weight, 4 or 8", 4, 4},
               {"rows", "of the matrix", 28672, 128},
               {"columns", "of the matrix", 4096, 4096}},
     .checked = {{4, 1, 1}, {4, 3, 21}, {4, 7, 83}, {4, 5, 1032}, {8, 1, 1}, {8, 7, 83}, {8, 5, 1032}},
     .ideas = {"a thread per weight", "a thread per 8 weights", "shipped: the 16 values in shared memory"}});
}  // namespace CUDA_BACKEND::workshop
