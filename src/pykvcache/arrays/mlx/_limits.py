"""Numbers that the caches of this family take."""

from __future__ import annotations

__all__ = ["LARGEST", "LARGEST_SIZE"]

#: Positions and counts, in arguments and in files: sums of several fit int64.
LARGEST = 2**60
#: Sizes of rings and chunks; ``sys.maxsize`` stands for "no limit".
LARGEST_SIZE = 2**63 - 1
