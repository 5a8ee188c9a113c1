#include "timing.h"

#include "warp.h"

namespace ptx {
namespace {

// Cycles from an instruction to the first one that can use its result, on an H100. Sources: published microbenchmarks and dev/emulator/gpu_model.md.
constexpr float latency_of[pipes] = {
    /* control */ 2, /* integer */ 4.5, /* fp32 */ 4.5, /* fp64 */ 16,  /* special */ 18, /* tensor */ 33,
    /* convert */ 8, /* move */ 0,      /* warp */ 23,  /* global */ 0, /* local */ 42,   /* shared */ 29,
    /* copy */ 4};

// Cycles for which a warp instruction occupies its unit of an SM sub-partition.
constexpr float cycles_of[pipes] = {1, 2, 1, 2, 8, 4 / 0.62f, 2, 0, 2, 1, 1, 1, 1};
constexpr Unit unit_of[pipes] = {Unit::issue, Unit::integer, Unit::fp32,  Unit::fp64,  Unit::special, Unit::tensor, Unit::convert,
                                 Unit::issue, Unit::issue,   Unit::issue, Unit::issue, Unit::issue,   Unit::issue};
}  // namespace

float time_wgmma(Warp &w, const Instruction &i) {
    const float cycles = 4 * i.work;  // 4: m16n8k16
    const float end = w.block->queues.tensor[size_t(w.number % 4)].add(w.timing.now(), cycles);
    note_time(w, "product", end - cycles, end);
    return end + latency_of[size_t(Pipe::tensor)];
}

float time_bulk_copy(Warp &w, size_t bytes, float latency) {
    const float end = w.block->queues.copies.add(w.timing.now(), float(bytes) / bulk_bytes) + latency;
    note_time(w, "copy", end - latency - float(bytes) / bulk_bytes, end);
    return end;
}

void wait_until(Warp &w, float cycle) {
    w.timing.end_basic_block();
    if (cycle <= w.timing.begin) return;
    note_time(w, "wait", w.timing.begin, cycle);
    w.timing.begin = w.timing.issued = cycle;
}

void note_time(const Warp &w, const char *what, float from, float to) {
    static const char *const path = getenv("PTX_TIMELINE");
    static FILE *const file = path ? fopen(path, "a") : nullptr;
    const Running &running = *w.block->running;
    if (file && running.launch->count_memory)
        fprintf(file, "%s\t%u\t%d\t%s\t%.0f\t%.0f\n", running.kernel->name.c_str(), w.block->number, w.number, what, double(from),
                double(to));
}

void time_instruction(Warp &w, const Instruction &i, const Count &before) {
    WarpTiming &t = w.timing;
    const Count &now = w.count();
    const size_t pipe = size_t(i.pipe);
    float at = t.begin;
    const auto needs = [&](int slot) { at = std::max(at, t.ready[size_t(slot)]); };
    if (i.guard >= 0) needs(i.guard);
    for (int n = i.writes; n < i.writes + i.reads; n++) needs(i.operands[n]);
    const bool queued =
        !i.accumulators.empty() || (i.pipe == Pipe::copy && !i.bytes);  // wgmma and TMA: their queue determines the time
    const float wavefronts = queued ? 0 : float(now.wavefronts - before.wavefronts) + float(now.lines - before.lines);
    const bool global = i.pipe == Pipe::global, loads = global && i.writes;
    if (loads && !i.constant) at = std::max(at, t.stored);  // the load may have the address of an earlier store
    const bool ordered = i.pipe != Pipe::move && i.pipe != Pipe::integer &&
                         i.pipe != Pipe::control;  // address arithmetic is not ordered: ptxas merges it
    if (ordered) at = std::max(at, t.order[t.instructions % t.order.size()]);
    float latency = latency_of[pipe] + 4 * float(std::max(int(i.machine) - 1, 0));
    if (!queued && (global || i.pipe == Pipe::copy)) latency += std::max(t.memory, 4.0f);
    latency += std::max(0.0f, wavefronts - 1);
    if (i.pipe != Pipe::move) {
        t.issued = std::max(t.issued, at);
        if (ordered) t.order[t.instructions++ % t.order.size()] = t.issued;
        t.work[size_t(Unit::issue)] += float(i.machine);
        if (!queued) t.work[size_t(unit_of[pipe])] += cycles_of[pipe] * (i.pipe == Pipe::special ? 1 : float(i.machine)) * i.work;
        t.work[size_t(Unit::shared)] += wavefronts;
    }
    for (int n = 0; n < i.writes; n++) t.ready[size_t(i.operands[n])] = at + latency;
    if (i.pipe == Pipe::copy && i.bytes) t.copied = std::max(t.copied, at + latency);
    if (global && !loads) t.stored = std::max(t.stored, at);
    t.memory = 0;
}

// The branch of an unrolled loop stays in the same basic block until all unrolled copies have run.
void time_control(Warp &w, const Instruction &i, bool taken) {
    WarpTiming &t = w.timing;
    if (!i.unrolled) return;
    t.iterations = i.unrolled > 1 && taken ? (t.iterations + 1) % i.unrolled : 0;
    if (!t.iterations) t.end_basic_block();
}
}  // namespace ptx
