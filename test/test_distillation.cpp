// Students and their teachers: divergences compared with those of logits, gradients with finite differences, and a teacher that is the student's base with
// one that is a model of its own. test/ops has the head alone, for all divergences and sizes.
#include "models.h"

#include <numeric>

#include "check.h"
#include "golden.h"

namespace {

using Probabilities = std::vector<double>;

Probabilities softmax(const float *logits, size_t V, double temperature) {
    Probabilities p(logits, logits + V);
    const double max = std::ranges::max(p);
    double sum = 0;
    for (double &x : p) sum += x = std::exp((x - max) / temperature);
    for (double &x : p) x /= sum;
    return p;
}

double kl(const Probabilities &p, const Probabilities &q) {
    double sum = 0;
    for (size_t v = 0; v < p.size(); v++) sum += p[v] * std::log(p[v] / q[v]);
    return sum;
}

double divergence(const Probabilities &student, const Probabilities &teacher, double beta) {
    if (beta == 0) return kl(teacher, student);
    if (beta == 1) return kl(student, teacher);
    Probabilities mixture(student.size());
    for (size_t v = 0; v < student.size(); v++) mixture[v] = (1 - beta) * student[v] + beta * teacher[v];
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture);
}

double entropy(const Probabilities &p) {
    double sum = 0;
    for (double x : p) sum -= x * std::log(x);
    return sum;
}

// A row whose predictors are the positions with logits, and those positions as (number of the document, position).
std::pair<Row, std::vector<std::pair<size_t, size_t>>> row_with_logits(const Golden &g) {
    std::vector<std::vector<int32_t>> documents;
    std::vector<std::vector<uint8_t>> masks;
    std::vector<std::pair<size_t, size_t>> positions;
    for (size_t j = 0; j < g.expected["logits_documents"].size(); j++) {
        documents.push_back(g.documents[g.expected["logits_documents"][j]]);
        masks.emplace_back(documents.back().size(), 0);
        for (size_t t = 0; t + 1 < documents.back().size(); t++)
            if (g.logits_at(j, t)) masks.back()[t + 1] = 1, positions.emplace_back(j, t);
    }
    return {make_row(documents, masks), positions};
}

// Returns the logits that follow the first tokens of a document, by the generator.
std::vector<float> logits_after(Trained<CpuF32> &model, std::span<const int32_t> tokens) {
    const Row row = make_row({{tokens.begin(), tokens.end()}});
    CacheStep step{true, std::vector<int32_t>(row.T, -1), {}, {}};
    std::iota(step.slots.begin(), step.slots.begin() + ptrdiff_t(tokens.size()), 0);
    model.model->next_logits(row, step);
    return model.model->logits();
}

// A student and a teacher of its own.
struct Lesson {
    const Golden s, t;
    const float beta, temperature;
    const Row row = row_with_logits(s).first;
    Trained<CpuF32> teacher{make_device<CpuF32>(), t, {.mode = Mode::teach}};
    Trained<CpuF32> student;

    Lesson(const char *student, const char *teacher, float beta, float temperature = 1, TrainedOptions o = {})
        : s(student), t(teacher), beta(beta), temperature(temperature), student(make_device<CpuF32>(), s, with(o)) {}

    TrainedOptions with(TrainedOptions o) const {
        o.teacher = {t.config.C, s.config.V, beta}, o.temperature = temperature;
        return o;
    }
    DivergenceSums compared() {
        student.model->compare(row, teacher.model->teach(row));
        return student.model->take_divergence();
    }
    DivergenceSums learned() {
        student.model->zero_gradients();
        student.model->distil(row, teacher.model->teach(row), 1, true);
        return student.model->take_divergence();
    }
};

}  // namespace

