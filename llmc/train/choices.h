// Flags whose value is one of several names. Such a flag is an enum, and the names of its values stand beside it, in the order of the enumerators.
#pragma once
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

template <class E> constexpr const char *choice_names = nullptr;  // with commas between

// An enum whose enumerators have the names of the values.
#define CHOICE(E, ...)            \
    enum class E { __VA_ARGS__ }; \
    template <> inline constexpr const char *choice_names<E> = #__VA_ARGS__;

CHOICE(Dtype, f32, tf32, bf16)
CHOICE(Processor, cpu, cuda)
CHOICE(GpuCheck, always, once, never)
CHOICE(OptimizerType, adamw, muon)
CHOICE(Scheduler, cosine_with_min_lr, cosine, linear, constant_with_warmup, warmup_stable_decay, constant)
CHOICE(RefMode, precompute, resident)
CHOICE(Estimator, gae, reinforce, reinforce_baseline, rloo, group_norm, dr_grpo)  // advantages.h
CHOICE(KlEstimator, k1, k2, k3)
CHOICE(PolicyLossType, ppo, gspo, cispo)  // policy_loss.h
CHOICE(Aggregation, token_mean, sequence_mean, constant)
#undef CHOICE

enum class LoadIn { dtype, nf4, int8 };
template <> inline constexpr const char *choice_names<LoadIn> = ", 4bit, 8bit";
enum class Switch { on, off };
template <> inline constexpr const char *choice_names<Switch> = "true, false";
enum class Correction { none, tis, icepop, seq_mask_tis };
template <> inline constexpr const char *choice_names<Correction> = ", tis, icepop, seq-mask-tis";

template <class E> using Auto = std::optional<E>;  // a choice with one more value, auto, which is nullopt
template <class E>
concept Choice = choice_names<E>
!= nullptr;

// Returns the names in "a, b".
inline std::vector<std::string> names_in(const std::string &list) {
    std::vector<std::string> names(1);
    for (char c : list)
        if (c == ',') names.emplace_back();
        else if (c != ' ') names.back() += c;
    return names;
}

template <Choice E> std::string name_of(E value) { return names_in(choice_names<E>)[size_t(value)]; }
template <Choice E> std::string name_of(const Auto<E> &value) { return value ? name_of(*value) : "auto"; }

template <Choice E> std::optional<E> find_choice(const std::string &name) {
    const std::vector<std::string> names = names_in(choice_names<E>);
    const auto found = std::ranges::find(names, name);
    return found == names.end() ? std::nullopt : std::optional(E(found - names.begin()));
}
