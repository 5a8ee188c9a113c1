// A document cut into pieces has the outputs and gradients of the whole one: each piece's affine function takes the state to the next piece, and the
// gradient to the one before.
#include "../../llmc/ops/delta_pieces.h"

#include "../../llmc/ops/layout.h"

#include "../reference_gated_delta.h"
#include "device.h"
#ifdef CUDA_HALF
#include "../../llmc/ops/delta_pieces.cuh"
#include "../../llmc/ops/layout.cuh"
#endif

namespace {

// The pieces of a row in order, each with the tokens of its documents; the last document of a piece continues in the next one.
struct Cuts {
    std::vector<size_t> documents, pieces;  // lengths
    size_t Hk, Hv, Dk, Dv;

    std::vector<int32_t> doc_pos() const {
        std::vector<int32_t> out;
        for (const size_t length : documents)
            for (size_t t = 0; t < length; t++) out.push_back(int32_t(t));
        return out;
    }
};

template <class T> std::vector<T> part_of(const std::vector<T> &whole, size_t begin, size_t n, size_t width) {
    return {whole.begin() + long(begin * width), whole.begin() + long((begin + n) * width)};
}

}  // namespace

template <class Dev> struct DeltaPieces : testing::Test {};
TYPED_TEST_SUITE(DeltaPieces, Devices);

