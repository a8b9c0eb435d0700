"""Arguments for the survival fuzz: right by parameter name, or anything at all."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from binding import fuzz_values as values
from binding.fuzz_values import MAX
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
from pykvcache.sampling import SETTINGS
from pykvcache.state import ContextState, Fingerprint, PartialState

N_SEQ = 4
SMALL_TOKENS = range(5, 56)
"""Tokens that every test vocabulary has and that end no text."""

SPOIL: list[Callable[[Any], Any]] = [
    lambda rows: rows,
    lambda rows: rows[:-1],
    lambda rows: rows[..., :-1],
    lambda rows: rows[::-1],
    lambda rows: rows.T,
    lambda rows: rows[None],
    lambda rows: rows.astype(np.float64),
    lambda rows: rows.astype(np.int32),
    lambda rows: rows * np.float32(1e30),
    lambda rows: rows * np.nan,
    lambda rows: rows.tolist(),
    lambda rows: np.repeat(rows, 2, axis=-1)[..., ::2],
    lambda rows: np.broadcast_to(rows[:1], rows.shape),
    lambda rows: rows.astype(">f4"),
    lambda rows: None,
    lambda rows: "rows",
]
"""What is done to the K or V of a layer before it is written back."""


def flip(rng: Random, state: Any) -> Any:
    """Change some bytes, mostly of counts and lengths."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(state), rng.choice([64, 64, 10**9])))
        state[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, state[at] ^ 1 << rng.randrange(8)])
    return state


DAMAGE: list[Callable[[Random, Any], Any]] = [
    lambda rng, state: state,
    lambda rng, state: state,
    lambda rng, state: state.tobytes(),
    lambda rng, state: memoryview(state).cast("c"),
    lambda rng, state: state[: rng.randrange(len(state) + 1)],
    lambda rng, state: np.concatenate([state, state[: rng.randrange(1, 9)]]),
    lambda rng, state: state[::-1],
    lambda rng, state: state.astype(np.int32),
    flip,
    flip,
]
"""What is done to a state before it is put back."""


def words(rng: Random, most: int = 40) -> Any:
    tokens = [rng.choice(SMALL_TOKENS) for _ in range(rng.randint(1, most))]
    return rng.choice([list, tuple, np.array, lambda t: np.array(t, np.int32)])(tokens)


def texts(rng: Random) -> Any:
    return rng.choice(["", "hello world", "é漢😀\0", b"\xff\xfe", "</s><s>", "x" * 500, "\ud800"])


def grammars(rng: Random) -> Any:
    whole = ["root ::= [0-9]+", 'root ::= "a" | "b" root', "root ::= [", "", 'x ::= "a"']
    pieces = ["root", " ::= ", '"a"', "[a-z]", *"|*+?()x\n", "{2}", "{5,2}"]
    if rng.random() < 0.5:
        return rng.choice(whole)
    return "root ::= " + "".join(rng.choice(pieces) for _ in range(rng.randint(1, 8)))


MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATES = ["{{ messages[0].content }}", "{{ 1 / 0 }}", "{% for", "{{ ''.__class__ }}", "x"]

FRACTIONS = [name for name, setting in SETTINGS.items() if setting.kind is float]
FRACTIONS += ["yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"]
COUNTS = [name for name, setting in SETTINGS.items() if setting.kind is int]
COUNTS += ["seed", "yarn_orig_ctx", "first", "n_gpu_layers", "split_mode", "main_gpu"]

