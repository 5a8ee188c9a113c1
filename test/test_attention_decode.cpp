// attention_decode.h against the float64 reference of attention, and against what its contract promises.
#include "../llmc/ops/attention_decode.h"

#include "reference_attention_decode.h"

template <class Dev> struct AttentionDecode : testing::Test {};
TYPED_TEST_SUITE(AttentionDecode, CpuDevices);

TYPED_TEST(AttentionDecode, EqualsReferenceWithAnyNumberOfThreads) {
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        const DecodeInputs<typename TypeParam::X> in(shape);
        const auto cache = run_cache_store<HostArray>(make_device<TypeParam>(), shape, in);
        check_cache(shape, in, cache);
        const auto out = run_decode<HostArray>(make_device<TypeParam>(), shape, in, cache);
        check_decode(name, shape, in, out);
        for (int threads : {1, 3}) {
            TypeParam dev = make_device<TypeParam>();
            dev.threads = threads;
            const auto again = run_decode<HostArray>(dev, shape, in, cache);
            EXPECT_TRUE(same_bits(again.data(), out.data(), out.size())) << threads << " threads";
        }
    }
}

TYPED_TEST(AttentionDecode, OtherSequencesChangeNoBit) {
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        const TypeParam dev = make_device<TypeParam>();
        const DecodeInputs<typename TypeParam::X> in(shape);
        const auto cache = run_cache_store<HostArray>(dev, shape, in);
        const auto together = run_decode<HostArray>(dev, shape, in, cache);
        for (size_t b = 0; b < shape.B(); b++) {
            const auto alone = run_decode<HostArray>(dev, shape, in, cache, {b});
            EXPECT_TRUE(same_bits(alone.data(), &together[b * alone.size()], alone.size())) << "sequence " << b;
        }
    }
}

TYPED_TEST(AttentionDecode, NanReachesTheHeadsThatSeeIt) {
    const DecodeShape shape{{0, 0}, {100, 90}, 4, 2, 16};
    DecodeInputs<typename TypeParam::X> in(shape);
    for (size_t column :
         {shape.H * shape.D, (shape.H + shape.KV) * shape.D}) {  // in k and in v, of the first key head and sequence
        auto bad = in;
        bad.qkv[70 * shape.row() + column] = NAN;
        const TypeParam dev = make_device<TypeParam>();
        const auto out = run_decode<HostArray>(dev, shape, bad, run_cache_store<HostArray>(dev, shape, bad));
        for (size_t i = 0; i < out.size(); i += shape.D) EXPECT_EQ(std::isnan(float(out[i])), i < 2 * shape.D) << i;
    }
}
