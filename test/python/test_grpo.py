"""Whole runs of grpo. On given rollouts, losses equal torch's, whatever the mesh. Its own answers are on policy and do not depend on mesh or cache,
and rewarded answers become likelier."""

import json
import math

import numpy as np
import pytest
import runs
from runs import DEMO, GOLDEN, ROOT, command, first_step, log_lines, near, read_lines, refused, succeeds, weights, write_data, write_lines
from test_sampling import with_tokenizer

POLICY = json.loads((GOLDEN / "policy.json").read_text())
MESHES = {"one": {}, "data": {"ranks": 3, "zero_stage": 3}, "ring": {"ranks": 2, "ring_attn_size": 2},
          "both": {"ranks": 4, "ring_attn_size": 2, "sp_mode": "gather", "zero_stage": 2}}


def rollouts(name="qwen3", **changes):
    lines = [{**rollout, "logprobs": logp} for rollout, logp in zip(POLICY["rollouts"], POLICY["models"][name]["logprobs"])]
    lines[4].update(changes)
    return lines


def masked(lines, mask_name="completion_mask"):
    """No answer's log-probability of a given token matters."""
    return [{**line, mask_name: mask, "logprobs": [logp if sampled else None for logp, sampled in zip(line["logprobs"], mask)]}
            for line, mask in zip(lines, POLICY["masks"])]


def rollouts_and_flags(name, case):
    """The records and the flags of a case of policy.json, some under "masked"."""
    return (masked(rollouts(name)), case["masked"]) if "masked" in case else (rollouts(name), case["flags"])


def words(output, file, *flags, name="qwen3", task="grpo", **options):
    """One step of all rollouts unless the options differ."""
    return command(task, *flags, **{"model": GOLDEN / name, "rollouts": file, "output_dir": output, "max_len": 67, "max_steps": 1,
                                      "recompute": "cheap", **options})


def run(output, file, *flags, **options):
    return succeeds(words(output, file, *flags, **options))


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "rollouts.jsonl", rollouts())


def use_program(monkeypatch, name, program):
    """Lets later calls run the program of a model's family, or its build with the emulator."""
    path = ROOT / (("train_gpt2" if name == "gpt2" else "train_llama") + program)
    if not path.exists():
        pytest.skip(f"{path.name} was not built")
    monkeypatch.setattr(runs, "PROGRAM", path)


@pytest.mark.parametrize("name, program", [*((name, "") for name in POLICY["models"]), ("gpt2", "_emu")])
def test_losses_equal_torch(name, program, tmp_path, monkeypatch):
    use_program(monkeypatch, name, program)
    golden = POLICY["models"][name]
    meshes = [*MESHES.values(), {"row_tokens": 100}]
    cases = list(golden["losses"].items())
    for number, (case, want) in enumerate(cases if not program else cases[2::3]):
        options = {"device": "cuda", "dtype": "f32"} if program else meshes[number % len(meshes)]
        lines, flags = rollouts_and_flags(name, want)
        if flags.get("kl_coef"):
            options = {**options, "ref_model": GOLDEN / golden["reference"]}
        run(tmp_path / case, write_lines(tmp_path / "rollouts.jsonl", lines), name=name, **options, **flags)
        line = first_step(tmp_path / case)
        scale = abs(want["policy_loss"]) + 0.1  # terms of a loss cancel
        near(line["policy_loss"], want["policy_loss"], 0, 1e-5 * scale)
        near(line["loss"], want["loss"], 0, 1e-5 * (scale + abs(want["loss"] - want["policy_loss"])))
        near(line["grad_norm"], want["grad_norm"], 1e-4)


