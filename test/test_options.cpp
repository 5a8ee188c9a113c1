// The command line: each flag is in --help, in the log and in --config, and each mistake is refused with a message.
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../llmc/app/command_line.h"
#include "errors.h"

using nlohmann::ordered_json;

static Parsed parse(const std::vector<std::string> &arguments) { return parse("./train_llama", arguments); }

static std::vector<std::string> words(const std::string &line) {
    std::istringstream in(line);
    return {std::istream_iterator<std::string>(in), {}};
}

static const std::string sft = "sft --model M --data D --output_dir O ";
static const std::string dpo = "dpo --model M --data D --output_dir O ";
static const std::string rm = "rm --model M --data D --output_dir O ";

static std::string help_of(Task task, const std::vector<std::string> &more = {}) {
    std::vector<std::string> all{task_name(task), "--help"};
    all.insert(all.end(), more.begin(), more.end());
    return parse(all).help;
}

static Options options(const std::string &line) { return parse(words(line)).options; }

static std::string message(const std::vector<std::string> &arguments) {
    return error_of([&] { parse(arguments); });
}

static void expect_error(const std::string &line, const std::string &part) {
    SCOPED_TRACE(line);
    expect_contains(message(words(line)), {part, "\n  fix: "});
}

struct ConfigFile : TemporaryFile {
    explicit ConfigFile(const std::string &text) : TemporaryFile("options.json") { write(text); }
};

TEST(Options, DefaultsDependOnTheTask) {
    const std::string pair =
        R"("max_len": 512, "row_tokens": 1024, "train_batch_size": 128, "truncation": "drop", "loss_type": ["sigmoid"])";
    const std::pair<std::string, std::string> defaults[] = {
        {"", R"({"train_batch_size": 64, "overwrite": true})"},
        {"--output_dir mine", R"({"overwrite": false})"},
        {sft, R"({"learning_rate": 5e-6, "truncation": "drop", "train_batch_size": 128, "row_tokens": 2048, "max_len": 2048})"},
        {"pretrain --preset tiny --data D --output_dir O", R"({"learning_rate": 3e-4, "truncation": "split"})"},
        {dpo, R"({"learning_rate": 1e-6, "beta": 0.1, "ref_mode": "auto", "loss_weights": [], )" + pair + "}"},
        {rm, R"({"learning_rate": 9e-6, )" + pair + "}"},
        {"generate --model M --prompt Hi", R"({"max_new_tokens": 128})"},
    };
    for (const auto &[line, options] : defaults) {
        const Parsed parsed = parse(words(line));
        const ordered_json got = to_json(parsed.options, parsed.task), want = ordered_json::parse(options);
        for (const auto &[name, value] : want.items()) EXPECT_EQ(got.at(name), value) << name << " of " << line;
        EXPECT_TRUE(parsed.notes.empty()) << line;
    }
    EXPECT_EQ(parse({}).task, DEMO);
    EXPECT_EQ(parse(words(sft)).task, SFT);
}

TEST(Options, DefaultMaxLenFitsARow) {
    const std::pair<std::string, size_t> lengths[] = {
        {sft + "--row_tokens 512", 512}, {sft + "--row_tokens 4096", 2048}, {"eval --model M --data D --row_tokens 512", 512},
        {"--row_tokens 512", 512},       {dpo + "--row_tokens 300", 150},  // a pair has two answers
        {rm + "--row_tokens 4096", 512}};
    for (const auto &[line, max_len] : lengths) EXPECT_EQ(options(line).max_len, max_len) << line;
    EXPECT_TRUE(parse(words(sft + "--row_tokens 512")).default_max_len);
    EXPECT_FALSE(parse(words(sft + "--max_len 2048")).default_max_len);
    expect_error(sft + "--row_tokens 512 --max_len 2048", "--row_tokens 512 is less than --max_len 2048");
    expect_error(sft + "--row_tokens 1", "--row_tokens 1 is less than --max_len 2");
}

