#!/usr/bin/env python3
"""Tiny random models and what Hugging Face transformers computes with them in float64.

    pip install torch transformers safetensors numpy
    python3 test/golden/make.py [--only NAME]

writes, for each model, test/golden/NAME/:
  config.json, *.safetensors   the model, as save_pretrained writes it (some then respelled, as transformers 4 or the hub's GPT-2 have them)
  golden.safetensors           tokens I32, loss_mask U8 (1: this token is predicted), doc_offsets I64,
                               logits F32 (rows, V): every eighth position of each of the documents `logits_documents`, the last one included
  golden.json                  what is expected, in float64 unless it says otherwise:
    loss, entropy, accuracy    means over all targets: negative log-likelihood, entropy of the prediction (nats), argmax == target
    bf16                       on 100 documents of 101 random tokens, so many that their mean is more than noise, with the weights
                               rounded to bfloat16: losses, the mean loss of each document in float64; bf16_loss, the mean of all
                               by transformers in bfloat16 (loss from float32 logits); document_rms, root mean square of the error
                               of a document's loss there; gradient_error, of the gradient of `loss`, relative, L2. Token t of document d is
                               Random{1, Purpose::test, stream_of("bf16 documents") + d}.block(t)[0] % V
    grad_norm                  L2 norm of the gradient of loss; tied embeddings count once
    gradients.NAME             of each tensor by its Hugging Face name: L2 norm, projections sum_i gradient[i] * sign[i] / sqrt(n) for k < 4,
                               sign[i] = Random{1, Purpose::test, stream_of(NAME) + k}.block(i)[0] & 1 ? 1 : -1   (llmc/core/rng.h)
                               i counts in the order of (out, in), also where the file has (in, out): GPT-2's Conv1D
    losses[0..10]              before the first and after each of 10 AdamW steps on the same documents (OPTIMIZER below)
    balanced                   of mixtures of experts: aux_loss of all documents as one batch; and with router_aux_loss_coef times it added to the loss
                               grad_norm, gradients and losses, as above

Documents are run one by one: nothing is packed here. The modelling code is transformers' own with eager attention; its float32
islands (norms, softmax) are widened to float64. Rope angles, cosines and sines stay float32, as they are for any dtype.
"""
import argparse
import contextlib
import importlib
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.numpy import save
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

HERE = Path(__file__).parent
OPTIMIZER = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
AUX_LOSS_COEF = 0.5  # large enough that every router notices
WEIGHT_DECAY, MAX_NORM, STEPS = 0.1, 1.0, 10  # decay of matrices, embeddings too; not of norms and biases

DOCUMENTS = [  # length, spans of targets
    (5, [(2, 5)]),
    (1, []),
    (13, [(4, 13)]),
    (33, [(1, 33)]),
    (2, [(1, 2)]),
    (70, [(10, 30), (45, 70)]),
]
LOGITS_DOCUMENTS, LOGITS_STRIDE = [2, 3], 8
ANSWER_LENGTH = 12  # and the length of its prompt
BF16_DOCUMENTS, BF16_LENGTH = 100, 101

SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, vocab_size=96,
             max_position_embeddings=128, rms_norm_eps=1e-5)
SMALLER = dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, intermediate_size=32, pad_token_id=None, bos_token_id=1, eos_token_id=2)
SPARSE = dict(SMALLER, moe_intermediate_size=8)
SMALL_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=128, bos_token_id=1, eos_token_id=2)
LLAMA3_SCALING = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=64)


def rope(theta, rope_type="default", **scaling):
    return dict(rope_parameters=dict(rope_type=rope_type, rope_theta=theta, **scaling))


def gemma_rope(theta, local_theta, **scaling):
    return dict(rope_parameters=dict(full_attention=rope(theta, **scaling)["rope_parameters"], sliding_attention=rope(local_theta)["rope_parameters"]))


