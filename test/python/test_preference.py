"""Whole runs of dpo and rm on the tiny models of test/golden: they equal transformers and TRL on the same pairs; the reference's side file; scores.
test_same_bits.py has them on ranks, test_preference.cpp the formulas of the losses."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
from runs import (
    ENVIRONMENT, GOLDEN, PAIRS, call, change_json, command, first_step, header_of, log_lines, near, read_lines, read_tensors, same_run, succeeds, write_data,
    write_lines, write_tensors)
from test_sampling import with_tokenizer

MODELS = json.loads((GOLDEN / "preference.json").read_text())["models"]
TRL = json.loads((GOLDEN / "trl.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The cache for the references of all these runs."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(directory))
        yield directory / "train_llama"


# ---- pairs, models and calls ------------------------------------------------------------------------------------------------------

def golden_pairs():
    """(ids, mask) of each document."""
    arrays = read_tensors(PAIRS)
    tokens, mask, offsets = (arrays[name] for name in ("tokens", "loss_mask", "doc_offsets"))
    return [(tokens[a:b], mask[a:b]) for a, b in zip(offsets, offsets[1:])]


def random_pairs(count, seed=0):
    """The documents chosen, rejected, chosen, ...: each pair is a prompt with two answers."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        prompt = rng.integers(4, 96, rng.integers(1, 20))
        for _ in range(2):
            answer = rng.integers(4, 96, rng.integers(1, 40))
            documents.append((np.concatenate([prompt, answer]), np.concatenate([0 * prompt, 0 * answer + 1])))
    return documents


write_pairs = partial(write_data, kind="pref")


