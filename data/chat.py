"""Renders chats with the tokenizer's chat template, and finds the spans of the rendered text that are trained."""

import difflib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from errors import DataError, GeneralError
from limits import Limits, checked_length
from messages import LOSS_FLAGS, REASONING, TRAIN_FLAGS

SENTINEL = "Sentinel7f3a9c51"  # rendered in place of a content; no template cuts or changes a plain word
BEGIN, END = "Begin7f3a9c51", "End7f3a9c51"  # rendered in place of generation marks
WORD = re.compile(r"Word(\d+)([a-z_]+)7f3a9c51")  # rendered in place of the texts of message N: content, reasoning, call, tools
EXAMPLE_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {SENTINEL: "x"}}}
EXAMPLE_TOOL = {"type": "function", "function": {"name": "Word0tools7f3a9c51", "description": "Word0tools7f3a9c51", "parameters": {
    "type": "object", "properties": {"Word0tools7f3a9c51": {"type": "string", "description": "Word0tools7f3a9c51"}}}}}
# Keys of a message in addition to its content. A template that names a key may render it.
OTHER_CONTENTS = {"image", "images", "image_url", "audio", "audios", "video", "videos", "files", "attachments", "documents", "refusal", "tools",
                  "functions", "function_calls"}
READ_KEYS = {"role", "content", "tool_calls", "tool_call_id", REASONING[0], *TRAIN_FLAGS, *LOSS_FLAGS, *OTHER_CONTENTS}  # others are counted

FEW = 2  # trained messages, which are found sooner by rendering the chat up to each than by a Reading of it
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")  # of published templates


class Span(NamedTuple):
    """A trained part of a text: the characters start .. content_end, and the first special token after them and before `limit`."""

    start: int
    content_end: int
    limit: int


class Unrenderable(Exception):
    """The template refuses these messages."""


class Form(NamedTuple):
    """The form of messages that a template expects."""

    parts: bool  # contents as lists of parts
    reasoning: str  # the template's name for reasoning content


class CallForm(NamedTuple):
    """The form of messages with tool calls that a template expects."""

    content: dict  # of a message without content
    is_wrapped: bool  # calls are {"type": "function", "function": ...}, also if the record has only the inner object
    is_text: bool  # arguments as JSON text


CALL_FORMS = [CallForm(content, is_wrapped, is_text) for is_text in (False, True) for is_wrapped in (False, True)
              for content in ({"content": ""}, {}, {"content": None})]


