// The products of groups against float64: groups without rows, and of more rows than a tile.
#include "../../llmc/ops/grouped_matmul.h"

#include <sys/mman.h>

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/grouped_matmul.cuh"
#include "../cuda/matmul_context.cuh"
#endif

struct Groups {
    std::vector<int32_t> rows;  // of each group
    size_t IC, OC;
};
static const std::vector<Groups> all_groups = {
    {{1}, 5, 3},           {{0, 7, 0}, 24, 40},    {{3, 0, 70, 1}, 40, 136}, {{130, 64, 65}, 72, 33},
    {{0, 0, 200}, 33, 48}, {{9, 1, 1, 1}, 64, 24}, {{20, 0, 1, 3}, 64, 40},  {std::vector<int32_t>(70, 1), 16, 8}};

template <class Dev> struct GroupedMatmul : testing::Test { MatmulContext context; };
TYPED_TEST_SUITE(GroupedMatmul, Devices);

TYPED_TEST(GroupedMatmul, EqualsReference) {
    using X = typename TypeParam::X;
    for (const Groups &g : all_groups) {
        const size_t E = g.rows.size(), IC = g.IC, OC = g.OC;
        std::vector<int32_t> starts = {0};
        for (int32_t n : g.rows) starts.push_back(starts.back() + n);
        const size_t R = size_t(starts.back());
        printf(" R %zu in %zu groups, IC %zu, OC %zu\n", R, E, IC, OC);
        const auto x = random_values<X>(R * IC, 1), w = random_values<X>(E * OC * IC, 2), dout = random_values<X>(R * OC, 3);
        const auto dw_before = random_values<float>(E * OC * IC, 4);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> d_x(x), d_w(w), d_dout(dout), out(R * OC), dx(R * IC);
            Array<float> dw(dw_before), alone(E * OC * IC);
            Array<int32_t> d_starts(starts);
            grouped_matmul_forward(dev, out.data(), d_x.data(), d_w.data(), d_starts.data(), E, R, IC, OC);
            grouped_matmul_backward_input(dev, dx.data(), d_dout.data(), d_w.data(), d_starts.data(), E, R, IC, OC);
            grouped_matmul_backward_weight(dev, dw.data(), d_dout.data(), d_x.data(), d_starts.data(), E, R, IC, OC, true);
            grouped_matmul_backward_weight(dev, alone.data(), d_dout.data(), d_x.data(), d_starts.data(), E, R, IC, OC, false);
            const auto part = [](const auto &of, size_t first, size_t n) {
                const auto begin = of.begin() + ptrdiff_t(first);
                return std::vector(begin, begin + ptrdiff_t(n));
            };
            const auto all_out = out.values(), all_dx = dx.values();
            const auto all_dw = dw.values(), all_alone = alone.values();
            for (size_t e = 0; e < E; e++) {
                const size_t r = size_t(starts[e]), n = size_t(g.rows[e]);
                const auto x_e = part(x, r * IC, n * IC), w_e = part(w, e * OC * IC, OC * IC),
                           dout_e = part(dout, r * OC, n * OC);
                const auto before = widen(part(dw_before, e * OC * IC, OC * IC));
                const Sums want = product_reference(x_e, IC, 1, w_e, 1, IC, {}, n, OC, IC);
                const Sums want_dx = product_reference(dout_e, OC, 1, w_e, IC, 1, {}, n, IC, OC);
                const Sums want_dw = product_reference(dout_e, 1, OC, x_e, IC, 1, before, OC, IC, n);
                const Sums want_alone = product_reference(dout_e, 1, OC, x_e, IC, 1, {}, OC, IC, n);
                expect_close("out", part(all_out, r * OC, n * OC), want.value, allowed<X>(want, IC));
                expect_close("dx", part(all_dx, r * IC, n * IC), want_dx.value, allowed<X>(want_dx, OC));
                expect_close("dw", part(all_dw, e * OC * IC, OC * IC), want_dw.value, allowed<float>(want_dw, n));
                expect_close("dw, overwritten", part(all_alone, e * OC * IC, OC * IC), want_alone.value,
                             allowed<float>(want_alone, n));
            }
            same(all_out, all_dx, all_dw, all_alone);
        });
    }
}

