"""Decides whose names a command has. A trainer is named by its command words, by a file that only it can have written, or by --from. Without one the
command is in the names of this program, and any other name is a problem."""

import re

from .accelerate import ACCELERATE
from .instead import no_task
from .llama_factory import LLAMA_FACTORY
from .peers import NAMES, PEERS, VERL, program, task_called, writer
from .reading import OVERRIDE, PortError, Setting, read_file, read_flags, read_overrides
from .translate import TRAINING, Translation, likeness

LAUNCHERS = ("accelerate", "launch", "python", "python3", "torchrun", "deepspeed")
FILE = re.compile(r".*\.(ya?ml|json)")


def answer(own, words):
    """Returns the output as a dictionary."""
    peer, source, name, launcher, words = start(own, words)
    task = name if name in own["tasks"] and not peer else None
    if not peer and (dotted := next((word.partition("=")[0] for word in read_flags(words)[0] if OVERRIDE.fullmatch(word) and "." in word.partition("=")[0]), None)):
        peer, source = VERL, dotted
    overrides, words = read_overrides(words) if peer is VERL or ("--from", "verl") in zip(words, words[1:]) else ([], words)
    bare, given = read_flags(words)
    if origins := [s for s in given if s.name == "from"]:
        peer, source = named_by_flag(origins, peer, source)
    if name and not (peer or task):
        raise PortError(no_task(name, [task for task in own["tasks"] if task != "demo"] + ["show"]))
    if peer is LLAMA_FACTORY:
        overrides, bare = read_overrides(bare)
    if peer is VERL:
        bare, given = [*bare, *hydra_file(given)], [s for s in given if s.name not in ("config_path", "config_name")]
    given = overrides + given
    if stray := [word for word in bare if not FILE.fullmatch(word)]:
        raise PortError(f'unexpected argument "{stray[0]}"\n  fix: flags are --name value; put quotes around a value with spaces')
    settings, notes = [], []
    for file in bare + [named_file(s) for s in given if is_file(s)]:
        read = read_file(file)
        writes, key = writer(read)
        if peer and writes and writes.name not in (peer.name, *(base.name for base in peer.bases)):
            raise PortError(f"{file} is a file of {writes.name}, the only trainer with the key {key}, but {source} names {peer.name}\n  fix: leave one of them out")
        if writes and not peer:
            peer, source = writes, file
            notes.append(f"{file} is a file of {peer.name}, the only trainer with the key {key}")
        settings += read
    settings += [s for s in given if not is_file(s) and s.name not in ("convert", "from")]
    if peer is VERL:
        settings = resolved(settings)
    if launcher:
        peer, settings = peer._replace(bases=(*peer.bases, ACCELERATE)), launcher + settings
    out = translated(own, peer, task, task_called(name, source) if name and not task else (None, []), settings) if peer else in_own_names(own, task, settings)
    out["settings"] = [s._asdict() for s in out["settings"] + [s for s in given if s.name == "convert"]]
    return out | {"notes": notes + out["notes"]}


# ---- whose names ------------------------------------------------------------------------------------------------------------------------


def start(own, words):
    """Returns the peer that the command words name, these words, the task or program in them, the settings of a launcher before them, and the words behind."""
    if not words or words[0].startswith("--"):
        return None, "", None, [], words
    if words[0] in own["tasks"]:
        return None, "", words[0], [], words[1:]
    for at in range(len(words)):
        if found := program(words[at:]):
            peer, name, count = found
            return peer, " ".join(words[at:at + count]), name, launcher_settings(words[:at]), words[at + count:]
    if words[0] in LAUNCHERS:
        raise PortError(f'{words[0]} starts no program of {", ".join(peer.name for peer in PEERS)}\n  fix: begin with a task: {", ".join(own["tasks"])}')
    return None, "", words[0], [], words[1:]


def launcher_settings(words):
    settings = []
    if "--" in words:  # ray job submit ... -- python3 -m ...
        settings = [s._replace(name=f"ray.{s.name}") for s in read_flags(words[:words.index("--")])[1]]
        words = words[words.index("--") + 1:]
    bare, given = read_flags([word for word in words if word not in ("-m", "-i", "--module")])
    if stray := [word for word in bare if word not in LAUNCHERS]:
        raise PortError(f'unexpected argument "{stray[0]}"\n  fix: leave out what starts the trainer; variables of the environment belong before this program')
    for setting in given:
        settings += read_file(named_file(setting)) if is_file(setting) else [setting]
    return settings


def named_by_flag(origins, peer, source):
    """Returns the peer of --from, which must be the one that the command words name, if they do."""
    name, where = origins[0].value, "--from " + origins[0].value
    if len(origins) > 1:
        raise PortError("--from is given twice\n  fix: a command has the names of one trainer")
    if name not in NAMES:
        raise PortError(f'--from "{name}" is unknown\n  fix: {", ".join(NAMES)}')
    if peer not in (None, NAMES[name]):
        raise PortError(f"{source} names {peer.name}, and {where} names {NAMES[name].name}\n  fix: leave one of them out")
    return NAMES[name], where


def is_file(setting):
    return setting.name in ("config", "config_file") or setting.name == "accelerate_config" and FILE.fullmatch(setting.value)


def named_file(setting):
    if len(setting.values) != 1:
        raise PortError(f"{setting.where} needs one file\n  fix: {setting.where} FILE.yaml")
    return setting.value


