#include "prediction.h"

#include <algorithm>

#include "../core/common.h"
#include "../parallel/ring.h"

namespace {

constexpr size_t gpus_of_host = 8;

// The row of the step, without tokens.
Row row_of(const ModelLimits &limits) {
    Row row{};
    row.T = round_up(limits.row_tokens, row_multiple * limits.ranks.sp);
    for (size_t begin = 0; begin < limits.row_tokens; begin += limits.positions) row.doc_offsets.push_back(begin);
    row.doc_offsets.push_back(limits.row_tokens);
    return row;
}

// The bytes that all ranks together send for a unit, or the ranks of one ring for a layer of one row.
class Messages {
  public:
    Messages(const StepParts &parts, const ModelConfig &config, const ModelLimits &limits)
        : parts_(parts),
          config_(config),
          ranks_(limits.ranks),
          muon_(limits.muon),
          split_(split_row(config, limits.ranks, parts.layout.element, row_of(limits))) {}

    size_t gather(size_t unit) const { return groups() * (parts_.sharding.parts - 1) * padded(unit) * parts_.layout.element; }
    size_t sum(size_t unit) const {
        const Unit &u = parts_.trained.units[unit];
        if (parts_.sharding.stage == 0) return 2 * (ranks_.world - 1) * (u.end - u.begin) * sizeof(float);
        return groups() * (parts_.sharding.parts - 1) * padded(unit) * sizeof(float);
    }
    size_t sum_of_replicas(size_t unit) const {
        return parts_.sharding.stage == 0 ? 0 : 2 * (groups() - 1) * padded(unit) * sizeof(float);
    }
    size_t gather_all() const {
        size_t bytes = 0;
        for (size_t unit = 0; unit < parts_.trained.units.size(); unit++) bytes += gather(unit);
        return bytes;
    }
    size_t momenta() const {  // what Muon gathers of the units that have matrices of layers
        size_t bytes = 0;
        for (size_t unit = 0; muon_ && unit < parts_.trained.units.size(); unit++) {
            const Unit &u = parts_.trained.units[unit];
            const auto is_its = [&](const Tensor &t) { return t.of_layer && u.begin <= t.offset && t.offset < u.end; };
            if (std::ranges::any_of(parts_.trained.tensors, is_its)) bytes += gather(unit);
        }
        return bytes;
    }
    size_t kv(size_t l, bool backward) const {
        const size_t P = ranks_.sp, width = 2 * config_.KV * config_.D * parts_.layout.element;
        if (P == 1) return 0;
        if (ranks_.sp_mode == SpMode::ring) return width * travel(l).row_hops();
        if (ranks_.sp_mode == SpMode::gather) return width * (split_.T / P) * pairs(l);
        const ring::UlyssesHeads heads(P, config_.H, config_.KV);
        const size_t delta = backward ? heads.h * sizeof(float) : 0;
        return ((2 * heads.h + 2 * heads.m) * config_.D * parts_.layout.element + delta) * split_.T * (P - 1);
    }
    size_t dkv(size_t l) const {
        const size_t P = ranks_.sp, width = 2 * config_.KV * config_.D * sizeof(float);
        if (P == 1) return 0;
        if (ranks_.sp_mode == SpMode::ring) return width * travel(l).row_hops();
        if (ranks_.sp_mode == SpMode::gather) return width * split_.T * (P - 1);
        const ring::UlyssesHeads heads(P, config_.H, config_.KV);
        return (heads.h + 2 * heads.m) * config_.D * sizeof(float) * split_.T * (P - 1);
    }

    // The scores of the rank that has most of them.
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
    size_t groups() const { return ranks_.world / parts_.sharding.parts; }
    size_t padded(size_t unit) const {
        const Unit &u = parts_.trained.units[unit];
        return u.begin == u.end ? 0 : parts_.sharding.padded_count(u.begin, u.end);
    }
    const KeyTravel &travel(size_t l) const { return split_.travel[kind_of(config_, l)]; }
    size_t pairs(size_t l) const {  // of a rank and another one whose keys it sees
        size_t n = 0;
        for (size_t rank = 0; rank < split_.ranks; rank++)
            for (size_t source = 0; source < split_.ranks; source++) n += rank != source && travel(l).sees(rank, source);
        return n;
    }

