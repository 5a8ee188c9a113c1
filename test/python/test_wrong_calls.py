"""A table of calls that are refused with one message that has a cause and a fix; no model is written. test_options.cpp has the calls that are wrong by
their flags alone."""

import json
import shlex
import shutil

import numpy as np
import pytest
from runs import DEMO, GOLDEN, PAIRS, PROGRAM, call, change_json, command, model_with, random_documents, refused, write_data, write_judged, write_lines
from test_grpo import rollouts
from test_preference import MODELS, random_pairs, reward_model, write_pairs
from test_sampling import with_tokenizer

# Beginnings of calls; names without a folder are files of `place`.
SFT, EVAL, GENERATE = "sft --data data.safetensors --max_len 64", "eval --data data.safetensors --max_len 64", "generate --prompt a"
DPO, RM = "dpo --model golden/llama2 --data pairs.safetensors --max_len 67", "rm --model golden/llama2 --data pairs.safetensors --max_len 67"
KTO = f"{DPO} --data judged.safetensors --loss_type kto"
GRPO, PPO = "grpo --rollouts rollouts --max_len 67", "ppo --rollouts rollouts --max_len 67"
DISTILL = "distill --model golden/llama2 --data data.safetensors --max_len 64 --max_new_tokens 8"
ANSWERS, PLAN = "grpo --data prompts.safetensors --max_new_tokens 9 --max_len 67", "sft --plan --model none --preset qwen2.5-0.5b"
MOE = "sft --model golden/qwen2_moe --data golden/qwen2_moe/golden.safetensors --max_len 128"
MOE_LORA = f"{MOE} --lora_rank 3 --lora_targets q_proj,gate_proj,up_proj,down_proj"
HYBRID = "sft --model golden/qwen35 --data golden/qwen35/golden.safetensors --max_len 128"
MIXTRAL = "sft --model golden/mixtral --data golden/mixtral/golden.safetensors --max_len 128"
WRONG = [
    # ranks
    (f"{SFT} --ranks 4 --ring_attn_size 3", "--ring_attn_size 3 does not divide 4 ranks", "1, 2, 4"),
    (f"{SFT} --ranks 2 --ring_attn_size 2 --ring_attn_head_stride 3", "--ring_attn_head_stride 3 does not divide the model's 2 KV heads"),
    (f"{SFT} --ranks 2 --ring_attn_size 2 --ring_attn_head_stride 1 --sp_mode ring", "--ring_attn_head_stride is for --sp_mode gather"),
    (f"{SFT} --zero_stage 5", "--zero_stage", "0, 1, 2 or 3"), (f"{SFT} --comm_timeout 0", "--comm_timeout", "above 0"),
    (f"{SFT} --rank 0/2", "--rank and --rendezvous belong together"),
    *((f"{SFT} --rendezvous h:1 --rank {rank}", f'--rank "{rank}" is not R/N') for rank in ("0", "2/2", "-1/2", "0/0", "1/2/3", "1/99999999999999999999")),
    (f"{SFT} --rank 1/2 --rendezvous h:1", "--rendezvous is for ranks with a GPU each", "\n  fix: for ranks on CPUs scripts/launch.sh -np 2 ./train_llama "),
    (f"{DPO} --model golden/qwen3 --ref_model golden/smollm2 --ranks 2 --ring_attn_size 2 --sp_mode ulysses", "9 query heads cannot be dealt to 2 ranks"),
    (f"{DPO} --model golden/qwen3 --ref_model golden/smollm2 --ranks 2 --ring_attn_size 2 --ring_attn_head_stride 2",
     "--ring_attn_head_stride 2", "3 KV heads"),
    (f"{PLAN} --ranks 4 --ring_attn_size 4 --sp_mode ulysses", "14 query heads cannot be dealt to 4 ranks"),
    (f"{MIXTRAL} --ranks 4 --expert_parallel 4", "--expert_parallel 4 does not divide 3 experts", "one of 1, which divide 4 ranks and 3 experts"),
    (f"{MIXTRAL} --ranks 1 --expert_parallel 3", "--expert_parallel 3 does not divide 1 rank\n", "one of 1, which divide 1 rank and 3 experts"),
    (f"{DPO} --model golden/qwen35 --share_prompts true", "--share_prompts true: linear attention reads the tokens of a document in their order",
     "fix: --share_prompts auto"),
    (f"{HYBRID} --fp8", "this model has linear attention", "leave --fp8 out"),
    (f"{SFT} --ranks 4 --tensor_parallel 3", "--tensor_parallel 3 does not divide 4 ranks", "1, 2, 4"),
    (f"{SFT} --ranks 4 --tensor_parallel 2 --ring_attn_size 4", "--ring_attn_size 4 does not divide 2 ranks", "1, 2"),
    (f"{SFT} --ranks 3 --tensor_parallel 3", "--tensor_parallel 3", "4 query and 2 key heads", "smaller --tensor_parallel"),
    (f"{HYBRID} --ranks 3 --tensor_parallel 3", "its linear attention has 2 key heads", "the same number", "smaller --tensor_parallel"),
    (f"{SFT} --ranks 2 --tensor_parallel 2 --lora_rank 4 --load_in 4bit", "blocks of 64 weights", "--load_in 8bit"),
    ("sft --model golden/phi4 --data data.safetensors --ranks 2 --tensor_parallel 2", "it has 1 key heads", "one tensor", "leave it out"),
    ("sft --model golden/olmo2 --data data.safetensors --ranks 4 --tensor_parallel 4", "it has 2 key heads", "one norm is over all key heads"),
    (f"{SFT} --model golden/llama3 --ranks 2 --tensor_parallel 2 --fp8", "sizes are multiples of 16", "the part of one of 2 ranks", "leave --fp8 out"),
    (f"{SFT} --ranks 6 --tensor_parallel 2 --zero_group 3", "--tensor_parallel 2 with --zero_group", "a multiple"),
    (f"{SFT} --zero_group 2", "--zero_group 2 does not divide 1 rank\n  fix: leave it out"),
    (f"{SFT} --ranks 2 --expert_parallel 2", "--expert_parallel 2 divides experts, and this model has none", "leave it out"),
    # data and weights
    *((f"{call} --data long.safetensors", "document 2", "65 tokens") for call in (SFT, EVAL)),
    *((f"{call} --data asked.safetensors", "holds prompts") for call in (SFT, EVAL)),
    *((f"{call} --model spoiled", "model.norm.weight", "NaN") for call in (SFT, EVAL)),
    *((f"{SFT} --{name} '{value}'", f"unknown flag {where}") for name, value, where in (("foo", "{}", "--foo"), ("foo", '{"a": {}}', "foo.a of --foo"))),
    (f"show {EVAL}", "show is for data that is trained on, and not for eval", "pretrain, sft"), ("show sft --model golden/qwen3", "sft needs --data"),
    (f"show {SFT} --model golden/llama3 --data long.safetensors", "has tokens, whose texts only a tokenizer knows", "tokenizer.json"),
    # preferences
    (f"{DPO} --beta 0", "--beta is 0", "above 0"),
    (f"{DPO} --loss_type dpo", 'no --loss_type "dpo"', "fix: use one of sigmoid, sigmoid_norm, robust", "orpo", "sft"),
    (f"{DPO} --loss_type sigmoid,sft --loss_weights 1,2,3", "--loss_weights has 3 numbers for the 2 losses", "one for each"),
    (f"{DPO} --ref_model golden/mistral", "--ref_model", "mistral", "another vocabulary"), (f"{DPO} --ref_model golden/absent", "absent"),
    (f"{DPO} --row_tokens 100", "pair 2", "126 tokens in its two answers", "row holds 100", "--row_tokens 126"),
    (f"{SFT} --data pairs.safetensors --max_len 128", "is of kind pref, but sft trains on single documents", "fix: use the task dpo or rm, or other data"),
    *((f"{task} --data data.safetensors", f"is of kind sft, but {task[:3].strip()} trains on pairs", "data/prepare.py pref") for task in (DPO, RM)),
    (f"{RM} --margin_loss_enable --data no_margins.safetensors", "--margin_loss_enable needs margins", "no_margins"),
    (f"{RM} --margin_loss_enable --eval_data no_margins.safetensors", "--margin_loss_enable needs margins", "no_margins"),
    *((f"{call} --model judge", "is a reward model", f"no head for {call.split()[0]}") for call in (SFT, DPO, f"{GENERATE} --prompt a")),
    (f"{EVAL} --model headless --data pairs.safetensors", "has no score.weight"), (f"{DPO} --ref_model judge", "--ref_model", "is a reward model"), (f"{EVAL} --model judge", "is a reward model", "no pairs to rank", "--scores FILE"),
    *((f"{DPO} --ref_mode {mode} --ref_model {model}", *parts) for mode in ("precompute", "resident") for model, parts in (
        ("spoiled", ["spoiled/model.safetensors", "model.norm.weight", "NaN"]), ("short", ["document ", "of short is 60", "--max_len 60"]))),
    # single answers
    (f"{KTO},sigmoid", "--loss_type kto learns from single answers, and cannot be added to other losses", "--loss_type kto alone"),
    (f"{KTO} --loss_weights 1", "--loss_weights has no effect without losses of pairs", "--desirable_weight"), (f"{KTO} --beta 0", "--beta is 0", "--loss_type kto"),
    (f"{KTO} --train_batch_size 1", "--train_batch_size 1: the mismatched pairs", "2 or more"), (f"{KTO} --nll_loss_coef 1", "--nll_loss_coef has no effect"),
    (f"{KTO} --ref_mode precompute", "--ref_mode and --loss_type were both given: the mismatched pairs of kto are only known in their step"),
    (f"{KTO} --desirable_weight -1", "--desirable_weight is -1.0 but must be 0 or more"), (f"{DPO} --undesirable_weight 2", "--undesirable_weight has no effect without"),
    (f"{KTO} --data pairs.safetensors", "is of kind pref, but --loss_type kto trains on single answers with a label", "data/prepare.py unpaired"),
    (f"{DPO} --data judged.safetensors", "is of kind unpaired, but dpo trains on pairs", "data/prepare.py pref"),
    (f"{SFT} --data judged.safetensors --max_len 128", "is of kind unpaired, but sft trains on single documents", "fix: use the task dpo with --loss_type kto"),
    (f"{KTO} --ref_model golden/mistral", "--ref_model", "another vocabulary"), (f"{RM} --loss_type kto", "fix: use one of sigmoid,logexp"),
    # students
    (DISTILL, "distill needs --teacher_model DIR, the model to learn from"), (f"{DISTILL} --teacher_model absent", "absent"),
    (f"{DISTILL} --teacher_model golden/lora_llama3", "--teacher_model golden/lora_llama3 is an adapter", "the task merge"),
    (f"{DISTILL} --teacher_model judge", "judge is a reward model, which has no distributions of tokens"),
    (f"{DISTILL} --teacher_model weightless", "weightless has no weights", "the directory of a trained model"),
    (f"{DISTILL} --teacher_model golden/mistral", "golden/mistral has a vocabulary of 101 rows, golden/llama2 of 96", "use models with their tokenizers"),
    (f"{DISTILL} --model spoken --teacher_model foreign", "--teacher_model foreign has another tokenizer than spoken: id 7 is ", "the student's tokenizer"),
    (f"{DISTILL} --teacher_model spoiled", "model.norm.weight", "NaN"), (f"{DISTILL} --teacher_model golden/gpt2", "gpt2", "use train_gpt2"),
    (f"{DISTILL} --teacher_model short --max_new_tokens 30 --row_tokens 128", "an answer may end at token 68", "of --teacher_model short is 60", "lower --max_new_tokens"),
    (f"{DISTILL} --teacher_model short --on_policy 0 --max_new_tokens none --data long.safetensors --max_len 65", "document 2", "of short is 60"),
    (f"{DISTILL} --teacher_model golden/llama31 --max_new_tokens 120", "--max_new_tokens 120 may follow"),
    (f"{DISTILL} --teacher_model golden/llama31 --divergence_beta 1.5", "--divergence_beta is 1.5 but must be between 0 and 1"),
    (f"{DISTILL} --teacher_model golden/llama31 --on_policy 2", "--on_policy is 2.0 but must be between 0 and 1"),
    (f"{DISTILL} --teacher_model golden/llama31 --temperature 0", "--temperature is 0.0 but must be above 0: greedy answers have no distribution"),
    (f"{DISTILL} --teacher_model golden/llama31 --teacher_load_in 3bit", '--teacher_load_in is "3bit"'),
    (f"{DISTILL} --teacher_model golden/llama31 --on_policy 0", "--max_new_tokens has no effect", "the answers of --data are given", "--on_policy 1"),
    (f"{DISTILL} --teacher_model golden/llama31 --on_policy 0 --max_new_tokens none --data asked.safetensors", "holds prompts"),
    (f"{DISTILL} --teacher_model golden/llama31 --data pairs.safetensors", "is of kind pref, but distill trains on single documents"),
    (f"{DISTILL} --teacher_model golden/llama31 --reward length", "belongs to grpo, ppo, not to distill"), (f"{SFT} --teacher_model golden/llama31", "belongs to distill, grpo, ppo, not to sft"),
    (f"{DISTILL} --teacher_model golden/llama2 --lora_rank 4 --lora_modules_to_save lm_head --zero_stage 3", "whose head --lora_modules_to_save replaces", "--zero_stage 3 keeps"),
    # policies
    ("grpo --rollouts high_rollouts --max_len 67 --model wide --teacher_model spoken", "high_rollouts: answer 5 has token 290", "--teacher_model spoken has a vocabulary of 260"),
    (f"{GRPO} --teacher_model golden/mistral", "golden/mistral has a vocabulary of 101 rows"), (f"{GRPO} --teacher_model judge", "judge is a reward model"),
    (f"{GRPO} --teacher_model golden/lora_llama3", "is an adapter", "the task merge"), (f"{PPO} --teacher_model absent", "absent"),
    (f"{ANSWERS} --max_new_tokens 50 --teacher_model short", "an answer may end at token", "of --teacher_model short is 60"),
    (f"{GRPO} --teacher_coef 0.5", "--teacher_coef has no effect", "--teacher_model DIR"),
    (f"{DISTILL} --teacher_model golden/llama31,golden/qwen3", "but must be one model: only grpo and ppo have several teachers"),
    (f"{GRPO} --teacher_model golden/llama31,golden/qwen3", "but must be one model, or several as NAME=MODEL with different names"),
    (f"{GRPO} --teacher_model a=golden/llama31,a=golden/qwen3", "NAME=MODEL with different names"),
    (f"{ANSWERS} --teacher_model a=golden/llama31,b=golden/qwen3", "prompt 1 has the teacher null", "a field teacher in each record"),
    (f"{GRPO} --teacher_load_in 4bit", "--teacher_load_in has no effect"), (f"{GRPO} --teacher_model golden/llama31 --teacher_coef 0", "--teacher_coef is 0.0 but must be above 0"),
    (f"{GRPO} --teacher_model golden/llama31 --divergence_beta 0", "--divergence_beta", "belongs to distill, not to grpo"),
    ("grpo --max_len 67", "--rollouts"), (f"{GRPO} --advantage_estimator gae", "--advantage_estimator gae", "the task ppo"),
    (f"{GRPO} --policy_loss_type trpo", '--policy_loss_type is "trpo"\n  fix: use one of ppo,gspo,cispo'), (f"{GRPO} --temperature 0", "--temperature 0", "greedy"),
    (f"{GRPO} --eps_clip 0.1,0.2,0.3", "--eps_clip", "a lower and an upper one"), (f"{GRPO} --is_correction tis", "--is_correction", "--rollouts"),
    (f"{GRPO} --async_steps 1", "--async_steps", "--rollouts"), (f"{GRPO} --max_len 20", "rollouts", "tokens", "--row_tokens"),
    (f"{ANSWERS} --n 4 --dynamic_filtering 2,3 --rollout_batch_size 6", "--dynamic_filtering", "kept 0 of 60 prompts", "2 or less"),
    (f"{ANSWERS} --n 1 --dynamic_filtering 0,1", "--dynamic_filtering", "--n is 1"), (f"{ANSWERS} --dynamic_filtering 1,0", "smaller one first"),
    (f"{ANSWERS} --overlong_buffer 10", "--overlong_buffer 10", "--max_new_tokens 9"), (f"{ANSWERS} --async_steps 2", "--async_steps is 2", "0 or 1"),
    (f"{GRPO} --advantage_estimator grpo", "is \"grpo\"", "reinforce_baseline,rloo,group_norm"), (f"{GRPO} --loss_aggregation mean", "use one of auto,token_mean,"),
    (f"{ANSWERS} --is_correction vtrace", "--is_correction vtrace is not known", "tis, icepop or seq-mask-tis"),
    (f"{ANSWERS} --is_correction ,0.5,5", "--is_correction ,0.5,5", "tis,0.5,5"),
    (f"{ANSWERS} --is_correction icepop,0.5", "--is_correction icepop,0.5 ", "icepop,0.5,5"),
    (f"{ANSWERS} --mask_truncated --entropy_coef 0.01", "--entropy_coef 0.01", "--mask_truncated", "leave one of them out"),
    (f"{ANSWERS} --max_new_tokens 60", "prompts", "--max_new_tokens 60", "--row_tokens"), (f"{ANSWERS} --enable_ema", "--enable_ema", "no moving average"),
    (f"{ANSWERS} --reward length", "--reward length", "exact_match"), (f"{ANSWERS} --reward length.py", "--reward length.py", "tokenizer.json"),
    (f"{ANSWERS} --reward exact_match,exact_match --reward_weights 1", "--reward_weights has 1 numbers for 2 rewards"),
    (f"{ANSWERS} --reward golden/qwen3", "qwen3 is not a reward model"), (f"{ANSWERS} --rollout_batch_size 0", "--rollout_batch_size", "at least 1"),
    (f"{ANSWERS} --stop a", "--stop reads text", "no tokenizer.json"),
    (f"{ANSWERS} --repetition_penalty 1.1", "belongs to pretrain, sft, generate, not to grpo"),
    (f"{PPO} --critic_model {shlex.quote(str(DEMO))}", "--critic_model", "vocabulary"), (f"{PPO} --critic_model /nowhere", "/nowhere"),
    (f"{PPO} --critic_model golden", "config.json"), (f"{PPO} --critic_model golden/gpt2", "gpt2", "does not train", "use train_gpt2"),
    (f"{PPO} --gae_lambda 1.5", "--gae_lambda 1.5", "between 0 and 1"), (f"{PPO} --value_clip -1", "--value_clip", "0 (no bound) or more"),
    (f"{PPO} --critic_learning_rate 0", "--critic_learning_rate", "above 0"), (f"{PPO} --kl_target 1", "--kl_target", "--rollouts"),
    ("ppo --data x --kl_target 1", "--kl_target 1", "--kl_coef 0.01"), ("ppo --data x --kl_target 1,100 --kl_coef 1", "--kl_target 1,100", "1024 answers"),
    (f"{PPO} --advantage_estimator group_norm", "--advantage_estimator", "grpo"),
    # adapters
    (f"{SFT} --lora_rank 4 --lora_targets q_proj,query", '--lora_targets has "query", but'),
    (f"{SFT} --lora_rank 4 --lora_targets lm_head", '--lora_targets has "lm_head", but'), (f"{SFT} --lora_rank 33", "--lora_rank 33 is larger than"),
    (f"{SFT} --lora_rank 4 --lora_dropout 1", "--lora_dropout is 1.0 but must be"),
    (f"{SFT} --lora_rank 4 --lora_alpha 0", "--lora_alpha is 0.0 but must be above 0"),
    (f"{SFT} --lora_rank 4 --adapter golden/lora_qwen3", "--lora_rank and --adapter were both given"),
    (f"{SFT} --load_in 4bit", "--load_in 4bit freezes the matrices of the layers"), (f"{SFT} --load_in 3bit --lora_rank 4", '--load_in is "3bit"'),
    (f"{SFT} --adapter golden/lora_mistral", "so it belongs to another model than"), (f"{SFT} --adapter golden/lora_reward", "belongs to a reward model"),
    (f"{SFT} --adapter golden/llama3", "has no adapter_config.json"),
    (f"{SFT} --lora_rank 4 --lora_modules_to_save embed_tokens,norm", "--lora_modules_to_save", '"norm"'),
    (f"{SFT} --lora_modules_to_save lm_head", "--lora_modules_to_save", "--lora_rank"),
    (f"{RM} --lora_rank 4 --lora_modules_to_save lm_head", "a reward model has none"),
    # mixtures of experts
    (f"{MOE_LORA} --lora_targets q_proj,w1", '--lora_targets has "w1"', "fix: all-linear, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    (f"{MOE_LORA} --lora_targets up_proj", "one of the experts' gate and up projections", "fix: target both"),
    (f"{MOE_LORA} --lora_dropout 0.1", "lora_dropout is 0.1, but in a mixture of experts", "fix: set lora_dropout to 0"),
    (f"{MOE_LORA} --lora_rank 9", "--lora_rank 9 is larger than gate_proj", "(8, 24)", "a rank of at most 8"),
    (f"{MOE} --fp8", "--fp8", "this model has experts"), (f"{MOE} --router_aux_loss_coef -0.5", "--router_aux_loss_coef is -0.5 but must be -1"),
    (f"{SFT} --router_aux_loss_coef 0.1", "not a mixture of experts"),
    # samples
    (f"{SFT} --sample_every 1", "--sample_every prints text", "no tokenizer.json"),
    (f"{SFT} --model none --preset smollm2-135m --sample_every 1", "--sample_every prints text", "a --preset"),
    (f"{SFT} --model spoken --sample_every 1", "1 tokens", "--max_new_tokens 128", "128 positions"),
    (f"{SFT} --model endless --sample_every 1 --max_new_tokens 9", "neither bos_token_id nor eos_token_id"),
    (f"{SFT} --model spoken --sample_every 1 --max_new_tokens 0", "--max_new_tokens is 0"),
    (f"{SFT} --model spoken --sample_every 1 --temperature -1", "--temperature is -1"),
    (f"{GENERATE} --n 0", "--n is 0", "at least 1"), (f"{GENERATE} --max_sequences 0", "--max_sequences is 0"),
    (f"{SFT} --n 2", "--n belongs to distill, grpo, ppo, generate"), (f"{GENERATE} --adapter golden/lora_reward", "belongs to a reward model"),
    # other flags, and models of the other program
    *((f"{call} --model {model}", f"{name} model, which train_llama does not train\n  fix: use train_gpt2\n") for call in (SFT, PLAN)
      for model, name in (("golden/gpt2 --preset none", "gpt2 is a gpt2"), ("none --preset d24", "--preset d24 is a gpt2"))),
    (f"{SFT} --offload activations", "--offload on a CPU needs a disk", "--offload_dir DIR"),
    (f"{SFT} --offload weight --offload_dir .", '--offload is "weight"', "one of activations,optimizer,weights"),
    (f"{SFT} --offload weights --offload_dir . --load_in 4bit --lora_rank 4", "the matrices that --load_in 4bit makes small stay in memory",
     "leave weights out of --offload"),
    (f"{SFT} --offload_dir .", "has no effect without --offload", "--offload activations"),
    (f"{SFT} --offload weights --offload_dir absent", "absent: cannot create a file for --offload: No such file or directory"),
    (f"{PLAN} --device none --threads none --gpu h100 --offload weights --offload_dir .", "a GPU offloads to the host's memory", "leave --offload_dir out"),
    (f"{SFT} --neftune_noise_alpha -1", "--neftune_noise_alpha is -1.0 but must be 0 (no noise) or more"),
    *((f"{SFT} --report_to {to}", f'--report_to is "{to}"') for to in ("wandb:", "tensorboard:mine", "none:mine", "comet")),
    (f"{SFT} --profile --debug", "--profile", "--debug"), (f"{EVAL} --profile", "--profile", "not to eval"),
    (f"{SFT} --early_stopping_patience 3", "--early_stopping_patience", "--eval_data"),
    (f"{PLAN} --gpu a100 --fp8", "--fp8 needs tensor cores of compute capability 8.9 or later, and --gpu a100 has none"),
    (f"{SFT} --model golden/gemma3 --fp8", "sizes are multiples of 16", "one of (80, 24)"),
    ("dpo --plan --loss_type simgoid", 'there is no --loss_type "simgoid"'),
    (f"{PLAN} --fit --timeline step.json", "--timeline belongs to --plan without --fit"),
    *((f"{PLAN} --timeline step.json {flags}", "--timeline: there is no prediction", why, "--gpu h100")
      for flags, why in (("--gpu 80", " for --gpu 80\n"), ("--gpu h100 --dtype f32", "--dtype bf16"), ("", " without --gpu\n"))),
    (f"{PLAN} --gpu h100 --timeline none/f.json", "none/f.json"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory, data, prompts):
    """A directory with the files that the calls name."""
    place = tmp_path_factory.mktemp("place")
    for name, target in {"golden": GOLDEN, "data.safetensors": data, "prompts.safetensors": prompts, "pairs.safetensors": PAIRS}.items():
        (place / name).symlink_to(target)
    documents = random_documents(4)
    write_data(place / "long.safetensors", [*documents[:2], (np.full(65, 5), np.arange(65) > 0)])
    write_data(place / "asked.safetensors", [(ids, 0 * mask) for ids, mask in documents], kind="prompts")
    write_judged(place / "judged.safetensors")
    write_lines(place / "rollouts", rollouts())
    write_lines(place / "high_rollouts", rollouts(completion_ids=[290] * len(rollouts()[4]["completion_ids"])))
    write_pairs(place / "no_margins.safetensors", random_pairs(2))
    shutil.copytree(reward_model(place / "judge", "llama2", MODELS["llama2"]["score"]), place / "headless")
    (place / "headless" / "model-score.safetensors").unlink()
    change_json(place / "headless" / "model.safetensors.index.json", weight_map={"model.norm.weight": "model-backbone.safetensors"})
    model_with(place / "spoiled", "llama31", lambda tensors: np.put(tensors["model.norm.weight"], 3, np.nan))
    model_with(place / "short", "llama31", max_position_embeddings=60)
    (place / "weightless").mkdir()
    shutil.copy(GOLDEN / "llama31" / "config.json", place / "weightless")
    for name, end in {"foreign": 2, "spoken": 2, "endless": None}.items():
        (place / name).mkdir()
        with_tokenizer(place / name, eos_token_id=end)
    model_with(place / "wide", change=lambda tensors: tensors.update({name: np.resize(value, (300, value.shape[1])) for name, value in tensors.items() if len(value) == 96}),
               vocab_size=300)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(place / "spoken" / file, place / "wide")
    tokenizer = json.loads((place / "foreign" / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    one, other = (next(token for token, id in ids.items() if id == number) for number in (7, 8))
    ids[one], ids[other] = 8, 7
    change_json(place / "foreign" / "tokenizer.json", model={**tokenizer["model"], "vocab": ids})
    return place


def words_of(text, output):
    """The words of a call. The last value of a flag counts, and the value "none" removes the flag."""
    shows, (task, *words) = text.startswith("show "), shlex.split(text.removeprefix("show "))
    flags = {} if task in ("eval", "generate") else {"output_dir": output}
    for word in words:
        if word.startswith("--"):
            flags[name := word[2:]] = "true"
        else:
            flags[name] = None if word == "none" else word
    program, *arguments = command(task, **flags)
    return [program, *["show"] * shows, *arguments]


def test_show_without_a_task_is_of_sft():
    error = call([str(PROGRAM), "show", "--per_device_train_batch_size", "3"]).stderr
    assert "train_llama: 3 problems:" in error and "--per_device_train_batch_size 3: --train_batch_size 3" in error and "sft needs --data" in error


@pytest.mark.parametrize("text, parts", [(text, parts) for text, *parts in WRONG], ids=[text for text, *_ in WRONG])
def test_a_wrong_call_is_refused(text, parts, place, tmp_path):
    refused(words_of(text, tmp_path / "out"), *parts, cwd=place)
    assert not list(tmp_path.rglob("*model*"))
