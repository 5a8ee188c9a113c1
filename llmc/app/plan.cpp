#include "plan.h"

#include <algorithm>
#include <map>
#include <vector>

#include "../core/common.h"
#include "../core/gpu.h"
#include "../core/json.h"
#include "../model/lora.h"
#include "../model/prediction.h"
#include "../train/open_config.h"
#include "../train/open_model.h"

// The memory that a plan is for: a named GPU for each rank, or the free memory of this machine.
struct Room {
    bool here;
    size_t usable, process, reserve;  // process: bytes of the process itself; reserve: bytes that are free but reserved

    explicit Room(const Run &run) : here(run.options.gpu.empty()) {
        const auto memory = here ? run.device.make_memory() : nullptr;
        usable = here ? usable_memory(run, *memory) : gpu_memory(run.options.gpu);
        process = here ? memory->process() : 0;
        reserve = here ? memory->reserve(run.model.ranks.communicators()) : 0;
    }
};

// Returns the predicted time of a step on the planned GPU; nothing if its rates are unknown, or if a step consists of more than passes of one model.
static std::optional<StepSeconds> predicted_step(const Run &run, Model &model, const ModelLimits &limits, size_t micro_steps) {
    const auto rates = gpu_rates(run.options.gpu);
    if (!rates || run.options.dtype != Dtype::bf16 || run.task & (RL | DISTILL) || estimates_kl(run.options)) return {};
    return predict_step(model, run.model.config, limits, *rates, micro_steps);
}

static std::string seconds(double s) { return format(s < 1000 ? "%.4g s" : "%.0f s", s); }

// Returns the number of rows of a ring in a step of train_batch_size samples, if all samples have the maximum length.
static size_t micro_steps_of(const Run &run) {
    const Options &o = run.options;
    const size_t all =
        o.train_batch_tokens ? o.train_batch_tokens : o.train_batch_size * documents_of_sample(run.options, run.task) * o.max_len;
    return ceil_div(ceil_div(all, o.row_tokens), run.model.ranks.dp());
}

// Returns the bytes alive at the peak within [first, last]: of arrays that are always alive, and of other arrays by kind, for example "act" for
// "act.3.qkv".
static std::map<std::string, size_t> most_alive(const Plan &plan, size_t first, size_t last) {
    std::map<std::string, size_t> most;
    for (size_t now = first, most_bytes = 0; now <= last; now++) {
        std::map<std::string, size_t> alive;
        size_t bytes = 0;
        for (const Segment &s : plan.segments())
            if (s.first <= now && now <= s.last)
                alive[s.last == Plan::always ? "always" : s.name.substr(0, s.name.find('.'))] += s.bytes, bytes += s.bytes;
        if (bytes >= most_bytes) most = std::move(alive), most_bytes = bytes;
    }
    return most;
}

// For --timeline: writes a rank's computation, messages, copies and live arrays in a step of one row, in Chrome's Trace Event Format; also the time
// of each op and the lifetime of each array, counted in ops.
static void write_timeline(const Run &run, Model &model, const ModelLimits &limits) {
    const Options &o = run.options;
    const auto rates = gpu_rates(o.gpu);
    if (!predicted_step(run, model, limits, 1))
        die("--timeline: there is no prediction%s\n  fix: use --gpu h100 (or another one whose rates are known), --dtype bf16, and a task that does not write answers",
            rates           ? ""
            : o.gpu.empty() ? " without --gpu"
                            : format(" for --gpu %s", o.gpu.c_str()).c_str());
    const char *const lanes[Interval::lanes] = {"ops", "messages", "copies out", "copies in"};
    nlohmann::json events = nlohmann::json::array();
    for (int lane = 0; lane < Interval::lanes; lane++)
        events.push_back({{"ph", "M"}, {"pid", 0}, {"tid", lane}, {"name", "thread_name"}, {"args", {{"name", lanes[lane]}}}});
    const std::map<OpKey, size_t> &times = model.trace().times();
    for (const Interval &i : predict_timeline(model, run.model.config, limits, *rates)) {
        const double begin = 1e6 * i.begin;  // us
        events.push_back(
            {{"ph", "X"}, {"pid", 0}, {"tid", int(i.lane)}, {"name", i.what}, {"ts", begin}, {"dur", 1e6 * (i.end - i.begin)}});
        const auto first = times.find(i.first), last = times.find(i.last);
        if (i.lane == Interval::ops && first != times.end() && last != times.end())
            events.push_back({{"ph", "C"},
                              {"pid", 0},
                              {"name", "bytes"},
                              {"ts", begin},
                              {"args", most_alive(model.plan(), first->second, last->second)}});
    }
    nlohmann::json ops = nlohmann::json::array(), arrays = nlohmann::json::array();  // for scripts/figures.py
    for (const auto &[op, time] : times) ops.push_back({{"time", time}, {"name", model.trace().describe(op)}});
    for (const Segment &s : model.plan().segments())
        if (s.last != Plan::always)
            arrays.push_back({{"name", s.name}, {"bytes", s.bytes}, {"first", s.first}, {"last", s.last}});
    write_json(o.timeline, {{"traceEvents", events}, {"displayTimeUnit", "ms"}, {"ops", ops}, {"arrays", arrays}});
    printf("the predicted time line is in %s\n", o.timeline.c_str());
}

