"""The compiled layer belongs to the main interpreter: others get an ImportError."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)

SOURCE = Path(__file__).parents[2] / "src" / "pykvcache"

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


@pytest.mark.hazard("N37")
def test_the_import_is_refused() -> None:
    assert child(f"run({REFUSED!r}); print('end')") == "end\n"


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
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
"""
    assert child(f"run({code!r}); print('end')") == "end\n"


def test_the_main_interpreter_is_unharmed() -> None:
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


def test_the_extension_checks_by_itself() -> None:
    """Also without Python's module, or with a loader that bypasses the package."""
    code = """
import sys
sys.modules["_interpreters"] = sys.modules["_xxsubinterpreters"] = None
try:
    import pykvcache._native.lib
except ImportError as error:
    assert "subinterpreter" in str(error), error
else:
    raise AssertionError("imported")
"""
    assert child(f"run({code!r}); print('end')") == "end\n"


def test_refused_imports_leave_numpy_to_the_main_interpreter() -> None:
    """NumPy works only in the first interpreter that loads it, so refusals must come before."""
    compiled = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(SOURCE.rglob("*.py"))
        if re.search(r"^from pykvcache\._native", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(compiled) > 20
    refused = f"""
import importlib, sys
import pykvcache
for load in (*{compiled}, "LlamaContext", "LlamaSequence", "PrefixCache", "describe_state"):
    try:
        getattr(pykvcache, load) if "." not in load else importlib.import_module(load)
    except ImportError as error:
        assert "subinterpreter" in str(error), error
    else:
        raise AssertionError(load)
assert "numpy" not in sys.modules
"""
    use = "import numpy, pykvcache; pykvcache.LlamaModel(pykvcache.embedded_model_path()).close()"
    assert child(f"run({refused!r}); {use}; print('end')") == "end\n"
