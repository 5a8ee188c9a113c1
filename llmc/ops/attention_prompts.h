// Attention of documents that share prompts (../data/row.h), in two parts (attention.h): every query sees keys of the first part, which are the shared
// prompts, and all documents that share none. Documents behind a shared prompt see their own keys in the second part.
//
//   prompts_attention_forward (dev, out, out32, lse, in, parts)
//   prompts_attention_backward(dev, dqkv, grads, delta, scratch, in, out, dout, lse, parts)
//
// Arguments are the same as in attention.h, with T rows of queries, keys and values. out32 has (T, H, D) floats. in.first_key and in.cuts belong to the
// first part: a document behind a shared prompt begins where the prompt does.
#pragma once
#include "attention.h"

template <class X> AttentionInputs<X> answers_inputs(AttentionInputs<X> in, const PromptParts &parts) {
    in.first_key = parts.answers_first_key, in.cuts = parts.answers_cuts;
    return in;
}

template <class Dev, class X = typename Dev::X>
void prompts_attention_forward(Dev dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in,
                               const PromptParts &parts) {
    attention_forward_part(dev, out, out32, lse, in, parts.row, parts.prompts, PartOrder{true, false});
    attention_forward_part(dev, out, out32, lse, answers_inputs(in, parts), parts.row, parts.answers, PartOrder{false, true});
}

template <class Dev, class X = typename Dev::X>
void prompts_attention_backward(Dev dev, X *dqkv, AttentionGrads grads, float *delta, float *scratch,
                                const AttentionInputs<X> &in, const X *out, const X *dout, const float *lse,
                                const PromptParts &parts) {
    attention_backward_begin(dev, grads, delta, out, dout, in.shape);
    attention_backward_part(dev, grads, scratch, in, delta, lse, dout, parts.row, parts.prompts);
    attention_backward_part(dev, grads, scratch, answers_inputs(in, parts), delta, lse, dout, parts.row, parts.answers);
    attention_backward_end(dev, dqkv, grads, in.shape);
}
