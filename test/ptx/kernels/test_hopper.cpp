// What nvcc makes of Hopper's instructions: a product of bf16 by TMA, multicast and wgmma, in clusters of two blocks.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "../../../llmc/core/dtype.h"

namespace {

constexpr int tile = 64, stages = 2, box_bytes = tile * tile * 2;  // rows of A and of B, elements of K; a tile of one of them

__device__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void arrive(uint64_t *barrier, uint32_t rank) {  // at the same mbarrier of a block of the cluster
    asm volatile(
        "{ .reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
__device__ void wait(uint64_t *barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra AGAIN;\n"
        "DONE: }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
__device__ void load(void *to, const CUtensorMap *map, int column, int row, uint64_t *barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}
__device__ void meet() {  // the cluster's blocks
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Rows of 128 bytes with a swizzle of 128, eight rows after 1024 bytes.
__device__ uint64_t descriptor(const void *p) {
    return uint64_t(shared_address(p) >> 4) | uint64_t(1024 / 16) << 32 | uint64_t(1) << 62;
}
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
          "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b));
}

struct Stage {
    uint8_t a[box_bytes], b[box_bytes];
};

// D (128, 64) = A (128, K) B (64, K)^T. A block has 64 rows of A, and loads one half of B for both. Its last warp loads, the others multiply.
__global__ void __cluster_dims__(2, 1, 1)
    product(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float *D, int K) {
    __shared__ alignas(1024) Stage stage[stages];
    __shared__ uint64_t full[stages], empty[stages];
    const int rank = int(blockIdx.x), tiles = K / tile;
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(shared_address(&empty[s])) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet();
    if (threadIdx.x >= 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        for (int t = 0; t < tiles && threadIdx.x == 128; t++) {
            Stage &now = stage[t % stages];
            wait(&empty[t % stages], t / stages % 2 ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full[t % stages])),
                         "r"(2 * box_bytes)
                         : "memory");
            load(now.a, &a_map, t * tile, rank * tile, &full[t % stages], uint16_t(1 << rank));
            load(now.b + rank * box_bytes / 2, &b_map, t * tile, rank * tile / 2, &full[t % stages], 3);
        }
    } else {
        float d[32] = {};
        for (int t = 0; t < tiles; t++) {
            Stage &now = stage[t % stages];
            wait(&full[t % stages], t / stages % 2);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int k = 0; k < tile / 16; k++) multiply(d, descriptor(now.a) + 2 * k, descriptor(now.b) + 2 * k);
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (threadIdx.x < 2) arrive(&empty[t % stages], threadIdx.x);
        }
        const int row = rank * tile + int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 4;
        for (int r = 0; r < 32; r++) D[(row + r / 2 % 2 * 8) * tile + r / 4 * 8 + int(threadIdx.x) % 4 * 2 + r % 2] = d[r];
    }
    meet();
}

// Boxes of 64 elements of K and `rows` rows of a matrix (all, K).
CUtensorMap map_of(bf16 *p, int all, int K, int rows) {
    void *function = nullptr;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, nullptr);
    CUtensorMap map;
    const cuuint64_t dims[] = {cuuint64_t(K), cuuint64_t(all)}, stride = cuuint64_t(K) * 2;
    const cuuint32_t box[] = {tile, cuuint32_t(rows)}, steps[] = {1, 1};
    EXPECT_EQ(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
                  &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, p, dims, &stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
              CUDA_SUCCESS);
    return map;
}
}  // namespace

TEST(PtxHopperKernels, ProductOfAClusterByTmaAndWgmma) {
    constexpr int M = 2 * tile, N = tile, K = 5 * tile;
    bf16 *a, *b;
    float *d;
    cudaMalloc(reinterpret_cast<void **>(&a), sizeof(bf16) * M * K),
        cudaMalloc(reinterpret_cast<void **>(&b), sizeof(bf16) * N * K);
    cudaMalloc(reinterpret_cast<void **>(&d), sizeof(float) * M * N);
    for (int i = 0; i < M * K; i++) a[i] = bf16(float(i * 7 % 9 - 4));
    for (int i = 0; i < N * K; i++) b[i] = bf16(float(i * 5 % 11 - 5));
    product<<<2, 160>>>(map_of(a, M, K, tile), map_of(b, N, K, tile / 2), d, K);
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    int wrong = 0;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float sum = 0;
            for (int k = 0; k < K; k++) sum += float(a[m * K + k]) * float(b[n * K + k]);
            wrong += d[m * N + n] != sum;
        }
    EXPECT_EQ(wrong, 0);
    cudaFree(a), cudaFree(b), cudaFree(d);
}
