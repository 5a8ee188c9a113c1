"""Command lines and files of OpenRLHF, TRL, accelerate and Axolotl as their pages have them. Each comes to a first step, or its plan, on small data and
models, which are in a made-up cache of the Hugging Face hub."""

import json
import shutil
import subprocess

import pyarrow
import pyarrow.parquet
import pytest
from runs import DEMO, ENVIRONMENT, PROGRAM, ROOT, change_json, chat, read_lines, write_lines
from test_recipes import LONG_CONTEXT

MODELS = ("meta-llama/Meta-Llama-3-8B", "OpenRLHF/Llama-3-8b-sft-mixture", "Qwen/Qwen2-0.5B",
          "NousResearch/Llama-3.2-1B", "Qwen/Qwen3-8B")
COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
WORDS = ("tami", "lo", "pa")
CHATS = [{"messages": chat(f"reverse {word}", word[::-1])} for word in WORDS]
DATA = {
    "Open-Orca/OpenOrca": [{"question": f"reverse {word}", "response": word[::-1], "input": f"reverse {word}",
                            "output": word[::-1]} for word in WORDS],
    "OpenRLHF/preference_dataset_mixture2_and_safe_pku": [
        {"chosen": chat(f"reverse {word}", word[::-1]), "rejected": chat(f"reverse {word}", "no")} for word in WORDS],
    "trl-lib/Capybara": CHATS,
    "teknium/GPT4-LLM-Cleaned": [{"instruction": "reverse", "input": word, "output": word[::-1]} for word in WORDS],
    "tatsu-lab/alpaca": [{"instruction": "reverse lo", "input": "", "output": "ol", "text": "all of it"}],
}


def call(home, words, timeout=120, **environment):
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(home / "own")}
    return subprocess.run([PROGRAM, *map(str, words)], cwd=home, env=ENVIRONMENT | offline | environment, capture_output=True, text=True,
                          timeout=timeout)


def cached(home, kind, name):
    """The directory of a snapshot, as huggingface_hub lays out its cache."""
    root = home / "hub" / f"{kind}--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots" / COMMIT).mkdir(parents=True)
    return root / "snapshots" / COMMIT


def home_with_a_model(home):
    """A directory with chats.jsonl, and with a model in first/ that a step has been trained."""
    write_lines(home / "chats.jsonl", CHATS)
    shutil.copytree(DEMO, home / "tiny")
    change_json(home / "tiny" / "config.json", num_key_value_heads=2)  # so that two heads can travel at a time
    prepared = ["--data", ROOT / "data/demo/train.safetensors", "--max_samples", "1"]  # prepared data starts without Python
    result = call(home, ["sft", "--model", "tiny", *prepared, "--output_dir", "first", "--max_steps", "1", "--device", "cpu"])
    assert result.returncode == 0, result.stderr
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache with these models, and data sets of three records with the splits train and test."""
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
    """What a run says until a first step."""
    result = call(home, [*words, "--max_steps", 1, "--device", "cpu", "--ranks", ranks, "--output_dir", "out", "--log", "log.jsonl"], timeout=300)
    assert result.returncode == 0, result.stderr
    shutil.rmtree(home / "out")
    steps = read_lines(home / "log.jsonl")
    (home / "log.jsonl").unlink()
    assert [line["step"] for line in steps if "loss" in line] == [1]
    return result.stdout


def plan(home, words, ranks=1):
    """What a plan says, which reads no data."""
    result = call(home, [*words, "--plan", "--device", "cpu", "--ranks", ranks])
    assert result.returncode == 0, result.stderr
    return result.stdout


# ---- OpenRLHF -----------------------------------------------------------------------------------------------------------------------

DPO_RING = """dpo --save_path ./checkpoint/llama3-8b-dpo --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256
    --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --bf16 --max_epochs 1 --max_len 8192 --zero_stage 3
    --learning_rate 5e-7 --beta 0.1 --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template
    --chosen_key chosen --rejected_key rejected --flash_attn --load_checkpoint --gradient_checkpointing --packing_samples
    --ring_attn_size 2 --ring_head_stride 1 --eval_dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku"""
def words(text):
    return [{"TEMPLATE": "User: {}\nAssistant: ", "MODEL": "meta-llama/Meta-Llama-3-8B"}.get(word, word) for word in text.split()]


def test_openrlhf_long_context(home):
    assert "2 ranks: 1 x data, 2 x sequence (gather)" in first_step(home, ["sft", *words(LONG_CONTEXT["sft"]), "--ckpt.load_enable"], ranks=2)


def test_openrlhf_dpo_ring_evaluates_on_the_split_test(home):
    said = first_step(home, [*words(DPO_RING), "--ref_model", MODELS[0]], ranks=2)
    assert "note: eval.dataset is read from its test split, as in OpenRLHF\n" in said and f"note: {MODELS[0]} is " in said


# ---- TRL ----------------------------------------------------------------------------------------------------------------------------

ALST = """sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2e-4 --max_steps 100 --max_seq_length 4096
    --packing --packing_strategy wrapped --torch_dtype bfloat16 --attn_implementation flash_attention_2 --output_dir output-alst-4gpu
    --logging_steps 10 --report_to trackio"""
def test_trl_alst(home):
    (home / "alst.yaml").write_text("""
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  zero_stage: 3
  seq_parallel_communication_data_type: bf16
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 2  # Number of GPUs
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 1
  parallelism_config_tp_size: 1
  parallelism_config_sp_size: 1
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
  parallelism_config_sp_attn_implementation: flash_attention_2