def test_the_log(file, tmp_path):
    golden = POLICY["models"]["qwen3"]
    run(tmp_path / "run", file, kl_coef=0.1, kl_use_loss="true", ref_model=GOLDEN / golden["reference"])
    line, rewards, lengths = first_step(tmp_path / "run"), [r["reward"] for r in rollouts()], [len(r["completion_ids"]) for r in rollouts()]
    mean = sum(rewards) / len(rewards)
    near(line["reward"], mean, 1e-12)
    near(line["reward_std"], math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)), 1e-12)
    near(line["response_length"], sum(lengths) / len(lengths), 1e-12)
    assert line["response_length_max"] == max(lengths) and line["truncated"] == 0
    assert 0 < line["clip_ratio"] < 1 and line["kl"] > 0 and abs(line["ppo_kl"]) < 0.2 and "reward_clip_ratio" not in line


def test_rewards_are_clipped_on_request_alone(file, tmp_path):
    """Rewards of 0 to 100 whose difference from their mean exceeds a bound."""
    losses = {}
    for flags in ({}, {"reward_clip_range": "-1000,1000"}, {"reward_clip_range": "-10,10"}):
        lines = write_lines(tmp_path / "hundred.jsonl", [{**line, "reward": 100 * line["reward"]} for line in rollouts()])
        output = tmp_path / f"run{len(losses)}"
        run(output, lines, advantage_estimator="dr_grpo", **flags)
        line = first_step(output)
        losses[flags.get("reward_clip_range")] = line["policy_loss"], line.get("reward_clip_ratio")
    groups, rewards = ([r[key] for r in rollouts()] for key in ("group", "reward"))
    means = [np.mean([r for g, r in zip(groups, rewards) if g == group]) for group in groups]
    assert losses["-1000,1000"] == (losses[None][0], 0) and losses[None][1] is None and losses["-10,10"][0] != losses[None][0]
    near(losses["-10,10"][1], np.mean([abs(100 * (r - m)) > 10 for r, m in zip(rewards, means)]), 1e-12)


def test_masks_have_the_names_of_other_libraries(tmp_path):
    """Values may be numbers or booleans. Only sampled tokens count as targets and as the length of an answer."""
    want = POLICY["models"]["qwen3"]["losses"]["masked"]
    for name, kind in (("completion_mask", int), ("loss_mask", float), ("response_mask", bool), ("tool_mask", bool), ("env_mask", int),
                       ("action_mask", int), ("token_loss_mask", float), ("response_loss_mask", int), ("loss_masks", int), ("assistant_masks", int)):
        lines = [{**line, name: list(map(kind, line[name]))} for line in masked(rollouts(), name)]
        run(tmp_path / name, write_lines(tmp_path / "rollouts.jsonl", lines), max_new_tokens=5, overlong_buffer=5)
        line, lengths = first_step(tmp_path / name), [sum(mask) for mask in POLICY["masks"]]
        near(line["response_length"], sum(lengths) / len(lengths), 1e-12)
        assert (line["target_tokens"], line["response_length_max"]) == (sum(lengths), max(lengths))
        near(line["reward"], np.mean([r["reward"] - min(n, 5) / 5 for r, n in zip(rollouts(), lengths)]), 1e-12)
    run(tmp_path / "run", tmp_path / "rollouts.jsonl", mask_truncated="true")
    near(first_step(tmp_path / "run")["policy_loss"], want["policy_loss"], 1e-5)


def test_a_step_with_masked_answers_alone_is_no_update(tmp_path):
    lines = rollouts()
    for line in lines[4:8]:
        line["truncated"] = True
    lines[1]["truncated"] = True
    options = {"max_steps": 2, "save_steps": 1, "train_batch_size": 4, "shuffle": "false", "mask_truncated": "true", "weight_decay": 0.1,
               **MESHES["both"]}
    said = run(tmp_path / "run", write_lines(tmp_path / "rollouts.jsonl", lines), **options)
    first, second = log_lines(tmp_path / "run")[1:3]
    assert weights(tmp_path / "run/step_1") == weights(tmp_path / "run/step_2") != weights(GOLDEN / "qwen3")
    assert (first["skipped"], second["skipped"], second["loss"], second["truncated"]) == (0, 1, None, 1)
    assert first["target_tokens"] == second["target_tokens"] == sum(len(line["completion_ids"]) for line in lines[:4] if not line.get("truncated"))
    assert "step 2 skipped: no token of its samples is learned from" in said
    cut = write_lines(tmp_path / "cut.jsonl", [{**line, "truncated": True} for line in lines])
    assert "nothing to evaluate, every answer was cut off" in run(tmp_path / "evaluated", tmp_path / "rollouts.jsonl", eval_data=cut, **options)
    assert not (tmp_path / "evaluated/best").exists()


