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

// A part of attention: queries and keys.
struct AttentionPart {
    Pieces queries{}, keys{};
};

// Returns the parts between queries and the shared prompts among the keys, each as large as Pieces permits.
inline std::vector<AttentionPart> prompt_parts(const Pieces &q_pieces, const Pieces &k_pieces, const PromptParts &prompts) {
    std::vector<AttentionPart> out;
    const auto append = [](Pieces &to, const Pieces &from) {
        std::copy_n(from.piece, from.count, to.piece + to.count);
        to.count += from.count;
    };
    for (const PromptPart &part : prompts.parts) {
        const Pieces see = clip(q_pieces, part.queries), seen = clip(k_pieces, part.prompt);
        if (see.count == 0 || seen.count == 0) continue;
        const auto has_prompt = [&](const Pieces &keys) {
            return keys.count && keys.piece[keys.count - 1].begin >= part.prompt.begin;
        };
        const auto fits = [&](const AttentionPart &in) {
            return in.queries.count + see.count <= Pieces::capacity &&
                   (has_prompt(in.keys) || in.keys.count + seen.count <= Pieces::capacity);
        };
        if (out.empty() || !fits(out.back())) out.emplace_back();
        if (!has_prompt(out.back().keys)) append(out.back().keys, seen);
        append(out.back().queries, see);
    }
    return out;
}

template <class X> AttentionInputs<X> prompt_inputs(AttentionInputs<X> in, const PromptParts &prompts) {
    in.first_key = prompts.first_key, in.cuts = {};
    return in;
}

}  // namespace attention

template <class Dev, class X = typename Dev::X>
void prompts_forward_part(Dev dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in, const Pieces &q_pieces,
                          const Pieces &k_pieces, PartOrder order, const PromptParts &prompts) {
    const auto parts = attention::prompt_parts(q_pieces, k_pieces, prompts);
    attention_forward_part(dev, out, out32, lse, in, q_pieces, k_pieces, PartOrder{order.first, order.last && parts.empty()});
    for (const auto &[queries, keys] : parts)
        attention_forward_part(dev, out, out32, lse, attention::prompt_inputs(in, prompts), queries, keys, PartOrder{});
    if (order.last && !parts.empty())  // the parts to prompts do not have all queries
        round_floats(dev, out, out32, in.shape.T * in.shape.H * in.shape.D);
}

template <class Dev, class X = typename Dev::X>
void prompts_backward_part(Dev dev, AttentionGrads grads, float *scratch, const AttentionInputs<X> &in, const float *delta,
                           const float *lse, const X *dout, const Pieces &q_pieces, const Pieces &k_pieces,
                           const PromptParts &prompts) {
    attention_backward_part(dev, grads, scratch, in, delta, lse, dout, q_pieces, k_pieces);
    for (const auto &[queries, keys] : attention::prompt_parts(q_pieces, k_pieces, prompts))
        attention_backward_part(dev, grads, scratch, attention::prompt_inputs(in, prompts), delta, lse, dout, queries, keys);
}
