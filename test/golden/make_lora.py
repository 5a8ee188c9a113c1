#!/usr/bin/env python3
"""Adapters of the models of make.py, and what PEFT computes with them in float64.

    pip install torch transformers peft safetensors numpy
    python3 test/golden/make_lora.py [NAME ...]

writes, for each of these entries of CASES, or for all, test/golden/lora_NAME/:
  adapter_config.json, adapter_model.safetensors    a random adapter, both of its matrices other than 0, as PEFT saves it
  golden.safetensors, golden.json                   as make.py, of the adapted model: base names the model; gradients and steps are the
                                                    adapter's, also of bf16.gradient_error. `merged` is the loss of the model that merge_and_unload returns
  of a reward model instead                         documents are those of pairs.safetensors: rewards; loss, grad_norm and gradients
                                                    of the mean over pairs of -log s(chosen - rejected)
"""
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from make import (HERE, LOGITS_DOCUMENTS, MAX_NORM, OPTIMIZER, STEPS, WEIGHT_DECAY, describe_gradient, evaluate, global_norm, load,
                  kept_logits, save_arrays, stream_of, widened, write_json)

CASES = {  # name: base, LoRA's settings
    "llama3": ("llama3", dict(r=4, lora_alpha=6, target_modules="all-linear")),
    "qwen2": ("qwen2", dict(r=3, lora_alpha=10, target_modules="all-linear")),
    "qwen3": ("qwen3", dict(r=8, lora_alpha=16, use_rslora=True, target_modules=["q_proj", "v_proj"])),
    "mistral": ("mistral", dict(r=3, lora_alpha=6, target_modules=["k_proj", "o_proj", "gate_proj", "down_proj"])),
    "phi3": ("phi3", dict(r=2, lora_alpha=3, target_modules="all-linear")),
    "olmo2": ("olmo2", dict(r=3, lora_alpha=12, target_modules="all-linear")),
    "mixtral": ("mixtral", dict(r=2, lora_alpha=12, target_modules=["o_proj", "w1", "w2", "w3"])),
    "gpt2": ("gpt2", dict(r=3, lora_alpha=5, target_modules="all-linear", fan_in_fan_out=True)),
    "modules": ("llama3", dict(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "tied": ("smollm2", dict(r=2, lora_alpha=4, target_modules=["v_proj"], modules_to_save=["lm_head"])),
    "wte": ("gpt2", dict(r=2, lora_alpha=4, target_modules=["c_attn"], modules_to_save=["wte"], fan_in_fan_out=True)),
}
REWARD = ("qwen2", dict(r=2, lora_alpha=8, target_modules="all-linear", modules_to_save=["score"]))


def randomise(model, name):
    with torch.no_grad():
        for tensor, p in model.named_parameters():
            if p.requires_grad:
                p.normal_(generator=torch.Generator().manual_seed(stream_of(f"{name}.{tensor}"))).mul_(0.1)


def of_expert(is_a, experts, halves, e, half, t):
    if is_a:
        return t.view(experts, halves, -1, t.shape[-1])[e, half]
    return t.view(halves, t.shape[0] // halves, halves, -1, experts)[half, :, half, :, e]


def parts(model):
    """Lists the trained tensors by the names of files, each with a function that takes it out of a parameter, or of its gradient. PEFT has adapters of all
    experts in one parameter, and those of gate and up side by side: A (experts, 2, r, C), and B (2, F, 2, r, experts), of which gate needs (0, :, 0), and up
    (1, :, 1)."""
    out = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if ".mlp.experts." not in name:
            out.append((our_name(name), p, lambda t: t))
            continue
        experts, halves = model.config.num_local_experts, 2 if "base_layer" in name else 1
        prefix, is_a = our_name(name).split(".mlp.")[0] + ".block_sparse_moe.experts", "lora_A" in name
        for e in range(experts):
            for half, module in enumerate(["w1", "w3"] if halves == 2 else ["w2"]):
                out.append((f"{prefix}.{e}.{module}.lora_{'A' if is_a else 'B'}.weight", p, partial(of_expert, is_a, experts, halves, e, half)))
    return out


def freeze_the_rest(model):
    """What belongs to no tensor of the files, such as the gate's A times the up projection's B, is and stays 0."""
    masks = {}
    for name, p, take in parts(model):
        take(masks.setdefault(p, torch.zeros_like(p))).fill_(1)
    with torch.no_grad():
        for p, mask in masks.items():
            p.mul_(mask)
            p.register_hook(lambda gradient, mask=mask: gradient * mask)


def save_by_expert(folder, model, settings):
    path = folder / "adapter_config.json"
    changes = dict(settings, target_parameters=None, rank_pattern={}, alpha_pattern={})
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    save_file({f"base_model.model.{name}": take(p.data).contiguous() for name, p, take in parts(model)}, folder / "adapter_model.safetensors")


def adapted(folder, name, base, settings, task):
    """PEFT saves the adapter in bfloat16, or in float32 beside a model in float32. Then it is widened with its model."""
    config = peft.LoraConfig(task_type=task, init_lora_weights=False, **settings)
    model = peft.get_peft_model(base, config).eval()
    randomise(model, name)
    freeze_the_rest(model)
    if name != "qwen3":
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16) if p.requires_grad else p.data
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    if base.config.model_type == "mixtral":
        save_by_expert(folder, model, settings)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    saved = json.loads(path.read_text())
    saved["base_model_name_or_path"] = str(Path(saved["base_model_name_or_path"]).name)
    path.write_text(json.dumps({key: sorted(value) if key == "target_modules" else value for key, value in saved.items()}, indent=2) + "\n")
    return model.double()


def our_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "").replace("modules_to_save.", "")


def describe_gradients(model):
    return {name: describe_gradient(name, take(p.grad).numpy().ravel()) for name, p, take in parts(model)}


def train(model, tokens, masks):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=WEIGHT_DECAY, **OPTIMIZER)
    losses = []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = evaluate(model, tokens, masks)[0]
        loss.backward()
        losses.append(loss.item())
        norm = global_norm(parameters)
        if step == 0:
            gradients, first_norm = describe_gradients(model), norm.item()
        if norm > MAX_NORM:
            for p in parameters:
                p.grad *= MAX_NORM / norm
        optimizer.step()
    return losses, gradients, first_norm


