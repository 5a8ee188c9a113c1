// Two kinds of arguments of attention.h: the rows of the packed sequence that a rank holds, and views of heads.
#pragma once
#include <cstddef>

#include "../core/common.h"

// Global positions [begin, end) of the packed row, which a rank stores in its local rows offset, offset + 1, ...
struct Piece {
    size_t begin, end, offset;
};
struct Pieces {  // the pieces that one rank holds, sorted by begin
    static constexpr size_t capacity = 16;
    Piece piece[capacity];
    size_t count;
};

template <class X> struct Heads {  // element (t, h, d) is data[t * stride + h * D + d]
    X *data;
    size_t stride;
};

namespace attention {

constexpr size_t max_D = 256;

inline void check_head_size(size_t D) {
    if (D % 8 || D > max_D)
        die("head_dim in config.json is %zu, but attention takes multiples of 8 up to %zu\n  fix: use a model with such heads", D,
            max_D);
}

}  // namespace attention
