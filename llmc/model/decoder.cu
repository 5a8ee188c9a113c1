// Compiles the base class of the models, once for both trainers.
#include "decoder.h"

#ifdef CUDA_HALF
#include "../ops/kernels.cuh"
template class Decoder<CudaF32>;
template class Decoder<CudaBf16>;
#else
template class Decoder<CpuF32>;
template class Decoder<CpuBf16>;
#endif
