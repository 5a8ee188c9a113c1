"""Renders chats with the tokenizer's chat template, and finds the spans of the rendered text that are trained."""

import difflib
import json
import re
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from errors import DataError
from limits import BeyondLimit, Limits, checked_length

SENTINEL = "Sentinel7f3a9c51"  # stands in for a message's content; no template cuts or changes a plain word

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # that templates of published models know


class Span(NamedTuple):
    """A trained stretch of a text: the characters start .. content_end, and the first special token that follows them before `limit`."""

    start: int
    content_end: int
    limit: int


class Unrenderable(Exception):
    """The template refuses these messages."""


class ChatTemplate:
    """Renders messages. `variables` are the template's other inputs: "tools" (a list, or None) and any further ones."""

    def __init__(self, hf_tokenizer):
        self.hf = hf_tokenizer
        self.special_tokens = hf_tokenizer.special_tokens_map
        self.usual_turn = lru_cache(maxsize=64)(self._usual_turn)
        self.limits = Limits()

    def prompt(self, messages, variables):
        return self._render_or_refuse(without_none(messages), variables, generation_prompt=True)

    def conversation(self, messages, trained, variables):
        """The whole chat as text and the spans of the messages with the indices `trained`."""
        messages = without_none(messages)
        text = self._render_or_refuse(messages, variables)
        marks = self._marks(messages, variables) if has_generation_marks(self._template(variables)) else {}
        usual_turn = self.usual_turn(json.dumps({**variables, "tools": [] if variables["tools"] else None}, default=str))
        turns = Turns(lambda part, prompt: self._render(part, variables, prompt), messages, text, usual_turn)
        return text, [marks[i] if i in marks else turns.span(i) for i in trained]

    def _template(self, variables):
        try:
            return self.hf.get_chat_template(tools=variables["tools"])
        except ValueError:
            raise DataError("holds a chat, and the tokenizer has no chat template",
                            "take the tokenizer of an instruct model, or give --tokenizer_chat_template FILE") from None

    def _render(self, messages, variables, generation_prompt=False):
        return self._rendered(messages, variables, add_generation_prompt=generation_prompt)[0]

    def _rendered(self, messages, variables, **how):
        """Returns text and generation marks, as apply_chat_template does, without the checks that it makes in each call."""
        from transformers.utils.chat_template_utils import render_jinja_template  # imported here, because that takes a second

        template = self._template(variables)
        variables = {**self.special_tokens, **variables}
        try:
            with self.limits:
                texts, marks = render_jinja_template([messages], chat_template=template, **how, **variables)
            return checked_length(texts[0]), marks[0] if marks else []
        except BeyondLimit as limit:
            raise DataError(f"the chat template {limit}", "mend it, or take another template with --tokenizer_chat_template FILE") from None
        except Exception as error:  # a template is a program and can fail with anything
            raise Unrenderable(f"{error}") from None

    def _render_or_refuse(self, messages, variables, generation_prompt=False):
        for message in messages:
            refuse_misspelled(message["role"], self._template(variables))
        try:
            return self._render(messages, variables, generation_prompt)
        except Unrenderable as error:
            roles = " ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses its messages: {error} (roles: {roles})",
                            "mend the record, or take another template with --tokenizer_chat_template FILE") from None

    def _marks(self, messages, variables):
        """Returns {index: span} of the assistant messages, for a template that marks what the assistant writes by {% generation %}."""
        _, marks = self._rendered(messages, variables, return_assistant_tokens_mask=True)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(assistant):
            raise DataError(f"the chat template's generation marks are {len(marks)} for {len(assistant)} assistant messages",
                            "put the content and the end of turn of each assistant message, and nothing else, into one mark")
        return {i: Span(start, end, end) for i, (start, end) in zip(assistant, marks)}

    def _usual_turn(self, variables):
        """Returns what stands before and after the content of an answer, found with one short chat: the generation prompt and the end of
        turn. Returns None if the template puts anything else there. `variables` is JSON, in which an empty list stands for any tools."""
        question, variables = [{"role": "user", "content": "Hi"}], json.loads(variables)
        try:
            asked, prompt = (self._render(question, variables, generation_prompt) for generation_prompt in (False, True))
            answered = self._render([*question, {"role": "assistant", "content": SENTINEL}], variables)
        except Unrenderable:
            return None
        plain = prompt != asked and prompt.startswith(asked) and answered.startswith(prompt + SENTINEL)
        return (prompt[len(asked):], answered[len(prompt + SENTINEL):]) if plain else None


@lru_cache
def has_generation_marks(template):
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


@lru_cache
def refuse_misspelled(role, template):
    """Many templates render any role, so an "asistant" would be taken for somebody who is not trained. Other names that are not known
    are the template's business."""
    near = difflib.get_close_matches(role.lower(), ROLES, 1, 0.8)
    if near and role not in ROLES and not re.search(f"""['"]{re.escape(role)}['"]""", template):
        raise DataError(f"has a message of the role {role!r}, which seems to be {near[0]!r} misspelled",
                        f"write {near[0]!r}; the known roles are {', '.join(ROLES)}, and those that the template names")


