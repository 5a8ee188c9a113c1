#!/usr/bin/env python3
"""The conformance cases: each is a silent bug that public threads report, with the right value of a small step and the value that the bug gives.

    pip install torch safetensors numpy
    python3 test/conformance/make.py

writes test/conformance/cases.json, the reward model test/conformance/reward and the tokenizer test/conformance/chat. docs/conformance.md describes the fields. The values are those of
reference.py and objectives.py in float64, which share no code with any trainer; models and adapters are those of test/golden."""

import json
import random
import shutil
from pathlib import Path

import chats
import torch
from objectives import compute, grpo, token_logps
from reference import Model
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
EOS, FIRST, VOCAB = 2, 3, 96
TOLERANCE = {"loss": 1e-5, "grad_norm": 1e-4, "logps": 1e-5, "value_loss": 1e-5}  # relative; docs/conformance.md derives them
CLEAR = 10  # tolerances, by which the wrong value differs at least

MICRO = {"micro_batches": [[0, 1], [2], [3, 4]]}
JUDGED = {"loss_type": "kto", "beta": 0.1}
WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
GAE = {"gamma": 0.9, "gae_lambda": 0.8}
PAIRS = {"loss_type": "sigmoid", "beta": 0.1}
KL = {"kl_coef": 0.2, "kl_use_loss": True, "kl_estimator": "k3"}
TP = {"ranks": 2, "tensor_parallel": 2}
RING = {"ranks": 2, "ring_attn_size": 2}

