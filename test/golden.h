// The whole model against transformers: tiny random models of every family, made by golden/make.py in float64, and what a model of any
// device must say of them. For test programs that have included train_llama.cu.
#pragma once
#include <gtest/gtest.h>

#include "../llmc/core/json.h"

constexpr const char *golden_families[] = {"llama2",     "llama3", "llama31",      "llama32", "llama_bias", "llama_linear",
                                           "llama_yarn", "qwen2",  "qwen2_window", "qwen3",   "mistral",    "smollm2"};
inline std::string family_name(const testing::TestParamInfo<const char *> &info) { return info.param; }

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
    std::unique_ptr<SelfComm> comm = std::make_unique<SelfComm>();
    std::unique_ptr<Mesh> mesh = std::make_unique<Mesh>(*comm, 1);
    std::unique_ptr<Llama<Dev>> model;
    Trained(Dev dev, const Golden &g, Recompute recompute = Recompute::none, Mode mode = Mode::train, bool guards = false,
            bool poison = false) {
        ModelLimits limits;
        limits.mode = mode, limits.row_tokens = limits.positions = limits.cache_tokens = 128, limits.recompute = recompute;
        model = std::make_unique<Llama<Dev>>(dev, g.config, limits);
        model->allocate(*mesh, guards, poison);
        model->load(HfWeights(g.dir), 0);
    }
    double loss(const std::vector<Row> &rows) {
        for (const Row &row : rows) model->evaluate(row);
        const LossSums sums = model->take_sums();
        return sums.nll / sums.targets;
    }
    double loss_and_gradient(const Golden &g, const std::vector<Row> &rows) {
        model->zero_gradients();
        for (const Row &row : rows) model->accumulate(row, 1 / float(g.targets()), false);
        const LossSums sums = model->take_sums();
        return sums.nll / sums.targets;
    }
    std::vector<float> gradient(const Tensor &t) { return read(model->memory(), model->parameters().grads + t.offset, t.count); }
};

inline void expect_at_most(const char *what, double got, double allowed) {
    printf("  %-40s %.2g of %.2g allowed\n", what, got, allowed);
    EXPECT_LE(got, allowed) << what;
}

inline void expect_near_relative(const char *what, double got, double want, double allowed) {
    const double error = std::abs(got - want) / std::abs(want);
    printf("  %-40s %.2g of %.2g allowed\n", what, error, allowed);
    EXPECT_LE(error, allowed) << what << ": " << got << " instead of " << want;
}

template <class Dev> void expect_loss_entropy_accuracy(Dev dev, const Golden &g) {
    Trained<Dev> t(dev, g, Recompute::none, Mode::evaluate);
    for (const Row &row : g.rows(6)) t.model->evaluate(row);
    const LossSums sums = t.model->take_sums();
    EXPECT_EQ(size_t(sums.targets), g.targets());
    expect_near_relative("loss", sums.nll / sums.targets, g.expected["loss"], 1e-5);
    expect_near_relative("entropy", sums.entropy / sums.targets, g.expected["entropy"], 1e-5);
    EXPECT_NEAR(sums.correct / sums.targets, g.expected["accuracy"].get<double>(), 1e-12);
}

template <class Dev> void expect_gradients(Dev dev, const Golden &g) {
    Trained<Dev> t(dev, g);
    t.loss_and_gradient(g, g.rows(6));
    const double global = g.expected["grad_norm"];
    expect_near_relative("gradient norm", t.model->gradient_norm(), global, 1e-4);
    double worst = 0;
    size_t tensors = 0;
    for (const Tensor &tensor : t.model->tensors()) {
        const auto &want = g.expected["gradients"].at(tensor.name);
        const std::vector<float> dw = t.gradient(tensor);
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

// The losses after `steps` AdamW steps.
template <class Dev> void expect_losses(Dev dev, const Golden &g, const std::vector<size_t> &steps) {
    Trained<Dev> t(dev, g);
    const auto rows = g.rows(2);
    for (size_t step = 0; step <= steps.back(); step++) {
        const double loss = t.loss_and_gradient(g, rows), norm = t.model->gradient_norm();
        if (std::find(steps.begin(), steps.end(), step) != steps.end())
            expect_near_relative(format("loss after %zu steps", step).c_str(), loss, g.expected["losses"][step], 2e-4);
        AdamW adamw{};
        adamw.lr = 1e-3, adamw.beta1 = 0.9, adamw.beta2 = 0.95, adamw.eps = 1e-8, adamw.weight_decay = 0.1;
        adamw.grad_scale = norm > 1 ? 1 / norm : 1, adamw.step = step + 1;
        t.model->update(adamw);
    }
}

// The mean loss of ten thousand targets, so that it is not the luck of a few, and how far single documents are off. The float64
// model has the rounded weights, too.
template <class Dev> void expect_bf16_as_good_as_transformers(Dev dev, const Golden &g) {
    const auto &theirs = g.expected["bf16"];
    const std::vector<double> exact = theirs["losses"];
    const double n = double(exact.size());
    Trained<Dev> t(dev, g, Recompute::none, Mode::evaluate);
    double want = 0, error = 0, squares = 0;
    for (size_t d = 0; d < exact.size(); d++) {
        const Random random{1, Purpose::test, stream_of("bf16 documents") + uint32_t(d)};
        std::vector<int32_t> document(101);
        for (size_t i = 0; i < document.size(); i++) document[i] = int32_t(random.block(i)[0] % g.config.V);
        std::vector<uint8_t> mask(document.size(), 1);
        mask[0] = 0;
        const double e = t.loss({make_row({document}, {mask})}) - exact[d];
        want += exact[d] / n, error += e / n, squares += e * e / n;
    }
    const double their_error = std::abs(theirs["bf16_loss"].get<double>() - want);
    expect_at_most("bf16, mean loss", std::abs(error), std::max(3 * their_error, 1e-3));
    expect_at_most("bf16, a document's loss, root mean square", std::sqrt(squares), 1.5 * theirs["document_rms"].get<double>());
}

// The gradient, against our own float one, which equals float64's: expect_gradients. Both have the rounded weights.
template <class Dev> void expect_bf16_gradient_as_good_as_transformers(Dev dev, CpuF32 cpu, const Golden &g) {
    Trained<CpuF32> exact(cpu, g);
    const size_t count = exact.model->parameters().sharding.count;
    for (const OptimizerPart &p : exact.model->optimizer_state().parts)
        for (size_t i = 0; i < p.count; i++) p.master[i] = bf16(p.master[i]);
    Trained<Dev> t(dev, g);
    exact.loss_and_gradient(g, g.rows(3)), t.loss_and_gradient(g, g.rows(3));
    const auto want = read(exact.model->memory(), exact.model->parameters().grads, count),
               got = read(t.model->memory(), t.model->parameters().grads, count);
    double error = 0, squares = 0;
    for (size_t i = 0; i < want.size(); i++) error += std::pow(double(got[i]) - want[i], 2), squares += double(want[i]) * want[i];
    expect_at_most("bf16, gradient, L2", std::sqrt(error / squares), 1.5 * g.expected["bf16"]["gradient_error"].get<double>());
}
