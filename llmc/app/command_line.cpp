#include "command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "../core/common.h"
#include "../data/hub.h"
#include "../data/tokenizer.h"
#include "../train/advantages.h"
#include "../train/preference.h"
#include "foreign.h"
#include "settings.h"

using nlohmann::ordered_json;

// ---- tables ---------------------------------------------------------------------------------------------------------------------

static constexpr Task tasks[] = {DEMO, PRETRAIN, SFT, DPO, RM, GRPO, PPO, EVAL, GENERATE, MERGE};

struct Flag {
    const char *name;
    unsigned tasks;
    std::vector<std::string> aliases;
    const char *wanted;  // what a value must be
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
static const char *wanted(const Texts &) { return "text, at least a character"; }

template <class T> constexpr bool is_list = std::is_same_v<T, Betas> || std::is_same_v<T, Names> || std::is_same_v<T, Numbers>;

static std::vector<std::string> split(const std::string &names) {
    return names.empty() ? std::vector<std::string>{} : CLI::detail::split(names, ',');
}

static const std::vector<Flag> &flags() {
    static const std::vector<Flag> all = {
#define OPT(type, name, value, tasks, aliases, help) \
    {#name, tasks, split(aliases), wanted(type{}), std::is_same_v<type, bool>, is_list<type>},
#include "../train/options.def"
    };
    return all;
}

static std::vector<std::string> split_at(const std::string &text, char c) { return CLI::detail::split(text, c); }

static bool contains(const std::string &names, const std::string &name) {
    const auto all = split(names);
    return std::find(all.begin(), all.end(), name) != all.end();
}

static const Flag *find_flag(const std::string &name) {
    for (const Flag &f : flags())
        if (name == f.name || std::find(f.aliases.begin(), f.aliases.end(), name) != f.aliases.end()) return &f;
    return nullptr;
}

// ---- unknown flags ---------------------------------------------------------------------------------------------------------------

// Returns the Levenshtein distance: how many insertions, deletions and replacements turn a into b.
static size_t edit_distance(const std::string &a, const std::string &b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

static std::string task_words(unsigned mask) {
    std::string out;
    for (Task t : tasks)
        if (mask & t) out += (out.empty() ? "" : ", ") + std::string(task_name(t));
    return out;
}

// Returns how alike two names are, from 0 to 1: the share of their words (max, len) that the other name has, too, though it may be misspelled.
// Letters of a whole name would say that eos_token means row_tokens, and ds_type dtype.
static double likeness(const std::string &a, const std::string &b) {
    const auto words = CLI::detail::split(a, '_');
    auto others = CLI::detail::split(b, '_');
    const size_t count = words.size() + others.size();
    size_t shared = 0;
    for (const std::string &word : words) {
        const auto same = std::find_if(others.begin(), others.end(), [&](const std::string &other) {
            const size_t letters = std::max(word.size(), other.size());
            return edit_distance(word, other) <= (letters < 4 ? 0 : (letters + 1) / 3);
        });
        if (same == others.end()) continue;
        others.erase(same);
        shared += 2;
    }
    return double(shared) / double(count);
}

[[noreturn]] static void die_unknown(const Setting &s, const std::string &program, Task task) {
    const std::string last = s.name.substr(s.name.rfind('.') + 1);
    std::string best;
    double most = 0.79;  // two of two words, or of two and three
    for (const Flag &f : flags()) {
        if (!(f.tasks & task)) continue;
        std::vector<std::string> names = f.aliases;
        names.push_back(f.name);
        for (const std::string &name : names)
            if (const double x = likeness(last, name); x > most) most = x, best = f.name;
    }
    if (best.empty())
        die("unknown flag %s\n  fix: ./%s %s --help lists the flags of %s", s.where.c_str(), program.c_str(), task_name(task),
            task_name(task));
    die("unknown flag %s\n  fix: did you mean --%s?", s.where.c_str(), best.c_str());
}

// ---- from settings to Options ----------------------------------------------------------------------------------------------------

using Problems = std::vector<std::string>;

struct Parser {
    std::string program;
    Task task;
    Options options;
    std::vector<std::string> notes;
    std::set<std::string> given;                  // the flags that were set, by our names
    unsigned spoken = 0;                          // whose names were used
    unsigned common = TRL | AXOLOTL;              // those of them to whom all names belong
    size_t rows_of = 0;                           // OpenRLHF's micro_batch_size
    std::map<std::string, std::string> together;  // values of names that count together, by the first name of their line
    FlagValues translated;                        // what was understood
    std::map<std::string, std::pair<Texts *, std::string>> texts;  // by flag: the field, and where its texts come from
    CLI::App app;

    Parser(const std::string &name, Task t)
        : program(name), task(t), options(default_options(t)), app(about(t), name + " " + task_name(t)) {
        app.get_formatter()->column_width(44);
        app.set_help_flag();  // removes CLI11's, which also has -h
#define OPT(type, name, value, tasks, aliases, help) \
    if (task & (tasks)) add("--" #name, options.name, help, aliases);
#include "../train/options.def"
    }

    static std::string about(Task t) {
        switch (t) {
            case DEMO:
                return "The bundled demo: trains a small model on bundled text.\nTasks, each with its own --help: pretrain, sft, dpo, rm, grpo, ppo, eval, generate, merge.";
            case PRETRAIN: return "Train on all tokens of plain text.";
            case SFT: return "Supervised fine-tuning: train on the responses of chats or of prompts with completions.";
            case DPO: return "Train on pairs of a better and a worse answer: DPO and its kin.";
            case RM: return "Train a reward model on pairs of a better and a worse answer.";
            case GRPO: return "Learn from rewards of sampled answers: GRPO and its kin.";
            case PPO: return "Learn from rewards of sampled answers, beside a critic that learns to foresee them.";
            case EVAL: return "Loss, accuracy and entropy of a model on a data file.";
            case GENERATE: return "Continue prompts.";
            case MERGE: return "Add an adapter to the weights of its model.";
        }
        return "";
    }

    template <class T> void add(const char *name, T &field, std::string help, const std::string &aliases) {
        for (const auto &[word, names] :
             {std::pair("{losses}", preference_names()), std::pair("{estimators}", estimator_names())})
            if (const size_t at = help.find(word); at != help.npos) help.replace(at, strlen(word), names);
        if (!aliases.empty()) help += " [" + aliases + "]";
        CLI::Option *option = app.add_option(name, field, help)->capture_default_str();
        if constexpr (std::is_same_v<T, bool>)
            option->default_str(field ? "true" : "false")->check(true_or_false, "")->type_name("BOOL");
        if constexpr (!std::is_same_v<T, std::string>) option->check(not_empty, "");
        if constexpr (std::is_unsigned_v<T> && !std::is_same_v<T, bool>) option->check(decimal, "");
        if constexpr (std::is_same_v<T, double> || std::is_same_v<T, Steps> || std::is_same_v<T, Betas> ||
                      std::is_same_v<T, Numbers>)
            option->check(finite, "");
        if constexpr (is_list<T>) option->delimiter(',');
        if constexpr (std::is_same_v<T, Betas>) option->type_name("FLOAT,FLOAT");
        if constexpr (std::is_same_v<T, Numbers>) option->type_name("FLOAT")->default_str(CLI::detail::join(field));
        if constexpr (std::is_same_v<T, Names>) option->type_name("NAME")->default_str(CLI::detail::join(field));
        if constexpr (std::is_same_v<T, Texts>) texts[name + 2] = {&field, ""};
    }

    // These checks find values that CLI11 lets through: "" (as 0), "yes", "nan", "-5" and "010" (as 8) for an unsigned number. They return
    // what is wrong.
    static std::string not_empty(const std::string &text) { return text.empty() ? "empty" : ""; }
    static std::string true_or_false(const std::string &text) { return text == "true" || text == "false" ? "" : "neither"; }
    static std::string finite(const std::string &text) {
        return std::isfinite(strtod(text.c_str(), nullptr)) ? "" : "not finite";
    }
    static std::string decimal(const std::string &text) {
        return text.find_first_not_of("0123456789") == text.npos && (text.size() == 1 || text[0] != '0') ? "" : "not decimal";
    }

    void translate(const std::string &name, const std::string &value) {
        std::erase_if(translated, [&](const auto &earlier) { return earlier.first == name; });
        translated.emplace_back(name, value);
    }

    static std::string quoted(const std::string &value) {  // for a shell
        if (!value.empty() && value.find_first_of(" \t\n\"'\\$`*?[]{}()<>|&;#~!") == value.npos) return value;
        std::string out = "'";
        for (char c : value) out += c == '\'' ? "'\\''" : std::string(1, c);
        return out + "'";
    }

    // Returns a command line with our names of everything that was understood.
    std::string command() const {
        std::string line = "./" + program + " " + task_name(task);
        for (const auto &[name, value] : translated) line += " --" + name + " " + quoted(value);
        return line;
    }

    std::string command_of(const std::string &whose) const {
        for (const auto &[name, mask] : {std::pair("openrlhf", OPENRLHF), std::pair("trl", TRL), std::pair("axolotl", AXOLOTL)})
            if (whose == name) {
                FlagValues flags = translated;
                if (mask != AXOLOTL)
                    for (auto &flag : flags) flag.second = quoted(flag.second);
                return command_as(mask, task, flags, world());
            }
        die("--as \"%s\" is unknown\n  fix: trl, openrlhf or axolotl", whose.c_str());
    }

    // The ranks of the run, as far as they are known before it starts.
    size_t world() const {
        for (const char *name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
            if (const char *value = getenv(name)) return std::max<size_t>(1, strtoul(value, nullptr, 10));
        return std::max({options.ranks, options.world_size, size_t(1)});
    }

    void set(const Flag &flag, const Setting &s) {
        if (!(flag.tasks & task))
            die("%s belongs to %s, not to %s\n  fix: leave it out, or start with another task", s.where.c_str(),
                task_words(flag.tasks).c_str(), task_name(task));
        std::vector<std::string> values = s.values;
        if (values.empty() && flag.boolean) values = {"true"};
        if (values.empty()) die("%s needs a value: %s", s.where.c_str(), flag.wanted);
        if (texts.count(flag.name)) return add_texts(flag, values, s.where);
        if (values.size() > 1 && !flag.list)
            die("%s has more than one value: \"%s\" and \"%s\"\n  fix: quotes around a value with spaces, commas between several files",
                s.where.c_str(), values[0].c_str(), values[1].c_str());
        for (const ForeignValue &v : foreign_values)
            if (flag.name == std::string(v.flag) && values == std::vector<std::string>{v.theirs}) {
                if (!*v.ours) return;
                notes.push_back(s.where + " " + v.theirs + format(": --%s %s", v.flag, v.ours));
                values = {v.ours};
            }
        if (flag.boolean && (values[0] == "True" || values[0] == "False")) values[0][0] = char(tolower(values[0][0]));
        if (values.size() == 1 && std::string(flag.wanted).starts_with("a whole number") && values[0].ends_with(".0"))
            values[0].resize(values[0].size() - 2);  // num_train_epochs 3.0
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
            options = before;  // half of a value would be a second mistake
            die("%s \"%s\" is not %s", s.where.c_str(), CLI::detail::join(values, " ").c_str(), flag.wanted);
        }
        translate(flag.name, CLI::detail::join(values, ","));
        given.insert(flag.name);
        if (flag.name == std::string("row_tokens")) together.erase("micro_batch_size");  // the later one wins
        if (contains("pretrain,save_path,l2,max_ckpt_num,eval_dataset", s.name) || s.name.find('.') != s.name.npos)
            spoken |= OPENRLHF;
    }

    // CLI11 would split "[a,b]". Texts of the command line take the place of those in --config, and are added to each other.
    void add_texts(const Flag &flag, const std::vector<std::string> &values, const std::string &where) {
        auto &[field, from] = texts[flag.name];
        if (from != where) {
            field->clear();
            std::erase_if(translated, [&](const auto &earlier) { return earlier.first == flag.name; });
        }
        from = where;
        for (const std::string &value : values) {
            if (value.empty()) die("%s \"\" is not %s", where.c_str(), flag.wanted);
            field->push_back(value);
            translated.emplace_back(flag.name, value);
        }
        given.insert(flag.name);
    }

    void set(const std::string &flag, const std::string &value, const std::string &where) {
        set(*find_flag(flag), {flag, {value}, where});
    }

    void set(const Setting &s) {
        const Flag *flag = find_flag(s.name);
        std::string name = s.name, value = s.values.empty() ? "true" : s.values[0];
        const ForeignName *f = find_foreign(name, value);
        const bool stands_for_others = f && f->answer == Answer::SETS && *f->values;  // optimizer adamw_8bit
        if (flag && (flag->tasks & task) && !stands_for_others) return set(*flag, s);
        if (!f && name.starts_with("no_") && value == "true") f = find_foreign(name.substr(3), value = "false");
        if (!f && flag) return set(*flag, s);
        const bool off = contains("false,False,none,None,null", value) && !(f && contains(f->values, value));
        if (!f && off && find_foreign(name, "true")) return;
        if (!f && find_foreign(name, "true"))
            die("%s \"%s\" is no value of that flag\n  fix: true or false, or leave it out", s.where.c_str(), value.c_str());
        if (!f) die_unknown(s, program, task);
        if (f->whose == OPENRLHF || !(f->whose & OPENRLHF)) spoken |= f->whose;
        else if (s.name.find('.') != s.name.npos) spoken |= OPENRLHF;  // "ds.zpg"
        if (f->whose & (TRL | AXOLOTL)) common &= f->whose;
        switch (f->answer) {
            case Answer::IS: {
                const auto names = split(f->text);
                const auto own = std::ranges::find_if(names, [&](const std::string &n) { return find_flag(n)->tasks & task; });
                const std::string &ours = own == names.end() ? names[0] : *own;
                if (ours == "kl_coef") together["beta"] = value;
                return set(*find_flag(ours), {ours, s.values, s.where});
            }
            case Answer::PART: return set_part(*f, value, s.where);
            case Answer::TOGETHER:
                if (off) return;
                together[name_in(*f)] = value;
                if (name_in(*f) == "micro_batch_size" &&
                    (strtoul(value.c_str(), nullptr, 10) == 0 || !decimal(value).empty() || value.size() > 9))
                    die("%s \"%s\" is not a whole number above 0", s.where.c_str(), value.c_str());
                return;
            case Answer::NOTE: return notes.push_back(s.where + ": " + f->text);
            case Answer::NO:
                if (off) return;
                die("%s%s has no meaning here\n  fix: %s", s.where.c_str(), value == "true" ? "" : (" \"" + value + "\"").c_str(),
                    f->text);
            case Answer::SETS: {
                if (off) return;
                const auto words = split_at(f->text, ' ');
                notes.push_back(s.where + ": --" + f->text);
                set(words[0], words[1], s.where);
            }
        }
    }

    static std::string name_in(const ForeignName &f) { return split(f.names)[0]; }

    void set_part(const ForeignName &f, const std::string &value, const std::string &where) {
        const auto words = split_at(f.text, ' ');
        std::vector<std::string> values;
        for (double x : options.adam_betas) values.push_back(ordered_json(x).dump());
        values[size_t(words[1][0] - '0')] = value;
        set(*find_flag(words[0]), {words[0], values, where});
    }

    size_t count_of(const std::string &name, size_t otherwise) const {
        const auto found = together.find(name);
        if (found == together.end()) return otherwise;
        const size_t count = strtoul(found->second.c_str(), nullptr, 10);
        if (count == 0 || !decimal(found->second).empty())
            die("--%s \"%s\" is not a whole number above 0", name.c_str(), found->second.c_str());
        return count;
    }

    // Appends `text` to each of the names in a list with commas.
    void append_to(const std::string &flag, const std::string &names, const std::string &text) {
        std::string all;
        for (const std::string &name : split(names)) all += (all.empty() ? "" : ",") + name + text;
        if (!all.empty()) set(flag, all, "--" + flag);
    }

    // The samples of a step, and with rewards the prompts of a batch of answers.
    void combine_batch(Problems &problems) {
        const auto has = [&](const char *name) { return together.count(name) > 0; };
        if (has("micro_batch_size") && !has("gradient_accumulation_steps")) {
            spoken |= OPENRLHF;
            rows_of = count_of("micro_batch_size", 1);
            return;
        }
        const bool samples_answers = task & RL && (has("generation_batch_size") || has("steps_per_generation"));
        if (!samples_answers && !has("per_device_train_batch_size") && !has("gradient_accumulation_steps")) return;
        const size_t samples = has("micro_batch_size") ? count_of("micro_batch_size", 1)
                                                       : count_of("per_device_train_batch_size", common == AXOLOTL ? 1 : 8);
        const size_t steps = count_of("gradient_accumulation_steps", 1),
                     ranks = std::max<size_t>(1, world() / std::max<size_t>(1, options.ring_attn_size));
        const size_t batch = samples * steps * ranks;
        const bool packs = has("packing") && !(task & RL);
        if (packs) set("train_batch_tokens", std::to_string(batch * options.max_len), "packing");
        else set("train_batch_size", std::to_string(batch), "per_device_train_batch_size");
        notes.push_back(format("a step: %zu samples of a device * %zu accumulated * %zu ranks%s = --%s %zu", samples, steps,
                               ranks, packs ? " * max_len" : "", packs ? "train_batch_tokens" : "train_batch_size",
                               packs ? batch * options.max_len : batch));
        if (task != GRPO || given.count("rollout_batch_size")) return;
        const size_t answers = count_of("generation_batch_size", samples * ranks * count_of("steps_per_generation", steps));
        if (answers % options.n) {
            problems.push_back(format(
                "a batch of %zu answers (generation_batch_size, or per_device_train_batch_size * ranks * steps_per_generation) is no multiple of num_generations, %zu\n"
                "  fix: --rollout_batch_size N, prompts, and --n N, answers to each",
                answers, options.n));
            return;
        }
        set("rollout_batch_size", std::to_string(answers / options.n), "generation_batch_size");
        notes.push_back(format("a batch of answers: %zu / %zu to a prompt = --rollout_batch_size %zu", answers, options.n,
                               options.rollout_batch_size));
    }

    // Their programs have a directory where none is given.
    void default_directory() {
        for (const auto &[mask, name, directory] :
             {std::tuple(OPENRLHF, "OpenRLHF", "./ckpt"), std::tuple(TRL, "TRL", "trainer_output"),
              std::tuple(AXOLOTL, "Axolotl", "./model-out")})
            if ((spoken & mask) && ((common & mask) || mask == OPENRLHF) && options.output_dir.empty()) {
                set("output_dir", directory, "--output_dir");
                notes.push_back(format("output_dir is %s, as in %s", directory, name));
            }
    }

    // Computes flags from the names that count together, in foreign.def.
    void combine(Problems &problems) {
        const auto has = [&](const char *name) { return together.count(name) > 0; };
        if (has("num_processes")) {
            if (world() == 1 && options.ranks == 1) set("ranks", together["num_processes"], "--num_processes");
            else notes.push_back("num_processes: the ranks are started already");
        }
        if (has("use_peft") && options.lora_rank == 0) set("lora_rank", "16", "--use_peft");
        if (has("beta") && options.kl_coef > 0) set("kl_use_loss", "true", "--beta");
        if (has("epsilon_high") && task & RL)
            set("eps_clip_low_high", ordered_json(options.eps_clip).dump() + "," + together["epsilon_high"], "--epsilon_high");
        if (has("algo.advantage.is_correction_enable")) {
            const std::string &type = together["algo.advantage.is_correction_type"];
            set("is_correction", type.empty() ? "tis" : type, "--algo.advantage.is_correction_enable");
        }
        if (has("model_revision")) append_to("model", options.model, "@" + together["model_revision"]);
        if (has("dataset_config")) append_to("data", options.data, ":" + together["dataset_config"]);
        if (has("dataset_train_split")) append_to("data", options.data, "[" + together["dataset_train_split"] + "]");
        if (task == DPO && spoken & OPENRLHF && is_hub_name(options.eval_data) && !has("eval.split")) {
            together["eval.split"] = "test";
            notes.push_back("eval.dataset is read from its split test, as in OpenRLHF");
        }
        if (has("eval.split")) append_to("eval_data", options.eval_data, "[" + together["eval.split"] + "]");
        combine_batch(problems);
    }

    // Names of rewards, which no flag of ours takes up in another task.
    void refuse_rewards(Problems &problems) {
        for (const char *name : {"generation_batch_size", "steps_per_generation", "epsilon_high"})
            if (!(task & RL) && together.count(name))
                problems.push_back(format("--%s belongs to %s, not to %s\n  fix: leave it out, or start with another task", name,
                                          task_words(RL).c_str(), task_name(task)));
    }

    // Special tokens that a run is given must be the tokenizer's own.
    void expect_own_tokens(Problems &problems) {
        for (const char *name : {"bos_token", "eos_token", "unk_token"}) {
            if (!together.count(name)) continue;
            const std::string &theirs = together[name], dir = fetched_model(options.model);
            const std::string own = dir.empty() ? "" : special_token(dir, name);
            if (own == theirs) notes.push_back(format("%s %s is the tokenizer's own", name, theirs.c_str()));
            else if (dir.empty())
                problems.push_back(
                    format("--%s \"%s\": whether it is the tokenizer's cannot be told before %s is here\n  fix: leave it out",
                           name, theirs.c_str(), options.model.c_str()));
            else
                problems.push_back(
                    format("--%s is \"%s\", but that of the tokenizer in %s is \"%s\"\n"
                           "  fix: leave it out, or change tokenizer_config.json there",
                           name, theirs.c_str(), options.model.c_str(), own.c_str()));
        }
    }

    // Sets options that follow from several flags together.
    void finish(Problems &problems) {
        combine(problems);
        refuse_rewards(problems);
        expect_own_tokens(problems);
        if ((task & TRAINING) && !options.plan) default_directory();
        const size_t documents = task & PAIRS ? 2 : 1;  // of a sample
        if (options.row_tokens && !rows_of && !given.count("max_len"))
            options.max_len = std::clamp<size_t>(options.row_tokens / documents, 2, options.max_len);
        const size_t sample = documents * options.max_len;
        if (rows_of) {
            if (__builtin_mul_overflow(rows_of, sample, &options.row_tokens)) die("--micro_batch_size %zu is too large", rows_of);
            notes.push_back(format("micro_batch_size %zu: a row holds %zu * %smax_len = %zu tokens", rows_of, rows_of,
                                   task & PAIRS ? "2 * " : "", options.row_tokens));
            translate("row_tokens", std::to_string(options.row_tokens));
        }
        if (options.row_tokens == 0) options.row_tokens = sample;
        if (options.ring_attn_head_stride && options.sp_mode != "gather") {
            if (given.count("sp_mode"))
                die("--ring_attn_head_stride is for --sp_mode gather, not %s\n  fix: leave one of them out",
                    options.sp_mode.c_str());
            options.sp_mode = "gather";
            notes.push_back("ring_attn_head_stride: --sp_mode gather");
        }
        if (options.train_batch_tokens && !given.count("train_batch_size")) options.train_batch_size = 0;
        if (task == DEMO && !given.count("output_dir") && options.resume == "never")
            options.overwrite = true;  // it only ever replaces the demo's own run
        if (spoken & OPENRLHF) list_differences(OPENRLHF, "OpenRLHF's");
        if (spoken & TRL && common == TRL) list_differences(TRL, "TRL's");
        if (spoken & AXOLOTL && common == AXOLOTL) list_differences(AXOLOTL, "Axolotl's");
        if (spoken & ~OPENRLHF) notes.push_back("in the names of this program: " + command());
    }

    void list_differences(Whose whose, const char *name) {
        const ordered_json ours = to_json(options, task);
        std::string line;
        for (const Difference &d : differences)
            if (d.whose == whose && (d.tasks & task) && !given.count(d.flag) &&
                !(options.lr_warmup_steps >= 0 && !strcmp(d.flag, "lr_warmup_ratio")) &&
                !(options.lora_rank == 0 && std::string(d.flag).starts_with("lora_")) &&
                !(rows_of && !strcmp(d.flag, "row_tokens")))
                line += (line.empty() ? "" : ", ") + format("%s %s (%s)", d.flag, ours[d.flag].dump().c_str(), d.theirs);
        if (!line.empty()) notes.push_back(format("defaults that differ from %s (in brackets): %s", name, line.c_str()));
    }
};

// ---- checks ----------------------------------------------------------------------------------------------------------------------

static void check_values(const Options &o, Task task, Problems &problems) {
    const ordered_json json = to_json(o, task);
    const auto must = [&](bool ok, const char *flag, const char *rule) {
        if (!ok)
            problems.push_back(format("--%s is %s but must be %s\n  fix: another --%s", flag,
                                      json.value(flag, ordered_json()).dump().c_str(), rule, flag));
    };
    const auto one_of = [&](const std::string &value, const char *flag, const char *choices) {
        if (!contains(choices, value))
            problems.push_back(format("--%s is \"%s\"\n  fix: one of %s", flag, value.c_str(), choices));
    };
    const auto share = [](double x) { return x >= 0 && x <= 1; };
    const auto steps = [](double x) { return (x > 0 && x < 1) || (x >= 1 && x == std::floor(x) && x < 0x1p53); };
    one_of(o.add_bos, "add_bos", "auto,never,always");
    one_of(o.truncation, "truncation", task == PRETRAIN ? "split,drop,keep" : "drop,keep");
    one_of(o.lr_scheduler, "lr_scheduler", "cosine_with_min_lr,cosine,linear,constant_with_warmup,warmup_stable_decay,constant");
    one_of(o.dtype, "dtype", "auto,f32,bf16");
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
    must(o.lora_rank <= 65536, "lora_rank", "at most 65536");
    must(o.lora_alpha > 0, "lora_alpha", "above 0");
    must(o.lora_dropout >= 0 && o.lora_dropout < 1, "lora_dropout", "at least 0 and less than 1");
    for (const std::string &name : task == RM ? o.loss_type : Names()) one_of(name, "loss_type", "sigmoid,logexp");

    must(o.train_batch_size > 0 || o.train_batch_tokens > 0, "train_batch_size", "at least 1");
    must(o.max_len >= 2 && o.max_len <= size_t(INT32_MAX), "max_len",
         "at least 2 and less than 2^31: a token is predicted from the one before");
    must(o.row_tokens <= size_t(INT32_MAX), "row_tokens", "less than 2^31");
    must(o.tile_tokens <= size_t(INT32_MAX), "tile_tokens", "less than 2^31");
    if (o.row_tokens < o.max_len)
        die("--row_tokens %zu is less than --max_len %zu: the longest sample would not fit\n  fix: --row_tokens %zu, or a smaller --max_len",
            o.row_tokens, o.max_len, o.max_len);
    must(o.max_epochs > 0, "max_epochs", "at least 1");
    must(o.rollout_batch_size > 0, "rollout_batch_size", "at least 1");
    must(o.num_episodes > 0, "num_episodes", "at least 1");
    must(o.async_steps <= 1, "async_steps",
         "0 or 1: while a batch of answers is trained on, one is written, and more of them would only be older");
    must(o.dynamic_filtering_range[0] < o.dynamic_filtering_range[1], "dynamic_filtering_range",
         "two numbers, the smaller one first");
    must(o.learning_rate > 0, "learning_rate", "above 0");
    must(o.critic_learning_rate > 0, "critic_learning_rate", "above 0");
    must(o.value_clip >= 0, "value_clip", "0 (no bound) or more");
    must(share(o.lr_warmup_ratio), "lr_warmup_ratio", "between 0 and 1");
    must(o.lr_warmup_steps == -1 || o.lr_warmup_steps == 0 || steps(o.lr_warmup_steps), "lr_warmup_steps",
         "-1 (as lr_warmup_ratio says), 0, a whole number, or a share of all steps below 1");
    for (const std::string &name : o.report_to) one_of(name, "report_to", "tensorboard,wandb,trackio,none");
    must(share(o.min_lr_ratio), "min_lr_ratio", "between 0 and 1");
    must(share(o.lr_decay_ratio), "lr_decay_ratio", "between 0 and 1");
    for (double beta : o.adam_betas) must(beta >= 0 && beta < 1, "adam_betas", "two numbers in [0, 1)");
    must(o.adam_eps > 0, "adam_eps", "above 0");
    must(o.weight_decay >= 0, "weight_decay", "0 or more");
    must(o.neftune_noise_alpha >= 0, "neftune_noise_alpha", "0 (no noise) or more");
    must(o.max_norm >= 0, "max_norm", "0 (no clipping) or more");
    must(o.threads <= 4096, "threads", "at most 4096");
    one_of(o.sp_mode, "sp_mode", "ring,gather,ulysses");
    must(o.ranks > 0 && o.ranks <= 4096, "ranks", "between 1 and 4096");
    must(o.ring_attn_size > 0 || task == DEMO, "ring_attn_size", "at least 1");
    must(o.zero_stage <= 3, "zero_stage", "0, 1, 2 or 3");
    must(o.attention_tflops >= 0, "attention_tflops", "0 (by device) or more");
    must(o.link_gb_s >= 0, "link_gb_s", "0 (by device) or more");
    must(o.comm_timeout > 0, "comm_timeout", "above 0");
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
    must(o.kl_target >= 0, "kl_target", "0 (fixed) or more");
    must(o.kl_horizon > 0, "kl_horizon", "above 0");
    must(o.temperature >= 0, "temperature", "0 (greedy) or more");
    must(o.top_p > 0 && o.top_p <= 1, "top_p", "above 0 and at most 1");
    must(o.min_p >= 0 && o.min_p <= 1, "min_p", "0 (all) to 1");
    must(o.repetition_penalty > 0, "repetition_penalty", "above 0");
}

static void check_together(const std::string &program, const Options &o, Task task, Problems &problems) {
    const auto both = [&](bool wrong, const char *a, const char *b, const char *why) {
        if (wrong)
            problems.push_back(
                format("--%s and --%s were both given: %s\n  fix: leave one of them out, on the command line or in --config", a,
                       b, why));
    };
    const auto need = [&](bool missing, const char *what) {
        if (missing)
            problems.push_back(format("%s needs %s\n  fix: ./%s %s --help shows its flags", task_name(task), what,
                                      program.c_str(), task_name(task)));
    };
    both(o.train_batch_size > 0 && o.train_batch_tokens > 0, "train_batch_size", "train_batch_tokens",
         "each says what a step is");
    both(!o.model.empty() && !o.preset.empty(), "model", "preset", "a preset starts from random weights");
    both(!o.eval_data.empty() && o.eval_fraction > 0, "eval_data", "eval_fraction", "evaluation has one source");
    both(o.overwrite && o.resume != "never", "overwrite", "resume", "one discards the earlier run, the other goes on with it");
    both(o.lora_rank > 0 && !o.adapter.empty(), "lora_rank", "adapter", "an adapter has its rank");
    both(o.lora_rank > 0 && !o.preset.empty() && !o.plan, "lora_rank", "preset", "adapters of random weights learn nothing");
    both(o.guard && o.poison, "guard", "poison", "with guards no array shares memory, so none is ever dead");
    both(o.profile && o.poison, "profile", "poison", "the time of filling dead arrays would count for the ops");
    both(!o.prompt.empty() && !o.prompts.empty(), "prompt", "prompts", "they have one source");
    both(!o.data.empty() && !o.rollouts.empty(), "data", "rollouts", "answers are sampled, or given");
    both(o.dynamic_filtering && !o.rollouts.empty(), "dynamic_filtering", "rollouts", "answers that are given are not replaced");
    both(o.kl_target > 0 && !o.rollouts.empty(), "kl_target", "rollouts",
         "the coefficient adapts after each batch of answers, and these are one");
    both(o.async_steps && !o.rollouts.empty(), "async_steps", "rollouts", "answers that are given are not written");
    both(!o.is_correction.empty() && !o.rollouts.empty(), "is_correction", "rollouts",
         "the policy that wrote given answers is the one that their ratios are taken to");
    both(o.save_rollouts && !o.rollouts.empty(), "save_rollouts", "rollouts", "they lie in a file already");
    if (o.dynamic_filtering && o.n < 2)
        die("--dynamic_filtering compares the answers to a prompt, but --n is %zu\n  fix: --n 8, say", o.n);
    if (!o.reward_weights.empty() && o.reward_weights.size() != o.reward.size())
        die("--reward_weights has %zu numbers for %zu rewards\n  fix: one for each of --reward", o.reward_weights.size(),
            o.reward.size());
    if (o.early_stopping_patience && o.eval_data.empty() && o.eval_fraction == 0)
        die("--early_stopping_patience counts evaluations, and there are none\n  fix: --eval_data FILE, or --eval_fraction 0.05");
    both(o.ranks > 1 && !o.rendezvous.empty(), "ranks", "rendezvous", "ranks are threads of one process, or processes");
    if ((o.rank >= 0 || o.world_size || !o.rendezvous.empty()) && (o.rank < 0 || !o.world_size || o.rendezvous.empty()))
        die("--rank, --world_size and --rendezvous belong together\n  fix: --rank 0 --world_size 2 --rendezvous HOST:29500, say");
    if (o.offload.empty() && !o.offload_dir.empty())
        die("--offload_dir is where --offload puts arrays, and nothing is offloaded\n  fix: --offload activations, say");
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
        die("--zero_group %zu: nothing is divided %s\n  fix: --zero_stage 0 alone, or a stage from 1 on with a larger group",
            o.zero_group, o.zero_stage == 0 ? "at --zero_stage 0" : "in a group of one rank");
    if (o.fit && !o.plan) die("--fit belongs to --plan\n  fix: --plan --fit");
    if (!o.timeline.empty() && (!o.plan || o.fit))
        die("--timeline belongs to --plan without --fit\n  fix: --plan --timeline %s", o.timeline.c_str());
    if (task != GENERATE && !o.prompt.empty() && !o.sample_every)
        die("--prompt belongs to --sample_every\n  fix: --sample_every 100, say, or leave it out");
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
    else if (task & RL) need(o.data.empty() && o.rollouts.empty(), "--data FILE, prompts with responses, or --rollouts FILE");
    else need(o.data.empty(), "--data FILE");
    if (task & TRAINING) need(o.output_dir.empty(), "--output_dir DIR");
}

// ---- the interface ---------------------------------------------------------------------------------------------------------------

static Task task_of(const std::vector<std::string> &arguments) {
    if (arguments.empty() || arguments[0].starts_with("-")) {
        const bool plan = std::find(arguments.begin(), arguments.end(), "--plan") != arguments.end();
        return plan ? SFT : DEMO;  // the plan is the same for all training
    }
    for (Task t : tasks)
        if (arguments[0] == task_name(t)) return t;
    if (arguments[0] == "reward") return RM;  // TRL's name
    if (arguments[0] == "rloo") die("there is no task \"rloo\"\n  fix: grpo, with --advantage_estimator rloo");
    if (arguments[0] == "kto")
        die("there is no task \"kto\": answers that are good or bad by themselves are not learnt from\n  fix: dpo, with pairs of a better and a worse answer");
    die("there is no task \"%s\"\n  fix: one of %s", arguments[0].c_str(), task_words(ALL_TASKS | MERGE).c_str());
}

// Calls the functions in turn, with a list that they add problems to or with an error that they end with, and ends with one message of all.
template <class... F> static void collect(const Parser &parser, Problems problems, F &&...functions) {
    const auto call = [&](auto &function) {
        try {
            function(problems);
        } catch (const Error &e) {
            problems.push_back(e.what());
        }
    };
    (call(functions), ...);
    if (problems.empty()) return;
    if (problems.size() == 1 && !parser.spoken) die("%s", problems[0].c_str());
    std::string all = problems.size() == 1 ? "" : format("%zu problems:\n", problems.size());
    for (const std::string &problem : problems) all += problem + "\n";
    die("%sWhat was understood, in the names of this program:\n  %s", all.c_str(), parser.command().c_str());
}

Parsed parse(const std::string &program, const std::vector<std::string> &given, const std::vector<std::string> &bundled) {
    const bool asks = std::find(given.begin(), given.end(), "--help") != given.end() ||
                      std::find(given.begin(), given.end(), "-h") != given.end();
    const bool brings = !asks && !bundled.empty() && task_of(given) == DEMO;
    std::vector<std::string> arguments = brings ? bundled : given;
    if (brings) arguments.insert(arguments.end(), given.begin(), given.end());
    if (brings && given.empty()) arguments.push_back("--overwrite");  // only ever its own
    const Task task = task_of(arguments);
    const bool named = !arguments.empty() && !arguments[0].starts_with("-");
    Parser parser(program, task);
    if (asks) {
        std::string config;
        parser.app.add_option(
            "--config", config,
            "JSON or YAML file with any of these flags, or with those of TRL, accelerate or Axolotl; the command line wins");
        bool convert = false;
        parser.app.add_flag("--convert", convert, "print the command in the names of this program, and stop");
        parser.app.add_option("--as", config, "trl | openrlhf | axolotl: print the command in their names, and stop");
        return {task, parser.options, true, {}, parser.app.help()};
    }
    Problems problems;
    std::string as;  // whose names are asked for, if any
    for (const Setting &s : read_settings(arguments, named)) try {
            if (s.name == "as") as = CLI::detail::join(s.values);
            else if (s.name == "convert") as = as.empty() ? program : as;
            else parser.set(s);
        } catch (const Error &e) {
            problems.push_back(e.what());
        }
    collect(
        parser, problems, [&](Problems &all) { parser.finish(all); },
        [&](Problems &all) { check_values(parser.options, task, all); },
        [&](Problems &all) { check_together(program, parser.options, task, all); });
    if (brings) {
        std::string command = "./" + program;
        for (const std::string &word : arguments) command += " " + word;
        parser.notes.push_back("without a task this is " + command);
    }
    const std::string converted = as.empty() ? "" : (as == program ? parser.command() : parser.command_of(as)) + "\n";
    return {task, parser.options, !parser.given.count("max_len"), parser.notes, converted};
}
