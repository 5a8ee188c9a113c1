"""ms-swift 4.6."""

import math
import re

from .instead import no_task
from .reading import PortError, Setting
from .table import Note, Peer, Refused, Same, Sets, Together
from .templates import THINKING, name_template, set_variables
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .trl import TRL, add_sft, complete_kto, set_rewards

ROWS = [
    # model and data
    Together("dataset", "files and names on the Hugging Face hub: --data; #N is the slice [train[:N]]", "dataset"),
    Together("val_dataset", "as dataset: --eval_data", "val_dataset"),
    Same("eval_fraction", "split_dataset_ratio"),
    Note("as without it", "max_length", "none, null"),
    Same("max_len", "max_length"),
    Same("tokenizer_chat_template", "chat_template"),
    Sets("truncation drop", "truncation_strategy", "delete"),
    Sets("truncation keep", "truncation_strategy", "right"),
    Sets("truncation split", "truncation_strategy", "split"),
    Refused("--truncation drop or keep, which cuts on the right", "truncation_strategy"),
    Together("revision", "the revision, after an @: --model OWNER/NAME@REVISION", "model_revision"),
    Together("interleave_prob", "--dataset_probs, with stopping_strategy", "interleave_prob"),
    Together("stopping_strategy", "with interleave_prob: --stopping_strategy", "stopping_strategy"),
    Together("template", "the tokenizer's own template, or one of --tokenizer_chat_template by its name", "template"),
    Together("use_chat_template", "chats have the template of the tokenizer, and texts of pt none", "use_chat_template", "true, false"),
    Note("data sets are read from the Hugging Face hub", "use_hf"),
    Note("these names are for the data set swift/self-cognition", "model_name, model_author"),
    Note("data/prepare.py tokenises samples once and caches them", "load_from_cache_file, dataset_num_proc, data_seed, lazy_tokenize, streaming, shuffle_buffer_size, "
      "download_mode, packing_num_proc"),
    Note("a record that cannot be read ends the run, and no other is dropped without a count", "strict"),
    Together("shuffles_once", "each epoch has its own random order, unless train_dataloader_shuffle is false", "dataset_shuffle", "true, false"),
    Together("shuffles", "false, with dataset_shuffle false: --shuffle false", "train_dataloader_shuffle", "true, false"),
    Note("evaluation reads all samples", "val_dataset_shuffle"),
    Refused("give --data the records from which the cache was made", "cached_dataset, cached_val_dataset"),
    Refused("give the flags themselves", "load_args, load_data_args"),
    Refused("--max_len N", "max_model_len"),
    Refused("--train_batch_tokens N is the number of tokens of a step", "packing_length"),
    Note("rows are packed by best fit: no document is cut at the end of a row or attends to another one", "packing_strategy"),
    Refused("the tokenizer's template determines the form of tools and calls; leave it out", "agent_template"),
    Refused("the template determines the beginning of an answer: --chat_template_kwargs or --tokenizer_chat_template", "response_prefix"),
    Note("rows have no padding", "padding_side"),
    Note("config.json describes the model", "model_type, ref_model_type, reward_model_type"),
    Note("the task determines the type", "task_type", "causal_lm"),
    Refused("models continue texts, or score them with one number (the task rm); there are no classifiers, embedding models or rerankers", "task_type, problem_type"),
    Note("a reward model gives one number", "num_labels", "1"),
    Refused("a reward model gives one number", "num_labels"),
    Same("router_aux_loss_coef", "router_aux_loss_coef"),
    Same("beta,kl_coef,divergence_beta", "beta"),
    Together("loss_scale", "the default of each task: the assistant's messages, for pairs the answer, in pt all tokens", "loss_scale"),
    Refused("the empty block of thoughts that a template adds is trained unless --chat_template_kwargs is '{\"enable_thinking\": false}'", "disable_ignore_empty_think"),
    Note("it selects an implementation and changes no result", "tuner_backend, experts_impl, is_binary_loss_scale, template_backend, use_logits_to_keep, enable_npu_model_patch"),
    Note("the loss is the mean over the targets of a step", "acc_strategy", "token"),
    Refused("the loss is the mean over the targets of a step; leave it out", "acc_strategy"),
    Refused("sft has only the plain cross-entropy of the targets; leave it out", "enable_dft_loss"),
    Same("early_stopping_patience", "early_stop_interval"),
    Sets("async_steps 1", "async_generate", "true"),
    Together("enable_thinking", THINKING, "enable_thinking", "true, false"),
    Together("preserve_thinking", THINKING, "preserve_thinking", "true, false"),
    Note("the template adds a block of thoughts to answers without one; --chat_template_kwargs '{\"enable_thinking\": false}' excludes it from the targets", "add_non_thinking_prefix", "true"),
    Refused("the template determines the beginning of an answer: --chat_template_kwargs or --tokenizer_chat_template", "add_non_thinking_prefix", "false"),
    Refused("write it into the records: a field system, or a system message", "system"),
    Refused("write the records in one of the forms of docs/data.md", "columns, remove_unused_columns, disable_auto_column_mapping, custom_dataset_info, custom_register_path, "
      "decision_drop_instructions, decision_subsample_options, decision_state_as_text, decision_shuffle_fields"),
    Note("a text model has no such part", "freeze_vit, freeze_aligner", "true"),
    Refused("this program trains only text models", "freeze_llm, max_pixels, norm_bbox, vit_gradient_checkpointing, vit_lr, aligner_lr, mrl_dims"),
    Together("tokens", "--add_tokens", "new_special_tokens"),
    # the method
    Together("rlhf_type", "the task: dpo, rm, grpo, gkd is distill, and for orpo, simpo and kto --loss_type", "rlhf_type"),
    Together("tuner_type", "lora, which is the default there, or full", "tuner_type, train_type, sft_type"),
    Together("lora_r", "with tuner_type lora: --lora_rank", "lora_rank"),
    Together("lora_alpha", "with tuner_type lora: --lora_alpha", "lora_alpha"),
    Together("lora_dropout", "with tuner_type lora: --lora_dropout", "lora_dropout"),
    Together("lora_targets", "with tuner_type lora: --lora_targets", "target_modules"),
    Together("lora_whole", "with tuner_type lora: --lora_modules_to_save", "modules_to_save"),
    Same("adapter", "adapters"),
    Refused("the task merge adds an adapter to the weights of its model: --ref_model DIR, --reward DIR", "ref_adapters, reward_adapters"),
    Sets("load_in 4bit", "quant_bits", "4"),
    Sets("load_in 8bit", "quant_bits", "8"),
    Note("4-bit weights are NF4", "quant_method, bnb_4bit_quant_type", "bnb, nf4"),
    Note("the scales of 4-bit weights are quantised as well", "bnb_4bit_use_double_quant", "true"),
    Refused("4-bit weights always have quantised scales; leave it out", "bnb_4bit_use_double_quant", "false"),
    Note("weights are products' operands in --dtype", "bnb_4bit_compute_dtype", "bfloat16, float32"),
    Note("a byte stores two 4-bit weights", "bnb_4bit_quant_storage"),
    Refused("frozen weights are stored in 4 or 8 bits (--load_in)", "quant_method, quant_bits, bnb_4bit_quant_type, bnb_4bit_compute_dtype, hqq_axis"),
    Note("adapters are stored as floats", "lora_dtype", "float32"),
    Note("adapters have no biases", "lora_bias", "none"),
    Note("adapters are initialised as in PEFT", "init_weights", "true"),
    Note("all layers have adapters, or are trained", "freeze_parameters_ratio", "0, 0.0"),
    Refused("adapters are LoRA or rsLoRA of whole linear layers (docs/lora.md); leave it out", "use_dora, lorap_lr_ratio, target_regex, target_parameters, init_weights, init_strategy, "
      "lora_bias, lora_dtype, use_swift_lora, freeze_parameters, freeze_parameters_regex, trainable_parameters, trainable_parameters_regex, freeze_parameters_ratio, "
      "lora_ga_batch_size, lora_ga_iters, lora_ga_max_length, lora_ga_direction, lora_ga_scale, lora_ga_stable_gamma, fourier_n_frequency, fourier_scaling, boft_block_size, "
      "boft_block_num, boft_n_butterfly_factor, boft_dropout, vera_rank, vera_projection_prng_key, vera_dropout, vera_d_initial, adapter_act, adapter_length, adalora_target_r, "
      "adalora_init_r, adalora_tinit, adalora_tfinal, adalora_deltaT, adalora_beta1, adalora_beta2, adalora_orth_reg_weight, llamapro_num_new_blocks, llamapro_num_groups, "
      "reft_layer_key, reft_layers, reft_rank, reft_intervention_type, reft_args"),
    Note("all layers are trained in every step", "lisa_activated_layers", "0"),
    Refused("--optimizer adamw or muon, over all weights; leave it out", "use_galore, galore_target_modules, galore_rank, galore_update_proj_gap, galore_scale, galore_proj_type, "
      "galore_optim_per_parameter, galore_with_embedding, galore_quantization, galore_proj_quant, galore_proj_bits, galore_proj_group_size, galore_cos_threshold, galore_gamma_proj, "
      "galore_queue_size, lisa_activated_layers, lisa_step_interval"),
    Together("packs", "samples are always packed and never attend to each other; with this flag a step counts rows of max_len tokens: --train_batch_tokens", "packing"),
    Note("samples are always packed into rows of --row_tokens tokens, and never attend to each other", "padding_free"),
    Together("rpo_alpha", "--loss_type sigmoid,sft --loss_weights 1,RPO_ALPHA", "rpo_alpha"),
    Together("cpo_alpha", "with rlhf_type simpo: --loss_type simpo,sft --loss_weights 1,CPO_ALPHA; the default there is 1", "cpo_alpha"),
    *TRL.only("simpo_gamma, label_smoothing, desirable_weight, undesirable_weight, ld_alpha, discopop_tau").rows,
    Same("teacher_model", "teacher_model"),
    Same("teacher_coef", "teacher_kl_coef"),
    Same("on_policy", "lmbda"),
    Note("the loss is the divergence alone", "sft_alpha", "0, 0.0"),
    Refused("--teacher_model MODEL@REVISION", "teacher_model_revision"),
    Refused("the task merge adds an adapter to the weights of its model: --teacher_model DIR", "teacher_adapters"),
    Refused("the teacher is in this process: --teacher_model", "teacher_model_server"),
    Refused("the loss is the divergence from one teacher over the whole vocabulary; leave it out", "gkd_logits_topk, sft_alpha, teacher_tag_key"),
    Refused("--on_policy 0, with --data from generate --model TEACHER --prompts FILE", "seq_kd"),
    Note("config.json describes the model", "teacher_model_type"),
    Note("all memory is planned before the start (--plan)", "offload_teacher_model"),
    Note("every rank has a part of all models, and --ranks or mpirun sets the number of ranks", "teacher_deepspeed"),
    Refused("MODEL@REVISION", "ref_model_revision, reward_model_revision"),
    Same("dtype", "torch_dtype"),
    Same("ring_attn_size", "sequence_parallel_size"),
    Note("this program has its own attention: exact, blocked, on packed rows", "attn_impl"),
    # reinforcement learning
    Refused("--policy_loss_type ppo, gspo or cispo", "loss_type", "real, fipo"),
    *TRL.only("num_generations, max_completion_length, temperature, num_iterations, generation_batch_size, steps_per_generation, epsilon, epsilon_high, delta, "
            "importance_sampling_level, top_entropy_quantile, top_k, top_p, min_p, repetition_penalty, loss_type").rows,
    Together("estimator", "grpo is group_norm, rloo is rloo: --advantage_estimator, with scale_rewards", "advantage_estimator"),
    Together("scale", "none with grpo: --advantage_estimator dr_grpo", "scale_rewards", "group, batch, none, gdpo"),
    Together("kl_in_reward", "false: --kl_use_loss; the default is true with rloo", "kl_in_reward", "true, false"),
    Same("stop", "stop_words"),
    Same("max_new_tokens", "response_length"),
    Note("this program samples answers itself, from the weights in training", "use_vllm, vllm_mode, vllm_gpu_memory_utilization, vllm_max_model_len, "
      "vllm_tensor_parallel_size, vllm_server_host, vllm_server_port, vllm_enable_lora, sleep_level, offload_optimizer, offload_model, move_model_batches, "
      "log_completions, vllm_pipeline_parallel_size, vllm_enable_expert_parallel, vllm_max_num_seqs, vllm_disable_custom_all_reduce, vllm_enforce_eager, vllm_limit_mm_per_prompt, "
      "vllm_max_lora_rank, vllm_enable_prefix_caching, vllm_use_async_engine, vllm_quantization, vllm_reasoning_parser, vllm_disable_cascade_attn, vllm_mm_processor_cache_gb, "
      "vllm_speculative_config, vllm_engine_kwargs, vllm_data_parallel_size, vllm_server_base_url, vllm_server_timeout, vllm_server_group_port, enable_flattened_weight_sync, "
      "ds3_gather_for_generation, num_generations_eval, num_beams, stream, logprobs, top_logprobs"),
    Note("sampling and training compute the same probabilities; for stale answers use --is_correction: token_truncate is tis, token_mask is icepop",
      "rollout_importance_sampling_mode, rollout_importance_sampling_threshold"),
    Refused("--dynamic_filtering LOW,HIGH draws other prompts in place of those with a mean reward outside this range", "dynamic_sample, max_resample_times"),
    Refused("--overlong_buffer N, a number of tokens before --max_new_tokens", "soft_max_length, soft_cache_length"),
    Refused("grpo has no such variant (docs/rl.md); leave it out", "structured_outputs_regex, sync_ref_model, ref_model_sync_steps, ref_model_mixup_alpha, chord_sft_dataset, "
      "chord_sft_per_device_train_batch_size, chord_enable_phi_function, chord_mu_warmup_steps, chord_mu_decay_steps, chord_mu_peak, chord_mu_valley, tau_pos, tau_neg, "
      "advantage_reweight, rlsd_lambda, rlsd_reweight_clip_range, rlsd_lambda_warmup_steps, rlsd_lambda_decay_steps, rlsd_negative_only, sdar_loss_coef, sdar_gate_beta, real_tau, "
      "fipo_decay_rate, fipo_clip_range, fipo_clip_high_only, fipo_safety_threshold, off_policy_sequence_mask_delta"),
    Refused("the task ppo has other flags (docs/rl.md)", "num_ppo_epochs, whiten_rewards, cliprange, vf_coef, cliprange_value, lam, num_mini_batches, "
      "local_rollout_forward_batch_size, num_sample_generations, missing_eos_penalty"),
    Same("mask_truncated", "overlong_filter"),
    Together("reward_funcs", "--reward, a directory or FILE.py; ms-swift's functions are refused", "reward_funcs"),
    Refused("--reward FILE.py, with reward(prompts, answers, labels)", "external_plugins, reward_model_plugin, reward_template, "
      "completion_length_limit_scope, vllm_server_pass_dataset, use_gym_env, gym_env, cosine_min_len_value_wrong, cosine_max_len_value_wrong, cosine_min_len_value_correct, "
      "cosine_max_len_value_correct, cosine_max_len, repetition_n_grams, repetition_max_penalty"),
    Refused("--environment FILE.py with a class Environment or TRL's tools, and --max_turns (docs/rl.md#episodes)", "multi_turn_scheduler, max_turns"),
    Same("reward", "reward_model"),
    # the run
    Note("every checkpoint contains the model as a Hugging Face directory", "save_safetensors, safe_serialization, max_shard_size, create_checkpoint_symlink, add_version, use_flash_ckpt"),
    Refused("--model DIR continues with new optimizer state, --resume with the state of the run", "resume_only_model"),
    Note("all memory is planned before the start (--plan)", "device_map, max_memory"),
    Note("it concerns memory and speed, and changes no result", "zero_hpz_partition_size"),
    Same("tensor_parallel", "deepspeed_autotp_size"),
    Note("code in a model's directory is never run", "local_repo_path"),
    Note("this program checks models itself", "check_model"),
    Refused("every name is checked; leave it out", "ignore_args_error"),
    Refused("leave it out: it sets environment variables of ms-swift's models", "model_kwargs"),
    Refused("--eval_data reports loss, perplexity and accuracy; --sample_every prints samples of the model", "eval_metric, eval_use_evalscope, eval_dataset, eval_dataset_args, eval_limit, "
      "eval_generation_config, extra_eval_args"),
    Refused("code of ms-swift is not run; leave it out", "callbacks"),
    Refused("scripts/launch.sh starts ranks with mpirun", "use_ray, ray_exp_name, device_groups"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training", "enable_channel_loss, log_entropy, "
      "log_rollout_offpolicy_metrics, wandb_log_unique_prompts, swanlab_token, swanlab_project, swanlab_workspace, swanlab_exp_name, swanlab_notification_method, swanlab_webhook_url, "
      "swanlab_secret, swanlab_sender_email, swanlab_receiver_email, swanlab_smtp_server, swanlab_smtp_port, swanlab_email_language, swanlab_mode"),
]

