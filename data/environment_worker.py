#!/usr/bin/env python3
"""Plays episodes for train_llama grpo: environment_worker.py FILE.py. Requests and replies are JSON objects, one a line, on standard input and output. The
first line has no reply; each other one has one, in the order in which the environments answer:

    {"tokenizer": directory, "template": text, "template_kwargs": text, "eos": [id, ...], "max_turns": number, "max_observation": tokens}
    {"episode": number, "prompt_ids": [id, ...], "prompt": text, "raw_prompt": text, "label": text, "columns": text}, the texts as in reward_worker.py
        ->     {"episode": number, "prompt_ids": [id, ...]}, the prompt with what reset adds to it, or {"error": text}
    {"episode": number, "turn": number, "answer": text, "raw_answer": text, "end": "token", "text" or "limit", "room": tokens}
        ->     {"episode": number, "ids": [id, ...], "reward": number or null, "truncated": bool} or {"error": text}
        of tools also {"calls": number, "failures": number}

Without ids the episode has ended; truncated means only because `room` is too small. FILE.py defines

    class Environment:
        def reset(self, prompt, label, **columns): ...   # optional, with those of these arguments, and of raw_prompt and messages, that it names; may return a text
        def step(self, answer): ...                      # or raw_answer; returns {"observation": ..., "reward": number, "done": bool}
        def get_reward(self): ...                        # optional: a reward at the end of the episode
        def close(self): ...                             # optional

each `def` or `async def`; or OpenRLHF's class AgentInstance; or TRL's tools, environment_factory and reward_funcs. Every episode has an object of its own. What FILE.py prints goes to standard error."""

import asyncio
import contextlib
import inspect
import json
import math
import os
import sys
import threading
import types
from functools import cached_property
from importlib.util import find_spec

from chat import EXAMPLE_CALL, SENTINEL, ChatTemplate
from errors import DataError, presentable
from messages import schemas_for
from reward_worker import WrongAnswer, module_of, number_of, shown, where_of
from tokenizer import Tokenizer
from tool_calls import FORMATS, Call, Toolbox, before_calls, has_tools, types_of
from worker import connect

FORM = "docs/rl.md#episodes describes class Environment"
KEYS = {"observation", "raw_observation", "reward", "done", "calls", "failures"}


