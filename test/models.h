// Both trainers' models in one program, and the one that a configuration asks for. For test programs that have defined LLMC_NO_MAIN.
#pragma once
#include "../train_gpt2.cu"
#include "../train_llama.cu"
#ifdef CUDA_HALF
#include "../llmc/ops/kernels.cuh"
#endif

template <class Dev> std::unique_ptr<Decoder<Dev>> make_model(Dev dev, const ModelConfig &config, const ModelLimits &limits) {
    if (config.gpt2()) return std::make_unique<Gpt2<Dev>>(dev, config, limits);
    return std::make_unique<Llama<Dev>>(dev, config, limits);
}

inline Table table_of(const ModelConfig &config) { return config.gpt2() ? gpt2_table(config) : llama_table(config); }

inline const char *program_of(const std::string &golden) { return golden.starts_with("gpt2") ? "train_gpt2" : "train_llama"; }
