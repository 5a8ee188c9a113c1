#include "critic.h"

#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"
#include "../io/hf.h"
#include "checkpoint.h"
#include "evaluate.h"
#include "open_config.h"
#include "open_data.h"
#include "open_model.h"

using nlohmann::ordered_json;

ModelSpec critic_spec(const Run &run) {
    const std::string &dir = run.options.critic_model;
    ModelSpec out = spec_beside(run, dir, "--critic_model");
    out.config.lora = {}, out.config.weight_bits = 0;  // all weights of a critic are trained
    out.config.experts.aux_loss_coef = 0;              // a critic has no auxiliary loss for its experts
    agree(run.comm, [&] {
        if (!dir.empty() && !run.options.plan && !HfWeights::present(dir))
            die("--critic_model %s has no weights (model.safetensors, or shards with an index)\n  fix: give the directory of a trained model",
                dir.c_str());
        out.new_head = !out.config.reward;
        if (out.new_head) make_reward(out.config);
    });
    return out;
}

Critic::Critic(const Run &run, const ModelSpec &spec, const ModelLimits &limits) : run_(run), spec_(spec) {
    ModelSpec with_policy = spec_;  // activations must leave memory for the policy
    with_policy.co_residents = {{"the policy", run.model.config, Mode::train}};
    model_ = open_model(run, with_policy, co_resident_limits(limits, spec_.config, Mode::train));
}

std::vector<std::vector<double>> Critic::values(const Samples &rollouts) {
    agree(run_.comm, [&] { expect_positions(run_, spec_, rollouts); });
    return target_values(run_, spec_, *model_, rollouts, first_samples(rollouts.size()));
}

void Critic::begin(const Batch &batch, double tokens) { batch_ = &batch, tokens_ = tokens; }

// Adds a row's tokens to the sums, and returns the derivatives of the loss with respect to their values.
std::vector<float> Critic::add(const Row &row) {
    const std::vector<double> values = model_->evaluate(row);
    std::vector<double> d_values(values.size());
    ValueSums sums;
    size_t first = 0;
    for (size_t i : row.documents) {
        const size_t count = values.empty() ? 0 : batch_->returns[i].size();
        const ValueTokens tokens{std::span(values).subspan(first, count), batch_->values[i], batch_->returns[i]};
        if (has_reward(batch_->rewards[i]))
            sums += value_loss(run_.options.value_clip, tokens, tokens_, std::span(d_values).subspan(first, count));
        first += count;
    }
    if (run_.mesh->is_first_of_row()) sums_ += sums;  // the ranks of a row have the same sums
    return {d_values.begin(), d_values.end()};
}

void Critic::evaluate(const Row &row) { add(row); }

void Critic::accumulate(const Row &row, bool last) {
    const auto weights = add(row);
    model_->backward(weights, 0, last);
}

double Critic::gradient_norm() {
    norm_ = model_->gradient_norm();
    model_->arena().check_guards();
    return norm_;
}

void Critic::update(AdamW adamw, double rate) {
    const Options &o = run_.options;
    adamw.lr = o.critic_learning_rate * rate;
    adamw.grad_scale = o.max_norm > 0 && norm_ > o.max_norm ? o.max_norm / norm_ : 1;
    model_->update(adamw);
}

ordered_json Critic::take(const std::string &prefix) {
    const ValueSums sums = over_ranks(run_.comm, std::exchange(sums_, {}));
    ordered_json out = {{prefix + "value_loss", sums.value_loss},
                        {prefix + "explained_variance", sums.explained_variance()},
                        {prefix + "value", sums.values / sums.tokens},
                        {prefix + "return", sums.returns / sums.tokens},
                        {prefix + "value_clip_ratio", sums.clipped / sums.tokens}};
    return out;
}

static std::string directory_in(const std::string &dir) { return dir + "/critic"; }

void Critic::save(const std::string &dir, const std::string &export_dtype) {
    const std::string own = directory_in(dir);
    agree(run_.comm, [&] {
        if (run_.is_main_rank()) std::filesystem::create_directories(own);
    });
    model_->save(own, export_dtype);
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        write_companions(spec_, run_.chat, own, export_dtype);
        sync_directory(own);
    });
}

void Critic::save_optimizer(const std::string &dir) {
    ::save_optimizer(run_.comm, directory_in(dir), model_->optimizer_state());
    agree(run_.comm, [&] { sync_directory(directory_in(dir)); });
}

void Critic::verify_optimizer(const std::string &dir) {
    ::verify_optimizer(run_.comm, directory_in(dir), model_->optimizer_state());
}

void Critic::load_optimizer(const std::string &dir) {
    const std::string from = directory_in(dir);
    ::load_optimizer(run_.comm, from, model_->optimizer_state(tensor_ranks_of(run_.comm, from)));
    model_->optimizer_state_loaded();
}
