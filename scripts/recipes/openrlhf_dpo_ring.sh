#!/bin/bash
# OpenRLHF's train_dpo with RingAttention: documents of up to 8192 tokens, a pair shared by two GPUs. OpenRLHF's flags also work here; these
# are the names of this program.
#   --sp_mode gather     as ring_attn_head_stride; without both flags, keys and values hop around the ring, with the same results
#   --truncation keep    cuts documents that are too long, as there, but without an EOS at the cut; the default drops their pairs
#   --resume auto        ckpt.load_enable
# The reference is evaluated once, before training (with --ref_mode resident in each step, as there). Not needed, because these are the defaults:
# micro_batch_size 1 (a row holds one pair), max_epochs 1, packing_samples, apply_chat_template (messages are always a chat),
# attn_implementation, param_dtype (bf16 on a GPU), gradient_checkpointing_enable (--recompute auto), logging_steps 1, save_steps -1,
# eval.steps -1.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-8}                                  # one rank per GPU
MODEL=${MODEL:-out/models/Llama-3-8b-sft-mixture}  # OpenRLHF/Llama-3-8b-sft-mixture on the hub
DATA=${DATA:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}
OUT=${OUT:-out/llama3-8b-dpo}

exec scripts/launch.sh -np "$RANKS" ./train_llama dpo --model "$MODEL" --data "$DATA" --output_dir "$OUT" --resume auto \
    --max_len 8192 --truncation keep --train_batch_size 256 --learning_rate 5e-7 --beta 0.1 \
    --zero_stage 3 --ring_attn_size 2 --sp_mode gather --ring_attn_head_stride 2 "$@"
