// The model reads a parameter as X and AdamW updates it as a float; both together take the 4 bytes of a float.
//
// With X = bf16 the float is stored in two halves: the nearest bf16, and the float's difference from it, in units of the float's last bit,
// as a signed 16-bit number. The difference is the rounding error of the bf16. Ties are rounded away from zero:
// with ties to even the difference would range from -0x8000 to 0x8000, which is one value too many for 16 bits. Every float is restored
// bit for bit, including infinities and floats that are rounded to infinity. A NaN is restored as 0x7fc00000.
#pragma once
#include <cstddef>
#include <tuple>

#include "dtype.h"

// The storage of an array of parameters. With X = float, `rounded` holds the floats themselves, and there is no `lower`.
template <class X> struct Floats {
    static constexpr bool halves = sizeof(X) != sizeof(float);

    X *rounded;
    int16_t *lower = nullptr;

    auto pointers() const { return std::tuple(rounded, lower); }  // rehearsal.h

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
            u = f == f ? u : 0x7fc00000;  // rounding 0x7fffffff would overflow into the sign
            rounded[i].bits = uint16_t((u + 0x8000) >> 16);
            lower[i] = int16_t(u);
        }
    }
    static X round(float f) {  // returns the value that store() writes into `rounded`
        X x;
        int16_t lower;
        Floats{&x, &lower}.store(0, f);
        return x;
    }
};
