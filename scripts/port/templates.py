"""Chat templates that peers call by a name. Those of a family of models are their tokenizer's own; a few are here, in data/templates."""

OURS = ("chatml", "llama3", "phi_3")  # the files of data/templates
OWN = {  # their names, and a part of the names of models whose tokenizer has the template
    "qwen": ("qwen",), "qwen_25": ("qwen2", "qwen-2"), "qwen25": ("qwen2",), "qwen2_5": ("qwen2",), "qwen3": ("qwen3",), "qwen3_nothink": ("qwen3",),
    "qwen2": ("qwen2",), "llama2": ("llama-2",), "mistral": ("mistral",), "mistral_v1": ("mistral",), "mistral_v2v3": ("mistral",),
    "mistral_v3_tekken": ("mistral",), "mistral_v7_tekken": ("mistral",), "phi": ("phi-3",), "phi_35": ("phi-3.5",), "phi_4": ("phi-4",), "phi4": ("phi-4",)}
SAME = {"llama-3": "llama3", "llama3_1": "llama3", "phi3": "phi_3", "phi-3": "phi_3"}


def name_template(t, name, where):
    """Sets the template that a peer has under a name."""
    name = SAME.get(name, name)
    model = t.flag("model", "").lower()
    if name in ("tokenizer_default", "default"):
        t.note(where, "the tokenizer's template is used")
    elif name in OURS:
        t.set("tokenizer_chat_template", name, where)
    elif name in OWN and any(part in model for part in OWN[name]):
        t.note(where, f"{name} is the template of the tokenizer of {t.flag('model')}, which is used")
    elif "{" in name:
        t.set("tokenizer_chat_template", name, where)
    else:
        t.refuse(f'{where} "{name}" is a template that is not here\n  fix: --tokenizer_chat_template FILE, or the text of a template; the tokenizer\'s own is used '
                 "without it")
