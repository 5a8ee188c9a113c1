// attention.h against a float64 reference that materialises every score, and against what its contract promises: any split of a
// row over ranks, any number of threads and any content of the other documents give the same result.
#include "../llmc/ops/attention.h"

#include <cstring>
#include <map>
#include <string>

#include "check.h"

// ---- reference

struct Shape {
    std::vector<size_t> documents;
    size_t window, H, KV, D;  // window 0: none

    size_t T() const {
        size_t sum = 0;
        for (size_t length : documents) sum += length;
        return sum;
    }
    float scale() const { return float(1 / std::sqrt(double(D))); }
    std::vector<int32_t> lo() const {
        std::vector<int32_t> out;
        for (size_t length : documents) {
            const size_t begin = out.size();
            for (size_t p = begin; p < begin + length; p++)
                out.push_back(int32_t(window && p + 1 > begin + window ? p + 1 - window : begin));
        }
        return out;
    }
};

// `*_size` is the same sum over absolute values: what rounding errors are relative to.
struct Reference {
    std::vector<double> out, out_size, lse;  // (T, H, D), (H, T)
    std::vector<double> dqkv, dqkv_size;     // (T, (H + 2 KV) * D)
    double score_size = 0;                   // the largest
};

// P[t, r] of head h, over the keys lo .. t.
static std::vector<double> probabilities(Reference &ref, const Shape &a, const std::vector<double> &qkv, size_t t, size_t h,
                                         size_t lo) {
    const double *q = &qkv[(t * (a.H + 2 * a.KV) + h) * a.D];
    std::vector<double> p(t + 1 - lo);
    for (size_t r = lo; r <= t; r++) {
        const double *k = &qkv[(r * (a.H + 2 * a.KV) + a.H + h / (a.H / a.KV)) * a.D];
        double dot = 0, size = 0;
        for (size_t d = 0; d < a.D; d++) dot += q[d] * k[d], size += std::abs(q[d] * k[d]);
        p[r - lo] = dot * double(a.scale());
        ref.score_size = std::max(ref.score_size, size * double(a.scale()));
    }
    double sum = 0;
    const double largest = *std::max_element(p.begin(), p.end());
    for (double s : p) sum += std::exp(s - largest);
    ref.lse[h * a.T() + t] = largest + std::log(sum);
    for (double &s : p) s = std::exp(s - largest) / sum;
    return p;
}

static Reference attention_reference(const Shape &a, const std::vector<double> &qkv) {
    const size_t T = a.T(), D = a.D;
    const auto lo = a.lo();
    Reference ref{std::vector<double>(T * a.H * D), std::vector<double>(T * a.H * D), std::vector<double>(a.H * T), {}, {}};
    for (size_t h = 0; h < a.H; h++)
        for (size_t t = 0; t < T; t++) {
            const auto p = probabilities(ref, a, qkv, t, h, size_t(lo[t]));
            for (size_t r = size_t(lo[t]); r <= t; r++) {
                const double p_r = p[r - size_t(lo[t])], *v = &qkv[(r * (a.H + 2 * a.KV) + a.H + a.KV + h / (a.H / a.KV)) * D];
                for (size_t d = 0; d < D; d++) {
                    ref.out[(t * a.H + h) * D + d] += p_r * v[d];
                    ref.out_size[(t * a.H + h) * D + d] += p_r * std::abs(v[d]);
                }
            }
        }
    return ref;
}

// Adds ref.dqkv. delta comes from the `out` given, so that the op and the reference can be handed the same rounded one.
static void attention_reference_backward(Reference &ref, const Shape &a, const std::vector<double> &qkv,
                                         const std::vector<double> &out, const std::vector<double> &dout) {
    const size_t T = a.T(), D = a.D, row = (a.H + 2 * a.KV) * D;
    const auto lo = a.lo();
    ref.dqkv.assign(T * row, 0);
    ref.dqkv_size.assign(T * row, 0);
    const auto add = [&](size_t at, double term, double size) { ref.dqkv[at] += term, ref.dqkv_size[at] += size; };
    for (size_t h = 0; h < a.H; h++)
        for (size_t t = 0; t < T; t++) {
            const size_t o = (t * a.H + h) * D, q = t * row + h * D;
            const auto p = probabilities(ref, a, qkv, t, h, size_t(lo[t]));
            for (size_t r = size_t(lo[t]); r <= t; r++) {
                const size_t k = r * row + (a.H + h / (a.H / a.KV)) * D, v = k + a.KV * D;
                const double p_r = p[r - size_t(lo[t])];
                double ds = 0, size = 0;  // dP - delta
                for (size_t d = 0; d < D; d++) {
                    ds += dout[o + d] * (qkv[v + d] - out[o + d]);
                    size += std::abs(dout[o + d]) * (std::abs(qkv[v + d]) + std::abs(out[o + d]));
                }
                ds *= p_r * double(a.scale()), size *= p_r * double(a.scale());
                for (size_t d = 0; d < D; d++) {
                    add(q + d, ds * qkv[k + d], size * std::abs(qkv[k + d]));
                    add(k + d, ds * qkv[q + d], size * std::abs(qkv[q + d]));
                    add(v + d, p_r * dout[o + d], p_r * std::abs(dout[o + d]));
                }
            }
        }
}

