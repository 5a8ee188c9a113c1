#!/usr/bin/env python3
"""What bitsandbytes makes of numbers in 4 bits.

    pip install torch bitsandbytes
    python3 test/golden/make_nf4.py

writes test/golden/nf4.json: for each case of CASES, hashes (stream_of of make.py, of bytes) of the packed codes, of the codes of the blocks'
magnitudes, of their groups' scales, and of the dequantised numbers in bfloat16 and float32; and `offset`, the mean of the magnitudes. Number i is
the float sum ((a + b) + c) + d of the words of Random{1, Purpose::test, stream_of(name)}.block(i) as signed integers, each times 2^-31 * scale, a power of two.
"""
import json
import warnings

import numpy as np
import torch

from make import HERE, philox4x32, stream_of

warnings.filterwarnings("ignore")
import bitsandbytes.functional as bnb  # noqa: E402

CASES = {  # name: numbers, scale, dtype
    "million": (1_000_000, 2.0**-6, torch.float32), "rounded": (100_000, 2.0**-6, torch.bfloat16), "short": (65, 4.0, torch.float32),
    "odd": (131, 1.0, torch.float32), "zeros": (256, 0.0, torch.float32), "large": (64 * 256 * 3 + 64, 2.0**13, torch.float32),
}


def numbers(name, n, scale):
    index, word = np.arange(n, dtype=np.uint64), lambda x: np.full(n, x, np.uint64)
    words = philox4x32([index, word(0), word(stream_of(name)), word(5)], (1, 0))
    a, b, c, d = (w.astype(np.uint32).view(np.int32).astype(np.float32) * np.float32(2.0**-31 * scale) for w in words)
    return ((a + b) + c) + d


def nearest(x, code, block=256):
    """What bitsandbytes' plain and CUDA kernels say; that for CPUs takes another neighbour for some numbers near a midpoint."""
    codes, scales = [], []
    for part in x.split(block):
        m = part.abs().max()
        least = m.clamp(min=1e-38)
        scaled = part * (1.0 / least) if len(part) == block else part / least
        codes.append(torch.bucketize(scaled.clamp(-1, 1), (code[:-1] + code[1:]) / 2).to(torch.uint8))
        scales.append(m if len(part) == block else least)
    return torch.cat(codes), torch.stack(scales)


def hash_of(tensor):
    h = 2166136261
    for c in tensor.contiguous().view(torch.uint8).flatten().tolist():
        h = (h ^ c) * 16777619 & 0xFFFFFFFF
    return h


def main():
    out = {}
    for name, (n, scale, dtype) in CASES.items():
        x = torch.from_numpy(numbers(name, n, scale)).to(dtype)
        packed, state = bnb.quantize_4bit(x, blocksize=64, compress_statistics=True, quant_type="nf4")
        plain_magnitudes = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")[1].absmax
        scales, groups = nearest(plain_magnitudes - state.offset, state.state2.code)
        assert (scales != state.absmax).sum() <= len(scales) // 64 + 4 and torch.allclose(groups, state.state2.absmax)
        state.absmax, state.state2.absmax = scales, groups
        back = bnb.dequantize_4bit(packed, state)
        magnitudes = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
        plain = torch.ops.bitsandbytes.dequantize_4bit.default(packed, magnitudes, 64, "nf4", x.shape, torch.float32)
        half = torch.ops.bitsandbytes.dequantize_4bit.default(packed, magnitudes, 64, "nf4", x.shape, torch.bfloat16)
        assert torch.equal(back, plain if dtype == torch.float32 else half)
        out[name] = dict(n=n, scale=scale, bf16=dtype == torch.bfloat16, offset=state.offset.item(), codes=hash_of(packed),
                         scales=hash_of(state.absmax), groups=hash_of(state.state2.absmax), f32=hash_of(plain), bf16_values=hash_of(half),
                         first=[plain.flatten()[i].item() for i in range(4)], magnitude=magnitudes.flatten()[0].item())
        print(name, {k: v for k, v in out[name].items() if k != "first"})
    out["map"] = state.state2.code.tolist()
    (HERE / "nf4.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
