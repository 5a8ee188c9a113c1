"""ms-swift 4.6's commands for Megatron: megatron sft, pt and rlhf."""

from . import swift
from .table import Note, Part, Peer, Refused, Same, Sets, Together
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .trl import TRL

ROWS = [
    # experts
    Same("expert_parallel", "expert_model_parallel_size"),
    Together("aux_loss", "--router_aux_loss_coef; Megatron sums the loss over layers, and divides its loads by the number of experts per token", "moe_aux_loss_coeff"),
    Note("the auxiliary loss uses the loads of the whole step", "moe_router_load_balancing_type", "aux_loss, global_aux_loss"),
    Sets("router_aux_loss_coef 0", "moe_router_load_balancing_type", "none"),
    Refused("--router_aux_loss_coef is the weight of the only auxiliary loss, on the loads of the whole step; leave it out", "moe_router_load_balancing_type, moe_z_loss_coeff, moe_router_enable_expert_bias, "
      "moe_router_bias_update_rate, moe_input_jitter_eps"),
    Refused("no token is dropped; leave it out", "moe_expert_capacity_factor, moe_pad_expert_input_to_capacity"),
    Note("no token is dropped", "moe_token_drop_policy"),
    Note("the router computes in float", "moe_router_dtype", "none, fp32, fp64"),
    Note("experts have one implementation", "moe_grouped_gemm, moe_permute_fusion, moe_router_fusion, moe_shared_expert_overlap, moe_token_dispatcher_type, moe_enable_deepep, "
      "moe_flex_dispatcher_backend, overlap_moe_expert_parallel_comm, delay_wgrad_compute, moe_layer_recompute, moe_use_legacy_grouped_gemm"),
    Refused("change config.json in the directory of --model", "num_experts, moe_layer_freq, moe_ffn_hidden_size, moe_shared_expert_intermediate_size, moe_router_topk, moe_router_pre_softmax, "
      "moe_router_score_function, moe_router_topk_scaling_factor"),
    # how it is divided and computed
    Same("ring_attn_size", "context_parallel_size"),
    Note("it saves memory and changes no result; here --zero_stage shards weights, gradients and the optimizer, and --ring_attn_size splits sequences", "sequence_parallel, "
      "expert_tensor_parallel_size, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers, "
      "pipeline_model_parallel_layout"),
    Same("tensor_parallel", "tensor_model_parallel_size"),
    Sets("zero_stage 0", "use_distributed_optimizer", "false"),
    Note("--zero_stage 1 shards the optimizer over the ranks", "use_distributed_optimizer"),
    Sets("recompute none", "recompute_granularity", "none"),
    Sets("recompute layer", "recompute_granularity", "full"),
    Sets("recompute cheap", "recompute_granularity", "selective"),
    Note("--recompute selects the recomputed activations", "recompute_method, recompute_num_layers, recompute_modules"),
    Sets("offload optimizer", "optimizer_cpu_offload", "true"),
    Note("the whole optimizer is offloaded", "optimizer_offload_fraction", "1, 1.0"),
    Note("--moments and --grad_dtype are the types of the optimizer's state and of gradients", "use_precision_aware_optimizer"),
    Note("the optimizer's state and gradients are in float", "main_params_dtype, main_grads_dtype, exp_avg_dtype, exp_avg_sq_dtype", "fp32"),
    Sets("grad_dtype bf16", "main_grads_dtype", "bf16"),
    Sets("moments bf16", "exp_avg_dtype, exp_avg_sq_dtype", "bf16"),
    Refused("--moments f32, bf16 or 8bit, --grad_dtype f32 or bf16", "main_params_dtype, main_grads_dtype, exp_avg_dtype, exp_avg_sq_dtype"),
    Note("--zero_stage selects the sharded arrays", "use_megatron_fsdp, data_parallel_sharding_strategy"),
    Note("sums over ranks are in float", "accumulate_allreduce_grads_in_fp32"),
    Note("this program has its own attention: exact, blocked, on packed rows", "attention_backend"),
    Note("it selects an implementation and changes no result", "cross_entropy_loss_fusion, cross_entropy_fusion_impl, gradient_accumulation_fusion, bias_dropout_fusion, "
      "bias_swiglu_fusion, rope_fusion, masked_softmax_fusion, overlap_grad_reduce, overlap_param_gather, tp_comm_overlap, attention_softmax_in_fp32, "
      "manual_gc, manual_gc_interval, deterministic_mode, distributed_backend, use_cpu_initialization, bias_activation_fusion, apply_rope_fusion, optimizer_cuda_graph, "
      "manual_gc_steps, manual_gc_eval, te_rng_tracker, mlp_padding_free, account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split, overlap_p2p_comm, "
      "batch_p2p_comm, align_param_gather, cp_comm_type, cp_partition_mode, sequence_packing_scheduler, overlap_param_gather_with_optimizer_step, align_grad_reduce, "
      "nccl_comm_warmup, microbatch_group_size_per_vp_stage, apply_query_key_layer_scaling, bridge_backend, offload_bridge, skip_megatron_init"),
    Note("ranks draw their rows from one random order", "data_sharding"),
    Note("the loss is the mean over the targets of a step", "calculate_per_token_loss", "true"),
    Refused("the loss is the mean over the targets of a step; leave it out", "calculate_per_token_loss", "false"),
    Refused("--fp8 scales each operand by its largest magnitude, and excludes experts", "fp8_format, fp8_recipe, fp8_param_gather, fp8_amax_history_len, fp8_amax_compute_algo, "
      "fp4_format, fp4_recipe, fp4_param_gather"),
    Refused("it is for other architectures, or for heads that predict several tokens; leave it out", "mtp_num_layers, mtp_loss_scaling_factor, mtp_decoder_input_detach, mtp_shared_weights, "
      "engram_tokenizer_map, dsa_indexer_loss_coeff, dsa_indexer_use_sparse_loss, apply_dsa_kernel_fusion, csa_dense_mode, use_fused_mhc, mhc_recompute_layer_num, "
      "linear_decoupled_in_proj"),
    Refused("this program trains only text models", "vit_gradient_checkpointing_kwargs, vit_attn_impl, language_model_only"),
    Refused("give the flags themselves", "megatron_extra_kwargs"),
    Note("sampling and training choose the same experts", "router_replay_mode", "disabled"),
    Refused("sampling and training choose experts by the same computation; leave it out", "router_replay_mode"),
    *TRL.only("reference_free, f_divergence_type").rows,
    # a step and its rate
    Together("batch", "--train_batch_size, or with packing --train_batch_tokens", "global_batch_size"),
    Note("rows are filled up to --row_tokens tokens, and the loss is the mean over all targets of a step", "micro_batch_size"),
    Same("max_steps", "train_iters"),
    Same("num_episodes,max_epochs", "max_epochs"),
    Same("learning_rate", "lr"),
    Sets("lr_scheduler constant_with_warmup", "lr_decay_style", "constant"),
    Same("lr_scheduler", "lr_decay_style"),
    Same("lr_warmup", "lr_warmup_fraction, lr_warmup_iters"),
    Together("min_lr", "divided by the learning rate: --min_lr_ratio, with cosine --lr_scheduler cosine_with_min_lr", "min_lr"),
    Note("the warm-up begins at 0", "lr_warmup_init", "0, 0.0"),
    Refused("--lr_scheduler warmup_stable_decay with --lr_decay_ratio; the schedule ends with the run", "lr_warmup_init, lr_decay_iters, lr_wsd_decay_style, lr_wsd_decay_iters"),
    Note("weight decay is constant", "weight_decay_incr_style", "constant"),
    Refused("weight decay is constant, of matrices alone: --weight_decay", "weight_decay_incr_style, start_weight_decay, end_weight_decay, apply_wd_to_qk_layernorm"),
    Refused("--optimizer adamw or muon, over all weights; leave it out", "sgd_momentum, muon_momentum, muon_split_qkv, muon_use_nesterov, muon_scale_mode, muon_fp32_matmul_prec, "
      "muon_coefficient_type, muon_num_ns_steps, muon_tp_mode, muon_extra_scale_factor, muon_scalar_optimizer, muon_lr, muon_min_lr"),
    Same("max_norm", "clip_grad"),
    Part("adam_betas 0", "adam_beta1"),
    Part("adam_betas 1", "adam_beta2"),
    Same("adam_eps", "adam_eps"),
    Sets("optimizer adamw", "optimizer", "adam"),
    # checkpoints, evaluation, log
    Same("output_dir", "save"),
    Same("save_steps", "save_interval"),
    Same("eval_steps", "eval_interval"),
    Note("evaluation reads all samples", "eval_iters"),
    Same("logging_steps", "log_interval"),
    Note("models are Hugging Face directories, without conversion", "load_safetensors, save_safetensors, merge_lora, finetune, no_save_rng, no_load_optim, no_load_rng, "
      "ckpt_format, auto_detect_ckpt_format, exit_on_missing_checkpoint, no_initialization, use_hf, async_save, use_persistent_ckpt_worker, dist_ckpt_save_pre_mcore_014, "
      "dist_ckpt_optim_fully_reshardable, distrib_optim_fully_reshardable_mem_efficient, strict_fsdp_dtensor_load, save_missing_weights, data_parallel_random_init"),
    Refused("--preset initialises a model with random weights (pretrain)", "perform_initialization"),
    Note("every checkpoint also contains the optimizer; --save_steps -1 writes none", "no_save_optim"),
    Refused("--model, --adapter and --ref_model take a Hugging Face directory or name, --resume a checkpoint of this program",
      "load, adapter_load, ref_load, ref_adapter_load, mcore_model, mcore_adapter, mcore_ref_model, mcore_ref_adapter"),
    Sets("shuffle false", "dataloader_type", "single"),
    Note("each epoch has its own random order", "dataloader_type", "cyclic, external"),
    Note("data/prepare.py tokenises samples once and caches them", "num_workers"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training", "tensorboard_dir, wandb_project, wandb_exp_name, "
      "wandb_save_dir, log_throughput, log_params_norm, tensorboard_queue_size, calculate_KL"),
]

