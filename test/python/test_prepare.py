"""data/prepare.py: what is trained, told by decoding the trained tokens; the files it reads and writes; its refusals."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
sys.path.insert(0, str(DATA))

import prepare  # noqa: E402
from tokenizer import Tokenizer, fnv1a  # noqa: E402

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
CHATML_STRIPPED = CHATML.replace("m['content']", "m['content'] | trim")
CHATML_WITHOUT_PROMPT = CHATML[:CHATML.index("{% if")]
CHATML_MARKED = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
                 "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
                 "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}")
STRICT = ("{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
          "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{% endfor %}" + CHATML)
# As Qwen3: earlier turns lose their reasoning, the last one always has some.
THINKING = ("{% for m in messages %}{% set c = m['content'] %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
            "{% if m['role'] == 'assistant' %}{% set a = c.split('</think>')[-1].lstrip('\\n') %}"
            "{% if loop.last %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in c else '' %}"
            "{{ '<think>\\n' + r + '\\n</think>\\n\\n' + a }}{% else %}{{ a }}{% endif %}"
            "{% else %}{{ c }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
# As Llama 2: no header, and a space before and after the answer.
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
          "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
# As one of Mistral's: something stands before the last user message only, so that no earlier rendering begins the whole one.
LAST_MARKED = LLAMA2.replace("{{ bos_token + ", "{% if loop.last or loop.index == loop.length - 1 %}{{ '#' }}{% endif %}{{ ")
# No special token ends a turn.
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there"}, {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Bye"}]
BOTH_TURNS = [["Hello there<|im_end|>", "Bye<|im_end|>"]]


def chain(*words):
    """The merges that make one token of each word."""
    merges = []
    for word in words:
        for i in range(1, len(word)):
            if (word[:i], word[i]) not in merges:
                merges.append((word[:i], word[i]))
    return merges


def make_tokenizer(path, template=None, merges=chain("Hello", "ĠHello", "ĊĊ"), rstrip=False, bos=None, eos="<|endoftext|>",
                   post=None):
    """A byte-level BPE: 256 bytes, the merges in the order given, and special tokens, saved as transformers does."""
    from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=rstrip and t == "<|im_end|>")
                                for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")])
    trim = processors.ByteLevel(trim_offsets=True)  # the usual one, which shortens offsets
    adds_bos = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocab_size(backend) - 1)])
    backend.post_processor = processors.Sequence([trim, adds_bos]) if post == "bos" else trim
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def vocab_size(backend):
    return backend.get_vocab_size(with_added_tokens=True)


def read_safetensors(path):
    """Arrays and metadata, read by the format's definition alone."""
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    metadata = header.pop("__metadata__")
    dtypes = {"U16": np.uint16, "I32": np.int32, "U8": np.uint8, "I64": np.int64, "F32": np.float32}
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[8 + size + begin:8 + size + end], dtypes[entry["dtype"]])
        assert list(arrays[name].shape) == entry["shape"]
    return arrays, metadata


class Documents:
    """A prepared file, taken apart."""

    def __init__(self, path, tokenizer):
        self.arrays, self.metadata = read_safetensors(path)
        self.hf = Tokenizer(tokenizer).hf
        offsets = self.arrays["doc_offsets"]
        self.ids = [self.arrays["tokens"][a:b].tolist() for a, b in zip(offsets, offsets[1:])]
        self.masks = [self.arrays["loss_mask"][a:b].tolist() for a, b in zip(offsets, offsets[1:])]
        assert all(mask[0] == 0 for mask in self.masks)

    def decode(self, ids):
        return self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def texts(self):
        return [self.decode(ids) for ids in self.ids]

    def trained(self):
        """Per document the text of each run of targets."""
        runs = []
        for ids, mask in zip(self.ids, self.masks):
            runs.append([])
            for t, target in enumerate(mask):
                if target and not mask[t - 1]:
                    runs[-1].append([])
                if target:
                    runs[-1][-1].append(ids[t])
        return [[self.decode(run) for run in document] for document in runs]


class Bench:
    """A directory with inputs and outputs, and prepare.py called in this process."""

    def __init__(self, path, capsys):
        self.path = path
        self.capsys = capsys
        self.printed = ""

    def tokenizer(self, template=None, **options):
        return make_tokenizer(self.path / "tokenizer", template, **options)

    def jsonl(self, *records, name="in.jsonl"):
        text = "".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in records)
        (self.path / name).write_text(text, encoding="utf-8")
        return str(self.path / name)

    def call(self, task, tokenizer, source, *flags):
        out = self.path / "out.safetensors"
        inputs = ["--input", source] if source else []
        status = prepare.main([task, *inputs, "--tokenizer", str(tokenizer), "--out", str(out), *flags])
        captured = self.capsys.readouterr()
        self.printed = captured.out
        return status, captured.err

    def run(self, task, tokenizer, records, *flags):
        source = records if isinstance(records, str) or records is None else self.jsonl(*records)
        status, error = self.call(task, tokenizer, source, *flags)
        assert status == 0, error
        return Documents(self.path / "out.safetensors", tokenizer)

    def refused(self, task, tokenizer, records, *flags):
        source = records if isinstance(records, str) or records is None else self.jsonl(*records)
        status, error = self.call(task, tokenizer, source, *flags)
        assert status == 1
        assert error.count("\n  fix: ") == 1 and "Traceback" not in error
        assert not [name for name in os.listdir(self.path) if name.startswith("out")]
        return error.replace(str(self.path) + "/", "")

    def row(self, name):
        """The number that the table shows for a name."""
        return int(re.search(rf"^ *{re.escape(name)} +([\d,]+)", self.printed, re.M).group(1).replace(",", ""))


@pytest.fixture
def bench(tmp_path, capsys):
    return Bench(tmp_path, capsys)


# ---- chats


def test_every_assistant_turn_is_trained_with_its_end_of_turn_and_nothing_after(bench):
    documents = bench.run("sft", bench.tokenizer(CHATML), [{"messages": CHAT}])
    assert documents.texts() == ["<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                                 "<|im_start|>assistant\nHello there<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
                                 "<|im_start|>assistant\nBye<|im_end|>\n"]
    assert documents.trained() == BOTH_TURNS


@pytest.mark.parametrize("template", [CHATML_MARKED, CHATML_WITHOUT_PROMPT, CHATML_STRIPPED,
                                      CHATML.replace("<|im_end|>\\n", "<|im_end|>")])
def test_spellings_of_a_template_train_the_same(bench, template):
    assert bench.run("sft", bench.tokenizer(template), [{"messages": CHAT}]).trained() == BOTH_TURNS


def test_chat_is_what_transformers_makes_of_it(bench):
    documents = bench.run("sft", bench.tokenizer(CHATML, bos="<s>", post="bos"), [{"messages": CHAT}])
    assert documents.ids == [documents.hf.apply_chat_template(CHAT, tokenize=True, return_dict=False)]


