"""The package of `pip install .`: the programs and their data tools, which run with the Python of the installation."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(name):
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.execv(HERE / name, [name, *sys.argv[1:]])


def train_llama():
    start("train_llama")


def train_gpt2():
    start("train_gpt2")
