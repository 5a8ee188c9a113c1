// The models of both trainers for a test program, which compiles the trainers once, in models.cpp.
#pragma once
#include "../llmc/model/decoder.h"
#include "../llmc/model/weights.h"
#include "../llmc/train/run.h"
#include "check.h"
#ifdef CUDA_HALF
#include "../llmc/ops/kernels.cuh"
#endif

// Creates the model of a configuration. Dev: CpuF32, CpuBf16; with kernels also CudaF32, CudaBf16.
template <class Dev> std::unique_ptr<Decoder<Dev>> make_model(Dev dev, const ModelConfig &config, const ModelLimits &limits);

template <class Dev> ModelFactory models_on(Dev dev) {
    return [dev](const ModelConfig &config, const ModelLimits &limits) { return make_model(dev, config, limits); };
}
template <class X> ModelFactory cpu_models() {
    if constexpr (sizeof(X) == 2) return models_on(make_device<CpuBf16>());
    else return models_on(make_device<CpuF32>());
}

Table table_of(const ModelConfig &config);
OpList op_list_of(const ModelConfig &config);

inline const char *program_of(const std::string &golden) { return golden.starts_with("gpt2") ? "train_gpt2" : "train_llama"; }