@pytest.mark.parametrize("changes, parts", [
    ({"group": None}, ["line 5", "group", "missing"]),
    ({"reward": "good"}, ["line 5", "reward", "good"]),
    ({"completion_ids": []}, ["line 5", "completion_ids", "no token"]),
    ({"prompt_ids": [999]}, ["line 5", "prompt_ids", "999", "vocabulary"]),
    ({"logprobs": [-1.0]}, ["line 5", "logprobs", "1 number"]),
    ({"logprobs": ["x"] * 9}, ["line 5", 'logprobs has "x" for token 0']),
    ({"logprobs": [0.5] * 9}, ["line 5", "logprobs", "0.5"]),
    ({"logprobs": [-1e308] * 9}, ["line 5", "logprobs has -1e+308 for token 0"]),
    ({"group": -1}, ["line 5", "group"]),
    ({"group": 2**63}, ["line 5", "group is 9223372036854775808", "0 to 9223372036854775807"]),
    ({"group": 0}, ["line 5", "prompt_ids differ from line 1's", "group 0"]),
    ({"loss_mask": [1] * 31}, ["line 5", "loss_mask has 31 numbers", "has 9 tokens"]),
    ({"env_mask": [1] * 8 + [0.5]}, ["line 5", "env_mask has 0.5 for token 8"]),
    ({"action_mask": "1" * 9}, ["line 5", "action_mask must be a list"]),
    ({"completion_mask": [1] * 9, "tool_mask": [1] * 8 + [0]}, ["line 5", "tool_mask differs from completion_mask"]),
    ({"reward": -1e308}, ["line 5", "reward is -1e+308", "within +-1e+30"]),
    ({"logprobs": [None] + [-1.0] * 8}, ["line 5", "logprobs has null for token 0"]),
    ({"group": 77}, ["group 1", "one rollout"]),  # the other answer to the same prompt
    ({"truncated": 3}, ["line 5", "truncated"]),
    ({"truncate": True}, ["line 5", "truncate is no field"]),
    ({"turn_rewards": [1, 2]}, ["line 5", "turn_rewards must be a list of 1 numbers"]), ({"turn_rewards": ["x"]}, ["line 5", 'turn_rewards has "x"']),
    ({"turn_rewards": [None]}, ["line 5", "turn_rewards add up to nan"]), ({"turn_rewards": [7]}, ["line 5", "turn_rewards add up to 7"]),
    ({"advantages": [1.0] * 9}, ["line 5", "advantages is no field"]),
])
def test_bad_rollouts_are_named(changes, parts, tmp_path):
    file = write_lines(tmp_path / "rollouts.jsonl", rollouts(**changes))
    refused(words(tmp_path / "run", file), *parts)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_bad_files_are_named(tmp_path):
    refused(words(tmp_path / "run", tmp_path / "none.jsonl"), "none.jsonl")
    refused(words(tmp_path / "run", write_lines(tmp_path / "empty.jsonl", [])), "empty.jsonl", "no rollouts")
    broken = write_lines(tmp_path / "broken.jsonl", rollouts())
    broken.write_text(broken.read_text()[:-20])
    refused(words(tmp_path / "run", broken), "broken.jsonl", f"line {len(rollouts())}")


# ---- the policy's own answers -----------------------------------------------------------------------------------------------------

