"""TRL 1.16."""

import re
from pathlib import Path

from json_yaml import read_object

from .table import Note, Peer, Refused, Same, Sets, Together
from .trainer import TRAINER
from .trainer import complete as complete_trainer
from .translate import RL, STEADY, fetched

PART = "it is part of a method that is refused by its own name"
ROWS = [
    # model and data
    Same("model", "model_name_or_path"),
    Note("the main revision is read", "model_revision", "main"),
    Together("revision", "the revision, after an @: --model OWNER/NAME@REVISION", "model_revision"),
    Same("data", "dataset_name, datasets"),
    Together("subset", "the subset, after a colon: --data OWNER/NAME:SUBSET", "dataset_config"),
    Note("data sets are read from their train split", "dataset_train_split", "train"),
    Together("split", "the split, in brackets: --data OWNER/NAME[SPLIT]", "dataset_train_split"),
    Note("the field text is read", "dataset_text_field", "text"),
    Refused("--input_key FIELD, with the task pretrain", "dataset_text_field"),
    Same("tokenizer_chat_template", "chat_template_path"),
    Note("the assistant's messages, or the completion, are trained", "assistant_only_loss, completion_only_loss", "true"),
    Sets("train_on_prompt true", "completion_only_loss", "false"),
    Refused("the assistant's messages, or the completion, are trained; --train_on_prompt trains on all tokens", "assistant_only_loss", "false"),
    Refused("a number: --max_len bounds every sample", "max_length", "none, null"),
    Same("max_len", "max_length"),
    Same("max_len", "max_seq_length, cutoff_len"),
    Refused("--max_len bounds prompt and answer together; leave it out", "max_prompt_length"),
    Sets("truncation keep", "truncation_mode", "keep_start"),
    Refused("--truncation keep cuts on the right; drop leaves long samples out", "truncation_mode"),
    Same("max_samples", "max_train_samples"),
    Together("shuffles", "of grpo and ppo: --shuffle; the other tasks shuffle the samples in each epoch whatever its value", "shuffle_dataset", "true, false"),
    Together("streams", "--shuffle false, but for grpo and ppo", "dataset_streaming, streaming"),
    Note("data/prepare.py tokenises samples once and caches them", "dataset_num_proc"),
    Refused("data/prepare.py prepares all records; leave it out", "dataset_kwargs, dataset_kwargs.skip_prepare_dataset"),
    Refused("records with the fields that are read, and no others", "datasets.columns"),
    Refused("path: FILE or DIR", "datasets.data_files, datasets.data_dir"),
    Refused("a slice of the split, such as split: train[:50%]", "datasets.fraction"),
    Same("eval_fraction", "test_split_size"),
    Note("rows have no padding", "pad_token"),
    Together("eos_token", "see bos_token", "eos_token"),
    Note("code in a model's directory is never run", "trust_remote_code"),
    Refused("change config.json in the directory of --model", "model_init_kwargs"),
    Note("all memory is planned before the start (--plan)", "ignore_bias_buffers"),
    # training steps
    Together("packs", "samples are always packed and never attend to each other; with this flag a step counts rows of max_len tokens: --train_batch_tokens",
      "packing"),
    Note("rows are packed by best fit: no document is cut at the end of a row or attends to another one", "packing_strategy", "bfd"),
    Together("packing_strategy", "with packing it is refused, unless it is bfd: rows are packed by best fit, and no document attends to another one", "packing_strategy"),
    Note("samples are always packed into rows of --row_tokens tokens, and never attend to each other", "padding_free, eval_packing, pad_to_multiple_of"),
    # optimizer
    Note("the loss is the mean over the targets of a step, and logits are computed for a part of the tokens at a time", "loss_type", "nll, chunked_nll"),
    Refused("sft has only the plain cross-entropy of the targets; leave it out", "loss_type", "dft"),
    Together("disable_dropout", "true, the default of dpo, rm and ppo: no --lora_dropout", "disable_dropout", "true, false"),
    Same("router_aux_loss_coef", "router_aux_loss_coef"),
    # preferences and reward models
    Same("beta,kl_coef,divergence_beta", "beta"),
    Sets("loss_aggregation token_mean", "loss_type", "dapo, bnpo"),
    Sets("loss_aggregation sequence_mean", "loss_type", "grpo"),
    Sets("loss_aggregation constant", "loss_type", "dr_grpo"),
    Sets("policy_loss_type cispo", "loss_type", "cispo"),
    Refused("--policy_loss_type ppo, gspo or cispo", "loss_type", "sapo, luspo, vespo"),
    Same("loss_type", "loss_type"),
    Same("loss_weights", "loss_weights"),
    Same("label_smoothing", "label_smoothing"),
    Same("desirable_weight", "desirable_weight"),
    Same("undesirable_weight", "undesirable_weight"),
    Refused("--loss_type simpo needs no reference", "reference_free"),
    Sets("ref_mode precompute", "precompute_ref_log_probs", "true"),
    Note("the reference is computed once, before training, on packed rows", "precompute_ref_batch_size"),
    Same("ref_model", "ref_model_name_or_path, ref_model_path"),
    Note("DPO uses this divergence", "f_divergence_type", "reverse_kl"),
    Note(PART, "ref_model_mixup_alpha, ref_model_sync_steps, f_alpha_divergence_coef, sapo_temperature_neg, sapo_temperature_pos, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, "
         "vespo_lambda_neg, entropy_coef_min, entropy_coef_max, entropy_coef_delta, entropy_target"),
    Note("the loss discopop uses this value", "discopop_tau", "0.05"),
    Refused("there is no such variant of DPO here; leave it out",
      "sync_ref_model, f_divergence_type, ld_alpha, use_weighting, discopop_tau"),
    # distillation
    Same("teacher_model", "teacher_model_name_or_path"),
    Same("on_policy", "lmbda"),
    Note("the main revision is read", "teacher_model_revision", "main"),
    Refused("--teacher_model OWNER/NAME@REVISION", "teacher_model_revision"),
    Refused("change config.json in the directory of --teacher_model", "teacher_model_init_kwargs"),
    Refused("--on_policy 0, with --data from generate --model TEACHER --prompts FILE", "seq_kd"),
    Note("it concerns memory and speed, and changes no result", "use_fused_linear_loss"),
    # reinforcement learning
    Same("n", "num_generations"),
    Same("max_new_tokens", "max_completion_length"),
    Same("temperature", "temperature"),
    Same("max_epochs", "num_iterations"),
    Together("generation_batch_size", "divided by num_generations: --rollout_batch_size, which counts prompts", "generation_batch_size"),
    Together("steps_per_generation", "multiplied by per_device_train_batch_size and the number of ranks: see generation_batch_size", "steps_per_generation"),
    Same("eps_clip", "epsilon"),
    Together("epsilon_high", "with epsilon: --eps_clip EPSILON,EPSILON_HIGH", "epsilon_high"),
    Same("dual_clip", "delta"),
    Note("the default is one ratio for each token", "importance_sampling_level", "token"),
    Sets("policy_loss_type gspo", "importance_sampling_level", "sequence"),
    Sets("advantage_estimator group_norm", "scale_rewards", "group, true"),
    Sets("advantage_estimator dr_grpo", "scale_rewards", "none, false"),
    Refused("--advantage_estimator reinforce_baseline divides by the standard deviation over all tokens of the batch", "scale_rewards", "batch"),
    Same("reward", "reward_model_name_or_path"),
    Same("mask_truncated", "mask_truncated_completions"),
    Same("entropy_coef", "entropy_coef"),
    Note("all tokens are trained", "top_entropy_quantile", "1, 1.0"),
    Note("answers are sampled from all tokens", "top_k", "0, -1"),
    Note("answers are sampled from all tokens", "min_p", "0, 0.0"),
    Note("answers are sampled from all tokens", "top_p", "1, 1.0"),
    Note("there is no repetition penalty", "repetition_penalty", "1, 1.0"),
    Refused("answers are sampled from the trained distribution, all tokens at --temperature; this flag is for generate and --sample_every",
      "top_k, top_p, min_p, repetition_penalty"),
    Same("stop", "stop_strings, generation_kwargs.stop_strings, generation_kwargs.stop"),
    Note("this program samples answers itself, from the weights in training",
      "use_vllm, vllm_mode, vllm_model_impl, vllm_enable_sleep_mode, vllm_server_base_url, vllm_server_host, vllm_server_port, "
      "vllm_server_timeout, vllm_group_port, vllm_gpu_memory_utilization, vllm_max_model_length, vllm_tensor_parallel_size, "
      "ds3_gather_for_generation, cache_implementation, use_transformers_continuous_batching, transformers_continuous_batching_config, "
      "use_transformers_paged, num_generations_eval, num_completions_to_print, log_completions, log_multimodal, log_unique_prompts, "
      "log_completions_hub_repo"),
    Note("this program samples answers itself, from the weights in training", "vllm.tensor_parallel_size"),
    Note("sampling and training compute the same probabilities; for stale answers use --is_correction: token_truncate is tis, token_mask is icepop",
      "vllm_importance_sampling_correction, vllm_importance_sampling_mode, vllm_importance_sampling_clip_max, "
      "vllm_importance_sampling_clip_min, vllm_importance_sampling_cap"),
    Refused("grpo has no such variant (docs/rl.md); leave it out",
      "generation_kwargs, vllm_structured_outputs_regex, use_adaptive_entropy, top_entropy_quantile, off_policy_mask_threshold"),
    Refused("--environment FILE.py with the same tools, environment_factory and reward_funcs (docs/rl.md#tools)", "environment_factory, tools, multi_turn"),
    Together("tool_turns", "with --environment: --max_turns, one more, for the answer behind the last call", "max_tool_calling_iterations"),
    Note("the sum of the rewards, with --reward_weights, is compared within the group", "multi_objective_aggregation", "sum_then_normalize"),
    Refused("the sum of the rewards, with --reward_weights, is compared within the group", "multi_objective_aggregation"),
    Together("bias_correction_kl", "with beta it must be false: the divergence in the loss is not multiplied by the ratio of probabilities", "use_bias_correction_kl", "true, false"),
    Note("rewards and losses are always computed in float or double", "cast_lm_head_to_fp32"),
    Same("gae_lambda", "lam"),
    Same("value_clip", "cliprange_value"),
    Same("eps_clip", "cliprange"),
    Same("max_epochs", "num_ppo_epochs"),
    Same("max_new_tokens", "response_length"),
    Same("model", "sft_model_path"),
    Same("reward", "reward_model_path"),
    Note("--train_batch_size is the number of answers per update", "num_mini_batches", "1"),
    Refused("--train_batch_size is the number of answers per update", "num_mini_batches"),
    Refused("--num_episodes N, passes over the prompts, or --max_steps N", "total_episodes"),
    Refused("--stop_properly_coef changes the reward of an answer without an end", "missing_eos_penalty"),
    Note("answers are sampled --max_sequences at a time", "local_rollout_forward_batch_size, num_sample_generations"),
    Refused("--advantage_estimator decides on whitening; leave it out", "whiten_rewards"),
    Refused("--critic_learning_rate: the critic is a separate model", "vf_coef"),
    # LoRA and quantisation
    Together("use_peft", "--lora_rank, 16 unless lora_r is given", "use_peft"),
    Note("the task determines the adapter's purpose", "lora_task_type", "CAUSAL_LM, SEQ_CLS"),
    Together("lora_whole", "with use_peft: --lora_modules_to_save; score, the head of a reward model, is always trained", "lora_modules_to_save"),
    Refused("adapters are LoRA or rsLoRA of whole linear layers (docs/lora.md); leave it out",
      "lora_target_parameters, lora_task_type, use_dora"),
    Sets("load_in 4bit", "load_in_4bit"),
    Sets("load_in 8bit", "load_in_8bit"),
    Note("4-bit weights are NF4", "bnb_4bit_quant_type", "nf4"),
    Note("the scales of 4-bit weights are quantised as well", "use_bnb_nested_quant", "true"),
    Note("a byte stores two 4-bit weights", "bnb_4bit_quant_storage"),
    Refused("weights are stored in f32 or bf16 (--dtype), and frozen weights also in 4 or 8 bits (--load_in); leave it out",
      "bnb_4bit_quant_type, use_bnb_nested_quant"),
    # how it is computed
    Same("dtype", "dtype"),
    Same("dtype", "torch_dtype"),
    Note("this program has its own attention: exact, blocked, on packed rows", "attn_implementation"),
    Note("only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits", "activation_offloading"),
    # ranks
    Note("the default is one rank", "accelerate_config", "single_gpu"),
    Sets("zero_stage 0", "accelerate_config", "multi_gpu"),
    Sets("zero_stage 1", "accelerate_config", "zero1"),
    Sets("zero_stage 2", "accelerate_config", "zero2"),
    Sets("zero_stage 3", "accelerate_config", "zero3, fsdp1, fsdp2"),
    Refused("--config FILE.yaml with accelerate's file", "accelerate_config"),
    Together("lora_r", "with use_peft: --lora_rank", "lora_r"),
    Together("lora_alpha", "with use_peft: --lora_alpha", "lora_alpha"),
    Together("lora_dropout", "with use_peft: --lora_dropout", "lora_dropout"),
    Together("lora_targets", "with use_peft: --lora_targets", "lora_target_modules"),
    Together("test_split", "with an eval_strategy: --eval_data DATASET[SPLIT]", "dataset_test_split"),
    Together("reward_funcs", "--reward, a directory or FILE.py; TRL's own functions can be named", "reward_funcs"),
]

