"""Translates flags of another trainer into this program's task and flags, with notes on their meaning and the problems that stop a run."""

import json
import os
import re
from pathlib import Path

from .reading import PortError, Setting, read_words
from .table import NESTED, OFF, find

TRAINING = ("pretrain", "sft", "dpo", "rm", "grpo", "ppo")
RL = ("grpo", "ppo")
PAIRS = ("dpo", "rm")
STEADY = ("dpo", "rm", "ppo")  # tasks whose trainers disable dropout unless disable_dropout is false
LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


class Translation:
    """The translation so far. `own` describes this program: its name, and for each flag its tasks and type."""

    def __init__(self, own, peer, task, settings, others):
        self.own, self.peer, self.task, self.others = own, peer, task, others
        self.flags, self.together, self.notes, self.problems = {}, {}, {}, []  # flags: name -> Setting
        # Flags set only by defaults; flags given by the user; flags given on the command line with this program's names.
        self.by_default, self.given, self.said = set(), set(), set()
        self.settings = settings
        self.foreign = peer is not None  # the command uses names of another trainer

    # ---- for the modules of the peers

    def has(self, key):
        return key in self.together

    def get(self, key, otherwise=None):
        return self.together[key].value if key in self.together else otherwise

    def flag(self, name, otherwise=None):
        return self.flags[name].value if name in self.flags else otherwise

    def set(self, flag, value, where, by_default=False):
        """Sets a flag of this program. Defaults never override a given flag, and a file never overrides a flag of this program on the command line."""
        values = [value] if isinstance(value, str) else value
        if flag in self.said and not where.startswith("--"):
            return
        if by_default and (flag in self.given or same_values(values, self.own["defaults"][self.task].get(flag))):
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
        """Returns the row of the peer for a name, or of another peer if the name is not a flag of this program. The longest match wins."""
        own = [row for peer in (self.peer, *self.peer.bases) for row in peer.rows] if self.peer else []
        if name in self.own["flags"] or name.split(".")[0] in NESTED and name.rpartition(".")[2] in self.own["flags"]:
            return next((row for one in (name, name.rpartition(".")[2]) for row in own if one in row.names and row.holds_for(value)), None)
        return find(own + [row for peer in self.others for row in peer.rows], name, value)

    def take(self, setting, by_default=False):
        name, value = setting.name, setting.value
        row = self.find(name, value)
        flag = name.rpartition(".")[2] if name.split(".")[0] in NESTED else name
        if row is None and flag in self.own["flags"]:
            if setting.where.startswith("--"):
                self.said.add(flag)
            return self.take_own(setting._replace(name=flag), by_default)
        if row is None and name.startswith("no_") and value == "true":
            return self.take(Setting(name[3:], ["false"], setting.where), by_default)
        off = value.lower() in OFF and not (row and value.lower() in (v.lower() for v in row.values))
        if row is None:
            if self.find(name, "true"):
                if not off:
                    self.refuse(f'{setting.where} "{value}" is not a value of this flag\n  fix: true or false, or leave it out')
                return None
            return self.refuse(f"unknown flag {setting.where}\n  fix: {self.hint(name)}")
        return self.answer(row, setting, off, by_default)

    def answer(self, row, setting, off, by_default):
        value = setting.value
        self.foreign = True
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
            values = self.flags[flag].values if flag in self.flags else map(str, self.own["defaults"][self.task][flag])
            values = [number for text in values for number in text.split(",")]
            values[int(part):int(part) + 1] = [value]
            self.set(flag, values, setting.where, by_default)
        elif row.kind == "together":
            if not off and not (by_default and row.key in self.together):
                self.together[row.key] = setting
        elif row.kind == "note":
            if not by_default:
                self.note(setting.where, row.text)
        elif off:
            return
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
                return
            self.note(f"{setting.where} {values[0]}", f"--{flag} {ours}")
            values = [ours]
        about = self.own["flags"][flag]
        if about["boolean"] and values and values[0] in ("True", "False"):
            values[0] = values[0].lower()
        if about["whole"] and len(values) == 1 and values[0].endswith(".0"):
            values[0] = values[0][:-2]  # num_train_epochs 3.0
        if flag in ("data", "eval_data") and len(values) > 1:
            values = [",".join(values)]
        if len(values) == 1 and values[0] in ("None", "none", "null") and not about["boolean"] and about["wanted"] != "text":
            return  # stands for the default
        self.set(flag, values or ["true"] * about["boolean"], setting.where, by_default)

    def hint(self, name):
        """Returns the flag that was probably meant: two of its two or three words are in the name, perhaps misspelled. The distance
        between whole names would match eos_token with row_tokens, and ds_type with dtype."""
        last = name.rpartition(".")[2]
        names = [flag for flag, about in self.own["flags"].items() if self.task in about["tasks"]]
        alike, best = max(((likeness(last, flag), flag) for flag in names), key=lambda pair: pair[0], default=(0, ""))
        return f"did you mean --{best}?" if alike > 0.79 else f"./{self.own['program']} {self.task} --help lists the flags of {self.task}"

    # ---- all of them

    def run(self):
        if self.peer and self.peer.defaults and self.task in TRAINING:
            defaults = [Setting(name, value.split(), f"{name} ({self.peer.name}'s default)") for name, value in self.peer.defaults(self.task).items()]
            self.guarded(*(lambda d=d: self.take(d, by_default=True) for d in defaults))
        self.guarded(*(lambda s=s: self.take(s) for s in self.settings))
        if self.peer and self.peer.complete:
            self.guarded(lambda: self.peer.complete(self))
        self.guarded(self.name_data, self.refuse_rewards, self.expect_own_tokens, self.tokens)
        if self.peer and self.peer.directory and self.task in TRAINING and "output_dir" not in self.flags and self.flag("plan") != "true":
            self.set("output_dir", self.peer.directory, "--output_dir")
            self.note("", f"output_dir is {self.peer.directory}, the default of {self.peer.name}")
        if self.foreign and self.own["converts"] and self.flag("model") and not fetched(self.flag("model")):
            self.note("", f"{self.flag('model')} is not on this machine; a run checks at its start whether this program supports its architecture")
        taken = [f"{flag} {self.flag(flag)}" for flag in self.flags if flag in self.by_default]
        if taken:
            self.note("", f"{self.peer.name}'s defaults, which differ from those of this program: {', '.join(taken)}")

    def guarded(self, *calls):
        for call in calls:
            try:
                call()
            except PortError as error:
                self.refuse(str(error))
            except ValueError as error:  # from float() or int()
                self.refuse(f"{error}\n  fix: give a number in its place")

    def name_data(self):
        """Appends the model's revision, and the data's subset and split, to their names."""
        for key, flag, form in (("revision", "model", "@%s"), ("subset", "data", ":%s"), ("split", "data", "[%s]"), ("eval_split", "eval_data", "[%s]")):
            if self.has(key) and self.flag(flag):
                names = [name + form % self.get(key) for name in self.flag(flag).split(",")]
                self.set(flag, ",".join(names), self.flags[flag].where)
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
        ranks = self.ranks()
        self.whole_step(samples * accumulated * ranks, packs, f"{samples} samples per device * {accumulated} accumulation steps * {ranks} ranks")

    def whole_step(self, batch, packs, text):
        if {"train_batch_size", "train_batch_tokens"} & self.given:
            return
        length = self.number("max_len", 2048)
        packs = packs and self.task not in RL + PAIRS
        flag, value = ("train_batch_tokens", batch * length) if packs else ("train_batch_size", batch)
        self.set(flag, str(value), "samples per step")
        self.note("", f"a step: {text}{f' * {length} tokens, packed,' if packs else ''} = --{flag} {value}")

    def answers(self, samples, accumulated):
        """Sets the number of prompts per batch of answers; TRL counts answers instead."""
        if self.task != "grpo" or "rollout_batch_size" in self.given:
            return
        n, ranks = max(1, self.number("n", 8)), self.ranks()
        answers = self.count("generation_batch_size", samples * ranks * self.count("steps_per_generation", accumulated))
        if answers % n:
            return self.refuse(f"a batch of {answers} answers (generation_batch_size, or per_device_train_batch_size * ranks * steps_per_generation) is not a "
                               f"multiple of num_generations, {n}\n  fix: --rollout_batch_size N, prompts, and --n N, answers to each")
        self.set("rollout_batch_size", str(answers // n), "generation_batch_size")
        self.note("", f"a batch of answers: {answers} answers / {n} per prompt = --rollout_batch_size {answers // n}")

    def policy(self, keeps_strings):
        """Sets the flags of rewards shared by TRL and the trainers built on it. With keeps_strings, string prompts are not changed, as in TRL."""
        if self.task not in RL:
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
            rate = float(self.flag("learning_rate", self.own["defaults"][self.task]["learning_rate"]))
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
        token = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return ""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


# ---- the trainer and the task ---------------------------------------------------------------------------------------------------------


def peer_of(settings, peers):
    """Returns the peer that knows most of the names; the first one wins a tie. None if no peer knows any."""
    best = max(peers, key=lambda peer: sum(peer.knows(s.name) for s in settings))
    return best if any(best.knows(s.name) for s in settings) else None


def answer(own, words, peers, launches, helpers):
    """Returns the output as a dictionary. `launches` interprets the words before the flags; `helpers` are tables without defaults."""
    launch, settings = read_words(words)
    peer, task, launched, prefix = None, None, None, []
    if launch and launch[0] in own["tasks"]:
        task, launch = launch[0], launch[1:]
    if launch:
        peer, launched, prefix = launches(launch)
        if task and launched and task != launched:
            raise PortError(f"{' '.join(launch)} is the task {launched}, not {task}\n  fix: leave {task} out")
    meta = [s for s in settings if s.name in ("convert", "as")]
    settings = prefix + [s for s in settings if s.name not in ("convert", "as")]
    peer = peer or peer_of(settings, peers)
    wish = peer.task_of({s.name: s for s in settings}, task or launched) if peer and peer.task_of else None
    problems = []
    if wish and task in TRAINING and wish[0] != task:
        problems.append(f"{wish[1]} asks for the task {wish[0]}, not {task}\n  fix: start with {wish[0]}, or leave {wish[1]} out")
    task = task or (wish and wish[0]) or launched
    if not task:
        raise PortError(f"the command has no task\n  fix: write one of {', '.join(own['tasks'])} before the flags")
    translation = Translation(own, peer, task, settings, [p for p in (*peers, *helpers) if p is not peer])
    translation.problems = problems
    translation.run()
    notes = [": ".join([*([", ".join(dict.fromkeys(re.sub(r" in [^ ]+( \(\d+\))?$", "", name) for name in names))] if names else []), text])
             for text, names in translation.notes.items()]
    return {"task": task, "settings": [s._asdict() for s in [*translation.flags.values(), *meta]], "notes": notes, "problems": translation.problems,
            "foreign": translation.foreign}