class ChatTemplate:
    """Renders messages. `variables` are the template's other inputs: "tools" (a list, or None) and any further ones.

    A template's inputs and the messages it shows are found by rendering short chats with a sentinel in each text, once for each kind of chat. `kind` is
    JSON: the variables, among them an empty list for any tools, and, to find the shown messages, an outline of them."""

    def __init__(self, hf_tokenizer, source):
        self.hf = hf_tokenizer
        self.source = source  # the directory or the flag that has given the template
        self.special_tokens = hf_tokenizer.special_tokens_map
        special = [token.content for token in hf_tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self.form = lru_cache(maxsize=64)(self._form)
        self.call_form = lru_cache(maxsize=64)(self._call_form)
        self.usual_turn = lru_cache(maxsize=64)(self._usual_turn)
        self.missing = lru_cache(maxsize=1024)(self._missing)
        self.compiled = lru_cache(maxsize=64)(self._compiled)
        self.refuse_disguised = lru_cache(maxsize=64)(self._refuse_disguised)
        self.limits = Limits()

    def prompt(self, messages, variables):
        """Returns the text that asks for an answer, and a list of omissions: "reasoning" for each message whose reasoning the template
        hides because turns follow, "content" for each message whose content it changes, and the name of each other key of a message that it does
        not read."""
        text = self._render_or_refuse(messages, variables, generation_prompt=True)
        lost, left_out = self._lost(messages, variables, text)
        refuse_lost(lost, messages)
        return text, left_out

    def conversation(self, messages, trained, variables):
        """Returns the whole chat as text, the spans of the messages with the indices `trained`, and the omissions, as prompt() does."""
        text = self._render_or_refuse(messages, variables)
        lost, left_out = self._lost(messages, variables, text)
        refuse_lost([word for word in lost if "content" not in word], messages)
        marks = self._marks(messages, variables, text) if has_generation_marks(self._template(variables)) else {}
        turns = Turns(lambda part, prompt: self._render(part, variables, prompt), messages, text, self.usual_turn(kind_of(variables)),
                      self.special, self._settled(messages, variables, text) if len(trained) > FEW else [])
        spans = [marks[i] if i in marks else turns.span(i) for i in trained]
        refuse_lost(lost, messages)
        return text, spans, left_out

    def _template(self, variables):
        try:
            return self.hf.get_chat_template(tools=variables["tools"])
        except ValueError:
            named = self.hf.chat_template or {}
            has, take = ((f"several chat templates ({', '.join(named)}), none of which is the default", "choose one of them") if named
                         else ("no chat template", "use the tokenizer of an instruct model"))
            raise DataError(f"contains a chat, but the tokenizer has {has}", f"{take}, or give --tokenizer_chat_template FILE") from None

    def _compiled(self, template):
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            with self.limits:
                return _compile_jinja_template(template)
        except Exception as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise GeneralError(f"the chat template of {self.source} does not compile: {problem}",
                               "correct it, or use another template with --tokenizer_chat_template FILE") from None

    def _render(self, messages, variables, generation_prompt=False):
        return self._rendered_as_given(self._formed(messages, variables), variables, generation_prompt)

    def _rendered_as_given(self, messages, variables, generation_prompt=False, change=str):
        """Returns the text, as apply_chat_template does, without its checks in each call. change: of the template."""
        from transformers.utils.chat_template_utils import render_jinja_template  # imported here, because that takes a second

        template = change(self._template(variables))
        self.compiled(template)
        variables = {**self.special_tokens, **variables}
        try:
            with self.limits:
                texts, _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=generation_prompt, **variables)
            return checked_length(texts[0])
        except DataError:  # beyond a limit
            raise
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
                            "correct the record, or use another template with --tokenizer_chat_template FILE") from None

    def _settled(self, messages, variables, text):
        """Returns how much of the text is settled by the messages before each one, and by all of them: the rendering of messages[:i] begins with
        text[:settled[i]]. Returns an empty list if more text follows the last message, or if the template cannot read a Reading."""
        reading = Reading(self._formed(messages, variables))
        variables = {**self.special_tokens, **variables, "messages": reading.messages(), "add_generation_prompt": False}
        try:
            with self.limits:
                for part in self.compiled(self._template(variables)).generate(variables):
                    reading.rendered += len(part)
        except Exception:  # as in _rendered_as_given
            return []
        return reading.settled if reading.settled[-1:] == [len(text)] == [reading.rendered] else []

    # ---- the template's inputs

    def _formed(self, messages, variables):
        """Returns the messages in the form that the template expects."""
        kind = kind_of(variables)
        form = self.form(kind)
        if not form.parts and not any("tool_calls" in message or REASONING[0] in message for message in messages):
            return messages
        return [self._formed_message(message, form, kind) for message in messages]

    def _formed_message(self, message, form, kind):
        if REASONING[0] in message:
            message = {form.reasoning if key == REASONING[0] else key: value for key, value in message.items()}
        if "tool_calls" in message:
            call_form = self.call_form(kind, "function" not in message["tool_calls"][0], bool(message.get("content")))
            message = with_calls(message, call_form)
        return in_parts(message) if form.parts else message

    def _form(self, kind):
        variables, question = json.loads(kind), {"role": "user", "content": "Hi"}

        def shows(*messages):
            try:
                return SENTINEL in self._rendered_as_given(messages, variables)
            except Unrenderable:
                return False

        answer = {"role": "assistant", "content": SENTINEL}
        parts = not shows(question, answer) and shows(in_parts(question), in_parts(answer))
        thinking = [{"role": "assistant", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [EXAMPLE_CALL]}]
        if parts:
            question, thinking = in_parts(question), map(in_parts, thinking)
        names = (name for message in thinking for name in REASONING if shows(question, {**message, name: SENTINEL}))
        return Form(parts, next(names, REASONING[0]))

    def _call_form(self, kind, is_flat, has_content):
        """Returns the first form of a message with tool calls whose arguments the template renders."""
        call = EXAMPLE_CALL["function"] if is_flat else EXAMPLE_CALL
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call], **({"content": "Hi"} if has_content else {})}]
        for form in CALL_FORMS:
            try:
                messages = [with_calls(message, form) if "tool_calls" in message else message for message in chat]
                messages = [in_parts(message) for message in messages] if self.form(kind).parts else messages
                text = self._rendered_as_given(messages, json.loads(kind))
            except Unrenderable:
                continue
            if SENTINEL in text and f"'{SENTINEL}'" not in text:  # not in the Python notation of an object
                return form
        return CALL_FORMS[0]

    # ---- the template's output

    def _lost(self, messages, variables, text):
        """Returns the outline's words for texts that the template does not render, and the omissions, as prompt() does."""
        outlined, said = outline(messages)
        missing = self.missing(kind_of({**variables, "messages": outlined}))
        if missing is None:  # the template refuses the outline, so the texts themselves are checked
            missing = [word for word, words in said.items() if not is_in(words, text)], 0
        template = self._template(variables)
        for message in messages:
            self.refuse_disguised(message["role"], kind_of(variables))
        unread = [key for message in messages if len(message) > 2 for key in message.keys() - READ_KEYS if message[key] and not names(template, key)]
        others = [f"Word{i}{name}7f3a9c51" for i, message in enumerate(messages) for name in message.keys() & OTHER_CONTENTS
                  if message[name] and not self._shows(messages, i, name, variables)]
        return [*missing[0], *others], ["reasoning"] * missing[1] + unread + ["content"] * (0 if missing[0] else changed_contents(messages, text))

    def _shows(self, messages, i, name, variables):
        """True if the chat is rendered differently, or not at all, without this key of message i."""
        without = {key: value for key, value in messages[i].items() if key != name}
        try:
            return self._render([*messages[:i], without, *messages[i + 1:]], variables) != self._render(messages, variables)
        except Unrenderable:
            return True

    def _missing(self, kind):
        """Returns the words of an outline that are missing in its text, without reasoning that is missing only because turns follow,
        and the number of such reasoning words. Returns None if the template refuses the outline."""
        variables = json.loads(kind)
        messages = variables.pop("messages")
        if variables["tools"] is not None:
            variables["tools"] = [EXAMPLE_TOOL]
        try:
            text = self._render(messages, variables)
            words = dict.fromkeys(match[0] for match in WORD.finditer(json.dumps([variables["tools"], messages])))
            shown, lost, left_out = {match[0] for match in WORD.finditer(text)}, [], 0
            for word in (word for word in words if word not in shown):
                i, what = WORD.fullmatch(word).groups()
                if what in ("reasoning", "thought") and word in self._render(messages[:int(i) + 1], variables):
                    left_out += 1
                else:
                    lost.append(word)
        except Unrenderable:
            return None
        return lost, left_out

    def _refuse_disguised(self, role, kind):
        """Refuses a role that the template renders exactly like the assistant or, if the role is not in ROLES, like the user."""
        variables, question = json.loads(kind), {"role": "user", "content": "Hi"}

        def shown(role):
            for chat in ([{"role": role, "content": SENTINEL}, question], [question, {"role": role, "content": SENTINEL}]):
                try:
                    yield self._render(chat, variables)
                except Unrenderable:
                    yield None

        if role in ("user", "assistant") or list(shown("user")) == list(shown("assistant")):
            return
        for other in ("assistant",) if role in ROLES else ("assistant", "user"):
            pairs = [(text, taken) for text, taken in zip(shown(role), shown(other)) if text is not None and SENTINEL in text]
            if pairs and all(text == taken for text, taken in pairs):
                raise DataError(f"has a message of the role {role!r}, which the chat template shows as the {other}'s",
                                f"write that role, or use a template for {role!r}: --tokenizer_chat_template FILE")

    def _marks(self, messages, variables, text):
        """Returns {index: span} of the assistant messages, for a template with {% generation %} marks."""
        pieces = re.split(f"({BEGIN}|{END})", self._rendered_as_given(self._formed(messages, variables), variables, change=with_words_as_marks))
        if "".join(pieces[::2]) != text:
            raise DataError("the chat template renders another text with words in place of its generation marks",
                            "put the marks outside of filters and of texts that the template changes")
        marks, ends = [], list(accumulate(map(len, pieces[::2])))  # of the pieces of the text
        for i, word in enumerate(pieces[1::2]):
            if word == BEGIN:
                start = ends[i]
            else:
                marks.append(Span(start, ends[i], ends[i]))
        assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(marks) != len(assistant):
            raise DataError(f"the chat template's generation marks are {len(marks)} for {len(assistant)} assistant messages",
                            "put the content and the end of turn of each assistant message, and nothing else, into one mark")
        return dict(zip(assistant, marks))

    def _usual_turn(self, kind):
        """Returns the texts before and after the content of an answer, found with one short chat: the generation prompt and the end of
        turn. The generation prompt is "" if there is none; the end of turn is None if the answer is not between them."""
        question, variables = [{"role": "user", "content": "Hi"}], json.loads(kind)
        try:
            asked, prompt = (self._render(question, variables, generation_prompt) for generation_prompt in (False, True))
            answered = self._render([*question, {"role": "assistant", "content": SENTINEL}], variables)
        except Unrenderable:
            return "", None
        if not prompt.startswith(asked):
            return "", None
        plain = prompt != asked and answered.startswith(prompt + SENTINEL)
        return prompt[len(asked):], answered[len(prompt + SENTINEL):] if plain else None


