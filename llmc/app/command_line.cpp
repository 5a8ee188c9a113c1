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
#include "help.h"
#include "rules.h"
#include "settings.h"

using nlohmann::ordered_json;

// ---- tables ---------------------------------------------------------------------------------------------------------------------

static constexpr Task tasks[] = {DEMO, PRETRAIN, SFT, DPO, RM, DISTILL, GRPO, PPO, EVAL, GENERATE, MERGE};

struct Flag {
    const char *name;
    unsigned tasks;
    const char *wanted;  // the valid values, in words
    bool boolean, list;
};

static const char *wanted(const std::string &) { return "text"; }
template <Choice E> const char *wanted(const E &) { return "text"; }
template <Choice E> const char *wanted(const Auto<E> &) { return "text"; }
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

static const std::vector<Flag> &flags() {
    static const std::vector<Flag> all = {
#define OPT(type, name, value, tasks, ...) {#name, tasks, wanted(type{}), std::is_same_v<type, bool>, is_list<type>},
#include "../train/options.def"
    };
    return all;
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

static void check_name(const char *flag, const std::string &name, std::vector<std::string> valid) {
    if (std::ranges::count(valid, name)) return;
    std::erase(valid, "");
    die("--%s is \"%s\"\n  fix: use one of %s", flag, name.c_str(), CLI::detail::join(valid, ",").c_str());
}

struct Parser {
    std::string program;
    Task task;
    Options options;
    const std::map<std::string, std::vector<std::string>> valid;
    std::set<std::string> given;                                   // flags that were set
    std::vector<std::pair<std::string, std::string>> understood;   // these flags with their values
    std::map<std::string, std::pair<Texts *, std::string>> texts;  // by flag: the field, and the source of its texts
    CLI::App app;

    Parser(const std::string &name, Task t) : program(name), task(t), options(default_options(t)), valid(valid_names(t)) {
        app.set_help_flag();  // removes CLI11's
#define OPT(type, name, value, tasks, ...) \
    if (task & (tasks)) add("--" #name, options.name);
#include "../train/options.def"
    }

    template <class T> CLI::Option *option_of(const char *name, T &field) { return app.add_option(name, field); }
    template <Choice E> CLI::Option *option_of(const char *name, E &field) {
        return app.add_option_function<std::string>(name, [&](const std::string &text) { field = *find_choice<E>(text); });
    }
    template <Choice E> CLI::Option *option_of(const char *name, Auto<E> &field) {
        return app.add_option_function<std::string>(name, [&](const std::string &text) { field = find_choice<E>(text); });
    }

    template <class T> void add(const char *name, T &field) {
        CLI::Option *option = option_of(name, field);
        if constexpr (std::is_same_v<T, bool>) option->check(true_or_false, "");
        if constexpr (!std::is_same_v<T, std::string> && !Choice<T>) option->check(not_empty, "");
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
            if (const auto names = valid.find(flag.name); names != valid.end())
                for (const std::string &value : values)
                    for (const std::string &name : flag.list ? names_in(value) : Names{value})
                        check_name(flag.name, name, names->second);
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
        const size_t documents = documents_of_sample(options, task);
        if (options.row_tokens && !given.count("max_len"))
            options.max_len = std::clamp<size_t>(options.row_tokens / documents, 2, options.max_len);
        if (options.row_tokens == 0) options.row_tokens = documents * options.max_len;
        if (options.ring_attn_head_stride && options.sp_mode != SpMode::gather) {
            if (given.count("sp_mode"))
                die("--ring_attn_head_stride is for --sp_mode gather, not %s\n  fix: leave one of them out",
                    name_of(options.sp_mode).c_str());
            options.sp_mode = SpMode::gather;
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
    const auto refuse = [&](const char *flag, const std::string &rule) {
        problems.push_back(format("--%s is %s but must be %s\n  fix: change --%s", flag,
                                  json.value(flag, ordered_json()).dump().c_str(), rule.c_str(), flag));
    };
    const size_t before = problems.size();
    // Sizes are products of two counts, with a factor of two for pairs.
    const auto must_be_countable = [&](const auto &value, const std::string &flag) {
        if constexpr (std::is_same_v<decltype(value), const size_t &>)
            if (value > most_count && flag != "seed") refuse(flag.c_str(), "less than 2^31");
    };
#define OPT(type, name, ...) must_be_countable(o.name, #name);
#include "../train/options.def"
    if (problems.size() > before) return;
    if (task & RL && double(o.n) * double(o.num_episodes) * double(o.max_epochs) > double(most_count))
        refuse("n", "such that n * num_episodes * max_epochs is less than 2^31");
    each_rule<Must>(o, task, [&](const char *flag, double x, const Must &rule) {
        if (!rule.holds(x)) refuse(flag, rule.rule);
    });
    for (const std::string &name : o.report_to) {
        const bool project = !name.ends_with(':') && (name.starts_with("wandb:") || name.starts_with("trackio:"));
        check_name("report_to", project ? name.substr(0, name.find(':')) : name, {"tensorboard", "wandb", "trackio", "none"});
    }
    if (o.row_tokens < o.max_len)
        die("--row_tokens %zu is less than --max_len %zu: the longest sample would not fit\n  fix: use --row_tokens %zu, or lower --max_len",
            o.row_tokens, o.max_len, o.max_len);
}

// Returns the flags that differ from their defaults and, because of another flag, have no effect; each with a message.
static std::map<std::string, std::string> idle_flags(const Options &o, Task task) {
    const ordered_json json = to_json(o, task), defaults = to_json(default_options(task), task);
    std::map<std::string, std::string> idle;
    const auto check = [&](const std::string &flag, double, const Needs &rule) {
        if (!rule.met && json.contains(flag) && json[flag] != defaults[flag])
            idle[flag] = format("--%s has no effect without %s\n  fix: %s, or leave it out", flag.c_str(), rule.what, rule.fix);
    };
    each_rule<Needs>(o, task, check);
    const auto raw = [](const std::string &path) { return !path.empty() && !path.ends_with(".safetensors"); };
    const Needs raw_data = needs(raw(o.data) || raw(o.eval_data) || (o.data + o.rollouts).empty(),
                                 "raw data: a prepared file has the tokens already", "raw --data");
    // Prepared documents that are too long are refused, whatever the truncation; and an environment plays the episodes.
    const std::set<std::string> also_later = {"max_len", "truncation", "environment"};
    for (const Flag &f : flags())
        if (f.tasks & PREPARE && !also_later.contains(f.name)) check(f.name, 0, raw_data);
    return idle;
}

static void check_together(const std::string &program, const Options &o, Task task, bool show, Problems &problems) {
    const auto need = [&](bool missing, const char *what) {
        if (missing)
            problems.push_back(format("%s needs %s\n  fix: %s %s --help shows its flags", task_name(task), what, program.c_str(),
                                      task_name(task)));
    };
    each_rule<Excludes>(o, task, [&](const char *flag, double, const Excludes &rule) {
        if (rule.both)
            problems.push_back(
                format("--%s and --%s were both given: %s\n  fix: leave one of them out, on the command line or in --config",
                       flag, rule.other, rule.why));
    });
    if (!o.dynamic_filtering.empty() && o.n < 2)
        die("--dynamic_filtering compares the answers to a prompt, but --n is %zu\n  fix: --n 8, say", o.n);
    if (!o.reward_weights.empty() && o.reward_weights.size() != o.reward.size())
        die("--reward_weights has %zu numbers for %zu rewards\n  fix: give one for each --reward", o.reward_weights.size(),
            o.reward.size());
    if (o.early_stopping_patience && o.eval_data.empty() && o.eval_fraction == 0)
        die("--early_stopping_patience counts evaluations, and there are none\n  fix: --eval_data FILE, or --eval_fraction 0.05");
    if ((started_by_hand(o).processes == 0) != o.rendezvous.empty())
        die("--rank and --rendezvous belong together\n  fix: --rank 0/2 --rendezvous HOST:29500, say");
    if (std::ranges::count(o.offload, "weights") && o.load_in != LoadIn::dtype)
        die("--offload weights: the matrices that --load_in %s makes small stay in memory\n  fix: leave weights out of --offload, or leave --load_in out",
            name_of(o.load_in).c_str());
    if (o.optimizer == OptimizerType::muon && o.moments == Moments::blockwise)
        die("--moments 8bit is for AdamW: Muon's one moment is stored in f32 or bf16\n  fix: --moments bf16, or --optimizer adamw");
    for (const std::string &name : o.offload)
        if (o.optimizer == OptimizerType::muon && name != "activations")
            die("--offload %s is for AdamW: Muon's update needs whole matrices\n  fix: leave %s out of --offload, or --optimizer adamw",
                name.c_str(), name.c_str());
    if (o.zero_group && (o.zero_group == 1 || o.zero_stage == 0))
        die("--zero_group %zu: nothing is divided %s\n  fix: leave --zero_group out, or use a larger group at a stage from 1 on",
            o.zero_group, o.zero_stage == 0 ? "at --zero_stage 0" : "in a group of one rank");
    if (o.expert_parallel > 1 && o.zero_group % o.expert_parallel)
        die("--expert_parallel %zu does not divide --zero_group %zu: a group would have parts of several ranks' experts\n  fix: use a group of %zu ranks, or of a multiple",
            o.expert_parallel, o.zero_group, o.expert_parallel);
    if (o.expert_parallel > 1 && o.load_in != LoadIn::dtype)
        die("--expert_parallel %zu: with --load_in %s every rank has all experts\n  fix: leave one of them out",
            o.expert_parallel, name_of(o.load_in).c_str());
    if (o.expert_parallel > 1 && o.async_steps)
        die("--expert_parallel %zu: the copy of the policy that samples during training would need all experts on every rank\n  fix: --async_steps 0",
            o.expert_parallel);
    if (o.expert_parallel > 1 && o.fit)
        die("--fit plans for 1, 2, 4, ... ranks, which --expert_parallel %zu does not all divide\n  fix: --plan alone, with --ranks and --expert_parallel",
            o.expert_parallel);
    if (const size_t tp = o.tensor_parallel; tp > 1) {
        const auto refuse = [&](const char *flag, const char *why) {
            die("--tensor_parallel %zu with %s: %s\n  fix: leave one of them out", tp, flag, why);
        };
        if (o.zero_group % tp) refuse("--zero_group", "a group needs whole models, so it is a multiple of --tensor_parallel");
        if (o.async_steps) refuse("--async_steps", "answers and training would use one communicator at a time");
    }
    if (o.fit && !o.plan) die("--fit belongs to --plan\n  fix: --plan --fit");
    if (!o.timeline.empty() && (!o.plan || o.fit))
        die("--timeline belongs to --plan without --fit\n  fix: --plan --timeline %s", o.timeline.c_str());
    if (o.load_in != LoadIn::dtype && task & TRAINING && o.lora_rank == 0 && o.adapter.empty())
        problems.push_back(format(
            "--load_in %s freezes the matrices of the layers, and without adapters nothing would be trained\n  fix: --lora_rank 16, say, or leave --load_in out",
            name_of(o.load_in).c_str()));
    if (task == DEMO) return;  // the demo brings its own model and data
    if (task & TRAINING & ~(RL | DISTILL))
        need(o.model.empty() && o.preset.empty(), "--model DIR, or --preset NAME to start from random weights");
    else need(o.model.empty(), "--model DIR");
    if (task == DISTILL) need(o.teacher_model.empty(), "--teacher_model DIR, the model to learn from");
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
static std::optional<Task> own_task(const std::vector<std::string> &words) {
    if (words.empty() || words[0].starts_with("-")) return is_asked(words, "--plan") ? SFT : DEMO;
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

static CommandLine read_request(const std::string &program, const std::vector<std::string> &words) {
    const std::optional<Task> task = own_task(words);
    std::string stranger;  // the first name that is not this program's
    CommandLine request;
    request.task = task.value_or(SFT);
    const auto is_own = [](const std::string &name) { return name == "convert" || find_flag(name); };
    if (!task) stranger = "there is no task \"" + words[0] + "\"";
    else request.settings = read_settings(words, !words.empty() && !words[0].starts_with("-"), is_own, stranger);
    if (!stranger.empty()) request = ask_port(program, words, stranger);
    request.convert = std::erase_if(request.settings, [](const Setting &s) {
                          if (s.name == "convert" && !s.values.empty() && s.values[0] != "true")
                              die("--convert has no value, and \"%s\" was given\n  fix: leave it out; the command is printed",
                                  s.values[0].c_str());
                          return s.name == "convert";
                      }) > 0;
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

// Returns the words with --help=TASK as two words.
static std::vector<std::string> help_apart(const std::vector<std::string> &words) {
    std::vector<std::string> apart;
    for (const std::string &word : words) {
        if (!word.starts_with("--help=")) apart.push_back(word);
        else apart.insert(apart.end(), {"--help", word.substr(strlen("--help="))});
    }
    return apart;
}

Parsed parse(const std::string &program, const std::vector<std::string> &command, const std::vector<std::string> &bundled) {
    const std::vector<std::string> given = help_apart(command);
    const bool asks = is_asked(given, "--help") || is_asked(given, "-h");
    const bool show = !given.empty() && given[0] == "show";
    const bool brings = !asks && !bundled.empty() && own_task(given) == DEMO;
    std::vector<std::string> words = brings ? bundled : given;
    if (show) words.erase(words.begin());
    if (show && (words.empty() || words[0].starts_with("-"))) words.insert(words.begin(), task_name(SFT));
    if (brings) words.insert(words.end(), given.begin(), given.end());
    if (brings && given.empty()) words.push_back("--overwrite");  // the directory only holds runs of this command
    if (asks) {                                                   // the task may follow --help
        const bool all = std::erase(words, "all") > 0;
        std::erase(words, "--help"), std::erase(words, "-h");
        const auto own = own_task(words);
        const Task task = own ? *own : read_request(program, words).task;
        return {task, default_options(task), true, {}, show, show ? help_of_show(program) : help(program, task, all)};
    }
    CommandLine request = read_request(program, words);
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
