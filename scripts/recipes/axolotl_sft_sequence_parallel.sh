#!/bin/bash
# Axolotl's SFT with `sequence_parallel_degree: 4`: Llama 3 8B Instruct, rows of 8192 tokens, each shared by four GPUs.
#   --ring_attn_size 4         sequence_parallel_degree (context_parallel_size)
#   --sp_mode gather           as heads_k_stride; without both flags, keys and values hop around the ring, with the same results
#   --train_batch_tokens       micro_batch_size 1 x gradient_accumulation_steps 1 x GPUs / degree rows of sequence_len; a step here does
#                              not shrink when the degree grows
#   --lr_scheduler, --adam_betas: the defaults there. Axolotl has no default for --learning_rate
# Not needed, because these are the defaults: sample_packing, flash_attention, dropping samples that are too long.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-4}                                    # one rank per GPU
MODEL=${MODEL:-out/models/Meta-Llama-3-8B-Instruct}  # meta-llama/Meta-Llama-3-8B-Instruct on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/llama3-8b-instruct-sft}

exec scripts/launch.sh -np "$RANKS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --max_len 8192 --train_batch_tokens 8192 --learning_rate 1e-5 --lr_scheduler cosine --adam_betas 0.9,0.999 \
    --zero_stage 2 --ring_attn_size 4 --sp_mode gather --ring_attn_head_stride 1 "$@"
