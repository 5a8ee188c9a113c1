"""Mixtures of experts in whole runs: files, ranks, stores, adapters and tasks. Their numbers are compared with transformers' in test/golden.h."""

import shutil

import numpy as np
import pytest
from runs import (
    DEMO, GOLDEN, OF_PAIRS, command, expect_resumed, log_lines, merging, model_with, near_weights, read_tensors, refused, same_run, succeeds, train,
    write_data, write_tensors)
from test_lora import eval_loss

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
MODEL = GOLDEN / "qwen2_moe"
RUN = dict(data=MODEL / "golden.safetensors", model=MODEL, max_len=128, train_batch_size=3, max_steps=3)
ROUTER = "model.layers.0.mlp.gate.weight"
EXPERT = "model.layers.0.mlp.experts.6.up_proj.weight"


def steps_of(output):
    return [line for line in log_lines(output) if "step" in line and "loss" in line]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "one"
    train(output, **RUN)
    return output


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_has_the_names_of_its_files(family, tmp_path):
    model = GOLDEN / family
    train(tmp_path / "out", **{**RUN, "model": model, "data": model / "golden.safetensors"})
    saved, before = read_tensors(tmp_path / "out/model.safetensors"), read_tensors(model / "model.safetensors")
    assert {name: values.shape for name, values in saved.items()} == {name: values.shape for name, values in before.items()}
    assert all((saved[name] != before[name]).any() for name in saved if ".gate.weight" in name)


@pytest.mark.parametrize("more", [{"ranks": 2, "zero_stage": 3}, {"ranks": 2, "ring_attn_size": 2}, {"recompute": "layer"}])
def test_every_split_trains_as_one_rank(more, one_rank, tmp_path):
    train(tmp_path / "out", **RUN, **more)
    near_weights(tmp_path / "out", one_rank)


def test_the_bits_are_those_of_a_run_in_memory(one_rank, tmp_path):
    train(tmp_path / "out", **RUN, offload="activations,optimizer,weights", offload_dir=tmp_path)
    same_run(tmp_path / "out", one_rank)


def test_a_resumed_run_ends_in_the_same_bits(tmp_path):
    expect_resumed(lambda output, **more: train(output, **RUN, **more), tmp_path, 2)


@pytest.mark.parametrize("task, more", [("grpo", {}), ("ppo", {"ranks": 2, "zero_stage": 3}),
                                        ("ppo", {"ranks": 7, "expert_parallel": 7, "zero_stage": 3}), ("grpo", {"lora_rank": 2, "load_in": "4bit", "kl_coef": 0.1})])
def test_answers_of_its_own_are_learned_from(task, more, tmp_path):
    model = model_with(tmp_path / "model", "qwen2_moe", eos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    random = np.random.default_rng(5)
    data = write_data(tmp_path / "prompts.safetensors", [(np.append(random.integers(4, 90, 5), [7]), np.array([0] * 5 + [1])) for _ in range(4)])
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(prompts, answers, labels):\n    return [len(a) for a in answers]\n")
    succeeds(command(task, model=model, data=data, reward=reward, output_dir=tmp_path / "out", max_len=64, rollout_batch_size=4, n=4, max_new_tokens=6,
                     train_batch_size=16, max_steps=2, temperature=1, router_aux_loss_coef=0.01, **more))
    for line in steps_of(tmp_path / "out"):
        assert line["grad_norm"] > 0 and np.isfinite(line["loss"]) and line["aux_loss"] > 3


def test_muon_updates_the_experts_and_not_the_router(tmp_path):
    train(tmp_path / "muon", **RUN, optimizer="muon")
    train(tmp_path / "adamw", **RUN)
    one, other, before = (read_tensors(directory / "model.safetensors") for directory in (tmp_path / "muon", tmp_path / "adamw", MODEL))
    moved = {name: np.abs(one[name] - before[name]).max() / np.abs(other[name] - before[name]).max() for name in (ROUTER, EXPERT)}
    assert moved[ROUTER] == pytest.approx(1, rel=0.5) and not moved[EXPERT] == pytest.approx(1, rel=0.5)


# ---- the auxiliary loss

def test_the_auxiliary_loss_is_of_the_whole_step(tmp_path):
    balanced = dict(RUN, train_batch_size=6, router_aux_loss_coef=0.5)
    train(tmp_path / "one", **balanced, row_tokens=128)
    train(tmp_path / "rows", **balanced, row_tokens=128, ranks=2)
    train(tmp_path / "plain", **dict(balanced, router_aux_loss_coef=0), row_tokens=128)
    near_weights(tmp_path / "rows", tmp_path / "one")
    one, rows, without = (steps_of(tmp_path / name) for name in ("one", "rows", "plain"))
    for a, b in zip(one, rows):
        assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=1e-5) and a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert one[0]["loss"] == pytest.approx(without[0]["loss"] + 0.5 * without[0]["aux_loss"], rel=1e-6)
    assert one[-1]["aux_loss"] < without[-1]["aux_loss"]


