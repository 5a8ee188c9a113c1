"""data/prepare.py pref: documents 2i and 2i+1 are the chosen and the rejected one of pair i."""

import csv
import json
import os

import numpy as np
import pytest
from preparing import (  # noqa: F401
    CALLING, CHAT, CHATML, CHATML_MARKED, CHATML_WITHOUT_PROMPT, LLAMA2, PLAIN, THINKING, bench,
    chain, make_tokenizer, prepare)

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
    # Text after the end of turn stays unless it is white space.
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
    chats = [{"good": CHAT[1:], "bad": [*CHAT[1:4], said("No")]}]  # this template has no system message
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


@pytest.mark.parametrize("record", [
    {"prompt": json.dumps(QUESTION), "chosen": json.dumps([said("So")]), "rejected": json.dumps([said("No")])},
    {"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"from": "gpt", "value": "So"}, "rejected": {"from": "gpt", "value": "No"}},
    {"messages": QUESTION, "chosen": [said("So")], "rejected": [said("No")]},
    {"prompt": QUESTION, "chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]},  # not asked twice
    {"chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")], "messages": [*QUESTION, said("So")], "question": "Why?"}])
def test_prompts_of_pairs_in_other_forms(bench, record):
    assert bench.run("pref", bench.tokenizer(CHATML), [record]).texts() == [ASKED + "So<|im_end|>", ASKED + "No<|im_end|>"]


@pytest.mark.parametrize("name", ["question", "instruction", "input", "query", "problem", "context", "history", "system_prompt"])
@pytest.mark.parametrize("answers", [("So", "No"), ([said("So")], [said("No")])])
def test_a_prompt_that_would_not_be_read_is_refused(bench, name, answers):
    pair = dict(zip(("chosen", "rejected"), answers))
    error = bench.refused("pref", bench.tokenizer(CALLING if name != "system_prompt" else LLAMA2), [pair | {name: [["Why?", "x"]]}])
    assert f"record 1 (line 1) of in.jsonl: has a field {name!r} that is in no part of what would be trained" in error or "'system_prompt' is a list" in error
    # It may be named, or be empty, or also be part of the answers.
    if name not in ("history", "system_prompt"):
        documents = bench.run("pref", bench.tokenizer(CHATML), [pair | {name: "Why?"}], "--prompt_key", name, "--apply_chat_template")
        assert documents.texts() == [ASKED + "So<|im_end|>", ASKED + "No<|im_end|>"]
    assert len(bench.run("pref", bench.tokenizer(CHATML), [{"chosen": "Why? So", "rejected": "Why? No", name: absent} for absent in ("", None)]).ids) == 4


def test_a_field_that_may_be_the_prompt(bench):
    """Answers that begin with their prompt share it; a text longer than their common beginning is not left out as a note."""
    error = bench.refused("pref", bench.tokenizer(CHATML), [{"post": "Why?", "chosen": "So", "rejected": "Sometimes"}])
    assert "a pair whose prompt is not known: both answers begin with 'So' only, and there is 'post'" in error and "fix: --prompt_key post;" in error
    assert len(bench.run("pref", bench.tokenizer(CHATML), [{"chosen": "Why? So", "rejected": "Why? No", "id": "a7"}]).ids) == 2


@pytest.mark.parametrize("record", [
    {"question": "Why?", "chosen": "So", "rejected": "No"}, {"instruction": "Why?", "chosen_response": "So", "rejected_response": "No", "chosen_rating": 5},
    {"system": "", "question": "Why?", "chosen": [{"role": "assistant", "content": "So"}], "rejected": [{"role": "assistant", "content": "No"}]},
])
def test_a_prompt_under_another_name(bench, record):
    """It is one if both answers lack it, and is a chat where there is a template; two of these names are not guessed at."""
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert bench.refused("pref", bench.tokenizer(CHATML, merges=[]), [record | {"query": "Or?"}])
    documents = bench.run("pref", bench.tokenizer(CHATML, merges=[]), [record])
    assert documents.texts() == [f"{asked}So<|im_end|>", f"{asked}No<|im_end|>"]


def test_a_system_prompt_of_a_pair_of_strings(bench):
    record = {"system": "Be terse.", "question": "Why?", "chosen": "So", "rejected": "No"}
    before = "<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert bench.run("pref", bench.tokenizer(CHATML, merges=[]), [record]).texts() == [f"{before}So<|im_end|>", f"{before}No<|im_end|>"]
