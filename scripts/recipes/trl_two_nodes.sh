#!/bin/bash
# TRL's SFT with `accelerate launch --config_file multi_node.yaml --machine_rank R`, on each of two machines with 8 GPUs. Here mpirun
# runs on one machine, and starts the ranks of the other by ssh. Both must share the directories of MODEL, DATA and OUT. (Without ssh: start
# each rank by hand, with --rank R/16 --rendezvous 10.0.0.1:29500, and one LLMC_RENDEZVOUS_SECRET: docs/ranks.md.)
#   HOSTS                   main_process_ip, num_machines, machine_rank
#   --train_batch_size 128  per_device_train_batch_size 8, the default there, on 16 GPUs
# The other flags are the same as in trl_sft_multi_gpu.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."

RANKS=${RANKS:-16}                     # one rank per GPU
HOSTS=${HOSTS:-10.0.0.1:8,10.0.0.2:8}  # addresses, with the number of ranks on each
MODEL=${MODEL:-out/models/Qwen2-0.5B}  # Qwen/Qwen2-0.5B on the hub
DATA=${DATA:-trl-lib/Capybara}
OUT=${OUT:-out/qwen2-0.5b-two-nodes}

exec scripts/launch.sh -np "$RANKS" --host "$HOSTS" ./train_llama sft --model "$MODEL" --data "$DATA" --output_dir "$OUT" \
    --max_len 1024 --truncation keep --train_batch_size 128 --max_epochs 3 \
    --learning_rate 2e-5 --lr_scheduler linear --lr_warmup 0 --adam_betas 0.9,0.999 "$@"
