"""Translates flags of another trainer into this program's task and flags, with notes on their meaning and the problems that stop a run."""

import json
import os
import re
import shlex
from pathlib import Path

from errors import DataError
from json_yaml import read_object

from .reading import PortError, Setting
from .table import NESTED, OFF, find

TRAINING = ("pretrain", "sft", "dpo", "rm", "distill", "grpo", "ppo")
RL = ("grpo", "ppo")
PAIRS = ("dpo", "rm")
STEADY = ("dpo", "rm", "ppo")  # tasks whose trainers disable dropout unless disable_dropout is false
LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


class Translation:
    """The translation so far of a peer's settings. `own` describes this program: its name, and for each flag its tasks and type. With
    `whole` the command is the peer's, and has its defaults; else it is a command of this program with some of the peer's names."""

    def __init__(self, own, peer, task, settings, whole=True):
        self.own, self.peer, self.task, self.settings, self.whole = own, peer, task, settings, whole
        self.rows = peer.every_row()
        self.flags, self.together, self.notes, self.problems, self.strangers = {}, {}, {}, [], []  # flags: name -> Setting
        # Flags set only by defaults; flags given by the user; flags given on the command line with this program's names.
        self.by_default, self.given, self.said = set(), set(), set()

    # ---- for the modules of the peers

    def has(self, key):
        return key in self.together

    def get(self, key, otherwise=None):
        return self.together[key].value if self.has(key) else otherwise

    def flag(self, name, otherwise=None):
        return self.flags[name].value if name in self.flags else otherwise

    def set(self, flag, value, where, by_default=False):
        """Sets a flag of this program. Defaults never override a given flag, and a file never overrides a flag of this program on the command line."""
        values = [value] if isinstance(value, str) else value
        if flag in self.said and not where.startswith("--"):
            return
        if by_default and (not self.whole or flag in self.given or same_values(values, self.own["defaults"][self.task].get(flag))):
            return
        self.flags.pop(flag, None)  # keeps the order of the last settings
        self.flags[flag] = Setting(flag, values, where)
        (self.by_default.add if by_default else self.given.add)(flag)
        if not by_default:
            self.by_default.discard(flag)

    def note(self, where, text):
        self.notes.setdefault(text, [])
        if where and where not in self.notes[text]:
            self.notes[text].append(where)

    def refuse(self, text):
        if text not in self.problems:
            self.problems.append(text)

    def count(self, key, otherwise):
        text = self.get(key)
        if text is None:
            return otherwise
        text = text[:-2] if text.endswith(".0") else text
        if not re.fullmatch(r"[1-9]\d{0,8}", text):
            raise PortError(f'{self.together[key].where} "{text}" is not a whole number above 0\n  fix: give a whole number, such as 8')
        return int(text)

    def number(self, flag, otherwise):
        try:
            return int(float(self.flag(flag, otherwise)))
        except (ValueError, OverflowError):
            return otherwise  # the program itself reports the bad value

    def ranks(self):
        """Returns the number of data-parallel ranks, as far as it is known before the run: all ranks divided by ring_attn_size."""
        processes = self.count("processes", 1) if self.own["ranks"] == 1 else 1  # of accelerate or torchrun
        by_hand = str(self.flag("rank", "")).partition("/")[2]
        ranks = max(self.own["ranks"], self.number("ranks", processes), int(by_hand) if by_hand.isdecimal() else 1)
        return max(1, ranks // max(1, self.number("ring_attn_size", 1)))

    # ---- one setting

    def find(self, name, value):
        """Returns the row of the peer for a name; None if there is none, or if the name is a flag of this program without a row for the value."""
        if name in self.own["flags"] or name.split(".")[0] in NESTED and name.rpartition(".")[2] in self.own["flags"]:
            return next((row for one in (name, name.rpartition(".")[2]) for row in self.rows if one in row.names and row.holds_for(value)), None)
        return find(self.rows, name, value)

    def take(self, setting, by_default=False):
        name, value = setting.name, setting.value
        row = self.find(name, value)
        flag = name.rpartition(".")[2] if name.split(".")[0] in NESTED else name
        if row is None and flag in self.own["flags"]:
            if setting.where.startswith("--"):
                self.said.add(flag)
            return self.take_own(setting._replace(name=flag), by_default)
        if row is None and name.startswith("no_") and value == "true" and (name[3:] in self.own["flags"] or self.find(name[3:], "false")):
            return self.take(Setting(name[3:], ["false"], setting.where), by_default)
        off = value.lower() in OFF and not (row and row.values)
        if row:
            return self.answer(row, setting, off, by_default)
        if not self.find(name, "true"):
            return self.strangers.append(setting)
        if off:
            return self.note(setting.where, "false, as here")
        allowed = dict.fromkeys(value for row in self.rows if name in row.names for value in row.values)
        return self.refuse(f'{setting.where} "{value}" is not a value of this flag\n  fix: {", ".join([*allowed, "false"])}, or leave it out')

    def answer(self, row, setting, off, by_default):
        value = setting.value
        if row.kind == "same":
            flags = row.text.split(",")
            flag = next((flag for flag in flags if self.task in self.own["flags"][flag]["tasks"]), flags[0])
            if by_default and self.task not in self.own["flags"][flag]["tasks"]:
                return
            if flag == "kl_coef" and "beta" in flags:
                self.together["kl_coef"] = setting
            self.take_own(Setting(flag, setting.values, setting.where), by_default)
        elif row.kind == "part":
            flag, part = row.text.split()
            values = self.flags[flag].values if flag in self.flags else map(str, self.own["defaults"][self.task].get(flag) or [0, 0])
            values = [number for text in values for number in text.split(",")]
            values[int(part):int(part) + 1] = [value]
            self.set(flag, values, setting.where, by_default)
        elif row.kind == "note":
            if not by_default:
                self.note(setting.where, row.text)
        elif off:
            if not by_default:
                self.note(setting.where, "false, as here")
        elif row.kind == "together":
            if not (by_default and row.key in self.together):
                self.together[row.key] = setting
        elif row.kind == "sets":
            flag, ours = row.text.split(" ", 1)
            if not by_default:
                self.note(setting.where, f"--{row.text}")
            self.take_own(Setting(flag, [ours], setting.where), by_default)
        else:
            shown = "" if value == "true" or row.holder else f' {json.dumps(value, ensure_ascii=False)}'
            where = setting.where.replace(setting.name, row.holder) if row.holder else setting.where
            self.refuse(f"{where}{shown} is not supported\n  fix: {row.text}")

    VALUES = {("dtype", "bfloat16"): "bf16", ("dtype", "float32"): "f32", ("max_steps", "-1"): None, ("truncation", "truncate"): "keep",
              ("device", "cuda:0"): "cuda", ("dual_clip", "none"): None}

    def take_own(self, setting, by_default=False):
        flag, values = setting.name, list(setting.values)
        if len(values) == 1 and (flag, values[0].lower()) in self.VALUES:
            ours = self.VALUES[flag, values[0].lower()]
            if ours is None:
                return self.note(f"{setting.where} {values[0]}", "the default")
            self.note(f"{setting.where} {values[0]}", f"--{flag} {ours}")
            values = [ours]
        about = self.own["flags"][flag]
        if about["boolean"] and values and values[0] in ("True", "False"):
            values[0] = values[0].lower()
        if about["whole"] and len(values) == 1 and values[0].endswith(".0"):
            values[0] = values[0][:-2]  # num_train_epochs 3.0
        if flag in ("data", "eval_data") and len(values) > 1:
            values = [",".join(values)]
        self.set(flag, values or ["true"] * about["boolean"], setting.where, by_default)

    # ---- all of them

    def run(self):
        self.convert()
        name = self.peer.name
        for setting in self.settings:
            if setting not in self.strangers and not self.mentions(setting) and self.without(setting) == self.values():
                row = self.find(setting.name, setting.value)
                self.note(setting.where, row.text if row and row.kind == "together" else "another setting takes precedence")
        if self.peer.directory and self.task in TRAINING and "output_dir" not in self.flags and self.flag("plan") != "true":
            self.set("output_dir", self.peer.directory, "--output_dir")
            self.note("", f"output_dir is {self.peer.directory}, the default of {name}")
        if self.own["converts"] and self.flag("model") and not fetched(self.flag("model")):
            self.note("", f"{self.flag('model')} is not on this machine; a run checks at its start whether this program supports its architecture")
        taken = [f"{flag} {self.flag(flag)}" for flag in self.flags if flag in self.by_default]
        if taken:
            self.note("", f"{name}'s defaults, which differ from those of this program: {', '.join(taken)}")

    def convert(self):
        if self.whole and self.peer.defaults and self.task in TRAINING:
            defaults = [Setting(flag, value.split(), f"{flag} ({self.peer.name}'s default)") for flag, value in self.peer.defaults(self.task).items()]
            self.guarded(*(lambda d=d: self.take(d, by_default=True) for d in defaults))
        self.guarded(*(lambda s=s: self.take(s) for s in self.settings))
        if self.peer.complete:
            self.guarded(lambda: self.peer.complete(self))
        if not self.whole:
            self.guarded(lambda: self.lora(None, steady=()))  # without the name that asks for adapters
        self.guarded(self.name_data, self.refuse_rewards, self.expect_own_tokens, self.tokens)

    def values(self):
        return {flag.name: flag.values for flag in self.flags.values()}

    def without(self, setting):
        """Returns the flags and values of the same command without a setting."""
        other = Translation(self.own, self.peer, self.task, [s for s in self.settings if s is not setting])
        other.convert()
        return other.values()

    def mentions(self, setting):
        """True if a flag, a note or a problem names the setting."""
        texts = [flag.where for flag in self.flags.values()] + [name for names in self.notes.values() for name in names] + self.problems
        return any(names(text, setting) for text in texts)

    def meaning(self, setting):
        """Returns the meaning of a setting in the names of this program: the setting as text, or several that have one meaning; the meaning; its kind, which
        is the same for all settings without effect, and for all that are refused; and the flags."""
        flags = [flag for flag in self.flags.values() if flag.name in self.given and (names(flag.where, setting) or flag.where.endswith(f" in {setting.value}"))]
        wrong = [flag for flag in flags if self.task not in self.own["flags"][flag.name]["tasks"]]
        row = self.find(setting.name, setting.value) or self.find(setting.name, "true")
        product = next((short(flag.where) for flag in flags if " x " in flag.where), short(setting.where) + (f" {' '.join(setting.values)}" if setting.values else ""))
        problem = next((problem for problem in self.problems if names(problem, setting)), None)
        if wrong:
            text = f"--{wrong[0].name}, which belongs to {', '.join(self.own['flags'][wrong[0].name]['tasks'])}, not to {self.task}"
            return product, text, text, []
        if flags:
            text = " ".join(f"--{flag.name} {shlex.quote(','.join(flag.values))}" for flag in flags)
            return product, text, text, flags
        if problem:
            return product, problem.replace("\n  fix: ", "; ").replace(setting.where, "", 1).strip(" :"), "refused", []
        if row and row.kind == "together":
            return product, row.text, row.key, []
        return product, "no effect: " + "; ".join(note for note, wheres in self.notes.items() if any(names(where, setting) for where in wheres)), "no effect", []

    def guarded(self, *calls):
        for call in calls:
            try:
                call()
            except DataError as error:
                self.refuse(str(error))
            except ValueError as error:  # from float() or int()
                self.refuse(f"{error}\n  fix: give a number in its place")

    def name_data(self):
        """Appends the model's revision, and the data's subset and split, to their names."""
        for key, flag, form in (("revision", "model", "@%s"), ("subset", "data", ":%s"), ("split", "data", "[%s]"), ("eval_split", "eval_data", "[%s]")):
            if self.has(key) and self.flag(flag):
                names = [name + form % self.get(key) for name in self.flag(flag).split(",")]
                self.set(flag, ",".join(names), f"{self.flags[flag].where}, {self.together[key].where}")
        if self.has("processes"):
            if self.own["ranks"] == 1 and "ranks" not in self.flags:
                self.set("ranks", self.get("processes"), self.together["processes"].where)
            else:
                self.note(self.together["processes"].where, "the ranks are already running")

    def refuse_rewards(self):
        """Refuses settings of rewards if the task has no rewards."""
        for key in ("generation_batch_size", "steps_per_generation", "epsilon_high"):
            if self.task not in RL and self.has(key):
                self.refuse(f"{self.together[key].where} belongs to {', '.join(RL)}, not to {self.task}\n  fix: leave it out, or start with another task")

    def expect_own_tokens(self):
        """Checks that given special tokens are the tokenizer's own."""
        model = self.flag("model", "")
        folder = fetched(model)
        for key in ("bos_token", "eos_token", "unk_token"):
            if not self.has(key):
                continue
            theirs, where = self.get(key), self.together[key].where
            own = special_token(folder, key) if folder else None
            if folder and own == theirs:
                self.note(where, f"{theirs} is the tokenizer's own")
            elif folder:
                self.refuse(f'{where} is "{theirs}", but the tokenizer in {model} has "{own}"\n'
                            "  fix: leave it out, or change tokenizer_config.json there")
            elif self.own["converts"]:
                self.note(where, f"it must be the tokenizer's own, which can only be checked on a machine with {model or 'the model'}")
            else:
                self.refuse(f'{where} "{theirs}" can only be compared with the tokenizer once {model or "the model"} is on this machine\n  fix: leave it out')

    def step(self, samples, accumulated, packs):
        """Sets the samples per step: samples per device * accumulation steps * ranks."""
        if not self.whole:
            accumulated = self.count("accumulated", 1)
        ranks = self.ranks()
        self.whole_step(samples * accumulated * ranks, packs, f"{samples} samples per device * {accumulated} accumulation steps * {ranks} ranks",
                        ("device_batch", "accumulated"))

    def whole_step(self, batch, packs, text, keys=("batch",)):
        """Sets the samples per step, which follow from the names with these keys; without the first one only a whole command has a default."""
        if {"train_batch_size", "train_batch_tokens"} & self.given or not (self.whole or self.has(keys[0])):
            return
        length = self.number("max_len", 2048)
        packs = packs and self.task not in RL + PAIRS
        flag, value = ("train_batch_tokens", batch * length) if packs else ("train_batch_size", batch)
        factors = [f"{self.together[key].where} {self.get(key)}" for key in keys if self.has(key)]
        self.set(flag, str(value), " x ".join(factors + [f"{self.ranks()} ranks"] * (self.ranks() > 1)) or "samples per step")
        self.note("", f"a step: {text}{f' * {length} tokens, packed,' if packs else ''} = --{flag} {value}")

    def answers(self, samples, accumulated):
        """Sets the number of prompts per batch of answers; TRL counts answers instead."""
        keys = [key for key in ("generation_batch_size", "steps_per_generation") if self.has(key)]
        if self.task != "grpo" or "rollout_batch_size" in self.given or not (self.whole or keys):
            return
        n, ranks = max(1, self.number("n", 8)), self.ranks()
        answers = self.count("generation_batch_size", samples * ranks * self.count("steps_per_generation", accumulated))
        if answers % n:
            return self.refuse(f"a batch of {answers} answers (generation_batch_size, or per_device_train_batch_size * ranks * steps_per_generation) is not a "
                               f"multiple of num_generations, {n}\n  fix: --rollout_batch_size N, prompts, and --n N, answers to each")
        self.set("rollout_batch_size", str(answers // n), ", ".join(self.together[key].where for key in keys) or "generation_batch_size")
        self.note("", f"a batch of answers: {answers} answers / {n} per prompt = --rollout_batch_size {answers // n}")

    def policy(self, keeps_strings):
        """Sets the flags of rewards shared by TRL and the trainers built on it. With keeps_strings, string prompts are not changed, as in TRL."""
        if self.task not in (*RL, "distill"):
            return
        if keeps_strings and self.flag("apply_chat_template", "false") != "true":
            self.set("input_template", "{}", "string prompts (TRL)", by_default=True)
        if self.has("kl_coef") and self.flag("kl_coef") and float(self.flag("kl_coef")) > 0:
            self.set("kl_use_loss", "true", self.together["kl_coef"].where)
        if self.has("epsilon_high"):
            self.set("eps_clip", [self.flag("eps_clip", "0.2"), self.get("epsilon_high")], self.together["epsilon_high"].where)

    def lora(self, rank, alpha=None, dropout=None, targets=None, steady=STEADY):
        """Sets the flags of an adapter from the keys lora_r, lora_alpha, lora_dropout and lora_targets, or from the arguments if a key is not given. In
        the tasks `steady` there is no dropout unless the key disable_dropout is false."""
        rank = self.get("lora_r", self.flag("lora_rank", rank))
        for flag, key, otherwise in (("lora_rank", "lora_r", rank), ("lora_alpha", "lora_alpha", alpha), ("lora_dropout", "lora_dropout", dropout),
                                     ("lora_targets", "lora_targets", targets)):
            where = self.together[key].where if self.has(key) else f"{flag} ({self.peer.name}'s default)"
            values = self.together[key].values if self.has(key) else None if otherwise is None else [otherwise]
            if values and flag not in self.given:
                self.set(flag, linear_names(values, where) if flag == "lora_targets" else values, where, by_default=not self.has(key))
        if self.get("disable_dropout", str(self.task in steady)).lower() == "true" and float(self.flag("lora_dropout", "0")) > 0:
            self.note(self.flags.pop("lora_dropout").where, f"{self.peer.name} disables dropout in this task unless disable_dropout is false")
        if self.has("lora_whole") and "lora_modules_to_save" not in self.given:
            setting = self.together["lora_whole"]
            names = [name for name in setting.value.split(",") if name.rpartition(".")[2] not in ("score", "classifier")]
            for name in names:
                if name.rpartition(".")[2] not in ("embed_tokens", "wte", "lm_head"):
                    self.refuse(f'{setting.where} has "{name}", but only the embedding and the head can be trained in full next to adapters\n  fix: embed_tokens, lm_head, or both')
            if names:
                self.set("lora_modules_to_save", names, setting.where)

    def tokens(self):
        """Sets the tokens added to the tokenizer."""
        if self.has("tokens"):
            setting = self.together["tokens"]
            self.set("add_tokens", [token for value in setting.values for token in value.split(",")] if len(setting.values) == 1 else setting.values, setting.where)

    def scheduler(self):
        """Converts an absolute minimum learning rate to a share of the peak."""
        if self.has("min_lr"):
            rate = float(self.flag("learning_rate", self.own["defaults"][self.task].get("learning_rate", "nan")))
            self.set("min_lr_ratio", f"{float(self.get('min_lr')) / rate:g}", self.together["min_lr"].where)


def same_values(texts, ours):
    """True if texts equal the program's default value of a flag."""
    def plain(value):
        try:
            return float(value)
        except (TypeError, ValueError):
            return value
    ours = ours if isinstance(ours, list) else [json.dumps(ours) if isinstance(ours, bool) else ours]
    return [plain(text) for text in texts] == [plain(value) for value in ours]


def linear_names(values, where):
    """Converts PEFT's names of linear layers to their last parts. A regular expression of full names must match the same names in every layer."""
    values = [value for text in values for value in text.split(",")] if not any(re.search(r"[\\|(\[*]", v) for v in values) else [",".join(values)]
    if len(values) == 1 and values[0] in ("all-linear", "all"):
        return ["all-linear"]
    if len(values) == 1 and re.search(r"[\\|(\[*]", values[0]):
        roots = ("model", "model.language_model", "language_model.model")  # of a text model, and of a text model inside a multimodal one
        try:
            found = [[name for name in LINEAR if any(re.fullmatch(values[0], f"{root}.layers.{layer}.{name}") for root in roots)] for layer in (0, 1, 11)]
        except re.error:
            found = [[]]
        if not found[0] or any(one != found[0] for one in found):
            raise PortError(f'{where} "{values[0]}" is a regular expression that does not match the same names in every layer of a text model\n'
                            "  fix: --lora_targets with names such as q_proj,v_proj")
        values = found[0]
    return list(dict.fromkeys(value.rpartition(".")[2] for value in values))


def likeness(a, b):
    """Returns the similarity of two names, from 0 to 1: the share of their words (max, len) that also occur in the other name, perhaps misspelled."""
    words, others = a.split("_"), b.split("_")
    count, shared = len(words) + len(others), 0
    for word in words:
        same = next((other for other in others if edits(word, other) <= (0 if max(len(word), len(other)) < 4 else (max(len(word), len(other)) + 1) // 3)), None)
        if same is not None:
            others.remove(same)
            shared += 2
    return shared / count


def edits(a, b):
    """Returns the Levenshtein distance: the smallest number of insertions, deletions and replacements that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def fetched(model):
    """Returns the directory of a model if it is on this machine, else None. Never uses the network."""
    if not model or Path(model).is_dir():
        return Path(model) if model else None
    name, _, revision = model.partition("@")
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    ref = root / "refs" / (revision or "main")
    folder = root / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision or "main")
    return folder if folder.is_dir() else None


def special_token(folder, name):
    try:
        token = read_object(folder / "tokenizer_config.json").get(name)
    except DataError:
        return ""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


# ---- names of other trainers ------------------------------------------------------------------------------------------------------------


def names(text, setting):
    return bool(re.search(rf"(?<![\w.-]){re.escape(setting.where)}(?![\w-])", text))


def short(where):
    """Returns names without the file that they are in."""
    return re.sub(r"\b(in|of) [^ ]+( \(\d+\))?( |$)", "", where).rstrip()
