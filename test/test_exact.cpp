// With dev.exact, forward products and attention give a token the same bits in any row and in generation.
#include "../llmc/ops/attention_decode.h"
#include "../llmc/ops/grouped_matmul.h"
#include "../llmc/ops/matmul.h"
#include "reference_attention.h"

template <class Dev> struct Exact : testing::Test {
    Dev dev = exact(2);

    static Dev exact(int threads) {
        Dev dev = make_device<Dev>(threads);
        dev.exact = true;
        return dev;
    }
};
TYPED_TEST_SUITE(Exact, CpuDevices);

// Every row has the bits that it has alone: with few tokens, whose weights are read in place, and with many, also for odd sums, and wherever tiles end.
TYPED_TEST(Exact, ProductsOfAnyNumberOfTokens) {
    using X = typename TypeParam::X;
    constexpr size_t most = 300;
    for (const auto &[IC, OC] :
         std::vector<std::pair<size_t, size_t>>{{1, 5}, {33, 70}, {64, 48}, {258, 100}, {576, 97}, {2050, 33}})
        for (const bool accumulate : {false, true}) {
            SCOPED_TRACE(format("%zu to %zu%s", IC, OC, accumulate ? ", added" : ""));
            const auto x = random_values<X>(most * IC, 1), w = random_values<X>(OC * IC, 2), bias = random_values<X>(OC, 3),
                       before = random_values<X>(most * OC, 4);
            std::vector<X> alone = before;
            for (size_t t = 0; t < most; t++)
                matmul_forward(this->dev, &alone[t * OC], &x[t * IC], w.data(), bias.data(), 1, IC, OC, 0, accumulate);
            for (const size_t T : {2, 3, 4, 5, 8, 9, 16, 17, 31, 64, 65, 128, 129, 300})
                for (const int threads : {1, 2, 3}) {
                    std::vector<X> out = before;
                    matmul_forward(this->exact(threads), out.data(), x.data(), w.data(), bias.data(), T, IC, OC, 0, accumulate);
                    EXPECT_TRUE(same_bits(out.data(), alone.data(), T * OC)) << T << " tokens, " << threads << " threads";
                }
        }
}

// Experts' rows have the bits of a product of their own, whether few or many rows share the experts.
TYPED_TEST(Exact, ProductsOfGroups) {
    using X = typename TypeParam::X;
    constexpr size_t E = 5, IC = 96, OC = 70, R = 200;
    const auto x = random_values<X>(R * IC, 1), w = random_values<X>(E * OC * IC, 2);
    for (const std::vector<int32_t> &starts :
         {std::vector<int32_t>{0, 1, 1, 3, 4, 5}, {0, 9, 20, 20, 21, 40}, {0, 40, 41, 150, 199, 200}}) {
        std::vector<X> out(R * OC), alone(R * OC);
        grouped_matmul_forward(this->dev, out.data(), x.data(), w.data(), RowGroups{starts.data(), E, size_t(starts[E])}, IC, OC,
                               0, false);
        for (size_t e = 0; e < E; e++)
            for (size_t r = size_t(starts[e]); r < size_t(starts[e + 1]); r++)
                matmul_forward(this->dev, &alone[r * OC], &x[r * IC], &w[e * OC * IC], nullptr, 1, IC, OC);
        EXPECT_TRUE(same_bits(out.data(), alone.data(), size_t(starts[E]) * OC)) << starts[E] << " rows";
    }
}

// The attention of each query of a packed row, to a cache with the keys of its document up to it, in pages of any order.
template <class Dev, class X = typename Dev::X>
static std::vector<X> decoded(Dev dev, const AttentionCase &c, const std::vector<X> &qkv) {
    const size_t row = c.row(), width = 2 * c.KV * c.D;
    const std::vector<int32_t> first_key = c.first_key();
    std::vector<X> out(c.T() * c.H * c.D);
    for (size_t i = 0; i < c.documents.size(); i++) {
        const size_t begin = c.offsets()[i], T = c.documents[i], pages = ceil_div(T, cache_page), pool = pages + pages % 2;
        std::vector<X> cache((pool + 1) * cache_page * width, X(NAN));
        std::vector<int32_t> table, first, length, slots(T);
        std::vector<int32_t> order(pages);
        for (size_t p = 0; p < pages; p++) order[p] = int32_t(pages - p);
        for (size_t t = 0; t < T; t++) {
            table.insert(table.end(), order.begin(), order.end());
            first.push_back(first_key[begin + t] - int32_t(begin)), length.push_back(int32_t(t + 1));
            slots[t] = order[t / cache_page] * int32_t(cache_page) + int32_t(t % cache_page);
        }
        const X *const q = &qkv[begin * row], *const k = q + c.H * c.D;
        cache_store(dev, cache.data(), Heads<const X>{k, row}, Heads<const X>{k + c.KV * c.D, row}, slots.data(), T, c.KV, c.D);
        std::vector<float> scratch(attention_decode_scratch(dev, T, pages, c.H, c.D));
        attention_decode(dev, &out[begin * c.H * c.D], scratch.data(), Heads<const X>{q, row},
                         {cache.data(), table.data(), first.data(), length.data(), pages}, c.shape(T));
    }
    return out;
}

TYPED_TEST(Exact, AttentionOfACachedQueryAndInAnyRow) {
    using X = typename TypeParam::X;
    const std::vector<AttentionCase> cases = {{{1, 2, 7, 50, 3}, 0, 3, 1, 16},     {{5, 700, 40}, 0, 4, 4, 8},
                                              {{191, 192, 193, 385}, 0, 9, 3, 64}, {{100, 450}, 64, 4, 2, 24},
                                              {{30, 600, 1}, 200, 7, 1, 80},       {{250, 90}, 1, 2, 1, 128}};
    for (const AttentionCase &c : cases) {
        SCOPED_TRACE(format("%zu documents, window %zu, %zu:%zu, D %zu", c.documents.size(), c.window, c.H, c.KV, c.D));
        const size_t T = c.T(), n = c.H * c.D;
        const auto qkv = random_values<X>(T * c.row(), 1);
        const auto attention = [&](const AttentionCase &row, const X *from) {
            const size_t rows = row.T();
            const auto first_key = row.first_key(), cuts = row.cuts();
            const Heads<const X> q{from, row.row()}, k{from + n, row.row()}, v{from + n + row.KV * row.D, row.row()};
            std::vector<X> out(rows * n);
            std::vector<float> out32(attention_floats(this->dev, row.shape(rows))), lse(row.H * rows);
            attention_forward(this->dev, out.data(), out32.data(), lse.data(),
                              AttentionInputs<X>{q, k, v, first_key.data(), {cuts.data(), cuts.size()}, row.shape(rows)},
                              Pieces{{{0, rows, 0}}, 1});
            return out;
        };
        const auto packed = attention(c, qkv.data()), cached = decoded(this->dev, c, qkv);
        for (size_t i = 0; i < c.documents.size(); i++) {
            const size_t begin = c.offsets()[i], length = c.documents[i];
            const auto alone = attention({{length}, c.window, c.H, c.KV, c.D}, &qkv[begin * c.row()]);
            EXPECT_TRUE(same_bits(&packed[begin * n], alone.data(), length * n)) << "document " << i;
            EXPECT_TRUE(same_bits(&packed[begin * n], &cached[begin * n], length * n)) << "document " << i << ", cached";
        }
    }
}
