"""--profile: the table at the end of a run, which must not change the run."""

import json
import math
import re

import pytest
from test_runs import GOLDEN, command, log_lines, random_documents, refused, refused_training, train, weights, write_data

LENGTHS = [len(ids) for ids, _ in random_documents(23)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.safetensors", random_documents(23))


def model_flops(model):
    """Of all documents once, from config.json alone."""
    c = json.loads((GOLDEN / model / "config.json").read_text())
    C, L, H, KV, F = (c[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"))
    D = c.get("head_dim") or C // H
    matrices = L * (C * D * (H + 2 * KV) + C * D * H + 3 * C * F) + c["vocab_size"] * C
    window = c.get("sliding_window") or max(LENGTHS)
    pairs = sum(min(query + 1, window) for n in LENGTHS for query in range(n))
    return 6 * sum(LENGTHS) * matrices + 12 * L * pairs * H * D


def read_table(text):
    """{(op, pass): (times a step, ms a step)}, and the figures of the last line."""
    ops = {}
    for line in text[text.index("profile of"):].splitlines():
        if found := re.fullmatch(r"(\S+(?: \S+)*?) +(forward|both|recompute|backward|) +([\d.]+) +([\d.]+) +([\d.]+)%.*", line):
            ops[found[1], found[2]] = float(found[3]), float(found[4])
    step, flops = re.search(r"a step: ([\d.]+) ms on the host's clock, (\S+) model TFLOP", text).groups()
    return ops, float(step), float(flops) * 1e12


@pytest.mark.parametrize("model", ["qwen3", "mistral"])  # mistral: a sliding window in all layers
def test_the_table(model, data, tmp_path):
    options = {"model": GOLDEN / model, "data": data, "max_steps": 3, "train_batch_size": 23, "row_tokens": 2048, "recompute": "layer"}
    text = train(tmp_path / "a", "--profile", **options)
    ops, step, flops = read_table(text)
    assert "profile of 2 steps" in text
    layers = json.loads((GOLDEN / model / "config.json").read_text())["num_hidden_layers"]
    layer = ["norm 1", "qkv", "rope", "attention", "proj", "norm 2", "up", "activation", "down"]
    wanted = {(op, which): layers for op in layer for which in ("forward", "recompute", "backward")}
    del wanted["attention", "recompute"], wanted["down", "recompute"]
    wanted |= {("embedding", "forward"): 1, ("embedding", "backward"): 1, ("final norm", "forward"): 1, ("final norm", "backward"): 1}
    wanted |= {("head, loss", "both"): 1, ("copies", ""): 2, ("zero gradients", ""): 1, ("gradient norm", ""): 1, ("optimizer", ""): 1}
    _, all_ms = ops.pop(("all", ""))
    assert {op: times for op, (times, _) in ops.items()} == wanted
    assert math.isclose(sum(ms for _, ms in ops.values()), all_ms, abs_tol=0.001 * len(ops))
    assert 0 < all_ms <= step + 0.001
    assert math.isclose(flops, model_flops(model), rel_tol=1e-5)

    without = train(tmp_path / "b", **options)
    assert "profile" not in without
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_evaluations_are_not_counted(data, tmp_path):
    options = {"data": data, "max_steps": 2, "train_batch_size": 23, "row_tokens": 2048, "recompute": "none", "eval_data": data, "eval_steps": 1}
    ops, _, _ = read_table(train(tmp_path / "a", "--profile", **options))
    assert ops["head, loss", "both"][0] == 1 and ("head, loss", "forward") not in ops
    assert not any(which == "recompute" for _, which in ops)
    assert sum("eval_loss" in line for line in log_lines(tmp_path / "a")) == 2


@pytest.mark.parametrize("stage, sums", [(1, 4), (2, 10)])  # the embedding, which is also the head; 2 layers; the final norm
def test_what_goes_among_ranks(stage, sums, data, tmp_path):
    options = {"data": data, "max_steps": 2, "train_batch_size": 23, "row_tokens": 2048, "ranks": 2, "ring_attn_size": 2, "zero_stage": stage}
    ops, _, _ = read_table(train(tmp_path / "a", "--profile", **options))
    assert ops["gradient sum", "backward"][0] == sums  # at stage 2 its buffer is made ready before, too
    assert ops["fetch params", "forward"][0] == 5  # 2 layers, the final norm, the embedding as itself and as head


def test_what_cannot_be_profiled(data, tmp_path):
    refused_training(data, tmp_path / "a", "--profile", "--debug", words=["--profile", "--debug"])
    refused(command("eval", "--profile", data=data), "--profile", "not to eval")
