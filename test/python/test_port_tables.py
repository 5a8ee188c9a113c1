"""Rows of the tables of scripts/port that say "no effect": each has a reason, and the same command results without the setting."""

import json

import pytest
from test_dialects import OPENRLHF, TRL, VERL, call  # adds scripts/ to sys.path
from port import peers

# A row without values has no effect whatever the value. Its reason is one of these: with it the data, the targets, the rates, the steps and the losses of
# the trainer itself are the same. A setting that would change them needs another row: one with values, for the values that are always so here, and one that
# translates or refuses the others.
REASONS = {
    "the log, and what evaluation prints": {
        "metrics go to --log, one JSON object per line", "metrics go to --log, one JSON object per line; --profile measures times",
        "metrics go to --log, one JSON object per line; --report_to tensorboard|wandb|trackio also reports them during training",
        "--report_to wandb:PROJECT reports metrics to that project during training", "evaluation answers each prompt once, greedily",
        "evaluation reports loss, perplexity and accuracy", "evaluation reads all samples", "--sample_every prints samples of the model", "--profile measures the time of each op",
        "the task plot draws the loss", "it only changes Axolotl's own output", "the stages pt, sft, rm and dpo generate nothing"},
    "the data and the model, described in another place": {
        "config.json describes the model", "a file's name determines its format", "data sets are read from the Hugging Face hub", "these names are for the data set swift/self-cognition",
        "a record that cannot be read ends the run, and no other is dropped without a count", "the end-of-turn token that the template adds to a trained turn is also a target",
        "new rows start as the mean of the others, and each token has one row", "a record with images, videos or sound is refused",
        "a reward model reads the policy's text",
        "the critic has the tokenizer of the policy",
        "calls are read in the format in which the chat template writes them",
        "an episode is only appended to, and its tokens are those of the chat template",
        "Hydra's own settings", "Axolotl does not read it either"},
    "files: checkpoints, caches, downloads, uploads": {
        "data/prepare.py tokenises samples once and caches them", "code in a model's directory is never run", "checkpoints are written to output_dir/step_N",
        "--max_num limits the checkpoints kept", "every checkpoint contains the model as a Hugging Face directory",
        "every checkpoint also contains the optimizer; --save_steps -1 writes none", "every checkpoint can be resumed by any number of ranks",
        "the model is saved at the end, and an interrupted run writes a checkpoint", "models are Hugging Face directories, without conversion", "this program checks models itself",
        "the critic is saved with every model, in the directory critic", "output_dir/best contains the model with the lowest eval_loss, output_dir the last one",
        "output_dir/best contains the model with the best evaluation, for a policy the one with the highest reward",
        "the model is saved at the end, and an interrupted run writes a checkpoint; --save_steps N also writes one every N optimizer steps",
        "hf auth login logs in to the hub, and hf upload OWNER/NAME OUTPUT_DIR uploads a model", "no model is uploaded; after the run: hf upload OWNER/NAME OUTPUT_DIR"},
    "the launcher, processes and machines": {
        "MPI tells each rank its number", "a setting of Axolotl's own programs", "ranks are threads of this program, or started by mpirun: Ray is not used",
        "--zero_stage 1 shards the optimizer over the ranks", "--zero_stage selects the sharded arrays",
        "it saves memory and changes no result; here --zero_stage shards weights, gradients and the optimizer, and --ring_attn_size splits sequences",
        "a setting of accelerate's launcher", "every rank has a part of all models, and --ranks or mpirun sets the number of ranks",
        "the task trains, and evaluates if --eval_data or --eval_fraction is given",
        "ranks that do not share a sequence (--ring_attn_size) divide the rows of a step; --zero_group N limits the sharding of --zero_stage to N ranks (default: all)"},
    "memory, speed, and the implementation of the same function": {
        "it concerns memory and speed, and changes no result", "it selects an implementation and changes no result", "a setting of PyTorch without a counterpart here",
        "a setting of FSDP; --zero_stage selects the sharded arrays", "all memory is planned before the start (--plan)", "rows have no padding", "weights of the sampler are those in training, in --dtype",
        "--ring_attn_size applies to all models",
        "all ranks run one implementation",
        "the head computes the logits of a part of the tokens at a time",
        "samples are always packed into rows of --row_tokens tokens, and never attend to each other", "runs are always deterministic",
        "rows are filled up to --row_tokens tokens, and the loss is the mean over all targets of a step",
        "rows are filled up to --row_tokens tokens, and --max_sequences prompts are answered at a time", "answers are sampled --max_sequences at a time",
        "this program samples answers itself, from the weights in training", "this program has its own attention: exact, blocked, on packed rows",
        "sampling and training compute the same probabilities; for stale answers use --is_correction: token_truncate is tis, token_mask is icepop",
        "only --offload enables offloading: of activations, optimizer, weights, or several of them; --plan shows whether a run fits",
        "the reference is computed once, before training, on packed rows", "with --ref_mode precompute the reference is not in memory during training",
        "a reward model stays in memory; --plan includes it", "experts have one implementation", "a byte stores two 4-bit weights",
        "--recompute applies to both models", "--recompute selects the recomputed activations", "sums, norms and losses are in float, weights in --dtype",
        "rewards and losses are always computed in float or double", "gradients of parameters are stored in float, or with --grad_dtype bf16 in bf16",
        "sums over ranks are in float", "a loss that is not finite ends the run", "a high loss does not end a run", "ranks exchange arrays in --dtype",
        "rows are packed by best fit: no document is cut at the end of a row or attends to another one", "no token is dropped",
        "experts have one implementation, and --load_in quantises them with the other matrices", "adapters have one implementation, and are stored as floats",
        "4-bit weights are NF4, with quantised scales", "--moments and --grad_dtype are the types of the optimizer's state and of gradients"},
    "names that follow from other settings": {"prompts are drawn until a batch is full", "--max_steps, or num_episodes, determines the steps", "the mean reward of a prompt's answers decides",
                                              "only the estimator gae has a critic", "the critic has no adapters"},
    "random numbers, which differ between programs": {"the answers of a batch are shuffled into steps", "--seed determines the order of the samples", "ranks draw their rows from one random order"},
    "a part of a method that is refused by its own name": {"it is part of a method that is refused by its own name"},
}
LINES = {"TRL": f"trl sft {TRL}", "OpenRLHF": f"openrlhf.cli.train_ppo_ray {OPENRLHF}", "Axolotl": "axolotl train --rl dpo --base_model M --datasets a/b --datasets.type.field_chosen c --output_dir O",
         "LLaMA-Factory": "llamafactory-cli train --model_name_or_path M --stage sft --dataset d.jsonl --output_dir O",
         "ms-swift": "swift sft --model M --dataset a/b --output_dir O", "Megatron-SWIFT": "megatron sft --model M --dataset a/b --save O",
         "verl": VERL, "transformers": f"trl sft {TRL}", "accelerate": f"trl sft {TRL}"}