def sample(output, prompts, *flags, **options):
    """Two iterations of 6 prompts with 4 answers each unless the options differ."""
    options = {"rollouts": None, "data": prompts, "rollout_batch_size": 6, "n": 4, "max_new_tokens": 9, "max_len": 67, "max_steps": 2,
               "advantage_estimator": "reinforce", "learning_rate": 1e-3, **options}
    return run(output, None, *flags, **options)


def reward_file(directory, text):
    (directory / "reward.py").write_text(text)
    return directory / "reward.py"


def saved_answers(output):
    """The answers of the first iteration, as saved by save_rollouts."""
    return read_lines(output / "rollouts" / "00000000.jsonl")


def test_answers_are_on_policy(prompts, tmp_path):
    """The log-probabilities recorded by sampling equal the training pass's."""
    for number, options in enumerate([{"temperature": 0.7, "max_sequences": 3}, {"model": GOLDEN / "phi3", "ranks": 2, "ring_attn_size": 2}]):
        sample(tmp_path / str(number), prompts, **options)
        for line in log_lines(tmp_path / str(number))[1:]:
            assert line["clip_ratio"] == 0 and abs(line["ppo_kl"]) < 1e-6 and line["generation_tok_s"] > 0
            assert 1 <= line["response_length"] <= line["response_length_max"] <= 9


EXACT = {"one": {}, "few": {"threads": 1, "max_sequences": 3, "recompute": "layer"}, "short rows": {"row_tokens": 67, "recompute": "none"},
         "ranks": {"ranks": 4, "zero_stage": 3}, "ulysses": {"ranks": 2, "ring_attn_size": 2, "sp_mode": "ulysses"}}


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"model": GOLDEN / "mistral", "temperature": 0.7}, {"model": GOLDEN / "qwen3_moe"},
                                     {"lora_rank": 4, "dtype": "bf16"}], ids=["f32", "bf16", "window", "experts", "lora"])
def test_exact_answers_are_on_policy_to_the_bit(options, prompts, tmp_path):
    """The log-probabilities recorded by sampling are the training pass's, which computes them before and in each update, on every mesh."""
    answers = {}
    for name, mesh in EXACT.items():
        if "model" in options and "sp_mode" in mesh:
            continue  # these models have 3 query heads
        sample(tmp_path / name, prompts, "--exact", "--save_rollouts", kl_coef=0.1, **options, **mesh)
        lines = log_lines(tmp_path / name)[1:]
        assert len(lines) == 2 and all(line["ppo_kl"] == 0 and line["clip_ratio"] == 0 for line in lines)
        assert lines[0]["kl"] == 0  # the reference is the policy before the first update, evaluated in rows of its own
        answers[name] = [(line["completion_ids"], line["logprobs"]) for line in saved_answers(tmp_path / name)]
        assert answers[name] == answers["one"]


@pytest.mark.parametrize("flags, parts", [
    ("--ranks 2 --ring_attn_size 2", ["--exact: a rank that receives keys block by block", "--sp_mode ulysses"]),
    (f"--model {GOLDEN / 'qwen35'}", ["--exact: linear attention sums many tokens at a time"]),
    ("--ranks 2 --tensor_parallel 2", ["--exact and --tensor_parallel were both given", "another order"]),
    ("--share_prompts true", ["--share_prompts true: with --exact each answer has a copy of the prompt"]),
    ("--dtype bf16 --fp8", ["--exact and --fp8 were both given"]),
])
def test_what_cannot_be_exact_is_refused(flags, parts, prompts, tmp_path):
    refused([*words(tmp_path / "run", None, "--exact", data=prompts, max_new_tokens=9), *flags.split()], *parts)


def test_a_rank_of_a_ring_answers_as_many_prompts_as_a_row_holds(tmp_path):
    """Its arrays hold a part of a training row, but whole rows of prompts."""
    documents = [(np.arange(i, i + 51) % 80 + 4, np.arange(51) == 50) for i in range(100)]
    data = write_data(tmp_path / "prompts.safetensors", documents)
    for name, options in {"one": {}, "ring": {"ranks": 2, "ring_attn_size": 2}}.items():
        sample(tmp_path / name, data, "--save_rollouts", rollout_batch_size=100, train_batch_size=100, n=1, max_steps=1, max_len=64, **options)
    one, ring = ([r["completion_ids"] for r in saved_answers(tmp_path / name)] for name in ("one", "ring"))
    assert one == ring


