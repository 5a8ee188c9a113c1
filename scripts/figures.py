#!/usr/bin/env python3
"""Draws the figures of docs/ that show how attention works, on one rank and in a ring, and the plan's memory and time.

    scripts/figures.py [DIRECTORY [NAME...]]

attention_rows.png: a packed row, the keys each query sees, and which tiles of scores attention computes. Blocks and tiles are cut as
forward_span() of llmc/ops/attention.h cuts them: blocks of 96 queries, and for each the keys from the first that its first query sees,
192 at a time. A tile is computed in strips of 6 queries, each from the first key that one of them sees to the last, in whole vectors.

attention_tile.png: the elements in each lane for one mma.m16n8k16 (llmc/ops/ptx.cuh), and the order in which attention_forward_kernel5
(attention_forward.cuh) processes the keys of one block of queries at head width 64.

ring.png: the hops of keys and values around a ring of four ranks for two rows, and the omitted hops. The script deals the pieces as
llmc/parallel/split.h does, and moves them as its KeyTravel does.

ring_backward.png: the keys on each rank at each hop in the backward pass of a ring of four, and the paths of the keys and of their gradients, as in
each_block() and VisitingGradients of llmc/parallel/ring.h.

banks.png: the rows addressed by the lanes of an ldmatrix, and the shared-memory banks of these rows, without and with the swizzle of
llmc/ops/attention_tile.cuh. The script reads the formula from that file.

attention_hopper.png, hopper_matmul.png: the work of the copies, products and warps of a block in each version of these ladders, in cycles of the PTX
interpreter's time model, which writes them to the file named by PTX_TIMELINE. They need the ladders' build for the interpreter
(dev/emulator/README.md).

lifetimes.png: the lifetimes of the arrays of a layer in a rehearsed step, from ./train_llama --plan --timeline.

timeline.png: predicted computation, communication, copies and memory over time, from ./train_llama --plan --timeline.

book/*.png: the pictures of docs/book, from the functions of each chapter's program.

longest_sample.png: the longest sample of Qwen3-8B on 1 to 64 H100 that share it, and the time of one step, from ./train_llama --plan --fit,
compared with TRL's published figures.
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs/book"))
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle
from PIL import Image

QUERIES, KEYS, STRIP, LANES = 96, 192, 6, 16
DOCUMENTS = [420, 60, 250, 40, 310, 72]  # the last is the padding
VISIBLE, COMPUTED, SKIPPED = "#1f5a96", "#a9cbea", "#f4f4f4"


def first_keys(documents, window):
    """Returns first_key: first_key[p] is the first key that the query at position p sees."""
    begin = np.repeat(np.cumsum([0, *documents[:-1]]), documents)
    return np.maximum(begin, np.arange(len(begin)) - window + 1) if window else begin


def computed_strips(first_key):
    """Yields (first query, end, first key, end) of the computed scores, for each strip of queries and each tile of keys."""
    T = len(first_key)
    for block in range(0, T, QUERIES):
        block_end = min(block + QUERIES, T)
        for tile in range(first_key[block], block_end, KEYS):
            tile_end = min(tile + KEYS, block_end)
            for first in range(block, block_end, STRIP):
                end = min(first + STRIP, block_end)
                seen = max(0, first_key[first] - tile), min(end, tile_end) - tile
                if seen[0] < seen[1]:
                    yield first, end, tile + seen[0] // LANES * LANES, min(tile_end, tile + -(-seen[1] // LANES) * LANES)


def draw(axis, documents, window, title):
    first_key = first_keys(documents, window)
    T = len(first_key)
    axis.add_patch(Rectangle((0, 0), T, T, color=SKIPPED, linewidth=0))
    computed = 0
    for first, end, key, key_end in computed_strips(first_key):
        axis.add_patch(Rectangle((key, first), key_end - key, end - first, facecolor=COMPUTED, linewidth=0))
        computed += (end - first) * (key_end - key)
    p = np.arange(T)
    axis.fill_betweenx(np.repeat([*p, T], 2)[1:-1], np.repeat(first_key, 2), np.repeat(p + 1, 2), color=VISIBLE, linewidth=0, alpha=0.85)
    for block in range(QUERIES, T, QUERIES):
        axis.axhline(block, color="#999999", linewidth=0.5)

    query = sum(documents[:4]) + 260
    axis.plot([first_key[query], query + 1], [query, query], color="#e06000", linewidth=2)
    axis.annotate(f"query {query} sees keys {first_key[query]} to {query}", (first_key[query], query), (20, query + 60),
                  color="#b04c00", fontsize=9, arrowprops={"arrowstyle": "-", "color": "#e06000"})
    ends = np.cumsum(documents)
    axis.set_xticks([0, *ends], ["0", *[str(e) for e in ends]], rotation=90, fontsize=8)
    axis.set_yticks(range(0, T + 1, QUERIES))
    axis.tick_params(axis="y", labelsize=8)
    axis.set(xlim=(0, T), ylim=(T, 0), aspect="equal", xlabel="keys (ticks: ends of documents)", ylabel="queries, in blocks of 96")
    visible = int((p - first_key + 1).sum())
    axis.set_title(f"{title}\n{visible / T**2:.1%} of the scores are seen, {computed / T**2:.1%} computed", fontsize=10)


def attention_rows():
    figure, axes = plt.subplots(1, 2, figsize=(12, 6.6), layout="constrained")
    draw(axes[0], DOCUMENTS, 0, "Five documents and the padding in one row")
    draw(axes[1], DOCUMENTS, 150, "The same row in a layer with a sliding window of 150")
    figure.legend(handles=[Patch(color=VISIBLE, label="seen: first_key[p] to p"), Patch(color=COMPUTED, label="computed, then masked"),
                           Patch(facecolor=SKIPPED, edgecolor="#cccccc", label="skipped")], loc="outside lower center", ncols=3, frameon=False)
    return figure


# ---- one tile on tensor cores

REGISTERS = ["#bcd9f2", "#f6cfa6", "#c6e3bd", "#e3c8e6"]
LANE = 5  # the lane with framed elements


def draw_fragment(axis, x, y, rows, columns, held_by):
    """Draws a matrix with the number of the lane in each cell, in the colour of the register; held_by(row, column) = lane, register."""
    for row in range(rows):
        for column in range(columns):
            lane, register = held_by(row, column)
            axis.add_patch(Rectangle((x + column, y + row), 1, 1, facecolor=REGISTERS[register], edgecolor="white", linewidth=0.7))
            axis.text(x + column + 0.5, y + row + 0.5, str(lane), ha="center", va="center", fontsize=6.5,
                      color="#000000" if lane == LANE else "#666666", weight="bold" if lane == LANE else "normal")
    for row in range(rows):
        for column in range(columns):
            if held_by(row, column)[0] == LANE:
                axis.add_patch(Rectangle((x + column, y + row), 1, 1, fill=False, edgecolor="#d02020", linewidth=1.4))


def draw_mma(axis):
    draw_fragment(axis, 0, 0, 16, 16, lambda r, c: (r % 8 * 4 + c % 8 // 2, r // 8 + c // 8 * 2))
    draw_fragment(axis, 19, -20, 16, 8, lambda r, c: (c * 4 + r % 8 // 2, r // 8))
    draw_fragment(axis, 19, 0, 16, 8, lambda r, c: (r % 8 * 4 + c // 2, r // 8))

    def label(x, y, text, register, **how):
        axis.text(x, y, text, ha="center", va="center", fontsize=8, bbox={"facecolor": REGISTERS[register], "edgecolor": "none", "pad": 2}, **how)

    label(4, -1.2, "a[0] = c[2k][0], [1]", 0)
    label(12.3, -1.2, "a[2] = c[2k+1][0], [1]", 2)
    label(4, 17.2, "a[1] = c[2k][2], [3]", 1)
    label(12.3, 17.2, "a[3] = c[2k+1][2], [3]", 3)
    for y, name in (-16, "b[0]"), (-8, "b[1]"), (4, "d[0], d[1]"), (12, "d[2], d[3]"):
        label(28, y, name, int(y in (-8, 12)), rotation=90)
    axis.text(8, 19.6, "left operand: 16 queries x 16 keys of P", ha="center", va="center", fontsize=9)
    axis.text(23, 18.2, "sum: 16 queries x\n8 channels of out", ha="center", va="center", fontsize=9)
    axis.text(18.2, -12, "right operand: 16 keys x 8 channels of V", rotation=90, ha="center", va="center", fontsize=9)
    axis.text(0, -20, "One mma.m16n8k16, and its lanes", ha="left", va="top", fontsize=11)
    axis.text(0, -18, f"""The number in a cell is its lane, the colour
