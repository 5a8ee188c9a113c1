#include "open_config.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/gpu.h"
#include "../core/hash.h"
#include "../data/hub.h"
#include "../data/tokenizer.h"
#include "../io/hf.h"
#include "output.h"

namespace fs = std::filesystem;

std::string while_others_wait(const Run &run, bool chosen, const std::function<std::string()> &work) {
    std::string out;
    std::future<std::string> made;
    if (chosen) made = std::async(std::launch::async, work);
    const std::chrono::duration<double> patience(std::min(1.0, run.options.comm_timeout / 4));
    while (!run.comm.all(!chosen || made.wait_for(patience) == std::future_status::ready)) {}
    agree(run.comm, [&] {
        if (chosen) out = made.get();
    });
    return out;
}

static bool is_first_of_host(const Run &run) {
    const auto hosts = run.comm.gather(host_name());
    return size_t(std::find(hosts.begin(), hosts.end(), host_name()) - hosts.begin()) == size_t(run.comm.rank);
}

void find_model(const Run &run, std::string &name) {
    if (run.comm.all(!is_hub_name(name))) return;
    const std::string asked = name;  // one rank downloads the model, and the other ranks then find it in the cache
    while_others_wait(run, is_first_of_host(run), [&] { return model_directory(asked, !run.options.plan); });
    agree(run.comm, [&] { name = model_directory(asked, !run.options.plan); });
    run.say("note: %s is %s", asked.c_str(), name.c_str());
}

void expect_own_family(const Run &run, const ModelConfig &config, const std::string &name) {
    const std::string trainer = config.gpt2() ? "train_gpt2" : "train_llama";
    if (trainer != run.program)
        die("%s is a %s model, which %s does not train\n  fix: use %s", name.c_str(), config.family.c_str(), run.program,
            trainer.c_str());
}

size_t weight_bits(LoadIn load_in) { return load_in == LoadIn::nf4 ? 4 : load_in == LoadIn::int8 ? 8 : 0; }

// Compares config.json with the weights, if the model has any. A head in the file that differs from the embedding means untied weights, even if
// config.json has tied weights, as in transformers 5.
static void compare_with_weights(ModelConfig &config, const std::string &dir, std::vector<std::string> &notes) {
    if (!fs::exists(dir + "/" + model_files.single) && !fs::exists(dir + "/" + model_files.index)) return;
    const HfWeights weights(dir);
    const char *embedding = embedding_name(config);
    if (const TensorInfo *found = weights.find(embedding); found && !found->shape.empty() && found->shape[0] != config.V)
        die("%s/config.json: vocab_size is %zu, but %s has %zu rows\n  fix: write \"vocab_size\": %zu there, or use the config.json that belongs to these weights",
            dir.c_str(), config.V, embedding, found->shape[0], found->shape[0]);
    if (!config.tied || !weights.find(head_name) || !weights.find(embedding) || weights.same(head_name, weights, embedding))
        return;
    config.tied = false;
    config.source["tie_word_embeddings"] = false;
    notes.push_back(format(
        "%s has a %s that differs from its embedding: the matrices are not tied, although config.json says so, as in transformers 5",
        dir.c_str(), head_name));
}

ModelSpec open_config(const Run &run, const std::string &dir) {
    std::vector<std::string> notes;
    ModelSpec model;
    model.dir = model.tokenizer_dir = dir;
    model.config = read_config(dir, notes);
    if (const Options &o = run.options; dir == o.model && (o.rope_theta != 0 || !o.rope_scaling.empty()))
        set_rope(model.config, o.rope_theta, o.rope_scaling);
    compare_with_weights(model.config, dir, notes);
    model.config.weight_bits = weight_bits(run.options.load_in);
    expect_own_family(run, model.config, dir);
    for (const std::string &note : notes) run.say("note: %s", note.c_str());
    if (fs::exists(dir + "/tokenizer.json")) use_tokenizer(run, model, dir);
    return model;
}

