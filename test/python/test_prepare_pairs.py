"""data/prepare.py pref: documents 2i and 2i+1 are the chosen and the rejected answer of pair i. Refused pairs."""

import json
import os
from functools import partial

import numpy as np
import pytest
from preparing import (
    AB, CHAT, CHATML, CHATML_MARKED, CHATML_WITHOUT_PROMPT, LLAMA2, PLAIN, THINKING, Case, asked, chain, chat, said)
from transformers.convert_slow_tokenizer import bytes_to_unicode

QUESTION = chat("Why?")
ASKED = asked("Why?")
ANSWERED = [ASKED + "So<|im_end|>", ASKED + "No<|im_end|>"]  # without the template's last line break
CHATS = {"chosen": [*QUESTION, said("So")], "rejected": [*QUESTION, said("No")]}
ANSWERS = {"chosen": [said("So")], "rejected": [said("No")]}
WORDS = {"chosen": "So", "rejected": "No"}
Pair = partial(Case, task="pref")


@pytest.mark.parametrize("record", [  # and those of test_prepare_datasets.py
    {"prompt": QUESTION} | ANSWERS, {"prompt": QUESTION, "chosen": said("So"), "rejected": said("No")}, {"prompt": QUESTION} | WORDS,
    {"prompt": "Why?"} | ANSWERS, {"prompt": "why"} | CHATS, {"prompt": QUESTION} | CHATS,  # the question appears once
    {"prompt": json.dumps(QUESTION), "chosen": json.dumps([said("So")]), "rejected": json.dumps([said("No")])}, {"messages": QUESTION} | ANSWERS])
def test_forms_of_a_pair(bench, record):
    documents = bench.expect(Pair([record], [["So<|im_end|>"], ["No<|im_end|>"]], ANSWERED))
    assert documents.metadata["kind"] == "pref" and list(documents.arrays) == ["doc_offsets", "tokens", "loss_mask"]


