// The choice of cuBLASLt's algorithms. The interpreter's replacement (dev/emulator/ptx/cublaslt.cpp) checks the library's rules at every product of every
// test.
#include <cublasLt.h>
#include <unistd.h>

#include <filesystem>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/core/file.h"
#include "../../cuda/matmul_context.cuh"
#include "../../errors.h"

// Every plan of memory places arrays elsewhere. Arrays at multiples of array_alignment, and parts of arrays with the alignment of vectors, share one
// question to cuBLASLt.
TEST(PtxCublas, ThePlanDoesNotChangeTheAlgorithm) {
    const size_t T = 64, C = 64, room = 4096;
    const MatmulContext context;
    const CudaBf16 dev{nullptr, context.get()};
    DeviceArray<bf16> x(T * C + room), w(C * C + room), out(T * C + room);
    const auto asked = [&](size_t elements) {  // number of questions if all arrays begin so many elements later
        const int before = ptx::heuristics;
        matmul_forward(dev, out.data() + elements, x.data() + elements, w.data() + elements, nullptr, T, C, C);
        return ptx::heuristics - before;
    };
    EXPECT_EQ(asked(0), 1);
    for (size_t bytes : {256, 512, 768, 4096}) EXPECT_EQ(asked(bytes / 2), 0) << bytes;
    EXPECT_EQ(asked(16 / 2), 1);
    for (size_t bytes : {32, 64, 128, 16 * 31}) EXPECT_EQ(asked(bytes / 2), 0) << bytes;
    EXPECT_EQ(asked(2 / 2), 1);
    for (size_t bytes : {4, 8, 2 * 77}) EXPECT_EQ(asked(bytes / 2), 0) << bytes;
    ptx::products.clear();
}

TEST(PtxCublas, AFailedHeuristicIsAnError) {
    const MatmulContext context;
    const CudaBf16 dev{nullptr, context.get()};
    DeviceArray<bf16> x(8 * 8), w(8 * 8), out(8 * 8);
    ptx::heuristic_state = CUBLAS_STATUS_NOT_SUPPORTED;
    const std::string message = error_of([&] { matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, 8, 8, 8); });
    ptx::heuristic_state = CUBLAS_STATUS_SUCCESS;
    EXPECT_EQ(message, "cuBLASLt has no algorithm for a product of (8, 8) and (8, 8) aligned to 256 bytes: not supported");
}

// Timed algorithms, with a cache in a temporary directory.
struct PtxAutotune : testing::Test {
    const std::string cache = testing::TempDir() + format("autotune-%d", int(getpid()));
    const std::vector<bf16> ones = std::vector<bf16>(8 * 8, bf16(1));
    DeviceArray<bf16> x{ones}, w{ones}, out{ones};
    std::unique_ptr<MatmulContext> context;

    void SetUp() override {
        setenv("XDG_CACHE_HOME", cache.c_str(), 1);
        ptx::candidates = 3, ptx::fastest = 1;
        start();
    }
    void TearDown() override {
        unsetenv("XDG_CACHE_HOME");
        std::filesystem::remove_all(cache);
        ptx::candidates = 1, ptx::fastest = 0;
        ptx::products.clear();
    }
    void start() { context = std::make_unique<MatmulContext>(true); }
    std::vector<int> algorithms(bool accumulate = false) {  // of the products of one call
        ptx::products.clear();
        matmul_forward(CudaBf16{nullptr, context->get()}, out.data(), x.data(), w.data(), nullptr, 8, 8, 8, 0, accumulate);
        std::vector<int> numbers;
        for (const ptx::Product &p : ptx::products) numbers.push_back(p.algorithm);
        return numbers;
    }
    std::string file() const {
        return AlgorithmChoices(format("the PTX interpreter, cuBLASLt %d, sums %d", CUBLAS_VERSION, int(CUBLAS_COMPUTE_32F)))
            .path();
    }
};

// The first product of a shape runs every candidate. A product that adds to its output runs once, with an earlier choice or the first candidate.
TEST_F(PtxAutotune, TheFastestCandidateIsKept) {
    EXPECT_EQ(algorithms(), (std::vector{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 1}));
    EXPECT_EQ(algorithms(), std::vector{1});
    EXPECT_EQ(float(out.values()[63]), 8);
    EXPECT_EQ(algorithms(true), std::vector{1});
    EXPECT_EQ(float(out.values()[63]), 8 + 8);
    ptx::fastest = 2;
    start();
    EXPECT_EQ(algorithms(), std::vector{1}) << "the next run reads the cache";
}

TEST_F(PtxAutotune, AProductThatAddsIsNotTried) {
    EXPECT_EQ(algorithms(true), std::vector{0});
    EXPECT_EQ(float(out.values()[63]), 1 + 8);
    start();
    EXPECT_EQ(algorithms(), std::vector{0}) << "the next run reads the cache";
}

TEST_F(PtxAutotune, ARefusedAlgorithmIsNamed) {
    algorithms();
    const std::string path = file();
    const std::string product = "bf16 bf16, (8, 8) T 8 times (8, 8) N 8 to 8, aligned to 256";
    write_file(path, product + ": 0 0 0 0 0 0 0 0\n");
    start();
    EXPECT_EQ(error_of([&] { algorithms(); }), path + ": cuBLASLt refuses the algorithm for " + product +
                                                   "\n  fix: remove the file; the next run writes a new one");
}

TEST(PtxCublas, AProductNeedsItsWorkspace) {
    const auto context = make_cuda_context(1);
    const CudaBf16 dev{nullptr, context.get()};
    DeviceArray<bf16> x(8 * 8), w(8 * 8), out(8 * 8);
    const auto multiply = [&] { matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, 8, 8, 8); };
    EXPECT_EQ(error_of(multiply), "a product before matmul_use_scratch, or after its memory was freed");
    {
        DeviceArray<char> scratch(matmul_scratch(dev));
        matmul_use_scratch(dev, scratch.data());
        EXPECT_EQ(error_of(multiply), "no error");
    }
    EXPECT_EQ(error_of(multiply),
              "cuBLASLt's rule: the workspace is allocated");  // a GPU would not report this error
    ptx::products.clear();
}
