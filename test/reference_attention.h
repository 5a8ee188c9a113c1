// Attention for tests on the CPU and of kernels: a float64 reference that stores all scores, a run of the op with rows dealt to ranks, and
// the comparison of both.
#pragma once
#include <cstring>
#include <deque>
#include <string>

#include "../llmc/ops/attention_prompts.h"
#include "../llmc/parallel/split.h"
#include "check.h"
#include "float_sums.h"

// ---- reference

struct AttentionCase {
    std::vector<size_t> documents;
    size_t window, H, KV, D;               // window 0: none
    size_t shortest = TileCuts::shortest;  // length from which a document begins with a cut
    size_t cut_slots = 0;                  // the least length of cuts(); unused slots hold INT32_MAX
    // (documents) or empty: the tokens that a document shares with the last one that shares none; it lacks them, and sees them
    std::vector<size_t> shared = {};

    size_t T() const {
        size_t sum = 0;
        for (size_t length : documents) sum += length;
        return sum;
    }
    size_t row() const { return (H + 2 * KV) * D; }
    float scale() const { return float(1 / std::sqrt(double(D))); }
    AttentionShape shape(size_t rows) const { return {rows, H, KV, D, scale()}; }
    std::vector<size_t> offsets() const {
        std::vector<size_t> out{0};
        for (size_t length : documents) out.push_back(out.back() + length);
        return out;
    }
    std::vector<int32_t> cuts() const {
        std::vector<int32_t> out;
        for (size_t i = 1; i < documents.size(); i++)
            if (documents[i] >= shortest) out.push_back(int32_t(offsets()[i]));
        out.resize(std::max(out.size(), cut_slots), INT32_MAX);
        return out;
    }
    // The row as a Row, without tokens.
    Row outline() const {
        Row row{};
        row.T = T(), row.doc_offsets = offsets();
        for (size_t i = 0; i < documents.size(); i++) {
            const size_t n = shared.empty() ? 0 : shared[i];
            if (n && shared[i - 1] == 0) row.shared.push_back({row.doc_offsets[i - 1], n, 0});
            if (n) row.shared.back().end = row.doc_offsets[i + 1];
            for (size_t t = 0; t < documents[i]; t++) row.doc_pos.push_back(int32_t(n + t));
            row.doc_begin.insert(row.doc_begin.end(), documents[i], int32_t(row.doc_offsets[i]));
        }
        return row;
    }
    // The keys that a query sees.
    std::vector<size_t> keys(size_t t) const {
        std::vector<size_t> out;
        const Row row = outline();
        for (const SharedPrompt &p : row.shared)
            for (size_t i = 0; i < p.length && size_t(row.doc_begin[t]) > p.begin && t < p.end; i++)
                if (window == 0 || i + window > size_t(row.doc_pos[t])) out.push_back(p.begin + i);
        for (size_t r = size_t(first_key()[t]); r <= t; r++) out.push_back(r);
        return out;
    }
    std::vector<int32_t> first_key() const {
        std::vector<int32_t> out;
        for (size_t length : documents) {
            const size_t begin = out.size();
            for (size_t p = begin; p < begin + length; p++)
                out.push_back(int32_t(window && p + 1 > begin + window ? p + 1 - window : begin));
        }
        return out;
    }
};

// `*_size` is the same sum over absolute values; rounding errors are relative to it.
struct AttentionReference {
    std::vector<double> out, out_size, lse;  // (T, H, D), (H, T)
    std::vector<double> dqkv, dqkv_size;     // (T, (H + 2 KV) * D)
    double score_size = 0;                   // of all scores
};

// Returns P[t, r] of head h for the keys r.
inline std::vector<double> probabilities(AttentionReference &ref, const AttentionCase &a, const std::vector<double> &qkv,
                                         size_t t, size_t h, const std::vector<size_t> &keys) {
    const double *q = &qkv[(t * (a.H + 2 * a.KV) + h) * a.D];
    std::vector<double> p(keys.size());
    for (size_t i = 0; i < keys.size(); i++) {
        const double *k = &qkv[(keys[i] * (a.H + 2 * a.KV) + a.H + h / (a.H / a.KV)) * a.D];
        double dot = 0, size = 0;
        for (size_t d = 0; d < a.D; d++) dot += q[d] * k[d], size += std::abs(q[d] * k[d]);
        p[i] = dot * double(a.scale());
        ref.score_size = std::max(ref.score_size, size * double(a.scale()));
    }
    double sum = 0;
    const double largest = *std::max_element(p.begin(), p.end());
    for (double s : p) sum += std::exp(s - largest);
    ref.lse[h * a.T() + t] = largest + std::log(sum);
    for (double &s : p) s = std::exp(s - largest) / sum;
    return p;
}

