"""Turns the fields of a record into one document, or two for a pair, ready to be tokenised. This file knows the record formats and the
trained parts of each."""

import json
import os
import re
from typing import Any, NamedTuple, Optional

import numpy as np

from chat import Span
from errors import DataError
from fields import a_kind, as_json, field, given, has, integers, is_mark, misspelled, parsed, refuse_mark, seen, string
from messages import LOSS_FLAGS, SYSTEM, TRAIN_FLAGS, as_messages, checked_messages, is_chat, system_message, template_variables, trained_messages

CHATS = ("messages", "conversations", "conversation")  # names of the field with a chat
SFT_FORMATS = ("messages; conversations; prompt and completion; instruction, input and output; question, query or problem, and answer, response or "
               "solution; text; input_ids and labels; "
               "or the fields named by --input_key and --output_key")
PREF_FORMATS = ("chosen and rejected, both strings or both lists of messages, with their prompt in prompt or at the beginning of "
                "both, or the fields named by --prompt_key, --chosen_key and --rejected_key; margin, a number")
UNPAIRED_FORMATS = ("label (or kto_tag), true for a desirable answer and false for an undesirable one, with prompt and completion, messages, conversations, or "
                    "instruction, input and output; or pairs as of pref, which become two answers")
PRETRAIN_FORMATS = "text; input_ids; or the field named by --input_key"
PROMPT_FORMATS = "prompt; messages; conversations"
RL_FORMATS = ("messages; conversations; prompt, question, query, problem, instruction or context_messages; and, if there is a right answer, "
              "ground_truth, answer, solution, label, completion or reward_model.ground_truth; or the fields named by --input_key and --output_key")
OPENRLHF_TEMPLATE = "User: {}\nAssistant: "
# Alpaca's prompts, with and without an input; their forms are Axolotl's types.
PREFACES = {True: "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that appropriately "
                  "completes the request.",
            False: "Below is an instruction that describes a task. Write a response that appropriately completes the request."}
ALPACA = {
    "alpaca": "{preface}\n\n### Instruction:\n{instruction}\n\n[### Input:\n{input}\n\n]### Response:\n",
    "alpaca:chat": "SYSTEM: {preface}\nUSER: {instruction}\n[{input}\n]ASSISTANT:",
    "alpaca:chatml": "<|im_start|>system\n{preface}<|im_end|>\n<|im_start|>user\n{instruction}[\n{input}]<|im_end|>\n<|im_start|>assistant\n",
}
CHAT_FIELDS = ("A chat can have tools, system and chat_template_kwargs beside its messages; train, training or weight of a "
               "message says whether it is trained")


class Draft(NamedTuple):
    """A text with its trained spans (None: all of it is trained), or ready-made ids with their mask."""

    text: Optional[str] = None
    spans: Any = None
    is_chat: bool = False  # the text is rendered by a template; other texts may get BOS and EOS
    ids: Optional[np.ndarray] = None
    mask: Optional[np.ndarray] = None
    left_out: Any = ()  # parts of messages that the template omits or changes, or that are missing, one entry each


# Names of fields that belong to a prompt or an answer. A record with such a field is refused if its document does not contain the field. Fields
# with other names are treated as notes on the record, and counted.
PROMPTS = {"prompt", "question", "query", "problem"}
ANSWERS = ("answer", "response", "solution", "output")
TARGET_MARKS = ("labels", "loss_mask", "completion_mask", "assistant_masks")  # beside input_ids; the last two are TRL's
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
QUESTIONS = ("prompt", "context_messages", "question", "query", "problem")  # the prompt in reinforcement learning: the first field that exists
LABELS = ("ground_truth", "answer", "final_answer", "solution", "label", "target", "response", "output", "answers")  # its right answer, likewise
# Two answers with a judgement: the names of the prompt, the answers and the judgement, and the values that prefer the first and the second answer.
# Any other value is a draw, and so is a zero if the sign decides.
SIGN = "below zero", "above zero"
JUDGED = (("prompt", "response_0", "response_1", "better_response_id", ("0", "1")),  # PKU-SafeRLHF
          ("context", "response1", "response2", "overall_preference", SIGN),  # HelpSteer3
          ("prompt", "response_1", "response_2", "preference_strength", SIGN),  # HelpSteer2's preferences
          (None, "conversation_a", "conversation_b", "winner", ("model_a", "model_b")),  # Chatbot Arena
          ("history", "human_ref_A", "human_ref_B", "labels", ("1", "0")),  # SHP
          ("question", "response_j", "response_k", None, ()),  # StackExchange's pairs, the better one first
          ("query", "response", "rejected_response", None, ()), (None, "messages", "rejected_messages", None, ()))  # ms-swift's pairs, likewise
