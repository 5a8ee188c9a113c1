"""Normalises a record's messages, so that every chat template gets the same form: a list of {role, content}
with text contents, tool calls with their arguments as objects, reasoning under one name, and tools as transformers describes them."""


from errors import DataError
from fields import a_kind, as_json, has, is_mark, json_field, misspelled, parsed, refuse_mark, seen

# Role names of templates, of ShareGPT and derived data sets, and of OpenAssistant. Upper and lower case are equivalent.
ALIASES = {**{role: role for role in ("system", "developer", "user", "assistant", "tool")},
           "human": "user", "prompter": "user", "observation": "tool", "tool_response": "tool", "function_response": "tool", "function": "tool",
           **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "bot", "ai", "model"), "assistant")}
CALLING = ("function_call", "tool_call")  # roles whose text is the call itself
REASONING = ("reasoning_content", "reasoning", "thinking")  # synonyms; the first one is used internally
TEXT_PARTS = (None, "text", "input_text", "output_text")
SYSTEM = ("system", "system_prompt")
# Marks of a message: true or 1 trains it, false or 0 does not. Axolotl's two names, OpenAI's and ShareGPT's, and LLaMA-Factory's apply to messages of any
# role; those of ms-swift (2), LoongForge and slime only exclude messages of the assistant.
TRAIN_FLAGS = ("train", "training", "weight", "loss_weight")
LOSS_FLAGS = ("loss", "loss_scale", "loss_mask", "step_loss_mask")
KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", *REASONING, *TRAIN_FLAGS, *LOSS_FLAGS, "train_detail", "training_detail")
# Names set by a rendering, and parameters of transformers' render_jinja_template.
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "conversations", "chat_template", "continue_final_message",
                      "return_assistant_tokens_mask")


def is_chat(value):
    """True if a field contains messages: a list of them, possibly as JSON text, or a single one."""
    messages = parsed(value) if not isinstance(value, dict) else [value]
    return isinstance(messages, list) and bool(messages) and all(
        isinstance(turn, dict) and bool(turn.keys() & {"role", "from"}) and bool(turn.keys() & {"content", "value", "tool_calls"})
        for turn in map(parsed, messages))


def as_messages(value, role, name):
    """Returns the messages in a field. A plain text becomes a message of the given role."""
    if isinstance(value, str) and not is_chat(value):
        return [{"role": role, "content": value}]
    if not isinstance(value, (str, list, dict)):
        raise DataError(f"{name!r} is {a_kind(value)}, neither a string nor a list of messages", f"write {name!r} as a string")
    return checked_messages([value] if isinstance(value, dict) else value, name)


def checked_messages(value, name):
    value = parsed(value)
    fix = f'write {name!r} as [{{"role": "user", "content": "..."}}, ...]'
    if not isinstance(value, list) or not value:
        raise DataError(f"{name!r} is {'an empty list' if value == [] else a_kind(value)}, not a list of messages", fix)
    messages, turns = [], [parsed(turn) for turn in value]
    for i, turn in enumerate(turns):
        where = f"{name}[{i}]"
        message = checked_message(turn, where, fix)
        check_train_flags(message, where)
        if messages and is_call(turn) and is_call(turns[i - 1]):  # several calls at once
            messages[-1] = {**messages[-1], "tool_calls": messages[-1]["tool_calls"] + message["tool_calls"]}
        else:
            messages.append(message)
    return messages


def is_call(turn):
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) in CALLING