TEST(AttentionReference, GradientEqualsCentralDifferences) {
    const Shape a{{3, 1, 5}, 4, 2, 1, 8};
    auto qkv = widen(random_values<float>(a.T() * 4 * a.D, 1));
    const auto dout = widen(random_values<float>(a.T() * 2 * a.D, 2));
    Reference ref = attention_reference(a, qkv);
    attention_reference_backward(ref, a, qkv, ref.out, dout);
    const double step = 1e-5;
    const auto loss = [&] {
        const auto out = attention_reference(a, qkv).out;
        double sum = 0;
        for (size_t i = 0; i < out.size(); i++) sum += out[i] * dout[i];
        return sum;
    };
    std::vector<double> numeric(qkv.size());
    for (size_t i = 0; i < qkv.size(); i++) {
        const double x = qkv[i];
        qkv[i] = x + step;
        const double above = loss();
        qkv[i] = x - step;
        numeric[i] = (above - loss()) / (2 * step);
        qkv[i] = x;
    }
    // third derivatives are of the order of 100 here, and the loss of 10: truncation 100 step^2 / 6, roundoff 10 * 2^-52 / step
    expect_close("reference gradient", ref.dqkv, numeric, 20 * step * step + 1e-9);
}

// ---- the op

template <class Dev> struct Attention : testing::Test {
    using X = typename Dev::X;
    struct Result {
        std::vector<X> out, dqkv;
        std::vector<float> lse;
    };
    struct Inputs {
        std::vector<X> qkv, dout;
    };
    static Inputs inputs(const Shape &a) {
        return {random_values<X>(a.T() * (a.H + 2 * a.KV) * a.D, 1), random_values<X>(a.T() * a.H * a.D, 2)};
    }
    static Heads<const X> view(const std::vector<X> &qkv, const Shape &a, size_t head) {
        return {qkv.data() + head * a.D, (a.H + 2 * a.KV) * a.D};
    }

    // Forward and backward with the rows dealt to ranks: rank r holds the pieces of ranks[r], one after the other.
    static Result run(Dev dev, const Shape &a, const Inputs &in, const std::vector<Pieces> &ranks) {
        const size_t T = a.T(), D = a.D, H = a.H, KV = a.KV, row = (H + 2 * KV) * D;
        const auto lo = a.lo();
        struct Rank {
            size_t T;
            std::vector<X> qkv, dout, out, dqkv;
            std::vector<float> out32, lse, dq, dk, dv, delta;
        };
        std::vector<Rank> state;
        std::vector<float> scratch(attention_scratch(size_t(dev.threads)));
        const auto each_row = [&](size_t r, auto &&f) {  // f(global row, local row)
            for (size_t i = 0; i < ranks[r].count; i++)
                for (size_t p = ranks[r].piece[i].begin; p < ranks[r].piece[i].end; p++)
                    f(p, ranks[r].piece[i].offset + p - ranks[r].piece[i].begin);
        };
        for (size_t r = 0; r < ranks.size(); r++) {
            Rank s{};
            each_row(r, [&](size_t p, size_t) {
                s.qkv.insert(s.qkv.end(), in.qkv.begin() + long(p * row), in.qkv.begin() + long((p + 1) * row));
                s.dout.insert(s.dout.end(), in.dout.begin() + long(p * H * D), in.dout.begin() + long((p + 1) * H * D));
                s.T++;
            });
            s.out32.assign(s.T * H * D, NAN), s.lse.assign(H * s.T, NAN), s.delta.assign(H * s.T, NAN),
                s.dq.assign(s.T * H * D, NAN);
            s.dk.assign(s.T * KV * D, NAN), s.dv.assign(s.T * KV * D, NAN), s.out.resize(s.T * H * D), s.dqkv.resize(s.T * row);
            attention_begin(dev, s.out32.data(), s.lse.data(), s.T, H, D);
            state.push_back(std::move(s));
        }
        for (size_t r = 0; r < ranks.size(); r++) {
            Rank &s = state[r];
            for (size_t from = 0; from < ranks.size(); from++)
                attention_forward_part(dev, s.out32.data(), s.lse.data(), view(s.qkv, a, 0), view(state[from].qkv, a, H),
                                       view(state[from].qkv, a, H + KV), lo.data(), ranks[r], ranks[from], s.T, H, KV, D,
                                       a.scale());
            attention_end(dev, s.out.data(), s.out32.data(), s.T * H * D);
            attention_backward_begin(dev, s.dq.data(), s.dk.data(), s.dv.data(), s.delta.data(), s.out.data(), s.dout.data(), s.T,
                                     H, KV, D);
        }
        Result result{std::vector<X>(T * H * D), std::vector<X>(T * row), std::vector<float>(H * T)};
        for (size_t r = 0; r < ranks.size(); r++)
            for (size_t from = 0; from < ranks.size(); from++)
                attention_backward_part(dev, state[r].dq.data(), state[from].dk.data(), state[from].dv.data(), scratch.data(),
                                        view(state[r].qkv, a, 0), view(state[from].qkv, a, H), view(state[from].qkv, a, H + KV),
                                        state[r].delta.data(), state[r].lse.data(), state[r].dout.data(), lo.data(), ranks[r],
                                        ranks[from], state[r].T, H, KV, D, a.scale());
        for (size_t r = 0; r < ranks.size(); r++) {
            Rank &s = state[r];
            attention_backward_end(dev, s.dqkv.data(), s.dq.data(), s.dk.data(), s.dv.data(), s.T, H, KV, D);
            each_row(r, [&](size_t p, size_t t) {
                std::copy_n(s.out.begin() + long(t * H * D), H * D, result.out.begin() + long(p * H * D));
                std::copy_n(s.dqkv.begin() + long(t * row), row, result.dqkv.begin() + long(p * row));
                for (size_t h = 0; h < H; h++) result.lse[h * T + p] = s.lse[h * s.T + t];
            });
        }
        return result;
    }
    static Result run(Dev dev, const Shape &a, const Inputs &in) { return run(dev, a, in, {{{{0, a.T(), 0}}, 1}}); }

    static void check(const char *what, const Shape &a, const Inputs &in, const Result &got);
};
TYPED_TEST_SUITE(Attention, CpuDevices);