def reward_model(directory, name, score):
    """A golden model with `score` as its head, in two files."""
    model = shutil.copytree(GOLDEN / name, directory)
    [architecture] = json.loads((model / "config.json").read_text())["architectures"]
    change_json(model / "config.json", architectures=[architecture.replace("CausalLM", "SequenceClassification")], id2label={"0": "LABEL_0"})
    (model / "model.safetensors.index.json").unlink(missing_ok=True)
    if (model / "model.safetensors").exists():
        (model / "model.safetensors").rename(model / "model-backbone.safetensors")
    write_tensors(model / "model-score.safetensors", {"score.weight": np.array([score], np.float32)})
    files = {tensor: path.name for path in model.glob("model-*.safetensors") for tensor in header_of(path)[0] if tensor != "__metadata__"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return model


def words(task, output, *flags, **options):
    """One step of all golden pairs unless the options differ."""
    return command(task, *flags, **{"data": PAIRS, "output_dir": output, "max_len": 67, "train_batch_size": 1000, "max_steps": 1, **options})


def run(task, output, *flags, **options):
    return succeeds(words(task, output, *flags, **options))


def step(task, output, *flags, **options):
    """The log line of the first step."""
    run(task, output, "--overwrite", *flags, **options)
    return first_step(output)


def evaluate(model, tmp_path, **options):
    """The log of eval, and the lines of --scores."""
    log, scores = tmp_path / "eval.jsonl", tmp_path / "scores.jsonl"
    succeeds(command("eval", **{"model": model, "data": PAIRS, "max_len": 128, "log": log, "scores": scores, **options}))
    return read_lines(log)[-1] if log.exists() else None, read_lines(scores)


# ---- transformers and TRL ---------------------------------------------------------------------------------------------------------

def expect_step(line, golden, **wanted):
    """Compares a step's loss and norm, and its log-probabilities and rewards."""
    near(line["loss"], golden["loss"], 1e-5)
    near(line["grad_norm"], golden["grad_norm"], 1e-4)
    for key, want in wanted.items():
        kind, _, which = key.partition("_")
        near(line[f"{kind}/{which}"], want, *((1e-5, 0) if kind == "logps" else (0, 1e-4)))


def test_rm_equals_transformers(tmp_path):
    golden = MODELS["llama31"]
    model = reward_model(tmp_path / "model", "llama31", golden["score"])
    for loss in golden["reward"].values():
        flags = ["--margin_loss_enable"] if loss["margin"] else []
        line = step("rm", tmp_path / "run", *flags, model=model, center_rewards_coefficient=loss["center_rewards_coefficient"])
        expect_step(line, loss, rewards_chosen=np.mean(golden["rewards"][0::2]), rewards_rejected=np.mean(golden["rewards"][1::2]))
        near(line["margin"], line["rewards/chosen"] - line["rewards/rejected"], 0, 1e-12)
        near(line["accuracy"], golden["rewards_accuracy"], 1e-12)
        assert "entropy" not in line and "rewards/margins" not in line


def trl_step(output, **options):
    return step("dpo", output, model=GOLDEN / TRL["policy"], ref_model=GOLDEN / TRL["reference"], **options)


@pytest.mark.parametrize("name", TRL["dpo"])
def test_dpo_equals_trl(name, tmp_path):
    """TRL computes in float; test_preference.cpp derives the error that this allows in the loss."""
    trl = TRL["dpo"][name]
    line = trl_step(tmp_path / "run", loss_type={"ipo": "ipo_mean"}.get(name, name), beta=trl["beta"], label_smoothing=trl["label_smoothing"])
    keys = [] if name == "sft" else ["logps/chosen", "logps/rejected", *(f"rewards/{key}" for key in ("chosen", "rejected", "margins", "accuracies"))]
    expect_step(line, trl, **{key.replace("/", "_"): trl["metrics"][key] for key in keys})  # without a reference there are no rewards


def test_weighted_losses_are_added(tmp_path):
    sigmoid, sft = (TRL["dpo"][name]["loss"] for name in ("sigmoid", "sft"))
    nll = -np.mean(np.array(TRL["logps"]["chosen"]) / TRL["tokens"]["chosen"])
    line = trl_step(tmp_path / "run", loss_type="sigmoid,sft", loss_weights="0.7,0.2", nll_loss_coef=0.5)
    near(line["loss"], 0.7 * sigmoid + 0.2 * sft + 0.5 * nll, 1e-5)


# ---- single answers ---------------------------------------------------------------------------------------------------------------

WEIGHTS = {True: 1.5, False: 0.5}
JUDGED = {"shuffle": "false", "desirable_weight": WEIGHTS[True], "undesirable_weight": WEIGHTS[False]}


def judged(path, documents, labels):
    return write_data(path, documents, kind="unpaired", labels=labels)


def mismatched(documents):
    """Each prompt with the answer of the document before it."""
    parts = [np.split(ids, [mask.argmax()]) for ids, mask in documents]
    pairs = [(prompt, parts[i - 1][1]) for i, (prompt, _) in enumerate(parts)]
    return [(np.concatenate(pair), np.concatenate([0 * pair[0], 0 * pair[1] + 1])) for pair in pairs]


def log_ratios(tmp_path, policy, reference, documents):
    """log p - log p of the reference, of each document."""
    data = write_data(tmp_path / "documents.safetensors", documents)
    policy, reference = ([line["logp"] for line in evaluate(model, tmp_path, data=data)[1]] for model in (policy, reference))
    return np.array(policy) - reference


def unpaired_loss(u, z, labels, beta, weights=WEIGHTS):
    """The mean loss of answers with these log-ratios, in float64."""
    signs = np.where(labels, 1, -1)
    return np.mean(np.where(labels, weights[True], weights[False]) * (1 - 1 / (1 + np.exp(-beta * signs * (u - z)))))


@pytest.mark.parametrize("policy, reference, is_positive", [("llama31", "llama2", True), ("llama2", "llama31", False)])
def test_kto_is_the_formula(policy, reference, is_positive, tmp_path):
    """With the models in the other order the mean over the mismatched pairs has the other sign, and z is 0."""
    policy, reference = GOLDEN / policy, GOLDEN / reference
    documents, labels = golden_pairs(), np.arange(len(golden_pairs())) % 3 != 1
    data = judged(tmp_path / "judged.safetensors", documents, labels)
    u, mean = (log_ratios(tmp_path, policy, reference, some) for some in (documents, mismatched(documents)))
    z, beta = max(0, mean.mean()), 0.02
    for name, loss_type, kl in (("kto", "kto", z), ("apo", "apo_zero_unpaired", 0)):
        line = step("dpo", tmp_path / name, model=policy, ref_model=reference, data=data, loss_type=loss_type, beta=beta, max_len=128, **JUDGED)
        near(line["loss"], unpaired_loss(u, kl, labels, beta), 1e-5)
        near(line["rewards/chosen"], beta * u[labels].mean(), 1e-5)
        near(line["rewards/rejected"], beta * u[~labels].mean(), 1e-5)
        near(line["rewards/margins"], line["rewards/chosen"] - line["rewards/rejected"], 0, 1e-12)
        assert line.get("kl", 0) == pytest.approx(kl, rel=1e-5) and ("kl" in line) == (name == "kto")
    assert abs(mean.mean()) > 1 and (z > 1) == is_positive


@pytest.mark.parametrize("name", TRL["kto"])
def test_a_run_of_kto_equals_trl(name, tmp_path):
    """Three steps, each of one batch of TRL's. AdamW divides the first gradient by its own size, which magnifies the rounding of its small elements."""
    trl = TRL["kto"][name]
    data = judged(tmp_path / "judged.safetensors", golden_pairs(), trl["labels"])
    weights = {key: trl[key] for key in ("beta", "desirable_weight", "undesirable_weight", "learning_rate")}
    run("dpo", tmp_path / "run", model=GOLDEN / TRL["reference"], ref_model=GOLDEN / TRL["policy"], data=data, loss_type=name, train_batch_size=trl["batch_size"],
        max_steps=None, shuffle="false", lr_scheduler="constant", lr_warmup=0, adam_betas="0.9,0.999", **weights)
    steps = [line for line in log_lines(tmp_path / "run") if "grad_norm" in line]
    for step, want in zip(steps, trl["steps"], strict=True):
        near(step["loss"], want["loss"], 1e-5)
        near(step["grad_norm"], want["grad_norm"], 1e-4)
        for key in want.keys() - {"loss", "grad_norm"} - ({"kl"} if name != "kto" else set()):
            near(step[key], want[key], 1e-5, 1e-4)
    assert (max(step["kl"] for step in trl["steps"]) > 1) == (name == "kto")


def test_labels_of_records(tmp_path):
    """Pairs become single answers. A note says if labels and weights are out of balance."""
    (tmp_path / "model").mkdir()
    model = with_tokenizer(tmp_path / "model")
    pair, answer = {"prompt": "ab", "chosen": "cd", "rejected": "efg"}, {"prompt": "ab", "completion": "cd"}
    for name, records, said in (("pairs", [pair] * 4, [f"{'pairs taken apart':<32}{4:>16}  into a desirable"]), ("good", [answer | {"label": True}] * 3, ["note: all 3 answers", "are desirable"]),
                                ("mixed", [answer | {"label": i == 0} for i in range(3)], ["note: the weights of 1 desirable and 2 undesirable answers have the ratio 0.5",
                                                                                         "--desirable_weight 2 or --undesirable_weight 0.5"])):
        result = call(words("dpo", tmp_path / name, model=model, data=write_lines(tmp_path / f"{name}.jsonl", records), loss_type="kto", max_len=32))
        printed = result.stdout + result.stderr
        assert result.returncode == 0 and all(text in printed for text in said) and ("note: the weights" in printed or "note: all" in printed) == (name != "pairs"), printed
        line = first_step(tmp_path / name)
        assert ("rewards/chosen" in line, "rewards/rejected" in line, "rewards/margins" in line) == (True, name != "good", name != "good")


def test_mismatched_pairs_are_cut_to_max_len(tmp_path):
    """A prompt and an answer of different samples can be longer than any sample."""
    rng = np.random.default_rng(5)
    documents = [(rng.integers(4, 96, 61), np.arange(61) >= begin) for begin in (60, 1)]
    data = judged(tmp_path / "judged.safetensors", documents, [1, 0])
    for max_len in (61, 100, 200):
        cut = [(ids[:max_len], mask[:max_len]) for ids, mask in mismatched(documents)]
        assert len(cut[0][0]) == min(max_len, 120)
        kl = log_ratios(tmp_path, GOLDEN / "qwen3", GOLDEN / "llama2", cut).mean()
        line = step("dpo", tmp_path / "run", model=GOLDEN / "qwen3", ref_model=GOLDEN / "llama2", data=data, loss_type="kto", max_len=max_len, shuffle="false")
        near(line["kl"], max(0, kl), 1e-5)
        assert kl > 1


# ---- the reference ----------------------------------------------------------------------------------------------------------------

def test_the_side_file_is_used_again(own_cache, tmp_path):
    """A change that affects the numbers makes another file. Losses without a reference make none."""
    pairs = write_pairs(tmp_path / "pairs.safetensors", random_pairs(6))
    model = shutil.copytree(GOLDEN / "smollm2", tmp_path / "reference")
    options, files = {"model": GOLDEN / "qwen3", "ref_model": model, "data": pairs}, []

    def swept(output, **change):
        """True if the run swept the reference and stored the result in a new file."""
        said, before = run("dpo", tmp_path / output, **{**options, **change}), len(files)
        files.extend(path for path in own_cache.glob("reference-*") if path not in files)
        assert said.count("reference: ") == 1 and len(files) - before == said.count(", kept in ") == 1 - said.count(", read from ")
        return len(files) > before

    assert swept("first") and not swept("again")
    same_run(tmp_path / "again", tmp_path / "first")
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-4])  # a damaged file is made again
    assert f"kept in {files[0]}" in run("dpo", tmp_path / "damaged", **options) and files[0].read_bytes() == whole
    for number, change in enumerate(({"row_tokens": 600, "train_batch_size": 2, "seed": 1, "beta": 0.5, "ranks": 2},
                                     {"data": shutil.copy(pairs, tmp_path / "moved.safetensors")})):
        assert not swept(f"same {number}", **change), change
    for number, change in enumerate(({"dtype": "bf16"}, {"max_samples": 5}, {"ref_model": GOLDEN / "llama2"},
                                     {"data": write_pairs(tmp_path / "other.safetensors", random_pairs(6, seed=1))})):
        assert swept(f"other {number}", **change), change
    change_json(model / "config.json", rms_norm_eps=1e-4)
    assert swept("other config")
    for number, change in enumerate(({"ref_mode": "resident"}, {"loss_type": "simpo", "beta": 2}, {"loss_type": "orpo"})):
        assert "reference: " not in run("dpo", tmp_path / f"none {number}", **options, **change)


