// CUTLASS's matrix products for sm_90a: D = alpha A B^T + beta C. Each is a compilation unit.
#pragma once

struct Gemm {
    int m, n, k;
    const void *a, *b;  // (m, k), (n, k): bf16 or e4m3
    const void *c;      // (m, n): bf16
    void *d;
    float alpha, beta;
};

// Returns CUTLASS's error, or null after a successful run.
const char *gemm_pingpong(const Gemm &gemm);     // two warpgroups alternate, a tile each
const char *gemm_cooperative(const Gemm &gemm);  // two warpgroups share a tile; clusters of two blocks, with multicast
const char *gemm_fp8(const Gemm &gemm);          // e4m3
