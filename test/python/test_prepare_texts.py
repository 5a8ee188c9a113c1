"""data/prepare.py on prompts with answers, text and ready-made ids. The tests decode the trained tokens; lengths; fields named by flags; prompts for rl."""

import json

import pytest
from preparing import BOTH_TURNS, CHAT, QA, Case, asked, chain, chat

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
    for label, text in (("So", "So"), (8, "8"), (["a", "b"], '["a", "b"]'), ([{"role": "assistant", "content": "So"}], "So"), (chat("Why?", "So"), "So")):
        answers = [record | {"answer": label, "solution": "because"}, record | {"reward_model": {"ground_truth": label, "style": "rule"}}]
        bench.expect(Case(answers, [[f"{text}<|im_end|>"]] * 2, task="rl", tokenizer={"merges": []}))
        assert "solution (1)" in bench.printed
