"""The messages of a chat, and the other fields about it: which messages are trained, the system message, the template's variables."""

from errors import DataError
from fields import has, json_field, seen
from records import json_kind

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TRAIN_FLAGS = ("train", "training", "weight")  # Axolotl's two names, and OpenAI's and ShareGPT's
# Names that a rendering sets by itself, and parameters of transformers' render_jinja_template.
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "conversations", "chat_template", "continue_final_message",
                      "return_assistant_tokens_mask")


def messages_of(fields):
    """`messages` of {role, content}, or ShareGPT's `conversations` of {from, value}."""
    if has(fields, "messages"):
        return checked_messages(fields["messages"], "messages")
    turns = fields["conversations"]
    if isinstance(turns, list) and all(isinstance(turn, dict) and "from" in turn and "value" in turn for turn in turns):
        turns = [{"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn["value"],
                  **{name: turn[name] for name in TRAIN_FLAGS if name in turn}} for turn in turns]
    return checked_messages(turns, "conversations")


def as_messages(value, role, name):
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return checked_messages([value] if isinstance(value, dict) else value, name)


def checked_messages(value, name):
    fix = f'write {name!r} as [{{"role": "user", "content": "..."}}, ...]'
    if not isinstance(value, list) or not value:
        raise DataError(f"{name!r} is {'an empty list' if value == [] else f'a {json_kind(value)}'}, not a list of messages", fix)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = seen(message) if isinstance(message, dict) else f"a {json_kind(message)}"
            raise DataError(f"{name}[{i}] is no message with a role; it has {found}", fix)
        if not has(message, "content") and not has(message, "tool_calls"):
            raise DataError(f"{name}[{i}] has no content; it has {seen(message)}", fix)
        check_train_flags(message, f"{name}[{i}]")
    return value


def check_train_flags(message, where):
    flags = [name for name in TRAIN_FLAGS if has(message, name)]
    for name in flags:
        value = message[name]
        if name == "weight" and value not in (0, 1):
            raise DataError(f"{where} has the weight {value!r}, neither 0 nor 1", "1 to train on the message, 0 not to")
        if name != "weight" and not isinstance(value, bool):
            raise DataError(f"{where} has {name} {value!r}, which is no boolean", "true to train on the message, false not to")
    if len({bool(message[name]) for name in flags}) > 1:
        raise DataError(f"{where} is to be trained and not to be trained: {' and '.join(flags)} differ", "leave one of them out")


def trained_messages(messages, first_trained):
    """Returns the indices of the trained messages: the assistant's from number first_trained on, unless a message's flag says otherwise."""
    def is_trained(i, message):
        flag = next((message[name] for name in TRAIN_FLAGS if has(message, name)), None)
        return flag if flag is not None else message["role"] == "assistant" and i >= first_trained

    return [i for i, message in enumerate(messages) if is_trained(i, message)]


def system_message(fields, messages):
    """Returns [the message in the field `system`], or [] without that field, for chats, pairs and prompts alike."""
    if fields.get("system") in (None, ""):
        return []
    system = fields["system"]
    if not isinstance(system, str):
        raise DataError(f"'system' is a {json_kind(system)}, not a string", "write 'system' as a string")
    if any(message["role"] == "system" for message in messages):
        raise DataError("has a field 'system' and a system message", "leave one of them out")
    return [{"role": "system", "content": system}]


def template_variables(fields, options):
    """Returns the template's inputs beside the messages: `tools`, and the variables of the flag and of the record, which win."""
    tools = json_field(fields, "tools", list, "write 'tools' as a list of objects, or as JSON text of one")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DataError(f"tools[{i}] is a {json_kind(tool)}, not an object", 'write a tool as {"type": "function", ...}')
    fix = 'write \'chat_template_kwargs\' as an object: {"enable_thinking": false}'
    own = json_field(fields, "chat_template_kwargs", dict, fix)
    own = {name: value for name, value in own.items() if value is not None}  # a table fills in null for keys that only other records have
    reserved = reserved_variable(own)
    if reserved:
        raise DataError(f"'chat_template_kwargs' sets {reserved!r}, which is no variable of its own",
                        f"leave {reserved!r} out there")
    return {"tools": tools or None, **options.chat_template_kwargs, **own}


def reserved_variable(variables):
    return next((name for name in variables if name in RESERVED_VARIABLES), None)