    const StepParts &parts_;
    const ModelConfig &config_;
    const Ranks &ranks_;
    const bool muon_;
    const SequenceSplit split_;
};

// Bytes a second of a rank in a collective of so many neighbours. Every GPU of a host has a link to other hosts, and all of them carry a share of the
// host's messages.
double rate_of_neighbours(size_t ranks, const GpuRates &rates) {
    return ranks <= gpus_of_host ? rates.link : std::min(rates.link, double(gpus_of_host) * rates.network);
}

// In a ring across hosts all ranks wait for the hop between two hosts. Otherwise a rank sends the same to each of the others.
double rate_of_ring(const Ranks &r, const GpuRates &rates) {
    if (r.sp <= gpus_of_host) return rates.link;
    if (r.sp_mode == SpMode::ring) return std::min(rates.link, rates.network);
    return std::min(rates.link, rates.network * double(r.sp - 1) / double(r.sp - gpus_of_host));
}

// Adds up what happens in a step, in its order.
class Prediction {
  public:
    // intervals: receives what is where when, if it is not null
    Prediction(Model &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates,
               std::vector<Interval> *intervals = nullptr)
        : parts_(model.parts()),
          ops_(parts_.ops),
          c_(config),
          r_(limits.ranks),
          rates_(rates),
          messages_(parts_, config, limits),
          work_(parts_.layout),
          divided_(parts_.sharding.divided),
          kept_(config.L > 1 ? double(model.plan().store_bytes("act.")) / double(config.L - 1) / rates.host : 0),
          updated_(double(model.plan().store_bytes("adamw ") + model.plan().store_bytes("params")) / rates.host),
          intervals_(intervals) {
        work_.T = work_.N = messages_.local_T();
        for (size_t l = 0; l < config.L; l++) work_.scores.push_back(messages_.scores(l));
    }

    // Forward and backward of one row. At the end of the last one gradients are summed at every stage.
    StepSeconds pass(bool last) {
        sum_ = {};
        const bool every = parts_.sharding.stage >= 2, sums = last || every;
        const size_t L = c_.L, norm = parts_.trained.units.size() - 1, positions = parts_.trained.positions;
        const size_t head_unit = parts_.trained.head;
        std::vector<Transfer> first = weights(0);
        if (positions) append(first, weights(positions));
        alone(first);
        stretch("embedding", key(Pass::forward, EMBED), key(Pass::forward, EMBED), 0, weights(1),
                [&] { row_op(Pass::forward, EMBED); });
        for (size_t l = 0; l < L; l++) {
            std::vector<Transfer> transfers = weights(l + 1 < L ? 2 + l : norm);
            if (l + 1 == L) append(transfers, weights(head_unit));
            if (l > 0) transfers.push_back({Interval::out, "activations of ", l, kept_});
            forward(l, transfers);
        }
        forward_ = sum_.products + sum_.attention + sum_.other;
        stretch("head", key(Pass::forward, FINAL_NORM), key(Pass::backward, FINAL_NORM), 0, {},
                [&] { row_op(Pass::forward, FINAL_NORM), head(), row_op(Pass::backward, FINAL_NORM); });
        for (size_t l = L; l-- > 0;) {  // a layer's gradients are summed while the one before it is computed
            std::vector<Transfer> transfers;
            if (sums) transfers = {gradients(l + 1 < L ? 2 + l : norm, last)};
            if (sums && l + 1 == L && head_unit) transfers.push_back(gradients(head_unit, last));
            if (every && l + 1 == L && !head_unit) transfers.push_back(gradients(0, false));  // it is the embedding
            if (l > 0 && l + 1 < L) append(transfers, weights(l));
            if (l > 0) transfers.push_back({Interval::in, "activations of ", l, kept_});
            backward(l, transfers);
        }
        stretch("embedding, backward", key(Pass::backward, EMBED), key(Pass::backward, EMBED), 0, {},
                [&] { row_op(Pass::backward, EMBED); });
        std::vector<Transfer> rest;
        if (sums) rest = {gradients(1, last), gradients(0, last)};
        if (sums && positions) rest.push_back(gradients(positions, last));
        alone(rest);
        return sum_;
    }

    // What follows the passes. Parameters that others have updated arrive while the next forward pass begins.
    StepSeconds update() {
        before_ += sum_.all(), sum_ = {};
        const OpKey norm = key(Pass::step, GRAD_NORM), adamw = key(Pass::step, ADAMW);
        stretch("gradient norm", norm, norm, 0, {}, [&] { row_op(Pass::step, ZERO_GRAD), row_op(Pass::step, GRAD_NORM); });
        const Transfer in{Interval::in, "moments and weights", whole, updated_}, out{Interval::out, in.what, whole, updated_};
        stretch("optimizer", adamw, adamw, 0, {in, out}, [&] { row_op(Pass::step, ADAMW); });
        double messages = seconds_of(messages_.momenta());
        if (!divided_) messages += std::max(seconds_of(messages_.gather(0)), seconds_of(messages_.gather_all()) - forward_);
        alone({{Interval::messages, "weights", whole, messages}});
        return sum_;
    }

