"""Axolotl 0.21."""

import json
import re

from .instead import no_task
from .reading import Setting
from .table import Note, Peer, Refused, Same, Sets, Together
from .templates import name_template
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .trl import TRL, add_sft, complete_kto, note_orpo, set_rewards

ROWS = [
    # model and data
    Same("model", "base_model"),
    Note("the main revision is read", "revision_of_model", "main"),
    Together("revision", "the revision, after an @: --model OWNER/NAME@REVISION", "revision_of_model"),
    Same("data", "datasets, pretraining_dataset"),
    Same("tokenizer_chat_template", "chat_template_jinja, datasets.chat_template_jinja"),
    Note("the main revision is read", "datasets.revision", "main"),
    Refused("hf download --repo-type dataset OWNER/NAME --revision REVISION --local-dir DIR, and --data DIR", "datasets.revision"),
    Note("a file's name determines its format", "datasets.ds_type, datasets.trust_remote_code"),
    Note("both names are read", "datasets.field_messages", "messages, conversations"),
    Same("chosen_key", "datasets.field_chosen"),
    Same("rejected_key", "datasets.field_rejected"),
    Note("both names are read", "datasets.message_field_role, datasets.message_property_mappings.role", "role, from"),
    Note("both names are read", "datasets.message_field_content, datasets.message_property_mappings.content", "content, value"),
    Note("these names are read", "datasets.message_field_training", "train, training, weight"),
    Note("the end of each trained turn is also a target", "train_on_eos, train_on_eot", "turn"),
    Refused("the end of each trained turn is a target, and no other; leave it out", "train_on_eos, train_on_eot", "all, last, none"),
    Same("max_len", "sequence_len, max_packed_sequence_len"),
    Refused("--max_len bounds all samples; leave it out", "eval_sequence_len, min_sample_len, max_prompt_len"),
    Same("truncation", "excess_length_strategy"),
    Note("each epoch has its own random order", "shuffle_merged_datasets", "true, false"),
    Together("curriculum", "with one data set, or shuffle_merged_datasets false: --shuffle false", "curriculum_sampling"),
    Note("the whole data set is read", "datasets.weight", "1, 1.0"),
    Refused("a slice takes the first part: --data 'NAME[train[:50%]]'", "datasets.weight"),
    Refused("data sets of random tokens are not supported: write the records", "datasets.length, datasets.sequence_length, datasets.min_input_id, datasets.max_input_id, "
      "datasets.min_turns, datasets.max_turns, datasets.min_turn_length, datasets.input_fraction, datasets.max_completion_length"),
    Refused("samples are shuffled over all data (--shuffle); leave it out", "sample_packing_sequentially, shuffle_before_merging_datasets"),
    Note("data/prepare.py tokenises samples once and caches them",
      "dataset_num_proc, dataset_processes, dataset_prepared_path, dataset_keep_in_memory, skip_prepare_dataset, streaming, "
      "streaming_multipack_buffer_size, num_dataset_shards_to_save, preprocess_iterable, is_preprocess, push_dataset_to_hub, "
      "tokenizer_use_fast, tokenizer_type, tokenizer_save_jinja_files"),
    Refused("each epoch uses all records once; leave it out", "dataset_shard_num, dataset_shard_idx, dataset_exact_deduplication"),
    Note("rows have no padding", "pad_token"),
    Together("bos_token", "it must equal the token of the tokenizer in --model", "bos_token"),
    Together("eos_token", "see bos_token", "eos_token"),
    Together("unk_token", "see bos_token", "unk_token"),
    Note("code in a model's directory is never run", "trust_remote_code"),
    Refused("--rope_scaling '{\"rope_type\": \"yarn\", \"factor\": 4}' takes it as JSON", "rope_scaling"),
    Refused("change config.json in the directory of --model",
      "overrides_of_model_config, model_config, overrides_of_model_kwargs, base_model_config, cls_model_config, type_of_model, "
      "reinit_weights"),
    Note("config.json describes the model", "is_llama_derived_model, is_mistral_derived_model, is_qwen_derived_model, is_falcon_derived_model"),
    Note("config.json describes the model", "model_type"),
    Note("all memory is planned before the start (--plan)",
      "low_cpu_mem_usage, device_map, max_memory, gpu_memory_limit, experimental_skip_move_to_device, cpu_ram_efficient_loading, "
      "sync_module_states"),
    # training steps
    Together("device_batch", "multiplied by gradient_accumulation_steps and the number of data-parallel ranks: --train_batch_size, or with sample_packing --train_batch_tokens",
      "micro_batch_size"),
    Together("packs", "samples are always packed and never attend to each other; with this flag a step counts rows of max_len tokens: --train_batch_tokens",
      "sample_packing"),
    Together("concatenates", "as sample_packing, with pretraining_dataset", "pretraining_sample_concatenation"),
    Refused("rows are packed by their lengths alone; leave it out", "balance_labels, label_balance_window_optim_steps"),
    Note("samples never attend to each other", "pretrain_multipack_attn", "true"),
    Refused("samples never attend to each other; leave it out", "pretrain_multipack_attn", "false"),
    Note("samples are always packed into rows of --row_tokens tokens, and never attend to each other",
      "dpo_padding_free, eval_sample_packing, batch_flattening, sample_packing_group_size, sample_packing_bin_size, sample_packing_eff_est, "
      "sample_packing_mp_start_method, multipack_real_batches, pretrain_multipack_buffer_size, "
      "fa_varlen_kwargs_in_collator, pad_to_multiple_of, pad_to_sequence_len, total_num_tokens, total_supervised_tokens"),
    Note("rows are filled up to --row_tokens tokens, and the loss is the mean over all targets of a step", "eval_batch_size, include_tkps"),
    Same("num_episodes,max_epochs", "num_epochs"),
    # optimizer
    Note("the cosine has no constant phase at its end", "cosine_constant_lr_ratio", "0, 0.0"),
    Refused("all weights share one --learning_rate and one --lr_scheduler; leave it out",
      "cosine_constant_lr_ratio, lr_quadratic_warmup, lr_div_factor, lr_groups, loraplus_lr_ratio, loraplus_lr_embedding, embedding_lr, "
      "embedding_lr_scale, jagged_restart_steps, jagged_restart_warmup_steps, jagged_restart_anneal_steps, relora, relora_prune_ratio, "
      "relora_prune_method, relora_cpu_offload"),
    Sets("optimizer adamw", "optimizer", "adamw_torch, adamw_torch_fused, adamw_hf, adamw_apex_fused, paged_adamw_32bit"),
    Sets("moments 8bit", "optimizer", "adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit, adamw_torch_8bit"),
    Same("optimizer", "optimizer"),
    Refused("--optimizer adamw or muon, over all weights; leave it out",
      "adam_beta3, adam_epsilon2, dion_lr, dion_momentum, dion_rank_fraction, dion_rank_multiple_of, qgalore_rank, qgalore_update_proj_gap, "
      "qgalore_scale, qgalore_proj_type, qgalore_proj_quant, qgalore_proj_bits, qgalore_proj_group_size, qgalore_cos_threshold, "
      "qgalore_gamma_proj, qgalore_queue_size, flash_optimum, lisa_n_layers, lisa_step_interval, lisa_layers_attribute, "
      "unfrozen_parameters, trainer_cls, grokfast_alpha, grokfast_lamb, spectrum_top_fraction, spectrum_model_name, dense_mixer"),
    Same("neftune_noise_alpha", "noisy_embedding_alpha"),
    Note("the loss has no such term", "use_eaft, eaft_alpha, eaft_k, scaling_softmax, scaling_softmax_factor, scaling_softmax_bias", "0, 0.0"),
    Refused("sft has only the plain cross-entropy of the targets; leave it out",
      "use_eaft, eaft_alpha, eaft_k, scaling_softmax, scaling_softmax_factor, scaling_softmax_bias, use_dft, liger_use_token_scaling"),
    Refused("the task distill, with --teacher_model DIR", "kd_trainer, kd_ce_alpha, kd_alpha, kd_temperature, kd_beta, kd_normalize_topk, "
      "kd_online_server_base_url, kd_online_topk, kd_online_server, kd_online_timeout, kd_temperature_min, datasets.temperature"),
    Note("experts have one implementation, and --load_in quantises them with the other matrices", "experts_implementation, llama4_linearized_experts, quantize_moe_experts"),
    # preferences and reward models
    Same("beta", "rl_beta, dpo_beta, orpo_alpha"),
    Sets("loss_type ipo_mean", "dpo_loss_type", "ipo"),
    Same("loss_type", "dpo_loss_type"),
    Same("desirable_weight", "kto_desirable_weight"),
    Same("undesirable_weight", "kto_undesirable_weight"),
    Same("loss_weights", "dpo_loss_weights"),
    Same("label_smoothing", "dpo_label_smoothing"),
    Same("simpo_gamma", "simpo_gamma"),
    Refused("--loss_type sigmoid,sft --loss_weights 1,ALPHA", "rpo_alpha, dpo_norm_loss"),
    Together("cpo_alpha", "with rl: simpo --loss_type simpo,sft --loss_weights 1,CPO_ALPHA; the default there is 1", "cpo_alpha"),
    Sets("ref_mode precompute", "precompute_ref_log_probs", "true"),
    Note("the reference is computed once, before training, on packed rows", "dpo_use_logits_to_keep, dpo_use_liger_kernel, dpo_generate_during_eval"),
    Refused("there is no such variant of DPO here; leave it out",
      "sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps, dpo_use_weighting, dpo_ld_alpha"),
    Note("a reward model gives one number", "num_labels", "1"),
    # reinforcement learning
    Same("n", "num_generations"),
    Same("max_new_tokens", "max_completion_length"),
    Same("temperature", "temperature"),
    Same("max_epochs", "num_iterations"),
    Together("generation_batch_size", "divided by num_generations: --rollout_batch_size, which counts prompts", "generation_batch_size"),
    Same("eps_clip", "epsilon"),
    Together("epsilon_high", "with epsilon: --eps_clip EPSILON,EPSILON_HIGH", "epsilon_high"),
    Note("the default is one ratio for each token", "importance_sampling_level", "token"),
    Sets("policy_loss_type gspo", "importance_sampling_level", "sequence"),
    Sets("advantage_estimator group_norm", "scale_rewards", "group, true"),
    Sets("advantage_estimator dr_grpo", "scale_rewards", "none, false"),
    Refused("--advantage_estimator reinforce_baseline divides by the standard deviation over all tokens of the batch", "scale_rewards", "batch"),
    Same("mask_truncated", "mask_truncated_completions"),
    Note("answers are sampled from all tokens", "top_k", "0, -1"),
    Note("answers are sampled from all tokens", "min_p", "0, 0.0"),
    Note("answers are sampled from all tokens", "top_p", "1, 1.0"),
    Note("there is no repetition penalty", "repetition_penalty", "1, 1.0"),
    Refused("answers are sampled from the trained distribution, all tokens at --temperature; this flag is for generate and --sample_every",
      "top_k, top_p, min_p, repetition_penalty"),
    Note("this program samples answers itself, from the weights in training",
      "use_vllm, vllm_mode, vllm_enable_sleep_mode, vllm_server_host, vllm_server_port, vllm_server_timeout, "
      "vllm_lora_sync, vllm, num_completions_to_print, log_completions, reward_num_workers"),
    Note("sampling and training compute the same probabilities; for stale answers use --is_correction: token_truncate is tis, token_mask is icepop",
      "vllm_importance_sampling_correction, vllm_importance_sampling_mode, vllm_importance_sampling_cap"),
    Refused("grpo has no such variant (docs/rl.md); leave it out",
      "generation_kwargs, vllm_guided_decoding_regex, multi_objective_aggregation, off_policy_mask_threshold, use_bias_correction_kl, "
      "rollout_func, use_data_producer, streaming_partial_batch, streaming_min_groups, replay_buffer_size, replay_recompute_logps, "
      "reroll_start_fraction, reroll_max_groups, skip_zero_advantage_batches, ebft"),
    Sets("async_steps 1", "async_prefetch", "true"),
    Note("with --async_steps 1 the program samples one batch of answers while it trains on another", "prefetch_depth, vllm_sync_interval", "1"),
    Refused("with --async_steps 1 the program samples one batch of answers, with weights one step old, while it trains on another", "prefetch_depth, vllm_sync_interval"),
    # LoRA and quantisation
    Same("use_rslora", "peft_use_rslora"),
    Together("lora_whole", "with adapter: --lora_modules_to_save; score, the head of a reward model, is always trained", "lora_modules_to_save"),
    Note("adapters have one implementation, and are stored as floats",
      "lora_mlp_kernel, lora_qkv_kernel, lora_o_kernel, lora_embedding_kernel, lora_on_cpu, lora_fan_in_fan_out, peft_autocast_adapter_dtype, "
      "peft_ensure_weight_tying"),
    Note("adapters are initialised as in PEFT", "peft_init_lora_weights", "true"),
    Refused("adapters are LoRA or rsLoRA of whole linear layers (docs/lora.md); leave it out",
      "lora_target_parameters, lora_rank_pattern, lora_alpha_pattern, peft, peft_use_dora, "
      "mixlora_num_experts, mixlora_top_k, mixlora_router_aux_loss_coef, mixlora_router_init_range, mixlora_jitter_noise, mixlora_expert_lora_r, mixlora_expert_lora_alpha, "
      "mixlora_expert_lora_dropout, mora, use_mora, mora_type, "
      "peft_layer_replication, peft_layers_to_transform, peft_layers_pattern, peft_init_lora_weights, peft_trainable_token_indices, "
      "loftq_bits, loftq_config, qlora_sharded_model_loading, merge_lora, merge_method"),
    Sets("load_in 4bit", "load_in_4bit"),
    Sets("load_in 8bit", "load_in_8bit"),
    Refused("weights are stored in f32 or bf16 (--dtype), and frozen weights also in 4 or 8 bits (--load_in); leave it out",
      "bnb_config_kwargs, gptq, qat, quantization, model_quantization_config, model_quantization_config_kwargs, use_onebitllms"),
    Note("ranks exchange arrays in --dtype", "fp8_enable_fsdp_float8_all_gather"),
    Note("each operand of a product is scaled by its largest magnitude, as in torchao", "fp8_config.recipe", "tensorwise"),
    Refused("--fp8 scales each operand by its largest magnitude, as torchao's tensorwise does", "fp8_config.recipe"),
    Note("4-bit weights are NF4, with quantised scales", "nf4_backend"),
    Note("gradients of parameters are stored in float, or with --grad_dtype bf16 in bf16", "lora_fp32_gradients"),
    # how it is computed
    Note("--recompute selects the recomputed activations", "selective_checkpointing"),
    Sets("dtype bf16", "bfloat16", "true, full"),
    Sets("dtype auto", "bfloat16", "auto"),
    Sets("dtype f32", "float32", "true"),
    Refused("--dtype bf16 or f32: there is no fp16", "float16"),
    Note("sums, norms and losses are in float, weights in --dtype", "fp32_norms, fp32_norm_classes"),
    Note("this program has its own attention: exact, blocked, on packed rows",
      "attn_implementation, flash_attention, sdp_attention, xformers_attention, flex_attention, flex_attn_compile_kwargs, sage_attention, "
      "eager_attention, flash_attn_cross_entropy, flash_attn_fuse_mlp, flash_attn_rms_norm, flash_attn_d512, sdpa_varlen, "
      "fused_attn_kernel, gemma4_hybrid_attn_impl, large_head_attention"),
    Refused("attention is exact; leave it out", "s2_attention"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits",
      "activation_offloading, layer_offloading, offload_params, cpu_offload_pin_memory"),
    Same("device", "device"),
    Refused("--profile measures the time of each op", "profiler_steps, profiler_steps_start, sync_profiler_steps, sync_profiler_start_step"),
    Refused("this program trains only text models", "freeze_mm_modules, processor_type, processor_kwargs"),
    Refused("this program trains only text models", "image_size, image_resize_algorithm, role_boundaries"),
    # ranks
    Sets("zero_stage 2", "reshard_after_forward", "false, SHARD_GRAD_OP"),
    Sets("zero_stage 3", "reshard_after_forward"),
    Note("a setting of FSDP; --zero_stage selects the sharded arrays",
      "fsdp_version, auto_wrap_policy, state_dict_type, fsdp_final_state_dict_type, final_state_dict_type, transformer_layer_cls_to_wrap, "
      "use_orig_params, min_num_params, mixed_precision_policy"),
    Same("expert_parallel", "expert_parallel_size"),
    Same("ring_attn_size", "context_parallel_size, sequence_parallel_degree, context_parallel.size"),
    Sets("sp_mode ulysses", "context_parallel.backend", "ulysses"),
    Sets("sp_mode ring", "context_parallel.backend", "ring"),
    Note("it selects an implementation and changes no result", "context_parallel.backend", "auto"),
    Note("it selects an implementation and changes no result", "context_parallel.rotate_method, context_parallel.load_balance, context_parallel.ring_impl, context_parallel.shard_in_collator"),
    Refused("--sp_mode ring, gather or ulysses; the program chooses the layout of each row", "context_parallel.backend, context_parallel.ulysses_size, context_parallel.ring_size"),
    Same("ring_attn_head_stride", "heads_k_stride"),
    Sets("sp_mode gather", "ring_attn_func", "varlen_llama3"),
    Sets("sp_mode ring", "ring_attn_func", "batch_ring, batch_zigzag, batch_stripe"),
    Refused("--sp_mode ring, gather or ulysses; the program chooses the layout of each row", "ring_attn_func"),
    Note("ranks that do not share a sequence (--ring_attn_size) divide the rows of a step; --zero_group N limits the sharding of --zero_stage to N ranks (default: all)",
      "dp_shard_size, dp_replicate_size"),
    Same("tensor_parallel", "tensor_parallel_size"),
    Refused("scripts/launch.sh starts ranks with mpirun", "use_ray, ray_run_name, ray_num_workers, resources_per_worker"),
    # checkpoints, evaluation, log
    Sets("resume auto", "auto_resume_from_checkpoints", "true"),
    Note("--sample_every prints samples of the model", "eval_table_size, eval_max_new_tokens"),
    Refused("--eval_data reports loss, perplexity and accuracy; --sample_every prints samples of the model",
      "do_causal_lm_eval, eval_causal_lm_metrics, do_bench_eval, bench_dataset, bench_split, generate_samples, num_generation_samples, "
      "generation_max_new_tokens, generation_temperature, generation_top_p, generation_top_k, generation_prompt_ratio, generation_do_sample, lm_eval_tasks, lm_eval_batch_size, "
      "lm_eval_post_train, lm_eval_model"),
    Same("run_name", "wandb_name"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
      "use_tensorboard, use_wandb, wandb_project, wandb_run_id, wandb_mode, wandb_entity, wandb_watch, wandb_log_model, use_mlflow, "
      "mlflow_tracking_uri, mlflow_experiment_name, mlflow_run_name, hf_mlflow_log_artifacts, use_comet, comet_api_key, comet_workspace, "
      "comet_project_name, comet_experiment_key, comet_mode, comet_online, comet_experiment_config, use_otel_metrics, otel_metrics_host, "
      "otel_metrics_port, use_trackio, trackio_project_name, trackio_run_name"),
    Note("hf auth login logs in to the hub, and hf upload OWNER/NAME OUTPUT_DIR uploads a model", "hf_use_auth_token"),
    Note("a setting of Axolotl's own programs",
      "world_size, axolotl_config_path, strict, capabilities, env_capabilities, gradio_title, gradio_share, gradio_server_name, gradio_server_port, "
      "gradio_max_new_tokens, gradio_temperature"),
    Together("chat_template", "the tokenizer's own template, or one of --tokenizer_chat_template by its name", "chat_template, datasets.chat_template"),
    Together("types", "the format of the records: --input_template, --prompt_key or the task", "datasets.type"),
    Together("messages", "--input_key with --multiturn, or for pairs --prompt_key; the names messages and conversations need no flag",
      "datasets.field_messages"),
    Together("text", "--input_key, with the task pretrain", "datasets.field, datasets.text_column, text_column"),
    Same("input_key,prompt_key", "datasets.field_instruction, datasets.type.field_instruction"),
    Same("output_key", "datasets.field_output, datasets.type.field_output, datasets.field_completion, datasets.type.field_completion"),
    Same("prompt_key", "datasets.field_prompt, datasets.type.field_prompt"),
    Same("chosen_key", "datasets.type.field_chosen"),
    Same("rejected_key", "datasets.type.field_rejected"),
    Together("format", "--input_template, if {instruction} (for pairs {prompt}) is the only field",
      "datasets.type.format, datasets.type.no_input_format, datasets.format, datasets.type.prompt_format"),
    Note("answers are trained without changes", "datasets.type.chosen_format, datasets.type.rejected_format", "{chosen}, {rejected}"),
    Note("records may have these two fields", "datasets.type.field_system, datasets.type.field_input", "system, input"),
    Note("these roles are read", "datasets.roles.user", "user, human, user,human, human,user"),
    Note("these roles are read", "datasets.roles.assistant", "assistant, gpt, model, assistant,gpt, gpt,assistant, assistant,gpt,model, gpt,model,assistant"),
    Note("these roles are read", "datasets.roles.system", "system"),
    Note("these roles are read", "datasets.roles.tool", "tool"),
    Note("the assistant's reasoning is read from these fields", "datasets.field_thinking, datasets.template_thinking_key, field_thinking, "
      "template_thinking_key", "thinking, reasoning, reasoning_content"),
    Note("tools are read from the field tools", "datasets.field_tools", "tools"),
    Note("the field system is read", "datasets.field_system", "system"),
    Note("the field margin is read", "datasets.field_label", "label"),
    Refused("hf download --repo-type dataset OWNER/NAME FILE --local-dir DIR, and --data DIR/FILE", "datasets.data_files"),
    Refused("write the records in one of the forms of docs/data.md",
      "datasets.message_property_mappings, message_property_mappings, message_field_role, message_field_content, "
      "message_field_training, message_field_training_detail, datasets.roles, "
      "roles, field_messages, field_human, field_model, field_tools, field_thinking, template_thinking_key, split_thinking, field_system, field_input, "
      "field_label, input_format, format, no_input_format, prompt_format, chosen_format, rejected_format, completion_format, system_prompt, system_format, "
      "input_transform, conversation, drop_system_message, logprobs_field, skip, shards, shards_idx, preprocess_shards, step_separator, "
      "max_completion_length_of_step, train_on_last_step_only, default_system_message"),
    Note("the assistant's messages are trained", "roles_to_train", "assistant, gpt"),
    Note("the end-of-turn token that the template adds to a trained turn is also a target", "eot_tokens"),
    Refused("the fields of a record determine the targets (docs/data.md); leave it out", "train_on_inputs, roles_to_train"),
    Together("held_out", "a share: --eval_fraction", "val_set_size"),
    Same("eval_data", "test_datasets"),
    Same("lr_scheduler", "lr_scheduler"),
    Together("min_lr_ratio", "with cosine: --lr_scheduler cosine_with_min_lr --min_lr_ratio", "cosine_min_lr_ratio"),
    Together("batch_size", "--train_batch_size", "batch_size"),
    Together("rl", "the task, and for ipo, orpo, simpo and kto --loss_type", "rl"),
    Together("reward_model", "the task rm", "reward_model"),
    Refused("rm trains one reward for each answer; leave it out", "process_reward_model, num_labels"),
    Together("reward_funcs", "--reward, a directory or FILE.py; functions of a module are refused", "reward_funcs"),
    Together("adapter", "lora or qlora: --lora_rank, from lora_r", "adapter"),
    Together("lora_r", "with adapter: --lora_rank", "lora_r"),
    Together("lora_alpha", "with adapter: --lora_alpha", "lora_alpha"),
    Together("lora_dropout", "with adapter: --lora_dropout", "lora_dropout"),
    Together("lora_targets", "with adapter: --lora_targets", "lora_target_modules"),
    Together("all_linear", "with adapter: --lora_targets all-linear", "lora_target_linear"),
    Together("lora_model_dir", "with adapter: --adapter", "lora_model_dir"),
    Together("evals", "a share of the steps: --eval_steps", "evals_per_epoch"),
    Together("saves", "a share of the steps: --save_steps", "saves_per_epoch"),
    Note("the model is saved at the end, and an interrupted run writes a checkpoint", "save_first_step, dynamic_checkpoint"),
    Together("plugins", "plugins for faster kernels and logs are not needed here", "plugins"),
    Note("a setting of PyTorch without a counterpart here",
      "deepcompile, torch_compile_options, use_liger_loss, chunked_cross_entropy, chunked_cross_entropy_num_chunks, tiled_mlp, tiled_mlp_num_shards, "
      "tiled_mlp_use_original_mlp, use_kernels, gc_steps, gc_collect_steps, ddp, liger_rope, liger_rms_norm, liger_rms_norm_gated, liger_glu_activation, "
      "liger_layer_norm, liger_fused_linear_cross_entropy, liger_swiglu, liger_cross_entropy, liger_kernel_impl, cut_cross_entropy, cut_cross_entropy_accum_c_fp32, "
      "cut_cross_entropy_c_grad_chunk_size, flash_attn_fuse_qkv, torch_compile_regional"),
    Note("a high loss does not end a run", "loss_watchdog_threshold, loss_watchdog_patience"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
      "use_swanlab, swanlab_project, swanlab_experiment_name, swanlab_description, swanlab_mode, swanlab_workspace, swanlab_log_completions, "
      "swanlab_completion_log_interval, swanlab_completion_max_buffer, swanlab_log_model, swanlab_api_key, swanlab_web_host, swanlab_api_host, "
      "swanlab_lark_webhook_url, swanlab_lark_secret, swanlab_private_deploy"),
    Note("it only changes Axolotl's own output", "debug"),
    Note("the best evaluation is kept in output_dir/best", "save_strategy", "best, epoch"),
    Together("tokens", "--add_tokens", "tokens, additional_special_tokens"),
    Note("new rows start as the mean of the others, and each token has one row", "resize_token_embeddings_to_32x, mean_resizing_embeddings, "
      "embeddings_skip_upcast"),
    Refused("the tokenizer is read from --model: change its files",
      "added_tokens_overrides, tokenizer_legacy, shrink_embeddings, fix_untrained_tokens, tokenizer_config"),
    Refused("a model with tokenizer.json: tekken.json of mistral-common is not supported", "tokenizer_use_mistral_common"),
    Refused("config.json contains the RoPE scaling; leave it out", "use_pose, pose_split_on_token_ids, pose_max_context_len, pose_num_chunks"),
    Refused("experts have one implementation, and --expert_parallel drops no token; leave it out", "use_scattermoe, use_sonicmoe, expert_parallel_num_nvl_bytes, "
      "expert_parallel_token_capacity, expert_parallel_num_rdma_bytes, expert_parallel_dispatch_chunks, expert_parallel_save_dispatch"),
    Note("experts have one implementation", "expert_parallel_backend, expert_parallel_fallback_on_unsupported, expert_backend, moe_grouped_backend, moe_dequant_chunk_size, "
      "moe_bnb_fast, autotune_cache_path, autotune_profiles, autotune_neighborhood"),
    Refused("one of the tasks pretrain, sft, dpo, rm, grpo and ppo", "diffusion, diffusion_lm, diffusion_decision, llmcompressor, recipe, save_compressed"),
    Refused("a model is saved as a Hugging Face directory, which llama.cpp converts to GGUF", "export"),
    Refused("a reward function has no environment of several turns here: --reward FILE.py", "nemo_gym_enabled, nemo_gym_dir, nemo_gym_auto_clone, nemo_gym_config_paths, "
      "nemo_gym_head_port, nemo_gym_server_timeout, nemo_gym_verify_timeout, nemo_gym_run_timeout, nemo_gym_datasets, nemo_gym_auto_start, nemo_gym_model_name, "
      "nemo_gym_multi_turn, nemo_gym_max_turns"),
    Refused("this program trains on this machine; leave it out", "hatchery, coreweave"),
    Note("Axolotl does not read it either", "eta_min, full_finetune, test_value, adam_eps, base_model_ignore_patterns, gptq_disable_exllama"),
    Refused("it is for other architectures, or for trained weights of four bits; leave it out", "nvfp4_merge_aware, dsv4_fp4_grouped_mode, use_dsv4_kernels, "
      "use_glm_dsa_kernels, nonexpert_quantization, dsv4_fp8_nonexpert_mode, dsv4_fp8_lora_kernel, dsv4_shared_mlp_lora_kernel, dsv4_bf16_all, gemma4_fp8_nonexpert, "
      "gemma4_nf4_nonexpert, nvfp4_merge_aware_start_step, ple_cpu_offload"),
]

