"""Saved models: their end tokens and chat template, which come from the training data; added tokens; models in other spellings; transformers opens
them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preparing import CHATML, PLAIN, chat, make_tokenizer, prepared
from runs import (
    DEMO, GOLDEN, OF_PAIRS, ROOT, change_json, command, evaluate, first_step, merging, read_tensors, succeeds, write_lines, write_tensors)

EOS, START, END = 266, 267, 268  # <|endoftext|>, <|im_start|>, <|im_end|>
OTHER = CHATML.replace("<|im_start|>' + m['role']", "<s>' + m['role']").replace("<|im_start|>", "<s>")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("models") / "base", CHATML)


def make_base(path, template):
    """A model without weights, whose files name only <|endoftext|> as the end of a text."""
    make_tokenizer(path, template)
    change_json(path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # the name that transformers 4 knows
    shutil.copy(DEMO / "config.json", path)
    change_json(path / "config.json", vocab_size=272, eos_token_id=EOS, bos_token_id=None)
    return path


HI = [{"messages": chat("Hi", "Yes.")}]


@pytest.fixture(scope="module")
def chats(base, tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("data") / "chats", "sft", HI, base)


@pytest.fixture(scope="module")
def trained(base, chats, tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "out", model=base, data=chats, max_epochs=60)


def train(output, task="sft", **options):
    options = {"max_len": 64, "learning_rate": 1e-2, "lr_scheduler": "constant", "output_dir": output, **options}
    succeeds(command(task, **options), quiet=False)
    return output


def answer(output, model, **options):
    """The prompt, the answer to "Hi", and its finish reason. With an adapter the program itself finds the template."""
    asked = [{"prompt": "Hi"}]
    prompts = write_lines(output.with_suffix(".jsonl"), asked) if options else prepared(output, "prompts", asked, model)
    line = json.loads(succeeds(command("generate", model=model, prompts=prompts, max_new_tokens=12, **options), quiet=False))
    return line["prompt"], line["completion"], line["finish_reason"]


def generation(directory):
    return json.loads((directory / "generation_config.json").read_text())


def templates(directory):
    """The chat template in each of the two places where readers look for it."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    file = directory / "chat_template.jinja"
    return file.read_text() if file.exists() else None, config.get("chat_template")


def test_a_model_ends_answers_as_in_its_data(trained, tmp_path):
    assert generation(trained) == {"eos_token_id": [END, EOS]}
    assert json.loads((trained / "config.json").read_text())["eos_token_id"] == EOS
    assert answer(tmp_path / "a", trained) == ("user\nHi\nassistant\n", "Yes.", "stop")


def test_the_template_of_the_data_replaces_the_models(tmp_path):
    model = make_base(tmp_path / "model", PLAIN)
    (tmp_path / "t.jinja").write_text(CHATML)
    chats = prepared(tmp_path / "chats", "sft", HI, model, "--tokenizer_chat_template", tmp_path / "t.jinja")
    out = train(tmp_path / "out", model=model, data=chats, max_epochs=60, save_steps=60, eval_data=chats, eval_steps=60)
    for directory in (out, out / "step_60", out / "best"):
        assert set(templates(directory)) - {None} == {CHATML} and generation(directory)["eos_token_id"] == [END, EOS]
    assert answer(tmp_path / "a", out) == ("user\nHi\nassistant\n", "Yes.", "stop")


def test_an_adapter_has_end_tokens_and_template(trained, tmp_path):
    (tmp_path / "t.jinja").write_text(OTHER.replace("<|im_end|>", "<|im_start|>"))
    chats = prepared(tmp_path / "chats", "sft", HI, trained, "--tokenizer_chat_template", tmp_path / "t.jinja")
    out = train(tmp_path / "out", model=trained, data=chats, max_epochs=60, lora_rank=8)
    assert generation(out)["eos_token_id"] == [START, END, EOS]
    said = answer(tmp_path / "a", trained, adapter=out)
    assert said == ("user\nHi\nassistant\n", "Yes.", "stop")
    model = shutil.copytree(trained, tmp_path / "model")
    (model / "vocab.json").write_text("{}")  # adapters have no such file
    succeeds(merging(model=model, adapter=out, output_dir=tmp_path / "merged"))
    assert (tmp_path / "merged" / "vocab.json").exists()
    assert templates(tmp_path / "merged") == templates(out) and generation(tmp_path / "merged") == generation(out)
    assert answer(tmp_path / "b", tmp_path / "merged") == said
    assert answer(tmp_path / "c", trained)[2] == "stop"