MOE = re.compile(r"moe|mixtral|-a\d+(\.\d+)?b", re.I)  # names of models
REWARDS = Path(__file__).resolve().parent.parent / "rewards"  # functions of TRL
LEARNING_RATES = {"sft": "2e-5", "pretrain": "2e-5", "dpo": "1e-6", "rm": "1e-4", "distill": "1e-6", "grpo": "1e-6", "ppo": "5e-5"}
GKD = {"learning_rate": "2e-5", "divergence_beta": "0.5", "temperature": "0.9", "max_new_tokens": "128", "max_len": "1024"}  # flags that its defaults set


def defaults(task):
    out = {"learning_rate": LEARNING_RATES[task], "num_train_epochs": "3", "per_device_train_batch_size": "8", "lr_scheduler_type": "linear",
           "warmup_ratio": "0", "adam_beta2": "0.999"}
    if task in ("sft", "pretrain", "dpo", "rm"):
        out |= {"max_length": "1024", **({} if task == "rm" else {"truncation_mode": "keep_start"})}  # a reward model's pairs are dropped whole
    if task == "distill":
        out |= {"max_completion_length": "512"}
    if task == "grpo":
        out |= {"num_generations": "8", "max_completion_length": "512", "loss_type": "dapo", "scale_rewards": "group"}
    if task == "ppo":
        out |= {"response_length": "53", "num_ppo_epochs": "4", "beta": "0.05", "cliprange_value": "0.2", "lam": "0.95"}
    return out


