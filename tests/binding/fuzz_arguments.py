"""Choosing arguments for the survival fuzz: by parameter name, or anything at all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from binding import fuzz_plausible as right
from binding import fuzz_values as values
from pykvcache import (
    CheckpointPolicy,
    ControlVector,
    KvCacheError,
    LlamaBatch,
    LlamaContext,
    LlamaModel,
    LoraAdapter,
    Sampler,
    SequenceState,
)
from pykvcache.arrays import KVCache, RotatingKVCache
from pykvcache.kv import LayerKV, LayerState, RecurrentState, SequenceKV, to_caches
from pykvcache.state import ContextState, Fingerprint, PartialState

NAMED_ONLY = {"n_ctx", "n_threads", "n_threads_batch", "capacity", "max_tokens", "grammar"}
"""Parameters that never get a random number: it could take gigabytes or minutes."""


class Arguments:
    """The objects that are alive, and arguments made from them."""

    rng: Random
    path: Path
    pool: dict[type, list[Any]]
    closed: list[Any]

    def adapters(self) -> Any:
        """Adapters for a context: mostly none."""
        rng, kinds = self.rng, (LoraAdapter, ControlVector)
        if rng.random() < 0.6:
            return rng.choice([(), [], (), 5])
        found = [self.one(rng.choice(kinds)) for _ in range(rng.randrange(1, 3))]
        scales = [0.5, -2, 0, 1e30, float("nan"), "x"]
        return [one if rng.random() < 0.5 else (one, rng.choice(scales)) for one in found]

    def one(self, kind: type) -> Any:
        """A live object of that kind."""
        pool = self.pool[kind]
        return self.rng.choice(pool) if pool else None

    def objects(self) -> list[Any]:
        return [one for pool in self.pool.values() for one in pool] + self.closed[-5:]

    def argument(self, name: str, plausible: bool) -> Any:
        rng = self.rng
        if not plausible and name not in NAMED_ONLY:
            return values.hostile(rng, self.objects())
        if name in MADE:
            return MADE[name](self)
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

    def state(self) -> Any:
        """The raw state of some live sequence or context, or nearly."""
        rng = self.rng
        try:
            seq = rng.choice([None, *range(right.N_SEQ)])
            state = rng.choice(self.pool[LlamaContext]).get_state(seq)
        except KvCacheError:
            return values.hostile(rng, self.objects())
        return rng.choice(right.DAMAGE)(rng, state)

    def kept(self, kind: type) -> Any:
        """Return an earlier call's result, sometimes shortened."""
        rng, found = self.rng, self.one(kind)
        if kind is SequenceState and found is not None and rng.random() < 0.2:
            try:
                return found[: rng.randrange(len(found) + 1)]
            except KvCacheError:
                return found
        return found

    def saved(self) -> Any:
        """A saved state, or nearly."""
        found = self.kept(self.rng.choice([SequenceState, ContextState]))
        if found is None:
            return b"saved"
        return self.rng.choice(right.DAMAGE)(self.rng, np.frombuffer(found.to_bytes(), "u1").copy())

    def state_path(self) -> Any:
        """A file below this folder, sometimes a damaged one."""
        path = Path(self.rng.choice(["one", "two"]))
        if path.exists() and self.rng.random() < 0.2:
            data = np.frombuffer(path.read_bytes(), "u1").copy()
            # Another file of that name: the old one may be mapped.
            Path("draft").write_bytes(bytes(self.rng.choice(right.DAMAGE)(self.rng, data)))
            Path("draft").replace(path)
        return self.rng.choice([path, path, str(path), str(path).encode(), "missing/one", "", "."])

    def token_map(self) -> Any:
        rng = self.rng
        return rng.choice([None, {}, {rng.randrange(right.N_SEQ): right.words(rng)}])

    def caches(self) -> Any:
        """Array caches that came out of a sequence."""
        try:
            return to_caches(self.sequence())
        except (KvCacheError, TypeError, ValueError):
            return [KVCache(), RotatingKVCache(8)]

    def arguments(self, function: Callable[..., Any]) -> Any:
        rng = self.rng
        # Half of the calls are right but for chance, a fifth is nonsense, the rest mixed.
        wild = rng.choice([0.0, 0.0, 0.0, 0.15, 0.4, 1.0])
        method = getattr(function, "__name__", "")
        if function == LlamaBatch.from_arrays and rng.random() < 0.5:
            tokens = right.words(rng)
            return [tokens, np.arange(len(tokens)), rng.randrange(right.N_SEQ)], {"logits": True}
        args: list[Any] = []
        named: dict[str, Any] = {}
        for p in inspect.signature(function).parameters.values():
            if p.name == "self":
                continue
            required = p.default is p.empty
            if not required and p.name != "capacity" and rng.random() < 0.5:
                continue
            name = OTHER_NAMES.get((method, p.name), p.name)
            value = self.argument(name, rng.random() >= wild)
            if required and p.kind is not p.KEYWORD_ONLY:
                args.append(value)
            else:
                named[p.name] = value
        return args, named


MADE: Mapping[str, Callable[[Arguments], Any]] = {
    "model": lambda a: a.one(LlamaModel),
    "ctx": lambda a: a.one(LlamaContext),
    "context": lambda a: a.one(LlamaContext),
    "checkpoints": lambda a: a.rng.choice([None, CheckpointPolicy(1 << 20, 8)]),
    "sampler": lambda a: a.one(Sampler),
    "source": lambda a: a.one(LlamaContext) or right.NAMED["source"](a.rng),
    "batch_or_tokens": lambda a: a.batch() if a.rng.random() < 0.3 else right.words(a.rng),
    "arrays": Arguments.sequence,
    "buffer": Arguments.state,
    "state": lambda a: a.kept(a.rng.choice([SequenceState, SequenceState, ContextState])),
    "partial_state": lambda a: a.one(PartialState),
    "states": lambda a: [a.kept(SequenceState) for _ in range(a.rng.randrange(4))],
    "adapters": Arguments.adapters,
    "parts": lambda a: [a.one(SequenceKV) for _ in range(a.rng.randrange(3))],
    "data": Arguments.saved,
    "caches": Arguments.caches,
    "here": lambda a: a.one(Fingerprint),
    "path": Arguments.state_path,
    "token_map": Arguments.token_map,
    "model_path": lambda a: a.rng.choice([a.path, str(a.path), "missing", "", "/", "/dev/null"]),
}
"""Arguments that are made from what is alive, by parameter name."""

OTHER_NAMES = {
    ("__init__", "path"): "model_path",
    ("set_partial_state", "state"): "partial_state",
    ("context_state", "tokens"): "token_map",
    ("save_context", "tokens"): "token_map",
}
"""Names that mean something else here. States are never saved over a model, or a device."""
