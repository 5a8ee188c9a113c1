"""The tools of an environment file in the form of TRL: functions with type hints and docstrings, and objects whose public methods are tools. Prompts show their schemas,
and an episode's turns call them, in one of the formats of published chat templates."""

import contextlib
import inspect
import json
import re
import sys
from typing import NamedTuple

from errors import DataError
from reward_worker import WrongAnswer, module_of, shown, where_of

DOCS = "docs/rl.md#tools describes them"
NO_TOOLS = ("reset", "get_reward")  # public methods of an environment for the trainer


# ---- schemas ------------------------------------------------------------------------------------------------------------------------------


class Toolbox:
    """The tools of a module. `schemas` has their descriptions, as chat templates render them: a list, or one for each name if environment_factory is a
    dictionary, from which the field `environment` of a record selects."""

    def __init__(self, module):
        if hasattr(module, "AgentInstance") or getattr(module, "Environment", None) not in (None, getattr(module, "environment_factory", None)):
            raise WrongAnswer("it defines tools beside a class that plays the episodes", "leave one of them out, or make the class the environment_factory")
        self.functions = getattr(module, "tools", None) or []
        if not isinstance(self.functions, (list, tuple)):
            raise WrongAnswer(f"tools is {shown(self.functions)}", "write a list of functions")
        factory = getattr(module, "environment_factory", None)
        self.has_names = isinstance(factory, dict)
        self.factories = factory if self.has_names else {} if factory is None else {None: factory}
        for name, make in self.factories.items():
            if not callable(make):
                raise WrongAnswer(f"environment_factory{f'[{name!r}]' if self.has_names else ''} is {shown(make)}, which cannot be called",
                                  "write a class, a function that makes an environment, or a dictionary of them")
        self.pools = {name: [make()] for name, make in self.factories.items()}  # an environment is made once, and reset for each episode
        own = {name: self._schemas(environment) for name, (environment,) in self.pools.items()}
        self.schemas = own if self.has_names else own[None] if own else self._schemas()
        if not all(own.values() if self.has_names else [self.schemas]):
            raise WrongAnswer("it has no tools", DOCS)

    def tools(self, environment=None):
        """Returns the functions, and those methods of an environment that are tools."""
        methods = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if name not in NO_TOOLS and not name.startswith("_")]
        return [*self.functions, *(getattr(environment, name) for name in methods if environment is not None)]

    def _schemas(self, environment=None):
        if environment is not None and not callable(getattr(environment, "reset", None)):
            raise WrongAnswer(f"the environment {shown(environment)} has no method reset", DOCS)
        schemas = [schema_of(tool) for tool in self.tools(environment)]
        names = [schema["function"]["name"] for schema in schemas]
        for name in names:
            if names.count(name) > 1:
                raise WrongAnswer(f"it has two tools with the name {name}", "rename one of them")
        return schemas


def schema_of(tool):
    from transformers.utils import get_json_schema  # imported here, because that takes a second
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    if not callable(tool) or not hasattr(tool, "__name__"):
        raise WrongAnswer(f"one of the tools is {shown(tool)}, which is no function", "write a list of functions")
    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise WrongAnswer(f"the tool {tool.__name__} has no schema: {' '.join(map(str, error.args))}",
                          "give each argument a type hint, and the function a docstring in Google's style that describes each argument") from None


def has_tools(module):
    return hasattr(module, "tools") or hasattr(module, "environment_factory")


def schemas_in(path):
    """Returns the schemas of a file's tools; None if it defines none."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = module_of(path)
            return Toolbox(module).schemas if has_tools(module) else None
    except WrongAnswer as error:
        raise DataError(f"{path}: {error.args[0]}", error.args[1]) from None
    except OSError:
        raise DataError(f"--environment {path}: no such file", "a Python file with tools or a class Environment (docs/rl.md#episodes)") from None
    except Exception as error:  # of the user's code
        raise DataError(f"{path}: {type(error).__name__}: {error}{where_of(error, path)}", "correct the file") from None


# ---- calls --------------------------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a tool. With an error it could not be read."""

    name: str = ""
    arguments: object = None
    error: str = ""


def of_json(text):
    """Reads {"name": ..., "arguments": {...}}, or a list of them."""
    try:
        return of_object(json.loads(text))
    except (ValueError, RecursionError) as error:
        return [Call(error=f"The call is no JSON: {error}")]


