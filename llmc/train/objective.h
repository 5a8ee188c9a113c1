// What a run minimises: which loss, over which targets, with which denominators. The trainer's loop knows no more of its task than this.
//
// The rule for every loss: its denominators belong to the whole step. They are computed first, from the step's samples; then each rank sums the
// shares of its rows. No mean is taken of means, so that a step is the same whatever its rows and ranks are.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "run.h"

// A loss, and further figures of the log for the same samples.
struct Measured {
    double loss = NAN;                                                  // NAN if no token was a target
    nlohmann::ordered_json metrics = nlohmann::ordered_json::object();  // for the log; empty if no token was a target
    std::string text = {};                                              // of an evaluation: for people
    double norm_beside = 0;                                             // of the gradient of a model that is trained beside
};

// Samples that are drawn at a time, or the most tokens that they may have; and how often the data is passed over.
struct Drawing {
    size_t batch_size, batch_tokens, epochs;
};

// All ranks make all calls together.
class Objective {
  public:
    virtual ~Objective() = default;

    // Models in memory in addition to the trained one.
    virtual std::vector<CoResidentModel> co_residents() const { return {}; }
    // How samples are drawn from the data, and the resulting number of optimizer steps.
    virtual Drawing drawing(const Options &o) const { return {o.train_batch_size, o.train_batch_tokens, o.max_epochs}; }
    virtual size_t steps(size_t /*samples*/) const { return 1; }
    // Makes room for what draw() needs of the trained model.
    virtual void reserve(const Samples &, ModelLimits &) {}
    // Draws from the data, and returns the optimizer steps that this leads to; an objective may make other samples of those drawn first. `left`: the steps
    // that the run still has.
    virtual std::vector<Step> draw(Model &, DataLoader &loader, size_t /*left*/) { return {loader.next()}; }
    // Announces the first `samples` of the data that steps draw from, and the data of evaluations if that is other data. It is called before the
    // trained model takes its memory, and may compute something with a model whose rows are as long as `limits` says.
    virtual void open(const ModelLimits &, const Samples & /*data*/, size_t /*samples*/, const Samples * /*eval_data*/) {}

    // The tokens of a step that the loss learns from. A step without any is no update: skip() replaces the calls below, and returns the
    // log says of its samples.
    virtual size_t targets(const Step &step) const { return step.target_tokens; }
    virtual Measured skip(const Step &) { return {}; }

    // A step begins, whose gradients are zero. Each rank then passes its rows. key: as in Model::zero_gradients, for a second trained model.
    virtual void begin(const Step &step, uint64_t key) = 0;
    // Runs forward, loss and backward. The row has no tokens if this rank's ring has none in this micro-step.
    virtual void accumulate(Model &model, const Row &row, bool last) = 0;
    virtual Measured take(Model &model) = 0;  // sums over all rows and ranks since begin()

    // Updates a model that is trained beside, from the same step. rate: the share of the peak that the schedule of learning rates has reached.
    virtual void update(const AdamW &, double /*rate*/) {}
    virtual size_t frozen_steps() const { return 0; }  // the first updates, which leave the trained model as it is

    // Names of metrics begin with "eval_".
    virtual Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) = 0;

    // Adds the last evaluation's figures to the config.json of a saved model.
    virtual void describe(ModelConfig &) const {}

    // Write, compare and read the objective's own files in the directory of a saved model or a checkpoint.
    virtual void save(const std::string & /*dir*/, const std::string & /*export_dtype*/) {}
    virtual void save_state(const std::string & /*dir*/) {}
    virtual void verify_state(const std::string & /*dir*/) {}
    virtual void load_state(const std::string & /*dir*/) {}
};

std::unique_ptr<Objective> make_objective(const Run &run);  // of run.task; dies if the options contradict each other

nlohmann::ordered_json token_metrics(const LossSums &sums, const std::string &prefix);
