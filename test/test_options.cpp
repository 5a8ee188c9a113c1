// The command line: every flag is in --help, in the run log and in --config; what a user can get wrong is refused with a message.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../llmc/app/command_line.h"
#include "../llmc/core/common.h"

using nlohmann::ordered_json;

static Parsed parse(const std::vector<std::string> &arguments) { return parse("train_llama", arguments); }

static std::vector<std::string> words(const std::string &line) {
    std::istringstream in(line);
    return {std::istream_iterator<std::string>(in), {}};
}

static const std::string sft = "sft --model M --data D --output_dir O ";
static const std::string dpo = "dpo --model M --data D --output_dir O ";
static const std::string grpo = "grpo --model M --data D --output_dir O ";
static const std::string rm = "rm --model M --data D --output_dir O ";

static std::string first_line(const Task task, const std::string &flag) {  // of the help of a flag
    const std::string help = parse({task_name(task), "--help"}).help;
    const size_t begin = help.find("--" + flag + " ");
    return begin == help.npos ? "" : help.substr(begin, help.find('\n', begin) - begin);
}

static bool shows_default(const std::string &line, const std::string &flag, const std::string &value) {
    return line.starts_with(flag + "=" + value + " ") || line.starts_with(flag + " [" + value + "] ");  // CLI11 2.1, 2.4
}

static Options options(const std::string &line) { return parse(words(line)).options; }

static std::string message(const std::vector<std::string> &arguments) {  // of the error that parse() ends with
    try {
        parse(arguments);
    } catch (const Error &e) {
        return e.what();
    }
    return "no error";
}

static void expect_error(const std::string &line, const std::string &part) {
    const std::string got = message(words(line));
    EXPECT_NE(got.find(part), got.npos) << line << "\n  said: " << got;
}

// All notes in one text.
static std::string notes(const std::string &line) {
    std::string out;
    for (const std::string &note : parse(words(line)).notes) out += note + "\n";
    return out;
}

struct ConfigFile {
    const std::string path = testing::TempDir() + "test_options_" + std::to_string(getpid()) + ".json";
    explicit ConfigFile(const std::string &text) { std::ofstream(path) << text; }
    ~ConfigFile() { remove(path.c_str()); }
};

TEST(Options, DefaultsDependOnTheTask) {
    EXPECT_EQ(parse({}).task, DEMO);
    EXPECT_EQ(parse({}).options.train_batch_size, 64u);
    EXPECT_TRUE(parse({}).options.overwrite);
    EXPECT_FALSE(parse({"--output_dir", "mine"}).options.overwrite);
    EXPECT_EQ(parse(words(sft)).task, SFT);
    EXPECT_EQ(options(sft).learning_rate, 5e-6);
    EXPECT_EQ(options(sft).truncation, "drop");
    EXPECT_EQ(options("pretrain --preset tiny --data D --output_dir O").learning_rate, 3e-4);
    EXPECT_EQ(options("pretrain --preset tiny --data D --output_dir O").truncation, "split");
    EXPECT_EQ(options(sft).train_batch_size, 128u);
    EXPECT_EQ(options(sft).row_tokens, 2048u);
    EXPECT_EQ(options(sft).max_len, 2048u);
    for (const std::string &pairs : {dpo, rm}) {
        EXPECT_EQ(options(pairs).max_len, 512u);
        EXPECT_EQ(options(pairs).row_tokens, 1024u);  // a pair
        EXPECT_EQ(options(pairs).train_batch_size, 128u);
        EXPECT_EQ(options(pairs).truncation, "drop");
        EXPECT_EQ(options(pairs).loss_type, Names{"sigmoid"});
        EXPECT_TRUE(parse(words(pairs)).notes.empty());
    }
    EXPECT_EQ(options(dpo).learning_rate, 1e-6);
    EXPECT_EQ(options(rm).learning_rate, 9e-6);
    EXPECT_EQ(options(dpo).beta, 0.1);
    EXPECT_EQ(options(dpo).ref_mode, "precompute");
    EXPECT_TRUE(options(dpo).loss_weights.empty());
    EXPECT_EQ(options("generate --model M --prompt Hi").max_new_tokens, 128u);
    EXPECT_TRUE(parse(words(sft)).notes.empty());
}

TEST(Options, TheDefaultMaxLenIsNoMoreThanARowHolds) {
    EXPECT_EQ(options(sft + "--row_tokens 512").max_len, 512u);
    EXPECT_EQ(options(sft + "--row_tokens 512").row_tokens, 512u);
    EXPECT_EQ(options(sft + "--row_tokens 4096").max_len, 2048u);
    EXPECT_EQ(options("eval --model M --data D --row_tokens 512").max_len, 512u);
    EXPECT_EQ(parse({"--row_tokens", "512"}).options.max_len, 512u);
    for (const std::string &pairs : {dpo, rm}) {
        EXPECT_EQ(options(pairs + "--row_tokens 300").max_len, 150u);  // a pair has two answers
        EXPECT_EQ(options(pairs + "--row_tokens 4096").max_len, 512u);
    }
    EXPECT_EQ(options(sft + "--row_tokens 512 --micro_batch_size 2").row_tokens, 4096u);  // the later one wins
    EXPECT_EQ(options(sft + "--micro_batch_size 2 --row_tokens 512").max_len, 512u);
    EXPECT_TRUE(parse(words(sft + "--row_tokens 512")).default_max_len);
    EXPECT_FALSE(parse(words(sft + "--max_len 2048")).default_max_len);
    expect_error(sft + "--row_tokens 512 --max_len 2048", "--row_tokens 512 is less than --max_len 2048");
    expect_error(sft + "--row_tokens 1", "--row_tokens 1 is less than --max_len 2");
}

