#!/usr/bin/env python3
"""Judges answers for train_llama grpo: reward_worker.py FILE.py, or http://ADDRESS. One request a line on standard input, one answer a line on standard output:

    {"prompts": [text, ...], "answers": [...], "labels": [...], "completion_ids": [[id, ...], ...], "columns": [text, ...], "raw_prompts": [...], "raw_answers": [...]}
        ->     {"rewards": [number or null, ...]} or {"error": text}

The raw texts have their special tokens; a text of columns is a JSON object, the record's other fields. FILE.py defines one of

    reward(prompts, answers, labels)                 returns a number for each, or None for one that it cannot judge
    reward(prompts, completions, **columns)          TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)
                                                     verl's, `def` or `async def`: of one answer, with fields of its record. It returns a number, or {"score": number, ...}
    reward_func(queries, prompts, labels)            OpenRLHF's: a query is a raw prompt with its raw answer. It returns {"rewards": ...}, also with
                                                     equal "scores" and with "extra_logs"

A server gets the same as reward_func by POST, as JSON with the queries under "query", and answers with what that returns. What FILE.py and its child
processes print goes to standard error."""

import asyncio
import importlib.util
import inspect
import json
import math
import sys
import traceback

from errors import presentable
from worker import serve

TRIES = 5
TRL_ALONE = ("trainer_state", "log_extra", "log_metric", "environments")  # further arguments of TRL, which do not exist here
MOST_BYTES = 1 << 26  # of a server's answer


class WrongAnswer(Exception):
    """A judge has returned something else than rewards. Arguments: what, and the fix."""


def shown(value):
    try:
        return repr(value)[:200]
    except Exception:  # of the user's class, or of an integer with too many digits
        return f"a {type(value).__name__}"


def of_openrlhf(reward_func):
    told = False

    def reward(labels, raw_prompts, raw_answers, **_):
        nonlocal told
        answer = reward_func([p + a for p, a in zip(raw_prompts, raw_answers)], raw_prompts, labels)
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise WrongAnswer(f'its answer has no list "rewards": {shown(answer)}', 'return {"rewards": [...]}, with one number for each answer')
        for name in answer.keys() - {"rewards", "scores", "extra_logs"}:
            raise WrongAnswer(f"its answer has {shown(name)} beside the rewards, which has no effect here", "leave it out")
        rewards, scores = (value.flatten().tolist() if hasattr(value, "flatten") else value  # for a tensor
                           for value in (answer["rewards"], answer.get("scores")))
        if scores not in (None, rewards):
            raise WrongAnswer("its scores differ from its rewards, and --dynamic_filtering reads the rewards", "return the rewards alone")
        if answer.get("extra_logs") and not told:
            told = True
            print("note: the log does not show extra_logs of a reward function", file=sys.stderr)
        return rewards
    return reward