def hydra_file(given):
    """Returns the file of verl's --config-path and --config-name; none without a name, or with that of the defaults."""
    named = {s.name: s for s in given}
    name, folder = named.get("config_name"), named.get("config_path")
    if not name or name.value.removesuffix(".yaml") == "ppo_trainer":
        return []
    if not folder:
        raise PortError(f"{name.where} {name.value} is in a folder of verl's own\n  fix: --config-path DIR, or the settings of that file as words")
    return [f"{folder.value}/{name.value.removesuffix('.yaml')}.yaml"]


def resolved(settings):
    """Replaces ${NAME} by the value of another setting. Without it the value is verl's default, and so is that of ${oc.select:NAME,VALUE}."""
    values, out = {s.name: s.value for s in settings}, []
    for setting in settings:
        value = re.sub(r"\$\{([\w.]+)\}", lambda found: values.get(found[1], found[0]), setting.value)
        if re.sub(r"\$\{(oc\.select:[^$]*|[\w.]+\})", "", value).count("${"):
            raise PortError(f"{setting.where} is {setting.value}, which only verl resolves\n  fix: write the value in its place")
        if "${" not in value:
            out.append(setting if value == setting.value else setting._replace(values=[value]))
    return out


# ---- the names of a peer ----------------------------------------------------------------------------------------------------------------


def translated(own, peer, task, program, settings):
    """Returns the answer for a peer's settings. `task` is a word of this program, `program` the task of the peer's program and the settings that it implies."""
    launched, implied = program
    wish = peer.task_of({s.name: s for s in settings}, task or launched) if peer.task_of else None
    if not (task or wish or launched):
        raise PortError(f"the command has no task\n  fix: write one of {', '.join(own['tasks'])} before the flags")
    t = Translation(own, peer, task or (wish and wish[0]) or launched, implied + settings)
    if wish and task in TRAINING and wish[0] != task:
        t.refuse(f"{wish[1]} asks for the task {wish[0]}, not {task}\n  fix: start with {wish[0]}, or leave {wish[1]} out")
    t.run()
    if t.strangers:
        lines, _, _, unknown = explain(own, t.task, t.strangers, [], [other for other in PEERS if other.name != peer.name])
        t.problems += ([f"{counted(t.strangers, unknown)} not of {peer.name}:\n" + "\n".join(lines) + "\n  fix: write them in the names of this program"] if lines else []) + unknown
    notes = [": ".join([*([", ".join(dict.fromkeys(re.sub(r" in [^ ]+( \(\d+\))?$", "", name) for name in names))] if names else []), text])
             for text, names in t.notes.items()]
    return {"task": t.task, "settings": list(t.flags.values()), "notes": notes, "problems": t.problems, "foreign": True}


# ---- the names of this program ----------------------------------------------------------------------------------------------------------


def in_own_names(own, task, settings):
    strangers, given = [s for s in settings if s.name not in own["flags"]], [s for s in settings if s.name in own["flags"]]
    problems = [] if task else [f"the command has no task\n  fix: write one of {', '.join(own['tasks'])} before the flags"]
    lines, same, complete, unknown = explain(own, task or "sft", strangers, given, PEERS)
    if lines:
        origins = ", ".join(name for name, peer in NAMES.items() if peer in complete)
        problems.insert(0, f"{counted(strangers, unknown)} other trainers', and no trainer is named:\n" + "\n".join(lines) + "\n  fix: write them in the names of this program"
                        + (f", or name the trainer, whose defaults then apply: --from {origins}" if origins else ""))
    names = {s.name for s in same}
    return {"task": task or "sft", "settings": [s for s in given if s.name not in names] + same, "notes": [], "problems": problems + unknown, "foreign": bool(strangers)}


def counted(strangers, unknown):
    count = len(strangers) - len(unknown)
    return "1 name is" if count == 1 else f"{count} names are"


def explain(own, task, strangers, given, peers):
    """Looks names up that a command cannot have. Returns a line with the meaning of each, the settings that do not depend on the peer, the peers that have
    all of the names, and the problems of names that no peer has. `given` are the flags of the command."""
    meanings, complete = [{} for _ in strangers], []  # of each name: (its left side, the kind of its meaning) -> its meaning, its flags, peers
    for peer in peers:
        trial = Translation(own, peer, task, strangers, whole=False)
        for setting in given:
            trial.set(setting.name, setting.values, setting.where)
        trial.convert()
        complete += [] if trial.strangers else [peer]
        for setting, found in zip(strangers, meanings, strict=True):
            if setting not in trial.strangers:
                left, text, kind, flags = trial.meaning(setting)
                found.setdefault((left, kind), (text, flags, []))[2].append(peer.name)
    lines, settings, problems = [], {}, []
    for setting, found in zip(strangers, meanings, strict=True):
        if len(found) == 1:
            ((left, _), (text, flags, _)), = found.items()
            lines.append(f"  {left}: {text}")
            settings |= {flag.name: flag for flag in flags}
        elif found:
            lines.append(f"  {next(iter(found))[0]} has several meanings: " + "; ".join(f"{text} ({', '.join(whose)})" for text, _, whose in found.values()))
        else:
            problems.append(f"unknown flag {setting.where}\n  fix: {hint(own, task, setting.name)}")
    return list(dict.fromkeys(lines)), list(settings.values()), complete, problems


def hint(own, task, name):
    """Returns the flag that was probably meant: two of its two or three words are in the name, perhaps misspelled. The distance
    between whole names would match eos_token with row_tokens, and ds_type with dtype."""
    last = name.rpartition(".")[2]
    flags = [flag for flag, about in own["flags"].items() if task in about["tasks"]]
    alike, best = max(((likeness(last, flag), flag) for flag in flags), key=lambda pair: pair[0], default=(0, ""))
    return f"did you mean --{best}?" if alike > 0.79 else f"{own['program']} {task} --help lists the flags of {task}"
