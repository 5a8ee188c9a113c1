"""The gated delta rule token by token, in chunks, and over ranks. Chapter H: delta.md."""

import numpy as np

TOKENS, DK, DV = 200, 8, 6
random = np.random.Generator(np.random.PCG64(8))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def document(tokens, decay=0.1):
    """(q, k, v, g, beta) of one head; the decays exp(g) are between exp(-2 decay) and 1."""
    q, k, v = (random.standard_normal((tokens, D)) for D in (DK, DK, DV))
    return unit(q), unit(k), v, -2 * decay * random.random(tokens), random.random(tokens)


def recurrence(S, q, k, v, g, beta):
    """The outputs, and the state after the last token."""
    out = np.empty_like(v)
    for t in range(len(v)):
        S = np.exp(g[t]) * S
        d = beta[t] * (v[t] - S.T @ k[t])
        S = S + np.outer(k[t], d)
        out[t] = S.T @ q[t]
    return out, S


def decays(g):
    """P[i, j] = exp(g[j+1] + ... + g[i]) for j <= i, otherwise 0, and c[i] = exp(g[0] + ... + g[i]), by products."""
    n, alpha = len(g), np.exp(g)
    P = np.eye(n, dtype=g.dtype)
    for i in range(1, n):
        P[i, :i] = alpha[i] * P[i - 1, :i]
    return P, np.cumprod(alpha)


def chunk(S, q, k, v, g, beta):
    """The same as recurrence, by products of matrices."""
    P, c = decays(g)
    e = v - c[:, None] * (k @ S)
    negative = -np.tril(P * (k @ k.T), -1)
    d = np.empty_like(v)
    for i in range(len(v)):
        d[i] = beta[i] * (e[i] + negative[i, :i] @ d[:i])
    out = c[:, None] * (q @ S) + (P * (q @ k.T)) @ d
    return out, c[-1] * S + k.T @ (P[-1][:, None] * d)


def chunked(S, tokens, size):
    out = []
    for first in range(0, len(tokens[0]), size):
        part, S = chunk(S, *(x[first:first + size] for x in tokens))
        out.append(part)
    return np.concatenate(out), S


def affine(tokens):
    """M and E of the map S -> M S + E from the state before these tokens to the state after them."""
    q, k, v, g, beta = tokens
    M = recurrence(np.eye(DK), q, k, np.zeros((len(k), DK)), g, beta)[1]
    return M, recurrence(np.zeros((DK, DV)), *tokens)[1]


def over_ranks(tokens, ranks):
    """Every rank computes the map of its piece; only states travel."""
    pieces = list(zip(*(np.array_split(x, ranks) for x in tokens)))
    maps, S, out = [affine(piece) for piece in pieces], np.zeros((DK, DV)), []
    for piece, (M, E) in zip(pieces, maps):
        out.append(chunked(S, piece, 64)[0])
        S = M @ S + E
    return np.concatenate(out), S


def backward(tokens, dout):
    """The gradients of v, g and beta, from the last token to the first, for sum(dout * out)."""
    q, k, v, g, beta = tokens
    states = [np.zeros((DK, DV))]
    for t in range(len(v)):
        states.append(recurrence(states[-1], *(x[t:t + 1] for x in tokens))[1])
    dv, dg, dbeta, G = np.empty_like(v), np.empty_like(g), np.empty_like(beta), np.zeros((DK, DV))
    for t in reversed(range(len(v))):
        S = np.exp(g[t]) * states[t]
        G = G + np.outer(q[t], dout[t])
        X = G.T @ k[t]
        dv[t], dbeta[t] = beta[t] * X, X @ (v[t] - S.T @ k[t])
        G = G - beta[t] * np.outer(k[t], X)
        dg[t] = (G * S).sum()
        G = np.exp(g[t]) * G
    return dv, dg, dbeta


def slope(tokens, dout, which, at, step=1e-6):
    """The derivative of sum(dout * out) with respect to one number, by a difference of two runs."""
    values = []
    for change in (step, -step):
        changed = [x.copy() for x in tokens]
        changed[which][at] += change
        values.append((dout * recurrence(np.zeros((DK, DV)), *changed)[0]).sum())
    return (values[0] - values[1]) / (2 * step)


def quotients(g):
    """P from the sums of g since the chunk's first token, of which neighbours differ little."""
    sums = np.cumsum(g, dtype=g.dtype)
    return np.tril(np.exp(np.minimum(sums[:, None] - sums, 0)))


def leak(before, tokens):
    """The largest error of each token's output if the document begins with the state of another one."""
    S = recurrence(np.zeros((DK, DV)), *before)[1]
    return np.abs(recurrence(S, *tokens)[0] - recurrence(np.zeros((DK, DV)), *tokens)[0]).max(axis=1)


def work(size, Dk=128, Dv=128):
    """Multiply-adds of a token and head in chunks of this size, without those of masked halves."""
    return 3 * Dk * Dv + size * (Dk + Dv)


def work_of_attention(length, Dk=128, Dv=128):
    """The same for causal attention, the mean over a document of this length."""
    return length / 2 * (Dk + Dv)


def worst(a, b):
    return max(np.abs(x - y).max() for x, y in zip(a, b))


def main():
    tokens, zero = document(TOKENS), np.zeros((DK, DV))
    exact = recurrence(zero, *tokens)
    print(f"{TOKENS} tokens, keys of {DK} channels, values of {DV}: differs from the recurrence by less than 1e-13")
    for size in (1, 7, 64, TOKENS):
        print(f"  chunks of {size:<3}  {worst(chunked(zero, tokens, size), exact) < 1e-13}")
    for ranks in (2, 5):
        print(f"  {ranks} ranks        {worst(over_ranks(tokens, ranks), exact) < 1e-13}")
    dout = random.standard_normal((TOKENS, DV))
    gradients = backward(tokens, dout)
    near = [abs(gradients[n][at] - slope(tokens, dout, which, at)) < 1e-8 for n, (which, at) in enumerate([(2, (50, 3)), (3, 50), (4, 50)])]
    print(f"gradients of a value, a g and a beta: within 1e-8 of differences of two runs  {all(near)}")
    print(f"a document that begins with the state of another one: its first output is wrong by {leak(tokens, document(5))[0]:.2f}")
    g = np.full(64, -20, np.float32)
    g[32:] = -0.001
    true = decays(g.astype(float))[0][63, 62]
    print(f"the decay of a chunk's last token in float, relative error: by products {abs(decays(g)[0][63, 62] / true - 1):.0e}, "
          f"by sums of g {abs(quotients(g)[63, 62] / true - 1):.0e}")
    print("multiply-adds of a token and head, Dk = Dv = 128: " + ", ".join(f"{work(size):,.0f} (chunks of {size})" for size in (16, 64, 256)))
    print(f"  as many in chunks of 64 as attention in documents of {work(64) / work_of_attention(1):.0f} tokens")


if __name__ == "__main__":
    main()