# name; model, with an adapter behind a +; the bug of reference.py or objectives.py; the bug in words; threads; settings
SFT = [
    # packed rows
    ("packed_attention", "qwen3", "attention_crosses", "a packed document attends to those before it", "huggingface/trl#805 huggingface/nanoVLM#204", {"packed": True}),
    ("packed_positions", "gpt2", "positions_run_on", "positions run on across the documents of a row", "hiyouga/LlamaFactory#2289 huggingface/nanoVLM#204", {"packed": True}),
    ("packed_convolution", "qwen35", "convolution_crosses", "a short convolution reads the previous document", "NVIDIA-NeMo/Automodel#2147", {"packed": True}),
    ("packed_state", "qwen35", "state_crosses", "the state of linear attention is not reset between documents", "fla-org/flash-linear-attention#1184 pytorch/torchtitan#3892", {"packed": True}),
    ("packed_border_target", "llama3", "target_across_border", "the last token of a document is trained to predict the next document", "NVIDIA-BioNeMo/bionemo-recipes#1449", {"packed": True}),
    ("packed_longrope", "phi35", "length_of_the_row", "the row's length, not the document's, selects longrope's factors", "ggml-org/llama.cpp#24875", {"packed": True}),
    ("padded_positions", "gpt2", "positions_count_padding", "padding on the left shifts positions", "ndif-team/nnsight#672 huggingface/trl#6800", {"padding_side": "left"}),
    # the mean
    ("accumulated_mean", "qwen3", "mean_of_micro_batches", "the loss is a mean of the micro-batches' means", "huggingface/transformers#37766 unslothai/unsloth-zoo#6", MICRO),
    ("mean_over_ranks", "qwen3", "mean_of_ranks", "the loss is a mean of the ranks' means", "huggingface/transformers#34242", {"ranks": 2}),
    ("mean_over_documents", "llama3", "mean_of_documents", "each document weighs the same, whatever its number of targets", "modelscope/ms-swift#10076", {"micro_batches": [[0], [1], [2], [3], [4]]}),
    # targets
    ("labels_shifted_twice", "llama3", "shifted_twice", "labels are shifted by the data and again by the model", "huggingface/transformers#47394 huggingface/transformers#44642", {}),
    ("end_of_text_masked", "llama3", "eos_is_padding", "EOS is the padding token and loses its target", "meta-pytorch/torchtune#949 verl-project/verl#655", {}),
    ("prompt_masked", "llama3", "prompt_learned", "the mask of the prompt is lost, and all tokens are trained", "karpathy/nanochat#582", {}),
    ("first_token_of_answer", "llama3", "first_token_lost", "the mask is one token late", "jingyaogong/minimind#621", {}),
    # ranks that share a sequence or the tensors
    ("target_between_ranks", "llama3", "target_lost_between_ranks", "each rank shifts its own piece of the labels", "huggingface/transformers#48493 huggingface/transformers#36607", RING),
    ("mean_of_pieces", "llama3", "mean_of_pieces", "each rank averages its own piece of the sequence", "hiyouga/LlamaFactory#10475", RING),
    ("divided_head", "llama3", "log_of_ranks_added", "the divided loss sums gathered logits once for each rank", "NVIDIA/Megatron-LM#7452", TP),
    ("divided_vocabulary", "mistral", "padded_vocabulary", "rows that pad the vocabulary take part in the softmax", "NVIDIA/Megatron-LM#1754", TP),
    ("divided_head_norms", "qwen3", "head_norm_of_one_rank", "the gradient of a norm shared by all heads is not summed over ranks", "NVIDIA-NeMo/RL#3716 NVIDIA/Megatron-LM#7452", TP),
    ("divided_gradient_norm", "qwen3", "replicated_counted_twice", "tensors that each rank has whole count once for each rank in the gradient norm", "NVIDIA-NeMo/RL#3788 ROCm/TransformerEngine#715", TP),
    ("divided_lora", "qwen3+lora_qwen3", "lora_factor_of_one_rank", "the gradient of the whole LoRA factor is not summed over ranks", "modelscope/mcore-bridge#173", TP),
    # attention
    ("grouped_key_heads", "smollm2", "key_heads_tiled", "key heads are tiled instead of repeated one by one", "onnx/onnx#7274", {}),
    ("attention_bias", "qwen2", "attention_bias_dropped", "the biases of q, k and v are not loaded", "sbryngelson/ANEForge#253", {}),
    ("window_length", "mistral", "window_off_by_one", "the sliding window is one token too long", "huggingface/transformers#39408 NVIDIA-NeMo/Megatron-Bridge#2656", {}),
    ("window_applied", "phi3", "window_ignored", "the sliding window is not applied", "proger/hippogriff#7", {}),
    ("window_layers", "qwen2_window", "window_in_other_layers", "the window is in the layers that should have none", "huggingface/transformers#35896", {}),
    ("window_switched_off", "qwen2", "unused_window", "a window is applied although use_sliding_window is false", "huggingface/transformers#38002", {}),
    ("head_norm_first", "qwen3", "norm_behind_rotation", "heads are normalised after the rotation", "tenstorrent/tt-mlir#9125", {}),
    ("norm_over_heads", "olmo2", "norm_of_each_head", "OLMo 2's norm is taken over each head, not over all", "EleutherAI/gpt-neox#1424", {}),
    ("output_gate", "qwen35", "gates_behind_all_queries", "the gates of attention's output are read behind all queries, not behind each head's", "llmmanorg/llmman#16", {}),
    # rotation
    ("rotated_pairs", "llama3", "interleaved_rotation", "neighbouring channels are rotated in place of halves", "karpathy/nanochat#264 huggingface/transformers#25199", {}),
    ("rotation_base", "llama3", "default_theta", "rope_theta is ignored", "google/gemma.cpp#986", {}),
    ("partial_rotation", "qwen35_tied", "partial_rotation_ignored", "all channels are rotated in place of a part", "huggingface/transformers#48242", {}),
    ("unrotated_layers", "smollm3", "every_layer_rotated", "layers without rotation are rotated", "airockchip/rknn-llm#501 onnxruntime/mobius#233", {}),
    ("rope_linear", "llama_linear", "scaling_ignored", "linear rope scaling is ignored", "Blaizzy/mlx-vlm#1709", {}),
    ("rope_llama3", "llama31", "scaling_ignored", "llama3 rope scaling is ignored", "sbryngelson/ANEForge#58 felafax/felafax#59", {}),
    ("rope_yarn", "llama_yarn", "scaling_ignored", "yarn in rope_parameters is dropped", "sgl-project/sglang#26187", {}),
    ("rope_yarn_factor", "llama_yarn", "attention_factor_missing", "yarn's factor of attention is missing", "turboderp-org/exllamav3#259", {}),
    ("rope_longrope_short", "phi35", "long_factors_always", "longrope's long factors are used for short documents", "lablup/mlxcel#1358", {}),
    ("rope_longrope_long", "phi4", "short_factors_always", "longrope's short factors are used for long documents", "ggml-org/llama.cpp#6849", {}),
    ("rope_of_local_layers", "gemma3_wide", "one_rotation_for_all", "windowed layers are rotated like the others", "google/gemma.cpp#986 ollama/ollama#13452", {}),
    ("rope_scaling_of_local_layers", "gemma3", "local_rotation_scaled", "the scaling of the global rotation is applied to windowed layers", "antonellof/ferrox#39", {}),
    # factors, norms and activations
    ("attention_scale", "gemma3", "scale_of_head_dim", "query_pre_attn_scalar is ignored", "ggml-org/llama.cpp#8444 antonellof/ferrox#40", {}),
    ("norm_plus_one", "gemma3", "norm_without_one", "norms multiply by w in place of 1 + w", "linkedin/Liger-Kernel#74", {}),
    ("gate_and_up", "phi3", "gate_and_up_swapped", "the activation is applied to the up projection", "ml-explore/mlx-lm#767", {}),
    ("granite_logits", "granite", "logits_multiplied", "logits are multiplied by logits_scaling in place of divided", "unslothai/unsloth#1218", {}),
    ("granite_attention", "granite", "scale_of_head_dim", "attention_multiplier is ignored", "OpenNMT/CTranslate2#1882", {}),
    ("granite_residual", "granite", "residual_unscaled", "residual_multiplier is ignored", "OpenNMT/CTranslate2#1882", {}),
    ("granite_embedding", "granite", "embedding_unscaled", "embedding_multiplier is ignored", "OpenNMT/CTranslate2#1882", {}),
    ("tied_gradient", "llama32", "tied_embedding_untrained", "a tied embedding gets the gradient of the head alone", "paiml/entrenar#314", {}),
    # experts and linear attention
    ("experts_normalised", "mixtral", "other_normalisation", "the weights of the chosen experts are not normalised", "pytorch/torchtitan#1448 NVIDIA/TensorRT-LLM#2752", {}),
    ("experts_unnormalised", "qwen2_moe", "other_normalisation", "the experts' weights are normalised although norm_topk_prob is false", "sgl-project/sglang#35160", {}),
    ("shared_expert", "qwen2_moe", "shared_expert_ungated", "the gate of the shared expert is ignored", "NousResearch/torchtitan#36", {}),
    ("balance_added", "mixtral", "balance_dropped", "the auxiliary loss is not added", "huggingface/transformers#44586", {"router_aux_loss_coef": 0.5}),
    ("balance_softmax", "qwen2_moe", "softmax_twice", "the auxiliary loss takes the softmax of probabilities", "huggingface/transformers#45120", {"router_aux_loss_coef": 0.5}),
    ("delta_heads", "qwen35", "delta_heads_tiled", "heads of queries and keys are tiled instead of repeated one by one", "paiml/aprender#3527", {}),
    ("delta_norm", "qwen35", "one_in_the_gated_norm", "the gated norm multiplies by 1 + w like the other norms", "NeuraLegion/shainet#176", {}),
    ("delta_scale", "qwen35", "delta_queries_unscaled", "queries of linear attention are not scaled", "NeuraLegion/shainet#176", {}),
    # adapters
    ("lora_rank_stabilised", "qwen3+lora_qwen3", "rslora_ignored", "use_rslora is ignored", "NVIDIA/TensorRT-LLM#1668", {}),
    ("lora_scale", "llama3+lora_llama3", "alpha_ignored", "lora_alpha / r is ignored", "cloneofsimo/lora#187", {}),
    ("lora_trained_head", "smollm2+lora_tied", "trained_head_tied_again", "a head trained beside an adapter is replaced by the tied embedding", "hiyouga/LlamaFactory#10832 unslothai/unsloth#9331", {}),
]
DPO = [
    ("dpo_reference", "qwen3+lora_qwen3", "reference_is_the_policy", "the adapter stays on in the reference", "huggingface/trl#1500", PAIRS),
    ("dpo_prompt", "qwen3", "prompt_learned", "the prompt's tokens count in an answer's log-probability", "OpenRLHF/OpenRLHF#237", {**PAIRS, "loss_type": "ipo_mean"}),
    ("dpo_label_smoothing", "qwen3", "smoothing_ignored", "label_smoothing has no effect", "huggingface/trl#1035", {**PAIRS, "label_smoothing": 0.2}),
    ("ipo_means", "qwen3", "log_probabilities_summed", "IPO takes sums of log-probabilities in place of means", "huggingface/trl#1265", {**PAIRS, "loss_type": "ipo_mean"}),
    ("simpo_length", "qwen3", "length_of_the_document", "means of log-probabilities are divided by the length of the whole sequence", "jingyaogong/minimind#298", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5}),
]
KTO = [
    ("kto_mismatched_pairs", "qwen3", "answers_reversed", "the middle one of an odd number of answers is paired with its own prompt", "huggingface/trl#1911 hiyouga/LlamaFactory#7509", JUDGED),
    ("kto_divergence", "qwen3", "divergence_of_the_other_label", "the divergence for one label is the mean log-ratio of the other label's answers", "meta-pytorch/torchtune#1864 ContextualAI/HALOs#4", JUDGED),
    ("kto_divergence_constant", "qwen3", "divergence_has_a_gradient", "the gradient goes through the divergence", "ContextualAI/HALOs#4", JUDGED),
    ("kto_sums", "qwen3", "log_probabilities_averaged", "log-probabilities are means over tokens in place of sums", "linkedin/Liger-Kernel#589", JUDGED),
    ("kto_weights", "qwen3", "weights_ignored", "desirable_weight and undesirable_weight have no effect", "modelscope/ms-swift#2167", {**JUDGED, **WEIGHTS}),
    ("apo_zero_weights", "qwen3", "weights_ignored", "desirable_weight and undesirable_weight have no effect", "modelscope/ms-swift#2167", {**JUDGED, **WEIGHTS, "loss_type": "apo_zero_unpaired"}),
]
RM = [("reward_position", "reward", "first_eos_read", "the reward is read at the first EOS, which is the padding token", "huggingface/transformers#35352", {})]
GRPO = [
    ("grpo_accumulated_mean", "mean_of_micro_batches", "the mean over tokens is taken in each micro-batch", "huggingface/trl#3021 allenai/open-instruct#1161", {"micro_batches": [[0, 1], [2, 3], [4, 5]]}),
    ("grpo_divided_twice", "divided_by_micro_batches_too", "the mean over the step's tokens is divided by the number of micro-batches too", "modelscope/ms-swift#10117", {"micro_batches": [[0, 1], [2, 3], [4, 5]]}),
    ("grpo_groups", "groups_merged", "groups of different sizes are normalised as one", "THUDM/slime#1918", {}),
    ("grpo_deviation", "deviation_of_the_batch", "rewards are divided by the deviation of the batch, not of the group", "huggingface/trl#3991", {}),
    ("grpo_constant", "constant_is_tokens", "Dr. GRPO divides by the number of tokens, not by a constant", "huggingface/trl#3138", {"advantage_estimator": "dr_grpo", "loss_aggregation": "constant", "max_new_tokens": 16}),
    ("grpo_observations", "observations_learned", "tokens of a tool's output are trained", "huggingface/trl#4974", {}),
    ("grpo_observations_counted", "observations_counted", "tokens of a tool's output count in the mean", "Tencent-Hunyuan/UniRL#409", {}),
    ("grpo_truncated", "truncated_counted", "tokens of masked truncated answers count in the mean", "huggingface/trl#6369 huggingface/trl#6439", {"mask_truncated": True}),
    ("grpo_temperature", "temperature_ignored", "log-probabilities are not those of the sampling temperature", "huggingface/trl#3029 NVIDIA-NeMo/RL#316", {"temperature": 0.7}),
    ("grpo_kl", "kl_mirrored", "the k3 estimator has the ratio upside down", "walkinglabs/hands-on-modern-rl#27", KL),
    ("grpo_kl_mask", "kl_of_every_token", "the divergence is averaged over masked tokens too", "allenai/open-instruct#535", KL),
    ("gspo_ratio", "ratio_of_the_sum", "the ratio of an answer is the product, not the geometric mean", "huggingface/trl#5815", {"policy_loss_type": "gspo", "eps_clip": [0.05, 0.05]}),
    ("grpo_dual_clip", "dual_clip_of_gains", "dual clip also limits positive advantages", "thu-ml/tianshou#433", {"dual_clip": 1.2}),
    ("grpo_clip", "clipped_on_both_sides", "the ratio is clipped without the minimum", "openai/spinningup#255", {}),
    ("cispo", "cispo_as_ppo", "a clipped token has no gradient", "areal-project/AReaL#1421", {"policy_loss_type": "cispo", "eps_clip": [0, 1.2]}),
    ("reinforce_observations", "return_reset_by_observation", "a tool's output ends the return of the tokens before it", "verl-project/verl#6376 verl-project/verl#7278", {"advantage_estimator": "reinforce", "gamma": 0.9}),
    ("grpo_entropy", "entropy_sum_of_means", "the entropy bonus is not the mean over the step's tokens", "huggingface/trl#6648", {"entropy_coef": 0.3}),
]
PPO = [
    ("ppo_observations", "observations_are_steps", "each token of a tool's output is a step of gamma and lambda", "verl-project/verl#2337 radixark/miles#1827", GAE),
    ("ppo_last_observation", "reward_of_the_last_token", "the reward stands at a tool's output behind the last sampled token, and is lost", "radixark/miles#1827 wyf3/llm_related#37", GAE),
    ("ppo_observation_value", "observation_valued", "the next value is that of a masked token", "alibaba/ROLL#447 verl-project/verl#50", GAE),
    ("ppo_value_position", "value_behind_the_token", "a token's value is read behind the token, not before it", "huggingface/trl#44 hpcaitech/ColossalAI#3622", GAE),
    ("ppo_whitened_together", "whitened_by_rank", "each rank whitens its own advantages", "radixark/miles#3229", {**GAE, "ranks": 2}),
]
DISTILL = [
    ("distill_direction", "divergence_turned_round", "beta 0 and 1 are the wrong way round", "modelscope/twinkle#112", {"divergence_beta": 0}),
    ("distill_mixture", "mixture_turned_round", "teacher and student change places in the mixture", "huggingface/trl#3043", {"divergence_beta": 0.2}),
    ("distill_mixture_of_probabilities", "mixture_of_logarithms", "logarithms are mixed in place of probabilities", "huggingface/trl#2202", {"divergence_beta": 0.5}),
    ("distill_accumulated_mean", "mean_of_micro_batches", "the loss is a mean of the micro-batches' means", "huggingface/trl#4719 verl-project/verl#7200", {"divergence_beta": 1, **MICRO}),
    ("distill_prompt", "prompt_learned", "the prompt's tokens are compared too", "huggingface/trl#5669", {"divergence_beta": 1}),
]
# name; template and records of chats.py; the bug of chats.py; the bug in words; threads
CHATS = [
    ("chat_turns", "plain", "chats", "last_turn_alone", "of several answers in a chat only the last one is trained", "NVIDIA-NeMo/Speech#16284 axolotl-ai-cloud/axolotl#3098"),
    ("chat_generation_marks", "marked", "chats", "mask_runs_on", "everything behind the beginning of the first marked answer is trained", "huggingface/transformers#47325"),
    ("chat_generation_prompt", "plain", "answers", "header_trained", "the header that a generation prompt gives is trained", "AI-Hypercomputer/maxtext#3284 huggingface/trl#4147"),
    ("chat_end_of_turn", "plain", "answers", "end_of_turn_untrained", "the token that ends the answer is not trained", "datawhalechina/happy-llm#211 huggingface/trl#5988"),
    ("chat_two_bos", "with_bos", "answers", "bos_twice", "template and tokenizer both add BOS", "OpenRLHF/OpenRLHF#393 huggingface/trl#1114"),
    ("chat_earlier_reasoning", "last_reasoning", "reasoned_chats", "turns_rendered_alone", "turns are rendered one by one, with the reasoning that the template drops from earlier turns", "THUDM/slime#1742 pytorch/torchtitan#2769"),
    ("chat_opened_reasoning", "opened_reasoning", "reasoned_answers", "opening_trained", "the mark of reasoning that a generation prompt ends with is trained", "modelscope/ms-swift#9875 NVIDIA-NeMo/Automodel#3738"),
]


