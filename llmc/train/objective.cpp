#include "objective.h"

#include <cmath>

#include "../core/common.h"
#include "distillation.h"
#include "evaluate.h"
#include "pairs.h"
#include "policy.h"
#include "unpaired.h"

using nlohmann::ordered_json;

ordered_json token_metrics(const LossSums &sums, const std::string &prefix) {
    const double n = sums.targets;
    return {{prefix + "entropy", sums.entropy / n}, {prefix + "mean_token_accuracy", sums.correct / n}};
}

namespace {

// The mean nll of a step's target tokens.
class LanguageModel final : public Objective {
  public:
    explicit LanguageModel(const Run &run) : run_(run) {}

    void begin(const Step &step, uint64_t) override { weight_ = 1 / float(step.target_tokens); }
    void accumulate(Model &model, const Row &row, bool last) override { model.accumulate(row, weight_, last); }
    Measured take(Model &model) override {
        const LossSums sums = over_ranks(run_.comm, model.take_sums());
        return {sums.nll / sums.targets, token_metrics(sums, ""), ""};
    }
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override {
        document_values(run_, run_.model, model, data, samples);
        const LossSums sums = over_ranks(run_.comm, model.take_sums());
        const double n = sums.targets, loss = sums.nll / n;
        if (n == 0) return {NAN, ordered_json::object(), "nothing to evaluate, no token of the evaluation samples is a target"};
        ordered_json metrics = {{"eval_perplexity", std::exp(loss)}, {"eval_target_tokens", size_t(n)}};
        metrics.update(token_metrics(sums, "eval_"));
        return {loss, metrics, format("eval loss %.4f  perplexity %.3f  accuracy %.4f", loss, std::exp(loss), sums.correct / n)};
    }

  private:
    const Run &run_;
    float weight_ = 0;
};

}  // namespace

std::unique_ptr<Objective> make_objective(const Run &run) {
    if (run.task & RL) return std::make_unique<Policy>(run);
    if (run.task == DISTILL) return std::make_unique<Distillation>(run);
    if (learns_unpaired(run.options)) return std::make_unique<Unpaired>(run);
    if (run.task & PAIRS) return std::make_unique<Pairs>(run);
    return std::make_unique<LanguageModel>(run);
}
