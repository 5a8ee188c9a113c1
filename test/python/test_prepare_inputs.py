"""data/prepare.py: several inputs drawn with probabilities, the first records of each, and printed documents."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from preparing import CHAT, CHATML, DATA, bench, prepare, read_safetensors  # noqa: F401

# ---- several inputs


def inputs(bench, *counts):
    """Files a.jsonl, b.jsonl, ... with counts[i] records each: a0, a1, ..."""
    return ",".join(bench.jsonl(*[{"text": f"{name}{i}"} for i in range(count)], name=f"{name}.jsonl")
                    for name, count in zip("abc", counts))


def drawn(bench, source, *flags):
    return bench.run("sft", bench.tokenizer(merges=[]), source, *flags, "--append_eos", "false").texts()


@pytest.mark.parametrize("counts, probs", [((40, 7), "0.5,0.5"), ((7, 900, 3), "0.2,0.7,0.1"), ((1, 1, 1), "0.3,0.3,0.4")])
def test_draws_are_those_of_datasets(bench, counts, probs):
    import datasets

    source = inputs(bench, *counts)
    sets = [datasets.Dataset.from_dict({"text": [f"{name}{i}" for i in range(count)]}) for name, count in zip("abc", counts)]
    for seed in (42, 7):
        expected = datasets.interleave_datasets(sets, probabilities=[float(p) for p in probs.split(",")], seed=seed,
                                                stopping_strategy="all_exhausted")["text"]
        texts = drawn(bench, source, "--dataset_probs", probs, *(["--seed", str(seed)] if seed != 42 else []))
        assert texts == list(expected) and len(set(texts)) == sum(counts)
        assert bench.row("records read") == len(texts)
    assert drawn(bench, source) == [f"{name}{i}" for name, count in zip("abc", counts) for i in range(count)]


def test_draws_do_not_depend_on_the_number_of_processes(bench):
    arguments = ["sft", "--input", inputs(bench, 2500, 30), "--tokenizer", bench.tokenizer(), "--dataset_probs", "0.7,0.3",
                 "--out", str(bench.path / "out.safetensors")]
    results = []
    for processes in (1, 3):
        prepare.prepare("sft", prepare.build_parser().parse_args(arguments), processes)
        results.append((bench.path / "out.safetensors").read_bytes())
    assert results[0] == results[1]


def test_first_records_of_each_input(bench):
    source = inputs(bench, 40, 2, 9)
    assert drawn(bench, source, "--max_samples", "3") == ["a0", "a1", "a2", "b0", "b1", "c0", "c1", "c2"]
    texts = drawn(bench, source, "--max_samples", "3", "--dataset_probs", "0.333,0.333,0.333")
    assert set(texts) == {"a0", "a1", "a2", "b0", "b1", "c0", "c1", "c2"}
    # What lies beyond them is not even looked at.
    bench.jsonl({"text": "a0"}, "{", name="a.jsonl")
    assert drawn(bench, source, "--max_samples", "1") == ["a0", "b0", "c0"]


def test_wrong_probabilities(bench):
    source = inputs(bench, 3, 3)
    for text in ("0.5,0.4", "1.5,-0.5", "0,1", "nan,1"):
        assert f"{text} are not positive numbers that add up to 1" in bench.refused("sft", bench.tokenizer(), source,
                                                                                      "--dataset_probs", text)
    assert "invalid probabilities value: 'a,b'" in bench.refused("sft", bench.tokenizer(), source, "--dataset_probs", "a,b")
    assert "--dataset_probs has 1 probabilities for 2 inputs\n  fix: give one for each" in bench.refused(
        "sft", bench.tokenizer(), source, "--dataset_probs", "1")
    assert "-1 is negative" in bench.refused("sft", bench.tokenizer(), source, "--seed", "-1")
    assert "0 is less than one" in bench.refused("sft", bench.tokenizer(), source, "--max_samples", "0")
    bench.jsonl("", name="b.jsonl")
    assert "b.jsonl: holds no records" in bench.refused("sft", bench.tokenizer(), source, "--dataset_probs", "0.5,0.5")


# ---- --show


def printed(bench, *arguments):
    """What follows the table."""
    bench.run(*arguments)
    return bench.printed.partition("\n\n")[2]


def test_trained_runs_between_marks(bench):
    tokenizer = bench.tokenizer(CHATML)
    records = [{"messages": CHAT}, {"messages": CHAT[1:3]}, {"text": "One"}]
    assert printed(bench, "sft", tokenizer, records, "--show", "2") == (
        "⟦trained⟧, ⟦~only some bytes of a character are~⟧\n\n---- document 1: 77 tokens, 12 trained\n"
        "<|im_start|>system↵\nBe short.<|im_end|>↵\n<|im_start|>user↵\nHi<|im_end|>↵\n"
        "<|im_start|>assistant↵\n⟦Hello there<|im_end|>⟧↵\n<|im_start|>user↵\nAnd?<|im_end|>↵\n"
        "<|im_start|>assistant↵\n⟦Bye<|im_end|>⟧↵\n\n\n---- document 2: 30 tokens, 8 trained\n"
        "<|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n⟦Hello there<|im_end|>⟧↵\n\n")
    assert printed(bench, "sft", tokenizer, records) == ""
    assert printed(bench, "sft", tokenizer, records, "--show", "9").count("---- document") == 3


def test_characters_split_over_tokens_and_control_characters(bench):
    # The first byte of the emoji is in a token with the prompt's end, which is not trained.
    tokenizer = bench.tokenizer(merges=[("Q", "ð")])
    text = printed(bench, "sft", tokenizer, [{"prompt": "Q", "completion": "😀漢\x1b[31m"}], "--show", "1")
    assert text.endswith("\n⟦~Q😀~⟧⟦漢\\x1b[31m<|endoftext|>⟧\n")
    # Cut within a character.
    text = printed(bench, "sft", bench.tokenizer(merges=[]), [{"prompt": "Q", "completion": "é漢"}], "--show", "1",
                   "--max_len", "4", "--truncation", "keep")
    assert text.endswith("\nQ⟦é�⟧\n")


def test_terminal_that_has_no_such_signs(bench):
    command = [sys.executable, str(DATA / "prepare.py"), "sft", "--input", bench.jsonl({"prompt": "Q", "completion": "漢"}),
               "--tokenizer", bench.tokenizer(), "--out", str(bench.path / "out.safetensors"), "--show", "1"]
    result = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, b"") and b"Q\\u27e6\\u6f22<|endoftext|>\\u27e7\n" in result.stdout


def test_both_answers_of_a_pair_and_pieces_of_a_text(bench):
    pairs = [{"prompt": "Q", "chosen": "a", "rejected": "b"}, {"prompt": "Q", "chosen": "c", "rejected": "d"}]
    assert printed(bench, "pref", bench.tokenizer(), pairs, "--show", "1").split("\n\n")[1:] == [
        "---- pair 1, chosen: 3 tokens, 2 trained\nQ⟦a<|endoftext|>⟧",
        "---- pair 1, rejected: 3 tokens, 2 trained\nQ⟦b<|endoftext|>⟧\n"]
    text = printed(bench, "pretrain", bench.tokenizer(merges=[]), [{"text": "abcdef"}], "--show", "2", "--max_len", "3")
    assert text.split("\n\n")[1:] == ["---- document 1: 3 tokens, 2 trained\na⟦bc⟧",
                                      "---- document 2: 3 tokens, 2 trained\nd⟦ef⟧\n"]


def test_shown_text_is_the_documents(bench):
    """Without marks it equals the decoded whole, for byte-level and for sentencepiece tokens."""
    from show import pieces
    from tokenizers import Tokenizer as Backend, decoders, models, normalizers

    rng = np.random.default_rng(1)
    vocab = {token: i for i, token in enumerate(["<unk>", "▁", *(f"<0x{b:02X}>" for b in range(256)), *"Qa", "▁a"])}
    spm = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spm.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(" ", 1, 0)])
    from tokenizer import Tokenizer
    for backend in (spm, Tokenizer(bench.tokenizer(merges=[("a", "ð"), ("Ã", "©")])).encoder):
        for _ in range(50):
            text = "".join(rng.choice(["a", " ", "é", "😀", "漢", "Q", "\n"]) for _ in range(20))
            ids = backend.encode(text).ids
            assert "".join(piece for piece, _ in pieces(backend, ids, [1] * len(ids))) == backend.decode(ids) == text


# ---- llm.c's token shards

END = 256  # of text, in a tokenizer of bytes


def shard(bench, tokens, name="a.bin", magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    (bench.path / name).write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())
    return str(bench.path / name)


def without_tokenizer(bench, source, *flags):
    """Status and message of pretrain; without flags, with correct ones."""
    out = str(bench.path / "out.safetensors")
    return (prepare.main(["pretrain", "--input", source, "--out", out, *(flags or ("--eos_token_id", str(END), "--vocab_size", "260"))]),
            bench.capsys.readouterr().err.replace(str(bench.path) + "/", ""))


def cut(path, size):
    os.truncate(path, size)
    return path


def test_documents_of_token_shards(bench):
    whole = shard(bench, [END, 1, 2, 3, END, 4, 5, END, END, 6])
    middle = shard(bench, [7, 8, END, 9, END], name="b.bin")
    documents = bench.run("pretrain", bench.tokenizer(merges=[]), f"{whole},{middle}")
    assert documents.ids == [[END, 1, 2, 3, END], [END, 4, 5, END], [END, END], [END, 6], [7, 8, END], [END, 9, END]]
    assert documents.masks == [[0] + [1] * (len(ids) - 1) for ids in documents.ids]
    assert bench.run("pretrain", bench.tokenizer(merges=[]), middle).ids == [[7, 8, END], [END, 9, END]]
    assert bench.run("pretrain", bench.tokenizer(merges=[]), shard(bench, [1, 2])).ids == [[1, 2]]


@pytest.mark.parametrize("size", [3, 4, 5, 1000])
def test_token_shards_written_back(bench, monkeypatch, size):
    import shards

    monkeypatch.setattr(shards, "SHARD_TOKENS", size)
    stream = [END, 1, 2, 3, END, 4, 5, 6, 7, 8, 9, END, END, 10, END, 11, 12]
    prefix = str(bench.path / "new")
    bench.run("pretrain", bench.tokenizer(merges=[]), shard(bench, stream), "--to_bin", prefix, "--max_len", "5")  # one is split
    paths = sorted(name for name in os.listdir(bench.path) if name.startswith("new"))
    assert paths == [f"new_{i:06}.bin" for i in range(-(-len(stream) // size))] and bench.row("token shards") == len(paths)
    arrays = [np.fromfile(bench.path / name, "<u2")[512:] for name in paths]
    assert [len(array) for array in arrays[:-1]] == [size] * (len(paths) - 1)
    assert np.concatenate(arrays).tolist() == stream
    for name, array in zip(paths, arrays):
        assert np.fromfile(bench.path / name, "<i4", 256).tolist() == [20240520, 1, len(array)] + [0] * 253

    (bench.path / "out.safetensors").unlink()
    message = bench.refused("pretrain", bench.tokenizer(merges=[]), shard(bench, stream), "--to_bin", prefix)
    assert "there is" in message and "new_000000.bin" in message


@pytest.mark.parametrize("make, parts", [
    (lambda b: shard(b, [1, 2], magic=20240801), ["a.bin", "begins with 20240801, not with 20240520"]),
    (lambda b: shard(b, [1, 2], version=2), ["a.bin", "is of version 2, not 1"]),
    (lambda b: cut(shard(b, [1, 2]), 1000), ["a.bin", "is shorter than its header"]),
    (lambda b: cut(shard(b, [1, 2]), 1027), ["a.bin", "has 1027 bytes, but a shard of 2 tokens has 1028"]),
    (lambda b: shard(b, [1, 2], count=3), ["a.bin", "has 1028 bytes, but a shard of 3 tokens has 1030"]),
    (lambda b: shard(b, [1, 2], count=-1), ["a.bin", "has 1028 bytes"]),
    (lambda b: shard(b, []), ["a.bin", "holds no records"]),
    (lambda b: shard(b, [END, 5, END, 1, 40000]), ["record 2 of a.bin", "input_ids[2] is 40000, outside the vocabulary"]),
])
def test_broken_token_shards(bench, make, parts):
    message = bench.refused("pretrain", bench.tokenizer(merges=[]), make(bench))
    assert all(part in message for part in parts), message


def test_token_shards_need_to_know_what_ends_a_text(bench):
    assert "the tokenizer has no eos_token" in bench.refused("pretrain", bench.tokenizer(eos=None), shard(bench, [1, 2]))


def test_shards_without_a_tokenizer(bench):
    stream = [END, 1, 2, 3, 4, 5, END, END, 6, 7, END]
    source = shard(bench, stream)
    bench.run("pretrain", bench.tokenizer(merges=[]), source, "--max_len", "4")
    expected, metadata = read_safetensors(bench.path / "out.safetensors")
    flags = ("--eos_token_id", str(END), "--vocab_size", "260", "--max_len", "4", "--to_bin", str(bench.path / "new"))
    assert without_tokenizer(bench, source, *flags) == (0, "")
    arrays, own = read_safetensors(bench.path / "out.safetensors")
    assert own == {**metadata, "tokenizer_hash": ""}
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
    assert np.fromfile(bench.path / "new_000000.bin", "<u2")[512:].tolist() == stream


def test_a_star_stands_for_files_in_their_order(bench):
    for i in (2, 0, 1):
        shard(bench, [END, i], name=f"train_{i}.bin")
    last = shard(bench, [END, 3], name="val_0.bin")
    assert without_tokenizer(bench, f"{bench.path}/train_*.bin,{last}") == (0, "")
    assert read_safetensors(bench.path / "out.safetensors")[0]["tokens"].tolist() == [END, 0, END, 1, END, 2, END, 3]
    assert without_tokenizer(bench, f"{last},{bench.path}/test_*.bin") == (
        1, "test_*.bin: there is no such file\n  fix: give --input an existing file, several with commas between them\n")


@pytest.mark.parametrize("name, flags, message", [
    ("a.bin", (), "record 2 of a.bin: input_ids[1] is 260, outside the vocabulary of 260\n"
     "  fix: take the tokenizer, or the model, that these ids were made for\n"),
    ("a.bin,in.jsonl", (), "in.jsonl: takes a tokenizer; only token shards (.bin) hold ids\n"
     "  fix: --tokenizer DIR in place of --eos_token_id and --vocab_size\n"),
    ("a.bin", ("--eos_token_id", "1", "--vocab_size", "260", "--show", "1"),
     "--show: takes a tokenizer; only token shards (.bin) hold ids\n  fix: --tokenizer DIR in place of --eos_token_id and --vocab_size\n"),
    ("a.bin", ("--eos_token_id", "260", "--vocab_size", "260"),
     "--eos_token_id 260 is beyond --vocab_size 260\n  fix: give those of the model's config.json\n"),
    ("a.bin", ("--eos_token_id", "65536", "--vocab_size", "65537"),
     "a.bin: is of another vocabulary: its tokens have 16 bits, and what ends a text is 65536\n"
     "  fix: take the tokenizer, or the model, that its ids were made for\n"),
    ("a.bin", ("--eos_token_id", "1"),
     "--eos_token_id and --vocab_size go together, in place of --tokenizer\n  fix: give both, or --tokenizer DIR alone\n"),
    ("a.bin", ("--tokenizer", "x", "--vocab_size", "260"),
     "--eos_token_id and --vocab_size go together, in place of --tokenizer\n  fix: give both, or --tokenizer DIR alone\n"),
    ("a.bin", ("--tokenizer", "x", "--eos_token_id", "1", "--vocab_size", "260"),
     "prepare.py pretrain: argument --eos_token_id: not allowed with argument --tokenizer\n  fix: prepare.py pretrain --help\n"),
    ("a.bin", ("--color", "never"),
     "prepare.py pretrain: one of the arguments --tokenizer --eos_token_id is required\n  fix: prepare.py pretrain --help\n"),
    ("a.bin", ("--eos_token_id", "1", "--vocab_size", "260", "--add_bos", "always"),
     "--add_bos always: the vocabulary has no bos_token\n  fix: --add_bos auto, or set it in tokenizer_config.json\n"),
])
def test_wrong_inputs_without_a_tokenizer(bench, name, flags, message):
    shard(bench, [END, 5, END, 260])
    bench.jsonl({"text": "a"})
    assert without_tokenizer(bench, ",".join(str(bench.path / part) for part in name.split(",")), *flags) == (1, message)
    assert not (bench.path / "out.safetensors").exists()


def test_prefix_that_cannot_be_written(bench):
    assert "its directory does not exist" in bench.refused("pretrain", bench.tokenizer(merges=[]), [{"text": "Hello"}], "--to_bin",
                                                           str(bench.path / "none" / "new"))


# ---- broken tokenizers


def changed(**fields):
    """What changes a tokenizer.json."""
    return lambda text: json.dumps({**json.loads(text), **fields}).encode()


def vocabulary(vocab):
    return lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "vocab": vocab}}).encode()


def added(**fields):
    plain = {"id": 256, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return changed(added_tokens=[{**plain, **fields}])


BROKEN = [lambda text: b"", lambda text: b"\0" * 9, lambda text: text.encode("utf-16"), lambda text: b'{"model": "\xff"}', lambda text: text[:-9].encode(),
          lambda text: b"[" * 100000 + b"]" * 100000, lambda text: b"5", lambda text: b"[1]", lambda text: b"{}"]


@pytest.mark.parametrize("name, break_it", [
    *[("tokenizer.json", break_it) for break_it in BROKEN], *[("tokenizer_config.json", break_it) for break_it in BROKEN[:-1]],
    *[("special_tokens_map.json", break_it) for break_it in BROKEN[:6]], ("special_tokens_map.json", lambda _: b'{"eos_token": {"a": 1}}'),
    *[("tokenizer.json", changed(**{name: value})) for name in ("model", "added_tokens") for value in (None, 5, "x", [1], {"a": 1})],
    *[("tokenizer.json", vocabulary(value)) for value in (None, 5, "x", {}, [], [1], {"a": "b"}, {"a": -1}, {"a": 1.5}, {"a": True}, {"a": 1 << 40})],
    *[("tokenizer.json", added(**field)) for field in ({"id": None}, {"id": "x"}, {"id": -1}, {"id": 1 << 30}, {"special": "x"}, {"content": 5},
                                                       {"content": "\ud800"})],
])
def test_a_broken_tokenizer_ends_in_one_message(bench, name, break_it):
    path = shutil.copytree(DATA / "demo" / "model", bench.path / "tokenizer")
    text = (path / name).read_text() if (path / name).exists() else "{}" * 9
    (path / name).write_bytes(break_it(text))
    message = bench.refused("sft", path, [{"text": "a"}])
    assert "tokenizer" in message and len(message) < 1000
