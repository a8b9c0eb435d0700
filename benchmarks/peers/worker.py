"""A contestant's process: answers requests, one flat JSON object per line.

Standard library only, and compatible with old interpreters, because it runs in the peers'
environments. An operation that a contestant lacks answers ``{"error": ...}``, shown in the report.
"""

from __future__ import annotations

import ctypes
import hashlib
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
from typing import Any

from benchmarks.peers.primitives import Answer, NotThereError, Primitives

__all__ = ["Answer", "NotThereError", "Worker", "serve"]

#: Calls that start from sequences which share all cells of sequence 0.
SHARED = ("remove", "remove_part", "copy_over")
#: Calls that start from sequences with one token each, at position 64.
OWN = ("add", "div")


class Worker(Primitives):
    """A contestant."""

    def do_facts(self) -> Answer:
        """Answer versions."""
        return self.facts()

    def do_open(self, model: str | None = None, n_vocab: int = 0, **options: Any) -> Answer:
        """Open a context; `n_vocab` is for bindings that cannot report it."""
        self.n_vocab = n_vocab or self.n_vocab
        self.n_seq_max, self.n_batch = options["n_seq_max"], options["n_batch"]
        self.open(model, **options)
        return {"n_vocab": self.n_vocab, "reported": self.reported()}

    def do_fill(self, n: int) -> Answer:
        """Empty everything and decode n tokens into sequence 0."""
        self.clear()
        self.extend(0, n)
        self.depth = n
        return {}

    def do_share(self) -> Answer:
        """Share the cells of sequence 0 with every other sequence."""
        self.prepare("remove")
        return {}

    # Calls --------------------------------------------------------------------------------

    def prepare(self, what: str) -> None:
        """Prepare the sequences except 0 for a call."""
        for s in range(1, self.n_seq_max):
            self.remove(s)
        if what in SHARED:
            for s in range(1, self.n_seq_max):
                self.copy(0, s)
        elif what in OWN:
            self.decode_rows([(64, 1, s) for s in range(1, self.n_seq_max)])

    def do_call(self, what: str, slices: int = 20, rounds: int = 1, enough_ms: int = 60) -> Answer:
        """Return the seconds of a call in the best slice; a slice is passes over all sequences."""
        statement = self.STATEMENTS.get(what)
        if statement is None:
            raise NotThereError
        if what == "logits":
            self.do_fill(self.depth)  # the last decoded sequence may be removed
        seqs = list(range(1, self.n_seq_max))
        timer = self.timer(what, statement, seqs, rounds)
        calls = 16 if what == "decode1" else rounds * len(seqs)
        # Created once, because allocations before the calls would change the heap.
        shuffle = random.Random(0).shuffle
        best, begin = float("inf"), time.perf_counter()
        for done in range(slices):
            if done >= 5 and time.perf_counter() - begin > enough_ms / 1e3:
                break
            if what == "decode1":
                self.before_decode()
            elif what in SHARED or what in OWN or what.startswith("copy"):
                self.prepare(what)
            # In a new order each time: branch prediction learns a short pass, which favours C.
            shuffle(seqs)
            best = min(best, timer.timeit(1) / calls)
        if what == "decode1":
            self.before_decode()
        else:
            self.prepare("nothing")
        return {"seconds": best, "statement": statement}

    def timer(self, what: str, statement: str, seqs: list[int], rounds: int) -> timeit.Timer:
        """Return a timer of passes over the sequences."""
        self.names["seqs"] = seqs
        if what != "decode1":
            body = statement.replace("\n", "\n    ")
            statement = f"for s in seqs:\n    {body}"
        if rounds > 1:
            # Shifts by 1 alternate in direction, so that positions do not drift.
            self.names["deltas"] = [1 - i % 2 * 2 for i in range(rounds)]
            body = statement.replace("\n", "\n    ")
            statement = f"for delta in deltas:\n    {body}"
        self.names["delta"] = 1
        return timeit.Timer(statement, globals=self.names)

    def before_decode(self) -> None:
        """Truncate sequence 0 to its length, and prepare the next tokens."""
        self.cut(0, self.depth)
        places = range(self.depth, self.depth + 16)
        self.names["steps"] = [(i, self.tokens(i, 1)) for i in places]

    # Generation ---------------------------------------------------------------------------

    def do_decode(self, parallel: int, steps: int = 16, depth: int = 32) -> Answer:
        """Return the seconds of the fastest step of one token for each of several sequences."""
        self.clear()
        for s in range(parallel):
            self.extend(s, depth)
        best, own = float("inf"), float("inf")
        # Prepared before timing, because it would leave its data in the caches.
        ready = [self.step([(depth + i, 1, s) for s in range(parallel)]) for i in range(steps)]
        for step in ready:
            start, begin = time.perf_counter(), time.thread_time()
            step()
            best = min(best, time.perf_counter() - start)
            own = min(own, time.thread_time() - begin)
        return {"seconds": best, "thread_seconds": own, "tokens": parallel}

    def do_prefill(self, parallel: int, tokens: int = 512) -> Answer:
        """Return the seconds of a batch with a prompt for each of several sequences."""
        self.clear()
        each = tokens // parallel
        return self.timed_step([(0, each, s) for s in range(parallel)])

    def do_append(self, tokens: int) -> Answer:
        """Return the seconds of a batch after sequence 0's tokens."""
        self.cut(0, self.depth)
        answer = self.timed_step([(self.depth, tokens, 0)])
        self.cut(0, self.depth)
        return answer

    def timed_step(self, rows: list[tuple[int, int, int]]) -> Answer:
        """Time one batch."""
        step = self.step(rows)
        start, begin = time.perf_counter(), time.thread_time()
        step()
        took = {
            "seconds": time.perf_counter() - start,
            "thread_seconds": time.thread_time() - begin,
        }
        return {**took, "tokens": sum(n for _, n, _ in rows)}

    def do_many(self, what: str, slots: int, alone: bool = False) -> Answer:
        """Return the seconds and generated tokens of a workload."""
        raise NotThereError

    def do_prefix(self, how: str, n: int, tail: int = 16, path: str = "") -> Answer:
        """Return the seconds until sequence 1 has the prefix, and until the first token."""
        self.remove(1)
        start = time.perf_counter()
        if how == "cold":
            self.extend(1, n)
        elif how == "fork":
            self.copy(0, 1)
        elif how in ("memory", "file"):
            self.restore(how, path)
        else:
            raise NotThereError
        ready = time.perf_counter() - start
        self.extend(1, tail)
        self.first_token()
        first = time.perf_counter() - start
        self.remove(1)
        return {"ready": ready, "first": first, "evaluated": tail + (n if how == "cold" else 0)}

    # States -------------------------------------------------------------------------------

    def do_keep_state(self, n: int, path: str = "") -> Answer:
        """Keep the state of sequence 0."""
        self.state_bytes = self.keep_state(n, path)
        return {"bytes": self.state_bytes}

    def do_load_blob(self, path: str) -> Answer:
        """Read a raw sequence state from a file into sequence 0."""
        blob = Path(path).read_bytes()
        self.clear()
        self.load_blob(blob)
        self.depth, self.state_bytes = self.end(0), len(blob)
        return {"bytes": len(blob)}

    def do_state(self, what: str, slices: int = 5) -> Answer:
        """Return the best seconds of a save, load (into an empty sequence) or memcpy."""
        call = self.state_call("load" if what == "load_over" else what)

        def empty() -> None:
            if what == "load":
                self.remove(0)

        empty()
        call()
        return {"seconds": min(timeit.repeat(call, empty, number=1, repeat=slices))}

    def do_file(self, what: str, path: str, n: int, slices: int = 5) -> Answer:
        """Return the median seconds of overwriting a file, creating one, or loading it."""
        call = self.file_call(what, path, n)

        def before() -> None:
            if what == "file_load":
                self.remove(0)
            elif what == "file_make":
                Path(path).unlink(missing_ok=True)

        before()
        call()
        return {"seconds": statistics.median(timeit.repeat(call, before, number=1, repeat=slices))}

    def do_progress(self, what: str, seconds: float = 0.1) -> Answer:
        """Return how fast another thread counts while this one works."""
        call = self.work(what)
        counted, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                counted[0] += 1

        call()
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

    def work(self, what: str) -> Callable[[], object]:
        """Return a function: a save or load, or other work with or without the GIL."""
        if what == "hashing":
            # Without the GIL and with little memory, about as long as a save of 64 MiB.
            return lambda: hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 30_000)
        if what in ("memcpy", "copying"):
            original = bytearray(b"x") * self.state_bytes
            if what == "copying":
                return lambda: bytes(original)  # with the GIL
            array = ctypes.c_char * len(original)
            ends = array.from_buffer(original[:]), array.from_buffer(original)
            return lambda: ctypes.memmove(*ends, len(original))
        return self.state_call(what)

    # The process --------------------------------------------------------------------------

    def do_held(self) -> Answer:
        """Return the number of tokens of each sequence, if the binding can tell."""
        return {"sequences": self.sequences()}

    def do_rss(self) -> Answer:
        """Return the resident bytes of this process."""
        with open("/proc/self/statm") as file:
            return {"bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")}


def serve(worker: Worker) -> None:
    """Answer on the original stdout; output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, "do_" + request.pop("do"))(**request)
        except NotThereError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
