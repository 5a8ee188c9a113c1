#include "prediction.h"

#include <algorithm>
#include <deque>
#include <set>

#include "../core/common.h"
#include "../parallel/delta_ring.h"
#include "../parallel/split.h"

namespace {

constexpr size_t gpus_of_host = 8;

// The step's row, without tokens.
Row row_of(const ModelLimits &limits) {
    Row row{};
    row.T = round_up(limits.row_tokens, row_multiple * limits.ranks.sp);
    for (size_t begin = 0; begin < limits.row_tokens; begin += limits.positions) row.doc_offsets.push_back(begin);
    row.doc_offsets.push_back(limits.row_tokens);
    return row;
}

// The quantities that depend on the row: the scores of a layer's attention, and the bytes of keys and values that the ranks of a ring together send
// for them.
class RingWork {
  public:
    RingWork(const ModelConfig &config, const ModelLimits &limits, size_t element)
        : config_(config),
          ranks_(limits.ranks),
          element_(element),
          split_(split_row(config, limits.ranks, element, row_of(limits))),
          borders_(piece_borders(split_, row_of(limits).doc_offsets).size()) {}

    // The bytes of states and columns of linear attention (../parallel/delta_ring.h).
    size_t states() const {
        const DeltaConfig &d = config_.delta;
        return borders_ * (d.Hv * d.Dk * d.Dv * sizeof(float) + conv_columns * d.row() * element_);
    }
    size_t kv(size_t l, bool backward) const {
        const size_t P = ranks_.sp, width = 2 * config_.KV * config_.D * element_;
        if (P == 1) return 0;
        if (config_.has_delta(l)) return backward ? 0 : states();
        if (ranks_.sp_mode == SpMode::ring) return width * travel(l).row_hops();
        if (ranks_.sp_mode == SpMode::gather) return width * (split_.T / P) * pairs(l);
        const UlyssesHeads heads(P, config_.H, config_.KV);
        const size_t delta = backward ? heads.h * sizeof(float) : 0;
        return ((2 * heads.h + 2 * heads.m) * config_.D * element_ + delta) * split_.T * (P - 1);
    }
    size_t dkv(size_t l) const {
        const size_t P = ranks_.sp, width = 2 * config_.KV * config_.D * sizeof(float);
        if (P == 1) return 0;
        if (config_.has_delta(l)) return states();
        if (ranks_.sp_mode == SpMode::ring) return width * travel(l).row_hops();
        if (ranks_.sp_mode == SpMode::gather) return width * split_.T * (P - 1);
        const UlyssesHeads heads(P, config_.H, config_.KV);
        return (heads.h + 2 * heads.m) * config_.D * sizeof(float) * split_.T * (P - 1);
    }

    // The scores of the rank with the most scores.
    double scores(size_t l) const {
        const KeyTravel &keys = travel(l);
        double most = 0, all = 0;
        for (size_t rank = 0; rank < split_.ranks; rank++) {
            double own = 0;
            for (size_t source = 0; source < split_.ranks; source++) own += double(keys.scores(rank, source));
            most = std::max(most, own), all += own;
        }
        return ranks_.sp_mode == SpMode::ulysses ? all / double(split_.ranks) : most;
    }
    size_t local_T() const { return split_.local_T(); }

  private:
    const KeyTravel &travel(size_t l) const { return split_.travel[kind_of(config_, l)]; }
    size_t pairs(size_t l) const {  // number of pairs of a rank and another rank whose keys it sees
        size_t n = 0;
        for (size_t rank = 0; rank < split_.ranks; rank++)
            for (size_t source = 0; source < split_.ranks; source++) n += rank != source && travel(l).sees(rank, source);
        return n;
    }

