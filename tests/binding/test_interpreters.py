"""The compiled layer belongs to the main interpreter and needs the GIL: ImportErrors elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

# How each Python makes an interpreter that may load single-phase extensions.
BEGIN = """
import sys
try:
    import _interpreters as interpreters  # from 3.13
    one = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    one = interpreters.create(**({"isolated": False} if sys.version_info >= (3, 12) else {}))

def run(code):
    # NumPy warns in subinterpreters, and pykvcache that it can do less.
    quiet = "import warnings; warnings.simplefilter('ignore')\\n"
    failed = interpreters.run_string(one, quiet + code)
    assert failed is None, failed
"""

REFUSED = """
native = "__import__('pykvcache._native.lib')"
for load in ("pykvcache.LlamaModel", "pykvcache.system_info", native):
    try:
        import pykvcache
        eval(load)
    except ImportError as error:
        assert "subinterpreter" in str(error), error
    else:
        raise AssertionError(load)
"""


def child(code: str) -> str:
    """Run code in a process that must exit normally, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    FREE_THREADED,
    reason="NumPy for free-threaded interpreters cannot be used in a subinterpreter",
)
def test_the_import_says_so_once_and_the_array_caches_work() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import pykvcache
    assert [w.category for w in seen] == [RuntimeWarning]
    assert "subinterpreter" in str(seen[0].message)
from pykvcache.arrays import KVCache
import numpy as np
keys, _ = KVCache().update(np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4)))
assert keys.shape == (1, 1, 2, 4)
import pykvcache.simulate
"""
    assert child(f"run({code!r}); print('end')") == "end\n"


@pytest.mark.hazard("N37")
def test_the_import_is_refused_and_the_main_interpreter_unharmed() -> None:
    use = "assert model.detokenize(model.tokenize('Lucy has a red kite.')).strip()"
    code = f"""
import pykvcache
with pykvcache.LlamaModel(pykvcache.embedded_model_path()) as model:
    {use}
    run({REFUSED!r})
    {use}
    with pykvcache.LlamaContext(model, n_ctx=64, n_threads=1) as ctx:
        ctx.decode([1, 2, 3])
        interpreters.destroy(one)
        ctx.decode([4])
print("end")
"""
    assert child(code) == "end\n"


# The GIL --------------------------------------------------------------------------------

WITHOUT_GIL = """
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


def with_gil(code: str, gil: str) -> str:
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
    assert with_gil(pretend + WITHOUT_GIL, gil="0") == "end"


@pytest.mark.skipif(not FREE_THREADED, reason="for a free-threaded Python")
def test_a_free_threaded_python_turns_the_gil_on() -> None:
    code = "import sys, pykvcache; pykvcache.system_info(); print(sys._is_gil_enabled())"
    assert with_gil(code, gil="") == "True"