def test_answers_of_the_current_policy_need_no_correction(prompts, tmp_path):
    """The weights are 1 within rounding, on every mesh."""
    for correction, mesh in zip(("tis", "icepop", "seq-mask-tis", "tis"), MESHES.values(), strict=True):
        run = tmp_path / f"{correction} {len(mesh)}"
        sample(run, prompts, is_correction=correction, n=128, max_new_tokens=1, **mesh)
        assert first_step(run)["grad_norm"] > 0
        for line in log_lines(run)[1:]:
            near(line["is_weight"], 1, 1e-6)
            assert abs(line["sampler_kl"]) < 1e-6 and line["is_cut"] == 0 and abs(line["ppo_kl"]) < 1e-6


def test_several_steps_in_an_iteration(prompts, tmp_path):
    """12 prompts in iterations of 6 with 4 answers each: 24 rollouts, in steps of 10, each rollout twice."""
    sample(tmp_path / "run", prompts, max_steps=None, train_batch_size=10, max_epochs=2, kl_coef=0.05)
    lines = log_lines(tmp_path / "run")[1:]
    assert len(lines) == 2 * 2 * 3
    assert [index for index, line in enumerate(lines) if "generation_s" in line] == [0, 6]
    assert lines[0]["ppo_kl"] == pytest.approx(0, abs=1e-6) and lines[5]["ppo_kl"] != pytest.approx(0, abs=1e-6)
    assert lines[-1]["samples"] == 96


def test_rewards_are_learned_also_from_answers_generated_ahead(prompts, tmp_path):
    """One answer is always right: the policy finds it by chance and then prefers it. With async_steps 1, the weights that generate a batch are one
    iteration old. The reward rises somewhat later, and as high."""
    learns = {"n": 32, "rollout_batch_size": 12, "max_new_tokens": 1, "learning_rate": 2e-3, "lr_scheduler": "constant",
              "advantage_estimator": "group_norm",
              "max_steps": 56, "num_episodes": 56, "train_batch_size": 384, "eval_data": prompts, "eval_steps": 56}
    rewards = []
    for name, options in (("sync", {}), ("async", {"async_steps": 1}), ("corrected", {"async_steps": 1, "is_correction": "tis"})):
        sample(tmp_path / name, prompts, **learns, **options)
        lines = log_lines(tmp_path / name)
        assert [line["eval_reward"] for line in lines if "eval_reward" in line] == [1.0]
        steps = [line for line in lines if "staleness" in line]
        batches = [line for line in steps if "generation_s" in line]
        assert [line["staleness"] for line in steps] == [0] + [int(name != "sync")] * 55
        assert steps[-1]["tokens"] == log_lines(tmp_path / "sync")[-2]["tokens"]
        if name == "sync":
            assert all(abs(line["ppo_kl"]) < 1e-6 for line in batches)
        else:
            assert max(abs(line["sampler_kl" if name == "corrected" else "ppo_kl"]) for line in batches) > 1e-3
        rewards.append([line["reward"] for line in batches])
    half = [next(index for index, reward in enumerate(curve) if reward >= 0.5) for curve in rewards]
    assert all(max(curve[:2]) < 0.05 and np.mean(curve[-16:]) > 0.97 for curve in rewards)
    assert max(half) - half[0] <= 12, half


