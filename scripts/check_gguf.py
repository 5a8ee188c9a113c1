#!/usr/bin/env python3
"""Converts a saved model with llama.cpp's convert_hf_to_gguf.py, and compares the GGUF with the directory: tensors, chat template, ends of turn.

    scripts/check_gguf.py out/mine ~/llama.cpp [--python PYTHON]

The second directory is a checkout of llama.cpp. PYTHON needs the packages of its converter: torch, transformers, and the requirements of gguf-py."""

import argparse
import json
import math
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# End-of-turn tokens that llama.cpp (src/llama-vocab.cpp) recognises by name, besides the eos_token.
KNOWN_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>",
              "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<｜end▁of▁sentence｜>"}
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # tensors that the converter derives from config.json


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def elements_of(directory):
    """Returns the number of elements of all tensors in a Hugging Face directory."""
    count = 0
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            size, = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        count += sum(math.prod(info["shape"]) for name, info in header.items() if name != "__metadata__")
    return count


def problems(directory, reader):
    def field(name):
        return reader.fields[name].contents() if name in reader.fields else None

    found = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in COMPUTED)
    expected = elements_of(directory)
    if found != expected:
        yield f"its tensors have {found:,} elements, those of {directory} have {expected:,}"
    jinja = directory / "chat_template.jinja"
    template = jinja.read_text(encoding="utf-8") if jinja.exists() else read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, str) and field("tokenizer.chat_template") != template:
        yield "its chat template differs"
    ends = read_json(directory / "generation_config.json").get("eos_token_id")
    tokens, eos = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.eos_token_id")
    for end in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if end != eos and tokens[end] not in KNOWN_ENDS:
            yield f"llama.cpp will not stop at {tokens[end]!r} ({end}), an EOS token of generation_config.json: its own EOS is {eos}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    converter = options.llama_cpp / "convert_hf_to_gguf.py"
    if not converter.exists():
        sys.exit(f"{options.llama_cpp}: contains no convert_hf_to_gguf.py\n  fix: give a checkout of https://github.com/ggml-org/llama.cpp")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        words = [options.python, converter, options.directory, "--outfile", file, "--outtype", "f32"]
        if subprocess.run(words).returncode != 0:
            sys.exit(f"{converter} failed for {options.directory}\n  fix: see its message above")
        sys.path.insert(0, str(options.llama_cpp / "gguf-py"))
        from gguf import GGUFReader  # of the same checkout

        found = list(problems(options.directory, GGUFReader(file)))
    for problem in found:
        print(f"the GGUF: {problem}")
    print("tensors, chat template and end-of-turn tokens equal those of the directory" if not found else f"{len(found)} differences")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
