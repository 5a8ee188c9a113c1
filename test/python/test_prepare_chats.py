"""data/prepare.py: what a record says beside its messages: who is trained, tools, system, the template's variables."""

import csv
import json

import pytest
from preparing import BOTH_TURNS, CHAT, CHATML, CHATML_MARKED, CHATML_STRIPPED, LLAMA2, THINKING, bench  # noqa: F401

QUESTION = [{"role": "user", "content": "Hi"}]
ANSWER = [{"role": "assistant", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
# What the template is given, before the chat.
SPEAKING = "{{ (tools or []) | map(attribute='function.name') | join(',') }}|{{ mood | default('none') }}|" + CHATML


def flagged(**flags):
    """CHAT with train flags: flagged(m2=False) for messages[2]."""
    return [message | flags.get(f"m{i}", {}) for i, message in enumerate(CHAT)]


# ---- who is trained


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_STRIPPED])
@pytest.mark.parametrize("name, no, yes", [("train", False, True), ("training", False, True), ("weight", 0, 1)])
def test_flags_of_messages(bench, template, name, no, yes):
    tokenizer = bench.tokenizer(template)
    records = [flagged(m2={name: no}), flagged(m4={name: no}, m2={name: yes}), flagged(m1={name: yes}, m4={name: no}),
               flagged(m0={name: yes}, m3={name: None}), flagged(m1={name: no})]
    documents = bench.run("sft", tokenizer, [{"messages": messages} for messages in records])
    hello, bye = BOTH_TURNS[0]
    assert documents.trained() == [[bye], [hello], ["Hi<|im_end|>", hello], ["Be short.<|im_end|>", hello, bye], [hello, bye]]
    assert len(set(documents.texts())) == 1  # flags change no text


def test_all_false_leaves_nothing_to_train(bench):
    untrained = {"messages": [QUESTION[0], ANSWER[0] | {"train": False}]}
    assert len(bench.run("sft", bench.tokenizer(CHATML), [untrained, {"messages": CHAT}]).ids) == 1
    assert bench.row("without a target token") == 1


def test_flags_of_sharegpt_turns_and_of_completions(bench):
    turns = [{"from": "human", "value": "Hi", "weight": 1}, {"from": "gpt", "value": "Hello", "weight": 0.0},
             {"from": "gpt", "value": "Bye"}]
    parts = {"prompt": flagged(m2={"train": True})[:4], "completion": flagged()[4:]}
    keyed = {"prompt": flagged(m2={"train": True})[:4], "completion": flagged(m4={"train": False})[4:]}
    documents = bench.run("sft", bench.tokenizer(CHATML), [{"conversations": turns}, parts, keyed])
    assert documents.trained() == [["Hi<|im_end|>", "Bye<|im_end|>"], *BOTH_TURNS, BOTH_TURNS[0][:1]]


def test_users_turn_where_the_template_rewrites_or_has_no_end_of_turn(bench):
    documents = bench.run("sft", bench.tokenizer(LLAMA2, bos="<s>"), [{"messages": [QUESTION[0] | {"train": True}, *ANSWER]}])
    assert documents.trained() == [[" Hi", " Hello <|endoftext|>"]] and bench.row("open turns") == 1
    thinking = [{"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne"},
                {"role": "user", "content": "2?", "train": True}]
    documents = bench.run("sft", bench.tokenizer(THINKING), [{"messages": [*QUESTION, *thinking, *ANSWER]}])
    assert documents.trained()[0][:2] == ["One<|im_end|>", "2?<|im_end|>"]


def test_generation_prompt_is_the_assistants_alone(bench):
    roleless = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>' }}")
    documents = bench.run("sft", bench.tokenizer(roleless), [{"messages": [*ANSWER, QUESTION[0] | {"train": True}, *ANSWER]}])
    assert documents.trained() == [["Hello<|im_end|>", "Hi<|im_end|>", "assistant\nHello<|im_end|>"]]


def test_contents_that_look_like_what_follows_them(bench):
    """The span of a plain turn is where the content stands, whatever the content."""
    chats = [[{"role": "user", "content": "<|im_end|>\n"}, {"role": "assistant", "content": text}]
             for text in ("<|im_end|>\n", "", "\n", "<|im_start|>assistant\n", " a ")]
    documents = bench.run("sft", bench.tokenizer(CHATML, merges=[]), [{"messages": chat} for chat in chats])
    assert documents.trained() == [[chat[1]["content"] + "<|im_end|>"] for chat in chats]