TEST(Options, WaysToWriteAFlag) {
    EXPECT_EQ(options(sft + "--max-len 100").max_len, 100u);
    EXPECT_EQ(options(sft + "--max_len=100").max_len, 100u);
    EXPECT_EQ(options(sft + "--max-len 100 --max_len 200").max_len, 200u);  // the last one wins
    EXPECT_TRUE(options(sft + "--overwrite").overwrite);
    EXPECT_FALSE(options(sft + "--shuffle false").shuffle);
    EXPECT_TRUE(options(sft + "--shuffle=true --overwrite").shuffle);
    EXPECT_EQ(options(sft + "--save_steps -1").save_steps, -1);
    EXPECT_EQ(options(sft + "--learning_rate 2e-5").learning_rate, 2e-5);
    EXPECT_EQ(options(sft + "--adam_betas 0.8,0.9").adam_betas, (Betas{0.8, 0.9}));
    EXPECT_EQ(options(sft + "--adam_betas 0.8 0.9").adam_betas, (Betas{0.8, 0.9}));
    EXPECT_EQ(parse({"generate", "--model", "M", "--prompt=--help = [a, b] {}"}).options.prompt, "--help = [a, b] {}");
    EXPECT_EQ(parse({"sft", "--model", "M", "--data", "D", "--output_dir", "O", "--log", ""}).options.log, "");
    EXPECT_EQ(options(sft + "--seed 18446744073709551615").seed, UINT64_MAX);
}

