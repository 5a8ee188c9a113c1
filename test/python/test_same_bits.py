"""A run has the same bits if it stops and resumes from a checkpoint, or offloads arrays to a disk, whatever it trains. Gradients in bf16 change it
only by their rounding, and ranks only the order of sums."""

import json
import shutil
import signal
import time

import pytest
from runs import (
    GOLDEN, OF_PAIRS, ROOT, SMALL, command, first_step, log_lines, near, stable, start, succeeds, weights, write_judged, write_lines)
from test_grpo import rollouts
from test_sampling import with_tokenizer

EXPERTS = {"model": GOLDEN / "qwen2_moe", "data": GOLDEN / "qwen2_moe" / "golden.safetensors", "max_len": 128, "train_batch_size": 2}
MIXTRAL = {"model": GOLDEN / "mixtral", "data": GOLDEN / "mixtral" / "golden.safetensors", "max_len": 128}
PAIRS = {**OF_PAIRS, "train_batch_size": 4, "eval_fraction": 0.2}
KTO = {"task": "dpo", "judged": True, "loss_type": "kto", "undesirable_weight": 0.7, "max_len": 67, "train_batch_size": 3, "eval_fraction": 0.2}
OF_ROLLOUTS = {"rollouts": True, "max_len": 67, "recompute": "cheap"}
ANSWERS = {"prompts": True, "max_len": 67, "rollout_batch_size": 6, "n": 32, "max_new_tokens": 1, "train_batch_size": 64, "num_episodes": 9, "at": 6,
           "max_steps": 12}  # an iteration has 3 steps, or 6 with max_epochs 2