its register. Framed: the elements of lane {LANE};
{LANE} = 4g + t with g = {LANE // 4}, t = {LANE % 4}.

Two sums c[2k], c[2k+1] of the previous
product, S = Q K$^T$, are in the same lanes
as the left operand a of this one.
S becomes P and is rounded to bf16
in place, in registers.""", ha="left", va="top", fontsize=9, linespacing=1.35)
    axis.set(xlim=(-0.5, 29), ylim=(20.5, -20.5), aspect="equal")
    axis.axis("off")


BLOCK, TILE, WARP = (384, 512), 64, 32  # of attention_forward_kernel5 at head width 64: queries, keys of a tile, queries of a warp
WALKED = [250, 170, 50, 90]             # lengths of the documents


def walk(first_key):
    """Yields (tile, its first key, end, first query of a warp, "none" | "part" | "all") in the order of the kernel."""
    for tile, key in enumerate(range(first_key[BLOCK[0]], BLOCK[1], TILE)):
        key_end = min(key + TILE, BLOCK[1])
        for first in range(*BLOCK, WARP):
            end = first + WARP
            none = key >= end or key_end <= first_key[first]
            every = key_end - key == TILE and key_end - 1 <= first and key >= first_key[end - 1]
            yield tile, key, key_end, first, "none" if none else "all" if every else "part"


def draw_walk(axis):
    first_key = first_keys(WALKED, 0)
    for tile, key, key_end, first, seen in walk(first_key):
        colour = SKIPPED if seen == "none" else COMPUTED
        axis.add_patch(Rectangle((key, first), key_end - key, WARP, facecolor=colour, edgecolor="white", linewidth=1.2))
        if seen == "all":
            axis.text((key + key_end) / 2, first + WARP / 2, "no mask", color="white", ha="center", va="center", fontsize=8, zorder=3)
        if first == BLOCK[0]:
            axis.text((key + key_end) / 2, first - 3, f"tile {tile}\nstage {tile % 2}" if key_end - key > 20 else f"{tile}\n{tile % 2}",
                      ha="center", va="bottom", fontsize=8)
    p = np.arange(*BLOCK)
    axis.fill_betweenx(np.repeat([*p, BLOCK[1]], 2)[1:-1], np.repeat(first_key[p], 2), np.repeat(p + 1, 2), color=VISIBLE,
                      linewidth=0, alpha=0.75)
    for warp, first in enumerate(range(*BLOCK, WARP)):
        axis.text(BLOCK[1] + 4, first + WARP / 2, f"warp {warp}", va="center", fontsize=8)
    axis.text(205, 440, "never read: no query\nof the block sees\nthese documents", ha="center", va="center", fontsize=8, color="#777777")
    axis.annotate("first_key of the\nblock's first query", (first_key[BLOCK[0]], BLOCK[1]), (first_key[BLOCK[0]] - 80, BLOCK[1] - 26),
                  color="#b04c00", fontsize=8, arrowprops={"arrowstyle": "->", "color": "#e06000"})
    ends = np.cumsum(WALKED)[:-1]
    axis.set_xticks([*ends, BLOCK[1]])
    axis.set_yticks(range(*BLOCK, WARP))
    axis.tick_params(labelsize=8)
    axis.set(xlim=(160, BLOCK[1] + 24), ylim=(BLOCK[1], BLOCK[0]), ylabel="queries",
             xlabel="keys (ticks: beginnings of documents, and the end of the block)")
    axis.set_title("One block: 128 queries against tiles of 64 keys", fontsize=10, pad=34)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(handles=[Patch(color=VISIBLE, label="seen"), Patch(color=COMPUTED, label="computed, then masked"),
                         Patch(facecolor=SKIPPED, edgecolor="#cccccc", label="skipped by this warp")], loc="upper left", fontsize=8, frameon=False)


def draw_stages(axis):
    tiles = 5
    for tile in range(tiles):
        for row, start, text, colour in (0, tile, f"copy {tile}", REGISTERS[1]), (1, tile + 1, f"products {tile}", COMPUTED):
            axis.add_patch(Rectangle((start + 0.05, row + 0.1), 0.9, 0.8, facecolor=colour, linewidth=0))
            axis.text(start + 0.5, row + 0.5, text, ha="center", va="center", fontsize=8)
        axis.axvline(tile + 1, color="#d02020", linewidth=1.4)
    axis.set_yticks([0.5, 1.5], ["cp.async", "tensor cores"], fontsize=8)
    axis.set_xticks([])
    axis.set(xlim=(0, tiles + 1), ylim=(2.05, -0.05))
    axis.set_title("Time: tile j + 1 arrives while tile j is computed. Red: cp_async_wait<0> and __syncthreads",
                   fontsize=10, pad=12)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def attention_tile():
    figure = plt.figure(figsize=(14, 7.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(5.2, 8.8))
    draw_mma(left.subplots())
    above, below = right.subplots(2, 1, height_ratios=(4, 1))
    draw_walk(above)
    draw_stages(below)
    return figure


# ---- keys and values in a ring

RANKS, PIECES, PIECE = 4, 8, 64  # each rank has 8 pieces of the row, here of 64 tokens
T = RANKS * PIECES * PIECE
SHADES = ["#7fb2dd", "#f0b27a", "#93c98a", "#c9a3cf", "#e0918b", "#b9b46a", "#84c4c0"]


def contiguous(piece):
    return piece // PIECES


def zigzag(piece):
    half = piece // (PIECES // 2)
    return min(half, 2 * RANKS - 1 - half)


def sees(documents):
    """Returns a matrix; element [i, j] is true if a query of piece i sees a key of piece j."""
    number = np.repeat(np.arange(len(documents)), documents).reshape(-1, PIECE)
    n = len(number)
    return np.array([[j <= i and number[j, -1] >= number[i, 0] for j in range(n)] for i in range(n)])


def draw_piece(axis, x, y, width, documents, piece, alpha):
    ends = np.cumsum(documents)
    begin, end = piece * PIECE, (piece + 1) * PIECE
    cuts = [begin, *(int(e) for e in ends if begin < e < end), end]
    for first, last in zip(cuts, cuts[1:]):
        shade = SHADES[int(np.searchsorted(ends, first, "right")) % len(SHADES)]
        axis.add_patch(Rectangle((x + (first - begin) / PIECE * width, y), (last - first) / PIECE * width, 1, facecolor=shade, alpha=alpha, linewidth=0))
    axis.add_patch(Rectangle((x, y), width, 1, fill=False, edgecolor="white" if alpha else "#bbbbbb", linewidth=0.8, linestyle="-" if alpha else ":"))


def draw_ring(axis, documents, owner, title):
    owners = np.array([owner(piece) for piece in range(RANKS * PIECES)])
    seen = sees(documents)
    needs = np.array([[seen[owners == rank, piece].any() for piece in range(RANKS * PIECES)] for rank in range(RANKS)])
    hops_needed = lambda piece: max((rank - owners[piece]) % RANKS for rank in range(RANKS) if needs[rank, piece])  # noqa: E731
    hops = np.array([hops_needed(piece) for piece in range(RANKS * PIECES)])

    width, gap = 1, 2  # of a piece, between ranks
    across = RANKS * PIECES * width + (RANKS - 1) * gap
    for piece in range(RANKS * PIECES):
        x = piece * across / (RANKS * PIECES)
        draw_piece(axis, x, 0, across / (RANKS * PIECES), documents, piece, 1)
        axis.text(x + across / RANKS / PIECES / 2, 0.5, str(owners[piece]), ha="center", va="center", fontsize=7)
    axis.text(0, -0.25, "the row, with a colour for each document, and the rank of each piece", fontsize=8, va="bottom")

    for hop in range(RANKS):
        y = 2.9 + 1.9 * hop
        axis.text(-0.5, y + 0.5, "own" if hop == 0 else f"hop {hop}", ha="right", va="center", fontsize=8)
        for rank in range(RANKS):
            source, x = (rank - hop) % RANKS, rank * (PIECES * width + gap)
            if hop == 0:
                axis.text(x + PIECES / 2, y - 0.2, f"rank {rank}", ha="center", va="bottom", fontsize=9)
            for i, piece in enumerate(np.flatnonzero(owners == source)):
                sent = hops[piece] >= hop
                draw_piece(axis, x + i * width, y, width, documents, piece, 0 if not sent else 1 if needs[rank, piece] else 0.3)
            sends = any(hops[owners == source] > hop)
            if hop + 1 < RANKS and sends:
                wraps = rank + 1 == RANKS
                start, to = (x + PIECES / 2, y + 1.05), ((x + PIECES + gap) * (not wraps) + PIECES / 2, y + 1.85)
                axis.annotate("", to, start, arrowprops={"arrowstyle": "->", "color": "#777777", "linewidth": 0.8})
    axis.set(xlim=(-3.5, across + 0.5), ylim=(2.9 + 1.9 * RANKS - 0.7, -1))
    axis.axis("off")
    axis.set_title(f"{title}\n{hops.sum() / RANKS / PIECES:.3f} hops per token instead of {RANKS - 1}", fontsize=10)


def ring():
    figure, axes = plt.subplots(1, 2, figsize=(14, 4.3), layout="constrained")
    draw_ring(axes[0], [T], zigzag, "One document, zigzag")
    draw_ring(axes[1], [520, 190, 404, 300, 180, 250, T - 1844], contiguous, "Seven documents, contiguous")
    figure.legend(handles=[Patch(color=SHADES[0], label="keys and values that the rank attends to"),
                           Patch(color=SHADES[0], alpha=0.3, label="keys and values that the rank only passes on"),
                           Patch(facecolor="white", edgecolor="#bbbbbb", linestyle=":", label="not sent: no later rank needs them")],
                  loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def ring_backward():
    """Draws time downwards. A block of keys moves one rank per hop, its gradients follow one hop later, and the last rank sends them home."""
    figure, axis = plt.subplots(figsize=(9, 5.2), layout="constrained")
    width, across = 2.4, 4
    for hop in range(RANKS):
        for rank in range(RANKS):
            home, x, y = (rank - hop) % RANKS, rank * across, 2 * hop
            axis.add_patch(Rectangle((x, y), width, 1, facecolor=SHADES[home], linewidth=0))
            axis.text(x + width / 2, y + 0.5, f"dq{rank}, dk{home}, dv{home}\nfrom keys of rank {home}", ha="center", va="center", fontsize=8)
            to = (rank + 1) % RANKS
            if hop + 1 < RANKS:  # the keys move on while this hop computes, from the last rank to the first
                style = {"arrowstyle": "->", "color": "#777777", "linewidth": 0.9, "linestyle": ":"}
                end = (to * across + 0.3, y + 1.95) if to else (x + width + 1.2, y + 1.3)
                axis.annotate("", end, (x + width, y + 0.5), arrowprops=style)
            if 0 < hop < RANKS - 1:  # the sums follow after this rank has added its part
                end = (to * across + width / 2, y + 1.95) if to else (x + width + 1.2, y + 1.75)
                axis.annotate("", end, (x + width / 2, y + 1), arrowprops={"arrowstyle": "-|>", "color": SHADES[home], "linewidth": 2.2})
            if hop == RANKS - 1:
                axis.annotate("", (x + width / 2, y + 1.6), (x + width / 2, y + 1), arrowprops={"arrowstyle": "-|>", "color": SHADES[home], "linewidth": 2.2})
                axis.text(x + width / 2, y + 1.9, f"home, to rank {home}", ha="center", va="center", fontsize=8)
        axis.text(-0.4, 2 * hop + 0.5, "own keys" if hop == 0 else f"hop {hop}", ha="right", va="center", fontsize=9)
    for rank in range(RANKS):
        axis.text(rank * across + width / 2, -0.2, f"rank {rank}", ha="center", va="bottom", fontsize=10)
    axis.set(xlim=(-2, RANKS * across), ylim=(2 * RANKS + 0.9, -0.8))
    axis.axis("off")
    axis.plot([], [], ":", color="#777777", label="keys and values, while the rank computes")
    axis.plot([], [], color="#999999", linewidth=2.2, label="float sums of their gradients, to which the next rank adds")
    axis.legend(loc="lower right", fontsize=8, frameon=False, ncols=2)
    return figure


# ---- banks of shared memory

def swizzle():
    """Returns the function (row, chunk) -> chunk of attention_tile.cuh for rows of 64 channels."""
    source = Path(__file__).resolve().parent.parent.joinpath("llmc/ops/attention_tile.cuh").read_text()
    formula = re.search(r"bf16 \*chunk\(int r, int c\) .*\(c \^ \(group == 8 \? (.*?) : .*\)\) \* 8;", source)[1]
    return lambda r, c: c ^ eval(formula, {"r": r})


def draw_banks(axis, place, title):
    """Draws eight rows of 128 bytes, in chunks of 16 bytes, and marks the chunks of one 8 x 8 matrix: logical chunk 2 of each row."""
    for row in range(8):
        for chunk in range(8):
            axis.add_patch(Rectangle((chunk, row), 1, 1, facecolor="#f4f4f4", edgecolor="white"))
        x = place(row, 2)
        axis.add_patch(Rectangle((x, row), 1, 1, facecolor=SHADES[row % len(SHADES)] if row < 7 else "#8da0cb", edgecolor="white"))
        axis.text(x + 0.5, row + 0.5, f"row {row}", ha="center", va="center", fontsize=8)
    used = len({place(row, 2) for row in range(8)})
    axis.set(xlim=(0, 8), ylim=(8, 0), xticks=np.arange(8) + 0.5, xticklabels=[f"{4 * c}-{4 * c + 3}" for c in range(8)], yticks=[],
             xlabel="banks of shared memory, 4 bytes each")
    axis.set_title(f"{title}: {4 * used} of 32 banks, {8 // used} pass{'es' if used < 8 else ''}", fontsize=10)
    axis.tick_params(labelsize=8, length=0)
    axis.spines[:].set_visible(False)


def banks():
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained", width_ratios=(1, 1.3, 1.3))
    for lane in range(32):
        matrix, row = lane // 8, lane % 8
        x, y = matrix // 2, matrix % 2 * 8 + row
        axes[0].add_patch(Rectangle((x, y), 1, 1, facecolor=SHADES[matrix], edgecolor="white"))
        axes[0].text(x + 0.5, y + 0.5, f"lane {lane}: row {row} of matrix {matrix}", ha="center", va="center", fontsize=6.5)
    axes[0].set(xlim=(0, 2), ylim=(16, 0), xticks=[0.5, 1.5], xticklabels=["channels 0-7", "8-15"], yticks=[4, 12], yticklabels=["rows 0-7", "8-15"])
    axes[0].set_title("ldmatrix.x4: the row that each lane addresses", fontsize=10)
    axes[0].tick_params(labelsize=8, length=0)
    axes[0].spines[:].set_visible(False)
    draw_banks(axes[1], lambda r, c: c, "One matrix, rows as they are")
    draw_banks(axes[2], swizzle(), "The same, swizzled")
    return figure


# ---- copies, products and waits of a block over time

COPIED, OWN, WAITS = "#c6e3bd", "#f0b27a", "#eeeeee"


def block_events(ladder, shape):
    """Returns the events of the last block of each version, {kernel: [(warp, what, from, to)]}, in the order of the versions."""
    program = Path("build/ptx/dev/cuda", ladder)
    if not program.exists():
        sys.exit(f"figures.py: {program} is not built\n  fix: make {program}, which needs nvcc; or name other figures")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline")
        subprocess.run([program, "--count", "--sample", "1", "--shape", shape], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "PTX_TIMELINE": str(path)})
        kernels = {}
        for line in path.read_text().splitlines():
            kernel, block, warp, what, begin, end = line.split("\t")
            kernels.setdefault(kernel, {}).setdefault(int(block), []).append((int(warp), what, float(begin), float(end)))
    return {kernel: blocks[min(blocks)] for kernel, blocks in kernels.items()}


def merged(intervals):
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(end, out[-1][1])
        else:
            out.append([begin, end])
    return [(begin, end - begin) for begin, end in out]


def draw_block(axis, events, title, last):
    of = lambda what, warp=None: merged((begin, end) for w, kind, begin, end in events if kind == what and warp in (None, w))
    consumers = sorted({warp for warp, what, *_ in events if what == "product" and warp % 4 == 0})
    axis.broken_barh(of("copy"), (0.1, 0.8), color=COPIED)
    for row, warp in enumerate(consumers, 1):
        end = max(end for w, *_, end in events if w == warp)
        axis.broken_barh([(0, end)], (row + 0.1, 0.4), color=OWN)
        axis.broken_barh(of("wait", warp), (row + 0.1, 0.4), color=WAITS)
        axis.broken_barh(of("product", warp), (row + 0.5, 0.4), color=VISIBLE)
    axis.set_yticks(np.arange(len(consumers) + 1) + 0.5, ["copies", *[f"group {n}" for n in range(len(consumers))]], fontsize=8)
    axis.set(xlim=(0, last), ylim=(len(consumers) + 1, 0))
    axis.tick_params(axis="x", labelsize=8)
    axis.set_title(f"{title}: {max(end for *_, end in events):,.0f} cycles", fontsize=9, loc="left")


def draw_versions(ladder, shape, titles):
    kernels = block_events(ladder, shape)
    figure, axes = plt.subplots(len(kernels), 1, figsize=(11, 1.55 * len(kernels) + 0.6), layout="constrained", sharex=True)
    last = max(end for events in kernels.values() for *_, end in events)
    for n, (axis, events) in enumerate(zip(axes, kernels.values(), strict=True), 1):
        draw_block(axis, events, f"version {n}, {titles[n - 1]}", last)
    axes[-1].set_xlabel("cycles of the model, not measured")
    figure.legend(handles=[Patch(color=COPIED, label="a copy, until it has landed"), Patch(color=VISIBLE, label="products of a group's first warp"),
                           Patch(color=OWN, label="its own instructions"), Patch(facecolor=WAITS, edgecolor="#cccccc", label="it waits")],
                  loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def attention_hopper():
    return draw_versions("attention_hopper", "1024x1x1x1024x1x1x128",
                         ["one step after the other", "a producer and consumers", "the next scores before this softmax", "turns"])


def hopper_matmul():
    return draw_versions("hopper_matmul", "256x1024x256", ["wgmma", "TMA and barriers", "specialised warps", "two consumers", "clusters"])


# ---- the plan -----------------------------------------------------------------------------------------------------------------------

def plan(*flags):
    """Returns what ./train_llama --plan prints."""
    root = Path(__file__).resolve().parent.parent
    return subprocess.run([root / "train_llama", "--plan", *flags], stdout=subprocess.PIPE, text=True, check=True).stdout


STEP = "--preset llama3.1-8b --gpu h100 --dtype bf16 --ranks 8 --zero_stage 3 --max_len 8192 --recompute layer --offload activations"
KINDS = {"weights": "weights of two layers, gathered", "act": "activations", "bucket": "gradients of two layers, to be summed"}  # arrays in the plan
ENGINES = {"ops": "computed", "messages": "sent between GPUs", "copies out": "copied to the host", "copies in": "copied from the host"}


def predicted_events():
    with tempfile.TemporaryDirectory() as folder:
        plan(*STEP.split(), "--timeline", f"{folder}/step.json")
        return json.loads(Path(folder, "step.json").read_text())["traceEvents"]


def draw_lanes(axis, events, begin, end):
    """Draws the busy engines in [begin, end), in milliseconds."""
    colours = {"weights": "#d9822b", "gradients": "#8a4fa3", "activations": "#3b8f5a", "moments": "#555555", "keys": "#c44e52"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    for event in events:
        first, length = event.get("ts", 0) / 1e3, event.get("dur", 0) / 1e3
        if event["ph"] != "X" or first + length < begin or first > end:
            continue
        what = event["name"]
        axis.barh(event["tid"], length, 0.8, left=first, color=colours.get(what.split()[0], "#7aa6d1"), edgecolor="white", linewidth=0.6)
        layer = re.search(r"layer (\d+)", what)
        text = layer[1] if layer else what.split(",")[0] if event["tid"] == 0 else ""
        if length > 0.007 * (end - begin):
            middle = (max(first, begin) + min(first + length, end)) / 2
            axis.text(middle, event["tid"], text, ha="center", va="center", fontsize=6.5, color="white", clip_on=True)
    axis.set(xlim=(begin, end), ylim=(len(names) - 0.4, -0.6), yticks=list(names), yticklabels=[ENGINES[name] for name in names.values()], xlabel="ms")
    axis.legend(handles=[Patch(color=colour, label=what) for what, colour in colours.items() if what in ("weights", "gradients", "activations")],
                loc="lower right", ncols=3, fontsize=8)


def draw_memory(axis, events):
    counters = [e for e in events if e["ph"] == "C"]
    end = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    times = [e["ts"] / 1e3 for e in counters] + [end / 1e3]
    others = [sum(n for kind, n in e["args"].items() if kind not in ("always", *KINDS)) for e in counters]
    stacks = [[e["args"].get(kind, 0) for e in counters] for kind in KINDS] + [others]
    stacks = np.array([[*stack, stack[-1]] for stack in stacks]) / 2**30
    axis.stackplot(times, stacks, step="post", labels=[*KINDS.values(), "buffers"], colors=["#d9822b", "#3b8f5a", "#8a4fa3", "#bbbbbb"])
    always = max(e["args"]["always"] for e in counters) / 2**30
    axis.set(xlim=(0, times[-1]), ylim=(0, 1.35 * stacks.sum(axis=0).max()), xlabel="ms", ylabel="GiB")
    axis.set_title(f"Memory of one GPU, in addition to the {always:.1f} GiB of its eighth of weights, gradients and moments", fontsize=10)
    axis.legend(loc="upper right", ncols=4, fontsize=8)


def timeline():
    events = predicted_events()
    layers = {e["name"]: e for e in events if e["ph"] == "X" and e["tid"] == 0}
    begin, end = layers["layer 28"]["ts"] / 1e3, layers["layer 29, backward"]["ts"] / 1e3
    figure, axes = plt.subplots(2, 1, figsize=(14, 6.5), layout="constrained")
    draw_memory(axes[0], events)
    axes[0].axvspan(begin, end, color="black", alpha=0.12, linewidth=0)
    figure.suptitle("Predicted: a step of Llama 3.1 8B on 8 H100, one row of 8192 tokens on each, ZeRO stage 3, activations recomputed and offloaded",
                    fontsize=11)
    draw_lanes(axes[1], events, begin, end)
    axes[1].set_title("The busy engines around the head, in the shaded time; numbers are layers", fontsize=10)
    return figure


LAYER = 1  # the layer of the drawn arrays


def lifetimes():
    with tempfile.TemporaryDirectory() as folder:
        plan(*"--preset llama3.2-1b --max_len 1024 --dtype bf16 --gpu h100 --recompute cheap --timeline".split(), f"{folder}/step.json")
        step = json.loads(Path(folder, "step.json").read_text())
    names = {op["time"]: op["name"] for op in step["ops"]}
    arrays = [a for a in step["arrays"] if a["name"].startswith(f"act.{LAYER}.") and a["bytes"]]
    arrays.sort(key=lambda a: (a["first"], a["last"]))
    times = sorted({t for a in arrays for t in (a["first"], a["last"])} | {t for t, name in names.items() if f"layer {LAYER}," in name})
    place = {time: i for i, time in enumerate(times)}
    back = min(time for time in times if not names[time].startswith("forward"))  # start of the layer's backward pass
    figure, axis = plt.subplots(figsize=(10, 0.21 * len(arrays) + 2.2), layout="constrained")
    for y, a in enumerate(arrays):
        kept = a["first"] < back <= a["last"]
        axis.barh(y, place[a["last"]] - place[a["first"]] + 1, 0.75, left=place[a["first"]], color="#3b8f5a" if kept else "#7aa6d1")
    axis.set(yticks=range(len(arrays)), yticklabels=[a["name"].split(".", 2)[2] for a in arrays], ylim=(len(arrays) - 0.4, -0.6), xlim=(0, len(times)),
             xticks=np.arange(len(times)) + 0.5)
    axis.axvline(place[back], color="#d02020", linewidth=1.4)
    axis.set_xticklabels([names[time].replace(f", layer {LAYER}", "") for time in times], rotation=90)
    axis.tick_params(labelsize=7)
    axis.grid(axis="x", alpha=0.2)
    axis.legend(handles=[Patch(color="#3b8f5a", label="kept for the backward pass"), Patch(color="#7aa6d1", label="alive within a pass")], fontsize=8,
                loc="lower left")
    axis.set_title(f"Lifetimes of the arrays of layer {LAYER} over the ops of the layer in a step (--recompute cheap). Red: later layers run", fontsize=10)
    return figure


TRL = {8: (1048576, 380), 16: (2097152, 696), 32: (4194304, 1346)}  # H100: tokens and seconds of Qwen3-8B, pull requests 6845 and 6846


def fitting(flags):
    """Yields ranks, tokens and seconds of the longest sample at --recompute layer."""
    text = plan(*"--fit --preset qwen3-8b --gpu h100 --dtype bf16 --zero_stage 3 --recompute layer --ranks 64".split(), *flags.split())
    for line in re.findall(r"^ +\d+ .*", text, re.M):
        if found := re.search(r"^ +(\d+) .* (\d+)[* ] +([\d.]+) s *$", line):
            yield int(found[1]), int(found[2]), float(found[3])


def longest_sample():
    figure, axes = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    for flags, label in (("", "all in the GPUs' memory"), ("--offload activations", "--offload activations"),
                         ("--offload activations,optimizer,weights", "--offload activations,optimizer,weights")):
        ranks, tokens, seconds = np.array(list(fitting(flags))).T
        axes[0].plot(ranks, tokens, marker="o", label=label)
        axes[1].plot(tokens, seconds, marker="o", label=label)
    axes[0].plot(list(TRL), [tokens for tokens, _ in TRL.values()], "k*", markersize=11, label="TRL 1.13, measured, activations offloaded")
    axes[1].plot(*zip(*TRL.values()), "k*", markersize=11, label="TRL 1.13, measured, on 8, 16 and 32")
    sizes = [1, 2, 4, 8, 16, 32, 64]
    axes[0].set(xscale="log", yscale="log", xticks=sizes, xticklabels=sizes, xlabel="H100 that share the sample", ylabel="tokens of the longest sample",
                title="Qwen3-8B, ZeRO stage 3, --recompute layer: planned")
    axes[1].set(xscale="log", yscale="log", xlabel="tokens of the longest sample", ylabel="seconds of a step",
                title="Predicted, on as many H100 as the sample needs")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    return figure


def book_backward():
    """Draws RMSNorm's gradient in the plane spanned by xh and g."""
    import backward as chapter
    rstd = 1 / np.sqrt(np.mean(chapter.x**2))
    g, along = chapter.dout * chapter.w, chapter.x / np.linalg.norm(chapter.x)
    rest = chapter.rmsnorm_backward(chapter.dout, chapter.x, chapter.w) / rstd
    across = rest / np.linalg.norm(rest)
    figure, axis = plt.subplots(figsize=(9, 2.9), layout="constrained")
    for vector, colour, text, shift in [(g, VISIBLE, "g = dout w", (-8, 8)), (along * (g @ along), "#888888", "xh mean(g xh), the part along x", (-8, -4)),
                                        (rest, "#e06000", "dx / rstd = g - xh mean(g xh)", (6, 4))]:
        end = vector @ across, vector @ along
        axis.annotate("", end, (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 2})
        axis.annotate(text, end, shift, textcoords="offset points", color=colour, fontsize=9, ha="right" if shift[0] < 0 else "left")
    axis.plot([g @ across] * 2, [0, g @ along], ":", color="#888888")
    axis.plot([0, 0], [-0.05, 0.3], color="#cccccc", linewidth=1, zorder=0)
    axis.annotate("direction of x: L does not change along it", (0, 0.27), (6, 0), textcoords="offset points", fontsize=8, color="#666666")
    axis.set(xlim=(-0.4, 1.3), ylim=(-0.06, 0.32), aspect="equal", xlabel="direction of dx", ylabel="direction of x")
    return figure


def book_softmax():
    """Draws a query's running (lse, out) after each tile of keys, for two orders of the tiles."""
    import softmax as chapter
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
    for axis, order, title in [(axes[0], range(8), "tiles from first to last"), (axes[1], reversed(range(8)), "from last to first")]:
        path = list(chapter.arriving(order))
        axis.plot(range(1, 9), [out[0] for _, out in path], "o-", color=VISIBLE, label="out[0]")
        axis.plot(range(1, 9), [lse for lse, _ in path], "s-", color="#e06000", label="lse")
        axis.set(xlabel="tiles that have arrived", title=title)
        axis.legend()
    return figure


def book_warp():
    """Draws the sectors of device memory and the banks of shared memory for the 32 addresses of a warp."""
    import warp as chapter
    figure, axes = plt.subplots(len(chapter.PATTERNS), 1, figsize=(10, 4.2), layout="constrained")
    for axis, (name, addresses, bytes_each) in zip(axes, chapter.PATTERNS):
        sectors = chapter.sectors(addresses, bytes_each)
        shown = sorted(sectors)[:40]
        for n, sector in enumerate(shown):
            axis.add_patch(Rectangle((n, 0), 0.94, 1, facecolor=SKIPPED, edgecolor="#bbbbbb", linewidth=0.5))
            for a in addresses:
                if sector * 32 <= a < sector * 32 + 32:
                    axis.add_patch(Rectangle((n + (a % 32) / 32 * 0.94, 0.1), min(bytes_each, 32) / 32 * 0.94, 0.8, facecolor=VISIBLE, linewidth=0.3, edgecolor="white"))
        axis.set(xlim=(0, 40), ylim=(0, 1), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        axis.set_title(f"{name}: {len(sectors)} sectors, {100 * chapter.used(addresses, bytes_each):.0f} % of their bytes are used", fontsize=9, loc="left")
    return figure


def book_grpo():
    import grpo as chapter
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    baselines = np.linspace(-0.4, 0.9, 100)
    left.plot(baselines, [chapter.one_sample(chapter.theta, b)[1] for b in baselines], color=VISIBLE)
    for name, b in [("none", 0.0), ("E[R]", float(chapter.policy(chapter.theta) @ chapter.reward))]:
        variance = chapter.one_sample(chapter.theta, b)[1]
        left.plot(b, variance, "o", color="#e06000")
        left.annotate(f"{name}: {variance:.4f}", (b, variance), (6, 8), textcoords="offset points", fontsize=9)
    left.set(xlabel="baseline", ylabel="total variance of one sample", ylim=(0, None), title="the expectation is the same everywhere")
    ratio = np.linspace(0, 2, 200)
    for A, colour in [(1, VISIBLE), (-1, "#e06000")]:
        right.plot(ratio, np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A), color=colour, label=f"A = {A:+d}")
        right.plot(ratio, ratio * A, ":", color=colour, linewidth=1)
    right.axvline(1, color="#cccccc", linewidth=1)
    right.set(xlabel="ratio p / p_old", ylabel="min(r A, clip(r) A)", title="flat: the token has no gradient")
    right.legend()
    return figure


def book_adamw():
    import adamw as chapter
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), width_ratios=(1.3, 1), layout="constrained")
    for row, x in enumerate((1.0, 1.0001, 1.0078125)):
        for n, bit in enumerate(f"{int(chapter.bits(x)):032b}"):
            colour = "#f2c9a0" if n == 0 else "#cfe3c4" if n < 9 else COMPUTED
            left.add_patch(Rectangle((n, -row), 1, 0.8, facecolor=colour if n < 16 else SKIPPED, edgecolor="#999999", linewidth=0.5))
            left.text(n + 0.5, 0.4 - row, bit, ha="center", va="center", fontsize=7)
        left.text(-0.5, 0.4 - row, f"{x}", ha="right", va="center", fontsize=9)
    for at, text in [(0.5, "sign"), (5, "exponent"), (12.5, "mantissa of bf16"), (24, "lower half")]:
        left.text(at, 1.0, text, ha="center", fontsize=8)
    left.set(xlim=(-7, 32.5), ylim=(-2.3, 1.5))
    left.axis("off")
    for name, rounding in chapter.roundings().items():
        right.plot(chapter.add_often(1e-4, 1000, rounding), label=name, linewidth=1)
    right.set(xlabel="updates of 0.0001", ylabel="weight")
    right.legend(fontsize=8)
    return figure


