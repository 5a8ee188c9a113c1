// Messages at the first start of ranks with a GPU each, in a program without NCCL and with kernels for 9.0.
#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/parallel/comm_nccl.h"
#include "../../errors.h"

namespace {
std::string error_of_ranks(int ranks, const std::function<void(Comm &)> &f) {
    return error_of([&] {
        run_threads(ranks, {.timeout = 60}, [&](Comm &host) {
            f(host);
            return 0;
        });
    });
}
}  // namespace

TEST(PtxFirstStart, WithoutNccl) {
    EXPECT_EQ(
        error_of_ranks(3, [](Comm &host) { make_gpu_comm(host, nullptr, 60); }),
        "3 ranks with a GPU each, but this program was built without NCCL\n  fix: .venv/bin/pip install nvidia-nccl-cu13 (or NVIDIA's packages "
        "libnccl2 libnccl-dev), then make probe && make; or --device cpu");
}

TEST(PtxFirstStart, WithoutKernelsForTheGpu) {
    const ptx::OtherGpu a100(80);
    expect_contains(error_of_ranks(1, select_gpu),
                    {"GPU 0: ", " has compute capability 8.0, this program has kernels for 9.0\n  fix: build with GPU_ARCHS=80",
                     "leave it out by CUDA_VISIBLE_DEVICES"});
}

TEST(PtxFirstStart, MoreRanksThanGpus) {
    expect_contains(error_of_ranks(2, select_gpu), {"2 ranks on ", " but 1 GPU\n  fix: -np 1 there, or --device cpu"});
}
