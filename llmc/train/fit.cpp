#include "fit.h"

#include <algorithm>

#include "../core/common.h"
#include "open.h"

size_t usable_memory(const Run &run, const Memory &memory) {
    const size_t free = memory.available();
    return free - std::min(free, memory.reserve(run.ranks.communicators()));
}

static Offload offload_of(const Options &o) {
    const auto has = [&](const char *name) { return std::ranges::count(o.offload, name) > 0; };
    return {.activations = has("activations"),
            .optimizer = has("optimizer"),
            .weights = has("weights"),
            .dir = o.offload_dir,
            .patience = o.comm_timeout};
}

ModelLimits co_resident_limits(ModelLimits limits, Mode mode) {
    limits.mode = mode;
    if (mode == Mode::generate) limits.ranks = {};
    limits.cache_pages = limits.sequences = limits.sequence_pages = 0;
    return limits;
}

std::unique_ptr<Model> co_resident_model(const Run &run, const CoResidentModel &other, const ModelLimits &limits) {
    auto model = run.make_model(other.config, co_resident_limits(limits, other.mode));
    model->plan().place();
    return model;
}

size_t rank_bytes(const Run &run, Model &model, const ModelLimits &limits) {
    size_t bytes = model.plan().bytes();
    for (const CoResidentModel &other : run.co_residents) bytes += co_resident_model(run, other, limits)->plan().bytes();
    return bytes;
}

size_t rank_store_bytes(const Run &run, Model &model, const ModelLimits &limits) {
    size_t bytes = model.plan().store_bytes();
    for (const CoResidentModel &other : run.co_residents) bytes += co_resident_model(run, other, limits)->plan().store_bytes();
    return bytes;
}

std::unique_ptr<Model> plan_model(const Run &run, const std::string &recompute, ModelLimits &limits, size_t memory) {
    std::unique_ptr<Model> model;
    for (auto [name, level] : recompute_levels) {
        if (recompute != "auto" && recompute != name) continue;
        const std::string &moments = run.options.moments;
        limits.recompute = level;
        limits.moments = moments == "bf16" ? Moments::bf16 : moments == "8bit" ? Moments::blockwise : Moments::f32;
        limits.muon = run.options.optimizer == "muon";
        limits.bf16_gradients = run.options.grad_dtype == "bf16";
        limits.tile_tokens = run.options.tile_tokens;
        limits.offload = offload_of(run.options);
        model = run.make_model(run.config, limits);
        model->plan().place();
        if (rank_bytes(run, *model, limits) <= memory || limits.mode != Mode::train) break;
    }
    return model;
}

size_t most_tokens(const Run &run, const std::string &recompute, ModelLimits limits, size_t memory, size_t limit) {
    const size_t unit = row_multiple * limits.ranks.sp;
    size_t low = 0, high = ceil_div(limit, unit) + 1;  // in units: low fits, high does not
    while (low + 1 < high) {
        const size_t middle = (low + high) / 2;
        limits.row_tokens = limits.positions = middle * unit;
        const auto model = plan_model(run, recompute, limits, memory);
        (rank_bytes(run, *model, limits) <= memory ? low : high) = middle;
    }
    return std::min(low * unit, limit);
}

size_t documents_of_sample(const Run &run) { return run.task & PAIRS ? 2 : 1; }

size_t longest_sample(const Run &run, const std::string &recompute, const ModelLimits &limits, size_t memory, size_t limit) {
    const size_t documents = documents_of_sample(run);
    return most_tokens(run, recompute, limits, memory, std::min<size_t>(documents * limit, INT32_MAX)) / documents;
}

size_t larger_ring(const Run &run, ModelLimits limits, size_t memory) {
    Ranks &r = limits.ranks;
    for (r.sp++; r.sp <= r.world; r.sp++) {
        if (r.world % r.sp || (r.sp_mode == SpMode::ulysses && run.config.H % r.sp)) continue;
        if (plan_model(run, run.options.recompute, limits, memory)->plan().bytes() <= memory) return r.sp;
    }
    return 0;
}

bool fits(const Run &run, ModelLimits limits) {
    const size_t memory = available_memory(run) / 20 * 19;
    size_t bytes = 0;
    agree(run.comm, [&] { bytes = plan_model(run, "none", limits, memory)->plan().bytes(); });
    return run.comm.all(bytes <= memory);
}
