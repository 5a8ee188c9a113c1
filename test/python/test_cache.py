"""The cache of prepared data: its key is a hash of exactly the bytes that preparation reads; several runs can fill it at the same time."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from preparing import CHAT, CHATML, PLAIN, prepare
from runs import DEMO, ENVIRONMENT, call, change_json, command, random_documents, refused, refused_training, start, succeeds, summary, write_data, write_lines


class Keys:
    """A data file, a tokenizer and a template file, and their keys."""

    def __init__(self, bench):
        self.bench = bench
        self.data = Path(bench.jsonl({"messages": CHAT}))
        self.tokenizer = Path(bench.tokenizer(CHATML))
        self.template = bench.path / "plain.jinja"
        self.template.write_text(PLAIN)

    def key(self, *flags, data=None, tokenizer=None, task="sft"):
        arguments = ["--data", str(data or self.data), "--tokenizer", str(tokenizer or self.tokenizer), *flags, "--key"]
        assert prepare.main([task, *arguments]) == 0
        return self.bench.capsys.readouterr().out


@pytest.fixture
def keys(bench):
    return Keys(bench)


def edit(path, old, new):
    """Changes a file in place, but neither its size nor its times."""
    text, times = path.read_text(encoding="utf-8"), os.stat(path)
    assert old in text and len(old.encode()) == len(new.encode())
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_every_byte_that_is_read_changes_the_key(keys):
    tokenizer = keys.tokenizer

    changes = {
        "data": lambda: edit(keys.data, "Hello", "Hallo"),
        "chat_template.jinja": lambda: edit(tokenizer / "chat_template.jinja", "im_start", "im_stArt"),
        "an additional template": lambda: ((tokenizer / "additional_chat_templates").mkdir(),
                                           (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text(PLAIN)),
        "eos_token": lambda: edit(tokenizer / "tokenizer_config.json", '"<|endoftext|>"', '"<|im_start|>" '),
        "special_tokens_map.json": lambda: (tokenizer / "special_tokens_map.json").write_text('{"bos_token": "<s>"}'),
        "added_tokens.json": lambda: (tokenizer / "added_tokens.json").write_text("{}"),
        "normalizer": lambda: change_json(tokenizer / "tokenizer.json", normalizer={"type": "Lowercase"}),
        "post_processor": lambda: change_json(tokenizer / "tokenizer.json", post_processor=None),
        "added tokens": lambda: edit(tokenizer / "tokenizer.json", '"rstrip": false', '"rstrip": true '),
        "config.json": lambda: (tokenizer / "config.json").write_text('{"model_type": "mistral"}'),
        "template file": lambda: edit(keys.template, "m['role']", "m[\"role\"]"),
    }
    seen = {keys.key("--tokenizer_chat_template", str(keys.template))}
    for name, change in changes.items():
        change()
        key = keys.key("--tokenizer_chat_template", str(keys.template))
        assert key not in seen, name
        seen.add(key)
    flags = [(), ("--max_len", "99"), ("--truncation", "keep"), ("--append_eos", "false"), ("--chat_template_kwargs", '{"a": 1}'),
             ("--add_bos", "never"), ("--max_samples", "1"), ("--dataset_probs", "1"), ("--dataset_probs", "1", "--seed", "7"),
             ("--stopping_strategy", "all_exhausted")]
    of_flags = [keys.key(*words) for words in flags] + [keys.key(data=f"{keys.data}[train[:1]]"), keys.key(task="pretrain")]
    assert len(set(of_flags)) == len(of_flags)


def test_the_libraries_and_the_code_change_the_key(keys, monkeypatch):
    import cache_key

    seen = {keys.key()}
    for library in cache_key.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, "version_of", lambda name: "9" if name == library else "1")
            seen.add(keys.key())
    monkeypatch.setattr(cache_key, "hash_of", lambda path: path[-6:] if path.endswith("chat.py") else cache_key.xxh3_128(Path(path).read_bytes()).hexdigest())
    seen.add(keys.key())
    assert len(seen) == 2 + len(cache_key.LIBRARIES)


def test_nothing_else_changes_the_key(keys, monkeypatch):
    key = keys.key()
    (keys.bench.path / "elsewhere").mkdir()
    moved = shutil.copy(keys.data, keys.bench.path / "elsewhere" / "in.jsonl")
    copied = shutil.copytree(keys.tokenizer, keys.bench.path / "elsewhere" / "model")
    for name in ("model.safetensors", "generation_config.json", "README.md", "training_args.bin"):
        (copied / name).write_text("other")
    os.utime(moved, (1, 1))
    assert keys.key(data=moved, tokenizer=copied) == key
    assert keys.key("--seed", "7", "--max_len", "2048", "--max-len=2048") == key
    monkeypatch.chdir(keys.bench.path)
    assert keys.key(data="in.jsonl", tokenizer="tokenizer") == key


def test_the_key_of_a_directory_covers_the_files_of_its_split(keys):
    for split, words in (("train", "Hello there"), ("test", "Bye")):
        (keys.bench.path / "set").mkdir(exist_ok=True)
        (keys.bench.path / "set" / f"{split}.jsonl").write_text(json.dumps({"prompt": "Q", "completion": words}) + "\n")
    keys.data = keys.bench.path / "set"
    key, of_test = keys.key(), keys.key(data=f"{keys.data}[test]")
    assert of_test != key
    edit(keys.data / "test.jsonl", "Bye", "bye")
    assert keys.key() == key and keys.key(data=f"{keys.data}[test]") != of_test
    edit(keys.data / "train.jsonl", "there", "There")
    assert keys.key() != key

    import datasets
    datasets.Dataset.from_list([{"text": "one"}]).save_to_disk(keys.bench.path / "saved")
    key = keys.key(data=keys.bench.path / "saved")
    arrow, = (keys.bench.path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes().replace(b"one", b"two"))
    assert keys.key(data=keys.bench.path / "saved") != key


def test_data_that_changes_while_it_is_read_is_not_kept(keys, monkeypatch):
    key = keys.key().strip()
    edit(keys.data, "Hello", "Hallo")
    message = keys.bench.refused("sft", keys.tokenizer, str(keys.data), "--key", key)
    assert message == ("the data or the tokenizer was changed while it was read\n"
                       "  fix: start again when no other program writes to them\n")
    assert keys.bench.call("sft", keys.tokenizer, str(keys.data), "--key", keys.key().strip())[0] == 0


def test_messages_have_the_flags_of_the_program(keys):
    for words, fix in ((["--prompts", "absent.jsonl", "--tokenizer", str(keys.tokenizer)], "--prompts an existing file"),
                       (["--data", str(keys.data), "--tokenizer", "absent"], "--model the directory")):
        assert prepare.main(["sft", *words, "--out", str(keys.bench.path / "out")]) == 1
        assert f"\n  fix: give {fix}" in keys.bench.capsys.readouterr().err


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    from whole_file import whole_file

    path, older = tmp_path / "file", "older"
    for unnamed in (True, False):  # with unnamed temporary files, and with named ones
        if not unnamed:
            monkeypatch.setattr(os, "O_TMPFILE", 0)
        path.write_text(older)
        with pytest.raises(KeyError), whole_file(path) as file:
            file.write(b"half")
            raise KeyError
        assert path.read_text() == older and os.listdir(tmp_path) == ["file"]
        with whole_file(path) as file, whole_file(path) as other:
            file.write(b"one")
            other.write(b"two")
        assert path.read_bytes() == b"one" and os.listdir(tmp_path) == ["file"]
        assert os.stat(path).st_mode & 0o777 == 0o666 & ~int(os.popen("umask").read(), 8)


# ---- the program


@pytest.fixture
def cache(tmp_path, own_cache):
    """The directory of an empty cache; records in in.jsonl."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(6)])
    return own_cache