# ---- records ----

def make_records():
    draw = random.Random(1)
    ids = lambda n: [draw.randrange(FIRST, VOCAB) for _ in range(n)]
    spans = [(8, [(4, 8)]), (14, [(3, 6), (9, 14)]), (30, [(1, 30)]), (3, [(2, 3)]), (40, [(6, 25), (30, 40)])]
    documents = []
    for n, parts in spans:
        mask = [int(any(a <= t < b for a, b in parts)) for t in range(n)]
        documents.append({"ids": ids(n - 1) + [EOS], "mask": mask})
    pairs = []
    for prompt, *answers in ((5, (7, 1), (11, 2)), (1, (4, 1), (9, 1)), (9, (15, 3), (3, 1)), (6, (2, 1), (20, 1))):
        question = ids(prompt)
        for n, ends in answers:
            pairs.append({"ids": question + ids(n - ends + 1) + [EOS] * ends, "mask": [0] * prompt + [1] * (n + 1)})
    rollouts = []
    for group, (prompt, lengths) in enumerate([(5, (7, 3)), (3, (8, 14, 5, 12))]):
        question = ids(prompt)
        for n in lengths:
            mask = [1] * n
            if n > 6:
                mask[2:4] = [0, 0]
            rollouts.append({"prompt_ids": question, "completion_ids": ids(n), "mask": mask, "reward": draw.randrange(9) / 8, "group": group,
                             "truncated": n == 14})
    add_logprobs(rollouts, draw)
    judged, draw = [], random.Random(2)  # for which the estimates of the divergence are positive
    for prompt, n, good in ((4, 9, True), (7, 3, False), (2, 12, True), (5, 6, True), (3, 16, False)):
        judged.append({"ids": ids(prompt + n) + [EOS], "mask": [0] * prompt + [1] * (n + 1), "label": good})
    episodes = [{**r, "mask": r["mask"][:-2] + [0, 0]} if len(r["mask"]) > 7 else r for r in rollouts]  # some end with an observation
    return {"documents": documents, "four_documents": documents[:4], "pairs": pairs, "judged": judged, "rollouts": rollouts, "episodes": episodes, **chats.RECORDS}


