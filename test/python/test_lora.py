"""Whole runs with adapters on the tiny models of test/golden: files, tasks, ranks, merging, and quantised bases. test_lora.cpp compares losses and
gradients with PEFT."""

import json
import re
import shutil

import numpy as np
import pytest
from runs import GOLDEN, OF_PAIRS, PAIRS, call, command, first_step, log_lines, merging, read_tensors, refused, stable, succeeds, train

MODEL, LORA = GOLDEN / "qwen3", {"lora_rank": 4, "learning_rate": 1e-2}
WHOLE = {"lora_modules_to_save": "embed_tokens,lm_head"}  # tied in this model, and untied by training


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "adapter"
    train(output, data=data, max_epochs=2, **LORA)
    return output


def eval_loss(*flags, **options):
    said = succeeds(command("eval", *flags, **{"max_len": 64, **options}))
    return float(re.match(r"loss ([\d.]+)", said.splitlines()[-1])[1])


def losses(output):
    return [line["loss"] for line in stable(log_lines(output))]


def test_an_adapter_has_the_files_of_peft(data, trained):
    config = json.loads((trained / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 16)
    assert config["base_model_name_or_path"] == str(MODEL) and "q_proj" in config["target_modules"]
    tensors = read_tensors(trained / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    assert tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (32, 4)
    assert not (trained / "model.safetensors").exists() and not (trained / "config.json").exists()
    assert log_lines(trained)[0]["model"]["trained"] == sum(t.size for t in tensors.values())
    assert eval_loss(data=data, adapter=trained) < eval_loss(data=data) - 0.2


def test_a_merged_model_is_the_adapted_one(data, trained, tmp_path):
    succeeds(merging(adapter=trained, output_dir=tmp_path / "merged"))
    assert abs(eval_loss(data=data, model=tmp_path / "merged") - eval_loss(data=data, adapter=trained)) < 2e-6
    before, after = read_tensors(MODEL / "model.safetensors"), read_tensors(tmp_path / "merged/model.safetensors")
    assert set(before) == set(after)
    assert {name.split(".", 3)[-1] for name in before if (before[name] != after[name]).any()} == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"), *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))}


def test_modules_trained_in_full_are_saved_as_in_peft(data, tmp_path):
    """A second run starts from the adapter and these modules."""
    train(tmp_path / "out", data=data, max_epochs=1, **WHOLE, **LORA)
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["modules_to_save"] == ["embed_tokens", "lm_head"]
    tensors, base = read_tensors(tmp_path / "out/adapter_model.safetensors"), read_tensors(MODEL / "model.safetensors")["model.embed_tokens.weight"]
    own = [tensors[f"base_model.model.{name}.weight"] for name in ("model.embed_tokens", "lm_head")]
    assert all(t.shape == base.shape and (t != base).any() for t in own) and (own[0] != own[1]).any()
    assert log_lines(tmp_path / "out")[0]["model"]["trained"] == sum(t.size for t in tensors.values())
    adapted = eval_loss(data=data, adapter=tmp_path / "out")
    assert adapted < eval_loss(data=data) - 0.2
    succeeds(merging(adapter=tmp_path / "out", output_dir=tmp_path / "merged"), quiet=False)
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"] is False
    assert abs(eval_loss(data=data, model=tmp_path / "merged") - adapted) < 2e-6
    train(tmp_path / "on", data=data, adapter=tmp_path / "out", max_steps=1, learning_rate=1e-12)
    after = read_tensors(tmp_path / "on/adapter_model.safetensors")
    assert list(after) == list(tensors) and all(np.allclose(after[name], tensors[name], atol=1e-9) for name in tensors)


# ---- tasks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"dtype": "bf16"}, {"ref_mode": "resident", "load_in": "4bit", **WHOLE}])
def test_the_base_serves_as_the_reference(tmp_path, more):
    """The results equal those with the base as a second model, which is also quantised."""
    options = dict(task="dpo", max_steps=4, **more, **OF_PAIRS, **LORA)
    train(tmp_path / "own", **options)
    first = first_step(tmp_path / "own")
    assert first["rewards/margins"] == 0 and first["rewards/chosen"] == 0 and losses(tmp_path / "own")[-1] < 0.6
    train(tmp_path / "second", ref_model=MODEL, **options)
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "second"), rel=1e-6)
    plans = [succeeds(command("dpo", "--plan", ref_mode="resident", max_len=64, lora_rank=4, ref_model=model)) for model in (None, MODEL)]
    assert ["the reference model, resident" in plan for plan in plans] == [False, True]