NAMED: Mapping[str, Callable[[Random], Any]] = {
    "devices": lambda r: r.choice([None, None, [], ["CPU"], ["CUDA0"], "CPU", [1], 3]),
    "rpc": lambda r: r.choice([None, None, [], ["127.0.0.1:1"], "127.0.0.1:1", ["x"], [None], 1]),
    "rpc_timeout": lambda r: r.choice([60.0, 0.1, 0, -1, MAX, float("nan"), None, "1"]),
    "tensor_split": lambda r: r.choice([None, None, None, [], [1.0], [-1, MAX], "1", [None]]),
    # Sizes of a context: never some gigabytes, and never 512 threads on two cores.
    "n_ctx": lambda r: r.choice([None, 0, 1, 256, 300, 512, MAX, -1, 2**32]),
    "n_batch": lambda r: r.choice([1, 8, 32, 512, MAX, 0, -1]),
    "n_ubatch": lambda r: r.choice([1, 8, 32, 512, MAX, 0, -1]),
    "n_seq_max": lambda r: r.choice([1, N_SEQ, N_SEQ, N_SEQ, 256, 257, 0]),
    "n_rs_seq": lambda r: r.choice([0, 0, 1, 4, 300, -1, MAX, None]),
    "n_threads": lambda r: r.choice([1, 2, None, 0, -1, 513, 2**31, True, "1"]),
    "n_threads_batch": lambda r: r.choice([1, 2, None, 0, -1, 513, 2**31, 1.5]),
    "capacity": lambda r: r.choice([0, 1, 100, -1, 2**31, 10**20, 1.5, None]),
    "type_k": lambda r: r.choice(["f32", "f16", "bf16", "q8_0", "q4_0", 4, 9999, -1, "f64"]),
    "type_v": lambda r: r.choice(["f32", "f16", "bf16", "q8_0", "iq4_nl", 5, 24, "i8"]),
    "flash_attn": lambda r: r.choice(["auto", "enabled", "disabled", 7, None]),
    "pooling_type": lambda r: r.choice([-1, "none", "mean", "cls", "last", "rank", 5]),
    "attention_type": lambda r: r.choice([-1, "causal", "non_causal", 2]),
    "rope_scaling_type": lambda r: r.choice([-1, "none", "linear", "yarn", "longrope", 4]),
    "rope_freq_base": lambda r: r.choice([0.0, 1e-30, 1e30, 1e4, float("nan")]),
    "rope_freq_scale": lambda r: r.choice([0.0, 1e-30, 1e30, 0.5, -1.0]),
    # Arguments of methods.
    "seq_id": lambda r: r.randrange(N_SEQ),
    "seq_ids": lambda r: r.choice([r.randrange(N_SEQ), [0, 1], [r.randrange(N_SEQ)]]),
    "src": lambda r: r.choice([None, *range(N_SEQ)]),
    "dest": lambda r: r.randrange(N_SEQ),
    "dst": lambda r: r.randrange(N_SEQ),
    "size": lambda r: r.randrange(40),
    "n": lambda r: r.randrange(40),
    "pos": lambda r: r.randrange(40),
    "p0": lambda r: r.choice([None, r.randrange(40)]),
    "p1": lambda r: r.choice([None, r.randrange(40)]),
    "begin": lambda r: r.randrange(40),
    "end": lambda r: r.choice([None, r.randrange(40)]),
    "delta": lambda r: r.randint(-9, 9),
    "d": lambda r: r.randint(1, 4),
    "i": lambda r: r.randint(-3, 9),
    "start": lambda r: r.randrange(9),
    "token": lambda r: r.choice(SMALL_TOKENS),
    "tokens": words,
    "prompt": lambda r: r.choice([words(r), texts(r)]),
    "max_tokens": lambda r: r.randrange(5),
    "namespace": lambda r: r.choice([None, "", "a", 5]),
    "ttl": lambda r: r.choice([None, 0, 0.001, 1e9, "x"]),
    "block_size": lambda r: r.choice([1, 4, 64, 0, -1, 1.5]),
    "tiers": lambda r: r.choice([(), (), (), (), (), 5]),
    "tier_seconds": lambda r: r.choice([0.01, 0.1, 1, 2, 3, -1]),
    "seconds": lambda r: r.choice([0, 0.01, -1, float("nan")]),
    "secret": lambda r: r.choice([None, None, None, None, b"x" * 32, b""]),
    "queue_bytes": lambda r: r.choice([1 << 20, 1 << 21, 1 << 22, 1 << 23, 0, -1]),
    "ram_bytes": lambda r: r.choice([0, 1000, 1 << 20, -1]),
    "checkpoint_bytes": lambda r: r.choice([0, 1 << 20, -1]),
    "policy": lambda r: r.choice(["lru", "slru", "cost-aware", "s3fifo", "best", 5]),
    "max_sequences": lambda r: r.choice([None, 1, 2, 0, 300]),
    "n_chunk": lambda r: r.choice([None, 1, 7, 10**6, 0, 1.5]),
    "logprobs": lambda r: r.choice([0, 2, 10**6, -1]),
    "priority": lambda r: r.choice([0, 1, -5, 2**40]),
    "more": lambda r: r.choice([words(r), texts(r)]),
    "stop": lambda r: r.choice([(), "a", ["b", 7], r.choice(SMALL_TOKENS), "", [3.5]]),
    "on_full": lambda r: r.choice(["raise", "stop", "shift", "other"]),
    "n_keep": lambda r: r.choice([0, 4, 300, -1]),
    "max_bytes": lambda r: r.choice([0, 1000, 1 << 28, -1, "1"]),
    "spacing": lambda r: r.choice([0, 8, 512, -1, 1.5]),
    "text": texts,
    "grammar": grammars,
    "source": lambda r: np.random.default_rng(r.randrange(99)).normal(size=320).astype("f4"),
    "logit_bias": lambda r: r.choice([None, {}, {5: 1.0, 6: float("-inf")}, {MAX: 1}, {-1: 2}, 5]),
    "grammar_root": lambda r: r.choice(["root", "x", "", "\0"]),
    "stages": lambda r: r.choice(
        [None, [], ["top_k", "temperature"], [lambda ids, logits: None], ["x"], "top_k", [3]]
    ),
    "dry_sequence_breakers": lambda r: r.choice([("\n",), [], ["ab", ":"], "x", [""], [3]]),
    "template": lambda r: r.choice(TEMPLATES),
    "messages": lambda r: r.choice([MESSAGES, MESSAGES, MESSAGES, [], "ab", [5], None]),
    "tools": lambda r: r.choice([None, [], MESSAGES, [{"type": "function"}], "x"]),
    "tool_choice": lambda r: r.choice(["auto", "none", "required", "other", {}, 5]),
    "json_schema": lambda r: r.choice([None, None, {"type": "integer"}, {}, "{", {"type": 5}, 5]),
    "chat_format": lambda r: r.choice([None, None, None, 5]),
    "boundaries": lambda r: r.choice([(), (1, 5), [9], [-1], "x", None]),
    "keep": lambda r: r.choice([None, 0, 5, 10**6, -1]),
    "call": lambda r: r.choice([lambda: None, 5]),
    "documents": lambda r: r.choice([None, [], [{"title": "a", "text": "b"}], [5]]),
    "variables": lambda r: r.choice([True, "x", {"a": [1]}]),
    "progress": lambda r: r.choice([None, lambda f: f < 0.5, lambda f: None]),
    "load_mode": lambda r: r.choice(["auto", "none", "mmap", "direct_io", 9]),
    "copy": lambda r: r.choice([True, False]),
    "dtype": lambda r: r.choice([None, "stored", np.float32, "f4", "f8", object]),
    "rope": lambda r: r.choice([True, False]),
    "out": lambda r: r.choice([None, bytearray(100), np.empty(10**6, np.uint8), np.empty(300_000)]),
    "metadata": lambda r: r.choice(
        [None, {}, {"a": [1, {"b": None}]}, {1: 2}, {"a": object()}, "a"]
    ),
    "checksum": lambda r: r.choice([None, "crc32", "none", "xxh3-64", "blake2b", 5]),
    "sync": lambda r: r.random() < 0.05,
    "n_tokens": lambda r: r.choice([None, r.randrange(40)]),
    "window_size": lambda r: r.choice([None, 1, 32, 0, -1]),
    "part": lambda r: r.choice([None, "attention", "window", "recurrent", "x"]),
    **dict.fromkeys(FRACTIONS, lambda r: r.choice([0.0, 0.5, 1.0, -1.0, 3.0, 1e30])),
    **dict.fromkeys(COUNTS, lambda r: r.choice([0, 1, 40, -1, MAX])),
}
"""Mostly right arguments by parameter name: calls that pass the checks are the dangerous ones."""