@lru_cache
def names(template, key):
    return re.search(rf"\b{re.escape(key)}\b", template) is not None


@lru_cache
def has_generation_marks(template):
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None


@lru_cache
def with_words_as_marks(template):
    """Returns a template that renders words in place of its generation marks, wherever they are. apply_chat_template finds a mark by the length of what the
    template has given out before it, which is too short inside of a macro."""
    macro = f"{{% macro generated7f3a9c51() %}}{BEGIN}{{{{ caller() }}}}{END}{{% endmacro %}}\n"  # the line break is trimmed
    for name, other in (("generation", "call generated7f3a9c51()"), ("endgeneration", "endcall")):
        template = re.sub(rf"(\{{%[-+]?\s*){name}(\s*[-+]?%\}})", rf"\g<1>{other}\g<2>", template)
    return macro + template


@lru_cache
def refuse_misspelled(role, template):
    """Refuses a misspelled role. Many templates render any role, so an "asistant" would silently not be trained. The template handles other
    unknown names."""
    near = difflib.get_close_matches(role.lower(), ROLES, 1, 0.8)
    if near and role not in ROLES and not re.search(f"""['"]{re.escape(role)}['"]""", template):
        raise DataError(f"has a message of the role {role!r}, which seems to be {near[0]!r} misspelled",
                        f"write {near[0]!r}; the known roles are {', '.join(ROLES)}, and those that the template names")


