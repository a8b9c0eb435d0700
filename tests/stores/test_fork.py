"""A store belongs to the process that opened it: in a forked child its methods raise."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stores.kinds import STORES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

CODE = """
    import os, signal, tempfile, threading
    from pykvcache.errors import ClosedError, StoreError
    from pykvcache.prefix.stores import *
    from pykvcache.prefix.stores.conformance import chain
    blocks = chain(4, "fork")
    keys = [key for key, _ in blocks]
    store = {store}
    assert store.put(blocks) == 4
    calls = [
        lambda: store.contains(keys),
        lambda: store.present(keys),
        lambda: store.get_into(keys, [bytearray(2000) for _ in keys]),
        lambda: store.put(chain(2, "new")),
        lambda: store.touch(keys),
        lambda: store.trim(0),
        lambda: store.discard(keys),
        lambda: list(store.entries()),
    ]
    def child():
        signal.alarm(20)
        for call in calls:
            try:
                call()
            except ClosedError:
                continue
            os._exit(1)
        try:
            with {store} as new:
                os._exit(new.put(chain(3, "child")) != 3)
        except StoreError as error:  # obstore works in no forked child
            os._exit("ObjectStore" not in repr(store) or "forked child" not in str(error))
    # Another thread holds a lock of the store while the process is forked.
    held, over = threading.Event(), threading.Event()
    def hold():
        with store.counters._lock:
            held.set()
            over.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if not pid:
        child()
    over.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert store.contains(keys) == 4
    store.close()
"""


@pytest.mark.parametrize("name", STORES)
def test_a_forked_child_gets_closed_errors_and_opens_its_own(name: str, tmp_path: Path) -> None:
    with STORES[name].running(tmp_path) as kind:
        code = textwrap.dedent(CODE.format(store=kind.code))
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
