"""data/prepare.py on chats. The tests decode the trained tokens, for templates of all kinds; tools, reasoning, and other fields of a chat. A chat with a part
that would be lost is refused."""

import json
import resource
import signal
from datetime import date
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from preparing import (
    BOTH_TURNS, CALLING, CHAT, CHATML, CHATML_MARKED, CHATML_STRIPPED, CHATML_WITHOUT_PROMPT, GREETING, HEADLINES, LAST_MARKED, LLAMA2, PLAIN, QA, THINKING, Case,
    asked, chain, chat, gpt, said, turn)

import chat as conversations
import limits
import prepare
from records import Record
from tokenizer import Tokenizer

QUESTION, ANSWER = chat("Hi"), [said("Hello")]
HELLO = ["Hello<|im_end|>"]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
# A template that shows its variables before the chat.
SPEAKING = "{{ (tools or []) | map(attribute='function.name') | join(',') }}|{{ mood | default('none') }}|" + CHATML


def a_chat(*texts, **fields):
    return {"messages": chat(*texts), **fields}


# ---- turns and templates -----------------------------------------------------------------------------------------------------------------

THOUGHT = [a_chat("1?", "<think>\nhm\n</think>\n\nOne", "2?", "<think>\nso\n</think>\n\nTwo"), a_chat("1?", "One", "2?", "Two")]
TWO_SPACED = [a_chat("Hi", "Hello you", "?", "Hello")]
LIKE_MARKS = [a_chat("<|im_end|>\n", text) for text in ("<|im_end|>\n", "", "\n", "<|im_start|>assistant\n", " a ")]
# As in gpt-oss, another token ends the final answer. As in Cohere's models, two tokens end a turn.
IS_LAST = "m['role'] == 'assistant' and loop.last and not add_generation_prompt"
ENDS_OTHERWISE = CHATML.replace("+ '<|im_end|>\\n'", f"+ (eos_token if {IS_LAST} else '<|im_end|>')")
ENDS_WITH_TWO = CHATML.replace("<|im_end|>\\n", "<|endoftext|><|im_end|>\\n<s>")
# Each turn but the last shows that another one follows.
CHATML_LAST = CHATML.replace("m['content']", "m['content'] + ('' if loop.last else '+')")
# As with Qwen3's enable_thinking, the generation prompt and so the trained text depend on a variable.
QUICK = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n' }}{% if quick %}{{ '<think></think>' }}{% endif %}{% endif")
# As in Qwen3.5 without thinking, the generation prompt has an empty block at the place of the answer's reasoning.
SILENT = CALLING.replace("'<think>' +", "'<think>' + '\\n' +").replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n</think>' }}{% endif")
ROLELESS = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>' }}")
NAMED = CHATML.replace("m['role'] +", "m['role'] + (m['name'] if 'name' in m else '') +")
ASKED_TO_TRAIN = [QUESTION[0] | {"train": True}]
DOCUMENTS = {
    "every assistant turn with its end of turn, nothing after": Case(
        [{"messages": CHAT}], BOTH_TURNS,
        ["".join(turn(*words) for words in (("system", "Be short."), ("user", "Hi"), ("assistant", "Hello there"), ("user", "And?"),
                                            ("assistant", "Bye")))]),
    "stripped content is trained as rendered": Case(
        [a_chat(" Hi ", "\n One \n", "more", "  Two")], [["One<|im_end|>", "Two<|im_end|>"]], template=CHATML_STRIPPED),
    "reasoning stripped from earlier turns": Case(
        THOUGHT, [["One<|im_end|>", "<think>\nso\n</think>\n\nTwo<|im_end|>"], ["One<|im_end|>", "<think>\n\n</think>\n\nTwo<|im_end|>"]],
        template=THINKING),
    "an answer that starts with a line break": Case(
        [a_chat("Hi", "\nyes")], [["\nyes<|im_end|>"]], rows={"merged starts": None}, tokenizer={"merges": chain("Hello")}),
    "a token of two line breaks belongs to the header": Case(
        [a_chat("Hi", "\nyes")], [["yes<|im_end|>"]], rows={"merged starts": 1}, tokenizer={"merges": chain("ĊĊ")}),
    "the space before an answer is the answer's": Case(
        TWO_SPACED, [[" Hello you <|endoftext|>", " Hello <|endoftext|>"]],
        ["<s>[INST] Hi [/INST] Hello you <|endoftext|><s>[INST] ? [/INST] Hello <|endoftext|>"], template=LLAMA2, tokenizer={"bos": "<s>"}),
    "a mark before the last user's message": Case(
        TWO_SPACED, [[" Hello you <|endoftext|>", " Hello <|endoftext|>"]],
        ["[INST] Hi [/INST] Hello you <|endoftext|>#[INST] ? [/INST] Hello <|endoftext|>"], template=LAST_MARKED),
    "no token ends a turn": Case(
        [{"messages": CHAT}], [[" Hello there", " Bye"]], rows={"open turns": 2}, template=PLAIN, tokenizer={"merges": []}),
    "a token across the end of an answer is not trained": Case(
        [{"messages": CHAT}], [[" Hello ther", " By"]], template=PLAIN, tokenizer={"merges": [("e", "Ċ")]}),
    "special tokens inside an answer do not end it": Case([a_chat("Hi", "a<|im_end|>b<|im_start|>c")], [["a<|im_end|>b<|im_start|>c<|im_end|>"]]),
    "an answer that has its end token is counted": Case(
        [a_chat("Hi", "Hello<|im_end|>\n", "?", "Hello")], [["Hello<|im_end|>\n<|im_end|>", *HELLO]], rows={"doubled ends": 1}),
    "a content that the template shows in part is counted": Case(
        [a_chat("Hi", "[THINK]hm[/THINK]Hello")], [HELLO], rows={"changed contents": 1},
        template=CHATML.replace("m['content']", "m['content'].split('[/THINK]')[-1]")),
    "a completion that repeats the end of its prompt": Case(
        [{"prompt": CHAT[:2], "completion": CHAT[1:]}, {"prompt": CHAT[1:2], "completion": CHAT}], BOTH_TURNS * 2,
        ["".join(turn(*message.values()) for message in CHAT)] * 2),
    "contents that equal parts of the template": Case(
        LIKE_MARKS, [[record["messages"][1]["content"] + "<|im_end|>"] for record in LIKE_MARKS], tokenizer={"merges": []}),
    "answers at the beginning and in a row": Case(
        [{"messages": [said("Welcome"), said("You"), *chat("Hi", "")]}], [["Welcome<|im_end|>", "You<|im_end|>", "<|im_end|>"]], rows={"empty answers": 1}),
    "ShareGPT": Case([{"conversations": [{"from": "system", "value": "Be short."}, *gpt("Hi", "Hello")]}], [HELLO],
                     [asked("Hi", "Be short.") + "Hello<|im_end|>\n"]),
    "a prompt and a completion": Case([{"prompt": CHAT[:4], "completion": CHAT[4:]}], [["Bye<|im_end|>"]]),
    "text ends a turn": Case(
        [{"messages": CHAT[1:]}], [["Hello there", "Bye<|endoftext|>"]], rows={"open turns": 1}, template=HEADLINES, tokenizer={"merges": []}),
    "text ends a turn, a special token begins the next": Case(
        [{"messages": CHAT[1:]}], [["Hello there", "Bye<|endoftext|>"]], rows={"open turns": 1},
        template=HEADLINES.replace("'### Instruction", "'<s>### Instruction"), tokenizer={"merges": []}),
    "another token ends the last turn": Case([{"messages": CHAT}], [["Hello there<|im_end|>", "Bye<|endoftext|>"]], template=ENDS_OTHERWISE),
    "two tokens end a turn": Case(
        [{"messages": CHAT}], [["Hello there<|endoftext|><|im_end|>", "Bye<|endoftext|><|im_end|>"]], template=ENDS_WITH_TWO),
    "a variable changes where the answer begins": Case(
        [a_chat("Hi", "<think></think>Hello"), a_chat("Hi", "<think></think>Hello", chat_template_kwargs={"quick": True})],
        [["<think></think>Hello<|im_end|>"], HELLO], template=QUICK),
    "reasoning replaces a part of the generation prompt": Case(
        [{"messages": [*QUESTION, ANSWER[0] | {"reasoning_content": "so"}]}], [["<think>\nso</think>Hello<|im_end|>"]], template=SILENT,
        tokenizer={"merges": []}),
    "the generation prompt applies to the assistant alone": Case(
        [{"messages": [*ANSWER, *ASKED_TO_TRAIN, *ANSWER]}], [[*HELLO, "Hi<|im_end|>", "assistant\nHello<|im_end|>"]], template=ROLELESS),
    "a trained turn of the user without an end token": Case(
        [{"messages": [*ASKED_TO_TRAIN, *ANSWER]}], [[" Hi", " Hello <|endoftext|>"]], rows={"open turns": 1}, template=LLAMA2,
        tokenizer={"bos": "<s>"}),
    "a trained turn of the user after a rewritten turn": Case(
        [{"messages": [*QUESTION, said("<think>\nhm\n</think>\n\nOne"), {"role": "user", "content": "2?", "train": True}, *ANSWER]}],
        [["One<|im_end|>", "2?<|im_end|>", "<think>\n\n</think>\n\nHello<|im_end|>"]], template=THINKING),
    "a chat without a trained turn": Case(
        [{"messages": [*QUESTION, ANSWER[0] | {"train": False}]}, {"messages": CHAT}], BOTH_TURNS, rows={"without a target token": 1}),
    "flags of ShareGPT's turns": Case(
        [{"conversations": [gpt("Hi")[0] | {"weight": 1}, gpt("", "Hello")[1] | {"weight": 0.0}, gpt("", "Bye")[1]]}],
        [["Hi<|im_end|>", "Bye<|im_end|>"]]),
    "flags that only exclude an answer": Case(
        [{"messages": [QUESTION[0] | {name: 1}, said("One") | {name: no}, *QUESTION, ANSWER[0] | {name: True}]}
         for name, no in (("loss", False), ("loss_scale", 0.0), ("loss_mask", 0), ("step_loss_mask", 0))], [["Hello<|im_end|>"]] * 4),
    "flags of prompts and completions": Case(
        [{"prompt": [*CHAT[:2], CHAT[2] | {"train": True}, CHAT[3]], "completion": [CHAT[4] | flags]} for flags in ({}, {"train": False})],
        [*BOTH_TURNS, BOTH_TURNS[0][:1]]),
    "null in a message counts as absent": Case(
        [{"messages": [QUESTION[0] | {"name": "X"}, ANSWER[0] | {"name": None}]}], texts=[turn("userX", "Hi") + turn("assistant", "Hello")],
        template=NAMED),
    "JSON text of messages": Case(
        [{"messages": json.dumps(CHAT)}, {"conversations": json.dumps(gpt("Hi", "Hello"))}, {"messages": [json.dumps(message) for message in CHAT]},
         {"prompt": json.dumps(CHAT[:4]), "completion": json.dumps(CHAT[4:])}], [*BOTH_TURNS, HELLO, *BOTH_TURNS, ["Bye<|im_end|>"]]),
    "other JSON is text": Case(
        [{"prompt": '{"role": "admin"}', "completion": "[1, 2]"}], texts=['{"role": "admin"}[1, 2]<|endoftext|>'], tokenizer={"merges": []}),
    **{f"the result of a tool may be an object {result}": Case(
        [{"messages": [*QUESTION, {"role": "tool", "content": result}, *ANSWER]}],
        texts=[turn("user", "Hi") + turn("tool", json.dumps(result, ensure_ascii=False)) + turn("assistant", "Hello")], template=CALLING)
       for result in ({"é": [1]}, [{"text": "a", "url": "b"}])},
    **{f"characters of several tokens {merges}": Case(
        [a_chat("😀é", "😀 naïve 漢字😀")], [["😀 naïve 漢字😀<|im_end|>"]], tokenizer={"merges": merges})
       for merges in (chain("Hello"), chain("ðŁ", "ĺĢ"), chain("ðŁĺĢ"), chain("ĺĢ<"))},
    # Neither role is a misspelling: one is far from all known names, and the template compares with the other.
    **{f"the role {role}": Case([{"messages": [*QUESTION, {"role": role, "content": "x"}, *ANSWER]}],
                                texts=[turn("user", "Hi") + turn(role, "x") + turn("assistant", "Hello")], template=template)
       for role, template in (("narrator", CHATML), ("tools", "{% if messages[0]['role'] == 'tools' %}{% endif %}" + CHATML))},
    # As in OpenRLHF, without a template only the fields that flags name count.
    **{f"a system field beside named fields {flags}": Case(
        [{"q": "Hi", "a": "Hello", "system": "Be short."}], texts=[text], flags=["--input_key", "q", "--output_key", "a", *flags])
       for text, flags in ((asked("Hi", "Be short.") + "Hello<|im_end|>\n", ["--apply_chat_template"]),
                           ("User: Hi\nAssistant: Hello<|endoftext|>", ["--input_template", "openrlhf"]))},
    "successive calls of tools are one message": Case(
        [{"conversations": [*gpt("Hi"), *({"from": "function_call", "value": json.dumps({"name": name, "arguments": {}})} for name in "ab")]}],
        [['<call>{"name": "a", "arguments": {}}<call>{"name": "b", "arguments": {}}<|im_end|>']], template=CALLING, tokenizer={"merges": []}),
    "notes and copies beside a chat": Case(
        [{"conversations": CHAT, "prompt": "Hi", "prompt_id": "x", "problem": "And?", "solution": "Bye", "answer": "8", "source": "s",
          "category": "c", "score": 1.5,
          "instruction": " Hi ", "system_prompt": "Be short.", "text": "elsewhere", "messages": None, "label": "x", "history": []}], BOTH_TURNS),
    "a prompt that repeats the fields of Alpaca": Case(
        [{"instruction": "Add.", "input": "1", "output": "2", "prompt": "### Instruction:\nAdd.\n### Input:\n1\n### Output:\n2"}], [["2<|im_end|>"]]),
}


