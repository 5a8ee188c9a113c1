#!/usr/bin/env python3
"""Prints the versions of Python and of the packages that read data, on one line."""

import platform
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow", "numpy")


def version_of(library):
    try:
        return version(library)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(f"Python {platform.python_version()};", ", ".join(f"{name} {version_of(name) or 'missing'}" for name in LIBRARIES))
