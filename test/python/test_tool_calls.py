"""Episodes with TRL's tools and environment_factory: their schemas in the prompts, the calls of a turn, what a policy observes of them, and rewards; whole runs whose
calls are counted."""

import asyncio
import json

import pytest
from preparing import Bench, asked, make_tokenizer, said, turn
from runs import DEMO, chat, first_step, refused, write_lines
from test_episodes import environment_file, model, play, words  # noqa: F401, a fixture
from test_grpo import saved_answers

from environment_worker import Episodes, WrongAnswer
from tokenizer import Tokenizer
from tool_calls import FORMATS, Call, schemas_in, typed

HEAD = ("{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{% elif m.tool_calls %}{{ '<|im_start|>assistant\n' + (m.content or '') }}{% for c in m.tool_calls %}{% set c = c.function %}")
TAIL = ("{% endfor %}{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
HERMES = HEAD + "{{ '<tool_call>\n{\"name\": \"' + c.name + '\", \"arguments\": ' + (c.arguments | tojson) + '}\n</tool_call>' }}" + TAIL
XML = (HEAD + "{{ '<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments | items %}{{ '<parameter=' + k + '>\n' + (v | string) + '\n</parameter>\n' }}"
       "{% endfor %}{{ '</function>\n</tool_call>' }}" + TAIL)
LLAMA = HEAD + "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + (c.arguments | tojson) + '}' }}" + TAIL
MISTRAL = HEAD + "{{ '[TOOL_CALLS] [{\"name\": \"' + c.name + '\", \"arguments\": ' + (c.arguments | tojson) + ', \"id\": \"' + m.tool_calls[0].id + '\"}]' }}" + TAIL
NEW_MISTRAL = HEAD + "{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + (c.arguments | tojson) }}" + TAIL
GRANITE = HEAD + "{{ '<|tool_call|>[{\"name\": \"' + c.name + '\", \"arguments\": ' + (c.arguments | tojson) + '}]' }}" + TAIL
DEEPSEEK = (HEAD + "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name + '\n```json\n' + (c.arguments | tojson) + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}" + TAIL)
NEW_DEEPSEEK = HEAD + "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + (c.arguments | tojson) + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}" + TAIL
TEMPLATES = {"hermes": HERMES, "qwen3_coder": XML, "llama3": LLAMA, "mistral": MISTRAL, "granite": GRANITE, "deepseek": DEEPSEEK}
MARKS = ("[TOOL_CALLS]", "<|tool_call|>", "<tool_call>", "</tool_call>", *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")))

ADD = '''
def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: one number
        b: the other number
    """
    return a + b
'''
TOOLS = '''
import json, pathlib
''' + ADD + '''
async def fail(text: str) -> str:
    """
    Fails.

    Args:
        text: why
    """
    raise KeyError(text)

tools = [add, fail]

def reward_funcs(prompts, completions, solution, **columns):
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps([prompts, completions, columns["environments"]]))
    return [float(solution[0] in completions[0][-1]["content"])]
'''
COUNTER = ADD + '''
made = []

class Counter:
    def __init__(self):
        made.append(self)

    def reset(self, start, **columns):
        self.count = start

    def increase(self, by: int) -> str:
        """
        Increases the counter.

        Args:
            by: how much
        """
        self.count += by
        return f"{self.count} {len(made)}"

    def _hidden(self): ...

    async def get_reward(self):
        return self.count

environment_factory = Counter
tools = [add]
'''


def call(name, **arguments):
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def episodes(directory, text, template=HERMES, max_turns=0, marks=()):
    path = make_tokenizer(directory / "tokenizer", template, merges=[], marks=marks)
    ends = Tokenizer(path).hf.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    return Episodes(str(environment_file(directory, text)), max_turns, 200, tokenizer=path, template=template, template_kwargs="", eos=ends)


def begun(played_by, number=0, shows="add fail increase", ids=None, **columns):
    """Returns the tokens of the prompt of an episode that begins."""
    columns = {"prompt": chat("Hi"), **columns}
    if ids is None:
        ids = played_by.rendering.encoding(played_by.rendering.rendered(columns["prompt"])).ids
    reply = asyncio.run(played_by.begin(episode=number, prompt_ids=ids, prompt="Hi", raw_prompt=shows, label="", columns=json.dumps(columns)))
    assert reply.keys() == {"episode", "prompt_ids"} and reply["episode"] == number
    return reply["prompt_ids"]


def played(played_by, answers, number=0, shows="add fail increase", room=1000, end="token", **columns):
    """Returns the replies to the turns of an episode."""
    begun(played_by, number, shows, **columns)

    async def play():
        replies = []
        for i, answer in enumerate(answers):
            raw = answer + ("<|im_end|>" if end == "token" else "")
            replies.append(await played_by.turn(episode=number, turn=i, answer=answer, raw_answer=raw, end=end, room=room))
        return replies
    return asyncio.run(play())


def text_of(played_by, reply):
    return played_by.rendering.tokenizer.hf.decode(reply["ids"], skip_special_tokens=False)


def observed(*results):
    return "\n" + "".join(turn("user", f"<tool_response>\n{result}\n</tool_response>") for result in results) + "<|im_start|>assistant\n"


# ---- calls --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, text", [
    ("hermes", 'I look. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><tool_call>\n{"name": "look"}\n</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n"
                    "</function>\n</tool_call>"),
    ("qwen3_coder", "<seed:tool_call><function=add><parameter=a>1</parameter><parameter=b>2</parameter></function></seed:tool_call>"
                    "<seed:tool_call><function=look></function></seed:tool_call>"),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "look", "parameters": {}}'),
    ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}\n{"name": "look"}'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "x"}, {"name": "look", "arguments": "{}"}]'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]look{}'),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "look"}]'),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```'
                 '<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>')])
def test_calls_in_every_format(name, text):
    assert FORMATS[name](text, {}) == [Call("add", {"a": 1, "b": 2}), Call("look", {})]
    assert FORMATS[name]('The answer is {"a": 1}.', {}) == []


@pytest.mark.parametrize("name, text", [
    ("hermes", "<tool_call>{broken</tool_call>"), ("hermes", '<tool_call>{"name": 7}</tool_call>'), ("hermes", "<tool_call>[7]</tool_call>"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'), ("hermes", "<tool_call>" + "[" * 100_000), ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{"}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=add"), ("qwen3_coder", "<tool_call>add(1)</tool_call>"), ("llama3", '{"name": "add", "parameters": '),
    ("mistral", "[TOOL_CALLS]add"), ("granite", "<|tool_call|>add"),
    ("deepseek", "<｜tool▁call▁begin｜>add"), ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{broken\n```<｜tool▁call▁end｜>")])
