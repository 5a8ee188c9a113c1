#include "timing.h"

#include "warp.h"

namespace ptx {
namespace {

// Cycles from an instruction to one that needs its result, on an H100; published microbenchmarks and those of docs/gpu_model.md.
constexpr float latency_of[pipes] = {
    /* control */ 2, /* integer */ 4.5, /* fp32 */ 4.5, /* fp64 */ 16,  /* special */ 18, /* tensor */ 33,
    /* convert */ 8, /* move */ 0,      /* warp */ 23,  /* global */ 0, /* local */ 42,   /* shared */ 29,
    /* copy */ 4};

// Cycles for which a warp instruction keeps a unit of a quarter of a multiprocessor busy.
constexpr float cycles_of[pipes] = {1, 2, 1, 2, 8, 4 / 0.62f, 2, 0, 2, 1, 1, 1, 1};
constexpr Unit unit_of[pipes] = {Unit::issue, Unit::integer, Unit::fp32,  Unit::fp64,  Unit::special, Unit::tensor, Unit::convert,
                                 Unit::issue, Unit::issue,   Unit::issue, Unit::issue, Unit::issue,   Unit::issue};
}  // namespace

void time_instruction(Warp &w, const Instruction &i, const Count &before) {
    WarpTiming &t = w.timing;
    const Count &now = w.count();
    const size_t pipe = size_t(i.pipe);
    float at = t.begin;
    const auto needs = [&](int slot) { at = std::max(at, t.ready[size_t(slot)]); };
    if (i.guard >= 0) needs(i.guard);
    for (int n = i.writes; n < i.writes + i.reads; n++) needs(i.operands[n]);
    const float wavefronts = float(now.wavefronts - before.wavefronts) + float(now.lines - before.lines);
    float latency = latency_of[pipe] + 4 * float(std::max(int(i.machine) - 1, 0));
    if (i.pipe == Pipe::global || i.pipe == Pipe::copy) latency += std::max(t.memory, 4.0f);
    latency += std::max(0.0f, wavefronts - 1);
    if (i.pipe != Pipe::move) {
        t.issued = std::max(t.issued, at);
        t.work[size_t(Unit::issue)] += float(i.machine);
        t.work[size_t(unit_of[pipe])] += cycles_of[pipe] * (i.pipe == Pipe::special ? 1 : float(i.machine)) * i.work;
        t.work[size_t(Unit::shared)] += wavefronts;
    }
    for (int n = 0; n < i.writes; n++) t.ready[size_t(i.operands[n])] = at + latency;
    if (i.pipe == Pipe::copy && i.bytes) t.copied = std::max(t.copied, at + latency);
    t.memory = 0;
}
}  // namespace ptx
