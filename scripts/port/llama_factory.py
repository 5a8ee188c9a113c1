"""LLaMA-Factory 0.9.5."""

import re
from pathlib import Path

from json_yaml import read_object

from .instead import instead, no_task
from .table import Note, Peer, Refused, Same, Sets, Together
from .templates import THINKING, name_template, set_variables
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .trl import add_sft, complete_kto

ROWS = [
    # model and data
    Same("model", "model_name_or_path"),
    Together("revision", "the revision, after an @: --model OWNER/NAME@REVISION", "model_revision"),
    Together("dataset", "names of dataset_info.json in dataset_dir, or files: --data", "dataset"),
    Together("eval_dataset", "names of dataset_info.json in dataset_dir, or files: --eval_data", "eval_dataset"),
    Together("dataset_dir", "the directory of dataset_info.json", "dataset_dir"),
    Together("template", "the tokenizer's own template, or one of --tokenizer_chat_template by its name", "template"),
    Same("max_len", "cutoff_len"),
    Together("max_samples", "the first samples of each data set: a slice in --data, NAME[train[:N]]", "max_samples"),
    Same("eval_fraction", "val_size"),
    Same("dataset_probs", "interleave_probs"),
    Note("data sets are read one after another", "mix_strategy", "concat"),
    Sets("stopping_strategy first_exhausted", "mix_strategy", "interleave_under"),
    Sets("stopping_strategy all_exhausted", "mix_strategy", "interleave_over"),
    Sets("stopping_strategy all_exhausted_without_replacement", "mix_strategy", "interleave_once"),
    Refused("concat, interleave_under, interleave_over or interleave_once", "mix_strategy"),
    Sets("shuffle false", "disable_shuffling", "true"),
    Together("packs", "samples are always packed and never attend to each other; with this flag, which is the default of stage pt, a step counts rows of max_len tokens: "
      "--train_batch_tokens", "packing", "true, false"),
    Together("neat", "as packing", "neat_packing"),
    Note("data/prepare.py tokenises samples once and caches them",
      "preprocessing_num_workers, preprocessing_batch_size, overwrite_cache, streaming, buffer_size, use_fast_tokenizer, cache_dir, media_dir, "
      "data_shared_file_system"),
    Refused("the tokenizer's template determines the form of tools and calls; leave it out", "tool_format"),
    Together("tokenized", "where it exists it holds the data in place of dataset, which is refused: --data 'DIR[train]'; else LLaMA-Factory writes it", "tokenized_path"),
    Note("code in a model's directory is never run", "trust_remote_code"),
    Note("all memory is planned before the start (--plan)", "low_cpu_mem_usage, print_param_status, offload_folder, quantization_device_map"),
    Refused("write it into the records: a field system, or a system message", "default_system"),
    Same("train_on_prompt", "train_on_prompt"),
    Refused("the fields of a record determine the targets (docs/data.md); leave it out", "mask_history"),
    Together("tokens", "--add_tokens", "add_tokens, add_special_tokens"),
    Together("resizes", "new rows start as the mean of the others; with lora the embedding and the head are then trained as well", "resize_vocab"),
    Note("new rows start as the mean of the others", "init_special_tokens", "noise_init"),
    Refused("the tokenizer is read from --model: change its files", "new_special_tokens_config, init_special_tokens, split_special_tokens"),
    Note("a text model has no such part", "freeze_vision_tower, freeze_multi_modal_projector", "true"),
    Refused("this program trains only text models", "image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels, video_fps, video_maxlen, use_audio_in_video, "
      "freeze_language_model, audio_sampling_rate, image_do_pan_and_scan, crop_to_patches"),
    Refused("--rope_scaling '{\"rope_type\": \"yarn\", \"factor\": 4}' takes it as JSON, with a factor", "rope_scaling"),
    Refused("change config.json in the directory of --model", "shift_attn, mixture_of_depths, train_from_scratch"),
    # the method
    Together("stage", "the task: pt is pretrain, sft, rm, dpo; kto is dpo with --loss_type kto", "stage"),
    Together("finetuning_type", "lora, which is the default there, or full", "finetuning_type"),
    Together("lora_r", "with finetuning_type lora: --lora_rank", "lora_rank"),
    Together("lora_alpha", "with finetuning_type lora: --lora_alpha; twice the rank by default", "lora_alpha"),
    Together("lora_dropout", "with finetuning_type lora: --lora_dropout", "lora_dropout"),
    Together("lora_targets", "with finetuning_type lora: --lora_targets", "lora_target"),
    Together("lora_whole", "with finetuning_type lora: --lora_modules_to_save", "additional_target"),
    Same("adapter", "adapter_name_or_path"),
    Refused("--adapter DIR, with the path of the folder", "adapter_folder"),
    Same("use_rslora", "use_rslora"),
    Sets("load_in 4bit", "quantization_bit", "4"),
    Sets("load_in 8bit", "quantization_bit", "8"),
    Note("4-bit weights are NF4, with quantised scales", "quantization_method, quantization_type, double_quantization", "bnb, bitsandbytes, nf4, true"),
    Refused("adapters are LoRA or rsLoRA of whole linear layers (docs/lora.md); leave it out",
      "use_dora, pissa_init, pissa_iter, pissa_convert, create_new_adapter, oft_rank, oft_block_size, oft_target, module_dropout, "
      "freeze_trainable_layers, freeze_trainable_modules, freeze_extra_modules, use_llama_pro"),
    Refused("frozen weights are stored in 4 or 8 bits (--load_in)", "quantization_bit, quantization_method, quantization_type"),
    Refused("4-bit weights always have quantised scales; leave it out", "double_quantization", "false"),
    Note("each operand of a product is scaled by its largest magnitude, as in torchao", "fp8_backend", "auto, torchao"),
    Refused("--fp8 scales each operand by its largest magnitude, as torchao does; leave it out", "fp8_backend"),
    Note("ranks exchange arrays in --dtype", "fp8_enable_fsdp_float8_all_gather"),
    Refused("all weights share one --learning_rate; leave it out", "loraplus_lr_ratio, loraplus_lr_embedding"),
    Sets("optimizer muon", "use_muon", "true"),
    Refused("--optimizer adamw or muon, over all weights; leave it out",
      "use_galore, galore_target, galore_rank, galore_update_interval, galore_scale, galore_proj_type, galore_layerwise, use_apollo, apollo_target, apollo_rank, "
      "apollo_update_interval, apollo_scale, apollo_proj, apollo_proj_type, apollo_scale_type, apollo_layerwise, apollo_scale_front, use_badam, badam_mode, badam_start_block, "
      "badam_switch_mode, badam_switch_interval, badam_update_ratio, badam_mask_mode, badam_verbose, use_adam_mini"),
    Refused("sft has only the plain cross-entropy of the targets; leave it out", "use_dft_loss, use_asft_loss, asft_alpha, use_eaft_loss, eaft_alpha"),
    Same("early_stopping_patience", "early_stopping_steps"),
    # preferences and rewards
    Same("beta", "pref_beta"),
    Sets("loss_type sigmoid", "pref_loss", "sigmoid"),
    Sets("loss_type hinge", "pref_loss", "hinge"),
    Sets("loss_type ipo_mean", "pref_loss", "ipo"),
    Sets("loss_type orpo", "pref_loss", "orpo"),
    Sets("loss_type simpo", "pref_loss", "simpo"),
    Refused("one of the losses in ./train_llama dpo --help: --loss_type", "pref_loss"),
    Together("pref_ftx", "--loss_type sigmoid,sft --loss_weights 1,PREF_FTX", "pref_ftx"),
    Same("simpo_gamma", "simpo_gamma"),
    Same("label_smoothing", "dpo_label_smoothing"),
    Same("ref_model", "ref_model"),
    Same("desirable_weight", "kto_chosen_weight"),
    Same("undesirable_weight", "kto_rejected_weight"),
    Refused("there is no such variant of DPO here; leave it out", "pref_bco_weight, ld_alpha, ref_model_adapters, "
      "ref_model_quantization_bit"),
    Refused("the tasks grpo and ppo learn from rewards, with other flags (docs/rl.md)",
      "ppo_buffer_size, ppo_epochs, ppo_score_norm, ppo_target, ppo_whiten_rewards, reward_model, reward_model_adapters, reward_model_quantization_bit, "
      "reward_model_type"),
    # how it is computed
    Note("this program has its own attention: exact, blocked, on packed rows", "flash_attn, block_diag_attn"),
    Note("--recompute selects the recomputed activations", "disable_gradient_checkpointing, use_reentrant_gc, use_unsloth_gc"),
    Note("a setting of PyTorch without a counterpart here", "enable_liger_kernel, use_v1_kernels, use_unsloth, upcast_layernorm, upcast_lmhead_output, use_kv_cache"),
    Note("rows have no padding", "ignore_pad_token_for_loss", "true"),
    Refused("rows have no padding; leave it out", "ignore_pad_token_for_loss", "false"),
    Sets("dtype bf16", "pure_bf16", "true"),
    Same("router_aux_loss_coef", "moe_aux_loss_coef"),
    Note("evaluation reports loss, perplexity and accuracy", "compute_accuracy, include_effective_tokens_per_second, eval_num_beams, eval_on_each_dataset"),
    Note("the task plot draws the loss", "plot_loss"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
      "use_swanlab, swanlab_project, swanlab_workspace, swanlab_run_name, swanlab_mode, swanlab_api_key, swanlab_logdir, swanlab_lark_webhook_url, "
      "swanlab_lark_secret"),
    Note("hf auth login logs in to the hub, and hf upload OWNER/NAME OUTPUT_DIR uploads a model", "hf_hub_token, ms_hub_token, om_hub_token"),
    Together("enable_thinking", THINKING + "; null is false", "enable_thinking", "true, false, null"),
    Together("preserve_thinking", THINKING, "preserve_thinking", "true, false"),
    Together("trains", "without it LLaMA-Factory only evaluates, as the task eval does", "do_train", "true, false"),
    Together("evaluates", "evaluation during training needs --eval_data or --eval_fraction", "do_eval"),
    Note("the stages pt, sft, rm and dpo generate nothing",
      "do_sample, temperature, top_p, top_k, num_beams, max_length, max_new_tokens, repetition_penalty, length_penalty, skip_special_tokens"),
    Refused("the task generate continues prompts, and the task eval reports the loss", "predict_with_generate, do_predict, infer_backend, infer_dtype, vllm_maxlen, vllm_gpu_util, "
      "vllm_enforce_eager, vllm_max_lora_rank, vllm_config, sglang_maxlen, sglang_mem_fraction, sglang_tp_size, sglang_config, sglang_lora_backend"),
    Refused("the task merge adds an adapter to the weights of its model", "export_dir, export_size, export_device, export_quantization_bit, "
      "export_quantization_dataset, export_legacy_format, export_hub_model_id, "
      "export_quantization_nsamples, export_quantization_maxlen"),
    Refused("it is for LLaMA-Factory's programs with Megatron, KTransformers or HyperParallel; leave it out", "use_kt, kt_cpu_activation, kt_weight_path, kt_config, use_mca, "
      "use_megatron_bridge, megatron_bridge_args, use_hyper_parallel, hyper_parallel_args, tensor_model_parallel_size, pipeline_model_parallel_size, "
      "expert_model_parallel_size, sequence_parallel, use_distributed_optimizer, bias_activation_fusion, apply_rope_fusion, overlap_grad_reduce, overlap_param_gather, "
      "moe_grouped_gemm, moe_token_dispatcher_type, recompute_granularity, export_hf_on_finish, use_packed_sequences, kt_non_expert_weight_path, kt_expert_checkpoint_path, "
      "kt_use_lora_experts, kt_lora_expert_num, kt_lora_expert_intermediate_size"),
    Note("--profile measures the time of each op", "enable_torch_profiler, profiler_output_dir, profiler_wait_steps, profiler_warmup_steps, profiler_active_steps, "
      "profiler_repeat, profiler_record_shapes, profiler_profile_memory, profiler_with_stack, profile_modules"),
    Refused("scripts/launch.sh starts ranks with mpirun", "master_addr, master_port, ray_num_workers, ray_run_name, ray_init_kwargs, ray_storage_path"),
    Refused("the keys of LLaMA-Factory's version 1 are not supported: write a file of version 0, or a command of this program",
      "model_class, dist_config, train_dataset, sample_backend, kernel_config, quant_config, peft_config, init_config, batching_strategy, optim_config"),
]

