"""The x87 unit, which NumPy's import leaves in use, is at rest while llama.cpp computes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.models import make_model

if TYPE_CHECKING:
    from binding.conftest import Child

SOURCE = """
unsigned in_use(void) {
    unsigned a, d;
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(1));
    return a & 1;
}
void use(void) { __asm__ volatile("fldz; fstp %st(0)"); }
unsigned control(void) {
    unsigned short w;
    __asm__ volatile("fnstcw %0" : "=m"(w));
    return w;
}
void set_control(unsigned w) {
    unsigned short v = w;
    __asm__ volatile("fldcw %0" : : "m"(v));
}
"""

CODE = """
import ctypes, sys
import numpy as np
from pykvcache import LlamaContext, LlamaModel
unit = ctypes.CDLL(sys.argv[1])
ctx = LlamaContext(LlamaModel(sys.argv[2]), n_ctx=256, n_threads=1)
def logits():
    ctx.clear_kv_cache()
    ctx.decode(np.arange(5, 25, dtype=np.int32))
    return ctx.logits()
unit.use()
assert unit.in_use()
first = logits()
assert not unit.in_use()
assert unit.control() == 0x37f
# Another precision is the thread's own choice: left alone, and in use.
unit.set_control(0x27f)
unit.use()
second = logits()
assert unit.control() == 0x27f
assert unit.in_use()
assert (first == second).all()
"""


def tells_use() -> bool:
    try:
        return "xgetbv1" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not tells_use(), reason="this processor does not tell which units are in use")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_unit_is_at_rest_after_a_decode(
    tmp_path: Path, model_folder: Path, child: Child
) -> None:
    source, library = tmp_path / "unit.c", tmp_path / "libunit.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    done = child(CODE, library, make_model("llama", model_folder))
    assert done.returncode == 0, done.stderr[-2000:]
