#!/usr/bin/env bash
# numpy: one NaN leaves a sorted bf16 array unsorted
#
# Claim (numpy 2.4.6, ml_dtypes 0.6.0, CPU): np.sort, np.argsort and np.partition move the NaNs of float16, float32 and float64 to the end. For ml_dtypes'
# bfloat16 and 8-bit floats they compare with a plain "less", which is false for a NaN on either side: np.sort([3, nan, 1, 2]) keeps numbers on both
# sides of the NaN where they were. Of a thousand values with one NaN in the middle, both halves are sorted apart or not at all, np.searchsorted and
# np.median work on what is left, and the ten largest of argsort(x)[-10:] are not the ten largest. np.argmax and np.max do know NaN in the same arrays.
#
# Why a good guess is wrong: the documentation of np.sort promises an order with NaN at the end for floating types, argmax of the same array returns the
# NaN as it should, and an array without NaN is sorted correctly, so a test of the type passes.
#
# Who is hurt: whoever ranks bf16 logits or scores read from a file: top-k, quantiles of a clip, the largest outliers of a tensor. One NaN, which should
# be seen at the end of the order, gives a plausible but wrong selection. Cure: x.astype(np.float32) first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 ml_dtypes==0.6.0
"$work/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

types = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
print("np.sort([3, nan, 1, 2])")
for dtype in [np.float16, np.float32, *types]:
    x = np.array([3, np.nan, 1, 2], dtype)
    print(f"  {np.dtype(dtype).name:16} {np.sort(x)}   argmax {np.argmax(x)}")
    assert np.argmax(x) == 1, "argmax does not know NaN"

def largest_ten(x):  # with NaN among them, as it sorts last
    return sorted(np.argsort(x)[-10:].tolist())

values = np.random.default_rng(0).permutation(240).astype(np.float32) - 120
for dtype in types:
    x = values.astype(dtype)
    x[120] = np.nan
    right, got = largest_ten(x.astype(np.float32)), largest_ten(x)
    s = np.sort(x).astype(np.float32)
    s = s[~np.isnan(s)]
    print(f"{np.dtype(dtype).name:16} largest ten of 240, one of them NaN: {len(set(right) & set(got))} of 10 right; "
          f"descents among the sorted numbers: {int((np.diff(s) < 0).sum())}")
    assert (np.diff(s) < 0).any(), "np.sort puts NaN in its place now"
    without = values.astype(dtype)
    assert (np.diff(np.sort(without).astype(np.float32)) >= 0).all(), "without NaN it is not sorted either"
print("as stated")
PYTHON
