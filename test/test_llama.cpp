// The whole model against transformers: tiny random models of every family, made by golden/make.py in float64.
#define LLMC_NO_MAIN
#include "../train_llama.cu"

#include "../llmc/core/json.h"
#include "check.h"

namespace {

struct Golden {
    ModelConfig config;
    std::string dir;
    nlohmann::json expected;
    std::vector<std::vector<int32_t>> documents;
    std::vector<std::vector<uint8_t>> masks;
    std::vector<float> logits;  // of the documents in expected["logits_documents"]

    explicit Golden(const std::string &name) : dir("test/golden/" + name), expected(read_json(dir + "/golden.json")) {
        std::vector<std::string> notes;
        config = read_config(dir, notes);
        const SafetensorsMap file(dir + "/golden.safetensors");
        const auto tokens = file.span<int32_t>("tokens");
        const auto mask = file.span<uint8_t>("loss_mask");
        const auto offsets = file.span<int64_t>("doc_offsets");
        for (size_t i = 0; i + 1 < offsets.size(); i++) {
            documents.emplace_back(tokens.begin() + offsets[i], tokens.begin() + offsets[i + 1]);
            masks.emplace_back(mask.begin() + offsets[i], mask.begin() + offsets[i + 1]);
        }
        const auto all = file.span<float>("logits");
        logits.assign(all.begin(), all.end());
    }

    // The documents in rows of at most `per_row` documents, in their order or backwards.
    std::vector<Row> rows(size_t per_row, bool backwards = false) const {
        std::vector<Row> out;
        for (size_t first = 0; first < documents.size(); first += per_row) {
            std::vector<std::vector<int32_t>> row_documents;
            std::vector<std::vector<uint8_t>> row_masks;
            for (size_t i = first; i < std::min(documents.size(), first + per_row); i++) {
                const size_t j = backwards ? documents.size() - 1 - i : i;
                row_documents.push_back(documents[j]), row_masks.push_back(masks[j]);
            }
            out.push_back(make_row(row_documents, row_masks));
        }
        return out;
    }
    size_t targets() const {
        size_t n = 0;
        for (const auto &mask : masks) n += size_t(std::count(mask.begin(), mask.end(), 1));
        return n;
    }
};

template <class Dev> struct Trained {  // a model with weights, ready to step
    std::unique_ptr<Llama<Dev>> model;
    Trained(const Golden &g, Recompute recompute = Recompute::none, Mode mode = Mode::train, int threads = 2, bool guards = false,
            bool poison = false) {
        ModelLimits limits;
        limits.mode = mode, limits.row_tokens = limits.positions = limits.cache_tokens = 128, limits.recompute = recompute;
        model = std::make_unique<Llama<Dev>>(make_device<Dev>(threads), g.config, limits);
        model->allocate(guards, poison);
        model->load(HfWeights(g.dir));
    }
    double loss_and_gradient(const Golden &g, const std::vector<Row> &rows) {
        model->zero_gradients();
        LossSums sums;
        for (const Row &row : rows) sums += model->accumulate(row, 1 / float(g.targets()));
        return sums.nll / sums.targets;
    }
    const float *gradient(const Tensor &t) { return model->gradients() + t.offset; }
};

void expect_at_most(const char *what, double got, double allowed) {
    printf("  %-40s %.2g of %.2g allowed\n", what, got, allowed);
    EXPECT_LE(got, allowed) << what;
}

void expect_near_relative(const char *what, double got, double want, double allowed) {
    const double error = std::abs(got - want) / std::abs(want);
    printf("  %-40s %.2g of %.2g allowed\n", what, error, allowed);
    EXPECT_LE(error, allowed) << what << ": " << got << " instead of " << want;
}

struct Goldens : testing::TestWithParam<const char *> {};

}  // namespace

TEST_P(Goldens, LossEntropyAccuracy) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g, Recompute::none, Mode::evaluate);
    LossSums sums;
    for (const Row &row : g.rows(6)) sums += t.model->evaluate(row);
    EXPECT_EQ(size_t(sums.targets), g.targets());
    expect_near_relative("loss", sums.nll / sums.targets, g.expected["loss"], 1e-5);
    expect_near_relative("entropy", sums.entropy / sums.targets, g.expected["entropy"], 1e-5);
    EXPECT_NEAR(sums.correct / sums.targets, g.expected["accuracy"].get<double>(), 1e-12);
}

