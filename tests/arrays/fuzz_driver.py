"""The survival fuzz of the array caches: hostile calls on every class, in random order.

Run as a script, with ``tests`` on the path::

    python -m arrays.fuzz_driver --calls 10000 --seed 1

Exit status 0: only what docs/array-caches.md allows was seen.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from binding import fuzz_values as values
from pykvcache import arrays as public
from pykvcache.errors import KvCacheError

ALLOWED = (KvCacheError, TypeError, MemoryError, OSError)
ARGUMENT = ("no ", "The truth value of")
"""Errors that arguments themselves raise, and names that no file can have."""
LIVE = 4
HEADS, DIM = 2, 8


def classes() -> list[type]:
    """Every public class that can be made."""
    found = [getattr(public, name) for name in public.__all__]
    return [
        one
        for one in found
        if inspect.isclass(one)
        and not issubclass(one, (BaseException, enum.Enum))
        and one is not public.Cache  # a protocol
    ]


def functions() -> list[Callable[..., Any]]:
    return [one for name in public.__all__ if inspect.isfunction(one := getattr(public, name))]


def rows(rng: Random) -> Any:
    """Return K or V of either cache family, mostly of the usual shape."""
    n = rng.randrange(1, 6)
    usual = (rng.choice([1, 1, 2]), HEADS, n, DIM)
    shape = rng.choice([usual, usual, (n, HEADS, DIM)])
    shape = rng.choice([shape, shape, shape, (), (0,), shape[1:], (*shape, 1)])
    dtype = rng.choice([np.float32, np.float32, np.float16, np.float64, np.int32, "U3", object])
    return np.ones(shape).astype(dtype)


def counts(rng: Random) -> Any:
    return rng.choice([[0], [0, 0], [1, 2], [0, 3], np.array([1, 0]), [-1], [], None])


def numbers(rng: Random) -> Any:
    return rng.choice([0, 1, 2, 3, 4, 8, 16, -1, 64])


NAMED: Mapping[str, Callable[[Random], Any]] = {
    **dict.fromkeys(["key", "value", "keys", "values", "k", "v", "array", "h"], rows),
    **dict.fromkeys(["left_padding", "right_padding", "lengths"], counts),
    "dtype": lambda r: r.choice([np.float32, np.float16, "f4", "f8", np.int8, "no type", None]),
    "mask_dtype": lambda r: r.choice([np.float32, np.float16, np.int8]),
    "shift_fn": lambda r: r.choice([None, lambda layer, key, shift: key, lambda: None, 5]),
    "positions": lambda r: [r.randrange(12) for _ in range(r.randrange(1, 5))],
    "sequences": lambda r: [r.randrange(3) for _ in range(r.randrange(1, 5))],
    "tokens": lambda r: [r.randrange(5) for _ in range(r.randrange(6))],
    "prompt": lambda r: [public.Input(r.randrange(5)) for _ in range(r.randrange(6))],
    "inputs": lambda r: [public.Input(r.randrange(5)) for _ in range(r.randrange(6))],
    "shape": lambda r: r.choice([(2, 3), (4,), (), (0, 2), (-1,)]),
    "place": lambda r: r.randrange(4),
    "name": lambda r: r.choice(["conv", "ssm", "", 5]),
    "file_name": lambda r: r.choice(["one", "two", "one", "missing/one", ""]),
    "metadata": lambda r: r.choice([None, {}, {"a": "b"}, {"a": 1}]),
    "kind": lambda r: r.choice([*public.KvCacheKind, "KVCache", "no kind"]),
    "cache_type": lambda r: r.choice(["user", "system", "assistant", "x"]),
    "max_batch": lambda r: r.choice([1, 4, 16]),
    "max_sequences": lambda r: r.choice([1, 2, 3]),
    "capacity": lambda r: r.choice([8, 16, 64]),
    "kv_size": lambda r: r.choice([8, 16, 64]),
    "num_slots": lambda r: r.choice([1, 2]),
    "bits": lambda r: r.choice([2, 4, 8, 3]),
    "group_size": lambda r: r.choice([8, 32, 64, 7]),
}
"""Arguments that make sense by parameter name; integers where none is given."""


class Unexpected(Exception):
    """A call raised an error that it must not raise."""


class Fuzz:
    """Live caches of every class, and random calls on them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.pool: dict[type, list[Any]] = {kind: [] for kind in classes()}
        self.called: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def objects(self) -> list[Any]:
        return [one for pool in self.pool.values() for one in pool]

    def argument(self, name: str) -> Any:
        rng, alive = self.rng, self.objects()
        if name in NAMED:
            return NAMED[name](rng)
        if name in ("cache", "other", "slot", "config", "model"):
            kind = {"slot": public.Slot, "config": public.CacheConfig}.get(name)
            near = [one for one in alive if kind is None or isinstance(one, kind)]
            return rng.choice(near or [None])
        if name in ("caches", "prompt_cache", "state", "meta"):
            return [rng.choice(alive) for _ in range(rng.randrange(3))] if alive else []
        return numbers(rng)

    def arguments(self, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        rng, args, named = self.rng, [], {}
        wild = rng.choice([0.0, 0.0, 0.0, 0.2, 1.0])
        for p in inspect.signature(function).parameters.values():
            if p.name == "self" or (p.default is not p.empty and rng.random() < 0.5):
                continue
            value = values.hostile(rng, self.objects()) if rng.random() < wild else None
            value = self.argument(p.name) if value is None else value
            if p.kind is p.VAR_POSITIONAL:
                args += [self.argument("cache") for _ in range(rng.randrange(3))]
            elif p.kind is p.KEYWORD_ONLY or p.default is not p.empty:
                named[p.name] = value
            elif p.kind is not p.VAR_KEYWORD:
                args.append(value)
        return args, named

    def call(self, what: str, function: Callable[..., Any], args: Any, named: Any) -> Any:
        self.called[what] += 1
        try:
            result = function(*args, **named)
        except ALLOWED as error:
            self.seen[type(error).__name__] += 1
            return None
        except Exception as error:
            if str(error).startswith(ARGUMENT) or isinstance(error, UnicodeEncodeError):
                return None
            if "integer string conversion" in str(error):  # of a key of the program's, in a repr
                return None
            raise Unexpected(f"{what}{args!r}{named!r}"[:3000]) from error
        self.returned[what] += 1
        for one in result if isinstance(result, list | tuple) else [result]:
            if type(one) in self.pool:
                self.add(one)
        return result

    def add(self, one: Any) -> None:
        pool = self.pool[type(one)]
        pool.append(one)
        if len(pool) > LIVE:
            pool.pop(self.rng.randrange(len(pool)))

    def step(self) -> None:
        rng = self.rng
        kind = rng.choice([*self.pool])
        if rng.random() < 0.1 or not self.pool[kind]:
            args, named = self.arguments(kind)
            self.call(kind.__name__, kind, args, named)
            return
        if rng.random() < 0.05:
            function = rng.choice(functions())
            args, named = self.arguments(function)
            self.call(function.__name__, function, args, named)
            return
        self.use(rng.choice(self.pool[kind]), rng.choice(members(kind)))

    def use(self, one: Any, name: str) -> None:
        kind = type(one)
        what = f"{kind.__name__}.{name}"
        member = getattr(kind, name, None)
        # A type that is a value (float32) has no signature before Python 3.11.
        if callable(member) and not isinstance(member, type):
            args, named = self.arguments(member)
            self.call(what, getattr(one, name), args, named)
        else:
            self.call(what, lambda: getattr(one, name), [], {})


def members(kind: type) -> list[str]:
    return [name for name in dir(kind) if name[0] != "_"] or ["__repr__"]


def limit_memory() -> None:
    """A mask of a billion tokens is a MemoryError, also on a machine that has the room."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (2**32, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    os.chdir(options.folder)
    warnings.simplefilter("ignore")
    limit_memory()
    fuzz = Fuzz(options.seed)
    for _ in range(options.calls):
        fuzz.step()
    print(json.dumps({"called": fuzz.called, "returned": fuzz.returned, "refused": fuzz.seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
