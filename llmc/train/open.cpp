#include "open.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/gpu.h"
#include "../data/hub.h"
#include "../data/prepare.h"
#include "../data/tokenizer.h"
#include "../io/hf.h"
#include "fit.h"
#include "rollouts.h"

namespace fs = std::filesystem;

// `own` identifies a rank's view of the file: equal for equal contents.
static void expect_same(const Run &run, const std::string &path, const std::string &own) {
    const auto all = run.comm.gather(own);
    agree(run.comm, [&] {
        for (size_t r = 1; r < all.size(); r++)
            if (all[r] != all[0])
                die("%s is not the same file for rank 0 and for rank %zu\n  fix: the same files on all hosts", path.c_str(), r);
    });
}

void expect_same_files(const Run &run, const std::vector<std::string> &paths) {
    if (run.comm.size == 1) return;
    const std::string process = format("%s %d", host_name().c_str(), int(getpid()));
    const auto processes = run.comm.gather(process);
    const size_t first = size_t(std::find(processes.begin(), processes.end(), process) - processes.begin());
    for (const std::string &path : paths) {
        std::string own;
        agree(run.comm, [&] {
            if (first == size_t(run.comm.rank)) own = fs::exists(path) ? fingerprint(InputFile(path)) : "none";
        });
        const auto all = run.comm.gather(own);
        expect_same(run, path, all[first]);
    }
}