TEST_P(Goldens, Gradients) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g);
    t.loss_and_gradient(g, g.rows(6));
    const double global = g.expected["grad_norm"];
    expect_near_relative("gradient norm", t.model->gradient_norm(), global, 1e-4);
    double worst = 0;
    size_t tensors = 0;
    for (const Tensor &tensor : t.model->tensors()) {
        const auto &want = g.expected["gradients"].at(tensor.name);
        const float *dw = t.gradient(tensor);
        double squares = 0, projections[4] = {};
        for (size_t i = 0; i < tensor.count; i++) squares += double(dw[i]) * dw[i];
        for (uint32_t k = 0; k < 4; k++) {
            const Random random{1, Purpose::test, stream_of(tensor.name) + k};
            for (size_t i = 0; i < tensor.count; i++) projections[k] += random.block(i)[0] & 1 ? dw[i] : -dw[i];
        }
        const double norm = want["norm"], scale = std::max(norm, 1e-3 * global);
        worst = std::max(worst, std::abs(std::sqrt(squares) - norm) / scale);
        for (size_t k = 0; k < 4; k++) {
            const double p = projections[k] / std::sqrt(double(tensor.count));
            worst = std::max(worst, std::abs(p - want["projections"][k].get<double>()) / scale);
        }
        tensors++;
        EXPECT_LE(worst, 1e-4) << tensor.name;
    }
    EXPECT_EQ(tensors, g.expected["gradients"].size());
    printf("  %-40s %.2g of %.2g allowed\n", "tensors' gradients", worst, 1e-4);
}

TEST_P(Goldens, LossesOfTenSteps) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g);
    const auto rows = g.rows(2);
    for (size_t step = 0; step <= 10; step++) {
        const double loss = t.loss_and_gradient(g, rows), norm = t.model->gradient_norm();
        if (step == 5 || step == 10)
            expect_near_relative(step == 5 ? "loss after 5 steps" : "loss after 10 steps", loss, g.expected["losses"][step],
                                 2e-4);
        AdamW adamw{};
        adamw.lr = 1e-3, adamw.beta1 = 0.9, adamw.beta2 = 0.95, adamw.eps = 1e-8, adamw.weight_decay = 0.1;
        adamw.grad_scale = norm > 1 ? 1 / norm : 1, adamw.step = step + 1;
        t.model->update(adamw);
    }
}

// The mean loss of ten thousand targets, so that it is not the luck of a few, and how far single documents are off. The float64
// model has the rounded weights, too.
TEST_P(Goldens, Bf16AsGoodAsTransformers) {
    const Golden g(GetParam());
    const auto &theirs = g.expected["bf16"];
    const std::vector<double> exact = theirs["losses"];
    const double n = double(exact.size());
    Trained<CpuBf16> t(g, Recompute::none, Mode::evaluate);
    double want = 0, error = 0, squares = 0;
    for (size_t d = 0; d < exact.size(); d++) {
        const Random random{1, Purpose::test, stream_of("bf16 documents") + uint32_t(d)};
        std::vector<int32_t> document(101);
        for (size_t i = 0; i < document.size(); i++) document[i] = int32_t(random.block(i)[0] % g.config.V);
        std::vector<uint8_t> mask(document.size(), 1);
        mask[0] = 0;
        const LossSums sums = t.model->evaluate(make_row({document}, {mask}));
        const double e = sums.nll / sums.targets - exact[d];
        want += exact[d] / n, error += e / n, squares += e * e / n;
    }
    const double their_error = std::abs(theirs["bf16_loss"].get<double>() - want);
    expect_at_most("bf16, mean loss", std::abs(error), std::max(3 * their_error, 1e-3));
    expect_at_most("bf16, a document's loss, root mean square", std::sqrt(squares), 1.5 * theirs["document_rms"].get<double>());
}

