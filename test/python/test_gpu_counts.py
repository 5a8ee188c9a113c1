"""scripts/gpu_counts.py: regressions of counts, on a program that prints the output of a ladder's --count --csv."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_counts.py"
HEADER = ("what,kernel,launches,blocks,threads,shared,registers,spilled,occupancy,warp inst.,active,Mflop,requests,per req.,kB read,kB written,kB L2,"
          "wavefronts,conflicts,barriers,pipes,H100 us,bound,A100 us,bound,RTX 4090 us,bound")
ROW = 'some 2,"some_kernel2<bf16, 8>",1,4,128,0,{registers},{spilled},100 %,1000,32.0,0.00,96,{per_request},3.1,1.0,4.1,0,{conflicts},0,fp32 9,{h100},DRAM,2.00,DRAM,3.00,DRAM'
GOOD = {"registers": 30, "spilled": 0, "per_request": "4.00", "conflicts": 0, "h100": "1.00"}


def script(folder, *options, **changes):
    """Runs it in `folder`, with a ladder of one row."""
    for name, text in [("some", HEADER + "\n" + ROW.format(**GOOD | changes)), ("nvcc", "Cuda compilation tools, release 13.0, V13.0.88")]:
        (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (folder / name).chmod(0o755)
    (folder / "docs").mkdir(exist_ok=True)
    return subprocess.run([sys.executable, str(SCRIPT), "--nvcc", "./nvcc", *options, "./some"], cwd=folder, stdout=subprocess.PIPE, text=True)


def test_the_same_counts_pass(tmp_path):
    assert script(tmp_path).returncode == 0
    assert "| `some_kernel2<bf16, 8>` | 4 | 30 | 0 | 100 % |" in (tmp_path / "docs/gpu_counts.md").read_text()
    done = script(tmp_path, "--check")
    assert (done.returncode, done.stdout) == (0, "1 passed, 0 failed\n")


def test_each_worse_count_is_named(tmp_path):
    script(tmp_path)
    for change, said in [({"spilled": 4}, "spilled is 4, and was 0"), ({"per_request": "4.01"}, "per req. is 4.01, and was 4.00"),
                         ({"conflicts": 1}, "conflicts is 1, and was 0"), ({"h100": "1.01"}, "H100 us is 1.01 DRAM, and was 1.00 DRAM")]:
        done = script(tmp_path, "--check", **change)
        assert done.returncode == 1 and f"some_kernel2<bf16, 8>: {said}\n  fix: " in done.stdout and "0 passed, 1 failed" in done.stdout


def test_another_nvcc_is_left_out(tmp_path):
    script(tmp_path)
    page = tmp_path / "docs/gpu_counts.md"
    page.write_text(page.read_text().replace("nvcc 13.0", "nvcc 12.8"))
    done = script(tmp_path, "--check", conflicts=5)
    assert (done.returncode, done.stdout) == (0, "left out: docs/gpu_counts.md is of nvcc 12.8, and this is 13.0\n0 passed, 0 failed\n")
