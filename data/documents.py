"""Turns the fields of a record into a document, or the two of a pair, ready to be tokenised. The formats of records are known here, and
what is trained in each."""

from typing import Any, NamedTuple, Optional

import numpy as np

from chat import Span
from errors import DataError
from fields import field, has, integers, seen, string
from messages import as_messages, checked_messages, messages_of, system_message, template_variables, trained_messages
from records import json_kind

SFT_FORMATS = ("messages; conversations; prompt and completion; instruction, input and output; text; input_ids and labels; "
               "or the fields named by --input_key and --output_key")
PREF_FORMATS = ("chosen and rejected, both strings or both lists of messages, with their prompt in prompt or at the beginning of "
                "both, or the fields named by --prompt_key, --chosen_key and --rejected_key; margin, a number")
PRETRAIN_FORMATS = "text; input_ids; or the field named by --input_key"
PROMPT_FORMATS = "prompt; messages"
OPENRLHF_TEMPLATE = "User: {}\nAssistant: "
CHAT_FIELDS = ("A chat can have tools, system and chat_template_kwargs beside its messages; train, training or weight of a "
               "message says whether it is trained")


class Draft(NamedTuple):
    """A text with its trained spans (None: all of it is trained), or ready-made ids with their mask."""

    text: Optional[str] = None
    spans: Any = None
    is_chat: bool = False  # a template has rendered the text; to other texts BOS and EOS may be added
    ids: Optional[np.ndarray] = None
    mask: Optional[np.ndarray] = None


def sft_draft(fields, options, template):
    if options.input_key:
        return keyed_draft(fields, options, template)
    if has(fields, "messages") or has(fields, "conversations"):
        return chat_draft(messages_of(fields), 0, fields, options, template)
    if has(fields, "prompt") and has(fields, "completion"):
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            refuse_system(fields)
            return completion_draft(prompt, completion)
        prompt, completion = checked_messages(prompt, "prompt"), checked_messages(completion, "completion")
        return chat_draft(prompt + completion, len(prompt), fields, options, template)
    if has(fields, "instruction") and has(fields, "output"):
        return instruction_draft(fields, options, template)
    if has(fields, "text"):
        return Draft(string(fields, "text"))
    if has(fields, "input_ids") and has(fields, "labels"):
        return ids_draft(fields)
    raise missing(fields, SFT_FORMATS)


def pref_drafts(fields, options, template):
    """Returns the drafts of the chosen and of the rejected answer. Drafts without spans are texts whose prompt is what both begin with."""
    chosen, rejected = answer_of(fields, options.chosen_key), answer_of(fields, options.rejected_key)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{options.chosen_key!r} is a {json_kind(chosen)} and {options.rejected_key!r} a {json_kind(rejected)}",
                        "write both answers as strings, or both as lists of messages")
    prompt = field(fields, options.prompt_key, "--prompt_key") if options.prompt_key else fields.get("prompt")
    if options.apply_chat_template or not all(isinstance(part, str) for part in (chosen, "" if prompt is None else prompt)):
        return [final_answer_draft(with_prompt(prompt, fields[name], name, options), fields, options, template)
                for name in (options.chosen_key, options.rejected_key)]
    if not options.prompt_key:
        refuse_system(fields)
    if prompt is None:
        return [Draft(chosen), Draft(rejected)]
    if options.input_template:
        prompt = options.input_template.replace("{}", prompt, 1)
    return [completion_draft(prompt, text if text.strip() else "") for text in (chosen, rejected)]


def pretrain_draft(fields, options, template):
    if options.input_key:
        return Draft(string(fields, options.input_key))
    if has(fields, "text"):
        return Draft(string(fields, "text"))
    if has(fields, "input_ids"):
        return ids_draft(fields)
    raise missing(fields, PRETRAIN_FORMATS)


def prompts_draft(fields, options, template):
    if has(fields, "messages") or isinstance(fields.get("prompt"), list):
        name = "messages" if has(fields, "messages") else "prompt"
        messages = checked_messages(fields[name], name)
        if not options.chat_template:
            raise DataError("holds messages, and there is no chat template to render them with",
                            "give `prompt` strings, or a template: --tokenizer_chat_template FILE without --no_chat_template")
        if messages[-1]["role"] == "assistant":
            raise DataError("its last message is the assistant's, so there is nothing to answer",
                            "end it with the user's message")
    elif not has(fields, "prompt"):
        raise missing(fields, PROMPT_FORMATS)
    elif options.chat_template:
        messages = [{"role": "user", "content": string(fields, "prompt")}]
    else:
        refuse_system(fields)
        return Draft(string(fields, "prompt"), [])
    messages = system_message(fields, messages) + messages
    return Draft(template.prompt(messages, template_variables(fields, options)), [], is_chat=True)


