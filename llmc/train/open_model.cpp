#include "open_model.h"

#include <algorithm>

#include "../core/common.h"
#include "../io/hf.h"
#include "../model/lora.h"
#include "open_config.h"
#include "open_data.h"

// ---- limits ---------------------------------------------------------------------------------------------------------------------------

void set_offload(ModelLimits &limits, const Names &offload) {
    const auto has = [&](const char *name) { return std::ranges::count(offload, name) > 0; };
    Offload &o = limits.offload;
    o.activations = has("activations"), o.optimizer = has("optimizer"), o.weights = has("weights");
}

ModelLimits flag_limits(const Options &o) {
    ModelLimits limits;
    limits.moments = o.moments;
    limits.muon = o.optimizer == OptimizerType::muon;
    limits.bf16_gradients = o.grad_dtype == Dtype::bf16;
    limits.fp8 = o.fp8;
    limits.offload.dir = o.offload_dir, limits.offload.patience = o.comm_timeout;
    set_offload(limits, o.offload);
    return limits;
}

size_t rows_capacity(const Samples &data, size_t row_tokens) {
    return round_up(std::min(row_tokens, data.total_tokens()), row_multiple);
}

ModelLimits limits_for(const Run &run, Mode mode, const Samples &data) {
    const bool answers = run.task & RL || (run.task == DISTILL && run.options.on_policy == 1);
    if (data.total_targets() == 0 && !run.model.config.reward && !answers)
        die("%s holds prompts, and nothing in it is a target\n  fix: prepare it again with data/prepare.py %s",
            data.name().c_str(), run.task == PRETRAIN ? "pretrain" : "sft");
    size_t longest = 0;
    for (size_t i = 0; i < data.documents(); i++) longest = std::max(longest, data.length(i));
    ModelLimits limits = flag_limits(run.options);
    limits.mode = mode;
    limits.row_tokens = rows_capacity(data, run.options.row_tokens);
    limits.positions = std::max(longest, row_multiple);
    limits.share_prompts = run.share_prompts;
    if (run.task & (RL | DISTILL)) limits.temperature = float(run.options.temperature);
    if (mode == Mode::train)
        limits.neftune_alpha = float(run.options.neftune_noise_alpha), limits.graphs = run.options.cuda_graphs;
    return limits;
}

// Tensor cores multiply matrices of 8 bits in tiles of 16.
std::string obstacle_to_fp8(const ModelConfig &c, size_t tensor_ranks) {
    if (c.experts.number) return "multiplies the matrices of dense layers, and this model has experts";
    if (c.delta.Hk) return "multiplies the matrices of attention and feed-forward, and this model has linear attention";
    if (part_of(c, tensor_ranks, 0).part.shares_keys())
        return format("multiplies queries, keys and values by one matrix, and %zu ranks share %zu key heads", tensor_ranks, c.KV);
    for (size_t rank = 0; rank < tensor_ranks; rank++)
        for (Linear matrix : {Linear::qkv, Linear::o, Linear::gate_up, Linear::down})
            if (const auto [IC, OC] = linear_shape(part_of(c, tensor_ranks, rank), matrix); IC % 16 || OC % 16)
                return format(
                    "multiplies matrices whose sizes are multiples of 16, and the layers of this model have one of (%zu, %zu)%s",
                    OC, IC, tensor_ranks > 1 ? format(", the part of one of %zu ranks", tensor_ranks).c_str() : "");
    return "";
}

ModelLimits co_resident_limits(ModelLimits limits, const ModelConfig &config, Mode mode) {
    limits.mode = mode, limits.teacher = {}, limits.head_chunk = least_head_chunk;
    limits.fp8 &= obstacle_to_fp8(config, limits.ranks.tp).empty();
    if (mode == Mode::generate) limits.ranks = limits.ranks.of_generation(), limits.share_prompts = false;
    limits.cache_pages = limits.sequences = limits.sequence_pages = limits.appended = 0;
    return limits;
}

// ---- plans ----------------------------------------------------------------------------------------------------------------------------

