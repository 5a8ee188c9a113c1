"""--profile prints a table at the end of a run, and changes no bit of the run."""

import re

from runs import log_lines, near, train, weights


def read_table(text):
    """{(op, pass): (times per step, ms per step)}, and the ms of a step in the last line."""
    ops = {}
    for line in text[text.index("profile of"):].splitlines():
        if found := re.fullmatch(r"(\S+(?: \S+)*?) +(forward|both|recompute|backward|) +([\d.]+) +([\d.]+) +([\d.]+)%.*", line):
            ops[found[1], found[2]] = float(found[3]), float(found[4])
    step, flops = re.search(r"a step: ([\d.]+) ms on the host's clock, (\S+) model TFLOP", text).groups()
    assert float(flops) > 0
    return ops, float(step)


def test_the_table(data, tmp_path):
    """Evaluations are not part of it."""
    options = {"data": data, "max_steps": 3, "row_tokens": 256, "recompute": "layer", "eval_data": data, "eval_steps": 1}
    text = train(tmp_path / "a", "--profile", **options)
    ops, step = read_table(text)
    assert "profile of 2 steps" in text and sum("eval_loss" in line for line in log_lines(tmp_path / "a")) == 3
    _, all_ms = ops.pop(("all", ""))
    near(sum(ms for _, ms in ops.values()), all_ms, 0, 0.001 * len(ops))
    assert 0 < all_ms <= step + 0.001
    layer = ["norm 1", "qkv", "rope", "attention", "proj", "norm 2", "up", "activation", "down"]
    wanted = {(op, which): 2 for op in layer for which in ("forward", "backward")} | {("up", "recompute"): 2, ("optimizer", ""): 1}
    assert {op: times for op, (times, _) in ops.items() if op in wanted} == wanted and ("down", "recompute") not in ops

    assert "profile" not in train(tmp_path / "b", **options)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_messages_between_ranks(data, tmp_path):
    options = {"data": data, "max_steps": 2, "row_tokens": 256, "ranks": 2, "ring_attn_size": 2, "zero_stage": 2}
    ops, _ = read_table(train(tmp_path / "a", "--profile", **options))
    assert ops["gradient sum", "backward"][0] == 10  # the embedding and head; 2 layers; the final norm; and waits for their buffers
    assert ops["fetch params", "forward"][0] == 5  # 2 layers, the final norm, the embedding twice: also as the head
