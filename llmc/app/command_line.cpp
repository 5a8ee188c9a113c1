#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "../core/common.h"
#include "../core/file.h"
#include "../data/hub.h"
#include "../data/python.h"
#include "../data/tokenizer.h"
#include "../model/config.h"
#include "../train/advantages.h"
#include "../train/preference.h"
#include "../train/reward.h"
#include "help.h"
#include "settings.h"

using nlohmann::ordered_json;

// ---- tables ---------------------------------------------------------------------------------------------------------------------

static constexpr Task tasks[] = {DEMO, PRETRAIN, SFT, DPO, RM, GRPO, PPO, EVAL, GENERATE, MERGE};

struct Flag {
    const char *name;
    unsigned tasks;
    const char *wanted;  // the valid values, in words
    bool boolean, list;
};

static const char *wanted(const std::string &) { return "text"; }
static const char *wanted(bool) { return "true or false"; }
static const char *wanted(size_t) { return "a whole number, 0 or more"; }
static const char *wanted(int64_t) { return "a whole number"; }
static const char *wanted(double) { return "a number"; }
static const char *wanted(const Steps &) { return "a number of steps, or a share of all below 1"; }
static const char *wanted(const Betas &) { return "two numbers such as 0.9,0.95"; }
static const char *wanted(const Names &) { return "names with commas between"; }
static const char *wanted(const Numbers &) { return "numbers with commas between"; }
static const char *wanted(const Texts &) { return "text, at least a character, in UTF-8"; }

template <class T> constexpr bool is_list = std::is_same_v<T, Betas> || std::is_same_v<T, Names> || std::is_same_v<T, Numbers>;

static std::vector<std::string> split(const std::string &names) {
    return names.empty() ? std::vector<std::string>{} : CLI::detail::split(names, ',');
}

static const std::vector<Flag> &flags() {
    static const std::vector<Flag> all = {
#define OPT(type, name, value, tasks, help) {#name, tasks, wanted(type{}), std::is_same_v<type, bool>, is_list<type>},
#include "../train/options.def"
    };
    return all;
}

static bool contains(const std::string &names, const std::string &name) {
    const auto all = split(names);
    return std::find(all.begin(), all.end(), name) != all.end();
}

static const Flag *find_flag(const std::string &name) {
    for (const Flag &f : flags())
        if (name == f.name) return &f;
    return nullptr;
}

static std::vector<std::string> names_of(unsigned mask) {
    std::vector<std::string> names;
    for (Task t : tasks)
        if (mask & t) names.push_back(task_name(t));
    return names;
}

static std::string task_words(unsigned mask) { return CLI::detail::join(names_of(mask), ", "); }

// ---- settings to Options ---------------------------------------------------------------------------------------------------------

using Problems = std::vector<std::string>;

struct Parser {
    std::string program;
    Task task;
    Options options;
    std::set<std::string> given;                                   // flags that were set
    std::vector<std::pair<std::string, std::string>> understood;   // these flags with their values
    std::map<std::string, std::pair<Texts *, std::string>> texts;  // by flag: the field, and the source of its texts
    CLI::App app;

