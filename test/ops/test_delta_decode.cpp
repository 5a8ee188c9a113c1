// Prompts go through the ops of whole rows, and the tokens after them one at a time through those of generation; both together give the values of the
// whole documents.
#include "../../llmc/ops/delta_decode.h"

#include "../reference_causal_conv.h"
#include "../reference_gated_delta.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/causal_conv.cuh"
#include "../../llmc/ops/delta_decode.cuh"
#endif

struct Continuation {
    size_t prompt, length;  // tokens of the prompt, and of the whole document
    int32_t slot;
};
constexpr size_t decode_slots = 7;
// Prompts shorter than the filter, of a chunk and around it; sequences end one after the other, and no slot is that of its number.
static const std::vector<Continuation> continuations = {{1, 6, 4}, {2, 3, 0}, {65, 72, 6}, {3, 3, 2}, {64, 69, 1}, {130, 134, 3}};

// Rows of the documents' tokens: all of them, the prompts, or the token of each document at `position` tokens after its prompt.
struct DecodeRows {
    std::vector<size_t> tokens;  // of the whole documents
    std::vector<int32_t> doc_pos, slots;

    static DecodeRows prompts() {
        DecodeRows rows;
        each([&](const Continuation &c, size_t begin) {
            for (size_t t = 0; t < c.prompt; t++) rows.add(begin + t, t, t + 1 == c.prompt ? c.slot : -1);
        });
        return rows;
    }
    static DecodeRows newest(size_t position) {
        DecodeRows rows;
        each([&](const Continuation &c, size_t begin) {
            if (const size_t t = c.prompt + position; t < c.length) rows.add(begin + t, t, c.slot);
        });
        return rows;
    }
    static std::vector<int32_t> whole_positions() {
        std::vector<int32_t> out;
        for (const Continuation &c : continuations)
            for (size_t t = 0; t < c.length; t++) out.push_back(int32_t(t));
        return out;
    }
    template <class T> std::vector<T> of(const std::vector<T> &whole, size_t width) const {
        std::vector<T> out;
        for (const size_t t : tokens)
            out.insert(out.end(), whole.begin() + long(t * width), whole.begin() + long((t + 1) * width));
        return out;
    }
    template <class T> void put(std::vector<T> &whole, const std::vector<T> &rows, size_t width) const {
        for (size_t i = 0; i < tokens.size(); i++)
            std::copy_n(rows.begin() + long(i * width), width, whole.begin() + long(tokens[i] * width));
    }

  private:
    template <class F> static void each(F f) {
        size_t begin = 0;
        for (const Continuation &c : continuations) f(c, begin), begin += c.length;
    }
    void add(size_t token, size_t position, int32_t slot) {
        tokens.push_back(token), doc_pos.push_back(int32_t(position)), slots.push_back(slot);
    }
};

template <class Dev> struct DeltaDecode : testing::Test {};
TYPED_TEST_SUITE(DeltaDecode, Devices);

TYPED_TEST(DeltaDecode, ConvolutionEqualsReference) {
    using X = typename TypeParam::X;
    for (const size_t C : {8, 40, 264}) {
        const std::vector<int32_t> doc_pos = DecodeRows::whole_positions();
        const auto x = random_values<X>(doc_pos.size() * C, 1), w = random_values<X>(C * conv_taps, 2, 0.7);
        const ConvReference want = conv_reference(std::vector<double>(x.size()), widen(x), widen(w), doc_pos, C);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<X> filters(w), columns(decode_slots * conv_columns * C);
            std::vector<X> got(x.size(), X(NAN));
            const DecodeRows prompts = DecodeRows::prompts();
            for (size_t position = 0;; position++) {
                const bool first = position == 0;
                const DecodeRows rows = first ? prompts : DecodeRows::newest(position - 1);
                const size_t T = rows.tokens.size();
                if (T == 0) break;
                Array<X> in(rows.of(x, C)), out(T * C);
                Array<int32_t> positions(rows.doc_pos), slots(rows.slots);
                if (first) causal_conv_forward(dev, out.data(), in.data(), filters.data(), positions.data(), T, C);
                if (first) conv_store(dev, columns.data(), in.data(), positions.data(), slots.data(), T, C);
                else causal_conv_decode(dev, out.data(), columns.data(), in.data(), filters.data(), slots.data(), T, C);
                rows.put(got, std::vector<X>(out.values()), C);
            }
            expect_close("out", got, want.out, want.out_error + unit_roundoff<X> * largest(want.out));
            same(got, std::vector<X>(columns.values()));
        });
    }
}

TYPED_TEST(DeltaDecode, DeltaRuleEqualsReference) {
    using X = typename TypeParam::X;
    for (const DeltaShape &heads : {DeltaShape{0, 2, 2, 8, 8, 1e-6f}, {0, 1, 3, 16, 40, 1e-6f}, {0, 1, 2, 128, 128, 1e-6f}}) {
        const std::vector<int32_t> doc_pos = DecodeRows::whole_positions();
        const auto of = [&](size_t T) { return DeltaShape{T, heads.Hk, heads.Hv, heads.Dk, heads.Dv, heads.eps}; };
        const DeltaShape whole = of(doc_pos.size());
        const auto qkv = random_values<X>(whole.T * whole.row(), 1);
        auto g = random_values<float>(whole.T * whole.Hv, 3), beta = random_values<float>(g.size(), 4, 2);
        for (float &b : beta) b = 1 / (1 + std::exp(-b));
        for (size_t i = 0; i < g.size(); i++) g[i] = i % 7 == 3 ? -18 : -0.05f * std::exp(g[i]);
        const DeltaReference want = delta_reference(
            {widen(qkv), widen(g), widen(beta), std::vector<double>(whole.T * whole.Hv * whole.Dv)}, doc_pos, whole);
        printf(" Hk %zu, Hv %zu, Dk %zu, Dv %zu\n", whole.Hk, whole.Hv, whole.Dk, whole.Dv);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            Array<float> states(decode_slots * whole.Hv * whole.Dk * whole.Dv);
            std::vector<X> got(want.out.size(), X(NAN));
            const DecodeRows prompts = DecodeRows::prompts();
            for (size_t position = 0;; position++) {
                const bool first = position == 0;
                const DecodeRows rows = first ? prompts : DecodeRows::newest(position - 1);
                const DeltaShape s = of(rows.tokens.size());
                if (s.T == 0) break;
                Array<X> in(rows.of(qkv, s.row())), out(s.T * s.Hv * s.Dv);
                Array<float> in_g(rows.of(g, s.Hv)), in_beta(rows.of(beta, s.Hv));
                Array<int32_t> positions(rows.doc_pos), slots(rows.slots);
                const DeltaGates<const float> gates{in_g.data(), in_beta.data()};
                if (first) {
                    Array<float> kept(gated_delta_states(s)), scratch(gated_delta_scratch(dev, s));
                    gated_delta_forward(dev, out.data(), kept.data(), scratch.data(), in.data(), gates, positions.data(), s,
                                        DeltaStates<float>{states.data(), slots.data()});
                } else gated_delta_decode(dev, out.data(), states.data(), in.data(), gates, slots.data(), s);
                rows.put(got, std::vector<X>(out.values()), s.Hv * s.Dv);
            }
            expect_close("out", got, want.out, delta_errors(want, whole).out + unit_roundoff<X> * largest(want.out));
            same(got, std::vector<float>(states.values()));
        });
    }
}