// Returns what `work` returns on the ranks that are `chosen`, and nothing on the others, which are told that it goes on: it may take longer than
// --comm_timeout.
static std::string while_others_wait(const Run &run, bool chosen, const std::function<std::string()> &work) {
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

std::string prepared_file(const Run &run, Task task, const std::string &flag, const std::string &path,
                          const std::vector<std::string> &extra) {
    const std::string kind = task == PRETRAIN   ? "pretrain"
                             : task == GENERATE ? "prompts"
                             : task & PAIRS     ? "pref"
                             : task & RL        ? "rl"
                                                : "sft";
    const TokenMeaning meaning{run.tokenizer_dir, run.tokenizer_hash, run.config.V, run.config.eos};
    std::string out = while_others_wait(run, run.is_main_rank(), [&] { return prepare(meaning, kind, flag, path, extra); });
    return run.comm.gather(out)[0];
}

void find_model(const Run &run, std::string &name) {
    if (run.comm.all(!is_hub_name(name))) return;
    const auto hosts =
        run.comm.gather(host_name());  // the first rank of each downloads, the others then find the model in the cache
    const bool first = size_t(std::find(hosts.begin(), hosts.end(), host_name()) - hosts.begin()) == size_t(run.comm.rank);
    const std::string asked = name;
    while_others_wait(run, first, [&] { return model_directory(asked, !run.options.plan); });
    agree(run.comm, [&] { name = model_directory(asked, !run.options.plan); });
    run.say("note: %s is %s", asked.c_str(), name.c_str());
}

void expect_own_family(const Run &run, const std::string &name) {
    const std::string trainer = run.config.gpt2() ? "train_gpt2" : "train_llama";
    if (trainer != run.program)
        die("%s is a %s model, which %s does not train\n  fix: ./%s", name.c_str(), run.config.family.c_str(), run.program,
            trainer.c_str());
}

void set_weight_bits(Run &run) {
    const std::string &bits = run.options.load_in;
    run.config.weight_bits = bits == "4bit" ? 4 : bits == "8bit" ? 8 : 0;
}

static const char *embedding_of(const ModelConfig &config) {
    return config.gpt2() ? "transformer.wte.weight" : "model.embed_tokens.weight";
}
static const char *const head_name = "lm_head.weight";

// A file with a head that is not the embedding is of a model that is not tied, whatever its config.json says, as in transformers 5.
static void untie(ModelConfig &config, const std::string &dir, std::vector<std::string> &notes) {
    if (!config.tied || (!fs::exists(dir + "/" + model_files.single) && !fs::exists(dir + "/" + model_files.index))) return;
    const HfWeights weights(dir);
    const char *embedding = embedding_of(config);
    if (!weights.find(head_name) || !weights.find(embedding) || weights.same(head_name, weights, embedding)) return;
    config.tied = false;
    config.source["tie_word_embeddings"] = false;
    notes.push_back(
        format("%s has a %s that is not its embedding: the two are not tied, though config.json says so, as in transformers 5",
               dir.c_str(), head_name));
}

void open_config(Run &run, const std::string &dir) {
    std::vector<std::string> notes;
    run.model_dir = run.tokenizer_dir = dir;
    run.config = read_config(dir, notes);
    if (const Options &o = run.options; dir == o.model && (o.rope_theta != 0 || !o.rope_scaling.empty()))
        set_rope(run.config, o.rope_theta, o.rope_scaling);
    untie(run.config, dir, notes);
    set_weight_bits(run);
    expect_own_family(run, dir);
    for (const std::string &note : notes) run.say("note: %s", note.c_str());
    const std::string tokenizer = dir + "/tokenizer.json";
    run.tokenizer_hash = fs::exists(tokenizer) ? tokenizer_hash(tokenizer) : "";
}

// `sp` of them in a ring.
Ranks ranks_of(const Run &run, size_t world, size_t sp) {
    const Options &o = run.options;
    check_divides("ring_attn_size", int(sp), int(world));
    if (o.zero_group) check_divides("zero_group", int(o.zero_group), int(world), 2);
    Ranks r;
    r.world = world, r.rank = size_t(run.comm.rank), r.sp = sp;
    r.sp_mode = o.sp_mode == "ring" ? SpMode::ring : o.sp_mode == "gather" ? SpMode::gather : SpMode::ulysses;
    r.head_stride = o.ring_attn_head_stride ? o.ring_attn_head_stride : run.config.KV;
    r.zero_stage = int(o.zero_stage), r.zero_group = o.zero_group;
    // Constants, so that runs stay reproducible: measured rates would choose other layouts, which sum in another order.
    const bool gpu = o.device == "cuda";
    r.flops = gpu ? 4e14 : 5e10, r.bandwidth = gpu ? 5e10 : 5e9;
    if (const auto rates = o.gpu.empty() ? std::nullopt : gpu_rates(o.gpu))
        r.flops = rates->attention * attention_share(run.config.D, o.max_len), r.bandwidth = rates->link;
    check_sp_mode(r.sp_mode, r.sp, run.config.H, run.config.KV, r.head_stride);
    return r;
}

void expect_positions(const Run &run, const Samples &data) {
    const size_t most = run.config.max_positions;
    for (size_t i = 0; i < data.documents(); i++)
        if (data.length(i) > most)
            die("document %zu of %s has %zu tokens but %s of %s is %zu\n  fix: prepare with --max_len %zu%s", i,
                data.name().c_str(), data.length(i), run.config.positions_name(),
                (run.model_dir.empty() ? run.options.preset : run.model_dir).c_str(), most, most,
                run.config.gpt2() ? "" : ", or --rope_scaling");
}

std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path) {
    std::unique_ptr<PreparedData> data;
    agree(run.comm, [&] {
        data = std::make_unique<PreparedData>(path, run.config.V, run.tokenizer_hash);
        if ((run.task & (PRETRAIN | SFT | PAIRS | RL)) && data->pairs() != ((run.task & PAIRS) != 0))
            die("%s is of kind %s, but %s trains on %s\n  fix: %s", path.c_str(), data->kind().c_str(), task_name(run.task),
                run.task & PAIRS ? "pairs" : "single documents",
                run.task & PAIRS ? "prepare pairs with data/prepare.py pref" : "the task dpo or rm, or other data");
        expect_positions(run, *data);
    });
    expect_same(run, path, data->fingerprint());
    return data;
}

std::unique_ptr<Samples> open_samples(const Run &run, const std::string &path) {
    if (run.options.rollouts.empty()) return open_data(run, path);
    expect_same_files(run, {path});
    std::unique_ptr<Rollouts> rollouts;
    agree(run.comm, [&] {
        rollouts = std::make_unique<Rollouts>(path, run.config.V);
        expect_positions(run, *rollouts);
    });
    return rollouts;
}

