// The PTX instructions our kernels use. Each has a twin of the same name and signature in the emulator (dev/emulator/simt.h).
// Layouts and semantics: PTX ISA 8.0, "Warp Level Matrix Instructions" and "Data Movement: cp.async".
//
// mma_m16n8k16(d, a, b): d += A B for A (16, 16) and B (16, 8) in bf16, d (16, 8) in float. With g = lane / 4 and t = lane % 4 a lane holds
//   a[0] = A[g][2t, 2t+1]   a[1] = A[g+8][2t, 2t+1]   a[2] = A[g][2t+8, 2t+9]   a[3] = A[g+8][2t+8, 2t+9]     the first in the lower half
//   b[0] = B[2t, 2t+1][g]   b[1] = B[2t+8, 2t+9][g]
//   d[0], d[1] = D[g][2t, 2t+1]     d[2], d[3] = D[g+8][2t, 2t+1]
// ldmatrix_x4(r, row): four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8, 16 bytes aligned
//   to 16 in shared memory. r[i] = matrix i's [g][2t, 2t+1];   _trans: its [2t, 2t+1][g].
// cp_async_16(to, from, valid): 16 bytes from device to shared memory, both aligned to 16; zeros where !valid, and `from` is not read.
//   They have landed, for the thread that asked, after the cp_async_wait<N> that leaves only the N youngest committed groups open.
// bar_sync(id, threads), bar_arrive: a barrier for some warps of the block (id 1 to 15; threads that wait or arrive, a multiple of 32).
#pragma once
#include "../core/launch.cuh"

inline namespace CUDA_BACKEND {
constexpr float log2_e = 1.44269504f;  // exp(x) = exp2_approx(log2_e * x)
constexpr float ln_2 = 0.69314718f;    // log(x) = ln_2 * log2(x)

#ifdef LLMC_EMULATE
using simt::bar_arrive;
using simt::bar_sync;
using simt::cp_async_16;
using simt::cp_async_commit;
using simt::cp_async_wait;
using simt::exp2_approx;
using simt::ldmatrix_x4;
using simt::ldmatrix_x4_trans;
using simt::mma_m16n8k16;
using simt::pack_bf16;
#else
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline unsigned shared_address(const void *p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ inline void cp_async_16(void *to, const void *from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ inline void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

__device__ inline uint32_t pack_bf16(float low, float high) {  // two floats, rounded to nearest even, in one register
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ inline float exp2_approx(float x) {  // 2^x within 2 ulp; denormal results become 0
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#endif
}  // namespace CUDA_BACKEND