def context_options(rng: Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "n_ctx": rng.choice([256, 256, 300, 512]),
        "n_seq_max": rng.choice([N_SEQ, N_SEQ, N_SEQ, 1, 16]),
        "n_batch": rng.choice([16, 64, 512]),
        "n_ubatch": rng.choice([1, 16, 64, 512]),
        "n_threads": rng.choice([1, 1, 2]),
        "n_threads_batch": 1,
    }
    unusual = {
        "kv_unified": [False],
        "swa_full": [False],
        "embeddings": [True],
        "flash_attn": ["enabled", "disabled"],
        "type_k": ["f32", "bf16", "q8_0"],
        "type_v": ["f32", "bf16"],
        "pooling_type": ["none", "mean", "cls", "last", "rank"],
        "attention_type": ["causal", "non_causal"],
        "rope_scaling_type": ["none", "linear", "yarn", "longrope"],
        "rope_freq_scale": [1e-30, 0.5, 1e30],
        "rope_freq_base": [1e-30, 1e30],
        "n_rs_seq": [1, 4],
        "yarn_ext_factor": [0.0, 1.0, 1e30],
        "no_perf": [True],
        "offload_kqv": [False],
    }
    for name, choices in unusual.items():
        if rng.random() < 0.15:
            options[name] = rng.choice(choices)
    return options


NAMED_ONLY = {"n_ctx", "n_threads", "n_threads_batch", "capacity", "max_tokens", "grammar"}
"""Parameters that never get a random number: it could take gigabytes or minutes."""