""")
    said = first_step(home, [*words(ALST), "--config_file", "alst.yaml"], ranks=2)
    assert "2 ranks: 2 x data, 1 x sequence, ZeRO stage 3" in said
    assert "note: in the names of this program: ./train_llama sft " in said


# ---- Axolotl ------------------------------------------------------------------------------------------------------------------------

LORA_1B = {
    "base_model": "NousResearch/Llama-3.2-1B", "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}], "val_set_size": 0.4,
    "output_dir": "./outputs/lora-out", "adapter": "lora", "lora_model_dir": None, "sequence_len": 2048, "sample_packing": True,
    "eval_sample_packing": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": ["gate_proj", "down_proj"], "wandb_project": None,
    "gradient_accumulation_steps": 2, "micro_batch_size": 2, "num_epochs": 1, "optimizer": "adamw_8bit", "lr_scheduler": "cosine",
    "learning_rate": 0.0002, "bf16": "auto", "tf32": False, "gradient_checkpointing": True, "resume_from_checkpoint": None, "logging_steps": 1,
    "attn_implementation": "flash_attention_2", "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3, "warmup_ratio": 0.1,
    "evals_per_epoch": 4, "saves_per_epoch": 1, "weight_decay": 0.0, "special_tokens": {"pad_token": "<|end_of_text|>"}}
SEQUENCE_PARALLEL = """
base_model: Qwen/Qwen3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
context_parallel_size: 2  # Split sequences across 2 GPUs
heads_k_stride: 1
ring_attn_func:
sequence_len: 8192
sample_packing: true
micro_batch_size: 1
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: constant_with_warmup
learning_rate: 2e-6
bf16: true
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  reshard_after_forward: true
special_tokens:
"""


def test_axolotl_sequence_parallel(home):
    (home / "sp.yaml").write_text(SEQUENCE_PARALLEL)
    assert "2 ranks: 1 x data, 2 x sequence (gather), ZeRO stage 3" in plan(home, ["sft", "--config", "sp.yaml"], ranks=2)


def test_axolotl_lora(home):
    (home / "lora.yaml").write_text(json.dumps(LORA_1B))  # JSON is YAML
    first_step(home, ["axolotl", "train", "lora.yaml"])


# ---- models by name -----------------------------------------------------------------------------------------------------------------


def test_a_model_and_its_revision_lie_in_the_cache(home):
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


def test_a_model_without_weights_is_not_begun_from_random_ones(home):
    snapshot = cached(home, "models", "someone/tokenizer-only")
    shutil.copy(DEMO / "config.json", snapshot)
    line = ["sft", "--model", "someone/tokenizer-only", "--data", "chats.jsonl", "--output_dir", "out", "--device", "cpu"]
    assert call(home, [*line, "--plan"]).returncode == 0  # needs no weights
    result = call(home, line)
    assert result.returncode == 1 and "does not have all of that model" in result.stderr
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "does not have all of that model" in call(home, line).stderr


def test_without_a_network_both_ways_are_named(home):
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # nothing listens there
    result = call(home, ["sft", "--plan", "--device", "cpu", "--model", "someone/else"], **environment)
    assert result.returncode == 1 and result.stderr.count("\n  fix: ") == 1, result.stderr
    assert "someone/else: there is no such directory, the cache does not have that model, and the hub cannot be reached" in result.stderr
    assert "hf download someone/else --local-dir DIR, and give DIR" in result.stderr
