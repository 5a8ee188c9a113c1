// Builds instruction handlers: turns a function of one lane's values into an instruction of a warp.
#pragma once
#include <cmath>
#include <type_traits>
#include <utility>

#include "warp.h"

namespace ptx {

// d = f(a, b, ...) in every lane. Inactive lanes also compute f, on arbitrary values; their results are discarded.
template <class F, class D, class... S> void lanewise(Warp &w, const Instruction &i) {
    alignas(64) D result[lanes];
    [&]<size_t... n>(std::index_sequence<n...>) {
        [&](const S *...sources) {
            for (int l = 0; l < lanes; l++) result[l] = D(F()(sources[l]...));
        }(w.values<S>(i.operands[1 + n])...);
    }
    (std::index_sequence_for<S...>());
    w.write(i.operands[0], result);
}

// f with .ftz: subnormal floats are flushed to 0 with their sign
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
template <class T> T flush(T x) { return x; }
template <class F> struct Flushed {
    template <class... S> auto operator()(S... sources) const { return flush(F()(flush(sources)...)); }
};

// p = f(a, b)
template <class F, class S> void compare(Warp &w, const Instruction &i) {
    const S *a = w.values<S>(i.operands[1]), *b = w.values<S>(i.operands[2]);
    uint32_t bits = 0;
    for (int l = 0; l < lanes; l++) bits |= uint32_t(F()(a[l], b[l])) << l;
    w.write_predicate(i.operands[0], bits);
}

// d = p ? a : b
template <class T> void select(Warp &w, const Instruction &i) {
    alignas(64) T result[lanes];
    const T *a = w.values<T>(i.operands[1]), *b = w.values<T>(i.operands[2]);
    const uint32_t p = w.predicate(i.operands[3]);
    for (int l = 0; l < lanes; l++) result[l] = p >> l & 1 ? a[l] : b[l];
    w.write(i.operands[0], result);
}

// Combines predicates, which hold one bit per lane.
template <class F, int n> void predicates(Warp &w, const Instruction &i) {
    if constexpr (n == 1) w.write_predicate(i.operands[0], F()(w.predicate(i.operands[1])));
    else w.write_predicate(i.operands[0], F()(w.predicate(i.operands[1]), w.predicate(i.operands[2])));
}

template <class D, class... S, class F> Form form(Pipe pipe, F) {
    Form made{lanewise<F, D, S...>, pipe, 1, {sizeof(D), sizeof(S)...}};
    if constexpr ((std::is_same_v<D, float> || ... || std::is_same_v<S, float>)) made.flushed = lanewise<Flushed<F>, D, S...>;
    return made;
}
template <class S, class F> Form comparison(Pipe pipe, F) {
    Form made{compare<F, S>, pipe, 1, {0, sizeof(S), sizeof(S)}};
    if constexpr (std::is_same_v<S, float>) made.flushed = compare<Flushed<F>, S>;
    return made;
}
template <int n, class F> Form logic(Pipe pipe, F) { return {predicates<F, n>, pipe, 1, std::vector<uint8_t>(1 + n, 0)}; }
}  // namespace ptx
