"""OpenRLHF 0.11.2, and names of 0.6 and 0.9."""

from .table import Note, Part, Peer, Refused, Same, Sets, Together
from .translate import RL, same_values
from .trl import PART, complete_kto, learns_unpaired

CORRECTIONS = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}
CRITIC = {"critic.adam.betas": "adam_betas", "critic.adam.eps": "adam_eps", "critic.adam.weight_decay": "weight_decay", "critic.lr_scheduler": "lr_scheduler",
          "critic.lr_warmup_ratio": "lr_warmup", "critic.min_lr_ratio": "min_lr_ratio", "critic.max_norm": "max_norm", "critic.optim": "optimizer"}

ROWS = [
    # names of the same thing
    Same("model", "actor.model_name_or_path, model_name_or_path, model.model_name_or_path, pretrain"),
    Same("data", "data.dataset, dataset, data.prompt_dataset, prompt_data"),
    Same("output_dir", "ckpt.output_dir, save_path"),
    Same("input_key", "data.input_key"),
    Same("output_key", "data.output_key"),
    Same("input_template", "data.input_template"),
    Same("apply_chat_template", "data.apply_chat_template"),
    Same("multiturn", "data.multiturn"),
    Same("tokenizer_chat_template", "data.tokenizer_chat_template"),
    Same("prompt_key", "data.prompt_key"),
    Same("chosen_key", "data.chosen_key"),
    Same("rejected_key", "data.rejected_key"),
    Same("dataset_probs", "data.dataset_probs"),
    Same("train_batch_size", "train.batch_size"),
    Same("max_len", "data.max_len"),
    Same("max_epochs", "train.max_epochs"),
    Same("max_samples", "data.max_samples"),
    Same("seed", "train.seed"),
    Same("learning_rate", "adam.lr, actor.adam.lr, actor_learning_rate"),
    Same("lr_scheduler", "actor.lr_scheduler"),
    Refused("--lr_warmup N, in steps", "lr_warmup_ratio", "1, 1.0"),
    Same("lr_warmup", "actor.lr_warmup_ratio, lr_warmup_ratio"),
    Same("min_lr_ratio", "actor.min_lr_ratio"),
    Same("adam_betas", "adam.betas, actor.adam.betas"),
    Same("adam_eps", "adam.eps, actor.adam.eps"),
    Same("weight_decay", "adam.weight_decay, l2, actor.adam.weight_decay"),
    Same("max_norm", "actor.max_norm"),
    Same("lora_rank", "ds.lora.rank, lora.rank"),
    Same("lora_alpha", "ds.lora.alpha, lora.alpha"),
    Same("lora_dropout", "ds.lora.dropout, lora.dropout"),
    Same("lora_targets", "ds.lora.target_modules, lora.target_modules, target_modules"),
    Same("loss_type", "model.loss_type, loss"),
    Same("beta", "model.beta"),
    Same("label_smoothing", "model.label_smoothing"),
    Same("desirable_weight", "desirable_loss_weight"),
    Same("undesirable_weight", "undesirable_loss_weight"),
    Same("nll_loss_coef", "model.nll_loss_coef"),
    Same("router_aux_loss_coef", "model.aux_loss_coef, actor.aux_loss_coef, aux_loss_coef"),
    Same("ref_model", "ref.model_name_or_path, ref_pretrain"),
    Same("margin_loss_enable", "model.margin_loss_enable, margin_loss"),
    Same("reward", "reward.remote_url, reward.model_name_or_path, remote_rm_url, reward_pretrain"),
    Same("normalize_reward", "reward.normalize_enable"),
    Part("overlong_buffer 0", "reward.overlong_buffer_len, overlong_buffer_len"),
    Part("overlong_buffer 1", "reward.overlong_penalty_factor, overlong_penalty_factor"),
    Same("stop_properly_coef", "reward.stop_properly_penalty_coef, stop_properly_penalty_coef"),
    Together("filters", "with dynamic_filtering_range, which is 0,1 by default: --dynamic_filtering LOW,HIGH", "algo.dynamic_filtering_enable, dynamic_filtering"),
    Together("filter_range", "where dynamic_filtering_enable is given: --dynamic_filtering LOW,HIGH",
      "algo.dynamic_filtering_range, dynamic_filtering_reward_range"),
    Same("rollout_batch_size", "rollout.batch_size"),
    Same("num_episodes", "train.num_episodes"),
    Note("the task ppo has a critic", "algo.advantage.estimator, advantage_estimator", "gae"),
    Refused("reinforce with --no_std_norm subtracts the mean over the tokens of the batch, or dr_grpo the mean of the answers to each prompt",
      "algo.advantage.estimator, advantage_estimator", "flash_reinforce"),
    Same("advantage_estimator", "algo.advantage.estimator"),
    Same("gamma", "algo.advantage.gamma"),
    Same("no_std_norm", "algo.advantage.no_std_norm, no_advantage_std_norm"),
    Same("reward_clip_range", "reward.clip_range"),
    Same("kl_coef", "algo.kl.init_coef, init_kl_coef"),
    Same("kl_use_loss", "algo.kl.use_loss, use_kl_loss"),
    Part("kl_target 0", "algo.kl.target"),
    Part("kl_target 1", "algo.kl.horizon, kl_horizon"),
    Same("kl_estimator", "algo.kl.estimator"),
    Note("the divergence in the loss is differentiated as it stands", "algo.kl.unbiased_gradient", "false"),
    Refused("the divergence in the loss is differentiated as it stands, with --kl_estimator k2 or k3; leave it out", "algo.kl.unbiased_gradient"),
    Same("policy_loss_type", "actor.policy_loss_type"),
    Sets("loss_aggregation token_mean", "actor.loss_agg_mode", "token-mean"),
    Sets("loss_aggregation sequence_mean", "actor.loss_agg_mode", "seq-mean-token-mean"),
    Refused("token-mean or seq-mean-token-mean: --loss_aggregation token_mean, sequence_mean or constant", "actor.loss_agg_mode"),
    Same("eps_clip", "actor.eps_clip, actor.eps_clip_low_high, eps_clip_low_high"),
    Same("dual_clip", "actor.dual_clip"),
    Same("entropy_coef", "actor.entropy_coef"),
    Same("critic_model", "critic.model_name_or_path, critic_pretrain"),
    Same("critic_learning_rate", "critic.adam.lr"),
    Same("gae_lambda", "algo.advantage.lambd, lambd"),
    Same("value_clip", "critic.value_clip"),
    Same("freezing_steps", "critic.freezing_steps"),
    Same("ring_attn_size", "ds.ring_attn_size"),
    Same("ring_attn_head_stride", "ds.ring_attn_head_stride, ring_head_stride"),
    Same("zero_stage", "ds.zero_stage"),
    Same("save_steps", "ckpt.save_steps"),
    Same("max_num", "ckpt.max_num, max_ckpt_num"),
    Same("eval_data", "eval.dataset, eval_dataset"),
    Same("eval_steps", "eval.steps"),
    Same("logging_steps", "logger.logging_steps"),
    Same("n", "rollout.n_samples_per_prompt, n_samples_per_prompt"),
    Same("max_new_tokens", "rollout.max_new_tokens"),
    Same("temperature", "rollout.temperature"),
    # model and data
    Note("data sets are read from their train split", "dataset_split, train_split, data.prompt_split, prompt_split", "train"),
    Together("split", "the split, in brackets: --data OWNER/NAME[SPLIT]", "data.dataset_split, dataset_split, train_split, data.prompt_split, prompt_split"),
    Note("data sets are read from their train split", "eval.split, eval_split", "train"),
    Together("eval_split", "the split, in brackets: --eval_data OWNER/NAME[SPLIT]", "eval.split, eval_split"),
    Note("data/prepare.py tokenises samples once and caches them", "disable_fast_tokenizer"),
    Refused("a local directory, or a name on the Hugging Face hub: ModelScope is not supported", "use_ms"),
    # training steps
    Together("micro_batch_size", "N becomes --row_tokens N * max_len, for pairs 2 N * max_len",
      "micro_batch_size, train.micro_batch_size, micro_train_batch_size"),
    Note("samples are always packed into rows of --row_tokens tokens, and never attend to each other", "packing_samples, use_dynamic_batch, dynamic_batch_enable"),
    # optimizer
    Sets("optimizer adamw", "optim, actor.optim", "adam"),
    Same("optimizer", "optim, actor.optim"),
    Note("Muon's momentum has this value", "muon.momentum", "0.95, .95"),
    Note("Muon has this number of iterations", "muon.ns_steps", "5"),
    Note("Muon uses Nesterov momentum", "muon.nesterov", "true"),
    Together("muon_lr", "refused with --optim muon, and without effect otherwise", "muon.lr, actor.muon.lr, critic.muon.lr"),
    Refused("Muon has a Nesterov momentum of 0.95 and 5 iterations; leave it out",
      "muon.momentum, muon.ns_steps, muon.nesterov, muon.no_nesterov"),
    Note("experts have one implementation", "experts_implementation"),
    # preferences and reward models
    Sets("loss_type ipo_sum", "model.ipo_enable, ipo_enable, ipo", "true"),
    Note("with --ref_mode precompute the reference is not in memory during training", "ref.offload, ref_offload"),
    Note("rewards and losses are always computed in float or double", "compute_fp32_loss_enable, compute_fp32_loss"),
    Note("rewards and losses are always computed in float or double", "cast_lm_head_to_fp32"),
    Note("the head of a reward model is score.weight", "value_head_prefix", "score"),
    Note("the head of a reward model is score.weight", "value_prefix_head", "score"),
    Refused("the head of a reward model is score.weight; leave it out", "value_head_prefix"),
    Refused("the head of a reward model is score.weight; leave it out", "value_prefix_head"),
    # reinforcement learning
    Note("answers are sampled from all tokens", "top_p, rollout.top_p", "1, 1.0"),
    Refused("answers are sampled from the trained distribution, all tokens at --temperature; this flag is for generate and --sample_every",
      "top_p, rollout.top_p"),
    Same("output_key", "data.label_key, label_key"),
    Same("dataset_probs", "data.prompt_probs, prompt_data_probs"),
    Note("rows are filled up to --row_tokens tokens, and --max_sequences prompts are answered at a time",
      "rollout.micro_batch_size, micro_rollout_batch_size, rollout.max_tokens_per_gpu, train.max_tokens_per_gpu, train_max_tokens_per_gpu, "
      "rollout_max_tokens_per_gpu, max_tokens_per_gpu, rollout.vllm_generate_batch_size, vllm_generate_batch_size"),
    Note("evaluation answers each prompt once, greedily", "eval.temperature, eval_temperature, eval.n_samples_per_prompt, eval_n_samples_per_prompt"),
    Note("answers are corrected only if a level is given", "algo.advantage.is_correction_level", "off"),
    Together("correction_level", "with is_correction_mode: token and clip are --is_correction tis, token and mask icepop, seq and mask seq-mask-tis", "algo.advantage.is_correction_level"),
    Together("correction_mode", "see is_correction_level", "algo.advantage.is_correction_mode"),
    Note("the weight is the ratio of probabilities", "algo.advantage.is_correction_gating", "ratio"),
    Refused("ratio: the weight is the ratio of probabilities", "algo.advantage.is_correction_gating"),
    Together("corrects", "with is_correction_type, which is tis by default: --is_correction TYPE",
      "algo.advantage.is_correction_enable, enable_vllm_is_correction, vllm_enable_is_correction"),
    Together("correction", "where is_correction_enable is given: --is_correction TYPE", "algo.advantage.is_correction_type, vllm_is_correction_type"),
    Together("correction_range", "where is_correction_enable or is_correction_level is given: --is_correction TYPE,LOW,HIGH",
      "algo.advantage.is_correction_threshold, vllm_is_truncated_threshold"),
    Note("every rank has a part of all models, and --ranks or mpirun sets the number of ranks",
      "num_nodes, num_gpus_per_node, actor_num_nodes, actor_num_gpus_per_node, ref_num_nodes, ref_num_gpus_per_node, reward_num_nodes, "
      "reward_num_gpus_per_node, critic_num_nodes, critic_num_gpus_per_node, colocate_all, colocate_all_models, colocate_actor_ref, "
      "colocate_critic_reward, enable_sleep, ds.enable_sleep, deepspeed_enable_sleep, vllm_enable_sleep, vllm_num_engines, "
      "vllm_sync_backend, vllm_sync_with_ray"),
    Sets("async_steps 1", "train.async_enable, async_enable, async_train", "true"),
    Note("with --async_steps 1 the program samples one batch of answers while it trains on another", "train.async_queue_size, async_queue_size", "1"),
    Refused("with --async_steps 1 the program samples one batch of answers while it trains on another", "train.async_queue_size, async_queue_size"),
    Refused("all tokens of a batch of answers are sampled from the same weights; leave it out",
      "train.partial_rollout_enable, partial_rollout_enable, partial_rollout"),
    Note("a reward model stays in memory; --plan includes it", "reward.offload, ref_reward_offload"),
    Refused("there is no moving average of the weights; leave it out", "train.enable_ema, enable_ema"),
    Note(PART, "train.ema_beta, ema_beta, ptx_coef"),
    Note("output_dir/best contains the model with the best evaluation, for a policy the one with the highest reward",
      "ckpt.best_metric_key, best_metric_key"),
    Same("environment", "train.agent_func_path, agent_func_path"),
    *(Together(name, "it must have the value of the same setting of the actor: only --critic_learning_rate is the critic's own", name) for name in CRITIC),
    Note("the critic is saved with every model, in the directory critic", "critic.save_value_network, save_value_network"),
    Note("--recompute applies to both models", "critic.gradient_checkpointing_enable"),
    # LoRA and quantisation
    Sets("load_in 4bit", "load_in_4bit, ds.load_in_4bit"),
    # how it is computed
    Sets("recompute layer", "actor.gradient_checkpointing_enable, model.gradient_checkpointing_enable, gradient_checkpointing_enable", "true"),
    Note("--recompute selects the recomputed activations", "gradient_checkpointing_reentrant, gradient_checkpointing_use_reentrant"),
    Note("--recompute selects the recomputed activations", "recompute_layer_types"),
    Sets("dtype bf16", "ds.param_dtype, param_dtype", "bf16"),
    Refused("--dtype bf16 or f32: there is no fp16", "param_dtype"),
    Sets("grad_dtype bf16", "ds.grad_accum_dtype, grad_accum_dtype", "bf16"),
    Note("gradients of parameters are stored in float, or with --grad_dtype bf16 in bf16", "grad_accum_dtype"),
    Note("this program has its own attention: exact, blocked, on packed rows", "attn_implementation, flash_attn"),
    Note("a setting of PyTorch without a counterpart here", "zpg, overlap_comm, deepcompile"),
    Note("a setting of PyTorch without a counterpart here",
      "disable_trace_cache, liger_rope, liger_rms_norm, liger_glu_activation, liger_layer_norm, liger_fused_linear_cross_entropy, "
      "cut_cross_entropy"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits", "adam_offload"),
    Note("runs are always deterministic", "full_determinism_enable"),
    Refused("this program trains only text models", "image_key, max_images_per_prompt, freeze_visual_encoder"),
    # ranks
    Same("tensor_parallel", "ds.tensor_parallel_size, tensor_parallel_size, ds_tensor_parallel_size"),
    # checkpoints, evaluation, log
    Sets("resume auto", "ckpt.load_enable, load_enable, load_checkpoint", "true"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
      "tensorboard_dir, use_tensorboard, use_wandb, wandb_org, wandb_group"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
      "wandb.key, wandb.org, wandb.group"),
    Same("run_name", "logger.wandb.run_name, wandb.run_name, wandb_run_name"),
    Note("--report_to wandb:PROJECT reports metrics to that project during training", "logger.wandb.project, wandb.project, wandb_project"),
    Note("checkpoints are written to output_dir/step_N", "ckpt.path, ckpt_path"),
    Note("--max_num limits the checkpoints kept", "max_mem, max_ckpt_mem"),
    Note("every checkpoint contains the model as a Hugging Face directory", "save_hf, save_hf_ckpt"),
    Note("every checkpoint also contains the optimizer; --save_steps -1 writes none", "disable_ds, disable_ds_ckpt"),
    Note("every checkpoint can be resumed by any number of ranks", "use_universal_ckpt, use_ds_universal_ckpt"),
    Together("pretrain_mode", "the task pretrain, which trains on all tokens", "model.pretrain_mode_enable, pretrain_mode_enable, pretrain_mode"),
    # older names
    Same("learning_rate", "lr"),
    Same("output_dir", "out"),
    Same("train_batch_size", "batch_size"),
    Together("prompt_max_len", "--max_len, and with generate_max_len --row_tokens", "prompt_max_len"),
    Together("generate_max_len", "--max_new_tokens, and with prompt_max_len --row_tokens", "generate_max_len"),
    Same("freezing_steps", "freezing_actor_steps"),
    Same("entropy_coef", "entropy_loss_coef"),
    Note("this program samples answers itself, from the weights in training",
      "vllm.enable_prefix_caching, enable_prefix_caching, vllm.enforce_eager, enforce_eager, vllm.gpu_memory_utilization, vllm_gpu_memory_utilization, "
      "vllm.tensor_parallel_size, vllm_tensor_parallel_size, vllm.num_engines, vllm.sync_backend, vllm.sync_with_ray"),
    Note("a setting of PyTorch without a counterpart here", "torch_compile, use_liger_kernel, actor_init_on_gpu, perf"),
    Note("data/prepare.py tokenises samples once and caches them", "dataloader_num_workers"),
    Note("runs are always deterministic", "full_determinism"),
    Note("MPI tells each rank its number", "local_rank"),
    Refused("no pretraining loss is added to the loss of rewards; leave it out", "pretrain_data, pretrain_data_probs, pretrain_split"),
    Sets("recompute layer", "gradient_checkpointing", "true"),
    Sets("dtype bf16", "bf16", "true"),
]


def defaults(task):
    if task in ("sft", "pretrain"):
        return {"train.max_epochs": "2", "adam.lr": "5e-6", "model.aux_loss_coef": "0"}
    if task in ("dpo", "rm"):
        return {"adam.lr": "1e-5" if task == "dpo" else "9e-6", "model.aux_loss_coef": "0"}
    if task not in RL:
        return {}
    return {"adam.lr": "1e-6", "rollout.n_samples_per_prompt": "1", "algo.kl.init_coef": "0.01", "algo.kl.estimator": "k1", "reward.clip_range": "-10,10", "actor.aux_loss_coef": "0"}


def task_of(given, task):
    """Returns the task: pretraining is a mode of train_sft, and the estimator decides whether train_ppo_ray has a critic."""
    for name in ("model.pretrain_mode_enable", "pretrain_mode_enable", "pretrain_mode"):
        if name in given and given[name].value.lower() == "true":
            return "pretrain", given[name].where
    estimator = given.get("algo.advantage.estimator") or given.get("advantage_estimator")
    return estimator and ("ppo" if estimator.value == "gae" else "grpo", f"{estimator.where} {estimator.value}")


def complete(t):
    if learns_unpaired(t):  # of train_kto, which OpenRLHF removed in 2026
        t.set("beta", "0.01", "beta (OpenRLHF's default)", by_default=True)
        t.set("max_len", "2048", "max_len (OpenRLHF's default)", by_default=True)
        complete_kto(t)
    learns_pairs = t.task in ("dpo", "rm") and not learns_unpaired(t)
    pairs, length = 2 if learns_pairs else 1, t.number("max_len", 512 if learns_pairs else 2048)
    critic(t)
    if t.task in ("grpo", "ppo"):
        complete_rewards(t, length)
    elif t.has("micro_batch_size") and "row_tokens" not in t.given:
        rows = t.count("micro_batch_size", 1)
        t.set("row_tokens", str(rows * pairs * length), t.together["micro_batch_size"].where)
        t.note(t.together["micro_batch_size"].where, f"a row has {rows} * {'2 * ' if pairs == 2 else ''}max_len = {rows * pairs * length} tokens")
    if t.task in ("sft", "pretrain") and "input_key" not in t.given:
        t.set("input_key", "input", "data.input_key (OpenRLHF's default)", by_default=True)
    if t.task in ("sft", "grpo", "ppo") and t.flag("apply_chat_template", "false") != "true":  # strings are not turned into chats
        t.set("input_template", "openrlhf" if t.task == "sft" else "{}", "data.input_template (OpenRLHF's default)", by_default=True)
    if t.task in ("sft", "dpo", "rm") and t.flag("apply_chat_template", "false") != "true":
        t.note("", "plain text is followed only by EOS; OpenRLHF inserts a space before it")
    if "input_template" in t.given and "{}" not in t.flag("input_template"):
        t.note(t.flags["input_template"].where, "a template without {} is ignored, as in OpenRLHF, and prompts are not changed: --input_template {}")
        t.set("input_template", "{}", t.flags["input_template"].where)
    if t.has("filters"):
        t.set("dynamic_filtering", t.together["filter_range"].values if t.has("filter_range") else ["0,1"], t.together["filters"].where)
    correct(t)
    if t.has("muon_lr") and t.flag("optimizer") != "muon":
        t.note(t.together["muon_lr"].where, "it is for --optim muon alone")
    elif t.has("muon_lr"):
        t.refuse(f"{t.together['muon_lr'].where} \"{t.get('muon_lr')}\" is not supported\n"
                 "  fix: leave it out: --learning_rate is for both optimizers, and Muon's updates are as large as AdamW's (docs/muon.md)")
    if t.flag("optimizer") == "muon":
        t.note(t.flags["optimizer"].where, "OpenRLHF's Muon has a rate of its own, muon.lr, and updates of another size; here --learning_rate is for both optimizers (docs/muon.md)")
    if t.task == "dpo" and t.flag("eval_data") and "/" in t.flag("eval_data") and not t.has("eval_split"):
        t.set("eval_data", ",".join(f"{name}[test]" for name in t.flag("eval_data").split(",")), t.flags["eval_data"].where)
        t.note("", "eval.dataset is read from its test split, as in OpenRLHF")
    if t.task in ("sft", "dpo", "rm") and "truncation" not in t.flags:
        t.note("", "samples longer than max_len are dropped and counted; OpenRLHF cuts them and makes the last token EOS (--truncation keep cuts them here)")
    if t.task == "rm" and "eval_data" not in t.flags and "eval_fraction" not in t.flags:
        t.note("", "without eval.dataset OpenRLHF evaluates on 1 % of the training pairs; --eval_fraction 0.01 evaluates on 1 % and does not train on them")


def critic(t):
    """Compares the critic's settings with the actor's, which both models have here."""
    for name, flag in CRITIC.items():
        default = t.own["defaults"]["ppo"][flag]
        actor = t.flags[flag].value.split(",") if flag in t.flags else default
        value = {"adam": "adamw"}.get(t.get(name), t.get(name))
        if t.task != "ppo":
            if value:
                t.note(t.together[name].where, "only the estimator gae has a critic")
        elif value is None:
            if flag in t.given and not same_values(actor, default):
                t.note(t.flags[flag].where, f"the critic has it as well; without {name} OpenRLHF's critic has the default")
        elif same_values(value.split(","), actor):
            t.note(t.together[name].where, "the critic has the actor's value")
        else:
            t.refuse(f"{t.together[name].where} is {t.get(name)}, which the critic alone cannot have\n  fix: give the actor the same value, or leave it out")


def correct(t):
    """Sets --is_correction from the names of 0.11.2, or from is_correction_enable and is_correction_type of older versions."""
    limits = t.together["correction_range"].values if t.has("correction_range") else []
    if t.has("corrects"):
        return t.set("is_correction", ",".join([t.get("correction", "tis"), *limits]), t.together["corrects"].where)
    if t.has("correction_level"):
        level, mode, setting = t.get("correction_level"), t.get("correction_mode", "mask"), t.together["correction_level"]
        if (level, mode) not in CORRECTIONS:
            return t.refuse(f'{setting.where} "{level}" with is_correction_mode "{mode}" is not supported\n  fix: token and clip, token and mask, or seq and mask')
        limits = limits if len(limits) != 1 else ["0", *limits]  # one number is the upper limit
        return t.set("is_correction", ",".join([CORRECTIONS[level, mode], *limits]), setting.where)
    for key in ("correction", "correction_mode", "correction_range"):
        if t.has(key):
            t.note(t.together[key].where, "without is_correction_level or is_correction_enable it has no effect, as in OpenRLHF")


def complete_rewards(t, length):
    """Sets the lengths of prompts and answers: prompt_max_len and generate_max_len of older versions, or max_len. Only gae has a critic."""
    for flag in [flag for flag in t.flags if t.task == "grpo" and t.own["flags"][flag]["tasks"] == ["ppo"]]:
        t.note(t.flags.pop(flag).where, "only the estimator gae has a critic")
    if t.flag("kl_use_loss") == "true" and t.flag("policy_loss_type") == "gspo":
        t.note(t.flags["kl_use_loss"].where, "with gspo the divergence is averaged over answers, as the policy loss is; OpenRLHF averages it over tokens")
    if t.has("generate_max_len") or t.has("prompt_max_len"):
        prompt, answer = t.count("prompt_max_len", 1024), t.count("generate_max_len", 1024)
        t.set("max_len", str(prompt), "prompt_max_len")
        t.set("max_new_tokens", str(answer), "generate_max_len")
        t.set("row_tokens", str(prompt + answer), "prompt_max_len and generate_max_len")
        return
    if "max_new_tokens" not in t.flags:
        t.set("max_new_tokens", str(length), "rollout.max_new_tokens (OpenRLHF's default)", by_default=True)
        t.note("", f"an answer has up to {length} tokens; in OpenRLHF max_len limits prompt and answer together")
    if "row_tokens" not in t.given:
        t.set("row_tokens", str(length + t.number("max_new_tokens", length)), "data.max_len")


OPENRLHF = Peer("OpenRLHF", "0.11.2", ROWS, defaults, task_of, complete, "./ckpt")
