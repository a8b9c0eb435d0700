"""The survival fuzz: call every public method with hostile arguments and stay alive.

Run as a script, with ``tests`` on the path::

    python -m binding.fuzz_driver llama --folder FOLDER --calls 100000 --seed 1

Exit status 0: only documented exceptions were seen, and at the end a fresh context still
decodes as at the start. ``--journal FILE`` notes each call before it is made.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import inspect
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import IO, Any

import numpy as np

from binding import fuzz_plausible as right
from binding.fuzz_arguments import Arguments
from pykvcache import (
    InternalError,
    KvCacheError,
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    Sampler,
)
from support.models import RIGHT, make_model

ALLOWED = (KvCacheError, TypeError, ValueError, IndexError, OverflowError, MemoryError, ImportError)
KINDS: tuple[type, ...] = (LlamaContext, LlamaModel, LlamaBatch, Sampler)
LIVE = 3
"""Objects of each kind that are kept open."""


def members(kind: type) -> tuple[list[str], list[int]]:
    """Public names of a class with how often each is called."""
    names = [n for n in dir(kind) if not n.startswith("_") and n != "native"]
    quiet = {n for n in names if isinstance(inspect.getattr_static(kind, n), property)}
    return names, [20 if n == "decode" else 1 if n in quiet else 4 for n in names]


MEMBERS = {kind: members(kind) for kind in KINDS}


class Unexpected(Exception):
    """A call raised what it must not raise."""


class Fuzz(Arguments):
    """A pool of objects, and random calls on them."""

    def __init__(self, name: str, folder: Path, seed: int, journal: IO[str] | None = None) -> None:
        self.rng = Random(f"{name} {seed}")
        self.journal = journal
        self.seen: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        other = "qwen2vl" if name != "qwen2vl" else "llama"
        self.path = make_model(name, folder)
        self.models = [LlamaModel(self.path), LlamaModel(make_model(other, folder))]
        self.pool = {
            LlamaModel: list(self.models),
            LlamaContext: [],
            LlamaBatch: [LlamaBatch()],
            Sampler: [Sampler(temperature=0)],
        }
        self.closed = []
        self.taken = []
        self.expected = self.fresh()

    def fresh(self) -> Any:
        """What a new context gives for some tokens: logits, or an embedding."""
        model = self.models[0]
        embeds = model.has_decoder and not model.has_encoder and "bert" in model.description
        with LlamaContext(model, n_ctx=256, n_threads=1, embeddings=embeds) as ctx:
            if model.has_encoder:
                ctx.encode([5, 6, 7])
            ctx.decode([8, 9, 10])
            return ctx.seq_embeddings() if embeds else ctx.logits()

    # Calls ----------------------------------------------------------------------------

    def call(self, what: str, function: Callable[..., Any], args: Any, named: Any) -> Any:
        if self.journal:
            self.journal.write(f"{what} {args!r} {named!r}\n"[:2000])
            self.journal.flush()
        try:
            result = function(*args, **named)
            if inspect.isgenerator(result):
                result = list(result)
        except InternalError as error:
            raise Unexpected(f"{what}{args!r}{named!r}: no check foresaw this") from error
        except ALLOWED as error:
            self.seen[type(error).__name__] += 1
            return None
        except Exception as error:
            raise Unexpected(f"{what}{args!r}{named!r}") from error
        self.returned[what] += 1
        return result

    def make(self, kind: type) -> None:
        """Make a new object, and let go of an old one in one of several ways."""
        rng, pool = self.rng, self.pool[kind]
        args, named = self.arguments(kind.__init__)
        if kind is LlamaContext:
            # One wrong option in every third context: with more none would ever be made.
            wrong = dict(rng.sample(list(named.items()), min(len(named), 1)))
            named = right.context_options(rng) | (wrong if rng.random() < 0.3 else {})
            args = [rng.choice(self.models)] if rng.random() < 0.95 else args
        if kind is LlamaBatch and rng.random() < 0.5:
            args, named = self.arguments(LlamaBatch.from_arrays)
            made = self.call("from_arrays", LlamaBatch.from_arrays, args, named)
        else:
            made = self.call(kind.__name__, kind, args, named)
        if made is not None:
            pool.append(made)
        while len(pool) > LIVE:
            gone = pool.pop(rng.randrange(len(pool)))
            if gone in self.models:
                pool.insert(0, gone)
            elif rng.random() < 0.5 and hasattr(gone, "close"):
                gone.close()
                self.closed.append(gone)
        del self.closed[:-5]

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.04 or not self.pool[LlamaContext]:
            self.make(rng.choice(KINDS) if self.pool[LlamaContext] else LlamaContext)
            return
        # Contexts are what this is about.
        kind = rng.choices(KINDS, (12, 2, 2, 1))[0]
        closed = [one for one in self.closed if isinstance(one, kind)]
        target = rng.choice(closed if closed and rng.random() < 0.03 else self.pool[kind])
        names, weights = MEMBERS[kind]
        name = rng.choices(names, weights)[0]
        if name == "close" and (target in self.models or rng.random() < 0.9):
            return
        member = inspect.getattr_static(kind, name)
        if isinstance(member, property):
            self.call(f"{kind.__name__}.{name}", lambda: getattr(target, name), (), {})
            return
        args, named = self.arguments(getattr(kind, name))
        self.call(f"{kind.__name__}.{name}", getattr(target, name), args, named)
        if name == "close":
            self.pool[kind] = [one for one in self.pool[kind] if not one.is_closed]
            self.closed.append(target)

    def run(self, calls: int) -> None:
        """Make that many calls, and check that all still works."""
        for k in range(calls):
            self.step()
            if k % 1000 == 0:
                gc.collect()
        for pool in self.pool.values():
            for one in pool:
                repr(one)
        self.pool[LlamaContext].clear()
        off = float(np.abs(self.fresh() - self.expected).max())
        if off > RIGHT:
            raise Unexpected(f"a fresh context is off by {off}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path)
    options = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("pykvcache.llama").setLevel(logging.CRITICAL)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    journal = options.journal.open("w", errors="backslashreplace") if options.journal else None
    fuzz = Fuzz(options.model, options.folder, options.seed, journal)
    try:
        fuzz.run(options.calls)
    except Unexpected:
        traceback.print_exc()
        return 3
    print(f"returned {fuzz.returned.total()}, refused {fuzz.seen.total()}: {dict(fuzz.seen)}")
    print(f"never returned: {sorted(unreached(fuzz))}")
    return 0


def unreached(fuzz: Fuzz) -> set[str]:
    """Public members of a context that no call got through to."""
    public = {f"LlamaContext.{n}" for n in dir(LlamaContext) if not n.startswith("_")}
    return public - set(fuzz.returned) - {"LlamaContext.native"}


if __name__ == "__main__":
    sys.exit(main())
