// bf16 is the upper half of a float. With our own type, host, device and emulator share one definition and one rounding.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

struct bf16 {
    uint16_t bits;

    bf16() = default;
    HOST_DEVICE bf16(float f) {  // round to nearest, ties to even; NaN stays NaN
#ifdef __CUDA_ARCH__
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));  // one instruction instead of six
#else
        uint32_t u;
        memcpy(&u, &f, 4);
        bits = f == f ? uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16) : uint16_t(u >> 16 | 0x40);
#endif
    }
    HOST_DEVICE bf16 &operator=(float f) {  // without it g++ creates a temporary and does not vectorise loops that write bf16
        bits = bf16(f).bits;
        return *this;
    }
    HOST_DEVICE operator float() const {
        uint32_t u = uint32_t(bits) << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};

// Stochastic rounding: returns the bf16 above or below f, with probabilities that make f the expected value.
// `random` has 16 random bits. NaN and infinities are kept.
HOST_DEVICE inline bf16 round_stochastically(float f, uint32_t random) {
    uint32_t u;
    memcpy(&u, &f, 4);
    bf16 x;
    x.bits = uint16_t((f - f == 0 ? u + random : f == f ? u : 0x7fc00000) >> 16);
    return x;
}

template <class X> constexpr const char *dtype_name = nullptr;
template <> inline constexpr const char *dtype_name<float> = "f32";
template <> inline constexpr const char *dtype_name<bf16> = "bf16";
template <> inline constexpr const char *dtype_name<double> = "f64";
template <> inline constexpr const char *dtype_name<int16_t> = "i16";