// Roundoff of a float sum of n terms, relative to the sum of their sizes, grows like sqrt(n) with high probability, times about 4
// (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). All but inputs, results and, where tiles of
// bf16 are multiplied, P and dS is float.
static double sum_error(size_t n) { return 4 * std::sqrt(double(n)) * unit_roundoff<float>; }

static std::vector<double> relative(std::vector<double> x, const std::vector<double> &size) {
    for (size_t i = 0; i < x.size(); i++) x[i] /= size[i];
    return x;
}

template <class Dev> void Attention<Dev>::check(const char *what, const Shape &a, const Inputs &in, const Result &got) {
    const auto qkv = widen(in.qkv);
    Reference ref = attention_reference(a, qkv);
    attention_reference_backward(ref, a, qkv, widen(got.out), widen(in.dout));
    // a score is a sum over D and lse a sum of exp(score); to hold, scale and merge them costs a few roundings of numbers below 8
    const double lse_error = sum_error(a.D) * ref.score_size + sum_error(a.T()) + sum_error(1) * 8;
    const double p_error = 2 * lse_error;  // relative, of exp(score - lse)
    const auto expect = [&](const char *tensor, const auto &x, const std::vector<double> &want, const std::vector<double> &size,
                            double e) {
        expect_close(format("%s: %s", what, tensor).c_str(), relative(widen(x), size), relative(want, size),
                     e + (sizeof(X) == sizeof(float) ? 1 : 2) * unit_roundoff<X>);  // of the result, and of P or dS
    };
    expect_close(format("%s: lse", what).c_str(), got.lse, ref.lse, lse_error);
    // out sums over keys; dq, dk, dv over keys or over queries and heads, and dP over D
    expect("out", got.out, ref.out, ref.out_size, p_error + sum_error(a.T()));
    expect("dqkv", got.dqkv, ref.dqkv, ref.dqkv_size, p_error + sum_error(a.T() * a.H) + sum_error(a.D));
}

