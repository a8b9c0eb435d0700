"""``python -m pykvcache``."""

from __future__ import annotations

import sys

from pykvcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
