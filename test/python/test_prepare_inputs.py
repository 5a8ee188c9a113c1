"""Inputs of data/prepare.py: files and data sets in every layout give the same tokens; refused files; several inputs, also drawn with probabilities; llm.c's
token shards."""

import datasets
import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from preparing import CHAT, CHATML, DATA, DEEP, GREETING, Case, Documents, chat, gpt, prepare, read_safetensors
from test_front_door import cached

# ---- layouts of the same records ---------------------------------------------------------------------------------------------------------

CHATS = [{"messages": chat(f"Say {i}" + ("" if i % 2 else "\n\naloud"), f"{i}!")} for i in range(6)]
ALPACA = [{"instruction": f"Say {i}", "input": "" if i % 2 else "aloud", "output": f"{i}!"} for i in range(6)]
SHAREGPT = [{"conversations": gpt(*(message["content"] for message in record["messages"]))} for record in CHATS]
OTHERS = [{"messages": CHAT}]  # records that must not be read


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def write(path, records):
    """Writes records in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines(records)))
    elif path.suffix == ".zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(lines(records))
    else:
        path.write_bytes(json.dumps(records).encode() if path.suffix == ".json" else lines(records))
    return path


def hub(path):
    """A data set of the hub in its cache, with two subsets and two splits."""
    snapshot = cached(path, "datasets", "someone/chats")
    for subset, train, test in (("plain", CHATS, OTHERS), ("other", OTHERS, CHATS)):
        write(snapshot / subset / "train-00000-of-00002.parquet", train[:len(train) // 2])
        write(snapshot / subset / "train-00001-of-00002.parquet", train[len(train) // 2:])
        write(snapshot / subset / "test-00000-of-00001.parquet", test)
    configs = [{"config_name": subset, "data_files": [{"split": split, "path": f"{subset}/{split}-*"} for split in ("train", "test")]}
               for subset in ("plain", "other")]
    (snapshot / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return snapshot


FILES = {
    "plain.jsonl": CHATS, "chats.jsonl.gz": CHATS, "chats.jsonl.zst": CHATS, "chats.json.gz": CHATS, "alpaca.jsonl": ALPACA,
    "sharegpt.parquet": SHAREGPT,
    **{f"shards/part-{i}.jsonl": CHATS[2 * i:2 * i + 2] for i in range(3)},
    **{f"parquets/data/train-0000{i}-of-00003.parquet": CHATS[2 * i:2 * i + 2] for i in range(3)},
    "parquets/data/test-00000-of-00001.parquet": OTHERS,
    "zipped/train.jsonl.gz": CHATS, "zipped/validation.jsonl.gz": OTHERS, "folders/2024/a.jsonl": CHATS, "folders/2023/a.jsonl": OTHERS}
LAYOUTS = [*list(FILES)[:6], "shards", "parquets", "parquets[train]", "zipped", "folders@2024", "saved", "splits", "splits[train]"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A folder with CHATS in every layout."""
    path = tmp_path_factory.mktemp("layouts")
    for name, records in FILES.items():
        write(path / name, records)
    datasets.Dataset.from_list(CHATS).save_to_disk(path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(CHATS), test=datasets.Dataset.from_list(OTHERS)).save_to_disk(path / "splits")
    return path


@pytest.fixture
def twin(bench):
    """The tokenizer, and the tokens and masks of CHATS in a plain file."""
    tokenizer = bench.tokenizer(CHATML)
    documents = bench.run("sft", tokenizer, CHATS)
    assert len(documents.ids) == len(CHATS)
    bench.out.unlink()
    return tokenizer, (documents.ids, documents.masks)


def test_every_layout_gives_the_tokens_of_a_plain_file(bench, twin, layouts):
    for name in LAYOUTS:
        documents = bench.run("sft", twin[0], str(layouts / name))
        assert (documents.ids, documents.masks) == twin[1], name


