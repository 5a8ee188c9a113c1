#!/usr/bin/env python3
"""Plays the same episodes with tools in TRL and in train_llama, and compares tokens, masks, rewards, counts, losses and gradient norms.

    .venv-compare/bin/python scripts/check_tools.py

The turns are given texts in place of sampled ones: one call or several, unknown tools, wrong arguments, tools that raise, and answers. The rest is that of
each trainer: the schemas in the prompt, the text that an environment's reset appends to it, the parsing of calls, the tools' messages, and a step of GRPO on a
tiny random model, in float on the CPU. The learning rate is 0 on TRL's side, and each of its three steps is a run of its own here, on the episodes as a file (--rollouts)."""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import ROOT

sys.path.insert(0, str(ROOT / "data"))

STEPS, PROMPTS, ANSWERS, AGREE = 3, 2, 4, 1e-5
TOOLS = '''
import itertools

class Desk:
    numbers = itertools.count()

    def reset(self, **record):
        number = next(self.numbers)
        return f" Note {number % 2}." if number % 3 else None

environment_factory = Desk

def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: one number
        b: the other number
    """
    return a + b

def spell(word: str) -> str:
    """
    Spells a word.

    Args:
        word: the word
    """
    if len(word) > 4:
        raise ValueError("the word is too long")
    return "-".join(word)

def reward_funcs(completions, **columns):
    return [len(c[-1]["content"]) / 10 + len(c) for c in completions]

tools = [add, spell]
'''


def call(name, **arguments):
    return f'\n<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def scripts():
    """Returns the turns of each episode. The number in each says whose it is."""
    rng = random.Random(1)
    calls = [lambda: call("add", a=rng.randrange(99), b=rng.randrange(99)), lambda: call("spell", word="cat"), lambda: call("spell", word="house"),
             lambda: call("find", what="x"), lambda: call("add", a=1)]
    return [[f"#{e}#" + "".join(rng.choice(calls)() for _ in range(1 + rng.randrange(2))) for _ in range(rng.randrange(4))] + [f"#{e}# " + "x" * rng.randrange(9)]
            for e in range(STEPS * PROMPTS * ANSWERS)]


def make_model(folder):
    """Saves a tiny Qwen2 with random weights, a tokenizer of bytes, and the chat template of Qwen2.5."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from trl.chat_template_utils import qwen2_5_chat_template

    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = qwen2_5_chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.Qwen2Config(vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=258)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model, tokenizer


def records():
    return [{"prompt": [{"role": "user", "content": f"Question {p}"}]} for p in range(STEPS * PROMPTS)]


def in_trl(model, tokenizer, tools, folder):
    """Returns TRL's episodes and the log of its steps."""
    import re

    import datasets
    import trl

    turns, played, asked = [list(texts) for texts in scripts()], [], 0

    class Scripted(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *others, **more):
            nonlocal asked
            texts = []
            for ids in prompt_ids:
                marks = re.findall(r"#(\d+)#", self._tokenizer.decode(ids))
                texts.append(turns[int(marks[-1]) if marks else asked].pop(0))
                asked += not marks
            return [self._tokenizer(text + "<|im_end|>")["input_ids"] for text in texts], None

        def _generate(self, prompts):
            out = super()._generate(prompts)
            played.extend(zip(out[0], out[1], out[2]))
            return out

        def _calculate_rewards(self, *arguments):
            rewards = super()._calculate_rewards(*arguments)
            given.extend(rewards[:, 0].tolist())
            return rewards

    given = []
    args = trl.GRPOConfig(output_dir=str(folder / "trl"), report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
                          num_generations=ANSWERS, max_completion_length=3000, per_device_train_batch_size=PROMPTS * ANSWERS, max_steps=STEPS, beta=0.0,
                          learning_rate=0.0, max_grad_norm=1e9, loss_type="dapo", scale_rewards="none", shuffle_dataset=False, gradient_checkpointing=False)
    trainer = Scripted(model, tools["reward_funcs"], args, train_dataset=datasets.Dataset.from_list(records()), processing_class=tokenizer, tools=tools["tools"],
                       environment_factory=tools["environment_factory"])
    trainer.train()
    return played, given, [line for line in trainer.state.log_history if "grad_norm" in line]