    const ModelConfig &config_;
    const Ranks &ranks_;
    const size_t element_;
    const SequenceSplit split_;
    const size_t borders_;  // of pieces within documents
};

// Bytes per second of a rank in a collective. Every GPU of a host has a link to other hosts, and if neighbours span hosts, each of these links
// carries a share of the host's messages.
double rate_of(const Event &message, const GpuRates &rates) {
    if (message.ranks * message.distance <= gpus_of_host) return rates.link;
    return std::min(rates.link, (message.distance == 1 ? double(gpus_of_host) : 1) * rates.network);
}

// The same if each neighbour sends equally much to every other one.
double rate_of_all(size_t ranks, const GpuRates &rates) {
    if (ranks <= gpus_of_host) return rates.link;
    return std::min(rates.link, rates.network * double(ranks - 1) / double(ranks - gpus_of_host));
}

// In a ring across hosts all ranks wait for the hop between two hosts.
double rate_of_ring(const Ranks &r, const GpuRates &rates) {
    if (r.sp <= gpus_of_host || r.sp_mode != SpMode::ring) return rate_of_all(r.sp, rates);
    return std::min(rates.link, rates.network);
}

// True for a message of tensor parallelism: tokens of a block, or statistics of the head. Rings and the ranks with the same part are further apart. An
// op that sends rows to experts sends no tokens.
bool is_of_tensors(const Event &e, const Ranks &r, const RehearsedSteps &steps) {
    if (r.tp == 1 || e.lane != Event::messages || e.distance > 1 || e.ranks != r.tp) return false;
    const OpList &ops = steps.ops;
    if (!ops.of_layer(e.key.op)) {
        const size_t op = e.key.op;
        return op == ops.number(EMBED) || op == ops.number(HEAD) || op == ops.number(TOKENS);
    }
    Work row = steps.layout;
    row.T = r.tp, row.scores.resize(e.key.layer + 1);
    return ops.layer[e.key.op].cost(row, Phase(e.key.phase), e.key.layer).sent == 0;
}

// Simulates the events of two steps, and sums the second step.
class Simulation {
  public:
    Simulation(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates, size_t micro_steps)
        : steps_(model.rehearse_steps(micro_steps)),
          ops_(steps_.ops),
          c_(part_of(config, limits.ranks.tp, 0)),
          r_(limits.ranks),
          rates_(rates),
          document_(limits.positions),
          fp8_(limits.fp8),
          ring_(c_, limits, steps_.layout.element),
          work_(steps_.layout) {
        work_.T = work_.N = ring_.local_T();
        for (size_t l = 0; l < config.L; l++) work_.scores.push_back(ring_.scores(l));
        for (const Event &e : steps_.events) handle(e);
        end_op();
        for (int lane = 0; lane < Event::lanes; lane++) advance(lane, now_);
    }

    StepSeconds sum;
    std::vector<Interval> intervals;

  private:
    struct Transfer {
        size_t id;
        std::string what;
        double left;           // seconds
        bool is_read = false;  // by the op that waits for it, from its beginning
    };
    struct Lane {  // consecutive transfers
        double now = 0;
        std::deque<Transfer> queue;
    };

    void handle(const Event &e) {
        if (e.kind == Event::row) seen_.clear();
        else if (e.kind == Event::op) begin_op(e);
        else if (e.kind == Event::pause) end_op(), dequantise(e);
        else if (e.kind == Event::start) start(e);
        else wait(e.id);
    }

