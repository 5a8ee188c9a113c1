#!/bin/bash
# TRL's SFT with `accelerate launch --config_file context_parallel_2gpu.yaml`, which is FSDP2 with ring attention: rows of 16384 tokens, each
# shared by all GPUs.
#   --ring_attn_size       parallelism_config_cp_size; it needs no pad_to_multiple_of
#   --train_batch_tokens   a packed row is a sample there, and a step is one row; here a sample is a document that sees only itself
#   --max_epochs, --learning_rate, --lr_scheduler, --lr_warmup, --adam_betas: the defaults there
#   --truncation keep      cuts samples that are too long, as there; the default drops them
# In chats only the assistant's messages are trained, as with assistant_only_loss. Not needed, because these are the defaults: packing,
# mixed_precision (bf16 on a GPU), fsdp_activation_checkpointing (--recompute auto), use_liger_kernel (logits never exist as a whole).
# Qwen3-8B needs RANKS=4 on GPUs of 80 GB; the results are the same for any number of ranks.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-2}                    # one rank per GPU
MODEL=${MODEL:-out/models/Qwen3-4B}  # Qwen/Qwen3-4B on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/qwen3-4b-context-parallel}

exec scripts/launch.sh -np "$RANKS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --max_len 16384 --truncation keep --train_batch_tokens 16384 --max_epochs 3 \
    --learning_rate 2e-5 --lr_scheduler linear --lr_warmup 0 --adam_betas 0.9,0.999 \
    --zero_stage 3 --ring_attn_size "$RANKS" "$@"
