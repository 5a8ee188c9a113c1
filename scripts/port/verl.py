"""verl 0.9: verl.trainer.main_ppo, whose settings are words of Hydra, and the names of older versions and of the recipe DAPO."""

from .reading import PortError
from .table import Note, Peer, Refused, Same, Sets, Together
from .translate import RL
from .trl import PART

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
ESTIMATORS = {"gae": None, "grpo": "group_norm", "grpo_vectorized": "group_norm", "rloo": "rloo", "rloo_vectorized": "rloo", "reinforce_plus_plus": "reinforce",
              "reinforce_plus_plus_baseline": "reinforce_baseline"}
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
# Settings of the critic that are the actor's here, with the defaults of both; None: by default the actor's.
CRITIC = {"optim.weight_decay": "0.01", "optim.betas": "0.9,0.999", "optim.clip_grad": "1.0", "grad_clip": "1.0", "optim.lr_scheduler_type": "constant",
          "optim.warmup_style": "constant", "optim.lr_warmup_steps_ratio": "0.0", "optim.lr_warmup_steps": "-1", "optim.min_lr_ratio": "0.0", "ppo_epochs": None, "ppo_mini_batch_size": None}
TOOLS = "--environment FILE.py with the same tools, in TRL's form, and a reward (docs/rl.md#tools)"
OFFLOAD = "only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits"
SAMPLER = "this program samples answers itself, from the weights in training"
ROWS_FILLED = "rows are filled up to --row_tokens tokens, and --max_sequences prompts are answered at a time"
RANKS = "every rank has a part of all models, and --ranks or mpirun sets the number of ranks"
RAY = "ranks are threads of this program, or started by mpirun: Ray is not used"
PARALLEL = "it saves memory and changes no result; here --zero_stage shards weights, gradients and the optimizer, and --ring_attn_size splits sequences"
TORCH = "a setting of PyTorch without a counterpart here"
IMPLEMENTATION = "it selects an implementation and changes no result"
TEXT = "a record with images, videos or sound is refused"
LOG = "metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training"
SAMPLED = "answers are sampled from the trained distribution, all tokens at --temperature; this flag is for generate and --sample_every"


def under(prefix, names):
    return ", ".join(f"{prefix}.{name.strip()}" for name in names.split(","))


