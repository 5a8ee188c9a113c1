"""Further tensors in the files of a model or an adapter: they equal known values, untie the model, replace its embedding, or are refused."""

import json
import re

import numpy as np
import pytest
from runs import GOLDEN, PAIRS, command, merging, model_with, read_tensors, refused, succeeds, train, weights
from test_lora import eval_loss

LORA = GOLDEN / "lora_qwen3"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FREQUENCIES = 1e6 ** -(np.arange(8, dtype=np.float32) / 8)


def another_head(tensors):
    tensors[HEAD] = tensors[EMBEDDING][::-1]


def adapter_with(directory, name, value):
    return model_with(directory, "lora_qwen3", lambda tensors: tensors.update({name: value}), "adapter_model.safetensors")


DATA = GOLDEN / "qwen3/golden.safetensors"


def test_another_head_unties_the_model(tmp_path):
    """As in transformers 5, the result equals that of tie_word_embeddings false. A merge keeps the head."""
    model, untied = model_with(tmp_path / "model", change=another_head), model_with(tmp_path / "untied", change=another_head, tie_word_embeddings=False)
    assert eval_loss(data=DATA, model=model, max_len=128) == eval_loss(data=DATA, model=untied, max_len=128)
    options = {"data": DATA, "max_steps": 1, "max_len": 128}
    said = train(tmp_path / "out", model=model, **options)
    assert f"note: {model} has a lm_head.weight that differs from its embedding: " in said
    train(tmp_path / "same", model=untied, **options)
    assert weights(tmp_path / "out") == weights(tmp_path / "same")
    succeeds(merging(model=model, adapter=LORA, output_dir=tmp_path / "merged"))
    assert (read_tensors(tmp_path / "merged/model.safetensors")[HEAD] == read_tensors(model / "model.safetensors")[HEAD]).all()
    for output in ("out", "merged"):
        assert json.loads((tmp_path / output / "config.json").read_text())["tie_word_embeddings"] is False
    totals = [re.findall("^embedding.*|^head.*", succeeds(command("sft", "--plan", model=own, max_len=64)), re.M) for own in (model, untied)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("of, name, change, part", [  # a part of None accepts the files
    ("model", HEAD, lambda e: e, None),
    ("model", "model.layers.1.self_attn.rotary_emb.inv_freq", lambda e: FREQUENCIES * 1.003, None),  # with the error of bf16
    ("model", "model.layers.2.mlp.up_proj.weight", lambda e: e, "the config.json that belongs to these weights"),  # a layer that config.json lacks
    ("model", "_orig_mod.model.norm.weight", lambda e: e, "not what torch.compile or DDP made of it"),
    ("model", "model.layers.0.mlp.up_proj.weight_scale", lambda e: e, "weights that are not quantised"),
    ("model", "score.weight", lambda e: e[:1], "whose architectures name a reward model"),
    ("adapter", EMBEDDING, lambda e: e, None), ("adapter", HEAD, lambda e: e, None), ("adapter", EMBEDDING, lambda e: e[:, 1:], "belongs to another model"),
    ("adapter", "model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", lambda e: e[0],
     "is not part of the model that adapter_config.json describes"),
    ("adapter", "model.layers.0.self_attn.q_norm.lora_A.weight", lambda e: e, "is not part of the model that adapter_config.json describes")])
def test_further_tensors(of, name, change, part, tmp_path):
    embedding = read_tensors(GOLDEN / "qwen3/model.safetensors")[EMBEDDING]
    if of == "model":
        given, plain = {"model": model_with(tmp_path / "model", change=lambda tensors: tensors.update({name: change(embedding)}))}, {}
    else:
        given, plain = {"adapter": adapter_with(tmp_path / "adapter", f"base_model.model.{name}", change(embedding))}, {"adapter": LORA}
    merge = merging(**{"adapter": LORA, **given}, output_dir=tmp_path / "merged")
    if part is None:
        assert eval_loss(data=DATA, max_len=128, **given) == eval_loss(data=DATA, max_len=128, **plain)
        succeeds(merge)
    else:
        refused(command("eval", data=DATA, max_len=64, **given), name, part)
        refused(merge, name, part)


@pytest.mark.parametrize("task", ["sft", "eval"])
def test_a_vocabulary_of_another_size(task, tmp_path):
    """Training would otherwise add rows for the tokens of a tokenizer."""
    model = model_with(tmp_path / "model", vocab_size=50)
    refused(command(task, model=model, data=DATA, max_len=128, **({"output_dir": tmp_path / "out"} if task == "sft" else {})),
            f'{model}/config.json: vocab_size is 50, but {EMBEDDING} has 96 rows\n  fix: write "vocab_size": 96 there')


def test_a_reward_model_ignores_lm_head(tmp_path):
    model = model_with(tmp_path / "model", change=another_head)
    said = train(tmp_path / "rm", task="rm", model=model, data=PAIRS, max_steps=1, row_tokens=128)
    assert f"note: lm_head.weight of {model} is left out: a reward model has none" in said


@pytest.mark.parametrize("name, change", [(EMBEDDING, lambda e: e * 1.1), (HEAD, lambda e: np.concatenate([e, e[:5]]))])
def test_the_embedding_of_an_adapter_replaces_the_models(name, change, tmp_path):
    """PEFT saves resized embeddings without a note in adapter_config.json."""
    embedding = read_tensors(GOLDEN / "qwen3/model.safetensors")[EMBEDDING]
    adapter = adapter_with(tmp_path / "adapter", f"base_model.model.{name}", change(embedding))
    adapted = eval_loss(data=DATA, adapter=adapter, max_len=128)
    assert adapted != eval_loss(data=DATA, adapter=LORA, max_len=128)
    succeeds(merging(adapter=adapter, output_dir=tmp_path / "merged"))
    merged = read_tensors(tmp_path / "merged/model.safetensors")
    assert {EMBEDDING, HEAD} <= set(merged) and np.array_equal(merged[name], change(embedding))
    assert json.loads((tmp_path / "merged/config.json").read_text())["vocab_size"] == len(merged[EMBEDDING]) == len(merged[HEAD])
    assert abs(eval_loss(data=DATA, model=tmp_path / "merged", max_len=128) - adapted) < 2e-6