# ---- a reference on ranks, evaluations and scores -----------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("many") / "pairs.safetensors", random_pairs(24, seed=3))  # 1343 tokens, at most 85 in a pair


@pytest.mark.parametrize("mode", ["precompute", "resident"])
def test_a_reference_with_other_heads_in_a_ring(mode, many, own_cache, tmp_path):
    options = {"data": many, "model": GOLDEN / "qwen3", "ref_model": GOLDEN / "smollm2", "ref_mode": mode}  # 4 query and 2 KV heads; 9 and 3
    gathered = step("dpo", tmp_path / "gather", sp_mode="gather", ranks=2, ring_attn_size=2, **options)
    near(gathered["loss"], step("dpo", tmp_path / "one", **{**options, "ref_mode": "resident"})["loss"], 1e-6)


def test_an_evaluation_has_the_numbers_of_a_step(tmp_path):
    """The learning rate of the only step is 0, so the evaluation after it has the same model."""
    for task, options in (("dpo", {"ref_model": GOLDEN / "qwen3"}), ("rm", {})):
        run(task, tmp_path / task, eval_data=PAIRS, model=GOLDEN / "llama2", **options)
        _, line, evaluation = log_lines(tmp_path / task)
        assert line["lr"] == 0
        named = {"dpo": ("loss", "entropy", "mean_token_accuracy", "rewards/chosen", "rewards/rejected", "rewards/accuracies",
                         "rewards/margins", "logps/chosen", "logps/rejected"),
                 "rm": ("loss", "rewards/chosen", "rewards/rejected", "accuracy", "margin")}[task]
        assert set(evaluation) == {"step", *(f"eval_{key}" for key in named)}
        for key in named:
            near(evaluation[f"eval_{key}"], line[key], 1e-12)


