"""Writes blockwise.json: the 256 fractions of bitsandbytes' 8-bit optimizers, and numbers in blocks of 256 with their scales and the codes of the nearest fractions,
found in float64. (bitsandbytes' own CPU code, which is not that of its optimizers, takes a fraction near by.)

    python test/golden/make_blockwise.py        needs torch and bitsandbytes (0.50)
"""

import json
import pathlib

import torch
from bitsandbytes import functional

BLOCK = 256


def numbers(fractions, generator):
    """Very small normal ones, ones of very different size, the fractions themselves, and the middles between two of them."""
    normal = torch.randn(BLOCK, generator=generator)
    wide = torch.randn(BLOCK, generator=generator) * 10 ** (-8 * torch.rand(BLOCK, generator=generator))
    middles = torch.cat([(fractions[1:] + fractions[:-1]) / 2, torch.ones(1)])
    blocks = torch.cat([wide, 3 * fractions, middles, 1e-9 * normal])
    return blocks if fractions.min() < 0 else blocks.abs()


def main():
    generator = torch.Generator().manual_seed(1)
    out = {}
    for name in ("signed", "unsigned"):
        fractions = functional.create_dynamic_map(name == "signed")
        values = numbers(fractions, generator)
        scales = values.abs().view(-1, BLOCK).amax(1)
        scaled = (values.view(-1, BLOCK) / scales[:, None]).view(-1)
        codes = (scaled.double()[:, None] - fractions.double()).abs().argmin(1)
        digits = lambda x: [float(f"{v:.9g}") for v in x.tolist()]  # all of a float
        out[name] = {"fractions": digits(fractions), "values": digits(values), "codes": codes.tolist(), "scales": digits(scales)}
    path = pathlib.Path(__file__).parent / "blockwise.json"
    path.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(part)}' for name, part in out.items()) + "\n}\n")


main()