size_t rows_capacity(const Samples &data, size_t row_tokens) {
    return round_up(std::min(row_tokens, data.total_tokens()), row_multiple);
}

ModelLimits limits_for(const Run &run, Mode mode, const Samples &data) {
    if (data.total_targets() == 0 && !run.config.reward && !(run.task & RL))
        die("%s holds prompts, and nothing in it is a target\n  fix: prepare it again with data/prepare.py %s",
            data.name().c_str(), run.task == PRETRAIN ? "pretrain" : "sft");
    size_t longest = 0;
    for (size_t i = 0; i < data.documents(); i++) longest = std::max(longest, data.length(i));
    ModelLimits limits;
    limits.mode = mode;
    limits.row_tokens = rows_capacity(data, run.options.row_tokens);
    limits.positions = std::max(longest, row_multiple);
    if (run.task & RL) limits.temperature = float(run.options.temperature);
    if (mode == Mode::train)
        limits.neftune_alpha = float(run.options.neftune_noise_alpha), limits.graphs = run.options.cuda_graphs;
    return limits;
}

// Dies because the plan is larger than the memory, and says what to change, and by how much.
[[noreturn]] static void does_not_fit(const Run &run, const ModelLimits &limits, Model &model, size_t memory) {
    const std::string cause =
        format("the plan needs %s but only %s of memory are free (%s)", human_bytes(model.plan().bytes()).c_str(),
               human_bytes(memory).c_str(), model.memory().device().c_str());
    const std::string smaller = run.options.dtype == "f32" ? "--dtype bf16, or a smaller model" : "a smaller model";
    const bool keeps_too_much = run.options.recompute != "auto" && run.options.recompute != "layer";
    const size_t documents = documents_of_sample(run),
                 fits = limits.mode == Mode::generate
                            ? 0
                            : most_tokens(run, run.options.recompute, limits, memory, documents * run.config.max_positions);
    const size_t ring = larger_ring(run, limits, memory);
    const std::string wider = ring ? format("--ring_attn_size %zu (now %zu), ", ring, limits.ranks.sp) : "";
    if (fits == 0)
        die("%s\n  fix: %s%s%s; see --plan", cause.c_str(), wider.c_str(), keeps_too_much ? "--recompute layer, " : "",
            smaller.c_str());
    die("%s\n  fix: %s--row_tokens %zu (now %zu)%s%s, %s; see --plan", cause.c_str(), wider.c_str(), fits, limits.row_tokens,
        fits < documents * limits.positions ? format(" with samples of at most --max_len %zu", fits / documents).c_str() : "",
        keeps_too_much ? ", --recompute layer" : "", smaller.c_str());
}

size_t available_memory(const Run &run) {
    size_t least = 0;
    agree(run.comm, [&] { least = usable_memory(run, run.make_model(run.config, {})->memory()) / run.sharing; });
    for (size_t other : run.comm.gather(least)) least = std::min(least, other);
    return least;
}

// A tensor of another shape, or one that is missing, means that the adapter belongs to another model.
void expect_adapter_tensor(const Run &run, const HfWeights &adapter, const std::string &name, const std::vector<size_t> &shape) {
    const TensorInfo *found = adapter.find(name);
    if (found && found->shape == shape) return;
    die("--adapter %s: its tensor %s %s, so it belongs to another model than %s\n  fix: the model that it was trained on",
        run.options.adapter.c_str(), name.c_str(),
        found ? format("has %s and not %s", shape_text(found->shape).c_str(), shape_text(shape).c_str()).c_str() : "is missing",
        run.model_dir.c_str());
}

