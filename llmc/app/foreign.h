// The flags of OpenRLHF, TRL and Axolotl that options.def does not have as aliases, and what each is here. Names are separated by commas.
#pragma once
#include "../train/options.h"

// Switches of OpenRLHF that stand for a value of one of our flags.
struct Switch {
    const char *names, *flag, *value;
};
inline constexpr Switch switches[] = {
    {"gradient_checkpointing_enable,model.gradient_checkpointing_enable,actor.gradient_checkpointing_enable,gradient_checkpointing",
     "recompute", "layer"},
    {"load_enable,ckpt.load_enable,load_checkpoint", "resume", "auto"},
    {"ipo_enable,model.ipo_enable,ipo", "loss_type", "ipo_sum"},
};

// OpenRLHF's names for the samples N of a micro-batch. They set row_tokens to N * max_len, or for pairs to 2 N * max_len.
inline constexpr const char *micro_batch_size = "micro_batch_size,train.micro_batch_size,micro_train_batch_size";

// Names of OpenRLHF that have no meaning here; they match with any prefix ("ds.packing_samples"). `values` are the values that can be
// accepted; if it is empty, all can.
struct Meaningless {
    const char *names, *values, *note;
};
inline constexpr Meaningless meaningless[] = {
    {"attn_implementation,flash_attn", "", "attention is this program's own: exact, blocked, on packed rows"},
    {"packing_samples", "", "samples are always packed into rows of --row_tokens"},
    {"use_dynamic_batch,dynamic_batch_enable", "", "rows are always filled by tokens (--row_tokens)"},
    {"param_dtype,bf16", "bf16,true,auto", "--dtype decides; auto is f32 on the CPU"},
    {"grad_accum_dtype", "", "gradients of parameters are always summed in float"},
    {"optim", "adam", "the optimizer is AdamW"},
    {"muon.lr,muon.momentum,muon.ns_steps,muon.nesterov,muon.no_nesterov", "", "the optimizer is AdamW"},
    {"adam_offload,zpg,overlap_comm,deepcompile,torch_compile,disable_trace_cache,use_liger_kernel", "",
     "it belongs to DeepSpeed or PyTorch; nothing here needs it"},
    {"gradient_checkpointing_reentrant,gradient_checkpointing_use_reentrant", "", "--recompute decides what is computed again"},
    {"disable_fast_tokenizer,dataloader_num_workers", "", "samples are tokenised once, by data/prepare.py"},
    {"dataset_split,train_split,eval.split,eval_split", "train", "a hub data set is read from its train split"},
    {"full_determinism_enable,full_determinism", "", "runs are deterministic anyway"},
    {"ckpt.path,ckpt_path", "", "checkpoints are written to output_dir/step_N"},
    {"max_mem,max_ckpt_mem", "", "--max_num limits the checkpoints kept"},
    {"save_hf,save_hf_ckpt", "", "every checkpoint holds the model as a Hugging Face directory"},
    {"disable_ds,disable_ds_ckpt", "", "every checkpoint holds the optimizer, too; --save_steps -1 writes none"},
    {"use_universal_ckpt,use_ds_universal_ckpt", "", "every checkpoint can be resumed by any number of ranks"},
    {"tensorboard_dir,use_tensorboard,use_wandb,wandb.key,wandb.org,wandb.group,wandb.project,wandb.run_name", "",
     "metrics go to --log, one JSON object a line"},
    {"wandb_org,wandb_group,wandb_project,wandb_run_name", "", "metrics go to --log, one JSON object a line"},
    {"compute_fp32_loss_enable,compute_fp32_loss", "", "rewards and losses are always computed in float or double"},
    {"value_head_prefix", "score", "the head of a reward model is score.weight"},
    {"ref.offload,ref_offload", "", "--ref_mode precompute needs no reference in memory while training"},
    {"local_rank", "", "MPI tells each rank its number"},
    {"aux_loss_coef", "0,0.0", "there are no mixtures of experts"},
    {"experts_implementation", "", "there are no mixtures of experts"},
    {"tensor_parallel_size,ds_tensor_parallel_size", "1", "there is no tensor parallelism"},
    {"lora.rank,lora_rank", "0", "all weights are trained"},
    {"lora.alpha,lora_alpha,lora.dropout,lora_dropout,lora.target_modules,target_modules", "", "all weights are trained"},
};