void grow_vocabulary(const Run &run, ModelSpec &model, size_t rows, const std::string &whose) {
    if (rows <= model.config.V) return;
    const size_t old = std::exchange(model.config.V, rows);
    model.config.source["vocab_size"] = rows;
    if (!model.grown_from) model.grown_from = old;
    run.say(
        "note: %s has %zu tokens, and the model %zu rows of its embedding and its head: it gets %zu more, each the mean of those",
        whose.c_str(), rows, old, rows - old);
}

void use_tokenizer(const Run &run, ModelSpec &model, const std::string &dir) {
    size_t tokens;
    model.tokenizer_hash = tokenizer_hash(dir + "/tokenizer.json", &tokens);
    model.tokenizer_dir = dir;
    if (run.task & TRAINING || !run.options.adapter.empty()) grow_vocabulary(run, model, tokens, "the tokenizer of " + dir);
}

std::string tokenizer_with_tokens(const Run &run, const std::string &dir) {
    const Texts &tokens = run.options.add_tokens;
    std::string from = dir + "/tokenizer.json", out;
    if (tokens.empty()) return "";
    agree(run.comm, [&] {
        if (dir.empty() || !fs::exists(from))
            die("--add_tokens: %s has no tokenizer.json\n  fix: use a model directory with its tokenizer",
                dir.empty() ? "a --preset" : dir.c_str());
        std::string key = "2 " + tokenizer_hash(from);  // 2: the version of what add_tokens() writes
        for (const std::string &token : tokens) key += "\n" + token;
        out = cache_file("tokenizer-" + hash_of(key));
    });
    while_others_wait(run, is_first_of_host(run) && !fs::exists(out), [&] {
        SelfComm alone;
        write_directory(alone, out, [&](const std::string &to) {
            copy_tokenizer(dir, to);
            add_tokens(from, tokens, to + "/tokenizer.json");
        });
        return out;
    });
    return out;
}

// Returns the number of ranks that divide the experts of a model: the same for all models of a run with experts.
static size_t expert_ranks(const Options &o, const ModelConfig &config, size_t world) {
    const size_t n = o.expert_parallel, experts = config.experts.number;
    if (n == 1 || experts == 0) return 1;
    std::string sizes;
    for (size_t size = 1; size <= std::min(world, experts); size++)
        if (world % size == 0 && experts % size == 0) sizes += format("%s%zu", size > 1 ? ", " : "", size);
    if (world % n || experts % n)
        die("--expert_parallel %zu does not divide %zu %s\n  fix: use one of %s, which divide %zu rank%s and %zu experts", n,
            world % n ? world : experts,
            world % n == 0 ? "experts"
            : world == 1   ? "rank"
                           : "ranks",
            sizes.c_str(), world, world == 1 ? "" : "s", experts);
    return n;
}

Ranks ranks_of(const Run &run, const ModelConfig &config, size_t world, size_t sp) {
    const Options &o = run.options;
    const size_t tp = o.tensor_parallel;
    check_divides("tensor_parallel", int(tp), int(world));
    check_divides("ring_attn_size", int(sp), int(world / tp));
    if (o.zero_group) check_divides("zero_group", int(o.zero_group), int(world), 2);
    Ranks r;
    r.world = world, r.rank = size_t(run.comm.rank), r.sp = sp, r.tp = tp;
    if (const std::string reason = cannot_divide(config, tp); !reason.empty())
        die("--tensor_parallel %zu: this model cannot be divided so: %s\n  fix: a smaller --tensor_parallel, or leave it out", tp,
            reason.c_str());
    r.sp_mode = o.sp_mode;
    r.head_stride = o.ring_attn_head_stride ? o.ring_attn_head_stride : config.KV;
    r.zero_stage = int(o.zero_stage), r.zero_group = o.zero_group;
    r.expert_parallel = expert_ranks(o, config, world);
    // Constants keep runs reproducible: measured rates would choose other layouts, which sum in another order.
    const bool gpu = o.device == Processor::cuda;
    r.flops = gpu ? 4e14 : 5e10, r.bandwidth = gpu ? 5e10 : 5e9;
    if (const auto rates = o.gpu.empty() ? std::nullopt : gpu_rates(o.gpu))
        r.flops = attention_rate(*rates, config.D, o.max_len, false), r.bandwidth = rates->link;
    if (o.ring_attn_head_stride == 0)
        r.head_stride = tp == 1 ? config.KV : 1;  // ranks of a tensor group may have different numbers of heads
    for (size_t rank = 0; rank < tp; rank++) {
        const ModelConfig part = part_of(config, tp, rank);
        check_sp_mode(r.sp_mode, r.sp, part.H, part.KV, r.head_stride);
    }
    return r;
}

