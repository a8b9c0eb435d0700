"""Recording what a cache is asked for, as a trace that the simulator replays."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pykvcache._paths import as_file_name
from pykvcache.prefix.events import EventLog, Lookup, as_dict

__all__ = ["record"]


@contextmanager
def record(events: EventLog, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write every prompt that a cache looks up to a file, as long as the block lasts.

    One JSON object per line, which `read_trace` reads: names of blocks, which are hashes, and no
    token. It takes about a microsecond per block.

    Parameters
    ----------
    events
        ``cache.events`` of a `PrefixCache`.
    path
        The file, replaced if it is there; compressed where its name ends with ``.gz``.

    Raises
    ------
    OSError
        The file cannot be written; at the end of the block, if that happened within it: what was
        asked for since then is missing.
    ArgumentError
        A ValueError: there can be no file of that name.
    """
    if not isinstance(events, EventLog):
        raise TypeError(f"events must be an EventLog, not {type(events).__name__}")
    path = as_file_name(path)
    is_packed = path.endswith(".gz")
    failed: list[OSError] = []
    lock = threading.Lock()  # another thread may be looking something up when the block ends
    with gzip.open(path, "wt") if is_packed else open(path, "w", encoding="utf-8") as file:

        def note(lookup: Lookup) -> None:
            with lock:
                if not (file.closed or failed):
                    try:
                        file.write(json.dumps(as_dict(lookup)) + "\n")
                    except OSError as error:
                        failed.append(error)

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
