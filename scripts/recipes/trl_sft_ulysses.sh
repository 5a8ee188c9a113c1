#!/bin/bash
# TRL's SFT with `accelerate launch --config_file alst_ulysses_4gpu.yaml`: two GPUs share a row by heads, two such pairs take different rows.
#   --ring_attn_size 2     parallelism_config_sp_size; dp_shard_size is what remains of the ranks. It needs no pad_to_multiple_of
#   --sp_mode ulysses      needs an even number of query heads; --sp_mode ring does not, and gives the same results
#   --train_batch_tokens   per_device_train_batch_size 8, the default there, on 4 GPUs over sp_size 2: 16 rows of 4096 tokens
#   --truncation keep      packing_strategy wrapped cuts the joined samples every 4096 tokens, and samples of a row see each other;
#                          here a sample is cut at 4096 tokens, and sees only itself
#   --lr_scheduler, --lr_warmup, --adam_betas: the defaults there
# In chats only the assistant's messages are trained, as with assistant_only_loss. Not needed, because these are the defaults: packing,
# torch_dtype (bf16 on a GPU), attn_implementation, report_to (the log is OUT/log.jsonl).
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-4}                      # one rank per GPU
MODEL=${MODEL:-out/models/Qwen2-0.5B}  # Qwen/Qwen2-0.5B on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/qwen2-0.5b-ulysses}

exec scripts/launch.sh -np "$RANKS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --max_len 4096 --truncation keep --train_batch_tokens 65536 --max_steps 100 --logging_steps 10 \
    --learning_rate 2e-4 --lr_scheduler linear --lr_warmup 0 --adam_betas 0.9,0.999 \
    --zero_stage 3 --ring_attn_size 2 --sp_mode ulysses "$@"
