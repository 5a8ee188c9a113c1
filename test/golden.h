// Checks of a whole model on any device against transformers, with tiny random models of each family from golden/make.py in float64, and with
// pairs of answers from golden/make_preference.py. The test program includes models.h first.
#pragma once
#include <gtest/gtest.h>

#include <array>

#include "../llmc/core/json.h"
#include "../llmc/data/packing.h"
#include "../llmc/train/evaluate.h"
#include "../llmc/train/open_config.h"
#include "../llmc/train/open_data.h"
#include "../llmc/train/open_model.h"
#include "../llmc/train/pairs.h"

constexpr const char *golden_families[] = {"llama2",     "llama3",      "llama31",      "llama32",   "llama_bias", "llama_linear",
                                           "llama_yarn", "qwen2",       "qwen2_window", "qwen3",     "mistral",    "phi3",
                                           "smollm2",    "olmo2",       "gpt2",         "gpt2_erf",  "phi4",       "phi35",
                                           "seed_oss",   "smollm3",     "ministral",    "granite",   "exaone4",    "dynamic",
                                           "gemma3",     "gemma3_wide", "qwen3_moe",    "qwen2_moe", "mixtral"};
constexpr const char *golden_hybrids[] = {"qwen35", "qwen35_tied", "qwen35_moe"};  // with linear attention
inline std::string family_name(const testing::TestParamInfo<const char *> &info) { return info.param; }

// Adapters of some families, made with PEFT by golden/make_lora.py.
constexpr const char *golden_adapters[] = {"lora_llama3",  "lora_qwen2", "lora_qwen3",   "lora_mistral",
                                           "lora_phi3",    "lora_olmo2", "lora_mixtral", "lora_gpt2",
                                           "lora_modules", "lora_tied",  "lora_wte"};

struct Golden {
    ModelConfig config;
    std::string own, dir;  // directories of the golden values and of the model; they differ for an adapter
    nlohmann::json expected;
    std::vector<std::vector<int32_t>> documents;
    std::vector<std::vector<uint8_t>> masks;
    std::vector<float> logits;

    explicit Golden(const std::string &name) : own("test/golden/" + name), expected(read_json(own + "/golden.json")) {
        std::vector<std::string> notes;
        bool reward;
        dir = "test/golden/" + expected.value("base", name);
        config = read_config(dir, notes);
        if (dir != own) set_lora(config, read_lora(own, config, reward, notes));
        const SafetensorsFile file(own + "/golden.safetensors");
        const auto tokens = file.array<int32_t>("tokens");
        const auto mask = file.array<uint8_t>("loss_mask");
        const auto offsets = file.array<int64_t>("doc_offsets");
        for (size_t i = 0; i + 1 < offsets.size(); i++) {
            documents.emplace_back(tokens.begin() + offsets[i], tokens.begin() + offsets[i + 1]);
            masks.emplace_back(mask.begin() + offsets[i], mask.begin() + offsets[i + 1]);
        }
        logits = file.array<float>("logits");
    }

    // The same model trained with the auxiliary loss of mixtures of experts.
    Golden balanced() const {
        Golden g = *this;
        g.expected.update(expected["balanced"]);
        g.config.experts.aux_loss_coef = g.expected["router_aux_loss_coef"];
        return g;
    }

    // The logits at a position of the document expected["logits_documents"][j], or null: only every eighth position before the last has some.
    const float *logits_at(size_t j, size_t position) const {
        constexpr size_t stride = 8;
        const auto last = [&](size_t i) { return documents[expected["logits_documents"][i]].size() - 1; };
        if ((last(j) - position) % stride != 0) return nullptr;
        size_t row = position / stride;
        for (size_t i = 0; i < j; i++) row += last(i) / stride + 1;
        return &logits[row * config.V];
    }

