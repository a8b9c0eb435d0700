"""Hold the stubs and the signatures against the package as it runs: stubtest, for `make lint`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mypy import stubtest

HERE = Path(__file__).parent
sys.argv[1:] = ["--mypy-config-file", str(HERE / "stubtest.ini")]
sys.argv += ["--allowlist", str(HERE / "stubtest.allow"), "pykvcache"]
status = stubtest.main()
sys.stdout.flush()
# As mypy itself does: to give a whole graph of modules back takes seconds.
os._exit(status)
