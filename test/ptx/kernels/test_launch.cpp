// What launch() tells the driver of a kernel.
#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/ops/attention.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention.h"

// Without the preference the driver chooses how much of an SM's memory is shared, and may leave a kernel room for fewer blocks than fit.
TEST(PtxLaunch, KernelsWithMuchSharedMemoryPreferItToL1) {
    const AttentionCase a{{70}, 0, 2, 1, 128};
    run_attention<DeviceArray>(CudaBf16{}, a, AttentionValues<bf16>(a));
    size_t large = 0;
    for (const ptx::Launches &l : ptx::launched())
        if (l.launch.shared > 48 * 1024) {
            EXPECT_EQ(l.carveout, int(cudaSharedmemCarveoutMaxShared)) << l.name;
            large++;
        }
    EXPECT_GE(large, 3u);  // forward, keys, queries
}
