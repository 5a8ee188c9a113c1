// Queries the driver for its GPUs. The emulator has one.
#include <sstream>

#include "gpu.h"
#include "launch.cuh"

GpuQuery query_gpus() {
    GpuQuery q;
    q.compiled = true;
#ifdef LLMC_EMULATE
    q.runtime = q.driver = 13000, q.archs = {80}, q.gpus = {{"the emulator", 80}};
#else
    std::istringstream archs(LLMC_GPU_ARCHS);
    for (int arch; archs >> arch;) q.archs.push_back(arch);
    cudaRuntimeGetVersion(&q.runtime);
    cudaDriverGetVersion(&q.driver);
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error) q.error = cudaGetErrorString(error);
    for (int i = 0; i < count; i++) {
        cudaDeviceProp properties;
        if (cudaGetDeviceProperties(&properties, i) == cudaSuccess)
            q.gpus.push_back({properties.name, 10 * properties.major + properties.minor});
    }
#endif
    return q;
}