WATCHED = {*PROMPTS, *CHATS, *SYSTEM, *MEDIA, "instruction", "input", "context", "history", "context_messages", "system_message", "documents",
           "tools", "functions", "reasoning", "reasoning_content", "thinking"}
KNOWN = (*sorted(WATCHED), "completion", *ANSWERS, "chosen", "rejected", "margin", "label", "kto_tag", "chat_template_kwargs", "input_ids")


def refuse_unseen(fields, drafts, is_named=False):
    """Refuses a record with a field that belongs to the prompt or the answer but is missing in the drafts. As in OpenRLHF, if flags name
    the fields, other fields with the same meaning are ignored."""
    if "context_messages" in fields.used:
        fields.used.add("context")  # OpenRLHF's prompts have both: a text, and its messages
    unused = fields.unused()
    for name in filter(is_mark, unused):
        refuse_mark(name, fields.get(name), f"write input_ids with labels, or mark messages by train (true, false); or leave {name!r} out")
    if "labels" in unused and isinstance(fields.get("labels"), list) and -100 in fields.get("labels"):
        raise DataError("has 'labels' beside a text or a chat, whose targets follow from its format", "write input_ids with labels alone, or leave 'labels' out")
    suspects = {name: known for name in unused if (known := misspelled(name, KNOWN)) and (known != name or name in WATCHED)
                and not (is_named and known in (*PROMPTS, "system"))}
    if not suspects or not all(draft.text for draft in drafts):
        return
    whole = one_line(" ".join(draft.text for draft in drafts))
    asked = one_line(" ".join(draft.text[:draft.spans[-1].start] if draft.spans else draft.text for draft in drafts))
    for name, known in suspects.items():
        if known in MEDIA:
            raise DataError(f"has {name!r}, and only text is trained on", f"leave {name!r} out, and the record too if its text is about them")
        rename = f"write {known!r}, if that is meant; " if known != name else ""
        value = fields[name] if known == name else fields.get(name)  # a misspelled field counts as unused
        texts, place = [one_line(text) for text in texts_in(parsed(value))], whole if known in CHATS else asked
        if not all(text in place for text in texts):
            raise DataError(f"has a field {name!r} that no part of the sample would contain; it has {seen(fields)}",
                            f"{rename}put {name!r} into the prompt or the messages, or leave it out; the fields of prompts and answers are named by "
                            "--input_key and --output_key, or --prompt_key, --chosen_key and --rejected_key")
        if known != name and not texts:
            raise DataError(f"has a field {name!r}, which seems to be {known!r} misspelled", f"write {known!r}, or leave {name!r} out")


def refuse_unknown_prompt(fields, chosen, rejected):
    """Without a prompt field, both answers begin with the prompt. Refuses a field longer than their common beginning: it may be the prompt."""
    shared = os.path.commonprefix([chosen, rejected])
    longer = [name for name in fields.unused() if name != "margin" and isinstance(fields.get(name), str) and len(fields.get(name)) > len(shared)]
    for name in longer:
        raise DataError(f"is a pair without a clear prompt: both answers begin only with {shared[:40]!r}, but {name!r} may be the prompt; it has {seen(fields)}",
                        f"--prompt_key {name}; or put the prompt into 'prompt', or leave {name!r} out")