def keyed_draft(fields, options, template):
    """Reads the fields that --input_key and --output_key name, as OpenRLHF does. Without an output_key the last message is the answer."""
    prompt = field(fields, options.input_key)
    answer = field(fields, options.output_key) if options.output_key else None
    if isinstance(prompt, str) and not options.apply_chat_template:
        if answer is None:
            raise DataError(f"there is no answer to the prompt in {options.input_key!r}",
                            "--output_key FIELD, or --apply_chat_template for a list of messages")
        return completion_draft(options.input_template.replace("{}", prompt, 1), string(fields, options.output_key))
    if answer is None:
        messages = checked_messages(prompt, options.input_key)
        first_trained = len(messages) - 1
    else:
        prompt = as_messages(prompt, "user", options.input_key)
        messages = prompt + as_messages(answer, "assistant", options.output_key)
        first_trained = len(prompt)
    return chat_draft(messages, 0 if options.multiturn else first_trained, fields, options, template)


def instruction_draft(fields, options, template):
    """Alpaca's instruction, input (which may be empty) and output: a chat if the tokenizer has a template, else as --input_template says."""
    context = fields.get("input")
    prompt = string(fields, "instruction") + (f"\n\n{string(fields, 'input')}" if context not in (None, "") else "")
    if not options.chat_template:
        refuse_system(fields)
        return completion_draft(options.input_template.replace("{}", prompt, 1), string(fields, "output"))
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": string(fields, "output")}]
    return chat_draft(messages, 0, fields, options, template)


def with_prompt(prompt, value, name, options):
    """Returns the messages of a chat that ends with an answer. If they do not begin with the assistant's, the prompt string is among them."""
    messages = as_messages(value, "assistant", name)
    if prompt is None and isinstance(value, str):
        raise DataError(f"{name!r} is a string without a prompt, which makes no chat",
                        "name the prompt with --prompt_key, or leave --apply_chat_template out")
    if isinstance(prompt, str) and messages[0]["role"] != "assistant":
        prompt = None
    if prompt is not None:
        messages = as_messages(prompt, "user", options.prompt_key or "prompt") + messages
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{name!r} ends with a message of the role {messages[-1]['role']}, not the assistant's",
                        f"end {name!r} with the answer")
    return messages


def final_answer_draft(messages, fields, options, template):
    """Returns a chat of which only the last message is trained, or an empty text if that message is empty."""
    content = messages[-1].get("content")
    if isinstance(content, str) and not content.strip() and not has(messages[-1], "tool_calls"):
        return Draft("", [])
    return rendered_draft(messages, [len(messages) - 1], fields, options, template)


def chat_draft(messages, first_trained, fields, options, template):
    """Returns a chat whose assistant messages from number first_trained on are trained, unless flags of messages say otherwise."""
    return rendered_draft(messages, trained_messages(messages, first_trained), fields, options, template)


def rendered_draft(messages, trained, fields, options, template):
    system = system_message(fields, messages)
    trained = [i + len(system) for i in trained]
    text, spans = template.conversation(system + messages, trained, template_variables(fields, options))
    return Draft(text, spans, is_chat=True)


def refuse_system(fields):
    if fields.get("system"):
        raise DataError("has a field 'system', and strings that no chat template is applied to",
                        "write them as messages, or put what is in 'system' into the prompt")


def completion_draft(prompt, completion):
    text = prompt + completion
    return Draft(text if completion else "", [Span(len(prompt), len(text), len(text))])


def ids_draft(fields):
    """A label stands beside its token, as in transformers: it is -100, or the same id. Without labels every token is trained."""
    ids = integers(fields, "input_ids")
    if not has(fields, "labels"):
        return Draft(ids=ids, mask=np.ones(len(ids), np.uint8))
    labels = integers(fields, "labels")
    if len(labels) != len(ids):
        raise DataError(f"has {len(ids)} input_ids but {len(labels)} labels",
                        "give one label for each id, -100 where it is no target")
    wrong = np.flatnonzero((labels != -100) & (labels != ids))
    if wrong.size:
        t = wrong[0]
        raise DataError(f"labels[{t}] is {labels[t]} but input_ids[{t}] is {ids[t]}",
                        "do not shift labels: each is -100 or the id beside it")
    return Draft(ids=ids, mask=(labels != -100).astype(np.uint8))


def answer_of(fields, name):
    if not has(fields, name):
        raise DataError(f"has no field {name!r}, so it is no pair of answers; it has {seen(fields)}",
                        "name the fields with --chosen_key and --rejected_key; records with one answer are for the task sft")
    return fields[name]


def margin_of(fields):
    """Returns by how much the chosen answer is better, or NaN if the record does not say. A cell of CSV is a string, and may be empty."""
    value = fields.get("margin")
    if value is None or value == "":
        return np.nan
    try:
        number = np.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise DataError(f"'margin' is {value!r}, not a finite number", "write 'margin' as a number, or leave it out, which means 0")
    return number


def missing(fields, accepted):
    if has(fields, "chosen") and has(fields, "rejected"):
        return DataError("is a pair of answers, chosen and rejected", "prepare it with the task pref")
    return DataError(f"has fields {seen(fields)}, none of which can be used", f"accepted are: {accepted}")


DRAFTS = {"sft": sft_draft, "pref": pref_drafts, "pretrain": pretrain_draft, "prompts": prompts_draft}
