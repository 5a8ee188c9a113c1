"""Fields of a record that data/prepare.py refuses, with one message that has the problem, its place and the fix; and fields that it counts."""

import json

import pytest
from preparing import AB, CHAT, CHATML, DEEP, GREETING, QA, STRICT, Case, chat, gpt, said

QUESTION, ANSWER = chat("Hi"), [said("Hello")]


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
    (QA | {"reasoning_content": "hm"}, "has a field 'reasoning_content'"), (GREETING | {"context": "C"}, "has a field 'context'"),
    (GREETING | {"documents": [{"text": "D"}]}, "has a field 'documents'"), (GREETING | {"conversations": gpt("Else")}, "has a field 'conversations'"),
    (GREETING | {"kto_tag": True}, "is one answer with a"),
    ({"messages": [*QUESTION, *ANSWER, *QUESTION], "response": "A"}, "has 'response' beside a chat that ends with a message of the role user\n  fix: --input_key"),
    ({"prompt": "Q", "solution": "A", "answer": "B"},
     "has a prompt and no answer; it has prompt, solution, answer\n"
     "  fix: name both with --input_key and --output_key"),
    ({"instruction": "Q", "output": "A", "history": ["x"]}, "has a 'history' that is not a list of questions with their answers"),
    ({"chosen": "a", "rejected": "b"}, "is a pair of answers, chosen and rejected\n  fix: train on it with dpo or rm (prepare.py pref)"),
    ({"messages": [QUESTION[0], ANSWER[0] | {"train": "false"}]},
     "messages[1] has train 'false', neither true (1) nor false (0)\n  fix: set it to true to train on the message, to false not to"),
    *[({"messages": [ANSWER[0] | {name: 0.5}]}, f"messages[0] has {name} 0.5, neither true (1) nor false (0)\n  fix: ") for name in ("weight", "loss_scale")],
    ({"messages": [ANSWER[0] | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}]}, "messages[0] has train_detail, which trains parts of"),
    ({"messages": [ANSWER[0] | {"train": True, "weight": 0}]}, "messages[0] is to be trained and not to be trained: train and weight differ"),
    (QA | {"system": "S"}, "has a field 'system', and strings that no chat template is applied to"),
    (GREETING | {"system": ["x"]}, "'system' is a list, not a string"), (GREETING | {"tools": "[{"}, "'tools' is broken JSON: "),
    (GREETING | {"tools": {"name": "f"}}, "'tools' is of the kind object, not list"),
    (GREETING | {"chat_template_kwargs": 1}, "'chat_template_kwargs' is of the kind number, not object"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}, *ANSWER]},
     "messages[0] has a part of the type 'image'\n  fix: only text"),
    ({"messages": chat([{"type": "text"}], "Hello")}, "messages[0] has a part of the type 'text' that has no text"),
    ({"messages": chat(5, "Hello")}, "messages[0] has a content that is a number, not a string"),
    ({"messages": chat(None, "Hello")}, "messages[0] has no content; its content is null"),
    ({"conversations": [*QUESTION, {"from": "gpt", "value": "Hello", "content": "Bye"}]},
     "conversations[1] has a content and another value\n  fix: leave one of them out"),
    (GREETING | {"images": ["a.png"]}, "has 'images', and only text is trained on"),
    *[(record | {name: value}, f"has {name!r}, a weight or a mask of the loss that is not read here\n  fix: ") for record, name, value in (
        (QA, "weight", 0.5), (GREETING, "loss_weight", "0"), (GREETING, "sample_weight", 2), (GREETING, "loss_mask", [1, 0]), (GREETING, "mask", [[0]]), (QA, "train", False),
        (GREETING, "assistant_masks", [0, 1]), (GREETING, "lossMask", [0]), (GREETING, "Loss", 0))],
    (GREETING | {"input_ids": [1, 2], "labels": [-100, 2]}, "has 'labels' beside a text or a chat"),
    *[(GREETING | {name: value}, f"has a field {name!r} that no part of the sample would contain; it has messages, {name}\n  fix: write {known!r}, if") for name, value, known in (
        ("sytem", "S", "system"), ("System", "S", "system"), ("systemPrompt", "S", "system_prompt"), ("tool", [{"name": "f"}], "tools"), ("mesages", QUESTION + [said("Bye")], "messages"))],
    (GREETING | {"Images": ["a.png"]}, "has 'Images', and only text is trained on"),
    (GREETING | {"chat_template_kwarg": {"enable_thinking": False}}, "has a field 'chat_template_kwarg', which seems to be 'chat_template_kwargs' misspelled"),
    *[({"messages": [*QUESTION, ANSWER[0] | {name: value}]}, f"messages[1] has {name!r}, {what}") for name, value, what in (
        ("mask", 0, "a weight or a mask of the loss that is not read here\n  fix: mark"), ("trian", False, "which seems to be 'train' misspelled"),
        ("tool_call", [], "which seems to be 'tool_calls' misspelled"), ("reasonning", "hm", "which seems to be 'reasoning' misspelled"))],
])
def test_records_of_sft(bench, record, message):
    assert bench.refused_record("sft", STRICT, record).startswith(message)


