#include "plan.h"

#include "../core/common.h"
#include "../core/gpu.h"
#include "../model/lora.h"
#include "../train/fit.h"
#include "../train/open.h"

// The memory that a plan is for: a named GPU for each rank, or the free memory of this machine.
struct Room {
    bool here;
    size_t usable, process, reserve;  // process: the bytes that the process itself takes; reserve: what is free, but not usable

    explicit Room(const Run &run) : here(run.options.gpu.empty()) {
        const auto model = here ? run.make_model(run.config, {}) : nullptr;
        usable = here ? usable_memory(run, model->memory()) : gpu_memory(run.options.gpu);
        process = here ? model->memory().process() : 0;
        reserve = here ? model->memory().reserve(run.ranks.world > 1) : 0;
    }
};

int print_plan(const Run &run, const std::optional<Continuation> &continuation) {
    const Options &o = run.options;
    ModelLimits limits;
    limits.ranks = run.ranks;
    limits.row_tokens = round_up(o.row_tokens, row_multiple);
    limits.positions = o.max_len;
    if (continuation) continuation->use(limits);
    const Room room(run);
    const size_t ranks = room.here ? run.ranks.world : 1,
                 memory = room.usable / ranks;  // the ranks of this machine share its memory
    const auto model = plan_model(run, o.recompute, limits, memory);
    const size_t of_rank = rank_bytes(run, *model, limits), bytes = room.process + ranks * of_rank;
    if (run.ranks.world > 1) printf("%s; the plan is that of each rank\n", mesh_line(run.ranks).c_str());
    if (run.config.lora.rank)
        printf("adapters of rank %zu: %zu parameters are trained\n", run.config.lora.rank, trained_parameters(run.config));
    printf("%zu parameters; rows of %zu tokens, samples of up to %zu; recompute %s\n\n%s\n", parameter_count(run.config),
           o.row_tokens, o.max_len, recompute_levels[size_t(limits.recompute)].first, model->plan().table().c_str());
    const auto line = [](const std::string &what, size_t n) { printf("%-78s %12s\n", what.c_str(), human_bytes(n).c_str()); };
    printf("%s", model->plan().store_table(o.offload_dir.empty() ? "in the host's memory" : "on disk").c_str());
    for (const Beside &other : run.beside) line(other.what, bytes_beside(run, other, limits));
    if (ranks > 1) line(format("%zu ranks, which share the memory of this machine", ranks), ranks * of_rank);
    if (room.process) line("the process itself, with what its libraries generate", room.process);
    if (room.reserve) line("kept free: kernels are loaded when they first run, NCCL's buffers at the first call", room.reserve);
    const std::string where = room.here             ? "here"
                              : run.ranks.world > 1 ? format("on each of %zu GPUs (%s)", run.ranks.world, o.gpu.c_str())
                                                    : "on " + o.gpu;
    printf("%s: %s of %s usable %s\n", bytes <= room.usable ? "fits" : "does not fit", human_bytes(bytes).c_str(),
           human_bytes(room.usable).c_str(), where.c_str());

    const std::string ring = run.ranks.sp > 1 ? format(", a row of %zu ranks", run.ranks.sp) : "";
    if (const size_t longest = longest_sample(run, o.recompute, limits, memory, run.config.max_positions)) {
        printf("longest sample that fits: %zu tokens%s%s\n", longest, ring.c_str(),
               longest == run.config.max_positions ? format(" (%s)", run.config.positions_name()).c_str() : "");
        return 0;
    }
    limits.row_tokens = limits.positions = row_multiple;
    const auto least = plan_model(run, o.recompute, limits, memory);
    printf("longest sample that fits: none; parameters and optimizer%s alone need %s\n",
           run.beside.empty() ? "" : ", with the models beside,", human_bytes(rank_bytes(run, *least, limits)).c_str());
    return 0;
}

// For --plan --fit: shows how long a sample may be on more ranks, if a row holds one sample and all ranks share it.
int print_fit(const Run &run) {
    const Options &o = run.options;
    const Room room(run);
    const size_t memory = room.usable, most = o.ranks > 1 ? o.ranks : 8, max_positions = run.config.max_positions;
    printf("%zu parameters in %s, ZeRO stage %zu; %s for each rank, %s\n", parameter_count(run.config), o.dtype.c_str(),
           o.zero_stage, human_bytes(memory).c_str(), room.here ? "as this machine has alone" : ("usable on " + o.gpu).c_str());
    printf("longest sample in tokens, on ranks that share it (%s), by --recompute:\n%6s", o.sp_mode.c_str(), "ranks");
    for (auto [name, level] : recompute_levels) printf("%12s ", name);
    bool beyond = false;
    for (size_t n = 1, last = 0; last < most; last = n, n = std::min(2 * n, most)) {
        printf("\n%6zu", n);
        ModelLimits limits;
        try {
            limits.ranks = ranks_of(run, n, n);
        } catch (const Error &) {
            printf("  --sp_mode %s does not suit so many ranks", o.sp_mode.c_str());
            continue;
        }
        for (auto [name, level] : recompute_levels) {
            const size_t longest = longest_sample(run, name, limits, memory, INT32_MAX);
            printf("%12s%c", longest ? std::to_string(longest).c_str() : "none", longest > max_positions ? '*' : ' ');
            beyond |= longest > max_positions;
        }
    }
    printf("\n%s", beyond ? format("* more than the model's %s, %zu\n", run.config.positions_name(), max_positions).c_str() : "");
    return 0;
}
