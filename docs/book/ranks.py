"""Ranks that share a step: sums around a ring, attention around a ring, a block whose channels are divided, and the bytes of a parameter. Chapter F: ranks.md."""

import numpy as np
from softmax import attend, merge

random = np.random.Generator(np.random.PCG64(6))


class Ring:
    """P ranks, each of which sends to the next one. Counts what all of them send."""

    def __init__(self, ranks):
        self.ranks, self.sent = ranks, 0

    def hop(self, arrays):
        """What each rank receives: the array of the one before."""
        self.sent += sum(a.size for a in arrays)
        return [arrays[r - 1] for r in range(self.ranks)]


def reduce_scatter(ring, arrays):
    """Rank r ends with part r of the sum. A part starts at the rank behind its owner and visits all, who add theirs; the owner is last."""
    P = ring.ranks
    parts = [np.split(a, P) for a in arrays]
    travelling = [parts[r][r - 1] for r in range(P)]
    for hop in range(1, P):
        travelling = [a + parts[r][r - 1 - hop] for r, a in enumerate(ring.hop(travelling))]
    return travelling


def all_gather(ring, parts):
    """Every rank ends with the parts of all."""
    P = ring.ranks
    have, travelling = [{r: parts[r]} for r in range(P)], parts
    for hop in range(1, P):
        travelling = ring.hop(travelling)
        for r in range(P):
            have[r][(r - hop) % P] = travelling[r]
    return [np.concatenate([have[r][n] for n in range(P)]) for r in range(P)]


def all_reduce(ring, arrays):
    return all_gather(ring, reduce_scatter(ring, arrays))


# ---- attention of a row of 2 P pieces, of which each of P ranks has two ------------------------------------------------------------

PIECE, WIDTH = 4, 8  # tokens, channels


def contiguous(P):
    return [[2 * r, 2 * r + 1] for r in range(P)]


def zigzag(P):
    return [[r, 2 * P - 1 - r] for r in range(P)]


def hops_of(deal, owner, piece):
    """The hops of a piece's keys: to the last rank on their way around that has a query behind them."""
    P = len(deal)
    return max(h for h in range(P) if h == 0 or max(deal[(owner + h) % P]) > piece)


def mean_hops(deal):
    return np.mean([hops_of(deal, r, piece) for r, pieces in enumerate(deal) for piece in pieces])


def work(deal):
    """The share of each rank in the pairs of a query and a key that it sees, times the number of ranks."""
    pairs = np.array([sum(piece + 0.5 for piece in pieces) for pieces in deal])
    return pairs / pairs.sum() * len(deal)


def ring_attention(deal, joined=merge):
    """Causal attention: queries stay, keys come around. The largest difference from one rank's."""
    P = len(deal)
    q, k, v = (random.standard_normal((2 * P * PIECE, WIDTH)) for _ in range(3))
    results = {}
    for hop in range(P):
        for r in range(P):
            owner = (r - hop) % P
            for piece in deal[owner]:
                if hops_of(deal, owner, piece) < hop:
                    continue  # it stopped before it came here
                for t in (t for mine in deal[r] for t in range(mine * PIECE, (mine + 1) * PIECE)):
                    seen = np.arange(piece * PIECE, min((piece + 1) * PIECE, t + 1))
                    if len(seen):
                        part = attend(k[seen] @ q[t], v[seen])
                        results[t] = joined(results[t], part) if t in results else part
    return max(np.abs(results[t][1] - attend(k[:t + 1] @ q[t], v[:t + 1])[1]).max() for t in results)


# ---- a block whose hidden channels are divided among ranks ----------------------------------------------------------------------------

def block(x, gain, up, down, dy):
    """y = down relu(up (gain x)) of each token (a row of x), and the gradients of gain, up, down and x."""
    n = x * gain
    h = np.maximum(n @ up.T, 0)
    dh = (dy @ down) * (h > 0)
    dn = dh @ up
    return h @ down.T, (dn * x).sum(0), dh.T @ n, dy.T @ h, dn * gain


