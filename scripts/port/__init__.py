"""Command lines and files of other trainers in the names of this program. Each peer has a module with its table; docs/porting.md is made from them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "data"))
