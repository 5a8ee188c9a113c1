// The emulator itself.
#include "../../llmc/ops/ptx.cuh"
#include "../../llmc/ops/warp.cuh"
#include "check.cuh"

template <class X> __global__ void sum_rows_kernel(float *out, const X *x, size_t C) {
    struct Shared {
        float partial[32];
    };
    float sum = 0;
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) sum += float(x[blockIdx.x * C + c]);
    sum = block_sum(sum, shared_mem<Shared>().partial);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

template <class Dev> struct Simt : testing::Test {};
TYPED_TEST_SUITE(Simt, CudaDevices);

TYPED_TEST(Simt, BlockSum) {
    using X = typename TypeParam::X;
    const size_t T = 37, C = 301;
    const auto x = random_values<X>(T * C, 1);
    std::vector<double> want(T);
    for (size_t i = 0; i < T * C; i++) want[i / C] += double(float(x[i]));
    for_each_order<TypeParam>([&](TypeParam dev) {
        DeviceArray<X> d_x(x);
        DeviceArray<float> out(T);
        launch(dev, sum_rows_kernel<X>, Grid{T}, 128, 128, out.data(), d_x.data(), C);
        expect_close("block_sum", out.values(), want, 0x1p-24 * 10 * 60 * 4);
    });
}
