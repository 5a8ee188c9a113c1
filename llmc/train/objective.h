// The objective of a run: the loss, its targets and its denominators. This interface is all that the trainer's loop knows of a task.
//
// A rule for every loss: its denominators belong to the whole step. They are computed first, from the step's samples; then each rank sums the
// shares of its rows. There is no mean of means, so a step does not depend on its division into rows and ranks.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "run.h"

// A loss, and further figures for the log from the same samples.
struct Measured {
    double loss = NAN;                                                  // NAN if no token was a target
    nlohmann::ordered_json metrics = nlohmann::ordered_json::object();  // for the log; empty if no token was a target
    std::string text = {};                                              // readable text of an evaluation
    double norm_beside = 0;                                             // gradient norm of a second trained model (the critic)
};

// The number of samples that are drawn at a time, or the most tokens that they may have; and the number of passes over the data.
struct Drawing {
    size_t batch_size, batch_tokens, epochs;
};

// All ranks make all calls together.
class Objective {
  public:
    virtual ~Objective() = default;

    // Models in memory in addition to the trained one.
    virtual std::vector<CoResidentModel> co_residents() const { return {}; }
    // The drawing of samples from the data, and the resulting number of optimizer steps.
    virtual Drawing drawing(const Options &o) const { return {o.train_batch_size, o.train_batch_tokens, o.max_epochs}; }
    virtual size_t steps(size_t /*samples*/) const { return 1; }
    // Reserves memory in the trained model for draw().
    virtual void reserve(const Samples &, ModelLimits &) {}
    // Draws from the data and returns the resulting optimizer steps; an objective may first turn the drawn samples into others. `left`: remaining
    // steps of the run.
    virtual std::vector<Step> draw(Model &, DataLoader &loader, size_t /*left*/) { return {loader.next()}; }
    // True if save_state() keeps what was drawn, because not all its steps are done. In the resumed run draw() returns the other steps.
    virtual bool keeps_drawn() const { return false; }
    // Announces the first `samples` of the training data, and the evaluation data if that differs. It is called before the trained model allocates
    // its memory, and may compute something with a model whose rows are within `limits`.
    virtual void open(const ModelLimits &, const Samples & /*data*/, size_t /*samples*/, const Samples * /*eval_data*/) {}

    // Returns the number of tokens of a step that the loss learns from. A step without any makes no update: skip() then replaces the calls below, and
    // returns the log's figures for its samples.
    virtual size_t targets(const Step &step) const { return step.target_tokens; }
    virtual Measured skip(const Step &) { return {}; }

    // Begins a step; the gradients are zero. Each rank then passes its rows. key: see Model::zero_gradients; for a second trained model.
    virtual void begin(const Step &step, uint64_t key) = 0;
    // Runs forward, loss and backward. The row has no tokens if this rank's ring has none in this micro-step.
    virtual void accumulate(Model &model, const Row &row, bool last) = 0;
    virtual Measured take(Model &model) = 0;  // sums over all rows and ranks since begin()

    // Updates a second trained model from the same step. rate: the schedule's current share of the peak learning rate.
    virtual void update(const AdamW &, double /*rate*/) {}
    virtual size_t frozen_steps() const { return 0; }  // number of initial updates that do not change the trained model

    // The names of these metrics begin with "eval_".
    virtual Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) = 0;

    // Adds the last evaluation's figures to the config.json of a saved model.
    virtual void describe(ModelConfig &) const {}

    // Write, compare and read the objective's own files in the directory of a saved model or a checkpoint.
    virtual void save(const std::string & /*dir*/, const std::string & /*export_dtype*/) {}
    virtual void save_state(const std::string & /*dir*/) {}
    virtual void verify_state(const std::string & /*dir*/) {}
    virtual void load_state(const std::string & /*dir*/) {}
};

std::unique_ptr<Objective> make_objective(const Run &run);  // for run.task; dies if options contradict each other

nlohmann::ordered_json token_metrics(const LossSums &sums, const std::string &prefix);