def one_line(text):
    return " ".join(text.split())


def texts_in(value):
    """Yields the texts of a field; of messages only the contents, without the roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(parsed(part))
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("role", "from", "type"):
                yield from texts_in(part)


def sft_draft(fields, options, template):
    if not options.input_key:
        refuse_other_losses(fields)
    draft = keyed_draft(fields, options, template) if options.input_key else formed_draft(fields, options, template)
    refuse_unseen(fields, [draft], bool(options.input_key))
    return draft._replace(spans=None) if options.train_on_prompt else draft


def formed_draft(fields, options, template):
    """Returns the draft of a record; the record's fields determine its format."""
    name = chat_field(fields)
    if name:
        messages = checked_messages(fields[name], name)
        answer = next((other for other in ("completion", *ANSWERS) if fields.get(other) not in (None, "")), None)
        if answer and messages[-1]["role"] != "assistant":
            raise DataError(f"has {answer!r} beside a chat that ends with a message of the role {messages[-1]['role']}",
                            f"--input_key {name} --output_key {answer}; or make it the last message, or leave it out")
        return chat_draft(messages, 0, fields, options, template)
    if has(fields, "prompt") and has(fields, "completion"):
        prompt, completion = fields["prompt"], fields["completion"]
        if is_text(prompt) and is_text(completion) and not options.apply_chat_template:
            refuse_system(fields)
            return completion_draft(prompt, completion)
        messages, first_trained = joined(as_messages(prompt, "user", "prompt"), as_messages(completion, "assistant", "completion"), "completion")
        return chat_draft(messages, first_trained, fields, options, template)
    for context, answer in (("input", "output"), ("context", "response")):  # Alpaca's names, and Dolly's
        if has(fields, "instruction") and has(fields, answer):
            return instruction_draft(fields, context, answer, options, template)
    if has(fields, "text"):
        return Draft(string(fields, "text"))
    if has(fields, "input_ids") and any(has(fields, name) for name in TARGET_MARKS):
        return ids_draft(fields)
    asked = [name for name in (*sorted(PROMPTS), "instruction", "input") if has(fields, name)]
    said = [name for name in ANSWERS if has(fields, name)]
    if len(asked) == 1 and has(fields, "answers") and has(fields, "tools"):  # xlam: the answers are calls
        turns = [{"role": "user", "content": string(fields, asked[0])}, {"role": "function_call", "content": fields["answers"]}]
        return chat_draft(checked_messages(turns, "answers"), 0, fields, options, template)
    if len(asked) == len(said) == 1:  # gsm8k, dolly, OpenOrca and similar data sets
        return named_draft(fields, asked[0], said[0], options, template)
    raise missing(fields, SFT_FORMATS)


def unpaired_drafts(fields, options, template):
    """Returns the draft of a judged answer, or the two of a pair, which have no label of their own."""
    if has(fields, pair_keys(fields, options)[0]) or has(fields, "rejected_response") or judged_pair(fields) != (None, []):
        return pair_drafts(fields, options, template)
    name = chat_field(fields)
    if name and not has(fields, "completion"):
        messages = checked_messages(fields[name], name)
        if messages[-1]["role"] != "assistant":
            raise DataError(f"{name!r} ends with a message of the role {messages[-1]['role']}, so it has no answer that the label could judge",
                            "end it with the assistant's message")
        draft = final_answer_draft(messages, fields, options, template)
    elif options.prompt_key or options.input_template and has(fields, "completion"):
        draft = named_draft(fields, options.prompt_key or "prompt", "completion", options, template)
    else:
        draft = formed_draft(fields, options, template)
        draft = draft if has(fields, "completion") or not draft.spans else draft._replace(spans=draft.spans[-1:])
    if not draft.spans and (draft.text or draft.ids is not None):
        raise DataError(f"has no prompt beside the answer that is judged; it has {seen(fields)}", f"the supported formats are {UNPAIRED_FORMATS}")
    refuse_unseen(fields, [draft], bool(options.prompt_key))
    return [draft]