# name: model_type, what differs from SMALL or SMALL_GPT2, and how the files are written (in bfloat16 unless they say otherwise)
MODELS = {
    "llama2": ("llama", dict(num_key_value_heads=4, **rope(1e4)), dict(v4=True, drop=["num_key_value_heads", "head_dim"])),
    "llama3": ("llama", dict(vocab_size=112, **rope(5e5)), dict(max_shard_size="30KB")),
    "llama31": ("llama", dict(SMALLER, rope_parameters=LLAMA3_SCALING, eos_token_id=[2, 3]), dict(v4=True, drop=["head_dim"])),
    "llama32": ("llama", dict(rope_parameters=LLAMA3_SCALING, head_dim=16, tie_word_embeddings=True), {}),
    "llama_bias": ("llama", dict(SMALLER, attention_bias=True, mlp_bias=True, **rope(1e4)), {}),
    "llama_yarn": ("llama", dict(SMALLER, **rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=1.0)), {}),
    "llama_linear": ("llama", dict(SMALLER, intermediate_size=24, **rope(1e4, "linear", factor=4.0)), dict(dtype=torch.float16, v4=True, legacy_type=True)),
    "qwen2": ("qwen2", dict(hidden_size=56, num_attention_heads=7, num_key_value_heads=1, intermediate_size=32, rms_norm_eps=1e-6,
                            tie_word_embeddings=True, use_sliding_window=False, **rope(1e6)),
              dict(v4=True, extra=dict(sliding_window=24, max_window_layers=1))),  # a window that is not used, as Qwen2.5 ships it
    "qwen2_window": ("qwen2", dict(SMALLER, rms_norm_eps=1e-6, use_sliding_window=True, sliding_window=16, max_window_layers=1, **rope(1e6)), {}),
    "qwen3": ("qwen3", dict(head_dim=16, intermediate_size=64, rms_norm_eps=1e-6, tie_word_embeddings=True, **rope(1e6)), dict(dtype=torch.float32)),
    "mistral": ("mistral", dict(SMALLER, sliding_window=24, vocab_size=101, **rope(1e4)), {}),
    "phi3": ("phi3", dict(hidden_size=24, num_attention_heads=3, num_key_value_heads=1, intermediate_size=32, sliding_window=20,
                          pad_token_id=None, eos_token_id=2, **rope(1e4)), {}),
    # documents of 33 and 70 tokens are longer than the original positions, the others are not
    "phi4": ("phi3", dict(SMALLER, hidden_size=32, num_attention_heads=4, intermediate_size=40, original_max_position_embeddings=32, tie_word_embeddings=True,
                          **rope(1e4, "longrope", short_factor=[1.0, 1.25, 1.5], long_factor=[2.0, 3.0, 4.5], partial_rotary_factor=0.75)),
             dict(v4=True)),
    "seed_oss": ("seed_oss", dict(SMALLER, head_dim=16, **rope(1e4)), {}),
    "smollm3": ("smollm3", dict(SMALLER, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=20, **rope(1e4)), {}),
    "ministral": ("ministral", dict(SMALLER, head_dim=8, layer_types=["full_attention", "sliding_attention"], sliding_window=16, **rope(1e4)), {}),
    "granite": ("granite", dict(SMALLER, intermediate_size=40, embedding_multiplier=6.0, residual_multiplier=0.35, attention_multiplier=0.5, logits_scaling=2.0,
                                tie_word_embeddings=True, **rope(1e4)), {}),
    "exaone4": ("exaone4", dict(SMALLER, head_dim=16, layer_types=["sliding_attention", "full_attention"], sliding_window=16, sliding_window_pattern=2, **rope(1e4)), {}),
    "dynamic": ("llama", dict(SMALLER, **rope(1e4, "dynamic", factor=4.0)), dict(v4=True)),
    "phi35": ("phi3", dict(SMALLER, hidden_size=32, num_attention_heads=4, intermediate_size=40, original_max_position_embeddings=32,
                           **rope(1e4, "longrope", short_factor=[1.0, 1.25, 1.5, 1.75], long_factor=[2.0, 3.0, 4.5, 6.0])), dict(v4=True)),
    "smollm2": ("llama", dict(SMALLER, hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=16, num_hidden_layers=1,
                              tie_word_embeddings=True, **rope(1e5)), {}),
    # queries are wider than the residual stream: each norm shows its width
    "olmo2": ("olmo2", dict(head_dim=16, pad_token_id=None, eos_token_id=2, **rope(5e5)), {}),
    "gemma3": ("gemma3_text", dict(SMALLER, head_dim=16, layer_types=["sliding_attention", "full_attention"], sliding_window=16, query_pre_attn_scalar=24,
                                   **gemma_rope(1e5, 1e3, rope_type="linear", factor=4.0)), {}),
    "gemma3_wide": ("gemma3_text", dict(SMALLER, head_dim=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3, sliding_window=8,
                                        sliding_window_pattern=2, query_pre_attn_scalar=16, tie_word_embeddings=False, **gemma_rope(1e6, 1e4)),
                    dict(v4=True, extra=dict(sliding_window_pattern=2))),
    # three routers have the same rows in each layer: of their experts the first two are always chosen together, and the last one never
    "qwen3_moe": ("qwen3_moe", dict(SPARSE, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True, head_dim=8, **rope(1e4)),
                  dict(tied_routers=[0, 1, 4])),
    "qwen2_moe": ("qwen2_moe", dict(SPARSE, num_hidden_layers=3, num_experts=7, num_experts_per_tok=3, shared_expert_intermediate_size=16, mlp_only_layers=[1],
                                    **rope(1e4)), {}),
    "mixtral": ("mixtral", dict(SPARSE, intermediate_size=24, num_local_experts=3, num_experts_per_tok=2, **rope(1e6)), {}),
    # heads of queries and keys, of values, and of attention have different sizes; a document has two chunks of the delta rule, one of a few tokens
    "qwen35": ("qwen3_5_text", dict(SMALLER, head_dim=32, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "full_attention"],
                                    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
                                    **rope(1e4, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)), {}),
    "qwen35_tied": ("qwen3_5_text", dict(SMALLER, head_dim=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
                                         linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=16, linear_value_head_dim=8,
                                         **rope(1e4, partial_rotary_factor=0.5)), {}),
    "qwen35_moe": ("qwen3_5_moe_text", dict(SPARSE, head_dim=16, num_attention_heads=2, layer_types=["linear_attention", "full_attention"],
                                            num_experts=6, num_experts_per_tok=2, shared_expert_intermediate_size=16,
                                            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                                            **rope(1e4, partial_rotary_factor=0.5)), {}),
    "gpt2": ("gpt2", {}, {}),
    "gpt2_erf": ("gpt2", dict(activation_function="gelu", n_inner=48, n_positions=104, tie_word_embeddings=False),
                 dict(like_the_hubs=True)),
}


