"""--plan for ranks, its table --fit, and a run's report on its plan."""

import json
import re

import pytest
from runs import GOLDEN, command, log_lines, random_documents, succeeds, train, write_data

QWEN = {"model": None, "preset": "qwen2.5-0.5b"}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text, line):
    """The bytes at the end of a line that begins with `line`."""
    number, unit = re.search(rf"^\s*{re.escape(line)}.* ([\d.]+) (KiB|MiB|GiB)$", text, re.M).groups()
    return float(number) * UNITS[unit]


def plan(*flags, task="sft", **options):
    """The output, after an empty line."""
    return "\n" + succeeds(command(task, "--plan", *flags, **{**QWEN, **options}))


def test_the_answer_comes_first():
    text = plan(gpu="h100", max_len=2048)
    assert re.match(r"\nfits: .*\npredicted, .*\n  products .*\nfastest .*\nlongest sample .*\n\n\d+ parameters; ", text) and size(text, "placed:") > 0


def test_the_plan_of_a_rank():
    long = {"gpu": 80, "max_len": 131072, "dtype": "bf16", "recompute": "layer"}
    one, eight = plan(**long), plan(ranks=8, ring_attn_size=8, zero_stage=2, **long)
    assert "ranks" not in one and " of 75.20 GiB usable on 80\n" in one
    assert "8 ranks: 1 x data, 8 x sequence (ring), ZeRO stage 2; the plan is that of each rank\n" in eight
    assert " of 75.20 GiB usable on each of 8 GPUs (80)\n" in eight and "a row of 8 ranks" in eight
    for text in (one, eight):
        assert abs(size(text, "weights,") + size(text, "activations and buffers") - size(text, "placed:")) < 0.02 * UNITS["GiB"]
    # An eighth, except for arrays that every rank has in full: gradients of the embedding before they are reduced, a head's chunk, and a ring's blocks.
    whole = size(eight, "bucket.head") + size(eight, "head chunk") + sum(size(eight, f"act.*.{blocks} ") for blocks in ("ring", "ring backward", "ring gradients")) / 24
    assert size(eight, "activations and buffers") < size(one, "activations and buffers") / 8 + whole
    assert size(eight, "adamw m") < 0.13 * size(one, "adamw m")


def needed(text):
    return float(re.search(r"^(?:fits|does not fit): ([\d.]+) GiB", text, re.M)[1]) * UNITS["GiB"]


def test_the_head_gets_what_memory_is_left():
    """The chunks of the head are as large as fits, in whole 64 rows of up to 512 MiB; the level of recomputation does not depend on them."""
    options = {"dtype": "bf16", "max_len": 2048}
    least = plan(gpu=1, recompute="cheap", **options)
    row = 151936 * 4 / UNITS["MiB"]
    for left, rows in ((0.02, 192), (0.2, 384), (0.45, 832)):
        text = plan(gpu=(needed(least) / UNITS["GiB"] + left) / 0.94, recompute="cheap", **options)
        assert "\nfits: " in text and size(text, "head chunk") // (row * UNITS["MiB"]) // 64 * 64 == rows, left
        assert abs(needed(text) - needed(least) - (size(text, "head chunk") - size(least, "head chunk"))) < 0.02 * UNITS["GiB"]
    assert size(plan(gpu=24, **options), "head chunk") == size(text, "head chunk")


def longest_sample(text):
    return int(re.search(r"^longest sample that fits: (\d+) tokens", text, re.M)[1])


