// Attributes of kernels that launch() sets.
#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/ops/attention.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention.h"

// Without this preference the driver divides an SM's memory between L1 and shared memory, and fewer blocks may fit.
TEST(PtxLaunch, LargeKernelsPreferSharedMemoryToL1) {
    const AttentionCase a{{70}, 0, 2, 1, 128};
    run_attention<DeviceArray>(CudaBf16{}, a, AttentionValues<bf16>(a));
    size_t large = 0;
    for (const ptx::Launches &l : ptx::launched())
        if (l.launch.shared > 48 * 1024) {
            EXPECT_EQ(l.carveout, int(cudaSharedmemCarveoutMaxShared)) << l.name;
            large++;
        }
    EXPECT_GE(large, 2u);  // forward, backward
}

static __global__ void static_and_dynamic_kernel(float *out) {
    __shared__ float fixed[10000];
    extern __shared__ float given[];
    fixed[threadIdx.x] = given[threadIdx.x] = 1;
    out[threadIdx.x] = fixed[threadIdx.x] + given[threadIdx.x];
}

// Static and dynamic shared memory have 48 KiB together, unless the attribute sets a limit for the dynamic part alone.
TEST(PtxLaunch, TheAttributeLimitsDynamicSharedMemory) {
    constexpr size_t bytes = 16 * 1024;
    DeviceArray<float> out(32);
    const auto launched_with = [&](size_t shared) {
        static_and_dynamic_kernel<<<1, 32, shared>>>(out.data());
        return cudaGetLastError();
    };
    EXPECT_EQ(launched_with(8 * 1024), cudaSuccess);
    EXPECT_EQ(launched_with(bytes), cudaErrorInvalidValue);
    ASSERT_EQ(cudaFuncSetAttribute(static_and_dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)),
              cudaSuccess);
    EXPECT_EQ(launched_with(bytes), cudaSuccess);
    EXPECT_EQ(launched_with(bytes + 4), cudaErrorInvalidValue);
}