def label_of(fields):
    """Returns whether a record's answer is desirable. A CSV cell is a string."""
    name = next((name for name in ("label", "kto_tag") if has(fields, name)), None)
    if name is None:
        raise DataError(f"has no label, which says whether its answer is desirable, and is no pair of answers; it has {seen(fields)}",
                        "write 'label': true or false; answers without a judgement are for the task sft")
    label = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}.get(str(fields[name]).strip().lower())
    if label is None:
        raise DataError(f"{name!r} is {fields[name]!r}, neither true nor false", f"write {name!r} as true for a desirable answer, and false for an undesirable one")
    return label


def pref_drafts(fields, options, template):
    refuse_other_losses(fields)
    return pair_drafts(fields, options, template)


def pair_keys(fields, options):
    """Returns the names of the fields with the chosen and the rejected answer."""
    return [next((name for name in (key, f"{key}_response", f"{key}_messages") if has(fields, name)), key)
            for key in (options.chosen_key, options.rejected_key)]


def pair_drafts(fields, options, template):
    """Returns the drafts of the chosen and of the rejected answer, or none if neither is better. Drafts without spans are texts; their common
    beginning is the prompt."""
    split_swift_pair(fields)
    keys = pair_keys(fields, options)
    found, judged = judged_pair(fields) if not has(fields, keys[0]) else (None, keys)
    if judged is None:
        return []
    keys = judged or keys
    chosen, rejected = (answer_of(fields, key) for key in keys)
    if is_text(chosen) != is_text(rejected):
        raise DataError(f"{keys[0]!r} is {a_kind(chosen)} and {keys[1]!r} {a_kind(rejected)}",
                        "write both answers as strings, or both as lists of messages")
    prompt = field(fields, options.prompt_key, "--prompt_key") if options.prompt_key else given(fields, "prompt")
    name = options.prompt_key or "prompt"
    if prompt is None and chat_field(fields) and as_messages(chosen, "assistant", keys[0])[0]["role"] == "assistant":
        name = chat_field(fields)  # the format of LLaMA-Factory and Axolotl
        prompt = checked_messages(fields[name], name)
        prompt = None if prompt[-1]["role"] == "assistant" else prompt
    found = found or (None if prompt is not None else prompt_of_pair(fields, keys))
    if found:
        name, prompt = found, fields[found]
    if options.apply_chat_template or found and makes_chats(options) or not all(is_text(part) for part in (chosen, "" if prompt is None else prompt)):
        drafts = [final_answer_draft(with_prompt(prompt, name, fields[key], key), fields, options, template) for key in keys]
    else:
        if not options.prompt_key:
            refuse_system(fields)
        if prompt is None:
            refuse_unknown_prompt(fields, chosen, rejected)
            drafts = [Draft(chosen), Draft(rejected)]
        else:
            before = framed(prompt, options) if options.input_template else prompt
            drafts = [completion_draft(before, text if text.strip() else "") for text in (chosen, rejected)]
    refuse_unseen(fields, drafts, bool(options.prompt_key))
    return drafts


def split_swift_pair(fields):
    """Splits ms-swift's chat with another answer into prompt, chosen and rejected: `rejected_response` replaces all turns after the last user's."""
    if has(fields, "messages") and has(fields, "rejected_response"):
        messages = checked_messages(fields["messages"], "messages")
        asked = max((i + 1 for i, message in enumerate(messages) if message["role"] == "user"), default=0)
        fields.update(prompt=messages[:asked], chosen=messages[asked:], rejected=as_messages(fields["rejected_response"], "assistant", "rejected_response"))


def judged_pair(fields):
    """Returns the names of the prompt, of the better and of the worse answer; [] if a record has no two answers of known names, None if neither is
    better."""
    for prompt, first, second, name, better in JUDGED:
        if all(field is None or has(fields, field) for field in (prompt, first, second, name)):
            if name is None:
                return prompt, [first, second]
            judgement = str(fields[name]).strip()
            if better == SIGN:
                number = float(judgement) if re.fullmatch(r"[+-]?\d+(\.\d+)?", judgement) else 0
                judgement = better[number > 0] if number else ""
            if judgement not in better:
                return prompt, None
            return prompt, [first, second] if judgement == better[0] else [second, first]
    return None, []


