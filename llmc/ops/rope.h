// Rotary position embedding (Su et al., 2021, arXiv:2104.09864), in Hugging Face's layout: channel i is rotated with channel i + R/2.
//
//   rope_forward (dev, qkv, table, doc_pos, T, heads, D, R, stride)
//       with (cos, sin) = table[doc_pos[t], i], for each of the first `heads` heads of row t and each i < R/2:
//           (x[i], x[i + R/2])  <-  (x[i] * cos - x[i + R/2] * sin,  x[i + R/2] * cos + x[i] * sin)
//   rope_backward(dev, dqkv, table, doc_pos, T, heads, D, R, stride)
//       applies the transposed map, which is the rotation by the negative angle
//
//   qkv, dqkv: T rows of `stride` elements X, changed in place; heads are D elements each, from the start of a row
//   R <= D, even: how many channels of a head are rotated, the first ones; the others stay as they are
//   table (positions, R/2, 2) float, by rope_table     doc_pos (T), the row of the table, in [0, positions)
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../core/device.h"

// What config.json says about positions: rope_theta and rope_scaling (rope_parameters in newer files).
struct RopeConfig {
    std::string type = "default";  // "default" | "linear" | "dynamic" | "llama3" | "yarn" | "longrope"
    double theta = 10000;
    double rotated = 1;                // share of a head's channels that are rotated
    double factor = 1;                 // all but default: the positions are this many times longer than the original ones
    double low_freq_factor = 1;        // llama3
    double high_freq_factor = 4;       // llama3
    size_t original_max_position = 0;  // llama3, yarn, longrope; in dynamic the longest document, beyond which theta would grow
    double beta_fast = 32;             // yarn: more rotations than this over the original positions are left alone,
    double beta_slow = 1;              // yarn: fewer than this are divided by factor
    double attention_factor = 0;       // yarn, longrope: multiplies cos and sin; 0 = from factor, mscale and mscale_all_dim
    double mscale = 0;                 // yarn, 0 = not given
    double mscale_all_dim = 0;         // yarn, 0 = not given
    bool truncate = true;              // yarn: the limits of the ramp are whole channels
    // longrope (R/2): divisors of the frequencies, for documents of at most original_max_position tokens and for longer ones
    std::vector<double> short_factor = {}, long_factor = {};

    size_t channels(size_t D) const { return size_t(double(D) * rotated); }  // R
    // Whether documents of this many positions need two tables, one behind the other, of which longer documents use the second.
    bool by_length(size_t positions) const { return type == "longrope" && positions > original_max_position; }
    size_t rows(size_t positions) const { return by_length(positions) ? 2 * positions : positions; }
};

// (R/2), for documents of more than original_max_position tokens if `is_long`
std::vector<float> inverse_frequencies(const RopeConfig &config, size_t D, bool is_long = false);

// table (rows(positions), R/2, 2) = cos, sin of float(position) * inv_freq[i], times the attention factor. Frequencies and angles
// are float and rounded where transformers rounds them: at position 100000 an angle's last bit is 0.008 radians.
void rope_table(float *table, const RopeConfig &config, size_t positions, size_t D);

// Rotates by sign * angle: sign is +1 forward and -1 backward.
template <class X>
void rope_rotate(Cpu<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                 size_t stride, float sign) {
    const size_t half = R / 2;
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        const float *row = table + size_t(doc_pos[t]) * R;
        for (size_t h = 0; h < heads; h++) {
            X *x = qkv + t * stride + h * D;
#pragma omp simd
            for (size_t i = 0; i < half; i++) {
                const float cos = row[2 * i], sin = sign * row[2 * i + 1];
                const float a = x[i], b = x[i + half];
                x[i] = a * cos - b * sin;
                x[i + half] = b * cos + a * sin;
            }
        }
    }
}

template <class X>
void rope_forward(Cpu<X> dev, X *qkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                  size_t stride) {
    rope_rotate(dev, qkv, table, doc_pos, T, heads, D, R, stride, 1.0f);
}

template <class X>
void rope_backward(Cpu<X> dev, X *dqkv, const float *table, const int32_t *doc_pos, size_t T, size_t heads, size_t D, size_t R,
                   size_t stride) {
    rope_rotate(dev, dqkv, table, doc_pos, T, heads, D, R, stride, -1.0f);
}