ROWS = [
    # model and data
    Same("model", f"{MODEL}.path"),
    Same("data", "data.train_files"),
    Together("val_files", "where trainer.test_freq is above 0: --eval_data", "data.val_files"),
    Note("the field prompt is read", "data.prompt_key", "prompt"),
    Same("input_key", "data.prompt_key"),
    Same("max_len", f"data.max_prompt_length, {ROLLOUT}.prompt_length"),
    Same("max_new_tokens", f"data.max_response_length, {ROLLOUT}.response_length"),
    Together("truncation", "prompts longer than max_prompt_length are dropped and counted: it must be error, or filter_overlong_prompts true", "data.truncation"),
    Together("filters_long", "true, the default here: prompts longer than max_prompt_length are dropped and counted", "data.filter_overlong_prompts", "true, false"),
    Note("all samples are used", "data.train_max_samples, data.val_max_samples", "-1"),
    Same("max_samples", "data.train_max_samples"),
    Refused("a file with fewer samples", "data.val_max_samples"),
    Same("shuffle", "data.shuffle"),
    Same("seed", "data.seed"),
    Same("chat_template_kwargs", "data.apply_chat_template_kwargs"),
    Same("tokenizer_chat_template", f"{MODEL}.custom_chat_template"),
    Refused("--model DIR, with its own tokenizer", f"data.tokenizer, {MODEL}.tokenizer_path, {MODEL}.hf_config_path"),
    Refused("change config.json in the directory of --model", "override_config"),
    Note("code in a model's directory is never run", "trust_remote_code, external_lib"),
    Note("data/prepare.py tokenises samples once and caches them", "data.filter_overlong_prompts_workers, data.dataloader_num_workers, data.return_raw_input_ids, data.return_raw_chat, "
         "data.return_full_prompt, use_shm"),
    Note("evaluation reads all samples", "data.val_batch_size, data.validation_shuffle"),
    Note(TEXT, "data.image_key, data.video_key, data.audio_key, data.image_patch_size, data.return_multi_modal_inputs, data.mm_processor_kwargs, freeze_vision_tower"),
    Note("functions of rewards read the field data_source", "data.reward_fn_key", "data_source"),
    Refused("functions of rewards read the fields of a record by their names (docs/rl.md#rewards)", "data.reward_fn_key"),
    Refused("a file of records: --data FILE", "data.custom_cls, data.datagen"),
    Refused("--shuffle decides on the order of the prompts; leave it out", "data.sampler"),
    # steps: verl's batches of prompts are this program's
    Same("rollout_batch_size", "data.train_batch_size"),
    Together("mini_batch", "prompts of an update, times rollout.n: --train_batch_size, which counts answers", f"{ACTOR}.ppo_mini_batch_size"),
    Same("max_epochs", f"{ACTOR}.ppo_epochs"),
    Same("num_episodes", "trainer.total_epochs"),
    Together("total_steps", "times the updates of a batch: --max_steps", "trainer.total_training_steps"),
    Note("prompts are drawn until a batch is full", "data.gen_batch_size, algorithm.filter_groups.max_num_gen_batches, algorithm.filter_groups.max_inflight_gen_batches"),
    Note(ROWS_FILLED, "ppo_micro_batch_size, ppo_micro_batch_size_per_gpu, ppo_max_token_len_per_gpu, use_dynamic_bsz, log_prob_micro_batch_size, log_prob_micro_batch_size_per_gpu, "
         "log_prob_use_dynamic_bsz, log_prob_max_token_len_per_gpu, forward_micro_batch_size, forward_micro_batch_size_per_gpu, forward_max_token_len_per_gpu, "
         "reward_model.micro_batch_size, reward_model.micro_batch_size_per_gpu, reward_model.max_length"),
    Note("the answers of a batch are shuffled into steps", f"{ACTOR}.shuffle, critic.shuffle, data_loader_seed"),
    Note("rows have no padding", "use_remove_padding, pad_to_length, pad_to_length_bucket"),
    Note("ranks draw their rows from one random order", "trainer.balance_batch, fsdp_config.seed, fsdp.seed, megatron.seed"),
    # optimizer
    Same("learning_rate", f"{ACTOR}.optim.lr"),
    Same("weight_decay", f"{ACTOR}.optim.weight_decay"),
    Same("adam_betas", f"{ACTOR}.optim.betas"),
    Same("max_norm", f"{ACTOR}.grad_clip, {ACTOR}.optim.clip_grad"),
    Together("scheduler", "constant, or cosine: --lr_scheduler", f"{ACTOR}.optim.lr_scheduler_type, {ACTOR}.optim.warmup_style", "constant, cosine"),
    Refused("--lr_scheduler constant, constant_with_warmup or cosine_with_min_lr", "lr_scheduler_type, warmup_style"),
    Together("warmup_ratio", "--lr_warmup, a share of all steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Together("warmup_steps", "times the updates of a batch: --lr_warmup", f"{ACTOR}.optim.lr_warmup_steps"),
    Together("min_lr_ratio", "with a cosine: --min_lr_ratio", f"{ACTOR}.optim.min_lr_ratio"),
    Note("the cosine is half a period", "optim.num_cycles", "0.5"),
    Refused("the cosine is half a period; leave it out", "optim.num_cycles"),
    Note("--max_steps, or num_episodes, determines the steps", "optim.total_training_steps"),
    Note("the first step of a warm-up has a rate above 0", "optim.zero_indexed_step", "true, false"),
    Note("AdamW updates the weights", "optim.optimizer", "AdamW, adamw, adam"),
    Note("AdamW updates the weights", "optim.optimizer_impl", "torch.optim"),
    Refused("--optimizer adamw or muon, --moments f32, bf16 or 8bit; leave it out", "optim.optimizer, optim.optimizer_impl, optim.override_optimizer_config"),
    Refused("lr_scheduler_type, min_lr_ratio and lr_warmup_steps, the names of FSDP", "optim.lr_decay_style, optim.lr_decay_steps, optim.min_lr"),
    # adapters
    Together("lora_r", "above 0: --lora_rank", f"{MODEL}.lora_rank"),
    Together("lora_alpha", "with lora_rank: --lora_alpha", f"{MODEL}.lora_alpha"),
    Together("lora_targets", "with lora_rank: --lora_targets", f"{MODEL}.target_modules"),
    Same("adapter", f"{MODEL}.lora_adapter_path"),
    Note("there is no adapter of Megatron's", "lora.rank", "0"),
    Refused("--lora_rank and --lora_alpha", "lora.rank"),
    Note(PART, f"{MODEL}.lora, critic.model.lora"),
    Refused("--lora_targets with the names of layers that get adapters", "exclude_modules"),
    # rewards
    Same("reward", "custom_reward_function.path, reward.custom_reward_function.path"),
    Note("verl's name of the function is found", "custom_reward_function.name", "compute_score"),
    Refused("def compute_score in that file", "custom_reward_function.name"),
    Refused("default values of the function's parameters", "custom_reward_function.reward_kwargs"),
    Together("has_reward_model", "with the path of a reward model: --reward DIR", "reward_model.enable, reward.reward_model.enable"),
    Together("reward_model", "where reward_model.enable is true: --reward DIR", "reward_model.model.path, reward.reward_model.model_path"),
    Note("a reward model reads the policy's text", "reward_model.model.input_tokenizer"),
    Note("the function of --reward judges one answer at a time", "reward_model.reward_manager, reward.reward_manager.name", "naive, dapo, batch"),
    Note("the function of --reward judges one answer at a time", "reward_manager.source", "register"),
    Note(PART, "reward_manager.module"),
    Refused("--reward FILE.py with compute_score (docs/rl.md#rewards)", "reward_manager.source, reward_manager, reward_loop_module_path, reward_loop_class_name, reward_loop_source, sandbox_fusion.url"),
    Together("overlong", "with len and penalty_factor: --overlong_buffer LEN,FACTOR", "reward_model.reward_kwargs.overlong_buffer_cfg.enable, reward.reward_kwargs.overlong_buffer_cfg.enable, "
             "reward_model.overlong_buffer.enable"),
    Together("overlong_len", "where the overlong buffer is enabled: --overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg.len, reward.reward_kwargs.overlong_buffer_cfg.len, "
             "reward_model.overlong_buffer.len"),
    Together("overlong_factor", "where the overlong buffer is enabled: --overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor, "
             "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor, reward_model.overlong_buffer.penalty_factor"),
    Together("max_resp_len", "it must be max_response_length", "reward_model.reward_kwargs.max_resp_len, reward.reward_kwargs.max_resp_len"),
    Note(LOG, "overlong_buffer_cfg.log, overlong_buffer.log"),
    Note("a reward model stays in memory; --plan includes it", "reward_model.rollout, reward_model.enable_resource_pool, reward_model.n_gpus_per_node, reward_model.nnodes, reward_model.strategy, "
         "reward_model.model.fsdp_config, reward_model.use_reward_loop, reward_model.num_workers, reward.num_workers, launch_reward_fn_async, sandbox_fusion.max_concurrent, "
         "sandbox_fusion.memory_limit_mb"),
    # advantages
    Together("estimator", "gae is the task ppo; grpo is group_norm, or with norm_adv_by_std_in_grpo false dr_grpo; rloo is rloo, reinforce_plus_plus reinforce, and "
             "reinforce_plus_plus_baseline reinforce_baseline", "algorithm.adv_estimator", ", ".join(ESTIMATORS)),
    Refused("grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline or gae", "algorithm.adv_estimator"),
    Together("divides", "with grpo; false: --advantage_estimator dr_grpo", "algorithm.norm_adv_by_std_in_grpo", "true, false"),
    Together("gamma", "with reinforce_plus_plus and gae: --gamma", "algorithm.gamma"),
    Together("lambda", "with gae: --gae_lambda", "algorithm.lam"),
    Together("kl_in_reward", "with kl_ctrl.kl_coef and kl_penalty: --kl_coef and --kl_estimator", "algorithm.use_kl_in_reward", "true, false"),
    Together("reward_kl_coef", "with use_kl_in_reward: --kl_coef", "algorithm.kl_ctrl.kl_coef"),
    Together("reward_kl_type", "with use_kl_in_reward: --kl_estimator", "algorithm.kl_penalty", ", ".join(KL)),
    Refused("kl, mse or low_var_kl: --kl_estimator k1, k2 or k3", "algorithm.kl_penalty, kl_loss_type", ", ".join(["abs", "full", *(f"{name}+" for name in [*KL, "abs"])])),
    Together("kl_control", "adaptive with use_kl_in_reward: --kl_target TARGET_KL,HORIZON", "algorithm.kl_ctrl.type", "fixed, adaptive"),
    Together("kl_target", "with an adaptive kl_ctrl: --kl_target", "algorithm.kl_ctrl.target_kl"),
    Together("kl_horizon", "with an adaptive kl_ctrl: --kl_target", "algorithm.kl_ctrl.horizon"),
    Together("filters", "--dynamic_filtering 0,1", "algorithm.filter_groups.enable", "true, false"),
    Note("the mean reward of a prompt's answers decides", "algorithm.filter_groups.metric"),
    Refused("there is no such weighting of samples; leave it out", "algorithm.use_pf_ppo"),
    Refused("the sum of the rewards, with --reward_weights, is compared within the group", "algorithm.gdpo_reward_keys"),
    Note(PART, "algorithm.pf_ppo"),
    # losses
    Together("loss_mode", "vanilla, gspo or cispo: --policy_loss_type", f"{ACTOR}.policy_loss.loss_mode", "vanilla, gspo, cispo"),
    Refused("vanilla, gspo or cispo: --policy_loss_type ppo, gspo or cispo", "policy_loss.loss_mode"),
    Note(PART, f"{ACTOR}.policy_loss, {ACTOR}.tau_pos, {ACTOR}.tau_neg"),
    Together("clip", "clip_ratio_low and clip_ratio_high, which are 0.2 by default, take precedence, as in verl", f"{ACTOR}.clip_ratio"),
    Together("clip_low", "--eps_clip LOW,HIGH", f"{ACTOR}.clip_ratio_low"),
    Together("clip_high", "--eps_clip LOW,HIGH", f"{ACTOR}.clip_ratio_high"),
    Same("dual_clip", f"{ACTOR}.clip_ratio_c"),
    Sets("loss_aggregation token_mean", f"{ACTOR}.loss_agg_mode", "token-mean"),
    Sets("loss_aggregation sequence_mean", f"{ACTOR}.loss_agg_mode", "seq-mean-token-mean"),
    Sets("loss_aggregation constant", f"{ACTOR}.loss_agg_mode", "seq-mean-token-sum-norm"),
    Refused("token-mean, seq-mean-token-mean or seq-mean-token-sum-norm: --loss_aggregation token_mean, sequence_mean or constant", f"{ACTOR}.loss_agg_mode"),
    Together("loss_scale", "it must be max_response_length, by which --loss_aggregation constant divides", f"{ACTOR}.loss_scale_factor"),
    Note("the critic's loss is the mean over tokens", "critic.loss_agg_mode", "token-mean"),
    Refused("the critic's loss is the mean over tokens; leave it out", "critic.loss_agg_mode, critic.loss_scale_factor"),
    Same("entropy_coef", f"{ACTOR}.entropy_coeff"),
    Together("kl_in_loss", "with kl_loss_coef and kl_loss_type: --kl_coef, --kl_estimator and --kl_use_loss", f"{ACTOR}.use_kl_loss", "true, false"),
    Together("loss_kl_coef", "with use_kl_loss: --kl_coef", f"{ACTOR}.kl_loss_coef"),
    Together("loss_kl_type", "with use_kl_loss: --kl_estimator", f"{ACTOR}.kl_loss_type", ", ".join(KL)),
    Note(LOG, "calculate_entropy, calculate_sum_pi_squared, sum_pi_squared_checkpointing, calculate_log_probs"),
    # stale answers
    Together("correction", "token: --is_correction tis, or with two thresholds icepop", "algorithm.rollout_correction.rollout_is", "token"),
    Together("correction_range", "with rollout_is: --is_correction TYPE,LOW,HIGH", "algorithm.rollout_correction.rollout_is_threshold"),
    Together("tis_cap", "above 0: --is_correction tis,0,CAP", f"{ACTOR}.tis_imp_ratio_cap"),
    Note("the loss is that of policy_loss.loss_mode", "rollout_correction.loss_type", "ppo_clip"),
    Note(PART, "rollout_correction.rollout_rs_threshold"),
    Refused("--is_correction tis, icepop or seq-mask-tis (docs/rl.md#stale-answers)", "rollout_correction.rollout_is, rollout_correction.rollout_rs, rollout_correction.bypass_mode, "
            "rollout_correction.loss_type, rollout_correction.rollout_is_batch_normalize"),
    # the sampler
    Same("n", f"{ROLLOUT}.n"),
    Same("temperature", f"{ROLLOUT}.temperature"),
    Note("answers are sampled from all tokens", f"{ROLLOUT}.top_k", "-1, 0"),
    Note("answers are sampled from all tokens", f"{ROLLOUT}.top_p", "1, 1.0"),
    Note("answers are sampled from all tokens", f"{ROLLOUT}.do_sample", "true"),
    Note("an answer ends at an EOS token", f"{ROLLOUT}.ignore_eos", "false"),
    Refused(SAMPLED, f"{ROLLOUT}.top_k, {ROLLOUT}.top_p"),
    Refused("--temperature above 0", f"{ROLLOUT}.do_sample", "false"),
    Refused("an answer ends at an EOS token; leave it out", f"{ROLLOUT}.ignore_eos"),
    Note("evaluation answers each prompt once, greedily", f"{ROLLOUT}.val_kwargs"),
    Refused("rewards read all answers of a batch; leave it out", f"{ROLLOUT}.skip_rollout, skip.rollout.enable, skip.rollout_tq.enable, skip.async_rollout.enable"),
    Note(PART, "skip, skip_dump_dir"),
    Note("a batch is complete when each of its prompts has its answers", f"{ROLLOUT}.over_sample_rate", "0, 0.0"),
    Refused("a batch is complete when each of its prompts has its answers; leave it out", f"{ROLLOUT}.over_sample_rate"),
    Note("weights of the sampler are those in training, in --dtype", f"{ROLLOUT}.dtype, {ROLLOUT}.quantization, {ROLLOUT}.quantization_config_file, {ROLLOUT}.qat, {ROLLOUT}.mtp"),
    # several turns
    Together("multi_turn", "true with --environment FILE.py, which has the tools", f"{ROLLOUT}.multi_turn.enable", "true, false"),
    Together("turns", "with --environment: --max_turns", f"{ROLLOUT}.multi_turn.max_assistant_turns"),
    Together("user_turns", "with --environment: --max_turns, one more, unless max_assistant_turns is given", f"{ROLLOUT}.multi_turn.max_user_turns"),
    Together("tool_response", "with --environment: --max_observation", f"{ROLLOUT}.multi_turn.max_tool_response_length"),
    Note("a long observation is cut in the middle", "multi_turn.tool_response_truncate_side", "middle"),
    Refused("a long observation is cut in the middle", "multi_turn.tool_response_truncate_side"),
    Together("parallel_calls", "all calls of a turn are made", f"{ROLLOUT}.multi_turn.max_parallel_calls"),
    Note("calls are read in the format in which the chat template writes them", "multi_turn.format"),
    Note("an episode is only appended to, and its tokens are those of the chat template", "multi_turn.tokenization_sanity_check_mode, multi_turn.use_inference_chat_template, "
         "multi_turn.num_repeat_rollouts"),
    Together("tools", "its tools, in TRL's form: --environment FILE.py", f"{ROLLOUT}.multi_turn.tool_config_path, {ROLLOUT}.multi_turn.function_tool_path, data.tool_config_path, data.function_tool_path"),
    Refused("--environment FILE.py with a class Environment, whose step answers the policy (docs/rl.md#episodes)", "multi_turn.interaction_config_path, agent.agent_loop_config_path"),
    Together("agent_loop", "tool_agent with --environment FILE.py", "actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent, tool_agent"),
    Refused("--environment FILE.py with a class Environment (docs/rl.md#episodes)", "agent.default_agent_loop"),
    # the critic
    Same("critic_model", "critic.model.path"),
    Same("critic_learning_rate", "critic.optim.lr"),
    Same("value_clip", "critic.cliprange_value"),
    Together("critic_warmup", "times the updates of a batch: --freezing_steps", "trainer.critic_warmup"),
    Note("only the estimator gae has a critic", "critic.enable"),
    *(Together(f"critic.{name}", "it must have the value of the same setting of the actor: only --critic_learning_rate is the critic's own", f"critic.{name}") for name in CRITIC),
    Note("adapters are the policy's alone", "critic.model.lora_rank", "0"),
    Refused("the critic is trained as a whole; leave it out", "critic.model.lora_rank, critic.model.lora_adapter_path"),
    Note("the critic has no adapters", "critic.model.lora_alpha, critic.model.target_modules"),
    Note("the critic has the tokenizer of the policy", "critic.model.tokenizer_path, critic.model.hf_config_path, critic.model.custom_chat_template"),
    # how it is computed
    Sets("recompute layer", f"{MODEL}.enable_gradient_checkpointing", "true"),
    Note("--recompute applies to both models", "critic.model.enable_gradient_checkpointing"),
    Together("ulysses", "above 1: --ring_attn_size N --sp_mode ulysses", f"{ACTOR}.ulysses_sequence_parallel_size, {ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    Note("--ring_attn_size applies to all models", "ulysses_sequence_parallel_size"),
    Note(OFFLOAD, "param_offload, optimizer_offload, grad_offload, offload_policy, enable_activation_offload"),
    Note("sums, norms and losses are in float, weights in --dtype", "model_dtype, model.torch_dtype, mixed_precision, fsdp_config.dtype, fsdp.dtype"),
    Note("a setting of FSDP; --zero_stage selects the sharded arrays", "wrap_policy, reshard_after_forward, forward_prefetch, use_orig_params, fsdp_size, forward_only, "
         "use_no_sync_for_gradient_accumulation, turbo_config"),
    Note("all ranks run one implementation", f"{ACTOR}.strategy, {REF}.strategy, critic.strategy, fsdp_config.strategy, fsdp.strategy, model_engine"),
    Note("runs are always deterministic", "full_determinism"),
    Note(TORCH, "use_torch_compile, use_liger, use_fused_kernels, fused_kernel_options, tiled_mlp, use_prefix_grouper"),
    Note("the head computes the logits of a part of the tokens at a time", "entropy_from_logits_with_chunking, entropy_from_logits_chunk_size, entropy_checkpointing"),
    Refused("it is for heads that predict several tokens; leave it out", "mtp.enable"),
    Refused("weights are stored in f32 or bf16 (--dtype), and frozen weights also in 4 or 8 bits (--load_in); leave it out", "qat.enable"),
    Note(PART, "mtp, qat"),
    Note("each pass chooses its experts", "router_replay.mode", "disabled"),
    Refused("each pass chooses its experts; leave it out", "router_replay.mode"),
    Refused("each pass chooses its experts; leave it out", "enable_rollout_routing_replay"),
    Note(PART, "router_replay"),
    Note(PARALLEL, "megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size, megatron.expert_model_parallel_size, "
         "megatron.expert_tensor_parallel_size, megatron.context_parallel_size, megatron.sequence_parallel, megatron.use_distributed_optimizer"),
    Note(IMPLEMENTATION, "use_mbridge, vanilla_mbridge, use_dist_checkpointing, dist_checkpointing_path, _target_"),
    Refused("the settings of FSDP: this program computes a model in one way", "megatron, veomni, torchtitan, engine"),
    Note(SAMPLER, under(ROLLOUT, "name, mode, gpu_memory_utilization, enforce_eager, cudagraph_capture_sizes, free_cache_engine, tensor_model_parallel_size, data_parallel_size, "
                        "expert_parallel_size, pipeline_model_parallel_size, max_num_batched_tokens, max_model_len, max_num_seqs, enable_chunked_prefill, enable_prefix_caching, logprobs_mode, "
                        "scheduling_policy, load_format, layered_summon, disable_log_stats, multi_stage_wake_up, engine_kwargs, checkpoint_engine, skip_tokenizer_init, seed, agent, "
                        "disaggregation, router_config_path, moe_load_balance_metrics_interval, custom_async_server")),
    Note(LOG, f"{ROLLOUT}.trace, {ROLLOUT}.prometheus"),
    # ranks, checkpoints, evaluation, log
    Note(RANKS, f"trainer.nnodes, trainer.n_gpus_per_node, {ROLLOUT}.nnodes, {ROLLOUT}.n_gpus_per_node, rollout_n, hybrid_engine"),
    Note(RAY, "ray_kwargs, ray_init, transfer_queue, trainer.ray_wait_register_center_timeout, nccl_timeout, trainer.use_legacy_worker_impl, trainer.use_v1"),
    Note("sampling and training alternate", "trainer.v1.trainer_mode", "sync"),
    Refused("--async_steps 1 samples a batch while another is trained on", "trainer.v1.trainer_mode, async_training"),
    Note(PART, "trainer.v1"),
    Note("a GPU is used if there is one", "trainer.device", "cuda"),
    Refused("a CPU, or an NVIDIA GPU", "trainer.device"),
    Same("output_dir", "trainer.default_local_dir"),
    Together("save_freq", "batches, times the updates of one: --save_steps", "trainer.save_freq"),
    Together("test_freq", "batches, times the updates of one: --eval_steps", "trainer.test_freq"),
    Note("the task trains, and evaluates if --eval_data or --eval_fraction is given", "trainer.val_before_train"),
    Refused("the task eval, or generate", "trainer.val_only"),
    Sets("resume auto", "trainer.resume_mode", "auto"),
    Sets("resume never", "trainer.resume_mode", "disable"),
    Note("resume_from_path names the checkpoint", "trainer.resume_mode", "resume_path"),
    Same("resume", "trainer.resume_from_path"),
    Same("max_num", "trainer.max_actor_ckpt_to_keep"),
    Note("the critic is saved with every model, in the directory critic", "trainer.max_critic_ckpt_to_keep"),
    Note("every checkpoint contains the model as a Hugging Face directory", "checkpoint.save_contents, checkpoint.load_contents, checkpoint.async_save, checkpoint.strict, checkpoint.mbridge_config"),
    Note("checkpoints are written to output_dir/step_N", "trainer.del_local_ckpt_after_load, trainer.esi_redundant_time, trainer.checkpoint_callback_class"),
    Note("no model is uploaded; after the run: hf upload OWNER/NAME OUTPUT_DIR", "trainer.default_hdfs_dir"),
    Together("project", "--report_to wandb:PROJECT reports metrics to that project; without default_local_dir a part of --output_dir", "trainer.project_name"),
    Same("run_name", "trainer.experiment_name"),
    Note(LOG, "trainer.logger, trainer.log_val_generations, trainer.validation_data_dir"),
    Together("rollout_dir", "--save_rollouts true, which writes to output_dir/rollouts", "trainer.rollout_data_dir"),
    Note("--profile measures the time of each op", "global_profiler, profiler"),
    Refused("distill (docs/distillation.md) for a loss over whole distributions, or grpo with --teacher_model, which rewards sampled tokens", "distillation.enabled"),
    Note(PART, "distillation"),
    Note("Hydra's own settings", "hydra, defaults"),
]


def defaults(task):
    if task not in RL:
        return {}
    return {f"{ACTOR}.optim.lr": "1e-6", f"{ACTOR}.optim.weight_decay": "0.01", f"{ACTOR}.optim.betas": "0.9,0.999", "data.max_prompt_length": "512",
            "data.max_response_length": "512", f"{ACTOR}.clip_ratio_c": "3", f"{ACTOR}.loss_agg_mode": "token-mean", "trainer.total_epochs": "30", "critic.optim.lr": "1e-5",
            "trainer.resume_mode": "auto"}


def task_of(given, task):
    """Returns the task: only the estimator gae, the default, has a critic."""
    estimator = given.get("algorithm.adv_estimator")
    if not estimator:
        return task or "ppo", "algorithm.adv_estimator, by default gae,"
    return ("ppo" if estimator.value == "gae" else "grpo"), f"{estimator.where} {estimator.value}"


def complete(t):
    if t.whole and t.task not in RL:
        return
    is_true = lambda key, otherwise: t.get(key, otherwise).lower() == "true"  # noqa: E731
    estimate(t, is_true)
    diverge(t, is_true)
    loss = clip(t)
    judge(t, is_true)
    batches(t)
    correct(t)
    critic(t)
    if number(t, "lora_r", 0) > 0:
        t.lora(None, "16", None, "all-linear", steady=())
    else:
        for key in ("lora_r", "lora_alpha", "lora_targets"):
            if t.has(key):
                t.note(t.together[key].where, "without lora_rank above 0 all weights are trained, as in verl")
    if number(t, "ulysses", 1) > 1:
        t.set("ring_attn_size", t.get("ulysses"), t.together["ulysses"].where)
        t.set("sp_mode", "ulysses", t.together["ulysses"].where)
    elif t.has("ulysses"):
        t.note(t.together["ulysses"].where, "1, as here")
    if is_true("filters", "false"):
        t.set("dynamic_filtering", "0,1", t.together["filters"].where)
        t.note(t.together["filters"].where, "the mean reward of a kept prompt's answers is strictly between 0 and 1: for other rewards --dynamic_filtering LOW,HIGH")
    if t.get("loss_scale") not in (None, t.flag("max_new_tokens")):
        t.refuse(f'{t.together["loss_scale"].where} "{t.get("loss_scale")}" is not supported\n  fix: leave it out: --loss_aggregation constant divides by max_response_length')
    elif t.has("loss_scale"):
        t.note(t.together["loss_scale"].where, "it is max_response_length, as here")
    if t.task == "ppo" and t.flag("loss_aggregation", "token_mean") != "token_mean":
        t.note(t.flags["loss_aggregation"].where, "the critic's loss is the mean over tokens; verl's critic has the actor's loss_agg_mode by default")
    if loss == "gspo" and t.flag("loss_aggregation") != "sequence_mean":
        t.set("loss_aggregation", "sequence_mean", f"{ACTOR}.loss_agg_mode (gspo's)", by_default="loss_aggregation" not in t.given)
        t.note("", "gspo averages over the tokens of each answer, whatever loss_agg_mode is, as in verl")
    turns(t, is_true)
    if t.has("rollout_dir"):
        t.set("save_rollouts", "true", t.together["rollout_dir"].where)
    long_prompts(t, is_true)
    if t.whole:
        if "output_dir" not in t.flags:
            name = next((s.value for s in t.settings if s.name == "trainer.experiment_name"), "gsm8k")
            t.set("output_dir", f"checkpoints/{t.get('project', 'verl_examples')}/{name}", "trainer.default_local_dir (verl's default)", by_default=True)
        if "row_tokens" not in t.given:
            t.set("row_tokens", str(t.number("max_len", 512) + t.number("max_new_tokens", 512)), "max_prompt_length and max_response_length", by_default=True)
    if t.has("project"):
        t.note(t.together["project"].where, f"--report_to wandb:{t.get('project')} reports metrics to that project")


def estimate(t, is_true):
    """Sets the estimator, gamma and lambda."""
    name = t.get("estimator", "gae")
    flag = "dr_grpo" if name.startswith("grpo") and not is_true("divides", "true") else ESTIMATORS.get(name)
    if t.has("estimator") and flag:
        t.set("advantage_estimator", flag, t.together["estimator"].where)
    elif t.has("estimator"):
        t.note(t.together["estimator"].where, "the task ppo has a critic")
    if t.has("divides") and flag != "dr_grpo":
        t.note(t.together["divides"].where, "true, as here" if is_true("divides", "true") else "only grpo divides by a standard deviation of the group")
    for key, flag, whose in (("gamma", "gamma", ("gae", "reinforce_plus_plus")), ("lambda", "gae_lambda", ("gae",))):
        if t.has(key) and name in whose:
            t.set(flag, t.get(key), t.together[key].where)
        elif t.has(key):
            t.note(t.together[key].where, f"the estimator {name} has none")


def diverge(t, is_true):
    """Sets the divergence from the reference, in the loss or in the reward; verl's two can also be both."""
    in_loss, in_reward = is_true("kl_in_loss", "false"), is_true("kl_in_reward", "false")
    if in_loss and in_reward:
        return t.refuse(f"{t.together['kl_in_loss'].where} with {t.together['kl_in_reward'].where} is not supported\n  fix: one of them: the divergence is in the loss, or in the reward")
    part, switch = ("loss", "kl_in_loss") if in_loss else ("reward", "kl_in_reward")
    for other in ("loss", "reward"):
        for key in (f"{other}_kl_coef", f"{other}_kl_type"):
            if t.has(key) and not (other == part and (in_loss or in_reward)):
                t.note(t.together[key].where, f"without {'use_kl_loss' if other == 'loss' else 'use_kl_in_reward'} it has no effect, as in verl")
    for key, on in (("kl_in_loss", in_loss), ("kl_in_reward", in_reward)):
        if t.has(key) and not on:
            t.note(t.together[key].where, "false, as here")
    adapts = in_reward and t.get("kl_control") == "adaptive"
    for key in ("kl_control", "kl_target", "kl_horizon"):
        if t.has(key) and not adapts:
            t.note(t.together[key].where, "the coefficient is fixed")
    if not (in_loss or in_reward):
        return
    where = t.together[switch].where
    coefficient, kind = t.get(f"{part}_kl_coef", "0.001"), t.get(f"{part}_kl_type", "low_var_kl" if in_loss else "kl")
    if number(t, f"{part}_kl_coef", 0.001) == 0 and not adapts:
        return t.note(where, "its coefficient is 0, so there is no reference")
    t.set("kl_coef", coefficient, t.together[f"{part}_kl_coef"].where if t.has(f"{part}_kl_coef") else where)
    t.set("kl_estimator", KL[kind], t.together[f"{part}_kl_type"].where if t.has(f"{part}_kl_type") else where)
    t.set("kl_use_loss", "true" if in_loss else "false", where)
    if adapts:
        t.set("kl_target", [t.get("kl_target", "0.1"), t.get("kl_horizon", "10000")], t.together["kl_control"].where)


def clip(t):
    """Sets the objective of the policy and its bounds. Returns verl's name of the objective."""
    loss = t.get("loss_mode", "vanilla")
    if t.has("loss_mode"):
        t.set("policy_loss_type", {"vanilla": "ppo"}.get(loss, loss), t.together["loss_mode"].where)
    if loss != "vanilla" and "dual_clip" in t.flags:
        where, given = t.flags.pop("dual_clip").where, "dual_clip" in t.given
        t.by_default.discard("dual_clip")
        if given:
            t.note(where, f"{loss} has no such bound, as in verl")
    whole = t.get("clip", "0.2")
    low, high = (whole if t.get(key, "0.2") == "null" else t.get(key, "0.2") for key in ("clip_low", "clip_high"))
    if t.has("clip") and (low, high) != (whole, whole):
        t.note(t.together["clip"].where, "clip_ratio_low and clip_ratio_high, which are 0.2 by default, take precedence, as in verl")
    wheres = [t.together[key].where for key in ("clip_low", "clip_high", "clip") if t.has(key)]
    if loss == "cispo" and number(t, "clip_low", low) < 1:
        t.refuse(f"cispo with a clip_ratio_low of {low} is not supported\n  fix: clip_ratio_low=1 or more: cispo bounds the ratio only from above")
    elif loss == "cispo":
        t.set("eps_clip", ["0", f"{1 + number(t, 'clip_high', high):g}"], ", ".join(wheres))
    elif wheres:
        t.set("eps_clip", [low] if low == high else [low, high], ", ".join(wheres))
    return loss


def judge(t, is_true):
    """Sets the rewards."""
    if is_true("has_reward_model", "false") and t.has("reward_model"):
        t.set("reward", t.get("reward_model"), f"{t.together['reward_model'].where}, {t.together['has_reward_model'].where}")
    else:
        for key in ("has_reward_model", "reward_model"):
            if t.has(key):
                t.note(t.together[key].where, "without reward_model.enable and a path there is no reward model, as in verl")
    if t.whole and not {"reward", "environment", "rollouts"} & t.given:
        t.refuse("the command names no reward: verl chooses a function by the field data_source of each record, and has its own for some data sets\n"
                 "  fix: --reward FILE.py with compute_score(data_source, solution_str, ground_truth, extra_info), as verl's files have it, or --reward exact_match")
    if is_true("overlong", "false"):
        if t.get("max_resp_len") not in (None, t.flag("max_new_tokens")):
            t.refuse(f'{t.together["max_resp_len"].where} "{t.get("max_resp_len")}" is not supported\n  fix: the value of data.max_response_length')
        t.set("overlong_buffer", [t.get("overlong_len", "0"), t.get("overlong_factor", "1")],
              ", ".join(t.together[key].where for key in ("overlong", "overlong_len", "overlong_factor", "max_resp_len") if t.has(key)))
    else:
        for key in ("overlong", "overlong_len", "overlong_factor", "max_resp_len"):
            if t.has(key):
                t.note(t.together[key].where, "without an enabled overlong buffer it has no effect, as in verl")


def batches(t):
    """Sets what verl counts in prompts or in batches, and this program in answers or in updates."""
    prompts, n, mini = t.number("rollout_batch_size", 1024), t.number("n", 1), t.count("mini_batch", 256)
    updates = t.number("max_epochs", 1) * -(-prompts // mini)
    if t.whole or t.has("mini_batch"):
        t.set("train_batch_size", str(mini * n), t.together["mini_batch"].where if t.has("mini_batch") else "ppo_mini_batch_size (verl's default)", by_default=not t.has("mini_batch"))
        t.note("", f"an update: {mini} prompts * {n} answers = --train_batch_size {mini * n}")
    counts = {"total_steps": "max_steps", "save_freq": "save_steps", "test_freq": "eval_steps", "critic_warmup": "freezing_steps"}
    for key, flag in counts.items():
        if not t.has(key):
            continue
        where, count = t.together[key].where, int(number(t, key, 0))
        if count <= 0:
            t.note(where, "the default")
        elif t.task not in t.own["flags"][flag]["tasks"]:
            t.note(where, "only the estimator gae has a critic")
        elif key == "test_freq" and not t.has("val_files"):
            t.note(where, "without data.val_files there is nothing to evaluate on")
        else:
            t.set(flag, str(count * updates), where)
            if updates > 1:
                t.note(where, f"a batch has {updates} updates: --{flag} {count * updates}")
    if t.has("val_files"):
        setting = t.together["val_files"]
        if number(t, "test_freq", -1) > 0:
            t.set("eval_data", ",".join(setting.values), setting.where)
        else:
            t.note(setting.where, "without a trainer.test_freq above 0 nothing is evaluated during training")
    schedule(t, updates)


def schedule(t, updates):
    is_cosine, steps, share = t.get("scheduler", "constant") == "cosine", int(number(t, "warmup_steps", -1)), number(t, "warmup_ratio", 0)
    warms = steps > 0 or (steps < 0 and share > 0)
    where = next((t.together[key].where for key in ("scheduler", "warmup_steps", "warmup_ratio") if t.has(key)), "lr_scheduler_type (verl's default)")
    if t.whole or t.has("scheduler"):
        t.set("lr_scheduler", "cosine_with_min_lr" if is_cosine else "constant_with_warmup" if warms else "constant", where, by_default=where.endswith("default)"))
    if warms:
        key = "warmup_steps" if steps > 0 else "warmup_ratio"
        t.set("lr_warmup", str(steps * updates) if steps > 0 else t.get("warmup_ratio"), t.together[key].where)
    elif is_cosine:
        t.set("lr_warmup", "0", where, by_default=True)
    if is_cosine:
        t.set("min_lr_ratio", t.get("min_lr_ratio", "0"), t.together["min_lr_ratio"].where if t.has("min_lr_ratio") else where, by_default=not t.has("min_lr_ratio"))
    for key, used in (("warmup_steps", steps > 0), ("warmup_ratio", warms and steps <= 0), ("min_lr_ratio", is_cosine)):
        if t.has(key) and not used:
            t.note(t.together[key].where, "only a cosine has a smallest rate" if key == "min_lr_ratio" else "no warm-up" if not warms else "lr_warmup_steps takes precedence, as in verl")


def correct(t):
    """Sets --is_correction from rollout_is and its threshold, or from the older tis_imp_ratio_cap."""
    if t.has("correction"):
        limits = t.get("correction_range", "2.0").split("_")
        t.set("is_correction", "tis,0," + limits[0] if len(limits) == 1 else "icepop," + ",".join(limits), t.together["correction"].where)
    elif t.has("correction_range"):
        t.note(t.together["correction_range"].where, "without rollout_is it has no effect, as in verl")
    if t.has("tis_cap"):
        if number(t, "tis_cap", 0) > 0:
            t.set("is_correction", f"tis,0,{t.get('tis_cap')}", t.together["tis_cap"].where)
        else:
            t.note(t.together["tis_cap"].where, "no correction")


def critic(t):
    """Compares the critic's settings with the actor's, which both models have here."""
    given = {s.name: s for s in t.settings}
    for name, default in CRITIC.items():
        own, actor = given.get(f"critic.{name}"), given.get(f"{ACTOR}.{name}")
        if t.task != "ppo":
            if own:
                t.note(own.where, "only the estimator gae has a critic")
        elif own and (actor is None and default is None or equal(own.value, actor.value if actor else default)):
            t.note(own.where, "the critic has the actor's value")
        elif own:
            t.refuse(f"{own.where} is {own.value}, which the critic alone cannot have\n  fix: give the actor the same value, or leave it out")
        elif actor and default and not equal(actor.value, default):
            t.note(actor.where, f"the critic has it as well; without critic.{name} verl's critic has the default")
    for flag in [flag for flag in t.flags if t.task == "grpo" and t.own["flags"][flag]["tasks"] == ["ppo"]]:
        t.note(t.flags.pop(flag).where, "only the estimator gae has a critic")


def number(t, key, otherwise):
    try:
        return float(otherwise if t.get(key, "null") == "null" else t.get(key))
    except ValueError:
        raise PortError(f'{t.together[key].where} "{t.get(key)}" is not a number\n  fix: give a number, such as 1') from None


def equal(text, other):
    try:
        return [float(part) for part in text.split(",")] == [float(part) for part in other.split(",")]
    except ValueError:
        return text == other


def turns(t, is_true):
    """Sets the limits of episodes, which need --environment."""
    plays = "environment" in t.flags
    asks = [key for key, on in (("tools", t.has("tools")), ("multi_turn", is_true("multi_turn", "false")), ("agent_loop", t.get("agent_loop") == "tool_agent")) if on]
    if asks and not plays:
        return t.refuse(f"{', '.join(t.together[key].where for key in asks)}: the tools are not here\n  fix: {TOOLS}")
    if plays and t.has("turns"):
        t.set("max_turns", t.get("turns"), t.together["turns"].where)
    elif plays and t.has("user_turns"):
        t.set("max_turns", str(t.count("user_turns", 1) + 1), t.together["user_turns"].where)
    if plays and t.has("tool_response"):
        t.set("max_observation", t.get("tool_response"), t.together["tool_response"].where)
        t.note(t.together["tool_response"].where, "--max_observation counts tokens; in verl the length is in characters")
    for key in ("tools", "multi_turn", "agent_loop", "turns", "user_turns", "tool_response", "parallel_calls"):
        if t.has(key) and not plays:
            t.note(t.together[key].where, "an answer has one turn without --environment")
        elif key == "parallel_calls" and t.has(key):
            t.note(t.together[key].where, "all calls of a turn are made")
        elif t.has(key) and key in ("tools", "multi_turn", "agent_loop"):
            t.note(t.together[key].where, "--environment has the tools, and plays episodes of several turns")


def long_prompts(t, is_true):
    filters, cut = is_true("filters_long", "false"), t.get("truncation", "error")
    if t.has("filters_long"):
        t.note(t.together["filters_long"].where, "prompts longer than max_prompt_length are dropped and counted")
    if not t.has("truncation"):
        return
    if cut == "error" or filters:
        t.note(t.together["truncation"].where, "no prompt is cut: longer ones are dropped and counted")
    else:
        t.refuse(f'{t.together["truncation"].where} "{cut}" is not supported\n  fix: data.filter_overlong_prompts=True, which drops longer prompts, as this program does')


VERL = Peer("verl", "0.9", ROWS, defaults, task_of, complete)
