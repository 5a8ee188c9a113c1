"""Names of transformers 5.24's Trainer. TRL, Axolotl, LLaMA-Factory and ms-swift pass them on to it."""

from . import deepspeed
from .accelerate import ACCELERATE
from .table import SPEED, Note, Part, Peer, Refused, Same, Sets, Together

ROWS = [
    # model and data
    Same("max_samples", "num_samples"),
    Note("samples are shuffled", "train_sampling_strategy", "random"),
    Sets("shuffle false", "train_sampling_strategy", "sequential"),
    Refused("rows are packed and have no padding; leave it out", "group_by_length, train_sampling_strategy"),
    Note("data/prepare.py tokenises samples once and caches them",
      "dataloader_num_workers, dataloader_pin_memory, dataloader_prefetch_factor, dataloader_persistent_workers, dataloader_in_order, "
      "dataloader_multiprocessing_context, remove_unused_columns, length_column_name, label_names, include_for_metrics, include_inputs_for_metrics"),
    Note("--seed determines the order of the samples", "data_seed"),
    Refused("each epoch uses all records once; leave it out", "dataloader_drop_last"),
    Refused("a resumed run continues with the next samples; leave it out", "ignore_data_skip"),
    Refused("per_device_train_batch_size counts the samples of one device; leave it out", "split_batches, accelerator_config.split_batches"),
    Note(SPEED, "dispatch_batches, accelerator_config.dispatch_batches, accelerator_config.even_batches, accelerator_config.use_seedable_sampler, "
         "accelerator_config.non_blocking, accelerator_config.use_configured_state"),
    Refused("--train_batch_size is the number of samples in a step", "accelerator_config"),
    Note("all memory is planned before the start (--plan)", "use_cache"),
    # training steps
    Together("device_batch", "multiplied by gradient_accumulation_steps and the number of data-parallel ranks: --train_batch_size, or with packing --train_batch_tokens",
      "per_device_train_batch_size, per_gpu_train_batch_size"),
    Together("accumulated", "see per_device_train_batch_size; the program chooses the rows of a step", "gradient_accumulation_steps"),
    Note("rows are filled up to --row_tokens tokens, and the loss is the mean over all targets of a step",
      "per_device_eval_batch_size, per_gpu_eval_batch_size, eval_accumulation_steps, eval_do_concat_batches, eval_use_gather_object, batch_eval_metrics, "
      "prediction_loss_only, auto_find_batch_size, include_num_input_tokens_seen, include_tokens_per_second"),
    Together("averages", "it must be true if there are several ranks: the loss is the mean over all targets of a step", "average_tokens_across_devices", "true, false"),
    Same("num_episodes,max_epochs", "num_train_epochs"),
    Same("learning_rate", "learning_rate"),
    Same("max_steps", "max_steps"),
    Same("seed", "seed"),
    # optimizer
    Same("lr_scheduler", "lr_scheduler_type"),
    Together("warmup_steps", "--lr_warmup; unless it is 0, it replaces warmup_ratio", "warmup_steps"),
    Refused("--lr_warmup N, in steps", "warmup_ratio", "1, 1.0"),
    Same("lr_warmup", "warmup_ratio"),
    Same("max_norm", "max_grad_norm"),
    Part("adam_betas 0", "adam_beta1"),
    Part("adam_betas 1", "adam_beta2"),
    Same("adam_eps", "adam_epsilon"),
    Same("weight_decay", "weight_decay"),
    Sets("optimizer adamw", "optim", "adamw_torch, adamw_torch_fused, adamw_hf, adamw_apex_fused, paged_adamw_32bit"),
    Sets("moments 8bit", "optim", "adamw_8bit, adamw_bnb_8bit, paged_adamw_8bit, adamw_torch_8bit"),
    Same("optimizer", "optim"),
    Refused("--optimizer adamw or muon, over all weights; leave it out", "optim_args, optim_target_modules, torchdistx_path"),
    Note("the loss of sft has no label smoothing", "label_smoothing_factor", "0, 0.0"),
    Refused("sft has only the plain cross-entropy of the targets; leave it out", "label_smoothing_factor"),
    # how it is computed
    Sets("recompute layer", "gradient_checkpointing, activation_checkpointing", "true"),
    Note("--recompute selects the recomputed activations", "gradient_checkpointing_kwargs, activation_checkpointing_kwargs, gradient_checkpointing"),
    Sets("dtype bf16", "bf16", "true, full"),
    Sets("dtype auto", "bf16", "auto"),
    Refused("--dtype bf16 or f32: there is no fp16", "fp16, fp16_full_eval"),
    Note("sums, norms and losses are in float, weights in --dtype", "bf16_full_eval"),
    Together("tf32", "--dtype tf32 if the run is in f32; a run in bf16 has no f32 products", "tf32"),
    Note("a setting of PyTorch without a counterpart here",
      "torch_compile, torch_compile_backend, torch_compile_mode, use_liger_kernel, liger_kernel_config, torch_empty_cache_steps, "
      "skip_memory_metrics, enable_jit_checkpoint, ddp_backend, ddp_broadcast_buffers, ddp_bucket_cap_mb, ddp_find_unused_parameters, "
      "ddp_static_graph, fp16_opt_level, half_precision_backend, fp16_backend, jit_mode_eval, use_ipex, use_mps_device, torchdynamo, sharded_ddp, mp_parameters, "
      "past_index, tpu_num_cores, tpu_metrics_debug, xpu_backend, ray_scope"),
    Note("runs are always deterministic", "full_determinism"),
    Sets("device cpu", "use_cpu, no_cuda", "true"),
    Refused("--debug finds the first value that is not finite, and ranks whose calls differ", "debug"),
    # ranks
    Sets("zero_stage 2", "fsdp", "shard_grad_op, shard_grad_op auto_wrap"),
    Sets("zero_stage 3", "fsdp"),
    Refused("--config FILE.yaml with accelerate's file; or --zero_stage and --ring_attn_size", "fsdp_config, parallelism_config"),
    Same("comm_timeout", "ddp_timeout"),
    Note("MPI tells each rank its number", "local_rank"),
    # checkpoints, evaluation, log
    Same("output_dir", "output_dir"),
    Same("overwrite", "overwrite_output_dir"),
    Same("max_num", "save_total_limit"),
    Sets("save_steps -1", "save_strategy", "no"),
    Note("--save_steps sets the interval", "save_strategy", "steps"),
    Note("the model is saved at the end, and an interrupted run writes a checkpoint; --save_steps N also writes one every N optimizer steps",
      "save_strategy"),
    Same("save_steps", "save_steps"),
    Sets("resume auto", "resume_from_checkpoint", "true"),
    Same("resume", "resume_from_checkpoint"),
    Note("--eval_steps sets the interval, --eval_data or --eval_fraction the data", "eval_strategy, evaluation_strategy", "no, steps"),
    Sets("eval_steps -1", "eval_strategy, evaluation_strategy", "epoch"),
    Refused("--eval_steps N, in optimizer steps; -1 evaluates after each epoch", "eval_strategy, evaluation_strategy"),
    Same("eval_steps", "eval_steps"),
    Note("the task trains, and evaluates if --eval_data or --eval_fraction is given", "do_train, do_eval, do_predict"),
    Note("evaluation begins with the run", "eval_delay", "0, 0.0"),
    Refused("--eval_data reports loss, perplexity and accuracy; --sample_every prints samples of the model", "eval_on_start, eval_delay"),
    Note("the best evaluation has the lowest eval_loss", "metric_for_best_model", "loss, eval_loss"),
    Note("output_dir/best contains the model with the lowest eval_loss, output_dir the last one", "load_best_model_at_end"),
    Refused("the best evaluation has the lowest eval_loss; leave it out", "metric_for_best_model, greater_is_better"),
    Same("logging_steps", "logging_steps"),
    Same("run_name", "run_name"),
    Note("metrics go to --log, one JSON object per line",
      "logging_first_step, logging_strategy, logging_nan_inf_filter, log_level, log_level_replica, log_on_each_node, disable_tqdm, project, "
      "trackio_space_id, trackio_bucket_id, trackio_static_space_id, save_on_each_node"),
    Note("metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training", "logging_dir"),
    Note("every checkpoint contains the model as a Hugging Face directory", "save_safetensors"),
    Note("every checkpoint also contains the optimizer; --save_steps -1 writes none", "save_only_model, restore_callback_states_from_checkpoint"),
    Note("hf auth login logs in to the hub, and hf upload OWNER/NAME OUTPUT_DIR uploads a model",
      "hub_strategy, hub_revision, hub_private_repo, hub_always_push, hub_token"),
    Note("no model is uploaded; after the run: hf upload OWNER/NAME OUTPUT_DIR", "push_to_hub, hub_model_id, push_to_hub_model_id, push_to_hub_organization, push_to_hub_token"),
    Same("min_lr_ratio", "lr_scheduler_kwargs.min_lr_rate, lr_scheduler_kwargs.min_lr_ratio"),
    Together("min_lr", "divided by learning_rate: --min_lr_ratio", "lr_scheduler_kwargs.min_lr"),
    Note("the cosine is half a period", "lr_scheduler_kwargs.num_cycles", "0.5"),
    Refused("--min_lr_ratio is the final share of cosine_with_min_lr and warmup_stable_decay, --lr_decay_ratio the length of the latter's decay", "lr_scheduler_kwargs"),
    Together("deepspeed", "a file of DeepSpeed, of which each setting is taken over or refused (deepspeed.md)", "deepspeed"),
]


def complete(t, keeps_strings=True):
    """Computes the flags that depend on several names in all of these trainers: the schedule, DeepSpeed's file and the flags of rewards."""
    if t.has("warmup_steps") and (t.get("warmup_steps") not in ("0", "0.0") or "lr_warmup" not in t.flags):
        t.set("lr_warmup", t.get("warmup_steps"), t.together["warmup_steps"].where, by_default="default)" in t.together["warmup_steps"].where)
    deepspeed.complete(t)
    t.scheduler()
    if t.has("tf32") and t.get("tf32").lower() == "true":
        if t.flag("dtype") == "f32":
            t.set("dtype", "tf32", t.together["tf32"].where)
        else:
            t.note(t.together["tf32"].where, "--dtype tf32 is for runs in f32; tensor cores multiply bf16 directly")
    if t.get("averages", "true").lower() == "false" and t.ranks() > 1:
        t.refuse(f'{t.together["averages"].where} false is not supported: the loss is the mean over all targets of a step\n  fix: leave it out')
    t.policy(keeps_strings)


TRAINER = Peer("transformers", "5.24", ROWS, bases=(ACCELERATE,))
