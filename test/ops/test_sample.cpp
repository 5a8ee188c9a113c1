// Sampling: greedy, the distribution after temperature, penalty and filters, and equal tokens on every device.
#include "../../llmc/ops/sample.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "../../llmc/core/rng.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/sample.cuh"
#endif

using Vector = std::vector<double>;

// ---- sampling in float64, by definition: tokens sorted by logit, cut at the first filter's end

static Vector penalised_reference(Vector logits, const std::vector<int32_t> &occurred, double penalty) {
    for (int32_t v : occurred)
        logits[size_t(v)] = logits[size_t(v)] > 0 ? logits[size_t(v)] / penalty : logits[size_t(v)] * penalty;
    return logits;
}

// Probability of each token; the temperature is above 0.
static Vector sampling_reference(const Vector &logits, const Sampling &s) {
    const double max = *std::ranges::max_element(logits);
    std::vector<std::pair<double, size_t>> order;  // (-logit, id)
    for (size_t v = 0; v < logits.size(); v++) order.emplace_back(-logits[v], v);
    std::ranges::sort(order);
    if (s.top_k && s.top_k < order.size()) {
        const double last = order[s.top_k - 1].first;
        std::erase_if(order, [&](const auto &token) { return token.first > last; });
    }
    const auto mass_of = [&](double minus_logit) { return std::exp((-minus_logit - max) / s.temperature); };
    double all = 0, before = 0, sum = 0;
    for (const auto &[l, v] : order) all += mass_of(l);
    Vector out(logits.size());
    for (const auto &[l, v] : order) {
        const double mass = mass_of(l);
        if (before >= s.top_p * all || mass < s.min_p) break;
        sum += out[v] = mass, before += mass;
    }
    for (double &p : out) p /= sum;
    return out;
}

static double log_probability_reference(const Vector &logits, double temperature, size_t token) {
    const double max = *std::ranges::max_element(logits);
    double sum = 0;
    for (double l : logits) sum += std::exp((l - max) / temperature);
    return (logits[token] - max) / temperature - std::log(sum);
}

// ---- the op

namespace {

struct Rows {
    size_t V;
    std::vector<float> logits;                        // (rows, V)
    std::vector<std::vector<uint64_t>> random;        // random numbers of each row
    std::vector<std::vector<int32_t>> occurred = {};  // earlier tokens of each row; empty: no penalty
    size_t vocabulary = V;
};

struct Tokens {
    std::vector<int32_t> tokens;
    std::vector<float> logps;
};

template <class T> std::vector<int32_t> firsts_of(const std::vector<std::vector<T>> &lists) {
    std::vector<int32_t> out = {0};
    for (const auto &list : lists) out.push_back(out.back() + int32_t(list.size()));
    return out;
}
template <class T> std::vector<T> joined(const std::vector<std::vector<T>> &lists) {
    std::vector<T> out;
    for (const auto &list : lists) out.insert(out.end(), list.begin(), list.end());
    return out;
}

// A gap of 3 NaN follows each row.
template <template <class> class A = Array, class Dev>
Tokens draw(Dev dev, const Rows &in, const Sampling &s, bool logps = false) {
    const size_t rows = in.random.size(), ld = in.V + 3;
    std::vector<float> with_gaps(rows * ld, NAN);
    for (size_t r = 0; r < rows; r++)
        std::copy_n(in.logits.begin() + ptrdiff_t(r * in.V), in.V, with_gaps.begin() + ptrdiff_t(r * ld));
    const auto random = joined(in.random);
    A<float> logits(with_gaps), out_logps(random.size());
    A<int32_t> first(firsts_of(in.random)), first_occurred(firsts_of(in.occurred)), occurred(joined(in.occurred)),
        tokens(random.size());
    A<uint64_t> numbers(random);
    const Draws draws{first.data(), numbers.data(), first_occurred.data(), in.occurred.empty() ? nullptr : occurred.data()};
    sample(dev, tokens.data(), logps ? out_logps.data() : nullptr, logits.data(), draws, s, in.vocabulary, rows, in.V, ld);
    return {tokens.values(), logps ? out_logps.values() : std::vector<float>()};
}

// n evenly spaced random numbers: they draw each token with a frequency equal to its probability within 1/n.
std::vector<uint64_t> evenly(size_t n) {
    std::vector<uint64_t> out;
    for (size_t i = 0; i < n; i++) out.push_back(uint64_t((double(i) + 0.5) / double(n) * 0x1p64));
    return out;
}
Vector frequencies(const std::vector<int32_t> &tokens, size_t V) {
    Vector out(V);
    for (int32_t token : tokens) out[size_t(token)] += 1 / double(tokens.size());
    return out;
}

#ifdef CUDA_HALF
constexpr size_t tries = 40;  // the emulator runs a thousand threads for each number
#else
constexpr size_t tries = 20000;
#endif

const std::vector<float> four = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

std::vector<float> many_logits(size_t V) {  // all different; probabilities span a factor of 50
    std::vector<float> out(V);
    for (size_t v = 0; v < V; v++) out[v] = 4 / float(V) * float(v * 617 % V);
    return out;
}

// Each filter alone, at its limits, and all together.
const std::vector<Sampling> filters = {{.temperature = 1},
                                       {.temperature = 0.7},
                                       {.temperature = 1e-300},
                                       {.temperature = 1e30},
                                       {.temperature = 1, .top_k = 12},
                                       {.temperature = 1, .top_k = 9000},
                                       {.temperature = 1, .top_p = 1e-9},
                                       {.temperature = 1, .min_p = 1},
                                       {.temperature = 1.3, .top_p = 0.8},
                                       {.temperature = 1, .min_p = 0.2},
                                       {.temperature = 1, .repetition_penalty = 1.5},
                                       {.temperature = 0.8, .top_k = 30, .top_p = 0.9, .min_p = 0.1, .repetition_penalty = 1.2}};

}  // namespace

