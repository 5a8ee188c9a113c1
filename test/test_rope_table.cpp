#include "../llmc/ops/rope_table.h"

#include "../llmc/core/common.h"
#include "check.h"

// cos and sin of four channels at position 1000, then at position 131071. The two math libraries may each be off by one unit in the last
// place, for values below 2.
static void expect_entries(const RopeConfig &config, size_t D, const std::vector<size_t> &channels,
                           const std::vector<float> &want) {
    const size_t positions = 131072;
    std::vector<float> table(positions * D), got;
    rope_table(table.data(), config, positions, D);
    for (size_t position : {1000, 131071})
        for (size_t channel : channels)
            for (size_t part : {0, 1}) got.push_back(table[position * D + 2 * channel + part]);
    expect_close(config.type.c_str(), got, want, 2 * 0x1p-23);
}

// cos and sin of LlamaRotaryEmbedding in float32, from transformers 5.23.0 and torch 2.15.0 with a LlamaConfig of
// max_position_embeddings 131072 and these rope_parameters. A wrong last bit of a frequency changes the first channels.
TEST(RopeTable, EqualsTransformers) {
    expect_entries(
        {}, 64, {0, 10, 14, 31},
        {0.562379062f, 0.826879561f, 0.950938582f, -0.309379756f, 0.482962996f, -0.87564075f, 0.991121769f, 0.132957265f,
         -0.817983508f, -0.575241685f, 0.883642972f, 0.468161374f, 0.968127012f, -0.25045985f, 0.19851248f, -0.980098367f});
    expect_entries(
        {.type = "linear", .factor = 4}, 128, {0, 20, 30, 63},
        {0.240988299f, -0.970528007f, 0.0785541683f, 0.996909857f, -0.981584251f, -0.191029638f, 0.999583304f, 0.0288655385f,
         0.590899408f, 0.806745231f, -0.121501274f, 0.992591262f, -0.96004945f, -0.279830456f, -0.800679386f, -0.59909308f});
    expect_entries(
        {.type = "llama3", .theta = 5e5, .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position = 8192},
        128, {0, 20, 29, 63},
        {0.562379062f, 0.826879561f, -0.658120334f, -0.75291276f, -0.561149836f, 0.827714205f, 0.99999994f, 0.000306892587f,
         -0.817983508f, -0.575241685f, -0.969645917f, 0.244513348f, 0.333068758f, 0.942902565f, 0.999191105f, 0.0402138717f});
    expect_entries(
        {.type = "yarn", .theta = 1e6, .factor = 4, .original_max_position = 32768}, 128, {0, 20, 33, 63},
        {0.640341341f, 0.941509426f, 0.818349957f, 0.791694582f, 1.02511525f, 0.49559629f, 1.13862932f, 0.000353242067f,
         -0.931380093f, -0.654987097f, 0.481199473f, 1.03195167f, -0.895374119f, 0.703407586f, 1.13768828f, 0.0462870337f});
    expect_entries(
        {.type = "yarn", .factor = 40, .original_max_position = 4096, .mscale = 1, .mscale_all_dim = 0.5, .truncate = false}, 64,
        {0, 10, 14, 31},
        {0.649953842f, 0.955642939f, 1.09902072f, -0.357556999f, 1.14492893f, 0.157578617f, 1.15571558f, 0.00385294296f,
         -0.945361555f, -0.664819479f, 1.0212456f, 0.541064382f, 1.15518689f, -0.0351684242f, 1.0471307f, 0.489091784f});
}

TEST(RopeTable, AttentionFactorOfYarn) {
    RopeConfig config{.type = "yarn", .factor = 4, .original_max_position = 1024};
    for (const float factor : {1.5f, 1.0f}) {
        if (factor == 1) config = {.type = "yarn", .factor = 1, .original_max_position = 1024};
        else config.attention_factor = factor;
        std::vector<float> table(8);
        rope_table(table.data(), config, 1, 8);
        EXPECT_EQ(table[0], factor);  // cos of position 0 is 1
    }
}
