#!/bin/bash
# OpenRLHF's train_sft with RingAttention: Llama 3 8B on OpenOrca, a sample shared by two GPUs. OpenRLHF's flags also work here; these are
# the names of this program.
#   --row_tokens 16384   micro_batch_size 8: a packed row holds 8 samples of max_len
#   --sp_mode gather     as ring_attn_head_stride; without both flags, keys and values hop around the ring, with the same results
#   --truncation keep    cuts samples that are too long, as there, but without an EOS at the cut; the default drops them
#   --max_samples        the first of the data set, which is prepared as a whole
# Not needed, because these are the defaults: max_epochs 1, input_template, packing_samples, attn_implementation, param_dtype (bf16 on a GPU),
# gradient_checkpointing_enable (--recompute auto), logging_steps 1, save_steps -1, eval.steps -1.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-8}                           # one rank per GPU
MODEL=${MODEL:-out/models/Meta-Llama-3-8B}  # meta-llama/Meta-Llama-3-8B on the hub
DATA=${DATA:-Open-Orca/OpenOrca}
OUT=${OUT:-out/llama3-8b-sft}

exec scripts/launch.sh -np "$RANKS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --input_key question --output_key response --max_samples 500000 --max_len 2048 --truncation keep \
    --train_batch_size 256 --row_tokens 16384 --learning_rate 5e-6 \
    --zero_stage 2 --ring_attn_size 2 --sp_mode gather --ring_attn_head_stride 2 "$@"