def bf16_gradient_error(folder, base, tokens, masks):
    """As make.py's gradient_error, of the adapter. Its weights are bfloat16, too."""
    exact, rounded = [peft.PeftModel.from_pretrained(load(HERE / base, dtype), folder, is_trainable=True).to(dtype).eval()
                      for dtype in (torch.float64, torch.bfloat16)]
    with torch.no_grad():
        for p, q in zip(exact.parameters(), rounded.parameters()):
            p.copy_(q)
    with widened(load(HERE / base, torch.float64)):
        evaluate(exact, tokens, masks)[0].backward()
    evaluate(rounded, tokens, masks)[0].backward()
    gradients = [torch.cat([take(p.grad.double()).flatten() for _, p, take in parts(m)]) for m in (exact, rounded)]
    return ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()


def write_golden(folder, golden):
    versions = dict(peft=peft.__version__, transformers=transformers.__version__, torch=torch.__version__)
    write_json(folder / "golden.json", {**versions, **golden}, depth=1)


def make(name, base, settings):
    folder = HERE / f"lora_{name}"
    model = load(HERE / base, torch.float32)
    with widened(model):
        model = adapted(folder, name, model, settings, "CAUSAL_LM")
        arrays = load_file(HERE / base / "golden.safetensors")
        ends = arrays["doc_offsets"].tolist()
        tokens = [arrays["tokens"][a:b].long() for a, b in zip(ends, ends[1:])]
        masks = [arrays["loss_mask"][a:b].numpy() for a, b in zip(ends, ends[1:])]
        with torch.no_grad():
            loss, entropy, accuracy, logits = evaluate(model, tokens, masks)
            with model.disable_adapter():
                base_loss = evaluate(model, tokens, masks)[0]
        assert abs(base_loss - loss) > 1e-2 * loss, "the adapter changes little"
        losses, gradients, grad_norm = train(model, tokens, masks)
        fresh = peft.PeftModel.from_pretrained(load(HERE / base, torch.float64), folder).double().merge_and_unload()
        with torch.no_grad():
            merged = evaluate(fresh, tokens, masks)[0].item()
    error = bf16_gradient_error(folder, base, tokens, masks)
    save_arrays(folder / "golden.safetensors",
                dict(tokens=arrays["tokens"].numpy(), loss_mask=arrays["loss_mask"].numpy(), doc_offsets=arrays["doc_offsets"].numpy(),
                     logits=kept_logits(logits)), dict(kind="sft"))
    write_golden(folder, dict(base=base, loss=loss.item(), base_loss=base_loss.item(), merged=merged, entropy=entropy, accuracy=accuracy,
                              grad_norm=grad_norm, bf16=dict(gradient_error=error), losses=losses, logits_documents=LOGITS_DOCUMENTS, gradients=gradients))
    print(f"{name:10} {base_loss.item():9.6f} {loss.item():9.6f} {merged:9.6f} {grad_norm:9.5f} {losses[-1]:9.6f} {error:9.1e}", flush=True)


def make_reward(base, settings):
    folder = HERE / "lora_reward"
    model = AutoModelForSequenceClassification.from_pretrained(HERE / base, num_labels=1, dtype=torch.float32, attn_implementation="eager").eval()
    with widened(model):
        model = adapted(folder, "reward", model, settings, "SEQ_CLS")
        arrays = load_file(HERE / "pairs.safetensors")
        ends = arrays["doc_offsets"].tolist()
        rewards = []
        for a, b in zip(ends, ends[1:]):
            ids = arrays["tokens"][a:b].long()
            state = model.base_model.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -1]
            rewards.append(model.base_model.model.score(state)[0])
        rewards = torch.stack(rewards)
        loss = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
        loss.backward()
    grad_norm = global_norm([p for p in model.parameters() if p.requires_grad]).item()
    write_golden(folder, dict(base=base, rewards=rewards.tolist(), loss=loss.item(), grad_norm=grad_norm,
                              gradients=describe_gradients(model)))
    print(f"{'reward':10} {loss.item():9.6f} {grad_norm:9.5f}", flush=True)


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("adapter    base loss      loss    merged grad norm   loss 10  bf16 gradient")
    names = sys.argv[1:] or [*CASES, "reward"]
    for name in names:
        make_reward(*REWARD) if name == "reward" else make(name, *CASES[name])


if __name__ == "__main__":
    main()