template <class Dev> struct Sample : testing::Test {};
TYPED_TEST_SUITE(Sample, Devices);

TYPED_TEST(Sample, TemperatureZeroTakesTheFirstOfTheLikeliest) {
    const Rows rows{4, {four[0], four[1], four[2], four[3], 1, 3, 3, 2}, {{0, UINT64_MAX / 2, UINT64_MAX}, {UINT64_MAX}}};
    EXPECT_EQ(draw(any_device<TypeParam>(), rows, {}).tokens, (std::vector<int32_t>{1, 1, 1, 1}));
}

// Frequencies equal the reference's probabilities. One row has different logits, the other equal ones; the last ids are no tokens.
TYPED_TEST(Sample, EqualsReference) {
    for (const size_t V : {40, 1500}) {
        const size_t known = V - 7, n = tries;
        Rows rows{V, many_logits(V), {evenly(n), evenly(n)}, {{3, 39, 7}, {}}, known};
        for (size_t v = 0; v < V; v++) rows.logits.push_back(float(v % 5));  // five values
        for (const Sampling &s : filters) {
            const auto got = draw(any_device<TypeParam>(), rows, s).tokens;
            for (size_t r = 0; r < 2; r++) {
                const auto begin = rows.logits.begin() + ptrdiff_t(r * V);
                auto seen = penalised_reference({begin, begin + ptrdiff_t(V)}, rows.occurred[r], s.repetition_penalty);
                seen.resize(known);
                const auto want = sampling_reference(seen, s);
                const auto share = frequencies({got.begin() + ptrdiff_t(r * n), got.begin() + ptrdiff_t((r + 1) * n)}, V);
                for (size_t v = 0; v < V; v++)
                    ASSERT_NEAR(share[v], v < known ? want[v] : 0, 1.5 / double(n)) << "row " << r << ", token " << v;
            }
        }
    }
}

// Equal random numbers give equal tokens on every device, in every order of its threads.
TYPED_TEST(Sample, GivesTheSameTokensOnEveryDevice) {
    for (const size_t V : {5, 1500}) {
        Rows rows{V, {}, {}, {}};
        for (uint32_t r = 0; r < 3; r++) {
            const auto logits = random_values<float>(V, r);
            for (float l : logits) rows.logits.push_back(5 * l);
            rows.random.emplace_back(), rows.occurred.push_back({int32_t(r), 4});
            for (uint64_t i = 0; i < 4; i++) rows.random.back().push_back(Random{7, Purpose::sampling, r}.bits(i));
        }
        for (const Sampling &s : filters) {
            const auto want = draw<HostArray>(make_device<CpuF32>(), rows, s);
            for_each_order<TypeParam>([&](TypeParam dev) { EXPECT_EQ(draw(dev, rows, s).tokens, want.tokens); });
        }
    }
}

TYPED_TEST(Sample, LogProbabilitiesIgnoreFilters) {
    const size_t V = 1500;
    const Rows rows{V, many_logits(V), {evenly(10)}, {}, V - 100};
    for (const double temperature : {0.7, 1.0, 2.0}) {
        const auto got = draw(any_device<TypeParam>(), rows, {.temperature = temperature, .top_k = 200}, true);
        for (size_t i = 0; i < got.tokens.size(); i++)
            EXPECT_NEAR(got.logps[i], log_probability_reference(widen(rows.logits), temperature, size_t(got.tokens[i])), 1e-5);
    }
}

TYPED_TEST(Sample, GivesATokenIfLogitsAreFinite) {
    const float inf = INFINITY;
    Rows rows{4, {-1e38f, 3e38f, -inf, 3e38f}, {{0, UINT64_MAX / 4, UINT64_MAX}}};
    for (const auto &row : {std::vector<float>{0, -inf, inf, 1}, {0, 1, NAN, 1}, {NAN, NAN, NAN, NAN}, {-inf, -inf, -inf, -inf}})
        rows.logits.insert(rows.logits.end(), row.begin(), row.end()), rows.random.push_back({5, 6});
    for (const Sampling &s : {Sampling{},
                              {.temperature = 0.7},
                              {.temperature = 1, .top_k = 3},
                              {.temperature = 1, .top_p = 0.9},
                              {.temperature = 1, .min_p = 1}}) {
        const auto got = draw(any_device<TypeParam>(), rows, s).tokens;
        for (size_t i = 0; i < 3; i++) EXPECT_TRUE(got[i] == 1 || got[i] == 3) << got[i];
        EXPECT_EQ(std::vector(got.begin() + 3, got.end()), std::vector(8, no_token));
    }
}
