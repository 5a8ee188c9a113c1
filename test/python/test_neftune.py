"""Noise on embeddings (--neftune_noise_alpha): the loss of a step with it, and the noise's arguments."""

import json
import math
import shutil

import numpy as np
import pytest
from runs import GOLDEN, OF_PAIRS, first_step, log_lines, read_tensors, stable, train, write_data, write_tensors

MODEL, SEED, ALPHA = GOLDEN / "llama2", 42, 5


def philox(counter, seed):
    """The four words of Philox4x32-10 (Salmon et al., SC 2011)."""
    counter, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def noise(step, document, length, channels):
    """(length, channels): of a step, counted from 0, for a document of the file."""
    low, high, *_ = philox([step, 0, 0, 7], SEED)
    words = [[philox([position, document, group, 9], high << 32 | low) for group in range(channels // 4)] for position in range(length)]
    uniform = np.array(words, np.uint32).astype(np.int32).reshape(length, channels) / 2.0**31
    return uniform * ALPHA / math.sqrt(length * channels)


def test_a_step_has_the_loss_of_the_model_whose_embeddings_have_the_noise(tmp_path):
    lengths = (30, 7, 21)  # no token occurs twice, so that each row of the table belongs to one
    ids = np.split(np.random.default_rng(1).permutation(96)[:sum(lengths)], np.cumsum(lengths)[:-1])
    data = write_data(tmp_path / "data.safetensors", [(own, np.arange(len(own)) > 0) for own in ids])
    noisy = shutil.copytree(MODEL, tmp_path / "noisy")
    tensors = read_tensors(MODEL / "model.safetensors")
    assert "lm_head.weight" in tensors  # else the head would have the noise, too
    for document, own in enumerate(ids):
        tensors["model.embed_tokens.weight"][own] += noise(0, document, len(own), 32).astype(np.float32)
    write_tensors(noisy / "model.safetensors", tensors)
    options = {"data": data, "max_steps": 1, "train_batch_size": 3}
    train(tmp_path / "plain", model=MODEL, **options)
    train(tmp_path / "want", model=noisy, **options)
    train(tmp_path / "got", model=MODEL, neftune_noise_alpha=ALPHA, **options)
    plain, want, got = (first_step(tmp_path / name) for name in ("plain", "want", "got"))
    for name in ("loss", "grad_norm"):
        assert got[name] == pytest.approx(want[name], rel=2e-6)
        assert got[name] != pytest.approx(plain[name], rel=1e-3)


def test_ranks_and_rows_change_nothing_but_the_order_of_sums(data, tmp_path):
    options = {"model": MODEL, "data": data, "max_steps": 4, "neftune_noise_alpha": ALPHA}
    train(tmp_path / "one", **options)
    want = [line["loss"] for line in stable(log_lines(tmp_path / "one"))]
    for number, mesh in enumerate([{"ranks": 3, "zero_stage": 2}, {"ranks": 4, "ring_attn_size": 2, "recompute": "layer"}, {}]):
        train(tmp_path / str(number), row_tokens=128, **mesh, **options)
        assert [line["loss"] for line in stable(log_lines(tmp_path / str(number)))] == pytest.approx(want, rel=1e-5), mesh


def test_evaluation_has_none(data, tmp_path):
    options = {"model": MODEL, "data": data, "max_steps": 1, "learning_rate": 1e-12, "eval_data": data, "eval_steps": 1}
    train(tmp_path / "plain", **options)
    train(tmp_path / "noisy", neftune_noise_alpha=ALPHA, **options)
    (_, plain, plain_eval), (_, noisy, noisy_eval) = (log_lines(tmp_path / name) for name in ("plain", "noisy"))
    assert plain_eval["eval_loss"] == pytest.approx(noisy_eval["eval_loss"], rel=1e-6) and plain["loss"] != pytest.approx(noisy["loss"], rel=1e-3)


@pytest.mark.parametrize("more", [{}, {"ref_mode": "resident", "lora_rank": 4}], ids=["precompute", "resident"])
def test_the_reference_of_dpo_has_none(tmp_path, more):
    train(tmp_path / "dpo", task="dpo", max_steps=1, neftune_noise_alpha=ALPHA, **OF_PAIRS, **more)
    assert abs(first_step(tmp_path / "dpo")["rewards/chosen"]) > 1e-4  # the policy alone has noise


def test_the_name_of_another_trainer(data, tmp_path):
    config = tmp_path / "axolotl.json"
    config.write_text(json.dumps({"noisy_embedding_alpha": 5}))
    train(tmp_path / "run", "--config", str(config), data=data, max_steps=1)
    assert log_lines(tmp_path / "run")[0]["options"]["neftune_noise_alpha"] == 5
