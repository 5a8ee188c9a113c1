// An entry of a model's parameter table.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

// One tensor of the Hugging Face files, and its position in the flat arrays of parameters, gradients and moments.
struct Tensor {
    // residual: GPT-2's projections into the residual stream; score: the head of a reward model, whose shape is (1, C); lora_a, lora_b: both
    // matrices of an adapter; router: it chooses experts, and is neither quantised nor updated by Muon; rate: logarithms of the delta rule's rates of decay
    enum Init { normal, residual, router, ones, zeros, rate, score, lora_a, lora_b };
    std::string name;
    std::vector<size_t> shape;
    Init init;
    bool decay;  // weight decay applies: true for matrices, false for norms and biases
    size_t offset, count;
    bool transposed = false;  // weight files store it as (shape[1], shape[0]), as GPT-2's Conv1D does; checkpoints do not
    bool product = false;     // its gradient is one matrix product, which can overwrite the array; other ops only add to it
    // True for a matrix of a layer or of a layer's adapter, except routers: Muon updates these, and --load_in quantises them.
    bool of_layer = false;
};
