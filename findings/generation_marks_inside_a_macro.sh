#!/usr/bin/env bash
# transformers: a {% generation %} mark inside a macro marks other tokens: the header of the answer, and not its end
#
# Claim (transformers 5.23.0, tokenizers 0.23.3, Jinja2 3.1.6, CPU): apply_chat_template(return_assistant_tokens_mask=True) begins a mark
# where the text ends that the template has given out so far. Jinja gives out the text of a macro, of a {% set %}...{% endset %} block and of
# a {% filter %} block when it is complete, so a mark inside begins where the whole text does, with the length that it should have. The
# rendered chat is the same, character by character. For a macro that renders a turn,
#
#     <user>what is it<end><assistant>a cat<end>        the tokens of `<assistant` are marked in place of those of `a cat<end>`
#
# In a macro that renders the whole chat the marks of all answers begin at the first question. A macro that begins with the mark, or that is
# called inside a mark, is right. There is no error and no warning.
#
# Why a good guess is wrong: a macro is a function that returns text, and nothing else about a template depends on whether it uses one. A
# check that some tokens are marked, or how many in each turn, passes; so does a test with a macro of the content alone.
#
# Who is hurt: whoever trains on answers only (TRL's assistant_only_loss, any use of assistant_masks) with a template of his own whose turns
# are macros. The model learns to write the header of its answers, and never to end one. The templates in TRL 1.16 have macros, but no mark
# in one. Cure: put the marks around the calls of macros.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet transformers==5.23.0 tokenizers==0.23.3 jinja2==3.1.6
"$work/venv/bin/python" - <<'PYTHON'
import warnings
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

warnings.simplefilter("error")
CHAT = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"},
        {"role": "user", "content": "and this"}, {"role": "assistant", "content": "a dog"}]
letters = {c: i for i, c in enumerate("?\n <>abcdefghijklmnopqrstuvwxyz")}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(letters, [], unk_token="?")))  # a token is a character

header, content = "{{- '<' + m.role + '>' }}", "{{- m.content + '<end>' }}"
marked = "{%- if m.role == 'assistant' %}{%- generation %}" + content + "{%- endgeneration %}{%- else %}" + content + "{%- endif %}"


def each(body):
    return "{%- for m in messages %}" + body + "{%- endfor %}"


RIGHT, HEADER = ["a cat<end>", "a dog<end>"], ["<assistant", "<assistant"]
for way, template, expected in [
    ("no macro", each(header + marked), RIGHT),
    ("a macro of the turn", "{%- macro turn(m) %}" + header + marked + "{%- endmacro %}" + each("{{- turn(m) }}"), HEADER),
    ("a set block of the turn", each("{%- set turn %}" + header + marked + "{%- endset %}{{- turn }}"), HEADER),
    ("a filter block of the turn", each("{%- filter trim %}" + header + marked + "{%- endfilter %}"), HEADER),
    ("a macro of the whole chat", "{%- macro chat() %}" + each(header + marked) + "{%- endmacro %}{{- chat() }}", ["<user>what"]),
    ("a macro that begins with the mark", "{%- macro said(m) %}" + marked + "{%- endmacro %}" + each(header + "{{- said(m) }}"), RIGHT),
    ("a macro called inside the mark", "{%- macro said(m) %}" + content + "{%- endmacro %}" + each(header + marked.replace(content, "{{- said(m) }}")), RIGHT),
]:
    text = tokenizer.apply_chat_template(CHAT, chat_template=template, tokenize=False)
    out = tokenizer.apply_chat_template(CHAT, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    assert text == "<user>what is it<end><assistant>a cat<end><user>and this<end><assistant>a dog<end>"
    assert len(text) == len(out["input_ids"])
    parts = "".join(c if m else "\n" for c, m in zip(text, out["assistant_masks"])).split("\n")
    parts = [part for part in parts if part]
    print(f"{way:34} marked: {parts}")
    assert parts == expected, way
print("as stated")
PYTHON