STAGES = {"pt": "pretrain", "sft": "sft", "rm": "rm", "dpo": "dpo", "kto": "dpo"}
# For each column of a data set: the names that need no flag, and the flag of another name (None: there is none).
COLUMNS = {"prompt": ("instruction, text", "input_key"), "query": ("input", None), "response": ("output", "output_key"), "history": ("history", None),
           "messages": ("messages, conversations", "input_key"), "chosen": ("chosen", "chosen_key"), "rejected": ("rejected", "rejected_key"), "tools": ("tools", None),
           "system": ("system", None)}
# The values of a data set's tags that are read here.
TAGS = {"role_tag": "from, role", "content_tag": "value, content", "user_tag": "human, user", "assistant_tag": "gpt, assistant", "observation_tag": "observation, tool",
        "function_tag": "function_call, tool_call", "system_tag": "system"}


def task_of(given, task):
    stage = given.get("stage")
    if stage and stage.value in STAGES:
        return STAGES[stage.value], f'{stage.where} "{stage.value}"'
    return None if task else ("sft", "")


def defaults(task):
    return {"learning_rate": "5e-5", "num_train_epochs": "3", "per_device_train_batch_size": "8", "lr_scheduler_type": "linear", "warmup_ratio": "0",
            "adam_beta2": "0.999", "cutoff_len": "2048"} | ({} if task == "pretrain" else {"truncation": "keep"})