AHEAD = {"task": "grpo", **ANSWERS, "async_steps": 1, "is_correction": "icepop", "max_epochs": 2, "max_steps": 18}
DISTILL = {"task": "distill", "teacher_model": GOLDEN / "llama31", "temperature": 0.9}
RUNS = {  # 23 samples make an epoch of 6 steps of 4: the checkpoint of step 4 is in the first epoch, and the end in the second
    "f32": {}, "bf16": {"dtype": "bf16"}, "moments of 8 bits": {"moments": "8bit", "row_tokens": 128, "max_norm": 0.1},
    "all in bf16": {"task": "pretrain", "dtype": "bf16", "grad_dtype": "bf16", "moments": "bf16", "row_tokens": 64},
    "groups": {"dtype": "bf16", "ranks": 6, "ring_attn_size": 3, "zero_stage": 3, "zero_group": 3, "recompute": "layer", "eval_fraction": 0.2},
    "muon": {"dtype": "bf16", "optimizer": "muon", "moments": "bf16", "weight_decay": 0.1},
    "steps of tokens": {"train_batch_size": None, "train_batch_tokens": 150, "eval_fraction": 0.2, "eval_steps": 2},
    "in order": {"shuffle": "false", "weight_decay": 0.1}, "noise": {"model": GOLDEN / "llama2", "neftune_noise_alpha": 5, "dtype": "bf16", "ranks": 4, "ring_attn_size": 2},
    "samples": {"spoken": True, "ranks": 2, "ring_attn_size": 2, "sample_every": 3, "max_new_tokens": 40, "temperature": 1},
    "adapters": {"lora_rank": 4, "lora_dropout": 0.3, "neftune_noise_alpha": 5, "ranks": 2, "zero_stage": 2},
    "adapters and a head": {"lora_rank": 4, "lora_modules_to_save": "embed_tokens,lm_head", "dtype": "bf16", "moments": "8bit", "ranks": 3, "zero_stage": 2},
    "adapters of 4 bits": {"lora_rank": 4, "load_in": "4bit", "grad_dtype": "bf16", "ranks": 2},
    "adapters of GPT-2": {"program": ROOT / "train_gpt2", "model": GOLDEN / "gpt2", "lora_rank": 4, "lora_dropout": 0.2, "load_in": "4bit", "ranks": 4,
                          "ring_attn_size": 2, "zero_stage": 2, "recompute": "layer"},
    "experts": {**EXPERTS, "ranks": 2, "ring_attn_size": 2},
    "adapters of experts": {**EXPERTS, "lora_rank": 3, "lora_targets": "q_proj,gate_proj,up_proj,down_proj", "load_in": "8bit", "optimizer": "muon",
                            "router_aux_loss_coef": 0.1},
    "linear attention": {"model": GOLDEN / "qwen35", "ranks": 4, "ring_attn_size": 2, "zero_stage": 3, "recompute": "layer", "row_tokens": 128},
    "adapters of linear attention": {"model": GOLDEN / "qwen35_tied", "dtype": "bf16", "lora_rank": 3, "load_in": "4bit", "ranks": 2, "zero_stage": 2},
    "dpo of linear attention": {"task": "dpo", **PAIRS, "model": GOLDEN / "qwen35", "ref_model": GOLDEN / "qwen35_tied", "ref_mode": "resident", "recompute": "none"},
    "experts beside linear attention": {**EXPERTS, "model": GOLDEN / "qwen35_moe", "ranks": 4, "expert_parallel": 2, "ring_attn_size": 2, "zero_stage": 3,
                                        "router_aux_loss_coef": 0.1},
    "divided experts": {**MIXTRAL, "ranks": 6, "expert_parallel": 3, "zero_stage": 3},
    "adapters of divided experts": {**MIXTRAL, "lora_rank": 2, "lora_targets": "q_proj,w1,w2,w3", "ranks": 6, "expert_parallel": 3,
                                    "ring_attn_size": 2, "zero_stage": 2, "recompute": "layer"},
    "dpo of divided experts": {**MIXTRAL, "task": "dpo", **PAIRS, "ref_model": MIXTRAL["model"], "ref_mode": "resident", "ranks": 6, "expert_parallel": 3},
    "tensors": {"model": GOLDEN / "smollm2", "neftune_noise_alpha": 5, "ranks": 4, "tensor_parallel": 2, "ring_attn_size": 2, "zero_stage": 3, "recompute": "layer"},
    "tensors of small rows": {"model": GOLDEN / "qwen2", "dtype": "bf16", "row_tokens": 64, "ranks": 4, "tensor_parallel": 2, "zero_stage": 2},
    "tensors of GPT-2": {"program": ROOT / "train_gpt2", "model": GOLDEN / "gpt2", "ranks": 6, "tensor_parallel": 3, "zero_stage": 3, "recompute": "layer"},
    "tensors of wide norms": {"model": GOLDEN / "olmo2", "dtype": "bf16", "ranks": 4, "tensor_parallel": 2, "ring_attn_size": 2, "zero_stage": 2},
    "adapters of tensors": {"model": GOLDEN / "smollm2", "lora_rank": 4, "lora_dropout": 0.3, "load_in": "8bit", "ranks": 4, "tensor_parallel": 2,
                            "ring_attn_size": 2, "zero_stage": 2, "recompute": "layer"},
    "adapters of shared keys": {"lora_rank": 4, "lora_modules_to_save": "embed_tokens,lm_head", "ranks": 4, "tensor_parallel": 4},
    "adapters of fused tensors": {"fused": True, "lora_rank": 4, "lora_dropout": 0.3, "load_in": "4bit", "ranks": 4, "tensor_parallel": 2, "zero_stage": 1},
    "tensors of fused matrices": {"fused": True, "ranks": 4, "tensor_parallel": 4, "zero_stage": 3},
    "tensors of linear attention": {"model": GOLDEN / "qwen35", "ranks": 4, "tensor_parallel": 2, "ring_attn_size": 2, "zero_stage": 3, "recompute": "layer"},
    "adapters of tensors of linear attention": {"model": GOLDEN / "qwen35", "lora_rank": 4, "lora_dropout": 0.3, "ranks": 2, "tensor_parallel": 2, "zero_stage": 2},
    "rm of tensors": {"task": "rm", **PAIRS, "model": GOLDEN / "gemma3", "ranks": 2, "tensor_parallel": 2, "zero_stage": 0},
    "dpo": {"task": "dpo", **PAIRS, "ref_model": GOLDEN / "llama2", "ref_mode": "resident", "ranks": 2, "zero_stage": 3},
    "kto": {**KTO, "ref_model": GOLDEN / "llama2", "ranks": 4, "ring_attn_size": 2, "zero_stage": 3, "recompute": "layer"},
    "kto of adapters": {**KTO, "lora_rank": 4, "lora_dropout": 0.3, "ranks": 2, "zero_stage": 2},
    "kto of experts": {**KTO, "model": MIXTRAL["model"], "ranks": 3, "router_aux_loss_coef": 0.1},
    "distill": {**DISTILL, "on_policy": 0, "divergence_beta": 0.5, "eval_fraction": 0.2, "ranks": 4, "ring_attn_size": 2, "zero_stage": 3, "recompute": "layer"},
    "distill of small rows": {**DISTILL, "on_policy": 0, "row_tokens": 64, "ranks": 3, "zero_stage": 2, "dtype": "bf16"},
    "distill of the base": {**DISTILL, "teacher_model": GOLDEN / "qwen3", "on_policy": 0, "adapter": GOLDEN / "lora_qwen3", "ranks": 2, "zero_stage": 2},
    "distill of tensors": {**DISTILL, "model": GOLDEN / "llama2", "teacher_model": GOLDEN / "qwen3", "on_policy": 0, "divergence_beta": 0.5, "eval_fraction": 0.2, "ranks": 4, "tensor_parallel": 2, "zero_stage": 2},
    "distill of divided experts": {**DISTILL, "model": MIXTRAL["model"], "on_policy": 0, "router_aux_loss_coef": 0.1, "ranks": 6, "expert_parallel": 3,
                                   "zero_stage": 3},
    "distill of own answers": {**DISTILL, "on_policy": 0.5, "n": 2, "max_new_tokens": 8, "eval_fraction": 0.2, "ranks": 2, "ring_attn_size": 2},
    "distill of linear attention": {**DISTILL, "model": GOLDEN / "qwen35_tied", "teacher_model": GOLDEN / "qwen35", "on_policy": 0.5, "n": 2, "max_new_tokens": 8},
    "rm": {"task": "rm", **PAIRS, "ranks": 4, "ring_attn_size": 2, "zero_stage": 2, "recompute": "layer"},
    "grpo": {"task": "grpo", **OF_ROLLOUTS, "ranks": 2, "zero_stage": 3, "max_epochs": 4},
    "grpo with a teacher": {"task": "grpo", **OF_ROLLOUTS, "teacher_model": GOLDEN / "qwen3", "adapter": GOLDEN / "lora_qwen3", "ranks": 2, "max_epochs": 4},
    "ppo": {"task": "ppo", **OF_ROLLOUTS, "ranks": 2, "ring_attn_size": 2, "max_epochs": 4},
    "answers of grpo": {"task": "grpo", **ANSWERS, "kl_coef": 0.1, "ranks": 2, "zero_stage": 2},
    "answers of tensors": {"task": "ppo", **ANSWERS, "model": GOLDEN / "smollm2", "kl_coef": 0.1, "ranks": 6, "tensor_parallel": 3, "zero_stage": 3},
    "answers of ppo": {"task": "ppo", **ANSWERS, "kl_coef": 0.05, "kl_target": "1e-3,120", "ranks": 2, "zero_stage": 3},
    "answers of grpo with a teacher": {"task": "grpo", **ANSWERS, "teacher_model": GOLDEN / "llama31", "teacher_load_in": "4bit", "teacher_coef": 0.3, "ranks": 4,
                                       "ring_attn_size": 2, "zero_stage": 3},
    "answers of ppo with a teacher": {"task": "ppo", **ANSWERS, "teacher_model": GOLDEN / "mixtral", "kl_coef": 0.05, "max_epochs": 2, "ranks": 2},
    "answers of experts": {"task": "grpo", **ANSWERS, "model": EXPERTS["model"], "kl_coef": 0.1, "lora_rank": 2, "load_in": "4bit", "ranks": 2},
    "answers of linear attention": {"task": "grpo", **ANSWERS, "model": GOLDEN / "qwen35", "kl_coef": 0.1, "ranks": 2, "zero_stage": 3},
    "answers of divided experts": {"task": "ppo", **ANSWERS, "model": EXPERTS["model"], "router_aux_loss_coef": 0.01, "ranks": 7, "expert_parallel": 7,
                                   "zero_stage": 3},
    "answers ahead": {**AHEAD, "lora_rank": 4, "kl_coef": 0.1, "kl_target": "0.05,1000", "ranks": 3, "zero_stage": 3},
    "answers ahead, filtered": {**AHEAD, "n": 128, "rollout_batch_size": 3, "dynamic_filtering": "0,1", "train_batch_size": 2000, "num_episodes": 20,
                                "max_epochs": 1, "at": 2, "max_steps": 4},
    "answers ahead of ppo": {**AHEAD, "task": "ppo", "dtype": "bf16", "ranks": 2, "ring_attn_size": 2},
}