def test_a_resident_reference_counts(tmp_path):
    options = {"task": "dpo", "gpu": 12, "dtype": "bf16", "recompute": "layer", "max_len": 1024}
    precomputed, resident = plan(**options), plan(ref_mode="resident", **options)
    beside = size(resident, "the reference model, resident")
    parameters = int(re.search(r"^(\d+) parameters; rows of 2048 tokens, samples of up to 1024;", resident, re.M)[1])
    assert 2 * parameters < beside < 2.5 * parameters and "the reference model" not in precomputed
    assert size(precomputed, "placed:") == size(resident, "placed:")
    assert abs(needed(resident) - needed(precomputed) - beside) < 0.02 * UNITS["GiB"]
    for loss, counts in (("simpo", False), ("simpo,hinge", True)):
        assert ("the reference model, resident" in plan(ref_mode="resident", loss_type=loss, **options)) == counts
    assert "the reference model, resident" in plan(loss_type="kto", **options) and "rows of 1024 tokens" in plan(loss_type="kto", **options)
    assert "the reference model" not in plan(loss_type="apo_zero_unpaired", **options)
    longest = longest_sample(resident)
    assert longest < longest_sample(precomputed) < 32768
    long = {**options, "ref_mode": "resident"}
    assert "\nfits: " in plan(**{**long, "max_len": longest}) and "\ndoes not fit: " in plan(**{**long, "max_len": longest + 64})
    smaller = {"vocab_size": 151936, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **smaller}))
    assert size(plan(ref_mode="resident", ref_model=tmp_path, **options), "the reference model, resident") < beside / 2


def test_a_teacher_counts(tmp_path):
    """The base of adapters is no second model, and a teacher whose sizes do not fit FP8 computes without it."""
    student, other = {"task": "distill", "model": GOLDEN / "llama2", "preset": None, "max_len": 64, "max_new_tokens": 8}, GOLDEN / "llama31"
    text = plan(teacher_model=other, **student)
    assert size(text, "the teacher, resident") > 0 and size(text, "stats.divergence") > 0
    base = plan(teacher_model=student["model"], lora_rank=4, **student)
    assert "the teacher, resident" not in base and size(base, "normf of the teacher") > 0
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 96, "hidden_size": 512, "intermediate_size": 520,
                                                      "num_hidden_layers": 4, "num_attention_heads": 8}))
    for task in ("grpo", "ppo"):
        policy = {**student, "task": task, "teacher_model": tmp_path}
        whole, small = plan(**policy), plan(teacher_load_in="4bit", **policy)
        assert size(whole, "the teacher, resident") == size(plan(**policy, kl_coef=0.1, ref_model=tmp_path), "the reference model, resident")
        assert size(small, "the teacher, resident") < size(whole, "the teacher, resident") / 2
        assert "the teacher, resident" not in plan(**{**policy, "teacher_model": student["model"]}, lora_rank=4)
        in_bf16, in_fp8 = (plan(*flags, dtype="bf16", **policy) for flags in ((), ("--fp8",)))  # FP8 cannot multiply matrices with 520 rows
        assert size(in_fp8, "the teacher, resident") == size(in_bf16, "the teacher, resident") and size(in_fp8, "fp8 weights") > 0


def test_ranks_as_threads_share_the_memory():
    text = plan(task="dpo", ranks=4, max_len=64, ref_mode="resident")
    together = size(text, "4 ranks, which share the memory of this machine")
    assert abs(together - 4 * (size(text, "placed:") + size(text, "the reference model"))) < 0.05 * UNITS["GiB"]
    assert abs(needed(text) - together - size(text, "the process itself")) < 0.02 * UNITS["GiB"]


def tokens(cell):
    return 0 if cell == "none" else int(cell)


def fit(*flags, levels=3, **options):
    """{ranks: [tokens with recompute none, cheap, layer]}, the set of marked numbers, and the output."""
    text = plan("--fit", *flags, **options)
    lines = re.findall(r"^ +(\d+)" + levels * r" +(\d+|none)([* ])" + "$", text, re.M)
    table = {int(ranks): [tokens(n) for n in cells[0::2]] for ranks, *cells in lines}
    return table, {n for _, *cells in lines for n, mark in zip(map(tokens, cells[0::2]), cells[1::2]) if mark == "*"}, text


def test_the_table_of_what_fits():
    table, marked, text = fit(gpu=24, dtype="bf16", ranks=6, zero_stage=2)
    assert list(table) == [1, 2, 4, 6] and "ZeRO stage 2" in text and "22.56 GiB for each rank, usable on 24\n" in text
    assert marked == {n for row in table.values() for n in row if n > 32768} and "max_position_embeddings, 32768" in text
    for row, next_row in zip(table.values(), list(table.values())[1:]):
        assert row == sorted(row) and all(a < b for a, b in zip(row, next_row))
    for recompute, n in zip(("none", "cheap", "layer"), table[6]):  # a longer sample does not fit
        options = {"gpu": 24, "dtype": "bf16", "ranks": 6, "ring_attn_size": 6, "zero_stage": 2, "recompute": recompute}
        assert "\nfits: " in plan(max_len=n, **options) and "\ndoes not fit: " in plan(max_len=n + 64 * 6, **options), recompute