    // An op takes the longer of the times for its FLOPs and its bytes. The tiles of a row are one op.
    void begin_op(const Event &e) {
        end_op();
        if (e.key.op == ops_.number(ZERO_GRAD)) begin_step();
        if (!seen_.insert(e.key).second && e.amount == 0) return;
        Work work = work_;
        work.bucket = e.amount;
        const bool attention = e.key.op == ops_.attention, backward = Phase(e.key.phase) == Phase::backward;
        const Cost cost = ops_.cost(c_, work, Phase(e.key.phase), e.key.op, e.key.layer);
        const bool fp8 = fp8_ && cost.rounded > 0;  // these products have 1.8 to 1.9 times the rate on an H200
        const double rate = attention ? rate_of_attention(e.key.layer, backward) : (fp8 ? 1.85 : 1) * rates_.products;
        const double flops = (cost.flops - cost.grouped) / rate + cost.grouped / rates_.grouped;
        const double rounding = fp8 ? cost.rounded / rates_.memory : 0;
        const double bytes = cost.bytes / rates_.memory, logits = cost.logits / rates_.memory, seconds = std::max(flops, bytes);
        (flops < bytes ? sum.other : attention ? sum.attention : sum.products) += seconds;
        sum.other += logits + rounding;
        op_end_ = now_ + seconds + logits + rounding;
        if (attention) send_keys(e.key.layer, backward, seconds);
        if (cost.sent > 0) send_rows(cost.sent);
        if (op_end_ > now_) record({Interval::ops, stretch_of(e.key), now_, op_end_, e.key, e.key});
    }
    double rate_of_attention(size_t l, bool backward) const {
        if (c_.has_delta(l)) return rate_of_delta(backward);
        return attention_rate(rates_, c_.D, c_.window[l] ? std::min(c_.window[l], document_) : document_, backward);
    }
    // Tokens of a document come one after the other, so blocks limit the delta rule, not the GPU's peak. In the backward pass those that divide columns
    // take 2.2 times as long as in the forward pass, and so do those that then divide chunks (dev/cuda/gated_delta_forward, predicted).
    double rate_of_delta(bool backward) const {
        const DeltaConfig &d = c_.delta;
        const DeltaShape shape{work_.T, d.Hk, d.Hv, d.Dk, d.Dv, 0};
        const double blocks = double(delta::column_blocks(shape)), forward = gated_delta_flops(shape) / rates_.delta;
        const size_t parts = std::min(delta::parts_of_row(shape), std::max<size_t>(1, work_.T / document_));
        if (!backward) return rates_.delta * blocks * double(parts);
        const double of_head = blocks / double(shape.Hv);
        return gated_delta_backward_flops(shape) / (2.2 * forward * (1 / blocks + 1 / (of_head * double(delta::many_blocks))));
    }
    void end_op() { now_ = std::max(now_, op_end_); }
    void dequantise(const Event &e) {
        if (e.key.op != ops_.number(DEQUANTISE)) return;
        Work work = work_;
        work.bucket = e.amount;
        const double seconds = ops_.cost(c_, work, Phase::forward, e.key.op, 0).bytes / rates_.memory;
        sum.other += seconds, now_ += seconds;
    }
    void begin_step() {
        for (int lane = 0; lane < Event::lanes; lane++) advance(lane, now_);
        seen_.clear(), intervals.clear();
        sum = {}, step_begin_ = now_;
    }

    // The ring's messages have priority. Attention waits for the part of the messages that takes longer than attention itself. Under ulysses no
    // computation overlaps with them, and gather waits for the first heads. Linear attention waits for the states, which pass from piece to piece.
    void send_keys(size_t l, bool backward, double attention) {
        const size_t bytes = ring_.kv(l, backward) + (backward ? ring_.dkv(l) : 0);
        if (bytes == 0) return;
        const bool one_by_one = c_.has_delta(l);
        const double seconds = double(bytes) / (one_by_one ? 1 : double(r_.sp)) / rate_of_ring(r_, rates_);
        const double first = r_.sp_mode == SpMode::gather ? seconds * double(r_.head_stride) / double(c_.KV) : 0;
        const double waits =
            one_by_one || r_.sp_mode == SpMode::ulysses ? seconds : first + std::max(0.0, seconds - first - attention);
        advance(Event::messages, now_);
        lanes_[Event::messages].queue.push_front({0, "keys and values", seconds});
        sum.messages += waits, op_end_ += waits;
    }