class Arguments:
    rng: Random
    path: Path
    pool: dict[type, list[Any]]
    closed: list[Any]

    def adapters(self) -> Any:
        rng, kinds = self.rng, (LoraAdapter, ControlVector)
        if rng.random() < 0.6:
            return rng.choice([(), [], (), 5])
        found = [self.one(rng.choice(kinds)) for _ in range(rng.randrange(1, 3))]
        scales = [0.5, -2, 0, 1e30, float("nan"), "x"]
        return [one if rng.random() < 0.5 else (one, rng.choice(scales)) for one in found]

    def one(self, kind: type) -> Any:
        pool = self.pool[kind]
        return self.rng.choice(pool) if pool else None

    def objects(self) -> list[Any]:
        return [one for pool in self.pool.values() for one in pool] + self.closed[-5:]

    def argument(self, name: str, plausible: bool, default: object) -> Any:
        rng = self.rng
        if not plausible and name not in NAMED_ONLY:
            return values.hostile(rng, self.objects())
        if name in MADE:
            return MADE[name](self)
        if name in NAMED:
            return NAMED[name](rng)
        if isinstance(default, bool):
            return rng.random() < 0.5
        return values.hostile(rng, self.objects())

    def batch(self) -> LlamaBatch:
        rng, made = self.rng, LlamaBatch(4)
        contexts = self.pool[LlamaContext]
        for _ in range(rng.randint(1, 3)):
            seq = rng.randrange(N_SEQ)
            start = 0
            if contexts and rng.random() < 0.8:
                start = rng.choice(contexts).kv_cache_seq_pos_max(seq) + 1
            made.add_sequence(words(rng), seq, rng.random() < 0.5, start=start)
            if rng.random() < 0.2:
                made.add(rng.choice(SMALL_TOKENS), start, [0, 1], True)
        return rng.choice([made, made, *self.pool[LlamaBatch]])

    def sequence(self) -> Any:
        rng = self.rng
        try:
            ctx, copy = rng.choice(self.pool[LlamaContext]), rng.random() < 0.9
            dtype = rng.choice([None, "stored"])
            found = ctx.kv(rng.randrange(N_SEQ), copy=copy, dtype=dtype)
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
        rng = self.rng
        position = rng.choice([state.position, state.position + 1, -2, -1, 2**31, 0])
        layers = [[layer.r, layer.s, layer.layer] for layer in state.layers]
        if layers:
            with np.errstate(all="ignore"):
                row = rng.choice(layers)
                row[rng.randrange(2)] = rng.choice(SPOIL)(state.layers[0].r)
        first = rng.choice([0, state.first, -1, 2**40])
        return rng.choice([None, RecurrentState(position, [LayerState(*x) for x in layers], first)])

    def spoiled(self, found: SequenceKV) -> Any:
        rng = self.rng
        if not found.layers:
            return None
        layers = [[layer.keys, layer.values, layer.layer] for layer in found.layers]
        rows, k = rng.choice(layers), rng.randrange(2)
        with np.errstate(all="ignore"):
            rows[k] = rng.choice(SPOIL)(rows[k])
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
        rng = self.rng
        try:
            seq = rng.choice([None, *range(N_SEQ)])
            state = rng.choice(self.pool[LlamaContext]).get_state(seq)
        except KvCacheError:
            return values.hostile(rng, self.objects())
        return rng.choice(DAMAGE)(rng, state)

    def kept(self, kind: type) -> Any:
        rng, found = self.rng, self.one(kind)
        if kind is SequenceState and found is not None and rng.random() < 0.2:
            try:
                return found[: rng.randrange(len(found) + 1)]
            except KvCacheError:
                return found
        return found

    def saved(self) -> Any:
        found = self.kept(self.rng.choice([SequenceState, ContextState]))
        if found is None:
            return b"saved"
        return self.rng.choice(DAMAGE)(self.rng, np.frombuffer(found.to_bytes(), "u1").copy())

    def state_path(self) -> Any:
        path = Path(self.rng.choice(["one", "two"]))
        if path.exists() and self.rng.random() < 0.2:
            data = np.frombuffer(path.read_bytes(), "u1").copy()
            # Another file of that name: the old one may be mapped.
            Path("draft").write_bytes(bytes(self.rng.choice(DAMAGE)(self.rng, data)))
            Path("draft").replace(path)
        return self.rng.choice([path, path, str(path), str(path).encode(), "missing/one", "", "."])

    def token_map(self) -> Any:
        rng = self.rng
        return rng.choice([None, {}, {rng.randrange(N_SEQ): words(rng)}])

    def caches(self) -> Any:
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
            tokens = words(rng)
            return [tokens, np.arange(len(tokens)), rng.randrange(N_SEQ)], {"logits": True}
        args: list[Any] = []
        named: dict[str, Any] = {}
        for p in inspect.signature(function).parameters.values():
            if p.name == "self":
                continue
            required = p.default is p.empty
            if not required and p.name != "capacity" and rng.random() < 0.5:
                continue
            name = OTHER_NAMES.get((method, p.name), p.name)
            value = self.argument(name, rng.random() >= wild, p.default)
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
    "source": lambda a: a.one(LlamaContext) or NAMED["source"](a.rng),
    "batch_or_tokens": lambda a: a.batch() if a.rng.random() < 0.3 else words(a.rng),
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
