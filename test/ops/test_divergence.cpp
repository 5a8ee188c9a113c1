// The head and its divergence from a teacher: statistics and gradients, over several chunks, with rows that have no target.
#include "../../llmc/ops/divergence.h"

#include "../../llmc/core/json.h"
#include "../../llmc/ops/head_parts.h"
#include "../finite_difference.h"
#include "../reference_divergence.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/divergence.cuh"
#include "../../llmc/ops/head_parts.cuh"
#include "../cuda/matmul_context.cuh"
#endif

using Vector = std::vector<double>;

// The statistics of N rows, on the device.
struct DivergenceArrays {
    Array<float> student[5], teacher[5], own[3];

    explicit DivergenceArrays(size_t n)
        : student{Array<float>(n), Array<float>(n), Array<float>(n), Array<float>(n), Array<float>(n)},
          teacher{Array<float>(n), Array<float>(n), Array<float>(n), Array<float>(n), Array<float>(n)},
          own{Array<float>(n), Array<float>(n), Array<float>(n)} {}
    DivergenceStats stats() {
        const auto head = [](auto &a) { return HeadStats{a[0].data(), a[1].data(), a[2].data(), a[3].data(), a[4].data()}; };
        return {head(student), head(teacher), own[0].data(), own[1].data(), own[2].data()};
    }
};

