"""A matrix product in tiles: what is read, from which banks, and who holds what in an mma. Chapter D: matmul.md."""

import numpy as np
from warp import WARP, wavefronts

N = 256  # rows, columns and depth of the product
random = np.random.Generator(np.random.PCG64(4))
x, w = random.integers(-4, 5, (N, N)), random.integers(-4, 5, (N, N))  # small integers, so that any order of sums is exact


def tiled(rows, columns, depth=32):
    """out = x w^T, in tiles of rows x columns outputs; and the elements that were read on the way."""
    out, read = np.zeros((N, N), int), 0
    for t in range(0, N, rows):
        for o in range(0, N, columns):
            for k in range(0, N, depth):
                a, b = x[t:t + rows, k:k + depth], w[o:o + columns, k:k + depth]
                read += a.size + b.size
                out[t:t + rows, o:o + columns] += a @ b.T
    return out, read


def flop_per_byte(read, bytes_each=2):
    return 2 * N**3 / (read * bytes_each)


# Where chunk c, of 16 bytes, of row r lies, in rows of 32 bf16: in bytes.
LAYOUTS = {
    "rows of 64 bytes": lambda r, c: 64 * r + 16 * c,
    "rows of 80 bytes, of which 16 are padding": lambda r, c: 80 * r + 16 * c,
    "rows of 64 bytes, chunk c at c ^ (r / 2 % 4)": lambda r, c: 64 * r + 16 * (c ^ (r // 2 % 4)),
}


def ldmatrix_addresses(at, k=0):
    """The rows that the lanes of an ldmatrix.x4 name for a left operand: chunks k and k + 1 of 16 rows."""
    return [at(lane % 16, k + lane // 16) for lane in WARP]


# ---- mma.m16n8k16: the elements that each register of lane 4 g + t holds, as (row, column)

def left(lane, register):
    g, t = divmod(lane, 4)
    return [(g + register % 2 * 8, 2 * t + register // 2 * 8 + e) for e in (0, 1)]


def right(lane, register):
    g, t = divmod(lane, 4)
    return [(2 * t + register * 8 + e, g) for e in (0, 1)]


def total(lane, pair):
    g, t = divmod(lane, 4)
    return [(g + pair * 8, 2 * t + e) for e in (0, 1)]


def registers(matrix, held, count):
    """What 32 lanes hold of a matrix: (lane, register) -> two elements."""
    return {(lane, n): [matrix[at] for at in held(lane, n)] for lane in WARP for n in range(count)}


def matrix(registers, held, shape):
    out = np.full(shape, -10**6)
    for (lane, n), values in registers.items():
        for at, value in zip(held(lane, n), values):
            assert out[at] == -10**6  # nobody else holds it
            out[at] = value
    return out


def ldmatrix(tile, chunks):
    """Register n of each lane, from matrix n of the four whose rows the lanes name: (row, chunk) for each lane."""
    out = {}
    for lane in WARP:
        for n in range(4):
            row, chunk = chunks[8 * n + lane // 4]
            out[lane, n] = list(tile[row, 8 * chunk + lane % 4 * 2:][:2])
    return out


def main():
    print(f"a product of {N} x {N} x {N} in bf16, in tiles of   read, in elements   FLOP / byte   m n / (m + n)")
    want = x @ w.T
    for m, n in ((1, 1), (4, 1), (16, 16), (32, 32), (128, 16), (64, 64), (128, 128), (N, N)):
        out, read = tiled(m, n)
        assert (out == want).all()
        print(f"  {m:3} x {n:<3}{read:50,}{flop_per_byte(read):14.1f}{m * n / (m + n):15.1f}")
    print("an ldmatrix.x4 of 16 rows and 32 bytes of each")
    for name, at in LAYOUTS.items():
        print(f"  {name:<46}{wavefronts(ldmatrix_addresses(at), 16):3} wavefronts")
    a, b = x[:16, :16], w[:8, :16].T
    print("an mma of 16 x 16 times 16 x 8, from the registers of 32 lanes")
    from_lanes = matrix(registers(a, left, 4), left, (16, 16)) @ matrix(registers(b, right, 2), right, (16, 8))
    print("  equals the product                                     ", (from_lanes == a @ b).all())
    print("  ldmatrix gives the left operand to its lanes           ",
          ldmatrix(x, [(lane % 16, lane // 16) for lane in WARP]) == registers(a, left, 4))
    two = [registers(want[:16, 8 * half:8 * half + 8], total, 2) for half in (0, 1)]
    print("  two sums side by side are the next left operand        ",
          {(lane, n): two[n // 2][lane, n % 2] for lane in WARP for n in range(4)} == registers(want[:16, :16], left, 4))


if __name__ == "__main__":
    main()