static void print_seconds(const Run &run, Model &model, const ModelLimits &limits) {
    const Options &o = run.options;
    const size_t micro_steps = micro_steps_of(run), rings = run.model.ranks.dp();
    const auto s = predicted_step(run, model, limits, micro_steps);
    if (!s) return;
    const size_t rows = micro_steps * rings;
    const double spread = gpu_rates(o.gpu)->spread;
    printf("predicted, not measured: %s (%.4g to %.4g) for a step of %zu row%s of %zu tokens, documents of %zu; %.0f tokens/s\n",
           seconds(s->all()).c_str(), s->all() * (1 - spread), s->all() * (1 + spread), rows, rows > 1 ? "s" : "", o.row_tokens,
           o.max_len, double(rows * o.row_tokens) / s->all());
    printf("  products %s, attention %s, other ops %s, waiting for messages %s, for copies %s\n", seconds(s->products).c_str(),
           seconds(s->attention).c_str(), seconds(s->other).c_str(), seconds(s->messages).c_str(), seconds(s->copies).c_str());
}

// Returns all valid values of --offload for the run.
static std::vector<Names> offload_choices(const Run &run) {
    const bool muon = run.options.optimizer == OptimizerType::muon;
    Names names = {"activations"};
    if (!muon) names.push_back("optimizer");
    if (!muon && !run.model.config.weight_bits) names.push_back("weights");
    std::vector<Names> all = {{}};
    for (const std::string &name : names)
        for (size_t i = 0, n = all.size(); i < n; i++) all.push_back(all[i]), all.back().push_back(name);
    return all;
}

// Flags with which the run fits, the predicted seconds of a step, and the needs of each rank.
struct Candidate {
    std::string flags;
    double seconds;
    size_t bytes, of_host;
};

// Returns all levels of recomputation, ZeRO stages and values of --offload that fit. None of them changes a bit if
// memory is left for the largest chunks of the head; with smaller ones the gradient of its weights is summed in another order.
static std::vector<Candidate> fitting_choices(const Run &run, ModelLimits limits, size_t memory) {
    std::vector<Candidate> choices;
    for (int stage : run.model.ranks.world > 1 ? std::vector{1, 2, 3} : std::vector{run.model.ranks.zero_stage})
        for (const Names &offload : offload_choices(run))
            for (Recompute level : recompute_levels) {
                limits.ranks.zero_stage = stage;
                set_offload(limits, offload);
                const auto model = plan_model(run, run.model, level, limits, memory);
                const size_t needs = rank_bytes(run, run.model, *model, limits);
                const auto s = predicted_step(run, *model, limits, micro_steps_of(run));
                if (!s || needs > memory) continue;
                std::string flags = "--recompute " + name_of(level);
                if (run.model.ranks.world > 1) flags += format(" --zero_stage %d", stage);
                for (size_t i = 0; i < offload.size(); i++) flags += (i ? "," : " --offload ") + offload[i];
                choices.push_back({flags, s->all(), needs, rank_store_bytes(run, run.model, *model, limits)});
            }
    return choices;
}