// Returns why rows cannot share prompts for this model; empty: they can.
static std::string cannot_share(const Options &o, const ModelConfig &config) {
    if (o.exact) return "with --exact each answer has a copy of the prompt, whose keys are summed in the order of generation";
    if (config.delta.Hk) return "linear attention reads the tokens of a document in their order";
    if (config.rope.by_length(o.row_tokens)) return "the model rotates by the length of each document";
    if (config.lora.dropout > 0) return "--lora_dropout drops other channels in each answer's copy of the prompt";
    if (o.neftune_noise_alpha > 0) return "--neftune_noise_alpha adds other noise to each answer's copy of the prompt";
    return "";
}

bool shares_prompts(const Run &run) {
    const Options &o = run.options;
    if (!(run.task & (PAIRS | RL)) || o.share_prompts == Switch::off) return false;
    std::string reason = cannot_share(o, run.model.config);
    Names beside = {o.ref_model, o.critic_model};  // they read the same rows
    for (const Teacher &teacher : teachers_of(o)) beside.push_back(teacher.model);
    for (const std::string &dir : beside)
        if (reason.empty() && fs::exists(dir + "/config.json")) {
            std::vector<std::string> notes;
            reason = cannot_share(o, read_config(dir, notes));
        }
    if (o.share_prompts == Switch::on && !reason.empty())
        die("--share_prompts true: %s\n  fix: --share_prompts auto", reason.c_str());
    return reason.empty();
}

void expect_exact(const Run &run) {
    const ModelSpec &model = run.model;
    const auto refuse = [](const char *why, const char *fix) { die("--exact: %s\n  fix: %s", why, fix); };
    if (run.options.device == Processor::cuda)
        refuse("on a GPU, products of few and of many tokens sum in different orders", "--device cpu, or leave it out");
    if (model.config.delta.Hk)
        refuse("linear attention sums many tokens at a time in training, and one after another in generation", "leave it out");
    if (model.ranks.sp > 1 && model.ranks.sp_mode != SpMode::ulysses)
        refuse("a rank that receives keys block by block sums them in another order", "--sp_mode ulysses, or leave it out");
}

ModelSpec spec_beside(const Run &run, const std::string &dir, const char *flag) {
    if (dir.empty()) return run.model;
    ModelSpec out;
    agree(run.comm, [&] {
        out = open_config(run, dir);
        const auto refuse = [&](const char *what) {
            die("%s %s has another %s than the trained model\n  fix: use a model that was trained from the same one", flag,
                dir.c_str(), what);
        };
        const ModelSpec &trained = run.model;
        if (out.config.V != trained.config.V) refuse("vocabulary");
        if (!out.tokenizer_hash.empty() && !trained.tokenizer_hash.empty() && out.tokenizer_hash != trained.tokenizer_hash)
            refuse("tokenizer");
        // The models may have different numbers of heads.
        out.ranks = ranks_of(run, out.config, trained.ranks.world, trained.ranks.sp);
    });
    return out;
}
