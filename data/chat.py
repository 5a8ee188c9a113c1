"""Chats: rendered by the tokenizer's chat template, and the spans of the rendered text that are trained."""

import re
from typing import NamedTuple

import numpy as np

from errors import DataError

SENTINEL = "Sentinel7f3a9c51"  # stands in for a message's content; no template cuts or changes a plain word
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Span(NamedTuple):
    """Characters start .. content_end of a text are trained, and so is the first special token that follows them before limit."""

    start: int
    content_end: int
    limit: int


class Unrenderable(Exception):
    """The template refuses these messages."""


class ChatTemplate:
    def __init__(self, hf_tokenizer):
        self.hf = hf_tokenizer

    def prompt(self, messages, tools):
        return self._render_or_refuse(messages, tools, generation_prompt=True)

    def conversation(self, messages, tools, trained):
        """The whole chat as text and the spans of the assistant messages with the indices `trained`."""
        if GENERATION_MARK.search(self._template(tools)):
            return self._marked(messages, tools, trained)
        text = self._render_or_refuse(messages, tools)
        turns = Turns(lambda part, prompt: self._render(part, tools, prompt), messages, text)
        return text, [turns.span(i) for i in trained]

    def _template(self, tools):
        try:
            return self.hf.get_chat_template(tools=tools)
        except ValueError:
            raise DataError("holds a chat, and the tokenizer has no chat template",
                            "take the tokenizer of an instruct model, or give --tokenizer_chat_template FILE") from None

    def _render(self, messages, tools, generation_prompt=False):
        try:
            return self.hf.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt,
                                               chat_template=self._template(tools))
        except DataError:
            raise
        except Exception as error:  # a template is a program and can fail with anything
            raise Unrenderable(f"{error}") from None

    def _render_or_refuse(self, messages, tools, generation_prompt=False):
        try:
            return self._render(messages, tools, generation_prompt)
        except Unrenderable as error:
            roles = " ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses its messages: {error} (roles: {roles})",
                            "mend the record, or take another template with --tokenizer_chat_template FILE") from None

    def _marked(self, messages, tools, trained):
        """With a template that marks what the assistant writes by {% generation %}: the marks, one for each assistant message."""
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_or_refuse(messages, tools)
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        (text,), (marks,) = render_jinja_template([messages], tools, chat_template=self._template(tools),
                                                  return_assistant_tokens_mask=True, **self.hf.special_tokens_map)
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(assistant):
            raise DataError(f"the chat template's generation marks are {len(marks)} for {len(assistant)} assistant messages",
                            "put the content and the end of turn of each assistant message, and nothing else, into one mark")
        return text, [Span(start, end, end) for i, (start, end) in zip(assistant, marks) if i in trained]


class Turns:
    """Finds what an assistant writes in a rendered chat; render(messages, generation_prompt) is all it knows of the template.

    The chat is rendered with and without its last messages. Where the shorter text begins the longer one, a turn is what lies
    between the generation prompt and the end of the rendering that stops after this turn. Templates that rewrite earlier turns
    (they drop the reasoning, for instance) break that; then the whole chat is rendered with a sentinel in place of the content,
    and what differs is the turn. What follows the content in a turn is found with the sentinel in both cases."""

    def __init__(self, render, messages, text):
        self.render = render
        self.messages = messages
        self.text = text
        self.rendered = {(len(messages), False): text}

    def span(self, i):
        before, after = self._around_sentinel(self.messages[:i])
        start = self._start(i, before)
        end_of_turn = self._prefix(i + 1)
        if start is not None and after is not None and end_of_turn is not None:
            content_end = len(end_of_turn) - len(after)
            if self.text.startswith(end_of_turn) and end_of_turn.endswith(after) and content_end >= start:
                return Span(start, content_end, len(end_of_turn))
        before, rest = self._around_sentinel(self.messages[:i], self.messages[i + 1:])
        if before is not None and self.text.startswith(before) and self.text.endswith(rest):
            start, content_end = self._start(i, before), len(self.text) - len(rest)
            if start is not None and content_end >= start:
                turn_rest = after if after is not None and rest.startswith(after) else rest
                return Span(start, content_end, content_end + len(turn_rest))
        raise DataError(f"messages[{i}], the assistant's, cannot be found in the rendered chat: the template rewrites it",
                        "take a template with {% generation %} marks: --tokenizer_chat_template FILE")

    def _start(self, i, before_content):
        """Where the turn begins: after the generation prompt, or, where the template has none or another one, at the content and
        the spaces before it, which most tokenizers take into the first word's token."""
        prompt = self._prefix(i, generation_prompt=True)
        if prompt is not None and self.text.startswith(prompt) and prompt != self._prefix(i):
            return len(prompt)
        return len(before_content.rstrip(" ")) if before_content is not None and self.text.startswith(before_content) else None

    def _prefix(self, count, generation_prompt=False):
        """The rendering of the first messages alone, or None."""
        key = count, generation_prompt
        if key not in self.rendered:
            self.rendered[key] = self._try(self.messages[:count], generation_prompt) if count else None
        return self.rendered[key]

    def _around_sentinel(self, before, after=()):
        """What is rendered before and after the content of an assistant message between these; (None, None) if it gets lost."""
        text = self._try([*before, {"role": "assistant", "content": SENTINEL}, *after], False) or ""
        return tuple(text.split(SENTINEL)) if text.count(SENTINEL) == 1 else (None, None)

    def _try(self, messages, generation_prompt):
        try:
            return self.render(messages, generation_prompt)
        except Unrenderable:
            return None


def mark_targets(mask, span, ids, starts, ends, special):
    """Sets mask to 1 for the tokens of a span: those wholly inside it, and its end-of-turn token.

    A special token may swallow the white space after it, so for that one the place where it begins decides.
    True if a token straddles the start of the span, which leaves the first characters untrained."""
    first = np.searchsorted(starts, span.start)
    stop = np.searchsorted(starts, span.content_end)
    inside = slice(first, stop)
    mask[inside] |= ends[inside] <= span.content_end
    end_of_turn = np.flatnonzero(special[ids[first:]] & (ends[first:] > span.content_end) & (starts[first:] < span.limit))
    if end_of_turn.size:
        mask[first:first + end_of_turn[0] + 1] = 1
    return bool(first > 0 and ends[first - 1] > span.start)
