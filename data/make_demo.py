#!/usr/bin/env python3
"""Makes data/demo: what ./train_llama without arguments trains on.

Small tasks on made-up words whose right answer can be computed, as chats:

    user: reverse tamilo     assistant: olimat
    user: sort tamilo        assistant: ailmot
    user: no vowels tamilo   assistant: tml
    user: last two tamilo    assistant: lo

The words of the 200 test chats occur in no training chat. Everything goes through data/prepare.py, as a user's own chats would.

    python3 data/make_demo.py            writes data/demo/model (config and tokenizer), train.safetensors and test.safetensors
"""
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
DEMO = HERE / "demo"
TRAIN_CHATS, TEST_CHATS = 20000, 200

TASKS = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "no vowels": lambda word: "".join(c for c in word if c not in "aeiou"),
    "last two": lambda word: word[-2:],
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": 259,
    "torch_dtype": "float32",
}


def make_word(rng):
    """Three to six letters, consonants and vowels mostly in turn."""
    word = ""
    for i in range(rng.randint(3, 6)):
        letters = "bdfgklmnprstvz" if (i % 2 == 0) != (rng.random() < 0.15) else "aeiou"
        word += rng.choice(letters)
    return word


def make_chats():
    rng = random.Random(1)
    words = set()
    while len(words) < (TRAIN_CHATS + TEST_CHATS) // len(TASKS):
        word = make_word(rng)
        if TASKS["no vowels"](word):  # an answer must not be empty
            words.add(word)
    words = sorted(words)
    rng.shuffle(words)
    held_out = set(words[: TEST_CHATS // len(TASKS)])
    chats = {True: [], False: []}
    for word in words:
        for task, answer in TASKS.items():
            turns = [{"role": "user", "content": f"{task} {word}"}, {"role": "assistant", "content": answer(word)}]
            chats[word in held_out].append({"messages": turns})
    rng.shuffle(chats[False])
    rng.shuffle(chats[True])
    return chats[False], chats[True]


def save_model_dir(path):
    """A tokenizer whose tokens are the 256 bytes and four marks, and the configuration of a small Llama without weights."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def prepare(chats, out):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "chats.jsonl"
        raw.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        command = [sys.executable, HERE / "prepare.py", "sft", "--input", raw, "--tokenizer", DEMO / "model", "--out", out]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    train, test = make_chats()
    save_model_dir(DEMO / "model")
    prepare(train, DEMO / "train.safetensors")
    prepare(test, DEMO / "test.safetensors")
