"""Plans of scripts/recipes, and of command lines with all flags of OpenRLHF: the parser accepts them, and the plan shows their meaning."""

import re
import shutil
import subprocess

import pytest
from runs import ENVIRONMENT, GOLDEN, ROOT, change_json, command, stand_in, succeeds

RECIPES = ROOT / "scripts" / "recipes"
WANT = {  # recipe: the plan's line on ranks, row_tokens and max_len
    "openrlhf_sft_ring": ("8 ranks: 4 x data, 2 x sequence (gather), ZeRO stage 2", 16384, 2048),
    "openrlhf_dpo_ring": ("8 ranks: 4 x data, 2 x sequence (gather), ZeRO stage 3", 16384, 8192),
    "openrlhf_rm_ring": ("8 ranks: 4 x data, 2 x sequence (gather), ZeRO stage 3", 16384, 8192),
    "trl_sft_multi_gpu": ("8 ranks: 8 x data, 1 x sequence, ZeRO stage 1", 1024, 1024),
    "trl_sft_context_parallel": ("2 ranks: 1 x data, 2 x sequence (ring), ZeRO stage 3", 16384, 16384),
    "trl_sft_ulysses": ("4 ranks: 2 x data, 2 x sequence (ulysses), ZeRO stage 3", 4096, 4096),
    "trl_two_nodes": ("16 ranks: 16 x data, 1 x sequence, ZeRO stage 1", 1024, 1024),
    "trl_two_nodes_slurm": ("16 ranks: 16 x data, 1 x sequence, ZeRO stage 1", 1024, 1024),
    "axolotl_sft_sequence_parallel": ("4 ranks: 1 x data, 4 x sequence (gather), ZeRO stage 2", 8192, 8192),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a config.json alone; a plan reads nothing else."""
    directory = tmp_path_factory.mktemp("model")
    shutil.copy(GOLDEN / "llama3" / "config.json", directory)
    change_json(directory / "config.json", max_position_embeddings=131072, num_attention_heads=8, num_key_value_heads=8)
    return directory


# ---- the recipes --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """An mpirun and an sbatch that start the program once, for a plan with their number of ranks."""
    directory = tmp_path_factory.mktemp("launchers")
    stand_in(directory / "mpirun", """
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 4.1.4'; exit; fi
while [ "$1" != ./train_llama ]; do [ "$1" != -np ] || ranks=$2; shift; done
exec "$@" --ranks "$ranks"
""")
    stand_in(directory / "sbatch", """
while [ "$1" != scripts/slurm.sbatch ]; do case $1 in --nodes=*) nodes=${1#*=} ;; --gpus-per-node=*) gpus=${1#*=} ;; esac; shift; done
exec ./train_llama "${@:2}" --resume auto --ranks $((nodes * gpus))
""")
    return {"PATH": f"{directory}:{ENVIRONMENT['PATH']}"}


def run_recipe(name, launchers, model, *flags, **environment):
    environment = {**ENVIRONMENT, **launchers, "MODEL": str(model), "DATA": "no data", "OUT": "no place", **environment}
    return subprocess.run([RECIPES / f"{name}.sh", *flags], cwd="/", env=environment, capture_output=True, text=True, timeout=120)


def test_every_recipe_is_tested():
    assert {path.name for path in RECIPES.iterdir()} == {f"{name}.sh" for name in WANT}
    text = (ROOT / "docs/porting.md").read_text()
    assert [name for name in WANT if f"[{name}](../scripts/recipes/{name}.sh)" not in text] == []


@pytest.mark.parametrize("name", WANT)
def test_a_recipe_has_the_flags_of_this_program(name, launchers, model):
    """The plan prints no note. Further flags at the end take precedence."""
    mesh, row_tokens, max_len = WANT[name]
    for flags, rows, length in (((), row_tokens, max_len), (("--max_len", "64", "--row_tokens", "128"), 128, 64)):
        result = run_recipe(name, launchers, model, "--plan", "--device", "cpu", *flags)
        assert result.returncode == 0 and "note: " not in result.stdout, result.stderr
        assert f"\n{mesh}; the plan is that of each rank\n" in result.stdout
        assert f"; rows of {rows} tokens, samples of up to {length}; " in result.stdout


def test_the_variables_of_a_recipe(launchers, model):
    result = run_recipe("trl_sft_context_parallel", launchers, model, "--plan", "--device", "cpu", RANKS="4")
    assert "4 ranks: 1 x data, 4 x sequence (ring)" in result.stdout
    result = run_recipe("openrlhf_dpo_ring", launchers, model / "nowhere", "--plan")
    assert result.returncode == 1 and f"{model / 'nowhere'} is not a directory" in result.stderr


# ---- OpenRLHF's own command lines ---------------------------------------------------------------------------------------------------

# From its page on RingAttention, without `deepspeed --module openrlhf.cli.train_...`.
RING = """--model.model_name_or_path MODEL --data.max_len LENGTH --ds.packing_samples --train.batch_size 256 --train.max_epochs 1 --ds.param_dtype bf16
    --ds.attn_implementation flash_attention_2 --model.gradient_checkpointing_enable --ds.ring_attn_size 2 --ds.ring_attn_head_stride 2
    --ckpt.save_steps -1 --logger.logging_steps 1 --eval.steps -1"""
OF_PAIRS = """--data.dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --data.apply_chat_template --data.chosen_key chosen
    --data.rejected_key rejected --train.micro_batch_size 1 --ds.zero_stage 3 --ckpt.load_enable"""
LONG_CONTEXT = {
    "sft": RING.replace("LENGTH", "2048") + """ --data.dataset Open-Orca/OpenOrca --data.input_key question --data.output_key response
        --data.input_template TEMPLATE --data.max_samples 500000 --train.micro_batch_size 8 --adam.lr 5e-6 --ds.zero_stage 2
        --ckpt.output_dir ./checkpoint/llama3-8b-sft""",
    "dpo": f"{RING.replace('LENGTH', '8192')} {OF_PAIRS} --adam.lr 5e-7 --model.beta 0.1 --ckpt.output_dir ./checkpoint/llama3-8b-ring-dpo",
    "rm": f"{RING.replace('LENGTH', '8192')} {OF_PAIRS} --adam.lr 9e-6 --ckpt.output_dir ./checkpoint/llama3-8b-rm",
}

# The other flags of its parsers, as of 0.11, each with its default or with a value that this program supports.
REST = """--ckpt.save_hf --ckpt.disable_ds --ckpt.path ./ckpt/checkpoints --ckpt.max_num 3 --ckpt.max_mem 100000000 --ds.use_universal_ckpt
    --ds.deepcompile --train.seed 42 --train.full_determinism_enable --data.disable_fast_tokenizer --data.dataloader_num_workers 0
    --local_rank 0 --ds.zpg 1 --ds.adam_offload --ds.experts_implementation eager --ds.grad_accum_dtype fp32 --ds.overlap_comm
    --model.gradient_checkpointing_reentrant --ds.tensor_parallel_size 1 --model.aux_loss_coef 0 --optim adam --muon.lr 0.02
    --muon.momentum 0.95 --muon.ns_steps 5 --muon.nesterov --adam.betas 0.9 0.95 --adam.eps 1e-8 --adam.weight_decay 0.0
    --lr_scheduler cosine_with_min_lr --lr_warmup_ratio 0.03 --min_lr_ratio 0.1 --max_norm 1.0 --ds.lora.rank 0 --ds.lora.alpha 16
    --ds.lora.target_modules all-linear --ds.lora.dropout 0 --data.dataset_probs 1.0 --eval.dataset held_out.jsonl
    --data.dataset_split train --eval.split train --data.max_samples 1000000 --data.tokenizer_chat_template template.jinja
    --logger.wandb.key abc --logger.wandb.org us --logger.wandb.group first --logger.wandb.project openrlhf --logger.wandb.run_name exp
    --logger.tensorboard_dir ./tensorboard"""
REST_OF = {
    "sft": "--data.multiturn --ds.use_liger_kernel",
    "dpo": """--model.ipo_enable --model.label_smoothing 0.0 --model.nll_loss_coef 0 --ref.model_name_or_path MODEL --ref.offload
        --data.prompt_key prompt --data.input_template TEMPLATE --ds.use_liger_kernel""",
    "rm": """--model.loss_type sigmoid --model.margin_loss_enable --model.compute_fp32_loss_enable --ds.value_head_prefix score
        --data.prompt_key prompt --data.input_template TEMPLATE""",
}

@pytest.mark.parametrize("task", REST_OF)
def test_a_command_line_of_openrlhf(task, model):
    text = f"{LONG_CONTEXT[task]} {REST} {REST_OF[task]}"
    words = [{"MODEL": str(model), "TEMPLATE": "User: {}\nAssistant: "}.get(word, word) for word in text.split()]
    plan = succeeds(command(task, "--from", "openrlhf", *words, "--plan", model=None, ranks=8), quiet=False)
    assert re.search(r"8 ranks: 4 x data, 2 x sequence \(gather\), ZeRO stage [23];", plan)
    said = re.findall("^note: (.*)", plan, re.M)
    assert any("--recompute layer" in note for note in said) and any("in the names of this program: ./train_llama " in note for note in said)