def add_logprobs(rollouts, draw):
    """Log-probabilities when the answers were sampled, near those of the model."""
    documents = [{"ids": r["prompt_ids"] + r["completion_ids"]} for r in rollouts]
    for r, d, z in zip(rollouts, documents, Model(GOLDEN / "qwen3").logits([d["ids"] for d in documents])):
        now = token_logps(z, d, range(len(r["prompt_ids"]), len(d["ids"]))).tolist()
        r["logprobs"] = [round(min(lp + draw.gauss(0, 0.3), 0), 6) for lp in now]


def make_reward_model():
    """llama31 with a head for one score."""
    folder = HERE / "reward"
    folder.mkdir(exist_ok=True)
    config = json.loads((GOLDEN / "llama31/config.json").read_text())
    config.update(architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = load_file(GOLDEN / "llama31/model.safetensors")
    tensors.pop("lm_head.weight")
    tensors["score.weight"] = torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# ---- cases ----

def make_tokenizer():
    folder = HERE / "chat"
    folder.mkdir(exist_ok=True)
    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), chats.tokenizer()):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def place(name):
    return HERE / name if name == "reward" else GOLDEN / name


def list_cases():
    kinds = {"sft": ("documents", SFT), "dpo": ("pairs", DPO), "kto": ("judged", KTO), "rm": ("pairs", RM), "grpo": ("rollouts", GRPO), "ppo": ("episodes", PPO),
             "distill": ("documents", DISTILL)}
    for task, (records, rows) in kinds.items():
        for name, *model, bug, words, threads, settings in rows:
            model, _, adapter = (model[0] if model else "qwen3").partition("+")
            case = {"name": name, "bug": words, "threads": threads.split(), "task": task, "model": model}
            if adapter:
                case["adapter"] = adapter
            if task == "kto" or task == "dpo" and settings["loss_type"] != "simpo":
                case["ref_model"] = "qwen3" if adapter else "llama32"
            if task == "grpo" and "kl_coef" in settings:
                case["ref_model"] = "llama32"
            if task == "ppo":
                case["critic_model"] = "reward"
            if task == "distill":
                case["teacher_model"] = "llama32"
            own = "four_documents" if name == "mean_over_ranks" else records  # as many for each rank
            yield {**case, "records": own, "settings": dict(settings)}, bug
    for name, template, records, bug, words, threads in CHATS:
        template, marked = chats.TEMPLATES[template]
        yield {"name": name, "bug": words, "threads": threads.split(), "task": "sft", "model": "llama3", "tokenizer": "chat", "chat_template": template,
               **({"marked_template": marked} if marked else {}), "records": records, "settings": {}}, bug


