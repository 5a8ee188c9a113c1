"""For pip: see pyproject.toml. The package holds the programs built by make, and the files that they need next to them."""

import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

PROGRAMS = ("train_llama", "train_gpt2")
BESIDE = ("data", "scripts")


class BuildPrograms(build_py):
    def run(self):
        super().run()
        if subprocess.run(["make", *PROGRAMS]).returncode:
            raise SystemExit("the programs were not built\n  fix: make deps, then pip install . again; make says above what is missing")
        package = Path(self.build_lib) / "train_llama_programs"
        for name in PROGRAMS:
            shutil.copy2(name, package)
        for name in BESIDE:
            shutil.copytree(name, package / name, ignore=shutil.ignore_patterns("__pycache__", "pip"), dirs_exist_ok=True)


class OfThisMachine(Distribution):
    def has_ext_modules(self):  # so that the wheel is marked with the platform
        return True


setup(distclass=OfThisMachine, cmdclass={"build_py": BuildPrograms})