def checked_message(turn, where, fix):
    """Returns a message as templates expect it, without keys whose value is null: templates treat such a key as present."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise DataError(f"{where} is not a message with a role; it has {seen(turn) if isinstance(turn, dict) else a_kind(turn)}", fix)
    message = {key: value for key, value in turn.items() if value is not None and key not in ("from", "value")}
    message["role"] = ALIASES.get(role.lower(), role)
    if has(turn, "value"):
        if message.setdefault("content", turn["value"]) != turn["value"]:
            raise DataError(f"{where} has a content and another value", "leave one of them out")
    if role in CALLING:
        message |= {"role": "assistant", "tool_calls": tool_calls(message.pop("content", None), where)}
    elif not isinstance(message.get("content", ""), str):
        message |= text_of(message["content"], message["role"], where)
    if "function_call" in message:  # OpenAI's name for a single call
        message["tool_calls"] = [message.pop("function_call")]
    if "tool_calls" in message:
        message["tool_calls"] = tool_calls(message["tool_calls"], where)
        if not message["tool_calls"]:
            del message["tool_calls"]
    if "content" not in message and "tool_calls" not in message and "function_calls" not in message:
        null = "; its content is null" if "content" in turn or "value" in turn else f"; it has {seen(turn)}"
        raise DataError(f"{where} has no content{null}", fix)
    return with_one_reasoning(message, where) if any(name in message for name in REASONING) else message


def text_of(content, role, where):
    """Returns the content, and any reasoning and calls, of a message whose content is a list of parts or a tool's result."""
    parts = content if isinstance(content, list) else [content]
    is_parts = all(isinstance(part, str) or isinstance(part, dict) and ("type" in part or part.keys() == {"text"}) for part in parts)
    if role == "tool" and not (is_parts and parts):
        return {"content": as_json(content)}
    if not is_parts:
        raise DataError(f"{where} has a content that is {a_kind(content)}, not a string", "write it as a string, or as a list of text parts")
    texts, reasoning, calls = [], [], []
    for part in parts:
        part = {"text": part} if isinstance(part, str) else part
        kind, value = part.get("type"), part.get("text", part.get("value"))
        if kind in ("thinking", "reasoning"):
            value = part.get(kind, value)
            reasoning.append(value if isinstance(value, str) else text_of(value, role, where)["content"])
        elif kind in TEXT_PARTS and isinstance(value, str):
            texts.append(value)
        elif kind == "tool_call" and value is not None:
            calls.append(value)
        else:
            raise DataError(f"{where} has a part of the type {kind!r}{'' if kind not in TEXT_PARTS else ' that has no text'}",
                            'only text is trained on: {"type": "text", "text": "..."}')
    return {"content": "".join(texts), **({REASONING[0]: "".join(reasoning)} if reasoning else {}), **({"tool_calls": calls} if calls else {})}


def with_one_reasoning(message, where):
    given = {name: message[name] for name in REASONING if name in message}
    texts = {value for value in given.values() if isinstance(value, str)}
    if len(texts) != 1 or not all(isinstance(value, str) for value in given.values()):
        raise DataError(f"{where} has {' and '.join(given)}, which {'differ' if len(texts) > 1 else 'is not a string'}",
                        f"write the assistant's reasoning as the string {REASONING[0]!r}")
    text = texts.pop()
    if text and (message.get("content") or "").lstrip().startswith("<think>"):
        raise DataError(f"{where} has {' and '.join(given)}, and a content that begins with <think>", "leave one of them out")
    return {**{key: value for key, value in message.items() if key not in REASONING}, **({REASONING[0]: text} if text else {})}


def tool_calls(value, where):
    """Returns calls as objects with arguments as objects; any of these may be given as JSON text."""
    fix = 'write a call as {"type": "function", "function": {"name": "...", "arguments": {...}}}'
    value = parsed(value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = parsed(call)
        function = parsed(call.get("function", call)) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where} calls a tool by {a_kind(call)}{' without a name' if isinstance(call, dict) else ''}", fix)
        key = "arguments" if "arguments" in function or "parameters" not in function else "parameters"
        if key in function:
            function = {**function, key: {} if function[key] in ("", None, []) else parsed(function[key])}
        calls.append({**call, "function": function} if "function" in call else function)
    return calls