@pytest.mark.parametrize("case", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_of_chats(bench, case):
    bench.expect(case)


MACRO = "{% macro turn(m) %}" + CHATML_MARKED.partition("messages %}")[2].replace("{% endfor %}", "{% endmacro %}") + "{% for m in messages %}{{ turn(m) }}{% endfor %}"


@pytest.mark.parametrize("template, rstrip", [(CHATML, True), (CHATML_MARKED, False), (CHATML_MARKED, True), (MACRO, False), (CHATML_WITHOUT_PROMPT, False),
                                              (CHATML_STRIPPED, False),
                                              (CHATML.replace("<|im_end|>\\n", "<|im_end|>"), False)])
def test_spellings_of_a_template_train_the_same(bench, template, rstrip):
    """With rstrip the token for the end of turn includes the line break after it. Marks also count in a macro."""
    bench.expect(Case([{"messages": CHAT}], BOTH_TURNS, template=template, tokenizer={"rstrip": rstrip}))


LONG = [*chat(*(f"{word} {i}" for i in range(9) for word in ("ask", "say <|im_start|>assistant\n" if i == 5 else "say"))), *chat("", "", "Hi", " Hello ")]


@pytest.mark.parametrize("template", [CHATML, CHATML_STRIPPED, CHATML_WITHOUT_PROMPT, LLAMA2, LAST_MARKED, HEADLINES, CALLING, PLAIN, THINKING, CHATML_LAST,
                                      CHATML.replace("in messages", "in messages[0:]"), CHATML.replace("in messages", "in messages | list"), CHATML + "</s>"])
def test_long_chats_train_the_same_tokens_as_short_ones(bench, monkeypatch, template):
    both = [bench.run("sft", bench.tokenizer(template, bos="<s>"), [{"messages": LONG}]) for _ in (1, monkeypatch.setattr(conversations, "FEW", len(LONG)))]
    assert both[0].ids == both[1].ids and both[0].masks == both[1].masks


@pytest.mark.parametrize("template", [CHATML, CHATML_STRIPPED, CHATML.replace("in messages", "in messages[0:]")])
def test_a_long_chat_is_rendered_a_few_times(bench, monkeypatch, template):
    options = prepare.build_parser().parse_args(bench.arguments("sft", bench.tokenizer(template), "in.jsonl", "--max_len", "10000"))
    recipe, counts = prepare.Recipe("sft", options, Tokenizer(options.tokenizer)), []
    render = recipe.template._rendered_as_given
    monkeypatch.setattr(recipe.template, "_rendered_as_given", lambda *given, **how: counts.append(1) or render(*given, **how))
    lot = recipe.lot([Record("the chat", 1, None, a_chat(*map(str, range(200))), 0)])
    assert lot.counts["chats"] == 1 and len(counts) < 20


def test_ids_equal_those_of_transformers(bench):
    documents = bench.run("sft", bench.tokenizer(CHATML, bos="<s>", post="bos"), [{"messages": CHAT}])
    assert documents.ids == [documents.hf.apply_chat_template(CHAT, tokenize=True, return_dict=False)]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_STRIPPED])