def fused_model(directory, data):
    """A model with random weights of the layout of Phi-3, with a key head for each of four ranks, and matrices of whole blocks of 4 bits."""
    if not directory.exists():
        directory.mkdir()
        config = json.loads((GOLDEN / "phi3" / "config.json").read_text())
        sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
        (directory / "config.json").write_text(json.dumps(config | sizes))
        succeeds(command("sft", model=directory, data=data, max_steps=1, **SMALL, output_dir=directory / "out"))
    return directory / "out"


@pytest.fixture
def words_of(data, prompts, tmp_path):
    """words(name, output, **more) is the command of one of RUNS."""
    def words(name, output, **more):
        options = {"task": "sft", "data": data, "max_steps": 9, "max_num": 9, **SMALL, **RUNS[name], **more}
        if options.pop("rollouts", None):
            options |= {"data": None, "rollouts": write_lines(tmp_path / "rollouts.jsonl", rollouts())}
        if options.pop("judged", None):
            options |= {"data": write_judged(tmp_path / "judged.safetensors")}
        if options.pop("prompts", None):
            options |= {"data": prompts}
        if options.pop("spoken", None):
            (tmp_path / "model").mkdir(exist_ok=True)
            options |= {"model": with_tokenizer(tmp_path / "model")}
        if options.pop("fused", None):
            options |= {"model": fused_model(tmp_path / "fused", data)}
        options.pop("at", None)
        return command(options.pop("task"), output_dir=output, **options)

    return words


