"""The text of ids equals that of the package tokenizers, for every kind of decoder. `generate` prints the text of its prompts, which are ids here."""

import json
import re
import shutil

import numpy as np
import pytest
from runs import GOLDEN, call, command, write_data
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL, ADDED = ["<s>", "</s>", "<|im_end|>"], ["<think>", "a b", "\u2581x", "<0x41>y", "\u00e9"]
METASPACE, BYTES = "\u2581", [0x0A, 0x20, 0x41, 0x60, 0x6E, 0x80, 0x9F, 0x98, 0x84, 0xA4, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0xF4, 0x90,
                              0xFF, 0xC0]
SENTENCEPIECE = [METASPACE, METASPACE * 2, METASPACE + "the", METASPACE * 2 + "b", "ing", "\u00e9", "\U0001f604", " ", "  ", " c ", "\n", "<0xZZ>",
                 "<0x4>", "\ufffd", "a" + METASPACE, *(f"<0x{byte:02X}>" for byte in BYTES), "<0xe2>"]
REPLACE, STRIP = decoders.Replace(METASPACE, " "), decoders.Strip(" ", 1, 0)
DECODERS = {
    "llama2": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), STRIP]),
    "gemma": decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse()]),
    "unfused": decoders.Sequence([decoders.ByteFallback(), REPLACE, decoders.Strip(" ", 2, 0)]),
    "fused": decoders.Sequence([decoders.Fuse(), REPLACE, STRIP]),
    "fallback": decoders.ByteFallback(),
    "metaspace": decoders.Metaspace(),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "first": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]),
    "other": decoders.Metaspace(replacement="b"),
}
SPACES = normalizers.Replace(" ", METASPACE)
NORMALIZERS = {  # applied to the added tokens, which are found in normalised text
    "byte_level": normalizers.NFC(), "llama2": normalizers.Sequence([normalizers.Prepend(METASPACE), SPACES]), "gemma": SPACES,
    "fused": normalizers.Sequence([normalizers.Replace("a", "aa"), normalizers.Prepend("x")]), "fallback": normalizers.Sequence([]),
    "bytes": normalizers.ByteLevel()}


def byte_level(random):
    """Tokens of a few bytes each. Most are no complete characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {"".join(random.choice(alphabet, random.integers(1, 4))) for _ in range(60)}
    return sorted(tokens | {"\u0120the", "H", "\u00c3", "\u00a9", "\u00f0\u0141"})


def tokenizer_file(directory, tokens, decoder, normalizer):
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token) for token in ADDED])
    tokenizer.decoder = decoder
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("name", ["byte_level", "bytes", *DECODERS])
def test_texts_equal_those_of_the_package_tokenizers(name, tmp_path):
    model, random = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model"), np.random.default_rng(len(name))
    tokens = SENTENCEPIECE if name in DECODERS else byte_level(random)
    tokenizer = tokenizer_file(model, tokens, DECODERS.get(name, decoders.ByteLevel()), NORMALIZERS.get(name))
    size = tokenizer.get_vocab_size()
    bytes_only = [i for i, token in enumerate(tokens) if token.startswith("<0x")] or list(range(size))
    ids = [random.choice(bytes_only if i % 2 else size, random.integers(1, 12)).astype(np.int32) for i in range(400)]
    file = write_data(tmp_path / "prompts.safetensors", [(document, np.zeros(len(document), np.uint8)) for document in ids], kind="prompts")
    result = call(command("generate", model=model, prompts=file, max_new_tokens=1))
    assert result.returncode == 0 and re.fullmatch(r"\d+ tokens in [\d.]+ s, \d+ tokens/s\n", result.stderr), result.stderr
    for document, line in zip(ids, result.stdout.splitlines(), strict=True):
        assert json.loads(line)["prompt"] == tokenizer.decode(document.tolist()), [tokenizer.id_to_token(i) for i in document]
