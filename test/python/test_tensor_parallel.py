"""Models of all families, and adapters, on ranks that divide their tensors: files are read and written in parts, and runs equal those of one rank.
test_ranks.cpp has all meshes of a few models."""

import json
import math

import numpy as np
import pytest
from runs import GOLDEN, ROOT, command, log_lines, near, read_tensors, refused, stable, succeeds, train, weights, write_lines, write_tensors
from test_lora import eval_loss
from test_sampling import with_tokenizer

MODELS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.json")
                if "reward" not in path.parent.name)
TOLERANCE = 1e-5  # of a loss or norm in float, as in test_ranks_equal_one_rank


def divides(config, ranks):
    """True if ranks have whole heads, or share key heads where files and norms allow it."""
    heads = config.get("num_attention_heads") or config["n_head"]
    keys = config.get("num_key_value_heads") or heads
    shares = config["model_type"] not in ("phi3", "olmo2") and ranks % keys == 0 and ranks <= heads
    return (ranks <= keys or shares) and config.get("linear_num_key_heads", 0) % ranks == 0


@pytest.mark.parametrize("name", MODELS)
def test_families_equal_one_rank(name, data, tmp_path):
    expected = json.loads((GOLDEN / name / "golden.json").read_text())
    model = GOLDEN / expected.get("base", name)
    config = json.loads((model / "config.json").read_text())
    options = {"model": model, "data": data, "program": ROOT / ("train_gpt2" if "gpt2" in str(model) else "train_llama"), "max_steps": 3}
    if "base" in expected:
        options["adapter"] = GOLDEN / name
    train(tmp_path / "one", **options)
    [file] = (path.name for path in (tmp_path / "one").glob("*model.safetensors"))
    want = stable(log_lines(tmp_path / "one"))
    shapes = {key: value.shape for key, value in read_tensors(tmp_path / "one" / file).items()}

    def loss_of(run):
        saved = {"adapter": run} if "base" in expected else {"model": run}
        return eval_loss(data=data, **{"model": model, "program": options["program"], **saved})

    rings = (1, 2) if "linear_num_key_heads" in config else (1,)  # whose states pass from one rank of a ring to the next
    experts = config.get("num_experts") or config.get("num_local_experts")
    meshes = [dict(tensor_parallel=tp, ring_attn_size=sp, zero_stage=stage, ranks=tp * sp)
              for tp in (2, 3) for sp in rings for stage in (0, 1, 3) if divides(config, tp)]
    # The ranks that divide experts may be those that divide other tensors, or not.
    meshes += [dict(tensor_parallel=tp, expert_parallel=ep, zero_stage=stage, ranks=math.lcm(tp, ep))
               for tp in (2, 3) for ep in (2, 3) for stage in (0, 1, 3) if experts and experts % ep == 0 and divides(config, tp)]
    for mesh in meshes:
        run, stage = tmp_path / " ".join(map(str, mesh.values())), mesh["zero_stage"]
        train(run, **options, **mesh)
        for got, line in zip(stable(log_lines(run)), want, strict=True):
            for key in ("loss", "grad_norm"):
                near(got[key], line[key], TOLERANCE, 1e-6)
        assert {key: value.shape for key, value in read_tensors(run / file).items()} == shapes
        if stage == 3:
            near(loss_of(run), loss_of(tmp_path / "one"), TOLERANCE, 1e-6)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("options", [{"model": GOLDEN / "llama2"}, {"model": GOLDEN / "qwen3", "adapter": GOLDEN / "lora_qwen3"}])
def test_distillation_equals_one_rank(options, beta, data, tmp_path):
    """The vocabulary of both models is divided. The teacher is another model, or the student without its adapter."""
    options = dict(task="distill", teacher_model=GOLDEN / "qwen3", data=data, on_policy=0, divergence_beta=beta, temperature=0.9, eval_fraction=0.2, max_steps=3, **options)
    train(tmp_path / "one", **options)
    want = stable(log_lines(tmp_path / "one"))
    for mesh in (dict(ranks=2, tensor_parallel=2), dict(ranks=4, tensor_parallel=2, ring_attn_size=2, zero_stage=3, recompute="layer")):
        run = tmp_path / str(mesh["ranks"])
        train(run, **options, **mesh)
        for got, line in zip(stable(log_lines(run)), want, strict=True):
            for key in line.keys() - {"step", "epoch", "lr"}:
                near(got[key], line[key], TOLERANCE, 1e-6)