def test_a_copy_of_the_policy_generates_the_same_answers(prompts, tmp_path):
    """With async_steps the first batch still comes from the initial weights, however they are divided and stored."""
    for number, options in enumerate([{"model": GOLDEN / "phi3", "dtype": "bf16", "max_sequences": 3}, {"ranks": 2, "zero_stage": 3, "dtype": "bf16"},
                                      {"lora_rank": 4, "load_in": "4bit"}]):
        for name, steps in (("now", 0), ("ahead", 1)):
            sample(tmp_path / f"{number}{name}", prompts, async_steps=steps, max_steps=1, save_rollouts="true", **options)
        assert saved_answers(tmp_path / f"{number}now") == saved_answers(tmp_path / f"{number}ahead")


def test_damaged_answers_of_a_checkpoint_are_refused(prompts, tmp_path):
    options = {"data": prompts, "rollout_batch_size": 6, "n": 4, "max_new_tokens": 9, "async_steps": 1, "max_steps": 2, "num_episodes": 2, "save_steps": 1,
               "advantage_estimator": "reinforce"}
    run(tmp_path / "run", None, **options)
    options["resume"] = tmp_path / "run" / "step_1"
    file = options["resume"] / "next_answers.jsonl"
    file.write_text(file.read_text().replace("3", "4", 1))
    refused(words(tmp_path / "run", None, **options), "next_answers.jsonl is damaged")
    refused(words(tmp_path / "run", None, **{**options, "async_steps": 0}), "--async_steps 1", "this run has 0")


def test_saved_answers_can_be_trained_on(prompts, tmp_path):
    """A run on the saved file has the same first step."""
    sample(tmp_path / "run", prompts, save_rollouts="true", loss_aggregation="sequence_mean")
    files = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert files == ["00000000.jsonl", "00000006.jsonl"]
    saved = tmp_path / "run" / "rollouts" / files[0]
    assert len(saved.read_text().splitlines()) == 24
    sample(tmp_path / "again", None, data=None, rollouts=saved, max_steps=1, loss_aggregation="sequence_mean", train_batch_size=24)
    one, again = log_lines(tmp_path / "run")[1], log_lines(tmp_path / "again")[1]
    assert all(one[key] == again[key] for key in ("reward", "response_length", "truncated", "tokens"))
    near(again["grad_norm"], one["grad_norm"], 1e-4)


def test_lengths_shape_rewards(prompts, tmp_path):
    """No answer is right, so the logged reward is the length penalty."""
    rewards = []
    for number, options in enumerate([{}, {"stop_properly_coef": -0.5}, {"overlong_buffer": 9}]):
        sample(tmp_path / str(number), prompts, save_rollouts="true", max_steps=1, **options)
        rewards.append(log_lines(tmp_path / str(number))[1]["reward"])
    answers = saved_answers(tmp_path / "0")
    truncated, lengths = [answer["truncated"] for answer in answers], [len(answer["completion_ids"]) for answer in answers]
    assert any(truncated) and rewards[0] == 0
    assert rewards[1] == pytest.approx(-0.5 * np.mean(truncated))
    assert rewards[2] == pytest.approx(-np.mean(lengths) / 9)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("base", [False, True])
def test_a_teacher_of_answers_of_one_token_is_a_divergence_in_the_reward(mesh, base, prompts, tmp_path):
    """There k1 in the reward has the same advantages. The teacher may be the policy without its adapters, which is no second model."""
    other = {"adapter": GOLDEN / "lora_qwen3"} if base else {}
    model, options = GOLDEN / ("qwen3" if base else "llama31"), {"max_new_tokens": 1, "n": 64, "advantage_estimator": "dr_grpo", **other, **MESHES[mesh]}
    sample(tmp_path / "taught", prompts, teacher_model=model, teacher_coef=0.3, **options)
    sample(tmp_path / "bound", prompts, ref_model=model, kl_coef=0.3, kl_estimator="k1", **options)
    sample(tmp_path / "alone", prompts, **options)
    for taught, bound, alone in zip(*(log_lines(tmp_path / name)[1:] for name in ("taught", "bound", "alone")), strict=True):
        for key in ("loss", "policy_loss", "grad_norm", "entropy", "reward"):
            near(taught[key], bound[key], 1e-5, 1e-6)
        assert taught["teacher_kl"] > 0 and taught["grad_norm"] != alone["grad_norm"] and "teacher_kl" not in alone


