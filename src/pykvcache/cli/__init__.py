"""The command line: ``pykvcache COMMAND``, or ``python -m pykvcache COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pykvcache.errors import how_to_install

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (needs the extra ``cli``).

    Parameters
    ----------
    argv
        Arguments; default ``sys.argv[1:]``.

    Returns
    -------
    int
        0 for success, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C. Failures and wrong
        usage are reported in one line on stderr.
    """
    try:
        try:
            import click  # noqa: F401
        except ImportError:
            print(
                f"pykvcache: the command line needs click: {how_to_install('cli')}",
                file=sys.stderr,
            )
            return 1
        from pykvcache.cli.app import run
    except KeyboardInterrupt:  # during the imports
        return 130
    return run(sys.argv[1:] if argv is None else argv)
