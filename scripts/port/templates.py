"""Chat templates with names. Most names mean the template of a model family's own tokenizer; data/templates contains the others."""

import json

from json_yaml import expect_object, parse_json

OURS = ("chatml", "llama3", "phi_3")  # the files of data/templates
OWN = {  # name -> parts of the names of the models whose tokenizer has this template
    "qwen": ("qwen",), "qwen_25": ("qwen2", "qwen-2"), "qwen25": ("qwen2",), "qwen2_5": ("qwen2",), "qwen3": ("qwen3",), "qwen3_nothink": ("qwen3",),
    "qwen3_nothinking": ("qwen3",), "qwen3_thinking": ("qwen3",), "llama3_2": ("llama-3.2",), "qwen2": ("qwen2",), "llama2": ("llama-2",), "mistral": ("mistral",), "mistral_v1": ("mistral",), "mistral_v2v3": ("mistral",),
    "mistral_v3_tekken": ("mistral",), "mistral_v7_tekken": ("mistral",), "phi": ("phi-3",), "phi_35": ("phi-3.5",), "phi_4": ("phi-4",), "phi4": ("phi-4",)}
THINKING = "a variable of the chat template: --chat_template_kwargs"
SAME = {"llama-3": "llama3", "llama3_1": "llama3", "phi3": "phi_3", "phi-3": "phi_3"}


def set_variables(t, *names):
    """Adds settings of a peer that have the name of a variable of the chat template to the variables."""
    given = [t.together[name] for name in names if t.has(name)]
    if given and t.task != "pretrain":
        said = expect_object(parse_json(t.flag("chat_template_kwargs", "{}"), "chat_template_kwargs"), "chat_template_kwargs")
        variables = said | {setting.name: setting.value.lower() == "true" for setting in given}
        t.set("chat_template_kwargs", json.dumps(variables), given[0].where)
    elif given:
        t.note(given[0].where, "plain text has no chat template")
    if t.get("enable_thinking") == "false":
        t.note(t.together["enable_thinking"].where, "empty thoughts are a part of the prompt; a record whose answer has thoughts is refused")


def name_template(t, name, where):
    """Sets the template that has this name in a peer."""
    name = SAME.get(name, name)
    model = t.flag("model", "").lower()
    if name == "jinja" and "tokenizer_chat_template" in t.flags or name.startswith("tokenizer_default_fallback_"):
        t.note(where, "the template is given as text" if name == "jinja" else "the tokenizer's own template is used, and a tokenizer without one is refused")
    elif name in ("tokenizer_default", "default"):
        t.note(where, "the tokenizer's own template is used")
    elif name in OURS:
        t.set("tokenizer_chat_template", name, where)
    elif name in OWN and any(part in model for part in OWN[name]):
        t.note(where, f"{name} is the tokenizer's own template of {t.flag('model')}, which is used")
    elif "{" in name:
        t.set("tokenizer_chat_template", name, where)
    else:
        t.refuse(f'{where} "{name}" is an unknown template\n  fix: --tokenizer_chat_template FILE, or the text of a template; the tokenizer\'s own template is used '
                 "without it")
