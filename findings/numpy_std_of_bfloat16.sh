#!/usr/bin/env bash
# numpy: the standard deviation of a bf16 tensor that is N(0, 1) is 0.077
#
# Claim (numpy 2.4.6, ml_dtypes 0.6.0, safetensors 0.8.0, CPU): safetensors.numpy gives a bf16 tensor as an array of ml_dtypes' bfloat16. numpy sums
# such an array in bf16, in one running sum or a few of them, which stop growing where a term is less than half of their last bit: at 256 for terms of
# 1. For a million numbers from N(0, 1)
#
#     np.std            0.0767   (1.0007 in float32)
#     np.var            0.0059   (1.0013)
#     np.mean(abs(x))   0.0015   (0.7984)
#     np.linalg.norm    1000.67  (1000.68): right, because a norm is a product of vectors, which bfloat16 sums in float32
#
# No warning appears, and the result has the type bfloat16 as expected. np.mean(abs(x)) of float16 is right: numpy
# sums that type in float32.
#
# Why a good guess is wrong: numpy says that it uses float32 intermediates for half precision, and it does so for its own float16 alone. np.linalg.norm
# of the same tensor is right to five digits, so a check of one does not uncover the other.
#
# Who is hurt: whoever looks at a checkpoint with numpy: scales of initialisation, means of activations, a comparison of two checkpoints by the mean
# absolute difference. The difference of two unlike checkpoints looks small because its sum stops early. Cure: x.astype(np.float32) first, or
# np.std(x, dtype=np.float32).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0
"$work/venv/bin/python" - "$work/x.safetensors" <<'PYTHON'
import sys
import warnings
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

warnings.simplefilter("error")  # a warning would end the script
save_file({"x": np.random.default_rng(0).standard_normal(1_000_000).astype(ml_dtypes.bfloat16)}, sys.argv[1])
x = load_file(sys.argv[1])["x"]
wide = x.astype(np.float32)
figures = {"np.std": np.std, "np.var": np.var, "np.mean(abs)": lambda a: np.mean(np.abs(a)), "np.linalg.norm": np.linalg.norm}
for name, f in figures.items():
    print(f"{name:16} {float(f(x)):12.4f} in bf16 {float(f(wide)):12.4f} in float32")

assert x.dtype == ml_dtypes.bfloat16 and np.std(x).dtype == ml_dtypes.bfloat16
assert abs(np.std(wide) - 1) < 0.01
assert np.std(x) < 0.1, "np.std sums bf16 in a wider type now"
assert np.mean(np.abs(x)) < 0.01 and np.mean(np.abs(wide)) > 0.79, "np.mean sums bf16 in a wider type now"
assert abs(float(np.linalg.norm(x)) / float(np.linalg.norm(wide)) - 1) < 1e-4, "the norm is wrong, too"
assert abs(float(np.std(x, dtype=np.float32)) - 1) < 0.01
assert abs(float(np.mean(np.abs(wide.astype(np.float16)))) - 0.798) < 0.001, "the mean of float16 is not summed in float32"
print("as stated")
PYTHON
