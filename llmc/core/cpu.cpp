// The program is compiled for the build machine's CPU. A CPU that lacks some of its instructions runs PROGRAM.plain instead, which `make plain`
// builds for all CPUs with AVX2, because clusters have several kinds of nodes with one home directory. If that file is missing, the program reports
// it before it executes anything else, instead of dying of an illegal instruction.
#ifdef __x86_64__
#include <cpuid.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

__attribute__((constructor(101), target("arch=x86-64,no-avx"))) static void check_cpu(int, char **argv, char **) {
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
    unsigned a, b, c, d;  // __builtin_cpu_supports of clang 16 does not know this one
    __cpuid_count(7, 0, a, b, c, d);
    if (!(d & bit_AVX512FP16)) lacking = "avx512fp16";
#endif
    if (!lacking) return;
    char plain[4096] = {};
    if (readlink("/proc/self/exe", plain, sizeof plain - sizeof ".plain") > 0) execv(strcat(plain, ".plain"), argv);
    fprintf(stderr,
            "error: this program was compiled for a CPU with %s, which this one lacks\n"
            "  fix: make plain, where it was made: then it runs on all CPUs with AVX2; or make clean && make, on this machine\n",
            lacking);
    _Exit(1);
}
#endif