class Rendering:
    """The tokens of observations: as they are, or rendered by the chat template of the prompts."""

    def __init__(self, tokenizer, template, template_kwargs, eos, most):
        self.tokenizer, self.eos, self.most = Tokenizer(tokenizer, template or None), eos, most
        self.template = ChatTemplate(self.tokenizer.hf, "the prompts") if template else None
        self.variables = {"tools": None, **json.loads(template_kwargs or "{}")}
        self.told = False

    def encoding(self, text):
        return self.tokenizer.encode([text], with_offsets=True)[0]

    def cut(self, text):
        """Cuts a text with too many tokens in the middle."""
        end = 32 * self.most  # characters, so that a huge text is not encoded whole
        if len(text) > 2 * end:
            text = f"{text[:end]}...{text[-end:]}"
        offsets = self.encoding(text).offsets
        if len(offsets) <= self.most:
            return text
        half = self.most // 2
        return f"{text[:offsets[half][0]]}...{text[offsets[half - self.most][0]:]}"

    def raw_ids(self, observation):
        if not isinstance(observation, str):
            raise WrongAnswer(f"the observation is {shown(observation)}", "return a text, because no chat template renders it")
        return self.encoding(self.cut(observation)).ids

    def ids(self, observation, chat, ends_by_token):
        """Returns the tokens between a turn and the next one. The messages of the episode, `chat`, get the observation."""
        if not self.template:
            return self.raw_ids(observation)
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        messages = [messages] if isinstance(messages, dict) else messages
        if not (isinstance(messages, list) and messages and all(
                isinstance(m, dict) and m.keys() >= {"role", "content"} and all(isinstance(m[key], str) for key in ("role", "content")) for m in messages)):
            raise WrongAnswer(f"the observation is {shown(observation)}", 'return a text, a message {"role": ..., "content": ...} or a list of messages')
        return self.encoding(self.suffix([{**m, "content": self.cut(m["content"])} for m in messages], chat, ends_by_token)).ids

    def suffix(self, messages, chat, ends_by_token):
        """Returns what the template renders behind the content of the last turn. A word stands in place of the turns, whose tokens remain as they
        were sampled."""
        before = self.rendered(chat)
        called = messages[0].get("name") if self.call_format else None  # of the tool whose results these are
        chat += [calling(called) if called else {"role": "assistant", "content": SENTINEL}, *messages]
        text = self.rendered(chat)
        if not text.startswith(before) and not self.told:
            self.told = True
            print("note: the chat template changes what is before a turn when others follow; episodes keep it as the policy has read it", file=sys.stderr)
        behind = text.rpartition(SENTINEL)[2]
        begin, end = self.end_of_turn(behind, bool(called))
        return behind[end:] if ends_by_token else behind[begin if called else 0:]

    def rendered(self, chat, what="an observation", **variables):
        try:
            return self.template.prompt(chat, self.variables | variables)[0]
        except DataError as error:
            raise WrongAnswer(f"{what} {error.what}", error.fix) from None

    def longer_prompt(self, ids, messages, text, variables):
        """Returns the tokens of a prompt whose last message has a text appended, and its messages. A prompt that is no chat ends with the text."""
        if not self.template:
            return [*ids, *self.encoding(text).ids], messages
        if not messages or self.encoding(self.rendered(messages, "a prompt", **variables)).ids != ids:
            raise WrongAnswer(f"reset returned {shown(text)}, but {'the chat template renders the messages of a prompt otherwise' if messages else 'a prompt is no list of messages'}",
                              "write each prompt as a list of all its messages, to the last of which the text is appended")
        longer = appended(messages, text)
        return self.encoding(self.rendered(longer, "a prompt with the text of reset", **variables)).ids, longer

    def end_of_turn(self, behind, called):
        """Returns where the token that ends a turn begins and ends: the first special token, if it is one that ends answers, else nothing. The marks of a
        call may be special tokens, too."""
        encoding = self.encoding(behind)
        marks = [(i, span) for i, span in zip(encoding.ids, encoding.offsets) if i in self.eos or self.tokenizer.special[i] and not called]
        return marks[0][1] if marks and marks[0][0] in self.eos else (0, 0)

    @cached_property
    def call_format(self):
        """The name of the format that reads a call as the template writes it; None if there is none."""
        chat = [{"role": "user", "content": "Hi"}]
        try:
            before = self.rendered([*chat, {"role": "assistant", "content": SENTINEL}]).rpartition(SENTINEL)[0]
            text = self.rendered([*chat, calling("look")])
        except WrongAnswer:
            return None
        turn = text[len(os.path.commonprefix([before, text])):]
        turn = turn[:self.end_of_turn(turn, True)[0]]
        return next((name for name, read in FORMATS.items() if read(turn, {}) == [Call("look", {SENTINEL: "x"})]), None)


def calling(name):
    """A turn that calls a tool. Behind the word the template writes the end of the call, and of the turn."""
    return {"role": "assistant", "content": "", "tool_calls": [{**EXAMPLE_CALL, "function": {"name": name, "arguments": {SENTINEL: "x"}}}]}


def appended(messages, text):
    """Returns the messages with a text at the end of the last one."""
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + text}]