json_text = json.JSONEncoder(default=str).encode


def kind_of(variables):
    if len(variables) == 1:  # the common case; every rendering comes here
        return '{"tools": null}' if variables["tools"] is None else '{"tools": []}'
    return json_text(variables if variables["tools"] is None else {**variables, "tools": []})


def outline(messages):
    """Returns the messages with a word instead of each text, without parts that no template branches on, and {word: text}."""
    outlined, said = [], {}

    def word(i, what, text):
        if not text or text.isspace():
            return text
        said[f"Word{i}{what}7f3a9c51"] = text
        return f"Word{i}{what}7f3a9c51"

    for i, message in enumerate(messages):
        content = message.get("content")
        if content is not None and "</think>" in content:
            before, _, after = content.rpartition("</think>")
            thought = before.replace("<think>", "")
            content = f"<think>\n{word(i, 'thought', thought)}\n</think>\n\n{word(i, 'content', after)}"
        elif content is not None:
            content = word(i, "content", content)
        entry = {"role": message["role"], "content": content}
        if message.keys() - {"role", "content"}:
            entry |= {key: message[key] for key in ("name", "tool_call_id") if key in message}
            if REASONING[0] in message:
                entry[REASONING[0]] = word(i, "reasoning", message[REASONING[0]])
            if "tool_calls" in message:
                entry["tool_calls"] = [outlined_call(call, word(i, "call" + "s" * n, call.get("function", call)["name"]))
                                       for n, call in enumerate(message["tool_calls"])]
        if content is None:
            del entry["content"]
        outlined.append(entry)
    return outlined, said