@pytest.fixture
def run_of(words_of):
    """run(name, output, **more) trains one of RUNS."""
    return lambda name, output, **more: succeeds(words_of(name, output, **more))


def lines_of(run):
    """The log without the bytes of sent weights, because offloaded weights are gathered in parts."""
    return [{key: value for key, value in line.items() if key != "sent_params"} for line in stable(log_lines(run))]


def same_run(run, other):
    """Compares the logs and all files except checkpoints."""
    assert lines_of(run) == lines_of(other)
    written = [{path.relative_to(output): path.read_bytes() for pattern in ("*.json", "*.safetensors", "critic/*.safetensors")
                for path in output.glob(pattern) if path.name != "run_files.json"} for output in (run, other)]
    assert written[0] == written[1] != {}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_has_the_same_bits(name, run_of, tmp_path):
    at, straight, stopped = RUNS[name].get("at", 4), tmp_path / "straight", tmp_path / "stopped"
    run_of(name, straight)
    run_of(name, stopped, save_steps=at)
    same_run(stopped, straight)
    assert ("async_steps" in RUNS[name]) == (stopped / f"step_{at}" / "next_answers.jsonl").exists()
    assert f"at step {at}" in run_of(name, stopped, resume=stopped / f"step_{at}", save_steps=at)
    same_run(stopped, straight)
    steps = [line for line in log_lines(straight) if "grad_norm" in line]
    assert any(line["grad_norm"] > 0 for line in steps) and all(("aux_loss" in line) == ("experts" in name) for line in steps)


@pytest.mark.parametrize("name", ["steps of tokens", "adapters and a head", "dpo", "rm", "ppo", "answers of ppo", "answers of divided experts",
                                  "answers ahead", "answers ahead of ppo"])
