"""Helpers for tests of data/prepare.py: tokenizers and templates, calls in this process, and prepared files."""

import csv
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers, processors
from runs import ROOT, chat, header_of  # adds data/ to sys.path
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast  # prints a note at its first import, which must not be in a test

import prepare
from tokenizer import Tokenizer

DATA = ROOT / "data"

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
CHATML_STRIPPED = CHATML.replace("m['content']", "m['content'] | trim")
CHATML_WITHOUT_PROMPT = CHATML[:CHATML.index("{% if")]
CHATML_MARKED = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
                 "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
                 "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}")
STRICT = ("{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
          "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{% endfor %}" + CHATML)
# As in Qwen3: earlier turns lose their reasoning, and the last turn always has a reasoning block.
THINKING = ("{% for m in messages %}{% set c = m['content'] %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
            "{% if m['role'] == 'assistant' %}{% set a = c.split('</think>')[-1].lstrip('\\n') %}"
            "{% if loop.last %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in c else '' %}"
            "{{ '<think>\\n' + r + '\\n</think>\\n\\n' + a }}{% else %}{{ a }}{% endif %}"
            "{% else %}{{ c }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
# As in Llama 2: no header, and a space before and after the answer.
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
          "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
# As in a template of Mistral: a mark precedes only the last user message, so a shorter chat's rendering is no prefix of the whole.
LAST_MARKED = LLAMA2.replace("{{ bos_token + ", "{% if loop.last or loop.index == loop.length - 1 %}{{ '#' }}{% endif %}{{ ")
# Alpaca's headlines in plain text, and one end token after the whole chat.
HEADLINES = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '### Instruction:\n' + m['content'] + '\n\n' }}{% else %}"
             "{{ '### Response:\n' + m['content'] }}{% if loop.last %}{{ eos_token }}{% else %}{{ '\n\n' }}{% endif %}{% endif %}{% endfor %}"
             "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}")
