// Predictions of a training step's messages and time on GPUs that do not run it. The model is rehearsed
// (../core/rehearsal.h), and each event of its step costs time: an op its FLOPs and bytes (op_list.h) over the GPU's rates, a
// message or a copy its bytes over a link's. So the prediction follows the decoder's order of early and late work. The bytes of
// messages equal the ranks' counts; docs/memory.md compares the times with a GPU.
//
// The step has `micro_steps` rows for each ring. A row is limits.row_tokens long and full of documents of limits.positions
// tokens, all of them targets. The model needs no memory, but its plan counts.
#pragma once
#include "../core/gpu.h"
#include "model.h"

// Returns the bytes that all ranks together send in the step, by the tables of ../parallel/ring.h and ../parallel/zero.h.
Payload predict_messages(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits, size_t micro_steps);

// Predicted seconds of the slowest rank.
struct StepSeconds {
    double products = 0, attention = 0, other = 0;  // other: ops whose bytes take longer than their FLOPs
    double messages = 0, copies = 0;                // time that ops wait for transfers longer than the overlapping ops

    double all() const { return products + attention + other + messages + copies; }
    // Adds `times` the difference of two predictions.
    void extend(const StepSeconds &more, const StepSeconds &less, double times) {
        for (double StepSeconds::*part :
             {&StepSeconds::products, &StepSeconds::attention, &StepSeconds::other, &StepSeconds::messages, &StepSeconds::copies})
            this->*part += times * (more.*part - less.*part);
    }
};

// One interval of the predicted timeline: a layer's ops, or a transfer.
struct Interval {
    enum Lane { ops, messages, out, in, lanes } lane;  // ops, and then the lanes of transfers (Event::Lane)
    std::string what;
    double begin, end;
    OpKey first = {}, last = {};  // ops: the first and the last
};

// Ranks are GPUs of hosts of 8. The slowest rank counts.
StepSeconds predict_step(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits, const GpuRates &rates,
                         size_t micro_steps);
// Returns the intervals of a step of one micro-step, in their order on each lane.
std::vector<Interval> predict_timeline(Diagnosis &model, const ModelConfig &config, const ModelLimits &limits,
                                       const GpuRates &rates);
