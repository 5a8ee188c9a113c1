"""data/prepare.py: the trained text, by decoding the trained tokens; the files it reads and writes; its refusals."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preparing import (  # noqa: F401
    BOTH_TURNS, CHAT, CHATML, CHATML_MARKED, CHATML_STRIPPED, CHATML_WITHOUT_PROMPT, DATA, LAST_MARKED,
    LLAMA2, PLAIN, STRICT, THINKING, Documents, bench, chain, make_tokenizer, prepare, read_safetensors)
from tokenizer import Tokenizer, fnv1a


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
    # Where both line breaks are one token it also belongs to the header, and is no target; the table counts it.
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
    # Bytes of one character in a token with earlier text.
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
    strings = [{"question": "Why {x}?", "response": "So"}]
    assert bench.run("sft", bench.tokenizer(merges=[]), strings).texts() == ["User: Why {x}?\nAssistant: So<|endoftext|>"]  # there is no template
    tokenizer = bench.tokenizer(CHATML, merges=[])
    keys = ["--input_key", "question", "--output_key", "response"]
    documents = bench.run("sft", tokenizer, strings, *keys, "--input_template", "openrlhf")
    assert documents.texts() == ["User: Why {x}?\nAssistant: So<|endoftext|>"]
    assert documents.trained() == [["So<|endoftext|>"]]
    assert bench.run("sft", tokenizer, strings, *keys, "--input_template", "{}=").texts() == ["Why {x}?=So<|endoftext|>"]
    for how in ([*keys, "--apply_chat_template"], keys, []):  # where there is a template strings are turns, and these names are known
        documents = bench.run("sft", tokenizer, strings, *how)
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

    def load_dataset(name, subset, data_dir, split, streaming):
        assert (name, subset, data_dir, split, streaming) == ("owner/chats", None, None, "train", True)
        return iter([{"messages": CHAT}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert bench.run("sft", bench.tokenizer(CHATML), "owner/chats").trained() == BOTH_TURNS


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


@pytest.mark.parametrize("record", [{"prompt": "Why?"}, {"prompt": [CHAT[1] | {"content": "Why?"}]},
                                    {"messages": json.dumps([CHAT[1] | {"content": "Why?"}])}])
def test_prompts_for_answers_of_the_models_own(bench, record):
    """The task rl keeps prompts without an answer, and says how many; of a chat the last message is the answer."""
    answered = [{"prompt": "Q", "completion": "A"}, {"messages": CHAT}]
    tokenizer = bench.tokenizer(CHATML, merges=[])
    documents = bench.run("rl", tokenizer, [record, *answered])
    assert documents.trained() == [[], ["A<|endoftext|>"], BOTH_TURNS[0][1:]] and bench.row("without an answer") == 1
    assert documents.texts()[0] == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n" and documents.metadata["kind"] == "rl"
    for label, text in (("So", "So"), (8, "8"), (["a", "b"], '["a", "b"]')):
        answers = [record | {"answer": label, "solution": "because"}, record | {"reward_model": {"ground_truth": label, "style": "rule"}}]
        assert bench.run("rl", tokenizer, answers).trained() == [[f"{text}<|im_end|>"]] * 2
        assert "solution (1)" in bench.printed
    if record["prompt" if "prompt" in record else "messages"] == "Why?":
        assert bench.run("rl", tokenizer, [record], "--input_template", "{}").texts() == ["Why?"]
    keyed = bench.run("rl", bench.tokenizer(CHATML, merges=[]), [{"q": "Why?"}, {"q": "Why?", "a": "So"}], "--input_key", "q", "--output_key", "a",
                      "--input_template", "openrlhf")
    assert keyed.texts() == ["User: Why?\nAssistant: ", "User: Why?\nAssistant: So<|endoftext|>"]
    keyed = bench.run("rl", bench.tokenizer(CHATML, merges=[]), [{"q": "Why?"}], "--input_key", "q", "--apply_chat_template")
    assert keyed.texts() == ["<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"]
    openrlhf = {"dataset": "d", "context": "c", "context_messages": [CHAT[1] | {"content": "Why?"}], "id": "1"}
    keyed = bench.run("rl", bench.tokenizer(CHATML, merges=[]), [openrlhf], "--input_key", "context_messages", "--apply_chat_template")
    assert keyed.texts() == ["<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"]
    # A longer one is cut or dropped as ever; an answer that is cut off leaves no prompt behind.
    assert bench.run("rl", bench.tokenizer(CHATML, merges=[]), [{"prompt": "QQQQQQ", "completion": "A"}, {"prompt": "Q"}], "--max_len", "4",
                     "--truncation", "keep", "--input_template", "{}").texts() == ["Q"]


# ---- fields that would not be read

DOLLY = {"instruction": "Name a river.", "context": "Peru is a country.", "response": "The Maranon."}
ORCA = {"system_prompt": "Be terse.", "question": "Name a river.", "response": "The Maranon."}


def test_prompts_beside_the_named_fields(bench):
    tokenizer = bench.tokenizer(CHATML, merges=[])
    for record, keys, name in ((DOLLY, ("instruction", "response"), "context"), (ORCA, ("question", "response"), "system_prompt"),
                               ({"instruction": "Add.", "input": "1 2", "output": "3"}, ("instruction", "output"), "input"),
                               ({"instruction": "Add.", "input": "1 2", "output": "3"}, ("input", "output"), "instruction"),
                               ({"q": "Q", "a": "A", "tools": [{"name": "look"}]}, ("q", "a"), "tools"),
                               ({"q": "Q", "a": "A", "reasoning": "hm"}, ("q", "a"), "reasoning")):
        error = bench.refused("sft", tokenizer, [record], "--input_key", keys[0], "--output_key", keys[1], "--input_template", "openrlhf")
        assert f"record 1 (line 1) of in.jsonl: has a field {name!r} that is in no part of what would be trained; it has " in error
    # A system prompt is one, in a chat; if the prompt has several names, the named field counts.
    keys = ["--input_key", "question", "--output_key", "response", "--apply_chat_template"]
    documents = bench.run("sft", tokenizer, [ORCA | {"prompt": "x", "id": "7", "answer": "y", "source": "z"}], *keys)
    assert documents.texts() == ["<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nName a river.<|im_end|>\n"
                                 "<|im_start|>assistant\nThe Maranon.<|im_end|>\n"]


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
BELOW = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"


@pytest.mark.parametrize("form, context, text", [
    ("alpaca", "1 2", f"{BELOW}, paired with an input that provides further context. {REQUEST}### Input:\n1 2\n\n### Response:\n"),
    ("alpaca", "", f"{BELOW}. {REQUEST}### Response:\n"), ("<{}>", "1 2", "<Add.\n\n1 2>"),
])
def test_a_text_around_an_instruction_makes_no_chat(bench, form, context, text):
    documents = bench.run("sft", bench.tokenizer(CHATML, merges=[]), [ALPACA | {"input": context}], "--input_template", form)
    assert documents.texts() == [f"{text}3<|endoftext|>"] and documents.trained() == [["3<|endoftext|>"]]


@pytest.mark.parametrize("name, text", [
    ("chatml", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"), ("phi_3", "<|user|>\nHi<|end|>\n<|assistant|>\nYes<|end|>\n"),
    ("llama3", "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"),
])
def test_templates_by_name(bench, name, text):
    records = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}]
    assert "neither a template nor a file, nor one of chatml, llama3, phi_3" in bench.refused("sft", bench.tokenizer(), records, "--tokenizer_chat_template", "x")
    assert bench.run("sft", bench.tokenizer(), records, "--tokenizer_chat_template", name).texts() == [text]


@pytest.mark.parametrize("record, message", [
    ({"text": "A", "question": "Q"}, "has a field 'question'"), ({"prompt": "Q", "completion": "A", "context": "C"}, "has a field 'context'"),
    ({"prompt": "Q", "completion": "A", "reasoning_content": "hm"}, "has a field 'reasoning_content'"),
    ({"messages": CHAT, "context": "C"}, "has a field 'context'"), ({"messages": CHAT, "documents": [{"text": "D"}]}, "has a field 'documents'"),
    ({"messages": CHAT, "conversations": [{"from": "human", "value": "Else"}]}, "has a field 'conversations'"),
    ({"prompt": "Q", "completion": "A", "label": False}, "is one answer with a judgement"), ({"messages": CHAT, "kto_tag": True}, "is one answer with a"),
    ({"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]}, "is an answer in steps with a label for each"),
    ({"text": "Hello?", "role": "prompter", "parent_id": None}, "is one message of a conversation, with a role and a text of its own"),
    ({"prompt": "Q", "solution": "A", "answer": "B"}, "has a prompt and no answer; it has prompt, solution, answer\n  fix: name both with --input_key and --output_key"),
    ({"instruction": "Q", "output": "A", "history": ["x"]}, "has a 'history' that is no list of questions with their answers")])
def test_records_of_which_a_part_would_not_be_read(bench, record, message):
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": CHAT}, record])
    assert error.startswith(f"record 2 (line 2) of in.jsonl: {message}")


def test_notes_and_copies_beside_a_chat_are_no_part_of_it(bench):
    notes = {"prompt": "Hi", "prompt_id": "x", "problem": "And?", "solution": "Bye", "answer": "8", "source": "s", "category": "c", "score": 1.5,
             "instruction": " Hi ", "system_prompt": "Be short.", "text": "elsewhere", "messages": None, "label": "x", "history": []}
    assert bench.run("sft", bench.tokenizer(CHATML), [{"conversations": CHAT} | notes]).trained() == BOTH_TURNS


def test_history_of_alpaca(bench):
    copied = {"instruction": "Add.", "input": "1", "output": "2", "prompt": "### Instruction:\nAdd.\n### Input:\n1\n### Output:\n2"}
    assert len(bench.run("sft", bench.tokenizer(CHATML), [copied]).ids) == 1  # a copy in other words
    (bench.path / "out.safetensors").unlink()
    record = {"instruction": "And?", "input": "", "output": "Bye", "history": [["Hi", "Hello there"]], "system": "Be short."}
    error = bench.refused("sft", make_tokenizer(bench.path / "plain"), [record | {"system": ""}])  # without a template
    assert "has a field 'history'" in error
    assert bench.run("sft", bench.tokenizer(CHATML), [record]).trained() == BOTH_TURNS


def test_json_text_of_messages(bench):
    records = [{"messages": json.dumps(CHAT)}, {"conversations": json.dumps([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}])},
               {"prompt": json.dumps(CHAT[:4]), "completion": json.dumps(CHAT[4:])}, {"messages": [json.dumps(message) for message in CHAT]}]
    documents = bench.run("sft", bench.tokenizer(CHATML), records)
    assert documents.trained() == [*BOTH_TURNS, ["Hello<|im_end|>"], ["Bye<|im_end|>"], *BOTH_TURNS]
    # Other JSON is text, and stays as it is.
    objects = {"prompt": '{"role": "admin"}', "completion": "[1, 2]"}
    assert bench.run("sft", bench.tokenizer(CHATML, merges=[]), [objects]).texts() == ['{"role": "admin"}[1, 2]<|endoftext|>']


# ---- the file


ENDS = [("sft", CHATML, [{"messages": CHAT}], [], ["<|im_end|>"]),
        ("sft", CHATML_MARKED, [{"messages": CHAT}], [], ["<|im_end|>"]),
        ("sft", CHATML_MARKED.replace("'<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "'<|im_end|>\\n' }}{% endgeneration %}"), [{"messages": CHAT}], [],
         ["<|im_end|>"]),
        ("sft", LLAMA2.replace("bos_token + ", ""), [{"messages": CHAT[1:]}], [], ["<|endoftext|>"]),
        ("sft", PLAIN, [{"messages": CHAT}], [], []),
        ("sft", None, [{"prompt": "a", "completion": "b"}], [], ["<|endoftext|>"]),
        ("sft", None, [{"input_ids": [1, 2, 268, 3], "labels": [-100, 2, 268, -100]}], [], ["<|im_end|>"]),
        ("pref", CHATML, [{"prompt": "a", "chosen": CHAT[1:3], "rejected": CHAT[3:]}], [], ["<|im_end|>"]),
        ("pretrain", CHATML, [{"text": "a<|im_end|>b"}], [], ["<|endoftext|>"]),
        ("pretrain", None, [{"text": "ab"}], ["--append_eos", "false"], []),
        ("prompts", CHATML, [{"prompt": "a"}], [], ["<|im_end|>"]),
        ("prompts", CHATML, [{"prompt": "a"}], ["--no_chat_template"], []),
        ("prompts", STRICT.replace("'assistant'", "'model'"), [{"prompt": "a"}], [], [])]


@pytest.mark.parametrize("task, template, records, flags, ends", ENDS)
def test_what_ends_a_turn_is_noted(bench, task, template, records, flags, ends):
    documents = bench.run(task, bench.tokenizer(template), records, *flags)
    noted = documents.metadata.get("end_of_turn")
    assert [documents.hf.convert_ids_to_tokens(int(i)) for i in (noted.split(",") if noted else [])] == ends
    assert ("open turns" in bench.printed) == (template == PLAIN)
    chats = template is not None and task != "pretrain" and not flags
    assert documents.metadata.get("chat_template") == (template if chats else None)


def test_the_template_that_was_given_is_noted(bench):
    documents = bench.run("sft", bench.tokenizer(PLAIN), [{"messages": CHAT}], "--tokenizer_chat_template", CHATML)
    assert documents.metadata["chat_template"] == CHATML


def test_file(bench):
    tokenizer = bench.tokenizer(CHATML)
    documents = bench.run("sft", tokenizer, [{"messages": CHAT}, {"text": "odd"}], "--max_len", "999")
    arrays, metadata = documents.arrays, documents.metadata
    assert (arrays["tokens"].dtype, arrays["loss_mask"].dtype, arrays["doc_offsets"].dtype) == (np.uint16, np.uint8, np.int64)
    assert len(arrays["tokens"]) == len(arrays["loss_mask"]) == arrays["doc_offsets"][-1]
    assert metadata.pop("checksums").startswith("524288 ")
    assert metadata == {"kind": "sft", "vocab_size": str(len(documents.hf)), "tokenizer_hash": Tokenizer(tokenizer).hash,
                        "max_len": "999", "template_hash": fnv1a(CHATML), "source": "in.jsonl", "version": "1",
                        "end_of_turn": "266,268", "chat_template": CHATML}  # EOS ends the text
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
    (bench.path / "nothing").mkdir()
    (bench.path / "list.json").write_text("[1")
    (bench.path / "bad.csv").write_text("prompt,completion\na,b\na,b,c\n")
    (bench.path / "bad.parquet").write_text("no")
    (bench.path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    for name, expected in {"none.jsonl": "none.jsonl: there is no such file", "empty.jsonl": "empty.jsonl: the file is empty",
                           "blank.jsonl": "blank.jsonl: holds no records", "x.txt": "x.txt: unknown kind of file",
                           "list.json": "list.json: broken JSON",
                           "bad.csv": "line 3 of bad.csv: has 3 cells but the header has 2",
                           "bad.parquet": "bad.parquet: broken parquet file", "nothing": "nothing: holds no data set",
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
    source = bench.jsonl({"messages": CHAT}, "{")
    command = [sys.executable, str(DATA / "prepare.py"), "sft", "--input", source, "--tokenizer", bench.tokenizer(CHATML),
               "--out", str(bench.path / "out.safetensors")]
    bench.run("sft", command[6], bench.jsonl({"messages": CHAT[1:3]}, name="old.jsonl"))
    old = (bench.path / "out.safetensors").read_bytes()
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"record 2 (line 2) of {source}: broken JSON") and len(result.stderr.splitlines()) == 2
    assert (bench.path / "out.safetensors").read_bytes() == old and len(os.listdir(bench.path)) == 4

    bench.jsonl({"messages": CHAT})
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "") and "target tokens" in result.stdout
    assert Documents(bench.path / "out.safetensors", str(bench.path / "tokenizer")).trained() == BOTH_TURNS


@pytest.mark.parametrize("content", ["mine", '{"messages": []}\n', '\x40\0\0\0\0\0\0\0{"__metadata__": {"format": "pt"}}'])
def test_a_file_of_the_user_s_is_not_replaced(bench, content):
    tokenizer, source, other = bench.tokenizer(CHATML), bench.jsonl({"messages": CHAT}), bench.path / "other"
    other.write_text(content)
    arguments = ["sft", "--tokenizer", tokenizer, "--input", source, "--out"]
    for out in (str(other), source):  # the second one is its own input
        before = Path(out).read_bytes()
        assert prepare.main([*arguments, out]) == 1 and f"--out {out} exists, and is no earlier result" in bench.capsys.readouterr().err
        assert Path(out).read_bytes() == before


def test_links_and_devices_stay(bench):
    arguments = ["sft", "--tokenizer", bench.tokenizer(CHATML), "--input", bench.jsonl({"messages": CHAT}), "--out"]
    link, pipe = bench.path / "link", bench.path / "pipe"
    link.symlink_to("target")
    assert prepare.main([*arguments, str(link)]) == 0 and link.is_symlink() and (bench.path / "target").is_file()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert prepare.main([*arguments, str(pipe)]) == 0 and pipe.is_fifo()
        assert reader.communicate()[0] == link.read_bytes()


def test_out_in_no_directory(bench):
    arguments = ["sft", "--input", bench.jsonl({"messages": CHAT}), "--tokenizer", bench.tokenizer(CHATML), "--out"]
    assert prepare.main([*arguments, str(bench.path / "none" / "f")]) == 1
    assert "its directory does not exist" in bench.capsys.readouterr().err