template <class Dev> struct DivergenceHead : testing::Test {
    using X = typename Dev::X;
    MatmulContext context;
    size_t T, C, teacher_C, V, N;
    float beta = 1, temperature = 1;
    size_t chunk = least_head_chunk;
    bool is_part = false;  // of a vocabulary that is divided among ranks; the only part
    std::vector<X> x, w, teacher_x, teacher_w, dx;
    std::vector<int32_t> rows, targets;
    std::vector<float> weights, divergence, agreement, dw, dw_before;
    std::vector<float> student[3], teacher[3];  // nll, entropy, correct

    HeadShape shape() const { return {T, C, V, N, chunk}; }

    // About every second row has a target; some weights are 0.
    void make(size_t tokens, size_t channels, size_t teacher_channels, size_t vocab, double deviation = 1) {
        T = tokens, C = channels, teacher_C = teacher_channels, V = vocab;
        x = random_values<X>(T * C, 1, deviation), w = random_values<X>(V * C, 2, 1 / std::sqrt(double(C)));
        teacher_x = random_values<X>(T * teacher_C, 5, deviation);
        teacher_w = random_values<X>(V * teacher_C, 6, 1 / std::sqrt(double(teacher_C)));
        const Random random{1, Purpose::test, 3};
        rows.clear(), targets.clear(), weights.clear();
        for (size_t t = 0; t < T; t++)
            if (t == 0 || random.uniform(t) < 0.6) {
                rows.push_back(int32_t(t)), targets.push_back(int32_t(random.below(T + t, V)));
                weights.push_back(t % 5 == 3 ? 0.0f : float(random.normal(2 * T + t)));
            }
        N = rows.size();
        dw_before = random_values<float>(V * C, 4);
        printf(" T %zu, C %zu and %zu, V %zu, N %zu, beta %g, temperature %g, chunks of %zu\n", T, C, teacher_C, V, N,
               double(beta), double(temperature), divergence_rows(Dev{}, SIZE_MAX / 2, V, chunk));
    }

    // z: error of z and z' (test_loss.cpp); log_p: of their logarithms, which subtract the maximum and the logarithm of the sum; log_q: of the
    // logarithm of a quotient, which for the mixture has an exponential and a logarithm more. A term of the divergence is a probability times
    // such a logarithm, and so is a gradient, with the mean beside; `size` bounds their sum over a row.
    void check() {
        const auto want = divergence_head_reference(widen(x), widen(w), widen(teacher_x), widen(teacher_w), rows, targets,
                                                    widen(weights), C, teacher_C, beta, temperature);
        const double u = 0x1p-24, uX = unit_roundoff<X>, tau = temperature, e = 4 * u + rounded_sum_error(1025);
        const auto error_of_z = [&](const HeadResult &r, size_t C) {
            return (sum_error_of<X>(C + 1) + (tau == 1 ? 0 : 2 * u)) * r.size / tau;
        };
        const double z = std::max(error_of_z(want.student, C), error_of_z(want.teacher, teacher_C)),
                     spread = std::max(want.student.spread, want.teacher.spread), log_V = std::log(double(V)),
                     log_p = 2 * z + e + 4 * u * (spread + log_V),
                     log_q = 2 * log_p +
                             (beta == 0 || beta == 1 ? 0 : 4 * u * (1 + spread - std::log(std::min(beta, 1 - beta)))) +
                             2 * u * want.reach,
                     term = log_p + 4 * u + e, size = std::max(1.0, want.size), of_divergence = size * term + log_q;
        expect_close("divergence", divergence, want.divergence, 2 * of_divergence);
        EXPECT_EQ(widen(agreement), want.agreement);
        const std::pair<const std::vector<float> *, const HeadResult *> models[] = {{student, &want.student},
                                                                                    {teacher, &want.teacher}};
        for (const auto &[got, of] : models) {
            expect_close("nll", got[0], of->nll, 2 * z + e + 2 * u * (largest(of->nll) + spread));
            expect_close("entropy", got[1], of->entropy, (z + e + u) * (2 + spread));
            EXPECT_EQ(widen(got[2]), of->correct);
        }
        double total_weight = 0;
        for (float v : weights) total_weight += std::abs(v);
        const double dlogits =
                         2 * (of_divergence + size * term) + 4 * uX * size,  // the sum of a row's errors, per unit of weight
            row = 2 * size;                                                  // the sum of a row's sizes
        expect_close("dx", dx, want.student.dx,
                     largest(weights) * (dlogits + row * sum_error_of<X>(V + 1)) / tau * largest(widen(w)) +
                         uX * largest(want.student.dx));
        auto dw_want = want.student.dw;
        for (size_t i = 0; i < dw_want.size(); i++) dw_want[i] += dw_before[i];
        expect_close(
            "dw", dw, dw_want,
            total_weight * (dlogits + row * sum_error_of<X>(N + 1)) / tau * largest(widen(x)) + u * double(N) * largest(dw_want));
    }

    // `ends` are the ends of vocabulary ranges whose parts of dw are computed separately; empty: dw as a whole.
    void run(Dev dev, bool backward = true, const std::vector<size_t> &ends = {}, bool accumulate = true) {
        dev = context.device(dev);
        Array<X> d_x(x), d_w(w), d_teacher_x(teacher_x), d_teacher_w(teacher_w), d_dx(T * C);
        Array<int32_t> d_rows(rows), d_targets(targets);
        Array<float> d_weights(weights), d_dw(dw_before);
        DivergenceArrays arrays(N);
        const size_t bytes = divergence_scratch(dev, shape(), teacher_C);
        Array<char> scratch(std::vector<char>(bytes + 64 + 64, 77));
        char *aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<size_t>(scratch.data()), 64));
        const TeacherHead<X> head{d_teacher_x.data(), d_teacher_w.data(), teacher_C, beta};
        const HeadLoss loss{d_rows.data(), d_targets.data(), backward ? d_weights.data() : nullptr, 0, temperature};
        Array<float> packed(fields_of<DivergenceStats> * N);
        const auto merge_of = [&](const auto &stats, size_t n) {
            pack_head_stats(dev, packed.data(), stats, n), merge_head_stats(dev, stats, packed.data(), 1, n);
        };
        const MergeParts merge = [&](OfParts what, size_t n0, size_t n) {
            const DivergenceStats of = arrays.stats().from(n0);
            if (what == OfParts::statistics) merge_of(of, n);
            else merge_of(PartsOfDivergence{of.divergence, of.mean}, n);
        };
        divergence_head(dev, arrays.stats(), backward ? d_dx.data() : nullptr, backward && ends.empty() ? d_dw.data() : nullptr,
                        aligned, d_x.data(), d_w.data(), head, loss, shape(), accumulate, is_part ? merge : nullptr);
        divergence = arrays.own[0].values(), agreement = arrays.own[2].values();
        for (size_t i = 0; i < 3; i++) student[i] = arrays.student[i].values(), teacher[i] = arrays.teacher[i].values();
        dx = d_dx.values(), dw = d_dw.values();
        for (size_t i = 0, first = 0; i < ends.size(); first = ends[i++]) {
            const auto begin = dw.begin() + ptrdiff_t(first * C), end = dw.begin() + ptrdiff_t(ends[i] * C);
            Array<float> part(std::vector<float>(begin, end));
            divergence_head_weight(dev, part.data(), aligned, d_x.data(), d_w.data(), head, loss, arrays.stats(), shape(), first,
                                   ends[i] - first);
            std::ranges::copy(part.values(), begin);
        }
        const auto after = scratch.values();
        for (size_t i = size_t(aligned - scratch.data()) + bytes; i < after.size(); i++)
            ASSERT_EQ(after[i], 77);  // no write beyond the scratch
    }
};
TYPED_TEST_SUITE(DivergenceHead, Devices);

static const nlohmann::json &divergence_cases() {
    static const nlohmann::json cases = read_json("test/golden/divergence.json");
    return cases;
}