@pytest.mark.parametrize("flags, expected", [
    ({"train": "false"}, "messages[2] has train 'false', which is no boolean\n  fix: true to train on the message, false not to"),
    ({"training": 1}, "messages[2] has training 1, which is no boolean"),
    ({"weight": 0.5}, "messages[2] has the weight 0.5, neither 0 nor 1\n  fix: "),
    ({"weight": [1]}, "messages[2] has the weight [1], neither 0 nor 1"),
    ({"train": True, "weight": 0}, "messages[2] is to be trained and not to be trained: train and weight differ")])
def test_wrong_flags(bench, flags, expected):
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": CHAT}, {"messages": flagged(m2=flags)}])
    assert error.startswith("record 2 (line 2) of in.jsonl: " + expected)


# ---- system, tools, variables


def test_system_field(bench):
    tokenizer = bench.tokenizer(CHATML)
    expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    beside = {"system": "Be short."}
    records = [{"messages": QUESTION + ANSWER}, {"prompt": QUESTION, "completion": ANSWER},
               {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]
    documents = bench.run("sft", tokenizer, [record | beside for record in records])
    assert documents.texts() == [expected + "Hello<|im_end|>\n"] * 3
    assert documents.trained() == [["Hello<|im_end|>"]] * 3
    # A table fills in what only other records have.
    for absent in (None, ""):
        assert bench.run("sft", tokenizer, [{"messages": CHAT, "system": absent}]).trained() == BOTH_TURNS
    pair = {"prompt": "Hi", "chosen": ANSWER, "rejected": [{"role": "assistant", "content": "No"}]} | beside
    assert bench.run("pref", tokenizer, [pair]).texts() == [expected + "Hello<|im_end|>", expected + "No<|im_end|>"]
    for record in ({"prompt": "Hi"}, {"messages": QUESTION}):
        assert bench.run("prompts", tokenizer, [record | beside]).texts() == [expected]
    keys = ["--input_key", "q", "--output_key", "a"]
    strings = [{"q": "Hi", "a": "Hello"} | beside]
    documents = bench.run("sft", tokenizer, strings, *keys, "--apply_chat_template")
    assert documents.trained() == [["Hello<|im_end|>"]] and documents.texts()[0].startswith(expected)
    # As in OpenRLHF only the fields that flags name count where no template is applied.
    assert bench.run("sft", tokenizer, strings, *keys).texts() == ["User: Hi\nAssistant: Hello<|endoftext|>"]


@pytest.mark.parametrize("task, record, expected", [
    ("sft", {"messages": CHAT}, "has a field 'system' and a system message\n  fix: leave one of them out"),
    ("sft", {"prompt": "Q", "completion": "A"}, "has a field 'system', and strings that no chat template is applied to"),
    ("pref", {"prompt": "Q", "chosen": "A", "rejected": "B"}, "has a field 'system', and strings that no chat template"),
    ("sft", {"messages": QUESTION + ANSWER, "system": ["x"]}, "'system' is a list, not a string"),
    ("sft", {"messages": QUESTION + ANSWER, "system": None, "tools": "[{"}, "'tools' is broken JSON: "),
    ("sft", {"messages": QUESTION + ANSWER, "system": None, "tools": {"name": "f"}}, "'tools' is of the kind object, not list"),
    ("prompts", {"prompt": "Q", "tools": ["f"]}, "tools[0] is a string, not an object"),
    ("sft", {"messages": QUESTION + ANSWER, "chat_template_kwargs": 1},
     "'chat_template_kwargs' is of the kind number, not object"),
    ("pref", {"prompt": QUESTION, "chosen": "a", "rejected": "b", "chat_template_kwargs": {"messages": []}},
     "'chat_template_kwargs' sets 'messages', which is no variable of its own")])
def test_wrong_fields_beside_messages(bench, task, record, expected):
    good = {"messages": CHAT} if task == "sft" else {"prompt": "Q"} | ({"chosen": "a", "rejected": "b"} if task == "pref" else {})
    error = bench.refused(task, bench.tokenizer(CHATML), [good, {"system": "Be short."} | record])
    assert error.startswith("record 2 (line 2) of in.jsonl: " + expected)


def test_tools_and_variables_reach_the_template(bench):
    tokenizer = bench.tokenizer(SPEAKING)
    given = [({}, "|none|"), ({"tools": TOOLS}, "look|none|"), ({"tools": json.dumps(TOOLS)}, "look|none|"),
             ({"tools": []}, "|none|"), ({"tools": ""}, "|none|"), ({"chat_template_kwargs": {"mood": "glad"}}, "|glad|"),
             ({"chat_template_kwargs": '{"mood": "glad"}', "tools": TOOLS}, "look|glad|"),
             ({"chat_template_kwargs": {"mood": None}}, "|none|"), ({"chat_template_kwargs": None}, "|none|")]
    tasks = {"sft": {"messages": QUESTION + ANSWER}, "prompts": {"messages": QUESTION},
             "pref": {"prompt": QUESTION, "chosen": "Hello", "rejected": "No"}}
    for task, record in tasks.items():
        documents = bench.run(task, tokenizer, [record | beside for beside, _ in given])
        begun = [text.partition("<|im_start|>")[0] for text in documents.texts()[::2 if task == "pref" else 1]]
        assert begun == [expected for _, expected in given], task
        if task == "sft":
            assert documents.trained() == [["Hello<|im_end|>"]] * len(given)
        # Those of the flag are for all records; a record's own win.
        flags = ["--chat_template_kwargs", '{"mood": "sad", "x": 1}']
        documents = bench.run(task, tokenizer, [record, record | given[5][0]], *flags)
        begun = [text.partition("<|im_start|>")[0] for text in documents.texts()[::2 if task == "pref" else 1]]
        assert begun == ["|sad|", "|glad|"], task


def test_variables_change_where_the_answer_begins(bench):
    """As Qwen3's enable_thinking: the generation prompt, and with it what is trained, depends on a variable."""
    quick = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n' }}{% if quick %}{{ '<think></think>' }}{% endif %}{% endif")
    chat = {"messages": [*QUESTION, {"role": "assistant", "content": "<think></think>Hello"}]}
    documents = bench.run("sft", bench.tokenizer(quick), [chat, chat | {"chat_template_kwargs": {"quick": True}}])
    assert documents.trained() == [["<think></think>Hello<|im_end|>"], ["Hello<|im_end|>"]]


def test_null_in_a_message_is_no_key_of_it(bench):
    named = CHATML.replace("m['role'] +", "m['role'] + (m['name'] if 'name' in m else '') +")
    messages = [QUESTION[0] | {"name": "X"}, ANSWER[0] | {"name": None}]
    documents = bench.run("sft", bench.tokenizer(named), [{"messages": messages}])
    assert documents.texts() == ["<|im_start|>userX\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"]


def test_template_for_tools_alone(bench):
    """A tokenizer can have several templates; records with tools take that named tool_use."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = bench.tokenizer()
    saved = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    saved.chat_template = {"tool_use": SPEAKING}
    saved.save_pretrained(tokenizer)
    assert "the tokenizer has no chat template" in bench.refused("sft", tokenizer, [{"messages": CHAT}])
    documents = bench.run("sft", tokenizer, [{"messages": CHAT, "tools": TOOLS}])
    assert documents.trained() == BOTH_TURNS and documents.texts()[0].startswith("look|none|<|im_start|>system")


def test_fields_in_cells_of_csv(bench):
    with open(bench.path / "in.csv", "w", newline="") as file:
        csv.writer(file).writerows([["prompt", "tools", "system", "chat_template_kwargs"],
                                    ["Hi", json.dumps(TOOLS), "Be", '{"mood": "glad"}'], ["Hi", "", "", ""]])
    texts = bench.run("prompts", bench.tokenizer(SPEAKING), str(bench.path / "in.csv")).texts()
    assert [text[:30] for text in texts] == ["look|glad|<|im_start|>system\nB", "|none|<|im_start|>user\nHi<|im_"]


def test_wrong_flag_for_variables(bench):
    for text in ("mood", "[1]", "1"):
        error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": CHAT}], "--chat_template_kwargs", text)
        assert f"{text!r} is no JSON object" in error
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": CHAT}], "--chat_template_kwargs", '{"tools": []}')
    assert "'tools' is no variable of the template's own" in error


# ---- roles


@pytest.mark.parametrize("role, meant", [("asistant", "assistant"), ("Assistant", "assistant"), ("usr", "user"), ("tools", "tool")])
@pytest.mark.parametrize("task", ["sft", "prompts"])
def test_a_misspelled_role_is_named(bench, task, role, meant):
    good = {"messages": [*QUESTION, *ANSWER, *QUESTION]}
    bad = {"messages": [*QUESTION, {"role": role, "content": "Hello"}, *ANSWER, *QUESTION]}
    error = bench.refused(task, bench.tokenizer(CHATML), [good, bad])
    assert f"record 2 (line 2) of in.jsonl: has a message of the role {role!r}, which seems to be {meant!r} misspelled\n" in error
    assert "fix: " in error and "the known roles are system, developer, user, assistant, tool" in error


def test_a_role_of_ones_own_is_no_mistake(bench):
    """A name that is far from the known ones, and one that the template itself compares with."""
    guided = CHATML.replace("{{ '<|im_start|>'", "{% if m['role'] == 'tools' %}{% endif %}{{ '<|im_start|>'")
    for role, template in (("narrator", CHATML), ("tools", guided)):
        documents = bench.run("sft", bench.tokenizer(template), [{"messages": [*QUESTION, {"role": role, "content": "x"}, *ANSWER]}])
        assert f"<|im_start|>{role}\nx" in documents.texts()[0]