size_t usable_memory(const Run &run, const Memory &memory) {
    const size_t free = memory.available();
    return free - std::min(free, memory.reserve(run.model.ranks.communicators()));
}

size_t available_memory(const Run &run) {
    size_t least = 0;
    agree(run.comm, [&] { least = usable_memory(run, *run.device.make_memory()) / run.sharing; });
    for (size_t other : run.comm.gather(least)) least = std::min(least, other);
    return least;
}

struct PlacedModel {
    std::unique_ptr<Model> model;
    bool fits;  // into the memory, with the models beside it
};

static PlacedModel place(const Run &run, const ModelSpec &spec, const ModelLimits &limits, size_t memory) {
    auto model = run.device.make_model(spec.config, limits);
    model->plan().place();
    const bool fits = rank_bytes(run, spec, *model, limits) <= memory;
    return {std::move(model), fits};
}

// Returns the model with the least recomputation that fits, and the smallest chunks of the head.
static PlacedModel place_smallest(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, ModelLimits &limits,
                                  size_t memory) {
    PlacedModel placed{};
    if (limits.mode == Mode::train) limits.teacher = model.teacher;
    limits.head_chunk = least_head_chunk;
    for (Recompute level : recompute_levels) {
        if (level != recompute.value_or(level)) continue;
        limits.recompute = level;
        placed = place(run, model, limits, memory);
        if (placed.fits || limits.mode != Mode::train) break;
    }
    return placed;
}

std::unique_ptr<Model> plan_model(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, ModelLimits &limits,
                                  size_t memory) {
    PlacedModel smallest = place_smallest(run, model, recompute, limits, memory);
    const bool may_grow =
        smallest.fits && limits.ranks.tp == 1;  // ranks of a tensor group need equal chunks, and their plans differ
    for (limits.head_chunk = most_head_chunk; may_grow && limits.head_chunk > least_head_chunk; limits.head_chunk /= 2)
        if (PlacedModel larger = place(run, model, limits, memory); larger.fits) return std::move(larger.model);
    limits.head_chunk = least_head_chunk;
    return std::move(smallest.model);
}

std::unique_ptr<Model> co_resident_model(const Run &run, const CoResidentModel &other, const ModelLimits &limits) {
    auto model = run.device.make_model(other.config, co_resident_limits(limits, other.config, other.mode));
    model->plan().place();
    return model;
}

size_t rank_bytes(const Run &run, const ModelSpec &model, Model &planned, const ModelLimits &limits) {
    size_t bytes = planned.plan().bytes();
    for (const CoResidentModel &other : model.co_residents) bytes += co_resident_model(run, other, limits)->plan().bytes();
    return bytes;
}

size_t rank_store_bytes(const Run &run, const ModelSpec &model, Model &planned, const ModelLimits &limits) {
    size_t bytes = planned.plan().store_bytes();
    for (const CoResidentModel &other : model.co_residents) bytes += co_resident_model(run, other, limits)->plan().store_bytes();
    return bytes;
}

size_t most_tokens(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, ModelLimits limits, size_t memory,
                   size_t limit) {
    const size_t unit = row_multiple * limits.ranks.sp;
    size_t low = 0, high = ceil_div(limit, unit) + 1;  // in units; low fits, high does not
    while (low + 1 < high) {
        const size_t middle = (low + high) / 2;
        limits.row_tokens = limits.positions = middle * unit;
        (place_smallest(run, model, recompute, limits, memory).fits ? low : high) = middle;
    }
    return std::min(low * unit, limit);
}

size_t longest_sample(const Run &run, const ModelSpec &model, Auto<Recompute> recompute, const ModelLimits &limits, size_t memory,
                      size_t limit) {
    const size_t documents = documents_of_sample(run.options, run.task);
    return most_tokens(run, model, recompute, limits, memory, std::min<size_t>(documents * limit, INT32_MAX)) / documents;
}

