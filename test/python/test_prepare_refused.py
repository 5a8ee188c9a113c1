"""Refusals of data/prepare.py: one message with the problem, its place and the fix, and no output. A record with a part that would be lost is
refused."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pyarrow.parquet
import pytest
from preparing import CALLING, CHAT, CHATML, DATA, HEADLINES, STRICT, THINKING, Case, chat, gpt, said

import limits

QUESTION, ANSWER = chat("Hi"), [said("Hello")]
SAID = {"messages": chat("Hi", "Hello")}
QA = {"prompt": "Q", "completion": "A"}
AB = {"chosen": "a", "rejected": "b"}
DEEP = "[" * 100_000 + "]" * 100_000
GOOD = {"sft": {"messages": chat("Hi", "Hello")}, "prompts": {"prompt": "Q"}, "rl": {"prompt": "Q"}, "pretrain": {"text": "a"},
        "pref": {"prompt": QUESTION, "q": QUESTION, "chosen": [said("a")], "good": [said("a")], "rejected": [said("b")]}}


def refused_record(bench, task, template, record, *flags):
    """The message on the second record, without its place."""
    error = bench.refused(task, bench.tokenizer(template), [GOOD[task] if template else {"text": "a"}, record], *flags)
    assert error.startswith("record 2 (line 2) of in.jsonl: "), error
    return error.removeprefix("record 2 (line 2) of in.jsonl: ")


# ---- fields and their values


@pytest.mark.parametrize("record, message", [
    ('{"text": "b"', "broken JSON: "), ('{"text": "a", "text": "b"}', "has 'text' twice\n  fix: leave one of them out"), ('["text"]', "is a JSON list, not an object"),
    ('{"text": "a", "id": ' + 4301 * "1" + '}', "has an integer of more than 4,300 digits\n  fix: write it as a text in quotes"),
    ({"question": "a", "reply": "b"}, "has fields question, reply, which match no supported format\n  fix: the supported formats are messages; "),
    ({"prompt": 1, "completion": "b"}, "'prompt' is a number, neither a string nor a list of messages"), ({"text": ["a"]}, "'text' is a list, not a string"),
    ({"messages": []}, "'messages' is an empty list"),
    ({"question": "Q", "answer": json.dumps(QUESTION + ANSWER)}, "'answer' begins with a message of the role user, after a prompt that ends with the user's"),
    ({"prompt": None, "completion": "b"}, "has fields prompt (null), completion, which match no"),
    ({"messages": [{"role": "user"}]}, "messages[0] has no content; it has role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0] is not a message with a role; it has content"),
    ({"conversations": [{"from": ["human"], "value": "Hi"}]}, "conversations[0] is not a message with a role"),
    ({"messages": CHAT[:1]}, "the chat template refuses its messages: unknown role system (roles: system)"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "has 3 input_ids but 2 labels"),
    ({"input_ids": [1, 99999], "labels": [1, 99999]}, "input_ids[1] is 99999, outside the vocabulary of "),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels[0] is 2 but input_ids[0] is 1"),
    ({"input_ids": [1.5], "labels": [1]}, "'input_ids' is not a list of integers"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 2]}, "attention_mask has the value 2, neither 0 nor 1\n  fix: write one document in each"),
    ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "position_ids": [0, 1, 0]}, "'position_ids' do not count from 0 to the last id"),
    ('{"text": "a\\ud83d"}', "its text has half of a surrogate pair: '\\ud83d'"),
    ({"text": "A", "question": "Q"}, "has a field 'question'"), (QA | {"context": "C"}, "has a field 'context'"),
    (QA | {"reasoning_content": "hm"}, "has a field 'reasoning_content'"), (SAID | {"context": "C"}, "has a field 'context'"),
    (SAID | {"documents": [{"text": "D"}]}, "has a field 'documents'"), (SAID | {"conversations": gpt("Else")}, "has a field 'conversations'"),
    (SAID | {"kto_tag": True}, "is one answer with a"),
    ({"messages": [*QUESTION, *ANSWER, *QUESTION], "response": "A"}, "has 'response' beside a chat that ends with a message of the role user\n  fix: --input_key"),
    ({"prompt": "Q", "solution": "A", "answer": "B"},
     "has a prompt and no answer; it has prompt, solution, answer\n"
     "  fix: name both with --input_key and --output_key"),
    ({"instruction": "Q", "output": "A", "history": ["x"]}, "has a 'history' that is not a list of questions with their answers"),
    ({"chosen": "a", "rejected": "b"}, "is a pair of answers, chosen and rejected\n  fix: prepare it with the task pref"),
    ({"messages": [QUESTION[0], ANSWER[0] | {"train": "false"}]},
     "messages[1] has train 'false', neither true (1) nor false (0)\n  fix: set it to true to train on the message, to false not to"),
    *[({"messages": [ANSWER[0] | {name: 0.5}]}, f"messages[0] has {name} 0.5, neither true (1) nor false (0)\n  fix: ") for name in ("weight", "loss_scale")],
    ({"messages": [ANSWER[0] | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]}, "messages[0] has train_detail, which trains parts of"),
    ({"messages": [ANSWER[0] | {"train": True, "weight": 0}]}, "messages[0] is to be trained and not to be trained: train and weight differ"),
    (QA | {"system": "S"}, "has a field 'system', and strings that no chat template is applied to"),
    (SAID | {"system": ["x"]}, "'system' is a list, not a string"), (SAID | {"tools": "[{"}, "'tools' is broken JSON: "),
    (SAID | {"tools": {"name": "f"}}, "'tools' is of the kind object, not list"),
    (SAID | {"chat_template_kwargs": 1}, "'chat_template_kwargs' is of the kind number, not object"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}, *ANSWER]},
     "messages[0] has a part of the type 'image'\n  fix: only text"),
    ({"messages": chat([{"type": "text"}], "Hello")}, "messages[0] has a part of the type 'text' that has no text"),
    ({"messages": chat(5, "Hello")}, "messages[0] has a content that is a number, not a string"),
    ({"messages": chat(None, "Hello")}, "messages[0] has no content; its content is null"),
    ({"conversations": [*QUESTION, {"from": "gpt", "value": "Hello", "content": "Bye"}]},
     "conversations[1] has a content and another value\n  fix: leave one of them out"),
    (SAID | {"images": ["a.png"]}, "has 'images', and only text is trained on"),
    *[(record | {name: value}, f"has {name!r}, a weight or a mask of the loss that is not read here\n  fix: ") for record, name, value in (
        (QA, "weight", 0.5), (SAID, "loss_weight", "0"), (SAID, "sample_weight", 2), (SAID, "loss_mask", [1, 0]), (SAID, "mask", [[0]]), (QA, "train", False),
        (SAID, "assistant_masks", [0, 1]), (SAID, "lossMask", [0]), (SAID, "Loss", 0))],
    (SAID | {"input_ids": [1, 2], "labels": [-100, 2]}, "has 'labels' beside a text or a chat"),
    *[(SAID | {name: value}, f"has a field {name!r} that no part of the sample would contain; it has messages, {name}\n  fix: write {known!r}, if") for name, value, known in (
        ("sytem", "S", "system"), ("System", "S", "system"), ("systemPrompt", "S", "system_prompt"), ("tool", [{"name": "f"}], "tools"), ("mesages", QUESTION + [said("Bye")], "messages"))],
    (SAID | {"Images": ["a.png"]}, "has 'Images', and only text is trained on"),
    (SAID | {"chat_template_kwarg": {"enable_thinking": False}}, "has a field 'chat_template_kwarg', which seems to be 'chat_template_kwargs' misspelled"),
    *[({"messages": [*QUESTION, ANSWER[0] | {name: value}]}, f"messages[1] has {name!r}, {what}") for name, value, what in (
        ("mask", 0, "a weight or a mask of the loss that is not read here\n  fix: mark"), ("trian", False, "which seems to be 'train' misspelled"),
        ("tool_call", [], "which seems to be 'tool_calls' misspelled"), ("reasonning", "hm", "which seems to be 'reasoning' misspelled"))],
])
def test_records_of_sft(bench, record, message):
    assert refused_record(bench, "sft", STRICT, record).startswith(message)


def test_a_content_under_two_names_may_be_equal(bench):
    bench.expect(Case([{"conversations": [*QUESTION, {"from": "gpt", "value": "Hello", "content": "Hello"}]}], [["Hello<|im_end|>"]]))


@pytest.mark.parametrize("task, template, record, message", [
    ("sft", CHATML, {"messages": CHAT, "system": "S"}, "has a field 'system' and a system message\n  fix: leave one of them out"),
    ("pref", CHATML, {"prompt": "Q", "system": "S"} | AB, "has a field 'system', and strings that no chat template"),
    ("sft", None, {"instruction": "Q", "output": "A", "history": [["a", "b"]]}, "has a field 'history'"),
    ("prompts", CHATML, {"prompt": "Q", "tools": ["f"]}, "tools[0] is a string, not an object"),
    ("pref", CHATML, {"prompt": QUESTION, "chat_template_kwargs": {"messages": []}} | AB,
     "'chat_template_kwargs' sets 'messages', which is a reserved name"),
    ("pref", CHATML, {"prompt": "Q", "lable": 0} | AB, "has a field 'lable', which seems to be 'label' misspelled"),
    ("pref", CHATML, {"prompt": "Q", "sample_weights": 0.5} | AB, "has 'sample_weights', a weight or a mask"),
    ("rl", CHATML, {"prompt": "Q", "completion_mask": [0, 1]}, "has 'completion_mask', a weight or a mask"),
    ("prompts", CHATML, {"prompt": "Q", "systm": "S"}, "has a field 'systm' that no part of the sample would contain"),
    ("pretrain", CHATML, AB, "is a pair of answers, chosen and rejected\n  fix: prepare it with the task pref"),
    *(("sft", CHATML, record, "its JSON is nested too deeply\n") for record in (
        f'{{"messages": {DEEP}}}', f'{{"text": "a", "more": {DEEP}}}', json.dumps({"messages": CHAT, "tools": DEEP})))])
def test_records_of_other_tasks(bench, task, template, record, message):
    assert refused_record(bench, task, template, record).startswith(message)


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
def test_pairs(bench, flags, record, message):
    assert message in refused_record(bench, "pref", CHATML, record, *flags)


@pytest.mark.parametrize("record, keys, name", [
    ({"instruction": "Q", "context": "C", "response": "A"}, ("instruction", "response"), "context"),
    ({"system_prompt": "S", "question": "Q", "response": "A"}, ("question", "response"), "system_prompt"),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, ("instruction", "output"), "input"),
    ({"q": "Q", "a": "A", "tools": [{"name": "look"}]}, ("q", "a"), "tools"), ({"q": "Q", "a": "A", "reasoning": "hm"}, ("q", "a"), "reasoning")])
def test_prompts_beside_the_named_fields(bench, record, keys, name):
    error = bench.refused("sft", bench.tokenizer(CHATML), [record], "--input_key", keys[0], "--output_key", keys[1], "--input_template", "openrlhf")
    assert f"record 1 (line 1) of in.jsonl: has a field {name!r} that no part of the sample would contain; it has " in error


# ---- roles, and parts of messages that the template does not render

LOOK = {"name": "look", "arguments": {"place": "Rome"}}


@pytest.mark.parametrize("role, meant", [("asistant", "assistant"), ("Asistant", "assistant"), ("usr", "user"), ("tools", "tool")])
def test_a_misspelled_role(bench, role, meant):
    error = refused_record(bench, "sft", CHATML, {"messages": [*QUESTION, {"role": role, "content": "Hello"}, *ANSWER, *QUESTION]})
    assert error.startswith(f"has a message of the role {role!r}, which seems to be {meant!r} misspelled\n  fix: ")
    assert "the known roles are system, developer, user, assistant, tool" in error


@pytest.mark.parametrize("role, other", [("system", "assistant"), ("critic", "assistant"), ("critic", "user")])
def test_a_role_that_is_rendered_as_another(bench, role, other):
    """The last branch of the template renders every unknown role."""
    first, last = ("user", "assistant") if other == "assistant" else ("assistant", "user")
    template = ("{% for m in messages %}{% if m['role'] == 'FIRST' %}FIRST: {% else %}LAST: {% endif %}{{ m['content'] }}{% endfor %}"
                .replace("FIRST", first).replace("LAST", last))
    error = refused_record(bench, "sft", template, {"messages": [{"role": role, "content": "Well"}, *QUESTION, *ANSWER]})
    assert f"a message of the role '{role}', which the chat template shows as the {other}'s\n  fix: " in error


def called(*calls, **message):
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [*calls], **message}, {"role": "tool", "content": "sunny"}, *ANSWER]}


CRITIC = "has content in a message of the role 'critic', which the chat template does not render"
CALLS = "has tool calls in a message of the role 'assistant', which the chat template does not render\n  fix: "


@pytest.mark.parametrize("template, record, lost", [
    (CALLING, {"messages": [*QUESTION, {"role": "critic", "content": "Hello"}, *ANSWER]}, CRITIC),  # another message has the same text
    (CALLING, {"messages": [*QUESTION, {"role": "developer", "content": "Hi"}, *ANSWER]}, "has content in a message of the role 'developer'"),
    (HEADLINES.replace("{% else %}", "{% elif m['role'] == 'assistant' %}", 1), {"messages": CHAT}, "has content in a message of the role 'system'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"reasoning_content": "hm"}]}, "has reasoning in a message of the role 'assistant'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"thinking": "hm"}, *QUESTION, *ANSWER]}, "has reasoning in a message"),
    (THINKING.replace("{% if loop.last %}", "{% if false %}"), {"messages": chat("Hi", "<think>hm</think>Hello")}, "has reasoning in a message"),
    (CHATML, called({"function": LOOK}, content="Let me see."), CALLS),
    (CHATML, {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [LOOK]}, *QUESTION, *ANSWER]}, CALLS),  # without a content
    (CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), called({"function": LOOK}, {"function": LOOK}), "has tool calls in"),
    (CALLING.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), called({"function": LOOK}, content="Now"),
     "has content beside tool calls in a message of the role 'assistant'"),
    (CHATML, SAID | {"tools": [{"type": "function", "function": {"name": "look"}}]},
     "has tools, which the chat template does not render\n  fix: leave 'tools' out, or use a template for tools"),
    (CHATML, {"messages": [QUESTION[0] | {"images": ["a.png"]}, *ANSWER]}, "has images in a message of the role 'user'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"function_calls": "look()"}]}, "has function_calls in a message of the role 'assistant'"),
    (CALLING, {"messages": [QUESTION[0] | {"tools": "[]"}, *ANSWER]}, "has tools, which the chat template does not render"),  # it renders others
    (CALLING, {"messages": [*QUESTION, ANSWER[0] | {"reasoning": "a", "thinking": "b"}]}, "messages[1] has reasoning and thinking, which differ"),
    (CALLING, {"messages": [*QUESTION, said("<think>a</think>b") | {"reasoning": "a"}]}, "messages[1] has reasoning, and a content that begins with <think>"),
    (CALLING, called({"function": {"arguments": {}}}), "messages[1] calls a tool by an object without a name"),
    (CALLING, {"conversations": [*gpt("Hi"), {"from": "function_call", "value": "look at Rome"}]}, "conversations[1] calls a tool by a string")])
def test_parts_that_the_template_does_not_render(bench, template, record, lost):
    assert refused_record(bench, "sft", template, record).startswith(lost)


COUNTING = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
MOODY = CHATML.replace("'<|im_end|>\\n'", "('<|im_end|>' if m['content'] == 'Bye' else '<|im_end|>\\n')")


@pytest.mark.parametrize("template, turn", [(COUNTING, 2), (MOODY, 4)])
def test_content_that_the_template_rewrites(bench, template, turn):
    error = bench.refused("sft", bench.tokenizer(template), [{"messages": CHAT}])
    assert error.startswith(f"record 1 (line 1) of in.jsonl: messages[{turn}], the assistant's, cannot be found in the")


# ---- flags and files


@pytest.mark.parametrize("task, source, flags, message", [
    ("sft", [SAID], ["--truncation", "split"], "invalid choice: 'split'"), ("pref", [AB], ["--truncation", "split"], "invalid choice: 'split'"),
    ("sft", [SAID], ["--maxlen", "5"], "unrecognized arguments: --maxlen"), ("sft", [SAID], ["--append_eos", "maybe"], "neither true nor false"),
    ("sft", [SAID], ["--max_len", "1"], "at least two tokens"), ("sft", [SAID], ["--input_template", "User:"], "has no {}"),
    ("pref", [AB], ["--input_template", "User:"], "has no {}"),
    ("sft", [SAID], ["--tokenizer_chat_template", "none.jinja"], "neither a template nor a file"),
    ("sft", [SAID], ["--tokenizer_chat_template", "x"], "neither a template nor a file, nor one of chatml, llama3, phi_3"),
    ("sft", [SAID], ["--input_key", "chat"], "has no field 'chat'; it has messages"),
    ("sft", [{"q": "a"}], ["--input_key", "q"], "there is no answer to the prompt"),
    ("prompts", None, [], "there is nothing to prepare"), ("prompts", [SAID], [], "nothing to answer"),
    ("prompts", None, ["--prompt", "", "--prompt", "a", "--no_chat_template"], "record 1 of --prompt: the prompt is empty"),
    ("sft", [{"messages": QUESTION}], [], "no record is left"), ("sft", [SAID], ["--max_len", "9"], "\n  fix: --max_len 24, or give shorter records"),
    ("pref", [AB], ["--append_eos", "false"], "no record is left"),  # only the first tokens differ, and these are no targets
    ("sft", [SAID], ["--chat_template_kwargs", '{"a": ' + DEEP[:50_000]], "is not a JSON object"),
    ("sft", [SAID], ["--chat_template_kwargs", "mood"], "'mood' is not a JSON object"),
    ("sft", [SAID], ["--chat_template_kwargs", "[1]"], "'[1]' is not a JSON object"),
    ("sft", [SAID], ["--chat_template_kwargs", '{"tools": []}'], "'tools' is a reserved name"),
    ("sft", [SAID], ["--seed", "-1"], "-1 is negative"), ("sft", [SAID], ["--max_samples", "0"], "0 is less than one"),
    ("pretrain", [{"text": "a"}], ["--to_bin", "/nowhere/new"], "its directory does not exist"),
    ("sft", [{"text": "a"}], ["--stopping_strategy", "concat"], "invalid choice: 'concat' (choose from 'first_exhausted'"),
    ("sft", [{"text": "a"}], ["--dataset_probs", "0.5,0.5"], "--dataset_probs has 2 probabilities for 1 inputs\n  fix: give one for each"),
])
def test_flags(bench, task, source, flags, message):
    assert message in bench.refused(task, bench.tokenizer(CHATML), source, *flags)


@pytest.mark.parametrize("probs, message", [
    *[(text, f"{text} are not positive numbers that add up to 1") for text in ("0.5,0.4", "1.5,-0.5", "0,1", "nan,1")],
    ("a,b", "invalid probabilities value: 'a,b'"), ("0.5,0.5", "b.jsonl: contains no records")])
def test_probabilities(bench, probs, message):
    source = bench.jsonl({"text": "a"}, name="a.jsonl") + "," + bench.jsonl("", name="b.jsonl")
    assert message in bench.refused("sft", bench.tokenizer(), source, "--dataset_probs", probs)


@pytest.mark.parametrize("name, content, message", [
    ("none.jsonl", None, "none.jsonl: there is no such file"), ("empty.jsonl", "", "empty.jsonl: the file is empty"),
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
def test_inputs(bench, name, content, message):
    (bench.path / "nothing").mkdir()
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], ["text", "text"]), bench.path / "twice.parquet")
    bench.jsonl(*[SAID] * 3, {"messages": 1}, name="bad.jsonl")
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


def test_tokenizers(bench):
    records = [SAID]
    assert "no-such: there is no such directory" in bench.refused("sft", bench.path / "no-such", records)
    (bench.path / "bare").mkdir()
    assert "bare: contains no tokenizer.json" in bench.refused("sft", bench.path / "bare", records)
    bench.write("bare/tokenizer.json", "version https://git-lfs.github.com/spec/v1\n")
    assert "bare/tokenizer.json: is a pointer of Git LFS" in bench.refused("sft", bench.path / "bare", records)
    bench.write("bare/tokenizer.json", '{"model": {}}')
    assert "bare/tokenizer.json: is not a tokenizer" in bench.refused("sft", bench.path / "bare", records)
    for task, source in (("sft", records), ("pref", [GOOD["pref"]])):
        assert "the tokenizer has no chat template" in bench.refused(task, bench.tokenizer(), source)
    assert "there is no chat template to render" in bench.refused("prompts", bench.tokenizer(), records)
    assert "has no eos_token" in bench.refused("pretrain", bench.tokenizer(eos=None), [{"text": "a"}])
    assert "has no bos_token" in bench.refused("pretrain", bench.tokenizer(), [{"text": "a"}], "--add_bos", "always")


def changed(**fields):
    return lambda text: json.dumps({**json.loads(text), **fields}).encode()


def vocabulary(vocab):
    return lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "vocab": vocab}}).encode()


BROKEN = [lambda text: b"", lambda text: text.encode("utf-16"), lambda text: b'{"model": "\xff"}', lambda text: text[:-9].encode(),
          lambda text: b"[" * 100000 + b"]" * 100000, lambda text: b"[1]"]
TOKEN = {"id": 256, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize("name, break_it", [
    *[(name, break_it) for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json") for break_it in BROKEN],
    ("special_tokens_map.json", lambda _: b'{"eos_token": {"a": 1}}'),
    *[("tokenizer.json", changed(**{name: value})) for name in ("model", "added_tokens") for value in (None, "x", {"a": 1})],
    *[("tokenizer.json", vocabulary(value)) for value in (None, {}, [1], {"a": "b"}, {"a": -1}, {"a": 1.5}, {"a": 1 << 40})],
    *[("tokenizer.json", changed(added_tokens=[TOKEN | field])) for field in ({"id": -1}, {"id": 1 << 30}, {"special": "x"}, {"content": "\ud800"})]])
def test_broken_tokenizers(bench, name, break_it):
    path = shutil.copytree(DATA / "demo" / "model", bench.path / "tokenizer")
    text = (path / name).read_text() if (path / name).exists() else "{}" * 9
    (path / name).write_bytes(break_it(text))
    message = bench.refused("sft", path, [{"text": "a"}])
    assert "tokenizer" in message and len(message) < 1000


def test_arguments_and_files_in_another_encoding(bench):
    """As from a shell with a locale in Latin-1."""
    latin = bench.path / os.fsdecode(b"caf\xe9.jsonl")
    latin.write_text('{"text": "a"}\n')
    tokenizer = bench.tokenizer(CHATML)
    for flags in (["prompts", "--prompt", b"caf\xe9"], ["sft", "--input", latin], ["sft", "--input", bench.path / "*.jsonl"]):
        command = [sys.executable, DATA / "prepare.py", *flags, "--tokenizer", tokenizer, "--out", bench.out]
        result = subprocess.run(command, capture_output=True)
        assert result.returncode == 1 and b"\\udce9" in result.stderr and b" is not UTF-8\n  fix: " in result.stderr, result.stderr
    error = bench.refused("sft", tokenizer, [SAID], "--tokenizer_chat_template", bench.write("latin.jinja", b"{{ 'caf\xe9' }}"))
    assert "latin.jinja: is not UTF-8 text" in error


# ---- templates without an end or with too much output

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize("template, expected", [
    *[(template, "the chat template has not ended after 0.2 seconds") for template in (ENDLESS, RECURSIVE, "{{ 3 ** (10 ** 8) % 7 }}")],
    *[(template, "the chat template needs more than 64 MiB of memory")
      for template in ("{{ 'a' * 10 ** 11 }}", "{{ '%99999999999d' % 1 }}", DOUBLING)],
    ("{{ 'a' * 5000 }}", "the chat template makes a text of 5,000 characters, more than 4,000"),
    ("{% for i in range(10 ** 12) %}{% endfor %}", "the chat template refuses its messages: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refuses its messages: maximum recursion depth exceeded"),
])
def test_a_template_beyond_the_limits(bench, monkeypatch, template, expected):
    for name, value in {"SECONDS": 0.2 if "seconds" in expected else 60, "MEMORY": 64 << 20, "CHARACTERS": 4000}.items():
        monkeypatch.setattr(limits, name, value)
    usual = resource.getrlimit(resource.RLIMIT_AS)
    error = bench.refused("sft", bench.tokenizer(template), [{"messages": CHAT}])
    assert f"record 1 (line 1) of in.jsonl: {expected}" in error
    assert resource.getrlimit(resource.RLIMIT_AS) == usual and signal.getitimer(signal.ITIMER_PROF)[0] == 0
