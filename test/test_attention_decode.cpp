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
        check_each_alone<HostArray>(make_device<TypeParam>(), shape);
    }
}

TYPED_TEST(AttentionDecode, NanReachesThoseWhoSeeIt) { check_nan_reaches_those_who_see_it<HostArray>(make_device<TypeParam>()); }
