#!/bin/bash
# TRL's SFT with slurm: a job with `srun accelerate launch --config_file multi_node.yaml` on two nodes with 8 GPUs. Here the job is
# scripts/slurm.sbatch, with a rank for each GPU; it saves before its time limit and resumes automatically.
#   --save_steps 500  interval of checkpoints, for resuming after a node fails; the default there
# The other flags are the same as in trl_two_nodes.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

MODEL=${MODEL:-out/models/Qwen2-0.5B}  # Qwen/Qwen2-0.5B on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/qwen2-0.5b-slurm}

exec sbatch --nodes=2 --gpus-per-node=8 --job-name=sft_multi scripts/slurm.sbatch \
    sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" --save_steps 500 \
    --max_len 1024 --truncation keep --train_batch_size 128 --max_epochs 3 \
    --learning_rate 2e-5 --lr_scheduler linear --lr_warmup 0 --adam_betas 0.9,0.999 "$@"
