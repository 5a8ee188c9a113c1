// attention_decode against attention's float64 reference, and its contract: sequences are independent.
#include "../../llmc/ops/attention_decode.h"

#include "../reference_attention_decode.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/attention_decode.cuh"
#endif

template <class Dev> struct AttentionDecode : testing::Test {};
TYPED_TEST_SUITE(AttentionDecode, Devices);

TYPED_TEST(AttentionDecode, EqualsReference) {
    using X = typename TypeParam::X;
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        const DecodeInputs<X> in(shape);
        std::vector<X> out;
        SameBits same;
        for_each_order<TypeParam>([&, &shape = shape](TypeParam dev) {
            const auto cache = run_cache_store<Array>(dev, shape, in);
            check_cache(shape, in, cache);
            out = run_decode<Array>(dev, shape, in, cache);
            same(out);
        });
        check_decode(name, shape, in, out);
    }
}

TYPED_TEST(AttentionDecode, OtherSequencesChangeNoBit) {
    using X = typename TypeParam::X;
    const auto dev = any_device<TypeParam>();
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        const DecodeInputs<X> in(shape);
        const auto cache = run_cache_store<Array>(dev, shape, in), together = run_decode<Array>(dev, shape, in, cache);
        for (size_t b = 0; b < shape.B(); b++) {
            const auto alone = run_decode<Array>(dev, shape, in, cache, {b});
            EXPECT_TRUE(same_bits(alone.data(), &together[b * alone.size()], alone.size())) << "sequence " << b;
        }
    }
}

// A NaN is in a key or a value of the first key head of the first sequence.
TYPED_TEST(AttentionDecode, NanReachesTheHeadsThatSeeIt) {
    using X = typename TypeParam::X;
    const auto dev = any_device<TypeParam>();
    const DecodeShape s{{0, 0}, {100, 90}, 4, 2, 16};
    for (size_t column : {s.H * s.D, (s.H + s.KV) * s.D}) {
        DecodeInputs<X> in(s);
        in.qkv[70 * s.row() + column] = NAN;
        const auto out = run_decode<Array>(dev, s, in, run_cache_store<Array>(dev, s, in));
        for (size_t i = 0; i < out.size(); i += s.D) EXPECT_EQ(std::isnan(float(out[i])), i < 2 * s.D) << i;
    }
}
