// The table of cosines and sines for the rotation of queries and keys (rope.h), and its settings. They follow transformers'
// modeling_rope_utils.py.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

// The position settings of config.json: rope_theta and rope_scaling (rope_parameters in newer files).
struct RopeConfig {
    std::string type = "default";  // "default" | "linear" | "dynamic" | "llama3" | "yarn" | "longrope"
    double theta = 10000;
    double rotated = 1;                // share of a head's channels that are rotated
    double factor = 1;                 // all but default: the positions are this many times longer than the original ones
    double low_freq_factor = 1;        // llama3
    double high_freq_factor = 4;       // llama3
    size_t original_max_position = 0;  // llama3, yarn, longrope; in dynamic the longest document, beyond which theta would grow
    double beta_fast = 32;        // yarn: frequencies with more rotations than this over the original positions do not change
    double beta_slow = 1;         // yarn: frequencies with fewer rotations than this are divided by factor
    double attention_factor = 0;  // yarn, longrope: multiplies cos and sin; 0 = from factor, mscale and mscale_all_dim
    double mscale = 0;            // yarn, 0 = not given
    double mscale_all_dim = 0;    // yarn, 0 = not given
    bool truncate = true;         // yarn: the limits of the ramp are whole channels
    // longrope (R/2): divisors of the frequencies, for documents of at most original_max_position tokens and for longer ones
    std::vector<double> short_factor = {}, long_factor = {};

    size_t channels(size_t D) const { return size_t(double(D) * rotated); }  // R
    // True if documents of this many positions need two tables, one after the other; longer documents use the second.
    bool by_length(size_t positions) const { return type == "longrope" && positions > original_max_position; }
    size_t rows(size_t positions) const { return by_length(positions) ? 2 * positions : positions; }
};

// (R/2), for documents of more than original_max_position tokens if `is_long`
std::vector<float> inverse_frequencies(const RopeConfig &config, size_t D, bool is_long = false);

// table (rows(positions), R/2, 2) = cos, sin of float(position) * inv_freq[i], times the attention factor. Frequencies and angles
// are float and rounded where transformers rounds them: at position 100000 an angle's last bit is 0.008 radians.
void rope_table(float *table, const RopeConfig &config, size_t positions, size_t D);