def test_scores_of_a_language_model(tmp_path):
    documents = golden_pairs()
    _, lines = evaluate(GOLDEN / "mistral", tmp_path, ranks=4, ring_attn_size=2, row_tokens=300, max_samples=3)
    assert len(lines) == 6
    for number, (line, logp, (_, mask)) in enumerate(zip(lines, MODELS["mistral"]["logps"], documents)):
        assert line["document"] == number and line["tokens"] == mask.sum()
        near(line["logp"], logp, 1e-5)


def test_scores_of_a_reward_model(tmp_path):
    """Documents without targets also have scores."""
    golden, options = MODELS["smollm2"], {"ranks": 4, "ring_attn_size": 4, "row_tokens": 300}
    model = reward_model(tmp_path / "model", "smollm2", golden["score"])
    line, lines = evaluate(model, tmp_path, **options)
    assert np.abs(np.array([score["score"] for score in lines]) - golden["rewards"]).max() <= 1e-4
    near(line["eval_loss"], golden["reward"]["plain"]["loss"], 1e-5)
    near(line["eval_accuracy"], golden["rewards_accuracy"], 1e-12)
    near(line["eval_margin"], line["eval_rewards/chosen"] - line["eval_rewards/rejected"], 1e-9)
    single = write_data(tmp_path / "single.safetensors", [(ids, 0 * mask) for ids, mask in golden_pairs()], kind="prompts")
    scores = evaluate(model, tmp_path, data=single, **options)[1]
    assert np.abs(np.array([score["score"] for score in scores]) - golden["rewards"]).max() <= 1e-4


