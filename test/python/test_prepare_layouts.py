"""data/prepare.py: the same records in other layouts - directories, compressed files, save_to_disk, the hub's cache - give the same tokens."""

import gzip
import json
import os
import subprocess
import sys

import pytest
from preparing import CHAT, CHATML, DATA, Documents, bench  # noqa: F401

ALPACA = [{"instruction": f"Say {i}", "input": "" if i % 2 else "aloud", "output": f"{i}!"} for i in range(6)]
CHATS = [{"messages": [{"role": "user", "content": f"Say {i}" + ("" if i % 2 else "\n\naloud")}, {"role": "assistant", "content": f"{i}!"}]}
         for i in range(6)]
SHAREGPT = [{"conversations": [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in chat["messages"]]}
            for chat in CHATS]
OTHERS = [{"messages": CHAT}]  # must not be read


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(path, records):
    """Writes records as the name asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = str(path)
    if name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), name)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(records)))
    elif name.endswith(".zst"):
        import pyarrow

        with pyarrow.CompressedOutputStream(name, "zstd") as file:
            file.write(lines(records))
    elif name.endswith(".json"):
        path.write_text(json.dumps(records))
    else:
        path.write_bytes(lines(records))
    return path


def saved(path, records):
    import datasets

    datasets.Dataset.from_list(records).save_to_disk(path)


def saved_splits(path):
    import datasets

    datasets.DatasetDict(train=datasets.Dataset.from_list(CHATS), test=datasets.Dataset.from_list(OTHERS)).save_to_disk(path)


def hub(path, name="someone/chats"):
    """A data set as huggingface_hub lays it out in its cache, with two subsets and two splits."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    root = path / "hub" / f"datasets--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    snapshot = root / "snapshots" / commit
    for subset, train, test in (("plain", CHATS, OTHERS), ("other", OTHERS, CHATS)):
        write(snapshot / subset / "train-00000-of-00002.parquet", train[:len(train) // 2])
        write(snapshot / subset / "train-00001-of-00002.parquet", train[len(train) // 2:])
        write(snapshot / subset / "test-00000-of-00001.parquet", test)
    configs = [{"config_name": subset, "data_files": [{"split": split, "path": f"{subset}/{split}-*"} for split in ("train", "test")]}
               for subset in ("plain", "other")]
    (snapshot / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return snapshot


def layouts(path):
    """Names for --input, each with the records of CHATS."""
    write(path / "chats.jsonl.gz", CHATS)
    write(path / "chats.jsonl.zst", CHATS)
    write(path / "chats.json.gz", CHATS)
    write(path / "alpaca.jsonl", ALPACA)
    write(path / "sharegpt.parquet", SHAREGPT)
    for i in range(3):
        write(path / "shards" / f"part-{i}.jsonl", CHATS[2 * i:2 * i + 2])
        write(path / "parquets" / "data" / f"train-0000{i}-of-00003.parquet", CHATS[2 * i:2 * i + 2])
    write(path / "parquets" / "data" / "test-00000-of-00001.parquet", OTHERS)
    write(path / "zipped" / "train.jsonl.gz", CHATS)
    write(path / "zipped" / "validation.jsonl.gz", OTHERS)
    write(path / "folders" / "2024" / "a.jsonl", CHATS)
    write(path / "folders" / "2023" / "a.jsonl", OTHERS)
    saved(path / "saved", CHATS)
    saved_splits(path / "splits")
    return ["chats.jsonl.gz", "chats.jsonl.zst", "chats.json.gz", "alpaca.jsonl", "sharegpt.parquet", "shards", "parquets", "parquets[train]",
            "zipped", "folders@2024", "saved", "splits", "splits[train]"]


@pytest.fixture
def twin(bench):
    """The tokens and masks of the plain file."""
    tokenizer = bench.tokenizer(CHATML)
    documents = bench.run("sft", tokenizer, CHATS)
    assert len(documents.ids) == len(CHATS)
    return tokenizer, (documents.ids, documents.masks)


def test_every_layout_gives_the_tokens_of_its_plain_twin(bench, twin):
    tokenizer, expected = twin
    for name in layouts(bench.path):
        documents = bench.run("sft", tokenizer, str(bench.path / name))
        assert (documents.ids, documents.masks) == expected, name


@pytest.mark.parametrize("split", ["train", "train[:2]", "train[2:]", "train[1:3]", "train[-2:]", "train[:-4]", "train[:50%]", "train[-34%:]",
                                   "train[10%:90%]", "train[:2]+train[5:]", "train[:99]", "train[-99:2]"])
def test_slices_of_a_split_are_those_of_datasets(bench, twin, split):
    import datasets

    tokenizer, (ids, masks) = twin
    layouts(bench.path)
    (bench.path / "plain.jsonl").write_bytes(lines(CHATS))
    datasets.Dataset.from_dict({"i": list(range(6))}).to_json(bench.path / "numbers.jsonl")
    expected = datasets.load_dataset("json", data_files=str(bench.path / "numbers.jsonl"), split=split, cache_dir=str(bench.path / "cache"))["i"]
    for name in ("plain.jsonl", "sharegpt.parquet", "shards", "parquets", "splits", "saved", "plain.js*"):
        documents = bench.run("sft", tokenizer, f"{bench.path / name}[{split}]")
        assert documents.ids == [ids[i] for i in expected], name


def test_a_record_of_a_slice_has_its_own_number(bench):
    bench.jsonl(*CHATS[:3], {"messages": 1}, name="bad.jsonl")
    assert "record 4 (line 4) of bad.jsonl" in bench.refused("sft", bench.tokenizer(CHATML), f"{bench.path}/bad.jsonl[train[3:]]")


def prepared(bench, tokenizer, source, **environment):
    """Code, message and documents of a process of its own, which reads the environment when it starts."""
    out = bench.path / "own.safetensors"
    command = [sys.executable, DATA / "prepare.py", "sft", "--input", source, "--tokenizer", tokenizer, "--out", out]
    home = {"HF_HOME": str(bench.path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=bench.path, env=os.environ | home | environment)
    return result.returncode, result.stderr, Documents(out, tokenizer) if result.returncode == 0 else None


def test_a_data_set_of_the_hub_is_read_from_its_cache(bench, twin):
    tokenizer, expected = twin
    snapshot = hub(bench.path)
    for name in ("someone/chats:plain", "someone/chats:plain[train]", "someone/chats:other[test]"):
        code, error, documents = prepared(bench, tokenizer, name)
        assert code == 0 and (documents.ids, documents.masks) == expected, name + error
    code, error, _ = prepared(bench, tokenizer, "someone/chats:plain[valid]")
    assert code == 1 and "has no split 'valid'; it has train, test\n  fix: --input someone/chats[SPLIT]" in error
    (snapshot / "plain" / "train-00001-of-00002.parquet").unlink()
    code, error, _ = prepared(bench, tokenizer, "someone/chats:plain")
    assert code == 1 and "is one of 2 files, of which 1 are there\n  fix: download the data set again" in error


def test_a_data_set_that_is_nowhere(bench, twin):
    code, error, _ = prepared(bench, twin[0], "someone/else:x")
    assert code == 1 and error.count("\n  fix: ") == 1 and "Traceback" not in error
    assert "someone/else:x: there is no such file, and neither the hub nor its cache has that data set" in error
    assert "hf download --repo-type dataset someone/else --local-dir DIR" in error


def test_wrong_layouts(bench, twin):
    tokenizer, _ = twin
    layouts(bench.path)
    (bench.path / "out.safetensors").unlink()  # of the twin
    (bench.path / "nothing").mkdir()
    (bench.path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(CHATS * 1000))[:100])
    for name, expected in {"nothing": "nothing: holds no data set", "splits[dev]": "has no split 'dev'; it has train, test",
                           "parquets[dev]": "has no split 'dev'", "alpaca.jsonl[test]": "alpaca.jsonl[test]: has no split 'test'; it has train\n  fix: --input alpaca.jsonl[SPLIT]",
                           "alpaca.jsonl:sub": "alpaca.jsonl is one file, which has no subset", "alpaca.jsonl[train[:x]]": "names no records",
                           "alpaca.jsonl[train[2:2]]": "holds no records", "splits[train[:2]+dev]": "has no split 'dev'",
                           "cut.jsonl.gz": "cut.jsonl.gz: broken compression"}.items():
        assert expected in bench.refused("sft", tokenizer, str(bench.path / name)), name


def test_memory_does_not_grow_with_the_data(bench):
    """The reader and its workers, one after the other: the most that a process ever held, for some data and for five times as much."""
    tokenizer = bench.tokenizer(CHATML)

    records = [{"text": f"{i} " * 400} for i in range(6)]

    def peak(copies):
        write(bench.path / "many.jsonl.gz", records * copies)
        # Its own peak is read from /proc: rusage would begin with the peak of the process that started it.
        script = ("import re, resource, sys; sys.path.insert(0, sys.argv[1]); import prepare; code = prepare.main(sys.argv[2:]);"
                  "own = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]);"
                  "print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(code)")
        command = [sys.executable, "-c", script, DATA, "sft", "--input", bench.path / "many.jsonl.gz", "--tokenizer", tokenizer,
                   "--out", bench.path / "many.safetensors"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(result.stdout.split()[-1]) << 10

    few, many = peak(2000), peak(10000)  # both fill the queues between the processes
    print(f"peaks: {few >> 20} and {many >> 20} MiB")
    assert many - few < len(lines(records)) * 8000 / 2  # in memory, text and tokens would be several times that
