"""Files of accelerate 1.15, and flags of its launcher and of torchrun."""

from .table import Note, Peer, Refused, Same, Sets, Together

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
    Sets("device cpu", "use_cpu, no_cuda", "true"),
    Refused("--debug finds the first value that is not finite, and ranks whose calls differ", "debug"),
    # ranks
    Together("processes", "--ranks N, or mpirun -np N before the program", "num_processes, nproc_per_node, world_size"),
    Note("all ranks are on this machine", "num_machines, nnodes", "1"),
    Note("this is the first machine", "machine_rank, node_rank", "0"),
    Refused("--rank R/N --rendezvous HOST:PORT, or mpirun",
      "num_machines, machine_rank, main_process_ip, main_process_port, nnodes, node_rank, master_addr, master_port"),
    Note("the flags of ranks and --zero_stage determine the division of the work", "distributed_type", "no, multi_gpu, multi_cpu, fsdp, deepspeed"),
    Note("a setting of accelerate's launcher",
      "compute_environment, main_training_function, rdzv_backend, same_network, tpu_env, tpu_use_cluster, tpu_use_sudo, "
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
    Note("ranks that do not share a sequence (--ring_attn_size) divide the rows of a step; --zero_group N limits the sharding of --zero_stage to N ranks (default: all)",
      "parallelism_config_dp_shard_size, parallelism_config_dp_replicate_size"),
    Note("there is no tensor parallelism", "tp_size, parallelism_config_tp_size", "1"),
    Refused("there is no tensor parallelism: --ring_attn_size splits sequences, --zero_stage shards optimizer, gradients and weights", "tp_size, parallelism_config_tp_size"),
    Together("ds_accumulated", "see per_device_train_batch_size", "deepspeed_config.gradient_accumulation_steps"),
    Note("ranks are threads of this program, or started by mpirun: Ray is not used", "ray"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits",
      "fsdp_offload_params, offload_optimizer_device, offload_param_device"),
    Note("a setting of accelerate's launcher", "multi_gpu, use_fsdp, use_deepspeed, log_dir, tee, standalone"),
]

ACCELERATE = Peer("accelerate", "1.15", ROWS)