@pytest.mark.parametrize("merges", [chain("Hello"), chain("ðŁ", "ĺĢ"), chain("ðŁĺĢ"), chain("ĺĢ<")])
def test_non_ascii_split_over_tokens(bench, merges):
    chat = [{"role": "user", "content": "😀é"}, {"role": "assistant", "content": "😀 naïve 漢字😀"}]
    documents = bench.run("sft", bench.tokenizer(CHATML, merges=merges), [{"messages": chat}])
    assert documents.trained() == [["😀 naïve 漢字😀<|im_end|>"]]


def test_stripped_content_is_trained_as_rendered(bench):
    chat = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "\n One \n"},
            {"role": "user", "content": "more"}, {"role": "assistant", "content": "  Two"}]
    documents = bench.run("sft", bench.tokenizer(CHATML_STRIPPED), [{"messages": chat}])
    assert documents.trained() == [["One<|im_end|>", "Two<|im_end|>"]]


def test_reasoning_stripped_from_earlier_turns(bench):
    thoughts = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne"},
                {"role": "user", "content": "2?"}, {"role": "assistant", "content": "<think>\nso\n</think>\n\nTwo"}]
    plain = [{**message, "content": message["content"].split("\n")[-1]} for message in thoughts]
    documents = bench.run("sft", bench.tokenizer(THINKING), [{"messages": thoughts}, {"messages": plain}])
    assert documents.trained() == [["One<|im_end|>", "<think>\nso\n</think>\n\nTwo<|im_end|>"],
                                   ["One<|im_end|>", "<think>\n\n</think>\n\nTwo<|im_end|>"]]


def test_answer_that_starts_with_a_newline(bench):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\nyes"}]
    documents = bench.run("sft", bench.tokenizer(CHATML, merges=chain("Hello")), [{"messages": chat}])
    assert documents.trained() == [["\nyes<|im_end|>"]]
    assert "merged starts" not in bench.printed
    # Where both line breaks are one token it belongs to the header too, and is no target; the table says so.
    documents = bench.run("sft", bench.tokenizer(CHATML, merges=chain("ĊĊ")), [{"messages": chat}])
    assert documents.trained() == [["yes<|im_end|>"]]
    assert bench.row("merged starts") == 1


def test_space_between_header_and_answer_belongs_to_the_answer(bench):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}, {"role": "user", "content": "?"},
            {"role": "assistant", "content": "Hello"}]
    documents = bench.run("sft", bench.tokenizer(LLAMA2, bos="<s>"), [{"messages": chat}])
    assert documents.trained() == [[" Hello you <|endoftext|>", " Hello <|endoftext|>"]]
    assert documents.texts()[0].startswith("<s>[INST] Hi [/INST] Hello")
    documents = bench.run("sft", bench.tokenizer(LAST_MARKED), [{"messages": chat}])
    assert documents.trained() == [[" Hello you <|endoftext|>", " Hello <|endoftext|>"]]
    assert documents.texts()[0].startswith("[INST] Hi [/INST] Hello you <|endoftext|>#[INST] ? [/INST] Hello")


def test_end_of_turn_that_swallows_the_line_break_after_it(bench):
    for template in (CHATML, CHATML_MARKED):
        documents = bench.run("sft", bench.tokenizer(template, rstrip=True), [{"messages": CHAT}])
        assert documents.trained() == BOTH_TURNS


def test_template_without_end_of_turn_tokens(bench):
    documents = bench.run("sft", bench.tokenizer(PLAIN, merges=[]), [{"messages": CHAT}])
    assert documents.trained() == [[" Hello there", " Bye"]]
    assert bench.row("open turns") == 2
    # A token over the end of the answer is none of its tokens.
    documents = bench.run("sft", bench.tokenizer(PLAIN, merges=[("e", "Ċ")]), [{"messages": CHAT}])
    assert documents.trained() == [[" Hello ther", " By"]]


def test_special_tokens_inside_the_content_do_not_end_the_turn(bench):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a<|im_end|>b<|im_start|>c"}]
    documents = bench.run("sft", bench.tokenizer(CHATML), [{"messages": chat}])
    assert documents.trained() == [["a<|im_end|>b<|im_start|>c<|im_end|>"]]