def complete(t):
    complete_trainer(t)
    is_gkd = any(s.name == "lmbda" for s in t.settings)
    if is_gkd:
        complete_gkd(t)
    if t.has("use_peft"):
        t.lora("16", "32", "0.05", targets_of(t), (*STEADY, "distill") if is_gkd else STEADY)
    else:
        for key in ("lora_r", "lora_targets"):
            if t.has(key):
                t.note(t.together[key].where, "without use_peft all weights are trained, as in TRL")
    asked = next((s.value for s in t.settings if s.name in ("eval_strategy", "evaluation_strategy")), "no")
    if asked != "no" and "eval_data" not in t.flags and t.flag("data"):
        split = t.get("test_split", "test")
        t.set("eval_data", ",".join(f"{name}:{t.get('subset')}[{split}]" if t.has("subset") else f"{name}[{split}]" for name in t.flag("data").split(",")),
              "dataset_test_split")
        t.note("", f"evaluation uses the split {split} of the data, as in TRL; leave eval_strategy out if the data has no such split")
    if t.has("reward_funcs"):
        set_rewards(t)
    if t.has("tool_turns"):
        if "environment" in t.flags:
            t.set("max_turns", str(t.count("tool_turns", 1) + 1), t.together["tool_turns"].where)
        else:
            t.note(t.together["tool_turns"].where, "without --environment there are no tools, and it has no effect, as in TRL")
    if t.task == "dpo" and "label_smoothing" in t.given and not {"robust", "exo_pair"} & set(t.flag("loss_type", "sigmoid").split(",")):
        t.note(t.flags.pop("label_smoothing").where, "ignored: in TRL 1.16 it changes only the losses robust and exo_pair; --label_smoothing here also changes sigmoid, as in cDPO")
    if t.task == "dpo" and "ipo" in (losses := t.flag("loss_type", "").split(",")):
        t.set("loss_type", ["ipo_mean" if loss == "ipo" else loss for loss in losses], t.flags["loss_type"].where)
    if learns_unpaired(t) and not t.has("streams") and not any(s.name == "train_sampling_strategy" for s in t.settings):
        t.set("shuffle", "false", "train_sampling_strategy (TRL's default for KTO)", by_default=True)
    order(t)
    note_orpo(t)
    complete_kto(t)
    if t.has("packing_strategy"):
        setting = t.together["packing_strategy"]
        if t.has("packs"):
            t.refuse(f'{setting.where} "{setting.value}" with packing is not supported\n  fix: bfd; a step of packed rows with whole documents')
        else:
            t.note(setting.where, "without packing it has no effect, as in TRL")
    if t.task == "grpo" and float(t.flag("kl_coef", "0")) > 0 and t.get("bias_correction_kl", "true").lower() == "true":
        text = "the divergence in the loss is not multiplied by the ratio of probabilities"
        if t.has("bias_correction_kl"):
            t.refuse(f'{t.together["bias_correction_kl"].where} with beta is not supported: {text}\n  fix: false')
        t.note("", f"{text}, as in TRL with use_bias_correction_kl false; its default is true")
    if t.task in ("sft", "dpo", "grpo") and "router_aux_loss_coef" not in t.flags:
        balance(t)
    if t.task in ("dpo", "rm") and not learns_unpaired(t):
        t.note("", "in chats TRL also scores the text that the template adds after an answer's end of turn, such as a line break; here the end of turn is the last scored token")
    samples, accumulated = t.count("device_batch", 8), t.count("accumulated", 1)
    if t.task == "dpo" and accumulated > 1 and "sft" in t.flag("loss_type", "sigmoid").split(","):
        t.note("", "the loss sft is the mean over the tokens of a step; in TRL it is the mean over each accumulated batch, and these means have equal weights")
    t.step(samples, accumulated, t.has("packs"))
    t.answers(samples, accumulated)
    if t.task == "sft" and "train_on_prompt" not in t.flags and \
            not any(s.name in ("assistant_only_loss", "completion_only_loss") and s.value.lower() == "true" for s in t.settings):
        t.note("", "in chats TRL trains on all tokens unless assistant_only_loss is set, and in completions on the text that the template adds after the end of a turn, such "
                   "as a line break; here the targets are the assistant's messages with their end of turn")


