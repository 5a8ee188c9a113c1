"""Writes muon.json: matrices that torch.optim.Muon has updated, beside the gradients of each step. Its Newton-Schulz iteration, which torch computes in bf16, is
replaced by the same formula in float64; how far torch's own is from that, is there, too.

    .venv-compare/bin/python test/golden/make_muon.py        needs torch from 2.9 on
"""

import json
import pathlib

import torch
import torch.optim._muon as own

SHAPES = [(8, 12), (12, 8), (10, 10)]
SETTING = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
STEPS = 3


def numbers(shape, generator):
    """Normal ones that a few digits write exactly."""
    return (64 * torch.randn(shape, generator=generator)).round() / 64


def newton_schulz(grad, coefficients, steps, eps):
    a, b, c = coefficients
    x = grad / max(float(grad.norm()), eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def train(starts, gradients, dtype):
    params = [torch.nn.Parameter(start.to(dtype, copy=True)) for start in starts]
    optimizer = torch.optim.Muon(params, **SETTING)
    for step in gradients:
        for param, gradient in zip(params, step):
            param.grad = gradient.to(dtype)
        optimizer.step()
    return [param.detach() for param in params]


def main():
    generator = torch.Generator().manual_seed(1)
    starts = [numbers(shape, generator) for shape in SHAPES]
    gradients = [[numbers(shape, generator) for shape in SHAPES] for _ in range(STEPS)]
    rounded = train(starts, gradients, torch.float32)
    own._zeropower_via_newtonschulz = newton_schulz
    exact = train(starts, gradients, torch.float64)
    error = sum(float((r - e).square().sum()) for r, e in zip(rounded, exact)) ** 0.5
    moved = sum(float((e - s * (1 - SETTING["lr"] * SETTING["weight_decay"]) ** STEPS).square().sum()) for e, s in zip(exact, starts)) ** 0.5
    print(f"torch {torch.__version__}: in bf16 the updates are off by {error / moved:.2%} of their norm")
    matrices = [{"shape": shape, "start": start.flatten().tolist(), "gradients": [step[i].flatten().tolist() for step in gradients],
                 "updated": [round(x, 12) for x in exact[i].flatten().tolist()]} for i, (shape, start) in enumerate(zip(SHAPES, starts))]
    out = {"torch": torch.__version__, **SETTING, "bf16_error": error / moved, "matrices": matrices}
    (pathlib.Path(__file__).parent / "muon.json").write_text(json.dumps(out) + "\n")


main()