class Episodes:
    def __init__(self, source, max_turns, max_observation, **rendering):
        stand_in_for_openrlhf()
        module = module_of(source)
        self.rendering, self.max_turns = Rendering(most=max_observation, **rendering), max_turns
        self.make = (of_tools(module, self.rendering) if has_tools(module) else of_openrlhf(module) if hasattr(module, "AgentInstance") else
                     getattr(module, "Environment", None))
        if not inspect.isclass(self.make) or not hasattr(self.make, "step"):
            raise WrongAnswer("it defines neither a class Environment with a method step nor tools", FORM)
        self.running = {}  # of each episode its environment and its messages

    async def begin(self, episode, prompt_ids, prompt, raw_prompt, label, columns):
        environment, record = self.make(), json.loads(columns)
        messages = record.get("prompt")
        if hasattr(environment, "reset"):
            given = {**record, "prompt": prompt, "raw_prompt": raw_prompt, "messages": messages, "label": label}
            ids, messages = self.prompt_of(await called(environment.reset, **taken(environment.reset, given)), prompt_ids, messages, getattr(environment, "variables", {}))
            if (more := len(ids) - len(prompt_ids)) > self.rendering.most:
                raise WrongAnswer(f"the text that reset returned makes a prompt {more} tokens longer", f"--max_observation {more}, or a shorter text")
            prompt_ids = ids
        self.running[episode] = environment, [*(messages or [{"role": "user", "content": SENTINEL}])]
        return {"episode": episode, "prompt_ids": prompt_ids}

    def prompt_of(self, returned, ids, messages, variables):
        """Returns the tokens and the messages of a prompt, by what reset has returned."""
        if returned is None:
            return ids, messages
        if isinstance(returned, str):
            return self.rendering.longer_prompt(ids, messages, returned, variables)
        if isinstance(returned, dict) and [*returned] == ["raw_prompt"] and isinstance(returned["raw_prompt"], str) and returned["raw_prompt"]:
            return self.rendering.encoding(returned["raw_prompt"]).ids, None
        raise WrongAnswer(f"reset returned {shown(returned)}", "return nothing, or a text to append to the last message of the prompt")

    async def turn(self, episode, turn, answer, raw_answer, end, room):
        environment, chat = self.running[episode]
        last = end == "limit" or turn + 1 == self.max_turns
        names = inspect.signature(environment.step).parameters
        reply = await called(environment.step, raw_answer if "raw_answer" in names else answer, **({"last": last} if "last" in names else {}))
        if not isinstance(reply, dict) or not reply.keys() <= KEYS or not (reply.keys() & {"observation", "raw_observation"} or reply.get("done")):
            raise WrongAnswer(f"step returned {shown(reply)}", 'return {"observation": ..., "reward": number, "done": bool}')
        reward = finite(reply.get("reward", 0))
        ids, truncated = [], False
        if not reply.get("done") and not last:
            is_raw = "raw_observation" in reply
            ids = self.rendering.raw_ids(reply["raw_observation"]) if is_raw else self.rendering.ids(reply["observation"], chat, end == "token")
            if not ids:
                raise WrongAnswer("the observation is empty", 'return a text, or {"done": True} to end the episode')
            truncated = len(ids) >= room
        if truncated or not ids:
            ids = []
            del self.running[episode]
            if hasattr(environment, "get_reward"):
                reward = total([reward, finite(await called(environment.get_reward))])
            if hasattr(environment, "close"):
                await called(environment.close)
        counts = {name: reply[name] for name in ("calls", "failures") if name in reply}
        return {"episode": episode, "ids": ids, "reward": reward, "truncated": truncated, **counts}