// Prints the flags of the fastest predicted step that fits. Times within 2 % count as equal; among these, the flags with the least host memory are
// chosen, because the host's size is unknown. Gradients in bf16 round the results, so they are only considered if nothing fits without them.
static void print_fastest(const Run &run, ModelLimits limits, size_t memory) {
    if (!gpu_rates(run.options.gpu)) return;
    std::vector<Candidate> choices = fitting_choices(run, limits, memory);
    const bool rounds = choices.empty();
    if (rounds) {
        limits.bf16_gradients = true;
        choices = fitting_choices(run, limits, memory);
    }
    if (choices.empty()) return;
    const double least = std::ranges::min_element(choices, {}, &Candidate::seconds)->seconds;
    std::erase_if(choices, [&](const Candidate &c) { return c.seconds > 1.02 * least; });
    const Candidate &best = *std::ranges::min_element(choices, {}, &Candidate::of_host);
    printf("fastest that fits, by prediction: %s%s (%s, %s%s for each rank)\n", best.flags.c_str(),
           rounds ? " --grad_dtype bf16" : "", seconds(best.seconds).c_str(), human_bytes(best.bytes).c_str(),
           best.of_host ? (" and of the host " + human_bytes(best.of_host)).c_str() : "");
}

static void print_longest(const Run &run, ModelLimits limits, size_t memory) {
    const Options &o = run.options;
    const std::string ring = run.model.ranks.sp > 1 ? format(", a row of %zu ranks", run.model.ranks.sp) : "";
    if (const size_t longest = longest_sample(run, run.model, o.recompute, limits, memory, run.model.config.max_positions)) {
        printf("longest sample that fits: %zu tokens%s%s\n", longest, ring.c_str(),
               longest == run.model.config.max_positions ? format(" (%s)", run.model.config.positions_name()).c_str() : "");
        return;
    }
    limits.row_tokens = limits.positions = row_multiple;
    const auto least = plan_model(run, run.model, o.recompute, limits, memory);
    printf("longest sample that fits: none; parameters and optimizer%s alone need %s\n",
           run.model.co_residents.empty() ? "" : ", with the models beside,",
           human_bytes(rank_bytes(run, run.model, *least, limits)).c_str());
}

// Prints the arrays of a rank, and further bytes of the process.
static void print_arrays(const Run &run, Model &model, const ModelLimits &limits, const Room &room, size_t ranks,
                         size_t of_rank) {
    const Options &o = run.options;
    if (run.model.ranks.world > 1) printf("%s; the plan is that of each rank\n", mesh_line(run.model.ranks).c_str());
    if (run.model.config.lora.rank)
        printf("adapters of rank %zu: %zu parameters are trained\n", run.model.config.lora.rank,
               trained_parameters(run.model.config));
    if (const ExpertConfig &e = run.model.config.experts; e.number)
        printf("a token goes to %zu of %zu experts: %zu parameters are active\n", e.chosen, e.number,
               active_parameter_count(run.model.config));
    if (run.model.config.experts.aux_loss_coef > 0 && run.task & TRAINING)
        printf("the auxiliary loss of experts adds a forward pass to steps of several rows for a rank\n");
    printf("%zu parameters; rows of %zu tokens, samples of up to %zu; recompute %s\n\n%s\n", parameter_count(run.model.config),
           o.row_tokens, o.max_len, name_of(limits.recompute).c_str(), model.plan().table().c_str());
    const auto line = [](const std::string &what, size_t n) { printf("%-78s %12s\n", what.c_str(), human_bytes(n).c_str()); };
    const char *const place = o.offload_dir.empty() ? "in the host's memory" : "on disk";
    printf("%s", model.plan().store_table(place).c_str());
    for (const CoResidentModel &other : run.model.co_residents) {
        const auto resident = co_resident_model(run, other, limits);
        line(other.what, resident->plan().bytes());
        if (const size_t stored = resident->plan().store_bytes()) line(format("%s, %s", other.what, place), stored);
    }
    if (ranks > 1) line(format("%zu ranks, which share the memory of this machine", ranks), ranks * of_rank);
    if (room.process) line("the process itself, with what its libraries generate", room.process);
    if (room.reserve) line("kept free: kernels are loaded when they first run, NCCL's buffers at the first call", room.reserve);
}

