// What a run minimises: which loss, over which targets, with which denominators. The trainer's loop knows no more of its task than this.
//
// The rule for every loss: its denominators belong to the whole step. They are computed first, from the step's samples; then each rank sums the
// shares of its rows. No mean is taken of means, so that a step is the same whatever its rows and ranks are.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>

#include "run.h"

// A loss, and what else the log says of the same samples.
struct Measured {
    double loss = NAN;                                                  // NAN if no token was a target
    nlohmann::ordered_json metrics = nlohmann::ordered_json::object();  // for the log; empty if no token was a target
    std::string text;                                                   // of an evaluation: for people
};

// All ranks make all calls together.
class Objective {
  public:
    virtual ~Objective() = default;

    // The configuration of a model that stays in memory beside the trained one.
    virtual std::optional<ModelConfig> resident() const { return {}; }
    // Announces the first `samples` of data that the calls below will get. It is called before the trained model takes its memory, and
    // may compute something with a model whose rows are as long as `limits` says.
    virtual void use(const Samples &, size_t /*samples*/, const ModelLimits &) {}

    // A step begins, whose gradients are zero. Each rank then passes its rows.
    virtual void begin(const Samples &data, const Step &step) = 0;
    // Runs forward, loss and backward. The row has no tokens if this rank's ring has none in this micro-step.
    virtual void accumulate(Model &model, const Row &row, bool last) = 0;
    virtual Measured take(Model &model) = 0;  // sums over all rows and ranks since begin()

    // Names of metrics begin with "eval_".
    virtual Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) = 0;

    // Adds to the config.json of a saved model what the last evaluation found.
    virtual void describe(ModelConfig &) const {}
};

std::unique_ptr<Objective> make_objective(const Run &run);  // of run.task; dies if the options contradict each other

nlohmann::ordered_json token_metrics(const LossSums &sums, const std::string &prefix);
