"""Mixtures of experts in whole runs: the auxiliary loss, files, and plans. test/golden.h compares the numbers with
transformers; test_same_bits.py and test_ranks.cpp compare ranks with one rank."""

import numpy as np
import pytest
from runs import (
    GOLDEN, command, log_lines, model_with, read_tensors, refused, succeeds, train)

MODEL = GOLDEN / "qwen2_moe"
RUN = dict(data=MODEL / "golden.safetensors", model=MODEL, max_len=128, train_batch_size=3, max_steps=3)
ROUTER = "model.layers.0.mlp.gate.weight"
EXPERT = "model.layers.0.mlp.experts.6.up_proj.weight"


def steps_of(output):
    return [line for line in log_lines(output) if "step" in line and "loss" in line]


def test_muon_updates_the_experts_and_not_the_router(tmp_path):
    train(tmp_path / "muon", **RUN, optimizer="muon")
    train(tmp_path / "adamw", **RUN)
    one, other, before = (read_tensors(directory / "model.safetensors") for directory in (tmp_path / "muon", tmp_path / "adamw", MODEL))
    moved = {name: np.abs(one[name] - before[name]).max() / np.abs(other[name] - before[name]).max() for name in (ROUTER, EXPERT)}
    assert moved[ROUTER] == pytest.approx(1, rel=0.5) and not moved[EXPERT] == pytest.approx(1, rel=0.5)


def test_the_auxiliary_loss_covers_the_whole_step(tmp_path):
    """The coefficient comes from a flag or from config.json, and the loss does not depend on the rows. The log has the loads of the experts."""
    balanced = dict(RUN, train_batch_size=6, row_tokens=128)
    of_config = model_with(tmp_path / "model", "qwen2_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    train(tmp_path / "one", **balanced, router_aux_loss_coef=0.5)
    train(tmp_path / "rows", **{**balanced, "model": of_config}, ranks=2)
    train(tmp_path / "plain", **{**balanced, "model": of_config}, router_aux_loss_coef=0)
    one, rows, without = (steps_of(tmp_path / name) for name in ("one", "rows", "plain"))
    for a, b in zip(one, rows):
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=1e-5) and a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert one[0]["loss"] == pytest.approx(without[0]["loss"] + 0.5 * without[0]["aux_loss"], rel=1e-6)
    assert one[-1]["aux_loss"] < without[-1]["aux_loss"]
    line = one[0]
    assert 0 <= line["expert_load_min"] < 1 < line["expert_load_max"] == max(line["expert_load_max_by_layer"])
    assert len(line["expert_load_max_by_layer"]) == 2 and 0 < line["router_entropy"] < np.log(7)
    assert line["aux_loss"] > 3  # the value for equal loads


@pytest.mark.parametrize("change, parts", [
    (lambda tensors: tensors.pop(EXPERT), [f"has no tensor \"{EXPERT}\""]),
    (lambda tensors: tensors.update({ROUTER: tensors[ROUTER][:-1]}), [ROUTER, "(6, 24)", "(7, 24)"]),
    (lambda tensors: tensors.update({EXPERT.replace(".6.", ".7."): tensors[EXPERT]}), [EXPERT.replace(".6.", ".7."), "is not part of the model"])])
def test_files_that_do_not_fit_the_config(change, parts, tmp_path):
    model = model_with(tmp_path / "model", "qwen2_moe", change)
    refused(command("sft", **{**RUN, "model": model}, output_dir=tmp_path / "out"), *parts)


def test_a_plan_counts_active_parameters():
    out = succeeds(command("sft", "--plan", model=None, preset="mixtral-8x7b", max_len=512, lora_rank=16, load_in="4bit", recompute="layer"))
    assert "a token goes to 2 of 8 experts: 12879925248 parameters are active" in out