def add_sft(t, setting):
    """Adds the NLL of the better answers to the loss of pairs, with the weight of a setting."""
    if float(setting.value) > 0:
        weights = t.flags["loss_weights"].values if "loss_weights" in t.flags else ["1"]
        t.set("loss_type", [t.flag("loss_type", "sigmoid"), "sft"], setting.where)
        t.set("loss_weights", [*weights, setting.value], setting.where)


def order(t):
    """Sets --shuffle. The Trainer's sampler shuffles samples in each epoch, but not those of a stream; grpo has its own sampler."""
    if t.has("shuffles") and t.task in RL:
        t.set("shuffle", t.get("shuffles").lower(), t.together["shuffles"].where)
    elif t.has("shuffles"):
        t.note(t.together["shuffles"].where, "the samples are shuffled in each epoch, as in TRL, whatever its value")
    if t.has("streams") and t.task not in RL:
        t.set("shuffle", "false", t.together["streams"].where)
        t.note(t.together["streams"].where, "--shuffle false: a stream is read in its order")


def balance(t):
    """Sets the weight of the auxiliary loss of a mixture of experts, which TRL always adds, and this program only if config.json has output_router_logits."""
    folder = fetched(t.flag("model"))
    config = read_object(folder / "config.json") if folder else {}
    if not folder and MOE.search(t.flag("model", "")):
        t.note("", "TRL adds the auxiliary loss of experts with the config.json's router_aux_loss_coef, this program only if output_router_logits is true there: --router_aux_loss_coef")
    elif any(config.get(name) for name in ("num_experts", "num_local_experts")):
        t.set("router_aux_loss_coef", str(config.get("router_aux_loss_coef", 0.001)), "router_aux_loss_coef (TRL's default)", by_default=True)