def trained(output, source, **options):
    """Trains on raw data. Returns the number of samples of an epoch."""
    words = command("sft", **{"model": DEMO, "data": source, "output_dir": output, "max_epochs": 1, "train_batch_size": 2, **options})
    succeeds(words, quiet=False)
    return summary(output)["samples"]


def test_a_damaged_file_of_the_cache_is_prepared_again(cache, tmp_path):
    assert trained(tmp_path / "a", tmp_path / "in.jsonl") == 6
    file, = cache.glob("*.safetensors")
    right = file.read_bytes()
    file.write_bytes(right[:-9] + bytes([right[-9] ^ 2]) + right[-8:])
    assert trained(tmp_path / "a", tmp_path / "in.jsonl", overwrite="true") == 6
    assert file.read_bytes() == right
    before = os.stat(file).st_ino
    assert trained(tmp_path / "a", tmp_path / "in.jsonl", overwrite="true", learning_rate=1e-5, seed=3) == 6
    assert os.stat(file).st_ino == before and list(cache.glob("*.safetensors")) == [file]


def test_missing_splits_and_files(cache, tmp_path):
    source, prepared = tmp_path / "in.jsonl", write_data(tmp_path / "data.safetensors", random_documents(4))
    for given, options, message in (
            (source, {"from": "trl", "dataset_train_split": "test"}, f"{source}[test]: has no split 'test'; it has train\n  fix: --data {source}[SPLIT]"),
            (source, {"from": "trl", "dataset_config": "fr"}, f"{source} is one file, which has no subset"),
            (prepared, {"from": "trl", "dataset_train_split": "train[:2]"}, "is prepared data, which has no splits\n  fix: --max_samples N"),
            (prepared, {"eval_data": "absent.jsonl[train[:2]]"}, "there is no such file\n  fix: give --eval_data an existing file")):
        refused_training(given, tmp_path / "none", message, model=DEMO, **options)


