"""What data/prepare.py writes and prints: the file, the program's output, refused flags, and the documents that show prints."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from preparing import (
    AB, BOTH_TURNS, CHAT, CHATML, CHATML_MARKED, DATA, DEEP, GREETING, LLAMA2, PLAIN, QA, STRICT, Documents, chat, prepare, read_safetensors)
import show
from tokenizer import Tokenizer, fnv1a

# ---- the file ----------------------------------------------------------------------------------------------------------------------------

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


# ---- the program and its flags -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("task, source, flags, message", [
    ("sft", [GREETING], ["--truncation", "split"], "invalid choice: 'split'"), ("pref", [AB], ["--truncation", "split"], "invalid choice: 'split'"),
    ("sft", [GREETING], ["--maxlen", "5"], "unrecognized arguments: --maxlen"), ("sft", [GREETING], ["--append_eos", "maybe"], "neither true nor false"),
    ("sft", [GREETING], ["--max_len", "1"], "at least two tokens"), ("sft", [GREETING], ["--input_template", "User:"], "has no {}"),
    ("pref", [AB], ["--input_template", "User:"], "has no {}"),
    ("sft", [GREETING], ["--tokenizer_chat_template", "none.jinja"], "neither a template nor a file"),
    ("sft", [GREETING], ["--tokenizer_chat_template", "x"], "neither a template nor a file, nor one of chatml, llama3, phi_3"),
    ("sft", [GREETING], ["--input_key", "chat"], "has no field 'chat'; it has messages"),
    ("sft", [{"q": "a"}], ["--input_key", "q"], "there is no answer to the prompt"),
    ("prompts", None, [], "there is nothing to prepare"), ("prompts", [GREETING], [], "nothing to answer"),
    ("prompts", None, ["--prompt", "", "--prompt", "a", "--no_chat_template"], "record 1 of --prompt: the prompt is empty"),
    ("sft", [{"messages": chat("Hi")}], [], "no record is left"), ("sft", [GREETING], ["--max_len", "9"], "\n  fix: --max_len 24, or give shorter records"),
    ("pref", [AB], ["--append_eos", "false"], "no record is left"),  # only the first tokens differ, and these are no targets
    ("sft", [GREETING], ["--chat_template_kwargs", '{"a": ' + DEEP[:50_000]], "is not a JSON object"),
    ("sft", [GREETING], ["--chat_template_kwargs", "mood"], "'mood' is not a JSON object"),
    ("sft", [GREETING], ["--chat_template_kwargs", "[1]"], "'[1]' is not a JSON object"),
    ("sft", [GREETING], ["--chat_template_kwargs", '{"tools": []}'], "'tools' is a reserved name"),
    ("sft", [GREETING], ["--seed", "-1"], "-1 is negative"), ("sft", [GREETING], ["--max_samples", "0"], "0 is less than one"),
    ("pretrain", [{"text": "a"}], ["--to_bin", "/nowhere/new"], "its directory does not exist"),
    ("sft", [{"text": "a"}], ["--stopping_strategy", "concat"], "invalid choice: 'concat' (choose from 'first_exhausted'"),
    ("sft", [{"text": "a"}], ["--dataset_probs", "0.5,0.5"], "--dataset_probs has 2 probabilities for 1 inputs\n  fix: give one for each"),
])
def test_refused_flags(bench, task, source, flags, message):
    assert message in bench.refused(task, bench.tokenizer(CHATML), source, *flags)


# ---- show --------------------------------------------------------------------------------------------------------------------------------


def printed(bench, count, task, tokenizer, *arguments):
    bench.run(task, tokenizer, *arguments)
    show.main(bench.out, tokenizer, count)
    return bench.capsys.readouterr().out


def test_trained_runs_between_marks(bench):
    tokenizer = bench.tokenizer(CHATML)
    records = [{"messages": CHAT}, {"messages": CHAT[1:3]}, {"text": "One"}]
    assert printed(bench, 2, "sft", tokenizer, records) == (
        "⟦trained⟧, ⟦~only some bytes of a character are~⟧\n\n---- document 1: 77 tokens, 12 trained\n"
        "<|im_start|>system↵\nBe short.<|im_end|>↵\n<|im_start|>user↵\nHi<|im_end|>↵\n"
        "<|im_start|>assistant↵\n⟦Hello there<|im_end|>⟧↵\n<|im_start|>user↵\nAnd?<|im_end|>↵\n"
        "<|im_start|>assistant↵\n⟦Bye<|im_end|>⟧↵\n\n\n---- document 2: 30 tokens, 8 trained\n"
        "<|im_start|>user↵\nHi<|im_end|>↵\n<|im_start|>assistant↵\n⟦Hello there<|im_end|>⟧↵\n\n")
    assert printed(bench, 9, "sft", tokenizer, records).count("---- document") == 3


PAIRS = [{"prompt": "Q", "chosen": "a", "rejected": "b"}, {"prompt": "Q", "chosen": "c", "rejected": "d"}]


@pytest.mark.parametrize("task, merges, records, count, flags, shown", [
    # The token at the prompt's end, which is not trained, has the first byte of the emoji.
    ("sft", [("Q", "ð")], [{"prompt": "Q", "completion": "😀漢\x1b[31m"}], 1, [],
     ["13 tokens, 12 trained\n⟦~Q😀~⟧⟦漢\\x1b[31m<|endoftext|>⟧\n"]),
    ("sft", [], [{"prompt": "Q", "completion": "é漢"}], 1, ["--max_len", "4", "--truncation", "keep"], ["4 tokens, 3 trained\nQ⟦é�⟧\n"]),
    ("pref", [], PAIRS, 1, [], ["pair 1, chosen: 3 tokens, 2 trained\nQ⟦a<|endoftext|>⟧",
                              "pair 1, rejected: 3 tokens, 2 trained\nQ⟦b<|endoftext|>⟧\n"]),
    ("unpaired", [], [{"prompt": "Q", "completion": "a", "label": False}], 1, [], ["document 1, undesirable: 3 tokens, 2 trained\nQ⟦a<|endoftext|>⟧\n"]),
    ("pretrain", [], [{"text": "abcdef"}], 2, ["--max_len", "3"],
     ["document 1: 3 tokens, 2 trained\na⟦bc⟧", "document 2: 3 tokens, 2 trained\nd⟦ef⟧\n"]),
], ids=["split characters", "a cut character", "both answers of a pair", "a judged answer", "pieces of a text"])
def test_shown_documents(bench, task, merges, records, count, flags, shown):
    texts = printed(bench, count, task, bench.tokenizer(merges=merges), records, *flags).split("\n\n")[1:]
    assert len(texts) == len(shown) and all(text.startswith("---- ") and text.endswith(end) for text, end in zip(texts, shown)), texts


def test_shown_text_equals_the_decoded_text(bench):
    """For byte-level and for sentencepiece tokens, without the marks."""
    from tokenizer import Tokenizer
    from tokenizers import Tokenizer as Backend, decoders, models, normalizers

    rng = np.random.default_rng(1)
    vocab = {token: i for i, token in enumerate(["<unk>", "▁", *(f"<0x{b:02X}>" for b in range(256)), *"Qa", "▁a"])}
    spm = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    spm.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spm.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for backend in (spm, Tokenizer(bench.tokenizer(merges=[("a", "ð"), ("Ã", "©")])).encoder):
        for _ in range(50):
            text = "".join(rng.choice(["a", " ", "é", "😀", "漢", "Q", "\n"]) for _ in range(20))
            ids = backend.encode(text).ids
            assert "".join(piece for piece, _ in show.pieces(backend, ids, [1] * len(ids))) == backend.decode(ids) == text