@pytest.mark.parametrize("name, no, yes", [("train", False, True), ("training", False, True), ("weight", 0, 1), ("loss_weight", 0.0, 1.0)])
def test_flags_of_messages(bench, template, name, no, yes):
    def flagged(**flags):
        return {"messages": [message | ({name: flags[f"m{i}"]} if f"m{i}" in flags else {}) for i, message in enumerate(CHAT)]}

    records = [flagged(m2=no), flagged(m4=no, m2=yes), flagged(m1=yes, m4=no), flagged(m0=yes, m3=None), flagged(m1=no)]
    hello, bye = BOTH_TURNS[0]
    documents = bench.expect(Case(records, [[bye], [hello], ["Hi<|im_end|>", hello], ["Be short.<|im_end|>", hello, bye], [hello, bye]],
                                  template=template))
    assert len(set(documents.texts())) == 1  # flags change no text


# Names in ShareGPT and in data derived from it.
@pytest.mark.parametrize("roles", [("human", "gpt"), ("user", "assistant"), ("prompter", "bot"), ("Human", "chatgpt"), ("human", "bard"),
                                   ("human", "bing"), ("human", "model"), ("user", "ai"), ("User", "Assistant"), ("Human", "ASSISTANT")])
@pytest.mark.parametrize("field, keys", [("conversations", ("from", "value")), ("messages", ("role", "content"))])
def test_names_of_the_same_two_roles(bench, field, keys, roles):
    turns = chat("Hi", "Hello there", "And?", "Bye", roles=roles, keys=keys)
    documents = bench.expect(Case([{field: turns}], BOTH_TURNS, template=CALLING))
    assert documents.texts()[0].startswith(turn("user", "Hi"))