def test_consecutive_and_leading_assistant_messages(bench):
    chat = [{"role": "assistant", "content": "Welcome"}, {"role": "assistant", "content": "You"},
            {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    documents = bench.run("sft", bench.tokenizer(CHATML), [{"messages": chat}])
    assert documents.trained() == [["Welcome<|im_end|>", "You<|im_end|>", "<|im_end|>"]]


def test_sharegpt_conversations(bench):
    chat = [{"from": "system", "value": "Be short."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    documents = bench.run("sft", bench.tokenizer(CHATML), [{"conversations": chat}])
    assert documents.texts()[0].startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi")
    assert documents.trained() == [["Hello<|im_end|>"]]


def test_given_template_replaces_the_tokenizers(bench):
    (bench.path / "chat.jinja").write_text(CHATML)
    for given in (CHATML, str(bench.path / "chat.jinja")):
        documents = bench.run("sft", bench.tokenizer(PLAIN), [{"messages": CHAT}], "--tokenizer_chat_template", given)
        assert documents.trained() == BOTH_TURNS


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_prompt_and_completion_messages_train_the_completion_only(bench, template):
    documents = bench.run("sft", bench.tokenizer(template), [{"prompt": CHAT[:4], "completion": CHAT[4:]}])
    assert documents.trained() == [["Bye<|im_end|>"]]
    assert "assistant\nHello there<|im_end|>" in documents.texts()[0]


# ---- prompt and completion, text, EOS and BOS


def test_prompt_and_completion(bench):
    documents = bench.run("sft", bench.tokenizer(merges=[]), [
        {"prompt": "Q: ", "completion": "yes"}, {"prompt": "Q:", "completion": " yes"},
        {"prompt": "Q:", "completion": "\n\nyes\n"}, {"prompt": "Q:", "completion": "yes<|endoftext|>"},
        {"prompt": "é", "completion": "😀"}, {"prompt": "", "completion": "yes"}])
    assert documents.trained() == [["yes<|endoftext|>"], [" yes<|endoftext|>"], ["\n\nyes\n<|endoftext|>"],
                                   ["yes<|endoftext|>"], ["😀<|endoftext|>"], ["es<|endoftext|>"]]
    assert documents.texts()[3] == "Q:yes<|endoftext|>"


def test_token_over_the_border_is_no_target(bench):
    tokenizer = bench.tokenizer(merges=chain("ĠHello", "ĊĊ"))
    documents = bench.run("sft", tokenizer, [
        {"prompt": "Q: ", "completion": "Hello"}, {"prompt": "Q:", "completion": " Hello"},
        {"prompt": "Q\n", "completion": "\nHello"}, {"prompt": "Q ", "completion": "He"}])
    assert documents.trained() == [["<|endoftext|>"], [" Hello<|endoftext|>"], ["Hello<|endoftext|>"], ["<|endoftext|>"]]
    assert bench.row("merged starts") == 3
    # Bytes of one character in a token with what comes before it.
    documents = bench.run("sft", bench.tokenizer(merges=[("Q", "ð")]), [{"prompt": "Q", "completion": "😀!"}])
    assert len(documents.ids[0]) == 6 and documents.masks[0] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("task", ["sft", "pretrain"])
def test_text_is_trained_whole_and_ended(bench, task):
    documents = bench.run(task, bench.tokenizer(merges=[]), [{"text": "One"}, {"text": "Two<|endoftext|>"}, {"text": ""}])
    assert documents.texts() == ["One<|endoftext|>", "Two<|endoftext|>"]
    assert documents.trained() == [["ne<|endoftext|>"], ["wo<|endoftext|>"]]
    assert [bench.row(name) for name in ("records read", "dropped", "empty", "documents kept")] == [3, 1, 1, 2]
    assert bench.run(task, bench.tokenizer(merges=[]), [{"text": "One"}], "--append-eos=false").texts() == ["One"]


def test_bos(bench):
    silent, adding = bench.tokenizer(bos="<s>"), make_tokenizer(bench.path / "adding", bos="<s>", post="bos")
    one = [{"text": "One"}, {"text": "<s>Two"}]
    with_bos = ["<s>One<|endoftext|>", "<s>Two<|endoftext|>"]
    without = ["One<|endoftext|>", "<s>Two<|endoftext|>"]
    assert bench.run("pretrain", silent, one).texts() == without
    assert bench.run("pretrain", silent, one, "--add_bos", "always").texts() == with_bos
    assert bench.run("pretrain", adding, one).texts() == with_bos
    assert bench.run("pretrain", adding, one, "--add_bos", "never").texts() == without
    assert bench.run("pretrain", adding, one).trained()[0] == ["One<|endoftext|>"]
    assert bench.run("sft", adding, [{"prompt": "Q:", "completion": "A"}]).texts() == ["<s>Q:A<|endoftext|>"]


# ---- length


def test_split(bench):
    documents = bench.run("pretrain", bench.tokenizer(merges=[]), [{"text": "abcdefghij"}, {"text": "klm"}], "--max_len", "4")
    assert documents.texts() == ["abcd", "efgh", "ij<|endoftext|>", "klm<|endoftext|>"]
    assert documents.trained() == [["bcd"], ["fgh"], ["j<|endoftext|>"], ["lm<|endoftext|>"]]
    assert bench.row("split") == 1 and "into 3 documents" in bench.printed
    # A rest of one token has nothing to predict.
    assert bench.run("pretrain", bench.tokenizer(merges=[]), [{"text": "abcdefgh"}], "--max_len", "4").texts() == ["abcd", "efgh"]


def test_drop_and_keep(bench):
    records = [{"prompt": "Q:", "completion": "abcdef"}, {"prompt": "Q:", "completion": "a"},
               {"prompt": "QQQQQQ", "completion": "a"}]
    tokenizer = bench.tokenizer(merges=[])
    assert bench.run("sft", tokenizer, records, "--max_len", "5").trained() == [["a<|endoftext|>"]]
    assert (bench.row("dropped"), bench.row("longer than 5 tokens")) == (2, 2)
    documents = bench.run("sft", tokenizer, records, "--max-len", "5", "--truncation", "keep")
    assert documents.texts() == ["Q:abc", "Q:a<|endoftext|>"]  # no end where there is none
    assert documents.trained() == [["abc"], ["a<|endoftext|>"]]
    assert (bench.row("cut to 5 tokens"), bench.row("dropped"), bench.row("without a target token")) == (2, 1, 1)
    assert bench.run("pretrain", tokenizer, [{"text": "abcdef"}], "--max_len=5", "--truncation=keep").texts() == ["abcde"]


def test_document_without_target_is_dropped_and_counted(bench):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert len(bench.run("sft", bench.tokenizer(CHATML), [chat, {"messages": CHAT}]).ids) == 1
    assert bench.row("without a target token") == 1


# ---- ready-made ids, OpenRLHF's keys, formats of files


def test_ids_and_labels(bench):
    records = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [5, 6], "labels": [5, 6]},
               {"input_ids": [5, 6], "labels": [5, -100]}]
    documents = bench.run("sft", bench.tokenizer(), records)
    assert (documents.ids, documents.masks) == ([[5, 6, 7, 8], [5, 6]], [[0, 0, 1, 1], [0, 1]])
    documents = bench.run("pretrain", bench.tokenizer(), [{"input_ids": [5, 6, 7, 8, 9]}], "--max_len", "3")
    assert (documents.ids, documents.masks) == ([[5, 6, 7], [8, 9]], [[0, 1, 1], [0, 1]])


def test_openrlhf_keys(bench):
    tokenizer = bench.tokenizer(CHATML, merges=[])
    strings = [{"question": "Why {x}?", "response": "So"}]
    keys = ["--input_key", "question", "--output_key", "response"]
    documents = bench.run("sft", tokenizer, strings, *keys)
    assert documents.texts() == ["User: Why {x}?\nAssistant: So<|endoftext|>"]
    assert documents.trained() == [["So<|endoftext|>"]]
    assert bench.run("sft", tokenizer, strings, *keys, "--input_template", "{}=").texts() == ["Why {x}?=So<|endoftext|>"]
    documents = bench.run("sft", tokenizer, strings, *keys, "--apply_chat_template")
    assert documents.texts() == ["<|im_start|>user\nWhy {x}?<|im_end|>\n<|im_start|>assistant\nSo<|im_end|>\n"]
    assert documents.trained() == [["So<|im_end|>"]]

    chat = [{"chat": CHAT}]
    documents = bench.run("sft", tokenizer, chat, "--input_key", "chat", "--apply-chat-template", "true")
    assert documents.trained() == [["Bye<|im_end|>"]]
    documents = bench.run("sft", tokenizer, chat, "--input_key", "chat", "--apply_chat_template", "--multiturn")
    assert documents.trained() == BOTH_TURNS
    parts = [{"chat": CHAT[:4], "last": CHAT[4]}]
    keys = ["--input_key", "chat", "--output_key", "last"]
    documents = bench.run("sft", tokenizer, parts, *keys, "--apply_chat_template", "--multiturn")
    assert documents.trained() == BOTH_TURNS
    assert bench.run("pretrain", tokenizer, [{"body": "One"}], "--input_key", "body").texts() == ["One<|endoftext|>"]


def test_json_csv_parquet_and_several_files(bench):
    import pyarrow
    import pyarrow.parquet

    tokenizer = bench.tokenizer(CHATML, merges=[])
    (bench.path / "a.json").write_text(json.dumps([{"prompt": "Q", "completion": "1"}]))
    with open(bench.path / "b.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "completion"], ["Q, \"and\"\nso", "null"], ["Q", "007"]])
    chats = [{"messages": CHAT, "id": 1}, {"messages": [*CHAT[:2], {"role": "assistant", "content": "é", "name": "x"}], "id": 2}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), bench.path / "c.parquet")
    lines = bench.jsonl("\ufeff" + json.dumps({"text": "One"}), "", {"text": "Two"}, name="d.json")
    sources = ",".join([*(str(bench.path / name) for name in ("a.json", "b.csv", "c.parquet")), lines])
    documents = bench.run("sft", tokenizer, sources)
    assert documents.trained() == [["1<|endoftext|>"], ["null<|endoftext|>"], ["007<|endoftext|>"],
                                   *BOTH_TURNS, ["é<|im_end|>"], ["ne<|endoftext|>"], ["wo<|endoftext|>"]]
    assert documents.texts()[1] == "Q, \"and\"\nsonull<|endoftext|>"
    assert documents.metadata["source"] == ",".join(os.path.basename(name) for name in sources.split(","))


