// Settings of ops that a model's configuration or the command line chooses. They have their own header, so that files that only pass them on
// (../model/config.h, ../model/model.h, the tasks) do not compile kernels. The contract of each op defines its settings.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>

// ---- gelu.h, swiglu.h ----

enum class Gelu { erf, tanh };
enum class Gate { silu, gelu };

// ---- sample.h, attention_decode.h ----

struct Sampling {
    double temperature = 0;
    size_t top_k = 0;
    double top_p = 1;
    double min_p = 0;
    double repetition_penalty = 1;

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};

constexpr int32_t no_token = -1;  // sampled from logits that are not finite

constexpr size_t cache_page = 64;  // tokens per page of keys and values

// ---- loss.h ----

// Bytes of logits in a chunk of the head on CPUs. Each chunk reads the head's weights and adds to their gradient, so large chunks need less of the
// memory's bandwidth.
constexpr size_t least_head_chunk = size_t(128) << 20, most_head_chunk = size_t(512) << 20;

// ---- adamw.h ----

enum class Moments { f32, bf16, blockwise };  // storage formats

struct AdamW {  // members are double, because 1 - 0.999f is off by 1e-5
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale;  // for example max_norm / norm if gradients are clipped
    size_t step;        // the first update is step 1
    uint64_t seed = 0;  // for moments in bf16
    size_t first = 0;   // the number of element 0 in the model

    auto pointers() const { return std::tuple(); }  // ../core/rehearsal.h
};