# ---- random numbers that C++ can repeat (llmc/core/rng.h) -----------------------------------------------------------------------

def stream_of(name):
    h = 2166136261
    for c in name.encode():
        h = (h ^ c) * 16777619 & 0xFFFFFFFF
    return h


def philox4x32(counter, key):
    """Philox4x32-10 of four arrays of 32-bit words (held in uint64) under two key words."""
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * counter[0], np.uint64(0xCD9E8D57) * counter[2]
        counter = [(b >> np.uint64(32)) ^ counter[1] ^ np.uint64(key[0]), b & low,
                   (a >> np.uint64(32)) ^ counter[3] ^ np.uint64(key[1]), a & low]
        key = (key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def random_words(name, k, n):
    index, word = np.arange(n, dtype=np.uint64), lambda x: np.full(n, x, np.uint64)
    purpose_test = 5
    return philox4x32([index, word(0), word((stream_of(name) + k) & 0xFFFFFFFF), word(purpose_test)], (1, 0))[0]


def signs(name, k, n):
    return np.where(random_words(name, k, n) & np.uint64(1), 1.0, -1.0)


def is_hybrid(model_type):
    return model_type in ("qwen3_5_text", "qwen3_5_moe_text")


# ---- the model ------------------------------------------------------------------------------------------------------------------

def write_model(name, folder, model_type, config, files):
    config = AutoConfig.for_model(model_type, **{**(SMALL_GPT2 if model_type == "gpt2" else SMALL), **config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor, p in model.named_parameters():
            p.normal_(generator=torch.Generator().manual_seed(stream_of(f"{name}.{tensor}")))
            p.mul_(0.1 if p.dim() == 1 else 1.5 / config.hidden_size**0.5)  # large enough that attention and rope matter
            adds_1 = model_type == "gemma3_text" or (is_hybrid(model_type) and not tensor.endswith("linear_attn.norm.weight"))
            if p.dim() == 1 and tensor.endswith("weight") and not adds_1:  # the other norms add 1 themselves
                p.add_(1)
    for layer in model.model.layers if "tied_routers" in files else []:
        rows = layer.mlp.gate.weight.data
        rows[files["tied_routers"]] = rows[files["tied_routers"][0]].clone()
    model = model.to(files.get("dtype", torch.bfloat16))
    model.save_pretrained(folder, max_shard_size=files.get("max_shard_size", "1GB"))
    if files.get("v4"):
        path = folder / "config.json"
        path.write_text(json.dumps(v4_spelling(json.loads(path.read_text()), files), indent=2) + "\n")
    if files.get("like_the_hubs"):
        respell_gpt2(folder / "model.safetensors", config)


def respell_gpt2(path, config):
    """As the hub has GPT-2: names without "transformer.", causal masks beside the weights, smaller than there."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    for layer in range(config.n_layer):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(8, 8, dtype=torch.uint8).tril()[None, None]
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, dict(format="pt"))


def v4_spelling(config, files):
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type" if files.get("legacy_type") else "rope_type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    for key in ["layer_types", "transformers_version", *files.get("drop", [])]:
        config.pop(key, None)
    return dict(sorted({**config, **files.get("extra", {})}.items()))


class Float64Torch:
    """torch as the modelling code sees it, where float32 means float64. Of equal values topk takes the first ones, which torch leaves open."""
    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def topk(x, k, dim):
        order = (x * 2**40).round().argsort(dim=dim, descending=True, stable=True).narrow(dim, 0, k)  # equal but for rounding
        return x.gather(dim, order), order

def gemma_norm(norm, x):
    return norm._norm(x) * (1 + norm.weight)  # without its float()


@contextlib.contextmanager
def widened(model):
    module, narrow = importlib.import_module(type(model).__module__), torch.Tensor.float
    with mock.patch.object(module, "torch", Float64Torch()), \
            mock.patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x)):
        if not hasattr(module, "Gemma3RMSNorm"):
            yield
        else:
            with mock.patch.object(module.Gemma3RMSNorm, "forward", gemma_norm):
                yield


def load(folder, dtype, **changes):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **changes)
    return model.eval()  # no dropout


def save_arrays(path, arrays, metadata):
    """safetensors writes the metadata in an order that changes from run to run; here they stay in theirs."""
    data = save(arrays, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = {**json.loads(data[8:end]), "__metadata__": metadata}
    path.write_bytes(data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + data[end:])


def shortened(value, digits=12):
    """Floats to twelve digits, in lists to nine."""
    if isinstance(value, dict):
        return {key: shortened(member, digits) for key, member in value.items()}
    if isinstance(value, list):
        return [shortened(member, 9) for member in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def write_json(path, value, depth):
    """Objects down to that depth have a line for each member, all else is one line."""
    def text(value, depth, indent):
        if depth == 0 or not isinstance(value, dict):
            return json.dumps(value)
        lines = [f"{indent} {json.dumps(key)}: {text(member, depth - 1, indent + ' ')}" for key, member in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    path.write_text(text(shortened(value), depth, "") + "\n")


# ---- documents, loss, optimizer -------------------------------------------------------------------------------------------------

def make_documents(name, model):
    """Random tokens, four in ten of them the model's own greedy choice, so that the accuracy is neither 0 nor 1."""
    random = np.random.Generator(np.random.PCG64(stream_of(name)))
    tokens, masks = [], []
    for length, spans in DOCUMENTS:
        ids = torch.from_numpy(random.integers(0, model.config.vocab_size, length))
        for t in range(1, length):
            if random.random() < 0.4:
                ids[t] = model(input_ids=ids[None, :t], use_cache=False).logits[0, -1].argmax()
        tokens.append(ids)
        masks.append(np.zeros(length, np.uint8))
        for begin, end in spans:
            masks[-1][begin:end] = 1
    return tokens, masks


def greedy_answers(model, tokens):
    """The continuations of the first tokens of some documents by transformers' own generation, with its states."""
    def answer(ids):
        out = model.generate(input_ids=ids[None], max_new_tokens=ANSWER_LENGTH, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return out[0, len(ids):].tolist()
    return [answer(tokens[d][:ANSWER_LENGTH]) for d in LOGITS_DOCUMENTS]


def kept_logits(logits):
    return torch.cat([logits[d][(len(logits[d]) - 1) % LOGITS_STRIDE::LOGITS_STRIDE] for d in LOGITS_DOCUMENTS]).float().numpy()


def evaluate(model, tokens, masks):
    """Mean loss, entropy and accuracy over the targets of all documents, and the logits of each."""
    entropy = correct = 0
    logits, losses = [], []
    for ids, mask in zip(tokens, masks):
        out = model(input_ids=ids[None], use_cache=False).logits[0]
        logits.append(out.detach())
        out = out.float() if out.dtype == torch.bfloat16 else out
        targets = torch.from_numpy(np.flatnonzero(mask))
        logp = torch.log_softmax(out[targets - 1], dim=-1)
        losses.append(-logp.gather(1, ids[targets, None])[:, 0])
        entropy = entropy - (logp.exp() * logp).sum().item()
        correct += (logp.argmax(-1) == ids[targets]).sum().item()
    losses = torch.cat(losses)
    return losses.mean(), entropy / len(losses), correct / len(losses), logits


def compare_bf16(folder, tokens, masks):
    """Losses and a gradient, exactly and in bfloat16. Both with rounded weights: what differs is arithmetic."""
    model, rounded_model = load(folder, torch.float64), load(folder, torch.bfloat16)
    with torch.no_grad():
        for p, rounded in zip(model.parameters(), rounded_model.parameters()):
            p.copy_(rounded)
    words = np.stack([random_words("bf16 documents", d, BF16_LENGTH) for d in range(BF16_DOCUMENTS)])
    ids = torch.from_numpy(words.astype(np.int64)) % model.config.vocab_size

    def document_losses(model):
        logits = torch.cat([model(input_ids=document[None], use_cache=False).logits[:, :-1] for document in ids])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.double().view(BF16_DOCUMENTS, -1).mean(1)

    with torch.no_grad():
        with widened(model):
            exact = document_losses(model)
        rounded = document_losses(rounded_model)
    with widened(model):
        evaluate(model, tokens, masks)[0].backward()
    evaluate(rounded_model, tokens, masks)[0].backward()
    gradients = [torch.cat([p.grad.double().flatten() for p in m.parameters()]) for m in (model, rounded_model)]
    gradient_error = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
    return dict(losses=[round(loss, 5) for loss in exact.tolist()], bf16_loss=rounded.mean().item(),
                document_rms=(rounded - exact).square().mean().sqrt().item(), gradient_error=gradient_error)


def flat_gradients(model, gradients):
    """By name, in the order of (out, in): gradients are those of model.parameters()."""
    in_out = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    names = [name for name, _ in model.named_parameters()]
    out = {}
    for name, g in zip(names, gradients):
        if g.dim() == 3 and ".experts." in name:
            out.update(by_expert(model.config.model_type, name, g))
        else:
            out[file_name(model.config.model_type, name)] = (g.T if name in in_out else g).numpy().ravel()
    return out


def file_name(model_type, name):
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name


def by_expert(model_type, name, g):
    """The tensors of files that transformers' arrays of all experts consist of."""
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    prefix, kind = file_name(model_type, name).rsplit(".", 1)
    for e, part in enumerate(g):
        for of, matrix in zip((gate, up), part.chunk(2)) if kind == "gate_up_proj" else [(down, part)]:
            yield f"{prefix}.{e}.{of}.weight", matrix.numpy().ravel()


def describe_gradient(name, g):
    """To nine digits: they are compared to four."""
    digits = lambda x: float(f"{x:.9g}")
    return dict(norm=digits(np.linalg.norm(g)), projections=[digits(g @ signs(name, k, g.size) / g.size**0.5) for k in range(4)])


def describe_gradients(model):
    out = {}
    for name, g in flat_gradients(model, [p.grad for p in model.parameters()]).items():
        out[name] = describe_gradient(name, g)
    return out


def global_norm(parameters):
    return torch.stack([p.grad.norm() for p in parameters]).norm()


def aux_loss(model, tokens):
    """As transformers adds it to the loss of one batch of these documents."""
    routers = [model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits for ids in tokens]
    config = model.config
    experts = config.num_local_experts if config.model_type == "mixtral" else config.num_experts
    of_batch = tuple(torch.cat(layer) for layer in zip(*routers))
    return importlib.import_module(type(model).__module__).load_balancing_loss_func(of_batch, experts, config.num_experts_per_tok)


def make_balanced(folder, tokens, masks):
    model = load(folder, torch.float64)
    loss = aux_loss(model, tokens)
    (evaluate(model, tokens, masks)[0] + AUX_LOSS_COEF * loss).backward()
    return dict(router_aux_loss_coef=AUX_LOSS_COEF, aux_loss=loss.item(), grad_norm=global_norm(list(model.parameters())).item(),
                losses=train(load(folder, torch.float64), tokens, masks, AUX_LOSS_COEF), gradients=describe_gradients(model))


def train(model, tokens, masks, aux_loss_coef=0):
    parameters = list(model.parameters())
    groups = [dict(params=[p for p in parameters if p.dim() > 1], weight_decay=WEIGHT_DECAY),
              dict(params=[p for p in parameters if p.dim() == 1], weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, **OPTIMIZER)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = evaluate(model, tokens, masks)[0]
        (loss + aux_loss_coef * aux_loss(model, tokens) if aux_loss_coef else loss).backward()
        losses.append(loss.item())
        norm = global_norm(parameters)
        if norm > MAX_NORM:
            for p in parameters:
                p.grad *= MAX_NORM / norm
        optimizer.step()
    with torch.no_grad():
        losses.append(evaluate(model, tokens, masks)[0].item())
    return losses


def without_specials(config):
    """Config changes that take away what the model is there to test: the loss must notice, or logits where it is a mean over too many."""
    if config.model_type == "gpt2":
        return {"other form of gelu": dict(activation_function="gelu" if config.activation_function == "gelu_new" else "gelu_new")}
    if config.model_type == "gemma3_text":
        both = [config.rope_parameters[layers] for layers in ("full_attention", "sliding_attention")]
        return {"other theta": dict(rope_parameters=dict(full_attention=both[0] | dict(rope_theta=10 * both[0]["rope_theta"]), sliding_attention=both[1])),
                "other local theta": dict(rope_parameters=dict(full_attention=both[0], sliding_attention=both[1] | dict(rope_theta=1e2))),
                "without window": dict(sliding_window=128), "window everywhere": dict(layer_types=["sliding_attention"] * config.num_hidden_layers),
                "other attention scale": dict(query_pre_attn_scalar=2 * config.query_pre_attn_scalar)}
    if is_hybrid(config.model_type):
        return {what: dict(rope_parameters=config.rope_parameters | change) for what, change in
                {"other theta": dict(rope_theta=10 * config.rope_parameters["rope_theta"]), "whole heads rotated": dict(partial_rotary_factor=1.0)}.items()}
    changes = {"other theta": rope(config.rope_parameters["rope_theta"] * 10)}
    if config.rope_parameters["rope_type"] != "default":
        changes["without scaling"] = rope(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "dynamic":
        changes.pop("without scaling")  # which is the same for documents within the positions
    if config.model_type == "exaone4":
        changes["window everywhere"] = dict(layer_types=["sliding_attention"] * config.num_hidden_layers)  # and rotation
    if config.model_type == "smollm3":
        changes["rotation everywhere"] = dict(no_rope_layers=[1] * config.num_hidden_layers)
    if config.model_type == "granite":
        changes |= {name: {name: 1.0} for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")}
    if config.rope_parameters["rope_type"] == "longrope":
        changes["short factors everywhere"] = dict(rope_parameters=config.rope_parameters | dict(long_factor=config.rope_parameters["short_factor"]))
        changes.pop("without scaling")  # which asks for another partial rotation, too
    if config.model_type in ("mistral", "ministral", "smollm3"):
        changes["without window"] = dict(sliding_window=128)
    if config.model_type == "qwen2" and config.use_sliding_window:
        changes["without window"] = dict(layer_types=["full_attention"] * config.num_hidden_layers)
        changes["window everywhere"] = dict(layer_types=["sliding_attention"] * config.num_hidden_layers)
    return changes


def make(name):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    write_model(name, folder, *MODELS[name])
    model = load(folder, torch.float64)

    with widened(model):
        with torch.no_grad():
            tokens, masks = make_documents(name, model)
        loss, entropy, accuracy, logits = evaluate(model, tokens, masks)
        loss.backward()
        grad_norm = global_norm(list(model.parameters())).item()
        gradients = describe_gradients(model)
        losses = train(load(folder, torch.float64), tokens, masks)
        balanced = dict(balanced=make_balanced(folder, tokens, masks)) if "num_experts_per_tok" in model.config.to_dict() else {}
        answers = dict(answers=greedy_answers(model, tokens)) if "linear_num_key_heads" in model.config.to_dict() else {}
        with torch.no_grad():
            for what, changes in without_specials(model.config).items():
                other_loss, _, _, other_logits = evaluate(load(folder, torch.float64, **changes), tokens, masks)
                difference = abs(other_loss.item() - loss.item())
                of_logits = max((a - b).abs().max().item() for a, b in zip(other_logits, logits))
                enough = of_logits > 1e-3 if what == "other form of gelu" else difference > 1e-3 * loss.item()
                assert enough, f"{name} {what}: the loss changes by {difference:.1e} only, a logit by {of_logits:.1e}"
    bf16 = compare_bf16(folder, tokens, masks)

    arrays = dict(tokens=torch.cat(tokens).int().numpy(), loss_mask=np.concatenate(masks),
                  doc_offsets=np.cumsum([0] + [len(t) for t in tokens], dtype=np.int64),
                  logits=kept_logits(logits))
    save_arrays(folder / "golden.safetensors", arrays, dict(kind="sft", vocab_size=str(model.config.vocab_size)))
    golden = dict(transformers=transformers.__version__, torch=torch.__version__, targets=int(arrays["loss_mask"].sum()),
                  loss=loss.item(), bf16=bf16, entropy=entropy, accuracy=accuracy, grad_norm=grad_norm, losses=losses,
                  logits_documents=LOGITS_DOCUMENTS, gradients=gradients, **balanced, **answers)
    write_json(folder / "golden.json", golden, depth=1)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:13} {sum(p.numel() for p in model.parameters()):6} {loss.item():9.6f} {bf16['bf16_loss'] - np.mean(bf16['losses']):+10.1e} "
          f"{entropy:9.6f} {accuracy:9.4f} {grad_norm:9.5f} {losses[-1]:9.6f} {size / 1e3:8.1f}", flush=True)
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, metavar="NAME", help="one model: " + ", ".join(MODELS))
    only = parser.parse_args().only
    torch.set_num_threads(1)  # the order of sums, and with it the last digits
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("model         params      loss  bf16-loss   entropy  accuracy grad norm   loss 10       kB")
    total = sum(make(name) for name in ([only] if only else MODELS))
    print(f"total {total / 1e3:.1f} kB")


if __name__ == "__main__":
    main()
