#include "tasks.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/file.h"
#include "../data/python.h"
#include "../data/tokenizer.h"
#include "../io/hf.h"
#include "../model/lora.h"
#include "../train/continuation.h"
#include "../train/distillation.h"
#include "../train/objective.h"
#include "../train/open_config.h"
#include "../train/open_data.h"
#include "../train/output.h"
#include "../train/reward.h"
#include "plan.h"

// PEFT also saves the embedding and the head if they were resized. Both are then trained with the adapters.
static void add_saved_modules(Run &run) {
    ModelConfig &config = run.model.config;
    LoraConfig lora = config.lora;
    if (HfWeights::present(run.model.dir) && std::filesystem::exists(run.model.adapter + "/" + adapter_files.single)) {
        const HfWeights weights(run.model.dir), adapter(run.model.adapter, adapter_files);
        const char *const embedding = embedding_name(config);
        const auto adds = [&](const char *name, bool &trained) {
            const TensorInfo *found = adapter.find(name);
            if (!found) return;
            if (!found->shape.empty()) grow_vocabulary(run, run.model, found->shape[0], "the adapter " + run.model.adapter);
            const std::string own = weights.find(name) ? name : embedding;
            trained = trained || (weights.find(own) && !adapter.same(name, weights, own));
        };
        adds(embedding, lora.embedding);
        if (!config.reward) adds(head_name, lora.head);
    }
    set_lora(config, lora);
}

// Reads the configuration of --adapter, which may make a language model a reward model, and its description of answers: end tokens and chat template.
static void open_adapter(Run &run) {
    const std::string &dir = run.options.adapter;
    bool reward = false;
    std::vector<std::string> notes;
    const LoraConfig lora = read_lora(dir, run.model.config, reward, notes);
    for (const std::string &note : notes) run.say("note: %s", note.c_str());
    if (reward && !(run.task & (RM | EVAL | MERGE)))
        die("--adapter %s belongs to a reward model, which has no head for %s\n  fix: use an adapter of a language model, or the task rm or eval",
            dir.c_str(), task_name(run.task));
    if (reward && !run.model.config.reward) make_reward(run.model.config);
    read_generation_config(run.model.config, dir);
    run.model.adapter = dir;
    if (const std::string tokenizer = dir + "/tokenizer.json"; std::filesystem::exists(tokenizer)) {
        size_t tokens = 0, own = 0;
        const bool same = tokenizer_hash(tokenizer, &tokens) == run.model.tokenizer_hash;
        if (!run.model.tokenizer_dir.empty()) tokenizer_hash(run.model.tokenizer_dir + "/tokenizer.json", &own);
        if (same || tokens > own) use_tokenizer(run, run.model, dir);
    }
    run.model.config.lora = lora;
    add_saved_modules(run);
}

// Returns the configuration to train or to use.
static void open_model_config(Run &run, const std::string &tokenizer) {
    const Options &o = run.options;
    if (o.preset.empty()) {
        run.model = open_config(run, run.task == DEMO ? program_file("data/demo/model") : o.model);
        if (!tokenizer.empty()) use_tokenizer(run, run.model, tokenizer);
    } else {
        run.model.config = preset(o.preset);
        if (o.rope_theta != 0 || !o.rope_scaling.empty()) set_rope(run.model.config, o.rope_theta, o.rope_scaling);
        run.model.config.weight_bits = weight_bits(o.load_in);
        expect_own_family(run, run.model.config, "--preset " + o.preset);
    }
    if (run.model.config.reward && !(run.task & (RM | EVAL | MERGE)))
        die("%s is a reward model, which has no head for %s\n  fix: use a language model, or the task rm or eval",
            run.model.dir.c_str(), task_name(run.task));
    if (o.router_aux_loss_coef >= 0) {
        if (run.model.config.experts.number == 0 && o.router_aux_loss_coef > 0)
            die("--router_aux_loss_coef %g keeps experts in balance, but this model is not a mixture of experts\n  fix: leave it out",
                o.router_aux_loss_coef);
        run.model.config.experts.aux_loss_coef = o.router_aux_loss_coef;
    }
    run.model.new_head = run.task == RM;
    if (run.model.new_head && !run.model.config.reward) make_reward(run.model.config);
    if (const std::string name = missing_reward_class(run.model.config); run.task == RM && !name.empty())
        run.say("note: transformers has no %s: the reward model opens in this program alone, in rm, eval and --reward",
                name.c_str());
    if (!o.adapter.empty()) open_adapter(run);
    if (o.lora_rank) {
        LoraConfig lora = {o.lora_rank, o.lora_alpha, o.lora_dropout, o.use_rslora,
                           without_expressions(run.model.config, o.lora_targets)};
        if (const std::string name = read_modules(lora, o.lora_modules_to_save); !name.empty())
            die("--lora_modules_to_save has \"%s\", but only the embedding and the head are trained in full together with adapters\n  fix: embed_tokens, lm_head, or both",
                name.c_str());
        if (lora.head && run.model.config.reward)
            die("--lora_modules_to_save has lm_head, but a reward model has none\n  fix: leave it out; its own head, score, is always trained");
        if (run.model.grown_from && !(lora.embedding && (lora.head || run.model.config.reward)))
            run.say("note: adapters leave the new rows as they are: --lora_modules_to_save embed_tokens,lm_head trains them");
        set_lora(run.model.config, lora);
        check_lora(run.model.config, run.model.dir);
        if (o.rope_theta != 0 || !o.rope_scaling.empty())
            run.say(
                "note: an adapter does not hold --rope_theta and --rope_scaling: give them to merge, which writes them to config.json, or set them in the model's");
    }
}