def test_the_template_of_prompts_gives_the_end_of_a_turn(trained, tmp_path):
    """The files of a base model do not have it."""
    model = shutil.copytree(trained, tmp_path / "model")
    (model / "generation_config.json").unlink()
    assert answer(tmp_path / "a", model)[1:] == ("Yes.", "stop")
    chats = prepared(tmp_path / "chats", "rl", HI, model)
    out = train(tmp_path / "out", task="grpo", model=model, data=chats, max_new_tokens=12, max_steps=1, n=2, rollout_batch_size=1, train_batch_size=2,
                reward="exact_match", learning_rate=1e-5, temperature=0.5)
    assert first_step(out)["truncated"] < 1 and first_step(out)["reward"] > 0
    assert generation(out)["eos_token_id"] == [END, EOS]


# ---- added tokens

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def small(tmp_path_factory, trained):
    """The trained model with 270 rows, one for each token, and an untied head."""
    path = tmp_path_factory.mktemp("models") / "small"
    shutil.copytree(trained, path, ignore=shutil.ignore_patterns("log*", "run_files*", "tensorboard"))
    config, tensors = json.loads((path / "config.json").read_text()), read_tensors(path / "model.safetensors")
    tensors[EMBEDDING] = tensors[EMBEDDING][:270]
    tensors[HEAD] = tensors[EMBEDDING] * 2
    write_tensors(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 270, "tie_word_embeddings": False}))
    return path


MARKED = [{"messages": chat("Hi", "<a>Yes.<|b|>")}]


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("data") / "marked.jsonl", MARKED)


def train_added(output, **options):
    words = command("sft", max_len=64, learning_rate=1e-9, max_steps=1, output_dir=output, add_tokens=None, **options)
    return succeeds(words + ["--add_tokens", "<a>", "<|b|>", "<|im_end|>"], quiet=False)  # the last one is no new token


