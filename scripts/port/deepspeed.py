"""DeepSpeed 0.19's file of settings, which transformers' Trainer and accelerate read: JSON with sections. Values "auto" are the trainer's arguments."""

import difflib

from errors import DataError
from json_yaml import parse_json, read_object

from .reading import Setting, to_text
from .table import OFF, SPEED, Note, Peer, Refused, Same, Sets, Together
from .translate import same_values

LOG = "metrics go to --log, one JSON object per line; --profile measures times"

ROWS = [
    # a step
    Together("ds_batch", "the samples of a step over all ranks: --train_batch_size", "train_batch_size"),
    Together("ds_micro", "per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    Together("ds_accumulated", "gradient_accumulation_steps", "gradient_accumulation_steps"),
    Refused("--train_batch_size N; the number of ranks does not change it", "elasticity"),
    # optimizer
    Sets("optimizer adamw", "optimizer.type", "adamw, adam"),
    Refused("AdamW or Adam; or --optimizer muon without the section optimizer", "optimizer.type"),
    Same("learning_rate", "optimizer.params.lr, scheduler.params.warmup_max_lr"),
    Same("adam_betas", "optimizer.params.betas"),
    Same("adam_eps", "optimizer.params.eps"),
    Same("weight_decay", "optimizer.params.weight_decay"),
    Note("weight decay is decoupled from the gradient, as in AdamW", "optimizer.params.adam_w_mode", "true"),
    Refused("weight decay is decoupled from the gradient, as in AdamW: true, or weight_decay 0", "optimizer.params.adam_w_mode", "false"),
    Note("the moments' bias is corrected", "optimizer.params.bias_correction", "true"),
    Refused("the moments' bias is corrected; leave it out", "optimizer.params.bias_correction", "false"),
    Refused("the second moment is an average, not a maximum; leave it out", "optimizer.params.amsgrad"),
    Refused("gradient_clipping", "optimizer.params.max_grad_norm"),
    Note("it selects an implementation and changes no result", "optimizer.params.torch_adam, optimizer.params.fused, optimizer.params.foreach, optimizer.legacy_fusion, "
         "zero_allow_untested_optimizer, zero_force_ds_cpu_optimizer"),
    Same("max_norm", "gradient_clipping"),
    # schedule
    Sets("lr_scheduler constant_with_warmup", "scheduler.type", "WarmupLR"),
    Sets("lr_scheduler linear", "scheduler.type", "WarmupDecayLR"),
    Sets("lr_scheduler cosine_with_min_lr", "scheduler.type", "WarmupCosineLR"),
    Refused("WarmupLR, WarmupDecayLR or WarmupCosineLR; or lr_scheduler_type without the section scheduler", "scheduler.type"),
    Same("lr_warmup", "scheduler.params.warmup_num_steps"),
    Note("the warm-up is linear", "scheduler.params.warmup_type", "linear"),
    Refused("the warm-up is linear: \"warmup_type\": \"linear\"", "scheduler.params.warmup_type"),
    Note("the warm-up begins at 0", "scheduler.params.warmup_min_lr, scheduler.params.warmup_min_ratio", "0, 0.0"),
    Refused("the warm-up begins at 0", "scheduler.params.warmup_min_lr, scheduler.params.warmup_min_ratio"),
    Together("ds_steps", "it must equal max_steps; \"auto\" is the number of steps of the run", "scheduler.params.total_num_steps"),
    Same("min_lr_ratio", "scheduler.params.cos_min_ratio"),
    Note("the schedule begins at the first step", "scheduler.params.last_batch_iteration", "-1"),
    # types
    Sets("dtype bf16", "bf16.enabled, bfloat16.enabled", "true"),
    Sets("dtype f32", "bf16.enabled, bfloat16.enabled", "false"),
    Note("gradients and the optimizer's state are in float, unless --grad_dtype or --moments is bf16", "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states", "false"),
    Refused("--grad_dtype bf16 stores gradients, and --moments bf16 the optimizer's moments in bf16", "bf16.bf16_master_weights_and_grads, bf16.bf16_optimizer_states"),
    Note("a loss that is not finite ends the run", "bf16.check_grad_overflow"),
    Note(SPEED, "bf16.immediate_grad_update"),
    Refused("--dtype bf16 or f32: there is no fp16", "fp16, amp"),
    Refused("--dtype bf16 or f32, for weights and activations", "torch_autocast"),
    Note("gradients are stored in float, unless --grad_dtype is bf16", "data_types.grad_accum_dtype", "fp32, float32"),
    Sets("grad_dtype bf16", "data_types.grad_accum_dtype", "bf16, bfloat16"),
    Refused("fp32 or bf16", "data_types"),
    Note("sums over ranks are in float", "communication_data_type, seq_parallel_communication_data_type, prescale_gradients, gradient_predivide_factor"),
    Note("the gradient of a step is a mean", "gradient_allreduce_op", "mean, avg"),
    Refused("the gradient of a step is a mean", "gradient_allreduce_op"),
    # ZeRO and ranks
    Same("zero_stage", "zero_optimization.stage"),
    Note("ZeRO shards over all ranks", "zero_optimization.mics_shard_size", "-1"),
    Same("zero_group", "zero_optimization.mics_shard_size"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits",
         "zero_optimization.offload_optimizer, zero_optimization.offload_param, zero_optimization.cpu_offload, zero_optimization.cpu_offload_param, "
         "zero_optimization.cpu_offload_params, zero_optimization.cpu_offload_use_pin_memory, aio"),
    Refused("weights and gradients are sent between ranks unchanged", "zero_optimization.zero_quantized_weights, zero_optimization.zero_quantized_gradients, "
            "zero_optimization.zero_quantized_nontrainable_weights, zero_optimization.zeropp_loco_param"),
    Refused("the optimizer updates all weights in each step", "zero_optimization.zenflow"),
    Note(SPEED, ", ".join(f"zero_optimization.{name}" for name in (
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size", "overlap_comm",
        "load_from_fp32_weights", "elastic_checkpoint", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters", "max_reuse_distance",
        "gather_16bit_weights_on_model_save", "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential", "ignore_unused_parameters",
        "legacy_stage1", "round_robin_gradients", "zero_hpz_partition_size", "mics_hierarchical_params_gather", "memory_efficient_linear", "pipeline_loading_checkpoint",
        "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module"))),
    Note("sequences are not split", "sequence_parallel_size", "1"),
    Refused("--ring_attn_size N --sp_mode ulysses", "sequence_parallel_size"),
    Note("tensors are not divided", "tensor_parallel.autotp_size", "0"),
    Same("tensor_parallel", "tensor_parallel.autotp_size"),
    Refused("--tensor_parallel N divides the tensors of a model among N ranks", "tensor_parallel"),
    Refused("--expert_parallel N divides the experts over N ranks", "expert_parallel"),
    # methods that this program does not have
    Refused("leave it out: all layers and all samples are trained, unquantised and in the order of --seed",
            "progressive_layer_drop, curriculum_learning, data_efficiency, compression_training, quantize_training, weight_quantization, eigenvalue, sparse_attention"),
    # no effect
    Note("--recompute selects the recomputed activations", "activation_checkpointing"),
    Note(SPEED, "managed_gradient_accumulation, dataloader_drop_last, compile, sparse_gradients, disable_allgather, graph_harvesting, hybrid_engine, pipeline, use_data_before_expert_parallelism, vocabulary_size"),
    Refused("leave it out: its trials change the batch; --plan shows which settings fit", "autotuning"),
    Note("checkpoints are written to output_dir/step_N", "checkpoint, nebula, datastates_ckpt"),
    Note(LOG, "steps_per_print, wall_clock_breakdown, memory_breakdown, dump_state, log_level, timers, flops_profiler, comms_logger, tensorboard, wandb, csv_monitor, comet, "
         "monitor_config"),
]
DEEPSPEED = Peer("DeepSpeed", "0.19", ROWS)
ADAM = (("lr", "learning_rate", "1e-3"), ("betas", "adam_betas", "0.9,0.999"), ("eps", "adam_eps", "1e-8"), ("weight_decay", "weight_decay", "0"))


def row_of(name, value):
    """Returns the row of a dotted name, or of its section. A section's row has the section as its holder."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        holder = ".".join(parts[:end])
        row = next((row for row in ROWS if holder in row.names and (row.holds_for(value) or value == "auto")), None)
        if row and (end == len(parts) or row.kind in ("note", "refused")):
            return row if end == len(parts) else row._replace(holder=holder)
    return None


def leaves(value, name=""):
    """Yields the dotted names and the values of an object; null is the default. A section that is not enabled has no other settings; the trainer's fp16
    decides on fp16 "auto"."""
    if not isinstance(value, dict):
        yield from [(name, value)] if value is not None else []
    elif name and (value.get("enabled") is False or name == "fp16" and value.get("enabled") == "auto"):
        yield f"{name}.enabled", value["enabled"]
    else:
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else key)


def read(setting):
    """Returns the settings of a file, or of an object in the place of its name."""
    path = setting.value
    try:
        value, path = (parse_json(path, setting.where), setting.where) if path.lstrip().startswith("{") else (read_object(path), path)
    except DataError as error:
        raise DataError(f"{setting.where}: {error.what}", f"{error.fix}; or --zero_stage 0, 1, 2 or 3 in its place") from None
    return path, [Setting(name, [to_text(v) for v in inner] if isinstance(inner, list) else [to_text(inner)], f"{name} in {path}") for name, inner in leaves(value)]


def complete(t):
    """Takes over the settings of DeepSpeed's file, and those of accelerate's file for DeepSpeed."""
    files = [t.together[key] for key in ("deepspeed", "deepspeed_config_file") if t.has(key)]
    if len(files) > 1 and files[0].value != files[1].value:
        return t.refuse(f"{files[0].where} and {files[1].where} are two files of DeepSpeed\n  fix: leave one of them out")
    if files:
        path, settings = read(files[0])
        given = {setting.name: setting for setting in settings}
        refused = tuple(name.replace(".type", ".params.") for name in ("optimizer.type", "scheduler.type") if name in given and row_of(name, given[name].value).kind == "refused")
        for setting in settings:
            if not setting.name.startswith(refused):  # the parameters of an optimizer or schedule that is refused
                take(t, setting)
        if any(name.startswith("optimizer.") for name in given):
            optimizer(t, given, path)
        if any(name.startswith("scheduler.") for name in given):
            scheduler(t, given, path)
        absent(t, given, path, "gradient_clipping", "max_norm", "0")
        absent(t, given, path, "zero_optimization.stage", "zero_stage", "0")
    if t.has("ds_norm"):
        agree(t, "max_norm", t.together["ds_norm"])
    batch(t)


def take(t, setting):
    """Answers a setting by its row."""
    row = row_of(setting.name, setting.value)
    if row is None:
        alike = difflib.get_close_matches(setting.name, [name for row in ROWS for name in row.names], 1, 0.8)
        t.refuse(f"{setting.where} is not a setting of DeepSpeed\n  fix: {f'did you mean {alike[0]}?' if alike else 'leave it out'}")
    elif setting.value == "auto":
        return  # the trainer's argument
    elif row.kind == "same":
        agree(t, row.text, setting)
    elif row.kind == "sets":
        flag, value = row.text.split()
        if flag in ("optimizer", "lr_scheduler"):
            replace(t, flag, value, setting)
        else:
            agree(t, flag, setting._replace(values=[value]))
    else:
        if row.holder:
            setting = setting._replace(name=row.holder, where=setting.where.replace(setting.name, row.holder, 1))
        t.answer(row, setting, setting.value.lower() in OFF and not row.values, by_default=False)


def agree(t, flag, setting):
    """Sets a flag to the file's value. An argument with another value is a contradiction, which transformers refuses."""
    said = t.flags.get(flag)
    if said and flag in t.given and said.value != "auto" and not same_values(said.value.split(","), setting.value.split(",")):
        t.refuse(f'{setting.where} is {setting.value}, but {said.where} is {said.value}\n  fix: give both the same value, or write "auto" in the file of DeepSpeed')
    else:
        t.set(flag, setting.values, setting.where)


def replace(t, flag, value, setting):
    """Sets a flag to the file's value, which takes precedence over the trainer's argument."""
    if flag in t.given and t.flag(flag) != value:
        t.note(t.flags[flag].where, f"the {flag} in the file of DeepSpeed takes precedence: --{flag} {value}")
    t.said.discard(flag)
    t.set(flag, value, setting.where)


def absent(t, given, path, name, flag, value):
    """Sets a flag to DeepSpeed's default where the file lacks a name. DeepSpeed does not read the trainer's argument then, but here the argument holds."""
    if name in given:
        return
    if flag in t.given:
        t.note(t.flags[flag].where, f"it holds here, although DeepSpeed uses {value} without {name} in {path}")
    elif not same_values([value], t.flag(flag, t.own["defaults"][t.task].get(flag))):
        t.note("", f"{path} has no {name}, for which DeepSpeed's default is --{flag} {value}")
        t.set(flag, value, f"{name} (DeepSpeed's default)")


def optimizer(t, given, path):
    if "optimizer.type" not in given:
        t.refuse(f"optimizer in {path} has no type\n  fix: \"type\": \"AdamW\"")
    if t.flag("moments", "f32") != "f32":
        t.note(t.flags.pop("moments").where, "the optimizer in the file of DeepSpeed takes precedence, and has its moments in float")
    for name, flag, value in ADAM:
        absent(t, given, path, f"optimizer.params.{name}", flag, value)
    if float(t.flag("weight_decay", "0")) > 0:
        t.note(t.flags["weight_decay"].where, "DeepSpeed's optimizer also decays norms and biases, which do not decay here")


def scheduler(t, given, path):
    kind = given["scheduler.type"].value if "scheduler.type" in given else None
    if kind is None:
        return t.refuse(f"scheduler in {path} has no type\n  fix: \"type\": \"WarmupDecayLR\"")
    absent(t, given, path, "scheduler.params.warmup_num_steps", "lr_warmup", "1000")
    if "scheduler.params.warmup_type" not in given:
        t.note(given["scheduler.type"].where, "the warm-up is linear; DeepSpeed's default is logarithmic: the rate is proportional to the logarithm of the step")
    t.note(given["scheduler.type"].where, "DeepSpeed's rates come one step later: its first two steps have the rate at which the warm-up begins")
    if kind == "WarmupCosineLR":
        absent(t, given, path, "scheduler.params.cos_min_ratio", "min_lr_ratio", "0.0001")
    if kind == "WarmupDecayLR":
        absent(t, given, path, "scheduler.params.warmup_max_lr", "learning_rate", "1e-3")
    if kind in ("WarmupDecayLR", "WarmupCosineLR") and "scheduler.params.total_num_steps" not in given:
        t.refuse(f"scheduler in {path} has no total_num_steps, which {kind} needs\n  fix: \"total_num_steps\": \"auto\"")
    if t.has("ds_steps") and t.get("ds_steps") != t.flag("max_steps"):
        t.refuse(f'{t.together["ds_steps"].where} is {t.get("ds_steps")}, but the number of steps is {t.flag("max_steps", "not given")}\n'
                 "  fix: \"auto\", or the same number in max_steps")


def batch(t):
    """Sets the samples per device and the accumulation steps. DeepSpeed computes one of its three numbers from the others."""
    def number(ours, theirs):
        argument = t.together.get(ours)
        if t.has(theirs) and argument and "default)" not in argument.where and t.count(ours, 1) != t.count(theirs, 1):
            t.refuse(f'{t.together[theirs].where} is {t.get(theirs)}, but {argument.where} is {argument.value}\n'
                     '  fix: give both the same value, or write "auto" in the file of DeepSpeed')
        if t.has(theirs):
            t.together[ours] = t.together[theirs]
        return t.count(ours, 1) if t.has(theirs) or argument and "default)" not in argument.where else None

    samples, accumulated = number("device_batch", "ds_micro"), number("accumulated", "ds_accumulated")
    if not t.has("ds_batch"):
        return
    setting, ranks = t.together["ds_batch"], t.ranks()
    known = (samples or 1) * (accumulated or 1) * ranks
    rest, over = divmod(t.count("ds_batch", 1), known)
    if over or samples and accumulated and rest != 1:
        return t.refuse(f"{setting.where} is {setting.value}, but {samples or 'any number of'} samples per device * {accumulated or 'any number of'} accumulation steps * {ranks} ranks "
                        f'are not\n  fix: "auto" in the file of DeepSpeed')
    if samples is None:
        t.together["device_batch"] = setting._replace(values=[str(rest)])
    elif accumulated is None:
        t.together["accumulated"] = setting._replace(values=[str(rest)])
    if samples is None and accumulated is None:
        t.together["accumulated"] = setting._replace(values=["1"])
