#include "trace.h"

#include "../core/common.h"

size_t Trace::time_of(const OpKey &op) const {
    const auto found = times_.find(op);
    if (found == times_.end()) die("%s, %s: an op that no rehearsal has seen", pass_names[op.pass], ops_.name(op.op));
    return found->second;
}

// Examines the arrays that the op before this one has written.
void Trace::examine(const OpKey &now) {
    if (running_ && Pass(running_->pass) != Pass::step && anomaly_.what.empty()) {
        examined_++;
        const auto [pass, op, layer] = *running_;
        const std::string of_layer = ops_.of_layer(op) ? format("layer %zu, ", layer) : "";
        if (const std::string found = arena_->nonfinite(time_of(*running_), layer); !found.empty())
            anomaly_ = {examined_, format("%s, %s%s: %s", pass_names[pass], of_layer.c_str(), ops_.name(op), found.c_str())};
    }
    // Not every pass has all ops, so that an array may begin at one which this pass leaves out; and the next tile finds what the tiles before it have written.
    if (running_) arena_->clear_new(time_of(*running_), time_of(now));
    running_ = now;
}