def note_orpo(t):
    if t.flag("loss_type") == "orpo":
        t.note("", "the NLL of orpo is the mean over the chosen answers of the mean over their tokens; TRL's is the mean over all tokens of a batch, with the prompts")


def learns_unpaired(t):
    return t.flag("loss_type") in ("kto", "apo_zero_unpaired")


def complete_kto(t):
    """The mismatched pairs of kto are those of a step, which the reference can only evaluate then."""
    if t.flag("loss_type") != "kto":
        return
    t.note("", "the estimate of the KL divergence in kto is the mean over the mismatched pairs of a whole step; TRL's trainer has one for each batch of a device")
    if "ref_mode" in t.flags:
        t.note(t.flags.pop("ref_mode").where, "the reference stays in memory (--ref_mode resident): the mismatched pairs of kto are only known in their step")


def complete_gkd(t):
    """GKD is the distillation with lmbda, which has defaults of its own."""
    for flag, value in GKD.items():
        if flag in t.by_default:
            t.by_default.discard(flag)
            t.flags.pop(flag)
        t.set(flag, value, f"{flag} (TRL's default for GKD)", by_default=True)
    if float(t.flag("temperature", "1")) != 1:
        t.note("", "--temperature also divides the logits in the loss; in TRL's GKD it only does so in sampling")


