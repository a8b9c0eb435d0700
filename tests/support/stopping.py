"""Stopping a decode from another thread."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykvcache import LlamaContext


def stop_soon(ctx: LlamaContext, delay: float) -> threading.Thread:
    """Call abort() once the context decodes, `delay` seconds from now at the earliest."""

    def stop() -> None:
        time.sleep(delay)
        # There is nothing to stop before the other thread is inside of llama.cpp.
        until = time.monotonic() + 10
        while not ctx.abort() and time.monotonic() < until:
            time.sleep(0)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    return thread