def without_none(messages):
    """Removes keys whose value is None. Templates treat such a key as present, and tables fill in null for keys that only other records have."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


class Turns:
    """Finds in a rendered chat the text of a trained message. It knows the template only by render(messages, generation_prompt) and
    usual_turn.

    There are three ways, tried in this order. 1. Mostly a turn is the message's content, unchanged, between the two parts of usual_turn.
    2. Otherwise the chat is rendered up to this turn. If that text begins the text of the whole chat, the turn lies between the generation
    prompt and the end of the shorter text. 3. Templates that rewrite earlier turns (some drop the reasoning) break this. Then the whole
    chat is rendered with a sentinel in place of the content, and the turn is where the two texts differ. In the ways 2 and 3 a sentinel also
    tells what follows the content within the turn."""

    def __init__(self, render, messages, text, usual_turn):
        self.render = render
        self.messages = messages
        self.text = text
        self.usual_turn = usual_turn
        self.rendered = {(len(messages), False): text}

    def span(self, i):
        span = self._plain_span(i) or self._span_in_prefix(i) or self._span_in_whole(i)
        if span is None:
            role = self.messages[i]["role"]
            raise DataError(f"messages[{i}], the {role}'s, cannot be found in the rendered chat: the template rewrites it",
                            "take a template with {% generation %} marks: --tokenizer_chat_template FILE")
        return span

    def _plain_span(self, i):
        content, end_of_turn = self.messages[i].get("content"), self._prefix(i + 1)
        if self.messages[i]["role"] != "assistant" or not isinstance(content, str) or None in (self.usual_turn, end_of_turn):
            return None
        header, after = self.usual_turn
        if not end_of_turn.endswith(header + content + after) or not self.text.startswith(end_of_turn):
            return None
        content_end = len(end_of_turn) - len(after)
        return Span(content_end - len(content), content_end, len(end_of_turn))

    def _span_in_prefix(self, i):
        before, after = self._around_sentinel(i, ())
        start, end_of_turn = self._start(i, before), self._prefix(i + 1)
        if None in (start, after, end_of_turn):
            return None
        content_end = len(end_of_turn) - len(after)
        found = self.text.startswith(end_of_turn) and end_of_turn.endswith(after) and content_end >= start
        return Span(start, content_end, len(end_of_turn)) if found else None

    def _span_in_whole(self, i):
        before, rest = self._around_sentinel(i, self.messages[i + 1:])
        if before is None or not self.text.startswith(before) or not self.text.endswith(rest):
            return None
        start, content_end = self._start(i, before), len(self.text) - len(rest)
        if start is None or content_end < start:
            return None
        _, after = self._around_sentinel(i, ())
        turn_rest = after if after is not None and rest.startswith(after) else rest
        return Span(start, content_end, content_end + len(turn_rest))

    def _start(self, i, before_content):
        """Returns where the turn begins: after the generation prompt. If the template has none, or another one, the turn begins at the content
        and the spaces before it, which most tokenizers put into the first word's token."""
        prompt = self._generation_prompt(i)
        if prompt is not None and self.text.startswith(prompt) and prompt != self._prefix(i):
            return len(prompt)
        return len(before_content.rstrip(" ")) if before_content is not None and self.text.startswith(before_content) else None

    def _generation_prompt(self, i):
        """Returns the rendering that asks for message i, or None if there is none or the message is not the assistant's."""
        return self._prefix(i, generation_prompt=True) if self.messages[i]["role"] == "assistant" else None

    def _prefix(self, count, generation_prompt=False):
        """Returns the rendering of the first `count` messages alone, or None if the template refuses them."""
        key = count, generation_prompt
        if key not in self.rendered:
            self.rendered[key] = self._try(self.messages[:count], generation_prompt) if count else None
        return self.rendered[key]

    def _around_sentinel(self, i, rest):
        """Returns the text before and after the content of message i if `rest` follows it, or (None, None) if the content gets lost."""
        message = self.messages[i] if self.messages[i]["role"] != "assistant" else {"role": "assistant"}
        text = self._try([*self.messages[:i], {**message, "content": SENTINEL}, *rest], False) or ""
        return tuple(text.split(SENTINEL)) if text.count(SENTINEL) == 1 else (None, None)

    def _try(self, messages, generation_prompt):
        try:
            return self.render(messages, generation_prompt)
        except Unrenderable:
            return None


def mark_targets(mask, span, ids, offsets, special):
    """Sets mask to 1 for the tokens of a span: those that lie wholly inside it, and its end-of-turn token.

    offsets has the first character and the end of each token; if several tokens are bytes of one character, each has the whole character. A
    special token may swallow the white space after it, so only its beginning decides whether it is inside. Returns two booleans: whether a
    token straddles the start of the span, so that its first characters are not trained, and whether a special token ends the span."""
    first = bisect_left(offsets, (span.start,))
    stop = bisect_left(offsets, (span.content_end,), first)
    while stop > first and offsets[stop - 1][1] > span.content_end:
        stop -= 1
    end = stop  # becomes the index of the end-of-turn token
    while end < len(ids) and offsets[end][0] < span.limit and not special[ids[end]]:
        end += 1
    is_ended = end < len(ids) and offsets[end][0] < span.limit
    mask[first:end + 1 if is_ended else stop] = 1
    straddles = first > 0 and offsets[first - 1][1] > span.start
    return straddles, is_ended or stop > first and bool(special[ids[stop - 1]])
