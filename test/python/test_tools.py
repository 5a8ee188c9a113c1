"""What of the tools in scripts/ needs no GPU: gpu_bench.py, gpu_check.sh, compare.py, compare_runs.py, gpu_counts.py, ptxas.py and mutants.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import compare  # noqa: E402
import mutants  # noqa: E402


def run(script, *arguments, **more):
    """Exit code and output."""
    command = [sys.executable if script.endswith(".py") else "bash", ROOT / "scripts" / script, *arguments]
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    return done.returncode, done.stdout


def stand_in(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# ---- comparisons


def parameters(shape):
    if shape["model_type"] == "gpt2":
        C, L, V, P = (shape[key] for key in ("n_embd", "n_layer", "vocab_size", "n_positions"))
        return (V + P) * C + 2 * C + L * (12 * C * C + 13 * C)
    C, L, F, V = (shape[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"))
    qkv = (shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * C // shape["num_attention_heads"]
    return V * C + C + L * (qkv * C + (qkv if shape["model_type"] == "qwen2" else 0) + C * C + 3 * C * F + 2 * C)


def test_both_sides_of_a_comparison_train_the_same_model():
    for name, (shape, *_, program) in compare.MODELS.items():
        if shape["model_type"] == "qwen3_moe":  # smaller than any preset: ours has what transformers has saved
            continue
        preset = "d12" if program == "train_gpt2" else name
        plan = subprocess.run([ROOT / program, "pretrain", "--plan", "--preset", preset, "--gpu", "h100", "--device", "cpu"],
                              text=True, stdout=subprocess.PIPE, check=True).stdout
        assert f"{parameters(shape)} parameters" in plan


@pytest.mark.parametrize("command", [["gpu_bench.py"], ["gpu_check.sh", "--out", "out"]])
def test_without_a_gpu_there_is_one_message(command, tmp_path):
    stand_in(tmp_path / "nvidia-smi", "exit 9")
    code, text = run(*command, cwd=tmp_path, env=dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"))
    assert code == 1 and re.fullmatch(r"scripts/\S+: there is no GPU: .*\n  fix: .*\n", text)


@pytest.mark.parametrize("losses, weights, first, flags, code, said", [
    ([2, 1], b"w", {"grad_norm": 1}, [], 0, "the same bits: 2 lines of the log, and the weights\n"),
    ([2, 1], b"v", {"grad_norm": 1}, [], 1, ""), ([2, 1], b"w", {}, [], 1, ""), ([2], b"w", {"grad_norm": 1}, [], 1, ""),
    ([2, 1.001], b"w", {"grad_norm": 1}, [], 1, "step 2: loss is 1 in "),
    ([2, 1.001], b"w", {}, ["--loss", "0.01"], 0, "losses differ by 0.001 of their size, 0.01 allowed\n"),
    ([2, 1.001], b"w", {}, ["--loss", "0.0001"], 1, ""), ([2, float("nan")], b"w", {}, ["--loss", "0.01"], 1, ""),
    ([2], b"w", {}, ["--loss", "1"], 1, ""), (None, b"", {}, [], 1, "")])
def test_compare_runs(tmp_path, losses, weights, first, flags, code, said):
    runs = []
    for name, own, first_step, model in (("a", [2, 1], {"grad_norm": 1}, b"w"), ("b", losses, first, weights)):
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        if own:
            steps = [{"step": i + 1, "loss": loss, "tok_s": name} | (first_step if i == 0 else {}) for i, loss in enumerate(own)]
            (runs[-1] / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"task": name}, *steps]))
            (runs[-1] / "model.safetensors").write_bytes(model)
    got, text = run("compare_runs.py", *runs, *flags)
    assert got == code and text.startswith(said), text


# ---- counts of kernels

HEADER = ("what,kernel,launches,blocks,threads,shared,registers,spilled,occupancy,warp inst.,active,Mflop,requests,per req.,kB read,kB written,kB L2,"
          "wavefronts,conflicts,barriers,pipes,H100 us,bound,H200 us,bound,A100 us,bound,RTX 4090 us,bound")
ROW = ('some 2,"some_kernel2<bf16, 8>",1,4,128,0,30,{spilled},100 %,1000,32.0,0.00,96,{per_request},3.1,1.0,4.1,0,{conflicts},0,fp32 9,{h100},DRAM,'
       "1.00,DRAM,2.00,DRAM,3.00,DRAM")


def gpu_counts(folder, *options, **changes):
    """Exit code and output in `folder`, with a ladder of one row."""
    row = ROW.format(**{"spilled": 0, "per_request": "4.00", "conflicts": 0, "h100": "1.00"} | changes)
    stand_in(folder / "some", f"cat <<'END'\n{HEADER}\n{row}\nEND")
    stand_in(folder / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    (folder / "docs").mkdir(exist_ok=True)
    return run("gpu_counts.py", "--nvcc", "./nvcc", *options, "./some", cwd=folder)


def test_counts_of_kernels(tmp_path):
    assert gpu_counts(tmp_path)[0] == 0
    page = tmp_path / "docs/gpu_counts.md"
    assert "| `some_kernel2<bf16, 8>` | 4 | 30 | 0 | 100 % |" in page.read_text()
    assert gpu_counts(tmp_path, "--check") == (0, "1 passed, 0 failed\n")
    for change, said in [({"spilled": 4}, "spilled is 4, and was 0"), ({"per_request": "4.01"}, "per req. is 4.01, and was 4.00"),
                         ({"conflicts": 1}, "conflicts is 1, and was 0"), ({"h100": "1.01"}, "H100 us is 1.01 DRAM, and was 1.00 DRAM")]:
        code, text = gpu_counts(tmp_path, "--check", **change)
        assert code == 1 and f"some_kernel2<bf16, 8>: {said}\n  fix: " in text and "0 passed, 1 failed" in text
    page.write_text(page.read_text().replace("nvcc 13.0", "nvcc 12.8"))
    left_out = "left out: docs/gpu_counts.md is of nvcc 12.8, and this is 13.0\n0 passed, 0 failed\n"
    assert gpu_counts(tmp_path, "--check", conflicts=5) == (0, left_out)


def ptxas(size, architecture, stack, stored, loaded, registers):
    """What `nvcc -Xptxas -v` of CUDA 13.0 prints for a kernel."""
    kernel = f"_ZN9attention3gpu31attention_backward_keys_kernel2ILi{size}EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf"
    return (f"ptxas info    : Compiling entry function '{kernel}' for 'sm_{architecture}'\nptxas info    : Function properties for {kernel}\n"
            f"    {stack} bytes stack frame, {stored} bytes spill stores, {loaded} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 1 barriers, 1268 bytes cmem[0], 16 bytes cmem[2]\n")


def test_spilled_registers_are_named(tmp_path):
    (tmp_path / "clean").write_text(ptxas(128, 80, 0, 0, 0, 243) + ptxas(128, 100, 0, 0, 0, 244))
    (tmp_path / "spills").write_text(ptxas(256, 80, 328, 516, 556, 255))
    code, text = run("ptxas.py", tmp_path / "clean")
    kernel = "attention::attention_backward_keys_kernel2"
    assert (code, text.split()) == (0, ["registers", "sm_80", "sm_100", f"{kernel}<128>", "243", "244", "2", "passed,", "0", "failed"])
    remark = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call in function 'kernel'\n"
    (tmp_path / "serial").write_text(remark + ptxas(128, "90a", 0, 0, 0, 168))
    code, text = run("ptxas.py", tmp_path / "serial")
    assert code == 1 and "FAILED: (C7510) Potential Performance Loss" in text and text.endswith("0 passed, 1 failed\n")
    code, text = run("ptxas.py", tmp_path / "clean", tmp_path / "spills")
    assert code == 1 and text.endswith("\n1 passed, 1 failed\n"), text
    assert f"FAILED: {kernel}<256> for sm_80: 328 bytes of stack, 516 of spilled registers stored, 556 loaded\n  fix: " in text


# ---- known bugs

SOURCE = "void f(int *x) {\n    for (int i = 0; i < 3; i++)\n        x[i] = i + 1;\n    if (*x) return;\n    f(x);  // again\n    g();\n}\n"


def mutated(tmp_path, *texts):
    """SOURCE with mutants 7, 8, ..., of (right, wrong) each."""
    entries = ["\n".join([f"{number} | f.h | F* | a bug", *("- " + line for line in right.split("\n")), *("+ " + line for line in wrong.split("\n"))])
               for number, (right, wrong) in enumerate(texts, 7)]
    (tmp_path / "mutants.txt").write_text("# number | file | tests | bug\n\n" + "\n\n".join(entries) + "\n")
    return mutants.mutated("f.h", SOURCE, mutants.read_table(tmp_path / "mutants.txt"))


def test_the_tree_holds_every_mutant_and_is_left_alone_when_nothing_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    def files():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "tree").rglob("*") if path.is_file()}

    mutants.make_tree(tmp_path / "tree")
    before = files()
    sources = "".join(path.read_text() for path in before)
    for mutant in mutants.read_table():
        assert mutant.number == 0 or sources.count(f"mutant({mutant.number})") == 1, mutant
    (tmp_path / "tree/llmc/ops/gone.h").write_text("")
    mutants.make_tree(tmp_path / "tree")
    assert files() == before


@pytest.mark.parametrize("right, wrong, expected", [
    ("i + 1", "i", "x[i] = (mutant(7) ? (i) : (i + 1));"),
    ("x[i]  =\ni + 1;", "x[i] = 0;", "{ if (mutant(7)) {\nx[i] = 0;\n} else {\nx[i] = i + 1;\n} }"),
    ("f(x);  // again", ";", "{ if (mutant(7)) {\n;\n} else {\nf(x);  // again\n} }"),
    ("if (*x) return;", "if (x[1]) return;\nif (*x) return;", "if (mutant(7)) { if (x[1]) return; }\nif (*x) return;"),
])
def test_expressions_statements_and_what_stands_in_front_of_them(tmp_path, right, wrong, expected):
    assert expected in mutated(tmp_path, (right, wrong))


@pytest.mark.parametrize("texts, message", [
    ([("i + 2", "i")], "mutant 7 .*: f.h has this text 0 times:\ni \\+ 2\n  fix: "), ([("i", "j")], "mutant 7 .*: f.h has this text 10 times"),
    ([("i + 1", "i"), ("x[i] = i + 1;", ";")], "mutants 8 and 7 .* f.h\n  fix: ")])
def test_a_text_that_no_longer_fits_is_named(tmp_path, texts, message):
    with pytest.raises(SystemExit, match=message):
        mutated(tmp_path, *texts)
