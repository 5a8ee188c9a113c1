// CUTLASS's matrix products for sm_90a, which nvcc compiles one by one: D = alpha A B^T + beta C.
#pragma once

struct Gemm {
    int m, n, k;
    const void *a, *b;  // (m, k), (n, k): bf16 or e4m3
    const void *c;      // (m, n): bf16
    void *d;
    float alpha, beta;
};

// What CUTLASS says of the product; null if it has run.
const char *gemm_pingpong(const Gemm &gemm);     // two warpgroups in turn compute a tile each
const char *gemm_cooperative(const Gemm &gemm);  // both compute one tile, in clusters of two blocks, with multicast
const char *gemm_fp8(const Gemm &gemm);          // of e4m3