def check_train_flags(message, where):
    if len(message) < 3:  # a role and a content
        return
    flags = [name for name in (*TRAIN_FLAGS, *LOSS_FLAGS) if has(message, name)]
    for name in flags:
        if message[name] not in (0, 1):
            raise DataError(f"{where} has {name} {message[name]!r}, neither true (1) nor false (0)", "set it to true to train on the message, to false not to")
    for name in ("train_detail", "training_detail"):  # Axolotl's
        if message.get(name):
            raise DataError(f"{where} has {name}, which trains parts of a content", f"leave {name} out, or write input_ids with labels")
    for name in message.keys() - KNOWN:
        if is_mark(name):
            refuse_mark(name, message[name], f"mark the message by train (true, false), or leave {name!r} out", where + " ")
        if known := misspelled(name, KNOWN):
            raise DataError(f"{where} has {name!r}, which seems to be {known!r} misspelled", f"write {known!r}, or leave {name!r} out")
    if len({bool(message[name]) for name in flags}) > 1:
        raise DataError(f"{where} is to be trained and not to be trained: {' and '.join(flags)} differ", "leave one of them out")


def trained_messages(messages, first_trained):
    """Returns the indices of the trained messages: the assistant's from number first_trained on, unless a message's flag says otherwise."""
    def is_trained(i, message):
        flag = next((message[name] for name in TRAIN_FLAGS if has(message, name)), None) if len(message) > 2 else None
        if flag is not None:
            return flag
        return message["role"] == "assistant" and i >= first_trained and all(message[name] for name in LOSS_FLAGS if has(message, name))

    return [i for i, message in enumerate(messages) if is_trained(i, message)]


def system_message(fields, messages):
    """Returns [the message in the field `system`, or OpenOrca's `system_prompt`], or [] without it, for chats, pairs and prompts alike."""
    name = next((name for name in SYSTEM if fields.get(name) not in (None, "")), None)
    has_own = any(message["role"] == "system" for message in messages)
    if name is None or has_own and name != "system":
        return []
    system = fields[name]
    if not isinstance(system, str):
        raise DataError(f"{name!r} is {a_kind(system)}, not a string", f"write {name!r} as a string")
    if has_own:
        raise DataError("has a field 'system' and a system message", "leave one of them out")
    return [{"role": "system", "content": system}]


def template_variables(fields, options):
    """Returns the template's inputs besides the messages: `tools`, and the variables of the flag and of the record, which take precedence."""
    tools = tools_of(fields, "tools") or tools_of(fields, "functions")
    if options.tools:
        if tools:
            raise DataError("has tools of its own, and the file of --environment has others", "leave 'tools' out")
        tools = schemas_for(options.tools, fields)
        fields.used.add("environment")
    fix = 'write \'chat_template_kwargs\' as an object: {"enable_thinking": false}'
    own = json_field(fields, "chat_template_kwargs", dict, fix)
    own = {name: value for name, value in own.items() if value is not None}
    reserved = reserved_variable(own)
    if reserved:
        raise DataError(f"'chat_template_kwargs' sets {reserved!r}, which is a reserved name",
                        f"leave {reserved!r} out there")
    return {"tools": tools or None, **options.chat_template_kwargs, **own}


def tools_of(fields, name):
    """Returns tools as {"type": "function", "function": {...}}; any part may be given as JSON text."""
    if fields.get(name) is None:
        return []
    tools = []
    for i, tool in enumerate(json_field(fields, name, list, f"write {name!r} as a list of objects, or as JSON text of one")):
        tool = parsed(tool)
        if not isinstance(tool, dict):
            raise DataError(f"{name}[{i}] is {a_kind(tool)}, not an object", 'write a tool as {"type": "function", ...}')
        if "name" in tool and "function" not in tool and tool.get("type", "function") == "function":
            tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if "function" in tool:
            function = parsed(tool["function"])
            if isinstance(function, dict) and isinstance(function.get("parameters"), str):
                function = {**function, "parameters": parsed(function["parameters"])}
            tool = {**tool, "function": function}
        tools.append(tool)
    return tools


def schemas_for(schemas, fields):
    """Returns the tools of a record: those of --environment, or if it has several environments, of the one that the field `environment` names."""
    if isinstance(schemas, list):
        return schemas
    name = fields.get("environment")
    if not isinstance(name, str) or name not in schemas:
        raise DataError(f"has the environment {name!r}, but environment_factory has {', '.join(schemas)}", "name one of them in a field 'environment'")
    return schemas[name]


def reserved_variable(variables):
    return next((name for name in variables if name in RESERVED_VARIABLES), None)