KEYS = ["--prompt_key", "q", "--chosen_key", "good", "--rejected_key", "bad"]
NAMED = [{"q": "Why {x}?", "good": "So", "bad": "No", "prompt": "not this"}]
NAMED_LISTS = [{"q": QUESTION, "good": [said("So")], "bad": [said("No")]}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
LAST_ANSWERS = [{"good": CHAT[1:], "bad": [*CHAT[1:4], said("No")]}]
CUT = [{"prompt": "Q:", "chosen": "abc", "rejected": "b"}, {"prompt": "Q:", "chosen": "abc", "rejected": "abd"},
       {"prompt": "QQQQ", "chosen": "abc", "rejected": "b"},
       {"prompt": "Q:", "chosen": "a", "rejected": "b"}, {"chosen": "QQQQa", "rejected": "QQQQb"}]
BOS_PAIRS = [{"prompt": "Q:", "chosen": "A", "rejected": "B"}, {"chosen": "Q:A", "rejected": "Q:B"}]
DOCUMENTS = {
    "only the final answer is scored": Pair(
        [{"chosen": CHAT, "rejected": [*CHAT[:4], said("One"), *chat("More", "Two")]}], [["Bye<|im_end|>"], ["Two<|im_end|>"]],
        rows={"different prompts": 1}),
    "answers that repeat the end of their prompt, or add a system message": Pair(
        [{"prompt": CHAT[:2], "chosen": CHAT[1:3], "rejected": [CHAT[1], said("No")]}, {"prompt": CHAT[1:2], "chosen": CHAT[:3], "rejected": [*CHAT[:2], said("No")]}],
        texts=[asked("Hi", "Be short.") + answer for answer in ("Hello there<|im_end|>", "No<|im_end|>")] * 2),
    "only the final one of two answers is scored": Pair(
        [{"prompt": CHAT[:4], "chosen": [said("One"), said("Two")], "rejected": [said("No")]}], [["Two<|im_end|>"], ["No<|im_end|>"]]),
    "no token ends a turn": Pair(
        [CHATS], [[" So"], [" No"]], ["user: Why?\nassistant: So\n", "user: Why?\nassistant: No\n"], {"open turns": 2}, template=PLAIN,
        tokenizer={"merges": []}),
    "text after the end of turn stays": Pair([CHATS], texts=[text + "\n.\n" for text in ANSWERED], template=CHATML + ".{{ '\\n' }}"),
    "a token after the end of turn is not trained": Pair(
        [CHATS], [["So<|im_end|>"], ["No<|im_end|>"]], [text + "\n<|endoftext|>" for text in ANSWERED], template=CHATML + "{{ eos_token + '\\n' }}"),
    "strings with a prompt: the common beginning of the answers is trained": Pair(
        [{"prompt": "Q: ", "chosen": "yes", "rejected": "yet\n"}], [["yes<|endoftext|>"], ["yet\n<|endoftext|>"]],
        ["Q: yes<|endoftext|>", "Q: yet\n<|endoftext|>"], {"different prompts": None}, template=None, tokenizer={"merges": []}),
    "strings without their end": Pair(
        [{"prompt": "Q: ", "chosen": "yes", "rejected": "no"}], texts=["Q: yes", "Q: no"], template=None, flags=["--append_eos", "false"]),
    "EOS is in the text once or twice; white space after it is removed": Pair(
        [{"prompt": "Q:", "chosen": "yes<|endoftext|>", "rejected": "no<|endoftext|><|endoftext|>\n\n"}],
        [["yes<|endoftext|>"], ["no<|endoftext|><|endoftext|>"]],
        ["Q:yes<|endoftext|>", "Q:no<|endoftext|><|endoftext|>"], template=None),
    "a token across the border belongs to no answer": Pair(
        [{"prompt": "Q: ", "chosen": "Hello you", "rejected": "Bye"}], [[" you<|endoftext|>"], ["Bye<|endoftext|>"]], rows={"merged starts": 1},
        template=None, tokenizer={"merges": chain("ĠHello")}),
    "BOS": Pair(BOS_PAIRS, [["A<|endoftext|>"], ["B<|endoftext|>"]] * 2, ["<s>Q:A<|endoftext|>", "<s>Q:B<|endoftext|>"] * 2, template=None,
                tokenizer={"bos": "<s>", "post": "bos"}),
    "named strings in a text": Pair(
        NAMED, [["So<|endoftext|>"], ["No<|endoftext|>"]], [f"User: Why {{x}}?\nAssistant: {word}<|endoftext|>" for word in WORDS.values()],
        tokenizer={"merges": []}, flags=[*KEYS, "--input_template", "User: {}\nAssistant: "]),
    "named strings in a chat": Pair(NAMED, texts=[asked("Why {x}?") + word + "<|im_end|>" for word in WORDS.values()],
                                    flags=[*KEYS, "--apply-chat-template"]),
    "named lists are chats": Pair(NAMED_LISTS, texts=ANSWERED, flags=KEYS),
    "the prompt is all messages but the last": Pair(
        [{"good": CHAT, "bad": [*CHAT[:4], said("No")]}], [["Bye<|im_end|>"], ["No<|im_end|>"]], flags=[*KEYS[2:], "--apply_chat_template"]),
    "the same with a template without system messages": Pair(
        LAST_ANSWERS, [[" Bye <|endoftext|>"], [" No <|endoftext|>"]],
        flags=[*KEYS[2:], "--tokenizer_chat_template", LLAMA2.replace("bos_token + ", "")]),
    "a call of a tool without text is no empty answer": Pair(
        [{"prompt": QUESTION, "chosen": [CALL], "rejected": [said("b")]}], [["look<|im_end|>"], ["b<|im_end|>"]],
        template=CHATML.replace("m['content']", "(m['content'] or m['tool_calls'][0]['name'])"), tokenizer={"merges": []}),
    "answers that are cut": Pair(
        CUT, [["ab"], ["b<|endoftext|>"], ["a<|endoftext|>"], ["b<|endoftext|>"]],
        ["Q:ab", "Q:b<|endoftext|>", "Q:a<|endoftext|>", "Q:b<|endoftext|>"],
        {"cut to 4 tokens": 1, "dropped": 3, "truncated to nothing": 3, "pairs kept": 2}, template=None, tokenizer={"merges": []},
        flags=["--max_len", "4", "--truncation", "keep"]),
    "answers that include their prompt; a short other text is a note": Pair(
        [{"chosen": "Why? So", "rejected": "Why? No", "id": "a7"}], texts=["Why? So<|endoftext|>", "Why? No<|endoftext|>"]),
    **{f"the prompt is named: {name}": Pair([pair | {name: "Why?"}], texts=ANSWERED, flags=["--prompt_key", name, "--apply_chat_template"])
       for name in ("question", "instruction", "input", "query", "problem", "context") for pair in (WORDS, ANSWERS)},
    "prompts that are empty": Pair(
        [{"chosen": "Why? So", "rejected": "Why? No", name: absent} for absent in ("", None)
         for name in ("question", "instruction", "input", "query", "problem", "context", "history", "system_prompt")], rows={"pairs kept": 16}),
}


@pytest.mark.parametrize("case", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_of_pairs(bench, case):
    bench.expect(case)


@pytest.mark.parametrize("template, ends", [
    (CHATML, "So<|im_end|>"), (CHATML_MARKED, "So<|im_end|>"), (CHATML_WITHOUT_PROMPT, "So<|im_end|>"),
    (CHATML.replace("<|im_end|>\\n", "<|im_end|>"), "So<|im_end|>"), (CHATML.replace("<|im_end|>\\n", "<|im_end|> \\n\\t\\n"), "So<|im_end|>"),
    (LLAMA2, " So <|endoftext|>"), (THINKING, "<think>\n\n</think>\n\nSo<|im_end|>")])
@pytest.mark.parametrize("rstrip", [False, True])
def test_a_pairs_documents_end_with_the_end_of_turn(bench, template, ends, rstrip):
    earlier = chat("Hi", "<think>\nhm\n</think>\n\nHello", "And?")  # THINKING rewrites it
    wanted = [ends, ends.replace("So", "No")]
    documents = bench.expect(Pair([{"chosen": [*earlier, said("So")], "rejected": [*earlier, said("No")]}], [[text] for text in wanted],
                                  template=template, tokenizer={"rstrip": rstrip, "bos": "<s>"}))
    assert all(text.endswith(end) for text, end in zip(documents.texts(), wanted))
    assert ("hm" in documents.texts()[0]) == (template != THINKING)


@pytest.mark.parametrize("merges, chosen, rejected, trained", [
    ([], "Q: yes", "Q: yet", ["s<|endoftext|>", "t<|endoftext|>"]),
    (chain("yes", "yet"), "Q: yes", "Q: yet", ["yes<|endoftext|>", "yet<|endoftext|>"]),  # one token each
    (chain("Ġyes"), "Q: yes", "Q: yet", [" yes<|endoftext|>", " yet<|endoftext|>"]),  # only one of the tokens includes the space
    (chain("yes"), "Q: yes", "Q: yes, so", ["<|endoftext|>", ", so<|endoftext|>"]),  # one text is the beginning of the other
    (chain("yes") + [("yes", "yes")], "Q: yesyes", "Q: yes", ["yesyes<|endoftext|>", "yes<|endoftext|>"]),
    ([], "😀", "😁", ["\ufffd<|endoftext|>"] * 2),  # the last of four bytes differs
    ([], "Yes", "No", ["es<|endoftext|>", "o<|endoftext|>"]),  # nothing in common
    ([], "<|im_start|>Q<|im_end|>A<|im_end|>\n", "<|im_start|>Q<|im_end|>B<|im_end|>\n", ["A<|im_end|><|endoftext|>", "B<|im_end|><|endoftext|>"])])
def test_prompt_of_two_strings_is_what_they_begin_with(bench, merges, chosen, rejected, trained):
    bench.expect(Pair([{"chosen": chosen, "rejected": rejected}], [[run] for run in trained], template=None, tokenizer={"merges": merges}))


@pytest.mark.parametrize("explicit", [True, False])
def test_targets_of_random_pairs_by_bytes(bench, explicit):
    """A token is a target if it begins at or after the prompt's end: the given prompt, or the longest common text that both split at a token."""
    rng = np.random.default_rng(1)
    tokenizer = bench.tokenizer(merges=chain("aab", "abb", "Ġab", "Ġba", "baĠ") + [("Ã", "©"), ("a", "Ã")])

    def text(most):
        return "".join(rng.choice(["a", "b", "ab", " ", "é", "è", "<|im_end|>", "\n"]) for _ in range(rng.integers(1, most)))

    pairs = [(text(9), text(6), text(6)) for _ in range(400)]
    pairs = [(p, c, r) for p, c, r in pairs if len({"", c.strip(), r.strip()}) == 3]
    documents = bench.run("pref", tokenizer, [{"prompt": p, "chosen": c, "rejected": r} if explicit else {"chosen": p + c, "rejected": p + r}
                                              for p, c, r in pairs])
    byte_of = {c: bytes([b]) for b, c in bytes_to_unicode().items()}
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"}
    pieces = [[t.encode() if t in special else b"".join(byte_of[c] for c in t) for t in documents.hf.convert_ids_to_tokens(ids)] for ids in documents.ids]
    bounds, whole = [np.cumsum([0, *map(len, p)]).tolist() for p in pieces], [b"".join(p) for p in pieces]
    assert len(pieces) == 2 * len(pairs) > 500
    for i, (prompt, *_) in zip(range(0, len(pieces), 2), pairs):
        common = len(os.path.commonprefix(whole[i:i + 2]))
        start = len(prompt.encode()) if explicit else max(b for b in {*bounds[i]} & {*bounds[i + 1]} if b <= common)
        for j in (i, i + 1):
            assert documents.masks[j] == [int(b >= start and t > 0) for t, b in enumerate(bounds[j][:-1])], whole[i:i + 2]


def test_margins(bench):
    tokenizer = bench.tokenizer(merges=[])
    pair = {"prompt": "Q", "chosen": "a", "rejected": "b"}
    dropped = pair | {"rejected": "a", "margin": 7}
    documents = bench.run("pref", tokenizer, [pair | {"margin": 1.5}, pair, dropped, pair | {"margin": -2}, pair | {"margin": None}])
    margin = documents.arrays["margin"]
    assert (margin.dtype, margin.tolist()) == (np.float32, [1.5, 0, -2, 0]) and len(documents.ids) == 8
    assert list(documents.arrays) == ["doc_offsets", "margin", "tokens", "loss_mask"]  # in the order of their alignment
    assert bench.row("without a margin") == 2
    bench.run("pref", tokenizer, [pair | {"margin": 1}])
    assert bench.row("without a margin") is None
    table = bench.csv(["chosen", "rejected", "margin"], ["Qa", "Qb", "0.25"], ["Qa", "Qb", ""])
    assert bench.run("pref", tokenizer, table).arrays["margin"].tolist() == [0.25, 0]
    assert "margin" not in bench.run("pref", tokenizer,
                                     [pair, pair | {"rejected": "", "margin": 1}]).arrays  # no pair that is kept has one


def test_labels(bench):
    """The rejected answers of pairs follow the other answers; a draw and an empty answer have no label in the file."""
    answer, pair = {"prompt": "Q", "completion": "a"}, {"prompt": "P", "chosen": "c", "rejected": "r"}
    judged = [answer | {"label": label} for label in (True, "0", "true", False, 1.0)]
    documents = bench.run("unpaired", bench.tokenizer(merges=[]), [*judged[:3], pair, *judged[3:], pair | {"rejected": "c"}, answer | {"completion": "", "label": True}])
    assert documents.metadata["kind"] == "unpaired" and list(documents.arrays) == ["doc_offsets", "label", "tokens", "loss_mask"]
    label = documents.arrays["label"]
    assert (label.dtype, label.tolist()) == (np.float32, [1, 0, 1, 1, 0, 1, 0])
    assert [text[1] for text in documents.texts()] == list("aaacaar")
    assert [bench.row(name) for name in ("desirable", "undesirable", "pairs taken apart", "dropped")] == [4, 3, 1, 2]


def test_dropped_pairs_are_counted_with_their_reason(bench):
    good = {"prompt": "Q:", "chosen": "ab", "rejected": "ac"}
    talk = {"prompt": QUESTION, "chosen": [said("a")], "rejected": [said("b")]}
    equal = [good | {"rejected": "ab"}, good | {"rejected": "ab<|endoftext|>"}, talk | {"rejected": [said("a")]}, {"chosen": "Q", "rejected": "Q"}]
    empty = [good | {"chosen": ""}, good | {"rejected": " \n"}, talk | {"chosen": [said(" ")]}, {"chosen": "Q", "rejected": ""}]
    bench.expect(Pair([good, *equal, talk, *empty, good | {"rejected": "a" * 50}],
                      texts=["Q:ab<|endoftext|>", "Q:ac<|endoftext|>", ASKED + "a<|im_end|>", ASKED + "b<|im_end|>"],
                      rows={"records read": 11, "dropped": 9, "answers are equal": 4, "an answer is empty": 4, "longer than 25 tokens": 1,
                            "pairs kept": 2,
                            "tokens": 2 * 5 + 2 * 25, "target tokens": 2 * 3 + 2 * 2, "length of the chosen": 15, "length of the rejected": 15},
                      tokenizer={"merges": []}, flags=["--max_len", "25"]))


@pytest.mark.parametrize("flags, record, message", [
    ([], {"chosen": "a"}, "has no field 'rejected', so it is not a pair of answers; it has chosen\n  fix: name the fields with --"),
    ([], {"prompt": "Q", "completion": "a"}, "records with one answer are for the task sft"),
    (["--chosen_key", "good"], AB, "has no field 'good', so it is not a pair"),
    (["--prompt_key", "q"], AB, "chosen, rejected\n  fix: name the right one with --prompt_key"),
    ([], {"chosen": 1, "rejected": 2}, "'chosen' is a number, neither a string nor a list of messages"),
    ([], {"chosen": [said("a")], "rejected": "b"}, "'chosen' is a list and 'rejected' a string"),
    ([], {"chosen": [*QUESTION, said("a")], "rejected": []}, "'rejected' is an empty list"),
    ([], {"chosen": QUESTION, "rejected": QUESTION}, "'chosen' ends with a message of the role user, not the assistant's"),
    ([], {"chosen": [*QUESTION, said("a")], "rejected": [{"role": "assistant"}]}, "rejected[0] has no content"),
    ([], {"chosen": ["a"], "rejected": ["b"]}, "chosen[0] is not a message with a role"),
    (["--apply_chat_template"], AB, "'chosen' is a string without a prompt, which makes no chat"),
    *[([], AB | {"margin": value}, f"'margin' is {value!r}, not a finite number") for value in ("much", True, [1], float("nan"), 1e39)],
    ([], AB | {"margin": 10 ** 400}, "not a finite number"), ([], '{"chosen": "a\\ud83d", "rejected": "b"}', "half of a surrogate pair"),
    ([], {"post": "Why?", "chosen": "So", "rejected": "Sometimes"},
     "a pair without a clear prompt: both answers begin only with 'So', but 'post' may be the prompt"),
    ([], {"query": "Or?", "question": "Why?"} | AB, "but 'query' may be the prompt; it has query, question, chosen, rejected"),  # either name may be the prompt's
    *[([], pair | {name: [["Why?", "x"]]}, f"has a field {name!r} that no part of the sample would contain")
      for name in ("question", "instruction", "input", "query", "problem", "context", "history")
      for pair in (AB, {"chosen": [said("a")], "rejected": [said("b")]})],
    ([], {"system_prompt": [["Why?"]], "chosen": [said("a")], "rejected": [said("b")]}, "'system_prompt' is a list"),
])
def test_refused_pairs(bench, flags, record, message):
    assert message in bench.refused_record("pref", CHATML, record, *flags)
