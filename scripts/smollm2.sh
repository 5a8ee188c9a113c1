#!/bin/bash
# Trains a pretrained model on chats: SmolLM2-135M-Instruct on the English conversations of chatterbot-corpus (sources: scripts/smollm2.py).
# Prints the loss on 100 held-out chats and the answers to three questions, before and after. The result is then trained on pairs of a
# right answer and an answer to another question: as a reward model that distinguishes them, and with DPO to prefer the right one.
# Finally models are trained on their own answers: the pretrained model with GRPO to answer like the corpus (judged by scripts/word_f1.py), and the
# model trained on chats with PPO for high scores of the reward model. Both are measured on unseen prompts.
#
#     make && scripts/smollm2.sh [DIR]       DIR is out/smollm2 by default; an hour on two cores, and 12 GB of disk
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
on_pairs rm --max_steps 1  # a warm-up step, whose first rate is 0, so only the head is new
evaluate "$dir/rm" pairs_heldout.jsonl
echo "== reward model, training"
on_pairs rm --max_samples 960 --learning_rate 1e-4
echo "== reward model, after"
evaluate "$dir/rm" pairs_heldout.jsonl
echo "== DPO"
on_pairs dpo --max_samples 640 --learning_rate 5e-6 --eval_data "$dir/pairs_heldout.jsonl"
answer "$dir/dpo"

on_questions() {  # TASK MODEL FLAGS
    ./train_llama "$1" --model "$2" --data "$dir/questions.jsonl" --n 8 --max_new_tokens 32 --rollout_batch_size 8 --train_batch_size 64 \
        --temperature 1 --lr_scheduler constant --max_steps 60 --dtype bf16 --output_dir "$dir/$1" --overwrite "${@:3}"
}
answer_heldout() {  # MODEL FILE
    ./train_llama generate --model "$1" --prompts "$dir/questions_heldout.jsonl" --max_new_tokens 32 --dtype bf16 > "$2"
}
echo "== GRPO"
on_questions grpo "$dir/model" --reward scripts/word_f1.py --stop_properly_coef 0 --learning_rate 2e-5  # the reward of an answer without an end is 0
for model in model grpo; do
    answer_heldout "$dir/$model" "$dir/said_$model.jsonl"
    echo "$model, answers to unseen prompts: $(python3 scripts/word_f1.py "$dir/questions_heldout.jsonl" "$dir/said_$model.jsonl")"
done
echo "== PPO"
on_questions ppo "$dir/tuned" --reward "$dir/rm" --critic_model "$dir/rm" --kl_coef 0.02 --learning_rate 2e-5
for model in tuned ppo; do answer_heldout "$dir/$model" "$dir/said_$model.jsonl"; done
python3 - "$dir" << 'EOF'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
read = lambda name: [json.loads(line) for line in (folder / name).read_text().splitlines() if line.startswith("{")]
asked, before, after = read("questions_heldout.jsonl"), read("said_tuned.jsonl"), read("said_ppo.jsonl")
turn = lambda said: [{"role": "assistant", "content": said["completion"].strip() or "."}]
pairs = [{"prompt": q["prompt"], "chosen": turn(a), "rejected": turn(b)} for q, a, b in zip(asked, after, before)]
differ = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
(folder / "before_and_after.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in differ))
print(f"of {len(pairs)} answers to unseen prompts PPO has changed {len(differ)}; the accuracy is the share that the reward model ranks higher than before")
EOF
evaluate "$dir/rm" before_and_after.jsonl
