// A run's choice of device, and its messages without one, from made-up answers of the driver.
#include "../llmc/core/gpu.h"

#include "errors.h"

namespace {

GpuQuery healthy() {  // an H100, as a program built with CUDA 13.0 sees it
    GpuQuery q;
    q.compiled = true, q.archs = {80, 90, 100}, q.runtime = 13000, q.driver = 13010, q.gpus = {{"NVIDIA H100", 90}};
    return q;
}

void expect_none(const GpuQuery &q, const std::string &cause, const std::string &fix) {
    std::string note;
    EXPECT_FALSE(use_gpu("auto", q, note));
    EXPECT_EQ(note, q.driver ? "no CUDA device: " + cause + "; using the CPU" : "");
    expect_error([&] { use_gpu("cuda", q, note); }, {"no CUDA device: " + cause, "fix: " + fix, "or --device cpu"});
}

}  // namespace

TEST(Devices, GpuIsUsedUnlessTheUserAsksForTheCpu) {
    std::string note;
    EXPECT_TRUE(use_gpu("auto", healthy(), note));
    EXPECT_TRUE(use_gpu("cuda", healthy(), note));
    EXPECT_FALSE(use_gpu("cpu", healthy(), note));
    EXPECT_EQ(note, "");
    GpuQuery q = healthy();
    for (int arch : {86, 89, 103, 120}) {  // kernels of the same major version, or compiled from PTX
        q.gpus = {{"another", arch}};
        EXPECT_TRUE(use_gpu("cuda", q, note)) << arch;
    }
    q.archs = {80, 100}, q.gpus = {{"NVIDIA H100", 90}};
    EXPECT_FALSE(use_gpu("auto", q, note));
}

TEST(Devices, MessageSaysWhyThereIsNone) {
    GpuQuery q;
    for (const int driver : {0, 1}) {
        q.driver = driver;
        expect_none(q, "this program was built without CUDA", "make probe && make, where there is nvcc");
    }
    q = healthy();
    q.driver = 0;
    expect_none(q, "there is no NVIDIA driver", "install one");
    q.driver = 12080;
    expect_none(q, "the driver is for CUDA 12.8, this program was built with 13.0",
                "install a driver for CUDA 13, or build with CUDA 12");
    q = healthy(), q.gpus.clear();
    expect_none(q, "the driver shows no GPU", "look at nvidia-smi and at CUDA_VISIBLE_DEVICES");
    q.error = "no CUDA-capable device is detected";
    expect_none(q, "no CUDA-capable device is detected", "look at nvidia-smi");
    q = healthy(), q.gpus = {{"Tesla T4", 75}};
    expect_none(q, "Tesla T4 has compute capability 7.5, this program has kernels for 8.0, 9.0, 10.0",
                "a GPU of 8.0 (Ampere) or later");
    q.archs = {90}, q.gpus = {{"NVIDIA A100", 80}};
    expect_none(q, "NVIDIA A100 has compute capability 8.0, this program has kernels for 9.0", "build with GPU_ARCHS=80");
}

TEST(Devices, RanksOfAHostUseOneGpuEach) {
    const std::vector<std::string> hosts = {"a", "b", "a", "b", "a"}, all(5, "0,1"), own = {"0", "0", "1", "1", "2"};
    const int want[] = {0, 0, 1, 1, 2};
    for (size_t r = 0; r < 5; r++) EXPECT_EQ(pick_gpu(hosts, all, r, 3), want[r]);
    for (size_t r = 0; r < 5; r++) EXPECT_EQ(pick_gpu(hosts, own, r, 1), 0);  // each rank sees one GPU
    EXPECT_EQ(error_of([&] { pick_gpu(hosts, all, 0, 2); }), "3 ranks on a but 2 GPUs\n  fix: -np 2 there, or --device cpu");
    EXPECT_EQ(error_of([&] { pick_gpu(hosts, all, 1, 1); }), "2 ranks on b but 1 GPU\n  fix: -np 1 there, or --device cpu");
}

TEST(Devices, MachineWithSeveralKindsOfGpu) {
    GpuQuery q = healthy();
    std::string note;
    q.archs = {90}, q.gpus = {{"NVIDIA H100", 90}, {"NVIDIA A100", 80}, {"Tesla T4", 75}};
    EXPECT_TRUE(use_gpu("cuda", q, note)) << "a single rank uses the first GPU";
    EXPECT_EQ(error_of([&] { need_kernels(q, 0); }), "no error");
    EXPECT_EQ(error_of([&] { need_kernels(q, 1); }),
              "GPU 1: NVIDIA A100 has compute capability 8.0, this program has kernels for 9.0\n"
              "  fix: build with GPU_ARCHS=\"80 90\", or leave it out by CUDA_VISIBLE_DEVICES");
    expect_error([&] { need_kernels(q, 2); }, {"GPU 2: Tesla T4", "a GPU of 8.0 (Ampere) or later"});
}
