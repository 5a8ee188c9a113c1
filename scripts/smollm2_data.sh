# Sourced by smollm2.sh and qlora.sh in the root of the tree: checks that the program is built, and writes a model and chats to $dir if missing.
if [ ! -x ./train_llama ]; then
    printf 'scripts/%s: ./train_llama is not built\n  fix: make deps && make\n' "${0##*/}" >&2
    exit 1
fi
python=.venv/bin/python3
[ -x $python ] || python=python3
$python data/prepare.py --help > /dev/null  # needed for the chats later; missing packages are reported now
if [ ! -e "$dir/model/tokenizer.json" ]; then  # the last file that smollm2.py writes
    bash scripts/install_compare.sh
    .venv-compare/bin/python scripts/smollm2.py "$dir"
fi
