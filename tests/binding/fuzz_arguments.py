"""Choosing arguments for the survival fuzz: by parameter name, or anything at all."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from binding import fuzz_plausible as right
from binding import fuzz_values as values
from pykvcache import (
    KvCacheError,
    LayerKV,
    LayerState,
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    PartialState,
    RecurrentState,
    Sampler,
    SequenceKV,
)

NAMED_ONLY = {"n_ctx", "n_threads", "n_threads_batch", "capacity", "max_tokens", "grammar"}
"""Parameters that never get a random number: it could take gigabytes or minutes."""


class Arguments:
    """The objects that are alive, and arguments made from them."""

    rng: Random
    path: Path
    pool: dict[type, list[Any]]
    closed: list[Any]
    taken: list[PartialState]

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
            return rng.choice([right.words(rng), right.words(rng), self.batch()])
        if name == "arrays":
            return self.sequence()
        if name == "state":
            return self.partial_state()
        if name == "path":
            return rng.choice([self.path, str(self.path), "missing", "", "/", "/dev/null"])
        if name in right.NAMED:
            return right.NAMED[name](rng)
        return values.hostile(rng, self.objects())

    def batch(self) -> LlamaBatch:
        """A batch that continues some sequences, more or less."""
        rng, made = self.rng, LlamaBatch(4)
        contexts = self.pool[LlamaContext]
        for _ in range(rng.randint(1, 3)):
            seq = rng.randrange(right.N_SEQ)
            start = 0
            if contexts and rng.random() < 0.8:
                start = rng.choice(contexts).kv_cache_seq_pos_max(seq) + 1
            made.add_sequence(right.words(rng), seq, rng.random() < 0.5, start=start)
            if rng.random() < 0.2:
                made.add(rng.choice(right.SMALL_TOKENS), start, [0, 1], True)
        return rng.choice([made, made, *self.pool[LlamaBatch]])

    def sequence(self) -> Any:
        """The K and V of some live sequence, or nearly."""
        rng = self.rng
        try:
            ctx, copy = rng.choice(self.pool[LlamaContext]), rng.random() < 0.9
            dtype = rng.choice([None, "stored"])
            found = ctx.kv(rng.randrange(right.N_SEQ), copy=copy, dtype=dtype)
        except KvCacheError:
            return values.hostile(rng, self.objects())
        if rng.random() < 0.4 or not copy:
            return found
        if found.window is not None and rng.random() < 0.5:
            return dataclasses.replace(found, window=self.spoiled(found.window))
        if found.recurrent is not None and rng.random() < 0.5:
            return dataclasses.replace(found, recurrent=self.spoiled_state(found.recurrent))
        return self.spoiled(found) if found.layers and len(found) else found

    def partial_state(self) -> Any:
        """A partial state: new, or one that was taken some calls ago."""
        rng, contexts = self.rng, self.pool[LlamaContext]
        if contexts:
            with contextlib.suppress(KvCacheError):
                state = rng.choice(contexts).get_partial_state(rng.randrange(right.N_SEQ))
                self.taken = [*self.taken[-9:], state]
        return rng.choice([*self.taken, None])

    def spoiled_state(self, state: RecurrentState) -> Any:
        """Recurrent states that may fit nowhere."""
        rng = self.rng
        position = rng.choice([state.position, state.position + 1, -2, -1, 2**31, 0])
        layers = [[layer.r, layer.s, layer.layer] for layer in state.layers]
        if layers:
            with np.errstate(all="ignore"):
                row = rng.choice(layers)
                row[rng.randrange(2)] = rng.choice(right.SPOIL)(state.layers[0].r)
        first = rng.choice([0, state.first, -1, 2**40])
        return rng.choice([None, RecurrentState(position, [LayerState(*x) for x in layers], first)])

    def spoiled(self, found: SequenceKV) -> Any:
        """K and V that may fit nowhere."""
        rng = self.rng
        if not found.layers:
            return None
        layers = [[layer.keys, layer.values, layer.layer] for layer in found.layers]
        rows, k = rng.choice(layers), rng.randrange(2)
        with np.errstate(all="ignore"):
            rows[k] = rng.choice(right.SPOIL)(rows[k])
        positions = found.positions
        if rng.random() < 0.4:
            positions = rng.choice(
                [*values.ARRAYS, lambda: positions[::-1], lambda: positions * 0]
            )()
        layers = rng.choice([layers, layers, layers[:-1], layers * 2, layers[::-1]])
        extended = rng.choice([found.extended, found.extended, None, positions])
        return dataclasses.replace(
            found,
            positions=positions,
            layers=[LayerKV(*layer) for layer in layers],
            extended=extended,
            rope=rng.random() < 0.8,
        )

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