def is_in(words, text):
    """True if a rendered text contains the words, as they are or as a JSON string."""
    return words.strip() in text or any(json.dumps(words, ensure_ascii=is_ascii)[1:-1] in text for is_ascii in (False, True))


def changed_contents(messages, text):
    """Returns the number of contents that a rendered text does not contain; contents with reasoning, which templates move, do not count."""
    count = at = 0
    for words in (message["content"].strip() for message in messages if message.get("content") and "</think>" not in message["content"]):
        found = text.find(words, at)  # usually in the order of the messages
        if found >= 0:
            at = found + len(words)
        else:
            count += not is_in(words, text)
    return count


def outlined_call(call, word):
    """Returns a call with a word instead of its arguments or, if it has none, instead of its name."""
    function = call.get("function", call)
    key = "arguments" if "arguments" in function else "parameters"
    given = function.get(key)
    replaced = {key: word if isinstance(given, str) else {word: "x"}} if given else {"name": word}
    return {**call, "function": {**function, **replaced}} if "function" in call else {**function, **replaced}


def in_parts(message):
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_calls(message, form):
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if form.is_text:
            function = {key: json.dumps(value, ensure_ascii=False) if key in ("arguments", "parameters") and not isinstance(value, str) else value
                        for key, value in function.items()}
        calls.append({**call, "function": function} if "function" in call else {"type": "function", "function": function} if form.is_wrapped else function)
    message = {**message, "tool_calls": calls}
    if not message.get("content"):
        message.pop("content", None)
        message |= form.content
    return message


def refuse_lost(lost, messages):
    """Refuses parts of a message, or of the record, that the template does not render."""
    if not lost:
        return
    number, what = WORD.fullmatch(lost[0]).groups()
    message, what = messages[int(number)], "reasoning" if what == "thought" else re.sub("^calls*$", "tool calls", what)
    if what == "tools":
        raise DataError("has tools, which the chat template does not render",
                         "leave 'tools' out, or use a template for tools: --tokenizer_chat_template FILE")
    fix = "leave it out, or use a template that shows it: --tokenizer_chat_template FILE"
    if what == "content" and message["role"] not in ROLES:
        fix = f"write one of the roles {', '.join(ROLES)}, {fix}"
    beside = " beside tool calls" if what == "content" and "tool_calls" in message else ""
    raise DataError(f"has {what}{beside} in a message of the role {message['role']!r}, which the chat template does not render", fix)


class Reading:
    """Notes how much of a text a template has rendered when it first reads each message, or finds that there are no more: the text up to there does not
    depend on that message and those after it."""

    def __init__(self, messages):
        self.all = messages
        self.rendered = 0  # characters
        self.settled = []

    def messages(self):
        return ReadMessages(self, 0)

    def read(self, i):
        self.settled += [self.rendered] * (i + 1 - len(self.settled))


