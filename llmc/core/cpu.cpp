// The program is compiled for the CPU it is made on, unless make was told otherwise (CPU=x86-64-v3). On a lesser one it says so before
// anything else is executed, instead of dying of an illegal instruction: clusters have nodes of several kinds, and their home directories
// are shared.
#ifdef __x86_64__
#include <cstdio>
#include <cstdlib>

__attribute__((constructor(101), target("arch=x86-64"))) static void check_cpu() {
    const char *lacking = nullptr;
    __builtin_cpu_init();
#define NEEDS(feature) \
    if (!__builtin_cpu_supports(feature)) lacking = feature
#ifdef __AVX2__
    NEEDS("avx2");
#endif
#ifdef __FMA__
    NEEDS("fma");
#endif
#ifdef __AVX512F__
    NEEDS("avx512f");
#endif
#ifdef __AVX512BW__
    NEEDS("avx512bw");
#endif
#ifdef __AVX512BF16__
    NEEDS("avx512bf16");
#endif
#ifdef __AVX512FP16__
    NEEDS("avx512fp16");
#endif
    if (!lacking) return;
    fprintf(stderr,
            "error: this program was compiled for a CPU with %s, which this one lacks\n"
            "  fix: make clean && make, on this machine; or with CPU=x86-64-v3, for all that have AVX2\n",
            lacking);
    _Exit(1);
}
#endif
