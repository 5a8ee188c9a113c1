// Products of groups, among them groups without rows and groups with more rows than a tile.
#include "../../llmc/ops/grouped_matmul.h"

#include <sys/mman.h>

#include "../reference_matmul.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/grouped_matmul.cuh"
#include "../cuda/matmul_context.cuh"
#endif

struct Groups {
    std::vector<int32_t> rows;  // per group
    size_t IC, OC;
    size_t first = 0,
           ld = OC;  // out and dout are the columns [first, first + OC) of rows of ld, as for adapters of one half of a matrix
};
static const std::vector<Groups> all_groups = {{{1}, 5, 3},
                                               {{0, 7, 0}, 24, 40},
                                               {{3, 0, 70, 1}, 40, 136},
                                               {{130, 64, 65}, 72, 33},
                                               {{0, 0, 200}, 33, 48},
                                               {{9, 1, 1, 1}, 64, 24},
                                               {{20, 0, 1, 3}, 64, 40},
                                               {std::vector<int32_t>(70, 1), 16, 8},
                                               {{70, 0, 20}, 16, 24, 8, 40},
                                               {{70, 0, 20}, 16, 24, 3, 35},
                                               {{0, 1, 1}, 16, 24, 8, 40},
                                               {{0, 1, 1}, 16, 24, 3, 35}};

template <class Dev> struct GroupedMatmul : testing::Test { MatmulContext context; };
TYPED_TEST_SUITE(GroupedMatmul, Devices);

// If out has more columns than the product, the op adds to its part and keeps the other columns; otherwise it overwrites whole rows.
TYPED_TEST(GroupedMatmul, EqualsReference) {
    using X = typename TypeParam::X;
    for (const auto &[rows, IC, OC, first, ld] : all_groups) {
        const size_t E = rows.size();
        const bool adds = ld > OC;
        std::vector<int32_t> starts = {0};
        for (int32_t n : rows) starts.push_back(starts.back() + n);
        const size_t R = size_t(starts.back());
        printf(" R %zu in %zu groups, IC %zu, OC %zu of %zu\n", R, E, IC, OC, ld);
        const auto x = random_values<X>(R * IC, 1), w = random_values<X>(E * OC * IC, 2), dout = random_values<X>(R * ld, 3);
        const auto dw_before = random_values<float>(E * OC * IC, 4);
        const auto before = [&](size_t n) { return adds ? random_values<X>(n, 5) : std::vector<X>(n, X(NAN)); };
        const auto out_before = before(R * ld), dx_before = before(R * IC);
        SameBits same;
        for_each_order<TypeParam>([&, &rows = rows, IC = IC, OC = OC, first = first, ld = ld](TypeParam dev) {
            dev = this->context.device(dev);
            Array<X> d_x(x), d_w(w), d_dout(dout), out(out_before), dx(dx_before);
            Array<float> dw(dw_before), alone(E * OC * IC);
            Array<int32_t> d_starts(starts);
            const RowGroups groups{d_starts.data(), E, R};
            grouped_matmul_forward(dev, out.data() + first, d_x.data(), d_w.data(), groups, IC, OC, ld, adds);
            grouped_matmul_backward_input(dev, dx.data(), d_dout.data() + first, d_w.data(), groups, IC, OC, ld, adds);
            for (auto *to : {&dw, &alone})
                grouped_matmul_backward_weight(dev, to->data(), d_dout.data() + first, d_x.data(), groups, IC, OC, to == &dw, ld);
            const auto part = [](const auto &of, size_t begin, size_t n) {
                return std::vector(of.begin() + ptrdiff_t(begin), of.begin() + ptrdiff_t(begin + n));
            };
            const auto columns = [&](const std::vector<X> &of, size_t r, size_t n) {
                std::vector<X> some;
                for (size_t i = r; i < r + n; i++) some.insert(some.end(), &of[i * ld + first], &of[i * ld + first] + OC);
                return some;
            };
            const auto all_out = out.values(), all_dx = dx.values();
            const auto all_dw = dw.values(), all_alone = alone.values();
            for (size_t e = 0; e < E; e++) {
                const size_t r = size_t(starts[e]), n = size_t(rows[e]);
                const auto x_e = part(x, r * IC, n * IC), w_e = part(w, e * OC * IC, OC * IC), dout_e = columns(dout, r, n);
                const auto expect = [&](const char *what, const std::vector<X> &got, Sums want, const std::vector<X> &start,
                                        size_t K) {
                    double error = allowed<X>(want, K);
                    for (size_t i = 0; adds && i < start.size(); i++) want.value[i] += double(start[i]);
                    if (adds) error += 2 * unit_roundoff<X> * largest(widen(start));
                    expect_close(what, got, want.value, error);
                };
                expect("out", columns(all_out, r, n), product_reference(x_e, IC, 1, w_e, 1, IC, {}, n, OC, IC),
                       columns(out_before, r, n), IC);
                expect("dx", part(all_dx, r * IC, n * IC), product_reference(dout_e, OC, 1, w_e, IC, 1, {}, n, IC, OC),
                       part(dx_before, r * IC, n * IC), OC);
                const Sums want_dw =
                    product_reference(dout_e, 1, OC, x_e, IC, 1, widen(part(dw_before, e * OC * IC, OC * IC)), OC, IC, n);
                const Sums want_alone = product_reference(dout_e, 1, OC, x_e, IC, 1, {}, OC, IC, n);
                expect_close("dw", part(all_dw, e * OC * IC, OC * IC), want_dw.value, allowed<float>(want_dw, n));
                expect_close("dw, overwritten", part(all_alone, e * OC * IC, OC * IC), want_alone.value,
                             allowed<float>(want_alone, n));
            }
            for (size_t i = 0; i < all_out.size(); i++)
                if (i % ld < first || i % ld >= first + OC) {
                    ASSERT_EQ(float(all_out[i]), float(out_before[i])) << "another column";
                }
            same(all_out, all_dx, all_dw, all_alone);
        });
    }
}

