#include "profile.h"

#include "../core/common.h"

void Profiler::begin_step() {
    start_ = std::chrono::steady_clock::now();
    in_step_ = true;
    model_flops_ = 0;
    entries_.clear();
}

void Profiler::begin_row(const Row &row, size_t sp) {
    if (!in_step_) return;
    const Work whole = work_of(config_, row, true);
    work_ = layout_;
    work_.T = whole.T / sp, work_.N = whole.N / sp, work_.scores = whole.scores;
    for (double &scores : work_.scores) scores /= double(sp);
    model_flops_ += ops_.model_flops(config_, row) / double(sp);
}

void Profiler::begin(Phase phase, size_t op, size_t layer, size_t bucket, size_t tokens) {
    if (!in_step_) return;
    Work work = work_;
    work.bucket = bucket;
    if (tokens) work.T = tokens;
    const char *phase_name = phase_names[size_t(phase)];
    timeline_->mark(ops_.of_layer(op) ? format("%s %s %zu", ops_.name(op), phase_name, layer).c_str() : ops_.name(op));
    entries_.push_back({phase, op, ops_.cost(config_, work, phase, op, layer)});
}

void Profiler::end_step() {
    in_step_ = false;
    if (entries_.empty()) return;  // a step without a target
    timeline_->mark(nullptr);
    const auto seconds = timeline_->take();
    if (steps_++ == 1) sums_ = Sums(ops_.size());
    for (size_t i = 0; i < entries_.size(); i++) {
        const auto &[phase, op, cost] = entries_[i];
        Total &total = sums_.op[op][size_t(phase)];
        total.count++, total.seconds += seconds[i], total.flops += cost.flops, total.bytes += cost.bytes;
        total.roofline += std::max(cost.flops / peaks_.flops, cost.bytes / peaks_.bytes) + cost.logits / peaks_.bytes;
    }
    sums_.steps++, sums_.model_flops += model_flops_;
    sums_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

std::string Profiler::line(const char *op, const char *phase, const Total &t, double all) const {
    const auto rate = [&](double amount, double unit, int digits) {
        return amount > 0 ? format("%.*f", digits, amount / unit / t.seconds) : std::string();
    };
    const double steps = double(sums_.steps);
    return format("%-14s %-9s %8.1f %11.3f %8.1f%% %9s %9s %9s\n", op, phase, double(t.count) / steps, 1e3 * t.seconds / steps,
                  100 * t.seconds / all, rate(t.flops, 1e12, 3).c_str(), rate(t.bytes, 1e9, 1).c_str(),
                  t.roofline > 0 ? format("%.0f%%", 100 * t.roofline / t.seconds).c_str() : "");
}

std::string Profiler::table() const {
    if (sums_.steps == 0) return "profile: no step was measured";
    Total all;
    for (const auto &op : sums_.op)
        for (const Total &t : op)
            all.count += t.count, all.seconds += t.seconds, all.flops += t.flops, all.bytes += t.bytes,
                all.roofline += t.roofline;
    const double steps = double(sums_.steps), rate = sums_.model_flops / sums_.seconds;
    std::string out = format("profile of %zu steps; here a large product does %.3f TFLOP/s, and a large copy %.1f GB/s\n",
                             sums_.steps, peaks_.flops / 1e12, peaks_.bytes / 1e9);
    out += format("%-14s %-9s %8s %11s %9s %9s %9s %9s\n", "op", "pass", "a step", "ms a step", "share", "TFLOP/s", "GB/s",
                  "roofline");
    for (size_t op = 0; op < ops_.size(); op++)
        for (size_t phase = 0; phase < phases; phase++)
            if (const Total &t = sums_.op[op][phase]; t.count) out += line(ops_.name(op), phase_names[phase], t, all.seconds);
    out += line("all", "", all, all.seconds);
    return out + format("a step: %.3f ms on the host's clock, %.6g model TFLOP, %.3f TFLOP/s, %.0f%% of the product's rate",
                        1e3 * sums_.seconds / steps, sums_.model_flops / steps / 1e12, rate / 1e12, 100 * rate / peaks_.flops);
}
