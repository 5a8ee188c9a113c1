#include "trace.h"

#include "../core/common.h"

size_t Trace::time_of(const OpKey &op) const {
    const auto found = times_.find(op);
    if (found == times_.end()) die("%s: an op that no rehearsal has seen", describe(op).c_str());
    return found->second;
}

std::string Trace::describe(const OpKey &op) const {
    const std::string phase = phase_names[op.phase], layer = ops_.of_layer(op.op) ? format("layer %zu, ", op.layer) : "";
    return (phase.empty() ? "" : phase + ", ") + layer + ops_.name(op.op);
}

void Trace::inspect_running() {
    if (running_ && !std::exchange(inspected_, true)) inspect_(*running_);
}

// Clears the arrays whose lifetimes begin after the previous op and at this op or before. Some passes skip ops, so these may be more than this op's
// arrays. The next tile of a row still finds the values that earlier tiles wrote.
void Trace::begin_inspected(const OpKey &now) {
    const std::optional<OpKey> before = running_;
    inspect_running();
    if (before) arena_->clear_new(time_of(*before), time_of(now));
    running_ = now, inspected_ = false;
}

void Trace::find_anomaly(const OpKey &op) {
    if (Phase(op.phase) == Phase::step || !anomaly_.what.empty()) return;
    searched_++;
    if (const std::string found = arena_->nonfinite(time_of(op), op.layer); !found.empty())
        anomaly_ = {searched_, describe(op) + ": " + found};
}