TEST(DivergenceReference, EqualsTrl) {
    for (const auto &c : divergence_cases())
        for (const auto &l : c["losses"]) {
            const DivergenceRow row = divergence_reference(c["student"], c["teacher"], 1, l["beta"], l["temperature"]);
            EXPECT_NEAR(row.divergence, l["loss"].get<double>(), 1e-10);
            EXPECT_LE(worst_difference(row.dlogit, l["gradient"].get<Vector>()), 1e-9);
        }
}

TEST(DivergenceReference, EqualsFiniteDifferences) {
    const size_t T = 6, C = 5, teacher_C = 3, V = 11;
    const auto x = widen(random_values<float>(T * C, 1)), w = widen(random_values<float>(V * C, 2)),
               teacher_x = widen(random_values<float>(T * teacher_C, 5)),
               teacher_w = widen(random_values<float>(V * teacher_C, 6));
    const std::vector<int32_t> rows = {0, 2, 3, 5}, targets = {10, 0, 3, 3};
    const Vector weights = {0.5, -1, 0, 2};
    for (double beta : {0.0, 0.3, 1.0}) {
        const auto reference = [&](const Vector &x, const Vector &w) {
            return divergence_head_reference(x, w, teacher_x, teacher_w, rows, targets, weights, C, teacher_C, beta, 1.6);
        };
        const auto by_x = [&](const Vector &x) { return std::vector{reference(x, w).loss}; };
        const auto by_w = [&](const Vector &w) { return std::vector{reference(x, w).loss}; };
        expect_close("dx", finite_difference(by_x, x, {1}), reference(x, w).student.dx, 1e-8);
        expect_close("dw", finite_difference(by_w, w, {1}), reference(x, w).student.dw, 1e-8);
    }
}

// TRL's numbers, from the logits: what remains are the roundings of the classifier.
TYPED_TEST(DivergenceHead, ClassifierEqualsTrl) {
    using X = typename TypeParam::X;
    for (const auto &c : divergence_cases()) {
        const auto a = c["student"].get<std::vector<float>>(), b = c["teacher"].get<std::vector<float>>();
        const size_t V = a.size(), ld = logits_ld(TypeParam{}, V), padded = 64;
        for (const auto &l : c["losses"]) {
            const float beta = l["beta"], temperature = l["temperature"];
            const auto row = divergence_reference(widen(a), widen(b), 1, beta, temperature);
            const double u = 0x1p-24, log_q = 8 * u * (1 + (largest(a) + largest(b)) / temperature + std::log(double(V))),
                         allowed = (1 + row.size) * log_q;
            for_each_order<TypeParam>([&](TypeParam dev) {
                const size_t room = dlogits_room(dev, padded, ld) / sizeof(float);
                std::vector<float> student(room + padded * ld), teacher(padded * ld);
                std::ranges::copy(a, student.begin() + ptrdiff_t(room)), std::ranges::copy(b, teacher.begin());
                Array<float> d_student(student), d_teacher(teacher), weights(std::vector<float>{1});
                Array<int32_t> targets(std::vector<int32_t>{int32_t(V - 1)});
                DivergenceArrays arrays(1);
                divergence_classifier(dev, arrays.stats(), reinterpret_cast<X *>(d_student.data()),
                                      {d_student.data() + room, d_teacher.data(), V, ld},
                                      {nullptr, targets.data(), weights.data(), 0, temperature}, beta, 1, padded);
                expect_close("divergence", arrays.own[0].values(), std::vector{l["loss"].get<double>()}, allowed);
                const std::vector<float> raw = d_student.values();
                std::vector<X> dlogits(V);
                memcpy(dlogits.data(), raw.data(), V * sizeof(X));
                const Vector want = l["gradient"];
                expect_close("dlogits", dlogits, want, 2 * allowed / temperature + unit_roundoff<X> * largest(want));
            });
        }
    }
}

TYPED_TEST(DivergenceHead, EqualsReference) {
    struct Case {
        size_t T, C, teacher_C, V;
        float beta, temperature = 1;
        double deviation = 1;
    };
    // One warp, a partial warp; with and without vectors; more vectors than threads; sums of several runs; a narrower and a wider teacher.
    const Case cases[] = {{1, 8, 8, 5, 1},           {37, 24, 40, 51, 0},         {37, 24, 16, 51, 0.1f},
                          {20, 60, 8, 136, 0.5f, 2}, {6, 7, 9, 4100, 1, 0.5f},    {6, 8, 16, 4100, 0.9f, 1.7f, 4},
                          {64, 20, 36, 1030, 0, 2},  {64, 20, 36, 1030, 0.5f, 1}, {150, 36, 20, 129, 1, 1, 4}};
    for (const auto &[T, C, teacher_C, V, beta, temperature, deviation] : cases) {
        this->beta = beta, this->temperature = temperature;
        this->make(T, C, teacher_C, V, deviation);
        for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {V / 3, V / 3 + 1, V - 1, V}}) {
            SameBits same, statistics;
            for_each_order<TypeParam>([&](TypeParam dev) {
                this->run(dev, true, ends);
                this->check();
                same(this->dx, this->dw);
                const auto &student = this->student, &teacher = this->teacher;
                statistics(this->divergence, this->agreement, student[0], student[1], student[2], teacher[0], teacher[1],
                           teacher[2]);
                if (!ends.empty()) return;
                this->run(dev, false);  // forward alone
                statistics(this->divergence, this->agreement, student[0], student[1], student[2], teacher[0], teacher[1],
                           teacher[2]);
                EXPECT_EQ(this->dw, this->dw_before);
            });
        }
    }
}