inline AttentionReference attention_reference(const AttentionCase &a, const std::vector<double> &qkv) {
    const size_t T = a.T(), D = a.D;
    AttentionReference ref{
        std::vector<double>(T * a.H * D), std::vector<double>(T * a.H * D), std::vector<double>(a.H * T), {}, {}};
    for (size_t t = 0; t < T; t++) {
        const auto keys = a.keys(t);
        for (size_t h = 0; h < a.H; h++) {
            const auto p = probabilities(ref, a, qkv, t, h, keys);
            for (size_t i = 0; i < keys.size(); i++) {
                const double p_r = p[i], *v = &qkv[(keys[i] * (a.H + 2 * a.KV) + a.H + a.KV + h / (a.H / a.KV)) * D];
                for (size_t d = 0; d < D; d++) {
                    ref.out[(t * a.H + h) * D + d] += p_r * v[d];
                    ref.out_size[(t * a.H + h) * D + d] += p_r * std::abs(v[d]);
                }
            }
        }
    }
    return ref;
}

// Computes ref.dqkv. delta is computed from `out`, so that op and reference can use the same rounded values.
inline void attention_reference_backward(AttentionReference &ref, const AttentionCase &a, const std::vector<double> &qkv,
                                         const std::vector<double> &out, const std::vector<double> &dout) {
    const size_t T = a.T(), D = a.D, row = a.row();
    ref.dqkv.assign(T * row, 0);
    ref.dqkv_size.assign(T * row, 0);
    const auto add = [&](size_t at, double term, double size) { ref.dqkv[at] += term, ref.dqkv_size[at] += size; };
    for (size_t t = 0; t < T; t++) {
        const auto keys = a.keys(t);
        for (size_t h = 0; h < a.H; h++) {
            const size_t o = (t * a.H + h) * D, q = t * row + h * D;
            const auto p = probabilities(ref, a, qkv, t, h, keys);
            for (size_t i = 0; i < keys.size(); i++) {
                const size_t k = keys[i] * row + (a.H + h / (a.H / a.KV)) * D, v = k + a.KV * D;
                const double p_r = p[i];
                double ds = 0, size = 0;  // dP - delta
                for (size_t d = 0; d < D; d++) {
                    ds += dout[o + d] * (qkv[v + d] - out[o + d]);
                    size += std::abs(dout[o + d]) * (std::abs(qkv[v + d]) + std::abs(out[o + d]));
                }
                ds *= p_r * double(a.scale()), size *= p_r * double(a.scale());
                for (size_t d = 0; d < D; d++) {
                    add(q + d, ds * qkv[k + d], size * std::abs(qkv[k + d]));
                    add(k + d, ds * qkv[q + d], size * std::abs(qkv[q + d]));
                    add(v + d, p_r * dout[o + d], p_r * std::abs(dout[o + d]));
                }
            }
        }
    }
}

// ---- the op

template <class X> struct AttentionValues {
    std::vector<X> qkv, dout;
    explicit AttentionValues(const AttentionCase &a)
        : qkv(random_values<X>(a.T() * a.row(), 1)), dout(random_values<X>(a.T() * a.H * a.D, 2)) {}
};
template <class X> struct AttentionResult {
    std::vector<X> out, dqkv;
    std::vector<float> lse;
};