def here(file, folder):
    """Returns the episodes of this program's worker: prompts, completions, masks, rewards, calls and failures."""
    from environment_worker import Episodes
    from tokenizer import Tokenizer
    from tool_calls import schemas_in

    tokenizer = Tokenizer(str(folder))
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    episodes = Episodes(str(file), 0, 1000, tokenizer=str(folder), template=tokenizer.hf.chat_template, template_kwargs="", eos=[end])
    out = []

    async def play(number, texts):
        record = records()[number // ANSWERS]
        prompt = episodes.rendering.template.prompt(record["prompt"], {"tools": schemas_in(str(file))})[0]
        begun = await episodes.begin(number, episodes.rendering.encoding(prompt).ids, prompt, prompt, "", json.dumps(record))
        ids, mask, rewards, counts = [], [], [], [0, 0]
        for turn, text in enumerate(texts):
            said = [*episodes.rendering.encoding(text).ids, end]
            reply = await episodes.turn(number, turn, text, text + "<|im_end|>", "token", 3000 - len(ids) - len(said))
            ids += said + reply["ids"]
            mask += [1] * len(said) + [0] * len(reply["ids"])
            rewards.append(reply["reward"])
            counts = [counts[0] + reply["calls"], counts[1] + reply["failures"]]
        out.append((begun["prompt_ids"], ids, mask, rewards, counts))

    async def all_of_them():
        for number, texts in enumerate(scripts()):
            await play(number, texts)

    asyncio.run(all_of_them())
    return out


def step_here(model, episodes, folder, number):
    """Returns the log line of a run of one step."""
    import torch

    lines = []
    for i, (prompt, ids, mask, rewards, _) in enumerate(episodes):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1].double()
        logps = torch.log_softmax(logits, -1)[range(len(ids)), ids].tolist()
        lines.append({"prompt_ids": prompt, "completion_ids": ids, "completion_mask": mask, "logprobs": logps, "reward": rewards[-1], "group": i // ANSWERS,
                      "turn_rewards": rewards})
    file = folder / f"{number}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = folder / f"run{number}"
    subprocess.run([ROOT / "train_llama", "grpo", "--model", folder / "model", "--rollouts", file, "--output_dir", out, "--max_steps", "1", "--advantage_estimator",
                    "dr_grpo", "--train_batch_size", str(len(lines)), "--max_norm", "0", "--row_tokens", "4096", "--max_len", "4096", "--device", "cpu"],
                   check=True, stdout=subprocess.DEVNULL)
    return next(line for line in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "policy_loss" in line)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, tokenizer = make_model(folder / "model")
        file, tools = folder / "tools.py", {}
        file.write_text(TOOLS)
        exec(TOOLS, tools)
        ours = here(file, folder / "model")
        theirs, rewards, log = in_trl(model, tokenizer, tools, folder)
        for number, (own, other, reward) in enumerate(zip(ours, theirs, rewards, strict=True)):
            if [list(part) for part in other] != [list(part) for part in own[:3]] or abs(own[3][-1] - reward) > AGREE:
                sys.exit(f"episode {number} differs\n  TRL:  {tokenizer.decode(other[1])!r} {reward}\n  here: {tokenizer.decode(own[1])!r} {own[3][-1]}")
        print(f"{len(ours)} episodes, {sum(len(own[1]) for own in ours)} tokens, {sum(sum(own[2]) for own in ours)} of them sampled: ids, masks and rewards are equal, with {len({tuple(own[0]) for own in ours})} prompts")
        for number in range(STEPS):
            mine = ours[number * PROMPTS * ANSWERS:(number + 1) * PROMPTS * ANSWERS]
            line = step_here(model, mine, folder, number)
            calls, failures = (sum(own[4][i] for own in mine) for i in (0, 1))
            pairs = {"loss": (log[number]["loss"], line["policy_loss"]), "gradient norm": (log[number]["grad_norm"], line["grad_norm"]),
                     "calls": (log[number]["tools/call_frequency"], calls / len(mine)), "failures": (log[number]["tools/failure_frequency"], failures / calls)}
            print(f"step {number + 1}: " + ", ".join(f"{what} {a:.7g} in TRL, {b:.7g} here" for what, (a, b) in pairs.items()))
            if wrong := [what for what, (a, b) in pairs.items() if abs(a - b) > AGREE * max(1, abs(a))]:
                sys.exit(f"{', '.join(wrong)}: more than {AGREE} apart")


if __name__ == "__main__":
    main()