def of_object(value):
    if isinstance(value, list):
        return [call for part in value for call in of_object(part)]
    value = value.get("function", value) if isinstance(value, dict) else None
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return [Call(error='The call must be {"name": ..., "arguments": {...}}')]
    arguments = value.get("arguments", value.get("parameters"))
    arguments = {} if arguments is None else json.loads(arguments) if isinstance(arguments, str) else arguments
    return [Call(value["name"], arguments) if isinstance(arguments, dict) else Call(value["name"], error="The arguments must be an object")]


def hermes(text, types):
    """<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>, of Hermes, Qwen2.5, Qwen3, SmolLM3, EXAONE 4, MiMo"""
    return [call for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", text, re.S) for call in of_json(body)]


def qwen3_coder(text, types):
    """<tool_call><function=look><parameter=where>here</parameter></function></tool_call>, of Qwen3-Coder, Qwen3.5; Seed-OSS has another prefix"""
    calls = []
    for body in re.findall(r"<(?:seed:)?tool_call>(.*?)(?:</(?:seed:)?tool_call>|$)", text, re.S):
        if not (function := re.match(r"\s*<function=([^\n>]+)>(.*)</function>", body, re.S)):
            calls.append(Call(error="The call must be <function=...>...</function>"))
            continue
        name, rest = function[1], function[2]
        own = types.get(name, {})
        calls.append(Call(name, {key: typed(value, own.get(key)) for key, value in re.findall(r"<parameter=([^\n>]+)>\s*(.*?)\s*</parameter>", rest, re.S)}))
    return calls


def typed(text, kind):
    """Returns the value of a parameter, whose type the schema tells."""
    if kind == "string":
        return text
    try:
        return json.loads(text.lower() if text in ("True", "False") else "null" if text == "None" else text)
    except (ValueError, RecursionError):
        return text


def llama3(text, types):
    """{"name": "look", "parameters": {"where": "here"}}, with nothing before it but <|python_tag|>, of Llama 3.1 and 3.2"""
    text, calls = text.replace("<|python_tag|>", "", 1).strip(), []
    while re.match(r'\{\s*"(name|type|function)"', text):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, Call(error=f"The call is no JSON: {error}")]
        calls += of_object(value)
        text = text[end:].lstrip("; \n")
    return calls


def mistral(text, types):
    """[TOOL_CALLS] [{"name": "look", "arguments": {"where": "here"}}], or, of newer models, [TOOL_CALLS]look[ARGS]{"where": "here"}"""
    calls = []
    for body in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{.*)", body, re.S)
        calls += [call._replace(name=named[1]) for call in of_json(f'{{"name": "", "arguments": {named[2]}}}')] if named else of_json(body)
    return calls


def granite(text, types):
    """<|tool_call|>[{"name": "look", "arguments": {"where": "here"}}], of Granite 3 and Phi-4-mini"""
    return [call for body in re.findall(r"<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|$)", text, re.S) for call in of_json(body)]


def deepseek(text, types):
    """<｜tool▁call▁begin｜>function<｜tool▁sep｜>look, and the arguments as a block of json, of V3 and R1; of V3.1 <｜tool▁call▁begin｜>look<｜tool▁sep｜>{"where": "here"}"""
    calls = []
    for body in re.findall(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|$)", text, re.S):
        head, _, rest = body.partition("<｜tool▁sep｜>")
        named = re.match(r"\s*([\w.-]+)\s*```(?:json)?(.*?)(?:```|$)", rest, re.S)
        name, arguments = (named[1], named[2]) if named else (head.strip(), rest)
        calls += [call._replace(name=name) for call in of_json(f'{{"name": "", "arguments": {arguments}}}')]
    return calls


FORMATS = {read.__name__: read for read in (hermes, qwen3_coder, llama3, mistral, granite, deepseek)}


def before_calls(text):
    """Returns what a turn says before its first call, in any of the formats."""
    return re.split(r"^\s*(?:<\|python_tag\|>)?\s*\{|<(?:seed:)?tool_call>|<\|tool_call\|>|\[TOOL_CALLS\]|<｜tool▁calls?▁begin｜>", text)[0]


def types_of(schemas):
    """Returns the type of each parameter of each tool, for formats that do not tell it."""
    functions = [schema["function"] for schema in schemas]
    return {function["name"]: {key: value.get("type") for key, value in function["parameters"].get("properties", {}).items()} for function in functions}
