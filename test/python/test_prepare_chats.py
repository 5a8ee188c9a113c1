"""data/prepare.py: other fields of a record with messages: trained turns, tools, system, the template's variables."""

import csv
import json

import pytest
from preparing import BOTH_TURNS, CALLING, CHAT, CHATML, CHATML_MARKED, CHATML_STRIPPED, HEADLINES, LLAMA2, THINKING, bench  # noqa: F401

QUESTION = [{"role": "user", "content": "Hi"}]
ANSWER = [{"role": "assistant", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
# What the template is given, before the chat.
SPEAKING = "{{ (tools or []) | map(attribute='function.name') | join(',') }}|{{ mood | default('none') }}|" + CHATML


def flagged(**flags):
    """CHAT with train flags: flagged(m2=False) for messages[2]."""
    return [message | flags.get(f"m{i}", {}) for i, message in enumerate(CHAT)]


# ---- trained turns


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
    assert bench.run("sft", tokenizer, strings, *keys, "--input_template", "openrlhf").texts() == ["User: Hi\nAssistant: Hello<|endoftext|>"]


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
    """As Qwen3's enable_thinking: the generation prompt, and with it the trained text, depends on a variable."""
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
    message = "the tokenizer has several chat templates (tool_use), of which none is the default"
    assert message in bench.refused("sft", tokenizer, [{"messages": CHAT}])
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


@pytest.mark.parametrize("role, meant", [("asistant", "assistant"), ("Asistant", "assistant"), ("usr", "user"), ("tools", "tool")])
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


# Names of ShareGPT and of data made from it, in a chat of two turns.
@pytest.mark.parametrize("user, assistant", [("human", "gpt"), ("user", "assistant"), ("prompter", "bot"), ("Human", "chatgpt"), ("human", "bard"),
                                             ("human", "bing"), ("human", "model"), ("user", "ai"), ("User", "Assistant"), ("Human", "ASSISTANT")])
@pytest.mark.parametrize("names", [("from", "value"), ("role", "content")])
def test_names_of_the_same_two_roles(bench, user, assistant, names):
    turns = [dict(zip(names, (role, text))) for role, text in zip((user, assistant) * 2, ("Hi", "Hello there", "And?", "Bye"))]
    field = "messages" if names[0] == "role" else "conversations"
    documents = bench.run("sft", bench.tokenizer(CALLING), [{field: turns}])
    assert documents.trained() == BOTH_TURNS and documents.texts()[0].startswith("<|im_start|>user\nHi<|im_end|>\n")


# ---- where a turn ends


def test_a_turn_that_no_token_ends_is_trained_alone(bench):
    """Two templates whose turns end in plain text; the trained text does not extend to the next special token."""
    documents = bench.run("sft", bench.tokenizer(HEADLINES, merges=[]), [{"messages": CHAT[1:]}])
    assert documents.trained() == [["Hello there", "Bye<|endoftext|>"]] and bench.row("open turns") == 1
    closed = HEADLINES.replace("'### Instruction", "'<s>### Instruction")  # a special token begins the next turn
    documents = bench.run("sft", bench.tokenizer(closed, merges=[]), [{"messages": CHAT[1:]}])
    assert documents.trained() == [["Hello there", "Bye<|endoftext|>"]] and bench.row("open turns") == 1


def test_turns_that_end_otherwise_than_the_last(bench):
    """As gpt-oss: <|im_end|>, but <|endoftext|> where the chat ends with the answer. And as Cohere: two tokens end a turn."""
    other = CHATML.replace("+ '<|im_end|>\\n'", "+ (eos_token if m['role'] == 'assistant' and loop.last and not add_generation_prompt else '<|im_end|>')")
    assert bench.run("sft", bench.tokenizer(other), [{"messages": CHAT}]).trained() == [["Hello there<|im_end|>", "Bye<|endoftext|>"]]
    two = CHATML.replace("<|im_end|>\\n", "<|endoftext|><|im_end|>\\n<s>")
    documents = bench.run("sft", bench.tokenizer(two), [{"messages": CHAT}])
    assert documents.trained() == [["Hello there<|endoftext|><|im_end|>", "Bye<|endoftext|><|im_end|>"]]


# ---- tools, reasoning, parts: in whatever form

LOOK = {"name": "look", "arguments": {"place": "Rome", "day": None}}
RESULT = {"role": "tool", "content": "sunny"}
CALLED = '<call>{"name": "look", "arguments": {"place": "Rome", "day": null}}<|im_end|>'


def called(**call):
    return [*QUESTION, {"role": "assistant", **call}, RESULT, *ANSWER]


@pytest.mark.parametrize("messages", [
    called(tool_calls=[{"type": "function", "function": LOOK}]),
    called(content=None, tool_calls=[{"function": LOOK}]),
    called(content="", tool_calls=json.dumps([{"function": LOOK}])),
    called(tool_calls=[{"type": "function", "function": LOOK | {"arguments": json.dumps(LOOK["arguments"])}}]),
    called(tool_calls=[{"type": "function", "function": json.dumps(LOOK | {"arguments": json.dumps(json.dumps(LOOK["arguments"]))})}]),
    called(tool_calls={"function": LOOK}), called(function_call=LOOK), called(tool_calls=[LOOK]),
    [*QUESTION, {"from": "function_call", "value": json.dumps(LOOK)}, {"from": "observation", "value": "sunny"}, *ANSWER],
    [*QUESTION, {"role": "tool_call", "content": json.dumps([LOOK])}, {"role": "tool_response", "content": "sunny"}, *ANSWER],
    json.dumps(called(tool_calls=[{"function": LOOK}]))])
def test_calls_of_tools_in_every_form(bench, messages):
    documents = bench.run("sft", bench.tokenizer(CALLING, merges=[]), [{"messages": messages}])
    assert documents.trained() == [[CALLED, "Hello<|im_end|>"]] and "tool\nsunny<|im_end|>" in documents.texts()[0]


def test_calls_where_earlier_renderings_are_of_no_use(bench):
    """As Mistral's: tools before the last user's message alone, turns that must alternate but for calls, and no generation prompt."""
    template = ("{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% set turn = namespace(n=0) %}{% for m in messages %}"
                "{% if m.tool_calls %}{{ '<call>' + (m.tool_calls[0].function | tojson) + eos_token }}{% elif m.role == 'tool' %}{{ '<result>' + m.content + '<s>' }}"
                "{% else %}{% if (m.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% set turn.n = turn.n + 1 %}"
                "{% if m.role == 'user' %}{% if tools and m == asked[-1] %}{{ tools | tojson }}{% endif %}{{ '[Q]' + m.content + '[/Q]' }}"
                "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endif %}{% endfor %}")
    turns = [called(tool_calls=[{"function": LOOK}]), called(content="", tool_calls=[{"function": LOOK | {"name": "find"}}])]
    turns[1][0] = {"role": "user", "content": "And?"}
    documents = bench.run("sft", bench.tokenizer(template, merges=[]), [{"messages": [*turns[0], *turns[1]], "tools": TOOLS}])
    calls = [CALLED.replace("<|im_end|>", "<|endoftext|>"), CALLED.replace("look", "find").replace("<|im_end|>", "<|endoftext|>")]
    assert documents.trained() == [[calls[0], " Hello<|endoftext|>", calls[1], " Hello<|endoftext|>"]]


def test_calls_one_after_the_other_are_one_message(bench):
    calls = [{"from": "function_call", "value": json.dumps({"name": name, "arguments": {}})} for name in ("a", "b")]
    documents = bench.run("sft", bench.tokenizer(CALLING, merges=[]), [{"conversations": [{"from": "human", "value": "Hi"}, *calls]}])
    assert documents.trained() == [['<call>{"name": "a", "arguments": {}}<call>{"name": "b", "arguments": {}}<|im_end|>']]


def test_arguments_as_a_template_wants_them(bench):
    """As DeepSeek's: a call only where the content is null, and with arguments that are JSON text already."""
    strings = ("{% for m in messages %}{% if m.content is not none %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% else %}"
               "{{ '<|im_start|>call ' + m.tool_calls[0].function.name + ':' + m.tool_calls[0].function.arguments + '<|im_end|>' }}{% endif %}{% endfor %}")
    printing = strings.replace("':' + m.tool_calls[0].function.arguments + '", "':' ~ m.tool_calls[0].function.arguments ~ '")  # would be Python's {'place'
    for template in (strings, printing):
        documents = bench.run("sft", bench.tokenizer(template, merges=[]), [{"messages": called(tool_calls=[{"function": LOOK}])}])
        assert 'call look:{"place": "Rome", "day": null}<|im_end|>' in documents.texts()[0]


@pytest.mark.parametrize("tools", [TOOLS, [TOOLS[0]["function"]], json.dumps(TOOLS), [json.dumps(TOOLS[0])],
                                   [{"type": "function", "function": json.dumps(TOOLS[0]["function"])}]])
@pytest.mark.parametrize("field", ["tools", "functions"])
def test_tools_in_every_form(bench, tools, field):
    documents = bench.run("prompts", bench.tokenizer(CALLING, merges=[]), [{"messages": QUESTION, field: tools}])
    assert documents.texts()[0].startswith('# Tools [{"type": "function", "function": {"name": "look"}}]\n<|im_start|>user')


def test_schemas_of_parameters_in_json_text(bench):
    tools = [{"type": "function", "function": {"name": "look", "parameters": json.dumps({"type": "object"})}}]
    documents = bench.run("prompts", bench.tokenizer(CALLING, merges=[]), [{"messages": QUESTION, "tools": tools}])
    assert '"parameters": {"type": "object"}' in documents.texts()[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_every_name(bench, name, read):
    """Earlier reasoning is left out by the template, and counted."""
    messages = [*QUESTION, ANSWER[0] | {name: "hm"}, *QUESTION, ANSWER[0] | {name: "so"}]
    template = CALLING.replace("reasoning_content", read)
    documents = bench.run("sft", bench.tokenizer(template), [{"messages": messages}])
    assert documents.trained() == [["Hello<|im_end|>", "<think>so</think>Hello<|im_end|>"]] and bench.row("reasoning left out") == 1
    pair = {"prompt": messages[:3], "chosen": [messages[3]], "rejected": [{"role": "assistant", "content": "No"}]}
    assert bench.run("pref", bench.tokenizer(template), [pair]).trained() == [["<think>so</think>Hello<|im_end|>"], ["No<|im_end|>"]]
    assert bench.row("reasoning left out") == 2


def test_reasoning_in_place_of_a_part_of_the_generation_prompt(bench):
    """As Qwen3.5 without thinking: the prompt has an empty block, where the answer has its reasoning."""
    silent = CALLING.replace("'<think>' +", "'<think>' + '\\n' +").replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n</think>' }}{% endif")
    documents = bench.run("sft", bench.tokenizer(silent, merges=[]), [{"messages": [*QUESTION, ANSWER[0] | {"reasoning_content": "so"}]}])
    assert documents.trained() == [["<think>\nso</think>Hello<|im_end|>"]]


@pytest.mark.parametrize("content", [[{"type": "text", "text": "Hello"}], [{"text": "Hel"}, "lo"], [{"type": "output_text", "text": "Hello", "image": None}],
                                     {"type": "text", "text": "Hello"}])
def test_contents_in_parts(bench, content):
    takes_parts = CHATML.replace("m['content']", "(m['content'] | map(attribute='text') | join(''))")
    for template in (CHATML, CALLING, CHATML_MARKED, takes_parts):
        for names in (("role", "content"), ("from", "value")):
            turns = [dict(zip(names, turn)) for turn in (("user", [{"type": "text", "text": "Hi"}]), ("assistant", content))]
            assert bench.run("sft", bench.tokenizer(template), [{"messages": turns}]).trained() == [["Hello<|im_end|>"]]


def test_what_a_tool_returns_may_be_an_object(bench):
    documents = bench.run("sft", bench.tokenizer(CALLING), [{"messages": [*QUESTION, {"role": "tool", "content": {"é": [1]}}, *ANSWER]}])
    assert '<|im_start|>tool\n{"é": [1]}<|im_end|>' in documents.texts()[0]


def test_what_a_table_fills_in_is_not_there(bench):
    """The same tokens from JSON lines and from tables, which give every object the keys of all; and a null of JSON stays."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    def record(name, **arguments):
        properties = {key: {"type": "string"} for key in arguments}
        return {"messages": called(content="Let me see.", tool_calls=[{"type": "function", "function": {"name": name, "arguments": arguments}}]),
                "tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}]}

    records = [record("look", place="Rome"), record("add", x="1", y="2")]
    tokenizer = bench.tokenizer(CALLING, merges=[])
    expected = bench.run("sft", tokenizer, records).texts()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), bench.path / "in.parquet")
    datasets.Dataset.from_list(records).save_to_disk(bench.path / "saved")
    for source in ("in.parquet", "saved"):
        assert bench.run("sft", tokenizer, str(bench.path / source)).texts() == expected
    assert "null" not in "".join(expected)
    assert '{"x": null}' in bench.run("sft", tokenizer, [record("add", x=None)]).texts()[0]


# ---- nothing vanishes

SAID = {"messages": QUESTION + ANSWER}


@pytest.mark.parametrize("template, record, lost", [
    (CALLING, {"messages": [*QUESTION, {"role": "critic", "content": "x"}, *ANSWER]}, "has content in a message of the role 'critic', of which the chat"),
    (CALLING, {"messages": [*QUESTION, {"role": "developer", "content": "Hi"}, *ANSWER]}, "has content in a message of the role 'developer'"),
    (HEADLINES.replace("{% else %}", "{% elif m['role'] == 'assistant' %}", 1), {"messages": CHAT}, "has content in a message of the role 'system'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"reasoning_content": "hm"}]}, "has reasoning in a message of the role 'assistant'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"thinking": "hm"}, *QUESTION, *ANSWER]}, "has reasoning in a message"),
    (THINKING.replace("{% if loop.last %}", "{% if false %}"), {"messages": [*QUESTION, {"role": "assistant", "content": "<think>hm</think>Hello"}]},
     "has reasoning in a message"),
    (CHATML, {"messages": called(content="Let me see.", tool_calls=[{"function": LOOK}])}, "has tool calls in a message of the role 'assistant'"),
    (CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), {"messages": called(tool_calls=[{"function": LOOK}] * 2)}, "has tool calls in"),
    (CALLING.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), {"messages": called(content="Now", tool_calls=[{"function": LOOK}])},
     "has content beside tool calls in a message of the role 'assistant'"),
    (CHATML, SAID | {"tools": TOOLS}, "has tools, of which the chat template shows nothing\n  fix: leave 'tools' out, or take a template for tools"),
    (CHATML, {"messages": [QUESTION[0] | {"images": ["a.png"]}, *ANSWER]}, "has images in a message of the role 'user'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"function_calls": "look()"}]}, "has function_calls in a message of the role 'assistant'"),
    (CHATML, {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}, *ANSWER]},
     "messages[0] has a part of the type 'image'\n  fix: only text"),
    (CHATML, {"messages": [{"role": "user", "content": [{"type": "text"}]}, *ANSWER]}, "messages[0] has a part of the type 'text' that has no text"),
    (CHATML, {"messages": [{"role": "user", "content": 5}, *ANSWER]}, "messages[0] has a content that is a number, not a string"),
    (CHATML, {"messages": [{"role": "user", "content": {"a": "b"}}, *ANSWER]}, "messages[0] has a content that is an object, not a string"),
    (CHATML, {"messages": [{"role": "user", "content": None}, *ANSWER]}, "messages[0] has no content; its content is null"),
    (CHATML, {"messages": 5}, "'messages' is a number, not a list of messages"),
    (CHATML, {"conversations": [{"from": ["human"], "value": "Hi"}]}, "conversations[0] is no message with a role"),
    (CALLING, {"messages": [*QUESTION, ANSWER[0] | {"reasoning": "a", "thinking": "b"}]}, "messages[1] has reasoning and thinking, which differ"),
    (CALLING, {"messages": called(tool_calls=[{"function": {"arguments": {}}}])}, "messages[1] calls a tool by an object without a name"),
    (CALLING, {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "look at Rome"}]},
     "conversations[1] calls a tool by a string"),
    (CHATML, SAID | {"images": ["a.png"]}, "has 'images', and only text is trained on")])
@pytest.mark.parametrize("task", ["sft", "rl"])
def test_what_no_template_shows_is_refused(bench, template, record, lost, task):
    good = {"messages": [*QUESTION, *ANSWER]}
    error = bench.refused(task, bench.tokenizer(template), [good, record])
    assert error.startswith("record 2 (line 2) of in.jsonl: " + lost), error


def test_short_texts_are_not_found_in_others(bench):
    """What is shown is told by words of our own in place of the texts, not by the texts, which may stand elsewhere."""
    error = bench.refused("sft", bench.tokenizer(CALLING), [{"messages": [*QUESTION, {"role": "critic", "content": "Hello"}, *ANSWER]}])
    assert "has content in a message of the role 'critic'" in error


def test_what_is_not_used_is_counted(bench):
    """Fields that are notes about a record, and keys of messages that the template does not name."""
    asked = {"role": "user", "content": "Hi", "mood": "glad"}
    bench.run("sft", bench.tokenizer(CHATML), [{"messages": [asked, *ANSWER], "source": "web", "id": i, "note": ""} for i in range(3)])
    assert bench.row("fields not used") == 2 and "source (3), id (3)" in bench.printed
    assert bench.row("keys of messages not read") == 1 and "mood (3) by the template" in bench.printed
    bench.run("sft", bench.tokenizer(CHATML.replace("m['content']", "m['content'] + m['mood'] | default('')")), [{"messages": CHAT}])
    assert "not used" not in bench.printed and "not read" not in bench.printed


@pytest.mark.parametrize("role, other", [("system", "assistant"), ("critic", "assistant"), ("critic", "user")])
def test_a_role_that_is_shown_as_another(bench, role, other):
    """A template whose last branch takes every role that it does not know."""
    first, last = ("user", "assistant") if other == "assistant" else ("assistant", "user")
    template = f"{{% for m in messages %}}{{% if m['role'] == '{first}' %}}{first}: {{% else %}}{last}: {{% endif %}}{{{{ m['content'] }}}}{{% endfor %}}"
    error = bench.refused("sft", bench.tokenizer(template), [{"messages": [{"role": role, "content": "Well"}, *QUESTION, *ANSWER]}])
    assert f"a message of the role '{role}', which the chat template shows as the {other}'s\n  fix: " in error


def test_a_call_without_a_content_is_not_lost(bench):
    call = {"role": "assistant", "tool_calls": [{"name": "look", "arguments": {"at": "it"}}]}
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": [*QUESTION, call, *QUESTION, *ANSWER]}])
    assert "has tool calls in a message of the role 'assistant', of which the chat template shows nothing\n  fix: " in error


def test_two_names_of_a_content(bench):
    turn = {"from": "gpt", "value": "Hello", "content": "Hello"}
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"conversations": [*QUESTION, turn | {"content": "Bye"}]}])
    assert "conversations[1] has a content and another value\n  fix: leave one of them out" in error
    assert bench.run("sft", bench.tokenizer(CHATML), [{"conversations": [*QUESTION, turn]}]).trained() == [["Hello<|im_end|>"]]