def taken(function, given):
    """Returns those of the given values that a function names as parameters, or all if it takes any."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def finite(reward):
    fix = "return a finite number, or None where there is none"
    reward = number_of(reward, "the reward", fix)
    if reward is not None and not math.isfinite(reward):
        raise WrongAnswer(f"the reward is {reward}", fix)
    return reward


def total(rewards):
    """Returns the sum of those rewards that are given, or None."""
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None


def stand_in_for_openrlhf():
    """Files with an AgentInstance import its base class, also where OpenRLHF is not installed."""
    if "openrlhf" in sys.modules or find_spec("openrlhf"):
        return
    for name in ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent"):
        sys.modules.setdefault(name, types.ModuleType(name))
    for name in ("AgentInstanceBase", "AgentExecutorBase", "MultiTurnAgentExecutor"):
        setattr(sys.modules["openrlhf.utils.agent"], name, type(name, (), {}))


def of_openrlhf(module):
    """Returns the Environment of a class AgentInstance."""
    if "execute" in vars(getattr(module, "AgentExecutor", object)):
        raise WrongAnswer("its AgentExecutor has a method execute of its own, which is not called here", FORM)
    told = False

    class Environment:
        def __init__(self):
            self.agent = module.AgentInstance()

        async def reset(self, raw_prompt, label):
            states = {"observation": raw_prompt, "label": label}
            if hasattr(self.agent, "reset"):
                states = await called(self.agent.reset, states)
            if not isinstance(states, dict) or not isinstance(states.get("observation"), str):
                raise WrongAnswer(f"reset returned {shown(states)}", 'return {"observation": text}, the prompt')
            self.text, self.label = states["observation"], label
            return None if self.text == raw_prompt else {"raw_prompt": self.text}

        async def step(self, raw_answer):
            nonlocal told
            reply = await called(self.agent.step, {"observation_text": self.text, "action_text": raw_answer, "label": self.label, "sampling_params": None})
            if not isinstance(reply, dict) or not {"rewards", "environment_feedback", "done"} <= reply.keys():
                raise WrongAnswer(f"step returned {shown(reply)}", "return rewards, environment_feedback and done")
            for name in ("sampling_params", "environment_images"):
                if reply.get(name):
                    raise WrongAnswer(f"step returned {name}, which have no effect here", "leave them out")
            reward, score = (float(value) for value in (reply["rewards"], reply.get("scores", reply["rewards"])))
            if score != reward:
                raise WrongAnswer("its scores differ from its rewards, and --dynamic_filtering reads the rewards", "return the rewards alone")
            if reply.get("extra_logs") and not told:
                told = True
                print("note: the log does not show extra_logs of an AgentInstance", file=sys.stderr)
            self.text += raw_answer + reply["environment_feedback"]
            return {"raw_observation": reply["environment_feedback"], "reward": reward, "done": bool(reply["done"])}

    return Environment


def of_tools(module, rendering):
    """Returns the Environment of TRL's tools and environment_factory, with the rewards of reward_funcs and get_reward."""
    box = Toolbox(module)
    judges = getattr(module, "reward_funcs", [])
    judges = judges if isinstance(judges, (list, tuple)) else [judges]
    if wrong := [judge for judge in judges if not callable(judge)]:
        raise WrongAnswer(f"reward_funcs has {shown(wrong[0])}, which is no function", "write functions of completions and columns, as TRL's")
    if not judges and not all(hasattr(pool[0], "get_reward") for pool in box.pools.values() or [[None]]):
        raise WrongAnswer("its tools have no reward", "define reward_funcs, or a method get_reward of the environment")
    if not rendering.template:
        raise WrongAnswer("no chat template renders the prompts, which must show the tools", "use a model with a chat template, and chats as prompts")
    rendering.variables["tools"] = box.schemas if isinstance(box.schemas, list) else next(iter(box.schemas.values()))
    form = getattr(module, "tool_format", rendering.call_format)
    if not callable(form) and form not in FORMATS:
        raise WrongAnswer(f"its tool_format is {shown(form)}" if hasattr(module, "tool_format") else "the chat template writes no calls in a known format",
                          f"tool_format = one of {', '.join(FORMATS)}, or a function; or a template for tools: --tokenizer_chat_template FILE")
    ends = [rendering.tokenizer.hf.decode([i], skip_special_tokens=False) for i in rendering.eos]

    class Environment:
        async def reset(self, raw_prompt, messages, prompt, **columns):
            self.record = {name: value for name, value in columns.items() if name != "label" or value} | {"prompt": messages or prompt}
            try:
                schemas = schemas_for(box.schemas, self.record)
            except DataError as error:
                raise WrongAnswer(f"a record {error.what}", error.fix) from None
            for name in (schema["function"]["name"] for schema in schemas):
                if name not in raw_prompt:
                    raise WrongAnswer(f"a prompt does not show the tool {name}", "prepare it with the tools: raw --data, or data/prepare.py rl --environment FILE.py")
            self.variables, text = {"tools": schemas}, None
            self.name, self.environment = self.record.get("environment") if box.has_names else None, None
            if box.factories:
                pool = box.pools[self.name]
                self.environment = pool.pop() if pool else box.factories[self.name]()
                given = {name: value for name, value in self.record.items() if name != "environment" or not box.has_names}
                text = await called(self.environment.reset, **taken(self.environment.reset, given))
                if isinstance(text, str) and messages:
                    self.record["prompt"] = appended(messages, text)
            self.tools, self.types = {tool.__name__: tool for tool in box.tools(self.environment)}, types_of(schemas)
            self.thinks, self.messages = raw_prompt.rstrip().endswith("<think>"), []
            return text

        async def step(self, raw_answer, last):
            said = next((raw_answer.removesuffix(end) for end in ends if raw_answer.endswith(end)), raw_answer)
            thought, mark, rest = said.rpartition("</think>")
            if not mark:
                rest = "" if self.thinks else said.partition("<think>")[0]
            calls = users_calls(form, rest) if callable(form) else FORMATS[form](rest, self.types)
            thought = {"reasoning_content": thought.replace("<think>", "").strip()} if mark else {}
            made = {"tool_calls": [{"type": "function", "function": {"name": call.name, "arguments": call.arguments or {}}} for call in calls]} if calls else {}
            self.messages.append({"role": "assistant", "content": (before_calls(rest) if calls else rest if mark else said).strip(), **thought, **made})
            if not calls or last:
                return {"reward": None, "done": True, "calls": 0, "failures": 0}
            results = await asyncio.gather(*(self.result(call) for call in calls))
            answers = [{"role": "tool", "name": call.name or "unknown", "tool_call_id": EXAMPLE_CALL["id"], "content": text}
                       for call, (text, _) in zip(calls, results)]
            self.messages += answers
            return {"observation": answers, "reward": None, "calls": len(calls), "failures": sum(failed for _, failed in results)}

        async def result(self, call):
            """Returns what the policy reads of a call, and whether it has failed."""
            try:
                if call.error:
                    raise ValueError(call.error)
                if call.name not in self.tools:
                    raise ValueError(f"Tool {call.name} not found.")
                return str(await called(self.tools[call.name], **call.arguments)), False
            except Exception as error:  # which the policy may correct
                return str({"error": str(error)}), True

        async def get_reward(self):
            columns = {name: [value] for name, value in self.record.items() if name != "prompt"}
            given = {**columns, "prompts": [self.record["prompt"]], "completions": [self.messages], "environments": [self.environment]}
            rewards = []
            for judge in judges:
                answer = await called(judge, **taken(judge, given))
                if not isinstance(answer, (list, tuple)) or len(answer) != 1:
                    raise WrongAnswer(f"{judge.__name__} returned {shown(answer)} for one answer", "return a list with one number for each completion")
                rewards.append(finite(answer[0]))
            if hasattr(self.environment, "get_reward"):
                rewards.append(finite(await called(self.environment.get_reward)))
            if self.environment is not None:
                box.pools[self.name].append(self.environment)
            return total(rewards)

    return Environment


