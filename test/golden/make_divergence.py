#!/usr/bin/env python3
"""The divergence of TRL's DistillationTrainer and GKDTrainer (generalized_jsd_loss of trl/experimental/gkd), step by step with its logarithms, in float64.
The gradients are complex-step derivatives (Squire and Trapp, 1998), exact to rounding: f(z + ih) = f(z) + ih f'(z) for a tiny h.

    python3 test/golden/make_divergence.py       needs numpy

writes test/golden/divergence.json: a list of cases with
  student, teacher    logits (V), which floats represent
  losses              beta, temperature, loss, and gradient: of the loss with respect to the student's logits
"""
import json
import pathlib

import numpy as np

BETAS = (0, 0.1, 0.5, 0.9, 1)
TEMPERATURES = (0.5, 1, 2)
SIZES = ((7, 1), (7, 6), (33, 3))  # V, and the deviation of the logits


def logsumexp(z):
    """Of the last axis; z may be complex."""
    top = z.real.max(-1, keepdims=True)
    return top + np.log(np.exp(z - top).sum(-1, keepdims=True))


def kl_div(log_q, log_p):
    """torch's F.kl_div(log_q, log_p, log_target=True)."""
    return np.exp(log_p) * (log_p - log_q)


def loss(student, teacher, beta, temperature):
    student, teacher = student / temperature, teacher / temperature
    log_s, log_t = student - logsumexp(student), teacher - logsumexp(teacher)
    if beta == 0:
        return kl_div(log_s, log_t).sum()
    if beta == 1:
        return kl_div(log_t, log_s).sum()
    log_m = logsumexp(np.stack([log_s + np.log(1 - beta), log_t + np.log(beta)], -1))[..., 0]
    return (beta * kl_div(log_m, log_t) + (1 - beta) * kl_div(log_m, log_s)).sum()


def gradient(student, *others):
    step = 1e-40
    return [loss(student + 1j * step * one, *others).imag / step for one in np.eye(len(student))]


def main():
    random = np.random.Generator(np.random.PCG64(1))
    cases = []
    for size, deviation in SIZES:
        student, teacher = (deviation * random.standard_normal((2, size))).astype(np.float32).astype(float)
        losses = [dict(beta=beta, temperature=tau, loss=loss(student, teacher, beta, tau), gradient=gradient(student, teacher, beta, tau))
                  for beta in BETAS for tau in TEMPERATURES]
        cases.append(dict(student=student.tolist(), teacher=teacher.tolist(), losses=losses))
    path = pathlib.Path(__file__).parent / "divergence.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