def test_a_teacher_judges_sampled_tokens_alone(prompts, tmp_path):
    """The policy has nothing to learn from itself, whatever stands between its tokens. Another teacher's divergence leaves out truncated answers."""
    sample(tmp_path / "sampled", prompts, "--save_rollouts")
    lines = [{**line, "truncated": number % 3 == 0} for number, line in enumerate(saved_answers(tmp_path / "sampled"))]
    for line in lines:
        line["completion_mask"] = [int(t % 3 != 1) for t in range(len(line["completion_ids"]))]
    file, kept = write_lines(tmp_path / "all.jsonl", lines), write_lines(tmp_path / "kept.jsonl", [line for line in lines if not line["truncated"]])
    for name, options in {"alone": {}, "itself": {"teacher_model": GOLDEN / "qwen3"}, "other": {"teacher_model": GOLDEN / "llama31", "mask_truncated": "true"},
                          "kept": {"teacher_model": GOLDEN / "llama31", "rollouts": kept}}.items():
        run(tmp_path / name, file, **{"advantage_estimator": "reinforce", **options})
    alone, itself, other, kept = (first_step(tmp_path / name) for name in ("alone", "itself", "other", "kept"))
    near(itself["teacher_kl"], itself["ppo_kl"], 0, 1e-7)
    near(other["teacher_kl"], kept["teacher_kl"], 1e-6)
    assert other["teacher_kl"] > 0.01 and other["target_tokens"] == kept["target_tokens"] < alone["target_tokens"]


TEACHERS = {"teacher_model": f"other={GOLDEN / 'llama31'},own={GOLDEN / 'qwen3'}", "teacher_coef": 0.3}


def test_each_answer_learns_from_its_teacher(tmp_path):
    """Without a teacher of its own an answer would have none: every teacher has some of the answers, wherever they stand in the rows."""
    lines = [{**line, "teacher": ["other", "own"][line["group"] % 2]} for line in rollouts()]
    run(tmp_path / "both", write_lines(tmp_path / "both.jsonl", lines), **TEACHERS, ranks=2)
    total = 0
    for k, (name, model) in enumerate({"other": "llama31", "own": "qwen3"}.items()):
        file = write_lines(tmp_path / f"{name}.jsonl", [line for line in lines if line["teacher"] == name])
        said = run(tmp_path / name, file, teacher_model=GOLDEN / model, teacher_coef=0.3)
        assert "without several models in --teacher_model" in said
        alone = first_step(tmp_path / name)
        total += alone["teacher_kl"] * alone["target_tokens"]
    both = first_step(tmp_path / "both")
    near(both["teacher_kl"], total / both["target_tokens"], 1e-6)
    wrong = write_lines(tmp_path / "wrong.jsonl", [*lines[:2], {**lines[2], "teacher": "third"}, *lines[3:]])
    refused(words(tmp_path / "refused", wrong, **TEACHERS), 'wrong.jsonl: answer 3 has the teacher "third"', "no name in --teacher_model")


def test_a_field_of_the_record_chooses_the_teacher(tmp_path):
    documents = [(np.arange(5) + 4 + i, np.arange(5) == 4) for i in range(12)]
    fields = [{"teacher": ["own", "other"][i % 3 == 0]} for i in range(12)]
    data = write_data(tmp_path / "data.safetensors", documents, kind="rl", columns=[json.dumps(f) for f in fields])
    sample(tmp_path / "run", data, "--save_rollouts", **TEACHERS)
    answers = saved_answers(tmp_path / "run")
    assert {answer["teacher"] for answer in answers} == {"own", "other"}
    for answer in answers:
        assert answer["teacher"] == fields[answer["prompt_ids"][0] - 4]["teacher"]
    again = write_lines(tmp_path / "again.jsonl", answers)
    run(tmp_path / "again", again, **TEACHERS, advantage_estimator="reinforce", learning_rate=1e-3, train_batch_size=24)
    near(first_step(tmp_path / "again")["teacher_kl"], first_step(tmp_path / "run")["teacher_kl"], 1e-5)
    for number, field in enumerate([{}, {"teacher": "third"}, {"teacher": 3}]):
        fields[7] = field
        wrong = write_data(tmp_path / f"{number}.safetensors", documents, kind="rl", columns=[json.dumps(f) for f in fields])
        refused(words(tmp_path / "refused", None, data=wrong, max_new_tokens=9, **TEACHERS),
                "prompt 8 has the teacher", "no name in --teacher_model", "a field teacher in each record")


