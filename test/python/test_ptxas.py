"""scripts/ptxas.py on excerpts of what `nvcc -Xptxas -v` of CUDA 13.0 printed."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ptxas.py"

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN9attention3gpu31attention_backward_keys_kernel2ILi128EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf' for 'sm_80'
ptxas info    : Function properties for _ZN9attention3gpu31attention_backward_keys_kernel2ILi128EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 243 registers, used 1 barriers, 1268 bytes cmem[0], 16 bytes cmem[2]
ptxas info    : Compile time = 97.999 ms
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN9attention3gpu31attention_backward_keys_kernel2ILi128EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf' for 'sm_100'
ptxas info    : Function properties for _ZN9attention3gpu31attention_backward_keys_kernel2ILi128EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 244 registers, used 1 barriers
ptxas info    : Compile time = 99.746 ms
"""
SPILLING = """\
ptxas info    : Compiling entry function '_ZN9attention3gpu31attention_backward_keys_kernel2ILi256EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf' for 'sm_80'
ptxas info    : Function properties for _ZN9attention3gpu31attention_backward_keys_kernel2ILi256EEEvPfS2_5HeadsIK4bf16ES6_S6_PKfS8_S6_PKi6PiecesSB_mjjmf
    328 bytes stack frame, 516 bytes spill stores, 556 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 328 bytes cumulative stack size, 1268 bytes cmem[0], 16 bytes cmem[2]
ptxas info    : Compile time = 134.393 ms
"""
def run(folder, *texts):
    logs = [folder / f"{i}.ptxas" for i in range(len(texts))]
    for log, text in zip(logs, texts):
        log.write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, *logs], stdout=subprocess.PIPE, text=True)
    return done.returncode, done.stdout.splitlines()


def test_clean(tmp_path):
    code, lines = run(tmp_path, CLEAN)
    assert code == 0
    assert [line.split() for line in lines] == [["registers", "sm_80", "sm_100"],
                                                ["attention::attention_backward_keys_kernel2<128>", "243", "244"],
                                                ["2", "passed,", "0", "failed"]]


def test_spills(tmp_path):
    code, lines = run(tmp_path, CLEAN, SPILLING)
    assert code == 1
    assert lines[2].split(maxsplit=1) == ["attention::attention_backward_keys_kernel2<256>", "255 stack 328 stored 516 loaded 556  -"]
    assert lines[3] == ("FAILED: attention::attention_backward_keys_kernel2<256> for sm_80: 328 bytes of stack, "
                        "516 of spilled registers stored, 556 loaded")
    assert lines[-1] == "1 passed, 1 failed"
