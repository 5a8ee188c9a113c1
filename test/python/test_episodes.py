"""Episodes of grpo: turns of the policy, between them the observations of a user's environment. Their tokens are only appended to, and are those of the whole
chat; a fault of an environment ends in one message."""

import shutil
import signal
import time

import numpy as np
import pytest
from preparing import CALLING, CHATML, CHATML_STRIPPED, HEADLINES, LLAMA2, PLAIN, THINKING, make_tokenizer, said
from runs import (
    DEMO, ENVIRONMENT, VARYING, call, change_json, chat, command, descendants, expect_end_of, first_step, log_lines, near, refused, same_run, start, succeeds,
    wait_for, weights, write_lines)
from test_grpo import saved_answers

import prepare
from environment_worker import Rendering, WrongAnswer
from tokenizer import Tokenizer

def environment_file(directory, text):
    (directory / "environment.py").write_text(text)
    return directory / "environment.py"


# ---- the tokens of an observation -------------------------------------------------------------------------------------------------------

TURNS = ["A", "Bye <b>", ""]
OBSERVED = [{"role": "user", "content": "Wrong."}, {"role": "tool", "content": '{"x": 1}'}, {"role": "user", "content": " again\n"}]


def rendering(directory, template, most=50, **tokenizer):
    path = str(make_tokenizer(directory / "tokenizer", template, **tokenizer))
    ends = Tokenizer(path).hf.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    return Rendering(path, template, "", ends, most)


def played(rendering, turns, observed, ends_by_token=True):
    """Returns the ids of an episode, and the text of its whole chat."""
    tokenizer, template = rendering.tokenizer, rendering.template
    messages = chat("Hi")
    text, _ = template.prompt(messages, rendering.variables)
    ids, whole = rendering.encoding(text).ids, [*messages]
    for answer, observation in zip(turns, observed):
        ids += rendering.encoding(answer).ids + ([tokenizer.hf.convert_tokens_to_ids("<|im_end|>")] if ends_by_token else [])
        ids += rendering.ids(observation, messages, ends_by_token)
        whole += [said(answer), observation]
    return ids, template.prompt(whole, rendering.variables)[0]


@pytest.mark.parametrize("template", [CHATML, CALLING, THINKING], ids=["chatml", "calling", "thinking"])
@pytest.mark.parametrize("ends_by_token", [True, False])
def test_an_episode_has_the_tokens_of_the_whole_chat(template, ends_by_token, tmp_path, capsys):
    parts = rendering(tmp_path, template, merges=[])
    ids, text = played(parts, TURNS, OBSERVED, ends_by_token)
    assert parts.tokenizer.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    assert ids == parts.encoding(text).ids
    assert capsys.readouterr().err == ""


def test_the_end_of_a_turn_is_the_templates(tmp_path):
    for number, (template, options, want) in enumerate([
            (LLAMA2, {"bos": "<s>"}, "<s>[INST] Wrong. [/INST]"), (HEADLINES, {}, "\n\n### Instruction:\nWrong.\n\n### Response:\n"),
            (HEADLINES.replace("'### Instruction", "'<s>### Instruction"), {}, "\n\n<s>### Instruction:\nWrong.\n\n### Response:\n"),
            (PLAIN, {}, "\nuser: Wrong.\n")]):
        (tmp_path / str(number)).mkdir()
        parts = rendering(tmp_path / str(number), template, merges=[], **options)
        ids = parts.ids("Wrong.", chat("Hi"), True)
        assert parts.tokenizer.hf.decode(ids, skip_special_tokens=False) == want


