"""Whole runs with adapters on the tiny models of test/golden: files, tasks, ranks, merging, and quantised bases. test_lora.cpp compares losses and
gradients with PEFT."""

import json
import re
import shutil

import numpy as np
import pytest
from runs import (GOLDEN, OF_PAIRS, PAIRS, ROOT, call, command, first_step, log_lines, merging, model_with, read_lines, read_tensors, refused, stable,
                  succeeds, train, write_tensors)

LORA = {"lora_rank": 4, "learning_rate": 1e-2}
WHOLE = {"lora_modules_to_save": "embed_tokens,lm_head"}  # tied in this model, and untied by training
MOE = {"model": GOLDEN / "qwen2_moe", "data": GOLDEN / "qwen2_moe/golden.safetensors", "max_len": 128, "train_batch_size": 3}
OF_EXPERTS = {**MOE, "lora_rank": 3, "lora_targets": "q_proj,gate_proj,up_proj,down_proj"}


def eval_loss(*flags, **options):
    said = succeeds(command("eval", *flags, **{"max_len": 64, **options}))
    return float(re.match(r"loss ([\d.]+)", said.splitlines()[-1])[1])


def losses(output):
    return [line["loss"] for line in stable(log_lines(output))]


ATTENTION, MLP, OF_GPT2 = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"c_attn", "c_proj", "c_fc"}
ADAPTERS = {  # options; modules in the file; their number, and some shapes; fields of adapter_config.json; the error of a merged model's loss
    "all matrices of the layers": ({}, ATTENTION | MLP, 28, {"model.layers.1.self_attn.k_proj.lora_B": (32, 4)}, {"task_type": "CAUSAL_LM"}, 2e-6),
    "modules in full": (WHOLE, ATTENTION | MLP | {"embed_tokens", "lm_head"}, 30, {"model.embed_tokens": (96, 32), "lm_head": (96, 32)},
                        {"modules_to_save": ["embed_tokens", "lm_head"]}, 2e-6),
    "4 bits": ({"load_in": "4bit"}, ATTENTION | MLP, 28, {}, {}, 2e-6),
    "GPT-2, 4 bits": ({"program": ROOT / "train_gpt2", "model": GOLDEN / "gpt2", "load_in": "4bit"}, OF_GPT2, 16, {}, {"fan_in_fan_out": True}, 2e-6),
    "a reward model": ({"task": "rm", **OF_PAIRS, "max_epochs": 6}, ATTENTION | MLP | {"score"}, 29, {"score": (1, 32)},
                       {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}, 1e-5),
    "attention beside experts of 4 bits": ({**MOE, "load_in": "4bit", "max_epochs": 3}, ATTENTION, 24, {}, {}, 5e-5),
    "experts": ({**OF_EXPERTS, "max_epochs": 2}, {"q_proj"} | MLP, 2 * (3 + 2 * 3 * (7 + 1) + 3),  # two layers with experts and a dense one
                {"model.layers.2.mlp.experts.6.up_proj.lora_A": (3, 24), "model.layers.2.mlp.experts.6.down_proj.lora_B": (24, 3),
                 "model.layers.0.mlp.shared_expert.gate_proj.lora_B": (16, 3), "model.layers.1.mlp.down_proj.lora_A": (3, 32)}, {}, 5e-6),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, data, tmp_path):
    """The files are those of PEFT, the loss falls, and the merged model equals the model with the adapter."""
    more, modules, number, shapes, config, error = ADAPTERS[name]
    options = {"model": GOLDEN / "qwen3", "data": data, "max_len": 64, "max_epochs": 2, **LORA, **more}
    out, merged = tmp_path / "out", tmp_path / "merged"
    train(out, **options)
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists()
    config = {"peft_type": "LORA", "r": options["lora_rank"], "base_model_name_or_path": str(options["model"])} | config
    assert json.loads((out / "adapter_config.json").read_text()).items() >= config.items()
    tensors = read_tensors(out / "adapter_model.safetensors")
    assert {key.removesuffix(".weight").replace(".lora_A", "").replace(".lora_B", "").split(".")[-1] for key in tensors} == modules
    assert len(tensors) == number and shapes == {key: tensors[f"base_model.model.{key}.weight"].shape for key in shapes}
    assert log_lines(out)[0]["model"]["trained"] == sum(t.size for t in tensors.values()) and losses(out)[-1] < losses(out)[0] - 0.1

    both = {"data": options["data"], "max_len": options["max_len"], "row_tokens": 128, "program": more.get("program")}
    succeeds(merging(model=options["model"], adapter=out, output_dir=merged, load_in=more.get("load_in"), export_dtype="f32", program=both["program"]))
    adapted = eval_loss(model=options["model"], adapter=out, load_in=more.get("load_in"), **both)
    assert abs(eval_loss(model=merged, **both) - adapted) < error
    before, after = read_tensors(options["model"] / "model.safetensors"), read_tensors(merged / "model.safetensors")
    changed = {key.split(".")[-2] for key in before if (before[key] != after[key]).any()}
    assert changed == (ATTENTION | MLP | OF_GPT2 if "load_in" in more else modules) & {key.split(".")[-2] for key in before}
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] == ("lm_head.weight" not in after and "score.weight" not in after)


