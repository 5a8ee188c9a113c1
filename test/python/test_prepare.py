"""data/prepare.py on prompts with answers, text and ready-made ids. The tests decode the trained tokens; lengths; fields named by flags; prompts without
answers; and the output file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from preparing import (
    BOTH_TURNS, CHAT, CHATML, CHATML_MARKED, DATA, LLAMA2, PLAIN, STRICT, Case, Documents, asked, chain, chat, prepare, read_safetensors)
from tokenizer import Tokenizer, fnv1a

QA = {"prompt": "Q", "completion": "A"}
TEXTS = [{"text": "One"}, {"text": "<s>Two"}]
WITH_BOS, WITHOUT_BOS = ["<s>One<|endoftext|>", "<s>Two<|endoftext|>"], ["One<|endoftext|>", "<s>Two<|endoftext|>"]
SILENT, ADDING = {"bos": "<s>"}, {"bos": "<s>", "post": "bos"}  # the tokenizer itself adds BOS or not
LONG = [{"prompt": "Q:", "completion": "abcdef"}, {"prompt": "Q:", "completion": "a"}, {"prompt": "QQQQQQ", "completion": "a"}]
STRINGS = [{"question": "Why {x}?", "response": "So"}]
KEYS = ["--input_key", "question", "--output_key", "response"]
ORCA = {"system_prompt": "Be terse.", "question": "Name a river.", "response": "The Maranon."}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
BELOW = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
ANSWERED = asked("Why {x}?") + "So<|im_end|>\n"
DOCUMENTS = {
    "prompts and completions": Case(
        [{"prompt": "Q: ", "completion": "yes"}, {"prompt": "Q:", "completion": " yes"}, {"prompt": "Q:", "completion": "\n\nyes\n"},
         {"prompt": "Q:", "completion": "yes<|endoftext|>"}, {"prompt": "é", "completion": "😀"}, {"prompt": "", "completion": "yes"}],
        [["yes<|endoftext|>"], [" yes<|endoftext|>"], ["\n\nyes\n<|endoftext|>"], ["yes<|endoftext|>"], ["😀<|endoftext|>"], ["es<|endoftext|>"]],
        ["Q: yes<|endoftext|>", "Q: yes<|endoftext|>", "Q:\n\nyes\n<|endoftext|>", "Q:yes<|endoftext|>", "é😀<|endoftext|>", "yes<|endoftext|>"]),
    "a token across the border is no target": Case(
        [{"prompt": "Q: ", "completion": "Hello"}, {"prompt": "Q:", "completion": " Hello"}, {"prompt": "Q\n", "completion": "\nHello"},
         {"prompt": "Q ", "completion": "He"}], [["<|endoftext|>"], [" Hello<|endoftext|>"], ["Hello<|endoftext|>"], ["<|endoftext|>"]],
        rows={"merged starts": 3}, tokenizer={"merges": chain("ĠHello", "ĊĊ")}),
    "no BOS": Case(TEXTS, texts=WITHOUT_BOS, task="pretrain", tokenizer=SILENT),
    "BOS always": Case(TEXTS, texts=WITH_BOS, task="pretrain", tokenizer=SILENT, flags=["--add_bos", "always"]),
    "BOS by the tokenizer": Case(TEXTS, [["One<|endoftext|>"], ["Two<|endoftext|>"]], WITH_BOS, task="pretrain", tokenizer=ADDING),
    "BOS never": Case(TEXTS, texts=WITHOUT_BOS, task="pretrain", tokenizer=ADDING, flags=["--add_bos", "never"]),
    "BOS before a prompt": Case([QA], texts=["<s>QA<|endoftext|>"], tokenizer=ADDING),
    **{f"text is trained whole and ended, {task}": Case(
        [{"text": "One"}, {"text": "Two<|endoftext|>"}, {"text": ""}], [["ne<|endoftext|>"], ["wo<|endoftext|>"]],
        ["One<|endoftext|>", "Two<|endoftext|>"],
        {"records read": 3, "dropped": 1, "empty": 1, "documents kept": 2}, task, tokenizer={"merges": []}) for task in ("sft", "pretrain")},
    "text without its end": Case([{"text": "One"}], texts=["One"], task="pretrain", flags=["--append-eos=false"]),
    "a long text is split": Case(
        [{"text": "abcdefghij"}, {"text": "klm"}], [["bcd"], ["fgh"], ["j<|endoftext|>"], ["lm<|endoftext|>"]],
        ["abcd", "efgh", "ij<|endoftext|>", "klm<|endoftext|>"],
        {"split": 1}, "pretrain", tokenizer={"merges": []}, flags=["--max_len", "4"]),
    "a remainder of one token is dropped": Case(
        [{"text": "abcdefgh"}], texts=["abcd", "efgh"], task="pretrain", tokenizer={"merges": []}, flags=["--max_len", "4"]),
    "a text is cut": Case([{"text": "abcdef"}], texts=["abcde"], task="pretrain", tokenizer={"merges": []},
                          flags=["--max_len=5", "--truncation=keep"]),
    "a sample that is too long is dropped": Case(
        LONG, [["a<|endoftext|>"]], rows={"dropped": 2, "longer than 5 tokens": 2}, tokenizer={"merges": []}, flags=["--max_len", "5"]),
    "a cut answer has no end token": Case(
        LONG, [["abc"], ["a<|endoftext|>"]], ["Q:abc", "Q:a<|endoftext|>"], {"cut to 5 tokens": 2, "dropped": 1, "without a target token": 1},
        tokenizer={"merges": []}, flags=["--max-len", "5", "--truncation", "keep"]),
    "no answer": Case([{"messages": chat("Hi")}, {"messages": CHAT}], BOTH_TURNS, rows={"without a target token": 1}),
    "strings without a template": Case(STRINGS, texts=["User: Why {x}?\nAssistant: So<|endoftext|>"], template=None),
    "OpenRLHF's text around a prompt": Case(
        STRINGS, [["So<|endoftext|>"]], ["User: Why {x}?\nAssistant: So<|endoftext|>"], tokenizer={"merges": []},
        flags=[*KEYS, "--input_template", "openrlhf"]),
    "other text around a prompt": Case(STRINGS, texts=["Why {x}?=So<|endoftext|>"], flags=[*KEYS, "--input_template", "{}="]),
    **{f"strings are turns if there is a template {flags}": Case(STRINGS, [["So<|im_end|>"]], [ANSWERED], flags=flags)
       for flags in ([*KEYS, "--apply_chat_template"], KEYS, [])},
    "a named chat": Case([{"chat": CHAT}], [["Bye<|im_end|>"]], flags=["--input_key", "chat", "--apply-chat-template", "true"]),
    "the prompt as well": Case([{"prompt": "Q", "completion": "A"}], [["A<|endoftext|>"]], flags=["--train_on_prompt"], tokenizer={"merges": []}),
    "a whole chat": Case([{"messages": CHAT[1:3]}], [[asked("Hi").removeprefix("<|im_start|>") + "Hello there<|im_end|>\n"]], flags=["--train_on_prompt"]),
    "all turns of a named chat": Case([{"chat": CHAT}], BOTH_TURNS, flags=["--input_key", "chat", "--apply_chat_template", "--multiturn"]),
    "all turns of a named chat with its answer": Case(
        [{"chat": CHAT[:4], "last": CHAT[4]}], BOTH_TURNS,
        flags=["--input_key", "chat", "--output_key", "last", "--apply_chat_template", "--multiturn"]),
    "a named text": Case([{"body": "One"}], texts=["One<|endoftext|>"], task="pretrain", flags=["--input_key", "body"]),
    "a chosen answer of a pair": Case(
        [{"chosen": chat("Q", "a"), "rejected": chat("Q", "b")}], [["a<|im_end|>"]], flags=["--input_key", "chosen", "--apply_chat_template"]),
    "a system prompt beside named fields": Case(
        [ORCA | {"prompt": "x", "id": "7", "answer": "y", "source": "z"}], texts=[asked("Name a river.", "Be terse.") + "The Maranon.<|im_end|>\n"],
        flags=[*KEYS, "--apply_chat_template"]),
    **{f"an input template in place of a chat: {form} {context}": Case(
        [ALPACA | {"input": context}], [["3<|endoftext|>"]], [f"{text}3<|endoftext|>"], tokenizer={"merges": []}, flags=["--input_template", form])
       for form, context, text in (
           ("alpaca", "1 2", f"{BELOW}, paired with an input that provides further context. {REQUEST}### Input:\n1 2\n\n### Response:\n"),
           ("alpaca", "", f"{BELOW}. {REQUEST}### Response:\n"), ("<{}>", "1 2", "<Add.\n\n1 2>"))},
    **{f"template by name: {name}": Case([{"messages": chat("Hi", "Yes")}], texts=[text], template=None,
                                         flags=["--tokenizer_chat_template", name]) for name, text in (
        ("chatml", asked("Hi") + "Yes<|im_end|>\n"), ("phi_3", "<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"))},
    "prompts": Case([{"prompt": "Why?"}, {"messages": CHAT[:2]}], [[], [], []], [asked("Why?"), asked("Why?"), asked("Hi", "Be short.")],
                    task="prompts", tokenizer={"merges": []}, flags=["--prompt", "Why?"]),
    "prompts without the template": Case(None, texts=["Why?", " "], task="prompts", flags=["--prompt=Why?", "--prompt", " ", "--no-chat-template"]),
    "prompts if there is no template": Case(None, texts=["<s>Why?"], task="prompts", template=None, tokenizer=ADDING, flags=["--prompt", "Why?"]),
    "rl: named fields": Case(
        [{"q": "Why?"}, {"q": "Why?", "a": "So"}], texts=["User: Why?\nAssistant: ", "User: Why?\nAssistant: So<|endoftext|>"], task="rl",
        tokenizer={"merges": []}, flags=["--input_key", "q", "--output_key", "a", "--input_template", "openrlhf"]),
    "rl: a named prompt": Case([{"q": "Why?"}], texts=[asked("Why?")], task="rl", flags=["--input_key", "q", "--apply_chat_template"]),
    "rl: a named prompt of messages": Case([{"dataset": "d", "context": "c", "context_messages": chat("Why?"), "id": "1"}], texts=[asked("Why?")],
                                           task="rl", flags=["--input_key", "context_messages", "--apply_chat_template"]),
    "rl: a prompt in a text": Case([{"prompt": "Why?"}], texts=["Why?"], task="rl", flags=["--input_template", "{}"]),
    "rl: a cut answer drops its prompt": Case(
        [{"prompt": "QQQQQQ", "completion": "A"}, {"prompt": "Q"}], texts=["Q"], task="rl", tokenizer={"merges": []},
        flags=["--max_len", "4", "--truncation", "keep", "--input_template", "{}"]),
}


@pytest.mark.parametrize("case", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents(bench, case):
    assert bench.expect(case).metadata["kind"] == case.task


def test_ids_and_labels(bench):
    records = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [5, 6], "labels": [5, 6]},
               {"input_ids": [5, 6], "labels": [5, -100]},
               {"input_ids": [9, 5, 6, 7], "attention_mask": [0, 1, 1, 1], "position_ids": [1, 0, 1, 2], "assistant_masks": [0, 0, 1, 1], "loss_mask": [True, True, True, False]}]
    documents = bench.run("sft", bench.tokenizer(), records)
    assert (documents.ids, documents.masks) == ([[5, 6, 7, 8], [5, 6], [5, 6, 7]], [[0, 0, 1, 1], [0, 1], [0, 1, 0]])
    documents = bench.run("pretrain", bench.tokenizer(), [{"input_ids": [5, 6, 7, 8, 9, 0, 0], "attention_mask": [1, 1, 1, 1, 1, 0, 0]}], "--max_len", "3")
    assert (documents.ids, documents.masks) == ([[5, 6, 7], [8, 9]], [[0, 1, 1], [0, 1]])


@pytest.mark.parametrize("record", [{"prompt": "Why?"}, {"prompt": chat("Why?")}, {"messages": json.dumps(chat("Why?"))},
                                    {"prompt": "Why?", "answer": "", "answers": [], "reward_model": {"ground_truth": ""}}])
def test_prompts_for_rl(bench, record):
    """The task rl keeps prompts without an answer and counts them. The last message of a chat is the answer."""
    documents = bench.expect(Case([record, QA, {"messages": CHAT}], [[], ["A<|endoftext|>"], BOTH_TURNS[0][1:]], rows={"without an answer": 1},
                                  task="rl", tokenizer={"merges": []}))
    assert documents.texts()[0] == asked("Why?")
    for label, text in (("So", "So"), (8, "8"), (["a", "b"], '["a", "b"]')):
        answers = [record | {"answer": label, "solution": "because"}, record | {"reward_model": {"ground_truth": label, "style": "rule"}}]
        bench.expect(Case(answers, [[f"{text}<|im_end|>"]] * 2, task="rl", tokenizer={"merges": []}))
        assert "solution (1)" in bench.printed


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


# ---- the file

LINE_IN_MARKS = CHATML_MARKED.replace("'<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "'<|im_end|>\\n' }}{% endgeneration %}")


@pytest.mark.parametrize("task, template, records, flags, ends", [
    ("sft", CHATML, [{"messages": CHAT}], [], ["<|im_end|>"]), ("sft", CHATML_MARKED, [{"messages": CHAT}], [], ["<|im_end|>"]),
    ("sft", LINE_IN_MARKS, [{"messages": CHAT}], [], ["<|im_end|>"]),
    ("sft", LLAMA2.replace("bos_token + ", ""), [{"messages": CHAT[1:]}], [], ["<|endoftext|>"]),
    ("sft", PLAIN, [{"messages": CHAT}], [], []), ("sft", None, [QA], [], ["<|endoftext|>"]),
    ("sft", None, [{"input_ids": [1, 2, 268, 3], "labels": [-100, 2, 268, -100]}], [], ["<|im_end|>"]),
    ("pref", CHATML, [{"prompt": "a", "chosen": CHAT[1:3], "rejected": CHAT[3:]}], [], ["<|im_end|>"]),
    ("pretrain", CHATML, [{"text": "a<|im_end|>b"}], [], ["<|endoftext|>"]), ("pretrain", None, [{"text": "ab"}], ["--append_eos", "false"], []),
    ("prompts", CHATML, [{"prompt": "a"}], [], ["<|im_end|>"]), ("prompts", CHATML, [{"prompt": "a"}], ["--no_chat_template"], []),
    ("prompts", STRICT.replace("'assistant'", "'model'"), [{"prompt": "a"}], [], [])])
def test_end_tokens_are_stored(bench, task, template, records, flags, ends):
    documents = bench.run(task, bench.tokenizer(template), records, *flags)
    noted = documents.metadata.get("end_of_turn")
    assert [documents.hf.convert_ids_to_tokens(int(i)) for i in (noted.split(",") if noted else [])] == ends
    assert ("open turns" in bench.printed) == (template == PLAIN)
    chats = template is not None and task != "pretrain" and not flags
    assert documents.metadata.get("chat_template") == (template if chats else None)


def test_file(bench):
    tokenizer = bench.tokenizer(PLAIN)
    documents = bench.run("sft", tokenizer, [{"messages": CHAT}, {"text": "odd"}], "--max_len", "999", "--tokenizer_chat_template", CHATML)
    arrays, metadata = documents.arrays, documents.metadata
    assert (arrays["tokens"].dtype, arrays["loss_mask"].dtype, arrays["doc_offsets"].dtype) == (np.uint16, np.uint8, np.int64)
    assert len(arrays["tokens"]) == len(arrays["loss_mask"]) == arrays["doc_offsets"][-1]
    assert metadata.pop("checksums").startswith("524288 ")
    assert metadata == {"kind": "sft", "vocab_size": str(len(documents.hf)), "tokenizer_hash": Tokenizer(tokenizer).hash,
                        "max_len": "999", "template_hash": fnv1a(CHATML), "source": "in.jsonl", "version": "1",
                        "end_of_turn": "266,268", "chat_template": CHATML}  # EOS ends the text
    assert [name for name in os.listdir(bench.path) if name.startswith("out")] == ["out.safetensors"]
    data = bench.out.read_bytes()
    assert int.from_bytes(data[:8], "little") % 8 == 0 and list(arrays)[0] == "doc_offsets"  # for the alignment of 8-byte integers


def test_large_vocabulary_takes_32_bits(tmp_path):
    from token_file import TokenFile

    file = TokenFile(str(tmp_path / "f"), vocab_size=65537)
    file.append(np.array([1, 65536], np.int32), np.array([0, 1], np.uint8), np.array([2]))
    file.write({"kind": "sft"})
    file.close()
    assert read_safetensors(tmp_path / "f")[0]["tokens"].tolist() == [1, 65536]


def test_hash(tmp_path):
    assert [fnv1a(text) for text in ("", "a", "foobar")] == ["cbf29ce484222325", "af63dc4c8601ec8c", "85944171f73967e8"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 3, "content": "<|end|>", "special": True, **plain}, {"id": 1, "content": "<x>", "special": False, **plain}]
    model = {"type": "BPE", "vocab": {"é": 2, "a": 0, "<x>": 1}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": model}), encoding="utf-8")
    assert Tokenizer(str(tmp_path)).hash == fnv1a("0\ta\t0\n1\t<x>\t0\n2\té\t0\n3\t<|end|>\t1\n") == "4822e3d0bf5859d2"


def test_the_program(bench):
    """A refusal keeps the older output, and has no traceback. A terminal without the marks of show gets escapes."""
    tokenizer = bench.tokenizer(CHATML)
    bench.run("sft", tokenizer, [{"messages": CHAT[1:3]}])
    old = bench.out.read_bytes()
    command = [sys.executable, str(DATA / "prepare.py"), *bench.arguments("sft", tokenizer, [{"messages": CHAT}, "{"])]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"record 2 (line 2) of {bench.path}/in.jsonl: broken JSON") and len(result.stderr.splitlines()) == 2
    assert bench.out.read_bytes() == old and sorted(os.listdir(bench.path)) == ["in.jsonl", "out.safetensors", "tokenizer"]

    bench.jsonl({"messages": CHAT})
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and "target tokens" in result.stdout
    command = [sys.executable, str(DATA / "show.py"), str(bench.out), tokenizer, "1"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "") and "\\u27e6Bye<|im_end|>\\u27e7" in result.stdout
    assert Documents(bench.out, tokenizer).trained() == BOTH_TURNS


def test_progress_without_a_terminal(capsys, monkeypatch):
    """A line every ten seconds."""
    now = iter([0, 9, 11, 12, 20, 22])
    monkeypatch.setattr(prepare.time, "monotonic", lambda: next(now))
    progress = prepare.Progress(400)
    for _ in range(5):
        progress.add(SimpleNamespace(size=100, counts={"read": 2}, tokens=[1] * 22))
    progress.end()
    assert capsys.readouterr().out == ("   50 %  11 s left  4 records  44 tokens  4 tokens/s\n"
                                       "  100 %  0 s left  10 records  110 tokens  5 tokens/s\n")


@pytest.mark.parametrize("content", ["mine", '{"messages": []}\n', '\x40\0\0\0\0\0\0\0{"__metadata__": {"format": "pt"}}'])
def test_other_files_are_not_replaced(bench, content):
    arguments = bench.arguments("sft", bench.tokenizer(CHATML), [{"messages": CHAT}], "--out")
    for out in (bench.write("other", content), str(bench.path / "in.jsonl")):  # the second one is the input itself
        before = Path(out).read_bytes()
        assert prepare.main([*arguments, out]) == 1 and f"--out {out} exists and is not an earlier result" in bench.capsys.readouterr().err
        assert Path(out).read_bytes() == before


def test_output_to_links_and_pipes(bench):
    arguments = bench.arguments("sft", bench.tokenizer(CHATML), [{"messages": CHAT}], "--out")
    link, pipe = bench.path / "link", bench.path / "pipe"
    link.symlink_to("target")
    assert prepare.main([*arguments, str(link)]) == 0 and link.is_symlink() and (bench.path / "target").is_file()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert prepare.main([*arguments, str(pipe)]) == 0 and pipe.is_fifo()
        assert reader.communicate()[0] == link.read_bytes()
    bench.capsys.readouterr()
    assert prepare.main([*arguments, str(bench.path / "none" / "f")]) == 1 and "its directory does not exist" in bench.capsys.readouterr().err
