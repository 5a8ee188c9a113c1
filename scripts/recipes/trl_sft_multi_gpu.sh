#!/bin/bash
# TRL's SFT with `accelerate launch --config_file multi_gpu.yaml`: every GPU has its own samples.
#   --train_batch_size 32  per_device_train_batch_size x devices x gradient_accumulation_steps: a step is the same on any number of GPUs
#   --max_len, --max_epochs, --learning_rate, --lr_scheduler, --lr_warmup, --adam_betas: the defaults there
#   --truncation keep      cuts samples that are too long, as there; the default drops them
# In chats only the assistant's messages are trained, as with assistant_only_loss. Samples are packed; optimizer states are sharded.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-8}                      # one rank per GPU
MODEL=${MODEL:-out/models/Qwen2-0.5B}  # Qwen/Qwen2-0.5B on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/qwen2-0.5b-multi-gpu}

exec scripts/launch.sh -np "$RANKS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --max_len 1024 --truncation keep --train_batch_size 32 --max_epochs 3 \
    --learning_rate 2e-5 --lr_scheduler linear --lr_warmup 0 --adam_betas 0.9,0.999 "$@"