# The names of transformers' Trainer that these commands also have.
SHARED = ("bf16, fp16, seed, weight_decay, num_train_epochs, output_dir, local_rank, dataloader_num_workers, dataloader_multiprocessing_context, dataloader_persistent_workers, "
          "dataloader_pin_memory, dataloader_prefetch_factor, group_by_length, ddp_backend, ddp_timeout, eval_steps, logging_steps, save_steps, save_strategy, save_total_limit, "
          "metric_for_best_model, greater_is_better, hub_token, report_to")


def defaults(task):
    return {"lr_decay_style": "cosine", "lr_warmup_fraction": "0", "weight_decay": "0.1"} | (swift.ANSWERS if task == "grpo" else {})


def complete(t):
    kind = t.get("tuner_type", "full")
    if "learning_rate" not in t.given:
        t.set("learning_rate", "1e-4" if kind == "lora" else "1e-5", "lr (ms-swift's default)", by_default=True)
    if t.has("min_lr") and float(t.get("min_lr")) == 0:
        del t.together["min_lr"]
    elif t.has("min_lr") and t.flag("lr_scheduler") == "cosine":
        t.set("lr_scheduler", "cosine_with_min_lr", t.together["min_lr"].where)
    elif t.has("min_lr"):
        t.refuse(f'{t.together["min_lr"].where} is not 0, but --lr_scheduler {t.flag("lr_scheduler")} has no minimum\n  fix: lr_decay_style cosine')
    complete_trainer(t, keeps_strings=False)
    if t.has("aux_loss"):
        where = t.together["aux_loss"].where
        t.set("router_aux_loss_coef", t.get("aux_loss"), where)
        if float(t.get("aux_loss")) > 0:
            t.note(where, "with L layers and K experts per token, Megatron's loss is L / K times the loss of --router_aux_loss_coef, which is transformers'")
    swift.finish(t, kind)
    batch = t.count("batch", 16)
    t.whole_step(batch, t.has("packs"), f"a global batch of {batch} samples")
    t.answers(max(1, batch // t.ranks()), 1)


MEGATRON = Peer("Megatron-SWIFT", "4.6", ROWS, defaults, swift.task_of, complete, "megatron_output", (swift.SWIFT._replace(bases=()), TRAINER.only(SHARED)))
