"""Backward by hand: the gradients of softmax, cross-entropy, RMSNorm and LayerNorm, beside finite differences. Chapter A: backward.md."""

import numpy as np


def differences(f, x, dout, h=1e-5):
    """dL/dx for L = dout . f(x), by moving one x at a time: two forward passes for each."""
    dx = np.zeros_like(x)
    for j in range(len(x)):
        step = np.zeros_like(x)
        step[j] = h
        dx[j] = dout @ (f(x + step) - f(x - step)) / (2 * h)
    return dx


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def softmax_backward(dP, P):
    return P * (dP - P @ dP)


def cross_entropy_backward(z, y):
    dz = softmax(z)
    dz[y] -= 1
    return dz


def rmsnorm(x, w):
    return x / np.sqrt(np.mean(x * x)) * w


def rmsnorm_backward(dout, x, w):
    rstd = 1 / np.sqrt(np.mean(x * x))
    g, xh = dout * w, x * rstd
    return rstd * (g - xh * np.mean(g * xh))


def layernorm(x, w):
    return (x - x.mean()) / x.std() * w


def layernorm_backward(dout, x, w):
    g, xh = dout * w, (x - x.mean()) / x.std()
    return (g - g.mean() - xh * np.mean(g * xh)) / x.std()


def show(name, values):
    print(f"  {name:<24}" + " ".join(f"{round(v, 7) + 0.0:9.5f}" for v in values))


x, w, dout = np.array([1.0, 2.0, 2.0]), np.array([1.0, 0.5, 2.0]), np.array([0.6, -1.0, 0.2])  # the example of the chapter


def main():
    print("softmax of three scores, and one attention output")
    s, v, dy = np.array([1.0, 0.0, 2.0]), np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), np.array([0.5, -1.0])
    P = softmax(s)
    dP = v @ dy  # dP_j = dy . v_j
    jacobian = np.diag(P) - np.outer(P, P)
    show("P", P)
    show("by the matrix", jacobian @ dP)
    show("by P (dP - sum P dP)", softmax_backward(dP, P))
    show("by differences", differences(lambda s: softmax(s) @ v, s, dy))
    show("sum P dP, and dy . out", [P @ dP, dy @ (P @ v)])

    print("cross-entropy, target 1")
    show("p - onehot", cross_entropy_backward(s, 1))
    show("by differences", differences(lambda z: np.array([-np.log(softmax(z)[1])]), s, np.ones(1)))

    print("RMSNorm")
    dx = rmsnorm_backward(dout, x, w)
    show("dx", dx)
    show("by differences", differences(lambda x: rmsnorm(x, w), x, dout))
    show("x . dx", [x @ dx])
    show("without the mean", dout * w / np.sqrt(np.mean(x * x)))

    print("LayerNorm")
    dx = layernorm_backward(dout, x, w)
    show("dx", dx)
    show("by differences", differences(lambda x: layernorm(x, w), x, dout))
    show("sum of dx, x . dx", [dx.sum(), x @ dx])


if __name__ == "__main__":
    main()
