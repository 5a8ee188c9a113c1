"""Command lines and files of OpenRLHF and Axolotl, copied from their pages, run to a first step on small data; models by name. The models and data sets
are in a made-up cache of the Hugging Face hub. test_dialects.py and test_recipes.py have all flags."""

import json
import re
import shutil
import subprocess

import pyarrow
import pyarrow.parquet
import pytest
from runs import DEMO, ENVIRONMENT, PROGRAM, ROOT, change_json, chat, read_lines, refused, succeeds, write_lines

MODELS = ("meta-llama/Meta-Llama-3-8B", "OpenRLHF/Llama-3-8b-sft-mixture", "NousResearch/Llama-3.2-1B")
COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
WORDS = ("tami", "lo", "pa")
DATA = {
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": [
        {"chosen": chat(f"reverse {word}", word[::-1]), "rejected": chat(f"reverse {word}", "no")} for word in WORDS],
    "teknium/GPT4-LLM-Cleaned": [{"instruction": "reverse", "input": word, "output": word[::-1]} for word in WORDS],
}


def call(home, words, timeout=120, **environment):
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(home / "own")}
    return subprocess.run([PROGRAM, *map(str, words)], cwd=home, env=ENVIRONMENT | offline | environment, capture_output=True, text=True,
                          timeout=timeout)


def cached(home, kind, name):
    """The directory of a snapshot, in the layout of huggingface_hub's cache."""
    root = home / "hub" / f"{kind}--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    return root / "snapshots" / COMMIT


def home_with_a_model(home):
    """A directory with chats.jsonl, and with a model in first/ that was trained for a step."""
    write_lines(home / "chats.jsonl", [{"messages": chat(f"reverse {word}", word[::-1])} for word in WORDS])
    shutil.copytree(DEMO, home / "tiny")
    change_json(home / "tiny" / "config.json", num_key_value_heads=2)  # for a head stride of 2
    prepared = ["--data", ROOT / "data/demo/train.safetensors", "--max_samples", "1"]  # prepared data starts without Python
    result = call(home, ["sft", "--model", "tiny", *prepared, "--output_dir", "first", "--max_steps", "1", "--device", "cpu"])
    assert result.returncode == 0, result.stderr
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache with MODELS and DATA, in the splits train and test."""
    home = home_with_a_model(tmp_path_factory.mktemp("hub"))
    for name in MODELS:
        snapshot = cached(home, "models", name)
        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (home / "first" / file).exists():
                shutil.copy(home / "first" / file, snapshot)
    for name, records in DATA.items():
        snapshot = cached(home, "datasets", name)
        for split, some in (("train", records), ("test", records[:1])):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), snapshot / f"{split}-00000-of-00001.parquet")
    return home


def first_step(home, words, ranks=1):
    """The output of a run of one step."""
    result = call(home, [*words, "--max_steps", 1, "--device", "cpu", "--ranks", ranks, "--output_dir", "out", "--log", "log.jsonl"], timeout=300)
    assert result.returncode == 0, result.stderr
    assert [line["step"] for line in read_lines(home / "log.jsonl") if "loss" in line] == [1]
    return result.stdout


def test_openrlhf_dpo_ring(home):
    """With the flags of earlier versions. The evaluation data is read from its test split."""
    said = first_step(home, """dpo --from openrlhf --save_path ./checkpoint/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256
    --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3
    --learning_rate 5e-7 --beta 0.1 --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template
    --chosen_key chosen --rejected_key rejected --flash_attn --load_checkpoint --gradient_checkpointing --packing_samples
    --ring_attn_size 2 --ring_head_stride 1 --eval_dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku
    --ref_model meta-llama/Meta-Llama-3-8B""".split(), ranks=2)
    assert "note: eval.dataset is read from its test split, as in OpenRLHF\n" in said and f"note: {MODELS[0]} is " in said
    assert "note: in the names of this program: ./train_llama dpo " in said


def test_axolotl_lora(home):
    (home / "lora.yaml").write_text("""
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.4
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_modules: [gate_proj, down_proj]
gradient_accumulation_steps: 2
micro_batch_size: 2
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
loss_watchdog_threshold: 5.0
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens:
  pad_token: "<|end_of_text|>"
""")
    first_step(home, ["axolotl", "train", "lora.yaml", "--overwrite"])


# ---- models by name -----------------------------------------------------------------------------------------------------------------


def test_a_model_and_its_revision_in_the_cache(home):
    name = MODELS[0]
    plan = ["sft", "--plan", "--device", "cpu", "--model"]
    for form in (name, f"{name}@{COMMIT}"):
        result = call(home, [*plan, form])
        assert result.returncode == 0 and f"note: {form} is {home}/hub/models--" in result.stdout, result.stderr
    result = call(home, [*plan, f"{name}@v2"])
    assert f"{name}@v2: there is no such directory, the cache {home}/hub does not have all of that model" in result.stderr
    assert f"fix: unset HF_HUB_OFFLINE; or, where there is a network: hf download {name} --revision v2 --local-dir DIR, and give DIR\n" in result.stderr
    refs = home / "hub" / f"models--{name.replace('/', '--')}" / "refs"
    (refs / "v2").write_text(COMMIT)
    assert call(home, [*plan, f"{name}@v2"]).returncode == 0
    elsewhere = call(home, [*plan, name], HF_HUB_CACHE=str(home / "other"))
    assert f"the cache {home}/other does not have" in elsewhere.stderr


def test_a_cached_model_without_weights_is_refused(home):
    snapshot = cached(home, "models", "someone/tokenizer-only")
    shutil.copy(DEMO / "config.json", snapshot)
    line = ["sft", "--model", "someone/tokenizer-only", "--data", "chats.jsonl", "--output_dir", "out", "--device", "cpu"]
    assert call(home, [*line, "--plan"]).returncode == 0  # needs no weights
    result = call(home, line)
    assert result.returncode == 1 and "does not have all of that model" in result.stderr
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "does not have all of that model" in call(home, line).stderr


# ---- the program's name and version


def test_version():
    refused([str(PROGRAM), "--version", "sft"], '--version stands alone, without "sft"')
    said = succeeds([str(PROGRAM), "--version"])
    assert re.fullmatch(r"train_llama, commit (unknown|[0-9a-f]{7,40}(-dirty)?)\ncompiled by \S+ \d.*\n[^;]+; [^;]+; .+\nPython 3\.[\d.]+; tokenizers \d.*\n", said), said


@pytest.mark.parametrize("words, name", [(["train_llama"], "train_llama"), (["./train_llama"], "./train_llama")])
def test_help_has_the_name_by_which_the_program_was_called(words, name):
    environment = {**ENVIRONMENT, "PATH": f"{PROGRAM.parent}:{ENVIRONMENT['PATH']}"}
    for task, usage in {"sft": f"usage: {name} sft [", "show": f"usage: {name} show [", "report": f"usage: {name} report ["}.items():
        assert usage in succeeds([*words, task, "--help"], env=environment, cwd=PROGRAM.parent)
