"""The command line of prepare.py."""

import argparse
import json
import os
import re
from pathlib import Path

from documents import (ALPACA, CHAT_FIELDS, DRAFTS, OPENRLHF_TEMPLATE, PREF_FORMATS, PRETRAIN_FORMATS, PROMPT_FORMATS, RL_FORMATS, SFT_FORMATS, UNPAIRED_FORMATS)
from messages import reserved_variable
from program import Parser
from sources import files_for


def boolean(text):
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def comma_list(text):
    return [name for name in text.split(",") if name]


def inputs(text):
    """Returns the names in a comma-separated list; a name with * is replaced by the matching files."""
    return [file for name in comma_list(text) for file in files_for(name)]


def whole_number(least, why):
    def number(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is {why}")
        return value

    return number


length = whole_number(2, "too short: a sample needs at least two tokens, one of which predicts the other")
count = whole_number(1, "less than one")
natural = whole_number(0, "negative")


def probabilities(text):
    """Parses numbers that add up to 1, except for rounding: 0.333,0.333,0.333."""
    values = [float(part) for part in text.split(",")]
    if not all(0 < value <= 1 for value in values) or round(sum(values), 2) != 1:
        raise argparse.ArgumentTypeError(f"{text} are not positive numbers that add up to 1")
    return values


def template_variables(text):
    try:
        variables = json.loads(text)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object: '{{\"enable_thinking\": false}}'")
    if reserved_variable(variables):
        raise argparse.ArgumentTypeError(f"{reserved_variable(variables)!r} is a reserved name")
    return variables


TEMPLATES = Path(__file__).resolve().parent / "templates"


def template_text(text):
    """Returns a Jinja template, given as text, as a file, or as the name of a template in data/templates."""
    if os.path.isfile(TEMPLATES / f"{text}.jinja"):  # false for a text that is too long for a name
        text = str(TEMPLATES / f"{text}.jinja")
    if not os.path.isfile(text):
        if "{" not in text:
            names = ", ".join(sorted(path.stem for path in TEMPLATES.iterdir()))
            raise argparse.ArgumentTypeError(f"{text!r} is neither a template nor a file, nor one of {names}")
        return text
    try:
        with open(text, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: is not UTF-8 text: {error}") from None


def input_template(text):
    if "{}" not in text and text not in (*ALPACA, "openrlhf"):
        raise argparse.ArgumentTypeError(f"{text!r} has no {{}} for the prompt, and is none of {', '.join(ALPACA)}, openrlhf")
    return OPENRLHF_TEMPLATE if text == "openrlhf" else text


FLAG = {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}  # --flag, --flag true, --flag false


TRAINERS_INPUTS = ("--data", "--eval_data", "--prompts")


def trainers_names(message, arguments):
    """Returns a message with the flags of the user's command: the trainer has other flags for inputs, and no --tokenizer."""
    names = [argument.partition("=")[0] for argument in map(snake_case, arguments)]
    called = next((name for name in names if name in TRAINERS_INPUTS), None)
    if called is None:
        return message
    for ours, theirs in (("--input", called), ("--tokenizer", "--model"), ("--out", "XDG_CACHE_HOME")):
        message = re.sub(rf"{ours}\b", theirs, message)
    return message


def add_common(parser, needs_input=True, takes_ids=False):
    parser.add_argument("--input", *TRAINERS_INPUTS, dest="input", metavar="FILE[,FILE]", required=needs_input, type=inputs,
                        help="JSON lines, JSON, CSV (also as .gz or .zst), parquet, token shards of llm.c (by extension; .bin), a directory of "
                             "them or of save_to_disk, or a hub data set OWNER/NAME, with :SUBSET, @DIRECTORY and [SPLIT], which may be a "
                             "slice, as in [train[:10%%]]; * in a name stands for any characters. The other names are those of the trainer")
    parser.add_argument("--dataset_probs", metavar="P,P,...", type=probabilities,
                        help="sampling probabilities of the inputs, which add up to 1: each record is drawn from a random input "
                             "(default: one input after the other)")
    parser.add_argument("--stopping_strategy", choices=["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"],
                        help="take the inputs in turn, or with --dataset_probs at random, until the first one, or every one, has been read; inputs that "
                             "end earlier are repeated, except without replacement (default with --dataset_probs: all_exhausted)")
    parser.add_argument("--seed", metavar="N", type=natural, default=42, help="seed of --dataset_probs (default 42)")
    parser.add_argument("--max_samples", metavar="N", type=count, help="use only the first N records of each input (default all)")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", metavar="DIR", help="Hugging Face directory with tokenizer.json, or OWNER/NAME[@REVISION] of the hub")
    if takes_ids:
        vocabulary.add_argument("--eos_token_id", metavar="N", type=natural,
                                help="for token shards, with --vocab_size instead of a tokenizer: id of the end-of-text token between texts")
        parser.add_argument("--vocab_size", metavar="N", type=count, help="with --eos_token_id: size of the vocabulary")
    parser.add_argument("--out", metavar="F.safetensors", help="output file; it may replace an earlier prepared file, but no other file")
    parser.add_argument("--key", metavar="KEY", nargs="?", const="",
                        help="print the hash of all inputs, the key of the trainer's cache, and exit; with KEY: "
                             "write nothing if the inputs' hash has changed by the end")
    parser.add_argument("--add_bos", choices=["auto", "always", "never"], default="auto",
                        help="BOS token before plain text; auto: as the tokenizer's default (default auto)")


def add_length(parser, default, choices):
    parser.add_argument("--max_len", type=length, default=2048, metavar="N", help="longest document in tokens (default 2048)")
    parser.add_argument("--truncation", choices=choices, default=default, help=f"treatment of longer documents (default {default})")
    parser.add_argument("--append_eos", default=True, **FLAG,
                        help="add the EOS token, which is a target, to plain text that lacks it (default true)")


def add_template(parser):
    parser.add_argument("--chat_template_kwargs", type=template_variables, default={}, metavar="JSON",
                        help="variables for the chat template, a JSON object; a record's chat_template_kwargs take precedence")
    parser.add_argument("--tokenizer_chat_template", type=template_text, metavar="FILE|TEXT|NAME",
                        help="chat template that replaces the tokenizer's: a file, Jinja text, or chatml, llama3 or phi_3")


def add_sft(sft):
    add_common(sft)
    add_length(sft, "drop", ["drop", "keep"])
    add_template(sft)
    sft.add_argument("--input_key", metavar="FIELD", help="field of the prompt: a string, or a list of messages")
    sft.add_argument("--output_key", metavar="FIELD", help="field of the answer: a string, a message or a list of messages")
    sft.add_argument("--input_template", metavar="TEXT", type=input_template,
                     help=f"text around a plain prompt, instead of a chat template, with {{}} for the prompt; openrlhf is {OPENRLHF_TEMPLATE!r}, "
                          "the default for a tokenizer without a chat template, and alpaca is Alpaca's text")
    sft.add_argument("--apply_chat_template", default=False, **FLAG,
                     help="render plain prompts and answers as chat turns, the default with a chat template unless "
                          "--input_template is given, or the fields are prompt and completion")
    sft.add_argument("--multiturn", default=False, **FLAG,
                     help="with --input_key: train on every assistant message, not only on the answer")


def build_parser(description=None):
    parser = Parser(prog="prepare.py", description=description, allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="|".join(DRAFTS), parser_class=Parser)
    # Values of the options that a task does not have as flags.
    parser.set_defaults(prompt=None, tokenizer_chat_template=None, input_key=None, input_template=None, append_eos=False, max_len=None,
                        truncation=None, chat_template=True, chat_template_kwargs={}, to_bin=None, train_on_prompt=False,
                        eos_token_id=None, vocab_size=None, environment=None, tools=None)

    for task, what, forms in (("sft", "chats, or prompts with completions", SFT_FORMATS),
                              ("rl", "prompts for answers of the model's own, with or without the right one", RL_FORMATS)):
        parser_of_task = tasks.add_parser(task, help=what, allow_abbrev=False, description=f"Fields: {forms}. {CHAT_FIELDS}.")
        add_sft(parser_of_task)
        if task == "rl":
            parser_of_task.add_argument("--environment", metavar="FILE.py", help="file with tools, which the chat template shows in each prompt (docs/rl.md#tools)")
        if task == "sft":
            parser_of_task.add_argument("--train_on_prompt", default=False, **FLAG,
                                        help="train on all tokens of a sample, not only on the answer or the assistant's messages")

    for task, what, forms in (("pref", "pairs of a better and a worse answer", PREF_FORMATS),
                              ("unpaired", "single answers, each judged desirable or undesirable", UNPAIRED_FORMATS)):
        pref = tasks.add_parser(task, help=what, allow_abbrev=False, description=f"Fields: {forms}. {CHAT_FIELDS}.")
        add_common(pref)
        add_length(pref, "drop", ["drop", "keep"])
        add_template(pref)
        pref.add_argument("--prompt_key", metavar="FIELD",
                          help="field of the prompt: a string, or a list of messages (default prompt, if present)")
        pref.add_argument("--chosen_key", metavar="FIELD", default="chosen", help="field of the better answer (default chosen)")
        pref.add_argument("--rejected_key", metavar="FIELD", default="rejected", help="field of the worse answer (default rejected)")
        pref.add_argument("--input_template", metavar="TEXT", type=input_template,
                          help="text around the prompt string where no chat template is applied (default nothing)")
        pref.add_argument("--apply_chat_template", default=False, **FLAG, help="turn prompt and answers that are strings into messages")

    pretrain = tasks.add_parser("pretrain", help="plain text", allow_abbrev=False, description=f"Fields: {PRETRAIN_FORMATS}.")
    add_common(pretrain, takes_ids=True)
    add_length(pretrain, "split", ["split", "drop", "keep"])
    pretrain.add_argument("--input_key", metavar="FIELD", help="field with the text")
    pretrain.add_argument("--to_bin", metavar="PREFIX", help="also write the tokens as shards of llm.c: PREFIX_000000.bin, ...")

    prompts = tasks.add_parser("prompts", help="prompts to generate from", allow_abbrev=False,
                               description=f"Fields: {PROMPT_FORMATS}. {CHAT_FIELDS}.")
    add_common(prompts, needs_input=False)
    add_template(prompts)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; can be given several times")
    prompts.add_argument("--no_chat_template", dest="chat_template", action="store_false",
                         help="treat prompts as plain text instead of rendering them as user messages by the tokenizer's chat template")
    return parser


def snake_case(argument):
    """Converts --max-len=5 to --max_len=5."""
    name, equals, value = argument.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else argument