int print_plan(const Run &run, const std::optional<Continuation> &continuation) {
    const Options &o = run.options;
    ModelLimits limits = flag_limits(o);
    limits.ranks = run.model.ranks, limits.share_prompts = run.share_prompts;
    limits.row_tokens = round_up(o.row_tokens, row_multiple);
    limits.positions = o.max_len;
    if (continuation) continuation->use(limits);
    const Room room(run);
    // The ranks of this machine share its memory.
    const size_t ranks = room.here ? run.model.ranks.world : 1, memory = room.usable / ranks;
    const auto model = plan_model(run, run.model, o.recompute, limits, memory);
    const size_t of_rank = rank_bytes(run, run.model, *model, limits), bytes = room.process + ranks * of_rank;
    const std::string where = room.here ? "here"
                              : run.model.ranks.world > 1
                                  ? format("on each of %zu GPUs (%s)", run.model.ranks.world, o.gpu.c_str())
                                  : "on " + o.gpu;
    printf("%s: %s of %s usable %s\n", bytes <= room.usable ? "fits" : "does not fit", human_bytes(bytes).c_str(),
           human_bytes(room.usable).c_str(), where.c_str());
    if (run.task & TRAINING) print_seconds(run, *model, limits), print_fastest(run, limits, memory);
    if (!o.timeline.empty()) write_timeline(run, *model, limits);

    print_longest(run, limits, memory);
    printf("\n");
    print_arrays(run, *model, limits, room, ranks, of_rank);
    return 0;
}

// Returns for example "1573888* 310.2 s ": the longest sample, a star if it exceeds the model's positions, and the seconds of a step with this
// sample.
static std::string cell(const Run &run, Recompute recompute, ModelLimits limits, size_t memory) {
    const size_t longest = longest_sample(run, run.model, recompute, limits, memory, INT32_MAX);
    std::string time;
    if (longest) {
        limits.row_tokens = round_up(documents_of_sample(run.options, run.task) * longest, row_multiple),
        limits.positions = longest;
        const auto model = plan_model(run, run.model, recompute, limits, memory);
        if (const auto s = predicted_step(run, *model, limits, 1)) time = seconds(s->all());
    }
    const std::string tokens = format("%12s%c", longest ? std::to_string(longest).c_str() : "none",
                                      longest > run.model.config.max_positions ? '*' : ' ');
    return gpu_rates(run.options.gpu) ? tokens + format("%9s", time.c_str()) : tokens;
}

// For --plan --fit: shows the longest sample for more ranks, if a row holds one sample and all ranks share it. Flags that were given stay as they are.
int print_fit(const Run &run) {
    const Options &o = run.options;
    const Room room(run);
    const size_t memory = room.usable, most = o.ranks > 1 ? o.ranks : 8, max_positions = run.model.config.max_positions;
    printf("%zu parameters in %s, ZeRO stage %zu; %s for each rank, %s\n", parameter_count(run.model.config),
           name_of(o.dtype).c_str(), o.zero_stage, human_bytes(memory).c_str(),
           room.here ? "as this machine has alone" : ("usable on " + o.gpu).c_str());
    const bool timed = gpu_rates(o.gpu).has_value(), varies = !o.recompute;
    std::vector<Recompute> levels;
    for (Recompute level : recompute_levels)
        if (level == o.recompute.value_or(level)) levels.push_back(level);
    const std::string sharing = o.ring_attn_size > 1 ? format("rings of --ring_attn_size %zu", o.ring_attn_size) : "ranks";
    printf("longest sample in tokens%s, on %s that share it (%s), by number of ranks%s as given\n%6s",
           timed ? ", and the predicted seconds of a step of it" : "", sharing.c_str(), name_of(o.sp_mode).c_str(),
           varies ? " and --recompute; all other flags"
                  : format("; --recompute %s and all other flags", name_of(levels[0]).c_str()).c_str(),
           "ranks");
    for (Recompute level : levels) printf("%12s %*s", name_of(level).c_str(), timed ? 9 : 0, "");
    bool beyond = false;
    for (size_t n = std::min(o.tensor_parallel, most), last = 0; last < most; last = n, n = std::min(2 * n, most)) {
        printf("\n%6zu", n);
        ModelLimits limits = flag_limits(o);
        try {
            limits.ranks = ranks_of(run, run.model.config, n,
                                    o.ring_attn_size > 1 ? o.ring_attn_size : std::max<size_t>(1, n / o.tensor_parallel));
            limits.share_prompts = run.share_prompts;
        } catch (const Error &e) {
            printf("  %s", std::string(e.what()).substr(0, std::string(e.what()).find('\n')).c_str());
            continue;
        }
        for (Recompute level : levels) {
            const std::string text = cell(run, level, limits, memory);
            printf("%s", text.c_str());
            fflush(stdout);  // a cell of many ranks takes seconds
            beyond |= text.find('*') != text.npos;
        }
    }
    printf("\n%s",
           beyond ? format("* more than the model's %s, %zu\n", run.model.config.positions_name(), max_positions).c_str() : "");
    return 0;
}
