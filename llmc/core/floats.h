// Parameters that a model reads as X and AdamW updates as floats, in the 4 bytes of a float.
//
// In bf16 a float lies in two halves: the nearest bf16, and the lower 16 bits of the float as a signed number, what rounding took away or,
// negative, added. Ties go away from zero: to even, that would be -0x8000 to 0x8000, one value more than 16 bits have. Every float comes
// back bit for bit, also the infinities and what is rounded to one; a NaN comes back as 0x7fc00000.
#pragma once
#include <cstddef>

#include "dtype.h"

// Where they lie. In f32 `rounded` is the floats themselves, and there is no `lower`.
template <class X> struct Floats {
    static constexpr bool halves = sizeof(X) != sizeof(float);

    X *rounded;
    int16_t *lower = nullptr;

    HOST_DEVICE Floats operator+(size_t n) const { return {rounded + n, halves ? lower + n : nullptr}; }

    HOST_DEVICE float load(size_t i) const {
        if constexpr (!halves) return rounded[i];
        else {
            const uint32_t u = (uint32_t(rounded[i].bits) << 16) + uint32_t(lower[i]);
            float f;
            memcpy(&f, &u, 4);
            return f;
        }
    }
    HOST_DEVICE void store(size_t i, float f) const {
        if constexpr (!halves) rounded[i] = f;
        else {
            uint32_t u;
            memcpy(&u, &f, 4);
            u = f == f ? u : 0x7fc00000;  // 0x7fffffff would be rounded into the sign
            rounded[i].bits = uint16_t((u + 0x8000) >> 16);
            lower[i] = int16_t(u);
        }
    }
    static X round(float f) {  // what `rounded` has of it
        X x;
        int16_t lower;
        Floats{&x, &lower}.store(0, f);
        return x;
    }
};
