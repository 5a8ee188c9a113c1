#include "../../llmc/ops/muon.h"

#include "../reference_adamw.h"
#include "../reference_muon.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/muon.cuh"
#include "../cuda/matmul_context.cuh"
#endif

static AdamW muon_setting(size_t first = 0) {
    return {.lr = 0.1,
            .beta1 = 0,
            .beta2 = 0,
            .eps = 0,
            .weight_decay = 0.2,
            .grad_scale = 0.25,
            .step = 3,
            .seed = 7,
            .first = first};
}

template <class Dev> struct MuonOps : testing::Test {};
TYPED_TEST_SUITE(MuonOps, Devices);

// Four float roundings of momenta near 1 and of scaled gradients near 0.25.
TYPED_TEST(MuonOps, MomentumEqualsReference) {
    using X = typename TypeParam::X;
    for (const size_t n : {size_t(1003), size_t(1100)}) {  // without and with vectors
        const auto start = random_values<float>(n, 1), grads = random_values<float>(n, 2);
        const auto rounded = random_values<bf16>(n, 2);
        const auto expect = [&]<class G>(const std::vector<G> &gradients) {
            std::vector<double> want_m(n), want_u(n);
            for (size_t i = 0; i < n; i++) {
                const double g = 0.25 * double(float(gradients[i]));
                want_m[i] = 0.95 * start[i] + 0.05 * g, want_u[i] = 0.95 * want_m[i] + 0.05 * g;
            }
            SameBits same;
            for_each_order<TypeParam>([&](TypeParam dev) {
                Array<float> m(start);
                Array<G> d_grads(gradients);
                Array<X> u(n);
                muon_momentum(dev, u.data(), m.data(), d_grads.data(), muon_setting(), n);
                const double allowed = 4 * 0x1p-24 * largest(start);
                expect_close("m", m.values(), want_m, allowed);
                expect_close("u", u.values(), want_u, 2 * allowed + unit_roundoff<X> * largest(want_u));
                same(m.values(), u.values());
            });
        };
        expect(grads), expect(rounded);
    }
}

// The bits of momenta in bf16 depend only on the seed, the step and the element's number. Parts of 5000 elements have vectors, parts of 6667 do not.
TYPED_TEST(MuonOps, BitsOfBf16MomentaBelongToTheElement) {
    using X = typename TypeParam::X;
    const size_t n = 20000;
    const float m = 0.77f, g = 0.375f;  // of every element: only the rounding differs
    const auto run = [&]<class G>(TypeParam dev, size_t parts, G grad) {
        Array<bf16> momentum(std::vector<bf16>(n, bf16(m)));
        Array<G> grads(std::vector<G>(n, grad));
        Array<X> u(n);
        for (size_t part = 0; part < parts; part++) {
            const size_t begin = n * part / parts, end = n * (part + 1) / parts;
            muon_momentum(dev, u.data() + begin, momentum.data() + begin, grads.data() + begin, muon_setting(7 + begin),
                          end - begin);
        }
        return widen(momentum.values());
    };
    const auto whole = run(any_device<TypeParam>(), 1, 4 * g);
    for_each_order<TypeParam>([&](TypeParam dev) {
        for (const size_t parts : {3, 4}) {
            EXPECT_EQ(run(dev, parts, 4 * g), whole);
            EXPECT_EQ(run(dev, parts, bf16(4 * g)), whole);
        }
    });
}

TYPED_TEST(MuonOps, UpdateEqualsReference) {
    using X = typename TypeParam::X;
    for (const size_t n : {size_t(1003), size_t(1100)}) {
        const auto start = random_values<X>(n, 1), x = random_values<X>(n, 2);
        std::vector<double> want(n);
        for (size_t i = 0; i < n; i++) want[i] = 0.98 * double(float(start[i])) - 0.1 * 0.2 * 8 * double(float(x[i]));
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            FloatsArray<X> params(std::vector<float>(start.begin(), start.end()));
            Array<X> d_x(x);
            muon_update(dev, params.where(), d_x.data(), muon_setting(), muon_size(12, 64), n);
            expect_close("params", params.values(), want, 4 * 0x1p-24 * largest(want));
            expect_nearest(params.rounded.values(), params.values());
            same(params.values());
        });
    }
}

// The allowed error is twice that of a plain loop with the same roundings, for the worst of ten matrices: another order of a sum has other roundings.
TYPED_TEST(MuonOps, OrthogonaliseEqualsReference) {
    using X = typename TypeParam::X;
    MatmulContext context;
    for (const auto &[rows, columns] :
         {std::pair<size_t, size_t>{40, 160}, {160, 40}, {48, 48}, {1, 7}, {7, 1}, {2, 3}, {2100, 3}, {3, 2100}}) {
        const size_t R = rows, C = columns, k = std::min(R, C);
        std::vector<X> start;
        std::vector<double> exact;
        double share = 0;
        for (uint32_t stream = 1; stream <= 10; stream++) {
            start = random_values<X>(R * C, stream, 1e-3);
            exact = orthogonalise_reference<double, double>(widen(start), R, C);
            share = std::max(share, distance(orthogonalise_reference<X, float>(widen(start), R, C), exact) / norm_of(exact));
        }
        const double allowed = 2 * share * norm_of(exact);
        SameBits same;
        for_each_order<TypeParam>([&, rows = rows](TypeParam dev) {
            Array<X> x(start), other(R * C), gram(k * k), polynomial(k * k);
            Array<float> product(k * k);
            Array<double> norm(squared_norm_scratch(R * C));
            orthogonalise(context.device(dev), x.data(),
                          {other.data(), gram.data(), polynomial.data(), product.data(), norm.data()}, R, C);
            const auto got = widen(x.values());
            if (rows == 40) {  // zeros stay zeros: the momentum of an adapter's first matrix in the first step
                Array<X> zeros(std::vector<X>(R * C, X(0.0f)));
                orthogonalise(context.device(dev), zeros.data(),
                              {other.data(), gram.data(), polynomial.data(), product.data(), norm.data()}, R, C);
                EXPECT_EQ(largest(widen(zeros.values())), 0);
            }
            printf("  %4zu x %-4zu %-30s %.2g of %.2g allowed\n", R, C, "relative error", distance(got, exact) / norm_of(exact),
                   allowed / norm_of(exact));
            EXPECT_LE(distance(got, exact), allowed);
            EXPECT_LE(allowed, 0.25 * norm_of(exact));  // the distance of a wrong matrix is about its norm
            same(got);
        });
    }
}