class ReadMessages(Sequence):
    """The messages of a Reading from a first one on. Its names begin with _, which a template cannot use."""

    def __init__(self, reading, first):
        self._reading, self._first = reading, first

    def __bool__(self):
        self._reading.read(self._first)
        return self._first < len(self._reading.all)

    def __len__(self):
        self._reading.read(len(self._reading.all))
        return max(0, len(self._reading.all) - self._first)

    def __iter__(self):
        for i in range(self._first, len(self._reading.all)):
            self._reading.read(i)
            yield self._reading.all[i]
        self._reading.read(len(self._reading.all))

    def __getitem__(self, key):
        if isinstance(key, slice) and key.stop is key.step is None and (key.start or 0) >= 0:
            return ReadMessages(self._reading, self._first + (key.start or 0))
        if isinstance(key, int) and 0 <= key < len(self._reading.all) - self._first:
            self._reading.read(self._first + key)
            return self._reading.all[self._first + key]
        self._reading.read(len(self._reading.all))
        return self._reading.all[self._first:][key]


class Turns:
    """Finds the text of a trained message in a rendered chat. It uses the template only through render(messages, generation_prompt), usual_turn and
    `settled`, which may be empty; `special` is a pattern of the special tokens.

    There are four ways, of which the first needs no further rendering where `settled` shows that the rendering up to a message is a prefix of the
    whole chat's. 1. Usually a turn is the message's content, unchanged, between both parts of usual_turn.
    2. Otherwise the chat is rendered up to this turn. If this text is a prefix of the whole chat's, the turn is between the generation
    prompt and the end of the shorter text. 3. Templates that rewrite earlier turns (some drop the reasoning) break this. Then the whole
    chat is rendered with a sentinel in place of the content, and the turn is where both texts differ. In the ways 2 and 3 a sentinel also
    reveals text after the content within the turn. 4. Before the third: a tool call may end differently from a content, and reasoning may
    replace a part of the generation prompt; then the turn is the part of the rendering after the common prefix with the generation prompt."""

    def __init__(self, render, messages, text, usual_turn, special, settled):
        self.render = render
        self.messages = messages
        self.text = text
        self.usual_turn = usual_turn
        self.special = special
        self.settled = settled
        self.rendered = {}
        self.around = {}

    def span(self, i):
        span = self._settled_span(i) or self._plain_span(i) or self._span_in_prefix(i) or self._span_of_turn(i) or self._span_of_call(i) or self._span_in_whole(i)
        if span is None:
            role = self.messages[i]["role"]
            raise DataError(f"messages[{i}], the {role}'s, cannot be found in the rendered chat: the template rewrites it",
                            "use a template with {% generation %} marks: --tokenizer_chat_template FILE")
        return span

    def _settled_span(self, i):
        header, after = self.usual_turn
        if not self.settled or self.messages[i]["role"] != "assistant" or not header or after is None:
            return None
        begin, end = self.settled[i], self.settled[i + 1]  # a text that ends with the turn, and begins in the turn before it or behind that
        turn, plain = self.text[begin:end], f"{header}{self.messages[i].get('content') or ''}{after}"
        start = len(turn) - len(plain) if turn.endswith(plain) else turn.find(header) if turn.count(header) == 1 and turn.endswith(after) else -1
        start, content_end = begin + start + len(header), end - len(after)
        return Span(start, content_end, end) if begin + len(header) <= start <= content_end else None

    def _plain_span(self, i):
        content, end_of_turn = self.messages[i].get("content"), self._prefix(i + 1)
        header, after = self.usual_turn
        if self.messages[i]["role"] != "assistant" or not isinstance(content, str) or None in (after, end_of_turn):
            return None
        if not end_of_turn.endswith(header + content + after) or not self.text.startswith(end_of_turn):
            return None
        content_end = len(end_of_turn) - len(after)
        return Span(content_end - len(content), content_end, len(end_of_turn))

    def _span_in_prefix(self, i):
        end_of_turn = self._prefix(i + 1)
        if end_of_turn is None or not self.text.startswith(end_of_turn):
            return None
        before, after = self._around_sentinel(i, ())
        start = self._start(i, before)
        if None in (start, after) or not end_of_turn.endswith(after) or len(end_of_turn) - len(after) < start:
            return None
        return Span(start, len(end_of_turn) - len(after), len(end_of_turn))

    def _span_in_whole(self, i):
        before, rest = self._around_sentinel(i, self.messages[i + 1:])
        if before is None or not self.text.startswith(before) or not self.text.endswith(rest):
            return None
        start, content_end = self._start(i, before), len(self.text) - len(rest)
        if start is None or content_end < start:
            return None
        return Span(start, content_end, content_end + len(self._end_of_turn(i, rest)))

    def _span_of_turn(self, i):
        """Returns the span of a message with more than a content, if the renderings before and after this message are prefixes of the whole."""
        turn, says_more = self._prefix(i + 1), "tool_calls" in self.messages[i] or REASONING[0] in self.messages[i]
        if not says_more or turn is None or not self.text.startswith(turn):
            return None
        before, prompt = self._prefix(i), self._generation_prompt(i)
        if before is None or not turn.startswith(before):
            return None
        start = len(before) + len(self._shared(turn[len(before):], prompt[len(before):] if prompt and prompt.startswith(before) else ""))
        return self._ended_span(start, len(turn))

    def _span_of_call(self, i):
        """Returns the span of a tool call in a chat whose earlier renderings are not prefixes of the whole: the turn starts at the end of the
        previous one, and a sentinel instead of the called name shows its end."""
        if i == 0 or "tool_calls" not in self.messages[i]:
            return None
        call, *others = self.messages[i]["tool_calls"]
        named = {**call, "function": {**call["function"], "name": SENTINEL}} if "function" in call else {**call, "name": SENTINEL}
        message = {**self.messages[i], "tool_calls": [named, *others]}
        ends = [(self._try([*self.messages[:i], message, *following], False) or "").partition(SENTINEL)[2] for following in (self.messages[i + 1:], ())]
        _, rest = self._around_sentinel(i - 1, self.messages[i:])
        if rest is None or not all(ends) or not self.text.endswith(ends[0]) or not self.text.endswith(rest):
            return None
        start = len(self.text) - len(rest) + len(self._end_of_turn(i - 1, rest))
        start += len(self.usual_turn[0]) if self.text.startswith(self.usual_turn[0], start) else 0
        return self._ended_span(start, len(self.text) - len(ends[0]) + len(self._shared(*ends)))

    def _ended_span(self, start, end):
        """Returns the span of a turn between two positions of the text; special tokens at its end are end-of-turn tokens."""
        turn = self.text[start:end]
        ends = [match.start() for match in self.special.finditer(turn) if not self.special.sub("", turn[match.start():]).strip()]
        return Span(start, start + (ends[0] if ends else len(turn.rstrip())), end)

    def _end_of_turn(self, i, rest):
        """Returns the part of the text after a content that belongs to the turn: its common prefix with the text that would follow at the end of
        the chat, or before a generation prompt."""
        if i == len(self.messages) - 1:
            return rest
        header, usual_end = self.usual_turn
        _, after = self._around_sentinel(i, ())
        _, asked = self._around_sentinel(i, (), generation_prompt=True)
        ends = [after or usual_end or "", asked.removesuffix(header) if header and asked else ""]
        return max((self._shared(rest, end) for end in ends), key=len)

    def _shared(self, text, other):
        """Returns the common prefix of both, cut so that it does not end inside a special token."""
        shared = len(os.path.commonprefix([text, other]))
        cut = (match.start() for part in (text, other) for match in self.special.finditer(part) if match.start() < shared < match.end())
        return text[:min(cut, default=shared)]

    def _start(self, i, before_content):
        """Returns where the turn begins: after the generation prompt. If the template has none, or another one, the turn begins at the content
        and the spaces before it, which most tokenizers put into the first word's token."""
        prompt, header = self._generation_prompt(i), self.usual_turn[0]
        if prompt is not None and self.text.startswith(prompt) and (header and prompt.endswith(header) or prompt != self._prefix(i)):
            return len(prompt)
        return len(before_content.rstrip(" ")) if before_content is not None and self.text.startswith(before_content) else None

    def _generation_prompt(self, i):
        """Returns the rendering up to message i with the generation prompt, or None if there is none or the message is not the assistant's."""
        return self._prefix(i, generation_prompt=True) if self.messages[i]["role"] == "assistant" else None

    def _prefix(self, count, generation_prompt=False):
        """Returns the rendering of the first `count` messages alone, or None if the template refuses them."""
        if (count, generation_prompt) == (len(self.messages), False):
            return self.text
        return kept(self.rendered, (count, generation_prompt), lambda: self._try(self.messages[:count], generation_prompt) if count else None)

    def _around_sentinel(self, i, rest, generation_prompt=False):
        """Returns the text before and after the content of message i if `rest` follows it, or (None, None) if the content is not rendered.
        `rest` is empty, or all following messages."""
        def around():
            message = self.messages[i] if self.messages[i]["role"] != "assistant" else {"role": "assistant"}
            text = self._try([*self.messages[:i], {**message, "content": SENTINEL}, *rest], generation_prompt) or ""
            return tuple(text.split(SENTINEL)) if text.count(SENTINEL) == 1 else (None, None)

        return kept(self.around, (i, len(rest), generation_prompt), around)

    def _try(self, messages, generation_prompt):
        try:
            return self.render(messages, generation_prompt)
        except Unrenderable:
            return None


