"""The compiled layer needs the GIL: a free-threaded Python enables it, or the import fails."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

REFUSED = """
import pykvcache
for load in ("LlamaModel", "system_info", "LlamaModel"):
    try:
        getattr(pykvcache, load)
    except ImportError as error:
        assert "needs the GIL, and PYTHON_GIL=0" in str(error), error
    else:
        raise AssertionError(load)
from pykvcache.arrays import KVCache
import numpy as np
keys, _ = KVCache().update(np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4)))
assert keys.shape == (1, 1, 2, 4)
print("end")
"""


def child(code: str, gil: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHON_GIL"}
    if gil and FREE_THREADED:
        env["PYTHON_GIL"] = gil
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.hazard("N170")
def test_without_the_gil_the_import_is_refused() -> None:
    # Another interpreter says the same of itself.
    pretend = "" if FREE_THREADED else "import sys; sys._is_gil_enabled = lambda: False\n"
    assert child(pretend + REFUSED, gil="0") == "end"


@pytest.mark.skipif(not FREE_THREADED, reason="for a free-threaded Python")
def test_a_free_threaded_python_turns_the_gil_on() -> None:
    code = "import sys, pykvcache; pykvcache.system_info(); print(sys._is_gil_enabled())"
    assert child(code, gil="") == "True"