size_t larger_ring(const Run &run, const ModelSpec &model, ModelLimits limits, size_t memory) {
    Ranks &r = limits.ranks;
    for (r.sp++; r.sp <= r.world; r.sp++) {
        if (r.world % r.sp || (r.sp_mode == SpMode::ulysses && model.config.H % r.sp)) continue;
        if (plan_model(run, model, run.options.recompute, limits, memory)->plan().bytes() <= memory) return r.sp;
    }
    return 0;
}

bool fits(const Run &run, const ModelSpec &model, ModelLimits limits) {
    const size_t memory = available_memory(run) / 20 * 19;
    size_t bytes = 0;
    agree(run.comm, [&] { bytes = plan_model(run, model, Recompute::none, limits, memory)->plan().bytes(); });
    return run.comm.all(bytes <= memory);
}

// Dies because the plan is larger than the memory. The message names the flags to change, with values that fit.
[[noreturn]] static void does_not_fit(const Run &run, const ModelSpec &model, const ModelLimits &limits, Model &planned,
                                      size_t memory) {
    const std::string cause =
        format("the plan needs %s but only %s of memory are free (%s)", human_bytes(planned.plan().bytes()).c_str(),
               human_bytes(memory).c_str(), planned.memory().device().c_str());
    const std::string smaller = run.options.dtype != Dtype::bf16 ? "--dtype bf16, or a smaller model" : "a smaller model";
    const bool keeps_too_much = run.options.recompute.value_or(Recompute::layer) != Recompute::layer;
    const size_t documents = documents_of_sample(run.options, run.task),
                 fits = limits.mode == Mode::generate ? 0
                                                      : most_tokens(run, model, run.options.recompute, limits, memory,
                                                                    documents * model.config.max_positions);
    const size_t ring = larger_ring(run, model, limits, memory);
    const std::string wider = ring ? format("--ring_attn_size %zu (now %zu), ", ring, limits.ranks.sp) : "";
    if (fits == 0)
        die("%s\n  fix: %s%s%s; see --plan", cause.c_str(), wider.c_str(), keeps_too_much ? "--recompute layer, " : "",
            smaller.c_str());
    die("%s\n  fix: %s--row_tokens %zu (now %zu)%s%s, %s; see --plan", cause.c_str(), wider.c_str(), fits, limits.row_tokens,
        fits < documents * limits.positions ? format(" with samples of at most --max_len %zu", fits / documents).c_str() : "",
        keeps_too_much ? ", --recompute layer" : "", smaller.c_str());
}

// ---- weights --------------------------------------------------------------------------------------------------------------------------

void expect_adapter_tensor(const ModelSpec &model, const HfWeights &adapter, const std::string &name,
                           const std::vector<size_t> &shape) {
    const TensorInfo *found = adapter.find(name);
    if (found && found->shape == shape) return;
    if (found)
        die("--adapter %s: its tensor %s has %s and not %s, so it belongs to another model than %s\n  fix: use the model that it was trained on",
            model.adapter.c_str(), name.c_str(), shape_text(found->shape).c_str(), shape_text(shape).c_str(), model.dir.c_str());
    die("--adapter %s: its tensor %s is missing (its first one is %s), so it belongs to another model than %s, or another program has named its tensors\n  fix: use the model that it was trained on, or save it with PEFT's save_pretrained",
        model.adapter.c_str(), name.c_str(), adapter.tensors().empty() ? "none" : adapter.tensors()[0].name.c_str(),
        model.dir.c_str());
}

HfWeights weights_of(const ModelSpec &model) {
    HfWeights weights(model.dir);
    if (model.config.untied) weights.read_as(head_name, embedding_name(model.config));
    if (model.grown_from)
        for (const char *name : {embedding_name(model.config), head_name}) weights.extend(name, model.grown_from, model.config.V);
    return weights;
}

