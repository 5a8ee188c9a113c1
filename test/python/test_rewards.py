"""Rewards for the answers of grpo: Python functions, servers, reward models, and several of them. Each of their faults ends in one message. And
scripts/serve_rm.py, which serves a reward model."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from runs import (
    DEMO, ROOT, call, change_json, chat, command, expect_end_of, first_step, log_lines, read_lines, read_tensors, refused, start, succeeds, train,
    wait_for, weights, write_data, write_lines, write_tensors)
import reward_worker
from test_grpo import reward_file, sample, saved_answers, words

PROMPTS = DEMO.parent / "train.safetensors"
ITERATION = {"data": PROMPTS, "model": DEMO, "rollout_batch_size": 3, "n": 2, "max_new_tokens": 9}


# ---- functions --------------------------------------------------------------------------------------------------------------------

OF_LENGTHS = "def reward(prompts, answers, labels):\n    return map(len, answers)\n"


def judge(output, reward, **options):
    """One iteration of the demo's model with random weights."""
    return sample(output, PROMPTS, model=DEMO, reward=reward, rollout_batch_size=3, n=2, max_steps=1, **options)


COUNTS = """
calls = 0
def reward(prompts, answers, labels):
    global calls
    calls += 1
    print("noise")
    assert len(prompts) == len(answers) == len(labels)
    assert all(p.startswith(("reverse", "sort", "upper", "count", "copy")) or p for p in prompts)
    return [len(a) / 100 + calls for a in answers]
"""


def test_rewards_by_a_function(tmp_path):
    reward, lines = reward_file(tmp_path, COUNTS), []
    for number, options in enumerate([{}, {"ranks": 2}]):
        result = call(words(tmp_path / str(number), None, **ITERATION, **{"reward": reward, "max_steps": 2, **options}))
        assert result.returncode == 0 and "noise" in result.stderr, result.stderr
        lines.append(log_lines(tmp_path / str(number))[1:])
    assert 1 < lines[0][0]["reward"] < 2 < lines[0][1]["reward"] < 3  # one process for the whole run
    assert [line["reward"] for line in lines[0]] == pytest.approx([line["reward"] for line in lines[1]], rel=1e-12)


def test_a_function_may_leave_answers_without_a_reward(tmp_path):
    """The second function judges every other answer. An answer without any reward is unscored."""
    (tmp_path / "sometimes").mkdir()
    judges = [reward_file(tmp_path, OF_LENGTHS), reward_file(
        tmp_path / "sometimes", "def reward(prompts, answers, labels):\n    return [2 if i % 2 else None for i in range(len(answers))]\n")]
    for name, reward in {"one": judges[0], "some": judges[1], "both": ",".join(map(str, judges))}.items():
        judge(tmp_path / name, reward)
    one, some, both = (first_step(tmp_path / name) for name in ("one", "some", "both"))
    assert both["reward"] == pytest.approx(one["reward"] + 1) and both[f"reward/{judges[1]}"] == 2 and both["unscored"] == 0
    assert (some["unscored"], some["reward"]) == (0.5, 2)


# Its child processes read, print and outlive the call.
STARTS_PROCESSES = """
import os, pathlib, subprocess
def reward(prompts, answers, labels):
    print("noise of Python", flush=True)
    subprocess.run("echo noise of a child; cat", shell=True, check=True)
    here = pathlib.Path(__file__)
    others = [subprocess.Popen(["sleep", "1000"], start_new_session=alone).pid for alone in (False, True)]
    here.with_name("new").write_text(f"{others[0]} {others[1]}")
    here.with_name("new").rename(here.with_name("processes"))
    if here.with_name("waits").exists():
        subprocess.run(["sleep", "1000"])
    return map(len, answers)
"""


NO_ZOMBIES = """
import os, pathlib, subprocess, time
def reward(prompts, answers, labels):
    for _ in range(5):
        subprocess.run("sleep 0.1 &", shell=True, check=True)
    time.sleep(1)
    states = [path.read_text().rpartition(")")[2].split()[:2] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    assert ["Z", str(os.getppid())] not in states
    return map(len, answers)
"""