def complete(t):
    complete_trainer(t)
    if t.has("stage") and t.get("stage") not in STAGES:
        where, stage = t.together["stage"].where, t.get("stage")
        t.refuse(f"{where}: {no_task(stage)}" if instead(stage) else
                 f'{where} "{stage}" is not supported\n  fix: use the stages pt, sft, rm, dpo and kto; the tasks grpo and ppo learn from rewards')
    kind = t.get("finetuning_type", "lora")
    if kind == "lora" and "adapter" not in t.flags:
        rank = t.count("lora_r", 8)
        t.lora(str(rank), str(2 * rank), "0", "all-linear", steady=("dpo",))
        if (t.has("resizes") or t.has("tokens")) and not t.has("lora_whole"):
            t.set("lora_modules_to_save", ["embed_tokens", "lm_head"], (t.together.get("resizes") or t.together["tokens"]).where)
        if not t.has("finetuning_type"):
            t.note("", "LLaMA-Factory trains adapters unless finetuning_type is full")
    elif kind not in ("lora", "full"):
        t.refuse(f'{t.together["finetuning_type"].where} "{kind}" is not supported\n  fix: lora or full')
    if t.has("evaluates") and t.get("trains", "false").lower() != "true":
        t.refuse(f"{t.together['evaluates'].where} without do_train only evaluates\n  fix: {t.own['program']} eval --model DIR --data FILE; or do_train: true")
    if t.has("tokenized") and Path(t.get("tokenized")).exists():
        t.refuse(f"{t.together['tokenized'].where} holds the data in place of dataset\n  fix: leave it out; or leave dataset out: --data '{t.get('tokenized')}[train]'")
    elif t.has("tokenized"):
        t.note(t.together["tokenized"].where, "data/prepare.py tokenises samples once and caches them")
    for key, flag in (("dataset", "data"), ("eval_dataset", "eval_data")):
        if t.has(key):
            find_data(t, key, flag)
    if float(t.flag("eval_fraction", "0")) >= 1:
        t.refuse(f"{t.flags.pop('eval_fraction').where} is a number of samples\n  fix: val_size: 0.05, a share of the samples")
    if "," in t.flag("adapter", ""):
        t.refuse(f"{t.flags['adapter'].where} has several adapters\n  fix: add all but the last to the model with the task merge, and give that model and the last one")
    if t.has("max_samples") and ("data" in t.said or not t.has("dataset")):
        t.refuse(f"{t.together['max_samples'].where} belongs to dataset\n  fix: --data 'NAME[train[:{t.get('max_samples')}]]'")
    if "dataset_probs" in t.given and "stopping_strategy" not in t.given:
        t.refuse(f"{t.flags['dataset_probs'].where} needs a mix_strategy that interleaves\n  fix: mix_strategy: interleave_under, interleave_over or interleave_once")
    if t.has("template") and t.task != "pretrain":
        name_template(t, t.get("template"), t.together["template"].where)
    if t.get("stage") == "kto":
        t.set("loss_type", "kto", t.together["stage"].where)
        complete_kto(t)
        if float(t.get("pref_ftx", "0")) > 0:
            t.refuse(f"{t.together['pref_ftx'].where} is not supported with stage kto\n  fix: leave it out; the loss kto cannot be added to others")
    elif t.has("pref_ftx"):
        add_sft(t, t.together["pref_ftx"])
    set_variables(t, "enable_thinking", "preserve_thinking")
    packs = t.has("neat") or t.get("packs", str(t.task == "pretrain")).lower() == "true"
    if t.task == "pretrain" and not packs:
        t.set("truncation", "keep", "truncation (LLaMA-Factory's default without packing)", by_default=True)
    t.step(t.count("device_batch", 8), t.count("accumulated", 1), packs)