def targets_of(t):
    t.note("", "PEFT's default targets depend on the architecture; q_proj,v_proj is the default for Llama, Mistral and Qwen"
           ) if not t.has("lora_targets") and not t.own["program"].endswith("train_gpt2") else None
    return "c_attn" if t.own["program"].endswith("train_gpt2") else "q_proj,v_proj"


def set_rewards(t):
    where, values = t.together["reward_funcs"].where, [v for value in t.together["reward_funcs"].values for v in value.split(",")]
    known = [v for v in values if (REWARDS / f"{v}.py").is_file()]
    named = [v for v in values if v not in known and "/" not in v and not v.endswith(".py")]
    if named:
        t.flags.pop("reward_weights", None)  # the refused names have weights, too many for the others
    if "get_soft_overlong_punishment" in named:
        t.refuse(f'{where} "get_soft_overlong_punishment" is not a separate reward here\n  fix: --overlong_buffer 256, a number of '
                 "tokens before --max_new_tokens, in addition to --reward")
    elif named:
        t.refuse(f'{where} "{named[0]}" is a function, which this program cannot load\n  fix: --reward FILE.py, with reward(prompts, answers, labels)')
    else:
        t.set("reward", [str(REWARDS / f"{v}.py") if v in known else v for v in values], where)
        if known:
            t.note(where, f"{' and '.join(known)} of TRL: the Python that runs rewards needs TRL, and math_verify for mathematical answers")


TRL = Peer("TRL", "1.16", ROWS, defaults, None, complete, "trainer_output", (TRAINER,))