def test_given_flags_stay_as_they_are():
    options = {"gpu": 24, "dtype": "bf16", "ranks": 4, "zero_stage": 2}
    all_levels, one_level = fit(**options)[0], fit(recompute="layer", levels=1, **options)
    assert "by number of ranks; --recompute layer and all other flags as given\n" in one_level[2]
    assert one_level[0] == {ranks: row[2:] for ranks, row in all_levels.items()}
    rings, _, text = fit(recompute="layer", ring_attn_size=2, levels=1, **options)
    assert list(rings) == [2, 4] and rings[2] == one_level[0][2] and rings[4] < one_level[0][4]
    assert "on rings of --ring_attn_size 2 that share it" in text and "\n     1  --ring_attn_size 2 does not divide 1 rank\n" in text


PREDICTED = r"^predicted, not measured: ([\d.e+]+) s \([\d.e+]+ to [\d.e+]+\) for a step of (\d+) rows? of (\d+) tokens, documents of (\d+); (\d+) tokens/s$"


def test_the_seconds_of_a_step_are_predicted():
    options = {"gpu": "h100", "max_len": 8192, "train_batch_size": 16, "recompute": "layer"}
    one, eight = (re.search(PREDICTED, plan(ranks=ranks, **options), re.M).groups() for ranks in (1, 8))
    assert one[1:4] == eight[1:4] == ("16", "8192", "8192")
    assert 6 < float(one[0]) / float(eight[0]) <= 8 and abs(float(eight[4]) * float(eight[0]) - 16 * 8192) < 8192
    packed = re.search(PREDICTED, plan(row_tokens=16384, **options), re.M).groups()
    assert packed[1:4] == ("8", "16384", "8192") and float(packed[0]) < 1.01 * float(one[0])
    assert "2 rows of 8192" in plan(**{**options, "train_batch_size": 0}, train_batch_tokens=16000)
    assert "16 rows of 16384 tokens, documents of 8192" in plan(task="dpo", **options)
    for unknown in ({"gpu": 80}, {"dtype": "f32"}):
        assert "predicted" not in plan(**{**options, **unknown})


def test_the_timeline_has_ops_messages_copies_and_memory(tmp_path):
    file = tmp_path / "step.json"
    options = {"gpu": "h100", "ranks": 8, "ring_attn_size": 8, "zero_stage": 3, "max_len": 32768, "train_batch_size": 1, "recompute": "layer",
               "offload": "activations,optimizer"}
    for max_len in (options["max_len"] // 2, options["max_len"]):  # the second run replaces the file of the first
        text = plan(timeline=file, **options | {"max_len": max_len})
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    lanes = {name: [e for e in events if e["ph"] == "X" and names[e["tid"]] == name] for name in names.values()}
    assert list(lanes) == ["ops", "messages", "copies out", "copies in"]
    for name, lane in lanes.items():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(lane, lane[1:])), name
    end = max(e["ts"] + e["dur"] for lane in lanes.values() for e in lane)
    assert abs(end / 1e6 - float(re.search(PREDICTED, text, re.M)[1])) < 1e-3 * end / 1e6
    begins, arrives = ({e["name"]: e["ts"] + late * e["dur"] for e in lane} for late, lane in enumerate((lanes["ops"], lanes["messages"])))
    for layer in (22, 23):  # the weights of earlier layers are gathered again for the backward pass
        assert arrives[f"weights of layer {layer}"] <= begins[f"layer {layer}"] + 1e-3
        assert arrives[f"gradients of layer {layer}"] > begins[f"layer {layer}, backward"]
    assert [e["name"] for e in lanes["copies out"]] == [f"activations of layer {layer}" for layer in range(23)] + ["moments and weights"]
    alive = [e["args"] for e in events if e["ph"] == "C"]
    assert len(alive) == len(lanes["ops"]) and {"always", "act", "weights"} <= set(alive[3])
    most = max(sum(kinds.values()) for kinds in alive)
    assert 0.9 * size(text, "placed:") < most <= size(text, "placed:") + 0.01 * UNITS["GiB"]