# Types of data sets, with their equivalents here: a template (ALPACA), or the prompt's field (PROMPTS; None if the type does not name it).
ALPACA = {"alpaca": "alpaca", "alpaca:instruct": "alpaca", "alpaca:chat": "alpaca:chat", "alpaca:chatml": "alpaca:chatml",
          "alpaca_chat.load": "alpaca:chat", "alpaca_instruct.load": "alpaca"}
CHATS = ("chat_template", "chat_template.default", "sharegpt", "bradley_terry.chat_template", "chat_template.argilla", "chat_template.argilla_chat",
         "orpo.chat_template", "chat_template.default")
PROMPTS = {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt", "argilla_chat": None, "argilla": None, "default": None}
TEXTS = ("completion", "pretrain")
PREFERENCES = {"dpo": None, "ipo": "ipo_mean", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
HARMLESS = ("cut_cross_entropy", "liger", "swanlab", "KernelsPlugin")


def types_of(settings):
    return [s.value for s in settings if s.name == "datasets.type" and s.value != "false"]


def task_of(given, task):
    """Returns the task that a file requests, and the setting that requests it."""
    def says(name):
        return name in given and given[name].value.lower() not in ("false", "none", "null")

    if says("rl"):
        rl = given["rl"].value
        return "dpo" if rl in PREFERENCES or rl == "bco" else "grpo", f"{given['rl'].where} \"{rl}\""
    if says("reward_model"):
        return "rm", given["reward_model"].where
    if "pretraining_dataset" in given:
        return "pretrain", given["pretraining_dataset"].where
    if task is None and "datasets.type" in given:
        return ("pretrain", given["datasets.type"].where) if given["datasets.type"].value in TEXTS else ("sft", "")
    return None if task else ("sft", "")


def defaults(task):
    grpo = {"num_generations": "8", "loss_type": "dapo", "scale_rewards": "group"}  # TRL's
    return (grpo if task == "grpo" else {}) | {"num_epochs": "1", "micro_batch_size": "1", "gradient_accumulation_steps": "1", "sequence_len": "512", "lr_scheduler": "cosine", "warmup_ratio": "0.03",
            "adam_beta2": "0.999", "excess_length_strategy": "split" if task == "pretrain" else "drop"}


def complete(t):
    complete_trainer(t)
    complete_data(t)
    complete_task(t)
    complete_adapter(t)
    if t.has("min_lr_ratio"):
        where = t.together["min_lr_ratio"].where
        if t.flag("lr_scheduler") == "cosine":
            t.set("lr_scheduler", "cosine_with_min_lr", where)
        t.set("min_lr_ratio", t.get("min_lr_ratio"), where)
    if "lr_warmup" not in t.given:
        t.note("", "Axolotl's default warm-up is 3 % of the steps, but at most 100 steps: --lr_warmup N")
    complete_steps(t)
    if t.has("curriculum"):
        merged = "," in t.flag("data", "") and not any(s.name == "shuffle_merged_datasets" and s.value == "false" for s in t.settings)
        if merged:
            t.refuse(f"{t.together['curriculum'].where} repeats one random order of several data sets in every epoch\n  fix: shuffle_merged_datasets: false, or leave it out")
        else:
            t.set("shuffle", "false", t.together["curriculum"].where)
    seen = next((s for s in t.settings if s.name == "model_type" and re.fullmatch(r"(?!Gemma3)\w+ForConditionalGeneration", s.value)), None)
    if seen:
        t.refuse(f"{seen.where} {seen.value} reads images\n  fix: use a text model")
    if t.has("plugins"):
        for plugin in t.together["plugins"].values:
            if not any(name in plugin for name in HARMLESS):
                t.refuse(f'{t.together["plugins"].where} "{plugin}" is not supported\n  fix: leave it out, if the run does not need it')
        t.note(t.together["plugins"].where, "this program has its own fast kernels, and writes metrics to --log")
    if t.has("batch_size"):
        t.set("train_batch_size", t.get("batch_size"), t.together["batch_size"].where)
        return
    samples, accumulated = t.count("device_batch", 1), t.count("accumulated", 1)
    streams = any(s.name == "pretraining_dataset" for s in t.settings)
    packs = t.has("packs") or streams and t.has("concatenates")
    if streams and not t.has("packs"):
        t.set("truncation", "keep", "truncation (Axolotl's, of pretraining_dataset)", by_default=True)
    t.step(samples, accumulated, packs)
    t.answers(samples, accumulated)


def complete_steps(t):
    """evals_per_epoch and saves_per_epoch are shares of all steps; val_set_size above 1 would count samples."""
    if t.has("held_out") and t.get("held_out") not in ("0", "0.0"):
        if float(t.get("held_out")) >= 1:
            t.refuse(f'{t.together["held_out"].where} "{t.get("held_out")}" is a number of samples\n  fix: --eval_fraction 0.05, a share of the samples')
        else:
            t.set("eval_fraction", t.get("held_out"), t.together["held_out"].where)
    epochs = float(t.flag("max_epochs", t.flag("num_episodes", "1")))
    for key, flag in (("evals", "eval_steps"), ("saves", "save_steps")):
        if not t.has(key) or (key == "evals" and not {"eval_fraction", "eval_data"} & t.given):
            continue
        times = float(t.get(key)) * epochs
        if key == "evals" and t.get(key) == "1":
            t.set(flag, "-1", t.together[key].where)
        elif times > 1:
            t.set(flag, f"{1 / times:.6g}", t.together[key].where)


def complete_data(t):
    types, pairs = types_of(t.settings), t.task in ("dpo", "rm")
    for name in ("datasets.field_instruction", "datasets.field_output", "datasets.field_prompt", "datasets.field_chosen", "datasets.field_rejected",
                 "datasets.field_messages", "datasets.field", "datasets.chat_template", "datasets.chat_template_jinja"):
        values = {s.value for s in t.settings if s.name == name} - {"messages", "conversations"}
        if len(values) > 1:
            t.refuse(f"{name[9:]} differs between data sets: {', '.join(sorted(values))}\n  fix: prepare each with data/prepare.py and its keys, and give both files")
    if t.has("text") and t.task != "pretrain":
        t.refuse(f'{t.together["text"].where} is a field of plain text\n  fix: use the task pretrain, with type: completion')
    elif t.has("text") and t.get("text") != "text":
        t.set("input_key", t.get("text"), t.together["text"].where)
    if t.has("messages") and t.get("messages") not in ("messages", "conversations", "conversation"):
        where = t.together["messages"].where
        t.set("prompt_key" if pairs else "input_key", t.get("messages"), where)
        if t.task == "sft":
            t.set("multiturn", "true", where)
    own = next((s for s in t.settings if s.name.startswith("datasets.type.")), None)
    if t.has("format"):
        complete_format(t, "{prompt}" if pairs else "{instruction}")
    elif own and t.task != "pretrain":
        t.set("input_template", "{}" if pairs else "{} ", own.where)
        t.note("", "prompts from named fields are plain text in Axolotl, without the chat template: --input_template")
    names = set()
    for kind in types:
        names |= name_type(t, kind, pairs)
    if len(names) > 1:
        t.refuse(f"datasets.type asks for several templates: {', '.join(sorted(names))}\n  fix: prepare each data set with data/prepare.py, and give both files")
    for name in names:
        t.set("input_template" if name.startswith("alpaca") else "tokenizer_chat_template", name, "datasets.type")
    if t.has("chat_template") and not any(not name.startswith("alpaca") for name in names):
        name_template(t, t.get("chat_template"), t.together["chat_template"].where)


def name_type(t, kind, pairs):
    """Sets the flags of a type of data set, and returns the names of its templates (none or one)."""
    family, _, form = kind.partition(".")
    where = t.together["types"].where
    if kind in ALPACA and not pairs:
        return {ALPACA[kind]}
    if kind in TEXTS:
        if t.task not in ("pretrain", "eval"):
            t.refuse(f'{where} "{kind}" is plain text\n  fix: use the task pretrain')
        return set()
    if kind in CHATS or kind == "None":
        return set()
    if pairs and family in ("chatml", "llama3") and form in PROMPTS:
        t.set("apply_chat_template", "true", where)
        if PROMPTS[form] and "prompt_key" not in t.given:
            t.set("prompt_key", PROMPTS[form], where)
        return {family}
    if any(s.name.startswith("datasets.type.") for s in t.settings):
        return set()
    t.refuse(f'{where} "{kind}" is not a supported format of records\n  fix: --input_key and --output_key, or for pairs --prompt_key, --chosen_key and '
             "--rejected_key, name the fields")
    return set()


def complete_format(t, prompt):
    """Converts a custom format, which surrounds the prompt, to an input template."""
    where, text = t.together["format"].where, t.get("format")
    if re.findall(r"\{\w*\}", text) != [prompt]:
        t.refuse(f'{where} {json.dumps(text)} has other fields than {prompt}, once\n  fix: write the prompt into one field, and --input_template with {{}} for it')
    else:
        t.set("input_template", text.replace(prompt, "{}"), where)


def complete_task(t):
    if t.has("rl"):
        rl, where = t.get("rl"), t.together["rl"].where
        if rl not in PREFERENCES and rl != "grpo":
            t.refuse(f"{where}: {no_task(rl)}")
        elif t.task == "dpo" and PREFERENCES.get(rl):
            t.set("loss_type", PREFERENCES[rl], where)
            note_orpo(t)
            complete_kto(t)
        if rl == "simpo":
            add_sft(t, t.together.get("cpo_alpha", Setting("cpo_alpha", ["1"], "cpo_alpha (Axolotl's default)")))
    if t.has("reward_funcs"):
        set_rewards(t)


def complete_adapter(t):
    kind = t.get("adapter")
    if kind is None:
        if t.has("lora_r"):
            t.note(t.together["lora_r"].where, "without the key adapter all weights are trained, as in Axolotl")
        if t.has("lora_model_dir"):
            t.set("adapter", t.get("lora_model_dir"), t.together["lora_model_dir"].where)
        return
    where = t.together["adapter"].where
    if kind not in ("lora", "qlora"):
        if "adapter" not in t.own["flags"] or re.fullmatch(r"[a-z-]+", kind):
            return t.refuse(f'{where} "{kind}" is not supported\n  fix: lora or qlora, or --adapter DIR to continue an adapter')
        return t.set("adapter", kind, where)  # our own flag
    if kind == "qlora" and "load_in" not in t.flags:
        t.set("load_in", "4bit", where)
    if t.has("lora_model_dir"):
        return t.set("adapter", t.get("lora_model_dir"), t.together["lora_model_dir"].where)
    for key in ("lora_r", "lora_alpha"):
        if not t.has(key) and "lora_rank" not in t.flags:
            t.refuse(f'{where} "{kind}" needs {key}, which has no default in Axolotl\n  fix: --{"lora_rank 16" if key == "lora_r" else "lora_alpha 32"}, say')
    if t.has("all_linear"):
        t.together["lora_targets"] = t.together["all_linear"]._replace(values=["all-linear"])
    elif not t.has("lora_targets"):
        t.note(where, "without lora_target_modules the targets are PEFT's: q_proj and v_proj of Llama, Mistral and Qwen")
    t.lora(None, None, "0", "q_proj,v_proj")


AXOLOTL = Peer("Axolotl", "0.21", ROWS, defaults, task_of, complete, "./model-out", (TRL, TRAINER))