def test_training_continues_from_an_adapter(tmp_path):
    adapter, model = GOLDEN / "lora_modules", GOLDEN / "llama3"
    train(tmp_path / "on", model=model, data=model / "golden.safetensors", max_len=128, adapter=adapter, max_steps=1, learning_rate=1e-12)
    before, after = (read_tensors(directory / "adapter_model.safetensors") for directory in (adapter, tmp_path / "on"))
    assert set(after) == set(before) and all(np.allclose(after[name], before[name], atol=1e-6) for name in before)


def test_an_adapter_without_a_head_uses_that_of_its_model(tmp_path):
    """As PEFT and merge do. PEFT saves no head with an adapter whose task_type is null; it is random only if neither file has one."""
    head, scores = np.linspace(-1, 1, 32, dtype=np.float32)[None], {}
    model = model_with(tmp_path / "model", change=lambda tensors: tensors.update({"score.weight": head}), num_labels=1,
                       architectures=["Qwen3ForSequenceClassification"])
    succeeds(merging(model=model, adapter=GOLDEN / "lora_qwen3", output_dir=tmp_path / "merged", export_dtype="f32"))
    for name, words in {"adapter": {"model": model, "adapter": GOLDEN / "lora_qwen3"}, "merged": {"model": tmp_path / "merged"}}.items():
        succeeds(command("eval", data=PAIRS, max_len=64, row_tokens=128, scores=tmp_path / f"{name}.jsonl", **words))
        scores[name] = [line["score"] for line in read_lines(tmp_path / f"{name}.jsonl")]
    assert scores["adapter"] == pytest.approx(scores["merged"], abs=1e-5)
    said = train(tmp_path / "on", task="rm", model=model, adapter=GOLDEN / "lora_qwen3", max_steps=1, **{**OF_PAIRS, "learning_rate": 1e-12})
    after = read_tensors(tmp_path / "on/adapter_model.safetensors")["base_model.model.score.weight"]
    assert np.allclose(after, head, atol=1e-6) and "random" not in said


@pytest.mark.parametrize("task, change, part", [
    ("eval", lambda tensors: {name: t for name, t in tensors.items() if ".experts.2." not in name}, "experts.2.w1.lora_A.weight is missing"),
    ("merge", lambda tensors: {**tensors, **{name.replace(".2.", ".3."): t for name, t in tensors.items() if ".experts.2." in name}}, ".experts.3."),
    ("sft", lambda tensors: {name: t[:1] if ".experts.0.w3.lora_A" in name else t for name, t in tensors.items()}, "has (1, 24) and not (2, 24)")])
def test_adapters_that_do_not_fit_are_refused(task, change, part, tmp_path):
    other, model = shutil.copytree(GOLDEN / "lora_mixtral", tmp_path / "adapter"), GOLDEN / "mixtral"
    write_tensors(other / "adapter_model.safetensors", change(read_tensors(other / "adapter_model.safetensors")))
    words = {"merge": merging(model=model, adapter=other, output_dir=tmp_path / "out"),
             "eval": command("eval", model=model, adapter=other, data=model / "golden.safetensors", max_len=128),
             "sft": command("sft", model=model, adapter=other, data=model / "golden.safetensors", max_len=128, output_dir=tmp_path / "out")}[task]
    refused(words, part)


