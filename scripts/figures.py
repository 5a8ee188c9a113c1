#!/usr/bin/env python3
"""Draws docs/attention_rows.png: a packed row, the keys each query sees, and which tiles of scores attention computes.

    scripts/figures.py [OUT.png]

Blocks and tiles are cut as forward_block() of llmc/ops/attention.h cuts them: blocks of 192 queries, and for each the keys from the
first that its first query sees, 96 at a time. Of a tile only those queries are computed that see a key in it.
"""
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

QUERIES, KEYS, LANES = 192, 96, 16
DOCUMENTS = [420, 60, 250, 40, 310, 72]  # the last is the padding
VISIBLE, COMPUTED, SKIPPED = "#1f5a96", "#a9cbea", "#f4f4f4"


def first_keys(documents, window):
    """lo[p]: the first key that the query at position p sees."""
    begin = np.repeat(np.cumsum([0, *documents[:-1]]), documents)
    return np.maximum(begin, np.arange(len(begin)) - window + 1) if window else begin


def computed_tiles(lo):
    """(first query, end, first key, end) of each product of a block of queries and a tile of keys."""
    T = len(lo)
    for block in range(0, T, QUERIES):
        block_end = min(block + QUERIES, T)
        for key in range(lo[block], block_end, KEYS):
            key_end = min(key + KEYS, block_end)
            first = block + max(0, key - block) // LANES * LANES
            end = block + int(np.searchsorted(lo[block:block_end], key_end))
            yield first, end, key, key_end


def draw(axis, documents, window, title):
    lo = first_keys(documents, window)
    T = len(lo)
    axis.add_patch(Rectangle((0, 0), T, T, color=SKIPPED, linewidth=0))
    computed = 0
    for first, end, key, key_end in computed_tiles(lo):
        axis.add_patch(Rectangle((key, first), key_end - key, end - first, facecolor=COMPUTED, edgecolor="white", linewidth=0.6))
        computed += (end - first) * (key_end - key)
    p = np.arange(T)
    axis.fill_betweenx(np.repeat([*p, T], 2)[1:-1], np.repeat(lo, 2), np.repeat(p + 1, 2), color=VISIBLE, linewidth=0, alpha=0.85)
    for block in range(QUERIES, T, QUERIES):
        axis.axhline(block, color="#999999", linewidth=0.5)

    query = sum(documents[:4]) + 260
    axis.plot([lo[query], query + 1], [query, query], color="#e06000", linewidth=2)
    axis.annotate(f"query {query} sees keys {lo[query]} to {query}", (lo[query], query), (20, query + 60), color="#b04c00", fontsize=9,
                  arrowprops={"arrowstyle": "-", "color": "#e06000"})
    ends = np.cumsum(documents)
    axis.set_xticks([0, *ends], ["0", *[str(e) for e in ends]], rotation=90, fontsize=8)
    axis.set_yticks(range(0, T + 1, QUERIES))
    axis.tick_params(axis="y", labelsize=8)
    axis.set(xlim=(0, T), ylim=(T, 0), aspect="equal", xlabel="keys; ticks where documents end", ylabel="queries, in blocks of 192")
    visible = int((p - lo + 1).sum())
    axis.set_title(f"{title}\n{visible / T**2:.1%} of the scores are seen, {computed / T**2:.1%} computed", fontsize=10)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs" / "attention_rows.png"
    figure, axes = plt.subplots(1, 2, figsize=(12, 6.6), layout="constrained")
    draw(axes[0], DOCUMENTS, 0, "Five documents and the padding in one row")
    draw(axes[1], DOCUMENTS, 150, "The same row in a layer with a sliding window of 150")
    figure.legend(handles=[Patch(color=VISIBLE, label="seen: lo[p] to p"), Patch(color=COMPUTED, label="computed, then masked"),
                           Patch(facecolor=SKIPPED, edgecolor="#cccccc", label="skipped")], loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(out, dpi=100)
    print(out)


if __name__ == "__main__":
    main()