def test_concurrent_runs(cache, tmp_path):
    trained(tmp_path / "model", tmp_path / "in.jsonl", max_steps=1)
    words = command("generate", model=tmp_path / "model", prompts=tmp_path / "p.jsonl", max_new_tokens=1)
    (tmp_path / "p.jsonl").write_text('{"prompt": "sort: 3 1 2"}\n')
    typed = command("generate", model=tmp_path / "model", prompt="sort: 3 1 2", max_new_tokens=1)
    started = [start(each) for each in [words, typed] * 2]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0] * 4, errors
    refused(command("generate", model=tmp_path / "model", prompt=b"\xff".decode(errors="surrogateescape")), "is not UTF-8\n  fix: write it in UTF-8")
    assert len(list(cache.iterdir())) == 2  # the training data and the prompts; typed prompts are not cached


def test_a_cache_that_cannot_be_created(cache, tmp_path, monkeypatch):
    words = command("sft", model=DEMO, data=tmp_path / "in.jsonl", output_dir=tmp_path / "a")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", "/proc/self"):
        monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(place))
        assert re.fullmatch(rf"train_llama: cannot create the cache {place}/train_llama: .*\n  fix: set XDG_CACHE_HOME\n", call(words).stderr)
    monkeypatch.delitem(ENVIRONMENT, "XDG_CACHE_HOME")
    monkeypatch.delitem(ENVIRONMENT, "HOME")
    own = Path(f"/tmp/train_llama-{os.getuid()}")
    existed = own.exists()
    trained(tmp_path / "b", tmp_path / "in.jsonl")
    assert os.stat(own).st_mode & 0o777 == 0o700 and list(own.glob("*.safetensors"))
    if not existed:
        shutil.rmtree(own)
        own.symlink_to(tmp_path)
        assert f"there is no HOME for the cache, and {own} is no directory of this user alone\n  fix: set HOME or XDG" in call(words).stderr
        own.unlink()
