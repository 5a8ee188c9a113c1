#!/usr/bin/env python3
"""Times steps of distillation in TRL and in train_llama, alternately in one run.

    .venv-compare/bin/python scripts/compare_distill.py [--dtype f32|bf16] [--out docs/benchmarks.md]

The student has the shape of SmolLM2-135M and the teacher that of SmolLM2-360M, both with random weights. A step learns, by KL(s, t), from four
given answers of 480 tokens to prompts of 32 tokens: one row of 2048 tokens in train_llama, a batch of four without padding in TRL, which gets the
answers where it would sample them, and trains without gradient checkpointing. Both sides use all cores. In each of three rounds each side runs one
warm-up step and two timed steps while the other side is idle; the fastest step is reported. The first losses must agree. Memory is the peak resident
size of the process (VmHWM), including libraries. There is one difference: TRL keeps AdamW's moments and the only copy of the student in bfloat16;
train_llama keeps its moments, gradients and weights in float.
"""
import argparse
import json
import sys
import tempfile
from pathlib import Path

import compare
import compare_trl
from compare import ROOT

ROUNDS, WARM_UP, COUNTED = 3, 1, 2
PROMPT, ANSWER, ANSWERS = 32, 480, 4
RATE = 1e-6
ROW = ANSWERS * (PROMPT + ANSWER)
STUDENT = compare.MODELS["smollm2-135m"][0]
TEACHER = {**STUDENT, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5}


def make_model(folder, shape, seed):
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def documents():
    """Returns the token ids of the prompts with their answers, and the mask of the answers."""
    import numpy as np

    ids = np.random.default_rng(1).integers(0, STUDENT["vocab_size"], (ANSWERS, PROMPT + ANSWER))
    return ids, np.array([0] * PROMPT + [1] * ANSWER, np.uint8)


# ---- TRL: a process of its own that does one step for each line it is sent ---------------------------------------------------------------

def worker(dtype, student, teacher):
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

    class DistillationTrainer(trl.DistillationTrainer):
        def _generate(self, prompts):  # replaces TRL's method, which would tokenise and sample
            return [ids[:PROMPT] for ids in prompts], [ids[PROMPT:] for ids in prompts], None, None, []

    answers = compare_trl.quiet_libraries()
    models = [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32) for path in (student, teacher)]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, "x")), eos_token="x", pad_token="x")
    with tempfile.TemporaryDirectory() as folder:
        args = trl.DistillationConfig(output_dir=folder, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
                                      per_device_train_batch_size=ANSWERS, activation_checkpointing=False, num_train_epochs=1000, learning_rate=RATE,
                                      lr_scheduler_type="constant", weight_decay=compare.WEIGHT_DECAY, adam_beta1=compare.BETAS[0],
                                      adam_beta2=compare.BETAS[1], max_grad_norm=compare.MAX_NORM)
        data = datasets.Dataset.from_dict(dict(prompt=documents()[0].tolist()))
        trainer = DistillationTrainer(models[0], models[1], args=args, train_dataset=data, processing_class=tokenizer)
        compare_trl.train_on_demand(trainer, answers, lambda logs: dict(loss=logs["loss"]))


# ---- train_llama: short runs of the program ------------------------------------------------------------------------------------------------

def write_answers(path, steps):
    import numpy as np

    sys.path.insert(0, str(ROOT / "data"))
    from token_file import TokenFile

    file, (ids, mask) = TokenFile(str(path), STUDENT["vocab_size"]), documents()
    for document in [*ids] * steps:
        file.append(document, mask, np.array([len(document)]))
    file.write(dict(kind="sft", vocab_size=str(STUDENT["vocab_size"])))
    file.close()


def our_steps(dtype, folder, steps):
    return compare.train("train_llama", "distill", folder / "run", RATE, "--model", folder / "student", "--teacher_model", folder / "teacher",
                         "--data", folder / "answers.safetensors", "--on_policy", 0, "--shuffle", "false", "--device", "cpu", "--dtype", dtype,
                         "--max_len", PROMPT + ANSWER, "--row_tokens", ROW, "--train_batch_size", ANSWERS, "--max_steps", steps)


# ---- both, and the table -----------------------------------------------------------------------------------------------------------------

def row(dtype, folder):
    make_model(folder / "student", STUDENT, 1)
    make_model(folder / "teacher", TEACHER, 2)
    write_answers(folder / "answers.safetensors", WARM_UP + COUNTED)
    peer = compare.Peer(__file__, dtype, str(folder / "student"), str(folder / "teacher"))
    theirs, ours = [], []
    for r in range(ROUNDS):
        theirs.append(peer.steps(WARM_UP + COUNTED))
        steps, said = our_steps(dtype, folder, WARM_UP + COUNTED)
        ours.append(steps)
        both = ["  ".join(f"{step['step_s']:6.2f}" for step in side[r]) for side in (theirs, ours)]
        print(f"seconds of the steps in round {r + 1}:  TRL {both[0]}   train_llama {both[1]}; {said.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
    peer.close()
    compare.expect_same_loss(theirs[0][0], ours[0][0])

    def speed(rounds):
        return ROW / min(step["step_s"] for steps in rounds for step in steps[WARM_UP:])

    return compare.table_row(f"smollm2-135m, distill from 360m, {ANSWERS} x ({PROMPT} + {ANSWER})", dtype, "trl", speed(theirs), speed(ours),
                             compare.memory(theirs), compare.memory(ours), "not taken", compare.first_losses(theirs, ours))


def main():
    if sys.argv[1:2] == ["worker"]:
        return worker(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default=compare.best_dtype())
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file, replacing the previous one of this CPU")
    options = parser.parse_args()
    if not (ROOT / "train_llama").exists():
        sys.exit("scripts/compare_distill.py: ./train_llama is not built\n  fix: make")
    with tempfile.TemporaryDirectory() as folder:
        compare.report([row(options.dtype, Path(folder))], options.out)


if __name__ == "__main__":
    main()
