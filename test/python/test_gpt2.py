"""Whole runs of train_gpt2: its files, raw data, generation, and messages. test_lora.py and test_same_bits.py have its adapters."""

import json
import math
from functools import partial

import numpy as np
import pytest
import runs
from runs import GOLDEN, ROOT, call, change_json, log_lines, model_with, read_tensors, same_run, succeeds, trained, write_data
from test_prepare_inputs import END, shard

PROGRAM = ROOT / "train_gpt2"
command = partial(runs.command, program=PROGRAM, model=GOLDEN / "gpt2")
evaluate = partial(runs.evaluate, program=PROGRAM)


def train(output, task="sft", *flags, **options):
    return trained(command(task, *flags, **{"max_len": 64, "train_batch_size": 9, "learning_rate": 1e-3, "max_steps": 10,
                                            "output_dir": output, **options}))


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


# ---- without a task -------------------------------------------------------------------------------------------------------------------

def test_the_bundled_run(tmp_path):
    """The run prints its command. Its own flags come first, so that given flags take precedence."""
    flags = ["--max_steps", "2", "--eval_steps", "2", "--sample_every", "2", "--max_new_tokens", "5"]
    first = succeeds([str(PROGRAM), *flags, "--output_dir", str(tmp_path / "run")], quiet=False).splitlines()[0]
    assert first.startswith("note: without a task this is ./train_gpt2 pretrain --model ") and first.endswith(f"--output_dir {tmp_path}/run")
    lines = log_lines(tmp_path / "run")
    assert [line["step"] for line in lines if "eval_loss" in line] == [2]
    assert [line["step"] for line in lines if "sample" in line] == [2]
    assert lines[-1]["step"] == 2


# ---- models in and out ----------------------------------------------------------------------------------------------------------------

def test_the_first_loss_of_random_weights(tmp_path):
    """Logits are normal, with the variance of a product of 384 normed channels and weights of 0.02."""
    V, variance = 1024, 384 * 0.02**2
    model = of_bytes(tmp_path / "model", vocab_size=V, n_embd=384, n_head=6, n_layer=1)
    ids = np.random.default_rng(0).integers(0, V, (8, 64))
    data = write_data(tmp_path / "data.safetensors", [(row, np.arange(64) > 0) for row in ids], kind="pretrain", vocab=V)
    train(tmp_path / "run", "pretrain", model=model, data=data, max_steps=1)
    line = log_lines(tmp_path / "run")[1]
    assert abs(line["loss"] - (math.log(V) + variance / 2)) < 0.04
    assert abs(line["entropy"] - (math.log(V) - variance / 2)) < 0.01


@pytest.mark.parametrize("name, dtype", [("gpt2", "f32"), ("gpt2_erf", "bf16")])
def test_weights_are_saved_as_they_were_loaded(name, dtype, data, tmp_path):
    """The first learning rate is 0. The names have the prefix that GPT-2's own files lack."""
    def with_more_digits(tensors):
        tensors["transformer.wte.weight"] *= 1.1

    model = GOLDEN / name if dtype == "bf16" else model_with(tmp_path / "float", name, with_more_digits, dtype="float32")
    train(tmp_path / "a", model=model, data=data, dtype=dtype, export_dtype=dtype, max_steps=1, ranks=3, zero_stage=2)
    before = {name if name.startswith(("transformer.", "lm_head.")) else "transformer." + name: values
              for name, values in read_tensors(model / "model.safetensors").items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    after = read_tensors(tmp_path / "a" / "model.safetensors")
    assert set(after) == set(before) and all(np.array_equal(after[name], before[name]) for name in before)
    assert config_of(tmp_path / "a") == config_of(model)
    assert (tmp_path / "a" / "generation_config.json").read_bytes() == (model / "generation_config.json").read_bytes()


# ---- raw data and text ----------------------------------------------------------------------------------------------------------------

def of_bytes(directory, **sizes):
    """A model with random weights whose ids 0 to 255 are bytes, and the next one is END."""
    directory.mkdir(exist_ok=True)
    sizes = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **sizes}
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, "bos_token_id": END, "eos_token_id": END}))
    return directory


@pytest.fixture
def text_model(bench, own_cache):
    bench.tokenizer(merges=[])
    return of_bytes(bench.path / "tokenizer")


def prepared(words):
    """The standard output of a run that first prepares raw data."""
    result = call(words)
    assert result.returncode == 0 and result.stderr.count("documents kept") <= 1, result.stdout + result.stderr
    return result.stdout


ANSWERS = {"cat": "meow", "a dog": "woof", "owl": "hoot", "count": "zero one two three four five six seven eight nine ten eleven twelve"}


def test_generation_gives_the_learned_answers(text_model, bench, tmp_path):
    answers = bench.jsonl(*[{"prompt": prompt, "completion": answer} for prompt, answer in ANSWERS.items()])
    prompts = bench.jsonl(*[{"prompt": prompt} for prompt in ANSWERS], name="prompts.jsonl")
    options = {"data": answers, "max_len": 128, "input_template": "{}"}
    prepared(command("sft", model=text_model, output_dir=tmp_path / "a", train_batch_size=4, max_epochs=150, learning_rate=1e-2, **options))
    cached, = (tmp_path / "cache").rglob("*.safetensors")
    assert evaluate(tmp_path / "a", cached, tmp_path)["eval_mean_token_accuracy"] == 1
    for more in ({"max_new_tokens": 123}, {"max_new_tokens": 80, "ranks": 2, "dtype": "bf16"}):
        said = prepared(command("generate", model=tmp_path / "a", prompts=prompts, **more))
        assert [json.loads(line)["completion"] for line in said.splitlines() if line.startswith("{")] == list(ANSWERS.values())
    result = call(command("generate", model=tmp_path / "a", prompts=prompts, max_new_tokens=124))
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr[result.stderr.index("train_gpt2: "):] == (
        f"train_gpt2: a prompt has 5 tokens and --max_new_tokens 124 may follow, but n_positions of {tmp_path / 'a'} is 128\n"
        "  fix: lower --max_new_tokens, or shorten the prompt\n")


