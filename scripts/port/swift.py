"""ms-swift 4.5."""

import math
import re

from .instead import no_task
from .reading import PortError
from .table import Note, Peer, Refused, Same, Sets, Together
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .trl import set_rewards

ROWS = [
    # model and data
    Together("dataset", "files and names on the Hugging Face hub: --data; #N is the slice [train[:N]]", "dataset"),
    Together("val_dataset", "as dataset: --eval_data", "val_dataset"),
    Same("eval_fraction", "split_dataset_ratio"),
    Same("max_len", "max_length"),
    Same("tokenizer_chat_template", "chat_template"),
    Sets("truncation drop", "truncation_strategy", "delete"),
    Sets("truncation keep", "truncation_strategy", "right"),
    Sets("truncation split", "truncation_strategy", "split"),
    Refused("--truncation drop or keep, which cuts on the right", "truncation_strategy"),
    Note("the tokenizer's own template is used", "template"),
    Note("data sets are read from the Hugging Face hub", "use_hf"),
    Note("no records with these names are generated: write records about the model's name into the data", "model_name, model_author"),
    Note("data/prepare.py tokenises samples once and caches them", "load_from_cache_file, dataset_num_proc, dataset_shuffle, data_seed, lazy_tokenize, strict, "
      "streaming, shuffle_buffer_size"),
    Note("config.json describes the model", "model_type"),
    Note("the task determines the type", "task_type", "causal_lm"),
    Refused("models continue texts, or score them with one number (the task rm); there are no classifiers, embedding models or rerankers", "task_type, problem_type"),
    Note("a reward model gives one number", "num_labels", "1"),
    Refused("a reward model gives one number", "num_labels"),
    Same("router_aux_loss_coef", "router_aux_loss_coef"),
    Same("beta,kl_coef", "beta"),
    Note("the assistant's messages are trained", "loss_scale", "default"),
    Refused("the fields of a record determine the targets (docs/data.md); leave it out", "loss_scale"),
    Note("it selects an implementation and changes no result", "tuner_backend, experts_impl"),
    Sets("async_steps 1", "async_generate", "true"),
    Sets("chat_template_kwargs {\"enable_thinking\": true}", "enable_thinking", "true"),
    Sets("chat_template_kwargs {\"enable_thinking\": false}", "enable_thinking", "false"),
    Refused("the template determines the beginning of an answer: --chat_template_kwargs or --tokenizer_chat_template", "add_non_thinking_prefix"),
    Refused("write it into the records: a field system, or a system message", "system"),
    Refused("write the records in one of the forms of docs/data.md", "columns, remove_unused_columns"),
    Refused("this program trains only text models", "freeze_vit, freeze_aligner, freeze_llm, max_pixels"),
    Together("tokens", "--add_tokens", "new_special_tokens"),
    # the method
    Together("rlhf_type", "the task: dpo, rm, grpo, and for orpo and simpo --loss_type", "rlhf_type"),
    Together("tuner_type", "lora, which is the default there, or full", "tuner_type, train_type, sft_type"),
    Together("lora_r", "with tuner_type lora: --lora_rank", "lora_rank"),
    Together("lora_alpha", "with tuner_type lora: --lora_alpha", "lora_alpha"),
    Together("lora_dropout", "with tuner_type lora: --lora_dropout", "lora_dropout"),
    Together("lora_targets", "with tuner_type lora: --lora_targets", "target_modules"),
    Together("lora_whole", "with tuner_type lora: --lora_modules_to_save", "modules_to_save"),
    Same("adapter", "adapters"),
    Sets("load_in 4bit", "quant_bits", "4"),
    Sets("load_in 8bit", "quant_bits", "8"),
    Note("4-bit weights are NF4", "quant_method, bnb_4bit_compute_dtype, bnb_4bit_quant_type, bnb_4bit_use_double_quant", "bnb, bfloat16, nf4, true"),
    Refused("frozen weights are stored in 4 or 8 bits (--load_in)", "quant_method, quant_bits"),
    Refused("adapters are LoRA or rsLoRA of whole linear layers (docs/lora.md); leave it out", "use_dora, lorap_lr_ratio, target_regex, init_weights, "
      "freeze_parameters, trainable_parameters, freeze_parameters_ratio"),
    Refused("--optimizer adamw or muon, over all weights; leave it out", "use_galore, lisa_activated_layers"),
    Together("packs", "samples are always packed and never attend to each other; with this flag a step counts rows of max_len tokens: --train_batch_tokens", "packing"),
    Note("samples are always packed into rows of --row_tokens tokens, and never attend to each other", "padding_free"),
    Refused("--loss_type sigmoid,sft --loss_weights 1,ALPHA", "rpo_alpha"),
    Same("dtype", "torch_dtype"),
    Same("ring_attn_size", "sequence_parallel_size"),
    Note("this program has its own attention: exact, blocked, on packed rows", "attn_impl"),
    Note("this program samples answers itself, from the weights in training", "use_vllm, vllm_mode, vllm_gpu_memory_utilization, vllm_max_model_len, "
      "vllm_tensor_parallel_size, vllm_server_host, vllm_server_port, vllm_enable_lora, sleep_level, offload_optimizer, offload_model, move_model_batches, "
      "log_completions"),
    Same("mask_truncated", "overlong_filter"),
    Together("reward_funcs", "--reward, a directory or FILE.py; ms-swift's functions are refused", "reward_funcs"),
    Refused("--reward FILE.py, with reward(prompts, answers, labels)", "external_plugins, multi_turn_scheduler, max_turns"),
    Same("reward", "reward_model"),
    Note("every checkpoint contains the model as a Hugging Face directory", "save_safetensors, create_checkpoint_symlink, add_version"),
]