TYPED_TEST(DeltaPieces, EqualTheWholeDocument) {
    using X = typename TypeParam::X;
    // several pieces of a document, also so short that the state before them still matters behind them; borders at documents' borders; pieces of one
    // document's end, a whole one and another's beginning; kept states
    const std::vector<Cuts> cases = {{{200}, {70, 64, 66}, 1, 2, 8, 16},
                                     {{40}, {10, 3, 2, 25}, 1, 2, 8, 16},
                                     {{64, 40, 100}, {64, 10, 90, 40}, 2, 2, 16, 8},
                                     {{5, 3, 150}, {6, 100, 52}, 1, 3, 24, 40},
                                     {{600}, {560, 40}, 1, 1, 8, 8},
                                     {{130}, {63, 67}, 1, 1, 128, 128}};
    for (const Cuts &a : cases) {
        const std::vector<int32_t> positions = a.doc_pos();
        const auto of = [&](size_t T) { return DeltaShape{T, a.Hk, a.Hv, a.Dk, a.Dv, 1e-6f}; };
        const DeltaShape s = of(positions.size());
        const auto qkv = random_values<X>(s.T * s.row(), 1), dout = random_values<X>(s.T * s.Hv * s.Dv, 2);
        auto g = random_values<float>(s.T * s.Hv, 3), beta = random_values<float>(g.size(), 4, 2);
        for (float &b : beta) b = 1 / (1 + std::exp(-b));
        for (float &v : g) v = -0.02f * std::exp(2 * v);
        const DeltaReference want = delta_reference({widen(qkv), widen(g), widen(beta), widen(dout)}, positions, s);
        const DeltaErrors allowed = delta_errors(want, s);
        printf(" T %zu, %zu pieces, Hk %zu, Hv %zu, Dk %zu, Dv %zu\n", s.T, a.pieces.size(), s.Hk, s.Hv, s.Dk, s.Dv);
        SameBits same;
        for_each_order<TypeParam>([&](TypeParam dev) {
            const size_t state = s.Hv * s.Dk * s.Dv, n = a.pieces.size();
            struct Piece {
                size_t begin, T;
                bool enters, leaves, spans;
                Array<X> qkv, dout, out, dqkv;
                Array<float> g, beta, dg, dbeta, kept, scratch, E, M, F, before, gradient, sum;
                Array<int32_t> doc_pos, starts, ends;
            };
            std::vector<std::unique_ptr<Piece>> pieces;
            for (size_t i = 0, begin = 0; i < n; begin += a.pieces[i++]) {
                const size_t T = a.pieces[i], end = begin + T;
                const bool enters = positions[begin] > 0, leaves = end < s.T && positions[end] > 0;
                std::vector<int32_t> doc_pos, starts(T, -1), ends(T, -1);
                for (size_t t = 0; t < T; t++) doc_pos.push_back(std::min(int32_t(t), positions[begin + t]));
                if (enters) starts[0] = 0;
                if (leaves) ends[T - 1] = 0;
                pieces.push_back(std::unique_ptr<Piece>(new Piece{begin,
                                                                  T,
                                                                  enters,
                                                                  leaves,
                                                                  enters && leaves && positions[end] >= int32_t(T),
                                                                  Array<X>(part_of(qkv, begin, T, s.row())),
                                                                  Array<X>(part_of(dout, begin, T, s.Hv * s.Dv)),
                                                                  Array<X>(T * s.Hv * s.Dv),
                                                                  Array<X>(T * s.row()),
                                                                  Array<float>(part_of(g, begin, T, s.Hv)),
                                                                  Array<float>(part_of(beta, begin, T, s.Hv)),
                                                                  Array<float>(T * s.Hv),
                                                                  Array<float>(T * s.Hv),
                                                                  Array<float>(gated_delta_states(of(T))),
                                                                  Array<float>(gated_delta_scratch(dev, of(T))),
                                                                  Array<float>(state),
                                                                  Array<float>(s.Hv * s.Dk * s.Dk),
                                                                  Array<float>(state),
                                                                  Array<float>(state),
                                                                  Array<float>(state),
                                                                  Array<float>(state),
                                                                  Array<int32_t>(doc_pos),
                                                                  Array<int32_t>(starts),
                                                                  Array<int32_t>(ends)}));
            }
            const auto gates = [](Piece &p) { return DeltaGates<const float>{p.g.data(), p.beta.data()}; };
            const auto affine = [&](Piece &p, float *x, float *b, bool transposed) {
                if (!p.spans) return b;
                delta_affine(dev, p.sum.data(), p.M.data(), x, b, transposed, s.Hv, s.Dk, s.Dv);
                return p.sum.data();
            };
            const auto move = [&](Array<float> &to, const float *from) {
                copy_rows(dev, to.data(), state, from, state, 1, state);
            };
            for (size_t i = 0; i < n; i++) {
                Piece &p = *pieces[i];
                gated_delta_ends(dev, p.E.data(), p.M.data(), p.scratch.data(), p.qkv.data(), gates(p), p.doc_pos.data(),
                                 p.ends.data(), of(p.T));
                if (p.leaves) move(pieces[i + 1]->before, affine(p, p.before.data(), p.E.data(), false));
            }
            std::vector<X> out, dqkv;
            std::vector<float> dg, dbeta;
            const auto append = [](auto &all, const auto &part) { all.insert(all.end(), part.begin(), part.end()); };
            for (const auto &p : pieces) {
                gated_delta_forward(dev, p->out.data(), p->kept.data(), p->scratch.data(), p->qkv.data(), gates(*p),
                                    p->doc_pos.data(), of(p->T), DeltaStates<float>{},
                                    DeltaStates<const float>{p->before.data(), p->starts.data()});
                append(out, p->out.values());
            }
            for (size_t i = n; i-- > 0;) {
                Piece &p = *pieces[i];
                gated_delta_starts(dev, p.F.data(), p.scratch.data(), p.dout.data(), p.qkv.data(), gates(p), p.doc_pos.data(),
                                   p.starts.data(), of(p.T));
                if (p.enters) move(pieces[i - 1]->gradient, affine(p, p.gradient.data(), p.F.data(), true));
            }
            for (const auto &p : pieces) {
                gated_delta_backward(dev, p->dqkv.data(), DeltaGates<float>{p->dg.data(), p->dbeta.data()}, p->scratch.data(),
                                     p->dout.data(), p->qkv.data(), gates(*p), p->kept.data(), p->doc_pos.data(), of(p->T),
                                     DeltaStates<const float>{p->gradient.data(), p->ends.data()},
                                     DeltaStates<const float>{p->before.data(), p->starts.data()});
                append(dqkv, p->dqkv.values()), append(dg, p->dg.values()), append(dbeta, p->dbeta.values());
            }
            expect_close("out", out, want.out, allowed.out + unit_roundoff<X> * largest(want.out));
            const auto columns = [&](const auto &values, size_t begin, size_t end) {
                std::vector<double> some;
                for (size_t at = 0; at < values.size(); at += s.row())
                    for (size_t c = begin; c < end; c++) some.push_back(double(float(values[at + c])));
                return some;
            };
            const auto expect_columns = [&](const char *what, size_t begin, size_t end, double error) {
                const auto wanted = columns(want.dqkv, begin, end);
                expect_close(what, columns(dqkv, begin, end), wanted, error + unit_roundoff<X> * largest(wanted));
            };
            expect_columns("dq", 0, s.Hk * s.Dk, allowed.dq);
            expect_columns("dk", s.Hk * s.Dk, 2 * s.Hk * s.Dk, allowed.dk);
            expect_columns("dv", 2 * s.Hk * s.Dk, s.row(), allowed.dv);
            expect_close("dbeta", dbeta, want.dbeta, allowed.dbeta);
            expect_close("dg", dg, want.dg, allowed.dg);
            same(out, dqkv, dg, dbeta);
        });
    }
}