def test_a_run_stopped_by_signals_has_the_same_bits(name, words_of, tmp_path):
    """Signals arrive in all parts of a run, some of them before the first step, where they end it without a checkpoint."""
    straight, stopped, began = tmp_path / "straight", tmp_path / "stopped", time.monotonic()
    succeeds(words_of(name, straight))
    took = time.monotonic() - began
    for number, (kind, moment) in enumerate([(signal.SIGTERM, 0.9), (signal.SIGINT, 0.6), (signal.SIGKILL, 0.7), (signal.SIGUSR1, 0.8), (signal.SIGTERM, 0.5)]):
        process = start(words_of(name, stopped, resume="auto"))
        time.sleep(moment * took)
        process.send_signal(kind)
        said, error = process.communicate(timeout=100)
        assert process.returncode in (0, -kind, 128 + kind), (number, said, error)
        assert error == "" or error.startswith(f"{kind.name}: the run stops ") and error.count("\n") == 1
        assert (process.returncode == 128 + kind) == ("stopped by signal" in said)
        if any((stopped / name).exists() for name in ("config.json", "adapter_config.json")):
            shutil.rmtree(stopped)  # the signal came after the end, and what follows is another run
    succeeds(words_of(name, stopped, resume="auto"))
    same_run(stopped, straight)


@pytest.mark.parametrize("name", [name for name in RUNS if "ranks" in RUNS[name] and name not in ("grpo", "ppo", "answers ahead")])
def test_an_offloaded_run_has_the_same_bits(name, run_of, tmp_path):
    what = "activations,optimizer" if "load_in" in RUNS[name] else "activations,optimizer,weights"
    place = tmp_path / "place"
    place.mkdir()
    run_of(name, tmp_path / "straight")
    assert f" to a file in {place}" in run_of(name, tmp_path / "run", offload=what, offload_dir=place)
    same_run(tmp_path / "run", tmp_path / "straight")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in RUNS if "ranks" in RUNS[name] and "answers" not in name] + ["answers of grpo", "answers of ppo", "answers of grpo with a teacher", "distill of own answers"])
def test_ranks_equal_one_rank(name, run_of, tmp_path):
    """In f32, the logs are equal except for rounding, also if one rank resumes from the checkpoint of several. test_ranks.cpp has all splits of a step."""
    at, one = RUNS[name].get("at", 4), {"ranks": 1, "ring_attn_size": 1, "zero_stage": 1, "zero_group": 0, "tensor_parallel": 1, "expert_parallel": 1}
    in_f32 = {"dtype": "f32", "grad_dtype": "f32", "moments": "f32", "max_steps": at + 2, "save_steps": at}
    run_of(name, tmp_path / "ranks", **in_f32)
    run_of(name, tmp_path / "one", **in_f32 | one)
    run_of(name, tmp_path / "resumed", **in_f32 | one, resume=tmp_path / "ranks" / f"step_{at}")
    for other in ("one", "resumed"):
        lines = lines_of(tmp_path / other)
        for got, want in zip(lines, lines_of(tmp_path / "ranks")[-len(lines):], strict=True):
            for key, value in want.items():
                if isinstance(value, float):
                    few = key == "explained_variance"  # divides by the variance of returns that hardly differ here
                    absolute = 0.1 * 2 * 200 * 2**-24 if key.startswith("rewards/") else 1e-6  # beta times differences of two log p, of at most 200
                    near(got[key], value, 1e-4 if few else 1e-5, absolute)
                elif not key.startswith("sent_") and not isinstance(value, list):
                    assert got[key] == value, key


@pytest.mark.parametrize("name", ["moments of 8 bits", "adapters", "dpo", "rm", "grpo", "ppo"])
def test_gradients_in_bf16_are_near(name, run_of, tmp_path):
    """The loss of the first step is equal, and its norm near within the error of rounding."""
    run_of(name, tmp_path / "f32", max_steps=4)
    run_of(name, tmp_path / "bf16", max_steps=4, grad_dtype="bf16")
    floats, rounded = (first_step(tmp_path / dtype) for dtype in ("f32", "bf16"))
    assert rounded["loss"] == floats["loss"] and weights(tmp_path / "bf16") != weights(tmp_path / "f32")
    for norm in ["grad_norm"] + ["critic_grad_norm"] * (name == "ppo"):
        # Each rounding has a relative error below 2^-7; no term of these sums is larger than three times the whole.
        assert rounded[norm] != floats[norm] and abs(rounded[norm] / floats[norm] - 1) < 3 * 3 * 2**-7, norm
