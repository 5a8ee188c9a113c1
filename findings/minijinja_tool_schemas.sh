#!/usr/bin/env bash
# minijinja 3.1: the schemas and arguments of tools are other tokens than transformers renders from the same chat template
#
# Claim (minijinja 3.1.0, transformers 5.23.0, Jinja2 3.1.6, CPU): from one chat template and one conversation with a tool, without an error,
# 1. tojson of minijinja writes ' < > & as \u0027 \u003c \u003e \u0026. transformers replaces Jinja2's filter, so apply_chat_template leaves them alone.
# 2. The number 1e-05 becomes 0.00001, 1e+16 becomes 10000000000000000.0, and inside tojson 1e-07 becomes 1e-7 and NaN becomes null.
# 3. A string is no sequence, and neither is a mapping: `x is sequence` is False for both, and True in Jinja2.
#
# Why a good guess is wrong: minijinja is by Jinja2's first author, and made to be compatible; all other lines of the template render equally, so a
# comparison on plain conversations shows nothing. Jinja2's own tojson escapes the four characters too, so a test against Jinja2 passes.
#
# Who is hurt: whoever trains on prompts of apply_chat_template and serves with an engine that renders by minijinja. An apostrophe in the description of
# a tool ("the user's city") is enough for other tokens; so is a learning rate as an argument. Cure: replace the filter tojson there, as transformers
# does, and pass numbers as strings.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.23.0 minijinja==3.1.0 jinja2==3.1.6
"$work/venv/bin/python" - <<'PYTHON'
import minijinja
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }} as JSON {{ value | tojson }}{% endfor %}</call>{% endfor %}
{% endfor %}"""


def tool(about):
    return {"type": "function", "function": {"name": "train", "description": about, "parameters": {"type": "object", "properties": {}}}}


def messages(**arguments):
    call = {"type": "function", "function": {"name": "train", "arguments": arguments}}
    return [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")), chat_template=TEMPLATE)
engine = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)


def both(**conversation):
    return [tokenizer.apply_chat_template(conversation["messages"], tools=conversation.get("tools"), tokenize=False),
            engine.render_str(TEMPLATE, **{"tools": None, **conversation})]


for what, conversation, theirs, minis in [
    ("an ordinary tool and call", dict(tools=[tool("Trains a model.")], messages=messages(steps=3, rate=0.5)), "Trains a model.", "Trains a model."),
    ("an apostrophe", dict(tools=[tool("Trains the user's model.")], messages=messages()), "user's", r"user\u0027s"),
    ("a comparison", dict(tools=[tool("If 1 < n && n > 0.")], messages=messages()), "1 < n && n > 0", r"1 \u003c n \u0026\u0026 n \u003e 0"),
    ("a small number", dict(messages=messages(rate=1e-5)), "rate=1e-05 as JSON 1e-05", "rate=0.00001 as JSON 0.00001"),
    ("a smaller number", dict(messages=messages(rate=1e-7)), "rate=1e-07 as JSON 1e-07", "as JSON 1e-7"),
    ("a large number", dict(messages=messages(rate=1e16)), "rate=1e+16 as JSON 1e+16", "rate=10000000000000000.0 as JSON 1e+16"),
    ("no number", dict(messages=messages(rate=float("nan"))), "rate=nan as JSON NaN", "rate=NaN as JSON null"),
]:
    first, second = both(**conversation)
    print(f"{what}: {'equal' if first == second else 'other texts'}\n  transformers {first!r}\n  minijinja    {second!r}")
    assert theirs in first and minis in second and (first == second) == (theirs == minis), what

import jinja2

for value in ("text", {"a": 1}, [1]):
    test = "{{ x is sequence }}"
    said = jinja2.Environment().from_string(test).render(x=value), engine.render_str(test, x=value)
    print(f"{value!r} is sequence: Jinja2 {said[0]}, minijinja {said[1]}")
    assert said == ("True", str(isinstance(value, list)))
PYTHON
echo "as stated"