def divided_block(ring, x, gain, up, down, dy):
    """The same over P ranks: each has its tokens outside, and all tokens with its channels inside. The gradients of up and down are the ranks' own rows and columns."""
    P, shape = ring.ranks, x.shape
    xs, dys, ups, downs = np.split(x, P), np.split(dy, P), np.split(up, P), np.split(down, P, axis=1)
    n = [a.reshape(shape) for a in all_gather(ring, [(own * gain).ravel() for own in xs])]
    h = [np.maximum(n[r] @ ups[r].T, 0) for r in range(P)]
    y = reduce_scatter(ring, [(h[r] @ downs[r].T).ravel() for r in range(P)])
    dy = [a.reshape(shape) for a in all_gather(ring, [own.ravel() for own in dys])]
    dh = [(dy[r] @ downs[r]) * (h[r] > 0) for r in range(P)]
    dn = [a.reshape(own.shape) for a, own in zip(reduce_scatter(ring, [(dh[r] @ ups[r]).ravel() for r in range(P)]), xs)]
    dgain = sum((dn[r] * xs[r]).sum(0) for r in range(P))  # each rank has the norm of other tokens
    return (np.concatenate(y).reshape(shape), dgain, np.concatenate([dh[r].T @ n[r] for r in range(P)]),
            np.concatenate([dy[r].T @ h[r] for r in range(P)], axis=1), np.concatenate([dn[r] * gain for r in range(P)]))


# ---- ZeRO ----------------------------------------------------------------------------------------------------------------------------

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 10  # bytes of a parameter in bf16: the last are m, v and the lower half of the weight's float


def held(stage, W):
    """Bytes of a parameter on each of W ranks."""
    return WEIGHT / (W if stage == 3 else 1) + GRADIENT / (W if stage >= 2 else 1) + OPTIMIZER / (W if stage >= 1 else 1)


def calls(stage, micro_steps):
    """What the ranks do in a step, and the bytes of an element."""
    for micro_step in range(micro_steps):
        if stage == 3:
            yield from [(all_gather, WEIGHT)] * 2  # before the forward and before the backward pass
        if stage >= 2 or micro_step == micro_steps - 1:
            yield (all_reduce if stage == 0 else reduce_scatter), GRADIENT
    if stage in (1, 2):
        yield all_gather, WEIGHT


def sent(stage, W, micro_steps):
    """Bytes that all ranks together send for a parameter in a step, counted."""
    total = 0
    for call, size in calls(stage, micro_steps):
        ring = Ring(W)
        call(ring, [np.zeros(1 if call is all_gather else W) for _ in range(W)])
        total += ring.sent / W * size
    return total


def main():
    P, n = 4, 1000
    arrays = [random.standard_normal(n).astype(np.float32) for _ in range(P)]
    ring = Ring(P)
    sums = all_reduce(ring, arrays)
    print(f"{P} ranks sum {n} numbers: what all of them send")
    print(f"  everyone to everyone              {P * (P - 1) * n:6}")
    print(f"  reduce-scatter, then all-gather   {ring.sent:6}")
    print(f"  every rank has the same bits        {all((a == sums[0]).all() for a in sums)}")
    print(f"  they are those of rank order        {bool((sums[0] == sum(arrays[1:], arrays[0])).all())}")
    print("attention around a ring   equals one rank's   hops of a key, mean   least and most work of a rank")
    for P in (2, 4, 8):
        for deal in (contiguous, zigzag):
            shares = work(deal(P))
            print(f"  {P} ranks, {deal.__name__:<16}{str(ring_attention(deal(P)) < 1e-13):>15}{mean_hops(deal(P)):21.4f}"
                  f"{shares.min():15.2f} {shares.max():.2f}")
    print("a block whose channels are divided   equals one rank's   sent, in vectors of a token")
    T, C, F = 8, 6, 16
    inputs = [random.standard_normal(shape) for shape in ((T, C), C, (F, C), (C, F), (T, C))]
    for P in (2, 4):
        ring = Ring(P)
        got, want = divided_block(ring, *inputs), block(*inputs)
        print(f"  {P} ranks{max(np.abs(a - b).max() for a, b in zip(got, want)) < 1e-12!s:>44}{ring.sent / C:15.0f}")
    print("a parameter on 8 ranks    bytes on each   sent by all, with 1 micro-step and with 4")
    for stage in range(4):
        print(f"  stage {stage}{held(stage, 8):30.2f}{sent(stage, 8, 1):15.0f} {sent(stage, 8, 4):6.0f}")


if __name__ == "__main__":
    main()
