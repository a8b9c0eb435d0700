"""Hold the stubs and the signatures against the package as it runs: stubtest, for `make lint`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mypy import stubtest

sys.argv[1:] = ["--mypy-config-file", str(Path(__file__).with_name("stubtest.ini")), "pykvcache"]
status = stubtest.main()
sys.stdout.flush()
# As mypy itself does: to give a whole graph of modules back takes seconds.
os._exit(status)
