"""The code in the documents of the upper half, run from top to bottom."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["sequences", "prefix-cache"])
def test_code_runs(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))
    assert code
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
