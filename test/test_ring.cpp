// ring.h on ranks that are threads: the results equal those of one rank in every mode and layout, and the payload its formulas.
#include "../llmc/parallel/ring.h"

#include "errors.h"
#include "ring_ranks.h"

template <class Dev> struct Ring : testing::Test {
    using X = typename Dev::X;
    static RingResult<X> run(const RingCase &c, const AttentionCase &a, const AttentionValues<X> &in) {
        return run_ring<HostArray>(c, a, in, [](Comm &comm, auto f) {
            const ContextPtr context = make_context();
            f(Dev{1, context.get()}, comm);
        });
    }
};
TYPED_TEST_SUITE(Ring, CpuDevices);

static std::vector<RingCase> ring_cases(const AttentionCase &a) {
    std::vector<RingCase> cases;
    for (size_t ranks : {1, 2, 3, 4, 8}) {
        if (a.H % ranks == 0) cases.push_back({ranks, SpMode::ulysses, Layout::contiguous});
        for (Layout layout : layouts) {
            cases.push_back({ranks, SpMode::ring, layout});
            cases.push_back({ranks, SpMode::gather, layout, 1 + size_t(layout) % a.KV == a.KV ? a.KV : 1});
        }
    }
    return cases;
}

// Both results are within the same derived bound of the float64 reference. One rank has the bits of the op alone.
TYPED_TEST(Ring, EqualsOneRank) {
    using Test = Ring<TypeParam>;
    const struct {
        const char *name;
        AttentionCase a;
        std::vector<RingCase> cases = {};  // empty: all
    } shapes[] = {
        {"4:2", {{1, 70, 1, 1, 40, 64, 15}, 0, 4, 2, 16}},
        {"9:3", {{100, 1, 91}, 0, 9, 3, 8}},
        {"7:1, window 24", {{30, 1, 120, 41}, 24, 7, 1, 8}},
        {"8:2, window 24", {{192}, 24, 8, 2, 8}},
        {"one document", {{192}, 0, 2, 1, 8}},
        {"shared prompts", {{5, 60, 20, 30, 31, 13, 33}, 0, 4, 2, 16, TileCuts::shortest, 0, {0, 0, 50, 50, 0, 12, 12}}},
        {"shared prompts, window 24", {{50, 20, 40, 31, 13, 38}, 24, 4, 2, 16, TileCuts::shortest, 0, {0, 45, 45, 0, 12, 12}}},
        // long enough for several blocks of queries on a rank, and for products in bf16
        {"long",
         {{200, 1, 350, 217}, 0, 2, 1, 16},
         {{2, SpMode::ring, Layout::zigzag},
          {3, SpMode::ring, Layout::longest_first},
          {3, SpMode::gather, Layout::zigzag},
          {2, SpMode::ulysses, Layout::contiguous}}},
        // KV heads copied to several ranks: one head to 7; 2 copies of each on 6 ranks with 2 query heads; one of each on 8 ranks with 1
        {"7:1", {{55, 1, 168}, 0, 7, 1, 8}, {{7, SpMode::ulysses, Layout::contiguous}}},
        {"12:4", {{55, 1, 136}, 0, 12, 4, 8}, {{6, SpMode::ulysses, Layout::contiguous}}},
        {"8:4", {{55, 1, 200}, 0, 8, 4, 8}, {{8, SpMode::ulysses, Layout::contiguous}}},
    };
    for (const auto &[name, a, cases] : shapes) {
        const AttentionValues<typename TypeParam::X> in(a);
        const auto one = run_attention<HostArray>(make_device<TypeParam>(), a, in);
        for (const RingCase &c : cases.empty() ? ring_cases(a) : cases) {
            const auto got = Test::run(c, a, in).result;
            check_attention(format("%s, %s", name, c.name().c_str()).c_str(), a, in, got);
            if (c.ranks > 1) continue;
            EXPECT_TRUE(same_bits(got.out.data(), one.out.data(), one.out.size()));
            EXPECT_TRUE(same_bits(got.lse.data(), one.lse.data(), one.lse.size()));
            EXPECT_TRUE(same_bits(got.dqkv.data(), one.dqkv.data(), one.dqkv.size()));
        }
    }
}