TEST(Options, WaysToWriteAFlag) {
    EXPECT_EQ(options(sft + "--max-len 100").max_len, 100u);
    EXPECT_EQ(options(sft + "--max_len=100").max_len, 100u);
    EXPECT_EQ(options(sft + "--data.max-len 100 --max_len 200").max_len, 200u);  // the last one wins
    EXPECT_TRUE(options(sft + "--overwrite").overwrite);
    EXPECT_FALSE(options(sft + "--shuffle false").shuffle);
    EXPECT_TRUE(options(sft + "--shuffle=true --overwrite").shuffle);
    EXPECT_EQ(options(sft + "--save_steps -1").save_steps, -1);
    EXPECT_EQ(options(sft + "--lr 2e-5").learning_rate, 2e-5);
    EXPECT_EQ(options(sft + "--adam_betas 0.8,0.9").adam_betas, (Betas{0.8, 0.9}));
    EXPECT_EQ(options(sft + "--adam.betas 0.8 0.9").adam_betas, (Betas{0.8, 0.9}));
    EXPECT_EQ(parse({"generate", "--model", "M", "--prompt=--help = [a, b] {}"}).options.prompt, "--help = [a, b] {}");
    EXPECT_EQ(parse({"sft", "--model", "M", "--data", "D", "--output_dir", "O", "--log", ""}).options.log, "");
    EXPECT_EQ(options(sft + "--seed 18446744073709551615").seed, UINT64_MAX);
}

