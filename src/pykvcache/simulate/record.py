"""Record a cache's lookups as a trace for the simulator."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pykvcache._arguments import as_file_name
from pykvcache.prefix.events import EventLog, Lookup

__all__ = ["record"]


@contextmanager
def record(events: EventLog, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write every prompt that a cache looks up to a file, during a ``with`` block.

    The file has one JSON object per line, for `read_trace`. It contains block hashes, no tokens.
    Recording takes about a microsecond per block.

    Parameters
    ----------
    events
        ``cache.events`` of a `PrefixCache`.
    path
        The file; replaced if it exists, compressed if its name ends with ``.gz``.

    Raises
    ------
    OSError
        The file cannot be written. If that happens within the block, the error is raised at its
        end, and later lookups are missing.
    ArgumentError
        The path is not a valid file name (also a ValueError).
    """
    if not isinstance(events, EventLog):
        raise TypeError(f"events must be an EventLog, not {type(events).__name__}")
    path = as_file_name(path)
    failed: list[OSError] = []
    lock = threading.Lock()  # another thread may be in a lookup when the block ends

    def note(lookup: Lookup) -> None:
        names = [name.hex() for name in lookup.block_hashes]
        line = json.dumps({"type": "Lookup", **vars(lookup), "block_hashes": names})
        with lock:
            if not (file.closed or failed):
                try:
                    file.write(line + "\n")
                except OSError as error:
                    failed.append(error)

    is_packed = path.endswith(".gz")
    with gzip.open(path, "wt") if is_packed else open(path, "w", encoding="utf-8") as file:
        stop = events.subscribe_lookups(note)
        try:
            yield
        finally:
            stop()
            with lock:
                try:
                    file.close()
                except OSError as error:
                    failed.append(error)
    if failed:
        raise failed[0]