def test_a_template_that_changes_what_was_read_is_named(tmp_path, capsys):
    """As in DeepSeek-R1: the generation prompt opens a thought, which the chat does not have afterwards."""
    parts = rendering(tmp_path, CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif"))
    messages = chat("Hi")
    for _ in range(2):
        ids = parts.ids("Wrong.", messages, True)
        assert parts.tokenizer.hf.decode(ids, skip_special_tokens=False) == "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n<think>"
    assert capsys.readouterr().err.count("note: the chat template changes what is before a turn") == 1


def test_long_observations_are_cut_in_the_middle(tmp_path):
    parts = rendering(tmp_path, CHATML, most=7, merges=[])
    assert parts.cut("0123456") == "0123456"
    assert parts.cut("01234567") == "012...4567"
    begin = time.monotonic()
    assert parts.cut("0" * 1_000_000 + "1234") == "000...1234"
    assert time.monotonic() - begin < 1
    plain = Rendering(str(DEMO), "", "", [], 6)
    assert plain.tokenizer.hf.decode(plain.ids("abcdefgh", [], True)) == "abc...fgh"


@pytest.mark.parametrize("observation", [7, [], [7], {"role": "user"}, {"role": "user", "content": 7}])
def test_other_observations_are_refused(observation, tmp_path):
    with pytest.raises(WrongAnswer):
        rendering(tmp_path, CHATML).ids(observation, chat("Hi"), True)


# ---- whole runs ---------------------------------------------------------------------------------------------------------------------------

# It counts turns, and answers later or sooner as DELAYS says; some episodes end after one turn, some are never done.
COUNTS = """
import asyncio, os, zlib
print("noise")
class Environment:
    async def reset(self, prompt, label):
        self.turns, self.last = 0, 1 + len(prompt) % 4
        assert prompt
        print("noise")
    async def step(self, answer):
        await asyncio.sleep(zlib.crc32((answer + os.environ.get("DELAYS", "")).encode()) % 50 / 1000 if "DELAYS" in os.environ else 0)
        self.turns += 1
        return {"observation": f"{self.turns} {len(answer)}", "reward": len(answer) / 100, "done": self.turns == self.last}
    async def close(self):
        await asyncio.sleep(0)
"""
OF_LENGTHS = """
class Environment:
    def step(self, answer):
        return {"reward": len(answer), "done": True}
"""


ENDS = {259, *range(60, 100)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo's model with random weights, and with many tokens that end a turn. Prompts, which are chats, are beside it."""
    directory = tmp_path_factory.mktemp("episodes")
    shutil.copytree(DEMO, directory / "model")
    change_json(directory / "model" / "config.json", eos_token_id=sorted(ENDS))
    records = write_lines(directory / "prompts.jsonl", [{"prompt": chat("reverse " + word), "completion": [said(word[::-1])]} for word in
                                                        "cat horse mouse bee elephant ox dog goose whale ant".split()])
    assert prepare.main(["rl", "--input", str(records), "--tokenizer", str(DEMO), "--out", str(directory / "prompts.safetensors")]) == 0
    return directory / "model"


def words(output, environment, model, task="grpo", **options):
    return command(task, **{"model": model, "data": model.parent / "prompts.safetensors", "output_dir": output, "environment": environment, "rollout_batch_size": 4, "n": 3,
                              "max_new_tokens": 90, "train_batch_size": 12, "max_steps": 2, "advantage_estimator": "reinforce", "learning_rate": 1e-3,
                              "temperature": 1, "recompute": "cheap", "max_len": 256, "save_rollouts": "true", **options})


def play(output, environment, model, **options):
    delays = options.pop("delays", None)
    result = call(words(output, environment, model, **options), env=ENVIRONMENT | ({"DELAYS": delays} if delays else {}))
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def expect_same_episodes(output, other):
    """Only rounding differs, of products in passes of other sizes: by a few units in the last place of a logit."""
    for episode, same in zip(saved_answers(output), saved_answers(other), strict=True):
        assert np.allclose(episode.pop("logprobs"), same.pop("logprobs"), rtol=0, atol=5e-6)
        assert episode == same


def test_episodes_do_not_depend_on_delays_ranks_or_the_cache(model, tmp_path):
    environment = environment_file(tmp_path, COUNTS)
    for name, options in {"one": {}, "slow": {"delays": "1"}, "other": {"delays": "2", "max_sequences": 3}, "ranks": {"ranks": 2, "zero_stage": 3},
                          "tensor": {"ranks": 2, "tensor_parallel": 2, "delays": "3"}, "ring": {"ranks": 2, "ring_attn_size": 2}}.items():
        result = play(tmp_path / name, environment, model, **options)
        assert "noise" in result.stderr
    one = log_lines(tmp_path / "one")[1:]
    assert 1.3 < one[0]["turns"] < 4
    for name in ("slow", "other", "ranks", "tensor", "ring"):
        expect_same_episodes(tmp_path / "one", tmp_path / name)
        near(log_lines(tmp_path / name)[1]["grad_norm"], one[0]["grad_norm"], 1e-4)


def test_sampled_tokens_are_learned_from_and_observed_ones_are_read(model, tmp_path):
    """The log-probabilities of sampling are those of the training pass, and a file with the episodes gives the same step."""
    play(tmp_path / "run", environment_file(tmp_path, COUNTS), model, max_steps=1)
    step, episodes = first_step(tmp_path / "run"), saved_answers(tmp_path / "run")
    assert step["clip_ratio"] == 0 and abs(step["ppo_kl"]) < 1e-6
    masks = [episode["completion_mask"] for episode in episodes]
    assert step["response_length"] == pytest.approx(np.mean([sum(mask) for mask in masks]))
    assert step["turns"] == pytest.approx(np.mean([sum(now > before for before, now in zip([0, *mask], mask)) for mask in masks]))
    hf, observed = Tokenizer(str(DEMO)).hf, 0
    for episode in episodes:
        turns, rewards = [[]], []
        for i, sampled, before in zip(episode["completion_ids"], episode["completion_mask"], [1, *episode["completion_mask"]]):
            turns += [[]] if sampled != before else []
            turns[-1].append(i)
        for number, (turn, observation) in enumerate(zip(turns[::2], [*turns[1::2], None]), 1):
            ended = turn[-1] in ENDS
            answer = hf.decode(turn[:-1] if ended else turn, skip_special_tokens=True)
            rewards.append(len(answer) / 100)
            if observation:
                observed += 1
                assert hf.decode(observation, skip_special_tokens=False) == f"<|user|>{number} {len(answer)}<|end|><|assistant|>"
        assert episode["turn_rewards"] == rewards and episode["reward"] == pytest.approx(sum(rewards))
        assert episode["truncated"] == (not ended or len(turns) % 2 == 0 or episode["truncated"])
    assert observed > 6
    first = episodes[0]["completion_ids"]
    assert step["answer"]["text"] == hf.decode(first[:-1] if first[-1] in ENDS else first, skip_special_tokens=False)
    assert "<|end|><|assistant|>" in step["answer"]["text"]
    succeeds(words(tmp_path / "again", None, model, data=None, rollouts=tmp_path / "run/rollouts/00000000.jsonl", max_steps=1, save_rollouts=None))
    again = first_step(tmp_path / "again")
    assert all(step[key] == again[key] for key in ("reward", "response_length", "truncated", "tokens"))
    near(again["grad_norm"], step["grad_norm"], 1e-4)


def test_a_critic_sees_the_rewards_of_turns(model, tmp_path):
    """A file with the episodes gives the same step; without the rewards of turns it gives other returns."""
    play(tmp_path / "run", environment_file(tmp_path, COUNTS), model, advantage_estimator=None, max_steps=1, task="ppo")
    live, episodes = first_step(tmp_path / "run"), saved_answers(tmp_path / "run")
    assert any(len(episode["turn_rewards"]) > 1 for episode in episodes)
    for name in ("again", "summed"):
        lines = [{key: value for key, value in episode.items() if name == "again" or key != "turn_rewards"} for episode in episodes]
        succeeds(words(tmp_path / name, None, model, data=None, rollouts=write_lines(tmp_path / f"{name}.jsonl", lines), max_steps=1, save_rollouts=None,
                       advantage_estimator=None, task="ppo"))
    again, summed = first_step(tmp_path / "again"), first_step(tmp_path / "summed")
    assert again["reward"] == live["reward"]
    for key in ("policy_loss", "loss", "value_loss", "return", "value", "grad_norm", "critic_grad_norm"):
        near(again[key], live[key], 1e-4)
    assert summed["reward"] == live["reward"] and summed["return"] > live["return"] + 0.01


def test_a_reward_at_the_end_of_an_episode(model, tmp_path):
    text = STEP.format("return {'observation': 'x', 'reward': 1, 'done': len(answer) < 9}") + "    async def get_reward(self):\n        return 10\n"
    play(tmp_path / "run", environment_file(tmp_path, text), model, max_steps=1)
    for episode in saved_answers(tmp_path / "run"):
        *first, last = episode["turn_rewards"]
        assert first == [1] * len(first) and last == 11


def test_an_episode_of_one_turn_is_an_answer(model, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompts, answers, labels):\n    return map(len, answers)\n")
    play(tmp_path / "answers", None, model, reward=tmp_path / "reward.py")
    play(tmp_path / "episodes", environment_file(tmp_path, OF_LENGTHS), model)
    play(tmp_path / "limited", environment_file(tmp_path, OF_LENGTHS.replace('"done": True', '"observation": "x"')), model, max_turns=1)
    want = log_lines(tmp_path / "answers")[1:]
    for name in ("episodes", "limited"):
        got = log_lines(tmp_path / name)[1:]
        for line, same in zip(want, got, strict=True):
            assert {key: value for key, value in line.items() if key not in VARYING} == {key: same[key] for key in line if key not in VARYING}
        assert weights(tmp_path / name) == weights(tmp_path / "answers")


def test_ppo_and_evaluation_of_episodes(model, tmp_path):
    play(tmp_path / "run", environment_file(tmp_path, COUNTS), model, advantage_estimator=None, eval_fraction=0.2, eval_steps=1, max_steps=1,
         task="ppo", max_samples=20)
    lines = log_lines(tmp_path / "run")
    assert any("value_loss" in line for line in lines) and any(line.get("eval_reward", 0) > 0 for line in lines)


# A text of reset, and turns that do not depend on the prompt.
TEXTS = """
import itertools
numbers = itertools.count()
class Environment:
    def reset(self, messages):
        return TEXT
    def step(self, answer):
        return {"observation": f"{len(answer)}", "reward": len(answer) / 100, "done": len(answer) % 3 == 0}
"""


def texts_of(ids):
    return Tokenizer(str(DEMO)).hf.decode(ids, skip_special_tokens=False)


def test_a_text_of_reset_is_a_part_of_the_prompt(model, tmp_path):
    """The run is that of prompts with the text, on any ranks."""
    records = write_lines(tmp_path / "longer.jsonl", [{"prompt": chat(f"reverse {word} {len(word)}!"), "completion": [said(word[::-1])]} for word in
                                                      "cat horse mouse bee elephant ox dog goose whale ant".split()])
    assert prepare.main(["rl", "--input", str(records), "--tokenizer", str(DEMO), "--out", str(tmp_path / "longer.safetensors")]) == 0
    (tmp_path / "text").mkdir()
    text = environment_file(tmp_path / "text", TEXTS.replace("TEXT", 'f" {len(messages[-1][\'content\'].split()[1])}!"'))
    without = environment_file(tmp_path, TEXTS.replace("TEXT", "None"))
    play(tmp_path / "longer", without, model, data=tmp_path / "longer.safetensors")
    for name, options in {"one": {}, "few": {"max_sequences": 3}, "ranks": {"ranks": 2, "zero_stage": 3}, "tensor": {"ranks": 2, "tensor_parallel": 2}}.items():
        play(tmp_path / name, text, model, **options)
        expect_same_episodes(tmp_path / "longer", tmp_path / name)
        near(first_step(tmp_path / name)["grad_norm"], first_step(tmp_path / "longer")["grad_norm"], 1e-4)
    saved = saved_answers(tmp_path / "one")
    assert texts_of(saved[0]["prompt_ids"]) == "<|user|>" + first_step(tmp_path / "one")["answer"]["prompt"].strip() + "<|end|><|assistant|>"


def test_episodes_of_a_group_may_have_prompts_of_their_own(model, tmp_path):
    """The trainer's log-probabilities are the sampler's, answers share only the prompts that are the same, and the saved episodes give the same step."""
    file = environment_file(tmp_path, TEXTS.replace("TEXT", "[None, ' once', ' once'][next(numbers) % 3]"))
    for name, options in {"run": {}, "apart": {"share_prompts": "false"}, "tensor": {"ranks": 2, "tensor_parallel": 2}, "greedy": {"eval_fraction": 0.2, "eval_steps": 1}}.items():
        play(tmp_path / name, file, model, max_steps=1, **options)
    step, saved = first_step(tmp_path / "run"), saved_answers(tmp_path / "run")
    for i, episode in enumerate(saved):
        text = texts_of(episode["prompt_ids"])
        assert text.startswith("<|user|>reverse ") and text.endswith("<|end|><|assistant|>") and (" once<|end|>" in text) == (i % 3 > 0)
        assert episode["group"] == saved[i - i % 3]["group"] and len(episode["logprobs"]) == len(episode["completion_ids"])
    assert step["clip_ratio"] == 0 and abs(step["ppo_kl"]) < 1e-6
    near(first_step(tmp_path / "apart")["grad_norm"], step["grad_norm"], 1e-4)
    expect_same_episodes(tmp_path / "run", tmp_path / "tensor")
    saved_file = tmp_path / "run/rollouts/00000000.jsonl"
    succeeds(words(tmp_path / "again", None, model, data=None, rollouts=saved_file, max_steps=1, save_rollouts=None))
    near(first_step(tmp_path / "again")["grad_norm"], step["grad_norm"], 1e-4)
    lines = [{key: value for key, value in episode.items() if key != "turn_rewards"} for episode in saved]
    refused(words(tmp_path / "answers", None, model, data=None, rollouts=write_lines(tmp_path / "answers.jsonl", lines), save_rollouts=None), "its prompt_ids differ")


def test_a_text_of_reset_needs_room(model, tmp_path):
    file = environment_file(tmp_path, TEXTS.replace("TEXT", "'x' * 100"))
    refused(words(tmp_path / "row", file, model, row_tokens=128, max_len=128), f"a prompt of the reset of {file} has", "but a row holds")
    play(tmp_path / "run", file, model, row_tokens=512, max_steps=1)
    assert all("xxx<|end|><|assistant|>" in texts_of(episode["prompt_ids"]) for episode in saved_answers(tmp_path / "run"))
    refused(words(tmp_path / "less", file, model, row_tokens=512, max_observation=99), "100 tokens longer", "--max_observation 100")


STEP = "class Environment:\n    def step(self, answer):\n        {}\n"
FAULTS = {
    "syntax": ("class", ["SyntaxError"]),
    "no class": ("def step(answer): ...", ["defines neither a class Environment with a method step nor tools", "rl.md#episodes"]),
    "raises": (STEP.format("1 / 0"), ["ZeroDivisionError", "line 3 of"]),
    "raises in reset": (STEP.format("...") + "    def reset(self): 1 / 0\n", ["ZeroDivisionError", "line 4 of"]),
    "raises in close": (STEP.format('return {"done": True}') + "    async def close(self): 1 / 0\n", ["ZeroDivisionError", "line 4 of"]),
    "reset returns": (STEP.format("...") + "    def reset(self): return 7\n", ["reset returned 7"]),
    "reset returns half a prompt": (STEP.format("...") + "    def reset(self): return {'raw_prompt': 7}\n", ["reset returned {'raw_prompt': 7}"]),
    "reset returns much": (STEP.format("...") + "    def reset(self): return 'x' * 257\n", ["257 tokens longer", "--max_observation 257"]),
    "reset is slow": (STEP.format("...") + "    def reset(self):\n        import time; time.sleep(60)\n", ["longer than 2 s", "--comm_timeout"]),
    "nothing": (STEP.format("pass"), ["step returned None"]),
    "a text": (STEP.format("return 'x'"), ["step returned 'x'"]),
    "an unknown key": (STEP.format("return {'observation': 'x', 'rewards': 1}"), ["step returned", "rewards"]),
    "neither": (STEP.format("return {'reward': 1}"), ["step returned {'reward': 1}"]),
    "an empty observation": (STEP.format("return {'observation': []}"), ["the observation is []"]),
    "a number": (STEP.format("return {'observation': 7}"), ["the observation is 7"]),
    "an unknown role": (STEP.format("return {'observation': {'role': 'asistant', 'content': 'x'}}"), ["asistant"]),
    "no number": (STEP.format("return {'reward': 'high', 'done': True}"), ["the reward is 'high'"]),
    "nan": (STEP.format("return {'reward': float('nan'), 'done': True}"), ["the reward is nan"]),
    "huge": (STEP.format("return {'reward': 1e31, 'done': True}"), ["1e+31", "within"]),
    "ends": (STEP.format("import os; os._exit(3)"), ["ended without an answer", "resumes"]),
    "exits": (STEP.format("raise SystemExit"), ["ended without an answer"]),
    "is slow": (STEP.format("import time; time.sleep(60)"), ["longer than 2 s", "--comm_timeout"]),
    "is slow in an async step": (STEP.replace("def", "async def").format("import asyncio; await asyncio.sleep(60)"), ["longer than 2 s"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_an_environment_end_in_one_message(name, model, tmp_path):
    text, parts = FAULTS[name]
    refused(words(tmp_path / "run", environment_file(tmp_path, text), model, comm_timeout=2 if "slow" in name else 600), "environment.py", *parts)


def test_faults_on_one_rank_end_the_run(model, tmp_path):
    environment = environment_file(tmp_path, STEP.format("if len(answer) > 3: 1 / 0\n        return {'done': True}"))
    for options in ({"zero_stage": 3}, {"tensor_parallel": 2}):
        refused(words(tmp_path / next(iter(options)), environment, model, ranks=2, **options), "environment.py", "ZeroDivisionError")


def test_episodes_without_a_reward_and_observations_of_a_megabyte(model, tmp_path):
    play(tmp_path / "none", environment_file(tmp_path, STEP.format("return {'done': True, 'reward': None if len(answer) % 2 else 1}")), model, max_steps=1)
    assert 0 < first_step(tmp_path / "none")["unscored"] < 1
    play(tmp_path / "big", environment_file(tmp_path, STEP.format("return {'observation': 'x' * 2**20, 'reward': 1}")), model, max_observation=10, max_turns=3,
         max_steps=1)
    for episode in saved_answers(tmp_path / "big"):
        text = Tokenizer(str(DEMO)).hf.decode([i for i, sampled in zip(episode["completion_ids"], episode["completion_mask"]) if not sampled])
        assert text.replace("<|user|>xxxxx...xxxxx<|end|><|assistant|>", "") in ("", "<|end|>")


# The forms of OpenRLHF's example, with the marks of the demo's template.
OF_OPENRLHF = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
class Number(float):  # in place of a tensor
    def item(self): return float(self)
class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0
    async def reset(self, states, **kwargs):
        self.last = 1 + len(states["observation"].removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")) % 4
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        text = states["action_text"]
        self.turns += 1
        assert states["observation_text"].startswith("<|user|>") and states["observation_text"].count("<|assistant|>") == self.turns
        reward = Number(len(text) / 100)
        return {"rewards": reward, "scores": reward, "environment_feedback": f"<|end|><|user|>{self.turns}<|end|><|assistant|>", "done": self.turns == self.last,
                "sampling_params": states.get("sampling_params"), "extra_logs": {"dummy": reward}}
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
RAW = """
class Environment:
    def reset(self, prompt, messages):
        assert messages == [{"role": "user", "content": prompt}]
        self.turns, self.last = 0, 1 + len(prompt) % 4
    def step(self, raw_answer):
        self.turns += 1
        return {"raw_observation": f"<|end|><|user|>{self.turns}<|end|><|assistant|>", "reward": len(raw_answer) / 100, "done": self.turns == self.last}
"""


def test_an_agent_of_openrlhf_is_an_environment(model, tmp_path):
    for name, text in {"agent": OF_OPENRLHF, "raw": RAW}.items():
        play(tmp_path / name, environment_file(tmp_path, text), model, max_steps=1)
    expect_same_episodes(tmp_path / "agent", tmp_path / "raw")
    assert first_step(tmp_path / "raw")["turns"] > 1.3
    for name, text in {"own": OF_OPENRLHF.replace('return {"observation": states["observation"]}', 'return {"observation": states["observation"].replace("<|end|>", "!<|end|>")}'),
                       "text": RAW.replace("% 4", "% 4\n        return '!'")}.items():
        play(tmp_path / name, environment_file(tmp_path, text), model, max_steps=1)
        assert "!<|end|><|assistant|>" in texts_of(saved_answers(tmp_path / name)[0]["prompt_ids"])
    expect_same_episodes(tmp_path / "own", tmp_path / "text")
    for old, new, parts in [('return {"observation": states["observation"]}', 'return {"observation": 7}', ["reset returned"]),
                            ('"scores": reward', '"scores": 7', ["scores differ"]), ('"done":', '"ended":', ["step returned"]),
                            ('states.get("sampling_params")', "{1: 2}", ["sampling_params"]),
                            ("super().__init__(AgentInstance)", "...\n    async def execute(self): ...", ["AgentExecutor has a method execute"])]:
        assert OF_OPENRLHF.count(old) == 1
        refused(words(tmp_path / parts[0], environment_file(tmp_path, OF_OPENRLHF.replace(old, new)), model), *parts)


@pytest.mark.parametrize("options, parts", [
    ({"environment": "none.py"}, ["none.py", "no such file"]), ({"reward": "reward.py"}, ["--environment", "--reward"]),
    ({"async_steps": 1}, ["--environment", "--async_steps"]), ({"environment": None, "max_turns": 2}, ["--max_turns", "--environment FILE.py"]),
    ({"environment": None, "max_observation": 9}, ["--max_observation", "--environment FILE.py"]),
    ({"max_observation": 1}, ["--max_observation", "at least 2"])])
def test_flags_of_episodes(options, parts, model, tmp_path):
    refused(words(tmp_path / "run", **{"environment": environment_file(tmp_path, OF_LENGTHS), "model": model, **options}), *parts)


# Once, within the second batch, a step starts a process and then computes. Beside this file the mark says that it does.
COMPUTES = """
import pathlib, subprocess, time
episodes, mark = 0, pathlib.Path(__file__).with_name("computes")
class Environment:
    def reset(self, prompt):
        global episodes
        episodes += 1
        self.turns, self.last = 0, 1 + len(prompt) % 4
    def step(self, answer):
        self.turns += 1
        if self.turns == 2 and episodes > EPISODES and not mark.exists():
            subprocess.Popen(["sleep", "1000"])
            mark.touch()
            time.sleep(1000)
        return {"observation": f"{self.turns} {len(answer)}", "reward": len(answer) / 100, "done": self.turns == self.last}
"""


@pytest.mark.parametrize("number, ranks", [(signal.SIGTERM, 1), (signal.SIGKILL, 1), (signal.SIGTERM, 2)])
def test_a_run_ends_while_its_environment_computes(number, ranks, model, tmp_path):
    """It ends at once, with all processes of the environment. One sequence at a time gives passes of equal sizes, so that the resumed run has the bits of an
    undisturbed one."""
    environment = environment_file(tmp_path, COMPUTES.replace("EPISODES", str(12 // ranks)))
    options = {"max_sequences": 1, "max_steps": 3, "save_steps": 1, **({"ranks": ranks, "zero_stage": 3} if ranks > 1 else {})}
    run = start(words(tmp_path / "run", environment, model, **options))
    wait_for((tmp_path / "computes").exists, run)
    children = descendants(run.pid)
    assert len(children) >= 2 * ranks + 1  # of each rank the worker and its guard, and the process that a step has started
    run.send_signal(number)
    said, error = run.communicate(timeout=60)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number), said + error
    assert ("SIGTERM: the run stops after this token" in error) == (number == signal.SIGTERM)
    expect_end_of(children)
    assert [line["step"] for line in log_lines(tmp_path / "run") if "step" in line] == [1]
    result = play(tmp_path / "run", environment, model, resume="auto", **options)
    assert "step_1" in result.stdout
    play(tmp_path / "straight", environment, model, **options)
    same_run(tmp_path / "run", tmp_path / "straight")
    for file in sorted((tmp_path / "straight/rollouts").iterdir()):
        assert (tmp_path / "run/rollouts" / file.name).read_bytes() == file.read_bytes()