# ---- system, tools, variables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task, record, answers", [
    ("sft", a_chat("Hi", "Hello"), ["Hello<|im_end|>\n"]), ("sft", {"prompt": QUESTION, "completion": ANSWER}, ["Hello<|im_end|>\n"]),
    ("sft", {"conversations": gpt("Hi", "Hello")}, ["Hello<|im_end|>\n"]), ("prompts", {"prompt": "Hi"}, [""]),
    ("prompts", {"messages": QUESTION}, [""]),
    ("pref", {"prompt": "Hi", "chosen": ANSWER, "rejected": [said("No")]}, ["Hello<|im_end|>", "No<|im_end|>"])])
def test_system_field(bench, task, record, answers):
    trained = [[answer.strip()] if answer else [] for answer in answers]
    bench.expect(Case([record | {"system": "Be short."}], trained, [asked("Hi", "Be short.") + answer for answer in answers], task=task))
    for absent in (None, ""):  # the values in tables for records without the field
        bench.expect(Case([record | {"system": absent}], trained, [asked("Hi") + answer for answer in answers], task=task))


@pytest.mark.parametrize("task, record", [("sft", a_chat("Hi", "Hello")), ("prompts", {"messages": QUESTION}),
                                          ("pref", {"prompt": QUESTION, "chosen": "Hello", "rejected": "No"})])