@pytest.mark.parametrize("split", ["train", "train[:2]", "train[2:]", "train[1:3]", "train[-2:]", "train[:-4]", "train[:50%]", "train[-34%:]",
                                   "train[10%:90%]", "train[:2]+train[5:]", "train[:99]", "train[-99:2]"])
def test_slices_of_a_split_are_those_of_datasets(bench, twin, layouts, split):
    tokenizer, (ids, _) = twin
    numbers = str(write(bench.path / "numbers.jsonl", [{"i": i} for i in range(6)]))
    expected = datasets.load_dataset("json", data_files=numbers, split=split, cache_dir=str(bench.path / "cache"))["i"]
    for name in ("plain.jsonl", "parquets", "splits", "plain.js*"):
        assert bench.run("sft", tokenizer, f"{layouts / name}[{split}]").ids == [ids[i] for i in expected], name


def test_several_files_of_several_kinds(bench):
    """Cells of CSV are text; a byte order mark and empty lines are ignored."""
    (bench.path / "a.json").write_text(json.dumps([{"prompt": "Q", "completion": "1"}]))
    table = bench.csv(["prompt", "completion"], ["Q, \"and\"\nso", "null"], ["Q", "007"])
    write(bench.path / "c.parquet", [{"messages": CHAT, "id": 1},
                                     {"messages": [*CHAT[:2], {"role": "assistant", "content": "é", "name": "x"}], "id": 2}])
    text = bench.jsonl("\ufeff" + json.dumps({"text": "One"}), "", {"text": "Two"}, name="d.json")
    documents = bench.expect(Case(
        f"{bench.path}/a.json,{table},{bench.path}/c.parquet,{text}", tokenizer={"merges": []},
        trained=[["1<|endoftext|>"], ["null<|endoftext|>"], ["007<|endoftext|>"], ["Hello there<|im_end|>", "Bye<|im_end|>"], ["é<|im_end|>"],
                 ["ne<|endoftext|>"], ["wo<|endoftext|>"]]))
    assert documents.texts()[1] == "Q, \"and\"\nsonull<|endoftext|>" and documents.metadata["source"] == "a.json,in.csv,c.parquet,d.json"


PREPARE_ALL = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import prepare
for arguments in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = prepare.main(arguments)
    print(json.dumps([code, said.getvalue()]))
