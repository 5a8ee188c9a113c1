"""Chats as token ids with a mask, written down by hand: neither Jinja nor a tokenizer's code is involved. Switches put known bugs into them, as in
reference.py.

A chat consists of turns <|start|>role\\ncontent<|end|>. The tokens are these two, <s>, the marks of reasoning, and single characters."""

import re

SPECIAL = ["<unk>", "<s>", "<|end|>", "<|start|>"]
MARKS = ["<think>", "</think>"]
VOCABULARY = SPECIAL + MARKS + list("\n .,?!+=0123456789abcdefghijklmnopqrstuvwxyz")
IDS = {token: i for i, token in enumerate(VOCABULARY)}

HEADER, TURN = "{{- '<|start|>' + m.role + '\\n' }}", "{{- m.content + '<|end|>' }}"
MARKED = "{%- if m.role == 'assistant' %}{%- generation %}" + TURN + "{%- endgeneration %}{%- else %}" + TURN + "{%- endif %}"
LAST_QUESTION = "{%- set n = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set n.last = loop.index0 %}{%- endif %}{%- endfor %}"
REASONING = "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"


def template(body, before="", opened=""):
    ask = "{%- if add_generation_prompt %}{{- '<|start|>assistant\\n" + opened + "' }}{%- endif %}"
    return before + "{%- for m in messages %}" + HEADER + body + "{%- endfor %}" + ask


def reasoned(condition, turn, marked=False):
    said = "{%- if " + condition + " %}" + REASONING + "{%- endif %}" + turn
    return "{%- if m.role == 'assistant' %}{%- generation %}" + said + "{%- endgeneration %}{%- else %}" + turn + "{%- endif %}" if marked else said


LATER = "m.role == 'assistant' and m.reasoning_content and loop.index0 > n.last"
TEMPLATES = {  # as in a model's directory; some also with marks of what is generated
    "plain": (template(TURN), template(MARKED)),
    "marked": (template(MARKED), None),
    "with_bos": (template(TURN, "{{- bos_token }}"), template(MARKED, "{{- bos_token }}")),
    "last_reasoning": (template(reasoned(LATER, TURN), LAST_QUESTION), template(reasoned(LATER, TURN, True), LAST_QUESTION)),
    "opened_reasoning": (template(reasoned("m.role == 'assistant'", TURN), opened="<think>\\n"), None),
}


def says(role, content, reasoning=None):
    return {"role": role, "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


def chat(*contents, system=None):
    """Questions and answers in turn; an answer may be a pair of reasoning and content."""
    first = [says("system", system)] if system else []
    pairs = [(c, None) if isinstance(c, str) else c[::-1] for c in contents]
    return {"messages": first + [says(("user", "assistant")[i % 2], *pair) for i, pair in enumerate(pairs)]}


RECORDS = {
    "chats": [chat("what is two and two?", "four.", "and three more?", "seven, i think."), chat("name a colour.", "blue!", system="be short."),
              chat("hi", "hello", "who wrote it?", "nobody knows.", "why?", "it is old.")],
    "answers": [chat("name a colour.", "blue, or green."), chat("what is two and two?", "four.", system="be short."), chat("why?", "it is 9 years old.")],
    "reasoned_chats": [chat("two and two?", ("2 + 2 = 4", "four."), "and three?", ("4 + 3 = 7", "seven.")), chat("a colour?", ("any of them", "blue."))],
    "reasoned_answers": [chat("two and two?", ("2 + 2 = 4", "four.")), chat("a colour?", ("any of them", "blue."), system="be short.")],
}


def encode(text):
    return [IDS[token] for token in re.findall("|".join(map(re.escape, SPECIAL + MARKS)) + "|.", text, re.DOTALL)]


def document(messages, name, bugs):
    """The ids of a chat, and a mask: 1 for what the assistant says, from behind the generation prompt to <|end|>."""
    parts = [("<s>", 0)] * (1 + ("bos_twice" in bugs)) if name == "with_bos" else []
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        own = m["role"] == "assistant" and ("last_turn_alone" not in bugs or i == len(messages) - 1)
        parts.append((f"<|start|>{m['role']}\n", own and "header_trained" in bugs))
        if "reasoning_content" in m and (i > last or "turns_rendered_alone" in bugs):
            parts += [("<think>\n", own and (name != "opened_reasoning" or "opening_trained" in bugs)), (f"{m['reasoning_content']}\n</think>\n\n", own)]
        parts += [(m["content"], own), ("<|end|>", own and "end_of_turn_untrained" not in bugs)]
    if "mask_runs_on" in bugs:  # from the first answer to the end of the chat
        first = min(i for i, (_, trained) in enumerate(parts) if trained)
        parts = [(text, i >= first) for i, (text, _) in enumerate(parts)]
    return {"ids": [i for text, _ in parts for i in encode(text)], "mask": [int(trained) for text, trained in parts for _ in encode(text)]}


def tokenizer():
    """tokenizer.json, and tokenizer_config.json without a template."""
    added = [{"id": IDS[token], "content": token, "special": token in SPECIAL, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for token in SPECIAL + MARKS]
    bos, A, B = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    first = {"type": "TemplateProcessing", "single": [bos, A], "pair": [bos, A, B], "special_tokens": {"<s>": {"id": "<s>", "ids": [IDS["<s>"]], "tokens": ["<s>"]}}}
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
             "byte_fallback": False, "ignore_merges": False, "vocab": IDS, "merges": []}
    words = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None,
             "post_processor": first, "decoder": {"type": "Fuse"}, "model": model}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|end|>",
              "clean_up_tokenization_spaces": False}
    return words, config