// A row's result does not depend on its group's other rows, nor on its group. Many groups have few rows each.
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
            grouped_matmul_forward(dev, out.data(), d_x.data(), d_w.data(), {d_starts.data(), E, R}, IC, OC);
            same(out.values());
        }
    }
}

#ifndef __CUDACC__  // a GPU cannot access this memory
// In generation a token loads only the weights of its experts: the others are in pages without read permission.
TYPED_TEST(GroupedMatmul, ReadsOnlyTheMatricesOfItsGroups) {
    using X = typename TypeParam::X;
    const size_t E = 7, IC = 64, OC = 4096 / sizeof(X);
    const auto w = random_values<X>(OC * IC, 2);
    const auto dev = this->context.device(any_device<TypeParam>());
    for (const int32_t n : {1, 12, 70}) {  // rows in each of two groups
        const std::vector<int32_t> starts = {0, 0, n, n, n, 2 * n, 2 * n, 2 * n};
        const size_t R = size_t(2 * n);
        const size_t matrix = w.size() * sizeof(X);
        X *const matrices =
            static_cast<X *>(mmap(nullptr, E * matrix, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        for (size_t e = 0; e < E; e++) {
            std::copy(w.begin(), w.end(), matrices + e * w.size());
            if (starts[e] == starts[e + 1]) mprotect(matrices + e * w.size(), matrix, PROT_NONE);
        }
        Array<X> x(random_values<X>(R * IC, 1)), out(R * OC), dx(R * IC);
        Array<int32_t> d_starts(starts);
        const RowGroups groups{d_starts.data(), E, R};
        grouped_matmul_forward(dev, out.data(), x.data(), matrices, groups, IC, OC);
        grouped_matmul_backward_input(dev, dx.data(), out.data(), matrices, groups, IC, OC);
        for (const X value : dx.values()) ASSERT_TRUE(std::isfinite(float(value)));
        munmap(matrices, E * matrix);
    }
}
#endif