def prompt_of_pair(fields, keys):
    """Returns the one field with the name of a prompt that is a string, if the answers do not begin with it; None if there is none, or several."""
    names = [name for name in ("question", "instruction", "query", "input") if isinstance(fields.get(name), str) and fields.get(name).strip()]
    starts = [fields[key] if is_text(fields[key]) else as_messages(fields[key], "assistant", key)[0] for key in keys]
    if len(names) != 1 or any(fields.get(names[0]) in start if isinstance(start, str) else start["role"] != "assistant" for start in starts):
        return None
    return names[0]


def pretrain_draft(fields, options, template):
    if options.input_key:
        return Draft(string(fields, options.input_key))
    if has(fields, "text"):
        return Draft(string(fields, "text"))
    if has(fields, "input_ids"):
        return ids_draft(fields)
    raise missing(fields, PRETRAIN_FORMATS)


def prompts_draft(fields, options, template):
    name = chat_field(fields) or "prompt"
    if name == "prompt" and not has(fields, name):
        raise missing(fields, PROMPT_FORMATS)
    if is_text(fields[name]) and not options.chat_template:
        refuse_system(fields)
        draft = Draft(string(fields, name), [])
    elif not options.chat_template:
        raise DataError("contains messages, but there is no chat template to render them with",
                        "give `prompt` strings, or a template: --tokenizer_chat_template FILE without --no_chat_template")
    else:
        draft = asked_draft(as_messages(fields[name], "user", name), fields, options, template)
    refuse_unseen(fields, [draft])
    return draft


def rl_draft(fields, options, template):
    """Returns a prompt and the correct answer as the trained text, or a prompt alone. The answer of a chat is its last message."""
    refuse_other_losses(fields)
    name = options.input_key or chat_field(fields) or next((name for name in QUESTIONS if has(fields, name)), None)
    if name is None or not has(fields, name) or has(fields, options.output_key or "completion"):
        if has(fields, "text"):
            raise missing(fields, RL_FORMATS)
        return sft_draft(fields, options, template)
    prompt, answer = fields[name], None if options.input_key else right_answer(fields)
    if is_text(prompt) and not makes_chats(options):
        before = framed(prompt, options) if options.input_template or name not in ("prompt", "context_messages") else prompt
        draft = Draft(before, []) if answer is None else completion_draft(before, answer)
    else:
        messages = as_messages(prompt, "user", name)
        if answer is not None and messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": answer})
        ends = messages[-1]["role"] == "assistant"
        draft = rendered_draft(messages, [len(messages) - 1], fields, options, template) if ends else asked_draft(messages, fields, options, template)
    refuse_unseen(fields, [draft], bool(options.input_key))
    return draft


def right_answer(fields):
    """Returns the text of the first field with the name of a right answer, or verl's, which is in an object; None without one, and for a chat that
    ends with its answer."""
    judge = parsed(fields.get("reward_model"))
    answer = judge.get("ground_truth") if isinstance(judge, dict) else None
    answer = None if answer == "" else answer
    name = "reward_model" if answer is not None else next((name for name in LABELS if fields.get(name) not in (None, "", [], {})), None)
    chat = chat_field(fields)
    if name is None or chat and checked_messages(fields.get(chat), chat)[-1]["role"] == "assistant":
        return None
    value = fields[name] if answer is None else answer
    fields.used.add(name)
    if is_chat(value):  # the answer as a message, or with messages before it
        last = as_messages(value, "assistant", name)[-1]
        if last["role"] != "assistant" or not isinstance(last.get("content"), str):
            raise DataError(f"{name!r} ends with no text of the assistant, so it is no right answer", f"write the answer itself as {name!r}")
        value = last["content"]
    return value if isinstance(value, str) else as_json(value)