def test_token_shards_are_data(text_model, bench, tmp_path):
    rng = np.random.default_rng(0)
    documents = [[END, *rng.integers(97, 123, n), END] for n in rng.integers(1, 60, 20)]
    stream = [token for ids in documents for token in ids[:-1]] + [END]
    options = {"max_len": 64, "train_batch_size": 8, "max_steps": 3, "learning_rate": 1e-3}
    prepared(command("pretrain", model=text_model, data=shard(bench, stream), output_dir=tmp_path / "shard", **options))
    masks = [np.arange(len(ids)) > 0 for ids in documents]
    same = write_data(tmp_path / "same.safetensors", list(zip(map(np.array, documents), masks)), kind="pretrain", vocab=260)
    trained(command("pretrain", model=text_model, data=same, output_dir=tmp_path / "same", **options))
    same_run(tmp_path / "shard", tmp_path / "same")
    files = set((tmp_path / "cache").rglob("*.safetensors"))
    shard(bench, stream, name="b.bin")  # matches the star, as a.bin does
    # Without a tokenizer, preparation takes eos_token_id and vocab_size from config.json.
    prepared(command("pretrain", model=of_bytes(tmp_path / "bare"), data=tmp_path / "*.bin", output_dir=tmp_path / "twice", **options))
    new, = set((tmp_path / "cache").rglob("*.safetensors")) - files
    assert read_tensors(new)["tokens"].tolist() == 2 * [token for ids in documents for token in ids]


def test_long_documents_of_shards_are_split_at_n_positions(text_model, bench, tmp_path):
    text = [END, *np.random.default_rng(0).integers(97, 123, 300), END]
    prepared(command("pretrain", model=of_bytes(tmp_path / "bare"), data=shard(bench, text), output_dir=tmp_path / "run", max_steps=1))
    made, = (tmp_path / "cache").rglob("*.safetensors")
    assert read_tensors(made)["doc_offsets"].tolist() == [0, 128, 256, len(text)]


# ---- wrong input ----------------------------------------------------------------------------------------------------------------------

def expect_refusal(words, message, tmp_path):
    """The call prints only this message, and notes."""
    result = call(words)
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.replace(str(tmp_path) + "/", "").replace(str(GOLDEN) + "/", "") == message
    assert all(line.startswith("note: ") for line in result.stdout.splitlines()), result.stdout


@pytest.mark.parametrize("options, message", [
    ({"model": GOLDEN / "llama3"}, "llama3 is a llama model, which train_gpt2 does not train\n  fix: use train_llama\n"),
    ({"model": None, "preset": "qwen2.5-0.5b"}, "--preset qwen2.5-0.5b is a qwen2 model, which train_gpt2 does not train\n  fix: use train_llama\n"),
    ({"lora_rank": 4, "lora_targets": "q_proj"}, '--lora_targets has "q_proj", but gpt2 has no linear layer of that name in its layers\n'
     "  fix: all-linear, c_attn, c_proj, c_fc\n")])
def test_refusals(options, message, data, tmp_path):
    for flags in ((), ("--plan",)):
        expect_refusal(command("sft", *flags, data=data, output_dir=tmp_path / "run", **options), f"train_gpt2: {message}", tmp_path)


def test_documents_that_do_not_fit(tmp_path):
    for length, options, model in ((129, {}, "gpt2"), (1025, {"model": None, "preset": "d12"}, "d12")):
        data = write_data(tmp_path / "data.safetensors", [(np.full(length, 5), np.arange(length) > 0)], vocab=200)
        expect_refusal(command("sft", data=data, output_dir=tmp_path / "run", **options), f"train_gpt2: document 0 of data.safetensors has {length} tokens "
                       f"but n_positions of {model} is {length - 1}\n  fix: prepare with --max_len {length - 1}\n", tmp_path)


@pytest.mark.parametrize("task, names, fields, message", [
    ("pretrain", "a.bin,in.jsonl", {}, None),
    ("sft", "a.bin", {}, None),
    ("pretrain", "a.bin", {"eos_token_id": None}, None),
    ("pretrain", "b*.bin", {}, "b*.bin: there is no such file\n  fix: give --data an existing file, several with commas between them\n"),
])
def test_raw_data_for_a_model_without_a_tokenizer(text_model, bench, task, names, fields, message, tmp_path):
    model = of_bytes(tmp_path / "bare")
    change_json(model / "config.json", **fields)
    shard(bench, [END, 260])
    bench.jsonl({"text": "a"})
    message = message or (f"{names} is raw data, which needs a tokenizer, but bare has no tokenizer.json\n  fix: --model DIR with a tokenizer, "
                          "a prepared .safetensors file, or, to pretrain or evaluate, token shards (.bin) and a model with eos_token_id\n")
    data = ",".join(str(tmp_path / name) for name in names.split(","))
    expect_refusal(command(task, model=model, data=data, output_dir=tmp_path / "run"), f"train_gpt2: {message}", tmp_path)