def test_the_fastest_choice_fits_and_no_other_is_faster(tmp_path):
    """The model has four large layers, because many layers take longer to plan."""
    sizes = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 4, "num_attention_heads": 16,
             "num_key_value_heads": 2, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    options = {"gpu": "rtx4090", "preset": None, "model": tmp_path, "ranks": 4, "ring_attn_size": 4, "max_len": 32768, "train_batch_size": 1}

    def seconds(text):
        return float(re.search(PREDICTED, text, re.M)[1])

    flags, least, needs = re.search(r"^fastest that fits, by prediction: (.*) \(([\d.]+) s, ([\d.]+) GiB.* for each rank\)$", plan(**options),
                                    re.M).groups()
    chosen = plan(*flags.split(), **options)
    assert "grad_dtype" not in flags  # gradients of fewer bits are the last resort
    assert "\nfits: " in chosen and seconds(chosen) == float(least) and f"fits: {needs} GiB" in chosen
    best = dict(zip(flags.split()[::2], flags.split()[1::2]))
    stage, offload = best["--zero_stage"], best.get("--offload")
    others = [(stage, "none", offload), (1, best["--recompute"], offload), (stage, best["--recompute"], "activations,optimizer,weights")]
    fitting = 0
    for stage, recompute, offload in others:
        text = plan(zero_stage=stage, recompute=recompute, offload=offload, **options)
        fitting += "\nfits: " in text
        assert "\nfits: " not in text or 1.021 * seconds(text) > float(least), (stage, recompute, offload)
    assert 0 < fitting < len(others)
    assert "fastest" not in plan(**{**options, "gpu": 24}) and "fastest" not in plan(**{**options, "max_len": 16777216})


def test_rounded_gradients_are_chosen_only_where_nothing_else_fits():
    options = {"gpu": "rtx4090", "preset": "llama3.1-8b", "max_len": 16384, "train_batch_size": 1}
    flags = re.search(r"^fastest that fits, by prediction: (.*) \(", plan(**options), re.M)[1]
    assert flags.endswith(" --grad_dtype bf16") and "\nfits: " in plan(*flags.split(), **options)
    assert "\nfits: " not in plan(*flags.split()[:-2], **options)


@pytest.fixture(scope="module")
def long_data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.safetensors", random_documents(600))


def test_planned_memory_is_that_of_the_process(long_data, tmp_path):
    planned = {}
    for ranks in (1, 4):
        output = tmp_path / str(ranks)
        text = train(output, data=long_data, ranks=ranks, max_steps=1, train_batch_size=600, row_tokens=32768, recompute="none")
        first, step = log_lines(output)[:2]
        planned[ranks] = first["planned_peak_mem"], first["plan_bytes"]
        assert ", planned " in text
        assert abs(step["peak_mem"] - planned[ranks][0]) < 0.1 * planned[ranks][0]
    process = {ranks: all_ranks - ranks * each for ranks, (all_ranks, each) in planned.items()}
    assert 0 < process[4] < process[1] + (32 << 20)


def test_the_pieces_of_the_first_row(long_data, tmp_path):
    options = {"data": long_data, "max_steps": 2, "train_batch_size": 600, "row_tokens": 2048, "ranks": 4}
    text = train(tmp_path / "a", ring_attn_size=2, **options)
    table = re.search(r"^first row: (\d+) tokens, .*\nrank .*\n((?:[01] .*\n){2})", text, re.M)
    assert text.count("first row: ") == 1 and text.index("first row: ") < text.index("step 1/2")
    pieces = sorted(tuple(map(int, piece.split("-"))) for piece in re.findall(r"\d+-\d+", table[2]))
    assert pieces[0][0] == 0 and pieces[-1][1] == int(table[1]) - 1
    assert all(a[1] + 1 == b[0] for a, b in zip(pieces, pieces[1:]))
    assert "first row" not in train(tmp_path / "b", **options)  # each rank has rows of its own