def asked_draft(messages, fields, options, template):
    """Returns a chat that asks for an answer."""
    if messages[-1]["role"] == "assistant":
        raise DataError("its last message is the assistant's, so there is nothing to answer",
                        "end it with the user's message")
    messages = system_message(fields, messages) + messages
    text, left_out = template.prompt(messages, template_variables(fields, options))
    return Draft(text, [], is_chat=True, left_out=left_out)


def makes_chats(options):
    """True if string prompts and answers become chat turns: if the tokenizer has a template, and no input template is given."""
    return options.apply_chat_template or options.chat_template and not options.input_template


def keyed_draft(fields, options, template):
    """Reads the fields named by --input_key and --output_key, as in OpenRLHF. Without an output_key the last message is the answer."""
    return named_draft(fields, options.input_key, options.output_key, options, template)


def named_draft(fields, input_key, output_key, options, template):
    prompt = field(fields, input_key)
    answer = field(fields, output_key) if output_key else None
    if is_text(prompt) and answer is None and not options.apply_chat_template:
        raise DataError(f"there is no answer to the prompt in {input_key!r}",
                        "--output_key FIELD, or --apply_chat_template for a list of messages")
    if is_text(prompt) and not makes_chats(options):
        return completion_draft(framed(prompt, options), string(fields, output_key))
    if answer is None:
        messages = checked_messages(prompt, input_key)
        first_trained = len(messages) - 1
    else:
        earlier = earlier_turns(fields) if is_text(prompt) else []
        messages, first_trained = joined([*earlier, *as_messages(prompt, "user", input_key)], as_messages(answer, "assistant", output_key), output_key)
        first_trained = 0 if earlier and not options.input_key else first_trained
    return chat_draft(messages, 0 if options.multiturn else first_trained, fields, options, template)


def instruction_draft(fields, context_key, answer_key, options, template):
    """Converts Alpaca's instruction, input (may be empty) and output, and LLaMA-Factory's history of [question, answer]: to a chat if the
    tokenizer has a template, otherwise to a text with --input_template."""
    context = given(fields, context_key)
    prompt = string(fields, "instruction") + (f"\n\n{string(fields, context_key)}" if context not in (None, "") else "")
    fields.used.update(name for name in PROMPTS if isinstance(fields.get(name), str) and fields["instruction"] in fields[name])  # it contains the instruction
    if options.input_template in ALPACA:
        prompt = alpaca_prompt(options.input_template, fields["instruction"], context or "")
        return completion_draft(prompt, string(fields, answer_key))
    if options.input_template or not options.chat_template:
        refuse_system(fields)
        return completion_draft(framed(prompt, options), string(fields, answer_key))
    answer = {"role": "assistant", "content": string(fields, answer_key)}
    return chat_draft([*earlier_turns(fields), {"role": "user", "content": prompt}, answer], 0, fields, options, template)


def earlier_turns(fields):
    """Returns the messages of the field history, which is a list of [question, answer]."""
    turns = parsed(given(fields, "history")) or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and list(map(type, turn)) == [str, str] for turn in turns):
        raise DataError("has a 'history' that is not a list of questions with their answers", 'write it as [["question", "answer"], ...]')
    return [message for asked, said in turns for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})]


def framed(prompt, options):
    """Returns a prompt string inserted into --input_template."""
    template = options.input_template or OPENRLHF_TEMPLATE
    return alpaca_prompt(template, prompt, "") if template in ALPACA else template.replace("{}", prompt, 1)


def alpaca_prompt(form, instruction, context):
    text, optional, rest = re.split(r"[\[\]]", ALPACA[form])
    text = text + (optional if context else "") + rest
    return re.sub(r"{(\w+)}", lambda name: {"preface": PREFACES[bool(context)], "instruction": instruction, "input": context}[name[1]], text)


