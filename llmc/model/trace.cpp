#include "trace.h"

#include "../core/common.h"

// Examines the arrays that the op before this one has written.
void Trace::examine(const Moment &now) {
    if (running_ && running_->pass != Pass::step && anomaly_.what.empty()) {
        examined_++;
        const auto [time, pass, op, layer] = *running_;
        const std::string of_layer = ops_.of_layer(op) ? format("layer %zu, ", layer) : "";
        if (const std::string found = arena_->nonfinite(time, layer); !found.empty())
            anomaly_ = {examined_,
                        format("%s, %s%s: %s", pass_names[size_t(pass)], of_layer.c_str(), ops_.name(op), found.c_str())};
    }
    if (!running_ || running_->time != now.time) arena_->clear_new(now.time);
    running_ = now;
}