def find_data(t, key, flag):
    """Looks up the names of data sets in dataset_info.json, and sets --data to their files and the flags of their fields."""
    where, folder = t.together[key].where, Path(t.get("dataset_dir", "data"))
    known = read_object(folder / "dataset_info.json") if (folder / "dataset_info.json").exists() else {}
    found = []
    for name in t.get(key).split(","):
        name = name.strip()
        entry = known.get(name, {"file_name": name} if Path(name).suffix else None)
        if entry is None:
            t.refuse(f'{where} "{name}" is a name in LLaMA-Factory\'s {folder}/dataset_info.json, which {"does not have it" if known else "is not here"}\n'
                     f"  fix: --{'dataset_dir DIR, where that file is, or --' if not known else ''}{flag} FILE or OWNER/NAME")
            found.append(name)
            continue
        source = isinstance(entry, dict) and (entry.get("hf_hub_url") or entry.get("file_name", ""))
        if not source:
            t.refuse(f'{where} "{name}" has neither a file nor a name on the Hugging Face hub\n  fix: --{flag} FILE or OWNER/NAME')
            continue
        source = str(folder / source) if "hf_hub_url" not in entry and not Path(source).exists() and known else source
        source += "".join(form % entry[part] for part, form in (("subset", ":%s"), ("folder", "@%s")) if entry.get(part))
        found.append(source + split_of(t, entry, f'{where} "{name}"'))
        name_fields(t, name, entry, where)
    if found:
        t.set(flag, ",".join(found), where)