# ---- tasks --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"dtype": "bf16", "share_prompts": "false"}, {"ref_mode": "resident", "load_in": "4bit", **WHOLE}])
def test_the_base_serves_as_the_reference(tmp_path, more):
    """The results equal those with the base as a second model, which is also quantised."""
    options = dict(task="dpo", max_steps=4, **more, **OF_PAIRS, **LORA)
    train(tmp_path / "own", **options)
    first = first_step(tmp_path / "own")
    assert first["rewards/margins"] == 0 and first["rewards/chosen"] == 0 and losses(tmp_path / "own")[-1] < 0.6
    train(tmp_path / "second", ref_model=GOLDEN / "qwen3", **options)
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "second"), rel=1e-6)
    plans = [succeeds(command("dpo", "--plan", ref_mode="resident", max_len=64, lora_rank=4, ref_model=model)) for model in (None, GOLDEN / "qwen3")]
    assert ["the reference model, resident" in plan for plan in plans] == [False, True]


def test_the_reference_of_dpo_from_an_adapter_has_that_adapter(tmp_path):
    train(tmp_path / "dpo", task="dpo", max_steps=1, adapter=GOLDEN / "lora_qwen3", ref_mode="resident", **OF_PAIRS)
    assert first_step(tmp_path / "dpo")["rewards/margins"] == 0


# ---- a quantised base ---------------------------------------------------------------------------------------------------------------


def test_the_losses_of_quantised_bases(data, tmp_path):
    """8 bits are nearer than 4. An adapter merged into the base without quantisation has another loss."""
    base = {bits: eval_loss(data=data, load_in=bits) for bits in (None, "8bit", "4bit")}
    assert 0 < abs(base["8bit"] - base[None]) < abs(base["4bit"] - base[None]) < 0.2
    succeeds(merging(adapter=GOLDEN / "lora_qwen3", output_dir=tmp_path / "merged"))
    quantised = eval_loss(data=data, adapter=GOLDEN / "lora_qwen3", load_in="4bit")
    assert abs(eval_loss(data=data, model=tmp_path / "merged") - quantised) > 1e-4


LAYERS_OF_8B = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)


@pytest.mark.parametrize("bits, bytes_each", [("4bit", 0.5 + 1 / 64 + 4 / (64 * 256)), ("8bit", 1 + 7 * 4 / 4096 / 7)])
def test_the_plan_of_a_quantised_model(bits, bytes_each):
    plan = call(command("sft", "--plan", model=None, preset="llama3-8b", dtype="bf16", lora_rank=16, max_len=4096, load_in=bits)).stdout
    lines = re.findall(r"^weights(?: in . bits|, magnitudes of blocks|, scales) .* ([\d.]+) ([GMK]iB)$", plan, re.M)
    size = sum(float(n) * {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit] for n, unit in lines)
    assert len(lines) >= 2 and size / LAYERS_OF_8B == pytest.approx(bytes_each, rel=0.01)


# ---- merges that are refused or interrupted -----------------------------------------------------------------------------------------


def test_wrong_merges(tmp_path):
    refused(merging(output_dir=tmp_path), "merge needs --adapter DIR")
    model, adapter = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model"), shutil.copytree(GOLDEN / "lora_qwen3", tmp_path / "adapter")
    (adapter / "run_files.json").write_text(json.dumps({"written": [path.name for path in adapter.iterdir()]}))
    for words in ([], ["--overwrite"]):
        for output in (model, tmp_path, f"{tmp_path}/", model / ".."):
            refused(merging(*words, model=model, adapter=adapter, output_dir=output), "holds files that no run wrote")
        refused(merging(*words, model=model, adapter=adapter, output_dir=adapter), "is the directory of --adapter itself")
    assert (model / "config.json").read_bytes() == (GOLDEN / "qwen3/config.json").read_bytes()
    refused(merging(adapter=GOLDEN / "lora_mistral", output_dir=tmp_path / "out"), "so it belongs to another model than")
    tensors = adapter / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes().replace(b"lora_A.weight", b"lora_A.WEIGHT"))
    refused(merging(adapter=adapter, output_dir=tmp_path / "out"), "lora_A.weight is missing (its first one is base_model.", "lora_A.WEIGHT)")


def test_an_interrupted_merge_can_be_repeated(tmp_path):
    out = tmp_path / "out"
    (out / "new_model").mkdir(parents=True)
    (out / "new_model" / "config.json").write_text("{")
    (out / "run_files.json").write_text('{"written": ["new_model/"]}')
    for expected in (0, 1):  # the second merge finds a model
        assert call(merging(adapter=GOLDEN / "lora_qwen3", output_dir=out)).returncode == expected
    assert not (out / "new_model").exists() and json.loads((out / "config.json").read_text())