def test_broken_calls_have_an_error(name, text):
    (broken,) = FORMATS[name](text, {})
    assert broken.error and broken.arguments is None


def test_the_schema_tells_the_types_of_texts():
    assert [typed("7", kind) for kind in ("string", "integer", "number", None)] == ["7", 7, 7, 7]
    assert [typed(text, "boolean") for text in ("true", "False", "perhaps")] == [True, False, "perhaps"]
    assert typed("None", None) is None and typed("[1, 2]", "array") == [1, 2]


@pytest.mark.parametrize("name, template", [*TEMPLATES.items(), ("mistral", NEW_MISTRAL), ("deepseek", NEW_DEEPSEEK)])
@pytest.mark.parametrize("marks", [(), MARKS], ids=["texts", "tokens"])
def test_the_format_is_the_templates(name, template, marks, tmp_path):
    assert episodes(tmp_path, TOOLS, template, marks=marks).rendering.call_format == name


# ---- episodes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("marks", [(), MARKS], ids=["texts", "tokens"])
def test_tokens_of_an_episode_are_the_whole_chats(name, marks, tmp_path):
    """A word stands for the call, whose tokens are the policy's own. Behind it is what the template writes after any call."""
    by = episodes(tmp_path, TOOLS, TEMPLATES[name], marks=marks)
    template, tokenizer = by.rendering.template, by.rendering.tokenizer
    made = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]}
    messages, ids = chat("Hi"), []
    before = template.prompt(messages, by.rendering.variables)[0]
    ids += by.rendering.encoding(before).ids
    for i in range(2):
        written = template.prompt([*messages, made], by.rendering.variables)[0][len(before):].partition("<|im_end|>")[0]
        (reply,) = played(by, [written], number=i, solution="")
        assert (reply["calls"], reply["failures"], reply["reward"]) == (1, 0, None)
        ids += by.rendering.encoding(written + "<|im_end|>").ids + reply["ids"]
        messages += [made, {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}]
        before = template.prompt(messages, by.rendering.variables)[0]
    assert tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == before
    assert ids == by.rendering.encoding(before).ids


