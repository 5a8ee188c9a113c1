#!/usr/bin/env python3
"""Calls a user's reward function for train_llama grpo: reward_worker.py FILE.py. One request a line on standard input, one answer a line on standard output:

    {"prompts": [text, ...], "answers": [text, ...], "labels": [text, ...]}     ->     {"rewards": [number, ...]} or {"error": text}

FILE.py defines reward(prompts, answers, labels), which returns a number for each; or OpenRLHF's reward_func(queries, prompts, labels), where a query is a
prompt with its answer, and which returns {"rewards": ...}. What it prints goes to standard error."""

import importlib.util
import json
import math
import sys
import traceback


def load(path):
    spec = importlib.util.spec_from_file_location("reward_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "reward"):
        return module.reward
    if hasattr(module, "reward_func"):
        return lambda prompts, answers, labels: module.reward_func([p + a for p, a in zip(prompts, answers)], prompts, labels)["rewards"]
    raise AttributeError("it defines neither reward(prompts, answers, labels) nor OpenRLHF's reward_func(queries, prompts, labels)")


def last_lines(error):
    """What is wrong, and where in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} (line {frames[-1].lineno} of {frames[-1].filename})"


def main():
    out, sys.stdout = sys.stdout, sys.stderr
    reward = None
    for line in sys.stdin:
        try:
            reward = reward or load(sys.argv[1])
            rewards = [float(r) for r in reward(**json.loads(line))]
            answer = {"rewards": [r if math.isfinite(r) else str(r) for r in rewards]}  # JSON has no nan
        except Exception as error:  # whatever the user's code does wrong
            answer = {"error": last_lines(error)}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