TYPED_TEST(Attention, EqualsReference) {
    using Test = Attention<TypeParam>;
    const std::map<std::string, Shape> shapes = {
        {"one token", {{1}, 0, 1, 1, 8}},
        {"one document, 1:1, D 64", {{443}, 0, 2, 2, 64}},
        {"packed, 3:1, D 64", {{5, 1, 13, 118, 2, 230, 1, 1, 64}, 0, 6, 2, 64}},
        {"packed, 7:1, D 16", {{192, 1, 96, 97}, 0, 7, 1, 16}},
        {"window 24, D 80", {{200, 30, 1, 217}, 24, 3, 1, 80}},
        {"window 1, D 24", {{70, 3}, 1, 2, 1, 24}},
        {"one document, D 8", {{291}, 0, 2, 1, 8}},
        {"packed, D 128", {{100, 1, 129}, 0, 3, 1, 128}},
        {"packed, D 256", {{33, 260}, 0, 1, 1, 256}},
    };
    for (const auto &[name, a] : shapes) {
        const auto in = Test::inputs(a);
        Test::check(name.c_str(), a, in, Test::run(make_device<TypeParam>(), a, in));
    }
}

// chunks pieces of about equal length, dealt to the ranks in turn, there and back if `zigzag`
static std::vector<Pieces> deal(size_t T, size_t ranks, size_t chunks, bool zigzag) {
    std::vector<Pieces> out(ranks);
    std::vector<size_t> rows(ranks);
    for (size_t c = 0; c < chunks; c++) {
        const size_t begin = T * c / chunks, end = T * (c + 1) / chunks, turn = c % ranks;
        const size_t r = zigzag && c / ranks % 2 ? ranks - 1 - turn : turn;
        out[r].piece[out[r].count++] = {begin, end, rows[r]};
        rows[r] += end - begin;
    }
    return out;
}

TYPED_TEST(Attention, AnySplitOverRanksEqualsTheWhole) {
    using Test = Attention<TypeParam>;
    const Shape several_blocks{{900, 101}, 0, 2, 1, 8};  // on each rank, more than one block of queries
    const auto several = Test::inputs(several_blocks);
    Test::check("500 rows on each of 2", several_blocks, several,
                Test::run(make_device<TypeParam>(), several_blocks, several, deal(several_blocks.T(), 2, 2, false)));
    for (const Shape &a : {Shape{{5, 1, 13, 18, 2, 330}, 0, 3, 1, 16}, Shape{{120, 1, 100}, 24, 2, 2, 32}}) {
        const auto in = Test::inputs(a);
        for (size_t ranks = 1; ranks <= 7; ranks++) {
            Test::check(format("contiguous over %zu", ranks).c_str(), a, in,
                        Test::run(make_device<TypeParam>(), a, in, deal(a.T(), ranks, ranks, false)));
            Test::check(format("zigzag over %zu", ranks).c_str(), a, in,
                        Test::run(make_device<TypeParam>(), a, in, deal(a.T(), ranks, 2 * ranks, true)));
        }
        Test::check("16 pieces on each of 3", a, in, Test::run(make_device<TypeParam>(), a, in, deal(a.T(), 3, 48, false)));
    }
}

template <class A, class B> static bool same_bits(const A *a, const B *b, size_t n) { return memcmp(a, b, n * sizeof(A)) == 0; }

TYPED_TEST(Attention, NumberOfThreadsChangesNoBit) {
    using Test = Attention<TypeParam>;
    const Shape a{{5, 700, 1, 350, 60}, 0, 4, 2, 32};
    const auto in = Test::inputs(a);
    for (const auto &ranks : {deal(a.T(), 1, 1, false), deal(a.T(), 2, 4, true)}) {
        const auto one = Test::run(make_device<TypeParam>(1), a, in, ranks);
        for (int threads : {2, 3}) {
            TypeParam dev = make_device<TypeParam>();
            dev.threads = threads;
            const auto many = Test::run(dev, a, in, ranks);
            EXPECT_TRUE(same_bits(one.out.data(), many.out.data(), one.out.size())) << threads;
            EXPECT_TRUE(same_bits(one.lse.data(), many.lse.data(), one.lse.size())) << threads;
            EXPECT_TRUE(same_bits(one.dqkv.data(), many.dqkv.data(), one.dqkv.size())) << threads;
        }
    }
}

