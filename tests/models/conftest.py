"""Make the scripts of `models/training`, which are no package, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "training"))
