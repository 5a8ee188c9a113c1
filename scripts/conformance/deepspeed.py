"""DeepSpeed's ZeRO stage 2 under transformers' Trainer, on the CPU, with a process for each rank."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("adapter_of_models", Path(__file__).with_name("transformers.py"))
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)

CONFIG = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": 1e9,
          "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def run(case, folder):
    if case["task"] != "sft":
        raise NotImplementedError("only sft")
    base.one_process({name: value for name, value in case["settings"].items() if name != "ranks" or len(case["settings"]) > 1})
    return base.on_ranks(case, folder, __file__)


if __name__ == "__main__":
    base.as_rank(lambda case, folder: base.run(case, folder, deepspeed=CONFIG))