// Every position's logits, one token at a time through the key/value cache, several documents side by side.
TEST_P(Goldens, LogitsThroughTheCache) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g, Recompute::none, Mode::generate);
    const std::vector<size_t> which = g.expected["logits_documents"];
    const size_t V = g.config.V, prompt = 4;
    std::vector<int32_t> begin;
    std::vector<size_t> base, first_row;
    size_t rows = 0;
    for (size_t i : which) {
        base.push_back(begin.size()), first_row.push_back(rows);
        begin.resize(begin.size() + g.documents[i].size(), int32_t(begin.size()));
        rows += g.documents[i].size();
    }
    double worst = 0, largest = 0;
    for (size_t done = 0, n = prompt;; done += n, n = 1) {
        std::vector<std::vector<int32_t>> next;
        std::vector<size_t> members;
        for (size_t j = 0; j < which.size(); j++) {
            const auto &document = g.documents[which[j]];
            if (done + n <= document.size())
                next.emplace_back(document.begin() + ptrdiff_t(done), document.begin() + ptrdiff_t(done + n)),
                    members.push_back(j);
        }
        if (next.empty()) break;
        Row row = make_row(next);
        Pieces where{};
        for (size_t j = 0; j < next.size(); j++) {
            const size_t offset = row.doc_offsets[j], at = base[members[j]] + done;
            where.piece[where.count++] = {at, at + n, offset};
            for (size_t i = 0; i < n; i++) row.doc_pos[offset + i] = int32_t(done + i);
        }
        const float *logits = t.model->next_logits(row, where, begin);
        for (size_t j = 0; j < next.size(); j++)
            for (size_t v = 0; v < V; v++) {
                const float want = g.logits[(first_row[members[j]] + done + n - 1) * V + v];
                worst = std::max(worst, double(std::abs(logits[j * V + v] - want)));
                largest = std::max(largest, double(std::abs(want)));
                ASSERT_FALSE(std::isnan(logits[j * V + v]));
            }
    }
    const double allowed = 2e-5 * largest;  // a few hundred roundings of 6e-8 relative to the largest logit
    printf("  %-40s %.2g of %.2g allowed\n", "logits", worst, allowed);
    EXPECT_LE(worst, allowed);
}

// How a step's samples are packed into rows, and in which order, changes nothing but the order of sums.
TEST_P(Goldens, PackingDoesNotMatter) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g);
    const double loss = t.loss_and_gradient(g, g.rows(6)), norm = t.model->gradient_norm();
    for (size_t per_row : {1, 2, 3, 6})
        for (bool backwards : {false, true}) {
            expect_near_relative("loss, packed otherwise", t.loss_and_gradient(g, g.rows(per_row, backwards)), loss, 1e-6);
            expect_near_relative("gradient norm, packed otherwise", t.model->gradient_norm(), norm, 1e-6);
        }
}

TEST_P(Goldens, RecomputeThreadsGuardsAndPoisonGiveTheSameBits) {
    const Golden g(GetParam());
    Trained<CpuF32> reference(g);
    const double loss = reference.loss_and_gradient(g, g.rows(3));
    auto expect_same = [&](const char *what, Trained<CpuF32> t) {
        EXPECT_EQ(t.loss_and_gradient(g, g.rows(3)), loss) << what;
        for (const Tensor &tensor : t.model->tensors())
            EXPECT_EQ(memcmp(t.gradient(tensor), reference.gradient(tensor), tensor.count * sizeof(float)), 0)
                << what << " " << tensor.name;
        t.model->arena().check_guards();
    };
    expect_same("one thread", Trained<CpuF32>(g, Recompute::none, Mode::train, 1));
    expect_same("cheap", Trained<CpuF32>(g, Recompute::cheap));
    expect_same("layer", Trained<CpuF32>(g, Recompute::layer));
    expect_same("guards", Trained<CpuF32>(g, Recompute::layer, Mode::train, 2, true));
    for (Recompute r : {Recompute::none, Recompute::cheap, Recompute::layer})
        expect_same("poison", Trained<CpuF32>(g, r, Mode::train, 2, false, true));
}

// Noise in one document leaves the losses of the others as they were, bit for bit.
TEST_P(Goldens, DocumentsDoNotLeak) {
    const Golden g(GetParam());
    Trained<CpuF32> t(g, Recompute::none, Mode::evaluate);
    for (size_t noisy = 0; noisy < g.documents.size(); noisy++) {
        auto documents = g.documents;
        auto masks = g.masks;
        std::fill(masks[noisy].begin(), masks[noisy].end(), 0);
        const double before = t.model->evaluate(make_row(documents, masks)).nll;
        for (size_t i = 0; i < documents[noisy].size(); i++)
            documents[noisy][i] = int32_t((documents[noisy][i] * 7 + 13 + i) % g.config.V);
        EXPECT_EQ(t.model->evaluate(make_row(documents, masks)).nll, before) << "document " << noisy;
    }
}

INSTANTIATE_TEST_SUITE_P(Families, Goldens,
                         testing::Values("llama2", "llama3", "llama31", "llama32", "llama_bias", "llama_linear", "llama_yarn",
                                         "qwen2", "qwen2_window", "qwen3", "mistral", "smollm2"),
                         [](const auto &info) { return std::string(info.param); });
