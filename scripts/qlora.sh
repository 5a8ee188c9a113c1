#!/bin/bash
# Trains a pretrained model on chats: SmolLM2-135M-Instruct on the English conversations of chatterbot-corpus (sources: scripts/smollm2.py), in three
# ways: with all weights, with adapters (LoRA), and with adapters next to weights in 4 bits (QLoRA). Prints for each the loss on 100 held-out chats, the
# planned and the peak memory, and tokens per second.
#
#     make && scripts/qlora.sh [DIR] [FLAG...]   DIR is out/smollm2 by default; flags go to all three runs: --max_steps 20
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-out/smollm2}
shift $(($# > 0))
. scripts/smollm2_data.sh

evaluate() { ./train_llama eval --model "$1" --data "$dir/heldout.jsonl" --max_len 512 --dtype bf16 "${@:2}" | tail -1; }
learn() {  # NAME FLAGS
    echo "== $1"
    ./train_llama sft --model "$dir/model" --data "$dir/chats.jsonl" --train_batch_size 32 --max_epochs 1 --max_len 512 --dtype bf16 \
        --output_dir "$dir/$1" --overwrite "${@:2}" | tail -4
}

echo "== before"
evaluate "$dir/model"
learn full --learning_rate 5e-5 "$@"
evaluate "$dir/full"
learn lora --lora_rank 16 --learning_rate 5e-4 "$@"
evaluate "$dir/model" --adapter "$dir/lora"
learn qlora --lora_rank 16 --learning_rate 5e-4 --load_in 4bit "$@"
evaluate "$dir/model" --adapter "$dir/qlora" --load_in 4bit