// Ranks that were started with different flags would wait for each other, or worse.
static void check_same_options(const Run &run) {
    const auto own = to_json(run.options, run.task);
    const std::string text = own.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // a path need not be UTF-8
    const auto all = run.comm.gather(std::string(task_name(run.task)) + " " + text);
    agree(run.comm, [&] {
        for (size_t r = 1; r < all.size(); r++) {
            if (all[r] == all[0]) continue;
            const auto of = [&](size_t rank) { return nlohmann::json::parse(all[rank].substr(all[rank].find('{'))); };
            const auto here = of(0), there = of(r);
            for (const auto &[name, value] : here.items())
                if (name != "rank" && name != "threads" && there.contains(name) && there[name] != value)
                    die("rank 0 was started with --%s %s, rank %zu with %s\n  fix: start every rank with the same command",
                        name.c_str(), value.dump().c_str(), r, there[name].dump().c_str());
            if (here.size() != there.size())
                die("rank 0 was started for another task than rank %zu\n  fix: start every rank with the same command", r);
        }
    });
}

// Prints the first samples of the training data. Only the main rank has work.
static int show(const Run &run) {
    const Options &o = run.options;
    const std::string data = prepared_file(run, run.task, "data", o.data, prepare_flags(o, run.task));
    open_data(run, data);  // checks it
    if (run.model.tokenizer_hash.empty())
        die("%s has tokens, whose texts only a tokenizer knows\n  fix: --model DIR with a tokenizer.json", o.data.c_str());
    if (!run.is_main_rank()) return 0;
    return call_python(std::string(run.program) + " show", "data/show.py",
                       {data, run.model.tokenizer_dir, std::to_string(o.max_samples)});
}

int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const Device &device) {
    Run run{program, parsed.task, parsed.options, comm, sharing, device};
    check_same_options(run);
    comm.check = run.options.debug;
    for (std::string *name : {&run.options.model, &run.options.ref_model, &run.options.critic_model}) find_model(run, *name);
    const std::vector<Teacher> teachers = teachers_of(run.options);
    for (size_t i = 0; i < teachers.size(); i++) {
        std::string model = teachers[i].model;
        find_model(run, model);
        run.options.teacher_model[i] = teachers[i].name.empty() ? model : teachers[i].name + "=" + model;
    }
    for (std::string &name : run.options.reward)
        if (is_model_reward(name)) find_model(run, name);
    const std::string tokenizer = tokenizer_with_tokens(run, run.options.model);
    agree(comm, [&] {
        const Options &o = run.options;
        const size_t planned = std::max({o.ranks, size_t(started_by_hand(o).processes), size_t(comm.size)});
        const size_t world = o.fit    ? std::max(o.tensor_parallel, o.zero_group)
                             : o.plan ? planned
                                      : size_t(comm.size),
                     demo = world / o.tensor_parallel % 2 ? 1 : 2;
        open_model_config(run, tokenizer);
        if (run.is_main_rank()) check_results(run);
        if (parsed.default_max_len) run.options.max_len = std::min(o.max_len, run.model.config.max_positions);
        if (o.expert_parallel > 1 && run.model.config.experts.number == 0)
            die("--expert_parallel %zu divides experts, and this model has none\n  fix: leave it out", o.expert_parallel);
        run.model.ranks = ranks_of(run, run.model.config, world, o.fit ? 1 : o.ring_attn_size ? o.ring_attn_size : demo);
        if (o.exact) expect_exact(run);
        if (const std::string obstacle = obstacle_to_fp8(run.model.config, o.tensor_parallel); o.fp8 && !obstacle.empty())
            die("--fp8 %s\n  fix: leave --fp8 out", obstacle.c_str());
        run.share_prompts = shares_prompts(run);
    });
    if (parsed.show) return show(run);
    if (run.task == DISTILL) run.model.teacher = teacher_shape(run);
    if (run.options.plan) agree(comm, [&] { run.model.co_residents = make_objective(run)->co_residents(); });
    std::optional<Continuation> continuation;
    if (run.options.plan && run.options.sample_every) continuation.emplace(run);
    if (run.options.plan && !run.is_main_rank()) return 0;
    if (run.options.plan) return run.options.fit ? print_fit(run) : print_plan(run, continuation);
    if (const std::string &dir = run.model.dir; !dir.empty())
        expect_same_files(run, {dir + "/config.json", dir + "/tokenizer.json"});
    const auto processes = comm.gather(format("%s %d", host_name().c_str(), int(getpid())));
    run.in_process = size_t(std::count(processes.begin(), processes.end(), processes[size_t(comm.rank)]));
    const Ranks &ranks = run.model.ranks;
    run.mesh = std::make_shared<Mesh>(comm, int(ranks.sp), int(ranks.zero_group), int(ranks.expert_parallel), int(ranks.tp));
    if (comm.size > 1) run.say("%s", mesh_line(run.model.ranks).c_str());
    if (const std::string note = ring_across_hosts(comm.gather(host_name()), int(run.model.ranks.sp)); !note.empty())
        run.say("note: %s", note.c_str());
    switch (run.task) {
        case EVAL: return evaluate(run);
        case GENERATE: return generate(run);
        case MERGE: return merge(run);
        default: return train(run);
    }
}
