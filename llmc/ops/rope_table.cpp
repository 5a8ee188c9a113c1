// inverse_frequencies and attention_factor follow transformers' modeling_rope_utils.py line by line.
#include "rope_table.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../core/common.h"

// transformers divides by a tensor as reciprocal times number. The compiler must not fuse any of its roundings.
#if defined(__clang__)
#define SEPARATE_ROUNDINGS
#pragma clang fp contract(off)
#else
#define SEPARATE_ROUNDINGS __attribute__((optimize("fp-contract=off")))
#endif

// llama3: wavelengths beyond the original length / low_freq_factor are divided by factor, those below length /
// high_freq_factor are kept, those between are interpolated.
SEPARATE_ROUNDINGS static void scale_llama3(std::vector<float> &inv_freq, const RopeConfig &config) {
    const double length = double(config.original_max_position), low = config.low_freq_factor, high = config.high_freq_factor;
    const float factor = float(config.factor);
    for (float &f : inv_freq) {
        const float wavelength = (1.0f / f) * float(2 * M_PI);
        if (wavelength > float(length / low)) {
            f = f / factor;
        } else if (!(wavelength < float(length / high))) {
            const float smooth = ((1.0f / wavelength) * float(length) - float(low)) / float(high - low);
            f = (1.0f - smooth) * f / factor + smooth * f;
        }
    }
}

// yarn (Peng et al., 2023, arXiv:2309.00071): a ramp over the channels from frequencies as they are to frequencies / factor. Its
// limits are the channels that turn beta_fast and beta_slow times over the original length.
SEPARATE_ROUNDINGS static void scale_yarn(std::vector<float> &inv_freq, const std::vector<float> &power,
                                          const RopeConfig &config) {
    const double D = 2 * double(inv_freq.size());
    const auto channel_of = [&](double rotations) {
        return D * std::log(double(config.original_max_position) / (rotations * 2 * M_PI)) / (2 * std::log(config.theta));
    };
    double low = channel_of(config.beta_fast), high = channel_of(config.beta_slow);
    if (config.truncate) low = std::floor(low), high = std::ceil(high);
    low = std::max(low, 0.0), high = std::min(high, D - 1);
    if (low == high) high += 0.001;
    for (size_t i = 0; i < inv_freq.size(); i++) {
        const float ramp = std::clamp((float(i) - float(low)) / float(high - low), 0.0f, 1.0f), keep = 1.0f - ramp;
        const float interpolated = 1.0f / (float(config.factor) * power[i]);
        inv_freq[i] = interpolated * (1.0f - keep) + inv_freq[i] * keep;
    }
}

// The power is rounded to float from double. torch's float pow is one unit in the last place away from that for about one channel
// in 150, which no table can follow, since its bits depend on the processor.
std::vector<float> inverse_frequencies(const RopeConfig &config, size_t D, bool is_long) {
    const size_t R = config.channels(D);
    // LongRoPE (Ding et al., 2024, arXiv:2402.13753).
    const std::vector<double> &divisor = is_long ? config.long_factor : config.short_factor;
    std::vector<float> power(R / 2), inv_freq(R / 2);
    for (size_t i = 0; i < R / 2; i++) {
        power[i] = float(std::pow(double(float(config.theta)), double(float(2 * i) / float(R))));
        inv_freq[i] = 1.0f / (config.type == "longrope" ? float(divisor[i]) * power[i] : power[i]);
    }
    if (config.type == "linear")
        for (float &f : inv_freq) f /= float(config.factor);
    else if (config.type == "llama3") scale_llama3(inv_freq, config);
    else if (config.type == "yarn") scale_yarn(inv_freq, power, config);
    else if (config.type != "default" && config.type != "dynamic" && config.type != "longrope")
        die("rope_type %s in config.json is not known\n  fix: default, linear, dynamic, llama3, yarn or longrope",
            config.type.c_str());
    return inv_freq;
}

static double attention_factor(const RopeConfig &config) {
    if (config.type != "yarn" && config.type != "longrope") return 1;
    if (config.attention_factor != 0) return config.attention_factor;
    if (config.type == "longrope")
        return config.factor <= 1 ? 1 : std::sqrt(1 + std::log(config.factor) / std::log(double(config.original_max_position)));
    const auto scale = [&](double mscale) { return config.factor <= 1 ? 1.0 : 0.1 * mscale * std::log(config.factor) + 1.0; };
    return config.mscale != 0 && config.mscale_all_dim != 0 ? scale(config.mscale) / scale(config.mscale_all_dim) : scale(1);
}

void rope_table(float *table, const RopeConfig &config, size_t positions, size_t D) {
    const size_t R = config.channels(D);
    const std::vector<float> inv_freq[] = {inverse_frequencies(config, D), inverse_frequencies(config, D, true)};
    const float factor = float(attention_factor(config));
#pragma omp parallel for
    for (size_t row = 0; row < config.rows(positions); row++)
        for (size_t i = 0; i < R / 2; i++) {
            const float angle = float(row % positions) * inv_freq[row / positions][i];
            table[row * R + 2 * i] = std::cos(angle) * factor;
            table[row * R + 2 * i + 1] = std::sin(angle) * factor;
        }
}