ANSWERS = {"num_generations": "8", "max_completion_length": "512", "temperature": "0.9", "beta": "0.04"}  # grpo's defaults
TASKS = {"dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "rm": "rm", "grpo": "grpo"}


def task_of(given, task):
    kind = given.get("rlhf_type")
    if kind and kind.value not in TASKS:
        raise PortError(f"{kind.where}: {no_task(kind.value)}")
    return kind and (TASKS[kind.value], f'{kind.where} "{kind.value}"')


def defaults(task):
    out = {"num_train_epochs": "3", "per_device_train_batch_size": "1", "lr_scheduler_type": "cosine", "warmup_ratio": "0", "weight_decay": "0.1"}
    return out | (ANSWERS if task == "grpo" else {})


def complete(t):
    kind = t.get("tuner_type", "lora")
    if not t.has("tuner_type"):
        t.note("", "ms-swift trains adapters unless tuner_type is full")
    if "learning_rate" not in t.given:
        t.set("learning_rate", "1e-4" if kind != "full" else "1e-5", "learning_rate (ms-swift's default)", by_default=True)
    if t.has("deepspeed") and (name := re.fullmatch(r"zero([0-3])(_offload)?", t.get("deepspeed"))):  # a file of ms-swift
        t.together["deepspeed"] = t.together["deepspeed"]._replace(values=[f'{{"zero_optimization": {{"stage": {name[1]}}}, "gradient_clipping": "auto"}}'])
    complete_trainer(t, keeps_strings=False)
    finish(t, kind)
    samples = t.count("device_batch", 1)
    accumulated = t.count("accumulated", 1 if t.task == "grpo" else max(1, math.ceil(16 / samples / t.ranks())))
    t.step(samples, accumulated, t.has("packs"))
    t.answers(samples, accumulated)


def finish(t, kind):
    """Computes the flags of all ms-swift commands: adapters, the loss, data and rewards."""
    if kind in ("lora", "qlora"):
        t.lora("8", "32", "0.05", "all-linear", steady=() if t.peer.name == "Megatron-SWIFT" else ("dpo", "rm"))
    elif kind != "full":
        t.refuse(f'{t.together["tuner_type"].where} "{kind}" is not supported\n  fix: lora or full')
    if "max_len" not in t.flags:
        t.note("", "without max_length ms-swift allows samples up to the model's number of positions; here --max_len is 2048, and for pairs 512")
    if t.has("rlhf_type"):
        rlhf, where = t.get("rlhf_type"), t.together["rlhf_type"].where
        if rlhf in ("orpo", "simpo"):
            t.set("loss_type", rlhf, where)
    for key, flag in (("dataset", "data"), ("val_dataset", "eval_data")):
        if t.has(key):
            names = [re.sub(r"#(\d+)$", r"[train[:\1]]", name) for name in t.together[key].values]
            t.set(flag, ",".join(names), t.together[key].where)
            if any("/" in name for name in names):
                t.note(t.together[key].where, "names are read from the Hugging Face hub; without use_hf ms-swift reads them from ModelScope. #N takes the first N records; ms-swift "
                       "draws N records at random")
    if t.has("reward_funcs"):
        set_rewards(t)


SWIFT = Peer("ms-swift", "4.5", ROWS, defaults, task_of, complete, "output", (TRAINER,))
