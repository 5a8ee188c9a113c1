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

MACHINE = {"gpu": "NVIDIA H100", "versions": "driver 1"}


def test_csv():  # the columns of dev/cuda/common.cpp
    source = (ROOT / "dev/cuda/common.cpp").read_text()
    head = re.search(r'"(op,version,dtype.*?)\\n"', source)[1]
    by_bytes = head.replace("%s", "gb_s") + "\nrope,4,bf16,8192x40,NVIDIA H100,0.3,50,49,1500,0.5\nrope,5,bf16,8192x40,NVIDIA H100,0.3,40,39,2000,0.8\n"
    assert gpu_bench.read_csv(by_bytes) == {"op": "rope", "shape": "8192x40", "us": 40, "bytes": True, "share": 0.8, "rate": 2e12}
    by_flop = head.replace("%s", "tflop_s") + "\nmatmul,7,bf16,4096x4096x4096,NVIDIA H100,0.3,200,199,680,0.9\n"
    assert gpu_bench.read_csv(by_flop)["rate"] == 680e12 and not gpu_bench.read_csv(by_flop)["bytes"]
    assert gpu_bench.read_csv("") is None


def test_numbers():
    assert [gpu_bench.number(x) for x in (None, 1234.5, 123.4, 12.34, 1.234, 0.01234, 0)] == ["-", "1234", "123", "12.3", "1.23", "0.0123", "0.0"]
    assert gpu_bench.number(150234.2, 4) == "150234"
    assert gpu_bench.ratio(None, 2) is None and gpu_bench.ratio(3, None) is None and gpu_bench.ratio(3, 2) == 1.5


def test_targets():
    assert gpu_bench.target("speed", 1.5, least=1.5) == "- speed: 1.50, at least 1.5 wanted: met"
    assert gpu_bench.target("speed", 1.4, least=1.5).endswith("**missed**")
    assert gpu_bench.target("memory", 0.8, most=0.7) == "- memory: 0.80, at most 0.7 wanted: **missed**"
    assert gpu_bench.target("memory", 0.6, most=0.7).endswith("met")
    assert gpu_bench.target("speed", None, least=1.5) == "- speed: not measured (at least 1.5 wanted)"


def test_documents_are_those_of_the_ladder():
    assert gpu_bench.document_lengths(4096, 1) == [4096]
    assert gpu_bench.document_lengths(270, 3) == [1, 67, 202]
    for T in (1024, 65536):
        lengths = gpu_bench.document_lengths(T, gpu_bench.DOCUMENTS)
        assert sum(lengths) == T and lengths == sorted(lengths) and len(lengths) == gpu_bench.DOCUMENTS
        pairs, dense = sum(n * n for n in lengths), gpu_bench.equal_dense(lengths)
        assert dense % 64 == 0 and abs(dense**2 / pairs - 1) < 0.15


def test_flops():  # a causal row is half of the square; five products backward, two forward
    T, D = 4096, 128
    forward = gpu_bench.attention_flops([T], D)
    assert abs(forward / (4 * D * gpu_bench.H * T * T / 2) - 1) < 1e-3
    assert gpu_bench.attention_flops([T], D, backward=True) == 2.5 * forward
    assert gpu_bench.attention_flops([3, 2], 8) == 4 * 8 * gpu_bench.H * (6 + 3)


def test_report(tmp_path):
    file = tmp_path / "benchmarks.md"
    file.write_text("# Benchmarks\n\n## NVIDIA H100: ops\n\nold\n\n## other\n\nkept\n")
    report = gpu_bench.Report(file, "ops", MACHINE, ["op", "us"])
    report.add("rope", "40")
    report.add_target("rope", 0.9, least=0.85)
    text = file.read_text()
    assert text.startswith("# Benchmarks") and "old" not in text and text.endswith("kept\n")
    assert "| op | us |\n|---|---|\n| rope | 40 |\n\n- rope: 0.90, at least 0.85 wanted: met\n" in text


def test_typical_steps():
    steps = [dict(step_s=9, peak_mem=2**30)] * gpu_bench.STEPS_WARM_UP + [dict(step_s=s, peak_mem=3 * 2**30) for s in (1, 2, 4)]
    assert gpu_bench.typical(steps, 1000) == (500, 3)


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


def test_a_table_for_each_cpu(monkeypatch):
    monkeypatch.setattr(compare.importlib.metadata, "version", lambda package: "1.0")
    rows = [compare.table_row(task, "bf16", "transformers", 100, speed, 2, 1, "80 %", "3.0000 / 3.0000") for task, speed in (("a", 150), ("b", 160))]
    monkeypatch.setattr(compare, "describe_cpu", lambda: "one")
    text = compare.merge_rows("# Benchmarks\n\n## another\n\nwords\n", rows)
    assert text.index("## another") < text.index("## one") and text.count("| training | dtype |") == 1
    again = compare.merge_rows(text, [compare.table_row("b", "bf16", "transformers", 100, 170, 2, 1, "80 %", "3.0000 / 3.0000")])
    assert "**1.50**" in again and "**1.70**" in again and "**1.60**" not in again and again.count("\n| b |") == 1
    monkeypatch.setattr(compare, "describe_cpu", lambda: "third")
    assert compare.merge_rows(again, rows).count("| training | dtype |") == 2


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