def test_processes_without_a_parent_do_not_stay_as_zombies(tmp_path):
    judge(tmp_path / "run", reward_file(tmp_path, NO_ZOMBIES))


@pytest.mark.parametrize("number", [0, signal.SIGTERM, signal.SIGKILL])
def test_functions_may_start_processes(number, tmp_path):
    """What they print or read does not reach the protocol, and they end with the run."""
    reward, started = reward_file(tmp_path, STARTS_PROCESSES), tmp_path / "processes"
    if number:
        (tmp_path / "waits").touch()
    run = start(words(tmp_path / "run", None, **ITERATION, reward=reward))
    if number:
        wait_for(started.exists, run)
        run.send_signal(number)
    said, error = run.communicate(timeout=60)
    assert run.returncode == {0: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}[number], said + error
    assert "noise of Python" in error and "noise of a child" in error
    assert ("SIGTERM: the run stops without this answer" in error) == (number == signal.SIGTERM)
    expect_end_of(map(int, started.read_text().split()))


# The second call writes its process id and waits; a repeated one does not.
WAITS = """
import os, pathlib, time
calls, mark = 0, pathlib.Path(__file__).with_name("waits")
def reward(prompts, answers, labels):
    global calls
    calls += 1
    if calls == 2 and not mark.exists():
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        time.sleep(20)
    return map(len, answers)
"""


ANSWER = [{"role": "assistant", "content": "olimat!"}]
TRLS = """
async def reward(prompts, completions, solution, level=7, **columns):
    assert prompts[0] == [{"role": "user", "content": "reverse tamilo"}] and completions[0][0]["role"] == "assistant"
    assert len(prompts) == len(completions) == len(columns["completion_ids"]) == 4 and isinstance(columns["completion_ids"][0][0], int)
    assert solution == ["olimat!", "olimat!", None, None] and level == [None, None, [1], [1]] and columns["extra"] == [0.5, 0.5, None, None]
    assert columns["answer"][0] == [{"role": "assistant", "content": "olimat!"}]
    return [len(c[0]["content"]) for c in completions]
"""


def test_rewards_by_a_function_of_trl(tmp_path):
    """It gets the columns of the records, and messages of chats."""
    data = write_lines(tmp_path / "asked.jsonl", [{"answer": ANSWER, "prompt": chat("reverse tamilo"), "solution": "olimat!", "extra": 0.5},
                                                  {"messages": chat("copy tamilo", "tamilo!"), "level": [1]}])
    for name, code in {"theirs": TRLS, "ours": OF_LENGTHS}.items():
        options = {**ITERATION, "data": data, "rollout_batch_size": 2, "shuffle": "false", "reward": reward_file(tmp_path, code)}
        succeeds(words(tmp_path / name, None, **options), quiet=False)
    assert first_step(tmp_path / "theirs")["reward"] == first_step(tmp_path / "ours")["reward"]


REQUEST = {"prompts": ["P"], "answers": ["A"], "labels": ["L"], "completion_ids": [[7]], "columns": ['{"hard": true, "answers": 5}']}


@pytest.mark.parametrize("function, result", [
    (lambda p, a, l: (p, a, l), (["P"], ["A"], ["L"])), (lambda p, a, l, hard: hard, [True]),
    (lambda prompts, answers, labels, **columns: columns, {"hard": [True]}),
    (lambda completions, **rest: (completions, rest), (["A"], {"prompts": ["P"], "completion_ids": [[7]], "hard": [True], "answers": [5]})),
    (lambda completions, hard, log_extra=None: (completions, hard, log_extra), (["A"], [True], None))])
def test_a_function_gets_the_arguments_that_it_names(function, result):
    assert reward_worker.of_function(function)(**REQUEST, raw_prompts=["P"], raw_answers=["A"]) == result