TEST(Options, EveryFlagIsInHelpAndInTheLog) {
    for (Task task : {DEMO, PRETRAIN, SFT, DPO, RM, GRPO, PPO, EVAL, GENERATE, MERGE}) {
        const Parsed p = parse({task_name(task), "--help"});
        const ordered_json json = to_json(default_options(task), task);
        size_t count = 0;
#define OPT(type, name, value, tasks, aliases, text)                                    \
    EXPECT_EQ(p.help.find("--" #name " ") != p.help.npos, bool((tasks)&task)) << #name; \
    EXPECT_EQ(json.contains(#name), bool((tasks)&task)) << #name;                       \
    count += bool((tasks)&task);
#include "../llmc/train/options.def"
        EXPECT_EQ(json.size(), count);
    }
    EXPECT_NE(parse({"--help"}).help.find("pretrain, sft, dpo, rm, grpo, ppo, eval, generate, merge"), std::string::npos);
    EXPECT_PRED3(shows_default, first_line(SFT, "learning_rate"), "--learning_rate FLOAT", "5e-06");
    EXPECT_PRED3(shows_default, first_line(DPO, "learning_rate"), "--learning_rate FLOAT", "1e-06");
    EXPECT_PRED3(shows_default, first_line(RM, "max_len"), "--max_len UINT", "512");
    EXPECT_PRED3(shows_default, first_line(SFT, "shuffle"), "--shuffle BOOL", "true");
    EXPECT_PRED3(shows_default, first_line(DPO, "loss_type"), "--loss_type NAME", "sigmoid");
    EXPECT_NE(first_line(DPO, "loss_type").find(" ... "), std::string::npos);
    EXPECT_EQ(first_line(DPO, "loss_weights").find("--loss_weights FLOAT ..."), 0u);
    EXPECT_NE(first_line(DPO, "ref_model").find("[ref.model_name_or_path,ref_pretrain]"), std::string::npos);
}

TEST(Options, EveryAliasNamesOneFlag) {
    std::map<std::string, std::string> owner;
    const auto take = [&](const std::string &name, const std::string &flag) {
        EXPECT_TRUE(owner.emplace(name, flag).second) << name << " means " << owner[name] << " and " << flag;
    };
#define OPT(type, name, value, tasks, aliases, text)                             \
    take(#name, #name);                                                          \
    for (std::string alias, rest = aliases; !rest.empty();) {                    \
        alias = rest.substr(0, rest.find(','));                                  \
        rest = alias.size() == rest.size() ? "" : rest.substr(alias.size() + 1); \
        take(alias, #name);                                                      \
    }
#include "../llmc/train/options.def"
}

TEST(Options, LogRoundTripsThroughConfig) {
    const std::string changed[] = {
        sft +
            "--lr 1.2345678901234567e-5 --adam_betas 0.1,0.7 --max_len 77 --micro_batch_size 3 --shuffle false --input_template User:{} --recompute layer",
        "pretrain --preset tiny --data D --output_dir O --train_batch_tokens 1000 --seed 18446744073709551615 --eval_fraction 0.125 --resume auto",
        dpo + "--beta 0.3 --micro_batch_size 3 --ref_model R --ref_mode resident",
        dpo + "--loss_type sigmoid,sft,hinge --loss_weights 1,0.2,1e-9 --label_smoothing 0.1 --prompt_key question",
        rm + "--loss_type logexp --margin_loss_enable --center_rewards_coefficient 0.01",
        "eval --model M --data D --poison",
        "generate --model M --prompt Hi --top_k 5 --temperature 0.7",
        "demo --max_steps 5",
    };
    for (const std::string &line : changed) {
        const Parsed first = parse(words(line));
        const ConfigFile file(to_json(first.options, first.task).dump());
        const Parsed second = parse({task_name(first.task), "--config", file.path});
        EXPECT_EQ(to_json(first.options, first.task).dump(), to_json(second.options, second.task).dump());
    }
}

TEST(Options, ConfigHoldsAnyFlagAndTheCommandLineWins) {
    const ConfigFile file(
        R"({"model-name-or-path": "M", "data": {"dataset": "D", "max_len": 64}, "output_dir": "O", "adam": {"betas": [0.5, 0.6]}, "overwrite": true})");
    const Options o = options("sft --max_len 32 --config " + file.path);
    EXPECT_EQ(o.model, "M");
    EXPECT_EQ(o.data, "D");
    EXPECT_EQ(o.max_len, 32u);
    EXPECT_EQ(o.adam_betas, (Betas{0.5, 0.6}));
    EXPECT_TRUE(o.overwrite);

    const ConfigFile wrong(R"({"max_len": "many"})");
    expect_error("sft --config " + wrong.path, "max_len in " + wrong.path + " \"many\" is not a whole number");
    const ConfigFile broken("{");
    expect_error("sft --config " + broken.path, "is not valid JSON");
    expect_error("sft --config /nowhere.json", "cannot open /nowhere.json");
}

TEST(Options, ListsAreWrittenInSeveralWays) {
    const Names types = {"sigmoid", "sft"};
    const Numbers weights = {1, 0.2};
    for (const char *flags : {"--loss_type sigmoid,sft --loss_weights 1,0.2", "--loss_type sigmoid sft --loss_weights 1 0.2",
                              "--model.loss_type=sigmoid,sft --loss-weights=1,0.2"}) {
        EXPECT_EQ(options(dpo + flags).loss_type, types) << flags;
        EXPECT_EQ(options(dpo + flags).loss_weights, weights) << flags;
    }
    const ConfigFile file(R"({"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2]})");
    EXPECT_EQ(options(dpo + "--config " + file.path).loss_type, types);
    EXPECT_EQ(options(dpo + "--config " + file.path).loss_weights, weights);
    EXPECT_EQ(options(dpo + "--loss_type hinge --config " + file.path).loss_type, Names{"hinge"});  // in its place, not added
    const ConfigFile text(R"({"loss_type": "sigmoid,sft", "loss_weights": "1,0.2"})");
    EXPECT_EQ(options(dpo + "--config " + text.path).loss_type, types);
    EXPECT_EQ(options(dpo + "--config " + text.path).loss_weights, weights);
    expect_error(dpo + "--loss_weights 1,high", "--loss_weights \"1,high\" is not numbers with commas between");
    expect_error(dpo + "--loss_weights 1,,2", "--loss_weights \"1,,2\" is not numbers with commas between");
    expect_error(dpo + "--loss_type sigmoid,", "--loss_type \"sigmoid,\" is not names with commas between");
    expect_error(dpo + "--loss_weights nan", "is not numbers with commas between");
    expect_error(dpo + "--loss_weights", "--loss_weights needs a value: numbers");
    expect_error(dpo + "--loss_type=", "is not names with commas between");
}

TEST(Options, TextsMayHaveCommas) {
    const std::vector<std::string> line = words("generate --model M --prompt Hi");
    const auto stop = [&](std::vector<std::string> more, const std::string &config = "") {
        more.insert(more.begin(), line.begin(), line.end());
        if (!config.empty()) more.insert(more.end(), {"--config", config});
        return parse(more).options.stop;
    };
    EXPECT_EQ(stop({}), Texts{});
    EXPECT_EQ(stop({"--stop", "a, b"}), Texts{"a, b"});
    EXPECT_EQ(stop({"--stop", "[a,b]", "\n"}), (Texts{"[a,b]", "\n"}));
    EXPECT_EQ(stop({"--stop", "a", "--n", "2", "--stop=b c", "--stop", "d"}), (Texts{"a", "b c", "d"}));
    const ConfigFile file(R"({"stop": ["x,y", "z"]})"), theirs(R"({"generation_kwargs": {"stop_strings": ["x,y", "z"]}})");
    EXPECT_EQ(stop({}, file.path), (Texts{"x,y", "z"}));
    EXPECT_EQ(stop({}, theirs.path), (Texts{"x,y", "z"}));
    EXPECT_EQ(stop({"--stop", "a"}, file.path), Texts{"a"});  // in their place, not added
    auto back = line;
    back.insert(back.end(), {"--stop", "[a,b]", "it's", "--convert"});
    EXPECT_EQ(parse(back).help, "./train_llama generate --model M --prompt Hi --stop '[a,b]' --stop 'it'\\''s'\n");
}

TEST(Options, MistakesAreNamed) {
    expect_error("stf", "there is no task \"stf\"");
    expect_error(sft + "--prompts F", "--prompts belongs to generate, not to sft");
    expect_error(sft + "--prompt Hi", "--prompt belongs to --sample_every");
    expect_error("dpo --model M --data D --output_dir O --sample_every 1", "--sample_every belongs to pretrain, sft, not to dpo");
    expect_error("generate --model M --prompt Hi --learning_rate 1",
                 "--learning_rate belongs to demo, pretrain, sft, dpo, rm, grpo, ppo, not to generate");
    expect_error(sft + "--beta 0.2", "--beta belongs to dpo, not to sft");
    expect_error(sft + "--chosen_key better", "--chosen_key belongs to dpo, rm, eval, not to sft");
    expect_error(rm + "--beta 0.2", "--beta belongs to dpo, not to rm");
    expect_error(rm + "--ref.model_name_or_path R", "--ref.model_name_or_path belongs to dpo, grpo, ppo, not to rm");
    expect_error(rm + "--loss_weights 1", "--loss_weights belongs to dpo, not to rm");
    expect_error(dpo + "--margin_loss", "--margin_loss belongs to rm, not to dpo");
    expect_error(dpo + "--center_rewards_coefficient 0.1", "belongs to rm, not to dpo");
    expect_error(dpo + "--input_key question", "--input_key belongs to pretrain, sft, grpo, ppo, eval, not to dpo");
    expect_error(rm + "--multiturn", "--multiturn belongs to sft, eval, not to rm");
    expect_error(sft + "--learnin_rate 1e-5", "did you mean --learning_rate?");
    expect_error(sft + "--critic.model_name_or_path C",
                 "--critic.model_name_or_path belongs to ppo, not to sft");  // is not the model
    expect_error(rm + "--reward_model true", "the task rm trains one");
    expect_error(rm + "--centre_rewards_coefficient 0.1", "did you mean --center_rewards_coefficient?");
    expect_error(sft + "--frobnicate 1", "unknown flag --frobnicate");
    expect_error(sft + "--max_len", "--max_len needs a value: a whole number");
    expect_error(sft + "--max_len 12x", "--max_len \"12x\" is not a whole number");
    expect_error(sft + "--max_len -5", "--max_len \"-5\" is not a whole number, 0 or more");
    expect_error(sft + "--max_len 010", "is not a whole number");
    expect_error(sft + "--max_len 1e3", "is not a whole number");
    expect_error(sft + "--max_steps=", "--max_steps \"\" is not a whole number");
    expect_error(sft + "--weight_decay=", "is not a number");
    expect_error(sft + "--save_steps=", "is not a number of steps, or a share of all below 1");
    expect_error(sft + "--save_steps inf", "is not a number of steps");
    expect_error(sft + "--learning_rate fast", "is not a number");
    expect_error(sft + "--learning_rate nan", "is not a number");
    expect_error(sft + "--learning_rate inf", "is not a number");
    expect_error(sft + "--shuffle maybe", "is not true or false");
    expect_error(sft + "--adam_betas 0.9", "is not two numbers");
    expect_error(sft + "--adam_betas 0.9,0.95,0.99", "is not two numbers");
    expect_error(sft + "--eval_data a b", "more than one value");
    expect_error("sft stray", "unexpected argument \"stray\"");
}

TEST(Options, ValuesAreChecked) {
    expect_error(sft + "--optimizer sgd", "--optimizer is \"sgd\"\n  fix: one of adamw,muon");
    expect_error(sft + "--optimizer muon --moments 8bit",
                 "--moments 8bit is for AdamW: Muon's one moment is stored in f32 or bf16\n  fix: --moments bf16, or");
    expect_error(
        sft + "--optimizer muon --offload activations,optimizer",
        "--offload optimizer is for AdamW: Muon's update needs whole matrices\n  fix: leave optimizer out of --offload, or --optimizer adamw");
    expect_error(sft + "--optimizer muon --offload weights", "--offload weights is for AdamW");
    EXPECT_EQ(options(sft + "--optimizer muon --moments bf16 --offload activations").optimizer, "muon");
    expect_error(sft + "--learning_rate 0", "--learning_rate is 0.0 but must be above 0");
    expect_error(sft + "--adam_betas 0.9,1", "--adam_betas is [0.9,1.0] but must be");
    expect_error(sft + "--max_len 1", "--max_len is 1 but must be at least 2");
    expect_error(sft + "--max_len 100 --row_tokens 99", "the longest sample would not fit");
    expect_error(sft + "--train_batch_size 0", "--train_batch_size is 0 but must be at least 1");
    expect_error(sft + "--train_batch_size 4 --train_batch_tokens 4", "were both given");
    expect_error(sft + "--save_steps 0",
                 "--save_steps is 0 but must be -1 (never), a whole number, or a share of all steps below 1");
    expect_error(sft + "--eval_steps 1.5", "--eval_steps is 1.5 but must be -1 (after each epoch)");
    expect_error(sft + "--logging_steps -1", "--logging_steps is -1 but must be a whole number");
    expect_error(sft + "--eval_fraction 1", "--eval_fraction is 1.0");
    expect_error(sft + "--eval_data E --eval_fraction 0.5", "were both given");
    expect_error(sft + "--truncation split", "fix: one of drop,keep");
    expect_error(sft + "--dtype fp8", "fix: one of auto,f32,bf16");
    expect_error(sft + "--preset tiny", "--model and --preset were both given");
    expect_error(sft + "--overwrite --resume auto", "were both given");
    for (const char *n : {"0", "-1", "010", "many", "9999999999", ""})
        expect_error(sft + "--micro_batch_size=" + n, "not a whole number above 0");
    expect_error(dpo + "--max_len 100 --row_tokens 99", "the longest sample would not fit");
    expect_error(sft + "--zero_stage 0 --zero_group 2",
                 "--zero_group 2: nothing is divided at --zero_stage 0\n  fix: --zero_stage 0 alone");
    expect_error(sft + "--zero_group 1", "--zero_group 1: nothing is divided in a group of one rank");
    expect_error(dpo + "--ref_mode offload", "--ref_mode is \"offload\"\n  fix: one of precompute,resident");
    expect_error(dpo + "--nll_loss_coef -1", "--nll_loss_coef is -1.0 but must be 0 or more");
    expect_error(dpo + "--truncation split", "fix: one of drop,keep");
    expect_error(rm + "--loss_type hinge", "--loss_type is \"hinge\"\n  fix: one of sigmoid,logexp");
    expect_error(rm + "--loss_type sigmoid,hinge", "--loss_type is \"hinge\"");
    expect_error(rm + "--center_rewards_coefficient -1", "must be 0 or more");
    expect_error(dpo + "--micro_batch_size 999999999 --max_len 2147483647", "--row_tokens is 4294967289705032706 but");
    expect_error("generate --model M --prompt Hi --top_p 0", "--top_p is 0.0");
    expect_error("generate --model M --prompt Hi --min_p 1.5", "--min_p is 1.5 but must be 0 (all) to 1");
    expect_error("generate --model M --prompt Hi --min_p -0.1", "--min_p is -0.1");
    expect_error("generate --model M --prompt Hi --repetition_penalty 0", "--repetition_penalty is 0.0 but must be above 0");
    expect_error("generate --model M --prompt Hi --stop", "--stop needs a value: text, at least a character");
    expect_error("generate --model M --prompt Hi --stop=", "--stop \"\" is not text, at least a character");
    for (const char *flag : {"--min_p 0.1", "--top_p 0.9", "--rollout.top_p 0.9", "--top_k 50", "--repetition_penalty 1.1"})
        expect_error(grpo + flag, "answers are sampled from the distribution that is trained");
    for (const char *flag : {"--min_p 0", "--rollout.top_p 1.0", "--top_k -1", "--repetition_penalty 1.0"})
        EXPECT_NE(notes(grpo + flag), "") << flag;
    expect_error("sft --data D --output_dir O", "sft needs --model DIR");
    for (const std::string task : {"grpo", "ppo"})  // which have no --preset
        expect_error(task + " --data D --output_dir O", task + " needs --model DIR\n");
    expect_error("sft --model M --output_dir O", "sft needs --data FILE");
    expect_error("sft --model M --data D", "sft needs --output_dir DIR");
    expect_error("eval --data D", "eval needs --model DIR");
    expect_error("generate --model M", "generate needs --prompt TEXT");
    EXPECT_TRUE(options("sft --preset tiny --plan").plan);  // a plan needs neither data nor a place to write
    for (const std::string task : {"dpo", "rm"}) {
        expect_error(task + " --data D --output_dir O", task + " needs --model DIR, or --preset NAME");
        expect_error(task + " --preset tiny --data D --output_dir O", task + " needs --model DIR: there is nothing to prefer");
        expect_error(task + " --model M --output_dir O", task + " needs --data FILE");
        expect_error(task + " --model M --data D", task + " needs --output_dir DIR");
        expect_error(task + " --model M --preset tiny --plan", "--model and --preset were both given");
        EXPECT_TRUE(options(task + " --preset tiny --plan").plan);
    }
}

TEST(Options, OpenRlhfCommandLinesRun) {
    const std::string line =
        "sft --model.model_name_or_path M --data.dataset D --ckpt.output_dir O --train.batch_size 256 --train.micro_batch_size 2 --data.max_len 100 "
        "--ds.packing_samples --ds.attn_implementation flash_attention_2 --ds.param_dtype bf16 --model.gradient_checkpointing_enable --adam.lr 1e-5 "
        "--data.input_key question --ckpt.load_enable --logger.wandb.key abc";
    const Options o = options(line);
    EXPECT_EQ(o.model, "M");
    EXPECT_EQ(o.train_batch_size, 256u);
    EXPECT_EQ(o.row_tokens, 200u);
    EXPECT_EQ(o.recompute, "layer");
    EXPECT_EQ(o.resume, "auto");
    EXPECT_EQ(o.input_key, "question");
    const std::string said = notes(line);
    for (const char *part : {"--ds.packing_samples: samples are always packed", "--ds.attn_implementation: ",
                             "--ds.param_dtype: ", "--model.gradient_checkpointing_enable: --recompute layer",
                             "--logger.wandb.key: ", "a row holds 2 * max_len = 200 tokens",
                             "defaults that differ from OpenRLHF's (in brackets): max_epochs 1 (2)"})
        EXPECT_NE(said.find(part), said.npos) << part << "\n" << said;
    EXPECT_EQ(said.find("input_key"), said.npos);  // given, so no default
    EXPECT_EQ(said.find("row_tokens 200"), said.npos);

    const std::string older =
        "sft --pretrain M --dataset D --save_path O --micro_train_batch_size 1 --train_batch_size 8 --packing_samples --bf16 --flash_attn --l2 0.1 --lora_rank 0";
    EXPECT_EQ(options(older).weight_decay, 0.1);
    EXPECT_NE(notes(older).find("defaults that differ"), std::string::npos);
    EXPECT_EQ(options(sft + "--micro_batch_size 4 --row_tokens 3000").row_tokens, 3000u);  // the later one wins

    const std::string ranks = "--ds.zero_stage 3 --ring_attn_size 2 --ring_head_stride 2 --ds.tensor_parallel_size 1";
    const Options on_ranks = options(sft + ranks);
    EXPECT_EQ(on_ranks.ring_attn_size, 2u);
    EXPECT_EQ(on_ranks.ring_attn_head_stride, 2u);
    EXPECT_EQ(on_ranks.sp_mode, "gather");
    EXPECT_EQ(on_ranks.zero_stage, 3u);
    expect_error(sft + "--ds.tensor_parallel_size 2", "has no meaning here\n  fix: there is no tensor parallelism");
    expect_error(sft + "--ring_attn_head_stride 2 --sp_mode ulysses", "is for --sp_mode gather, not ulysses");

    EXPECT_EQ(options(sft + "--gradient_checkpointing false").recompute, "auto");
    EXPECT_EQ(options(sft + "--gradient_checkpointing_enable False").recompute, "auto");
    expect_error(sft + "--ds.param_dtype fp16", "--ds.param_dtype \"fp16\" has no meaning here\n  fix: --dtype bf16 or f32");
    EXPECT_EQ(options(sft + "--ds.lora.rank 8 --ds.lora.alpha 4 --ds.lora.target_modules q_proj v_proj").lora_rank, 8);
    EXPECT_EQ(options(sft + "--ds.lora.target_modules q_proj v_proj").lora_targets, (Names{"q_proj", "v_proj"}));
    EXPECT_EQ(options(sft + "--use_peft --lora_dropout 0.1").lora_rank, 16);
    EXPECT_EQ(options(sft + "--use_peft --lora_r 4").lora_rank, 4);
    EXPECT_EQ(options(sft + "--adapter lora --lora_r 4").adapter, "");
    const Options qlora = options(sft + "--adapter qlora --load_in_4bit true --lora_r 4 --bnb_4bit_quant_type nf4");
    EXPECT_EQ(qlora.load_in, "4bit");
    EXPECT_EQ(qlora.adapter, "");
    EXPECT_EQ(options(sft + "--ds.load_in_4bit --ds.lora.rank 4").load_in, "4bit");
    EXPECT_EQ(options(sft + "--load_in_8bit True --load_in_4bit False --use_peft").load_in, "8bit");
    expect_error(sft + "--use_dora", "has no meaning here\n  fix: there are LoRA and rsLoRA");
    expect_error(sft + "--lora_rank 4 --adapter DIR", "--lora_rank and --adapter were both given");
    expect_error(sft + "--pretrain_mode", "the task pretrain trains on all tokens");
}

TEST(Options, OpenRlhfPreferencesRun) {
    const Options pairs = options(
        dpo +
        "--model.beta 0.2 --model.label_smoothing 0.1 --model.nll_loss_coef 0.3 --ref.model_name_or_path R --ref.offload --data.prompt_key p "
        "--data.chosen_key c --data.rejected_key r --train.micro_batch_size 2 --data.max_len 100");
    EXPECT_EQ(pairs.beta, 0.2);
    EXPECT_EQ(pairs.label_smoothing, 0.1);
    EXPECT_EQ(pairs.nll_loss_coef, 0.3);
    EXPECT_EQ(pairs.ref_model, "R");
    EXPECT_EQ(pairs.prompt_key + pairs.chosen_key + pairs.rejected_key, "pcr");
    EXPECT_EQ(pairs.row_tokens, 400u);  // N * 2 * max_len
    EXPECT_NE(notes(dpo + "--micro_train_batch_size 2").find("a row holds 2 * 2 * max_len = 2048 tokens"), std::string::npos);
    for (const char *ipo : {"--model.ipo_enable", "--ipo", "--ipo_enable true"})
        EXPECT_EQ(options(dpo + ipo).loss_type, Names{"ipo_sum"}) << ipo;
    EXPECT_EQ(options(dpo + "--ipo false").loss_type, Names{"sigmoid"});
    EXPECT_EQ(options(dpo + "--ref_pretrain R --ref_offload").ref_model, "R");

    const Options reward = options(
        rm + "--model.loss_type logexp --model.margin_loss_enable --model.compute_fp32_loss_enable --ds.value_head_prefix score");
    EXPECT_EQ(reward.loss_type, Names{"logexp"});
    EXPECT_TRUE(reward.margin_loss_enable);
    const Options older = options(rm + "--loss logexp --margin_loss --compute_fp32_loss --value_head_prefix score");
    EXPECT_EQ(older.loss_type, Names{"logexp"});
    EXPECT_TRUE(older.margin_loss_enable);
    expect_error(rm + "--value_head_prefix value_head", "has no meaning here\n  fix: the head of a reward model is score.weight");
    expect_error(rm + "--model.ipo_enable", "--loss_type is \"ipo_sum\"");
}

TEST(Options, CommandLinesOfTrlRun) {
    const std::string line =
        "sft --model_name_or_path M --dataset_name D --output_dir O --num_train_epochs 3.0 --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 --ranks 4 --sp_size 2 --learning_rate 2.0e-4 --gradient_checkpointing --bf16 True --max_length 512 "
        "--lr_scheduler_type cosine --max_grad_norm 0.5 --adam_beta2 0.99 --adam_epsilon 1e-6 --eval_strategy no --save_strategy no "
        "--save_total_limit 2 --report_to wandb tensorboard --optim adamw_torch_fused --loss_type nll --no_remove_unused_columns "
        "--push_to_hub False --use_peft false --attn_implementation flash_attention_2";
    const Options o = options(line);
    EXPECT_EQ(o.model + o.data + o.output_dir, "MDO");
    EXPECT_EQ(o.max_epochs, 3u);
    EXPECT_EQ(o.train_batch_size, 32u);  // 2 * 8, on 4 ranks of which 2 share a sequence
    EXPECT_EQ(o.recompute + o.dtype + o.lr_scheduler, "layerbf16cosine");
    EXPECT_EQ(o.max_len, 512u);
    EXPECT_EQ(o.max_norm, 0.5);
    EXPECT_EQ(o.adam_betas, (Betas{0.9, 0.99}));
    EXPECT_EQ(o.adam_eps, 1e-6);
    EXPECT_EQ(o.max_num, 2u);
    EXPECT_EQ(o.save_steps, -1);
    EXPECT_EQ(o.report_to, (Names{"wandb", "tensorboard"}));
    const std::string said = notes(line);
    for (const char *part :
         {"--optim: --optimizer adamw", "--gradient_checkpointing: --recompute layer",
          "a step: 2 samples of a device * 8 accumulated * 2 ranks = --train_batch_size 32",
          "defaults that differ from TRL's (in brackets): lr_warmup_ratio 0.03 (0), truncation \"drop\" (cut on the right",
          "in the names of this program: ./train_llama sft --model M --data D --output_dir O --max_epochs 3 --ranks 4"})
        EXPECT_NE(said.find(part), said.npos) << part << "\n" << said;
    EXPECT_EQ(said.find("OpenRLHF"), said.npos);

    EXPECT_EQ(options(sft + "--packing --per_device_train_batch_size 2 --max_length 512").train_batch_tokens, 1024u);
    EXPECT_EQ(options(sft + "--warmup_steps 5").lr_warmup_steps, 5);
    EXPECT_EQ(options(sft + "--warmup_steps 0.2").lr_warmup_steps, 0.2);
    EXPECT_EQ(notes(sft + "--warmup_steps 0 --max_grad_norm 1").find("lr_warmup_ratio"), std::string::npos);
    for (const char *name : {"generation_batch_size", "steps_per_generation", "epsilon_high"})
        expect_error(sft + "--" + name + " 4", (std::string("--") + name + " belongs to grpo").c_str());
    const std::string demo = "sft --model data/demo/model --dataset_name D --output_dir O ";
    EXPECT_EQ(options(demo + "--eos_token <|end|>").model, "data/demo/model");
    expect_error(demo + "--bos_token <s>",
                 "--bos_token is \"<s>\", but that of the tokenizer in data/demo/model is \"\"\n  fix: leave it out");
    expect_error(sft + "--bf16 3", "--bf16 \"3\" is no value of that flag\n  fix: true or false");
    EXPECT_EQ(options("sft --model M --output_dir O --data a.jsonl,b.parquet --dataset_split train[:2]").data,
              "a.jsonl[train[:2]],b.parquet[train[:2]]");
    EXPECT_EQ(options("dpo --model M --output_dir O --dataset_name a/b --dataset_config c --dataset_train_split d").data,
              "a/b:c[d]");
    EXPECT_EQ(options(sft + "--model_revision v2").model, "M@v2");
    EXPECT_EQ(options(dpo + "--loss_type ipo").loss_type, Names{"ipo_mean"});
    EXPECT_EQ(options(sft + "--accelerate_config zero2").zero_stage, 2u);
    EXPECT_EQ(options(sft + "--num_processes 4").ranks, 4u);
    EXPECT_EQ(options(sft + "--optim adamw_bnb_8bit").moments, "8bit");
    EXPECT_EQ(options(sft + "--optimizer paged_adamw_8bit").moments, "8bit");
    EXPECT_EQ(options(sft + "--optim muon --muon.momentum 0.95 --muon.nesterov").optimizer, "muon");
    EXPECT_EQ(options(sft + "--optim adamw").optimizer, "adamw");
    expect_error(sft + "--optim sgd", "--optimizer is \"sgd\"\n  fix: one of adamw,muon");
    EXPECT_NE(notes(sft + "--optim muon --muon.lr 0.02").find("--muon.lr: --learning_rate is for both optimizers"),
              std::string::npos);
    expect_error(sft + "--optim muon --muon.momentum 0.9",
                 "--muon.momentum \"0.9\" has no meaning here\n  fix: Muon has a momentum of 0.95");
    expect_error(sft + "--optim muon --muon.no_nesterov", "has no meaning here\n  fix: Muon has a momentum of 0.95, Nesterov's");
    EXPECT_EQ(options("grpo --model M --data D --output_dir O --loss_type dr_grpo").loss_aggregation, "constant");
    EXPECT_EQ(parse(words("reward --model M --data D --output_dir O")).task, RM);
}

TEST(Options, FilesOfAxolotlAndAccelerateAreUnderstood) {
    const ConfigFile axolotl(
        R"({"base_model": "M", "datasets": [{"path": "a/b", "name": "c", "split": "d", "type": "alpaca"}, {"path": "e.jsonl"}],
            "micro_batch_size": 2, "gradient_accumulation_steps": 4, "num_epochs": 2, "sequence_len": 512, "optimizer": "adamw_torch", "bf16": "auto",
            "val_set_size": 0.05, "special_tokens": {}, "output_dir": "O", "context_parallel_size": 2, "ring_attn_func": "varlen_llama3"})");
    const Options o = options("sft --ranks 2 --config " + axolotl.path);
    EXPECT_EQ(o.data, "a/b:c[d],e.jsonl");
    EXPECT_EQ(o.train_batch_size, 8u);
    EXPECT_EQ(o.row_tokens, 512u);  // micro_batch_size is not OpenRLHF's
    EXPECT_EQ(o.eval_fraction, 0.05);
    EXPECT_EQ(o.sp_mode, "gather");
    EXPECT_NE(notes("sft --ranks 2 --config " + axolotl.path).find("defaults that differ from Axolotl's"), std::string::npos);

    const ConfigFile accelerate(
        R"({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": true, "fsdp_reshard_after_forward": true, "fsdp_version": 2},
            "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2, "parallelism_config": {"parallelism_config_cp_size": 2}})");
    const Options two = options(sft + "--config " + accelerate.path);
    EXPECT_EQ(two.ranks, 2u);
    EXPECT_EQ(two.ring_attn_size, 2u);
    EXPECT_EQ(two.zero_stage, 3u);
    EXPECT_EQ(two.recompute + two.dtype, "layerbf16");
    const ConfigFile several(R"({"num_machines": 2, "mixed_precision": "fp16"})");
    expect_error(sft + "--config " + several.path,
                 "2 problems:\nnum_machines in " + several.path + " \"2\" has no meaning here\n  fix: --rank R");
}

// The same run in the names of the others, and back.
TEST(Options, ACommandIsTranslated) {
    const auto printed = [](const std::string &line) { return parse(words(line)).help; };
    EXPECT_EQ(
        printed(sft + "--train_batch_size 32 --dtype bf16 --recompute layer --ranks 2 --poison --as trl"),
        "trl sft --model_name_or_path M --dataset_name D --output_dir O --dtype bfloat16 --gradient_checkpointing true --num_processes 2 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 16\n# has no equivalent there: --poison true\n");
    EXPECT_EQ(
        printed(dpo + "--beta 0.2 --train_batch_size 4 --as axolotl"),
        "rl: dpo\nbase_model: M\ndatasets:\n  - path: D\noutput_dir: O\nrl_beta: 0.2\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n");
    EXPECT_EQ(
        printed(rm + "--max_len 64 --as openrlhf"),
        "deepspeed --module openrlhf.cli.train_rm --actor.model_name_or_path M --data.dataset D --ckpt.output_dir O --data.max_len 64\n");
    const std::string theirs =
        "sft --model_name_or_path M --dataset_name D --output_dir O --num_train_epochs 2 --warmup_ratio 0.1";
    EXPECT_EQ(printed(theirs + " --convert"),
              "./train_llama sft --model M --data D --output_dir O --max_epochs 2 --lr_warmup_ratio 0.1\n");
    EXPECT_EQ(printed(theirs + " --as trl"), "trl " + theirs + "\n");
    expect_error(sft + "--as nemo", "--as \"nemo\" is unknown\n  fix: trl, openrlhf or axolotl");
}

// The fix of all problems is one edit: they come together, with the command in our names. Values that must not be taken over are not.
TEST(Options, AllProblemsComeInOneMessage) {
    const std::string said =
        message(words("sft --base_model M --dataset_name D;x --output_dir O --num_train_epochs 3 --warmup_steps 2.5 "
                      "--use_dora --learning_rate x --dtype bfloat16 --max_grad_norm -1 --eos_token E --frobnicate"));
    EXPECT_TRUE(said.starts_with("6 problems:\n--use_dora has no meaning here\n  fix: there are")) << said;
    for (const char *part : {"--learning_rate \"x\" is not a number",
                             "--eos_token \"E\": whether it is the tokenizer's cannot be told before M is here",
                             "unknown flag --frobnicate", "--max_norm is -1.0 but must be 0",
                             "--lr_warmup_steps is 2.5 but must be -1 (as lr_warmup_ratio says), 0, a whole number"})
        EXPECT_NE(said.find(part), said.npos) << part << "\n" << said;
    EXPECT_TRUE(said.ends_with(
        "\n  ./train_llama sft --model M --data 'D;x' --output_dir O --max_epochs 3 --lr_warmup_steps 2.5 --dtype bf16 --max_norm -1"))
        << said;
    EXPECT_EQ(message(words(sft + "--max_len 12x")), "--max_len \"12x\" is not a whole number, 0 or more");
    expect_error("sft", "3 problems:\nsft needs --model DIR");
    expect_error("reward", "rm needs --model DIR");
}

// A hint is a flag whose words the name has; letters alone make none.
TEST(Options, HintsShareWords) {
    for (const char *name : {"ds_type", "weight_dtype", "dataset_speed", "push_to_disk"})
        expect_error(sft + "--" + name + " 1", "lists the flags of sft");
    expect_error(sft + "--max_lenn 4", "did you mean --max_len?");
    expect_error(sft + "--save_step 4", "did you mean --save_steps?");
    expect_error(sft + "--train_batch 4", "did you mean --train_batch_size?");
}

TEST(Options, ValuesOfOthersAreTranslated) {
    EXPECT_EQ(options(sft + "--dtype bfloat16").dtype, "bf16");
    EXPECT_EQ(options(sft + "--dtype float32").dtype, "f32");
    EXPECT_EQ(options(sft + "--max_steps -1").max_steps, 0u);
    EXPECT_NE(notes(sft + "--dtype bfloat16").find("--dtype bfloat16: --dtype bf16"), std::string::npos);
    expect_error(sft + "--dtype float16", "one of auto,f32,bf16");
}

// What is left out means something else than in OpenRLHF, where its names are used.
TEST(Options, DefaultsThatDifferFromOpenRlhfAreListed) {
    const auto differences = [](const std::string &line) {
        const std::string all = notes(line), head = "defaults that differ from OpenRLHF's (in brackets): ";
        const size_t begin = all.find(head);
        return begin == all.npos ? "" : all.substr(begin + head.size(), all.find('\n', begin) - begin - head.size());
    };
    const std::string truncation = "truncation \"drop\" (cut, and the last token replaced by EOS)";
    const std::string stage = "zero_stage 1 (2)", seen = "--ds.zpg 1 ";
    EXPECT_EQ(differences(sft + seen), "max_epochs 1 (2), input_key \"\" (\"input\"), " + truncation +
                                           ", dtype \"auto\" (bf16), row_tokens 2048 (8 samples of max_len), " + stage);
    EXPECT_EQ(differences(dpo + seen), "learning_rate 1e-06 (1e-5), " + truncation +
                                           ", dtype \"auto\" (bf16), row_tokens 1024 (8 pairs of 2 * max_len), ref_mode "
                                           "\"precompute\" (resident), " +
                                           stage);
    EXPECT_EQ(
        differences(rm + seen),
        truncation + ", eval_fraction 0.0 (0.01 without eval_data, of what is trained on), dtype \"auto\" (bf16), " + stage);
    EXPECT_NE(differences("pretrain --preset tiny --data D --output_dir O " + seen).find("learning_rate 0.0003 (5e-6)"),
              std::string::npos);
    EXPECT_EQ(differences("eval --model M --data D " + seen), "dtype \"auto\" (bf16)");
    EXPECT_EQ(differences(dpo + "--adam.lr 1e-5 --train.micro_batch_size 8 --truncation keep --dtype bf16 --ref_mode resident "
                                "--ds.zero_stage 2"),
              "");
    EXPECT_EQ(differences(dpo), "");  // none of its names
}

TEST(Options, DataFlagsAreHandedToPrepare) {
    const Parsed p = parse(words(sft + "--input_key question --multiturn --max_len 64"));
    const std::vector<std::string> want = words(
        "--input_key question --apply_chat_template false --multiturn true --add_bos auto --append_eos true --truncation drop --max_len 64");
    EXPECT_EQ(prepare_flags(p.options, p.task), want);
    const Parsed text = parse(words("pretrain --preset tiny --data D --output_dir O --input_key body"));
    EXPECT_EQ(prepare_flags(text.options, PRETRAIN),
              words("--input_key body --add_bos auto --append_eos true --truncation split --max_len 2048"));
    const Parsed pairs = parse(words(rm + "--chosen_key better --apply_chat_template --dataset_probs 0.7,0.3"));
    EXPECT_EQ(
        prepare_flags(pairs.options, RM),
        words(
            "--apply_chat_template true --chosen_key better --dataset_probs 0.7,0.3 --add_bos auto --append_eos true --truncation drop --max_len 512"));
}
