"""--sample_every prints samples of the model during training, without an effect on the training; generate with its flags."""

import json
import shutil

import pytest
from runs import (
    DEMO, GOLDEN, call, change_json, command, expect_one_message, log_lines, random_documents, read_tensors, stable, succeeds, train, weights, write_data,
    write_lines, write_tensors)

SAMPLING = {"sample_every": 2, "max_new_tokens": 40, "temperature": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with an end token, and a tokenizer whose first 96 tokens are ASCII characters and two bytes that begin no character."""
    return with_tokenizer(tmp_path_factory.mktemp("model"))


def with_tokenizer(directory, golden="qwen3", **fields):
    for file in (GOLDEN / golden / "config.json", GOLDEN / golden / "model.safetensors", DEMO / "tokenizer.json", DEMO / "tokenizer_config.json"):
        shutil.copy(file, directory)
    change_json(directory / "config.json", **{"eos_token_id": 2, **fields})
    return directory


def samples(output):
    return {line["step"]: line["sample"] for line in log_lines(output) if "sample" in line}


def test_samples_are_logged_and_printed(data, model, tmp_path):
    options = {"data": data, "model": model, "max_steps": 5, "seed": 41, **SAMPLING}  # one has an incomplete character
    said = train(tmp_path / "a", **options)
    texts = samples(tmp_path / "a")
    assert list(texts) == [2, 4, 5]  # the last one at the end
    assert len(set(texts.values())) == 3 and any("\ufffd" in text for text in texts.values())
    for step in texts:
        assert f"step {step}, a sample:\n" in said
    train(tmp_path / "b", data=data, model=model, max_steps=4, logging_steps=3, **SAMPLING)
    assert list(samples(tmp_path / "b")) == [2, 4]  # no second sample at the end


@pytest.mark.parametrize("options", [{"recompute": "layer", "eval_fraction": 0.2, "eval_steps": 2, "debug": "true"},
                                     {"ranks": 2, "ring_attn_size": 2, "debug": "true"}, {"ranks": 3, "zero_stage": 3, "dtype": "bf16"},
                                     {"model": "qwen35", "ranks": 2, "zero_stage": 3, "debug": "true"}])
def test_sampling_changes_no_bit_of_the_training(options, data, model, tmp_path):
    if "model" in options:
        model = with_tokenizer(tmp_path, options["model"])
    options = {"data": data, **options, "model": model, "max_steps": 5}
    train(tmp_path / "with", **SAMPLING, **options)
    train(tmp_path / "without", **options)
    assert [line for line in stable(log_lines(tmp_path / "with")) if "sample" not in line] == stable(log_lines(tmp_path / "without"))
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    assert list(samples(tmp_path / "with")) == [2, 4, 5]


def test_the_last_sample_equals_the_output_of_generate(tmp_path):
    data = write_data(tmp_path / "data.safetensors", random_documents(20), vocab=260)
    said = {"prompt": "reverse tamilo", "max_new_tokens": 12}
    train(tmp_path / "a", data=data, model=DEMO, max_steps=2, sample_every=1, ranks=2, max_len=64, **said)
    assert succeeds(command("generate", model=tmp_path / "a", **said)) == samples(tmp_path / "a")[2] + "\n"


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "n": 3}, {"temperature": 0.5, "top_k": 3, "ranks": 2}])
def test_logits_that_are_not_finite_end_generation(options, model, tmp_path):
    huge = shutil.copytree(model, tmp_path / "huge")
    tensors = read_tensors(huge / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.norm.weight"][:] = 1e19
    embedding *= 1e19 / abs(embedding).max()
    write_tensors(huge / "model.safetensors", tensors)
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "ab"}, {"prompt": "c"}])
    result = call(command("generate", model=huge, prompts=prompts, **options))
    assert result.returncode == 1 and result.stdout == ""
    expect_one_message(result.stderr[result.stderr.index("train_llama: "):], "token 1 of the answer to prompt 1", "not finite", "huge numbers")


def test_generate_stops_at_texts(model, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("ab", "cde", "f", "gh")])
    options = {"model": model, "prompts": prompts, "n": 4, "temperature": 1, "max_new_tokens": 40}

    def said(*flags):
        return [json.loads(line) for line in succeeds(command("generate", *flags, **options), quiet=False).splitlines()]

    whole, cut = said(), said("--stop", "a", "--stop", "[,")
    stopped = 0
    for a, b in zip(whole, cut, strict=True):
        at = min([a["completion"].find(text) % 1000 for text in ("a", "[,")])
        assert b["completion"] == a["completion"][:at]
        if at < 999:
            stopped += 1
            assert b["finish_reason"] == "stop" and b["tokens"] <= a["tokens"]
    assert 0 < stopped < len(cut)
    for flags in (["--min_p", "1"], ["--top_k", "1"]):  # both leave the likeliest token
        assert [line["completion"] for line in said(*flags)][0::4] == [line["completion"] for line in said("--seed", "1", *flags)][0::4]
    assert said("--repetition_penalty", "2") != whole


def test_generate_names_the_settings_of_the_model(model, tmp_path):
    """On standard error, because standard output has the completions."""
    own = shutil.copytree(model, tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 20, "num_beams": 4, "pad_token_id": 1, "top_p": None, "typical_p": 1.0}))
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "ab"}])
    result = call(command("generate", model=own, prompts=prompts, max_new_tokens=2, temperature=1, top_k=20))
    assert f"note: {own}/generation_config.json has num_beams 4, temperature 0.7, which are left to the flags" in result.stderr
    assert json.loads(result.stdout)["tokens"] <= 2
