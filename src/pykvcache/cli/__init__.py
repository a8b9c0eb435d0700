"""The command line: ``pykvcache COMMAND``, or ``python -m pykvcache COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (needs ``pykvcache[cli]``).

    Parameters
    ----------
    argv
        Arguments; default ``sys.argv[1:]``.

    Returns
    -------
    int
        0; 1 after a failure and 2 after wrong usage, which are reported in one line on stderr;
        130 after Ctrl-C.
    """
    try:
        try:
            import click  # noqa: F401
        except ImportError:
            print(
                "pykvcache: the command line needs click: pip install 'pykvcache[cli]'",
                file=sys.stderr,
            )
            return 1
        from pykvcache.cli.app import run
    except KeyboardInterrupt:  # while it is imported
        return 130
    return run(sys.argv[1:] if argv is None else argv)