def read_records(case, records, bugs):
    if "chat_template" not in case:
        return records
    name = next(name for name, (template, _) in chats.TEMPLATES.items() if template == case["chat_template"])
    return [chats.document(r["messages"], name, bugs) for r in records]


def differ(a, b, relative):
    pairs = zip(a, b) if isinstance(a, list) else [(a, b)]
    return any(abs(x - y) > relative * max(abs(x), abs(y), 0.01) for x, y in pairs)


def rounded(values):
    return {key: [round(x, 9) for x in value] if isinstance(value, list) else round(value, 10) for key, value in values.items()}


def main():
    torch.set_num_threads(1)
    make_reward_model()
    make_tokenizer()
    records, cases = make_records(), []
    for case, bug in list_cases():
        right, wrong = (rounded(compute(case, read_records(case, records[case["records"]], bugs), place, frozenset(bugs))) for bugs in ((), (bug,)))
        shown = [key for key in right if differ(right[key], wrong[key], CLEAR * TOLERANCE[key])]
        print(f"{case['name']:34} {right['loss']:.5f} {wrong['loss']:.5f}  {right['grad_norm']:.5f} {wrong['grad_norm']:.5f}", " ".join(shown), flush=True)
        assert shown, "the bug changes no value by ten tolerances"
        cases.append({**case, "right": right, "wrong": wrong, "shown": shown})
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    made = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in records.items())
    (HERE / "cases.json").write_text(f'{{"tolerance": {json.dumps(TOLERANCE)},\n "records": {{\n  {made}}},\n "cases": [\n  {lines}]}}\n')


if __name__ == "__main__":
    main()
