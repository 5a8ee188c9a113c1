"""Tools of scripts/ that check something: compare_runs.py, gpu_counts.py --check, ptxas.py and mutants.py. They must also reject."""

import subprocess
import sys

import pytest
from runs import ROOT, stand_in, write_lines  # adds scripts/ to sys.path
import mutants


def run(script, *arguments, **more):
    """Exit code and output."""
    command = [sys.executable if script.endswith(".py") else "bash", ROOT / "scripts" / script, *arguments]
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    return done.returncode, done.stdout


@pytest.mark.parametrize("losses, weights, first, flags, code, said", [
    ([2, 1], b"w", {"grad_norm": 1}, [], 0, "bit-identical: 2 log lines, and the weights\n"),
    ([2, 1], b"v", {"grad_norm": 1}, [], 1, ""), ([2, 1], b"w", {}, [], 1, ""), ([2], b"w", {"grad_norm": 1}, [], 1, ""),
    ([2, 1.001], b"w", {"grad_norm": 1}, [], 1, "step 2: loss is 1 in "), (None, b"", {}, [], 1, ""),
    ([2, 1.001], b"w", {}, ["--loss", "0.01"], 0, "the relative difference of the losses is 0.001; 0.01 is allowed\n"),
    ([2, 1.001], b"w", {}, ["--loss", "0.0001"], 1, ""), ([2, float("nan")], b"w", {}, ["--loss", "0.01"], 1, "")])
def test_compare_runs(tmp_path, losses, weights, first, flags, code, said):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run_, own, first_step, model in zip(runs, ([2, 1], losses), ({"grad_norm": 1}, first), (b"w", weights)):
        run_.mkdir()
        if own:
            write_lines(run_ / "log.jsonl", [{}, *({"step": i + 1, "loss": loss, "tok_s": run_.name} | (first_step if i == 0 else {})
                                                   for i, loss in enumerate(own))])
            (run_ / "model.safetensors").write_bytes(model)
    got, text = run("compare_runs.py", *runs, *flags)
    assert got == code and text.startswith(said), text


HEADER = ("what,kernel,launches,blocks,threads,shared,registers,spilled,occupancy,warp inst.,active,Mflop,requests,per req.,kB read,kB written,kB L2,"
          "wavefronts,conflicts,barriers,pipes,H100 us,bound,H200 us,bound,A100 us,bound,RTX 4090 us,bound")
ROW = 'some 2,"some_kernel2<bf16, 8>",1,4,128,0,30,{},100 %,1000,32.0,0.00,96,4.00,3.1,1.0,4.1,0,0,0,fp32 9,{},DRAM,1.00,DRAM,2.00,DRAM,3.00,DRAM'


def test_counts_of_kernels(tmp_path):
    """The counts of a ladder are written to a page, and compared with it."""
    stand_in(tmp_path / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    (tmp_path / "dev/cuda").mkdir(parents=True)

    def gpu_counts(*options, spilled=0, microseconds="1.00"):
        stand_in(tmp_path / "some", f"cat <<'END'\n{HEADER}\n{ROW.format(spilled, microseconds)}\nEND")
        return run("gpu_counts.py", "--nvcc", "./nvcc", *options, "./some", cwd=tmp_path)

    assert gpu_counts()[0] == 0
    assert "| `some_kernel2<bf16, 8>` | 4 | 30 | 0 | 100 % |" in (tmp_path / "dev/cuda/gpu_counts.md").read_text()
    assert gpu_counts("--check") == (0, "1 passed, 0 failed\n")
    for change, said in (({"spilled": 4}, "spilled is 4, and was 0"), ({"microseconds": "1.01"}, "H100 us is 1.01 DRAM, and was 1.00 DRAM")):
        code, text = gpu_counts("--check", **change)
        assert code == 1 and f"some_kernel2<bf16, 8>: {said}\n  fix: " in text and "0 passed, 1 failed" in text


def ptxas(size, architecture, stack, stored, loaded, registers):
    """The output of `nvcc -Xptxas -v` (CUDA 13.0) for a kernel."""
    kernel = f"_ZN9attention3gpu31attention_backward_keys_kernel2ILi{size}EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf"
    return (f"ptxas info    : Compiling entry function '{kernel}' for 'sm_{architecture}'\nptxas info    : Function properties for {kernel}\n"
            f"    {stack} bytes stack frame, {stored} bytes spill stores, {loaded} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 1 barriers, 1268 bytes cmem[0], 16 bytes cmem[2]\n")


def test_spilled_registers_are_named(tmp_path):
    (tmp_path / "clean").write_text(ptxas(128, 80, 0, 0, 0, 243) + ptxas(128, 100, 0, 0, 0, 244))
    (tmp_path / "spills").write_text(ptxas(256, 80, 328, 516, 556, 255))
    remark = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call in function 'kernel'\n"
    (tmp_path / "serial").write_text(remark + ptxas(128, "90a", 0, 0, 0, 168))
    remark = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.\n"
    (tmp_path / "ignored").write_text(ptxas(128, 80, 0, 0, 0, 243) + remark + ptxas(128, "90a", 0, 0, 0, 168))
    kernel = "attention::attention_backward_keys_kernel2"
    spilled = "328 bytes of stack, 516 of spilled registers stored, 556 loaded\n  fix: "
    for file, verdict, said in (
            ("clean", "2 passed, 0 failed", f"{kernel}<128>"), ("serial", "0 passed, 1 failed", "FAILED: (C7510) Potential Performance Loss"),
            ("ignored", "1 passed, 1 failed", "register count at entry.\n  fix: __launch_bounds__ with the number of blocks"),
            ("spills", "0 passed, 1 failed", f"FAILED: {kernel}<256> for sm_80: {spilled}")):
        code, text = run("ptxas.py", tmp_path / file)
        assert code == int(file != "clean") and said in text and text.endswith(f"{verdict}\n"), text


def test_the_tree_of_mutants_is_complete_and_only_rewritten_after_changes(tmp_path, monkeypatch):
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