void expect_known_tensors(const Run &run, const Model &model, const HfWeights &weights) {
    const ModelConfig &c = run.config;
    std::vector<std::string> names;
    for (const Tensor &t : c.freezes() ? model.frozen_tensors() : model.tensors()) names.push_back(t.name);
    if (c.tied || c.reward) names.push_back(head_name);  // is the embedding, or not used by a reward model
    weights.expect_only(names);
    if (c.reward && weights.find(head_name))
        run.say("note: %s of %s is left out: a reward model has none", head_name, run.model_dir.c_str());
    if (c.gpt2()) return weights.expect_buffers({});
    RopeConfig unscaled;
    unscaled.theta = c.rope.theta;
    weights.expect_buffers({inverse_frequencies(c.rope, c.D), inverse_frequencies(unscaled, c.D)});
}

// PEFT also saves the embedding and the head with adapters if asked to, or if they were resized.
void expect_known_tensors(const Run &run, const Model &model, const HfWeights &weights, const HfWeights &adapter) {
    std::vector<std::string> names;
    for (const Tensor &t : model.tensors()) {
        names.push_back(t.name);
        if (t.init != Tensor::score || adapter.find(t.name)) expect_adapter_tensor(run, adapter, t.name, t.shape);
    }
    const std::string embedding = embedding_of(run.config);
    for (const std::string &name : {embedding, std::string(head_name)}) {
        names.push_back(name);
        const std::string own = weights.find(name) ? name : embedding;
        if (adapter.find(name) && weights.find(own) && !adapter.same(name, weights, own))
            die("--adapter %s: its tensor %s is not that of %s, whose adapters alone are read\n  fix: merge the adapter with PEFT (merge_and_unload)",
                run.options.adapter.c_str(), name.c_str(), run.model_dir.c_str());
    }
    adapter.expect_only(names);
}

static void load_weights(const Run &run, Model &model) {
    const HfWeights weights(run.model_dir);
    const bool adapts = run.config.lora.rank > 0;
    expect_known_tensors(run, model, weights);
    std::unique_ptr<HfWeights> adapter;
    if (adapts && !run.options.adapter.empty()) adapter = std::make_unique<HfWeights>(run.options.adapter, adapter_files);
    const bool has_head = weights.find("score.weight") || (adapter && adapter->find("score.weight"));
    if (run.config.reward && !has_head) {
        if (!run.new_head)
            die("%s has no score.weight, the head of a reward model\n  fix: fetch the model again", run.model_dir.c_str());
        run.say("the reward head starts from random values: %s has none", run.model_dir.c_str());
    }
    model.load(weights, run.options.seed);
    if (!adapter) return;
    expect_known_tensors(run, model, weights, *adapter);
    model.load_adapters(*adapter, run.options.seed);
}

// Returns the files that load_weights() reads.
static std::vector<std::string> files_of_weights(const Run &run) {
    std::vector<std::string> files;
    agree(run.comm, [&] {
        files = HfWeights(run.model_dir).paths();
        if (run.config.lora.rank && !run.options.adapter.empty())
            for (const std::string &path : HfWeights(run.options.adapter, adapter_files).paths()) files.push_back(path);
    });
    return files;
}

std::unique_ptr<Model> open_model(const Run &run, ModelLimits limits) {
    if (limits.mode != Mode::generate) limits.ranks = run.ranks;
    const bool trained = !run.model_dir.empty() && HfWeights::present(run.model_dir);
    const size_t memory = available_memory(run);
    expect_same(run, run.model_dir, trained ? "has weights" : "has none");
    if (trained) expect_same_files(run, files_of_weights(run));
    std::unique_ptr<Model> model;
    agree(run.comm, [&] {
        if (!trained && run.config.lora.rank)
            die("%s has no weights, and adapters of random weights learn nothing\n  fix: the directory of a trained model",
                run.model_dir.c_str());
        if (!trained && limits.mode != Mode::train)
            die("%s has no weights (model.safetensors, or shards with an index)\n  fix: the directory of a trained model",
                run.model_dir.c_str());
        model = plan_model(run, run.options.recompute, limits, memory / 20 * 19);
        if (model->plan().bytes() > memory) does_not_fit(run, limits, *model, memory);
        if (run.options.profile) model->profile();
        model->allocate(*run.mesh, false, run.options.debug);
        if (trained) load_weights(run, *model);
    });
    if (!trained) model->initialise(run.options.seed);
    return model;
}
