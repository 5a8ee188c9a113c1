#define LLMC_NO_MAIN
#include "../train_gpt2.cu"
#include "../train_llama.cu"
//
#include "models.h"

// Instantiated in the trainers' units for rehearsals.
extern template void Decoder<CpuF32>::rehearse_as<Gpt2>(Touches &, const Calls &);
extern template void Decoder<CpuBf16>::rehearse_as<Gpt2>(Touches &, const Calls &);
extern template void Decoder<CpuF32>::rehearse_as<Llama>(Touches &, const Calls &);
extern template void Decoder<CpuBf16>::rehearse_as<Llama>(Touches &, const Calls &);

template <class Dev> std::unique_ptr<Decoder<Dev>> make_model(Dev dev, const ModelConfig &config, const ModelLimits &limits) {
    if (config.gpt2()) return std::make_unique<Gpt2<Dev>>(dev, config, limits);
    return std::make_unique<Llama<Dev>>(dev, config, limits);
}

#ifdef CUDA_HALF  // cuda/models.cpp
template std::unique_ptr<Decoder<CudaF32>> make_model(CudaF32, const ModelConfig &, const ModelLimits &);
template std::unique_ptr<Decoder<CudaBf16>> make_model(CudaBf16, const ModelConfig &, const ModelLimits &);
#else
template std::unique_ptr<Decoder<CpuF32>> make_model(CpuF32, const ModelConfig &, const ModelLimits &);
template std::unique_ptr<Decoder<CpuBf16>> make_model(CpuBf16, const ModelConfig &, const ModelLimits &);

Table table_of(const ModelConfig &config) { return config.gpt2() ? gpt2_table(config) : llama_table(config); }
OpList op_list_of(const ModelConfig &config) {
    return config.gpt2() ? Gpt2<CpuF32>::op_list(config) : Llama<CpuF32>::op_list(config);
}
#endif
