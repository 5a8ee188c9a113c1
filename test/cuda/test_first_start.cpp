// Messages at a first start: too little memory, and a rank that stalls. test/ptx/kernels/test_first_start.cpp has the messages of programs for GPUs,
// test_devices.cpp those before anything runs.
#include <chrono>
#include <thread>

#include "../../llmc/core/memory.cuh"
#include "../errors.h"
#include "gpu_ranks.cuh"

__global__ void two_kernel(float *x) { x[threadIdx.x] = 2; }

TEST(FirstStart, TooLittleMemory) {
    const CudaStream stream;
    CudaMemory memory(stream);
    expect_error([&] { memory.allocate(size_t(1) << 50); },
                 {"cannot allocate 1048576.00 GiB of ", " free on the GPU: out of memory",
                  "\n  fix: see --plan; a smaller --row_tokens or --recompute layer needs less"});
    std::byte *const enough = memory.allocate(4096);  // the error leaves no state behind: the next launch succeeds
    launch(CudaF32{stream, nullptr}, two_kernel, Grid{1}, 32, 0, reinterpret_cast<float *>(enough));
    float last;
    memory.read(&last, enough + 31 * sizeof last, sizeof last);
    EXPECT_EQ(last, 2);
    memory.release(enough, 4096);
}

// Rank 1 does not call the sum, for which rank 0 would wait on its GPU. The watchdog ends the process.
TEST(FirstStartDeathTest, AStalledRankEndsTheWaitOnTheGpu) {
    if (ranks_with_gpus() < 2) GTEST_SKIP() << "2 GPUs are needed, and NCCL";
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto run = [] {
        run_threads(2, {.timeout = 60}, [](Comm &host) {
            select_gpu(host);
            const CudaStream stream;
            const auto comm = make_gpu_comm(host, stream, 1);
            DeviceArray<float> sums(8);
            if (comm->rank == 1) std::this_thread::sleep_for(std::chrono::minutes(1));
            comm->all_reduce_sum({sums.data(), 8});
            cuda_check_kernels(cudaStreamSynchronize(stream));
            return 0;
        });
    };
    EXPECT_EXIT(
        run(), testing::ExitedWithCode(1),
        "rank 0: all_reduce_sum(.|\n)*test_first_start.cpp:(.|\n)* is not done after --comm_timeout 1 seconds: another rank has not "
        "come so far\n  fix: raise --comm_timeout if a rank is only slow");
}
