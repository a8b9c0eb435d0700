"""``python -m pykvcache``."""

from __future__ import annotations

import sys


def _main() -> int:
    from pykvcache.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