def book_matmul():
    """Draws the reuse of data for square tiles, by formula and counted, and the banks of the eight rows of an ldmatrix."""
    import matmul as chapter
    figure, (left, *right) = plt.subplots(1, 4, figsize=(13, 3.4), width_ratios=(1.4, 1, 1, 1), layout="constrained")
    edges = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    left.plot(edges, [m / 2 for m in edges], color=COMPUTED, label="m n / (m + n)")
    left.plot(edges[2:], [chapter.flop_per_byte(chapter.tiled(m, m)[1]) for m in edges[2:]], "o", color=VISIBLE, label="counted")
    left.axhline(185, color="#e06000", linewidth=1)
    left.text(1, 205, "H200: device memory suffices", fontsize=8, color="#b04c00")
    left.axhline(790 / 7, color="#e06000", linewidth=1, linestyle=":")
    left.text(1, 790 / 7 * 0.8, "L2 suffices", fontsize=8, color="#b04c00", va="top")
    left.set(xscale="log", yscale="log", ylim=(0.4, 600), xlabel="edge of a square tile", ylabel="FLOP per byte", title="reuse")
    left.set_xticks(edges, map(str, edges))
    left.minorticks_off()
    left.legend(fontsize=8, loc="lower right")
    for axis, (name, at) in zip(right, chapter.LAYOUTS.items()):
        for row in range(8):
            first = at(row, 1) % 128 // 16
            axis.add_patch(Rectangle((first, row), 1, 1, facecolor=COMPUTED, edgecolor=VISIBLE))
            axis.text(first + 0.5, row + 0.5, f"{row}", ha="center", va="center", fontsize=8)
        axis.set(xlim=(0, 8), ylim=(8, 0), xticks=range(0, 9, 2), xticklabels=[f"{4 * c}" for c in range(0, 9, 2)], yticks=[], xlabel="bank")
        axis.grid(axis="x", color="#eeeeee")
        axis.set_title(f"chunk 1 of eight rows,\n{name.replace(', of which 16 are padding', '')}".replace(", chunk", ",\nchunk"), fontsize=8)
    return figure