def test_tools_and_variables_reach_the_template(bench, task, record):
    given = [({}, "|none|"), ({"tools": TOOLS}, "look|none|"), ({"tools": json.dumps(TOOLS)}, "look|none|"), ({"tools": []}, "|none|"),
             ({"tools": ""}, "|none|"),
             ({"chat_template_kwargs": {"mood": "glad"}}, "|glad|"), ({"chat_template_kwargs": '{"mood": "glad"}', "tools": TOOLS}, "look|glad|"),
             ({"chat_template_kwargs": {"mood": None}}, "|none|"), ({"chat_template_kwargs": None}, "|none|")]
    by_flag = ["--chat_template_kwargs", '{"mood": "sad", "x": 1}']  # for all records; a record's own variables take precedence
    for beside, flags in ((given, []), ([({}, "|sad|"), (given[5][0], "|glad|")], by_flag)):
        documents = bench.run(task, bench.tokenizer(SPEAKING), [record | fields for fields, _ in beside], *flags)
        assert [text.partition("<|im_start|>")[0] for text in documents.texts()[::1 + (task == "pref")]] == [text for _, text in beside]
        assert task != "sft" or documents.trained() == [HELLO] * len(beside)


def test_a_template_for_records_with_tools(bench):
    """Records with tools use the template that is named tool_use."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = bench.tokenizer()
    saved = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    saved.chat_template = {"tool_use": SPEAKING}
    saved.save_pretrained(tokenizer)
    message = "the tokenizer has several chat templates (tool_use), none of which is the default"
    assert message in bench.refused("sft", tokenizer, [{"messages": CHAT}])
    documents = bench.run("sft", tokenizer, [{"messages": CHAT, "tools": TOOLS}])
    assert documents.trained() == BOTH_TURNS and documents.texts()[0].startswith("look|none|<|im_start|>system")


def test_fields_in_cells_of_csv(bench):
    source = bench.csv(["prompt", "tools", "system", "chat_template_kwargs"], ["Hi", json.dumps(TOOLS), "Be", '{"mood": "glad"}'], ["Hi", "", "", ""])
    bench.expect(Case(source, texts=["look|glad|" + asked("Hi", "Be"), "|none|" + asked("Hi")], task="prompts", template=SPEAKING))


# ---- forms of tools, reasoning and parts -------------------------------------------------------------------------------------------------

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
    called(content=[{"type": "tool_call", "value": json.dumps(LOOK)}]),
    [*QUESTION, {"from": "function_call", "value": json.dumps(LOOK)}, {"from": "observation", "value": "sunny"}, *ANSWER],
    [*QUESTION, {"role": "tool_call", "content": json.dumps([LOOK])}, {"role": "tool_response", "content": "sunny"}, *ANSWER],
    json.dumps(called(tool_calls=[{"function": LOOK}]))])
def test_calls_of_tools_in_every_form(bench, messages):
    bench.expect(Case([{"messages": messages}], [[CALLED, *HELLO]],
                      [asked("Hi") + CALLED + "\n" + turn("tool", "sunny") + turn("assistant", "Hello")], template=CALLING, tokenizer={"merges": []}))


def test_calls_in_a_template_whose_earlier_renderings_are_no_prefix(bench):
    """As in Mistral's template, tools precede the last user message, turns except calls must alternate, and there is no generation prompt."""
    template = ("{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}{% set turn = namespace(n=0) %}{% for m in messages %}"
                "{% if m.tool_calls %}{{ '<call>' + (m.tool_calls[0].function | tojson) + eos_token }}"
                "{% elif m.role == 'tool' %}{{ '<result>' + m.content + '<s>' }}"
                "{% else %}{% if (m.role == 'user') != (turn.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% set turn.n = turn.n + 1 %}"
                "{% if m.role == 'user' %}{% if tools and m == asked[-1] %}{{ tools | tojson }}{% endif %}{{ '[Q]' + m.content + '[/Q]' }}"
                "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endif %}{% endfor %}")
    found = called(content="", tool_calls=[{"function": LOOK | {"name": "find"}}])
    messages = [*called(tool_calls=[{"function": LOOK}]), *chat("And?"), *found[1:]]
    call = CALLED.replace("<|im_end|>", "<|endoftext|>")
    bench.expect(Case([{"messages": messages, "tools": TOOLS}], [[call, " Hello<|endoftext|>", call.replace("look", "find"), " Hello<|endoftext|>"]],
                      template=template, tokenizer={"merges": []}))