// Names of OpenRLHF, TRL or Axolotl that are refused, because a run must not silently lose their meaning, or because we have no such flag.
struct Refused {
    const char *names, *fix;
};
inline constexpr Refused refused[] = {
    {"pretrain_mode_enable,model.pretrain_mode_enable,pretrain_mode", "the task pretrain trains on all tokens"},
    {"load_in_4bit,ds.load_in_4bit", "weights are trained in f32 or bf16 (--dtype); leave it out"},
    {"use_ms", "ModelScope is not read; give a local directory"},
    {"use_peft,adapter,lora_r,lora_target_modules,lora_target_linear", "all weights are trained; leave it out"},
    {"assistant_only_loss,completion_only_loss,train_on_inputs,roles_to_train,train_on_eos",
     "the fields of a record say what is a target (docs/data.md); leave it out"},
    {"flash_attention,sdp_attention", "attention is this program's own; leave it out"},
    {"pad_to_multiple_of,pad_to_sequence_len", "rows are padded by the program; leave it out"},
    {"reward_model", "the task rm trains one"},
};

// Names of TRL and Axolotl, and the flag to use instead. If that is a flag's name alone, it takes the same values.
struct Foreign {
    const char *names, *flag;
};
inline constexpr Foreign foreign[] = {
    {"per_device_train_batch_size,gradient_accumulation_steps",
     "train_batch_size, the samples of a whole step; rows and ranks follow from it"},
    {"per_device_eval_batch_size,packing,packing_strategy,eval_packing,sample_packing,eval_sample_packing,padding_free",
     "row_tokens; samples are always packed into rows, and see only themselves"},
    {"num_train_epochs,num_epochs,epochs", "max_epochs"},
    {"max_length,max_seq_length,sequence_len,cutoff_len", "max_len"},
    {"lr_scheduler_type", "lr_scheduler"},
    {"warmup_ratio", "lr_warmup_ratio"},
    {"warmup_steps", "lr_warmup_ratio, a share of all steps"},
    {"cosine_min_lr_ratio", "min_lr_ratio"},
    {"max_grad_norm,gradient_clipping", "max_norm"},
    {"adam_beta1,adam_beta2", "adam_betas 0.9,0.95"},
    {"adam_epsilon", "adam_eps"},
    {"base_model", "model"},
    {"dataset_name,datasets,train_file", "data"},
    {"chat_template,chat_template_path", "tokenizer_chat_template, the text of a template"},
    {"logging_dir,report_to", "log FILE"},
    {"overwrite_output_dir", "overwrite"},
    {"save_total_limit", "max_num"},
    {"save_strategy,saves_per_epoch", "save_steps, which counts optimizer steps"},
    {"resume_from_checkpoint,auto_resume_from_checkpoints", "resume auto"},
    {"eval_strategy,evaluation_strategy,evals_per_epoch", "eval_steps, which counts optimizer steps"},
    {"val_set_size", "eval_fraction"},
    {"test_datasets", "eval_data"},
    {"fp16,torch_dtype", "dtype bf16"},
    {"use_cpu,no_cuda", "device cpu"},
    {"excess_length_strategy", "truncation"},
    {"num_samples,max_train_samples", "max_samples"},
    {"sequence_parallel_degree,sequence_parallel_size,context_parallel_size,cp_size,sp_size,parallelism_config_cp_size,parallelism_config_sp_size",
     "ring_attn_size, the ranks that share one sequence"},
    {"heads_k_stride", "ring_attn_head_stride, which counts KV heads"},
    {"ring_attn_func,cp_rotate_method,cp_comm_strategy,parallelism_config_cp_comm_strategy,sp_backend,parallelism_config_sp_backend",
     "sp_mode ring, gather or ulysses; the layout of each row is chosen by the program"},
    {"deepspeed,deepspeed_config_file,fsdp,fsdp_config,fsdp_sharding_strategy,dp_shard_size,parallelism_config_dp_shard_size",
     "zero_stage 0, 1 or 2, over all ranks"},
    {"dp_replicate_size,parallelism_config_dp_replicate_size",
     "ring_attn_size; the ranks that it does not take share the step's rows"},
    {"tp_size,parallelism_config_tp_size", "ring_attn_size; there is no tensor parallelism"},
    {"num_processes,nproc_per_node", "ranks N, or mpirun -np N in front of the program"},
    {"num_machines,machine_rank,main_process_ip,main_process_port,nnodes,node_rank,master_addr,master_port",
     "rank R --world_size W --rendezvous HOST:PORT, or mpirun"},
    {"ddp_timeout", "comm_timeout"},
    {"dpo_beta,rl_beta,orpo_alpha", "beta"},
    {"dpo_loss_type", "loss_type"},
    {"rl", "loss_type, a flag of the task dpo"},
    {"dpo_loss_weights", "loss_weights"},
    {"dpo_label_smoothing", "label_smoothing"},
    {"rpo_alpha,dpo_norm_loss", "loss_type sigmoid,sft --loss_weights 1,ALPHA, or nll_loss_coef"},
    {"reference_free", "loss_type simpo"},
    {"precompute_ref_log_probs", "ref_mode precompute, which is the default"},
    {"ref_model_name_or_path,ref_model_path", "ref_model"},
    {"cpo_alpha", "loss_type simpo,sft --loss_weights 1,ALPHA"},
    {"num_generations", "n"},
    {"max_completion_length", "max_new_tokens"},
    {"num_iterations", "max_epochs"},
    {"generation_batch_size,steps_per_generation", "rollout_batch_size, which counts prompts"},
    {"epsilon,epsilon_high,delta", "eps_clip, eps_clip_low_high, dual_clip"},
    {"importance_sampling_level", "policy_loss_type gspo"},
    {"scale_rewards", "advantage_estimator group_norm or dr_grpo"},
    {"reward_funcs", "reward FILE.py"},
    {"mask_truncated_completions", "stop_properly_coef, which lowers their reward instead"},
};