// The formulas in ring.h.
TYPED_TEST(Ring, PayloadOfADenseRow) {
    using Test = Ring<TypeParam>;
    const AttentionCase a{{192}, 0, 8, 2, 8};
    const size_t T = a.T(), D = a.D, b = sizeof(typename TypeParam::X);
    const AttentionValues<typename TypeParam::X> in(a);
    const auto expect = [&](const RingCase &c, size_t kv, size_t dkv) {
        const Payload got = Test::run(c, a, in).payload;
        EXPECT_EQ(got.kv, kv) << c.name();
        EXPECT_EQ(got.dkv, dkv) << c.name();
    };
    for (size_t P : {1, 2, 4, 8}) {
        const size_t kv = 2 * a.KV * D * b, dkv = 2 * a.KV * D * 4;
        const size_t contiguous = T * (P - 1) / 2, zigzag = P > 1 ? T * (P - 1) - T * (P - 1) / (2 * P) : 0;
        expect({P, SpMode::ring, Layout::contiguous}, 2 * kv * contiguous, dkv * contiguous);
        expect({P, SpMode::ring, Layout::zigzag}, 2 * kv * zigzag, dkv * zigzag);
        for (size_t stride : {1, 2}) {
            expect({P, SpMode::gather, Layout::contiguous, stride}, 2 * kv * T / P * (P * (P - 1) / 2), dkv * T * (P - 1));
            expect({P, SpMode::gather, Layout::zigzag, stride}, 2 * kv * T * (P - 1), dkv * T * (P - 1));
        }
        const size_t h = a.H / P, m = std::max<size_t>(a.KV / P, 1);
        expect({P, SpMode::ulysses, Layout::contiguous}, (2 * (2 * h + 2 * m) * D * b + h * 4) * T * (P - 1),
               (h + 2 * m) * D * 4 * T * (P - 1));
    }
}

TYPED_TEST(Ring, OnlyVisibleKeysAreSent) {
    using Test = Ring<TypeParam>;
    const auto payload = [](const std::vector<size_t> &documents, const RingCase &c, size_t window = 0) {
        const AttentionCase a{documents, window, 2, 1, 8};
        return Test::run(c, a, AttentionValues<typename TypeParam::X>(a)).payload;
    };
    const size_t row = 2 * 8 * sizeof(typename TypeParam::X);
    const RingCase ring{4, SpMode::ring, Layout::contiguous}, gather{4, SpMode::gather, Layout::contiguous};
    EXPECT_EQ(payload({48, 48, 48, 48}, ring).kv, 0u);
    EXPECT_EQ(payload({48, 48, 48, 48}, ring).dkv, 0u);
    EXPECT_EQ(payload({48, 48, 48, 48}, gather).kv, 0u);
    EXPECT_EQ(payload({45, 51, 96}, ring).kv, 2 * row * (6 + 48));  // 6 rows to the next rank; half of the last document
    EXPECT_EQ(payload({192}, ring, 6).kv, 2 * row * 3 * 6);         // each rank but the last one sends 6 rows
    // A prompt travels to the ranks of the documents that lack it, and the rest of its own document, a piece of 6, stays.
    const auto of_shared = [](const AttentionCase &a, const RingCase &c) {
        return Test::run(c, a, AttentionValues<typename TypeParam::X>(a)).payload.kv;
    };
    EXPECT_EQ(of_shared({{40, 8, 144}, 0, 2, 1, 8, TileCuts::shortest, 0, {0, 30, 0}}, ring), 2 * row * (2 + 1) * 48);
    EXPECT_EQ(of_shared({{40, 152}, 0, 2, 1, 8, TileCuts::shortest, 0, {0, 30}}, ring), 2 * row * (3 * 42 + 2 * 48 + 48));
    EXPECT_EQ(of_shared({{40, 152}, 8, 2, 1, 8, TileCuts::shortest, 0, {0, 30}}, ring), 2 * row * 3 * 12);
}

// ---- modes

TEST(RingModes, MessageNamesModesThatWork) {
    const auto message = [](auto... args) { return error_of([&] { check_sp_mode(args...); }); };
    EXPECT_EQ(message(SpMode::ring, 4, 9, 3, 0), "no error");
    EXPECT_EQ(message(SpMode::gather, 4, 9, 3, 3), "no error");
    EXPECT_EQ(message(SpMode::ulysses, 3, 9, 3, 0), "no error");
    EXPECT_EQ(
        message(SpMode::ulysses, 4, 9, 3, 0),
        "--sp_mode ulysses: 9 query heads cannot be dealt to 4 ranks\n  fix: --sp_mode ring or --sp_mode gather, which work with any "
        "number of heads");
    EXPECT_EQ(message(SpMode::gather, 4, 9, 3, 2),
              "--ring_attn_head_stride 2 does not divide the model's 3 KV heads (it counts KV heads, not query heads)\n  fix: "
              "--ring_attn_head_stride 1");
}
