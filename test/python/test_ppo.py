"""Whole runs of ppo. On given rollouts, the steps of both models equal torch's, whatever the mesh. On its own answers, the critic learns to predict
rewards, and rewarded answers become likelier."""

from functools import partial

import pytest
import test_grpo
from runs import GOLDEN, command, first_step, log_lines, near, read_lines, refused, succeeds, weights, write_lines
from test_grpo import MESHES, POLICY, rollouts, rollouts_and_flags, use_program
from test_preference import reward_model

MODELS = POLICY["models"]
words, run = (partial(call, task="ppo", max_steps=3, max_epochs=3) for call in (test_grpo.words, test_grpo.run))  # steps of all rollouts


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "rollouts.jsonl", rollouts())


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    return reward_model(tmp_path_factory.mktemp("critic") / "model", "qwen3", MODELS["qwen3"]["score"])


def expect_steps(lines, want):
    for line, golden in zip(lines, want, strict=True):
        near(line["policy_loss"], golden["policy_loss"], 0, 1e-5 * (abs(golden["policy_loss"]) + 0.1))
        near(line["value_loss"], golden["value_loss"], 1e-5)
        near(line["explained_variance"], golden["explained_variance"], 1e-4)
        near(line["grad_norm"], golden["grad_norm"], 1e-4)
        near(line["critic_grad_norm"], golden["critic_grad_norm"], 1e-4)


# ---- given rollouts ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, program", [*((name, "") for name in MODELS), ("qwen3", "_emu")])
def test_steps_equal_torch(name, program, tmp_path, monkeypatch):
    use_program(monkeypatch, name, program)
    critic = reward_model(tmp_path / "critic", name, MODELS[name]["score"])
    for number, (case, want) in enumerate(MODELS[name]["ppo"].items()):
        if program and number:
            continue
        options = {"device": "cuda", "dtype": "f32"} if program else {**[*MESHES.values()][number], "row_tokens": 100 * (number % 2) or None}
        lines, flags = rollouts_and_flags(name, want)
        if flags.get("kl_coef"):
            options = {**options, "ref_model": GOLDEN / MODELS[name]["reference"]}
        run(tmp_path / case, write_lines(tmp_path / "rollouts.jsonl", lines), name=name, critic_model=critic, **options, **flags)
        expect_steps(log_lines(tmp_path / case)[1:4], want["steps"])


def test_freezing_steps_train_the_critic_alone(file, tmp_path):
    """Without --critic_model the critic starts with a new head."""
    said = run(tmp_path / "run", file, freezing_steps=2, max_steps=4, max_epochs=4, learning_rate=1e-3, critic_learning_rate=1e-2,
               lr_scheduler="constant")
    lines = log_lines(tmp_path / "run")[1:5]
    assert "the reward head starts from random values" in said
    assert abs(lines[0]["value"]) < 0.5 and lines[0]["value_clip_ratio"] == 0 and lines[0]["critic_grad_norm"] > 0
    assert [line["lr"] for line in lines] == [0, 0, 1e-3, 1e-3]
    losses = [line["policy_loss"] for line in lines]
    assert losses[:3] == pytest.approx([losses[0]] * 3, abs=1e-6) and abs(losses[3] - losses[0]) > 1e-3
    assert len({line["value_loss"] for line in lines}) == 4


def test_the_critic_is_trained_in_full_also_beside_adapters(file, critic, tmp_path):
    options = {"critic_model": critic, "critic_learning_rate": 1e-3, "lr_scheduler": "constant"}
    run(tmp_path / "run", file, lora_rank=4, **options)
    run(tmp_path / "whole", file, **options)
    assert [line["value_loss"] for line in log_lines(tmp_path / "run")[1:]] == [line["value_loss"] for line in log_lines(tmp_path / "whole")[1:]]
    assert (tmp_path / "run" / "adapter_config.json").exists() and weights(tmp_path / "run" / "critic") == weights(tmp_path / "whole" / "critic")


def test_the_critic_is_saved_as_a_reward_model(file, critic, tmp_path):
    """A second run begins with the first one's critic."""
    options = {"critic_learning_rate": 1e-3, "lr_scheduler": "constant", "max_epochs": 9}
    run(tmp_path / "one", file, critic_model=critic, **options)
    run(tmp_path / "longer", file, critic_model=critic, max_steps=4, **options)
    run(tmp_path / "two", file, critic_model=tmp_path / "one" / "critic")
    near(first_step(tmp_path / "two")["value"], log_lines(tmp_path / "longer")[4]["value"], 1e-5)
    assert abs(log_lines(tmp_path / "longer")[4]["value"] - log_lines(tmp_path / "longer")[1]["value"]) > 1e-3
    scores = tmp_path / "scores.jsonl"
    succeeds(command("eval", model=tmp_path / "one" / "critic", data=GOLDEN / "pairs.safetensors", max_len=128, scores=scores))
    assert all("score" in line for line in read_lines(scores))


def test_the_plan_has_a_line_for_the_critic():
    assert "the critic, resident and trained" in succeeds(command("ppo", "--plan", max_len=67))
    assert "reference" in succeeds(command("ppo", "--plan", max_len=67, kl_coef=0.1, data="x"))


# ---- the policy's own answers -----------------------------------------------------------------------------------------------------

def test_rewards_are_learned(prompts, tmp_path):
    """One answer is always right: the policy finds it by chance and then prefers it, and the critic predicts its reward."""
    run(tmp_path / "run", None, data=prompts, rollout_batch_size=12, num_episodes=99, max_epochs=1, max_steps=60, n=32, max_new_tokens=1,
        learning_rate=2e-3, critic_learning_rate=2e-3, lr_scheduler="constant", eval_data=prompts, eval_steps=60)
    lines = [line for line in log_lines(tmp_path / "run")[1:] if "reward" in line]
    assert lines[0]["reward"] < 0.05
    assert lines[-1]["reward"] > 0.8
    assert abs(lines[-1]["value"] - lines[-1]["reward"]) < 0.15
    assert [line["eval_reward"] for line in log_lines(tmp_path / "run") if "eval_reward" in line] == [1.0]


def test_a_damaged_checkpoint_of_the_critic_is_named(file, tmp_path):
    options = {"max_steps": 4, "max_epochs": 9, "save_steps": 2}
    run(tmp_path / "run", file, **options)
    path = tmp_path / "run" / "step_4" / "critic" / "optimizer-00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    refused(words(tmp_path / "run", file, resume="auto", **options), "critic/optimizer-00000-of-00001.safetensors", "damaged", "fix: --resume",
            "step_2")
