"""Whole runs on the GPU's half of the program: its messages without a GPU, and its results in the emulator."""

import os
import shutil

import pytest
from runs import (
    DEMO, GOLDEN, ROOT, SMALL, checkpoints, command, log_lines, near, refused, refused_training, same_run, start, succeeds, train, weights)
from test_processes import free_address

EMULATED = ROOT / "train_llama_emu"
needs_emulator = pytest.mark.skipif(not EMULATED.exists(), reason="make train_llama_emu")
without_gpu = pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="there is a GPU")


def emulated(task, **options):
    return command(task, **{"program": EMULATED, "device": "cuda", "dtype": "f32", **options})


def emulated_run(output, task="sft", **options):
    return succeeds(emulated(task, **{**SMALL, "max_steps": 3, "output_dir": output, **options}))


@without_gpu
def test_without_a_driver_the_cpu_is_taken_and_nothing_said_of_gpus(data, tmp_path):
    said = train(tmp_path / "auto", data=data, device="auto", max_steps=2)
    assert "CUDA" not in said and "GPU" not in said
    assert log_lines(tmp_path / "auto")[0]["device"] == "cpu"
    train(tmp_path / "cpu", data=data, device="cpu", max_steps=2)
    assert log_lines(tmp_path / "auto")[1]["loss"] == log_lines(tmp_path / "cpu")[1]["loss"]


@without_gpu
def test_a_gpu_that_is_not_there_is_refused(data, tmp_path):
    refused_training(data, tmp_path / "out", "no CUDA device: ", "or --device cpu", device="cuda")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_llama", "train_gpt2"])
def test_the_kernels_train_as_the_cpu_does(program, data, tmp_path):
    """Of a model each; test/cuda/test_llama.cpp has all families."""
    if not (ROOT / f"{program}_emu").exists():
        pytest.skip(f"make {program}_emu")
    options = {"data": data, "model": GOLDEN / ("gpt2" if program == "train_gpt2" else "qwen3"), "max_steps": 3}
    train(tmp_path / "cpu", program=ROOT / program, **options)
    emulated_run(tmp_path / "emulated", program=ROOT / f"{program}_emu", **options)
    assert log_lines(tmp_path / "emulated")[0]["device"] == "the emulator"
    for gpu, cpu in zip(log_lines(tmp_path / "emulated")[1:], log_lines(tmp_path / "cpu")[1:], strict=True):
        near(gpu["loss"], cpu["loss"], 1e-5)
        near(gpu["grad_norm"], cpu["grad_norm"], 1e-4)
        assert gpu["mean_token_accuracy"] == cpu["mean_token_accuracy"]


@pytest.mark.slow
@needs_emulator
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_checkpoint_from_device_memory_resumes_bit_for_bit(dtype, data, tmp_path):
    emulated_run(tmp_path / "whole", data=data, dtype=dtype, max_steps=3)
    emulated_run(tmp_path / "parts", data=data, dtype=dtype, max_steps=3, save_steps=2)
    shutil.rmtree(tmp_path / "parts" / "step_3", ignore_errors=True)
    assert 2 in checkpoints(tmp_path / "parts")
    emulated_run(tmp_path / "parts", data=data, dtype=dtype, max_steps=3, save_steps=2, resume="auto")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.slow
@needs_emulator
def test_evaluation_and_generation_equal_the_cpus(data, tmp_path):
    words = {"data": data, "max_len": 64}
    cpu, gpu = succeeds(command("eval", **words)), succeeds(emulated("eval", **words, gpu_check="never"))
    assert gpu.split("perplexity")[0] == cpu.split("perplexity")[0]  # the loss to six digits
    train(tmp_path / "model", data=ROOT / "data" / "demo" / "train.safetensors", model=DEMO, max_steps=1, max_samples=4)
    words = {"model": tmp_path / "model", "prompt": "sort dog", "max_new_tokens": 8}
    assert succeeds(emulated("generate", **words, gpu_check="never")) == succeeds(command("generate", **words))


@needs_emulator
def test_ranks_started_by_hand_train_as_threads(data, tmp_path):
    """Over sockets they agree; the emulator moves what NCCL would."""
    options = {**SMALL, "data": data, "max_steps": 3, "ring_attn_size": 2, "zero_stage": 2, "rendezvous": free_address()}
    ranks = [start(emulated("sft", output_dir=tmp_path / "by_hand", rank=f"{rank}/2", **options)) for rank in (1, 0)]
    for rank in ranks:
        said, error = rank.communicate(timeout=120)
        assert rank.returncode == 0 and error == "", said + error
    emulated_run(tmp_path / "threads", data=data, ranks=2, ring_attn_size=2, zero_stage=2)
    same_run(tmp_path / "by_hand", tmp_path / "threads")


@needs_emulator
def test_products_in_fp8_are_refused(data, tmp_path):
    """By a GPU that is too old, which the emulator says it is, and beside floats."""
    options = {"data": data, "output_dir": tmp_path / "out", "max_len": 64, "fp8": "true"}
    refused(emulated("sft", **options, dtype="bf16"), "--fp8 needs tensor cores of compute capability 8.9 or later, and the emulator has 8.0")
    refused(emulated("sft", **options, dtype="f32"), "--fp8 rounds weights and activations in bf16, and --dtype is f32", "--dtype bf16")


@needs_emulator
def test_a_gpu_is_checked_at_its_first_start(data, own_cache, tmp_path):
    line = "GPU check: 28 ops of a step agree with the CPU ("

    def says(name, **options):
        return line in emulated_run(tmp_path / name, data=data, max_steps=1, **options)

    assert says("first") and not says("second")
    assert says("other_type", dtype="bf16")
    assert says("always", gpu_check="always")
    assert not says("never", dtype="bf16", gpu_check="never")
