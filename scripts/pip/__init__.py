"""What `pip install .` installs: the programs with their data tools beside them, which run with the Python that they were installed for."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(name):
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.execv(HERE / name, [str(HERE / name), *sys.argv[1:]])


def train_llama():
    start("train_llama")


def train_gpt2():
    start("train_gpt2")
