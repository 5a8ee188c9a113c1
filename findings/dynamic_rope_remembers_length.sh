#!/usr/bin/env bash
# transformers: with dynamic RoPE a forward pass leaves its length in the model, and later passes of shorter inputs give other logits
#
# Claim (transformers 5.23.0, torch 2.15.0, CPU): a Llama with rope_type "dynamic" and 64 original positions reads an input of 256 tokens. Then the logits of
# an input of 64 to 255 tokens differ from those of the same model before, of 64 and 100 tokens by as much as the logits themselves: the frequencies of 256 tokens stay, because a
# buffer grows with the longest input and is reset only by an input BELOW the original length. So
#   - 100 tokens after 256 are computed with the frequencies of 256; after 256 and then 10 they are right again;
#   - exactly 64 tokens, which fit the original length, are scaled too: the reset asks for fewer;
#   - in a batch, every sequence has the frequencies of the longest one, so a neighbour changes its logits.
# eval(), no_grad() and a fresh cache change none of this. Weights and state_dict stay equal, so a saved and loaded copy gives other logits than the model.
#
# Why a good guess is wrong: a forward pass in eval mode without a cache is taken for a function of its input. The formula of dynamic NTK scaling depends on
# the length of the sequence, and a call looks as if it used its own.
#
# Who is hurt: whoever compares log-probabilities of two passes: RL (sampled, old and new ones), the reference of DPO, a reward model's scores, evaluations,
# whose results depend on the order of the records and on the batch size. Cure: one sequence a batch, and a pass of one token before each; or yarn,
# linear and llama3, which have no state.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.15.0 transformers==5.23.0
"$work/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.randint(64, (2, 256), generator=torch.Generator().manual_seed(1))


def new_model(rope_type):
    torch.manual_seed(0)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "yarn":
        rope["original_max_position_embeddings"] = 64
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                                        max_position_embeddings=64, rope_parameters=rope, initializer_range=0.3)).eval()


@torch.no_grad()
def logits(model, length):
    return model(ids[:1, :length], use_cache=False).logits[0, -1]


def largest(difference):
    return difference.abs().max().item()


for rope_type in ("linear", "yarn", "dynamic"):
    remembers = rope_type == "dynamic"
    for length in (63, 64, 100, 160):
        alone = logits(new_model(rope_type), length)
        model = new_model(rope_type)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        logits(model, 256)
        after, again = logits(model, length), logits(model, length)
        logits(model, 10)
        reset = logits(model, length)
        print(f"{rope_type}, {length} tokens: logits up to {largest(alone):.2f}; after 256 tokens they differ by {largest(after - alone):.2f}, after 10 more by {largest(reset - alone):.2f}")
        assert largest(reset - alone) < 1e-4 and torch.equal(after, again)
        assert (largest(after - alone) > 0.02) == (remembers and length >= 64)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    padded = ids.clone()
    padded[0, 100:] = 0
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    with torch.no_grad():
        beside = new_model(rope_type)(padded, attention_mask=mask, use_cache=False).logits[0, 99]
    moved = largest(beside - logits(new_model(rope_type), 100))
    print(f"{rope_type}, 100 tokens beside a sequence of 256: they differ by {moved:.4f}")
    assert (moved > 0.2) == remembers
PYTHON
