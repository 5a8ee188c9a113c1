"""One softmax, three scales: (lse, out) of parts of the keys, merged in any order. Chapter B: softmax.md."""

import numpy as np

KEYS, WIDTH = 64, 4
random = np.random.Generator(np.random.PCG64(3))
scores, values = 3 * random.standard_normal(KEYS) + np.linspace(-4, 4, KEYS), random.standard_normal((KEYS, WIDTH))


def attend(s, v):
    """Attention of one query to some keys: log of the sum of exp, and the weighted mean of the values."""
    top = s.max()
    e = np.exp(s - top)
    return top + np.log(e.sum()), e @ v / e.sum()


def merge(a, b):
    """The attention to both sets of keys, from the attention to each."""
    (lse_a, out_a), (lse_b, out_b) = a, b
    lse = np.logaddexp(lse_a, lse_b)
    return lse, np.exp(lse_a - lse) * out_a + np.exp(lse_b - lse) * out_b


def merge_without_rescaling(a, b):
    return np.logaddexp(a[0], b[0]), (a[1] + b[1]) / 2


def online(tile):
    """Keys arrive in tiles; the sums so far are kept under a running maximum, as inside a kernel."""
    top, total, out = -np.inf, 0.0, np.zeros(WIDTH)
    for first in range(0, KEYS, tile):
        s = scores[first:first + tile]
        new = max(top, s.max())
        e, scale = np.exp(s - new), np.exp(top - new)
        top, total, out = new, total * scale + e.sum(), out * scale + e @ values[first:first + tile]
    return top + np.log(total), out / total


def parts(cuts):
    """The attention to each stretch of the keys between the cuts: parts of a kernel's grid, or ranks of a ring."""
    edges = [0, *sorted(cuts), KEYS]
    return [attend(scores[a:b], values[a:b]) for a, b in zip(edges, edges[1:]) if a < b]


def tree(results, join=merge):
    while len(results) > 1:
        results = [join(*pair) if len(pair) == 2 else pair[0] for pair in (results[n:n + 2] for n in range(0, len(results), 2))]
    return results[0]


def arriving(order):
    """(lse, out) after each of eight tiles that arrive in this order."""
    tiles = parts(range(8, KEYS, 8))
    now = None
    for n in order:
        now = tiles[n] if now is None else merge(now, tiles[n])
        yield now


def difference(a, b):
    return max(abs(a[0] - b[0]), np.abs(a[1] - b[1]).max())


def main():
    whole = attend(scores, values)
    print(f"whole: lse {whole[0]:.6f}, out " + " ".join(f"{x:.6f}" for x in whole[1]))
    for tile in (1, 7, 16):
        print(f"  online, tiles of {tile:<3}           differs by less than 1e-13: {difference(online(tile), whole) < 1e-13}")
    for ranks in (2, 4, 8):
        order = random.permutation(ranks)
        shares = parts(range(KEYS // ranks, KEYS, KEYS // ranks))
        print(f"  {ranks} ranks, in order {' '.join(map(str, order)):<16} {difference(tree([shares[n] for n in order]), whole) < 1e-13}")
    worst = max(difference(tree(parts(random.choice(np.arange(1, KEYS), random.integers(1, 12), replace=False))), whole) for _ in range(1000))
    print(f"  1000 random splits             {worst < 1e-13}")
    print(f"  without rescaling, 2 parts: lse {tree(parts([32]), merge_without_rescaling)[0]:.6f}, out "
          + " ".join(f"{x:.6f}" for x in tree(parts([32]), merge_without_rescaling)[1]))


if __name__ == "__main__":
    main()