def book_ranks():
    """Draws the hops of attention around a ring of four ranks, and the bytes per parameter on each rank in the ZeRO stages."""
    import ranks as chapter
    P = 4
    figure, (*deals, right) = plt.subplots(1, 3, figsize=(13, 3.4), width_ratios=(1, 1, 1.2), layout="constrained")
    for axis, deal in zip(deals, (chapter.contiguous(P), chapter.zigzag(P))):
        name = "contiguous" if axis is deals[0] else "zigzag"
        for owner, pieces in enumerate(deal):
            for piece in pieces:
                hops = chapter.hops_of(deal, owner, piece)
                for hop in range(hops + 1):
                    seen = max(deal[(owner + hop) % P]) >= piece
                    axis.add_patch(Rectangle((hop, piece), 0.94, 0.9, facecolor=(VISIBLE if hop == 0 else COMPUTED) if seen else SKIPPED, edgecolor="#999999", linewidth=0.5))
                    axis.text(hop + 0.47, piece + 0.45, f"rank {(owner + hop) % P}", ha="center", va="center", fontsize=8,
                              color="white" if hop == 0 and seen else "black")
        axis.set(xlim=(0, P), ylim=(2 * P, 0), xticks=[n + 0.47 for n in range(P)], xticklabels=range(P), yticks=[n + 0.45 for n in range(2 * P)],
                 yticklabels=range(2 * P), xlabel="hop", ylabel="piece of the row", title=f"{name}: {chapter.mean_hops(deal):.3f} hops per key")
    worlds = np.array([1, 2, 4, 8, 16, 32, 64])
    for stage, colour in enumerate(("#999999", COMPUTED, VISIBLE, "#e06000")):
        right.plot(worlds, [chapter.held(stage, W) for W in worlds], "o-", color=colour, markersize=3, label=f"stage {stage}")
    right.set(xscale="log", xlabel="ranks", ylabel="bytes per parameter on each rank", ylim=(0, None), title="ZeRO")
    right.set_xticks(worlds, map(str, worlds))
    right.minorticks_off()
    right.legend(fontsize=8)
    return figure