def split_of(t, entry, where):
    """Returns the split of an entry of dataset_info.json, cut to num_samples and max_samples."""
    split, drawn = entry.get("split"), entry.get("num_samples")
    if drawn:
        t.note(where, f"its num_samples means the first {drawn} records, once; LLaMA-Factory draws them at random, and repeats records of a smaller set")
    counts = [t.count("max_samples", 0), drawn or 0]
    if any(counts):
        name, most = re.fullmatch(r"(.*?)(?:\[:(\d+)\])?", split or "train").groups()
        if "[" in name or "+" in name:
            t.refuse(f"{where} has the split {split!r}, which cannot be cut further\n  fix: leave max_samples out")
        split = f"{name}[:{min(count for count in (*counts, int(most or 0)) if count)}]"
    return f"[{split}]" if split else ""


def name_fields(t, name, entry, where):
    columns, chats = entry.get("columns", {}), entry.get("formatting") in ("sharegpt", "openai")
    if {"images", "videos", "audios"} & set(columns):
        t.refuse(f'{where} "{name}" contains images or audio\n  fix: use a data set of text')
    judges, wanted = "kto_tag" in columns, t.get("stage") == "kto"
    if judges and not wanted:
        t.refuse(f'{where} "{name}" contains single answers labelled good or bad\n  fix: use the stage kto')
    if judges and columns["kto_tag"] not in ("kto_tag", "label"):
        t.refuse(f'{where} "{name}" has its kto_tag in the field {columns["kto_tag"]!r}\n  fix: rename the field to kto_tag or label')
    if entry.get("ranking") is not None and bool(entry["ranking"]) != (t.task in ("dpo", "rm") and not wanted):
        t.refuse(f'{where} "{name}" contains {"pairs" if entry["ranking"] else "single answers"}, which {t.task} does not train on\n  fix: use another task or data set')
    for tag, value in entry.get("tags", {}).items():
        if value not in TAGS.get(tag, "").split(", "):
            t.refuse(f'{where} "{name}" has the {tag} {value!r}\n  fix: write the records in one of the forms of docs/data.md')
    if unread := set(columns) - set(COLUMNS) - {"images", "videos", "audios", "kto_tag"}:
        t.note(f'{where} "{name}"', f"LLaMA-Factory has no column {', '.join(sorted(unread))} either")
    for column, (names, ours) in COLUMNS.items():
        value = columns.get(column)
        if not value or value in names.split(", "):
            continue
        flag = "prompt_key" if ours == "input_key" and t.task in ("dpo", "rm") else ours
        if flag is None or flag in t.given and t.flag(flag) != value:
            t.refuse(f'{where} "{name}" has its {column} in the field {value!r}\n  fix: write the records in one of the forms of docs/data.md')
        else:
            t.set(flag, value, where)
    if t.task == "sft" and "input_key" in t.given:
        t.set("multiturn" if chats else "apply_chat_template", "true", where)


LLAMA_FACTORY = Peer("LLaMA-Factory", "0.9.5", ROWS, defaults, task_of, complete, "./saves", (TRAINER,))