TYPED_TEST(DivergenceHead, OfTheOnlyPartEqualsReference) {
    this->is_part = true;
    for (const float beta : {0.0f, 0.1f, 1.0f}) {
        this->beta = beta;
        this->make(37, 24, 16, 51);
        for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {17, 51}})
            for_each_order<TypeParam>([&](TypeParam dev) {
                this->run(dev, true, ends);
                this->check();
            });
    }
}

TYPED_TEST(DivergenceHead, OverwritesTheGradientOfItsWeights) {
    this->make(37, 24, 16, 51);
    this->dw_before.assign(51 * 24, NAN);
    this->run(any_device<TypeParam>(), true, {}, false);
    this->dw_before.assign(51 * 24, 0);
    this->check();
}

#ifndef CUDA_HALF  // chunks of CUDA have at least 1024 rows and 256 MiB, which take long in the emulator
TYPED_TEST(DivergenceHead, SeveralChunks) {
    this->beta = 0.5f;
    this->chunk = size_t(1) << 20;
    this->make(120, 3, 2, 4009, 0.5);
    const TypeParam dev = any_device<TypeParam>();
    ASSERT_GT(this->N, 1 * divergence_rows(dev, this->N, this->V, this->chunk));
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {3001, this->V}}) {
        this->run(dev, true, ends);
        this->check();
    }
}
#endif

TYPED_TEST(DivergenceHead, ATeacherThatIsTheStudentTeachesNothing) {
    for (float beta : {0.0f, 0.1f, 0.5f, 1.0f}) {
        this->beta = beta;
        this->make(50, 24, 24, 70);
        this->teacher_x = this->x, this->teacher_w = this->w, this->dw_before.assign(70 * 24, 0);
        this->run(any_device<TypeParam>());
        EXPECT_EQ(this->agreement, std::vector<float>(this->N, 1));
        EXPECT_EQ(this->teacher[1], this->student[1]);
        const double allowed = beta == 0 || beta == 1 ? 0 : 4 * 0x1p-24;  // log((1 - beta) + beta) of floats is near 0
        EXPECT_LE(largest(this->divergence), allowed);
        EXPECT_LE(largest(widen(this->dx)), 2 * allowed * largest(this->weights) * largest(widen(this->w)) * 70);
        EXPECT_LE(largest(this->dw), 2 * allowed * largest(this->weights) * largest(widen(this->x)) * double(this->N));
    }
}

TYPED_TEST(DivergenceHead, RowsWithoutATargetOrWeightGetNoGradient) {
    this->make(50, 24, 16, 70);
    expect_no_gradient_without_a_target(*this, any_device<TypeParam>());
}

TYPED_TEST(DivergenceHead, ANaNIsNeverHidden) {
    using X = typename TypeParam::X;
    for (float beta : {0.0f, 0.5f, 1.0f}) {
        this->beta = beta;
        this->make(70, 24, 24, 90);
        for (std::vector<X> *x : {&this->x, &this->teacher_x}) {
            const auto before = *x;
            (*x)[size_t(this->rows[1]) * this->C + 5] = X(float(NAN));
            this->run(any_device<TypeParam>());
            for (size_t n = 0; n < this->N; n++) EXPECT_EQ(std::isnan(this->divergence[n]), n == 1) << n;
            *x = before;
        }
    }
}

TYPED_TEST(DivergenceHead, SumsAddUp) {
    const size_t N = 2500;
    std::vector<float> divergence(N), agreement(N);
    Vector want = {1, 2};
    for (size_t n = 0; n < N; n++) {
        divergence[n] = float(n % 17) / 8, agreement[n] = n % 3 == 0;  // sums are exact
        want[0] += divergence[n], want[1] += agreement[n];
    }
    for_each_order<TypeParam>([&](TypeParam dev) {
        Array<float> d_divergence(divergence), d_agreement(agreement);
        Array<double> sums(Vector{1, 2});
        divergence_sums(dev, sums.data(), {{}, {}, d_divergence.data(), nullptr, d_agreement.data()}, N);
        EXPECT_EQ(sums.values(), want);
    });
}
