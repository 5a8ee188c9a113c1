"""--grad_dtype bf16 in whole runs of every task: the first step's loss equals the loss with float gradients, its norm as near as rounding allows."""

import pytest
from runs import OF_PAIRS, command, first_step, log_lines, stable, succeeds, weights, write_lines
from test_grpo import rollouts

STEPS = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-3, "max_num": 9}
CASES = {  # of at most three micro-steps a step
    "pretrain": {"task": "pretrain", "max_len": 64, "train_batch_size": 4, "row_tokens": 128, "dtype": "bf16", "moments": "bf16"},
    "sft": {"task": "sft", "max_len": 64, "train_batch_size": 4, "row_tokens": 128, "moments": "8bit", "max_norm": 0.1},
    "lora": {"task": "sft", "max_len": 64, "train_batch_size": 4, "lora_rank": 4, "lora_dropout": 0.1, "ranks": 2, "zero_stage": 2},
    "dpo": {"task": "dpo", **OF_PAIRS, "ranks": 2, "zero_stage": 1},
    "rm": {"task": "rm", **OF_PAIRS, "ranks": 4, "ring_attn_size": 2, "zero_stage": 2, "recompute": "layer"},
    "grpo": {"task": "grpo", "max_len": 67, "recompute": "cheap", "ranks": 2, "zero_stage": 3, "max_epochs": 4},
    "ppo": {"task": "ppo", "max_len": 67, "ranks": 2, "ring_attn_size": 2, "max_epochs": 4},
}


@pytest.mark.parametrize("name", CASES)
def test_every_task_trains_with_bf16_gradients(name, data, tmp_path):
    options = {**STEPS, **CASES[name]}
    task = options.pop("task")
    if task in ("grpo", "ppo"):
        options["rollouts"] = write_lines(tmp_path / "rollouts.jsonl", rollouts())
    else:
        options.setdefault("data", data)

    def run(output, **more):
        succeeds(command(task, output_dir=output, **options, **more))
        return first_step(output)

    floats, rounded = run(tmp_path / "f32"), run(tmp_path / "bf16", grad_dtype="bf16")
    assert rounded["loss"] == floats["loss"]
    for norm in ["grad_norm"] + ["critic_grad_norm"] * (task == "ppo"):
        # Each rounding is off by less than 2^-7 of its value; no part of these sums is larger than three times the whole.
        assert rounded[norm] != floats[norm] and abs(rounded[norm] / floats[norm] - 1) < 3 * 3 * 2**-7, norm
    want = weights(tmp_path / "bf16"), stable(log_lines(tmp_path / "bf16"))
    assert want[0] != weights(tmp_path / "f32")
    assert "at step 2" in succeeds(command(task, output_dir=tmp_path / "bf16", grad_dtype="bf16", resume=tmp_path / "bf16" / "step_2", **options))
    assert (weights(tmp_path / "bf16"), stable(log_lines(tmp_path / "bf16"))) == want
