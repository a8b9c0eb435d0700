"""What a contestant's process does: answer requests, one flat JSON object per line.

Standard library only, and old-fashioned enough for any interpreter: this runs in the peers' own
environments. A contestant fills in the primitives and the statements of `Worker`; what it
cannot do answers ``{"error": ...}``, which the report shows as it is.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

Answer = dict[str, Any]

#: Calls that start from sequences which share all cells of sequence 0.
SHARED = ("remove", "remove_part", "copy_over")
#: Calls that start from sequences with one token each, at position 64.
OWN = ("add", "div")


#: Seconds after which a call has been measured in enough slices.
ENOUGH = 0.06


class NotThereError(Exception):
    """The binding has no such operation."""


class Worker:
    """One contestant."""

    #: What is timed for each call: a statement for every `s` in `seqs`, or for one pass.
    STATEMENTS: ClassVar[dict[str, str]] = {}
    #: What those statements see.
    names: dict[str, Any]

    def __init__(self) -> None:
        self.n_vocab = 0
        self.n_seq_max = 1
        self.depth = 16  # what sequence 0 holds
        self.names = {}

    # Primitives, untimed unless a request is about them -----------------------------------

    def facts(self) -> Answer:
        """Return versions."""
        raise NotThereError("facts")

    def open(self, **options: Any) -> None:
        """Load a model (``model`` absent: keep it) and make a context."""
        raise NotThereError("open")

    def extend(self, seq: int, n: int) -> None:
        """Append n tokens to a sequence, with logits for the last."""
        raise NotThereError("decode")

    def decode_rows(self, rows: list[tuple[int, int, int]]) -> None:
        """Decode one batch of (first position, length, sequence), logits for the last of each."""
        raise NotThereError("decode of several sequences")

    def step(self, rows: list[tuple[int, int, int]]) -> Callable[[], object]:
        """Return what fills a batch with rows as in `decode_rows` and decodes it."""
        return lambda: self.decode_rows(rows)

    def places(self, rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int, bool]]:
        """Return (token, position, sequence, whether it gives logits) of rows."""
        return [
            (self.token_at(i), i, seq, i == start + n - 1)
            for start, n, seq in rows
            for i in range(start, start + n)
        ]

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        raise NotThereError("remove")

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        raise NotThereError("copy")

    def clear(self) -> None:
        """Empty everything."""
        raise NotThereError("clear")

    def first_token(self) -> int:
        """Return the likeliest next token after the last decode."""
        raise NotThereError("logits")

    def restore(self, how: str, path: str) -> None:
        """Make sequence 1 hold what `keep_state` kept, from ``memory`` or a ``file``."""
        raise NotThereError(f"restoring from {how}")

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0 in memory, and in a file; return its size."""
        raise NotThereError("sequence states")

    def load_blob(self, blob: bytes) -> None:
        """Make sequence 0 hold a raw sequence state, and keep it for `state_call`."""
        raise NotThereError("sequence states")

    def state_call(self, what: str) -> Callable[[], object]:
        """Return what saves, loads or copies the state of `load_blob` once."""
        raise NotThereError(f"state {what}")

    def file_call(self, what: str, path: str, n: int) -> Callable[[], object]:
        """Return what saves sequence 0 with n tokens to a file, or loads it."""
        raise NotThereError(f"state {what}")

    def sequences(self) -> dict[int, int]:
        """Return the number of cells of each sequence."""
        raise NotThereError("a list of sequences")

    def held(self) -> int:
        """Return the number of tokens of sequence 0."""
        raise NotThereError("positions")

    def token_at(self, i: int) -> int:
        """Return the same token everywhere for a place in a sequence."""
        return 3 + i * 7919 % (self.n_vocab - 3)

    def tokens(self, start: int, n: int) -> list[int]:
        """Return the tokens of the places ``[start, start + n)``."""
        return [self.token_at(i) for i in range(start, start + n)]

    # Requests -----------------------------------------------------------------------------

    def do_facts(self) -> Answer:
        """Answer versions."""
        return self.facts()

    def do_open(self, n_seq_max: int = 1, **options: Any) -> Answer:
        """Open a context."""
        self.n_seq_max = n_seq_max
        self.open(n_seq_max=n_seq_max, **options)
        return {"n_vocab": self.n_vocab}

    def do_fill(self, n: int) -> Answer:
        """Empty everything and decode n tokens into sequence 0."""
        self.clear()
        self.extend(0, n)
        self.depth = n
        return {}

    def prepare(self, what: str) -> None:
        """Bring the sequences but 0 into the state that a call starts from."""
        for s in range(1, self.n_seq_max):
            self.remove(s)
        if what in SHARED:
            for s in range(1, self.n_seq_max):
                self.copy(0, s)
        elif what in OWN:
            self.decode_rows([(64, 1, s) for s in range(1, self.n_seq_max)])

    def do_call(self, what: str, slices: int = 20) -> Answer:
        """Seconds of one call, best of the slices; each slice is a pass over all sequences."""
        statement = self.STATEMENTS.get(what)
        if statement is None:
            raise NotThereError(what)
        # In another order each time: a processor learns a short pass by heart, which flatters C.
        seqs = list(range(1, self.n_seq_max))
        shuffle = random.Random(0).shuffle
        self.names["seqs"] = seqs
        if what == "decode1":
            timer, calls = timeit.Timer(statement, globals=self.names), 16
        else:
            body = statement.replace("\n", "\n    ")
            timer = timeit.Timer(f"for s in seqs:\n    {body}", globals=self.names)
            calls = self.n_seq_max - 1
        best, begin = float("inf"), time.perf_counter()
        for done in range(slices):
            if done >= 5 and time.perf_counter() - begin > ENOUGH:
                break
            if what == "decode1":
                self.before_decode()
            elif what in SHARED or what in OWN or what.startswith("copy"):
                self.prepare(what)
            shuffle(seqs)
            best = min(best, timer.timeit(1) / calls)
        if what == "decode1":
            self.before_decode()
        else:
            self.prepare("nothing")
        return {"seconds": best, "statement": statement}

    def before_decode(self) -> None:
        """Bring sequence 0 back to its length before a slice of decodes."""
        raise NotThereError("decode1")

    def do_decode(self, parallel: int, steps: int = 16, depth: int = 32) -> Answer:
        """Seconds of the fastest of some steps of one token for each of several sequences."""
        self.clear()
        for s in range(parallel):
            self.extend(s, depth)
        best = float("inf")
        # Prepared before the clock runs: it would leave its data in the caches.
        ready = [self.step([(depth + i, 1, s) for s in range(parallel)]) for i in range(steps)]
        for step in ready:
            start = time.perf_counter()
            step()
            best = min(best, time.perf_counter() - start)
        return {"seconds": best, "tokens": parallel}

    def do_prefill(self, parallel: int, tokens: int = 512) -> Answer:
        """Seconds of one batch that holds a prompt for each of several sequences."""
        each = tokens // parallel
        self.clear()
        step = self.step([(0, each, s) for s in range(parallel)])
        start = time.perf_counter()
        step()
        return {"seconds": time.perf_counter() - start, "tokens": each * parallel}

    def do_prefix(self, how: str, n: int, tail: int = 16, path: str = "") -> Answer:
        """Seconds until sequence 1 holds the prefix, and until the first token after its tail."""
        self.remove(1)
        start = time.perf_counter()
        if how == "cold":
            self.extend(1, n)
        elif how == "fork":
            self.copy(0, 1)
        else:
            self.restore(how, path)
        ready = time.perf_counter() - start
        self.extend(1, tail)
        self.first_token()
        first = time.perf_counter() - start
        self.remove(1)
        return {"ready": ready, "first": first, "evaluated": tail + (n if how == "cold" else 0)}

    def do_keep_state(self, n: int, path: str = "") -> Answer:
        """Keep the state of sequence 0."""
        return {"bytes": self.keep_state(n, path)}

    def do_load_blob(self, path: str) -> Answer:
        """Read a raw sequence state from a file into sequence 0."""
        with open(path, "rb") as file:
            blob = file.read()
        self.clear()
        self.load_blob(blob)
        self.depth = self.held()
        return {"bytes": len(blob)}

    def do_state(self, what: str, slices: int = 5) -> Answer:
        """Seconds of one save, load or memcpy, best of the slices; a load is into nothing."""
        call = self.state_call("load" if what == "load_over" else what)

        def empty() -> None:
            if what == "load":
                self.remove(0)

        empty()
        call()
        return {"seconds": min(timeit.repeat(call, empty, number=1, repeat=slices))}

    def do_file(self, what: str, path: str, n: int, slices: int = 5) -> Answer:
        """Seconds of one save over a file, save to a new one, or load into nothing: the median."""
        call = self.file_call(what, path, n)

        def before() -> None:
            if what == "file_load":
                self.remove(0)
            elif what == "file_make":
                Path(path).unlink(missing_ok=True)

        before()
        call()
        return {"seconds": statistics.median(timeit.repeat(call, before, number=1, repeat=slices))}

    def do_progress(self, what: str, seconds: float = 0.2) -> Answer:
        """How fast another thread counts while this one saves, loads or sleeps."""
        call = (lambda: time.sleep(0.01)) if what == "nothing" else self.state_call(what)
        counted, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        thread.start()
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            call()
            calls += 1
        took, total = time.perf_counter() - begin, counted[0]
        stop.set()
        thread.join()
        return {"per_second": total / took, "calls": calls}

    def do_held(self) -> Answer:
        """How many tokens each sequence holds, where a binding can tell."""
        return {"sequences": self.sequences()}

    def do_rss(self) -> Answer:
        """Resident bytes of this process."""
        with open("/proc/self/statm") as file:
            return {"bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")}


def serve(worker: Worker) -> None:
    """Answer on what was stdout; whatever a library prints there goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, "do_" + request.pop("do"))(**request)
        except NotThereError as error:
            answer = {"error": f"not there: {error}"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
