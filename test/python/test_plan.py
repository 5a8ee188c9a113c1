"""--plan for ranks and its table --fit, and what a run on ranks says of its plan."""

import re

import pytest
from test_runs import call, command, log_lines, random_documents, refused, train, write_data

QWEN = {"model": None, "preset": "qwen2.5-0.5b"}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text, line):
    """The bytes at the end of a line that begins so."""
    number, unit = re.search(rf"^\s*{re.escape(line)}.* ([\d.]+) (KiB|MiB|GiB)$", text, re.M).groups()
    return float(number) * UNITS[unit]


def plan(*flags, **options):
    result = call(command("sft", "--plan", *flags, **{**QWEN, **options}))
    assert result.returncode == 0 and not result.stderr, result.stderr
    return result.stdout


def test_the_plan_of_a_rank():
    long = {"gpu": 80, "max_len": 131072, "dtype": "bf16", "recompute": "layer"}
    one, eight = plan(**long), plan(ranks=8, ring_attn_size=8, zero_stage=2, **long)
    assert "ranks" not in one and " of 75.20 GiB usable on 80\n" in one
    assert "8 ranks: 1 x data, 8 x sequence (ring), ZeRO stage 2; the plan is that of each rank\n" in eight
    assert " of 75.20 GiB usable on each of 8 GPUs (80)\n" in eight and "a row of 8 ranks" in eight
    for text in (one, eight):
        assert abs(size(text, "weights,") + size(text, "activations and buffers") - size(text, "placed:")) < 0.02 * UNITS["GiB"]
    assert size(eight, "activations and buffers") < 0.15 * size(one, "activations and buffers")
    assert size(eight, "adamw m") < 0.13 * size(one, "adamw m")
    refused(command("sft", "--plan", **QWEN, ranks=8, ring_attn_size=3), "--ring_attn_size 3 does not divide 8 ranks")
    refused(command("sft", "--plan", **QWEN, ranks=4, ring_attn_size=4, sp_mode="ulysses"), "14 query heads cannot be dealt to 4 ranks")


def test_ranks_here_share_the_memory():
    text = plan(ranks=4, max_len=64)
    together = size(text, "4 ranks, which share the memory of this machine")
    assert abs(together - 4 * size(text, "placed:")) < 0.05 * UNITS["GiB"]
    needed = float(re.search(r"^(?:fits|does not fit): ([\d.]+) GiB", text, re.M)[1]) * UNITS["GiB"]
    assert abs(needed - together - size(text, "the process itself")) < 0.02 * UNITS["GiB"]


def tokens(cell):
    return 0 if cell == "none" else int(cell)


def fit(*flags, **options):
    """{ranks: [tokens with recompute none, cheap, layer]}, and which of them are marked."""
    text = plan("--fit", *flags, **options)
    lines = re.findall(r"^ +(\d+)" + 3 * r" +(\d+|none)([* ])" + "$", text, re.M)
    table = {int(ranks): [tokens(n) for n in cells[0::2]] for ranks, *cells in lines}
    return table, {n for _, *cells in lines for n, mark in zip(map(tokens, cells[0::2]), cells[1::2]) if mark == "*"}, text


def test_the_table_of_what_fits():
    table, marked, text = fit(gpu=24, dtype="bf16", ranks=6, zero_stage=2)
    assert list(table) == [1, 2, 4, 6] and "ZeRO stage 2" in text and "22.56 GiB for each rank, usable on 24\n" in text
    assert marked == {n for row in table.values() for n in row if n > 32768} and "max_position_embeddings, 32768" in text
    for row, next_row in zip(table.values(), list(table.values())[1:]):
        assert row == sorted(row) and all(a < b for a, b in zip(row, next_row))
    for ranks, row in table.items():  # it is the longest: one unit more does not fit
        for recompute, n in zip(("none", "cheap", "layer"), row):
            options = {"gpu": 24, "dtype": "bf16", "ranks": ranks, "ring_attn_size": ranks, "zero_stage": 2, "recompute": recompute}
            assert "\nfits: " in plan(max_len=n, **options), (ranks, recompute)
            assert "\ndoes not fit: " in plan(max_len=n + 64 * ranks, **options), (ranks, recompute)


def test_the_table_without_ranks_or_gpu():
    table, _, text = fit()
    assert list(table) == [1, 2, 4, 8] and "as this machine has alone" in text
    text = plan("--fit", ranks=4, sp_mode="ulysses", gpu=80)  # 14 heads
    assert re.findall(r"^ +(\d+) +(?:--sp_mode ulysses does not suit|\d+)", text, re.M) == ["1", "2", "4"]
    assert text.count("--sp_mode ulysses does not suit so many ranks") == 1
    refused(command("sft", "--fit", **QWEN, data="x", output_dir="y"), "--fit belongs to --plan")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.safetensors", random_documents(600))


def test_planned_memory_is_that_of_the_process(data, tmp_path):
    planned = {}
    for ranks in (1, 4):
        output = tmp_path / str(ranks)
        text = train(output, data=data, ranks=ranks, max_steps=1, train_batch_size=600, row_tokens=32768, recompute="none")
        first, step = log_lines(output)[:2]
        planned[ranks] = first["planned_peak_mem"], first["plan_bytes"]
        assert ", planned " in text
        print(f"\n  {ranks} ranks: peak {step['peak_mem'] >> 20} MiB, planned {planned[ranks][0] >> 20}, a plan {planned[ranks][1] >> 20}")
        assert abs(step["peak_mem"] - planned[ranks][0]) < 0.1 * planned[ranks][0]
    process = {ranks: all_ranks - ranks * each for ranks, (all_ranks, each) in planned.items()}
    assert 0 < process[4] < process[1] + (32 << 20)


def test_the_pieces_of_the_first_row(data, tmp_path):
    options = {"data": data, "max_steps": 2, "train_batch_size": 600, "row_tokens": 2048, "ranks": 4}
    text = train(tmp_path / "a", ring_attn_size=2, **options)
    table = re.search(r"^first row: (\d+) tokens, .*\nrank .*\n((?:[01] .*\n){2})", text, re.M)
    assert text.count("first row: ") == 1 and text.index("first row: ") < text.index("step 1/2")
    pieces = sorted(tuple(map(int, piece.split("-"))) for piece in re.findall(r"\d+-\d+", table[2]))
    assert pieces[0][0] == 0 and pieces[-1][1] == int(table[1]) - 1
    assert all(a[1] + 1 == b[0] for a, b in zip(pieces, pieces[1:]))
    assert "first row" not in train(tmp_path / "b", **options)  # each rank has rows of its own