  private:
    static constexpr size_t whole = SIZE_MAX;
    struct Transfer {  // what is on its way while ops run
        Interval::Lane lane;
        const char *what;
        size_t unit;  // whole: of all
        double seconds;
    };
    static void append(std::vector<Transfer> &to, const std::vector<Transfer> &more) {
        to.insert(to.end(), more.begin(), more.end());
    }
    std::vector<Transfer> weights(size_t unit) const {
        return {{Interval::messages, "weights of ", unit, gather(unit)}, {Interval::in, "weights of ", unit, copy(unit)}};
    }
    Transfer gradients(size_t unit, bool last) const { return {Interval::messages, "gradients of ", unit, reduce(unit, last)}; }
    std::string name_of(const Transfer &b) const {
        const Table &table = parts_.trained;
        if (b.unit == whole) return b.what;
        if (b.unit > 0 && b.unit <= c_.L) return format("%slayer %zu", b.what, b.unit - 1);
        return std::string(b.what) + (b.unit == 0                 ? "the embedding"
                                      : b.unit == table.positions ? "the positions"
                                      : b.unit == table.head      ? "the head"
                                                                  : "the final norm");
    }

    // Returns the seconds of an op, which is as long as the slower of its FLOPs and its bytes takes.
    double add(Pass pass, size_t op, size_t l = 0) {
        const Cost cost = ops_.cost(c_, work_, pass, op, l);
        const bool attention = op == ops_.attention;
        const double rate = !attention ? rates_.products : pass == Pass::backward ? rates_.attention_backward : rates_.attention;
        const double flops = cost.flops / rate, bytes = cost.bytes / rates_.memory;
        (flops < bytes ? sum_.other : attention ? sum_.attention : sum_.products) += std::max(flops, bytes);
        return std::max(flops, bytes);
    }
    OpKey key(Pass pass, RowOp op) const { return {size_t(pass), ops_.number(op), 0}; }
    double row_op(Pass pass, RowOp op) { return add(pass, ops_.number(op)); }

    // Where the head's gradient is computed in parts, the logits are computed once more.
    void head() {
        row_op(Pass::both, HEAD);
        const Unit &u = parts_.trained.units[parts_.trained.head];
        if (u.begin < u.end && parts_.sharding.bucket_of(u.begin) != parts_.sharding.bucket_of(u.end - 1))
            row_op(Pass::forward, HEAD);
    }

    double seconds_of(size_t bytes_of_all) const {
        const size_t ranks = parts_.sharding.stage ? parts_.sharding.parts : r_.world;
        return double(bytes_of_all) / double(r_.world) / rate_of_neighbours(ranks, rates_);
    }
    double gather(size_t unit) const { return divided_ ? seconds_of(messages_.gather(unit)) : 0; }
    double copy(size_t unit) const { return double(parts_.copied[unit]) / rates_.host; }
    double reduce(size_t unit, bool last) const {  // groups are on different hosts, if there are several
        const double rate = r_.world <= gpus_of_host ? rates_.link : std::min(rates_.link, rates_.network);
        const double of_replicas = double(messages_.sum_of_replicas(unit)) / double(r_.world) / rate;
        return seconds_of(messages_.sum(unit)) + (last ? of_replicas : 0);
    }

    // What attention of a layer waits for, of so many bytes that its ring sends meanwhile. Under ulysses nothing is computed meanwhile, and the first heads
    // of gather are waited for.
    double waits(double seconds, double attention) const {
        if (r_.sp_mode == SpMode::ulysses) return seconds;
        const double first = r_.sp_mode == SpMode::gather ? seconds * double(r_.head_stride) / double(c_.KV) : 0;
        return first + std::max(0.0, seconds - first - attention);
    }