def test_a_teacher_with_another_vocabulary_is_refused(data, tmp_path):
    """As those of Qwen2.5: the tokens are the same, and one model has more rows than tokens."""
    rows = {"student": 264, "teacher": 300}
    for name, V in rows.items():
        (tmp_path / name).mkdir()
        with_tokenizer(tmp_path / name, vocab_size=V)
        tensors = read_tensors(GOLDEN / "qwen3" / "model.safetensors")
        write_tensors(tmp_path / name / "model.safetensors", {key: np.resize(x, (V, *x.shape[1:])) if len(x) == 96 else x for key, x in tensors.items()})
    refused(command("distill", model=tmp_path / "student", teacher_model=tmp_path / "teacher", data=data, on_policy=0, ranks=2, tensor_parallel=2, output_dir=tmp_path / "run"),
            "--tensor_parallel 2", "the 264 rows of the student's vocabulary and the 300 rows", "a teacher with as many rows")


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "n": 3}])
def test_linear_attention_writes_the_answers_of_one_rank(options, tmp_path):
    """Each rank has the states of its heads, which the n answers of a prompt copy."""
    model = with_tokenizer(tmp_path, "qwen35")
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in ("ab", "cde", "f", "a-longer-one")])
    said = [succeeds(command("generate", model=model, prompts=prompts, max_new_tokens=30, seed=3, **options, **mesh), quiet=False)
            for mesh in ({}, {"ranks": 2, "tensor_parallel": 2}, {"ranks": 4, "tensor_parallel": 2})]
    assert said[1] == said[0] and said[2] == said[0]
    assert len(set(said[0].splitlines())) > 4 * options.get("n", 1) // 2


@pytest.mark.parametrize("options", [{"optimizer": "muon"}, {"moments": "8bit"}])
@pytest.mark.parametrize("name", ["smollm2", "olmo2", "qwen35_moe"])
def test_updates_of_whole_matrices_and_of_blocks(name, options, data, tmp_path):
    """Muon's update is that of the whole matrix. Blocks of 8 bits end where a rank's tensors end, so losses differ as much as those of 8 bits differ from
    those of floats. A run goes on with the same ranks bit for bit, and with others up to that rounding."""
    mesh = dict(ranks=4, tensor_parallel=2, zero_stage=1)
    shared = dict(model=GOLDEN / name, data=data, max_steps=6, save_steps=3)

    def losses(run, **more):
        train(tmp_path / run, **shared, **more)
        return [line["loss"] for line in stable(log_lines(tmp_path / run))]

    one, divided = losses("one", **options), losses("divided", **options, **mesh)
    rounding = 1e-5 if "optimizer" in options else 2 * max(abs(a / b - 1) for a, b in zip(one, losses("floats"), strict=True))
    for got, want in zip(divided, one, strict=True):
        near(got, want, rounding, 1e-6)
    checkpoint = tmp_path / "divided" / "step_3"
    losses("resumed", **options, **mesh, resume=checkpoint)
    assert weights(tmp_path / "resumed") == weights(tmp_path / "divided")
    for got, want in zip(losses("undivided", **options, resume=checkpoint), one[3:], strict=True):
        near(got, want, rounding, 1e-6)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_checkpoint_of_divided_experts_and_tensors_is_resumed_anywhere(stage, data, tmp_path):
    """Ranks that divide experts, and ranks that divide tensors, write each element once."""
    shared = dict(model=GOLDEN / "mixtral", data=data, max_steps=4, save_steps=2)
    train(tmp_path / "divided", **shared, ranks=6, tensor_parallel=2, expert_parallel=3, zero_stage=stage)
    want = [line["loss"] for line in stable(log_lines(tmp_path / "divided"))][2:]
    for number, mesh in enumerate([{}, dict(ranks=3, tensor_parallel=3), dict(ranks=3, expert_parallel=3, zero_stage=0)]):
        train(tmp_path / str(number), **shared, **mesh, resume=tmp_path / "divided" / "step_2")
        for line, loss in zip(stable(log_lines(tmp_path / str(number))), want, strict=True):
            near(line["loss"], loss, TOLERANCE, 1e-6)
