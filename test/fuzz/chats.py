#!/usr/bin/env python3
"""A fuzzer for data/prepare.py: mutated records of every form, and random chat templates with the features of published ones.

    test/fuzz/chats.py [--seconds 60] [--only N]      from the repository root; --only repeats a template and its records

Each record must be refused with a message that has a fix, or become tokens whose loss mask is right. Each text in a record has a unique word. The word
of a trained message must be in the trained text, any other word in the rest of the text, and no word may be missing. Templates may omit only reasoning.
"""
import argparse
import copy
import itertools
import json
import random
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "data"), str(ROOT / "scripts")]

import prepare  # noqa: E402
from check_templates import save_tokenizer  # noqa: E402
from errors import DataError  # noqa: E402
from records import Record  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

RECORDS = 20  # of each template
WORD = re.compile(r"word\d+[tur]x")


# ---- templates


def random_template(pick):
    """A chat template with random choices among the features of published templates."""
    before, after = pick([("<|im_start|>ROLE\n", "<|im_end|>\n"), ("<|im_start|>ROLE\n", "<|im_end|>"), ("<|im_start|>ROLE\n", "<|im_end|>\n\n"),
                          ("<|header|>ROLE<|/header|>\n\n", "<|eot|>"), ("### ROLE:\n", "\n\n"), ("ROLE: ", "\n"), ("[ROLE] ", " [/ROLE] "),
                          ("<|ROLE|>", "<|end|><|im_end|>\n"), ("ROLE: ", "</s>\n"), ("", "<|im_end|>"), (" ", " </s>")])
    role = pick(["m['role']", "m['role']", "m['role'] | upper", "('model' if m['role'] == 'assistant' else m['role'])"])
    content = pick(["c", "c", "c | trim", "c.strip()", "c | string", "c.rstrip()", "' ' + c + ' '"])
    head, tail = ("{{ '" + part.replace("\n", "\\n").replace("ROLE", "' + r + '") + "' }}" for part in (before, after))
    answer = "{{ " + content + " }}"
    if pick([0, 0, 1]):  # removes reasoning from earlier turns
        answer = "{% if not loop.last %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}" + answer
    if pick([0, 1]):
        shown = "{{ '<think>\\n' + m['reasoning_content'] + '\\n</think>\\n\\n' }}"
        answer = ("{% if m['reasoning_content']" + pick(["", " and loop.last"]) + " %}" + shown + "{% endif %}") + answer
    if pick([0, 1]):
        arguments = pick(["t['function']['arguments'] | tojson", "t['function']['arguments'] | string", "t | tojson"])
        answer += "{% for t in m['tool_calls'] or [] %}{{ '<tool_call>' + (" + arguments + ") + '</tool_call>' }}{% endfor %}"
    ends = pick([tail, tail, tail, "{{ eos_token }}", tail + "{{ eos_token }}", "{% if loop.last %}{{ eos_token }}{% else %}" + tail + "{% endif %}"])
    marked = pick([0, 0, 0, 1])
    turn = head + ("{% generation %}" if marked else "") + answer + (ends + "{% endgeneration %}" if marked else ends)
    other = head + pick(["", "", "{% if m['role'] == 'tool' %}{{ 'RESULT ' }}{% endif %}"]) + "{{ " + content + " }}" + tail
    if pick([0, 0, 0, 1]):  # marks the last user message
        other = "{% if loop.index0 >= messages | length - 2 %}{{ '#' }}{% endif %}" + other
    parts = pick(["{% set c = m['content'] or '' %}", "{% set c = m['content'] %}",
                  "{% if m['content'] is string %}{% set c = m['content'] %}{% else %}{% set c = m['content'] | map(attribute='text') | join %}{% endif %}",
                  "{% set c = m['content'][0]['text'] %}"])
    refusal = pick(["", "", "", "{% if m['role'] not in ['user', 'assistant'] %}{% continue %}{% endif %}", "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}",
                    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"])
    start = pick(["", "", "{{ bos_token }}", "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"])
    tools = pick(["", "{% if tools %}{{ 'TOOLS ' + (tools | tojson) + '\\n' }}{% endif %}"])
    loop = ("{% for m in messages %}" + refusal + parts + "{% set r = " + role + " %}{% if m['role'] == 'assistant' %}" + turn +
            "{% else %}" + other + "{% endif %}{% endfor %}")
    end = pick(["", "", "", "{{ eos_token }}"])
    asking = "{% set r = " + role.replace("m['role']", "'assistant'") + " %}" + head
    asking += pick(["", "", "", "{{ '<think>\\n' }}", "{{ '<think>\\n\\n</think>\\n\\n' }}"])
    return start + tools + loop + pick(["{% if add_generation_prompt %}" + asking + "{% else %}" + end + "{% endif %}"] * 4 + [end])


# ---- records


class Writer:
    """Makes random records. A letter in each unique word tells whether it must be trained (t), must not be (u), or may be missing (r: reasoning)."""

    def __init__(self, rng):
        self.rng = rng
        self.pick = rng.choice
        self.count = itertools.count()

    def text(self, kind="u"):
        word = f"a word{next(self.count)}{kind}x"  # begins with another token, because the first token of a text is never trained
        odd = self.pick(["", "", "", " ", "\n", "é", "😀", "\r\n", "\u2028", "<", "{{", "{% if %}", "'", '"', "\\", "\0", "<|im_end|>", "</s>", "\n\n"])
        return self.pick([word, f"{word} {odd}", f"{odd}{word}", f"{odd}{word}{odd}", f"say {word} again"])

    def message(self, role, trained=True, flags=True):
        message = {"role": role}
        trained = trained and role == "assistant"
        if self.rng.random() < 0.1:
            name = self.pick(["train", "training", "weight"])
            message[name] = self.pick([0, 1]) if name == "weight" else self.pick([True, False])
            trained = bool(message[name]) if flags else trained
        message["content"] = self.text("t" if trained else "u")
        if role == "assistant" and self.rng.random() < 0.15:
            message["reasoning_content"] = self.text("r")
        if role == "assistant" and self.rng.random() < 0.1:
            message["content"] = f"<think>\n{self.text('r')}\n</think>\n\n{message['content']}"
        if self.rng.random() < 0.1:
            message["content"] = [{"type": "text", "text": message["content"]} for _ in range(self.pick([1, 1, 2]))]
        return message

    def call(self, trained):
        kind = "t" if trained else "u"
        arguments = {"place": self.text(kind), "unit": None}
        function = {"name": "look", "arguments": self.pick([arguments, json.dumps(arguments)])}
        return {"role": "assistant", "content": self.pick(["", self.text(kind)]), "tool_calls": [{"type": "function", "function": function}]}

    def chat(self, tools=True, trained=True, flags=True):
        messages = [self.message("system", trained, flags)] if self.rng.random() < 0.3 else []
        for _ in range(self.pick([1, 1, 2, 3])):
            messages.append(self.message("user", trained, flags))
            if tools and self.rng.random() < 0.2:
                messages += [self.call(trained), self.message("tool", trained, flags)]
            messages.append(self.message("assistant", trained, flags))
        return messages

    def tools(self):
        return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}}]

    def record(self):
        """(task, record)"""
        short, tools, prompt = self.chat(tools=False, flags=False), self.tools(), self.chat(trained=False, flags=False)[:-1]
        names = {"user": "human", "assistant": "gpt"}
        ids = [self.rng.randrange(200) for _ in range(5)]
        beside = self.pick([{}, {"tools": tools}, {"tools": json.dumps(tools)}, {"system": self.text()}, {"chat_template_kwargs": {"enable_thinking": False}}])
        chosen, rejected = ([self.message("assistant", flags=False)] for _ in range(2))
        return self.pick([("sft", {"messages": self.chat()} | beside)] * 4 + [
            ("sft", {"conversations": [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in short]}),
            ("sft", {"prompt": self.chat(trained=False)[:-1], "completion": [self.message("assistant")]}),
            ("sft", {"prompt": self.text(), "completion": self.text("t")}),
            ("sft", {"instruction": self.text(), "input": self.pick(["", self.text()]), "output": self.text("t")}),
            (self.pick(["sft", "pretrain"]), {"text": self.text("t")}),
            ("sft", {"input_ids": ids, "labels": [self.pick([-100, i]) for i in ids]}),
            ("pref", {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": 1.5}),
            ("pref", {"prompt": self.text(), "chosen": self.text("t"), "rejected": self.text("t")}),
            ("prompts", self.pick([{"prompt": self.text()}, {"prompt": prompt}, {"messages": prompt}]))])


ODD = [None, "", " ", 0, 1, -1, 1.5, float("nan"), 10 ** 30, True, [], {}, [[]], [None], "null", "[]", "{}", "a\ud83d", "assistant", "user", "Assistant", "asistant",
       "gpt", "function_call", "observation", "critic", [{"type": "image"}], [{"type": "text"}], [{"type": "text", "text": None}],
       {"type": "text", "text": "hello"}, {"role": "user", "content": "Hi"}]
KEYS = ["role", "content", "from", "value", "messages", "tools", "tool_calls", "function", "arguments", "name", "text", "system", "train", "weight", "prompt",
        "completion", "chosen", "rejected", "input_ids", "labels", "reasoning_content", "images", "margin", "chat_template_kwargs", "unheard_of"]


def nodes(value, path=()):
    """The paths of all values in a record."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*path, key))


def mutate(record, rng):
    """Changes one value or key of a record."""
    if not record:
        return
    *way, last = rng.choice(list(nodes(record)))
    holder = record
    for key in way:
        holder = holder[key]
    change = rng.randrange(7)
    if change == 0:
        holder[last] = copy.deepcopy(rng.choice(ODD))
    elif change == 1:
        del holder[last]
    elif change == 2 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice([*ODD, *holder])))
    elif change == 3 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = holder.pop(last)
    elif change == 4 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
    elif change == 5:
        holder[last] = json.dumps(holder[last])
    elif change == 6:
        holder[last] = [holder[last]]


# ---- checks


def words(record):
    """({words that must be trained}, {words that must not be trained}) of a record without mutations."""
    said = WORD.findall(json.dumps(record))
    return tuple({word for word in said if word.endswith(kind)} for kind in ("tx", "ux"))


def words_of_messages(record):
    """The same for a mutated record, for messages that have a usual role, a string as content, and no flags."""
    wanted, unwanted = set(), set()
    chat = record.get("conversations") if record.get("messages") is None else record["messages"]
    for message in chat if isinstance(chat, list) else []:
        if isinstance(message, dict) and not {"train", "training", "weight"} & set(message):
            sharegpt = not {"role", "content"} & set(message)
            role, content = (message.get(name) for name in (("from", "value") if sharegpt else ("role", "content")))
            own, others = ("gpt", ("human", "system", "tool")) if sharegpt else ("assistant", ("user", "system", "tool"))
            if isinstance(content, str) and role in (own, *others):
                (wanted if role == own else unwanted).update(WORD.findall(content.split("</think>")[-1]))
    said = WORD.findall(json.dumps(record))
    return tuple({word for word in found if said.count(word) == 1} for found in (wanted, unwanted))


def check(task, record, mutated, recipe, template):
    """Returns an error, or None. Any refusal is accepted here; other tests check its reason."""
    try:
        lot = recipe.lot([Record("fuzz", 1, None, record, 100)])
    except DataError as error:
        return None if error.what and error.fix and str(error).count("\n  fix: ") == 1 else f"no fix: {error}"
    decode = recipe.tokenizer.hf.decode
    trained, text, begin = "", "", 0
    for length in lot.lengths:
        ids, mask = lot.tokens[begin:begin + length], lot.mask[begin:begin + length]
        begin += length
        if mask[0]:
            return "the first token is trained"
        text += decode(ids)
        trained += "\n".join(decode([i for i, _ in run]) for is_trained, run in itertools.groupby(zip(ids, mask), lambda pair: pair[1]) if is_trained)
    drafts, *_ = recipe._drafted(Record("fuzz", 1, None, record, 100))
    rendered = "".join(draft.text or "" for draft in drafts)
    if len(lot.lengths) == len(drafts) and drafts[0].is_chat and text != rendered:
        return f"the tokens are of another text: {text!r}, not {rendered!r}"
    if not len(lot.lengths) or mutated and task != "sft":
        return None
    if task == "prompts" and trained:
        return "a prompt is trained"
    wanted, unwanted = words_of_messages(record) if mutated else words(record)
    for word in wanted:
        if word not in trained:
            return f"{word} is not trained" if word in text else f"{word} is lost"
    for word in unwanted:
        if word in trained or word not in text:
            return f"{word} is {'trained' if word in trained else 'lost'}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    end, runs = time.monotonic() + options.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, ["<|im_start|><|im_end|><|eot|><|end|><|header|><s></s>"])
        tokenizer = Tokenizer(folder)
        for number in itertools.count() if options.only is None else [options.only]:
            if time.monotonic() > end:
                break
            rng = random.Random(number)
            template = random_template(rng.choice)
            tokenizer.hf.chat_template = template
            recipes = {task: prepare.Recipe(task, prepare.build_parser().parse_args(
                [task, "--input", "-", "--tokenizer", folder, "--out", "-"]), tokenizer) for task in ("sft", "pref", "pretrain", "prompts")}
            for _ in range(RECORDS):
                task, record = Writer(rng).record()
                mutations = rng.choice([0, 0, 1, 1, 2, 4])
                for _ in range(mutations):
                    mutate(record, rng)
                try:
                    wrong = check(task, record, mutations > 0, recipes[task], template)
                except Exception:
                    wrong = traceback.format_exc()
                runs += 1
                if wrong:
                    print(f"{task}\n{template}\n{json.dumps(record)}\nFAILED: {wrong}\nrepeat with --only {number}\n0 passed, 1 failed")
                    return 1
    print(f"stat::number_of_executed_units: {runs}\n1 passed, 0 failed")  # the format of libFuzzer
    return 0


if __name__ == "__main__":
    sys.exit(main())