"""


def prepared(bench, tokenizer, *sources):
    """Code, message and documents of each source, by one new process, because libraries read the environment when they are loaded."""
    outs = [bench.path / f"{number}.safetensors" for number in range(len(sources))]
    arguments = [[*bench.arguments("sft", tokenizer, source), "--out", str(out)] for source, out in zip(sources, outs)]
    result = subprocess.run([sys.executable, "-c", PREPARE_ALL, DATA], input=json.dumps(arguments), stdout=subprocess.PIPE, text=True, check=True,
                            cwd=bench.path, env=os.environ | {"HF_HOME": str(bench.path), "HF_HUB_OFFLINE": "1"})
    said = map(json.loads, result.stdout.splitlines())
    return [(code, error, Documents(out, tokenizer) if code == 0 else None) for (code, error), out in zip(said, outs, strict=True)]


def test_a_data_set_of_the_hub_is_read_from_its_cache(bench, twin):
    tokenizer, expected = twin
    snapshot = hub(bench.path)
    *found, (code, error, _), (code_2, error_2, _) = prepared(
        bench, tokenizer, "someone/chats:plain", "someone/chats:plain[train]", "someone/chats:other[test]", "someone/chats:plain[valid]", "someone/else:x")
    for code_0, error_0, documents in found:
        assert code_0 == 0 and (documents.ids, documents.masks) == expected, error_0
    assert code == 1 and "has no split 'valid'; it has train, test\n  fix: --input someone/chats[SPLIT]" in error
    assert code_2 == 1 and error_2.count("\n  fix: ") == 1 and "Traceback" not in error_2
    assert "someone/else:x: there is no such file, and neither the hub nor its cache has that data set" in error_2
    assert "hf download --repo-type dataset someone/else --local-dir DIR" in error_2
    (snapshot / "plain" / "train-00001-of-00002.parquet").unlink()
    [(code, error, _)] = prepared(bench, tokenizer, "someone/chats:plain")
    assert code == 1 and "is one of 2 files, but only 1 exist\n  fix: download the data set again" in error


@pytest.mark.parametrize("name, expected", [
    ("splits[dev]", "has no split 'dev'; it has train, test"), ("parquets[dev]", "has no split 'dev'"),
    ("alpaca.jsonl[test]", "alpaca.jsonl[test]: has no split 'test'; it has train\n  fix: --input alpaca.jsonl[SPLIT]"),
    ("alpaca.jsonl:sub", "alpaca.jsonl is one file, which has no subset"), ("alpaca.jsonl[train[:x]]", "names no records"),
    ("alpaca.jsonl[train[2:2]]", "contains no records"), ("splits[train[:2]+dev]", "has no split 'dev'")])
def test_wrong_layouts(bench, layouts, name, expected):
    assert expected in bench.refused("sft", bench.tokenizer(CHATML), str(layouts / name)).replace(f"{layouts}/", "")


@pytest.mark.parametrize("names, split", [(("a.jsonl", "b/c.csv"), "train"), (("train.jsonl", "extra.jsonl"), "train"), (("a-eval.jsonl", "a.jsonl"), "test")])
def test_a_directory_of_which_files_are_left_out(bench, names, split):
    tokenizer, folder = bench.tokenizer(), bench.path / "mixed"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text\na\n" if name.endswith("csv") else '{"text": "a"}\n')
    assert bench.refused("pretrain", tokenizer, str(folder)).startswith(f"mixed: its splits ({split}) leave out {names[1]}\n  fix: name a split: ")
    assert len(bench.run("pretrain", tokenizer, f"{folder}[{split}]").ids) == 1
    (folder / "dataset_info.json").write_text("{}")
    (folder / names[1]).unlink()
    assert len(bench.run("pretrain", tokenizer, str(folder)).ids) == 1


@pytest.mark.parametrize("name, content, message", [
    ("none.jsonl", None, "none.jsonl: there is no such file"), ("/dev/zero", None, "/dev/zero: is not a regular file"), ("empty.jsonl", "", "empty.jsonl: the file is empty"),
    ("blank.jsonl", "\n", "blank.jsonl: contains no records"), ("x.txt", "x", "x.txt: unknown kind of file"),
    ("list.json", "[1", "list.json: broken JSON"), *[(name, "version https://git-lfs.github.com/spec/v1\n", f"{name}: is a pointer of Git LFS")
                                                     for name in ("a.jsonl", "a.parquet")],
    ("list.json", DEEP, "list.json: broken JSON: maximum recursion"),
    ("bad.csv", "prompt,completion\na,b\na,b,c\n", "line 3 of bad.csv: has 3 cells but the header has 2"),
    ("twice.csv", "prompt,completion,prompt\na,b,c\n", "twice.csv: its header has 'prompt' twice\n  fix: leave one of them out"),
    ("twice.json", '[{"text": "a", "text": "b"}]', "twice.json: has 'text' twice"),
    ("bad.parquet", "no", "bad.parquet: broken parquet file"), ("twice.parquet", None, "twice.parquet: its header has 'text' twice"),
    ("packed.jsonl", b"\x1f\x8b\x08", "packed.jsonl: is compressed by gzip, which its name does not say\n  fix: mv "), ("cut.jsonl.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab", "cut.jsonl.gz: broken compression"),
    ("nothing", None, "nothing: contains no data set"), ("gaps.jsonl", '{"text": "a"}\n\n{"text": "b"\n',
                                                      "record 2 (line 3) of gaps.jsonl: broken JSON"),
    ("latin.jsonl", b'{"text": "\xe9"}\n', "record 1 (line 1) of latin.jsonl: broken JSON: 'utf-8' codec"),
    ("bad.jsonl[train[3:]]", None, "record 4 (line 4) of bad.jsonl")])
def test_refused_inputs(bench, name, content, message):
    (bench.path / "nothing").mkdir()
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], ["text", "text"]), bench.path / "twice.parquet")
    bench.jsonl(*[GREETING] * 3, {"messages": 1}, name="bad.jsonl")
    if content is not None:
        bench.write(name, content)
    assert message in bench.refused("sft", bench.tokenizer(), str(bench.path / name))


@pytest.mark.parametrize("task, column, kind, part", [
    ("sft", ["a"], "acme.secret", "'text' is a value of Arrow's type acme.secret, not a string"),
    ("rl", ["a"], "acme.secret", "holds a value of Arrow's type acme.secret, which is no text"),
    ("rl", [b"a"], "", "holds a bytes, which is no text"),
    ("sft", ['"a"', "a"], "arrow.json", "record 2 of in.parquet: a value of Arrow's type arrow.json is broken JSON"),
    ("sft", ['{"a": 1, "a": 2}'], "arrow.json", "record 1 of in.parquet: has 'a' twice"),
    ("sft", [DEEP], "arrow.json", "record 1 of in.parquet: a value of Arrow's type arrow.json is broken JSON"),
    ("sft", pyarrow.StructArray.from_arrays([pyarrow.array(["a"])] * 2, ["x", "x"]), "", "in.parquet: broken parquet file: Converting")])
def test_types_of_tables(bench, task, column, kind, part):
    array = pyarrow.array(column) if isinstance(column, list) else column
    field = pyarrow.field("text" if task == "sft" else "answer", array.type, metadata={"ARROW:extension:name": kind, "ARROW:extension:metadata": ""} if kind else {})
    prompt = [] if task == "sft" else [(pyarrow.field("prompt", pyarrow.string()), ["Hi"] * len(column))]
    fields, columns = zip((field, array), *prompt)
    pyarrow.parquet.write_table(pyarrow.table([*columns], pyarrow.schema(fields)), bench.path / "in.parquet")
    assert part in bench.refused(task, bench.tokenizer(CHATML), str(bench.path / "in.parquet"))


def test_arguments_and_files_in_another_encoding(bench):
    """As from a shell with a locale in Latin-1."""
    latin = bench.path / os.fsdecode(b"caf\xe9.jsonl")
    latin.write_text('{"text": "a"}\n')
    tokenizer = bench.tokenizer(CHATML)
    for flags in (["prompts", "--prompt", b"caf\xe9"], ["sft", "--input", latin], ["sft", "--input", bench.path / "*.jsonl"]):
        command = [sys.executable, DATA / "prepare.py", *flags, "--tokenizer", tokenizer, "--out", bench.out]
        result = subprocess.run(command, capture_output=True)
        assert result.returncode == 1 and b"\\udce9" in result.stderr and b" is not UTF-8\n  fix: " in result.stderr, result.stderr
    error = bench.refused("sft", tokenizer, [GREETING], "--tokenizer_chat_template", bench.write("latin.jinja", b"{{ 'caf\xe9' }}"))
    assert "latin.jinja: is not UTF-8 text" in error


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(bench):
    """The peak of the reader and its workers, for some data and for more."""
    tokenizer, records = bench.tokenizer(CHATML), [{"text": f"{i} " * 400} for i in range(6)]
    # The process reads its own peak from /proc, because rusage includes the peak of its parent before exec.
    script = ("import re, resource, sys; sys.path.insert(0, sys.argv[1]); import prepare; code = prepare.main(sys.argv[2:]);"
              "own = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]);"
              "print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(code)")

    def peak(copies):
        source = write(bench.path / "many.jsonl.gz", records * copies)
        command = [sys.executable, "-c", script, DATA, *bench.arguments("sft", tokenizer, str(source))]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]) << 10

    few, many = 1000, 2500  # both fill the queues between the processes
    assert peak(many) - peak(few) < len(lines(records)) * (many - few) / 2  # text and tokens in memory would need several times that


# ---- several inputs, several processes ---------------------------------------------------------------------------------------------------


def inputs(bench, *counts):
    """Files a.jsonl, b.jsonl, ... with counts[i] records each: a0, a1, ..."""
    return ",".join(bench.jsonl(*[{"text": f"{name}{i}"} for i in range(count)], name=f"{name}.jsonl") for name, count in zip("abc", counts))


def drawn(bench, source, *flags):
    return bench.run("sft", bench.tokenizer(merges=[]), source, *flags, "--append_eos", "false").texts()


@pytest.mark.parametrize("strategy", [None, "first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
@pytest.mark.parametrize("counts, probs", [((40, 7), "0.5,0.5"), ((7, 900, 3), "0.2,0.7,0.1"), ((1, 1, 1), "0.3,0.3,0.4"), ((4, 2, 3), None), ((6, 39), None)])
def test_draws_equal_those_of_datasets(bench, counts, probs, strategy):
    source = inputs(bench, *counts)
    sets = [datasets.Dataset.from_dict({"text": [f"{name}{i}" for i in range(count)]}) for name, count in zip("abc", counts)]
    for seed in ("42", "7"):
        flags = [*(["--dataset_probs", probs] if probs else []), *(["--stopping_strategy", strategy] if strategy else []), "--seed", seed]
        expected = [text for one in sets for text in one["text"]] if not probs and not strategy else datasets.interleave_datasets(
            sets, probabilities=probs and [float(p) for p in probs.split(",")], seed=int(seed), stopping_strategy=strategy or "all_exhausted")["text"]
        texts = drawn(bench, source, *flags)
        assert texts == list(expected) and (len(set(texts)) == sum(counts) or strategy == "first_exhausted")
        assert bench.row("records read") == len(texts)


@pytest.mark.parametrize("flags", [[], ["--dataset_probs", "0.7,0.3"]])
def test_the_number_of_processes_does_not_matter(bench, flags):
    bench.jsonl(*[{"messages": [CHAT[1], {"role": "assistant", "content": f"Hello {i} " * (i % 7)}]} for i in range(2500)], name="chats.jsonl")
    arguments = ["sft", bench.tokenizer(CHATML), f"{bench.path}/chats.jsonl,{inputs(bench, 30)}", *flags]
    assert bench.run_in(1, *arguments) == bench.run_in(3, *arguments)


def test_workers(bench):
    """Workers name a bad record, and so does the parent, if a record of a .json file is nested too deeply to be sent to a worker."""
    tokenizer = bench.tokenizer()
    with pytest.raises(prepare.DataError, match=r"record 2501 \(line 2501\) of .*in.jsonl: has fields txt"):
        bench.run_in(3, "sft", tokenizer, [*[{"text": "a"}] * 2500, {"txt": "a"}])
    assert not bench.out.exists()
    deep = json.loads("[" * 600 + "]" * 600)
    source = write(bench.path / "list.json", [{"text": "a"}] * 2000 + [{"text": "b", "more": deep}])
    with pytest.raises(prepare.DataError, match=r"record 2001 of .*list.json: its JSON is nested too deeply"):
        bench.run_in(2, "sft", tokenizer, str(source))


def test_first_records_of_each_input(bench):
    source, first = inputs(bench, 40, 2, 9), ["a0", "a1", "a2", "b0", "b1", "c0", "c1", "c2"]
    assert drawn(bench, source, "--max_samples", "3") == first
    assert set(drawn(bench, source, "--max_samples", "3", "--dataset_probs", "0.333,0.333,0.333")) == set(first)
    bench.jsonl({"text": "a0"}, "{", name="a.jsonl")  # later records are not read
    assert drawn(bench, source, "--max_samples", "1") == ["a0", "b0", "c0"]


@pytest.mark.parametrize("probs, message", [
    *[(text, f"{text} are not positive numbers that add up to 1") for text in ("0.5,0.4", "1.5,-0.5", "0,1", "nan,1")],
    ("a,b", "invalid probabilities value: 'a,b'"), ("0.5,0.5", "b.jsonl: contains no records")])
def test_probabilities(bench, probs, message):
    source = bench.jsonl({"text": "a"}, name="a.jsonl") + "," + bench.jsonl("", name="b.jsonl")
    assert message in bench.refused("sft", bench.tokenizer(), source, "--dataset_probs", probs)


# ---- llm.c's token shards ----------------------------------------------------------------------------------------------------------------

END = 256  # the end token of a tokenizer of bytes


def shard(bench, tokens, name="a.bin", magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return bench.write(name, header.tobytes() + np.array(tokens, "<u2").tobytes())


def without_tokenizer(bench, source, *flags):
    """Status and message of pretrain, with correct flags unless others are given."""
    status = prepare.main(["pretrain", "--input", source, "--out", str(bench.out), *(flags or ("--eos_token_id", str(END), "--vocab_size", "260"))])
    return status, bench.capsys.readouterr().err.replace(str(bench.path) + "/", "")


def test_documents_of_token_shards(bench):
    whole = shard(bench, [END, 1, 2, 3, END, 4, 5, END, END, 6])
    middle = shard(bench, [7, 8, END, 9, END], name="b.bin")
    documents = bench.run("pretrain", bench.tokenizer(merges=[]), f"{whole},{middle}")
    assert documents.ids == [[END, 1, 2, 3, END], [END, 4, 5, END], [END, END], [END, 6], [7, 8, END], [END, 9, END]]
    assert documents.masks == [[0] + [1] * (len(ids) - 1) for ids in documents.ids]
    assert bench.run("pretrain", bench.tokenizer(merges=[]), shard(bench, [1, 2])).ids == [[1, 2]]


@pytest.mark.parametrize("size", [4, 1000])
def test_shards_that_prepare_writes(bench, monkeypatch, size):
    import shards

    monkeypatch.setattr(shards, "SHARD_TOKENS", size)
    stream = [END, 1, 2, 3, END, 4, 5, 6, 7, 8, 9, END, END, 10, END, 11, 12]
    arguments = ["pretrain", bench.tokenizer(merges=[]), shard(bench, stream), "--to_bin", str(bench.path / "new")]
    bench.run(*arguments, "--max_len", "5")  # one is split
    paths = sorted(name for name in os.listdir(bench.path) if name.startswith("new"))
    assert paths == [f"new_{i:06}.bin" for i in range(-(-len(stream) // size))] and bench.row("token shards") == len(paths)
    arrays = [np.fromfile(bench.path / name, "<u2")[512:] for name in paths]
    assert [len(array) for array in arrays[:-1]] == [size] * (len(paths) - 1)
    assert np.concatenate(arrays).tolist() == stream
    for name, array in zip(paths, arrays):
        assert np.fromfile(bench.path / name, "<i4", 256).tolist() == [20240520, 1, len(array)] + [0] * 253

    bench.out.unlink()
    message = bench.refused(*arguments)
    assert "there is" in message and "new_000000.bin" in message


@pytest.mark.parametrize("tokens, header, size, parts", [
    ([1, 2], {"magic": 20240801}, None, ["a.bin", "begins with 20240801, not with 20240520"]),
    ([1, 2], {"version": 2}, None, ["a.bin", "is of version 2, not 1"]),
    ([1, 2], {}, 1000, ["a.bin", "is shorter than its header"]), ([1, 2], {}, 1027, ["a.bin", "has 1027 bytes, but a shard of 2 tokens has 1028"]),
    ([1, 2], {"count": 3}, None, ["a.bin", "has 1028 bytes, but a shard of 3 tokens has 1030"]),
    ([1, 2], {"count": -1}, None, ["a.bin", "has 1028 bytes"]),
    ([], {}, None, ["a.bin", "contains no records"]),
    ([END, 5, END, 1, 40000], {}, None, ["record 2 of a.bin", "input_ids[2] is 40000, outside the vocabulary"]),
])
def test_broken_token_shards(bench, tokens, header, size, parts):
    path = shard(bench, tokens, **header)
    os.truncate(path, size or os.path.getsize(path))
    message = bench.refused("pretrain", bench.tokenizer(merges=[]), path)
    assert all(part in message for part in parts), message


def test_shards_without_a_tokenizer(bench):
    stream = [END, 1, 2, 3, 4, 5, END, END, 6, 7, END]
    source = shard(bench, stream)
    bench.run("pretrain", bench.tokenizer(merges=[]), source, "--max_len", "4")
    expected, metadata = read_safetensors(bench.out)
    flags = ("--eos_token_id", str(END), "--vocab_size", "260", "--max_len", "4", "--to_bin", str(bench.path / "new"))
    assert without_tokenizer(bench, source, *flags) == (0, "")
    arrays, own = read_safetensors(bench.out)
    assert own == {**metadata, "tokenizer_hash": ""}
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
    assert np.fromfile(bench.path / "new_000000.bin", "<u2")[512:].tolist() == stream


def test_a_star_matches_files_in_order(bench):
    for i in (2, 0, 1):
        shard(bench, [END, i], name=f"train_{i}.bin")
    last = shard(bench, [END, 3], name="val_0.bin")
    assert without_tokenizer(bench, f"{bench.path}/train_*.bin,{last}") == (0, "")
    assert read_safetensors(bench.out)[0]["tokens"].tolist() == [END, 0, END, 1, END, 2, END, 3]
    assert without_tokenizer(bench, f"{last},{bench.path}/test_*.bin") == (
        1, "test_*.bin: there is no such file\n  fix: give --input an existing file, several with commas between them\n")


IDS = ("--eos_token_id", "1", "--vocab_size", "260")
TAKES_A_TOKENIZER = "needs a tokenizer; only token shards (.bin) hold ids\n  fix: --tokenizer DIR in place of --eos_token_id and --vocab_size\n"
TOGETHER = "--eos_token_id and --vocab_size go together, in place of --tokenizer\n  fix: give both, or --tokenizer DIR alone\n"


@pytest.mark.parametrize("name, flags, message", [
    ("a.bin", (),
     "record 2 of a.bin: input_ids[1] is 260, outside the vocabulary of 260\n"
     "  fix: use the tokenizer or model that these ids were made for\n"),
    ("a.bin,in.jsonl", (), f"in.jsonl: {TAKES_A_TOKENIZER}"),
    ("a.bin", ("--eos_token_id", "260", "--vocab_size", "260"),
     "--eos_token_id 260 is beyond --vocab_size 260\n  fix: give those of the model's config.json\n"),
    ("a.bin", ("--eos_token_id", "65536", "--vocab_size", "65537"),
     "a.bin: was made with another vocabulary: its tokens have 16 bits, but the end-of-text token here is 65536\n"
     "  fix: use the tokenizer or model that its ids were made for\n"),
    ("a.bin", IDS[:2], TOGETHER), ("a.bin", ("--tokenizer", "x", "--vocab_size", "260"), TOGETHER),
    ("a.bin", ("--tokenizer", "x", *IDS),
     "argument --eos_token_id: not allowed with argument --tokenizer\n  fix: prepare.py pretrain --help\n"),
    ("a.bin", ("--max_samples", "1"),
     "one of the arguments --tokenizer --eos_token_id is required\n  fix: prepare.py pretrain --help\n"),
    ("a.bin", (*IDS, "--add_bos", "always"),
     "--add_bos always: the vocabulary has no bos_token\n  fix: --add_bos auto, or set it in tokenizer_config.json\n"),
])
def test_wrong_inputs_without_a_tokenizer(bench, name, flags, message):
    shard(bench, [END, 5, END, 260])
    bench.jsonl({"text": "a"})
    assert without_tokenizer(bench, ",".join(str(bench.path / part) for part in name.split(",")), *flags) == (1, message)
    assert not bench.out.exists()
