"""The survival fuzz: call every public method with hostile arguments and stay alive.

``python -m binding.fuzz_driver MODEL FOLDER CALLS SEED [JOURNAL]``, in ``tests``. Exit status 0:
only documented exceptions were seen, and cleared contexts gave what new ones give. JOURNAL gets
each call before it is made.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import itertools
import json
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

from binding.fuzz_arguments import Arguments, context_options
from binding.fuzz_values import CallersOwn
from pykvcache import (
    BatchGenerator,
    ControlVector,
    KvCacheError,
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    LoraAdapter,
    PrefixCache,
    Sampler,
    SequenceState,
    describe_state,
    devices,
    embedded_model_path,
    system_info,
)
from pykvcache.errors import InternalError, InvalidBatch
from pykvcache.generate import GenerationHandle, HandleStream
from pykvcache.kv import CacheView, LayerKV, SequenceKV, from_caches, to_caches
from pykvcache.sequence import Generation, TextGeneration
from pykvcache.state import ContextState, Fingerprint, PartialState
from support.adapters import pairs, write_adapter
from support.models import RIGHT, make_model

BUILTIN = (TypeError, CallersOwn)
"""What docs/guarantees.md allows besides `KvCacheError`, and what arguments themselves raise."""
KINDS: tuple[type, ...] = (LlamaContext, LlamaModel, LlamaBatch, Sampler)
KINDS += (LlamaSequence, BatchGenerator, PrefixCache)
GIVEN: tuple[type, ...] = (SequenceState, ContextState, PartialState)
GIVEN += (SequenceKV, CacheView, Fingerprint, GenerationHandle)
GIVEN += (LoraAdapter, ControlVector, HandleStream)
"""Made by methods of others, and kept."""
FUNCTIONS = (describe_state, devices, embedded_model_path, from_caches, system_info, to_caches)
LIVE = 3
"""Objects of each kind that are kept open."""
MOST_TOKENS = 300
"""Tokens that are taken of a generation."""


INTERNAL = {"native"}


def members(kind: type) -> tuple[list[str], list[int]]:
    names = [n for n in dir(kind) if not n.startswith("_") and n not in INTERNAL]
    loud = {n for n in names if callable(getattr(kind, n))}
    # A picture takes as long as a hundred other calls, and nearly all of it is Matplotlib's.
    # A partial state is refused by most memories and sequences, and has its own members.
    often = {"decode": 20, "get_partial_state": 12, "plot": 1}
    return names, [often.get(n, 4 if n in loud else 1) for n in names]


MEMBERS = {kind: members(kind) for kind in (*KINDS, *GIVEN)}


def known(one: Any) -> type:
    """The class under which an object's members are called: a cache's sequences are sequences."""
    return LlamaSequence if isinstance(one, LlamaSequence) else type(one)


class Unexpected(Exception):
    """A call raised an undocumented exception."""


class Fuzz(Arguments):
    def __init__(self, name: str, folder: Path, seed: str, journal: IO[str]) -> None:
        self.rng = Random(f"{name} {seed}")
        self.journal = journal
        self.seen: Counter[str] = Counter()
        self.called: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        other = "qwen2vl" if name != "qwen2vl" else "llama"
        self.path = make_model(name, folder)
        self.models = [LlamaModel(self.path), LlamaModel(make_model(other, folder))]
        self.pool = {
            LlamaModel: list(self.models),
            LlamaContext: [],
            LlamaBatch: [LlamaBatch()],
            Sampler: [Sampler(temperature=0)],
            LlamaSequence: [],
            BatchGenerator: [],
            PrefixCache: [],
            **{kind: [] for kind in GIVEN},
        }
        if pairs(name, 1):
            adapter = write_adapter(folder / f"{name}-{os.getpid()}.lora.gguf", name)
            self.pool[LoraAdapter].append(self.models[0].load_adapter(adapter))
            adapter.unlink()
        model = self.models[0]
        values = np.zeros((max(2, model.n_layer), model.n_embd), np.float32)
        values[1:] = 0.01
        self.pool[ControlVector].append(ControlVector(values))
        self.closed = []
        self.options: dict[int, tuple[Any, Any]] = {}
        self.checked = 0
        self.expected = self.fresh()

    def fresh(self) -> Any:
        model = self.models[0]
        embeds = model.has_decoder and not model.has_encoder and "bert" in model.description
        with LlamaContext(model, n_ctx=256, n_threads=1, embeddings=embeds) as ctx:
            if model.has_encoder:
                ctx.encode([5, 6, 7])
            ctx.decode([8, 9, 10])
            return ctx.seq_embeddings() if embeds else ctx.logits()

    # Calls ----------------------------------------------------------------------------

    def call(self, what: str, function: Callable[..., Any], args: Any, named: Any) -> Any:
        try:
            given = f"{args!r} {named!r}"
        except Exception as error:  # a record of nonsense cannot be shown
            given = repr(error)
        self.journal.write(f"{what} {given}\n"[:2000])
        self.journal.flush()
        try:
            result = function(*args, **named)
            if inspect.isgenerator(result) or isinstance(result, Generation | TextGeneration):
                # With `on_full="shift"` it may go on for ever.
                result = list(itertools.islice(result, MOST_TOKENS))
            elif isinstance(result, HandleStream):
                list(itertools.islice(result, MOST_TOKENS))
        except Exception as error:
            if isinstance(error, InternalError):
                raise Unexpected(f"{what}{args!r}{named!r}: no check foresaw this") from error
            if not isinstance(error, (KvCacheError, *BUILTIN)):
                raise Unexpected(f"{what}{args!r}{named!r}") from error
            self.seen[type(error).__name__] += 1
            return None
        finally:
            self.called[what] += 1
        self.returned[what] += 1
        self.keep(result)
        return result

    def keep(self, result: Any) -> None:
        if isinstance(result, LlamaSequence):
            self.pool[LlamaSequence].append(result)
        found = [result] if isinstance(result, GIVEN) else []
        if isinstance(result, list):
            found += [one for one in result[:2] if isinstance(one, GenerationHandle)]
        if isinstance(result, SequenceKV) and isinstance(result.layers, list | tuple):
            layers = [layer for layer in result.layers if isinstance(layer, LayerKV)]
            found += [one for layer in layers[:1] for one in (layer.keys, layer.values)]
        elif isinstance(result, (SequenceState, ContextState)):
            found.append(result.fingerprint)
        for one in found:
            if isinstance(one, GIVEN):
                pool = self.pool[type(one)]
                pool.append(one)
                if len(pool) > LIVE:
                    pool.pop(self.rng.randrange(len(pool)))

    def make(self, kind: type) -> None:
        """Make a new object, and drop an old one in one of several ways."""
        rng, pool = self.rng, self.pool[kind]
        args, named = self.arguments(kind.__init__)
        if kind is LlamaContext:
            # One wrong option in every third context: with more none would ever be made.
            wrong = dict(rng.sample(list(named.items()), min(len(named), 1)))
            named = context_options(rng) | (wrong if rng.random() < 0.3 else {})
            args = [rng.choice(self.models)] if rng.random() < 0.95 else args
        if kind in (LlamaSequence, BatchGenerator, PrefixCache) and rng.random() < 0.95:
            args = [self.one(LlamaContext)]
            if kind is BatchGenerator and rng.random() < 0.3:
                args = [self.one(PrefixCache)]
            if kind is PrefixCache:
                # At most one option that may be wrong: with more, few caches would be made.
                named = dict(rng.sample(list(named.items()), min(len(named), 1)))
        if kind is LlamaBatch and rng.random() < 0.5:
            args, named = self.arguments(LlamaBatch.from_arrays)
            made = self.call("from_arrays", LlamaBatch.from_arrays, args, named)
        else:
            made = self.call(kind.__name__, kind, args, named)
        if made is not None and made not in pool:
            pool.append(made)
            self.options[id(made)] = (args, named)
        while len(pool) > LIVE:
            gone = pool.pop(rng.randrange(len(pool)))
            if kind is LlamaContext and rng.random() < 0.5:
                self.check(gone)
            if gone in self.models:
                pool.insert(0, gone)
            elif rng.random() < 0.5 and hasattr(gone, "close"):
                gone.close()
                self.closed.append(gone)
        del self.closed[:-5]

    def check(self, ctx: LlamaContext) -> None:
        args, named = self.options.pop(id(ctx))
        if ctx.is_closed or args[0].is_closed:
            return
        with LlamaContext(*args, **named) as new:
            ctx.clear_kv_cache()
            ctx.set_adapters(new.adapters)
            for given, wanted in itertools.zip_longest(answers(ctx), answers(new), fillvalue=str):
                if isinstance(wanted, type) or isinstance(given, type):
                    right = given is wanted
                else:
                    right = np.allclose(given, wanted, rtol=RIGHT, atol=RIGHT, equal_nan=True)
                if not right:
                    raise Unexpected(f"{ctx} {named} gives {given}, a new one {wanted}")
        self.checked += 1

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.05 or not self.pool[LlamaContext]:
            self.make(rng.choice(KINDS) if self.pool[LlamaContext] else LlamaContext)
            return
        if rng.random() < 0.01:
            function = rng.choice(FUNCTIONS)
            self.call(function.__name__, function, *self.arguments(function))
            return
        # Contexts are what this is about.
        kind = rng.choices((*KINDS, *GIVEN), (40, 4, 4, 2, 8, 3, 3, 3, 1, 1, 2, 3, 1, 1, 1, 1, 1))[
            0
        ]
        if not self.pool[kind]:
            kind = LlamaContext
        closed = [one for one in self.closed if isinstance(one, kind)]
        target = rng.choice(closed if closed and rng.random() < 0.03 else self.pool[kind])
        names, weights = MEMBERS[kind]
        name = rng.choices(names, weights)[0]
        if name == "close" and (target in self.models or rng.random() < 0.9):
            return
        self.use(target, name)
        if name == "close":
            self.pool[kind] = [one for one in self.pool[kind] if not one.is_closed]
            self.closed.append(target)

    def use(self, target: Any, name: str) -> None:
        kind = known(target)
        if callable(getattr(kind, name)):
            args, named = self.arguments(getattr(kind, name))
            self.call(f"{kind.__name__}.{name}", getattr(target, name), args, named)
        else:
            self.call(f"{kind.__name__}.{name}", lambda: getattr(target, name), (), {})

    def sweep(self) -> None:
        """Every member of an object of each kind, alive and then closed."""
        made = [LlamaModel(self.path), LlamaContext(self.models[0]), LlamaBatch(), Sampler()]
        # What chance gives seldom: a view of cells, a handle of a request, its stream.
        self.call("LlamaContext.decode", made[1].decode, ([5, 6, 7],), {})
        self.call("LlamaContext.kv", made[1].kv, (0,), {"copy": False})
        generator = self.call("BatchGenerator", BatchGenerator, (made[1],), {})
        if generator is not None:
            handle = self.call("BatchGenerator.submit", generator.submit, ([5, 6], 2), {})
            if handle is not None:
                self.call("GenerationHandle.stream", handle.stream, (), {})
        made += self.pool[LlamaSequence][:1]
        made += self.pool[BatchGenerator][:1] or [generator] * (generator is not None)
        # Chance may have made none; an encoder refuses.
        cache = self.call("PrefixCache", PrefixCache, (LlamaContext(self.models[0]),), {})
        made += self.pool[PrefixCache][:1] or [cache] * (cache is not None)
        for one in [*made, *(pool[0] for kind in GIVEN if (pool := self.pool[kind]))]:
            for name in [*MEMBERS[known(one)][0]] * 2:
                # Closes it somewhere on the way.
                self.use(one, name)

    def run(self, calls: int) -> None:
        for k in range(calls):
            self.step()
            if k % 1000 == 0:
                gc.collect()
        self.sweep()
        for ctx in self.pool[LlamaContext]:
            self.check(ctx)
        self.pool[LlamaContext].clear()
        off = float(np.abs(self.fresh() - self.expected).max())
        if off > RIGHT:
            raise Unexpected(f"a fresh context is off by {off}")


def answers(ctx: LlamaContext) -> list[Any]:
    calls: list[Callable[[], Any]] = [
        ctx.clear_kv_cache,
        lambda: ctx.encode([5]),
        lambda: ctx.decode([8, 9, 10]),
        ctx.logits,
        ctx.embeddings,
        ctx.seq_embeddings,
    ]
    found: list[Any] = []
    for call in calls:
        try:
            result = call()
            found.append(type(None) if result is None else result)
        except KvCacheError as error:
            found.append(type(error))
            if isinstance(error, InvalidBatch):
                break  # what an earlier decode left is still there
    return found


def main(name: str, folder: str, calls: str, seed: str, journal: str = "") -> int:
    faulthandler.enable()
    logging.getLogger("pykvcache.llama").setLevel(logging.CRITICAL)
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    with open(journal or os.devnull, "w", errors="backslashreplace") as file:
        fuzz = Fuzz(name, Path(folder), seed, file)
        try:
            fuzz.run(int(calls))
        except Unexpected:
            traceback.print_exc()
            return 3
    tallies = {"called": fuzz.called, "returned": fuzz.returned, "refused": fuzz.seen}
    print(json.dumps({"checked contexts": fuzz.checked, **tallies}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