template <template <class> class Array, class X> struct AttentionRank {  // the T rows of one rank
    Pieces pieces;
    size_t T;
    Array<X> qkv, dout, out;
    Array<float> out32, lse, dq, dk, dv, delta, scratch;

    template <class Dev>
    AttentionRank(Dev dev, const Pieces &pieces, const std::vector<X> &qkv, const std::vector<X> &dout, size_t T,
                  const AttentionCase &a)
        : pieces(pieces),
          T(T),
          qkv(qkv),
          dout(dout),
          out(T * a.H * a.D),
          out32(T * a.H * a.D),
          lse(a.H * T),
          dq(T * a.H * a.D),
          dk(T * a.KV * a.D),
          dv(T * a.KV * a.D),
          delta(a.H * T),
          scratch(attention_scratch(dev, a.shape(T))) {}
    Heads<const X> view(const AttentionCase &a, size_t head) { return {qkv.data() + head * a.D, a.row()}; }
    AttentionGrads grads(AttentionRank &keys) { return {dq.data(), keys.dk.data(), keys.dv.data()}; }
};

// Both passes, with the pieces ranks[r] as the consecutive rows of rank r. Array is an array in the memory of the device: Array<T>(n) is full of
// NaN, Array<T>(vector) has these values, and values() returns them. Gradients overwrite queries, keys and values.
template <template <class> class Array, class Dev, class X = typename Dev::X>
AttentionResult<X> run_attention(Dev dev, const AttentionCase &a, const AttentionValues<X> &in,
                                 const std::vector<Pieces> &ranks) {
    const size_t T = a.T(), D = a.D, H = a.H, KV = a.KV, row = a.row();
    Array<int32_t> first_key(a.first_key()), cuts(a.cuts());
    const auto each_row = [](const Pieces &pieces, auto &&f) {  // f(global row, local row)
        for (size_t i = 0; i < pieces.count; i++)
            for (size_t p = pieces.piece[i].begin; p < pieces.piece[i].end; p++)
                f(p, pieces.piece[i].offset + p - pieces.piece[i].begin);
    };
    using Rank = AttentionRank<Array, X>;
    std::deque<Rank> state;
    for (const Pieces &pieces : ranks) {
        std::vector<X> qkv, dout;
        each_row(pieces, [&](size_t p, size_t) {
            qkv.insert(qkv.end(), in.qkv.begin() + long(p * row), in.qkv.begin() + long((p + 1) * row));
            dout.insert(dout.end(), in.dout.begin() + long(p * H * D), in.dout.begin() + long((p + 1) * H * D));
        });
        const size_t t = qkv.size() / row;
        state.emplace_back(dev, pieces, qkv, dout, t, a);
    }
    const auto inputs = [&](Rank &q, Rank &k) -> AttentionInputs<X> {
        return {q.view(a, 0), k.view(a, H), k.view(a, H + KV), first_key.data(), {cuts.data(), a.cuts().size()}, a.shape(q.T)};
    };
    const PromptSplit split = split_prompts(a.outline(), a.window);
    Array<int32_t> prompt_key(split.first_key);
    const PromptParts prompts{split.parts, prompt_key.data()};
    if (Rank &s = state.front(); state.size() == 1 && a.shared.empty()) {
        attention_forward(dev, s.out.data(), s.out32.data(), s.lse.data(), inputs(s, s), s.pieces);
        attention_backward(dev, s.qkv.data(), s.grads(s), s.delta.data(), s.scratch.data(), inputs(s, s), s.out.data(),
                           s.dout.data(), s.lse.data(), s.pieces);
    } else {
        const size_t n = state.size();
        for (size_t r = 0; r < n; r++) {
            Rank &q = state[r];
            for (size_t hop = 0; hop < n; hop++) {
                Rank &k = state[(r + n - hop) % n];
                prompts_forward_part(dev, q.out.data(), q.out32.data(), q.lse.data(), inputs(q, k), q.pieces, k.pieces,
                                     {hop == 0, hop == n - 1}, prompts);
            }
            attention_backward_begin(dev, q.grads(q), q.delta.data(), q.out.data(), q.dout.data(), a.shape(q.T));
        }
        for (Rank &q : state)
            for (Rank &k : state)
                prompts_backward_part(dev, q.grads(k), q.scratch.data(), inputs(q, k), q.delta.data(), q.lse.data(),
                                      q.dout.data(), q.pieces, k.pieces, prompts);
        for (Rank &q : state) attention_backward_end(dev, q.qkv.data(), q.grads(q), a.shape(q.T));
    }
    AttentionResult<X> result{std::vector<X>(T * H * D), std::vector<X>(T * row), std::vector<float>(H * T)};
    for (Rank &s : state) {
        const auto out = s.out.values(), dqkv = s.qkv.values();
        const auto lse = s.lse.values();
        each_row(s.pieces, [&](size_t p, size_t t) {
            std::copy_n(out.begin() + long(t * H * D), H * D, result.out.begin() + long(p * H * D));
            std::copy_n(dqkv.begin() + long(t * row), row, result.dqkv.begin() + long(p * row));
            for (size_t h = 0; h < H; h++) result.lse[h * T + p] = lse[h * s.T + t];
        });
    }
    return result;
}
template <template <class> class Array, class Dev, class X = typename Dev::X>
AttentionResult<X> run_attention(Dev dev, const AttentionCase &a, const AttentionValues<X> &in) {
    return run_attention<Array>(dev, a, in, {{{{0, a.T(), 0}}, 1}});
}