TEST(Options, EveryFlagIsInHelpAndInTheLog) {
    for (Task task : {DEMO, PRETRAIN, SFT, DPO, RM, GRPO, PPO, EVAL, GENERATE, MERGE}) {
        const std::string help = help_of(task, {"all"}), common = help_of(task);
        const ordered_json json = to_json(default_options(task), task);
        size_t count = 0;
#define OPT(type, name, value, tasks, ...)                                              \
    EXPECT_EQ(help.find("\n  --" #name " ") != help.npos, bool((tasks)&task)) << #name; \
    EXPECT_EQ(json.contains(#name), bool((tasks)&task)) << #name;                       \
    count += bool((tasks)&task);
#include "../llmc/train/options.def"
        EXPECT_EQ(json.size(), count);
        EXPECT_LE(std::count(common.begin(), common.end(), '\n'), 54) << common;
        EXPECT_LE(count, 120) << task_name(task);
    }
    EXPECT_NE(parse({"--help"}).help.find("pretrain, sft, dpo, rm, distill, grpo, ppo, eval, generate, merge"),
              std::string::npos);
    EXPECT_EQ(parse({"--help", "sft", "all"}).help, help_of(SFT, {"all"}));
    EXPECT_EQ(parse({"--help=sft"}).help, help_of(SFT));
    EXPECT_EQ(parse({"sft", "--help=all"}).help, help_of(SFT, {"all"}));
    for (const char *line : {"--help bogus", "--help=bogus"}) expect_error(line, "there is no task \"bogus\"");
    for (const auto &[task, line] : {std::pair{SFT, "\n  --learning_rate 5e-06 "},
                                     {DPO, "\n  --learning_rate 1e-06 "},
                                     {RM, "\n  --max_len 512 "},
                                     {DPO, "\n  --loss_type sigmoid "},
                                     {DPO, "\n  --offload  "}})
        EXPECT_NE(help_of(task).find(line), std::string::npos) << line;
    EXPECT_NE(help_of(SFT, {"all"}).find("\n  --shuffle true "), std::string::npos);
}

TEST(Options, LogRoundTripsThroughConfig) {
    const std::string changed[] = {
        sft +
            "--learning_rate 1.2345678901234567e-5 --adam_betas 0.1,0.7 --max_len 77 --row_tokens 231 --shuffle false --input_template User:{} --recompute layer",
        "pretrain --preset tiny --data D --output_dir O --train_batch_tokens 1000 --seed 18446744073709551615 --eval_fraction 0.127 --resume auto",
        dpo + "--beta 0.3 --row_tokens 3072 --ref_model R --ref_mode resident",
        dpo + "--loss_type sigmoid,sft,hinge --loss_weights 1,0.2,1e-9 --label_smoothing 0.1 --prompt_key question",
        rm + "--loss_type logexp --margin_loss_enable --center_rewards_coefficient 0.01",
        "eval --model M --data D --debug",
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

TEST(Options, ConfigMayHaveAnyFlagAndTheCommandLineWins) {
    const ConfigFile file(
        R"({"model": "M", "data": "D", "max-len": 64, "output_dir": "O", "adam_betas": [0.5, 0.6], "overwrite": true})");
    const Options o = options("sft --max_len 32 --config " + file.path);
    EXPECT_EQ(o.model, "M");
    EXPECT_EQ(o.data, "D");
    EXPECT_EQ(o.max_len, 32u);
    EXPECT_EQ(o.adam_betas, (Betas{0.5, 0.6}));
    EXPECT_TRUE(o.overwrite);

    const ConfigFile wrong(R"({"max_len": "many"})");
    expect_error("sft --config " + wrong.path, "max_len in " + wrong.path + " \"many\" is not a whole number");
    const ConfigFile broken("{");
    expect_error("sft --config " + broken.path, "not valid JSON");
    const ConfigFile twice(R"({"max_len": 64, "max_len": 32})");
    expect_error("sft --config " + twice.path, "\"max_len\" appears twice");
    expect_error("sft --config /nowhere.json", "/nowhere.json: cannot open");
}

TEST(Options, WaysToWriteAList) {
    const Names types = {"sigmoid", "sft"};
    const Numbers weights = {1, 0.2};
    for (const char *flags : {"--loss_type sigmoid,sft --loss_weights 1,0.2", "--loss_type sigmoid sft --loss_weights 1 0.2",
                              "--loss-type=sigmoid,sft --loss-weights=1,0.2"}) {
        EXPECT_EQ(options(dpo + flags).loss_type, types) << flags;
        EXPECT_EQ(options(dpo + flags).loss_weights, weights) << flags;
    }
    for (const char *text : {R"({"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.2]})",
                             R"({"loss_type": "sigmoid,sft", "loss_weights": "1,0.2"})"}) {
        const ConfigFile file(text);
        EXPECT_EQ(options(dpo + "--config " + file.path).loss_type, types);
        EXPECT_EQ(options(dpo + "--config " + file.path).loss_weights, weights);
        EXPECT_EQ(options(dpo + "--loss_type hinge --config " + file.path).loss_type, Names{"hinge"});  // replaces the list
    }
    expect_error(dpo + "--loss_weights 1,high", "--loss_weights \"1,high\" is not numbers with commas between");
    expect_error(dpo + "--loss_type sigmoid,", "--loss_type \"sigmoid,\" is not names with commas between");
    expect_error(dpo + "--loss_weights nan", "is not numbers with commas between");
    expect_error(dpo + "--loss_weights", "--loss_weights needs a value: numbers");
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
    EXPECT_EQ(stop({"--stop", "a", "--seed", "2", "--stop=b c", "--stop", "d"}), (Texts{"a", "b c", "d"}));
    const ConfigFile file(R"({"stop": ["x,y", "z"]})");
    EXPECT_EQ(stop({}, file.path), (Texts{"x,y", "z"}));
    EXPECT_EQ(stop({"--stop", "a"}, file.path), Texts{"a"});  // replaces the list
    auto back = line;
    back.insert(back.end(), {"--stop", "[a,b]", "it's", "--convert"});
    EXPECT_EQ(parse(back).help, "./train_llama generate --model M --prompt Hi --stop '[a,b]' --stop 'it'\\''s'\n");
}

TEST(Options, WrongFlagsAreRefused) {
    expect_error(sft + "--prompts F", "--prompts belongs to generate, not to sft");
    expect_error("dpo --model M --data D --output_dir O --sample_every 1", "--sample_every belongs to pretrain, sft, not to dpo");
    expect_error("generate --model M --prompt Hi --learning_rate 1",
                 "--learning_rate belongs to demo, pretrain, sft, dpo, rm, distill, grpo, ppo, not to generate");
    for (const std::string &task : {sft, rm}) expect_error(task + "--beta 0.2", "--beta belongs to dpo, not to ");
    expect_error(rm + "--ref_model R", "--ref_model belongs to dpo, grpo, ppo, not to rm");
    expect_error(sft + "--max_len", "--max_len needs a value: a whole number");
    expect_error(sft + "--max_len 12x", "--max_len \"12x\" is not a whole number");
    expect_error(sft + "--max_len -5", "--max_len \"-5\" is not a whole number, 0 or more");
    expect_error(sft + "--max_len 010", "is not a whole number");
    expect_error(sft + "--max_len 1e3", "is not a whole number");
    expect_error(sft + "--max_steps=", "--max_steps \"\" is not a whole number");
    expect_error(sft + "--weight_decay=", "is not a number");
    expect_error(sft + "--save_steps=", "is not a number of steps, or a share of all below 1");
    expect_error(sft + "--save_steps inf", "is not a number of steps");
    expect_error(sft + "--learning_rate nan", "is not a number");
    expect_error(sft + "--shuffle maybe", "is not true or false");
    expect_error(sft + "--adam_betas 0.9", "is not two numbers");
    expect_error(sft + "--adam_betas 0.9,0.95,0.99", "is not two numbers");
    expect_error(sft + "--eval_data a b", "more than one value");
    expect_error(sft + "--convert false", "--convert has no value, and \"false\" was given");
    EXPECT_EQ(parse(words(sft + "--convert=true")).help, "./train_llama " + sft.substr(0, sft.size() - 1) + "\n");
    expect_error(sft + "--config=", "--config needs one file\n  fix: --config FILE");
}

TEST(Options, WrongValuesAreRefused) {
    expect_error(sft + "--optimizer sgd", "--optimizer is \"sgd\"\n  fix: use one of adamw,muon");
    expect_error(sft + "--optimizer muon --moments 8bit",
                 "--moments 8bit is for AdamW: Muon's one moment is stored in f32 or bf16\n  fix: --moments bf16, or");
    expect_error(
        sft + "--optimizer muon --offload activations,optimizer",
        "--offload optimizer is for AdamW: Muon's update needs whole matrices\n  fix: leave optimizer out of --offload, or --optimizer adamw");
    EXPECT_EQ(options(sft + "--optimizer muon --moments bf16 --offload activations").optimizer, OptimizerType::muon);
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
    expect_error(sft + "--truncation split", "fix: use one of drop,keep");
    expect_error(sft + "--stopping_strategy concat", "fix: use one of first_exhausted,all_exhausted,");
    expect_error(sft + "--dtype fp8", "fix: use one of auto,f32,tf32,bf16");
    expect_error(sft + "--preset tiny", "--model and --preset were both given");
    expect_error(sft + "--overwrite --resume auto", "were both given");
    expect_error(sft + "--zero_stage 0 --zero_group 2",
                 "--zero_group 2: nothing is divided at --zero_stage 0\n  fix: leave --zero_group out");
    expect_error(sft + "--zero_group 1", "--zero_group 1: nothing is divided in a group of one rank");
    expect_error(sft + "--expert_parallel 0", "--expert_parallel is 0 but must be at least 1");
    expect_error(sft + "--expert_parallel 4 --zero_group 6", "--expert_parallel 4 does not divide --zero_group 6");
    expect_error(sft + "--expert_parallel 2 --load_in 4bit --lora_rank 2", "with --load_in 4bit every rank has all experts");
    expect_error(sft + "--expert_parallel 2 --plan --fit", "which --expert_parallel 2 does not all divide\n  fix: --plan alone");
    expect_error(dpo + "--ref_mode offload", "--ref_mode is \"offload\"\n  fix: use one of auto,precompute,resident");
    expect_error(dpo + "--nll_loss_coef -1", "--nll_loss_coef is -1.0 but must be 0 or more");
    expect_error(rm + "--loss_type hinge", "--loss_type is \"hinge\"\n  fix: use one of sigmoid,logexp");
    expect_error(rm + "--center_rewards_coefficient -1", "must be 0 or more");
    expect_error("generate --model M --prompt Hi --top_p 0", "--top_p is 0.0");
    expect_error("generate --model M --prompt Hi --min_p 1.5", "--min_p is 1.5 but must be 0 (all) to 1");
    expect_error("generate --model M --prompt Hi --repetition_penalty 0", "--repetition_penalty is 0.0 but must be above 0");
    expect_error("generate --model M --prompt Hi --stop", "--stop needs a value: text, at least a character");
    expect_error(sft + "--add_tokens <a> <b> <a>", "--add_tokens has \"<a>\" twice\n  fix: leave one of them out");
    expect_error(sft + "--add_tokens \xff", "--add_tokens \"\\xff\" is not text, at least a character, in UTF-8");
    for (const std::string flag : {"train_batch_size", "max_len", "row_tokens", "max_steps", "max_epochs", "threads", "ranks",
                                   "lora_rank", "train_batch_tokens"})
        for (const std::string count : {"2147483648", "9007199254740992", "4611686018427387904", "18446744073709551615"})
            expect_error(dpo + "--" + flag + " " + count,
                         "--" + flag + " is " + count + " but must be less than 2^31\n  fix: change --" + flag);
    expect_error("grpo --model M --data D --output_dir O --n 70000 --num_episodes 70000",
                 "such that n * num_episodes * max_epochs is less than 2^31");
    expect_error(sft + "--comm_timeout 1e300", "--comm_timeout is 1e+300 but must be above 0 and at most 1e9");
    expect_error("generate --model M --prompt Hi --stop=", "--stop \"\" is not text, at least a character");
    expect_error("sft --data D --output_dir O", "sft needs --model DIR");
    for (const std::string task : {"grpo", "ppo"})  // have no --preset
        expect_error(task + " --data D --output_dir O", task + " needs --model DIR\n");
    expect_error("sft --model M --output_dir O", "sft needs --data FILE");
    expect_error("sft --model M --data D", "sft needs --output_dir DIR");
    expect_error("eval --data D", "eval needs --model DIR");
    expect_error("generate --model M", "generate needs --prompt TEXT");
    EXPECT_TRUE(options("sft --preset tiny --plan").plan);  // a plan needs neither data nor an output directory
    for (const std::string task : {"dpo", "rm"}) {
        expect_error(task + " --data D --output_dir O", task + " needs --model DIR, or --preset NAME");
        expect_error(task + " --preset tiny --data D --output_dir O", task + " needs --model DIR: there is nothing to prefer");
        EXPECT_TRUE(options(task + " --preset tiny --plan").plan);
    }
}

TEST(Options, FlagsWithoutEffectAreRefused) {
    const std::string grpo = "grpo --model M --data D --output_dir O ", given = "grpo --model M --rollouts R --output_dir O ";
    for (const std::string &line : {sft + "--lora_alpha 32",
                                    sft + "--lora_modules_to_save lm_head",
                                    dpo + "--adapter A --use_rslora",
                                    sft + "--offload_dir D",
                                    sft + "--prompt Hi",
                                    sft + "--temperature 1",
                                    std::string("generate --model M --prompt Hi --top_p 0.9"),
                                    std::string("generate --model M --prompt Hi --n 2"),
                                    sft + "--lr_scheduler cosine --min_lr_ratio 0.2",
                                    sft + "--lr_decay_ratio 0.2",
                                    rm + "--lr_scheduler constant --lr_warmup 10",
                                    dpo + "--simpo_gamma 1",
                                    dpo + "--loss_type hinge,sft --label_smoothing 0.1",
                                    grpo + "--kl_use_loss",
                                    grpo + "--no_std_norm",
                                    grpo + "--advantage_estimator rloo --gamma 0.9",
                                    grpo + "--policy_loss_type cispo --dual_clip 3",
                                    grpo + "--normalize_reward",
                                    given + "--reward R",
                                    given + "--num_episodes 2"}) {
        const size_t flag = line.rfind(" --") + 1;
        expect_error(line, line.substr(flag, line.find(' ', flag) - flag) + " has no effect without ");
    }
    options(dpo + "--lora_rank 4 --lora_alpha 32 --loss_type simpo,robust --simpo_gamma 1 --label_smoothing 0.1 --lr_warmup 10");
    options(
        "ppo --model M --data D --output_dir O --no_std_norm --gamma 0.9 --kl_coef 1 --kl_estimator k1 --stop a --temperature 0.9");
}

TEST(Options, OneMessageHasAllProblems) {
    expect_error("show", "2 problems:\nsft needs --model DIR");  // and --data, but no --output_dir
    expect_error("sft", "3 problems:\nsft needs --model DIR");
    const std::string said = message(words(sft + "--learning_rate x --max_norm -1 --lora_dropout 2"));
    EXPECT_TRUE(said.starts_with("3 problems:\n--learning_rate \"x\" is not a number\n")) << said;
    EXPECT_TRUE(said.ends_with("\n  ./train_llama sft --model M --data D --output_dir O --max_norm -1 --lora_dropout 2")) << said;
    EXPECT_EQ(message(words(sft + "--max_len 12x")),
              "--max_len \"12x\" is not a whole number, 0 or more\n  fix: give such a value, or leave it out");
}

TEST(Options, FlagsOfPrepare) {
    const Parsed p = parse(words(sft + "--input_key question --multiturn --max_len 64"));
    const std::vector<std::string> want = words(
        "--input_key question --apply_chat_template false --multiturn true --train_on_prompt false --add_bos auto --append_eos true --truncation drop --max_len 64");
    EXPECT_EQ(prepare_flags(p.options, p.task), want);
    const Parsed text = parse(words("pretrain --preset tiny --data D --output_dir O --input_key body"));
    EXPECT_EQ(prepare_flags(text.options, PRETRAIN),
              words("--input_key body --add_bos auto --append_eos true --truncation split --max_len 2048"));
    const Parsed pairs = parse(
        words(rm + "--chosen_key better --apply_chat_template --dataset_probs 0.7,0.3 --stopping_strategy first_exhausted"));
    EXPECT_EQ(
        prepare_flags(pairs.options, RM),
        words(
            "--apply_chat_template true --chosen_key better --dataset_probs 0.7,0.3 --stopping_strategy first_exhausted --add_bos auto --append_eos true --truncation drop --max_len 512"));
}