    // Adds ops, and what they wait for: bytes that a ring sends, and what is on its way beside them.
    template <class F>
    void stretch(const std::string &what, OpKey first, OpKey last, size_t ring_bytes, const std::vector<Transfer> &transfers,
                 F add_ops) {
        const StepSeconds before = sum_;
        add_ops();
        const double begin = before_ + before.all(), ops = sum_.all() - before.all();
        record(Interval::ops, what, begin, ops, first, last);
        double busy[Interval::lanes] = {};
        for (const Transfer &b : transfers)
            record(b.lane, name_of(b), begin + busy[b.lane], b.seconds), busy[b.lane] += b.seconds;
        const double ring = double(ring_bytes) / double(r_.sp) / rate_of_ring(r_, rates_);
        record(Interval::messages, "keys and values", begin + busy[Interval::messages], ring);
        const double waiting = waits(ring, sum_.attention - before.attention);
        const double messages = std::max({0.0, waiting, ring + busy[Interval::messages] - ops});
        sum_.messages += messages;
        sum_.copies += std::max(0.0, std::max(busy[Interval::out], busy[Interval::in]) - ops - messages);
    }
    // Adds what all ops wait for, one after the other.
    void alone(const std::vector<Transfer> &waited_for) {
        for (const Transfer &b : waited_for) {
            record(b.lane, name_of(b), before_ + sum_.all(), b.seconds);
            (b.lane == Interval::messages ? sum_.messages : sum_.copies) += b.seconds;
        }
    }
    void record(Interval::Lane lane, const std::string &what, double begin, double seconds, OpKey first = {}, OpKey last = {}) {
        if (intervals_ && seconds > 0) intervals_->push_back({lane, what, begin, seconds, first, last});
    }

    void forward(size_t l, const std::vector<Transfer> &transfers) {
        stretch(format("layer %zu", l), OpKey{size_t(Pass::forward), 0, l},
                OpKey{size_t(Pass::forward), ops_.layer.size() - 1, l}, messages_.kv(l, false), transfers, [&] {
                    dequantise();
                    for (size_t op = 0; op < ops_.layer.size(); op++) add(Pass::forward, op, l);
                });
    }
    void backward(size_t l, const std::vector<Transfer> &transfers) {
        const size_t sent = messages_.kv(l, true) + messages_.dkv(l);
        stretch(format("layer %zu, backward", l), OpKey{size_t(Pass::backward), ops_.layer.size() - 1, l},
                OpKey{size_t(Pass::backward), ops_.attention, l}, sent, transfers, [&] {
                    dequantise();
                    for (size_t op = 0; op < ops_.layer.size(); op++) {
                        if (work_.recompute >= ops_.layer[op].from) add(Pass::recompute, op, l);
                        add(Pass::backward, op, l);
                    }
                });
    }
    void dequantise() {
        Work of_layer = work_;
        of_layer.bucket = parts_.quantised;
        sum_.other += ops_.cost(c_, of_layer, Pass::forward, ops_.number(DEQUANTISE), 0).bytes / rates_.memory;
    }

    const StepParts parts_;
    const OpList &ops_;
    const ModelConfig &c_;
    const Ranks &r_;
    const GpuRates &rates_;
    const Messages messages_;
    Work work_;
    const bool divided_;
    const double kept_, updated_;  // seconds of a copy: of what a layer keeps, of the moments and weights that lie in a store
    double forward_ = 0;           // of the ops of a forward pass
    StepSeconds sum_;
    double before_ = 0;  // the seconds before those of sum_
    std::vector<Interval> *const intervals_;
};

}  // namespace

Payload predict_messages(const StepParts &parts, const ModelConfig &config, const ModelLimits &limits, size_t micro_steps) {
    const Messages of(parts, config, limits);
    const Sharding &sharding = parts.sharding;
    const size_t L = config.L, units = parts.trained.units.size(), rings = limits.ranks.dp(), head = parts.trained.head;
    Payload sent;
    for (size_t l = 0; l < L; l++)
        sent.kv += micro_steps * rings * (of.kv(l, false) + of.kv(l, true)), sent.dkv += micro_steps * rings * of.dkv(l);
    for (size_t unit = 0; unit < units; unit++) sent.grads += of.sum(unit);
    if (sharding.stage >= 2) sent.grads = micro_steps * (sent.grads + (head == 0 ? of.sum(0) : 0));  // as head, and as embedding
    for (size_t unit = 0; unit < units; unit++) sent.grads += of.sum_of_replicas(unit);
    sent.params = of.gather_all();
    if (sharding.divided) {
        if (head == 0) sent.params += of.gather(0);
        for (size_t l = 0; l + 2 < L; l++) sent.params += of.gather(1 + l);  // once more, backward
        sent.params *= micro_steps;
    }
    sent.params += of.momenta();
    return sent;
}

StepSeconds predict_step(Model &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates,
                         size_t micro_steps) {
    Prediction prediction(model, config, limits, rates);
    StepSeconds sum;
    const StepSeconds row = prediction.pass(false);
    for (size_t i = 1; i < micro_steps; i++) sum += row;
    sum += prediction.pass(true);
    return sum += prediction.update();
}

std::vector<Interval> predict_timeline(Model &model, const ModelConfig &config, const ModelLimits &limits,
                                       const GpuRates &rates) {
    std::vector<Interval> intervals;
    Prediction prediction(model, config, limits, rates, &intervals);
    prediction.pass(true), prediction.update();
    return intervals;
}