def kept(values, key, compute):
    """Returns the value of a key, of which only the last few are kept: in a long chat each is a long text."""
    if key not in values:
        values[key] = compute()
        if len(values) > 8:
            del values[next(iter(values))]
    return values[key]


def ending(ids, first, stop, tokenizer):
    """Returns the special token that ends ids[first:stop], ignoring white space after it, or None."""
    while stop > first and tokenizer.is_blank(ids[stop - 1]):
        stop -= 1
    return int(ids[stop - 1]) if stop > first and tokenizer.special[ids[stop - 1]] else None


def mark_targets(mask, span, ids, offsets, tokenizer):
    """Sets mask to 1 for the tokens of a span: tokens that are wholly inside it, and its end-of-turn tokens.

    offsets has the first character and the end of each token; if several tokens are bytes of one character, each has the whole character. A
    special token may swallow the white space after it, so only its beginning decides whether it is inside. Returns three booleans: whether a
    token straddles the start of the span, so that its first characters are not trained, whether a special token ends the span, and whether the
    content ends with that token as well."""
    special = tokenizer.special
    first = bisect_left(offsets, (span.start,))
    stop = bisect_left(offsets, (span.content_end,), first)
    while stop > first and offsets[stop - 1][1] > span.content_end:
        stop -= 1
    end = stop  # becomes the index of the end-of-turn token
    while end < len(ids) and offsets[end][0] < span.limit and not special[ids[end]]:
        end += 1
    is_ended = end < len(ids) and offsets[end][0] < span.limit
    last = end  # of several adjacent end-of-turn tokens
    while is_ended and last + 1 < len(ids) and special[ids[last + 1]] and offsets[last][1] == offsets[last + 1][0] < span.limit:
        last += 1
    mask[first:last + 1 if is_ended else stop] = 1
    straddles = first > 0 and offsets[first - 1][1] > span.start
    own_end = ending(ids, first, stop, tokenizer)
    return straddles, is_ended or own_end is not None, is_ended and own_end == ids[end]