@pytest.mark.parametrize("task, template, record, message", [
    ("sft", CHATML, {"messages": CHAT, "system": "S"}, "has a field 'system' and a system message\n  fix: leave one of them out"),
    ("pref", CHATML, {"prompt": "Q", "system": "S"} | AB, "has a field 'system', and strings that no chat template"),
    ("sft", None, {"instruction": "Q", "output": "A", "history": [["a", "b"]]}, "has a field 'history'"),
    ("prompts", CHATML, {"prompt": "Q", "tools": ["f"]}, "tools[0] is a string, not an object"),
    ("pref", CHATML, {"prompt": QUESTION, "chat_template_kwargs": {"messages": []}} | AB,
     "'chat_template_kwargs' sets 'messages', which is a reserved name"),
    ("pref", CHATML, {"prompt": "Q", "lable": 0} | AB, "has a field 'lable', which seems to be 'label' misspelled"),
    ("pref", CHATML, {"prompt": "Q", "sample_weights": 0.5} | AB, "has 'sample_weights', a weight or a mask"),
    ("unpaired", CHATML, {"prompt": "Q", "completion": "A"}, "has no label, which says whether its answer is desirable, and is no pair of answers; it has prompt, c"),
    *(("unpaired", CHATML, {"prompt": "Q", "completion": "A", "label": label}, f"'label' is {label!r}, neither true nor false\n") for label in ("good", 0.7, 2, [1])),
    ("unpaired", CHATML, {"messages": QUESTION, "label": True}, "'messages' ends with a message of the role user, so it has no answer that the label could judge"),
    ("unpaired", CHATML, {"text": "A", "label": True}, "has no prompt beside the answer that is judged; it has text, label"),
    ("unpaired", CHATML, {"prompt": "Q", "label": True}, "has a prompt and no answer; it has prompt, label"),
    ("rl", CHATML, {"prompt": "Q", "completion_mask": [0, 1]}, "has 'completion_mask', a weight or a mask"),
    ("prompts", CHATML, {"prompt": "Q", "systm": "S"}, "has a field 'systm' that no part of the sample would contain"),
    ("pretrain", CHATML, AB, "is a pair of answers, chosen and rejected\n  fix: train on it with dpo or rm (prepare.py pref)"),
    *(("sft", CHATML, record, "its JSON is nested too deeply\n") for record in (
        f'{{"messages": {DEEP}}}', f'{{"text": "a", "more": {DEEP}}}', json.dumps({"messages": CHAT, "tools": DEEP})))])
def test_records_of_other_tasks(bench, task, template, record, message):
    assert bench.refused_record(task, template, record).startswith(message)


@pytest.mark.parametrize("record, keys, name", [
    ({"instruction": "Q", "context": "C", "response": "A"}, ("instruction", "response"), "context"),
    ({"system_prompt": "S", "question": "Q", "response": "A"}, ("question", "response"), "system_prompt"),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, ("instruction", "output"), "input"),
    ({"q": "Q", "a": "A", "tools": [{"name": "look"}]}, ("q", "a"), "tools"), ({"q": "Q", "a": "A", "reasoning": "hm"}, ("q", "a"), "reasoning")])
def test_prompts_beside_the_named_fields(bench, record, keys, name):
    error = bench.refused("sft", bench.tokenizer(CHATML), [record], "--input_key", keys[0], "--output_key", keys[1], "--input_template", "openrlhf")
    assert f"record 1 (line 1) of in.jsonl: has a field {name!r} that no part of the sample would contain; it has " in error


def test_a_content_under_two_names_may_be_equal(bench):
    bench.expect(Case([{"conversations": [*QUESTION, {"from": "gpt", "value": "Hello", "content": "Hello"}]}], [["Hello<|im_end|>"]]))


def test_unused_fields_are_counted(bench):
    """Notes on a record, and keys of messages that the template does not read."""
    messages = [QUESTION[0] | {"mood": "glad"}, *ANSWER]
    bench.run("sft", bench.tokenizer(CHATML), [{"messages": messages, "source": "web", "id": i, "note": ""} for i in range(3)])
    assert bench.row("fields not used") == 2 and "source (3), id (3)" in bench.printed
    assert bench.row("keys of messages not read") == 1 and "mood (3) by the template" in bench.printed
    bench.run("sft", bench.tokenizer(CHATML), [{"messages": CHAT, "weight": 1, "loss_mask": [1, 1], "loss": 0.7, "prompts": "x", "contents": "y", "target": "z"}])
    assert bench.row("fields not used") == 6
    bench.run("sft", bench.tokenizer(CHATML), [{"messages": CHAT, "mesages": CHAT, "documets": ["e"], "chosen_": "e"}])  # misspelled, of words that the sample has
    assert bench.row("fields not used") == 3
    bench.run("prompts", bench.tokenizer(CHATML), [{"prompt": "Hi", "id": 1}] * 2)
    assert bench.row("fields not used") == 1 and "id (2)" in bench.printed
    bench.run("sft", bench.tokenizer(CHATML.replace("m['content']", "m['content'] + m['mood'] | default('')")), [{"messages": CHAT}])
    assert "not used" not in bench.printed and "not read" not in bench.printed