TEST(Distillation, DivergencesAreThoseOfTheLogits) {
    const std::tuple<const char *, const char *, float, float> cases[] = {
        {"llama2", "qwen2_window", 0.0f, 1.0f}, {"qwen3", "granite", 1.0f, 0.5f},  {"granite", "phi3", 0.1f, 2.0f},
        {"smollm2", "mixtral", 0.5f, 1.0f},     {"mixtral", "gemma3", 0.9f, 0.7f}, {"gpt2", "llama31", 1.0f, 1.0f},
    };
    for (const auto &[student, teacher, beta, temperature] : cases) {
        Lesson lesson(student, teacher, beta, temperature);
        const auto [row, positions] = row_with_logits(lesson.s);
        Trained<CpuF32> reader(make_device<CpuF32>(), lesson.t, {.mode = Mode::generate});
        double want = 0, of_student = 0, of_teacher = 0;
        for (const auto &[j, position] : positions) {
            const std::span document = lesson.s.documents[lesson.s.expected["logits_documents"][j]];
            const std::vector<float> logits = logits_after(reader, document.first(position + 1));
            const Probabilities s = softmax(lesson.s.logits_at(j, position), lesson.s.config.V, temperature),
                                t = softmax(logits.data(), lesson.s.config.V, temperature);
            want += divergence(s, t, beta), of_student += entropy(s), of_teacher += entropy(t);
        }
        for (const DivergenceSums &got : {lesson.compared(), lesson.learned()}) {
            const std::string name = format("%s of %s", student, teacher);
            EXPECT_EQ(got.student.targets, positions.size()) << name;
            expect_near_relative(name.c_str(), got.divergence, want, 1e-5);
            expect_near_relative("student's entropy", got.student.entropy, of_student, 1e-5);
            expect_near_relative("teacher's entropy", got.teacher.entropy, of_teacher, 1e-5);
        }
    }
}

// The slope of the divergence along the gradient is the gradient's squared norm. Recomputation, guards and poison change no bit.
TEST(Distillation, GradientsAreThoseOfTheDivergence) {
    for (const float beta : {0.0f, 0.3f, 1.0f})
        for (const auto &[student, teacher] : {std::pair{"llama2", "llama31"}, {"lora_qwen3", "smollm2"}, {"gpt2", "mixtral"}}) {
            Lesson lesson(student, teacher, beta, 0.8f);
            const double loss = lesson.learned().divergence;
            Zero<CpuF32> &zero = lesson.student.model->parameters();
            const std::vector<float> gradient = lesson.student.gradient(),
                                     weights(zero.params, zero.params + zero.sharding.count);
            const double squares = sum_of_squares(gradient), h = 4e-3 / std::sqrt(squares);
            const auto loss_at = [&](double step) {
                for (size_t i = 0; i < weights.size(); i++) zero.params[i] = float(weights[i] + step * gradient[i]);
                return lesson.compared().divergence;
            };
            expect_near_relative("slope", (loss_at(h) - loss_at(-h)) / (2 * h), squares, 2e-3);
            Lesson same(student, teacher, beta, 0.8f, {.recompute = Recompute::layer, .guards = true, .poison = true});
            EXPECT_EQ(same.learned().divergence, loss);
            EXPECT_EQ(same.student.gradient(), gradient);
        }
}

TEST(Distillation, AModelHasNothingToLearnFromItself) {
    for (const float beta : {0.0f, 0.5f, 1.0f}) {
        Lesson lesson("qwen3", "qwen3", beta), other("qwen3", "llama2", beta);
        const DivergenceSums sums = lesson.learned();
        other.learned();
        EXPECT_LT(std::abs(sums.divergence), 1e-6 * sums.student.targets);
        EXPECT_EQ(sums.agreement, sums.student.targets);
        EXPECT_LT(lesson.student.model->gradient_norm(), 1e-5 * other.student.model->gradient_norm());
    }
}

// The base of adapters is a teacher without a second model.
TEST(Distillation, TheBaseOfAdaptersTeachesLikeAModel) {
    for (const char *name : {"lora_llama3", "lora_gpt2", "lora_wte"}) {
        Lesson lesson(name, Golden(name).expected["base"].get<std::string>().c_str(), 1);
        TrainedOptions o = lesson.with({});
        o.teacher.is_base = true;
        Trained<CpuF32> own(make_device<CpuF32>(), lesson.s, o);
        const double want = lesson.learned().divergence;
        own.model->zero_gradients();
        own.model->distil(lesson.row, own.model->teach(lesson.row), 1, true);
        EXPECT_EQ(own.model->take_divergence().divergence, want) << name;
        EXPECT_EQ(own.gradient(), lesson.student.gradient()) << name;
        EXPECT_GT(want, 0);
    }
}