@pytest.mark.parametrize("victim", ["reward", "run"])
def test_killed_while_it_judges(victim, tmp_path):
    """A killed reward process is started again and judges the same answers; a killed run resumes, and its reward process ends. Both give the bits of a
    run without a kill."""
    options = {**ITERATION, "max_steps": 3, "save_steps": 1, "reward": reward_file(tmp_path, WAITS)}
    mark = tmp_path / "waits"
    run = start(words(tmp_path / "killed", None, **options))
    wait_for(mark.exists, run)
    process = int(mark.read_text())
    if victim == "run":
        run.kill()
        expect_end_of([process])
    else:
        os.kill(process, signal.SIGKILL)
    _, error = run.communicate(timeout=100)
    assert run.returncode == (0 if victim == "reward" else -signal.SIGKILL), error
    if victim == "run":
        result = call(words(tmp_path / "killed", None, **options, resume="auto"))
        assert result.returncode == 0 and "step_1" in result.stdout, result.stdout + result.stderr
    assert call(words(tmp_path / "straight", None, **options)).returncode == 0
    assert weights(tmp_path / "straight") == weights(tmp_path / "killed")


def test_rewards_by_verls_function(tmp_path):
    """It judges one answer, with the fields of its record; it may wait, and return more than a score."""
    records = write_lines(tmp_path / "prompts.jsonl", [{"data_source": "mine", "prompt": chat("reverse " + word), "ability": "words", "reward_model": {"style": "rule", "ground_truth": word[::-1]},
                                                        "extra_info": {"index": i}} for i, word in enumerate(("cat", "horse", "mouse"))])
    text = ("import asyncio\nasync def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    await asyncio.sleep(0)\n"
            "    assert data_source == 'mine' and ground_truth == ('tac', 'esroh', 'esuom')[extra_info['index']]\n    return {'score': len(solution_str), 'acc': 0}\n")
    theirs = reward_file(tmp_path, text).rename(tmp_path / "theirs.py")
    for name, reward in {"ours": reward_file(tmp_path, OF_LENGTHS), "theirs": theirs}.items():
        result = call(words(tmp_path / name, None, **{**ITERATION, "data": records, "reward": reward, "max_steps": 1}))
        assert result.returncode == 0, result.stderr
    assert first_step(tmp_path / "theirs")["reward"] == first_step(tmp_path / "ours")["reward"] > 0


JUDGES = "def reward(prompts, answers, labels):\n    "
THEIRS = "def reward_func(queries, prompts, labels):\n    return "


@pytest.mark.parametrize("text, parts", [
    (JUDGES + "return ['good'] * len(answers)", ["reward.py", "the reward of answer 0 is 'good'"]),
    (JUDGES + "return [None] * len(answers)", ["none of the 6 answers", "--reward"]),
    (JUDGES + "return ['1'] * len(answers)", ["reward.py", "the reward of answer 0 is '1'", "one number for each answer"]),
    (JUDGES + "return '1' * len(answers)", ["the rewards are '111111'"]), (JUDGES + "return [10**5000] * len(answers)", ["the reward of answer 0 is a int"]),
    (THEIRS + "{'rewards': [1] * 6, 'weights': [1] * 6}", ["reward.py", "'weights' beside the rewards", "leave it out"]),
    (THEIRS + "{'rewards': [1] * 6, 'scores': [0] * 6}", ["scores differ from its rewards"]), (THEIRS + "[1] * 6", ['no list "rewards": [1, 1']),
    ("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'acc': 1}", ["reward.py", "compute_score returned {'acc': 1}", '{"score": number']),
    ("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return ground_truth + 1", ["reward.py", "TypeError", "(line 2 of "]),
    (JUDGES + "return None", ["reward.py", "the rewards are None", "one number for each answer"]),
    (JUDGES + "return [1 / 0]", ["reward.py", "ZeroDivisionError", "line 2"]), (JUDGES + "return [1]", ["1 rewards for 6 answers"]),
    (JUDGES + "return [float('nan')] * len(answers)", ["nan", "answer 0"]), (JUDGES + "return [1, -float('inf')] * 3", ["-inf", "answer 1"]),
    (JUDGES + "return [0, 1e308] * 3", ["answer 1 is 1e+308", "within +-1e+30", "--reward_weights"]),
    ("def reword(prompts, answers, labels):\n    return []", ["reward.py", "defines neither"]), ("import nothing_of_that_name", ["nothing_of_that_name"]),
    ("def reward(completions):\n    return completions[99]", ["IndexError", "(line 2 of "]),
    ("def reward(completions, solution):\n    return [0]", ["TypeError: reward() takes solution, and the records have the columns none\n  fix: def reward(prompts, answers, labels), or TRL's"]),
    ("def reward(completions, trainer_state, log_extra):\n    return [0]", ["TypeError: reward() takes trainer_state, log_extra, which only TRL's trainer has"]),
    (JUDGES + r"raise ValueError('a\0b' + 9000 * 'x')", [r"ValueError: a\x00bxxx", "bytes) ... xxx", "\n  fix: def reward"]),
    (JUDGES + "import os; os._exit(1)", ["ended without an answer, twice"]),
    (JUDGES + "import time; time.sleep(60)", ["longer than 2 s", "--comm_timeout"]), (None, ["none.py", "no such file"])])