def with_prompt(prompt, prompt_name, value, name):
    """Returns the messages of a chat that ends with an answer. If they do not begin with the assistant's, the prompt string is among them."""
    messages = as_messages(value, "assistant", name)
    if prompt is None and is_text(value):
        raise DataError(f"{name!r} is a string without a prompt, which makes no chat",
                        "name the prompt with --prompt_key, or leave --apply_chat_template out")
    if prompt is not None and is_text(prompt) and messages[0]["role"] != "assistant":
        prompt = None
    if prompt is not None:
        messages, _ = joined(as_messages(prompt, "user", prompt_name), messages, name)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{name!r} ends with a message of the role {messages[-1]['role']}, not the assistant's",
                        f"end {name!r} with the answer")
    return messages


def joined(prompt, answer, name):
    """Returns the messages of a prompt and its answer, and the index of the first one after the prompt. An answer that does not begin with the
    assistant's message may repeat the prompt, also after a system message of its own, or the end of the prompt."""
    if answer[0]["role"] not in ("system", "developer", "user"):
        return prompt + answer, len(prompt)
    for i in range(len(answer) - len(prompt) + 1):
        if answer[i:i + len(prompt)] == prompt:
            return answer, i + len(prompt)
    shared = next(n for n in range(len(prompt), -1, -1) if prompt[len(prompt) - n:] == answer[:n])
    if not shared and prompt[-1]["role"] == "user":
        raise DataError(f"{name!r} begins with a message of the role {answer[0]['role']}, after a prompt that ends with the user's",
                        f"begin {name!r} with the answer, or with all messages of the prompt")
    return prompt + answer[shared:], len(prompt)


def final_answer_draft(messages, fields, options, template):
    """Returns a chat of which only the last message is trained, or an empty text if that message is empty."""
    if is_empty(messages[-1]):
        return Draft("", [])
    return rendered_draft(messages, [len(messages) - 1], fields, options, template)


def chat_draft(messages, first_trained, fields, options, template):
    """Returns a chat whose assistant messages from number first_trained on are trained, unless flags of messages say otherwise."""
    left_out = next((name for message in messages for name in (*TRAIN_FLAGS, *LOSS_FLAGS) if not message.get(name, True)), None)
    if options.train_on_prompt and left_out:
        raise DataError(f"has a message with {left_out} false, and --train_on_prompt trains on all tokens", "leave one of them out")
    return rendered_draft(messages, trained_messages(messages, first_trained), fields, options, template)


def rendered_draft(messages, trained, fields, options, template):
    system = system_message(fields, messages)
    trained = [i + len(system) for i in trained]
    text, spans, left_out = template.conversation(system + messages, trained, template_variables(fields, options))
    empty = ["no text" for i in trained if is_empty((system + messages)[i])]
    return Draft(text, spans, is_chat=True, left_out=left_out + empty)


def is_empty(message):
    return not (message.get("content") or "").strip() and not has(message, "tool_calls")


def chat_field(fields):
    return next((name for name in CHATS if has(fields, name)), None)


def is_text(value):
    """True if a field is a plain string, not JSON text of messages."""
    return isinstance(value, str) and not is_chat(value)


def refuse_other_losses(fields):
    """Refuses records for other losses: single answers with a judgement (KTO), or answers judged step by step."""
    label = fields.get("label", fields.get("kto_tag"))
    judgements = ("true", "false", "0", "1") if has(fields, "completion") else ("true", "false") if chat_field(fields) else ()
    if str(label).lower() in judgements:
        raise DataError("is one answer with a judgement, which is a label true or false: unpaired data, as for KTO",
                        "learn from the label with dpo --loss_type kto (prepare.py unpaired); or keep the good answers, without the label")
    if isinstance(fields.get("completions"), list) and has(fields, "labels"):
        raise DataError("is an answer in steps with a label for each, as for a process reward model, which is not trained here",
                        "join the steps of the good answers into 'completion'")
    if has(fields, "text") and has(fields, "role"):
        raise DataError("is a single message of a conversation, with a role and a text", "join the messages of each conversation into 'messages'")


