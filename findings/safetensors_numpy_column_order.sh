#!/usr/bin/env bash
# safetensors 0.8: numpy arrays in column order are saved with their values in other places
#
# Claim (safetensors 0.8.0, numpy 2.4.6, CPU): safetensors.numpy.save_file and save write the memory of an array as it lies there, under its logical
# shape. A transposed matrix, an array in Fortran order or one with a step comes back with the same shape and type, but other values in each place; a
# step even brings in values that the array did not have. 0.7.0 and the versions before it wrote the values in their places. No error, no warning; a
# checksum of the file or the sum of a transposed tensor does not show it.
#
# Why a good guess is wrong: torch's save_file raises an error for such a tensor, numpy's own np.save stores them correctly, and code that was right for
# years with 0.7.0 goes on without a message. The sentence "need to be contiguous and dense" stands in the documentation of both versions.
#
# Who is hurt: converters of checkpoints that write w.T (Conv1D of GPT-2, LoRA's A and B in another library's layout), rows picked with a step, and
# results of LAPACK (an SVD of a weight for PiSSA or a low-rank adapter), which numpy returns in Fortran order. Cure: np.ascontiguousarray(x).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 0.7.0 0.8.0; do
    python3 -m venv "$work/$version"
    "$work/$version/bin/pip" install --quiet numpy==2.4.6 safetensors==$version
    "$work/$version/bin/python" - "$work/x.safetensors" $version <<'PYTHON'
import sys
import numpy as np
from safetensors.numpy import load_file, save_file

path, version = sys.argv[1:]
x = np.arange(12, dtype=np.float32).reshape(3, 4)
u, _, vt = np.linalg.svd(np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32), full_matrices=False)
arrays = {"transposed": x.T, "column order": np.asfortranarray(x), "every other column": x[:, ::2], "transposed V of an SVD": vt.T,
          "row order": x, "made contiguous": np.ascontiguousarray(x.T)}
save_file(arrays, path)
loaded = load_file(path)
print(f"safetensors {version}: np.arange(12).reshape(3, 4).T comes back as {loaded['transposed'].astype(int).tolist()}")
for name, a in arrays.items():
    same = np.array_equal(loaded[name], a)
    print(f"  {name:24} {'equal' if same else 'other values'}")
    assert loaded[name].shape == a.shape and loaded[name].dtype == a.dtype
    assert same == (version == "0.7.0" or a.flags.c_contiguous), name
PYTHON
done
echo "as stated"