    // No computation overlaps with the rows' way to experts and back.
    void send_rows(double bytes) {
        const double seconds = bytes / rate_of_all(r_.expert_parallel, rates_);
        advance(Event::messages, now_);
        lanes_[Event::messages].queue.push_front({0, "rows of experts", seconds});
        sum.messages += seconds, op_end_ += seconds;
    }

    // No computation overlaps with the messages of tensor parallelism within an op.
    void send_tokens(double seconds) {
        advance(Event::messages, now_);
        lanes_[Event::messages].queue.push_front({0, "tokens", seconds});
        sum.messages += seconds, op_end_ = std::max(now_, op_end_) + seconds;
    }

    // A message sends results of earlier ops. A copy overlaps with the op that starts it, because that op uses other pieces. Messages of tensor
    // parallelism grow with the row.
    void start(const Event &e) {
        const bool tokens = is_of_tensors(e, r_, steps_);
        const double bytes = double(e.amount) * (tokens ? double(ring_.local_T()) / double(steps_.tokens) : 1);
        const double seconds = e.lane == Event::messages ? bytes / double(e.ranks) / rate_of(e, rates_) : bytes / rates_.host;
        if (tokens && e.key.op != ops_.number(TOKENS)) return send_tokens(seconds);
        if (ops_.of_layer(e.key.op)) return;  // a ring's message, or the experts' row counts
        if (e.lane == Event::messages) end_op();
        advance(e.lane, now_);
        lanes_[e.lane].queue.push_back({e.id, name_of(e), seconds, tokens});
    }
    void wait(size_t id) {
        for (int lane = 0; lane < Event::lanes; lane++) {
            std::deque<Transfer> &queue = lanes_[lane].queue;
            const auto transfer = std::ranges::find(queue, id, &Transfer::id);
            if (transfer == queue.end()) continue;
            const double busy = std::max(now_, op_end_), needed = transfer->is_read ? now_ : busy;
            for (bool done = false; !done;) done = queue.front().id == id, finish_first(lane);
            const double late = std::max(0.0, lanes_[lane].now - needed);
            if (needed < busy) op_end_ += late;
            else now_ = std::max(now_, lanes_[lane].now);
            (lane == Event::messages ? sum.messages : sum.copies) += late;
        }
    }
    void finish_first(int lane) { advance(lane, lanes_[lane].now + lanes_[lane].queue.front().left, true); }
    // Lets a lane run until this time, or until its first transfer has ended.
    void advance(int lane, double until, bool first = false) {
        Lane &l = lanes_[lane];
        while (!l.queue.empty() && (first || l.now < until)) {
            Transfer &t = l.queue.front();
            const double seconds = first ? t.left : std::min(t.left, until - l.now);
            if (seconds > 0) record({Interval::Lane(Interval::messages + lane), t.what, l.now, l.now + seconds});
            l.now += seconds, t.left -= seconds;
            if (t.left <= 0) l.queue.pop_front();
            if (first) return;
        }
        l.now = std::max(l.now, until);
    }

    void record(Interval i) {
        i.begin = std::max(0.0, i.begin - step_begin_), i.end -= step_begin_;
        const auto last = std::find_if(intervals.rbegin(), intervals.rend(), [&](const Interval &o) { return o.lane == i.lane; });
        if (last != intervals.rend() && last->what == i.what) last->end = i.end, last->last = i.last;
        else intervals.push_back(std::move(i));
    }
    std::string stretch_of(const OpKey &op) const {
        const bool forward = Phase(op.phase) == Phase::forward;
        if (ops_.of_layer(op.op)) return format(forward ? "layer %zu" : "layer %zu, backward", op.layer);
        const RowOp row_op = RowOp(op.op - ops_.layer.size());
        if (row_op == FINAL_NORM || row_op == HEAD) return "head";
        return std::string(ops_.name(op.op)) + (row_op == EMBED && !forward ? ", backward" : "");
    }
    std::string name_of(const Event &e) const {
        const size_t unit = e.key.layer;
        if (e.key.op == ops_.number(TOKENS)) return format("tokens of layer %zu", unit);
        if (e.key.op == ops_.number(COPY)) return format("activations of layer %zu", unit);
        if (e.key.op == ops_.number(ADAMW)) return e.lane == Event::messages ? "weights" : "moments and weights";
        const std::string what = e.key.op == ops_.number(GRAD_SUM) ? "gradients of " : "weights of ";
        if (unit > 0 && unit <= c_.L) return what + format("layer %zu", unit - 1);
        return what + (unit == 0                                 ? "the embedding"
                       : unit == steps_.trained.positions        ? "the positions"
                       : unit == steps_.trained.units.size() - 1 ? "the final norm"
                                                                 : "the head");
    }