@pytest.mark.parametrize("join", ["+", "~"])  # "~" accepts an object, but writes it in Python's syntax
def test_arguments_as_json_text(bench, join):
    """As in DeepSeek's template, a call needs a content of null and arguments that are JSON text."""
    template = ("{% for m in messages %}{% if m.content is not none %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
                "{% else %}{{ '<|im_start|>call ' + "
                f"m.tool_calls[0].function.name + ':' {join} m.tool_calls[0].function.arguments {join} '<|im_end|>' }}}}{{% endif %}}{{% endfor %}}")
    documents = bench.run("sft", bench.tokenizer(template, merges=[]), [{"messages": called(tool_calls=[{"function": LOOK}])}])
    assert 'call look:{"place": "Rome", "day": null}<|im_end|>' in documents.texts()[0]


WITH_SCHEMA = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("field, tools, shown", [
    *[(field, tools, TOOLS) for field in ("tools", "functions") for tools in (
        TOOLS, [TOOLS[0]["function"]], json.dumps(TOOLS), [json.dumps(TOOLS[0])], [TOOLS[0] | {"function": json.dumps(TOOLS[0]["function"])}])],
    ("tools", [{"type": "function", "function": {"name": "look", "parameters": json.dumps({"type": "object"})}}], WITH_SCHEMA)])
def test_tools_in_every_form(bench, field, tools, shown):
    bench.expect(Case([{"messages": QUESTION, field: tools}], texts=[f"# Tools {json.dumps(shown)}\n{asked('Hi')}"], task="prompts", template=CALLING,
                      tokenizer={"merges": []}))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_every_name(bench, name, read):
    """The template omits earlier reasoning, which is counted."""
    messages = [*QUESTION, ANSWER[0] | {name: "hm"}, *QUESTION, ANSWER[0] | {name: "so"}]
    thought, template = "<think>so</think>Hello<|im_end|>", CALLING.replace("reasoning_content", read)
    bench.expect(Case([{"messages": messages}], [[*HELLO, thought]], rows={"reasoning left out": 1}, template=template))
    pair = {"prompt": messages[:3], "chosen": [messages[3]], "rejected": [said("No")]}
    bench.expect(Case([pair], [[thought], ["No<|im_end|>"]], rows={"reasoning left out": 2}, task="pref", template=template))


@pytest.mark.parametrize("template", [CHATML, CALLING, CHATML_MARKED,
                                      CHATML.replace("m['content']", "(m['content'] | map(attribute='text') | join(''))")])