def test_added_tokens_get_the_mean_of_the_others(small, trained, marked, tmp_path):
    said = train_added(tmp_path / "out", model=small, data=marked)
    assert "has 272 tokens, and the model 270 rows of its embedding and its head: it gets 2 more, each the mean of those" in said
    before, after = read_tensors(small / "model.safetensors"), read_tensors(tmp_path / "out/model.safetensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 272
    for name in (EMBEDDING, HEAD):
        assert np.abs(after[name][:270] - before[name]).max() < 1e-6
        assert np.abs(after[name][270:] - before[name].mean(0)).max() < 1e-6
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("<a>Yes.<|b|>", add_special_tokens=False)["input_ids"] == [270, *tokenizer("Yes.", add_special_tokens=False)["input_ids"], 271]
    assert tokenizer.decode([270, 271], skip_special_tokens=True) == "<a>"  # <|b|> is special
    assert "the mean of those" not in train_added(tmp_path / "padded", model=trained, data=marked)  # which has 272 rows for 270 tokens
    assert len(read_tensors(tmp_path / "padded/model.safetensors")[EMBEDDING]) == 272
    # The saved model can be trained again.
    train(tmp_path / "again", model=tmp_path / "out", data=prepared(tmp_path / "data", "sft", MARKED, tmp_path / "out"), max_steps=1)


@pytest.mark.parametrize("whole", [{}, {"lora_modules_to_save": "embed_tokens,lm_head"}])
def test_an_adapter_has_its_added_tokens(small, marked, tmp_path, whole):
    said = train_added(tmp_path / "out", model=small, data=marked, lora_rank=2, **whole)
    assert ("--lora_modules_to_save" in said) == (not whole)  # a note that the new rows are not trained
    ids = tmp_path / "out/tokenizer.json"
    assert ids.exists() and "<a>" in ids.read_text()
    data = prepared(tmp_path / "data", "sft", MARKED, tmp_path / "out")
    said = succeeds(command("eval", model=small, adapter=tmp_path / "out", data=data, max_len=64))
    assert "272 tokens" in said
    succeeds(merging(model=small, adapter=tmp_path / "out", output_dir=tmp_path / "merged"))
    assert len(read_tensors(tmp_path / "merged/model.safetensors")[EMBEDDING]) == 272
    assert said.splitlines()[-1][:9] == succeeds(command("eval", model=tmp_path / "merged", data=data, max_len=64)).splitlines()[-1][:9]  # the loss


def test_a_tokenizer_with_more_tokens_than_the_model(small, tmp_path):
    """Training enlarges its embedding; an evaluation does not."""
    model = tmp_path / "model"
    shutil.copytree(small, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 270, "content": "<pad>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    data = {path: prepared(tmp_path / f"{path.name} data", "sft", MARKED, path) for path in (model, small)}
    assert "it gets 1 more" in succeeds(command("sft", model=model, data=data[model], max_len=64, max_steps=1, output_dir=tmp_path / "out"))
    one, two = (evaluate(path, data[path], tmp_path, max_len=64) for path in data)
    assert one == two


# ---- other programs

OPEN = """
import sys, warnings
warnings.simplefilter("error")
import logging
from transformers import AutoTokenizer, GenerationConfig, __version__
from transformers.utils import logging as transformers_logging
said = []
transformers_logging.disable_default_handler()
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
transformers_logging.add_handler(handler)
directory, has_torch = sys.argv[1], sys.argv[2] == "torch"
tokenizer = AutoTokenizer.from_pretrained(directory)
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
assert text == "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", text
assert GenerationConfig.from_pretrained(directory).eos_token_id == [268, 266]
if has_torch:
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(directory)
    asked = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = model.generate(asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=12, do_sample=False, pad_token_id=266)[0].tolist()
    assert ids[-1] == 268 and tokenizer.decode(ids, skip_special_tokens=True).endswith("Yes."), ids
assert not said, said
print(__version__)
"""
PYTHONS = [sys.executable, str(ROOT / ".venv-compare/bin/python"), *filter(None, os.environ.get("TRANSFORMERS_PYTHONS", "").split(":"))]


def has_torch(python):
    return Path(python).exists() and not subprocess.run([python, "-c", "import torch, transformers"], capture_output=True).returncode


def in_python(python, script, *words):
    result = subprocess.run([python, "-c", script, *words], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("python", PYTHONS)
def test_transformers_opens_a_saved_model(python, trained):
    """In this Python without torch, in the one of `make compare`, and in those of TRANSFORMERS_PYTHONS, for example with transformers 4."""
    if python != sys.executable and not has_torch(python):
        pytest.skip(f"{python} has no torch and transformers")
    in_python(python, OPEN, trained, "" if python == sys.executable else "torch")


@pytest.mark.parametrize("family", ["llama3", "granite", "olmo2", "qwen3_moe"])
def test_a_note_on_a_reward_model_without_a_class_in_transformers(family):
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as classes
    has_class = json.loads((GOLDEN / family / "config.json").read_text())["model_type"] in classes
    said = succeeds(command("rm", "--plan", model=GOLDEN / family, **OF_PAIRS))
    assert ("note: transformers has no " in said) != has_class


# ---- models in other spellings

def rename(tensors, names):
    for ours, theirs in names.items():
        for key in [key for key in tensors if ours + "." in key]:
            tensors[key.replace(ours + ".", theirs + ".")] = tensors.pop(key)


def internlm2(config, tensors):
    """The rows for each key head are together: its query heads, the key head, its value head."""
    config["bias"] = config.pop("attention_bias")
    kv, C, size = config["num_key_value_heads"], config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        q, k, v = (tensors.pop(f"model.layers.{layer}.self_attn.{c}_proj.weight").reshape(kv, -1, size, C) for c in "qkv")
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = np.concatenate([q, k, v], axis=1).reshape(-1, C)
    rename(tensors, {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "lm_head": "output",
                     "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
                     "embed_tokens": "tok_embeddings"})


def mimo(config, tensors):
    config["num_nextn_predict_layers"] = 1
    tensors["model.mtp_layers.0.input_layernorm.weight"] = np.ones(32)


def heads_together(tensors, prefix, names, parts):
    """Tensors of rows with the parts of each key head one after the other."""
    heads = [tensors.pop(f"{prefix}.{name}.weight") for name in names]
    return np.concatenate([part for head in zip(*(np.split(rows, parts) for rows in heads)) for part in head])


def qwen3_next(config, tensors):
    """For each key head the rows of its queries, its key, its values and their z; and those of b and a."""
    config |= {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [], "intermediate_size": 8}
    heads, keys = config["linear_num_key_heads"], config["linear_num_key_heads"] * config["linear_key_head_dim"]
    for prefix in [name.removesuffix(".A_log") for name in tensors if name.endswith(".A_log")]:
        for part, rows in zip("qkv", np.split(tensors.pop(f"{prefix}.in_proj_qkv.weight"), [keys, 2 * keys])):
            tensors[f"{prefix}.{part}.weight"] = rows
        tensors[f"{prefix}.in_proj_qkvz.weight"] = heads_together(tensors, prefix, ["q", "k", "v", "in_proj_z"], heads)
        tensors[f"{prefix}.in_proj_ba.weight"] = heads_together(tensors, prefix, ["in_proj_b", "in_proj_a"], heads)
    tensors["mtp.fc.weight"] = np.ones(8)


def experts_together(tensors):
    """Tensors of all experts, in which gate and up are one matrix."""
    for prefix in {name.split(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        experts = len([name for name in tensors if name.startswith(prefix) and name.endswith(".up_proj.weight")])
        gate, up, down = ([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(experts)] for part in ("gate", "up", "down"))
        tensors[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate(rows) for rows in zip(gate, up)])
        tensors[f"{prefix}.down_proj"] = np.stack(down)


def qwen3_5_moe(config, tensors):
    """As on the hub, beside a vision tower and a block for further tokens."""
    experts_together(tensors)
    rename(tensors, {"model": "model.language_model"})
    tensors["model.visual.merger.norm.weight"] = tensors["mtp.norm.weight"] = np.ones(8)
    text = {key: config.pop(key) for key in list(config) if key not in ("auto_map", "tie_word_embeddings")} | {"mtp_num_hidden_layers": 1}
    config |= {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "vision_config": {"depth": 1}, "text_config": text}
    text["model_type"] = "qwen3_5_moe_text"


def vision(prefix):
    def respell(config, tensors):
        rename(tensors, {"model": prefix})
        tensors["vision_tower.vision_model.post_layernorm.weight"] = tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(8)
        text = {key: config.pop(key) for key in list(config) if key not in ("dtype", "eos_token_id", "auto_map")}
        config |= {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 8}, "text_config": text}
        text["model_type"] = "gemma3_text"

    return respell


@pytest.mark.parametrize("model_type, golden, respell, family, architecture", [
    ("internlm2", "llama31", internlm2, "llama", "Llama"),
    ("Yi", "llama31", lambda _, tensors: rename(tensors, {"input_layernorm": "ln1", "post_attention_layernorm": "ln2"}), "llama", "Llama"),
    ("mimo", "qwen2_window", mimo, "qwen2", "Qwen2"),
    ("qwen3_next", "qwen35_moe", qwen3_next, "qwen3_5_moe_text", "Qwen3_5Moe"),
    ("qwen3_5_moe", "qwen35_moe", qwen3_5_moe, "qwen3_5_moe_text", "Qwen3_5Moe"),
    *(("gemma3", "gemma3", vision(prefix), "gemma3_text", "Gemma3") for prefix in ("language_model.model", "model.language_model"))])  # old, transformers 5
def test_a_model_in_another_spelling_trains_as_its_golden_model(model_type, golden, respell, family, architecture, tmp_path):
    golden, model = GOLDEN / golden, shutil.copytree(GOLDEN / golden, tmp_path / "model")
    config, tensors = json.loads((golden / "config.json").read_text()), read_tensors(golden / "model.safetensors")
    config |= {"model_type": model_type, "architectures": [f"{model_type}ForCausalLM"], "auto_map": {"AutoModel": "modeling.Model"}}
    respell(config, tensors)
    (model / "config.json").write_text(json.dumps(config))
    write_tensors(model / "model.safetensors", tensors)
    options = {"data": golden / "golden.safetensors", "max_steps": 2, "max_len": 128, "train_batch_size": 3, "ranks": 2, "zero_stage": 3, "dtype": "f32"}
    said = [succeeds(command("sft", model=source, output_dir=tmp_path / name, **options)) for name, source in (("a", model), ("b", golden))]
    assert ("note: the vision tower in " in said[0]) == (model_type in ("gemma3", "qwen3_5_moe"))
    assert ("note: the block that predicts further tokens in " in said[0]) == (model_type in ("mimo", "qwen3_next", "qwen3_5_moe"))
    after = [read_tensors(tmp_path / name / "model.safetensors") for name in "ab"]
    assert set(after[0]) == set(after[1]) and all((after[0][key] == after[1][key]).all() for key in after[0])
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == (family, [f"{architecture}ForCausalLM"]) and "auto_map" not in saved
