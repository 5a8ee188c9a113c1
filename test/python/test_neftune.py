"""Noise on embeddings (--neftune_noise_alpha) against a reference in numpy; evaluations and references have none."""

import math
import shutil

import numpy as np
import pytest
from runs import GOLDEN, OF_PAIRS, first_step, log_lines, read_tensors, train, write_data, write_tensors

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
    """The noise of a step, counted from 0, for a document of the file: (length, channels)."""
    low, high, *_ = philox([step, 0, 0, 7], SEED)
    words = [[philox([position, document, group, 9], high << 32 | low) for group in range(channels // 4)] for position in range(length)]
    uniform = np.array(words, np.uint32).astype(np.int32).reshape(length, channels) / 2.0**31
    return uniform * ALPHA / math.sqrt(length * channels)


def test_a_step_equals_one_with_the_noise_in_the_embedding_table(tmp_path):
    lengths = (30, 7, 21)  # no token occurs twice, so each row of the table belongs to one position
    ids = np.split(np.random.default_rng(1).permutation(96)[:sum(lengths)], np.cumsum(lengths)[:-1])
    data = write_data(tmp_path / "data.safetensors", [(own, np.arange(len(own)) > 0) for own in ids])
    noisy = shutil.copytree(MODEL, tmp_path / "noisy")
    tensors = read_tensors(MODEL / "model.safetensors")
    assert "lm_head.weight" in tensors  # a tied head would have the noise, too
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


def test_evaluations_and_the_reference_of_dpo_have_none(data, tmp_path):
    options = {"model": MODEL, "data": data, "max_steps": 1, "learning_rate": 1e-12, "eval_data": data, "eval_steps": 1}
    train(tmp_path / "plain", **options)
    train(tmp_path / "noisy", neftune_noise_alpha=ALPHA, **options)
    (_, plain, plain_eval), (_, noisy, noisy_eval) = (log_lines(tmp_path / name) for name in ("plain", "noisy"))
    assert plain_eval["eval_loss"] == pytest.approx(noisy_eval["eval_loss"], rel=1e-6) and plain["loss"] != pytest.approx(noisy["loss"], rel=1e-3)
    for name, more in (("precompute", {}), ("resident", {"ref_mode": "resident", "lora_rank": 4})):
        train(tmp_path / name, task="dpo", max_steps=1, neftune_noise_alpha=ALPHA, **OF_PAIRS, **more)
        assert abs(first_step(tmp_path / name)["rewards/chosen"]) > 1e-4
