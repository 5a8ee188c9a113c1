"""Whole runs with --device: the choice of a device without a GPU, and results of the kernels in the emulator."""

import os
import shutil

import pytest
from runs import DEMO, ROOT, SMALL, checkpoints, command, log_lines, refused, refused_training, same_run, start, succeeds, train, weights
from test_processes import free_address

EMULATED = ROOT / "train_llama_emu"
needs_emulator = pytest.mark.skipif(not EMULATED.exists(), reason="make train_llama_emu")
without_gpu = pytest.mark.skipif(os.path.exists("/proc/driver/nvidia/version"), reason="there is a GPU")


def emulated(task, **options):
    return command(task, **{"program": EMULATED, "device": "cuda", "dtype": "f32", **options})


def emulated_run(output, task="sft", **options):
    return succeeds(emulated(task, **{**SMALL, "max_steps": 3, "output_dir": output, **options}))


@without_gpu
def test_a_machine_without_a_gpu(data, tmp_path):
    """--device auto takes the CPU without a word on GPUs; --device cuda is refused."""
    said = train(tmp_path / "auto", data=data, device="auto", max_steps=1)
    assert "CUDA" not in said and "GPU" not in said and log_lines(tmp_path / "auto")[0]["device"] == "cpu"
    refused_training(data, tmp_path / "out", "no CUDA device: ", "or --device cpu", device="cuda")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_emulator
def test_a_checkpoint_from_device_memory_resumes_bit_for_bit(data, tmp_path):
    options = {"data": data, "dtype": "bf16", "max_steps": 3}
    emulated_run(tmp_path / "whole", **options)
    emulated_run(tmp_path / "parts", save_steps=2, **options)
    shutil.rmtree(tmp_path / "parts" / "step_3", ignore_errors=True)
    assert 2 in checkpoints(tmp_path / "parts") and log_lines(tmp_path / "parts")[0]["device"] == "the emulator"
    emulated_run(tmp_path / "parts", save_steps=2, resume="auto", **options)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


@pytest.mark.slow
@needs_emulator
def test_evaluation_and_generation_equal_the_cpu(data, tmp_path):
    words = {"data": data, "max_len": 64}
    cpu, gpu = succeeds(command("eval", **words)), succeeds(emulated("eval", **words, gpu_check="never"))
    assert gpu.split("perplexity")[0] == cpu.split("perplexity")[0]  # six digits of the loss
    train(tmp_path / "model", data=ROOT / "data" / "demo" / "train.safetensors", model=DEMO, max_steps=1, max_samples=4)
    words = {"model": tmp_path / "model", "prompt": "sort dog", "max_new_tokens": 8}
    assert succeeds(emulated("generate", **words, gpu_check="never")) == succeeds(command("generate", **words))


@needs_emulator
def test_ranks_started_by_hand_train_as_threads(data, tmp_path):
    """The ranks agree over sockets; the emulator replaces NCCL."""
    options = {**SMALL, "data": data, "max_steps": 3, "ring_attn_size": 2, "zero_stage": 2, "rendezvous": free_address()}
    ranks = [start(emulated("sft", output_dir=tmp_path / "by_hand", rank=f"{rank}/2", **options)) for rank in (1, 0)]
    for rank in ranks:
        said, error = rank.communicate(timeout=120)
        assert rank.returncode == 0 and error == "", said + error
    emulated_run(tmp_path / "threads", data=data, ranks=2, ring_attn_size=2, zero_stage=2)
    same_run(tmp_path / "by_hand", tmp_path / "threads")


@needs_emulator
def test_products_in_fp8_are_refused(data, tmp_path):
    """The emulator reports an old compute capability; and fp8 needs bf16."""
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