def test_failures_are_observed_and_counted(tmp_path):
    by = episodes(tmp_path, TOOLS)
    for number, (answer, results, calls, failures) in enumerate([
            (call("add", a=1, b=2) + call("fail", text="why") + call("add", a=3, b=4), ["3", "{'error': \"'why'\"}", "7"], 3, 1),
            (call("sub", a=1), ["{'error': 'Tool sub not found.'}"], 1, 1),
            (call("add", a=1), ["{'error': \"add() missing 1 required positional argument: 'b'\"}"], 1, 1),
            ("<tool_call>{</tool_call>", ["{'error': 'The call is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)'}"], 1, 1)]):
        (reply,) = played(by, [answer], number, solution="")
        assert text_of(by, reply) == observed(*results)
        assert (reply["calls"], reply["failures"], reply["truncated"]) == (calls, failures, False)


def test_a_stop_string_leaves_the_end_of_the_turn_to_the_template(tmp_path):
    by = episodes(tmp_path, TOOLS)
    (reply,) = played(by, [call("add", a=1, b=2)], solution="", end="text")
    assert text_of(by, reply) == "<|im_end|>" + observed("3")


def test_an_episode_ends_without_a_call_and_is_judged(tmp_path):
    by = episodes(tmp_path, TOOLS)
    first, last = played(by, ["<think>One.</think>I add. " + call("add", a=1, b=2), "It is 3."], solution="3")
    assert first["ids"] and last == {"episode": 0, "ids": [], "reward": 1, "truncated": False, "calls": 0, "failures": 0}
    assert json.loads((tmp_path / "seen.json").read_text()) == [[chat("Hi")], [[
        {"role": "assistant", "content": "I add.", "reasoning_content": "One.", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
        {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}, said("It is 3.")]], [None]]
    assert played(by, ["It is 4."], number=1, solution="3")[0]["reward"] == 0


@pytest.mark.parametrize("answer", ["<think>" + call("add", a=1, b=2), "no call", "<tool>{}</tool>"])
def test_thoughts_and_texts_are_no_calls(answer, tmp_path):
    assert played(episodes(tmp_path, TOOLS), [answer], solution="3")[0]["calls"] == 0


def test_a_thought_that_the_prompt_has_opened(tmp_path):
    by = episodes(tmp_path, TOOLS, HERMES.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif"))
    made = call("add", a=1, b=2)
    assert [played(by, [answer], number, "add fail <think>\n", solution="")[0]["calls"] for number, answer in enumerate([made, "Hm.</think>" + made])] == [0, 1]


@pytest.mark.parametrize("ends", [{"max_turns": 1}, {"end": "limit"}])
def test_the_calls_of_the_last_turn_are_not_made(ends, tmp_path):
    by = episodes(tmp_path, COUNTER, max_turns=ends.pop("max_turns", 0))
    (reply,) = played(by, [call("increase", by=5)], start=2, **ends)
    assert (reply["ids"], reply["reward"], reply["calls"]) == ([], 2, 0)


def test_observations_without_room_end_an_episode(tmp_path):
    (reply,) = played(episodes(tmp_path, COUNTER), [call("increase", by=5)], start=2, room=20)
    assert (reply["ids"], reply["truncated"], reply["reward"]) == ([], True, 7)


def test_methods_of_an_environment_are_tools(tmp_path):
    """An environment is made once, used by one episode at a time, and reset."""
    by = episodes(tmp_path, COUNTER)
    assert [schema["function"]["name"] for schema in by.rendering.variables["tools"]] == ["add", "increase"]
    for number, start in enumerate((2, 7)):
        first, last = played(by, [call("increase", by=5) + call("add", a=1, b=1) + call("reset", start=9), "done"], number, start=start)
        assert text_of(by, first) == observed(f"{start + 5} 1", "2", "{'error': 'Tool reset not found.'}")
        assert (first["reward"], last["reward"]) == (None, start + 5)


WELCOME = COUNTER.replace("self.count = start", "self.count = start\n        return ' You begin at %d.' % start if start else None") + """
import json, pathlib

def reward_funcs(prompts, **columns):
    pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(prompts))
    return [1]
"""


@pytest.mark.parametrize("template", [HERMES, HERMES.replace("m.role + '\n' + m.content", "m.role + '\n' + (m.content | trim)")], ids=["whole", "stripped"])
def test_reset_appends_a_text_to_the_last_message(template, tmp_path):
    """As in TRL: the prompt is the rendering of the longer chat, and reward functions read that chat. The turns go on behind it."""
    by = episodes(tmp_path, WELCOME, template)
    asked = [{"role": "system", "content": "Count."}, *chat("Hi")]
    longer = [asked[0], *chat("Hi You begin at 2.")]
    want = by.rendering.encoding(by.rendering.template.prompt(longer, by.rendering.variables)[0]).ids
    assert begun(by, 0, prompt=asked, start=2) == want != begun(by, 1, prompt=asked, start=0)
    assert "Hi You begin at 2.<|im_end|>" in by.rendering.tokenizer.hf.decode(want)
    first, last = played(by, [call("increase", by=5), "done"], 2, prompt=asked, start=2)
    assert text_of(by, first) == observed("7 3") and last["reward"] == 8
    assert json.loads((tmp_path / "seen.json").read_text()) == [longer]
    made = " You begin at 4." if template == HERMES else "You begin at 4."  # the whole prompt
    assert by.rendering.tokenizer.hf.decode(begun(by, 3, prompt=chat(""), start=4)).endswith(turn("user", made) + "<|im_start|>assistant\n")


def test_the_text_of_reset_is_within_a_prompt_that_shows_the_episodes_own_tools(tmp_path):
    by = episodes(tmp_path, SEVERAL.replace("self.count = start", "return ' Begin.'"))
    for name, tools in schemas_in(str(tmp_path / "environment.py")).items():
        ids = [by.rendering.encoding(by.rendering.template.prompt(chat(text), {"tools": tools})[0]).ids for text in ("Hi", "Hi Begin.")]
        assert begun(by, ids=ids[0], start=2, environment=name) == ids[1]


SEVERAL = COUNTER.replace("environment_factory = Counter", "class Other(Counter):\n    increase = None\nenvironment_factory = {'counts': Counter, 'other': Other}")


def test_a_record_names_its_environment(tmp_path):
    by = episodes(tmp_path, SEVERAL)
    assert played(by, [call("increase", by=5)], 0, start=2, environment="counts")[0]["failures"] == 0
    assert played(by, [call("increase", by=5)], 1, start=2, environment="other")[0]["failures"] == 1
    with pytest.raises(WrongAnswer, match="has the environment 'third', but environment_factory has counts, other"):
        played(by, ["x"], 2, start=2, environment="third")


def test_a_format_of_the_users_own(tmp_path):
    by = episodes(tmp_path, TOOLS + "\ndef tool_format(text):\n    return [('add', {'a': int(part), 'b': 1}) for part in text.split()]\n")
    (reply,) = played(by, ["3 4"], solution="")
    assert text_of(by, reply) == observed("4", "5")
    assert played(by, ["3 x"], 1, solution="")[0]["failures"] == 1


WRONG = {
    "no type hint": (TOOLS.replace("a: int, b: int", "a, b: int"), "the tool add has no schema: Argument a is missing a type hint"),
    "no docstring": ("def look(): ...\ntools = [look]", "the tool look has no schema: Cannot generate JSON schema for look because it has no docstring!"),
    "an argument without description": (TOOLS.replace("        b: the other number\n", ""), "the tool add has no schema: .*no description for the argument 'b'"),
    "no function": ("tools = ['add']", "one of the tools is 'add', which is no function"),
    "no list": (ADD + "tools = add", "tools is <function add"),
    "none": ("tools = []", "it has no tools"),
    "a factory of text": ("environment_factory = 'Counter'", "environment_factory is 'Counter', which cannot be called"),
    "a factory of text in a dictionary": ("environment_factory = {'x': 7}", "environment_factory\\['x'\\] is 7, which cannot be called"),
    "no reset": (COUNTER.replace("def reset(", "def begin("), "has no method reset"),
    "tools and a class": (TOOLS + "class Environment:\n    def step(self, answer): ...\n", "defines tools beside a class"),
    "tools and an agent": (TOOLS + "class AgentInstance: ...\n", "defines tools beside a class"),
    "equal names": (COUNTER.replace("def increase(", "def add("), "two tools with the name add"),
    "no reward": (TOOLS.replace("def reward_funcs", "def other"), "its tools have no reward"),
    "a reward model": (TOOLS + "reward_funcs = 'a/model'", "reward_funcs has 'a/model', which is no function"),
    "an unknown format": (TOOLS + "tool_format = 'xml'", "its tool_format is 'xml'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tools_are_refused(name, tmp_path):
    with pytest.raises(WrongAnswer, match=WRONG[name][1]):
        episodes(tmp_path, WRONG[name][0])


@pytest.mark.parametrize("text, more, match", [
    (TOOLS, {"shows": "add"}, "a prompt does not show the tool fail"), (TOOLS.replace("[float", "7, [float"), {}, "reward_funcs returned"),
    (COUNTER.replace("self.count = start", "return 7"), {}, "reset returned 7"), (COUNTER.replace("self.count = start", "return ['Welcome']"), {}, "reset returned \\['Welcome"),
    (COUNTER.replace("self.count = start", "return ' x' * 101"), {}, "the text that reset returned makes a prompt 202 tokens longer"),
    (COUNTER.replace("self.count = start", "return 'x'"), {"ids": [1]}, "reset returned 'x', but the chat template renders the messages of a prompt otherwise"),
    (COUNTER.replace("self.count = start", "return 'x'"), {"prompt": None, "ids": [1]}, "reset returned 'x', but a prompt is no list of messages"),
    (COUNTER.replace("return self.count", "return 'x'"), {}, "the reward is 'x'")])
def test_wrong_episodes_are_refused(text, more, match, tmp_path):
    with pytest.raises(WrongAnswer, match=match):
        played(episodes(tmp_path, text), ["x"], solution="3", start=1, **more)


def test_a_template_without_calls_needs_a_format(tmp_path):
    without = HERMES.replace("<tool_call>", "<made_call>")
    with pytest.raises(WrongAnswer, match="the chat template writes no calls in a known format"):
        episodes(tmp_path, TOOLS, without)
    (tmp_path / "named").mkdir()
    by = episodes(tmp_path / "named", TOOLS + "tool_format = 'hermes'\n", without)
    assert text_of(by, played(by, [call("add", a=1, b=2)], solution="")[0]) == observed("3")


# ---- prompts ------------------------------------------------------------------------------------------------------------------------------


def test_prompts_show_the_tools(tmp_path, capsys):
    bench = Bench(tmp_path, capsys)
    file = environment_file(tmp_path, SEVERAL)
    tools = schemas_in(str(file))
    records = [{"prompt": chat("Hi"), "environment": name} for name in tools]
    texts = bench.run("rl", bench.tokenizer(HERMES), records, "--environment", str(file)).texts()
    want = [turn("system", json.dumps(schemas)) + asked("Hi") for schemas in tools.values()]
    assert texts == want and "increase" in texts[0] and "increase" not in texts[1]
    for record, part in [({"environment": "x"}, "has the environment 'x', but environment_factory has counts, other"), ({}, "has the environment None"),
                         ({"environment": "other", "tools": tools["other"]}, "has tools of its own")]:
        status, error = bench.call("rl", bench.tokenizer(HERMES), [{"prompt": chat("Hi"), **record}], "--environment", str(file))
        assert status == 1 and part in error


@pytest.mark.parametrize("text, part", [("def", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), (None, "no such file"), ("tools = [7]", "one of the tools is 7")])
def test_files_that_preparation_refuses(text, part, tmp_path, capsys):
    bench = Bench(tmp_path, capsys)
    file = environment_file(tmp_path, text) if text else tmp_path / "none.py"
    status, error = bench.call("rl", bench.tokenizer(HERMES), [{"prompt": chat("Hi")}], "--environment", str(file))
    assert status == 1 and part in error and str(file) in error


# ---- whole runs ---------------------------------------------------------------------------------------------------------------------------

DEMOS = ("{% if tools %}{{ '<|system|>' + (tools | map(attribute='function.name') | join(' ')) + '<|end|>' }}{% endif %}"
         "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + m.content + '<|end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
LENGTHS = ADD + '''
print("noise")
tools = [add]

def tool_format(text):  # short turns call
    return [("add" if len(text) % 3 else "x", {"a": len(text), "b": 1})] if len(text) < 12 else []

def reward_funcs(completions, **columns):
    return [sum(len(m["content"]) for m in completions[0] if m["role"] == "assistant")]
'''


def test_a_run_counts_calls(model, tmp_path):  # noqa: F811
    """Prompts of raw data show the tools; prepared ones must."""
    file = environment_file(tmp_path, LENGTHS)
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": chat("reverse " + word)} for word in ("cat", "horse", "mouse", "bee")])
    options = {"data": data, "tokenizer_chat_template": DEMOS, "max_steps": 1, "max_new_tokens": 200, "max_turns": 3}
    play(tmp_path / "run", file, model, **options)
    step, saved, hf = first_step(tmp_path / "run"), saved_answers(tmp_path / "run"), Tokenizer(str(DEMO)).hf
    assert hf.decode(saved[0]["prompt_ids"]).startswith("<|system|>add<|end|><|user|>reverse cat")
    read = [hf.decode([i for i, sampled in zip(episode["completion_ids"], episode["completion_mask"]) if not sampled]) for episode in saved]
    calls, failures = sum(text.count("<|user|>") for text in read), sum(text.count("{'error'") for text in read)
    assert calls > failures > 0 and not any(episode["truncated"] for episode in saved)
    assert step["tool_calls"] == pytest.approx(calls / 12) and step["tool_failures"] == pytest.approx(failures / calls)
    assert step["turns"] == pytest.approx(1 + calls / 12) and step["reward"] > 0
    refused(words(tmp_path / "old", environment_file(tmp_path, LENGTHS.replace('print("noise")', "")), model), "a prompt does not show the tool add", "prepare it with the tools")
    refused(words(tmp_path / "wrong", environment_file(tmp_path, "tools = [7]"), model, **options), "environment.py: one of the tools is 7")