void expect_known_tensors(const Run &run, const ModelSpec &model, const Model &opened, const HfWeights &weights) {
    const ModelConfig &c = model.config;
    std::vector<std::string> names;
    for (const Tensor &t : c.freezes() ? opened.frozen_tensors() : opened.tensors()) names.push_back(t.name);
    if (c.tied || c.reward) names.push_back(head_name);  // the head is the embedding, or a reward model does not use it
    weights.expect_only(names);
    for (const std::string &part : weights.left_out())
        run.say("note: %s in %s is left out: it is neither trained nor saved", part.c_str(), model.dir.c_str());
    if (c.reward && weights.find(head_name))
        run.say("note: %s of %s is left out: a reward model has none", head_name, model.dir.c_str());
    if (c.gpt2()) return weights.expect_buffers({});
    RopeConfig unscaled;
    unscaled.theta = c.rope.theta;
    weights.expect_buffers({inverse_frequencies(c.rope, c.D), inverse_frequencies(unscaled, c.D)});
}

void expect_known_adapter(const ModelSpec &model, const Model &opened, const HfWeights &adapter) {
    std::vector<std::string> names = {embedding_name(model.config), head_name};  // if frozen, these equal the model's
    for (const Tensor &t : opened.tensors()) {
        names.push_back(t.name);
        if (t.init != Tensor::score || adapter.find(t.name)) expect_adapter_tensor(model, adapter, t.name, t.whole_shape());
    }
    adapter.expect_only(names);
}

static void load_weights(const Run &run, const ModelSpec &model, Model &opened) {
    const HfWeights weights = weights_of(model);
    const bool adapts = model.config.lora.rank > 0;
    expect_known_tensors(run, model, opened, weights);
    std::unique_ptr<HfWeights> adapter;
    if (adapts && !model.adapter.empty()) adapter = std::make_unique<HfWeights>(model.adapter, adapter_files);
    const bool has_head = weights.find("score.weight") || (adapter && adapter->find("score.weight"));
    if (model.config.reward && !has_head) {
        if (!model.new_head)
            die("%s has no score.weight, the head of a reward model\n  fix: fetch the model again", model.dir.c_str());
        run.say("the reward head starts from random values: %s has none", model.dir.c_str());
    }
    opened.load(weights, run.options.seed);
    if (!adapter) return;
    expect_known_adapter(model, opened, *adapter);
    opened.load_adapters(*adapter, weights, run.options.seed);
}

// Returns the files that load_weights() reads.
static std::vector<std::string> weight_files(const Run &run, const ModelSpec &model) {
    std::vector<std::string> files;
    agree(run.comm, [&] {
        files = HfWeights(model.dir).paths();
        if (model.config.lora.rank && !model.adapter.empty())
            for (const std::string &path : HfWeights(model.adapter, adapter_files).paths()) files.push_back(path);
    });
    return files;
}

std::unique_ptr<Model> open_model(const Run &run, const ModelSpec &model, ModelLimits limits, bool profile) {
    limits.ranks = limits.mode == Mode::generate ? model.ranks.of_generation() : model.ranks;
    const bool trained = !model.dir.empty() && HfWeights::present(model.dir);
    const size_t memory = available_memory(run);
    expect_same(run, model.dir, trained ? "has weights" : "has none");
    if (trained) expect_same_files(run, weight_files(run, model));
    std::unique_ptr<Model> opened;
    agree(run.comm, [&] {
        if (!trained && model.config.lora.rank)
            die("%s has no weights, and adapters on random weights learn nothing\n  fix: give the directory of a trained model",
                model.dir.c_str());
        if (!trained && limits.mode != Mode::train)
            die("%s has no weights (model.safetensors, or shards with an index)\n  fix: give the directory of a trained model",
                model.dir.c_str());
        opened = plan_model(run, model, run.options.recompute, limits, memory / 20 * 19);
        if (opened->plan().bytes() > memory) does_not_fit(run, model, limits, *opened, memory);
        if (profile) opened->profile();
        opened->allocate(*run.mesh, false, run.options.debug);
        if (trained) load_weights(run, model, *opened);
    });
    if (trained) return opened;
    if (!model.dir.empty())
        run.say("note: %s has no weights (model.safetensors, or shards with an index), so training starts from random ones",
                model.dir.c_str());
    opened->initialise(run.options.seed);
    return opened;
}
