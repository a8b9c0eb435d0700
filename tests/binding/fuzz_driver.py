"""The survival fuzz: call every public method with hostile arguments and stay alive.

Run as a script, with ``tests`` on the path::

    python -m binding.fuzz_driver llama --folder /tmp/models --calls 100000 --seed 1

Exit status 0: only documented exceptions were seen, and at the end a fresh context still
decodes as at the start. ``--journal FILE`` notes each call before it is made.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from binding import fuzz_values as values
from pykvcache import (
    InternalError,
    KvCacheError,
    LayerKV,
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    Sampler,
    SequenceKV,
)
from support.models import RIGHT, make_model

ALLOWED = (KvCacheError, TypeError, ValueError, IndexError, OverflowError, MemoryError, ImportError)
KINDS: tuple[type, ...] = (LlamaContext, LlamaModel, LlamaBatch, Sampler)
NAMED_ONLY = {"n_ctx", "n_threads", "n_threads_batch", "capacity", "max_tokens", "grammar"}
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


class Fuzz:
    """A pool of objects, and random calls on them."""

    def __init__(self, name: str, folder: Path, seed: int, journal: IO[str] | None = None) -> None:
        self.rng = Random(f"{name} {seed}")
        self.journal = journal
        self.seen: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        other = "qwen2vl" if name != "qwen2vl" else "llama"
        self.path = make_model(name, folder)
        self.models = [LlamaModel(self.path), LlamaModel(make_model(other, folder))]
        self.pool: dict[type, list[Any]] = {
            LlamaModel: list(self.models),
            LlamaContext: [],
            LlamaBatch: [LlamaBatch()],
            Sampler: [Sampler(temperature=0)],
        }
        self.closed: list[Any] = []
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

    # Arguments ------------------------------------------------------------------------

    def objects(self) -> list[Any]:
        return [one for pool in self.pool.values() for one in pool] + self.closed[-5:]

    def argument(self, name: str, plausible: bool) -> Any:
        rng = self.rng
        if not plausible and name not in NAMED_ONLY:
            return values.hostile(rng, self.objects())
        if name in ("model", "ctx", "sampler"):
            kind = {"model": LlamaModel, "ctx": LlamaContext, "sampler": Sampler}[name]
            pool = self.pool[kind]
            return rng.choice(pool) if pool else None
        if name == "batch_or_tokens":
            return rng.choice([values.words(rng), values.words(rng), self.batch()])
        if name == "arrays":
            return self.sequence()
        if name == "path":
            return rng.choice([self.path, str(self.path), "missing", "", "/", "/dev/null"])
        if name in values.NAMED:
            return values.NAMED[name](rng)
        return values.hostile(rng, self.objects())

    def batch(self) -> LlamaBatch:
        """A batch that continues some sequences, more or less."""
        rng, made = self.rng, LlamaBatch(4)
        contexts = self.pool[LlamaContext]
        for _ in range(rng.randint(1, 3)):
            seq = rng.randrange(values.N_SEQ)
            start = 0
            if contexts and rng.random() < 0.8:
                start = rng.choice(contexts).kv_cache_seq_pos_max(seq) + 1
            made.add_sequence(values.words(rng), seq, rng.random() < 0.5, start=start)
            if rng.random() < 0.2:
                made.add(rng.choice(values.SMALL_TOKENS), start, [0, 1], True)
        return rng.choice([made, made, *self.pool[LlamaBatch]])

    def sequence(self) -> Any:
        """The K and V of some live sequence, or nearly."""
        rng = self.rng
        try:
            found = rng.choice(self.pool[LlamaContext]).kv(rng.randrange(values.N_SEQ))
        except KvCacheError:
            return values.hostile(rng, self.objects())
        if rng.random() < 0.4 or not len(found):
            return found
        layers = [list(dataclasses.astuple(layer)) for layer in found.layers]
        rows, k = rng.choice(layers), rng.randrange(2)
        with np.errstate(all="ignore"):
            rows[k] = rng.choice(values.SPOIL)(rows[k])
        positions = found.positions
        if rng.random() < 0.4:
            positions = rng.choice(
                [*values.ARRAYS, lambda: positions[::-1], lambda: positions * 0]
            )()
        layers = rng.choice([layers, layers, layers[:-1], layers * 2, layers[::-1]])
        return SequenceKV(positions, [LayerKV(*pair) for pair in layers])

    def arguments(self, function: Callable[..., Any]) -> Any:
        rng = self.rng
        # Half of the calls are right but for chance, a fifth is nonsense, the rest mixed.
        wild = rng.choice([0.0, 0.0, 0.0, 0.15, 0.4, 1.0])
        args: list[Any] = []
        named: dict[str, Any] = {}
        for p in inspect.signature(function).parameters.values():
            if p.name == "self":
                continue
            required = p.default is p.empty
            if not required and p.name != "capacity" and rng.random() < 0.5:
                continue
            value = self.argument(p.name, rng.random() >= wild)
            if required and p.kind is not p.KEYWORD_ONLY:
                args.append(value)
            else:
                named[p.name] = value
        return args, named

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
            named = values.context_options(rng) | (wrong if rng.random() < 0.3 else {})
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