def book_delta():
    """Draws the work of a token in documents of each length, and the error of a leaked state after each token."""
    import delta as chapter
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    lengths = 2.0 ** np.arange(6, 17)
    axes[0].loglog(lengths, chapter.work_of_attention(lengths), "s-", color="#e06000", label="attention")
    axes[0].loglog(lengths, np.full(len(lengths), chapter.work(64)), "o-", color=VISIBLE, label="the delta rule, chunks of 64")
    axes[0].set(xlabel="tokens of a document", title="multiply-adds of a token and head")
    axes[0].legend()
    for decay, colour in ((0, "#d02020"), (0.05, "#e06000"), (0.5, VISIBLE)):
        before, tokens = chapter.document(chapter.TOKENS, decay), chapter.document(40, decay)
        axes[1].semilogy(range(1, 41), chapter.leak(before, tokens), color=colour, label=f"mean g = {-decay:g}")
    axes[1].set(xlabel="tokens since the document's first", title="error of an output with a leaked state", ylim=(1e-9, 3))
    axes[1].legend()
    return figure


FIGURES = (attention_rows, attention_tile, ring, ring_backward, banks, attention_hopper, hopper_matmul, lifetimes, timeline, longest_sample, book_backward,
           book_softmax, book_warp, book_grpo, book_adamw, book_matmul, book_ranks, book_delta)


def main():
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs"
    for draw_figure in [f for f in FIGURES if f.__name__ in (sys.argv[2:] or [f.__name__])]:
        out = docs / f"{draw_figure.__name__.replace('book_', 'book/')}.png"
        out.parent.mkdir(exist_ok=True)
        draw_figure().savefig(out, dpi=100)
        Image.open(out).convert("RGB").quantize(64).save(out, optimize=True)  # a third of the bytes
        print(out)


if __name__ == "__main__":
    main()