# As in Qwen3: tools before the chat, calls after the content, reasoning in the last turn alone; other roles are not rendered.
CALLING = ("{% if tools %}{{ '# Tools ' + (tools | tojson) + '\n' }}{% endif %}"
           "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
           "{% for m in messages %}{% if m.role in ['system', 'user', 'tool'] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
           "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
           "{% if m.reasoning_content and loop.index0 > last.user %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
           "{% for call in m.tool_calls or [] %}{{ '<call>' + (call.function | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# No special token ends a turn.
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


def gpt(*texts):
    """Messages in the layout of ShareGPT."""
    return chat(*texts, roles=("human", "gpt"), keys=("from", "value"))


def said(text):
    return {"role": "assistant", "content": text}


def turn(role, text):
    """A message in ChatML."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def asked(text, system=None):
    """A prompt in ChatML that asks for an answer."""
    return (turn("system", system) if system else "") + turn("user", text) + "<|im_start|>assistant\n"


CHAT = [{"role": "system", "content": "Be short."}, *chat("Hi", "Hello there", "And?", "Bye")]
BOTH_TURNS = [["Hello there<|im_end|>", "Bye<|im_end|>"]]


def chain(*words):
    """The merges that make each word one token."""
    merges = []
    for word in words:
        for i in range(1, len(word)):
            if (word[:i], word[i]) not in merges:
                merges.append((word[:i], word[i]))
    return merges


def make_tokenizer(path, template=None, merges=chain("Hello", "ĠHello", "ĊĊ"), rstrip=False, bos=None, eos="<|endoftext|>", post=None, marks=()):
    """Saves a byte-level BPE tokenizer of 256 bytes, the merges in the given order, and special tokens, also the given marks."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=rstrip and t == "<|im_end|>")
                                for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", *marks)])
    trim = processors.ByteLevel(trim_offsets=True)  # the usual post-processor, which shortens offsets
    adds_bos = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", len(vocab) + 3)])
    backend.post_processor = processors.Sequence([trim, adds_bos]) if post == "bos" else trim
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


def prepared(path, task, records, tokenizer, *flags):
    """The file that prepare.py makes from the records, in this process, because a new one needs two seconds to load transformers."""
    source = path.with_suffix(".jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepare.main([task, "--input", str(source), "--tokenizer", str(tokenizer), "--out", f"{path}.safetensors", *map(str, flags)]) == 0
    return f"{path}.safetensors"


def read_safetensors(path):
    """The arrays in the order of the file, and the metadata."""
    header, arrays = header_of(Path(path))[0], load_file(path)
    metadata = header.pop("__metadata__")
    return {name: arrays[name] for name in header}, metadata


class Documents:
    """The ids and masks of a prepared file."""

    def __init__(self, path, tokenizer):
        self.arrays, self.metadata = read_safetensors(path)
        self.hf = Tokenizer(str(tokenizer)).hf
        offsets = self.arrays["doc_offsets"]
        self.ids = [self.arrays["tokens"][a:b].tolist() for a, b in zip(offsets, offsets[1:])]
        self.masks = [self.arrays["loss_mask"][a:b].tolist() for a, b in zip(offsets, offsets[1:])]
        assert all(mask[0] == 0 for mask in self.masks)

    def decode(self, ids):
        return self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def texts(self):
        return [self.decode(ids) for ids in self.ids]

    def trained(self):
        """The text of each run of targets, per document."""
        runs = []
        for ids, mask in zip(self.ids, self.masks):
            runs.append([])
            for t, target in enumerate(mask):
                if target and not mask[t - 1]:
                    runs[-1].append([])
                if target:
                    runs[-1][-1].append(ids[t])
        return [[self.decode(run) for run in document] for document in runs]


class Case(NamedTuple):
    """A call of prepare.py, and its results."""

    source: list  # of records; or a value of --input
    trained: list = None  # the text of each run of targets, per document
    texts: list = None  # per document
    rows: dict = {}  # numbers of the printed table, None for a missing one
    task: str = "sft"
    template: str = CHATML
    tokenizer: dict = {}  # arguments of make_tokenizer
    flags: list = []


DEEP = "[" * 100_000 + "]" * 100_000
GREETING = {"messages": chat("Hi", "Hello")}
QA = {"prompt": "Q", "completion": "A"}
AB = {"chosen": "a", "rejected": "b"}
GOOD = {"sft": GREETING, "prompts": {"prompt": "Q"}, "rl": {"prompt": "Q"}, "pretrain": {"text": "a"},
        "pref": {"prompt": chat("Hi"), "q": chat("Hi"), "chosen": [said("a")], "good": [said("a")], "rejected": [said("b")]},
        "unpaired": QA | {"label": True}}  # a record of each task


class Bench:
    """A directory with inputs and outputs, and prepare.py called in this process."""

    def __init__(self, path, capsys):
        self.path = path
        self.out = path / "out.safetensors"
        self.capsys = capsys
        self.printed = ""

    def tokenizer(self, template=None, **options):
        return make_tokenizer(self.path / "tokenizer", template, **options)

    def write(self, name, content):
        """Writes text or bytes. Returns the path as a string."""
        (self.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(self.path / name)

    def jsonl(self, *records, name="in.jsonl"):
        return self.write(name, "".join((r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)) + "\n" for r in records))

    def csv(self, *rows):
        with open(self.path / "in.csv", "w", newline="") as file:
            csv.writer(file).writerows(rows)
        return str(self.path / "in.csv")

    def arguments(self, task, tokenizer, source, *flags):
        """The command line. `source` is a list of records, a value of --input, or None."""
        source = self.jsonl(*source) if isinstance(source, list) else source
        return [task, *(["--input", source] if source else []), "--tokenizer", str(tokenizer), "--out", str(self.out), *flags]

    def call(self, *arguments):
        """The exit code and the message."""
        status = prepare.main(self.arguments(*arguments))
        self.printed, error = self.capsys.readouterr()
        return status, error

    def run(self, task, tokenizer, source, *flags):
        status, error = self.call(task, tokenizer, source, *flags)
        assert status == 0, error
        return Documents(self.out, tokenizer)

    def run_in(self, processes, *arguments):
        """The bytes of the file that this number of processes writes."""
        arguments = self.arguments(*arguments)
        prepare.prepare(arguments[0], prepare.build_parser().parse_args(arguments), processes)
        return self.out.read_bytes()

    def expect(self, case):
        documents = self.run(case.task, self.tokenizer(case.template, **case.tokenizer), case.source, *case.flags)
        assert case.trained is None or documents.trained() == case.trained
        assert case.texts is None or documents.texts() == case.texts
        assert {name: self.row(name) for name in case.rows} == case.rows
        return documents

    def refused(self, task, tokenizer, source, *flags):
        """The only message, which has a fix. No file is written."""
        status, error = self.call(task, tokenizer, source, *flags)
        assert status == 1
        assert error.count("\n  fix: ") == 1 and "Traceback" not in error
        assert not [name for name in os.listdir(self.path) if name.startswith("out")]
        return error.replace(str(self.path) + "/", "")

    def row(self, name):
        """The number in the row of the table with this name."""
        found = re.search(rf"^ *{re.escape(name)} +([\d,]+)", self.printed, re.M)
        return int(found[1].replace(",", "")) if found else None

    def refused_record(self, task, template, record, *flags):
        """The message on the second record, without its place."""
        error = self.refused(task, self.tokenizer(template), [GOOD[task] if template else {"text": "a"}, record], *flags)
        assert error.startswith("record 2 (line 2) of in.jsonl: "), error
        return error.removeprefix("record 2 (line 2) of in.jsonl: ")