TYPED_TEST(Attention, OtherDocumentsChangeNoBit) {
    using Test = Attention<TypeParam>;
    using X = typename TypeParam::X;
    const Shape a{{40, 1, 300, 77}, 0, 3, 1, 24};
    const size_t T = a.T(), begin = 41, end = 341, row = (a.H + 2 * a.KV) * a.D, out_row = a.H * a.D;  // the document of 300
    const auto in = Test::inputs(a);
    auto noisy = in;
    const auto noise = random_values<X>(in.qkv.size(), 3, 20);
    std::copy(noise.begin() + long(begin * row), noise.begin() + long(end * row), noisy.qkv.begin() + long(begin * row));
    std::copy(noise.begin() + long(begin * out_row), noise.begin() + long(end * out_row),
              noisy.dout.begin() + long(begin * out_row));
    const auto want = Test::run(make_device<TypeParam>(), a, in), got = Test::run(make_device<TypeParam>(), a, noisy);
    for (size_t t = 0; t < T; t++) {
        const bool same = same_bits(&got.out[t * out_row], &want.out[t * out_row], out_row) &&
                          same_bits(&got.dqkv[t * row], &want.dqkv[t * row], row);
        EXPECT_EQ(same, t < begin || t >= end) << t;
    }
}

TYPED_TEST(Attention, NanReachesExactlyTheQueriesThatSeeIt) {
    using Test = Attention<TypeParam>;
    const Shape a{{200, 150}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D, bad = 70;
    for (size_t head : {size_t(0), a.H, a.H + a.KV}) {  // in q (of the first head), in k, in v
        auto in = Test::inputs(a);
        in.qkv[bad * row + head * a.D + 3] = NAN;
        const auto got = Test::run(make_device<TypeParam>(), a, in);
        for (size_t t = 0; t < a.T(); t++) {
            if (head == a.H + a.KV && (t < bad || t >= 192)) continue;  // a masked probability is 0, and 0 * NaN is NaN
            const bool expected = head == 0 ? t == bad : t >= bad && t < 200;
            const float seen = got.out[t * a.H * a.D + 3];
            EXPECT_EQ(std::isnan(seen), expected) << "head " << head << " row " << t;
        }
    }
}

// Cost follows the documents: keys before the first document of a block of queries take no part in it, not even as 0 * NaN.
TYPED_TEST(Attention, UnseenBlocksAreSkipped) {
    using Test = Attention<TypeParam>;
    const size_t first = 2 * attention::queries;
    const Shape a{{first, 250}, 0, 2, 1, 16};
    const size_t row = (a.H + 2 * a.KV) * a.D;
    const auto in = Test::inputs(a);
    auto poisoned = in;
    std::fill(poisoned.qkv.begin(), poisoned.qkv.begin() + long(first * row), NAN);
    const auto want = Test::run(make_device<TypeParam>(), a, in), got = Test::run(make_device<TypeParam>(), a, poisoned);
    EXPECT_TRUE(same_bits(&got.out[first * a.H * a.D], &want.out[first * a.H * a.D], 250 * a.H * a.D));
    EXPECT_TRUE(same_bits(&got.dqkv[first * row], &want.dqkv[first * row], 250 * row));
}

// ---- simd.h

TEST(Simd, FastExp) {
    std::vector<float> x, y(1 << 20);
    for (size_t i = 0; i < y.size(); i++) x.push_back(-87.33f + float(i) * (176.05f / float(y.size())));
#pragma omp simd
    for (size_t i = 0; i < y.size(); i++) y[i] = fast_exp(x[i]);
    double worst = 0;  // in units in the last place
    for (size_t i = 0; i < y.size(); i++) {
        const double want = std::exp(double(x[i]));
        worst = std::max(worst, std::abs(y[i] - want) / std::ldexp(1.0, std::ilogb(want) - 23));
    }
    printf("  %-40s %.2g of %.2g allowed\n", "fast_exp, units in the last place", worst, 1.5);
    EXPECT_LE(worst, 1.5);
    EXPECT_EQ(fast_exp(0.0f), 1.0f);
    EXPECT_EQ(fast_exp(-INFINITY), 0.0f);
    EXPECT_EQ(fast_exp(-100.0f), 0.0f);
    EXPECT_EQ(fast_exp(INFINITY), INFINITY);
    EXPECT_EQ(fast_exp(89.0f), INFINITY);
    for (uint32_t bits : {0x7fc00000u, 0xffffffffu, 0x7fffffffu, 0xffc00001u})
        EXPECT_TRUE(std::isnan(fast_exp(std::bit_cast<float>(bits))));
}