@pytest.mark.parametrize("content", [[{"type": "text", "text": "Hello"}], [{"text": "Hel"}, "lo"],
                                     [{"type": "output_text", "text": "Hello", "image": None}], [{"type": "text", "value": "Hello"}],
                                     {"type": "text", "text": "Hello"}])
def test_contents_in_parts(bench, content, template):
    for keys in (("role", "content"), ("from", "value")):
        bench.expect(Case([{"messages": chat([{"type": "text", "text": "Hi"}], content, keys=keys)}], [HELLO], template=template))


@pytest.mark.parametrize("value, kind, text", [
    ([("a", "1")], pyarrow.map_(pyarrow.string(), pyarrow.string()), '{"a": "1"}'), ([], pyarrow.map_(pyarrow.string(), pyarrow.string()), "{}"),
    ({"day": date(2024, 1, 2), "n": Decimal("1.50")}, None, '{"day": "2024-01-02", "n": 1.5}')])
def test_arguments_in_types_of_tables(bench, value, kind, text):
    call = pyarrow.StructArray.from_arrays([pyarrow.array(["look"]), pyarrow.array([value], kind)], ["name", "arguments"])
    table = pyarrow.table({"question": ["Hi"], "answers": call, "tools": [json.dumps(TOOLS)]})
    pyarrow.parquet.write_table(table, bench.path / "in.parquet")
    bench.expect(Case(str(bench.path / "in.parquet"), [[f'<call>{{"name": "look", "arguments": {text}}}<|im_end|>']], template=CALLING))


def test_nulls_that_a_table_fills_in_are_ignored(bench):
    """Tables give every object the keys of all objects; the tokens equal those from JSON lines. A null in JSON is kept."""
    import datasets

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


def asks(arguments):
    return {"messages": called(content="Let me see.", tool_calls=[{"type": "function", "function": {"name": "look", "arguments": arguments}}]), "tools": TOOLS}


@pytest.mark.parametrize("task, records", [
    ("sft", [{"messages": CHAT}, {"messages": chat([{"type": "text", "text": 'An "a"'}], 'the "end"\nof it')}]),
    ("sft", [{"prompt": "Hi", "completion": " go"}, {"prompt": "Hi", "completion": [said("Hello")]}]),
    ("sft", [asks({"place": "Rome", "when": None}), asks({"x": 1, "y": [{"z": None}]})]),
    ("rl", [{"prompt": "Hi", "answer": answer} for answer in ("x", 1, "2", 2.5, True)]),
    ("pref", [{"prompt": "Hi", "chosen": "a", "rejected": "b"}, {"prompt": "Hi", "chosen": [said("a")], "rejected": [said("b")]}])])
def test_json_columns_of_tables(bench, task, records):
    """Values of mixed kinds: datasets stores them as JSON text, in columns or parts of columns of Arrow's type arrow.json."""
    import datasets

    tokenizer = bench.tokenizer(CALLING, merges=[])
    expected = bench.run(task, tokenizer, records).texts()
    table = datasets.Dataset.from_list(records, on_mixed_types="use_json")
    assert "Json" in str(table.features)
    table.to_parquet(bench.path / "in.parquet")
    table.save_to_disk(bench.path / "saved")
    for source in ("in.parquet", "saved"):
        assert bench.run(task, tokenizer, str(bench.path / source)).texts() == expected


# ---- roles, and parts of messages that the template does not render ----------------------------------------------------------------------


@pytest.mark.parametrize("role, meant", [("asistant", "assistant"), ("Asistant", "assistant"), ("usr", "user"), ("tools", "tool")])
def test_a_misspelled_role(bench, role, meant):
    error = bench.refused_record("sft", CHATML, {"messages": [*QUESTION, {"role": role, "content": "Hello"}, *ANSWER, *QUESTION]})
    assert error.startswith(f"has a message of the role {role!r}, which seems to be {meant!r} misspelled\n  fix: ")
    assert "the known roles are system, developer, user, assistant, tool" in error


@pytest.mark.parametrize("role, other", [("system", "assistant"), ("critic", "assistant"), ("critic", "user")])
def test_a_role_that_is_rendered_as_another(bench, role, other):
    """The last branch of the template renders every unknown role."""
    first, last = ("user", "assistant") if other == "assistant" else ("assistant", "user")
    template = ("{% for m in messages %}{% if m['role'] == 'FIRST' %}FIRST: {% else %}LAST: {% endif %}{{ m['content'] }}{% endfor %}"
                .replace("FIRST", first).replace("LAST", last))
    error = bench.refused_record("sft", template, {"messages": [{"role": role, "content": "Well"}, *QUESTION, *ANSWER]})
    assert f"a message of the role '{role}', which the chat template shows as the {other}'s\n  fix: " in error


