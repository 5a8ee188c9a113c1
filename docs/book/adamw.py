"""One parameter's life: rounding to bf16, and AdamW's first steps. Chapter E: adamw.md."""

import numpy as np


def bits(x):
    return np.float32(x).view(np.uint32)


def bf16(x):
    """The nearest bf16, ties to even: the upper half of a float."""
    u = int(bits(x))
    return float(np.uint32((u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def bf16_stochastic(x, random):
    """The bf16 above or below, with probabilities that make x the expected value."""
    return float(np.uint32((int(bits(x)) + random) & 0xFFFF0000).view(np.float32))


def add_often(step, times, rounding):
    """1 + step + step + ..., rounded each time; all the values on the way."""
    p, path = 1.0, []
    for _ in range(times):
        p = rounding(p + step)
        path.append(p)
    return path


def adamw(gradients, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, p=1.0, corrected=True):
    """The parameter after each step, as llmc/ops/adamw.h computes it."""
    m = v = 0.0
    path = []
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if corrected else (m, v)
        p = p * (1 - lr * weight_decay) - lr * m_hat / (v_hat**0.5 + eps)
        path.append(p)
    return path


def roundings():
    random = np.random.Generator(np.random.PCG64(1)).integers(0, 1 << 16, 1000)
    draws = iter(random)
    return {"float": lambda x: float(np.float32(x)), "bf16, nearest": bf16, "bf16, stochastic": lambda x: bf16_stochastic(x, int(next(draws)))}


def main():
    print("1 and its neighbours in bf16")
    for x in (1.0, 1.0001, 1.0078125):
        u = f"{int(bits(x)):032b}"
        print(f"  {x:<10} {u[0]} {u[1:9]} {u[9:16]} | {u[16:]}   bf16 {bf16(x)}")
    print("1 + 1000 times 0.0001")
    for name, rounding in roundings().items():
        print(f"  {name:<20} {add_often(1e-4, 1000, rounding)[-1]:.6f}")
    print("AdamW, gradient 0.01 at each step: how far the parameter moves, in units of the learning rate")
    print("  step                       1        2        3       10      100     1000")
    for name, corrected in (("corrected", True), ("not corrected", False)):
        path = [1.0, *adamw([0.01] * 1000, corrected=corrected)]
        print(f"  {name:<20}" + "".join(f"{(path[t - 1] - path[t]) / 1e-3:9.4f}" for t in (1, 2, 3, 10, 100, 1000)))
    print("weight decay 0.1 for 1000 steps without a gradient, and as a part of gradients of size 1 and 0.01")
    decoupled = adamw([0.0] * 1000, weight_decay=0.1)[-1]
    print(f"  decoupled            {decoupled:.4f}   (1 - lr wd)^1000 = {(1 - 1e-4)**1000:.4f}")
    for size in (1.0, 0.01):
        signs = [size if t % 2 else -size for t in range(1000)]
        plain, with_l2 = adamw(signs)[-1], 1.0
        m = v = 0.0
        for t, g in enumerate(signs, 1):
            g += 0.1 * with_l2
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            with_l2 -= 1e-3 * m / (1 - 0.9**t) / ((v / (1 - 0.999**t))**0.5 + 1e-8)
        print(f"  in a gradient of {size:<4} {1 - (plain - with_l2):.4f}")


if __name__ == "__main__":
    main()
