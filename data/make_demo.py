#!/usr/bin/env python3
"""Makes data/demo: the chats that ./train_llama without arguments trains on, and the pairs of answers with which `make demo` continues.

The chats are small tasks on made-up words, whose right answer can be computed:

    user: reverse tamilo     assistant: olimat!
    user: sort tamilo        assistant: ailmot
    user: no vowels tamilo   assistant: tml!
    user: last two tamilo    assistant: lo!

An answer is right with and without the exclamation mark. Two of three training chats have it, so a model trained on them nearly always
writes it, until a preference takes it away. The words of the tests occur in no training file. Everything goes through data/prepare.py,
as a user's own data would.

    python3 data/make_demo.py            writes data/demo/model (config and tokenizer) and

    train.safetensors                    20 000 chats
    test.safetensors                     200 pairs, both answers right, that without the mark chosen
    prompts.jsonl                        their prompts, with the answer without the mark
    plain.safetensors                    1 000 such pairs, to train on (DPO)
    asked.safetensors                    2 000 chats without the mark: what reinforcement learning asks, and the answer that it rewards
    right.safetensors                    2 000 pairs, the right answer chosen over that to another task (reward model)
    right_test.safetensors               200 such pairs
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
TRAIN_WORDS, TEST_WORDS = 5000, 50
PLAIN_PAIRS, ASKED, RIGHT_PAIRS = 1000, 2000, 2000

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
    """Returns three to six letters, with consonants and vowels mostly in turn."""
    word = ""
    for i in range(rng.randint(3, 6)):
        letters = "bdfgklmnprstvz" if (i % 2 == 0) != (rng.random() < 0.15) else "aeiou"
        word += rng.choice(letters)
    return word


def make_prompts(rng):
    """Returns (task, word) pairs for training, and for the tests."""
    words = set()
    while len(words) < TRAIN_WORDS + TEST_WORDS:
        word = make_word(rng)
        if TASKS["no vowels"](word):  # an answer must not be empty
            words.add(word)
    words = sorted(words)
    rng.shuffle(words)
    tests = [(task, word) for word in words[:TEST_WORDS] for task in TASKS]
    train = [(task, word) for word in words[TEST_WORDS:] for task in TASKS]
    rng.shuffle(train)
    rng.shuffle(tests)
    return train, tests


def right_answer(task, word):
    return TASKS[task](word)


def wrong_answer(rng, task, word):
    """Returns the answer to another task; if all answers are equal, the answer with one more letter."""
    right = right_answer(task, word)
    others = [answer for answer in (right_answer(other, word) for other in TASKS) if answer != right]
    return rng.choice(others) if others else right + "a"


def said(rng, answer):
    return answer + ("!" if rng.random() < 2 / 3 else "")


def chat(prompt, answer):
    return {"messages": [{"role": "user", "content": " ".join(prompt)}, {"role": "assistant", "content": answer}]}


def pair(prompt, chosen, rejected):
    return {"chosen": chat(prompt, chosen)["messages"], "rejected": chat(prompt, rejected)["messages"]}


def plain_pairs(prompts):
    return [pair(prompt, right_answer(*prompt), right_answer(*prompt) + "!") for prompt in prompts]


def right_pairs(rng, prompts):
    return [pair(prompt, said(rng, right_answer(*prompt)), said(rng, wrong_answer(rng, *prompt))) for prompt in prompts]


def save_model_dir(path):
    """Saves a tokenizer with the 256 bytes and four marks as tokens, and the configuration of a small Llama without weights."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def prepare(task, records, name):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "records.jsonl"
        raw.write_text("".join(json.dumps(record) + "\n" for record in records))
        command = [sys.executable, HERE / "prepare.py", task, "--input", raw, "--tokenizer", DEMO / "model",
                   "--out", DEMO / name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    rng = random.Random(1)
    train, tests = make_prompts(rng)
    save_model_dir(DEMO / "model")
    prepare("sft", [chat(prompt, said(rng, right_answer(*prompt))) for prompt in train], "train.safetensors")
    prepare("pref", plain_pairs(tests), "test.safetensors")
    prepare("pref", plain_pairs(train[:PLAIN_PAIRS]), "plain.safetensors")
    prepare("sft", [chat(prompt, right_answer(*prompt)) for prompt in train[:ASKED]], "asked.safetensors")
    prepare("pref", right_pairs(rng, train[:RIGHT_PAIRS]), "right.safetensors")
    prepare("pref", right_pairs(rng, tests), "right_test.safetensors")
    prompts = [json.dumps({"prompt": " ".join(prompt), "answer": right_answer(*prompt)}) for prompt in tests]
    (DEMO / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