CRITIC = "has content in a message of the role 'critic', which the chat template does not render"
CALLS = "has tool calls in a message of the role 'assistant', which the chat template does not render\n  fix: "


@pytest.mark.parametrize("template, record, lost", [
    (CALLING, {"messages": [*QUESTION, {"role": "critic", "content": "Hello"}, *ANSWER]}, CRITIC),  # another message has the same text
    (CALLING, {"messages": [*QUESTION, {"role": "developer", "content": "Hi"}, *ANSWER]}, "has content in a message of the role 'developer'"),
    (HEADLINES.replace("{% else %}", "{% elif m['role'] == 'assistant' %}", 1), {"messages": CHAT}, "has content in a message of the role 'system'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"reasoning_content": "hm"}]}, "has reasoning in a message of the role 'assistant'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"thinking": "hm"}, *QUESTION, *ANSWER]}, "has reasoning in a message"),
    (THINKING.replace("{% if loop.last %}", "{% if false %}"), {"messages": chat("Hi", "<think>hm</think>Hello")}, "has reasoning in a message"),
    (CHATML, {"messages": called(content="Let me see.", tool_calls=[{"function": LOOK}])}, CALLS),
    (CHATML, {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [LOOK]}, *QUESTION, *ANSWER]}, CALLS),  # without a content
    (CALLING.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), {"messages": called(tool_calls=[{"function": LOOK}] * 2)}, "has tool calls in"),
    (CALLING.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), {"messages": called(content="Now", tool_calls=[{"function": LOOK}])},
     "has content beside tool calls in a message of the role 'assistant'"),
    (CHATML, {"messages": [*QUESTION, *ANSWER], "tools": TOOLS},
     "has tools, which the chat template does not render\n  fix: leave 'tools' out, or use a template for tools"),
    (CHATML, {"messages": [QUESTION[0] | {"images": ["a.png"]}, *ANSWER]}, "has images in a message of the role 'user'"),
    (CHATML, {"messages": [*QUESTION, ANSWER[0] | {"function_calls": "look()"}]}, "has function_calls in a message of the role 'assistant'"),
    (CALLING, {"messages": [QUESTION[0] | {"tools": "[]"}, *ANSWER]}, "has tools, which the chat template does not render"),  # it renders others
    (CALLING, {"messages": [*QUESTION, ANSWER[0] | {"reasoning": "a", "thinking": "b"}]}, "messages[1] has reasoning and thinking, which differ"),
    (CALLING, {"messages": [*QUESTION, said("<think>a</think>b") | {"reasoning": "a"}]}, "messages[1] has reasoning, and a content that begins with <think>"),
    (CALLING, {"messages": called(tool_calls=[{"function": {"arguments": {}}}])}, "messages[1] calls a tool by an object without a name"),
    (CALLING, {"conversations": [*gpt("Hi"), {"from": "function_call", "value": "look at Rome"}]}, "conversations[1] calls a tool by a string")])
def test_parts_that_the_template_does_not_render(bench, template, record, lost):
    assert bench.refused_record("sft", template, record).startswith(lost)


COUNTING = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
MOODY = CHATML.replace("'<|im_end|>\\n'", "('<|im_end|>' if m['content'] == 'Bye' else '<|im_end|>\\n')")


@pytest.mark.parametrize("template, turn", [(COUNTING, 2), (MOODY, 4)])
def test_content_that_the_template_rewrites(bench, template, turn):
    error = bench.refused("sft", bench.tokenizer(template), [{"messages": CHAT}])
    assert error.startswith(f"record 1 (line 1) of in.jsonl: messages[{turn}], the assistant's, cannot be found in the")


# ---- templates without an end or with too much output ------------------------------------------------------------------------------------

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.parametrize("template, problem", [("{% for m in messages %}{{ m.content }", "unexpected '}'"), ("{{ messages | shout }}", "No filter named 'shout'"),
                                               ("{% if messages %}" * 2000 + "{% endif %}" * 2000, "it is nested too deeply")])
def test_a_template_that_does_not_compile(bench, template, problem):
    tokenizer = bench.tokenizer(template)
    in_file = bench.refused("sft", tokenizer, [GREETING])
    assert in_file.startswith("the chat template of tokenizer does not compile: ") and problem in in_file
    in_flag = bench.refused("sft", tokenizer, [GREETING], "--tokenizer_chat_template", bench.write("a.jinja", template))
    assert in_flag.startswith("the chat template of --tokenizer_chat_template does not compile: ") and problem in in_flag
    bench.run("sft", tokenizer, [QA])


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