// Columns [first, first + OC) of wider rows are added to, or read, as adapters of one half of a matrix do; the others stay.
TYPED_TEST(GroupedMatmul, AddsToSomeColumns) {
    using X = typename TypeParam::X;
    for (const size_t first : {8, 3}) {  // with vectors and without
        const size_t E = 3, R = 90, IC = 16, OC = 24, ld = first + OC + 8;
        const std::vector<int32_t> starts = {0, 70, 70, 90};
        const auto x = random_values<X>(R * IC, 1), w = random_values<X>(E * OC * IC, 2), dout = random_values<X>(R * ld, 3),
                   out_before = random_values<X>(R * ld, 4), dx_before = random_values<X>(R * IC, 5);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> d_x(x), d_w(w), d_dout(dout), out(out_before), dx(dx_before), few(out_before);
            Array<float> dw(E * OC * IC);
            Array<int32_t> d_starts(starts), few_starts(std::vector<int32_t>{0, 0, 1, 2});
            grouped_matmul_forward(dev, out.data() + first, d_x.data(), d_w.data(), d_starts.data(), E, R, IC, OC, ld, true);
            grouped_matmul_forward(dev, few.data() + first, d_x.data(), d_w.data(), few_starts.data(), E, 2, IC, OC, ld, true);
            grouped_matmul_backward_input(dev, dx.data(), d_dout.data() + first, d_w.data(), d_starts.data(), E, R, IC, OC, ld,
                                          true);
            grouped_matmul_backward_weight(dev, dw.data(), d_dout.data() + first, d_x.data(), d_starts.data(), E, R, IC, OC,
                                           false, ld);
            std::vector<double> want_out = widen(out_before), want_few = want_out, want_dx = widen(dx_before),
                                want_dw(E * OC * IC);
            const auto wide_x = widen(x), wide_w = widen(w), wide_dout = widen(dout);
            for (size_t e = 0; e < E; e++)
                for (size_t r = size_t(starts[e]); r < size_t(starts[e + 1]); r++)
                    for (size_t o = 0; o < OC; o++)
                        for (size_t i = 0; i < IC; i++) {
                            const size_t at = r * ld + first + o, weight = (e * OC + o) * IC + i;
                            want_out[at] += wide_x[r * IC + i] * wide_w[weight];
                            want_dx[r * IC + i] += wide_dout[at] * wide_w[weight];
                            want_dw[weight] += wide_dout[at] * wide_x[r * IC + i];
                            if (r < 2) want_few[at] += wide_x[r * IC + i] * wide_w[((1 + r) * OC + o) * IC + i];
                        }
            const double sums = 1e-4, rounding = 64 * unit_roundoff<X> + sums;
            expect_close("out", out.values(), want_out, rounding), expect_close("few rows", few.values(), want_few, rounding);
            expect_close("dx", dx.values(), want_dx, rounding), expect_close("dw", dw.values(), want_dw, sums);
            same(out.values(), few.values(), dx.values(), dw.values());
        });
    }
}

// A row's results are the same whatever the other rows of its group are, and in whichever group they are. With many groups, rows are few.
TYPED_TEST(GroupedMatmul, RowsDoNotMix) {
    using X = typename TypeParam::X;
    const size_t R = 100, IC = 64, OC = 48;
    const auto x = random_values<X>(R * IC, 1), w = random_values<X>(OC * IC, 2);
    const auto dev = this->context.device(any_device<TypeParam>());
    for (const size_t E : {3, 100}) {
        std::vector<X> same_w;
        for (size_t e = 0; e < E; e++) same_w.insert(same_w.end(), w.begin(), w.end());
        SameBits same;
        for (const auto &[first, second] : {std::pair{0, 100}, {1, 30}, {31, 96}}) {
            std::vector<int32_t> starts(E + 1, 100);
            starts[0] = 0, starts[1] = first, starts[2] = second;
            Array<X> d_x(x), d_w(same_w), out(R * OC);
            Array<int32_t> d_starts(starts);
            grouped_matmul_forward(dev, out.data(), d_x.data(), d_w.data(), d_starts.data(), E, R, IC, OC);
            same(out.values());
        }
    }
}

#ifndef __CUDACC__  // a GPU does not read this memory
// Groups without rows have pages that nobody may read.
template <class X> struct MatricesWithRows {
    const size_t matrix, bytes;
    X *const w;

    MatricesWithRows(const std::vector<int32_t> &starts, const std::vector<X> &values)
        : matrix(values.size()),
          bytes((starts.size() - 1) * matrix * sizeof(X)),
          w(static_cast<X *>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
        for (size_t e = 0; e + 1 < starts.size(); e++) {
            std::copy(values.begin(), values.end(), w + e * matrix);
            if (starts[e] == starts[e + 1]) mprotect(w + e * matrix, matrix * sizeof(X), PROT_NONE);
        }
    }
    ~MatricesWithRows() { munmap(w, bytes); }
};

// In generation a token reads the weights of the experts that it chose, and no others: the test crashes if another one is read.
TYPED_TEST(GroupedMatmul, ReadsOnlyTheMatricesOfItsGroups) {
    using X = typename TypeParam::X;
    const size_t E = 7, IC = 64, OC = 4096 / sizeof(X);
    const auto w = random_values<X>(OC * IC, 2);
    const auto dev = this->context.device(any_device<TypeParam>());
    for (const int32_t n : {1, 12, 70}) {  // rows of each of two groups
        const std::vector<int32_t> starts = {0, 0, n, n, n, 2 * n, 2 * n, 2 * n};
        const size_t R = size_t(2 * n);
        const MatricesWithRows<X> matrices(starts, w);
        Array<X> x(random_values<X>(R * IC, 1)), out(R * OC), dx(R * IC);
        Array<int32_t> d_starts(starts);
        grouped_matmul_forward(dev, out.data(), x.data(), matrices.w, d_starts.data(), E, R, IC, OC);
        grouped_matmul_backward_input(dev, dx.data(), out.data(), matrices.w, d_starts.data(), E, R, IC, OC);
        for (const X value : dx.values()) ASSERT_TRUE(std::isfinite(float(value)));
    }
}
#endif