    Parser(const std::string &name, Task t) : program(name), task(t), options(default_options(t)) {
        app.set_help_flag();  // removes CLI11's
#define OPT(type, name, value, tasks, help) \
    if (task & (tasks)) add("--" #name, options.name);
#include "../train/options.def"
    }

    template <class T> void add(const char *name, T &field) {
        CLI::Option *option = app.add_option(name, field);
        if constexpr (std::is_same_v<T, bool>) option->check(true_or_false, "");
        if constexpr (!std::is_same_v<T, std::string>) option->check(not_empty, "");
        if constexpr (std::is_unsigned_v<T> && !std::is_same_v<T, bool>) option->check(decimal, "");
        if constexpr (std::is_same_v<T, double> || std::is_same_v<T, Steps> || std::is_same_v<T, Betas> ||
                      std::is_same_v<T, Numbers>)
            option->check(finite, "");
        if constexpr (is_list<T>) option->delimiter(',');
        if constexpr (std::is_same_v<T, Texts>) texts[name + 2] = {&field, ""};
    }

    // Checks for values that CLI11 accepts: "" (as 0), "yes", "nan", "-5" and "010" (as 8) for an unsigned number. They return the
    // error.
    static std::string not_empty(const std::string &text) { return text.empty() ? "empty" : ""; }
    static std::string true_or_false(const std::string &text) { return text == "true" || text == "false" ? "" : "neither"; }
    static std::string finite(const std::string &text) {
        return std::isfinite(strtod(text.c_str(), nullptr)) ? "" : "not finite";
    }
    static std::string decimal(const std::string &text) {
        return text.find_first_not_of("0123456789") == text.npos && (text.size() == 1 || text[0] != '0') ? "" : "not decimal";
    }

    static std::string quoted(const std::string &value) {  // for a shell
        if (!value.empty() && value.find_first_of(" \t\n\"'\\$`*?[]{}()<>|&;#~!") == value.npos) return value;
        std::string out = "'";
        for (char c : value) out += c == '\'' ? "'\\''" : std::string(1, c);
        return out + "'";
    }

    // Returns a command line of all understood options, in this program's names.
    std::string command() const {
        std::string line = program + " " + task_name(task);
        for (const auto &[name, value] : understood) line += " --" + name + " " + quoted(value);
        return line;
    }

    void leave_out(const std::string &flag) {
        std::erase_if(understood, [&](const auto &setting) { return setting.first == flag; });
    }

    void set(const Setting &s) {
        const Flag &flag = *find_flag(s.name);
        if (!(flag.tasks & task))
            die("%s belongs to %s, not to %s\n  fix: leave it out, or start with another task", s.where.c_str(),
                task_words(flag.tasks).c_str(), task_name(task));
        std::vector<std::string> values = s.values;
        if (values.empty() && flag.boolean) values = {"true"};
        if (values.empty()) die("%s needs a value: %s\n  fix: write it behind the flag", s.where.c_str(), flag.wanted);
        if (texts.count(flag.name)) return add_texts(flag, values, s.where);
        if (values.size() > 1 && !flag.list)
            die("%s has more than one value: \"%s\" and \"%s\"\n  fix: put quotes around a value with spaces, and commas between several files",
                s.where.c_str(), values[0].c_str(), values[1].c_str());
        if (flag.boolean && (values[0] == "True" || values[0] == "False")) values[0][0] = char(tolower(values[0][0]));
        const auto has_gap = [](const std::string &v) {
            return v.starts_with(',') || v.ends_with(',') || v.find(",,") != v.npos;
        };
        CLI::Option *option = app.get_option("--" + std::string(flag.name));
        const Options before = options;
        try {
            if (flag.list && std::any_of(values.begin(), values.end(), has_gap)) throw CLI::ValidationError("a gap in a list");
            option->clear();
            option->add_result(values);
            option->run_callback();
        } catch (const CLI::ParseError &) {
            options = before;  // a partially parsed value would cause a second error
            die("%s \"%s\" is not %s\n  fix: give such a value, or leave it out", s.where.c_str(),
                CLI::detail::join(values, " ").c_str(), flag.wanted);
        }
        leave_out(flag.name);
        understood.emplace_back(flag.name, CLI::detail::join(values, ","));
        given.insert(flag.name);
    }

    // CLI11 would split "[a,b]". Texts of the command line replace the texts in --config, and are added to each other.
    void add_texts(const Flag &flag, const std::vector<std::string> &values, const std::string &where) {
        auto &[field, from] = texts[flag.name];
        if (from != where) {
            field->clear();
            leave_out(flag.name);
        }
        from = where;
        for (const std::string &value : values) {
            if (value.empty() || !is_utf8(value))
                die("%s \"%s\" is not %s\n  fix: give such a value, or leave it out", where.c_str(), value.c_str(), flag.wanted);
            if (std::ranges::count(*field, value))
                die("%s has \"%s\" twice\n  fix: leave one of them out", where.c_str(), value.c_str());
            field->push_back(value);
            understood.emplace_back(flag.name, value);
        }
        given.insert(flag.name);
    }

    // Sets options that follow from several flags together.
    void finish(std::vector<std::string> &notes) {
        const size_t documents = task & PAIRS ? 2 : 1;  // per sample
        if (options.row_tokens && !given.count("max_len"))
            options.max_len = std::clamp<size_t>(options.row_tokens / documents, 2, options.max_len);
        if (options.row_tokens == 0) options.row_tokens = documents * options.max_len;
        if (options.ring_attn_head_stride && options.sp_mode != "gather") {
            if (given.count("sp_mode"))
                die("--ring_attn_head_stride is for --sp_mode gather, not %s\n  fix: leave one of them out",
                    options.sp_mode.c_str());
            options.sp_mode = "gather";
            notes.push_back("ring_attn_head_stride: --sp_mode gather");
        }
        if (options.train_batch_tokens && !given.count("train_batch_size")) options.train_batch_size = 0;
        // The demo replaces only its own run.
        if (task == DEMO && !given.count("output_dir") && options.resume == "never") options.overwrite = true;
    }
};

// ---- checks ----------------------------------------------------------------------------------------------------------------------

static constexpr size_t most_count = INT32_MAX;  // of a flag that counts

static void check_values(const Options &o, Task task, Problems &problems) {
    const ordered_json json = to_json(o, task);
    const auto must = [&](bool ok, const char *flag, const char *rule) {
        if (!ok)
            problems.push_back(format("--%s is %s but must be %s\n  fix: change --%s", flag,
                                      json.value(flag, ordered_json()).dump().c_str(), rule, flag));
    };
    const auto one_of = [&](const std::string &value, const char *flag, const char *choices) {
        if (!contains(choices, value))
            problems.push_back(format("--%s is \"%s\"\n  fix: use one of %s", flag, value.c_str(), choices));
    };
    const size_t before = problems.size();
    // Sizes are products of two counts, with a factor of two for pairs.
    const auto must_be_countable = [&](const auto &value, const std::string &flag) {
        if constexpr (std::is_same_v<decltype(value), const size_t &>)
            must(value <= most_count || flag == "seed", flag.c_str(), "less than 2^31");
    };
#define OPT(type, name, value, tasks, help) must_be_countable(o.name, #name);
#include "../train/options.def"
    if (problems.size() > before) return;
    must(double(o.n) * double(o.num_episodes) * double(o.max_epochs) <= double(most_count) || !(task & RL), "n",
         "such that n * num_episodes * max_epochs is less than 2^31");
    const auto one_or_two = [](const Numbers &x) { return x.size() == 1 || x.size() == 2; };
    const auto share = [](double x) { return x >= 0 && x <= 1; };
    const auto steps = [](double x) { return (x > 0 && x < 1) || (x >= 1 && x == std::floor(x) && x < 0x1p53); };
    one_of(o.add_bos, "add_bos", "auto,never,always");
    if (!o.stopping_strategy.empty())
        one_of(o.stopping_strategy, "stopping_strategy", "first_exhausted,all_exhausted,all_exhausted_without_replacement");
    one_of(o.share_prompts, "share_prompts", "auto,true,false");
    one_of(o.truncation, "truncation", task == PRETRAIN ? "split,drop,keep" : "drop,keep");
    one_of(o.lr_scheduler, "lr_scheduler", "cosine_with_min_lr,cosine,linear,constant_with_warmup,warmup_stable_decay,constant");
    one_of(o.dtype, "dtype", "auto,f32,tf32,bf16");
    one_of(o.export_dtype, "export_dtype", "auto,f32,bf16");
    one_of(o.device, "device", "auto,cpu,cuda");
    one_of(o.gpu_check, "gpu_check", "always,once,never");
    one_of(o.recompute, "recompute", "auto,none,cheap,layer");
    one_of(o.ref_mode, "ref_mode", "precompute,resident");
    if (!o.load_in.empty()) one_of(o.load_in, "load_in", "4bit,8bit");
    one_of(o.optimizer, "optimizer", "adamw,muon");
    one_of(o.moments, "moments", "f32,bf16,8bit");
    one_of(o.grad_dtype, "grad_dtype", "f32,bf16");
    for (const std::string &name : o.offload) one_of(name, "offload", "activations,optimizer,weights");
    must(o.rope_theta == 0 || o.rope_theta > 1, "rope_theta", "above 1, or 0 to keep config.json's");
    must(o.lora_rank <= 65536, "lora_rank", "at most 65536");
    must(o.lora_alpha > 0, "lora_alpha", "above 0");
    must(o.lora_dropout >= 0 && o.lora_dropout < 1, "lora_dropout", "at least 0 and less than 1");
    for (const std::string &name : task == RM ? o.loss_type : Names()) one_of(name, "loss_type", "sigmoid,logexp");

    must(o.train_batch_size > 0 || o.train_batch_tokens > 0, "train_batch_size", "at least 1");
    must(o.max_len >= 2, "max_len", "at least 2: a token is predicted from the one before");
    if (o.row_tokens < o.max_len)
        die("--row_tokens %zu is less than --max_len %zu: the longest sample would not fit\n  fix: use --row_tokens %zu, or lower --max_len",
            o.row_tokens, o.max_len, o.max_len);
    must(o.max_epochs > 0, "max_epochs", "at least 1");
    must(o.rollout_batch_size > 0, "rollout_batch_size", "at least 1");
    must(o.num_episodes > 0, "num_episodes", "at least 1");
    must(o.async_steps <= 1, "async_steps",
         "0 or 1: while a batch of answers is trained on, one is written, and more of them would only be older");
    must(o.dynamic_filtering.empty() || (o.dynamic_filtering.size() == 2 && o.dynamic_filtering[0] < o.dynamic_filtering[1]),
         "dynamic_filtering", "two numbers, the smaller one first, such as 0,1");
    must(o.reward_clip_range.empty() || (o.reward_clip_range.size() == 2 && o.reward_clip_range[0] < o.reward_clip_range[1]),
         "reward_clip_range", "two numbers, the smaller one first, such as -10,10");
    must(o.learning_rate > 0, "learning_rate", "above 0");
    must(o.critic_learning_rate > 0, "critic_learning_rate", "above 0");
    must(o.value_clip >= 0, "value_clip", "0 (no bound) or more");
    must(o.lr_warmup == 0 || steps(o.lr_warmup), "lr_warmup", "0 (none), a whole number, or a share of all steps below 1");
    for (const std::string &name : o.report_to) {
        const bool project = !name.ends_with(':') && (name.starts_with("wandb:") || name.starts_with("trackio:"));
        one_of(project ? name.substr(0, name.find(':')) : name, "report_to", "tensorboard,wandb,trackio,none");
    }
    must(share(o.min_lr_ratio), "min_lr_ratio", "between 0 and 1");
    must(share(o.lr_decay_ratio), "lr_decay_ratio", "between 0 and 1");
    for (double beta : o.adam_betas) must(beta >= 0 && beta < 1, "adam_betas", "two numbers in [0, 1)");
    must(o.adam_eps > 0, "adam_eps", "above 0");
    must(o.weight_decay >= 0, "weight_decay", "0 or more");
    must(o.neftune_noise_alpha >= 0, "neftune_noise_alpha", "0 (no noise) or more");
    must(o.max_norm >= 0, "max_norm", "0 (no clipping) or more");
    must(o.router_aux_loss_coef >= 0 || o.router_aux_loss_coef == -1, "router_aux_loss_coef",
         "-1 (as config.json says), 0 (no auxiliary loss) or more");
    must(o.threads <= 4096, "threads", "at most 4096");
    one_of(o.sp_mode, "sp_mode", "ring,gather,ulysses");
    must(o.ranks > 0 && o.ranks <= 4096, "ranks", "between 1 and 4096");
    must(o.ring_attn_size > 0 || task == DEMO, "ring_attn_size", "at least 1");
    must(o.zero_stage <= 3, "zero_stage", "0, 1, 2 or 3");
    must(o.expert_parallel > 0 && o.expert_parallel <= 4096, "expert_parallel", "at least 1");
    must(o.comm_timeout > 0 && o.comm_timeout <= 1e9, "comm_timeout", "above 0 and at most 1e9");
    must(o.save_steps == -1 || steps(o.save_steps), "save_steps", "-1 (never), a whole number, or a share of all steps below 1");
    must(o.eval_steps == -1 || steps(o.eval_steps), "eval_steps",
         "-1 (after each epoch), a whole number, or a share of all steps below 1");
    must(steps(o.logging_steps), "logging_steps", "a whole number, or a share of all steps below 1");
    must(o.max_num > 0, "max_num", "at least 1");
    must(o.eval_fraction >= 0 && o.eval_fraction < 1, "eval_fraction", "at least 0 and less than 1");
    must(o.nll_loss_coef >= 0, "nll_loss_coef", "0 or more");
    must(o.center_rewards_coefficient >= 0, "center_rewards_coefficient", "0 or more");
    must(o.max_new_tokens > 0, "max_new_tokens", "at least 1");
    must(o.n > 0, "n", "at least 1");
    must(o.max_sequences > 0 && o.max_sequences <= 65536, "max_sequences", "between 1 and 65536");
    must(one_or_two(o.kl_target) && o.kl_target[0] >= 0 && o.kl_target.back() >= 0, "kl_target",
         "0 (fixed) or more, and perhaps a number of answers: 6,10000");
    must(one_or_two(o.eps_clip), "eps_clip", "one number, or a lower and an upper one: 0.2,0.28");
    must(one_or_two(o.overlong_buffer) && o.overlong_buffer[0] >= 0 && o.overlong_buffer[0] == std::floor(o.overlong_buffer[0]),
         "overlong_buffer", "a number of tokens, and perhaps a penalty: 4096,1");
    must(o.temperature >= 0, "temperature", "0 (greedy) or more");
    must(o.top_p > 0 && o.top_p <= 1, "top_p", "above 0 and at most 1");
    must(o.min_p >= 0 && o.min_p <= 1, "min_p", "0 (all) to 1");
    must(o.repetition_penalty > 0, "repetition_penalty", "above 0");
}

// Returns the flags that differ from their defaults and, because of another flag, have no effect; each with a message.
static std::map<std::string, std::string> idle_flags(const Options &o, Task task) {
    const ordered_json json = to_json(o, task), defaults = to_json(default_options(task), task);
    std::map<std::string, std::string> idle;
    const auto need = [&](bool met, const char *flags, const char *what, const char *fix) {
        for (const std::string &flag : split(flags))
            if (!met && json.contains(flag) && json[flag] != defaults[flag])
                idle[flag] = format("--%s has no effect without %s\n  fix: %s, or leave it out", flag.c_str(), what, fix);
    };
    const auto smoothed = [](const std::string &loss) { return contains("sigmoid,sigmoid_norm,robust,exo_pair", loss); };
    need(o.lora_rank > 0, "lora_alpha,lora_dropout,lora_targets,lora_modules_to_save,use_rslora",
         "--lora_rank, which adds new adapters; --adapter has options of its own", "--lora_rank 16, say");
    need(!o.offload.empty(), "offload_dir", "--offload", "--offload activations, for example");
    need(!(task & (PRETRAIN | SFT)) || o.sample_every,
         "prompt,temperature,top_k,top_p,min_p,repetition_penalty,stop,max_new_tokens", "--sample_every",
         "--sample_every 100, say");
    need(o.temperature > 0, task == GENERATE ? "top_k,top_p,min_p,n" : "top_k,top_p,min_p",
         "--temperature: at 0 every answer to a prompt is the greedy one", "--temperature 1");
    need(contains("cosine_with_min_lr,warmup_stable_decay", o.lr_scheduler), "min_lr_ratio", "a schedule with a smallest rate",
         "--lr_scheduler cosine_with_min_lr or warmup_stable_decay");
    need(o.lr_scheduler == "warmup_stable_decay", "lr_decay_ratio", "a schedule with a final decay",
         "--lr_scheduler warmup_stable_decay");
    need(o.lr_scheduler != "constant" || o.lr_warmup == 0, "lr_warmup", "a schedule with a warm-up",
         "--lr_scheduler constant_with_warmup");
    need(std::ranges::count(o.loss_type, "simpo"), "simpo_gamma", "the loss that has this margin", "--loss_type simpo");
    need(std::ranges::any_of(o.loss_type, smoothed), "label_smoothing", "a loss that smooths labels",
         "--loss_type sigmoid, sigmoid_norm, robust or exo_pair");
    need(o.kl_coef > 0, "kl_use_loss,kl_estimator", "--kl_coef, the weight of the divergence", "--kl_coef 0.001, say");
    need(contains("gae,reinforce,reinforce_baseline", o.advantage_estimator), "no_std_norm",
         "an --advantage_estimator that whitens", "--advantage_estimator dr_grpo, which is group_norm without the division");
    need(contains("gae,reinforce", o.advantage_estimator), "gamma", "an --advantage_estimator that discounts",
         "--advantage_estimator reinforce");
    need(o.policy_loss_type != "cispo", "dual_clip", "a --policy_loss_type that clips losses", "--policy_loss_type ppo or gspo");
    need(std::ranges::any_of(o.reward, is_model_reward), "normalize_reward", "a reward model", "--reward DIRECTORY");
    need(
        o.rollouts.empty(),
        "reward,reward_weights,normalize_reward,dynamic_filtering,save_rollouts,num_episodes,kl_target,async_steps,is_correction",
        "--data: the answers of --rollouts are given, with their rewards, as one batch", "--data FILE");
    const auto raw = [](const std::string &path) { return !path.empty() && !path.ends_with(".safetensors"); };
    std::vector<std::string> of_prepare;
    for (const Flag &f : flags())  // prepared documents that are too long are refused, whatever the truncation
        if (f.tasks & PREPARE && !contains("max_len,truncation", f.name)) of_prepare.push_back(f.name);
    need(raw(o.data) || raw(o.eval_data) || (o.data + o.rollouts).empty(), CLI::detail::join(of_prepare).c_str(),
         "raw data: a prepared file has the tokens already", "raw --data");
    return idle;
}

static void check_together(const std::string &program, const Options &o, Task task, bool show, Problems &problems) {
    const auto both = [&](bool wrong, const char *a, const char *b, const char *why) {
        if (wrong)
            problems.push_back(
                format("--%s and --%s were both given: %s\n  fix: leave one of them out, on the command line or in --config", a,
                       b, why));
    };
    const auto need = [&](bool missing, const char *what) {
        if (missing)
            problems.push_back(format("%s needs %s\n  fix: %s %s --help shows its flags", task_name(task), what, program.c_str(),
                                      task_name(task)));
    };
    both(o.train_batch_size > 0 && o.train_batch_tokens > 0, "train_batch_size", "train_batch_tokens", "each defines a step");
    both(!o.model.empty() && !o.preset.empty(), "model", "preset", "a preset starts from random weights");
    both(!o.eval_data.empty() && o.eval_fraction > 0, "eval_data", "eval_fraction", "evaluation has one source");
    both(o.overwrite && o.resume != "never", "overwrite", "resume", "one discards the earlier run, the other goes on with it");
    both(o.lora_rank > 0 && !o.adapter.empty(), "lora_rank", "adapter", "an adapter has its rank");
    both(o.lora_rank > 0 && !o.preset.empty() && !o.plan, "lora_rank", "preset", "adapters of random weights learn nothing");
    both(o.profile && o.debug, "profile", "debug", "the time of the checks would count for the ops");
    both(!o.prompt.empty() && !o.prompts.empty(), "prompt", "prompts", "they have one source");
    both(!o.data.empty() && !o.rollouts.empty(), "data", "rollouts", "answers are sampled, or given");
    if (!o.dynamic_filtering.empty() && o.n < 2)
        die("--dynamic_filtering compares the answers to a prompt, but --n is %zu\n  fix: --n 8, say", o.n);
    if (!o.reward_weights.empty() && o.reward_weights.size() != o.reward.size())
        die("--reward_weights has %zu numbers for %zu rewards\n  fix: give one for each --reward", o.reward_weights.size(),
            o.reward.size());
    if (o.early_stopping_patience && o.eval_data.empty() && o.eval_fraction == 0)
        die("--early_stopping_patience counts evaluations, and there are none\n  fix: --eval_data FILE, or --eval_fraction 0.05");
    both(o.ranks > 1 && !o.rendezvous.empty(), "ranks", "rendezvous", "ranks are threads of one process, or processes");
    if ((started_by_hand(o).processes == 0) != o.rendezvous.empty())
        die("--rank and --rendezvous belong together\n  fix: --rank 0/2 --rendezvous HOST:29500, say");
    if (std::ranges::count(o.offload, "weights") && !o.load_in.empty())
        die("--offload weights: the matrices that --load_in %s makes small stay in memory\n  fix: leave weights out of --offload, or leave --load_in out",
            o.load_in.c_str());
    if (o.optimizer == "muon" && o.moments == "8bit")
        die("--moments 8bit is for AdamW: Muon's one moment is stored in f32 or bf16\n  fix: --moments bf16, or --optimizer adamw");
    for (const std::string &name : o.offload)
        if (o.optimizer == "muon" && name != "activations")
            die("--offload %s is for AdamW: Muon's update needs whole matrices\n  fix: leave %s out of --offload, or --optimizer adamw",
                name.c_str(), name.c_str());
    if (o.zero_group && (o.zero_group == 1 || o.zero_stage == 0))
        die("--zero_group %zu: nothing is divided %s\n  fix: leave --zero_group out, or use a larger group at a stage from 1 on",
            o.zero_group, o.zero_stage == 0 ? "at --zero_stage 0" : "in a group of one rank");
    if (o.expert_parallel > 1 && o.zero_group % o.expert_parallel)
        die("--expert_parallel %zu does not divide --zero_group %zu: a group would have parts of several ranks' experts\n  fix: use a group of %zu ranks, or of a multiple",
            o.expert_parallel, o.zero_group, o.expert_parallel);
    if (o.expert_parallel > 1 && !o.load_in.empty())
        die("--expert_parallel %zu: with --load_in %s every rank has all experts\n  fix: leave one of them out",
            o.expert_parallel, o.load_in.c_str());
    if (o.expert_parallel > 1 && o.async_steps)
        die("--expert_parallel %zu: the copy of the policy that samples during training would need all experts on every rank\n  fix: --async_steps 0",
            o.expert_parallel);
    if (o.expert_parallel > 1 && o.fit)
        die("--fit plans for 1, 2, 4, ... ranks, which --expert_parallel %zu does not all divide\n  fix: --plan alone, with --ranks and --expert_parallel",
            o.expert_parallel);
    if (o.fit && !o.plan) die("--fit belongs to --plan\n  fix: --plan --fit");
    if (!o.timeline.empty() && (!o.plan || o.fit))
        die("--timeline belongs to --plan without --fit\n  fix: --plan --timeline %s", o.timeline.c_str());
    if (!o.load_in.empty() && task & TRAINING && o.lora_rank == 0 && o.adapter.empty())
        problems.push_back(format(
            "--load_in %s freezes the matrices of the layers, and without adapters nothing would be trained\n  fix: --lora_rank 16, say, or leave --load_in out",
            o.load_in.c_str()));
    if (task == DEMO) return;  // the demo brings its own model and data
    if (task & TRAINING & ~RL)
        need(o.model.empty() && o.preset.empty(), "--model DIR, or --preset NAME to start from random weights");
    else need(o.model.empty(), "--model DIR");
    if (task == MERGE) need(o.adapter.empty(), "--adapter DIR"), need(o.output_dir.empty(), "--output_dir DIR");
    if (o.plan || task == MERGE) return;
    if (task & PAIRS) need(o.model.empty(), "--model DIR: there is nothing to prefer in what random weights say");
    if (task == GENERATE) need(o.prompt.empty() && o.prompts.empty(), "--prompt TEXT or --prompts FILE");
    else if (task & RL && !show)
        need(o.data.empty() && o.rollouts.empty(), "--data FILE, prompts with responses, or --rollouts FILE");
    else need(o.data.empty(), "--data FILE");
    if (task & TRAINING && !show) need(o.output_dir.empty(), "--output_dir DIR");
}

// ---- the interface ---------------------------------------------------------------------------------------------------------------

// The parsed request of a command line.
struct CommandLine {
    Task task = SFT;
    std::vector<Setting> settings;
    std::vector<std::string> notes, problems;
    bool convert = false;
    bool ours = true;  // true if no other trainer's names were used
};

// The ranks of the run, as far as they are known before it starts.
static size_t world() {
    for (const char *name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
        if (const char *value = getenv(name)) return std::max<size_t>(1, strtoul(value, nullptr, 10));
    return 1;
}

static bool is_asked(const std::vector<std::string> &words, const char *flag) {
    return std::find(words.begin(), words.end(), flag) != words.end();
}

static Task task_called(const std::string &name) {
    for (Task t : tasks)
        if (name == task_name(t)) return t;
    return DEMO;
}

// Returns the task of words in this program's names; without a name it is the demo.
static std::optional<Task> own_task(const std::vector<std::string> &words, bool show = false) {
    if (words.empty() || words[0].starts_with("-")) return show || is_asked(words, "--plan") ? SFT : DEMO;
    const Task task = task_called(words[0]);
    return task == DEMO && words[0] != task_name(DEMO) ? std::nullopt : std::optional(task);
}

// Translates a command line with another trainer's names by scripts/port.
static CommandLine ask_port(const std::string &program, const std::vector<std::string> &words, const std::string &stranger) {
    const char *script = "scripts/port/main.py";
    if (!std::filesystem::exists(program_file(script)))
        die("%s, and %s, which knows the names of other trainers, does not exist\n  fix: leave the program in the tree that it was built in, and call it there or by a link",
            stranger.c_str(), program_file(script).c_str());
    ordered_json question = {
        {"program", program}, {"words", words}, {"ranks", world()}, {"converts", is_asked(words, "--convert")}};
    question["tasks"] = names_of(ALL_TASKS | MERGE);
    for (Task t : tasks) question["defaults"][task_name(t)] = to_json(default_options(t), t);
    for (const Flag &f : flags())
        question["flags"][f.name] = {{"tasks", names_of(f.tasks)},
                                     {"boolean", f.boolean},
                                     {"whole", std::string(f.wanted).starts_with("a whole number")},
                                     {"wanted", f.wanted}};
    const ordered_json answer = ordered_json::parse(
        run_python(stranger + ": to look it up among the names of other trainers", script, {question.dump()}));
    CommandLine request;
    request.ours = !answer["foreign"];
    request.task = task_called(answer["task"]);
    request.notes = answer["notes"], request.problems = answer["problems"];
    for (const ordered_json &s : answer["settings"]) request.settings.push_back({s["name"], s["values"], s["where"]});
    return request;
}

static CommandLine read_request(const std::string &program, const std::vector<std::string> &words, bool show) {
    const std::optional<Task> task = own_task(words, show);
    std::string stranger;  // the first name that is not this program's
    CommandLine request;
    request.task = task.value_or(SFT);
    const auto is_own = [](const std::string &name) { return name == "convert" || find_flag(name); };
    if (!task) stranger = "there is no task \"" + words[0] + "\"";
    else request.settings = read_settings(words, !words.empty() && !words[0].starts_with("-"), is_own, stranger);
    if (!stranger.empty()) request = ask_port(program, words, stranger);
    request.convert = std::erase_if(request.settings, [](const Setting &s) { return s.name == "convert"; }) > 0;
    return request;
}

// Calls the functions in turn, collects the problems that they list and the errors that they throw, and dies with one message for all.
template <class... F> static void collect(const Parser &parser, bool ours, Problems problems, F &&...functions) {
    const auto call = [&](auto &function) {
        try {
            function(problems);
        } catch (const Error &e) {
            problems.push_back(e.what());
        }
    };
    (call(functions), ...);
    if (problems.empty()) return;
    if (problems.size() == 1 && ours) throw Error(problems[0]);
    std::string all = problems.size() == 1 ? "" : format("%zu problems:\n", problems.size());
    for (const std::string &problem : problems) all += problem + "\n";
    die("%sWhat was understood, in the names of this program:\n  %s", all.c_str(), parser.command().c_str());
}

// Checks the model if it is already on this machine, so a converted command will run.
static void check_model(const Options &o, Task task, Problems &) {
    if (!(task & TRAINING)) return;
    if (const std::string dir = fetched_model(o.model); !dir.empty()) {
        std::vector<std::string> notes;
        read_config(dir, notes);
    }
}

// Returns the output of --convert: the command, with the notes as shell comments.
static std::string converted(const CommandLine &request, const Parser &parser) {
    std::string text = parser.command() + "\n";
    for (const std::string &note : request.notes) text += "# " + note + "\n";
    return text;
}

Parsed parse(const std::string &program, const std::vector<std::string> &given, const std::vector<std::string> &bundled) {
    const bool asks = is_asked(given, "--help") || is_asked(given, "-h");
    const bool show = !given.empty() && given[0] == "show";
    const bool brings = !asks && !bundled.empty() && own_task(given) == DEMO;
    std::vector<std::string> words = brings ? bundled : given;
    if (show) words.erase(words.begin());
    if (brings) words.insert(words.end(), given.begin(), given.end());
    if (brings && given.empty()) words.push_back("--overwrite");  // the directory only holds runs of this command
    if (asks) {                                                   // the task may follow --help
        const bool all = std::erase(words, "all") > 0;
        std::erase(words, "--help"), std::erase(words, "-h");
        const auto own = own_task(words, show);
        const Task task = own ? *own : read_request(program, words, show).task;
        return {task, default_options(task), true, {}, show, show ? help_of_show(program) : help(program, task, all)};
    }
    CommandLine request = read_request(program, words, show);
    if (show && !(request.task & TRAINING & ~DEMO))
        die("show is for data that is trained on, and not for %s\n  fix: one of %s", task_name(request.task),
            task_words(TRAINING & ~DEMO).c_str());
    Parser parser(program, request.task);
    if (show) parser.options.max_samples = shown_samples;
    for (const Setting &s : request.settings) try {
            parser.set(s);
        } catch (const Error &e) {
            request.problems.push_back(e.what());
        }
    collect(
        parser, request.ours, request.problems, [&](Problems &) { parser.finish(request.notes); },
        [&](Problems &all) { check_values(parser.options, request.task, all); },
        [&](Problems &all) { check_together(program, parser.options, request.task, show, all); },
        [&](Problems &all) {
            if (!all.empty()) return;
            for (const auto &[flag, problem] : idle_flags(parser.options, request.task))
                if (request.ours) all.push_back(problem);
                else parser.leave_out(flag), request.notes.push_back(problem.substr(0, problem.find('\n')));
        },
        [&](Problems &all) {
            if (request.convert) check_model(parser.options, request.task, all);
        });
    if (brings) request.notes.push_back("without a task this is " + program + " " + CLI::detail::join(words, " "));
    if (!request.ours && !request.convert) request.notes.push_back("in the names of this program: " + parser.command());
    return {request.task,  parser.options, !parser.given.count("max_len"),
            request.notes, show,           request.convert ? converted(request, parser) : ""};
}