NOTES = {peer.name: [row for row in peer.rows if row.kind == "note"] for peer in peers.TABLES}


def command(words, tmp_path):
    """The command of a conversion, and the comments below it."""
    said = call([*words, "--convert"], tmp_path)
    assert said.returncode == 0, said.stderr
    return said.stdout.split("\n", 1)


@pytest.mark.parametrize("peer", NOTES)
def test_rows_without_effect(tmp_path, peer):
    given = [(name, row.values[0] if row.values else "x1") for row in NOTES[peer] for name in row.names]
    if peer == "DeepSpeed":
        plain, whole = ({"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}} for _ in range(2))
        for name, value in given:
            inner = whole
            for part in name.split(".")[:-1]:
                inner = inner.setdefault(part, {})
            inner[name.rpartition(".")[2]] = value
        commands = []
        for file in (plain, whole):
            (tmp_path / "ds.json").write_text(json.dumps(file))
            commands.append(command([*LINES["TRL"].split(), "--deepspeed", "ds.json"], tmp_path))
    else:
        commands = [command([*LINES[peer].split(), *more], tmp_path) for more in ([], [word for name, value in given for word in ([f"{name}={value}"] if peer == "verl" else [f"--{name}", value])])]
    (before, _), (after, notes) = commands
    assert after == before
    missing = [name for name, _ in given if name not in notes]
    assert not missing, missing


@pytest.mark.parametrize("peer", NOTES)
def test_rows_without_effect_have_a_reason(peer):
    """A row without values has one of the reasons."""
    reasons = set().union(*REASONS.values())
    assert {row.text: row.names for row in NOTES[peer] if not row.values and row.text not in reasons} == {}
