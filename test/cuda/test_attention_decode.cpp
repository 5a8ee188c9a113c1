// attention_decode.cuh against the float64 reference of the CPU's tests, and against what the contract promises.
#include "../../llmc/ops/attention_decode.cuh"

#include "../reference_attention_decode.h"
#include "check.cuh"

template <class Dev> struct CudaAttentionDecode : testing::Test {};
TYPED_TEST_SUITE(CudaAttentionDecode, CudaDevices);

TYPED_TEST(CudaAttentionDecode, EqualsReference) {
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        const DecodeInputs<typename TypeParam::X> in(shape);
        SameBits same;
        for_each_order<TypeParam>([&, name = name, &shape = shape](TypeParam dev) {
            const auto cache = run_cache_store<DeviceArray>(dev, shape, in);
            check_cache(shape, in, cache);
            const auto out = run_decode<DeviceArray>(dev, shape, in, cache);
            check_decode(name, shape, in, out);
            same(out);
        });
    }
}

TYPED_TEST(CudaAttentionDecode, OtherSequencesChangeNoBit) {
    for (const auto &[name, shape] : decode_shapes) {
        SCOPED_TRACE(name);
        check_each_alone<DeviceArray>(TypeParam{}, shape);
    }
}

TYPED_TEST(CudaAttentionDecode, NanReachesThoseWhoSeeIt) { check_nan_reaches_those_who_see_it<DeviceArray>(TypeParam{}); }