def test_the_reference_of_dpo_from_an_adapter_has_that_adapter(trained, tmp_path):
    train(tmp_path / "dpo", task="dpo", max_steps=1, adapter=trained, ref_mode="resident", **OF_PAIRS)
    assert first_step(tmp_path / "dpo")["rewards/margins"] == 0


def test_a_reward_model_keeps_its_head(tmp_path):
    train(tmp_path / "rm", task="rm", max_steps=6, **OF_PAIRS, **LORA)
    assert losses(tmp_path / "rm")[-1] < losses(tmp_path / "rm")[0]
    config = json.loads((tmp_path / "rm/adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert read_tensors(tmp_path / "rm/adapter_model.safetensors")["base_model.model.score.weight"].shape == (1, 32)
    adapted = eval_loss(data=PAIRS, adapter=tmp_path / "rm", row_tokens=128)
    succeeds(merging(adapter=tmp_path / "rm", output_dir=tmp_path / "merged"))
    assert abs(eval_loss(data=PAIRS, model=tmp_path / "merged", row_tokens=128) - adapted) < 1e-5


# ---- a quantised base ---------------------------------------------------------------------------------------------------------------


def test_adapters_learn_with_a_quantised_base_and_merge_with_its_values(data, tmp_path):
    train(tmp_path / "out", data=data, max_epochs=2, load_in="4bit", **LORA)
    base = {bits: eval_loss(data=data, load_in=bits) for bits in (None, "8bit", "4bit")}
    assert 0 < abs(base["8bit"] - base[None]) < abs(base["4bit"] - base[None]) < 0.2
    adapted = eval_loss(data=data, adapter=tmp_path / "out", load_in="4bit")
    assert adapted < base["4bit"] - 0.2
    for load_in in ("4bit", None):
        merged = tmp_path / f"merged_{load_in}"
        succeeds(merging(adapter=tmp_path / "out", output_dir=merged, load_in=load_in))
        difference = abs(eval_loss(data=data, model=merged) - adapted)
        assert difference < 2e-6 if load_in else difference > 1e-4


LAYERS_OF_8B = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)


@pytest.mark.parametrize("bits, bytes_each", [("4bit", 0.5 + 1 / 64 + 4 / (64 * 256)), ("8bit", 1 + 7 * 4 / 4096 / 7)])
def test_the_plan_of_a_quantised_model(bits, bytes_each):
    plan = call(command("sft", "--plan", model=None, preset="llama3-8b", dtype="bf16", lora_rank=16, max_len=4096, load_in=bits)).stdout
    lines = re.findall(r"^weights(?: in . bits|, magnitudes of blocks|, scales) .* ([\d.]+) ([GMK]iB)$", plan, re.M)
    size = sum(float(n) * {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit] for n, unit in lines)
    assert len(lines) >= 2 and size / LAYERS_OF_8B == pytest.approx(bytes_each, rel=0.01)


# ---- merges that are refused or interrupted -----------------------------------------------------------------------------------------


def test_wrong_merges(trained, tmp_path):
    refused(merging(output_dir=tmp_path), "merge needs --adapter DIR")
    model = shutil.copytree(MODEL, tmp_path / "model")
    for words in ([], ["--overwrite"]):
        for output in (model, tmp_path, f"{tmp_path}/", model / ".."):
            refused(merging(*words, model=model, adapter=trained, output_dir=output), "holds files that no run wrote")
        refused(merging(*words, model=model, adapter=trained, output_dir=trained), "is the directory of --adapter itself")
    assert (model / "config.json").read_bytes() == (MODEL / "config.json").read_bytes()
    refused(merging(adapter=GOLDEN / "lora_mistral", output_dir=tmp_path / "out"), "so it belongs to another model than")


def test_an_interrupted_merge_can_be_repeated(trained, tmp_path):
    out = tmp_path / "out"
    (out / "new_model").mkdir(parents=True)
    (out / "new_model" / "config.json").write_text("{")
    (out / "run_files.json").write_text('{"written": ["new_model/"]}')
    for expected in (0, 1):  # the second merge finds a model
        assert call(merging(adapter=trained, output_dir=out)).returncode == expected
    assert not (out / "new_model").exists() and json.loads((out / "config.json").read_text())