// Values of TRL and Axolotl, and what they are here.
struct ForeignValue {
    const char *flag, *theirs, *ours;
};
inline constexpr ForeignValue foreign_values[] = {
    {"dtype", "bfloat16", "bf16"},
    {"dtype", "float32", "f32"},
    {"max_steps", "-1", "0"},
    {"truncation", "truncate", "keep"},
};

// Flags whose default differs from OpenRLHF's. (pretrain is compared with OpenRLHF's SFT, which also trains on plain text.)
struct Difference {
    unsigned tasks;
    const char *flag, *theirs;
};
inline constexpr Difference differences[] = {
    {PRETRAIN | SFT, "max_epochs", "2"},
    {PRETRAIN, "learning_rate", "5e-6"},
    {DPO, "learning_rate", "1e-5"},
    {PRETRAIN | SFT, "input_key", "\"input\""},
    {PRETRAIN | SFT | PAIRS, "truncation", "cut, and the last token replaced by EOS"},
    {RM, "eval_fraction", "0.01 without eval_data, of what is trained on"},
    {PRETRAIN | SFT | PAIRS | EVAL, "dtype", "bf16"},
    {PRETRAIN | SFT, "row_tokens", "8 samples of max_len"},
    {DPO, "row_tokens", "8 pairs of 2 * max_len"},
    {DPO, "ref_mode", "resident"},
    {PRETRAIN | SFT | PAIRS, "zero_stage", "2"},
};