def test_bad_reward_functions_are_named(text, parts, tmp_path):
    file = reward_file(tmp_path, text + "\n") if text else tmp_path / "none.py"
    refused(words(tmp_path / "run", None, **ITERATION, reward=file, comm_timeout=2), *parts)


# ---- servers ----------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def server(*answers):
    """Yields the address and the list of requests. `answers` are (status, body), the last one for all further requests; None closes the connection."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers[min(len(requests), len(answers)) - 1]
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer[0])
            self.end_headers()
            self.wfile.write((answer[1](requests[-1]) if callable(answer[1]) else answer[1]).encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/get_reward", requests
        http.shutdown()


def lengths(request):
    return json.dumps({"rewards": [len(q.removesuffix("<|end|>")) - len(p) for q, p in zip(request["query"], request["prompts"])]})


def test_rewards_by_openrlhfs_functions_and_servers(tmp_path):
    """Their texts include special tokens, here the end of an answer. The program repeats a request if the server is not ready."""
    text = ("def reward_func(queries, prompts, labels):\n    assert all(q.startswith(p) and p.endswith('<|assistant|>') for q, p in zip(queries, prompts))\n"
            "    rewards = [len(q.removesuffix('<|end|>')) - len(p) for q, p in zip(queries, prompts)]\n"
            "    return {'rewards': rewards, 'scores': rewards}\n")
    theirs = reward_file(tmp_path, text).rename(tmp_path / "theirs.py")
    with server((503, "starting"), None, (200, lengths)) as (address, requests):
        for name, reward in {"ours": reward_file(tmp_path, OF_LENGTHS), "theirs": theirs, "server": address}.items():
            judge(tmp_path / name, reward)
    assert first_step(tmp_path / "server")["reward"] == first_step(tmp_path / "theirs")["reward"] == first_step(tmp_path / "ours")["reward"]
    assert len(requests) == 3 and len(requests[0]["labels"]) == 6
    logs = reward_file(tmp_path, THEIRS + "{'rewards': [1] * 6, 'extra_logs': {'length': [2] * 6}}\n")
    result = call(words(tmp_path / "logs", None, **ITERATION, reward=logs, max_steps=2))
    assert result.returncode == 0 and result.stderr == "note: the log does not show extra_logs of a reward function\n", result.stderr


@pytest.mark.parametrize("answer, parts", [
    ((500, "no such thing"), ["status 500: no such thing"]), ((200, "hello"), ["not JSON", "hello"]), ((200, "[1]"), ['no list "rewards"']),
    ((200, '{"rewards": [1, 2]}'), ["2 rewards for 6 answers"]), ((200, '{"rewards": ["a", "b"]}'), ["the reward of answer 0 is 'a'"]),
    ((200, '{"rewards": [1, 1, 1, 1, 1, 1], "reward": [0]}'), ["'reward' beside the rewards"]), ((503, "busy"), ["status 503: busy"]),
    (None, ["cannot be reached", "resumes from its last checkpoint"])])
def test_bad_servers_are_named(answer, parts, tmp_path):
    with server(answer) as (address, _):
        refused(words(tmp_path / "run", None, **ITERATION, reward=address), address, *parts)


def test_the_answer_of_a_server_is_limited(monkeypatch):
    monkeypatch.setattr(reward_worker, "MOST_BYTES", 20)
    with server((200, '{"rewards": [1]}'), (200, '{"rewards": [1, 2, 3]}')) as (address, _):
        ask = reward_worker.of_server(address)
        asked = {"prompts": ["a"], "answers": ["b"], "labels": [""], "raw_prompts": ["a"], "raw_answers": ["b"]}
        assert ask(**asked) == [1]
        with pytest.raises(ValueError, match="the server's answer has more than 20 bytes"):
            ask(**asked)


# ---- reward models ----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A model that has learned to write letters."""
    output = tmp_path_factory.mktemp("policy") / "model"
    train(output, model=DEMO, data=PROMPTS, max_steps=60, train_batch_size=16, learning_rate=1e-3, max_len=128)
    return output


