// What the wrapper of cuBLASLt asks for. The stand-in (dev/emulator/ptx/cublaslt.cpp) checks the library's rules at every product of every test; here
// are the products whose shapes and addresses are awkward.
#include <cublasLt.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/core/file.h"
#include "../../../llmc/ops/loss.cuh"
#include "../../cuda/matmul_context.cuh"
#include "../../errors.h"

template <class Dev> struct PtxHead : testing::Test {};
TYPED_TEST_SUITE(PtxHead, CudaDevices);

// Tensor cores read and write 16 bytes at a time: even with GPT-2's odd vocabulary every row must be aligned. (C is a multiple of 8 in every model.)
// The products are those of the head: forward, backward, and the weight's gradient in two ranges of the vocabulary.
TYPED_TEST(PtxHead, RowsOfAnOddVocabularyAreAligned) {
    using X = typename TypeParam::X;
    const MatmulContext context;
    const TypeParam dev{nullptr, context.get()};
    const size_t T = 37, C = 24, N = T;
    std::vector<int32_t> every_row(N);
    std::iota(every_row.begin(), every_row.end(), 0);
    for (size_t V : {51, 257, 50257 % 1024}) {
        DeviceArray<X> x(random_values<X>(T * C, 1)), w(random_values<X>(V * C, 2)), dx(T * C);
        DeviceArray<int32_t> rows(every_row), targets(every_row);
        DeviceArray<float> weights(std::vector<float>(N, 1)), dw(V * C), stats(5 * N);
        DeviceArray<char> scratch(lm_head_scratch(dev, N, C, V));
        float *const s = stats.data();
        const HeadStats head = {s, s + N, s + 2 * N, s + 3 * N, s + 4 * N};
        const HeadLoss loss = {rows.data(), targets.data(), weights.data()};
        ptx::products.clear();
        lm_head(dev, head, dx.data(), dw.data(), scratch.data(), x.data(), w.data(), loss, T, C, V, N, false);
        for (const auto &[first, last] : {std::pair<size_t, size_t>{0, V / 3}, {V / 3, V}})
            lm_head_weight(dev, dw.data() + first * C, scratch.data(), x.data(), w.data(), loss, head, C, V, N, first,
                           last - first);
        EXPECT_EQ(ptx::products.size(), 3u + 2 * 2u);
        for (const ptx::Product &p : ptx::products) {
            EXPECT_EQ(p.a_ld * p.in_bytes % 16, 0u) << p.m << " " << p.n << " " << p.k;
            EXPECT_EQ(p.b_ld * p.in_bytes % 16, 0u) << p.m << " " << p.n << " " << p.k;
            EXPECT_EQ(p.d_ld * p.out_bytes % 16, 0u) << p.m << " " << p.n << " " << p.k;
            EXPECT_GE(p.alignment, 16u) << p.m << " " << p.n << " " << p.k;
        }
    }
}

// A plan of a run moves arrays about. As long as they begin at multiples of array_alignment, and for parts of arrays wherever vectors
// can read them, cuBLASLt is asked the same, and once.
TEST(PtxCublas, TheChoiceOfAnAlgorithmDoesNotDependOnThePlan) {
    const size_t T = 64, C = 64, room = 4096;
    const MatmulContext context;
    const CudaBf16 dev{nullptr, context.get()};
    DeviceArray<bf16> x(T * C + room), w(C * C + room), out(T * C + room);
    const auto asked = [&](size_t elements) {  // of cuBLASLt, when all arrays lie so much later
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

TEST(PtxCublas, AnAnswerWithoutSuccessIsNoAlgorithm) {
    const MatmulContext context;
    const CudaBf16 dev{nullptr, context.get()};
    DeviceArray<bf16> x(8 * 8), w(8 * 8), out(8 * 8);
    ptx::heuristic_state = CUBLAS_STATUS_NOT_SUPPORTED;
    const std::string said = error_of([&] { matmul_forward(dev, out.data(), x.data(), w.data(), nullptr, 8, 8, 8); });
    ptx::heuristic_state = CUBLAS_STATUS_SUCCESS;
    EXPECT_EQ(said, "cuBLASLt has no algorithm for a product of (8, 8) and (8, 8) aligned to 256 bytes: not supported");
}

// With --autotune. The cache is in a directory of the test's own.
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
    std::vector<int> algorithms(bool accumulate = false) {  // of each product that one call computes
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

TEST_F(PtxAutotune, TheFastestOfAllCandidatesIsTaken) {
    EXPECT_EQ(algorithms(), (std::vector{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 1}));
    EXPECT_EQ(algorithms(), std::vector{1});
    EXPECT_EQ(float(out.values()[63]), 8);
}

TEST_F(PtxAutotune, LaterRunsTakeTheSame) {
    algorithms();
    ptx::fastest = 2;
    start();
    EXPECT_EQ(algorithms(), std::vector{1});
}

// Trials would add to the sum.
TEST_F(PtxAutotune, AProductThatAddsIsNotTried) {
    EXPECT_EQ(algorithms(true), std::vector{0});
    EXPECT_EQ(float(out.values()[63]), 1 + 8);
    start();
    EXPECT_EQ(algorithms(), std::vector{0});  // and whatever comes first, the next run takes the same
}

TEST_F(PtxAutotune, AProductThatAddsTakesWhatWasTried) {
    algorithms();
    EXPECT_EQ(algorithms(true), std::vector{1});
    EXPECT_EQ(float(out.values()[63]), 8 + 8);
}

TEST_F(PtxAutotune, ARefusedAlgorithmIsNamed) {
    algorithms();
    const std::string path = file();
    const std::string product = "bf16 bf16, (8, 8) T 8 times (8, 8) N 8 to 8, aligned to 256";
    write_file(path, product + ": 0 0 0 0 0 0 0 0\n");
    start();
    EXPECT_EQ(error_of([&] { algorithms(); }),
              path + ": cuBLASLt refuses the algorithm for " + product + "\n  fix: remove the file; --autotune writes a new one");
}

TEST(PtxCublas, NoProductUsesAWorkspaceThatIsNotThere) {
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
              "cuBLASLt's rule: the workspace is allocated");  // the replacement notices an error that a GPU would not
    ptx::products.clear();
}
