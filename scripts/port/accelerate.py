"""Files of accelerate 1.15, and flags of its launcher and of torchrun."""

from .table import SPEED, Note, Peer, Refused, Same, Sets, Together

MEGATRON_LM = (
    "attention_backend", "attention_dropout", "attention_softmax_in_fp32", "calculate_per_token_loss", "context_parallel_size", "decoder_last_pipeline_num_layers", "eod_mask_loss",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "gradient_clipping", "hidden_dropout", "no_load_optim", "no_save_optim", "num_micro_batches",
    "optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "pp_degree", "recompute_activations", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "sequence_parallelism", "tp_degree", "use_custom_fsdp", "use_distributed_optimizer", "use_precision_aware_optimizer", "use_rotary_position_embeddings")

ROWS = [
    # optimizer
    Together("ds_norm", "--max_norm", "gradient_clipping"),
    # how it is computed
    Sets("recompute layer", "fsdp_activation_checkpointing, activation_checkpointing", "true"),
    Sets("dtype bf16", "mixed_precision", "bf16"),
    Note("--dtype selects the type; auto is f32 on the CPU", "mixed_precision", "no"),
    Sets("fp8 true", "mixed_precision", "fp8"),
    Refused("--dtype bf16 or f32: there is no fp16", "mixed_precision, fp16_full_eval"),
    Note("sums, norms and losses are in float, weights in --dtype", "bf16_full_eval, downcast_bf16, float32_matmul_precision"),
    Sets("device cpu", "use_cpu, no_cuda, cpu", "true"),
    Same("threads", "num_cpu_threads_per_process"),
    Refused("--fp8 scales each operand by its largest magnitude, and excludes the head, norms and attention", "fp8_config, fp8_backend, fp8_format, fp8_amax_compute_algo, fp8_amax_history_len, "
            "fp8_interval, fp8_margin, fp8_opt_level, fp8_override_linear_precision"),
    Note(SPEED, "fp8_pad_inner_dim, fp8_use_autocast_during_eval, fp8_enable_fsdp_float8_all_gather, dynamo_config, dynamo_mode, dynamo_use_dynamic, "
         "dynamo_use_fullgraph, dynamo_use_regional_compilation, fsdp_activation_checkpointing_offload, offload_optimizer_nvme_path, offload_param_nvme_path"),
    Refused("--debug finds the first value that is not finite, and ranks whose calls differ", "debug"),
    # ranks
    Together("processes", "--ranks N, or mpirun -np N before the program", "num_processes, nproc_per_node, num_gpus, world_size"),
    Note("all ranks are on this machine", "num_machines, nnodes", "1"),
    Note("this is the first machine", "machine_rank, node_rank", "0"),
    Refused("--rank R/N --rendezvous HOST:PORT, or mpirun",
      "num_machines, machine_rank, main_process_ip, main_process_port, nnodes, node_rank, master_addr, master_port, deepspeed_hostfile, deepspeed_inclusion_filter, "
      "deepspeed_exclusion_filter, mpirun_hostfile, mpirun_config"),
    Note("the flags of ranks and --zero_stage determine the division of the work", "distributed_type", "no, multi_gpu, multi_cpu, fsdp, deepspeed"),
    Note("a setting of accelerate's launcher",
      "compute_environment, use_parallelism_config, max_restarts, monitor_interval, rdzv_conf, no_python, quiet, module, role, env, tpu, vm, tpu_cluster, no_tpu_cluster, tpu_vm, aws_access_key_id, "
      "aws_secret_access_key, base_job_name, ec2_instance_type, iam_role_name, image_uri, region, py_version, pytorch_version, transformers_version, "
      "sagemaker_inputs_file, sagemaker_metrics_file, main_training_function, rdzv_backend, same_network, tpu_env, tpu_use_cluster, tpu_use_sudo, "
      "enable_cpu_affinity, deepspeed_moe_layer_cls_names, deepspeed_multinode_launcher, zero3_init_flag, zero3_save_16bit_model, "
      "dynamo_backend, gpu_ids, commands, command_file, tpu_name, tpu_zone, seq_parallel_communication_data_type, "
      "parallelism_config_sp_seq_length_is_variable, parallelism_config_sp_seq_length, parallelism_config_sp_attn_implementation"),
    Together("deepspeed_config_file", "a file of DeepSpeed, of which each setting is taken over or refused (deepspeed.md)", "deepspeed_config_file"),
    Sets("zero_stage 2", "fsdp", "shard_grad_op, shard_grad_op auto_wrap"),
    Sets("zero_stage 3", "fsdp"),
    Refused("--config FILE.yaml with accelerate's file; or --zero_stage and --ring_attn_size", "fsdp_config, deepspeed_config"),
    Same("zero_stage", "zero_stage"),
    Sets("zero_stage 2", "fsdp_sharding_strategy, sharding_strategy", "SHARD_GRAD_OP, 2"),
    Sets("zero_stage 3", "fsdp_sharding_strategy, sharding_strategy", "FULL_SHARD, HYBRID_SHARD, 1, 4"),
    Sets("zero_stage 0", "fsdp_sharding_strategy, sharding_strategy", "NO_SHARD, 3"),
    Sets("zero_stage 2", "fsdp_reshard_after_forward", "false, SHARD_GRAD_OP"),
    Sets("zero_stage 3", "fsdp_reshard_after_forward"),
    Note("a setting of FSDP; --zero_stage selects the sharded arrays",
      "fsdp_version, fsdp_limit_all_gathers, limit_all_gathers, fsdp_auto_wrap_policy, fsdp_backward_prefetch, fsdp_forward_prefetch, "
      "fsdp_cpu_ram_efficient_loading, fsdp_sync_module_states, fsdp_state_dict_type, fsdp_final_state_dict_type, "
      "fsdp_transformer_layer_cls_to_wrap, fsdp_use_orig_params, fsdp_min_num_params"),
    Same("ring_attn_size", "sequence_parallel_size, cp_size, sp_size, parallelism_config_cp_size, parallelism_config_sp_size"),
    Sets("sp_mode gather", "cp_rotate_method, cp_comm_strategy, parallelism_config_cp_comm_strategy", "allgather"),
    Sets("sp_mode ring", "cp_rotate_method, cp_comm_strategy, parallelism_config_cp_comm_strategy", "alltoall"),
    Sets("sp_mode ulysses", "sp_backend, parallelism_config_sp_backend", "deepspeed"),
    Sets("sp_mode ring", "cp_backend, parallelism_config_cp_backend", "torch"),
    Refused("--sp_mode ring, gather or ulysses; the program chooses the layout of each row",
      "cp_rotate_method, cp_comm_strategy, sp_backend, cp_backend, parallelism_config_cp_comm_strategy, parallelism_config_sp_backend, "
      "parallelism_config_cp_backend"),
    Refused("this program has no model of Megatron-LM; --zero_stage, --ring_attn_size and --expert_parallel divide a run", "use_megatron_lm, megatron_lm_config, " + ", ".join(
      f"megatron_lm_{name}" for name in MEGATRON_LM)),
    Note("ranks that do not share a sequence (--ring_attn_size) divide the rows of a step; --zero_group N limits the sharding of --zero_stage to N ranks (default: all)",
      "parallelism_config_dp_shard_size, parallelism_config_dp_replicate_size"),
    Same("tensor_parallel", "tp_size, parallelism_config_tp_size"),
    Together("ds_accumulated", "see per_device_train_batch_size", "deepspeed_config.gradient_accumulation_steps, gradient_accumulation_steps"),
    Note("ranks are threads of this program, or started by mpirun: Ray is not used", "ray"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits",
      "fsdp_offload_params, offload_optimizer_device, offload_param_device"),
    Note("a setting of accelerate's launcher", "multi_gpu, use_fsdp, use_deepspeed, log_dir, tee, standalone"),
]

ACCELERATE = Peer("accelerate", "1.15", ROWS)