inline std::vector<double> relative(std::vector<double> x, const std::vector<double> &size) {
    for (size_t i = 0; i < x.size(); i++) x[i] /= size[i];
    return x;
}

// All values are float (float_sums.h) except inputs, results and, if tiles are multiplied in bf16, P and dS.
//
// A score is a sum over D, and lse a sum of exp(score); storing, scaling and merging them adds a few roundings of numbers below 8. The relative
// error of a probability exp(score - lse) is twice that.
template <class X> double lse_error(const AttentionCase &a, const AttentionReference &ref) {
    return sum_error_of<X>(a.D) * ref.score_size + rounded_sum_error(a.T()) + rounded_sum_error(1) * 8;
}

template <class X>
void check_attention(const char *what, const AttentionCase &a, const AttentionValues<X> &in, const AttentionResult<X> &got) {
    const auto qkv = widen(in.qkv);
    AttentionReference ref = attention_reference(a, qkv);
    attention_reference_backward(ref, a, qkv, widen(got.out), widen(in.dout));
    const double p_error = 2 * lse_error<X>(a, ref);
    const auto expect = [&](const char *tensor, const auto &x, const std::vector<double> &want, const std::vector<double> &size,
                            double e) {
        expect_close(format("%s: %s", what, tensor).c_str(), relative(widen(x), size), relative(want, size),
                     e + (sizeof(X) == sizeof(float) ? 1 : 2) * unit_roundoff<X>);  // of the result, and of P or dS
    };
    expect_close(format("%s: lse", what).c_str(), got.lse, ref.lse, lse_error<X>(a, ref));
    // out sums over keys; dq, dk, dv over keys or over queries and heads, and dP over D
    expect("out", got.out, ref.out, ref.out_size, p_error + sum_error_of<X>(a.T()));
    expect("dqkv", got.dqkv, ref.dqkv, ref.dqkv_size, p_error + sum_error_of<X>(a.T() * a.H) + sum_error_of<X>(a.D));
}

// Deals `chunks` pieces of about equal length to the ranks in turn; with `zigzag` every other turn is in reverse order.
inline std::vector<Pieces> deal(size_t T, size_t ranks, size_t chunks, bool zigzag) {
    std::vector<Pieces> out(ranks);
    std::vector<size_t> rows(ranks);
    for (size_t c = 0; c < chunks; c++) {
        const size_t begin = T * c / chunks, end = T * (c + 1) / chunks, turn = c % ranks;
        const size_t r = zigzag && c / ranks % 2 ? ranks - 1 - turn : turn;
        out[r].piece[out[r].count++] = {begin, end, rows[r]};
        rows[r] += end - begin;
    }
    return out;
}

template <class A, class B> inline bool same_bits(const A *a, const B *b, size_t n) { return memcmp(a, b, n * sizeof(A)) == 0; }

// True if the rows [begin, end) of outputs and gradients have the same bits.
template <class X>
bool same_rows(const AttentionCase &a, const AttentionResult<X> &x, const AttentionResult<X> &y, size_t begin, size_t end) {
    const auto same = [&](const std::vector<X> &v, const std::vector<X> &w, size_t row) {
        return same_bits(&v[begin * row], &w[begin * row], (end - begin) * row);
    };
    return same(x.out, y.out, a.H * a.D) && same(x.dqkv, y.dqkv, a.row());
}
