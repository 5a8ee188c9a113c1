// Attention of documents that share prompts (../data/row.h). A query sees the keys of its document that stand there, and keys of the prompt that the
// document lacks. Thus a part of attention (attention.h) has a part within documents, and further ones between documents and their prompts:
//
//   prompts_forward_part (dev, out, out32, lse, in, q_pieces, k_pieces, order, prompts)
//   prompts_backward_part(dev, grads, scratch, in, delta, lse, dout, q_pieces, k_pieces, prompts)
//
// Arguments are those of attention_forward_part and attention_backward_part, which these functions are if no prompt is shared.
#pragma once
#include "attention.h"

namespace attention {

inline Pieces clip(const Pieces &pieces, Piece within) {
    Pieces out{};
    for (size_t i = 0; i < pieces.count; i++)
        if (const Piece p = clip(pieces.piece[i], within.begin, within.end); length(p)) out.piece[out.count++] = p;
    return out;
}

// Calls f(queries, keys) for the queries that see a shared prompt among the keys, as many at a time as Pieces can hold.
template <class F> void each_prompt_part(const Pieces &q_pieces, const Pieces &k_pieces, const PromptParts &prompts, F f) {
    Pieces queries{}, keys{};
    const auto append = [](Pieces &to, const Pieces &from) {
        std::copy_n(from.piece, from.count, to.piece + to.count);
        to.count += from.count;
    };
    const auto flush = [&] {
        if (queries.count) f(queries, keys);
        queries.count = keys.count = 0;
    };
    for (const PromptPart &part : prompts.parts) {
        const Pieces see = clip(q_pieces, part.queries), seen = clip(k_pieces, part.prompt);
        if (see.count == 0 || seen.count == 0) continue;
        const auto present = [&] { return keys.count && keys.piece[keys.count - 1].begin >= part.prompt.begin; };
        if (queries.count + see.count > Pieces::capacity || (!present() && keys.count + seen.count > Pieces::capacity)) flush();
        if (!present()) append(keys, seen);
        append(queries, see);
    }
    flush();
}

template <class X> AttentionInputs<X> prompt_inputs(AttentionInputs<X> in, const PromptParts &prompts) {
    in.first_key = prompts.first_key, in.cuts = {};
    return in;
}

}  // namespace attention

template <class Dev, class X = typename Dev::X>
void prompts_forward_part(Dev dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in, const Pieces &q_pieces,
                          const Pieces &k_pieces, PartOrder order, const PromptParts &prompts) {
    bool ask = false;
    attention::each_prompt_part(q_pieces, k_pieces, prompts, [&](const Pieces &, const Pieces &) { ask = true; });
    attention_forward_part(dev, out, out32, lse, in, q_pieces, k_pieces, PartOrder{order.first, order.last && !ask});
    if (!ask) return;
    attention::each_prompt_part(q_pieces, k_pieces, prompts, [&](const Pieces &queries, const Pieces &keys) {
        attention_forward_part(dev, out, out32, lse, attention::prompt_inputs(in, prompts), queries, keys, PartOrder{});
    });
    if (order.last) round_floats(dev, out, out32, in.shape.T * in.shape.H * in.shape.D);  // the last part has not all queries
}

template <class Dev, class X = typename Dev::X>
void prompts_backward_part(Dev dev, AttentionGrads grads, float *scratch, const AttentionInputs<X> &in, const float *delta,
                           const float *lse, const X *dout, const Pieces &q_pieces, const Pieces &k_pieces,
                           const PromptParts &prompts) {
    attention_backward_part(dev, grads, scratch, in, delta, lse, dout, q_pieces, k_pieces);
    attention::each_prompt_part(q_pieces, k_pieces, prompts, [&](const Pieces &queries, const Pieces &keys) {
        attention_backward_part(dev, grads, scratch, attention::prompt_inputs(in, prompts), delta, lse, dout, queries, keys);
    });
}