def users_calls(form, text):
    """Returns the calls that a function of the user reads: pairs of a name and a dictionary of arguments."""
    try:
        return [Call(*pair) for pair in form(text)]
    except Exception as error:  # which the policy may correct
        return [Call(error=str(error))]


async def called(function, *arguments, **named):
    result = function(*arguments, **named)
    return await result if inspect.isawaitable(result) else result


def what_is_wrong(error, source):
    if isinstance(error, WrongAnswer):
        return "{}\n  fix: {}".format(*error.args)
    if isinstance(error, DataError):  # of the tokenizer
        return str(error)
    return f"{type(error).__name__}: {error}{where_of(error, source)}\n  fix: catch it where the episode may go on; {FORM}"


async def serve(source, requests, replies):
    """Answers requests as soon as their environments do."""
    loop, lines, tasks, episodes = asyncio.get_running_loop(), asyncio.Queue(), set(), None

    def read():
        with contextlib.suppress(OSError):  # the run has ended
            for line in requests:
                loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    def reply(message):
        try:
            print(json.dumps(message), file=replies, flush=True)
        except OSError:
            os._exit(0)

    async def answer(request):
        try:
            reply(await (episodes.turn if "turn" in request else episodes.begin)(**request))
        except Exception as error:  # from the user's code
            reply({"error": presentable(what_is_wrong(error, source))})

    threading.Thread(target=read, daemon=True).start()  # also while a step computes
    try:
        episodes = Episodes(source, **json.loads(await lines.get()))
    except Exception as error:
        reply({"error": presentable(what_is_wrong(error, source))})
    while (line := await lines.get()) is not None:
        if episodes:
            tasks.add(task := asyncio.create_task(answer(json.loads(line))))
            task.add_done_callback(tasks.discard)


def main():
    try:
        asyncio.run(serve(sys.argv[1], *connect()))
    except SystemExit:  # of the user's code
        pass
    os._exit(0)  # the thread may still read


if __name__ == "__main__":
    main()