    // The documents in rows of at most `per_row` documents.
    std::vector<Row> rows(size_t per_row) const {
        std::vector<Row> out;
        for (size_t first = 0; first < documents.size(); first += per_row) {
            std::vector<std::vector<int32_t>> row_documents;
            std::vector<std::vector<uint8_t>> row_masks;
            for (size_t i = first; i < std::min(documents.size(), first + per_row); i++)
                row_documents.push_back(documents[i]), row_masks.push_back(masks[i]);
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

template <class Dev> std::vector<float> gradient_of(Decoder<Dev> &model) {
    return read(model.memory(), model.parameters().gradients.floats, model.parameters().sharding.count);
}
template <class Dev> std::vector<float> gradient_of(Decoder<Dev> &model, const Tensor &t) {
    const auto &zero = model.parameters();
    return read(model.memory(), zero.gradients.floats + zero.sharding.flat(t.offset), t.count);
}

struct TrainedOptions {
    Mode mode = Mode::train;
    Recompute recompute = Recompute::none;
    size_t row_tokens = 128, tile_tokens = 0, positions = 128;
    bool fp8 = false, share_prompts = false, guards = false, poison = false, offload = false;
    TeacherShape teacher = {};
    float temperature = 1;
};

template <class Dev> struct Trained {  // a loaded model, ready to step
    std::unique_ptr<SelfComm> comm = std::make_unique<SelfComm>();
    std::unique_ptr<Mesh> mesh = std::make_unique<Mesh>(*comm, 1);
    std::unique_ptr<Decoder<Dev>> model;
    Trained(Dev dev, const Golden &g, const TrainedOptions &o = {}) {
        ModelLimits limits;
        limits.mode = o.mode, limits.recompute = o.recompute, limits.fp8 = o.fp8;
        limits.share_prompts = o.share_prompts, limits.teacher = o.teacher, limits.temperature = o.temperature;
        limits.row_tokens = o.row_tokens, limits.tile_tokens = o.tile_tokens;
        limits.positions = o.positions;
        limits.offload.activations = o.offload, limits.offload.dir = testing::TempDir();
        limits.cache_pages = 16, limits.sequences = 8, limits.sequence_pages = 4;
        model = make_model(dev, g.config, limits);
        model->allocate(*mesh, o.guards, o.poison);
        model->load(weights_of({.config = g.config, .dir = g.dir}), 0);
        if (g.dir != g.own) model->load_adapters(HfWeights(g.own, adapter_files), HfWeights(g.dir), 0);
    }
    double mean_loss() {  // of the rows since the last call
        const LossSums sums = model->take_sums();
        return sums.nll / sums.targets;
    }
    double loss(const std::vector<Row> &rows) {
        for (const Row &row : rows) model->evaluate(row);
        return mean_loss();
    }
    double loss_and_gradient(const Golden &g, const std::vector<Row> &rows) {
        model->zero_gradients();
        for (size_t i = 0; g.config.experts.aux_loss_coef > 0 && rows.size() > 1 && i < rows.size(); i++)
            model->count_routing(rows[i], i + 1 == rows.size());
        for (const Row &row : rows) model->accumulate(row, 1 / float(g.targets()), false);
        return mean_loss();
    }
    std::vector<float> gradient(const Tensor &t) { return gradient_of(*model, t); }
    std::vector<float> gradient() { return gradient_of(*model); }
};

inline void expect_at_most(const char *what, double got, double allowed) {
    printf("  %-40s %.2g of %.2g allowed\n", what, got, allowed);
    EXPECT_LE(got, allowed) << what;
}

inline void expect_near_relative(const std::string &what, double got, double want, double allowed) {
    expect_at_most(what.c_str(), std::abs(got - want) / std::abs(want), allowed);
}

template <class Dev> void expect_loss_entropy_accuracy(Dev dev, const Golden &g) {
    Trained<Dev> t(dev, g, {.mode = Mode::evaluate});
    for (const Row &row : g.rows(6)) t.model->evaluate(row);
    const LossSums sums = t.model->take_sums();
    EXPECT_EQ(size_t(sums.targets), g.targets());
    expect_near_relative("loss", sums.nll / sums.targets, g.expected["loss"], 1e-5);
    expect_near_relative("entropy", sums.entropy / sums.targets, g.expected["entropy"], 1e-5);
    EXPECT_NEAR(sums.correct / sums.targets, g.expected["accuracy"].get<double>(), 1e-12);
}

// The logits of every eighth position from the key/value cache: several documents together, one token at a time after a prompt of four.
template <class Dev> void expect_logits_through_the_cache(Dev dev, const Golden &g) {
    Trained<Dev> t(dev, g, {.mode = Mode::generate, .poison = true});
    const std::vector<size_t> which = g.expected["logits_documents"];
    const size_t V = g.config.V, prompt = 4, pages = 4;  // pages of a sequence, as in Trained
    const auto slot = [&](size_t j, size_t position) {
        return int32_t((j * pages + position / cache_page) * cache_page + position % cache_page);
    };
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
        CacheStep step{done == 0, std::vector<int32_t>(row.T, -1), {}, {}, std::vector<int32_t>(row.T, -1)};
        for (size_t j = 0; j < next.size(); j++) {
            for (size_t i = 0; i < n; i++) step.slots[row.doc_offsets[j] + i] = slot(members[j], done + i);
            step.states[row.doc_offsets[j] + n - 1] = int32_t(which.size() - 1 - members[j]);
        }
        if (done) {
            row.T = next.size();
            for (size_t j = 0; j < next.size(); j++) {
                row.doc_pos[j] = int32_t(done), step.length.push_back(int32_t(done + 1));
                for (size_t p = 0; p < pages; p++) step.table.push_back(int32_t(members[j] * pages + p));
            }
            row.tokens.resize(row.T), row.doc_pos.resize(row.T), step.slots.resize(row.T), step.states.resize(row.T);
        }
        t.model->generator().next_logits(row, step);
        const std::vector<float> logits = t.model->generator().logits();
        const size_t position = done + n - 1;
        for (size_t j = 0; j < next.size(); j++) {
            const float *want = g.logits_at(members[j], position);
            if (!want || g.documents[which[members[j]]].size() > g.config.growing_positions()) continue;
            for (size_t v = 0; v < V; v++) {
                worst = std::max(worst, double(std::abs(logits[j * V + v] - want[v])));
                largest = std::max(largest, double(std::abs(want[v])));
                ASSERT_FALSE(std::isnan(logits[j * V + v]));
            }
        }
    }
    expect_at_most("logits", worst, 2e-5 * largest);  // a few hundred roundings of 6e-8 relative to the largest logit
}

inline double sum_of_squares(const std::vector<float> &x) {
    double sum = 0;
    for (float v : x) sum += double(v) * v;
    return sum;
}

// Sums of a tensor's gradient with the random signs of make.py.
inline std::array<double, 4> signed_sums(const Tensor &t, const std::vector<float> &gradient) {
    std::array<double, 4> sums{};
    for (uint32_t k = 0; k < sums.size(); k++) {
        const Random random{1, Purpose::test, stream_of(t.name) + k};
        for (size_t i = 0; i < t.count; i++) sums[k] += random.block(i)[0] & 1 ? gradient[i] : -gradient[i];
    }
    return sums;
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
        const auto sums = signed_sums(tensor, dw);
        const double norm = want["norm"], scale = std::max(norm, 1e-3 * global);
        worst = std::max(worst, std::abs(std::sqrt(sum_of_squares(dw)) - norm) / scale);
        for (size_t k = 0; k < 4; k++) {
            const double p = sums[k] / std::sqrt(double(tensor.count));
            worst = std::max(worst, std::abs(p - want["projections"][k].get<double>()) / scale);
        }
        tensors++;
        EXPECT_LE(worst, 1e-4) << tensor.name;
    }
    EXPECT_EQ(tensors, g.expected["gradients"].size());
    printf("  %-40s %.2g of %.2g allowed\n", "tensors' gradients", worst, 1e-4);
}

// Recomputation, the number of threads, guards behind arrays and poison in dead arrays change no bit on the CPU.
inline void expect_same_bits_in_every_way(const Golden &g) {
    const auto step = [&](const TrainedOptions &o, int threads = 2) {
        Trained<CpuF32> t(make_device<CpuF32>(threads), g, o);
        t.model->randomise(3);
        const double loss = t.loss_and_gradient(g, g.rows(3));
        t.model->arena().check_guards();
        return std::pair(loss, t.gradient());
    };
    const auto want = step({});
    EXPECT_TRUE(step({.poison = true}, 1) == want) << "one thread";
    EXPECT_TRUE(step({.recompute = Recompute::cheap, .poison = true}) == want) << "cheap";
    EXPECT_TRUE(step({.recompute = Recompute::layer, .poison = true}) == want) << "layer";
    EXPECT_TRUE(step({.recompute = Recompute::layer, .guards = true}) == want) << "guards";
    if (g.config.lora.dropout > 0) return;
    Trained<CpuF32> evaluated(make_device<CpuF32>(), g, {.mode = Mode::evaluate, .poison = true});
    EXPECT_EQ(evaluated.loss(g.rows(3)), want.first) << "poison in an evaluation";
}

// The auxiliary loss and the loads of experts do not depend on the division of documents into rows.
template <class Dev> void expect_auxiliary_loss(Dev dev, const Golden &g) {
    Trained<Dev> t(dev, g);
    std::vector<int64_t> loads;  // of the first layer's experts
    for (size_t per_row : {6, 2, 1}) {
        t.loss_and_gradient(g, g.rows(per_row));
        const Routing routing = t.model->routing();
        expect_near_relative("auxiliary loss", routing.aux_loss(), g.expected["aux_loss"], 1e-5);
        const std::vector<int64_t> own(routing.sums.begin(), routing.sums.begin() + ptrdiff_t(routing.experts));
        if (loads.empty()) loads = own;
        EXPECT_EQ(own, loads) << per_row << " documents in a row";
    }
}

// The losses after these numbers of AdamW steps.
template <class Dev> void expect_losses(Dev dev, const Golden &g, const std::vector<size_t> &steps) {
    Trained<Dev> t(dev, g);
    const auto rows = g.rows(2);
    for (size_t step = 0; step <= steps.back(); step++) {
        const double loss = t.loss_and_gradient(g, rows), norm = t.model->gradient_norm();
        if (std::find(steps.begin(), steps.end(), step) != steps.end())
            expect_near_relative(format("loss after %zu steps", step), loss, g.expected["losses"][step], 2e-4);
        AdamW adamw{};
        adamw.lr = 1e-3, adamw.beta1 = 0.9, adamw.beta2 = 0.95, adamw.eps = 1e-8, adamw.weight_decay = 0.1;
        adamw.grad_scale = norm > 1 ? 1 / norm : 1, adamw.step = step + 1;
        t.model->update(adamw);
    }
}

// The mean loss of ten thousand targets, and the error of single documents. The float64 model has the same rounded weights.
template <class Dev> void expect_bf16_as_good_as_transformers(Dev dev, const Golden &g) {
    const auto &theirs = g.expected["bf16"];
    const std::vector<double> exact = theirs["losses"];
    const double n = double(exact.size());
    Trained<Dev> t(dev, g, {.mode = Mode::evaluate});
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

template <class Dev> void round_weights(Decoder<Dev> &model) {  // on the CPU
    for (const OptimizerPart &p : model.optimizer_state().parts)
        for (size_t i = 0; i < p.count; i++) {
            const auto params = std::get<Floats<float>>(p.master);
            params.store(i, bf16(params.load(i)));
        }
}

// |got - want| / |want|
inline double relative_distance(const std::vector<float> &got, const std::vector<float> &want) {
    double error = 0;
    for (size_t i = 0; i < want.size(); i++) error += std::pow(double(got[i]) - want[i], 2);
    return std::sqrt(error / sum_of_squares(want));
}

// The gradient, compared with the same model's in float, which expect_gradients compares with float64. Both have the rounded weights.
template <class Dev> void expect_bf16_gradient_as_good_as_transformers(Dev dev, CpuF32 cpu, const Golden &g) {
    Trained<CpuF32> exact(cpu, g);
    round_weights(*exact.model);
    Trained<Dev> t(dev, g);
    exact.loss_and_gradient(g, g.rows(3)), t.loss_and_gradient(g, g.rows(3));
    expect_at_most("bf16, gradient, L2", relative_distance(t.gradient(), exact.gradient()),
                   1.5 * g.expected["bf16"]["gradient_error"].get<double>());
}

// ---- pairs of answers -----------------------------------------------------------------------------------------------------------------

// dpo or rm on the golden pairs, with the code of the trainer. The reference of dpo is another model.
template <class Dev> struct GoldenPairs {
    nlohmann::json expected;
    SelfComm comm;
    Run run;
    ModelLimits limits;
    std::unique_ptr<PreparedData> data;
    std::unique_ptr<Decoder<Dev>> model;
    std::vector<size_t> samples;

    GoldenPairs(Dev dev, const std::string &name, Task task)
        : GoldenPairs(dev, read_json("test/golden/preference.json")["models"][name], name, task) {
        run.options.ref_model = "test/golden/" + expected["reference"].get<std::string>(),
        run.options.ref_mode = RefMode::resident;
        if (task == RM) set("score.weight", expected["score"]);
    }
    // The model golden/`name`, with an adapter if one is given.
    GoldenPairs(Dev dev, const nlohmann::json &expected, const std::string &name, Task task, const std::string &adapter = "")
        : expected(expected), run{program_of(name), task, default_options(task), comm, 1, device_of(dev)} {
        run.model = open_config(run, "test/golden/" + name);
        bool reward = false;
        std::vector<std::string> notes;
        if (!adapter.empty()) run.model.config.lora = read_lora(adapter, run.model.config, reward, notes);
        run.model.adapter = adapter, run.model.new_head = task == RM && !reward;
        if (task == RM) make_reward(run.model.config);
        run.mesh = std::make_shared<Mesh>(comm, 1);
        run.options.row_tokens = 128;
        data = open_data(run, "test/golden/pairs.safetensors");
        limits = limits_for(run, Mode::train, *data);
        for (size_t s = 0; s < data->size(); s++) samples.push_back(s);
        model.reset(static_cast<Decoder<Dev> *>(open_model(run, run.model, limits).release()));
    }
    static Device device_of(Dev dev) {
        return {models_on(dev), [dev] { return make_memory(dev); }};
    }
    void set(const std::string &tensor, const std::vector<float> &values) {
        size_t begin = 0;  // global offset of the tensor, as in OptimizerPart
        for (const Tensor &t : model->tensors()) {
            for (const OptimizerPart &p : model->optimizer_state().parts)
                if (t.name == tensor && p.global <= begin && begin < p.global + p.count)
                    std::visit([&](auto f) { write(model->memory(), f + (begin - p.global), values); }, p.master);
            begin += t.count;
        }
        model->optimizer_state_loaded();
    }

    // A step of all pairs: computes the gradient and returns the totals.
    PairTotals step() {
        Pairs pairs(run);
        pairs.open(limits, *data, data->size(), nullptr);
        model->zero_gradients();
        const auto rows = pack_samples(*data, samples, run.options.row_tokens);
        pairs.begin(
            {.data = data.get(), .begin = 0, .epoch = 0, .samples = samples, .rows = rows, .tokens = 0, .target_tokens = 0}, 0);
        for (size_t i = 0; i < rows.size(); i++) pairs.accumulate(*model, make_row(*data, rows[i]), i + 1 == rows.size());
        const PairTotals totals = pairs.take_totals();
        EXPECT_EQ(pairs.evaluate(*model, *data, samples).loss, totals.loss);
        return totals;
    }
    // Compares the loss, the norm of the gradient, and sums of it with random signs, which have the relative error of the gradient.
    void expect_loss(const std::string &name, const PairTotals &totals, const nlohmann::json &want) {
        expect_near_relative(name + ", loss", totals.loss, want["loss"], 1e-5);
        const double norm = want["grad_norm"];
        expect_near_relative(name + ", gradient norm", model->gradient_norm(), norm, 1e-4);
        std::array<double, 4> sums{};
        size_t count = 0;
        for (const Tensor &t : model->tensors()) {
            const auto own = signed_sums(t, gradient_of(*model, t));
            for (size_t k = 0; k < sums.size(); k++) sums[k] += own[k];
            count += t.count;
        }
        double worst = 0;
        for (size_t k = 0; k < sums.size(); k++)
            worst = std::max(worst, std::abs(sums[k] - want["projections"][k].get<double>() * std::sqrt(double(count))));
        expect_at_most((name + ", gradient").c_str(), worst / norm, 1e-4);
    }
    // Mean rewards, and the share of pairs whose chosen answer has the larger reward.
    void expect_rewards(const PairTotals &totals, double chosen, double rejected, double accuracy) {
        EXPECT_EQ(totals.pairs, double(data->size()));
        EXPECT_NEAR(totals.chosen_reward / totals.pairs, chosen, 1e-4);
        EXPECT_NEAR(totals.rejected_reward / totals.pairs, rejected, 1e-4);
        EXPECT_NEAR(totals.right / totals.pairs, accuracy, 1e-12);
    }
};

// The largest relative error.
inline void expect_logps(const char *what, const std::vector<double> &got, const std::vector<double> &want) {
    ASSERT_EQ(got.size(), want.size());
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) worst = std::max(worst, std::abs(got[i] / want[i] - 1));
    expect_at_most(what, worst, 1e-5);
}

template <class Dev> void expect_preferences(Dev dev, const std::string &name) {
    GoldenPairs<Dev> t(dev, name, DPO);
    const nlohmann::json &golden = t.expected;
    std::vector<double> logps = document_values(t.run, t.run.model, *t.model, *t.data, t.samples), of_reference;
    for (double &logp : logps) logp = -logp;
    expect_logps("log p", logps, golden["logps"]);
    const LossSums sums = t.model->take_sums();
    expect_near_relative("entropy", sums.entropy / sums.targets, golden["entropy"], 1e-5);
    Reference reference(t.run, t.limits);
    for (size_t s : t.samples)
        for (double logp : reference.logps(*t.model, *t.data, make_row(*t.data, {&s, 1}))) of_reference.push_back(logp);
    expect_logps("log p of the reference", of_reference, golden["reference_logps"]);
    for (const auto &[loss, want] : golden["dpo"].items()) {
        t.run.options.loss_type = {want["loss_type"]}, t.run.options.label_smoothing = want["label_smoothing"];
        EXPECT_EQ(want["beta"], t.run.options.beta);
        const PairTotals totals = t.step();
        t.expect_loss(loss, totals, want);
        t.expect_rewards(totals, golden["rewards_chosen"], golden["rewards_rejected"], golden["accuracy"]);
    }
}

template <class Dev> void expect_reward_model(Dev dev, const std::string &name) {
    if (!read_json("test/golden/preference.json")["models"][name].contains("reward")) GTEST_SKIP() << "transformers has none";
    GoldenPairs<Dev> t(dev, name, RM);
    const nlohmann::json &golden = t.expected;
    const std::vector<double> rewards = document_values(t.run, t.run.model, *t.model, *t.data, t.samples),
                              want_rewards = golden["rewards"];
    double worst = 0, chosen = 0, rejected = 0;
    for (size_t i = 0; i < rewards.size(); i++) {
        worst = std::max(worst, std::abs(rewards[i] - want_rewards[i]));
        (i % 2 ? rejected : chosen) += want_rewards[i] / double(t.data->size());
    }
    expect_at_most("rewards of documents", worst, 1e-4);
    for (const auto &[loss, want] : golden["reward"].items()) {
        t.run.options.margin_loss_enable = want["margin"],
        t.run.options.center_rewards_coefficient = want["center_rewards_coefficient"];
        const PairTotals totals = t.step();
        t.expect_loss(loss, totals, want);
        t.expect_rewards(totals, chosen, rejected, golden["rewards_accuracy"]);
    }
}
