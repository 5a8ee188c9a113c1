"""Tokenizers for data/prepare.py: their hash, other kinds of tokenizers, and refusals of broken ones."""

import json
import os
import shutil

import pytest
from preparing import DATA, GOOD, GREETING
from runs import change_json
from tokenizer import PLAIN_CLASSES, PLAIN_TYPES, Tokenizer, fnv1a, stages
from transformers import AutoTokenizer


def test_hash(tmp_path):
    assert [fnv1a(text) for text in ("", "a", "foobar")] == ["cbf29ce484222325", "af63dc4c8601ec8c", "85944171f73967e8"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 3, "content": "<|end|>", "special": True, **plain}, {"id": 1, "content": "<x>", "special": False, **plain}]
    model = {"type": "BPE", "vocab": {"é": 2, "a": 0, "<x>": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}), encoding="utf-8")
    assert Tokenizer(str(tmp_path)).hash == fnv1a("0\ta\t0\n1\t<x>\t0\n2\té\t0\n3\t<|end|>\t1\n") == "4822e3d0bf5859d2"


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_sentencepiece_style_tokenizer(bench, byte_fallback):
    from tokenizers import Tokenizer as Backend, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<unk>", "▁", *(f"<0x{b:02X}>" for b in range(256)), *"Q:yes", "</s>"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=byte_fallback, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(bench.path / "spm")
    documents = bench.run("sft", bench.path / "spm", [{"prompt": "Q😀:", "completion": " yes😀"}])
    tokens = documents.hf.convert_ids_to_tokens(documents.ids[0])
    emoji = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"] if byte_fallback else ["<unk>"]
    assert tokens == ["▁", "Q", *emoji, ":", "▁", "y", "e", "s", *emoji, "</s>"] and bench.row("unknown tokens") == (None if byte_fallback else 2)
    assert documents.masks[0] == [0] * (3 + len(emoji)) + [1] * (5 + len(emoji))


def test_a_tokenizer_that_transformers_reads_otherwise(bench):
    """The model_type qwen2 gets Qwen2Tokenizer, with its own normalizer and pre-tokenizer. Digits are then single tokens."""
    records, tokenizer = [{"text": "It is 123."}], bench.tokenizer(merges=[("1", "2")])
    assert "read_as" not in bench.run("sft", tokenizer, records).metadata and bench.row("read otherwise") is None
    bench.write("tokenizer/config.json", json.dumps({"model_type": "qwen2"}))
    assert bench.run("sft", tokenizer, records).metadata["read_as"] == "Qwen2Tokenizer" and "read otherwise" in bench.printed


@pytest.mark.parametrize("name", PLAIN_TYPES)
def test_models_whose_tokenizer_transformers_reads_unchanged(bench, name):
    tokenizer = bench.tokenizer(merges=[("1", "2")])
    bench.write("tokenizer/config.json", json.dumps({"model_type": name}))
    for kind in PLAIN_CLASSES:
        change_json(bench.path / "tokenizer/tokenizer_config.json", tokenizer_class=kind)
        other = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        assert stages(other.backend_tokenizer) == stages(Tokenizer(tokenizer).encoder)


def test_refused_tokenizers(bench):
    records = [GREETING]
    assert "no-such: there is no such directory" in bench.refused("sft", bench.path / "no-such", records)
    (bench.path / "bare").mkdir()
    assert "bare: contains no tokenizer.json" in bench.refused("sft", bench.path / "bare", records)
    bench.write("bare/tokenizer.json", "version https://git-lfs.github.com/spec/v1\n")
    assert "bare/tokenizer.json: is a pointer of Git LFS" in bench.refused("sft", bench.path / "bare", records)
    bench.write("bare/tokenizer.json", '{"model": {}}')
    assert "bare/tokenizer.json: is not a tokenizer" in bench.refused("sft", bench.path / "bare", records)
    for task, source in (("sft", records), ("pref", [GOOD["pref"]])):
        assert "the tokenizer has no chat template" in bench.refused(task, bench.tokenizer(), source)
    assert "there is no chat template to render" in bench.refused("prompts", bench.tokenizer(), records)
    assert "has no eos_token" in bench.refused("pretrain", bench.tokenizer(eos=None), [{"text": "a"}])
    assert "has no bos_token" in bench.refused("pretrain", bench.tokenizer(), [{"text": "a"}], "--add_bos", "always")


def changed(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields}).encode()


def vocabulary(vocab):
    return lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "vocab": vocab}}).encode()


BROKEN = [lambda text: b"", lambda text: text.encode("utf-16"), lambda text: b'{"model": "\xff"}', lambda text: text[:-9].encode(),
          lambda text: b"[" * 100000 + b"]" * 100000, lambda text: b"[1]"]
TOKEN = {"id": 256, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize("name, break_it", [
    *[(name, break_it) for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json") for break_it in BROKEN],
    ("special_tokens_map.json", lambda _: b'{"eos_token": {"a": 1}}'),
    *[("tokenizer.json", changed(**{name: value})) for name in ("model", "added_tokens") for value in (None, "x", {"a": 1})],
    *[("tokenizer.json", vocabulary(value)) for value in (None, {}, [1], {"a": "b"}, {"a": -1}, {"a": 1.5}, {"a": 1 << 40})],
    *[("tokenizer.json", changed(added_tokens=[TOKEN | field])) for field in ({"id": -1}, {"id": 1 << 30}, {"special": "x"}, {"content": "\ud800"})]])
def test_broken_tokenizers(bench, name, break_it):
    path = shutil.copytree(DATA / "demo" / "model", bench.path / "tokenizer")
    text = (path / name).read_text() if (path / name).exists() else "{}" * 9
    (path / name).write_bytes(break_it(text))
    message = bench.refused("sft", path, [{"text": "a"}])
    assert (f"tokenizer/{name}: is " if break_it in BROKEN else "tokenizer") in message and len(message) < 1000


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_what_is_not_a_file_of_a_tokenizer(bench, name, make):
    path = shutil.copytree(DATA / "demo" / "model", bench.path / "tokenizer")
    (path / name).unlink(missing_ok=True)
    make(path / name)
    assert f"tokenizer/{name}: is not a regular file" in bench.refused("sft", path, [{"text": "a"}])
