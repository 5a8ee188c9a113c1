#!/usr/bin/env python3
"""Judges answers for train_llama grpo: reward_worker.py FILE.py, or http://ADDRESS. One request a line on standard input, one answer a line on standard output:

    {"prompts": [text, ...], "answers": [...], "labels": [...], "raw_prompts": [...], "raw_answers": [...]}     ->     {"rewards": [number or null, ...]} or {"error": text}

The raw texts have their special tokens. FILE.py defines reward(prompts, answers, labels), which returns a number for each, or None for one that it cannot judge; or OpenRLHF's
reward_func(queries, prompts, labels), where a query is a raw prompt with its raw answer, and which returns {"rewards": ...}. A server gets the same by
POST, as JSON with the queries under "query", and answers with what reward_func returns. What FILE.py prints goes to standard error."""

import importlib.util
import json
import math
import sys
import traceback

TRIES = 5


def of_openrlhf(reward_func):
    def reward(prompts, answers, labels, raw_prompts, raw_answers):
        rewards = reward_func([p + a for p, a in zip(raw_prompts, raw_answers)], raw_prompts, labels)["rewards"]
        return rewards.flatten().tolist() if hasattr(rewards, "flatten") else rewards  # for a tensor
    return reward


def of_file(path):
    spec = importlib.util.spec_from_file_location("reward_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "reward"):
        return lambda prompts, answers, labels, **raw: module.reward(prompts, answers, labels)
    if hasattr(module, "reward_func"):
        return of_openrlhf(module.reward_func)
    raise AttributeError("it defines neither reward(prompts, answers, labels) nor OpenRLHF's reward_func(queries, prompts, labels)")


def of_server(address):
    """Returns a function that asks a server, repeatedly if the server is starting or busy."""
    import urllib3

    retry = urllib3.Retry(TRIES - 1, backoff_factor=1, backoff_max=1, status_forcelist=[429, 502, 503, 504], allowed_methods=None, raise_on_status=False)
    connections = urllib3.PoolManager(retries=retry, timeout=None)

    def ask(queries, prompts, labels):
        response = connections.request("POST", address, json={"query": queries, "prompts": prompts, "labels": labels})
        if response.status != 200:
            raise ValueError(f"the server answered with status {response.status}: {response.data[:200].decode(errors='replace')}")
        try:
            answer = response.json()
        except ValueError:
            raise ValueError(f"the server's answer is not JSON: {response.data[:200].decode(errors='replace')}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("rewards"), list):
            raise ValueError(f'the server\'s answer has no list "rewards": {str(answer)[:200]}')
        return answer

    return of_openrlhf(ask)


class NotNumbers(Exception):
    """The result is not a number for each answer."""


def numbers_of(rewards):
    try:
        rewards = list(rewards)
    except TypeError:
        raise NotNumbers(f"the rewards are {rewards!r}") from None
    for number, reward in enumerate(rewards):
        if reward is None:  # no judgement
            continue
        try:
            rewards[number] = float(reward)
        except (TypeError, ValueError):
            raise NotNumbers(f"the reward of answer {number} is {reward!r}") from None
    return [reward if reward is None or math.isfinite(reward) else str(reward) for reward in rewards]  # JSON has no nan


def what_is_wrong(error, source):
    """Returns the message with the line of the user's file."""
    if isinstance(error, NotNumbers):
        return f"{error}\n  fix: return a list with one number for each answer, or None where there is none"
    if source.endswith(".py"):
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source]
        place = f" (line {own[-1].lineno} of {source})" if own else ""  # none if the call itself fails
        return f"{type(error).__name__}: {error}{place}\n  fix: def reward(prompts, answers, labels), as docs/rl.md describes it"
    cause = f"it cannot be reached, {TRIES} times: {error.reason}" if hasattr(error, "reason") else str(error)
    return f"{cause}\n  fix: start a server of OpenRLHF's protocol (docs/rl.md) at that address; the run resumes from its last checkpoint"


def main():
    source = sys.argv[1]
    out, sys.stdout = sys.stdout, sys.stderr
    reward = None
    for line in sys.stdin:
        try:
            reward = reward or (of_file if source.endswith(".py") else of_server)(source)
            answer = {"rewards": numbers_of(reward(**json.loads(line)))}
        except Exception as error:  # from the user's code
            answer = {"error": what_is_wrong(error, source)}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