def test_a_trained_reward_model(many, tmp_path):
    """eval gives the run's final values, config.json has their mean and deviation, and a second run starts from this head."""
    said = run("rm", tmp_path / "run", data=many, model=GOLDEN / "smollm2", eval_data=PAIRS, dtype="bf16", max_steps=4, train_batch_size=6,
               learning_rate=1e-3, share_prompts="false")
    assert "the reward head starts from random values" in said
    evaluation = log_lines(tmp_path / "run")[-1]
    line, scores = evaluate(tmp_path / "run", tmp_path, dtype="bf16", row_tokens=2 * 67)  # the run's rows: others would change the last bits
    rewards = np.array([score["score"] for score in scores])
    for key in ("eval_loss", "eval_rewards/chosen", "eval_accuracy", "eval_margin"):
        near(line[key], evaluation[key], 1e-12)
    near(line["eval_rewards/chosen"], rewards[0::2].mean(), 1e-9)

    config = json.loads((tmp_path / "run" / "config.json").read_text())  # test_hf.cpp compares its other fields
    near(config["mean"], rewards.mean(), 1e-9)
    near(config["std"], rewards.std(ddof=1), 1e-9)
    tensors, _ = header_of(tmp_path / "run" / "model.safetensors")
    assert tensors["score.weight"]["shape"] == [1, config["hidden_size"]] and "lm_head.weight" not in tensors
    assert tensors["__metadata__"] == {"format": "pt"}

    said = run("rm", tmp_path / "second", model=tmp_path / "run", dtype="bf16", row_tokens=2 * 67, seed=2, share_prompts="false")
    assert "random" not in said and abs(first_step(tmp_path / "second")["rewards/chosen"] - rewards[0::2].mean()) <= 1e-6