def test_dynamic_filtering_keeps_groups_with_different_rewards(prompts, tmp_path):
    """With 128 answers of one token, some prompts have a right one among them and others have none."""
    sample(tmp_path / "run", prompts, max_steps=3, n=128, rollout_batch_size=3, max_new_tokens=1, dynamic_filtering="0,1", save_rollouts="true",
           num_episodes=20)
    lines = log_lines(tmp_path / "run")[1:]
    assert len(lines) == 3 and any(line["filtered"] > 0 for line in lines)
    for path in (tmp_path / "run" / "rollouts").iterdir():
        groups = {}
        for answer in read_lines(path):
            groups.setdefault(answer["group"], []).append(answer["reward"])
        assert len(groups) >= 3 and all(0 < np.mean(group) < 1 and len(group) == 128 for group in groups.values())


def test_stop_strings_end_answers(tmp_path):
    """Answers equal those without stop strings up to the stop string; the reward function gets the text before it."""
    model = with_tokenizer(tmp_path)
    random = np.random.default_rng(5)
    documents = [(np.append(random.integers(4, 90, 5), [7]), np.array([0] * 5 + [1])) for _ in range(6)]
    data = write_data(tmp_path / "prompts.safetensors", documents)
    reward = reward_file(tmp_path, "def reward(prompts, answers, labels):\n    return [1 - ('a' in a or 'Q,' in a) for a in answers]\n")
    options = {"model": model, "max_steps": 1, "max_new_tokens": 30, "save_rollouts": "true", "reward": reward}
    sample(tmp_path / "all", data, **options)
    sample(tmp_path / "stop", data, "--stop", "a", "Q,", **options)  # one token, and two
    stopped = 0
    for whole, cut in zip(saved_answers(tmp_path / "all"), saved_answers(tmp_path / "stop"), strict=True):
        n = len(cut["completion_ids"])
        is_cut = n < len(whole["completion_ids"])
        assert whole["completion_ids"][:n] == cut["completion_ids"] and (whole["reward"], cut["reward"]) == (1 - is_cut, 1)
        stopped += is_cut and not cut["truncated"]
    assert 0 < stopped < 24
    line = first_step(tmp_path / "stop")
    assert line["clip_ratio"] == 0 and abs(line["ppo_kl"]) < 1e-6


def test_prompts_without_a_right_answer(own_cache, tmp_path):  # an empty cache, so that preparation prints its table
    """A reward function without labels accepts such prompts; exact_match names the first."""
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one two"}, {"prompt": "three"}, {"prompt": "four", "completion": " five"}])
    reward = reward_file(tmp_path, "def reward(prompts, answers, labels):\n"
                                   "    assert {label.strip() for label in labels} <= {'', 'five'}, labels\n"
                                   "    return [len(a) for a in answers]\n")
    options = {"model": DEMO, "rollouts": None, "data": data, "max_new_tokens": 9, "rollout_batch_size": 3}
    result = runs.call(words(tmp_path / "run", None, reward=reward, **options))
    assert result.returncode == 0 and "without an answer                              2" in result.stderr
    refused(words(tmp_path / "none", None, **options), "prompt 1 of prompts.jsonl (prepared: ",
            "has no right answer, which --reward exact_match compares with")
