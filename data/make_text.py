#!/usr/bin/env python3
"""Makes the data that train_gpt2 trains on without arguments, from data/text/persuasion.jsonl: a tokenizer, a configuration and prepared data.

The text is Jane Austen's novel Persuasion (1817), a chapter on each line; data/text/README.md tells where it comes from and that it is in the
public domain. It is divided into passages: each has the whole paragraphs that fit the model's positions between two end-of-text
tokens. data/prepare.py cuts a longer paragraph. The last twentieth of the passages is for validation.

    python3 data/make_text.py            writes data/text/model (config and tokenizer) and

    train.safetensors                    passages of at most 256 tokens
    val.safetensors                      passages of the end of the book
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text"
END = "<|endoftext|>"  # begins and ends a document, as in GPT-2
VOCABULARY, POSITIONS = 1024, 256

CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": 192,
    "n_layer": 10,
    "n_head": 6,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.05,  # GPT-2's 0.02 is for wider layers
    "tie_word_embeddings": True,
    "bos_token_id": VOCABULARY - 1,
    "eos_token_id": VOCABULARY - 1,
    "torch_dtype": "float32",
}


def read_chapters():
    return [json.loads(line)["text"].split("\n\n") for line in (TEXT / "persuasion.jsonl").read_text().splitlines()]


def train_tokenizer(paragraphs):
    """Returns a byte-level BPE: the 256 bytes, merges learnt from the paragraphs, and the token between documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(paragraphs, trainers.BpeTrainer(vocab_size=VOCABULARY - 1, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def make_passages(tokenizer, chapters):
    passages = []
    for paragraphs in chapters:
        passage = ""
        for paragraph in paragraphs:
            longer = f"{passage}\n\n{paragraph}" if passage else paragraph
            if passage and len(tokenizer.encode(longer).ids) + 2 > POSITIONS:
                passages.append(passage)
                longer = paragraph
            passage = longer
        passages.append(passage)
    return passages


def save_model_dir(path, tokenizer):
    path.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=POSITIONS).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def prepare(passages, name):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / f"{name}.jsonl"
        raw.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
        command = [sys.executable, HERE / "prepare.py", "pretrain", "--input", raw, "--tokenizer", TEXT / "model",
                   "--max_len", str(POSITIONS), "--add_bos", "always", "--out", TEXT / f"{name}.safetensors"]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    chapters = read_chapters()
    tokenizer = train_tokenizer(paragraph for chapter in chapters for paragraph in chapter)
    save_model_dir(TEXT / "model", tokenizer)
    passages = make_passages(tokenizer, chapters)
    held_out = len(passages) // 20
    prepare(passages[:-held_out], "train")
    prepare(passages[-held_out:], "val")
