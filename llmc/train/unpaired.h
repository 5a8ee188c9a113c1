// The task dpo with --loss_type kto or apo_zero_unpaired: learns from single answers, each judged desirable or undesirable.
//
// kto compares an answer's reward with z, an estimate of the KL divergence of the policy from the reference. A step of samples (x_1, y_1) ... (x_n, y_n)
// of prompts and answers has the mismatched pairs (x_1, y_n), (x_2, y_1), ... (x_n, y_{n-1}), and z is the mean over these of log p - log p of the
// reference, or 0 if the mean is negative. The pairs are evaluated before the step, by the weights that the step updates, in rows of their own.
#pragma once
#include <memory>

#include "objective.h"
#include "preference.h"
#include "reference.h"

// The mismatched pairs of these samples, of at most `most` tokens each: longer answers are cut.
class Mismatched final : public Samples {
  public:
    Mismatched(const Samples &data, std::span<const size_t> samples, size_t most);

    size_t documents() const override { return all_.size(); }
    size_t length(size_t i) const override { return all_[i].tokens.size(); }
    size_t targets(size_t i) const override { return size_t(std::ranges::count(all_[i].mask, 1)); }
    Document document(size_t i) const override { return all_[i]; }
    const InputFile &file() const override { return data_.file(); }

  private:
    const Samples &data_;
    std::vector<Document> all_;
};

// Sums over the answers of one label. The reward of an answer is beta (log p - log p of the reference).
struct AnswerTotals {
    double answers = 0, reward = 0, logp = 0;
};

struct UnpairedTotals {
    double loss = 0;  // the sum of the answers' shares
    AnswerTotals desirable, undesirable;

    UnpairedTotals &operator+=(const UnpairedTotals &o);
    double margin() const { return desirable.reward / desirable.answers - undesirable.reward / undesirable.answers; }
};

class Unpaired final : public Objective {
  public:
    explicit Unpaired(const Run &run);

    std::vector<CoResidentModel> co_residents() const override { return Reference::co_residents(run_); }
    void reserve(const Samples &data, ModelLimits &limits) override;
    void open(const ModelLimits &limits, const Samples &data, size_t samples, const Samples *eval_data) override;
    std::vector<Step> draw(Model &model, DataLoader &loader, size_t) override;
    void begin(const Step &step, uint64_t) override;
    void accumulate(Model &model, const Row &row, bool last) override;
    Measured take(Model &model) override;
    Measured evaluate(Model &model, const Samples &data, std::span<const size_t> samples) override;

  private:
    double mismatched_divergence(Model &model, const Samples &data, std::span<const size_t> samples);
    std::vector<float> add(const Row &row, std::span<const double> nll, std::span<const double> reference);
    Measured take(Model &model, const std::string &prefix);

    const Run &run_;
    std::unique_ptr<Reference> reference_;
    size_t longest_ = 0;             // tokens of the longest mismatched pair
    const Samples *data_ = nullptr;  // the data of the current step or evaluation
    double answers_ = 0;             // their number in the step
    double z_ = 0;
    double kl_seconds_ = 0;  // time for z
    UnpairedTotals totals_;  // sums over this rank's answers
};