def of_function(function):
    """Returns the user's function of texts, with the arguments that its parameters name: TRL's if there is one called completions, else the program's own."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    is_trl = "completions" in names
    if foreign := [name for name in needed if name in TRL_ALONE]:
        raise TypeError(f"{function.__name__}() takes {', '.join(foreign)}, which only TRL's trainer has")

    def reward(prompts, answers, labels, completion_ids, columns, **raw):
        records = [json.loads(text) for text in columns]
        chats = [record.pop("prompt", None) for record in records]
        values = {name: [record.get(name) for record in records] for name in dict.fromkeys(name for record in records for name in record)}
        first = (prompts, answers, labels)
        if is_trl:  # of a chat, prompt and completion are messages
            given = {"prompts": [chat or text for chat, text in zip(chats, prompts)],
                     "completions": [[{"role": "assistant", "content": text}] if chat else text for chat, text in zip(chats, answers)],
                     "completion_ids": completion_ids}
            first = ()
        else:
            given = dict.fromkeys(names[:3])
        values = {name: value for name, value in values.items() if name not in given and (takes_all or name in names)}
        if missing := [name for name in needed if name not in given and name not in values]:
            raise TypeError(f"{function.__name__}() takes {', '.join(missing)}, and the records have the columns {', '.join(sorted(records[0])) or 'none'}")
        if is_trl:
            values |= {name: value for name, value in given.items() if takes_all or name in names}
        result = function(*first, **values)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return reward


def of_verl(compute_score):
    """Returns the function of a batch for verl's function of one answer, which reads fields of verl's records."""
    async def score(answer, record):
        judge = record.get("reward_model")
        result = compute_score(data_source=record.get("data_source"), solution_str=answer, ground_truth=judge.get("ground_truth") if isinstance(judge, dict) else None,
                               extra_info=record.get("extra_info") or {})
        result = await result if inspect.isawaitable(result) else result
        if isinstance(result, dict) and "score" not in result:
            raise WrongAnswer(f"compute_score returned {shown(result)}", 'return a number, or {"score": number, ...}')
        return result["score"] if isinstance(result, dict) else result

    async def scores(answers, columns):
        return await asyncio.gather(*(score(answer, json.loads(record)) for answer, record in zip(answers, columns)))

    def reward(answers, columns, **_):
        return asyncio.run(scores(answers, columns))
    return reward


def module_of(path):
    spec = importlib.util.spec_from_file_location("users_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_file(path):
    module = module_of(path)
    if hasattr(module, "reward"):
        return of_function(module.reward)
    if hasattr(module, "compute_score"):
        return of_verl(module.compute_score)
    if hasattr(module, "reward_func"):
        return of_openrlhf(module.reward_func)
    raise AttributeError("it defines neither reward(prompts, answers, labels) or reward(prompts, completions, **columns) nor verl's compute_score(data_source, solution_str, ground_truth) "
                         "or OpenRLHF's reward_func(queries, prompts, labels)")


def of_server(address):
    """Returns a function that asks a server, repeatedly if the server is starting or busy."""
    import urllib3

    retry = urllib3.Retry(TRIES - 1, backoff_factor=1, backoff_max=1, status_forcelist=[429, 502, 503, 504], allowed_methods=None, raise_on_status=False)
    connections = urllib3.PoolManager(retries=retry, timeout=None)

    def ask(queries, prompts, labels):
        response = connections.request("POST", address, json={"query": queries, "prompts": prompts, "labels": labels}, preload_content=False)
        with response:
            body = response.read(MOST_BYTES + 1, decode_content=True)
        if len(body) > MOST_BYTES:
            raise ValueError(f"the server's answer has more than {MOST_BYTES:,} bytes")
        if response.status != 200:
            raise ValueError(f"the server answered with status {response.status}: {body[:200].decode(errors='replace')}")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ValueError(f"the server's answer is not JSON: {body[:200].decode(errors='replace')}") from None

    return of_openrlhf(ask)


def number_of(reward, name, fix):
    if reward is None:  # no judgement
        return None
    try:
        return float(None if isinstance(reward, (str, bytes)) else reward)
    except (TypeError, ValueError, OverflowError):
        raise WrongAnswer(f"{name} is {shown(reward)}", fix) from None


def numbers_of(rewards):
    fix = "return a list with one number for each answer, or None where there is none"
    if isinstance(rewards, (str, bytes, dict, set)) or not hasattr(rewards, "__iter__"):
        raise WrongAnswer(f"the rewards are {shown(rewards)}", fix)
    rewards = [number_of(reward, f"the reward of answer {number}", fix) for number, reward in enumerate(rewards)]
    return [reward if reward is None or math.isfinite(reward) else str(reward) for reward in rewards]  # JSON has no nan


def where_of(error, source):
    """Returns the line of the user's file, if it is there that the error was raised."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
    return f" (line {own[-1].lineno} of {source})" if own else ""


def what_is_wrong(error, source):
    """Returns the message with the line of the user's file."""
    if isinstance(error, WrongAnswer):
        return "{}\n  fix: {}".format(*error.args)
    if source.endswith(".py"):
        return f"{type(error).__name__}: {error}{where_of(error, source)}\n  fix: def reward(prompts, answers, labels), or TRL's reward(prompts, completions, **columns), as docs/rl.md describes them"
    cause = f"it cannot be reached, {TRIES} times: {error.reason}" if hasattr(error, "reason") else str(error)
    return f"{cause}\n  fix: start a server of OpenRLHF's protocol (docs/rl.md) at that address; the run resumes from its last checkpoint"


def main():
    source = sys.argv[1]
    reward = None

    def answer(request):
        nonlocal reward
        try:
            reward = reward or (of_file if source.endswith(".py") else of_server)(source)
            return {"rewards": numbers_of(reward(**request))}
        except Exception as error:  # from the user's code
            return {"error": presentable(what_is_wrong(error, source))}

    serve(answer)


if __name__ == "__main__":
    main()
