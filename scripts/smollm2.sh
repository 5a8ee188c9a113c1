#!/bin/bash
# A pretrained model learns from chats: SmolLM2-135M-Instruct on the English conversations of chatterbot-corpus (scripts/smollm2.py says
# where both come from). Prints the loss on 100 held-out chats and the answers to three questions, before and after. Then what came out
# learns from pairs, right answers and those to other questions: to tell them apart as a reward model, and to prefer the right ones by DPO.
#
#     make && scripts/smollm2.sh [DIR]       DIR is out/smollm2 by default; half an hour on two cores, and 8 GB of disk
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-out/smollm2}
. scripts/smollm2_data.sh

evaluate() { ./train_llama eval --model "$1" --data "$dir/$2" --max_len 512 --dtype bf16; }
answer() { ./train_llama generate --model "$1" --prompts "$dir/prompts.jsonl" --max_new_tokens 64 --dtype bf16; }

echo "== before"
evaluate "$dir/model" heldout.jsonl
answer "$dir/model"
echo "== training"
./train_llama sft --model "$dir/model" --data "$dir/chats.jsonl" --learning_rate 5e-5 --train_batch_size 32 --max_epochs 1 --max_len 512 \
    --dtype bf16 --output_dir "$dir/tuned" --overwrite
echo "== after"
evaluate "$dir/tuned" heldout.jsonl
answer "$dir/tuned"

on_pairs() {  # TASK FLAGS: from the tuned model
    ./train_llama "$1" --model "$dir/tuned" --data "$dir/pairs.jsonl" --train_batch_size 32 --max_len 512 --dtype bf16 \
        --output_dir "$dir/$1" --overwrite "${@:2}"
}
echo "== reward model, before"
on_pairs rm --max_steps 1  # of the warm-up, whose first rate is 0: only the head is new
evaluate "$dir/rm" pairs_heldout.jsonl
echo "== reward model, training"
on_pairs rm --max_samples 640 --learning_rate 2e-5
echo "== reward model, after"
evaluate "$dir/rm" pairs_heldout.jsonl
echo "== DPO"
on_pairs dpo --max_samples 640 --learning_rate 5e-6 --eval_data "$dir/pairs_heldout.jsonl"
answer "$dir/dpo"