    const RehearsedSteps steps_;
    const OpList &ops_;
    const ModelConfig c_;  // of the rank with the largest part
    const Ranks &r_;
    const GpuRates &rates_;
    const size_t document_;  // tokens per document
    const bool fp8_;
    const RingWork ring_;
    Work work_;
    double now_ = 0, op_end_ = 0, step_begin_ = 0;
    std::set<OpKey> seen_;  // the ops of this row so far
    Lane lanes_[Event::lanes];
};

}  // namespace

Payload predict_messages(Diagnosis &model, const ModelConfig &whole, const ModelLimits &limits, size_t micro_steps) {
    const ModelConfig config = part_of(whole, limits.ranks.tp, 0);
    const RehearsedSteps steps = model.rehearse_steps(micro_steps);
    const RingWork ring(config, limits, steps.layout.element);
    const size_t layers = micro_steps * limits.ranks.dp() * limits.ranks.tp;
    Payload sent;
    Work work = steps.layout;
    work.T = work.N = ring.local_T(), work.scores.resize(config.L);
    double rows = 0;  // bytes of experts' rows, per rank
    for (size_t l = 0; l < config.L; l++) {
        sent.kv += layers * (ring.kv(l, false) + ring.kv(l, true)), sent.dkv += layers * ring.dkv(l);
        for (const LayerOp &op : steps.ops.layer)
            for (Phase phase : {Phase::forward, Phase::recompute, Phase::backward})
                if (phase != Phase::recompute || work.recompute >= op.from) rows += op.cost(work, phase, l).sent;
    }
    sent.experts = micro_steps * limits.ranks.world * size_t(rows);
    for (const Event &e : steps.events) {
        if (e.kind == Event::op && e.key.op == steps.ops.number(ZERO_GRAD))
            sent.grads = sent.params = sent.tensor = 0;  // discards the previous step's
        if (e.kind != Event::start || e.lane != Event::messages) continue;
        const size_t bytes = e.amount * (limits.ranks.world / e.ranks);  // of all such communicators
        if (is_of_tensors(e, limits.ranks, steps)) sent.tensor += bytes * ring.local_T() / steps.tokens;
        else if (!steps.ops.of_layer(e.key.op)) (e.key.op == steps.ops.number(GRAD_SUM) ? sent.grads : sent.params) += bytes;
    }
    return sent;
}

// All micro-steps between the first and the last have the same cost.
StepSeconds predict_step(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates,
                         size_t micro_steps) {
    const auto seconds = [&](size_t n) { return Simulation(model, config, limits, rates, n).sum; };
    const StepSeconds few = seconds(std::min<size_t>(micro_steps, 3));
    StepSeconds sum = few;
    if (micro_steps > 3) sum.extend(few, seconds(2), double(micro_steps - 3));
    return sum;
}

std::vector<Interval> predict_timeline(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits,
                                       const GpuRates &rates) {
    std::vector<Interval> intervals = Simulation(model, config, limits, rates, 1).intervals;
    std::ranges::stable_sort(intervals, {}, &Interval::lane);
    return intervals;
}