ANSWERS = {"num_generations": "8", "max_completion_length": "512", "temperature": "0.9", "beta": "0.04", "loss_type": "grpo"}  # grpo's defaults
GKD = {"max_completion_length": "512", "temperature": "0.9", "beta": "0.5", "lmbda": "0.5"}
TASKS = {"dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "kto": "dpo", "rm": "rm", "gkd": "distill", "grpo": "grpo"}


def task_of(given, task):
    kind = given.get("rlhf_type")
    if kind and kind.value == "ppo":
        raise PortError(f'{kind.where} "ppo" is not supported\n  fix: the task ppo with flags of this program (docs/rl.md)')
    if kind and kind.value not in TASKS:
        raise PortError(f"{kind.where}: {no_task(kind.value)}")
    return kind and (TASKS[kind.value], f'{kind.where} "{kind.value}"')


def defaults(task):
    out = {"num_train_epochs": "3", "per_device_train_batch_size": "1", "lr_scheduler_type": "cosine", "warmup_ratio": "0", "weight_decay": "0.1"}
    return out | (ANSWERS if task == "grpo" else {}) | (GKD if task == "distill" else {}) | ({"truncation_strategy": "delete"} if task == "pretrain" else {})


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
        if rlhf == "orpo" or rlhf == "kto" and "loss_type" not in t.given:
            t.set("loss_type", rlhf, where)
        elif rlhf == "simpo":
            t.set("loss_type", rlhf, where)
            t.set("beta", "2.0", "beta (ms-swift's default)", by_default=True)
            t.set("simpo_gamma", "1", "simpo_gamma (ms-swift's default)", by_default=True)
            add_sft(t, t.together.get("cpo_alpha", Setting("cpo_alpha", ["1"], "cpo_alpha (ms-swift's default)")))
    if t.has("rpo_alpha"):
        add_sft(t, t.together["rpo_alpha"])
    complete_kto(t)
    if t.task == "grpo":
        complete_advantages(t)
    set_variables(t, "enable_thinking", "preserve_thinking")
    complete_data(t)
    if t.has("reward_funcs"):
        set_rewards(t)
    elif t.task == "grpo" and "teacher_model" in t.flags and "reward" not in t.flags:
        t.refuse(f"{t.flags['teacher_model'].where} without reward_funcs is the whole objective of grpo\n  fix: --rlhf_type gkd --lmbda 1 --beta 1, which compares whole distributions, or --reward_funcs")


def complete_advantages(t):
    """The estimator, its scale and the place of the KL divergence depend on each other."""
    estimator, where = t.get("estimator", "grpo"), next((t.together[key].where for key in ("estimator", "scale", "kl_in_reward") if t.has(key)), "")
    scale = t.get("scale", "none" if estimator == "rloo" else "group")
    ours = {("grpo", "group"): "group_norm", ("grpo", "none"): "dr_grpo", ("rloo", "none"): "rloo"}.get((estimator, scale))
    if ours is None:
        t.refuse(f"{where}: advantage_estimator {estimator} with scale_rewards {scale} is not supported\n  fix: grpo with group or none, or rloo with none; "
                 "--advantage_estimator reinforce_baseline divides by the standard deviation over all tokens of the batch")
    elif ours != "group_norm":
        t.set("advantage_estimator", ours, where)
    if "kl_use_loss" in t.flags and t.get("kl_in_reward", str(estimator == "rloo")).lower() == "true":
        t.flags.pop("kl_use_loss")
        t.set("kl_estimator", "k1", where)


def complete_data(t):
    for key, flag in (("dataset", "data"), ("val_dataset", "eval_data")):
        if t.has(key):
            names = [re.sub(r"#(\d+)$", r"[train[:\1]]", name) for name in t.together[key].values]
            t.set(flag, ",".join(names), t.together[key].where)
            if any("self-cognition" in name for name in names):
                t.refuse(f"{t.together[key].where} has records with {{{{NAME}}}} and {{{{AUTHOR}}}} in place of names\n  fix: write the names into a copy of the data set, and give that")
            if any("/" in name for name in names):
                t.note(t.together[key].where, "names are read from the Hugging Face hub; without use_hf ms-swift reads them from ModelScope")
            if names != t.together[key].values and t.get("shuffles_once") != "false":
                t.note(t.together[key].where, "#N takes the first N records; ms-swift draws N records at random, and repeats records of a smaller set")
    if t.has("interleave_prob"):
        t.set("dataset_probs", t.together["interleave_prob"].values, t.together["interleave_prob"].where)
        t.set("stopping_strategy", t.get("stopping_strategy", "first_exhausted"), t.together["interleave_prob"].where)
    if t.get("shuffles") == "false":
        if t.get("shuffles_once") == "false":
            t.set("shuffle", "false", t.together["shuffles"].where)
        else:
            t.refuse(f"{t.together['shuffles'].where} repeats one random order in every epoch\n  fix: with dataset_shuffle false for the order of the data, or leave it out")
    if t.has("template") and t.task != "pretrain":
        name_template(t, t.get("template"), t.together["template"].where)
    usual = {"sft": ("default",), "pretrain": ("all",), "dpo": ("last_round", "default") if t.flag("loss_type") == "orpo" else ("last_round",)}.get(t.task, ("last_round",))
    scales = t.get("loss_scale", usual[0]).split("+")
    if "ignore_empty_think" in scales and t.get("enable_thinking") != "false":
        t.refuse(f'{t.together["loss_scale"].where} "{t.get("loss_scale")}" excludes empty thoughts from the targets\n  fix: --enable_thinking false, which makes them a part of the prompt')
    elif t.task == "sft" and scales == ["all"]:
        t.set("train_on_prompt", "true", t.together["loss_scale"].where)
    elif "+".join(scale for scale in scales if scale != "ignore_empty_think") not in ("", *usual):
        t.refuse(f'{t.together["loss_scale"].where} "{t.get("loss_scale")}" is not supported\n  fix: {usual[0]}; the fields of a record determine its targets (docs/data.md)')
    if "qwen3" in t.flag("model", "").lower() and t.task != "pretrain" and not t.has("enable_thinking"):
        t.note("", "ms-swift excludes the empty thoughts of answers from the targets, where the template adds them: --enable_thinking false makes them a part of the prompt")
    if t.get("use_chat_template", str(t.task != "pretrain").lower()) == str(t.task == "pretrain").lower():
        t.refuse(f"{t.together['use_chat_template'].where} is not supported in {t.task}\n  fix: the tasks sft and dpo for chats, pretrain for texts")


SWIFT = Peer("ms-swift", "4.6", ROWS, defaults, task_of, complete, "output", (TRAINER,))