def test_dataset_of_the_hub(bench, monkeypatch):
    import datasets

    def load_dataset(name, split, streaming):
        assert (name, split, streaming) == ("owner/chats", "train", True)
        return iter([{"messages": CHAT}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert bench.run("sft", bench.tokenizer(CHATML), "owner/chats").trained() == BOTH_TURNS


# ---- pairs: documents 2i and 2i+1 are the chosen and the rejected one of pair i

QUESTION = [{"role": "user", "content": "Why?"}]
ASKED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def said(text):
    return {"role": "assistant", "content": text}


def token_bytes(documents, ids):
    """Of each token of a byte-level BPE its bytes, by the alphabet that GPT-2 defined."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    special = set(documents.hf.all_special_tokens) | {"<|im_start|>", "<|im_end|>", "<s>"}
    tokens = documents.hf.convert_ids_to_tokens(ids)
    return [t.encode() if t in special else bytes(alphabet[c] for c in t) for t in tokens]


@pytest.mark.parametrize("record", [
    {"prompt": QUESTION, "chosen": [said("So")], "rejected": [said("No")]},
    {"prompt": QUESTION, "chosen": said("So"), "rejected": said("No")},
    {"prompt": QUESTION, "chosen": "So", "rejected": "No"},
    {"prompt": "Why?", "chosen": [said("So")], "rejected": [said("No")]},
    {"prompt": "Why?", "chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]},
    {"prompt": "why", "chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]},
    {"chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]}])
def test_pair_of_chats(bench, record):
    documents = bench.run("pref", bench.tokenizer(CHATML), [record])
    assert documents.texts() == [ASKED + "So<|im_end|>", ASKED + "No<|im_end|>"]  # without the template's last line break
    assert documents.trained() == [["So<|im_end|>"], ["No<|im_end|>"]]
    assert documents.metadata["kind"] == "pref" and list(documents.arrays) == ["doc_offsets", "tokens", "loss_mask"]


def test_only_the_final_answer_of_a_pair_is_scored(bench):
    longer = [*CHAT[:4], said("One"), {"role": "user", "content": "More"}, said("Two")]
    documents = bench.run("pref", bench.tokenizer(CHATML), [{"chosen": CHAT, "rejected": longer}])
    assert documents.trained() == [["Bye<|im_end|>"], ["Two<|im_end|>"]]
    record = {"prompt": CHAT[:4], "chosen": [said("One"), said("Two")], "rejected": [said("No")]}
    documents = bench.run("pref", bench.tokenizer(CHATML), [record])
    assert documents.trained() == [["Two<|im_end|>"], ["No<|im_end|>"]]


@pytest.mark.parametrize("template, ends", [
    (CHATML, "So<|im_end|>"), (CHATML_MARKED, "So<|im_end|>"), (CHATML_WITHOUT_PROMPT, "So<|im_end|>"),
    (CHATML.replace("<|im_end|>\\n", "<|im_end|>"), "So<|im_end|>"),
    (CHATML.replace("<|im_end|>\\n", "<|im_end|> \\n\\t\\n"), "So<|im_end|>"),
    (LLAMA2, " So <|endoftext|>"), (THINKING, "<think>\n\n</think>\n\nSo<|im_end|>")])
@pytest.mark.parametrize("rstrip", [False, True])
def test_a_pairs_documents_end_with_the_end_of_turn(bench, template, ends, rstrip):
    earlier = [CHAT[1], said("<think>\nhm\n</think>\n\nHello"), CHAT[3]]  # which THINKING rewrites
    record = {"chosen": [*earlier, said("So")], "rejected": [*earlier, said("No")]}
    documents = bench.run("pref", bench.tokenizer(template, rstrip=rstrip, bos="<s>"), [record])
    assert documents.trained() == [[ends], [ends.replace("So", "No")]]
    assert [text.endswith(ends.replace("So", word)) for text, word in zip(documents.texts(), ("So", "No"))] == [True, True]
    assert ("hm" in documents.texts()[0]) == (template != THINKING)


def test_chat_pair_without_end_of_turn_stays_as_rendered(bench):
    record = {"chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]}
    documents = bench.run("pref", bench.tokenizer(PLAIN, merges=[]), [record])
    assert documents.texts() == ["user: Why?\nassistant: So\n", "user: Why?\nassistant: No\n"]
    assert documents.trained() == [[" So"], [" No"]] and bench.row("open turns") == 2
    # What stands after the end of turn and is no white space stays, too.
    documents = bench.run("pref", bench.tokenizer(CHATML + ".{{ '\\n' }}"), [record])
    assert documents.texts()[0] == ASKED + "So<|im_end|>\n.\n"
    documents = bench.run("pref", bench.tokenizer(CHATML + "{{ eos_token + '\\n' }}"), [record])
    assert documents.texts()[0] == ASKED + "So<|im_end|>\n<|endoftext|>" and documents.trained()[0] == ["So<|im_end|>"]


def test_pair_of_strings_with_a_prompt(bench):
    tokenizer = bench.tokenizer(merges=[])
    documents = bench.run("pref", tokenizer, [{"prompt": "Q: ", "chosen": "yes", "rejected": "yet\n"}])
    assert documents.texts() == ["Q: yes<|endoftext|>", "Q: yet\n<|endoftext|>"]
    assert documents.trained() == [["yes<|endoftext|>"], ["yet\n<|endoftext|>"]]  # also what both answers begin with
    documents = bench.run("pref", tokenizer, [{"prompt": "Q: ", "chosen": "yes", "rejected": "no"}], "--append_eos", "false")
    assert documents.texts() == ["Q: yes", "Q: no"]
    # EOS is there already, once or twice; white space after it goes.
    ended = {"prompt": "Q:", "chosen": "yes<|endoftext|>", "rejected": "no<|endoftext|><|endoftext|>\n\n"}
    documents = bench.run("pref", tokenizer, [ended])
    assert documents.trained() == [["yes<|endoftext|>"], ["no<|endoftext|><|endoftext|>"]]
    assert documents.texts()[1] == "Q:no<|endoftext|><|endoftext|>"
    # A token over the border belongs to no answer.
    record = {"prompt": "Q: ", "chosen": "Hello you", "rejected": "Bye"}
    documents = bench.run("pref", bench.tokenizer(merges=chain("ĠHello")), [record])
    assert documents.trained() == [[" you<|endoftext|>"], ["Bye<|endoftext|>"]] and bench.row("merged starts") == 1


def test_bos_of_a_pair(bench):
    adding = make_tokenizer(bench.path / "adding", bos="<s>", post="bos")
    records = [{"prompt": "Q:", "chosen": "A", "rejected": "B"}, {"chosen": "Q:A", "rejected": "Q:B"}]
    documents = bench.run("pref", adding, records)
    assert documents.texts() == ["<s>Q:A<|endoftext|>", "<s>Q:B<|endoftext|>"] * 2
    assert documents.trained() == [["A<|endoftext|>"], ["B<|endoftext|>"]] * 2
    assert bench.run("pref", adding, records, "--add_bos", "never").texts() == ["Q:A<|endoftext|>", "Q:B<|endoftext|>"] * 2


@pytest.mark.parametrize("merges, chosen, rejected, trained", [
    ([], "Q: yes", "Q: yet", ["s<|endoftext|>", "t<|endoftext|>"]),
    (chain("yes", "yet"), "Q: yes", "Q: yet", ["yes<|endoftext|>", "yet<|endoftext|>"]),  # one token each
    (chain("Ġyes"), "Q: yes", "Q: yet", [" yes<|endoftext|>", " yet<|endoftext|>"]),  # only one of them swallows the space
    (chain("yes"), "Q: yes", "Q: yes, so", ["<|endoftext|>", ", so<|endoftext|>"]),  # one begins the other
    (chain("yes") + [("yes", "yes")], "Q: yesyes", "Q: yes", ["yesyes<|endoftext|>", "yes<|endoftext|>"]),
    ([], "😀", "😁", ["\ufffd<|endoftext|>"] * 2),  # of four bytes the last differs
    ([], "Yes", "No", ["es<|endoftext|>", "o<|endoftext|>"]),  # nothing in common
    ([], "<|im_start|>Q<|im_end|>A<|im_end|>\n", "<|im_start|>Q<|im_end|>B<|im_end|>\n",
     ["A<|im_end|><|endoftext|>", "B<|im_end|><|endoftext|>"])])
def test_prompt_of_two_strings_is_what_they_begin_with(bench, merges, chosen, rejected, trained):
    documents = bench.run("pref", bench.tokenizer(merges=merges), [{"chosen": chosen, "rejected": rejected}])
    assert documents.trained() == [[run] for run in trained]


def test_spans_of_random_pairs_in_bytes(bench):
    """The targets once more from bytes alone: where each token begins and ends, and how far the texts agree."""
    rng = np.random.default_rng(1)
    tokenizer = bench.tokenizer(merges=chain("aab", "abb", "Ġab", "Ġba", "baĠ") + [("Ã", "©"), ("a", "Ã")])

    def text(most):
        return "".join(rng.choice(["a", "b", "ab", " ", "é", "è", "<|im_end|>", "\n"]) for _ in range(rng.integers(1, most)))

    begun = [(text(9), text(6), text(6)) for _ in range(400)]
    begun = [(p, c, r) for p, c, r in begun if len({"", c.strip(), r.strip()}) == 3]
    for explicit in (True, False):
        records = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in begun]
        if not explicit:
            records = [{"chosen": p + c, "rejected": p + r} for p, c, r in begun]
        documents = bench.run("pref", tokenizer, records)
        pieces = [token_bytes(documents, ids) for ids in documents.ids]
        bounds = [np.cumsum([0, *map(len, p)]).tolist() for p in pieces]
        whole = [b"".join(p) for p in pieces]
        assert len(pieces) == 2 * len(begun) > 500
        for i, (prompt, *_) in zip(range(0, len(pieces), 2), begun):
            start = len(prompt.encode())
            if not explicit:
                agreed = len(os.path.commonprefix(whole[i:i + 2]))
                start = max(b for b in {*bounds[i]} & {*bounds[i + 1]} if b <= agreed)
            for j in (i, i + 1):
                assert documents.masks[j] == [int(b >= start and t > 0) for t, b in enumerate(bounds[j][:-1])], whole[i:i + 2]


def test_openrlhf_keys_of_pairs(bench):
    tokenizer = bench.tokenizer(CHATML, merges=[])
    keys = ["--prompt_key", "q", "--chosen_key", "good", "--rejected_key", "bad"]
    strings = [{"q": "Why {x}?", "good": "So", "bad": "No", "prompt": "not this"}]
    assert bench.run("pref", tokenizer, strings, *keys).texts() == ["Why {x}?So<|endoftext|>", "Why {x}?No<|endoftext|>"]
    documents = bench.run("pref", tokenizer, strings, *keys, "--input_template", "User: {}\nAssistant: ")
    assert documents.texts() == ["User: Why {x}?\nAssistant: So<|endoftext|>", "User: Why {x}?\nAssistant: No<|endoftext|>"]
    assert documents.trained() == [["So<|endoftext|>"], ["No<|endoftext|>"]]
    documents = bench.run("pref", tokenizer, strings, *keys, "--apply-chat-template")
    assert documents.texts() == [ASKED.replace("Why", "Why {x}") + word + "<|im_end|>" for word in ("So", "No")]
    lists = [{"q": QUESTION, "good": [said("So")], "bad": [said("No")]}]
    for flags in ([*keys, "--apply_chat_template"], keys):
        assert bench.run("pref", tokenizer, lists, *flags).texts() == [ASKED + "So<|im_end|>", ASKED + "No<|im_end|>"]
    # Without a prompt_key the prompt is all messages but the last.
    chats = [{"good": CHAT, "bad": [*CHAT[:4], said("No")]}]
    documents = bench.run("pref", tokenizer, chats, *keys[2:], "--apply_chat_template")
    assert documents.trained() == [["Bye<|im_end|>"], ["No<|im_end|>"]]
    documents = bench.run("pref", tokenizer, chats, *keys[2:], "--tokenizer_chat_template", LLAMA2.replace("bos_token + ", ""))
    assert documents.trained() == [[" Bye <|endoftext|>"], [" No <|endoftext|>"]]


def test_margins(bench):
    tokenizer = bench.tokenizer(merges=[])
    pair = {"prompt": "Q", "chosen": "a", "rejected": "b"}
    dropped = pair | {"rejected": "a", "margin": 7}
    records = [pair | {"margin": 1.5}, pair, dropped, pair | {"margin": -2}, pair | {"margin": None}]
    documents = bench.run("pref", tokenizer, records)
    margin = documents.arrays["margin"]
    assert (margin.dtype, margin.tolist()) == (np.float32, [1.5, 0, -2, 0]) and len(documents.ids) == 8
    assert list(documents.arrays) == ["doc_offsets", "margin", "tokens", "loss_mask"]  # the widest first, for their alignment
    assert bench.row("without a margin") == 2

    from safetensors.numpy import load_file
    np.testing.assert_array_equal(load_file(bench.path / "out.safetensors")["margin"], margin)
    bench.run("pref", tokenizer, [pair | {"margin": 1}])
    assert "without a margin" not in bench.printed
    with open(bench.path / "b.csv", "w", newline="") as file:
        csv.writer(file).writerows([["chosen", "rejected", "margin"], ["Qa", "Qb", "0.25"], ["Qa", "Qb", ""]])
    assert bench.run("pref", tokenizer, str(bench.path / "b.csv")).arrays["margin"].tolist() == [0.25, 0]
    # Of the pairs that are left none has one.
    assert "margin" not in bench.run("pref", tokenizer, [pair, pair | {"rejected": "", "margin": 1}]).arrays


def test_dropped_pairs_are_counted_with_their_reason(bench):
    tokenizer = bench.tokenizer(CHATML, merges=[])
    good = {"prompt": "Q:", "chosen": "ab", "rejected": "ac"}
    chat = {"prompt": QUESTION, "chosen": [said("a")], "rejected": [said("b")]}
    equal = [good | {"rejected": "ab"}, good | {"rejected": "ab<|endoftext|>"}, chat | {"rejected": [said("a")]},
             {"chosen": "Q", "rejected": "Q"}]
    empty = [good | {"chosen": ""}, good | {"rejected": " \n"}, chat | {"chosen": [said(" ")]}, {"chosen": "Q", "rejected": ""}]
    records = [good, *equal, chat, *empty, good | {"rejected": "a" * 50}]
    documents = bench.run("pref", tokenizer, records, "--max_len", "25")
    assert documents.texts() == ["Q:ab<|endoftext|>", "Q:ac<|endoftext|>", ASKED + "a<|im_end|>", ASKED + "b<|im_end|>"]
    for name, count in {"records read": 11, "dropped": 9, "answers are equal": 4, "an answer is empty": 4,
                        "longer than 25 tokens": 1, "pairs kept": 2, "tokens": 2 * 5 + 2 * 25, "target tokens": 2 * 3 + 2 * 2,
                        "length of the chosen": 15, "length of the rejected": 15}.items():
        assert bench.row(name) == count, name
    # A call of a tool without a word is no empty answer.
    called = CHATML.replace("m['content']", "(m['content'] or m['tool_calls'][0]['name'])")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
    documents = bench.run("pref", bench.tokenizer(called, merges=[]), [chat | {"chosen": [call]}])
    assert documents.trained() == [["look<|im_end|>"], ["b<|im_end|>"]]


def test_truncated_pairs(bench):
    tokenizer = bench.tokenizer(merges=[])
    # Nothing is a target where only first tokens differ.
    assert "no record is left" in bench.refused("pref", tokenizer, [{"chosen": "a", "rejected": "b"}], "--append_eos", "false")
    records = [{"prompt": "Q:", "chosen": "abc", "rejected": "b"}, {"prompt": "Q:", "chosen": "abc", "rejected": "abd"},
               {"prompt": "QQQQ", "chosen": "abc", "rejected": "b"}, {"prompt": "Q:", "chosen": "a", "rejected": "b"},
               {"chosen": "QQQQa", "rejected": "QQQQb"}]
    documents = bench.run("pref", tokenizer, records, "--max_len", "4", "--truncation", "keep")
    assert documents.texts() == ["Q:ab", "Q:b<|endoftext|>", "Q:a<|endoftext|>", "Q:b<|endoftext|>"]  # no end where there is none
    assert documents.trained() == [["ab"], ["b<|endoftext|>"], ["a<|endoftext|>"], ["b<|endoftext|>"]]
    names = ("cut to 4 tokens", "dropped", "truncated to nothing", "pairs kept")
    assert [bench.row(name) for name in names] == [1, 3, 3, 2]
    assert bench.run("pref", tokenizer, records, "--max_len", "4").texts() == documents.texts()[2:]
    assert [bench.row(name) for name in ("longer than 4 tokens", "pairs kept")] == [4, 1]


def test_pairs_do_not_depend_on_the_number_of_processes(bench):
    tokenizer = bench.tokenizer(CHATML)
    pairs = [{"prompt": f"{i}?", "chosen": [said(f"Hello {i} " * (i % 7))], "rejected": [said("No")]} for i in range(2500)]
    source = bench.jsonl(*pairs[:2001], *[pair | {"margin": i} for i, pair in enumerate(pairs[2001:], 2001)])
    out = str(bench.path / "out.safetensors")
    arguments = ["pref", "--input", source, "--tokenizer", tokenizer, "--out", out, "--max_len", "80"]
    results = []
    for processes in (1, 3):
        prepare.prepare("pref", prepare.build_parser().parse_args(arguments), processes)
        results.append((bench.path / "out.safetensors").read_bytes())
    assert results[0] == results[1]
    documents = Documents(bench.path / "out.safetensors", tokenizer)
    margin, kept = documents.arrays["margin"], [text for text in documents.texts() if "Hello" in text]
    assert len(margin) * 2 == len(documents.ids) and 1500 < len(margin) == len(kept) < 2500
    assert margin.tolist() == [i if i > 2000 else 0 for i in (int(re.search(r"(\d+)\?", text).group(1)) for text in kept)]


@pytest.mark.parametrize("flags, record, expected", [
    ([], {"chosen": "a"}, "has no field 'rejected', so it is no pair of answers; it has chosen\n  fix: name the fields with --"),
    ([], {"messages": CHAT}, "has no field 'chosen', so it is no pair of answers; it has messages"),
    ([], {"prompt": "Q", "completion": "a"}, "records with one answer are for the task sft"),
    (["--chosen_key", "good"], {"chosen": "a", "rejected": "b"}, "has no field 'good', so it is no pair"),
    (["--prompt_key", "q"], {"chosen": "a", "rejected": "b"}, "chosen, rejected\n  fix: name the right one with --prompt_key"),
    ([], {"chosen": 1, "rejected": 2}, "'chosen' is a number, not a list of messages"),
    ([], {"prompt": 1, "chosen": "a", "rejected": "b"}, "'prompt' is a number, not a list of messages"),
    ([], {"chosen": [said("a")], "rejected": "b"}, "'chosen' is a list and 'rejected' a string"),
    ([], {"chosen": [*QUESTION, said("a")], "rejected": []}, "'rejected' is an empty list"),
    ([], {"chosen": QUESTION, "rejected": QUESTION}, "'chosen' ends with a message of the role user, not the assistant's"),
    ([], {"chosen": [*QUESTION, said("a")], "rejected": [{"role": "assistant"}]}, "rejected[0] has no content"),
    ([], {"chosen": ["a"], "rejected": ["b"]}, "chosen[0] is no message with a role"),
    (["--apply_chat_template"], {"chosen": "a", "rejected": "b"}, "'chosen' is a string without a prompt, which makes no chat"),
    ([], {"chosen": "a", "rejected": "b", "margin": "much"}, "'margin' is 'much', not a finite number"),
    ([], {"chosen": "a", "rejected": "b", "margin": True}, "'margin' is True, not a finite number"),
    ([], {"chosen": "a", "rejected": "b", "margin": [1]}, "'margin' is [1], not a finite number"),
    ([], {"chosen": "a", "rejected": "b", "margin": float("nan")}, "'margin' is nan, not a finite number"),
    ([], {"chosen": "a", "rejected": "b", "margin": 1e39}, "'margin' is 1e+39, not a finite number"),
    ([], {"chosen": "a", "rejected": "b", "margin": 10 ** 400}, "not a finite number"),
    ([], '{"chosen": "a\\ud83d", "rejected": "b"}', "half of a surrogate pair"),
])
def test_bad_pairs(bench, flags, record, expected):
    good = {"prompt": QUESTION, "q": QUESTION, "chosen": [said("a")], "good": [said("a")], "rejected": [said("b")]}
    error = bench.refused("pref", bench.tokenizer(CHATML), [good, record], *flags)
    assert error.startswith("record 2 (line 2) of in.jsonl: ") and expected in error


def test_pairs_are_not_for_other_tasks(bench):
    pair = {"prompt": "Q", "chosen": "a", "rejected": "b"}
    for task in ("sft", "pretrain"):
        error = bench.refused(task, bench.tokenizer(), [pair])
        assert "is a pair of answers, chosen and rejected\n  fix: prepare it with the task pref" in error
    chats = [{"chosen": [*QUESTION, said("a")], "rejected": [*QUESTION, said("b")]}]
    assert "the tokenizer has no chat template" in bench.refused("pref", bench.tokenizer(), chats)
    assert "invalid choice: 'split'" in bench.refused("pref", bench.tokenizer(CHATML), chats, "--truncation", "split")
    assert "has no {}" in bench.refused("pref", bench.tokenizer(CHATML), chats, "--input_template", "User:")
    named = bench.run("sft", bench.tokenizer(CHATML), chats, "--input_key", "chosen", "--apply_chat_template")
    assert named.trained() == [["a<|im_end|>"]]


# ---- prompts


def test_prompts(bench):
    tokenizer = bench.tokenizer(CHATML, merges=[])
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    documents = bench.run("prompts", tokenizer, [{"prompt": "Why?"}, {"messages": CHAT[:2]}], "--prompt", "Why?")
    assert documents.texts() == [asked, asked, "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                                               "<|im_start|>assistant\n"]
    assert documents.trained() == [[], [], []] and documents.metadata["kind"] == "prompts"
    documents = bench.run("prompts", tokenizer, None, "--prompt=Why?", "--prompt", " ", "--no-chat-template")
    assert documents.texts() == ["Why?", " "]
    adding = make_tokenizer(bench.path / "adding", bos="<s>", post="bos")
    assert bench.run("prompts", adding, None, "--prompt", "Why?").texts() == ["<s>Why?"]  # without a template plain text


# ---- the file


def test_file(bench):
    tokenizer = bench.tokenizer(CHATML)
    documents = bench.run("sft", tokenizer, [{"messages": CHAT}, {"text": "odd"}], "--max_len", "999")
    arrays, metadata = documents.arrays, documents.metadata
    assert (arrays["tokens"].dtype, arrays["loss_mask"].dtype, arrays["doc_offsets"].dtype) == (np.uint16, np.uint8, np.int64)
    assert len(arrays["tokens"]) == len(arrays["loss_mask"]) == arrays["doc_offsets"][-1]
    assert metadata == {"kind": "sft", "vocab_size": str(len(documents.hf)), "tokenizer_hash": Tokenizer(tokenizer).hash,
                        "max_len": "999", "template_hash": fnv1a(CHATML), "source": "in.jsonl", "version": "1"}
    assert [name for name in os.listdir(bench.path) if name.startswith("out")] == ["out.safetensors"]
    data = (bench.path / "out.safetensors").read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0 and list(arrays)[0] == "doc_offsets"  # so that 8-byte integers are aligned

    from safetensors.numpy import load_file
    for name, array in load_file(bench.path / "out.safetensors").items():
        np.testing.assert_array_equal(array, arrays[name])


def test_large_vocabulary_takes_32_bits(tmp_path):
    from token_file import TokenFile

    file = TokenFile(str(tmp_path / "f"), vocab_size=65537)
    file.append(np.array([1, 65536], np.int32), np.array([0, 1], np.uint8), np.array([2]))
    file.write({"kind": "sft"})
    file.close()
    assert read_safetensors(tmp_path / "f")[0]["tokens"].tolist() == [1, 65536]


def test_result_does_not_depend_on_the_number_of_processes(bench):
    tokenizer = bench.tokenizer(CHATML)
    words = [{"messages": [CHAT[1], {"role": "assistant", "content": f"Hello {i} " * (i % 7)}]} for i in range(2500)]
    source = bench.jsonl(*words)
    results = []
    for processes in (1, 3):
        arguments = ["sft", "--input", source, "--tokenizer", tokenizer, "--out", str(bench.path / "out.safetensors")]
        prepare.prepare("sft", prepare.build_parser().parse_args(arguments), processes)
        results.append((bench.path / "out.safetensors").read_bytes())
    assert results[0] == results[1]


def test_hash(tmp_path):
    assert [fnv1a(text) for text in ("", "a", "foobar")] == ["cbf29ce484222325", "af63dc4c8601ec8c", "85944171f73967e8"]
    vocabulary = {"é": 2, "a": 0, "<x>": 1}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 3, "content": "<|end|>", "special": True, **plain}, {"id": 1, "content": "<x>", "special": False, **plain}]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert Tokenizer(str(tmp_path)).hash == fnv1a("0\ta\t0\n1\t<x>\t0\n2\té\t0\n3\t<|end|>\t1\n") == "4822e3d0bf5859d2"


def test_sentencepiece_style_tokenizer(bench):
    from tokenizers import Tokenizer as Backend, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<unk>", "▁", *(f"<0x{b:02X}>" for b in range(256)), *"Q:yes", "</s>"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>").save_pretrained(bench.path / "spm")
    documents = bench.run("sft", str(bench.path / "spm"), [{"prompt": "Q😀:", "completion": " yes😀"}])
    tokens = documents.hf.convert_ids_to_tokens(documents.ids[0])
    emoji = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokens == ["▁", "Q", *emoji, ":", "▁", "y", "e", "s", *emoji, "</s>"]
    assert documents.masks[0] == [0] * 7 + [1] * 9


# ---- refusals: one message, what and where and how to mend it; nothing written


@pytest.mark.parametrize("records, expected", [
    (['{"text": "a"}', "", '{"text": "b"'], "record 2 (line 3) of in.jsonl: broken JSON: "),
    (['["text"]'], "record 1 (line 1) of in.jsonl: is a JSON list, not an object"),
    ([{"question": "a", "reply": "b"}], "has fields question, reply, none of which can be used\n  fix: accepted are: messages; "),
    ([{"prompt": 1, "completion": "b"}], "'prompt' is a number, not a list of messages"),
    ([{"text": ["a"]}], "'text' is a list, not a string"),
    ([{"messages": []}], "'messages' is an empty list"),
    ([{"messages": [{"role": "user"}]}], "messages[0] has no content; it has role"),
    ([{"messages": [{"content": "Hi"}]}], "messages[0] is no message with a role; it has content"),
    ([{"messages": CHAT[:1]}], "the chat template refuses its messages: unknown role system (roles: system)"),
    ([{"input_ids": [1, 2, 3], "labels": [1, 2]}], "has 3 input_ids but 2 labels"),
    ([{"input_ids": [1, 99999], "labels": [1, 99999]}], "input_ids[1] is 99999, outside the vocabulary of "),
    ([{"input_ids": [1, -1], "labels": [1, -1]}], "input_ids[1] is -1, outside the vocabulary of "),
    ([{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}], "labels[0] is 2 but input_ids[0] is 1"),
    ([{"input_ids": [1.5], "labels": [1]}], "'input_ids' is not a list of integers"),
    ([{"input_ids": [[1], [2, 3]], "labels": [1]}], "'input_ids' is not a list of integers"),
    (['{"text": "a\\ud83d"}'], "half of a surrogate pair: '\\ud83d'"),
    ([{"messages": [CHAT[1]]}], "no record is left"),
])
def test_bad_records(bench, records, expected):
    error = bench.refused("sft", bench.tokenizer(STRICT), records)
    assert expected in error
    assert error.startswith(f"record {sum(r != '' for r in records)} (line {len(records)}) of in.jsonl: ") or "no record" in error


def test_bad_record_in_a_worker_process(bench):
    source = bench.jsonl(*[{"text": "a"}] * 2500, {"txt": "a"})
    arguments = ["sft", "--input", source, "--tokenizer", bench.tokenizer(), "--out", str(bench.path / "out.safetensors")]
    with pytest.raises(prepare.DataError, match=r"record 2501 \(line 2501\) of .*in.jsonl: has fields txt"):
        prepare.prepare("sft", prepare.build_parser().parse_args(arguments), 3)
    assert not (bench.path / "out.safetensors").exists()


def test_rewritten_content_is_refused(bench):
    counting = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
    moody = CHATML.replace("'<|im_end|>\\n'", "('<|im_end|>' if m['content'] == 'Bye' else '<|im_end|>\\n')")
    for template, turn in ((counting, 2), (moody, 4)):
        error = bench.refused("sft", bench.tokenizer(template), [{"messages": CHAT}])
        assert error.startswith(f"record 1 (line 1) of in.jsonl: messages[{turn}], the assistant's, cannot be found in the")
    assert bench.run("sft", bench.tokenizer(CHATML), [{"messages": CHAT}])


def test_bad_inputs(bench):
    tokenizer = bench.tokenizer()
    bench.jsonl(name="empty.jsonl")
    bench.jsonl("", name="blank.jsonl")
    (bench.path / "x.txt").write_text("x")
    (bench.path / "list.json").write_text("[1")
    (bench.path / "bad.csv").write_text("prompt,completion\na,b\na,b,c\n")
    (bench.path / "bad.parquet").write_text("no")
    (bench.path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    for name, expected in {"none.jsonl": "none.jsonl: there is no such file", "empty.jsonl": "empty.jsonl: the file is empty",
                           "blank.jsonl": "blank.jsonl: holds no records", "x.txt": "x.txt: unknown kind of file",
                           "list.json": "list.json: broken JSON",
                           "bad.csv": "line 3 of bad.csv: has 3 cells but the header has 2",
                           "bad.parquet": "bad.parquet: broken parquet file", "": " is a directory",
                           "latin.jsonl": "record 1 (line 1) of latin.jsonl: broken JSON: 'utf-8' codec"}.items():
        assert expected in bench.refused("sft", tokenizer, str(bench.path / name))


def test_bad_tokenizers(bench):
    records = [{"messages": CHAT}]
    assert "no-such: there is no such directory" in bench.refused("sft", bench.path / "no-such", records)
    (bench.path / "bare").mkdir()
    assert "bare: holds no tokenizer.json" in bench.refused("sft", bench.path / "bare", records)
    (bench.path / "bare" / "tokenizer.json").write_text('{"model": {}}')
    assert "bare/tokenizer.json: is no tokenizer" in bench.refused("sft", bench.path / "bare", records)
    assert "the tokenizer has no chat template" in bench.refused("sft", bench.tokenizer(), records)
    assert "there is no chat template to render" in bench.refused("prompts", bench.tokenizer(), records)
    assert "has no eos_token" in bench.refused("pretrain", bench.tokenizer(eos=None), [{"text": "a"}])
    assert "has no bos_token" in bench.refused("pretrain", bench.tokenizer(), [{"text": "a"}], "--add_bos", "always")


def test_bad_flags(bench):
    tokenizer, good = bench.tokenizer(CHATML), [{"messages": CHAT}]
    assert "invalid choice: 'split'" in bench.refused("sft", tokenizer, good, "--truncation", "split")
    assert "unrecognized arguments: --maxlen" in bench.refused("sft", tokenizer, good, "--maxlen", "5")
    assert "neither true nor false" in bench.refused("sft", tokenizer, good, "--append_eos", "maybe")
    assert "takes two" in bench.refused("sft", tokenizer, good, "--max_len", "1")
    assert "has no {}" in bench.refused("sft", tokenizer, good, "--input_template", "User:")
    assert "neither a template nor a file" in bench.refused("sft", tokenizer, good, "--tokenizer_chat_template", "none.jinja")
    assert "has no field 'chat'; it has messages" in bench.refused("sft", tokenizer, good, "--input_key", "chat")
    assert "there is no answer to the prompt" in bench.refused("sft", tokenizer, [{"q": "a"}], "--input_key", "q")
    assert "there is nothing to prepare" in bench.refused("prompts", tokenizer, None)
    assert "nothing to answer" in bench.refused("prompts", tokenizer, good)
    error = bench.refused("prompts", tokenizer, None, "--prompt", "", "--prompt", "a", "--no_chat_template")
    assert "record 1 of --prompt: the prompt is empty" in error


def test_refusal_leaves_an_older_file_alone_and_has_no_traceback(bench):
    (bench.path / "out.safetensors").write_text("old")
    source = bench.jsonl({"messages": CHAT}, "{")
    command = [sys.executable, str(DATA / "prepare.py"), "sft", "--input", source, "--tokenizer", bench.tokenizer(CHATML),
               "--out", str(bench.path / "out.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"record 2 (line 2) of {source}: broken JSON") and len(result.stderr.splitlines()) == 2
    assert (bench.path / "out.safetensors").read_text() == "old" and len(os.listdir(bench.path)) == 3

    bench.jsonl({"messages": CHAT})
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and "target tokens" in result.stdout
    assert Documents(bench.path / "out.safetensors", str(bench.path / "tokenizer")).trained() == BOTH_TURNS


def test_out_in_no_directory(bench):
    arguments = ["sft", "--input", bench.jsonl({"messages": CHAT}), "--tokenizer", bench.tokenizer(CHATML), "--out"]
    assert prepare.main([*arguments, str(bench.path / "none" / "f")]) == 1
    assert "its directory does not exist" in bench.capsys.readouterr().err