def test_config_json_asks_for_the_auxiliary_loss(tmp_path):
    model = model_with(tmp_path / "model", "qwen2_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    train(tmp_path / "file", **{**RUN, "model": model})
    train(tmp_path / "flag", **RUN, router_aux_loss_coef=0.5)
    train(tmp_path / "off", **{**RUN, "model": model}, router_aux_loss_coef=0)
    train(tmp_path / "plain", **RUN)
    same_run(tmp_path / "file", tmp_path / "flag")
    same_run(tmp_path / "off", tmp_path / "plain")


def test_the_log_has_the_loads(one_rank):
    line = steps_of(one_rank)[0]
    assert 0 <= line["expert_load_min"] < 1 < line["expert_load_max"] == max(line["expert_load_max_by_layer"])
    assert len(line["expert_load_max_by_layer"]) == 2 and 0 < line["router_entropy"] < np.log(7)
    assert line["aux_loss"] > 3  # which it is of equal loads


def test_a_dense_model_has_no_experts_to_balance(tmp_path):
    refused(command("sft", **{**RUN, "model": GOLDEN / "qwen3"}, output_dir=tmp_path / "out", router_aux_loss_coef=0.1), "no mixture of experts")


# ---- adapters

def test_adapters_are_of_attention_and_experts_may_be_quantised(tmp_path):
    lora = {"lora_rank": 2, "load_in": "4bit"}
    train(tmp_path / "out", **{**RUN, "max_steps": 6}, **lora)
    names = read_tensors(tmp_path / "out/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    lines = [line for line in log_lines(tmp_path / "out") if "step" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    succeeds(merging(model=MODEL, adapter=tmp_path / "out", output_dir=tmp_path / "merged", load_in="4bit", export_dtype="f32"))
    merged, before = read_tensors(tmp_path / "merged/model.safetensors"), read_tensors(MODEL / "model.safetensors")
    assert (merged[ROUTER] == before[ROUTER]).all() and (merged[EXPERT] != before[EXPERT]).any()
    of_merged = eval_loss(data=RUN["data"], model=tmp_path / "merged", max_len=128)
    assert of_merged == pytest.approx(eval_loss(data=RUN["data"], model=MODEL, adapter=tmp_path / "out", load_in="4bit", max_len=128), rel=1e-5)


ADAPTED = {**RUN, "lora_rank": 3, "lora_targets": "q_proj,gate_proj,up_proj,down_proj", "learning_rate": 1e-2, "max_steps": 4}


def adapters(output):
    return read_tensors(output / "adapter_model.safetensors")


def near_adapters(output, other):
    """Within a tenth of what one step of AdamW may change."""
    got, want = adapters(output), adapters(other)
    assert list(got) == list(want)
    assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-3


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "adapted"
    train(output, **ADAPTED)
    return output


def test_experts_have_adapters_on_request(adapted, tmp_path):
    tensors = adapters(adapted)
    layer = "base_model.model.model.layers.{}.mlp.{}.lora_{}.weight".format
    assert tensors[layer(2, "experts.6.up_proj", "A")].shape == (3, 24) and tensors[layer(2, "experts.6.down_proj", "B")].shape == (24, 3)
    assert tensors[layer(0, "shared_expert.gate_proj", "B")].shape == (16, 3) and tensors[layer(1, "down_proj", "A")].shape == (3, 32)
    assert len(tensors) == 2 * (3 + 2 * 3 * (7 + 1) + 3)  # three layers, of which one is dense
    assert log_lines(adapted)[0]["model"]["trained"] == sum(t.size for t in tensors.values())
    succeeds(merging(model=MODEL, adapter=adapted, output_dir=tmp_path / "merged", export_dtype="f32"))
    one, other = (eval_loss(data=RUN["data"], max_len=128, **more) for more in ({"model": tmp_path / "merged"}, {"model": MODEL, "adapter": adapted}))
    assert one == pytest.approx(other, rel=1e-6) and one < eval_loss(data=RUN["data"], model=MODEL, max_len=128) - 0.1


@pytest.mark.parametrize("more", [{"ranks": 2, "zero_stage": 1}, {"ranks": 2, "zero_stage": 3, "recompute": "layer"}, {"ranks": 2, "ring_attn_size": 2}])
def test_adapters_of_experts_on_ranks(more, adapted, tmp_path):
    train(tmp_path / "out", **ADAPTED, **more)
    near_adapters(tmp_path / "out", adapted)


@pytest.mark.parametrize("more", [{}, {"load_in": "8bit", "optimizer": "muon", "router_aux_loss_coef": 0.1}])
def test_adapters_of_experts_are_resumed(more, tmp_path):
    expect_resumed(lambda output, **saves: train(output, **ADAPTED, **more, **saves), tmp_path, 2)


def test_adapters_of_experts_beside_a_quantised_base(tmp_path):
    more = {"load_in": "4bit"}
    train(tmp_path / "out", **ADAPTED, **more)
    succeeds(merging(model=MODEL, adapter=tmp_path / "out", output_dir=tmp_path / "merged", export_dtype="f32", **more))
    of_merged = eval_loss(data=RUN["data"], model=tmp_path / "merged", max_len=128)
    assert of_merged == pytest.approx(eval_loss(data=RUN["data"], model=MODEL, adapter=tmp_path / "out", max_len=128, **more), rel=1e-5)


@pytest.mark.parametrize("more, parts", [
    ({"lora_targets": "q_proj,w1"}, ["--lora_targets has \"w1\"", "fix: all-linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"]),
    ({"lora_targets": "up_proj"}, ["one of the experts' gate and up projections", "fix: both"]),
    ({"lora_dropout": 0.1}, ["lora_dropout is 0.1, but in a mixture of experts", "fix: a lora_dropout of 0"]),
    ({"lora_rank": 9}, ["--lora_rank 9 is larger than gate_proj", "(8, 24)", "a rank of at most 8"])])
def test_adapters_of_experts_that_cannot_be(more, parts, tmp_path):
    refused(command("sft", **{**ADAPTED, **more}, output_dir=tmp_path / "out"), *parts)


@pytest.mark.parametrize("change, part", [
    (lambda tensors: {name: t for name, t in tensors.items() if ".experts.6." not in name}, "experts.6.gate_proj.lora_A.weight is missing"),
    (lambda tensors: {**tensors, **{name.replace(".6.", ".7."): t for name, t in tensors.items() if ".experts.6." in name}}, ".experts.7."),
    (lambda tensors: {name: t[:2] if ".experts.0.up_proj.lora_A" in name else t for name, t in tensors.items()}, "has (2, 24) and not (3, 24)")])
@pytest.mark.parametrize("task", ["eval", "merge", "sft"])
def test_adapters_of_other_experts_are_refused(task, change, part, adapted, tmp_path):
    other = shutil.copytree(adapted, tmp_path / "adapter")
    write_tensors(other / "adapter_model.safetensors", {name: np.ascontiguousarray(t) for name, t in change(adapters(other)).items()})
    words = {"merge": merging(model=MODEL, adapter=other, output_dir=tmp_path / "out"),
             "eval": command("eval", model=MODEL, adapter=other, data=RUN["data"], max_len=128),
             "sft": command("sft", **RUN, adapter=other, output_dir=tmp_path / "out")}[task]
    refused(words, part)


# ---- files

@pytest.mark.parametrize("change, parts", [
    (lambda tensors: tensors.pop(EXPERT), [f"has no tensor \"{EXPERT}\""]),
    (lambda tensors: tensors.update({ROUTER: tensors[ROUTER][:-1]}), [ROUTER, "(6, 24)", "(7, 24)"]),
    (lambda tensors: tensors.update({EXPERT.replace(".6.", ".7."): tensors[EXPERT]}), [EXPERT.replace(".6.", ".7."), "is not part of the model"]),
    (lambda tensors: tensors.update({EXPERT + "_scale_inv": tensors[EXPERT][:1]}), ["_scale_inv", "weights that are not quantised"]),
])
def test_files_that_do_not_fit_the_config(change, parts, tmp_path):
    model = model_with(tmp_path / "model", "qwen2_moe", change)
    refused(command("sft", **{**RUN, "model": model}, output_dir=tmp_path / "out"), *parts)


@pytest.mark.parametrize("words, changes, parts", [
    (["--fp8"], {}, ["--fp8", "this model has experts"]),
    (["--router_aux_loss_coef", "-0.5"], {}, ["--router_aux_loss_coef is -0.5 but must be -1"]),
    ([], {"output_router_logits": True, "router_aux_loss_coef": -1}, ["router_aux_loss_coef is -1"]),
])
def test_what_is_not_here_is_refused(words, changes, parts, tmp_path):
    model = model_with(tmp_path / "model", "qwen2_moe", **changes)
    refused(command("sft", *words, **{**RUN, "model": model}, output_dir=tmp_path / "out"), *parts)


def test_a_plan_tells_active_parameters():
    out = succeeds(command("sft", "--plan", model=None, preset="mixtral-8x7b", max_len=512, lora_rank=16, load_in="4bit", recompute="layer"))
    assert "a token goes to 2 of 8 experts: 12879925248 parameters are active" in out


# ---- expert parallelism

MIXTRAL = {**RUN, "model": GOLDEN / "mixtral", "data": GOLDEN / "mixtral/golden.safetensors"}  # 3 experts
DIVIDED = {"ranks": 6, "expert_parallel": 3}


@pytest.fixture(scope="module")
def one_rank_of_mixtral(tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "one"
    train(output, **MIXTRAL)
    return output


@pytest.mark.parametrize("more", [
    {"ranks": 3, "zero_stage": 0}, {"zero_stage": 1, "optimizer": "muon"}, {"zero_stage": 2, "ring_attn_size": 2}, {"zero_stage": 3, "recompute": "layer"},
    {"zero_stage": 3, "zero_group": 3, "ring_attn_size": 6}, {"zero_stage": 0, "offload": "activations,optimizer,weights", "offload_dir": "/tmp"},
    {"zero_stage": 2, "offload": "optimizer,weights", "offload_dir": "/tmp"}])
def test_divided_experts_train_and_are_saved_as_on_one_rank(more, one_rank_of_mixtral, tmp_path):
    want = one_rank_of_mixtral
    if "optimizer" in more:
        want = tmp_path / "one"
        train(want, **MIXTRAL, optimizer="muon")
    train(tmp_path / "out", **{**MIXTRAL, **DIVIDED, **more})
    near_weights(tmp_path / "out", want)
    assert all(line["sent_experts"] > 0 for line in log_lines(tmp_path / "out") if "loss" in line)


def test_checkpoints_of_divided_experts_are_resumed_with_any_number(tmp_path):
    run = {**MIXTRAL, "save_steps": 2, "max_steps": 4}
    for stage in (0, 1, 3):
        straight = tmp_path / f"straight{stage}"
        train(straight, **{**run, **DIVIDED, "zero_stage": stage, "dtype": "f32"})
        for name, more in {"again": {}, "whole": {"expert_parallel": 1}, "one": {"ranks": 1, "expert_parallel": 1}, "three": {"ranks": 3, "zero_stage": 2}}.items():
            output = shutil.copytree(straight, tmp_path / f"{name}{stage}")
            train(output, **{**run, **DIVIDED, "zero_stage": stage, **more, "resume": output / "step_2"})
            (same_run if name == "again" else near_weights)(output, straight)
    train(tmp_path / "one", **run)
    output = shutil.copytree(tmp_path / "one", tmp_path / "from one")
    train(output, **{**run, **DIVIDED, "resume": output / "step_2"})
    near_weights(output, tmp_path / "one")


@pytest.mark.parametrize("task, more", [("dpo", {"ref_mode": "resident", "ref_model": GOLDEN / "mixtral"}), ("dpo", {"lora_rank": 2}), ("rm", {})])
def test_preferences_with_divided_experts(task, more, tmp_path):
    run = {**MIXTRAL, **OF_PAIRS, "max_len": 128, "ref_model": None, **more}
    train(tmp_path / "one", task=task, **run)
    train(tmp_path / "out", task=task, **run, **DIVIDED)
    losses = [[line["loss"] for line in log_lines(tmp_path / name) if "loss" in line] for name in ("one", "out")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("more", [{"zero_stage": 0}, {"zero_stage": 2, "recompute": "layer"}, {"zero_stage": 1, "ring_attn_size": 2, "optimizer": "muon"}])
def test_adapters_of_divided_experts(more, tmp_path):
    lora = {**MIXTRAL, "lora_rank": 2, "lora_targets": "q_proj,w1,w2,w3", "learning_rate": 1e-2}
    train(tmp_path / "one", **lora, optimizer=more.get("optimizer"))
    train(tmp_path / "out", **lora, **DIVIDED, **more)
    near_adapters(tmp_path / "out", tmp_path / "one")
    assert all(line["sent_experts"] > 0 for line in log_lines(tmp_path / "out") if "loss" in line)


def test_checkpoints_of_adapters_of_divided_experts(tmp_path):
    lora = {**MIXTRAL, "lora_rank": 2, "lora_targets": "w1,w2,w3", "save_steps": 2, "max_steps": 4}
    train(tmp_path / "straight", **lora, **DIVIDED)
    for name, more in {"again": DIVIDED, "one": {}, "two": {"ranks": 2, "zero_stage": 2}}.items():
        output = shutil.copytree(tmp_path / "straight", tmp_path / name)
        train(output, **lora, **more, resume=output / "step_2")
        near_adapters(output, tmp_path / "straight")


@pytest.mark.parametrize("more, parts", [
    ({"ranks": 4, "expert_parallel": 4}, ["--expert_parallel 4 does not divide 3 experts", "one of 1, which divide 4 ranks and 3 experts"]),
    ({"ranks": 4, "expert_parallel": 3}, ["--expert_parallel 3 does not divide 4 ranks", "one of 1,"]),
    ({"ranks": 1, "expert_parallel": 3}, ["--expert_parallel 3 does not divide 1 rank\n", "one of 1, which divide 1 rank and 3 experts"]),
    ({"model": GOLDEN / "qwen3", "ranks": 2, "expert_parallel": 2}, ["--expert_parallel 2 divides experts, and this model has none", "leave it out"])])
def test_numbers_that_divide_no_experts_are_refused(more, parts, tmp_path):
    refused(command("sft", **{**MIXTRAL, **more}, output_dir=tmp_path / "out"), *parts)