def refuse_system(fields):
    if fields.get("system"):
        raise DataError("has a field 'system', and strings that no chat template is applied to",
                        "write them as messages, or --apply_chat_template with the names of the fields, which makes messages of strings; or put the text of "
                        "'system' into the prompt")


def completion_draft(prompt, completion):
    text = prompt + completion
    return Draft(text if completion else "", [Span(len(prompt), len(text), len(text))])


def ids_draft(fields):
    """Reads ids with labels or masks. As in transformers, label i belongs to token i: -100, or the token's id. Without both all tokens are trained.
    Ids with the attention_mask 0 are padding and are left out."""
    ids = integers(fields, "input_ids")
    given = {name: integers(fields, name) for name in (*TARGET_MARKS, "attention_mask", "position_ids") if has(fields, name)}
    for name, values in given.items():
        if len(values) != len(ids):
            raise DataError(f"has {len(ids)} input_ids but {len(values)} {name}", f"give one value of {name} for each id")
        if name not in ("labels", "position_ids") and not np.isin(values, (0, 1)).all():
            raise DataError(f"{name} has the value {values.max()}, neither 0 nor 1", "write one document in each record; rows are packed here")
    labels = given.pop("labels", ids)
    wrong = np.flatnonzero((labels != -100) & (labels != ids))
    if wrong.size:
        t = wrong[0]
        raise DataError(f"labels[{t}] is {labels[t]} but input_ids[{t}] is {ids[t]}",
                        "do not shift labels: each is -100 or the id at the same position")
    attended = given.pop("attention_mask", np.ones_like(ids)) == 1
    if "position_ids" in given and (given.pop("position_ids")[attended] != np.arange(attended.sum())).any():
        raise DataError("'position_ids' do not count from 0 to the last id, as in a row of several documents",
                        "write one document in each record, without position_ids; rows are packed here")
    mask = np.logical_and.reduce([labels != -100, *given.values()])
    return Draft(ids=ids[attended], mask=mask[attended].astype(np.uint8))


def answer_of(fields, name):
    if not has(fields, name):
        raise DataError(f"has no field {name!r}, so it is not a pair of answers; it has {seen(fields)}",
                        "name the fields with --chosen_key and --rejected_key; records with one answer are for the task sft")
    return fields[name]


def margin_of(fields):
    """Returns the margin of the chosen answer, or NaN if the record has none. A CSV cell is a string, and may be empty."""
    value = given(fields, "margin")
    if value is None or value == "":
        return np.nan
    try:
        number = np.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise DataError(f"'margin' is {value!r}, not a finite number", "write 'margin' as a number, or leave it out, which means 0")
    return number


def columns_of(fields):
    """Returns a record's columns for reward functions, as a JSON object: all fields but chats and the prompt. If the prompt is a chat, `prompt` has its
    messages, as functions of TRL read them. The right answer may be a chat, too."""
    columns = {name: value for name, value in fields.items() if name not in ("prompt", "completion") and (name in LABELS or not is_chat(value))}
    name = next((name for name, value in fields.items() if name not in ("completion", *LABELS) and is_chat(value)), None)
    if name:
        messages = as_messages(fields.get(name), "user", name)
        columns["prompt"] = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    return json.dumps(columns, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))


def missing(fields, accepted):
    if has(fields, "chosen") and has(fields, "rejected"):
        return DataError("is a pair of answers, chosen and rejected", "train on it with dpo or rm (prepare.py pref)")
    if has(fields, "prompt"):
        return DataError(f"has a prompt and no answer; it has {seen(fields)}",
                         "name both with --input_key and --output_key; prompts alone are for grpo, ppo and generate (prepare.py rl, prompts)")
    return DataError(f"has fields {seen(fields)}, which match no supported format", f"the supported formats are {accepted}")


DRAFTS = {"sft": sft_draft, "rl": rl_draft, "pref": pref_drafts, "unpaired": unpaired_drafts, "pretrain": pretrain_draft, "prompts": prompts_draft}
