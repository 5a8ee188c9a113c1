"""What of scripts/gpu_bench.py, gpu_check.sh and compare_runs.py needs no GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compare  # noqa: E402
import gpu_bench  # noqa: E402

def test_flops():  # a causal row is half of the square; five products backward, two forward
    T, D = 4096, 128
    forward = gpu_bench.attention_flops([T], D)
    assert abs(forward / (4 * D * gpu_bench.H * T * T / 2) - 1) < 1e-3
    assert gpu_bench.attention_flops([T], D, backward=True) == 2.5 * forward
    assert gpu_bench.attention_flops([3, 2], 8) == 4 * 8 * gpu_bench.H * (6 + 3)


def parameters(shape):
    if shape["model_type"] == "gpt2":
        C, L, V, P = (shape[key] for key in ("n_embd", "n_layer", "vocab_size", "n_positions"))
        return (V + P) * C + 2 * C + L * (12 * C * C + 13 * C)
    C, L, F, V = (shape[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"))
    D = C // shape["num_attention_heads"]
    qkv = (shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * D
    return V * C + C + L * (qkv * C + (qkv if shape["model_type"] == "qwen2" else 0) + C * C + 3 * C * F + 2 * C)


def test_both_sides_train_the_same_model():
    for name, (shape, *_, program) in compare.MODELS.items():
        preset = "d12" if program == "train_gpt2" else name
        plan = subprocess.run([ROOT / program, "pretrain", "--plan", "--preset", preset, "--gpu", "h100", "--device", "cpu"],
                              text=True, stdout=subprocess.PIPE, check=True).stdout
        assert f"{parameters(shape)} parameters" in plan


def test_without_a_gpu_there_is_one_message(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")
    for command in ([sys.executable, ROOT / "scripts/gpu_bench.py"], ["bash", ROOT / "scripts/gpu_check.sh", "--out", tmp_path / "out"]):
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 1 and re.fullmatch(r"scripts/\S+: there is no GPU: .*\n  fix: .*\n", done.stdout)


def write_run(folder, losses, weights=b"w", **first_step):
    folder.mkdir()
    steps = [dict(step=i + 1, loss=loss, tok_s=id(folder)) for i, loss in enumerate(losses)]
    steps[0] |= first_step
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"task": folder.name}, *steps]))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def same(*arguments):
    done = subprocess.run([sys.executable, ROOT / "scripts/compare_runs.py", *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_compare_runs(tmp_path):
    a, b = write_run(tmp_path / "a", [2, 1], grad_norm=1), write_run(tmp_path / "b", [2, 1], grad_norm=1)
    assert same(a, b) == (0, "the same bits: 2 lines of the log, and the weights\n")
    assert same(a, write_run(tmp_path / "weights", [2, 1], b"v", grad_norm=1))[0] == 1
    code, text = same(a, write_run(tmp_path / "loss", [2, 1.001], grad_norm=1))
    assert code == 1 and text.startswith("step 2: loss is 1 in ")
    assert same(a, write_run(tmp_path / "key", [2, 1]))[0] == 1
    assert same(a, write_run(tmp_path / "shorter", [2], grad_norm=1))[0] == 1
    assert same(a, tmp_path / "loss", "--loss", "0.01") == (0, "losses differ by 0.001 of their size, 0.01 allowed\n")
    assert same(a, tmp_path / "loss", "--loss", "0.0001")[0] == 1
    assert same(a, write_run(tmp_path / "nan", [2, float("nan")]), "--loss", "0.01")[0] == 1
    assert same(a, tmp_path)[0] == 1 and same(a, tmp_path / "shorter", "--loss", "1")[0] == 1
