// The task distill: a student learns the distributions of a teacher over the whole vocabulary (../ops/divergence.h), at every token of the answers of a
// step. The answers are the student's own, sampled for the step, or those of --data.
//
// The teacher is a second model in memory, or the base of the student's adapters. For each row it computes its hidden states; the student's loss then turns
// those of both models into logits, a chunk of tokens at a time.
#pragma once
#include <memory>
#include <optional>

#include "objective.h"
#include "rollout_source.h"

// What the plan of the student knows of --teacher_model. All ranks call it. Dies if the model cannot teach the student.
TeacherShape teacher_shape(const Run &run);

class Distillation final : public Objective {
  public:
    explicit Distillation(const Run &run);

    std::vector<CoResidentModel> co_residents() const override;
    void reserve(const Samples &data, ModelLimits &limits) override;
    void open(const ModelLimits &limits, const Samples &data, size_t samples, const Samples *eval_data) override;
    std::vector<Step> draw(Model &model, DataLoader &loader, size_t) override;
    Measured skip(const Step &) override { return {NAN, std::move(news_)}; }
    void begin(const Step &step, uint64_t) override { weight_ = 1 / float(step.target_tokens); }
    void accumulate(Model &model, const Row &row, bool last) override;
    Measured take(Model &model) override;
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override;

  private:
    bool is_on_policy(const Step &step) const;
    Step answered(Model &model, const Step &prompts);
    TeacherRow taught(Model &student, const Row &row);
    Measured take(Model &model, const std::string &prefix);

    const Run &run_;
    std::optional<RolloutSource> source_;  // none if all answers are given
    std::unique_ptr<Model> teacher_;       // null if it is the base of adapters
    Rollouts answers_;                     // of the current step or evaluation, if they are the student's own
    nlohmann::ordered_json news_;          // figures of these answers, for the log
    float weight_ = 0;                     // of a token
};
