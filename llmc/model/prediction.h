// Predictions of what a training step sends and how long it takes on GPUs that do not run it: FLOPs and bytes of the ops (op_list.h), bytes of messages and
// of copies, each over a rate. The bytes of messages are those that ranks count; no time was compared with a GPU.
//
// The step has `micro_steps` rows for each ring. A row is limits.row_tokens long and full of documents of limits.positions tokens, all of them targets.
#pragma once
#include "../core/gpu.h"
#include "model.h"

// Returns what all ranks together send in the step, by the tables of ../parallel/ring.h and ../parallel/zero.h.
Payload predict_messages(const StepParts &parts, const ModelConfig &config, const ModelLimits &limits, size_t micro_steps);

// The seconds of the slowest rank.
struct StepSeconds {
    double products = 0, attention = 0, other = 0;  // other: ops whose bytes take longer than their FLOPs
    double messages = 0, copies = 0;                // what ops wait for, since it takes longer than the ops beside it

    double all() const { return products + attention + other + messages + copies; }
    StepSeconds &operator+=(const StepSeconds &o) {
        products += o.products, attention += o.attention, other += o.other, messages += o.messages, copies += o.copies;
        return *this;
    }
};

// A stretch of the step's last row on a GPU's time line: of the ops of a layer, or of what is on its way beside them.
struct Interval {
    enum Lane { ops, messages, out, in, lanes } lane;  // out, in: copies to the store and from there
    std::string what;
    double begin, seconds;
    OpKey first = {}, last = {};  // ops: the first and the last
};

// Where ranks are GPUs of hosts of 8, and each message begins as early as the decoder (decoder.h) begins it. The model needs no memory, but its plan counts.
StepSeconds predict_step(Model &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates,
                         size_t micro_steps);
// Returns what predict_step() of one micro-step adds up, in the order of its beginnings on each lane.
std::vector<Interval> predict_timeline(Model &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates);