def head(directory, model, scale=1, **config):
    """A reward model with the backbone of `model` and a random head."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("log*", "step_*", "best"))
    change_json(directory / "config.json", architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}, **config)
    tensors = read_tensors(model / "model.safetensors")
    score = scale * np.random.default_rng(1).standard_normal((1, tensors["model.norm.weight"].size), np.float32)
    write_tensors(directory / "model.safetensors", {**tensors, "score.weight": score})
    return directory


@pytest.fixture(scope="module")
def reward_model(policy, tmp_path_factory):
    return head(tmp_path_factory.mktemp("rm") / "rm", policy)


def scores(tmp_path, model, answers):
    """The scores of prompts with their answers, by the task eval."""
    sequences = [np.array(a["prompt_ids"] + a["completion_ids"]) for a in answers]
    data = write_data(tmp_path / "sequences.safetensors", [(s, np.arange(len(s)) > 0) for s in sequences], vocab=260)
    succeeds(command("eval", model=model, data=data, scores=tmp_path / "scores.jsonl", max_len=128))
    return [line["score"] for line in read_lines(tmp_path / "scores.jsonl")]


def judge_by(output, policy, reward, *flags, **options):
    sample(output, PROMPTS, *flags, **{"model": policy, "reward": reward, "rollout_batch_size": 3, "n": 2, "max_steps": 1, "save_rollouts": "true",
                                       "temperature": 0.3, **options})
    return saved_answers(output)


@pytest.mark.parametrize("mesh", [{}, {"ranks": 4, "ring_attn_size": 2, "sp_mode": "gather"}])
def test_rewards_by_a_model(mesh, policy, tmp_path):
    """Normalised by the mean and deviation in config.json."""
    model = head(tmp_path / "rm", policy, mean=0.5, std=2.0)
    answers = judge_by(tmp_path / "run", policy, model, normalize_reward="true", **mesh)
    want = scores(tmp_path, model, answers)
    assert [2 * a["reward"] + 0.5 for a in answers] == pytest.approx(want, abs=1e-5) and np.std(want) > 0.1
    sure = judge_by(tmp_path / "sure", policy, model, temperature=1e-3, n=8, **mesh)  # equal answers have equal rewards, to the last bit
    assert len({(*a["prompt_ids"], *a["completion_ids"]) for a in sure}) == len({a["reward"] for a in sure}) < len(sure)


def test_a_reward_model_with_another_tokenizer_reads_the_text(policy, reward_model, tmp_path):
    """The same model with its vocabulary in another order gives the same scores. A note names the policy's special tokens that it lacks."""
    other = shutil.copytree(reward_model, tmp_path / "other")
    order = np.arange(260)
    order[:256] = np.random.default_rng(2).permutation(256)  # the new id of each token
    tensors = read_tensors(other / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[order] = embedding.copy()
    write_tensors(other / "model.safetensors", tensors)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {token: int(order[i]) for token, i in tokenizer["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    one, two = (judge_by(tmp_path / name, policy, path) for name, path in (("one", reward_model), ("two", other)))
    assert [a["completion_ids"] for a in one] == [a["completion_ids"] for a in two]
    assert [a["reward"] for a in two] == pytest.approx([a["reward"] for a in one], abs=1e-5)
    for file in other.glob("token*.json"):
        file.write_text(file.read_text().replace("<|assistant|>", "<|helper|>"))
    said = sample(tmp_path / "three", PROMPTS, model=policy, reward=other, rollout_batch_size=3, n=2, max_steps=2)
    assert said.count("has no <|assistant|>, which the reward model therefore reads as plain text") == 1


def test_several_rewards(policy, reward_model, tmp_path):
    model, function = reward_model, reward_file(tmp_path, OF_LENGTHS)
    answers = judge_by(tmp_path / "run", policy, f"{model},{function},exact_match", reward_weights="2,0.5,1")
    by_model = scores(tmp_path, model, answers)
    line = first_step(tmp_path / "run")
    assert line[f"reward/{model}"] == pytest.approx(np.mean(by_model), abs=1e-5) and line["reward/exact_match"] == 0
    assert np.mean([a["reward"] for a in answers]) == pytest.approx(2 * line[f"reward/{model}"] + 0.5 * line[f"reward/{function}"], abs=1e-6)


def test_the_plan_counts_reward_models(policy, reward_model):
    one, two = (succeeds(command("grpo", "--plan", model=policy, reward=reward, **more))
                for reward, more in ((reward_model, {}), (f"{reward_model},{reward_model}", {"kl_coef": 0.1})))
    assert one.count("a reward model, resident") == 1 and two.count("a reward model, resident") == 2
    assert "the reference model, resident" in two and "the reference model" not in one


@pytest.mark.parametrize("change, options, parts", [
    ({}, {"normalize_reward": "true"}, ["--normalize_reward", '"mean"']),
    ({"max_position_embeddings": 20}, {}, ["tokens for the reward model", "end at 20"]),
    ({"scale": np.nan}, {}, ["score.weight holds a NaN"]), ({"scale": 1e30}, {}, ["score.weight holds a NaN", "a number beyond 1.8e19"]),
    ({"mean": 0.5, "std": 0.0}, {"normalize_reward": "true"}, ["the deviation 0", "not a finite reward"]),
])
def test_bad_reward_models_are_named(change, options, parts, policy, tmp_path):
    model = head(tmp_path / "rm", policy, **change)
    refused(words(tmp_path / "run", None, **{**ITERATION, "model": policy, "reward": model, **options}), *parts)


# ---- scripts/serve_rm.py ----------------------------------------------------------------------------------------------------------

SERVE = [sys.executable, ROOT / "scripts" / "serve_rm.py", "--port", "0"]


@contextlib.contextmanager
def serving(model):
    """The server of a reward model, and its address."""
    process = start([*SERVE, "--model", model, "--threads", "1", "--row_tokens", "256"])
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture(scope="module")
def served(reward_model):
    with serving(reward_model) as (_, address):
        yield address


def answered(address, body, method="POST", **headers):
    """Status and JSON of the answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers, method=method), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(address, *texts):
    return answered(address, json.dumps({"query": texts}).encode())


def together(clients, call_of):
    """Results of call_of(number) for concurrent clients."""
    barrier = threading.Barrier(clients)

    def client(number):
        barrier.wait()
        return call_of(number)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(client, range(clients)))


def test_a_served_model_is_the_model(served, reward_model, policy, tmp_path):
    one, two = (judge_by(tmp_path / name, policy, reward) for name, reward in (("model", reward_model), ("server", served)))
    assert [a["reward"] for a in two] == pytest.approx([a["reward"] for a in one], abs=1e-5)


def test_concurrent_clients_get_their_rewards(served):
    texts = [f"{number} is a number" for number in range(100)]
    status, want = ask(served, *texts)
    assert status == 200 and len(set(want["rewards"])) > 50
    for number, (status, got) in enumerate(together(100, lambda number: ask(served, texts[number]))):
        assert status == 200 and got["rewards"] == pytest.approx([want["rewards"][number]], abs=1e-5)


@pytest.mark.parametrize("body, parts", [
    *[(body, ['a request is {"query"']) for body in (b"hello", b"", b"\xff\xfe", b"[" * 100_000, b"[1]", b'{"queries": []}', b'{"query": "text"}',
                                                   b'{"query": ["a", null]}', b'{"query": ["\\ud800"]}')],
    (b'{"query": ["a", ""]}', ["sequence 1", "0 tokens", "1 to 256"]),
    (json.dumps({"query": ["a" * 300]}).encode(), ["sequence 0", "300 tokens", "1 to 256"]),
])
def test_bad_requests_are_answered(body, parts, served):
    status, answer = answered(served, body)
    assert status == 400 and all(part in answer["error"] for part in parts), answer
    assert ask(served) == (200, {"rewards": []})


def test_other_paths_and_methods_are_refused(served):
    assert answered(served.replace("get_reward", "score"), b"{}") == (404, {"error": "there is no /score\n  fix: /get_reward"})
    assert answered(served, None, "GET") == (405, {"error": "GET is not a reward request\n  fix: POST"})


@pytest.mark.parametrize("header, status", [(b"Content-Length: 1000000000", b"413"), (b"X: " + b"x" * 300_000, b"431")])
def test_the_size_of_a_request_is_limited(header, status, served):
    address = urllib.parse.urlsplit(served)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(b"POST /get_reward HTTP/1.1\r\n" + header + b"\r\n\r\n")
        assert connection.recv(100).split()[1] == status


def child_of(process):
    return int(next(path for path in pathlib.Path(f"/proc/{process.pid}/task").glob("*/children") if path.read_text()).read_text())


def test_if_the_model_ends_all_waiting_clients_get_an_error_and_the_server_ends(reward_model):
    with serving(reward_model) as (process, address):
        model = child_of(process)
        os.kill(model, signal.SIGSTOP)
        threading.Timer(1, os.kill, [model, signal.SIGKILL]).start()
        for status, answer in together(20, lambda number: ask(address, "a")):
            assert status == 503 and "train_llama has ended\n  fix: " in answer["error"]
        _, error = process.communicate(timeout=20)
        assert process.returncode == 1 and error.count("serve_rm.py: train_llama has ended\n  fix: ") == 1 and "Traceback" not in error, error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_model(number, reward_model):
    with serving(reward_model) as (process, address):
        model = child_of(process)
        process.send_signal(number)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == 0
        while pathlib.Path(f"/proc/{model}/stat").exists():
            time.sleep(0.01)


@pytest.mark.parametrize("flags, said", [
    (["--model", "none"], "--model none: there is no such directory\n"), (["--model", DEMO], "train_llama has ended"),
    *((flags, "cannot listen at ") for flags in (["--host", "192.0.2.1"], ["--port", "70000"], ["--host", "no.such.host.invalid"]))])
def test_models_and_addresses_that_cannot_be_served(flags, said, reward_model):
    result = call([*SERVE, "--model", reward_model, *flags])
    assert result.returncode == 1 and f"serve_rm.py: {said}" in result.stderr and "\n  fix: " in result.stderr, result.stderr
    assert ("needs a reward model" in result.stderr) == (DEMO in flags)
