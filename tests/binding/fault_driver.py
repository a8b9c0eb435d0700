"""Run every operation on one model while an allocation of it fails, and look at what is left.

Run by test_faults.py under the preloaded allocator of support/faults.c:

    python -m binding.fault_driver llama --folder DIR --journal FILE [--points 3] [--only shift]

``--hidden`` treats the memory of the CPU as that of a device. ``--seconds`` ends the run then: up
to there operations have come in turns, each with its allocations in an order that ``--seed`` makes.

After each failure the context holds what it held before, or what the operation makes, or says what
to do; and cleared it is as good as new.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from binding.fault_operations import FIRST, MODELS, NEXT, OPERATIONS, Stage, fill, options, prepare
from pykvcache import KvCacheError, LlamaContext, LlamaModel
from pykvcache._native import lib
from pykvcache.errors import InvalidBatch, SequenceIdError, UnsupportedOperation
from support.models import RIGHT, make_model

Row = Any
FAULTS = ctypes.CDLL(None)
FAULTS.faults_arm.argtypes = [ctypes.c_long, ctypes.c_int]
FAULTS.faults_disarm.restype = FAULTS.faults_counted.restype = ctypes.c_long


class Driver:
    """One model, the contexts on it, and what they must say."""

    def __init__(self, name: str, folder: Path, journal: Path, n_points: int | None) -> None:
        self.streams = False
        self.kept: dict[str, tuple[Any, ...]] = {}
        self.info = MODELS[name]
        self.path = make_model(name, folder)
        self.model = LlamaModel(self.path)
        self.journal = journal
        self.n_points = n_points
        self.counts = {"runs": 0, "raised": 0, "unchanged": 0, "done": 0, "asked": 0}
        self.tried: dict[str, int] = {}

    def options(self) -> dict[str, Any]:
        """What the contexts are made with."""
        return options(self.info) | ({"kv_unified": False} if self.streams else {})

    def stage(self, made: dict[str, Any] | None = None) -> Stage:
        """A filled context in a stage."""
        ctx = LlamaContext(self.model, **self.options())
        fill(ctx, self.info)
        stage = Stage(self.path, self.model, self.info, ctx, made or {})
        if made is None:
            prepare(stage)
        return stage

    def says(self, ctx: LlamaContext) -> list[Row]:
        """Per sequence: its last position, and the logits of one more token."""
        if not self.info.has_memory:
            ctx.encode(np.arange(5, 12))
            return [ctx.seq_embeddings(0)]
        found: list[Row] = []
        for seq in range(2 if not self.info.has_encoder else 1):
            found.append(np.array([ctx.kv_cache_seq_pos_max(seq)]))
            ctx.decode([77], seq_id=seq)
            found.append(ctx.logits())
        return found

    def fresh(self) -> list[Row]:
        """What a new context says that was filled."""
        return self.says(self.stage({}).ctx)

    def points(self, name: str) -> list[tuple[str, int, int]]:
        """One operation, its allocations counted: each is to fail alone, and with all after it."""
        operation = OPERATIONS[name]
        stage = self.stage()
        made = stage.made
        FAULTS.faults_arm(0, 0)
        try:
            value = operation(stage)
        except (UnsupportedOperation, SequenceIdError, InvalidBatch, KeyError):
            FAULTS.faults_disarm()
            return []  # not on this memory
        FAULTS.faults_disarm()
        n = FAULTS.faults_counted()
        self.tried[name] = n
        before, after = self.fresh(), self.says(stage.ctx)
        stage.ctx.close()
        self.kept[name] = (made, value, before, after)
        points = range(1, n + 1)
        if self.n_points is not None and n > self.n_points:
            points = sorted({1, *np.linspace(1, n, self.n_points).astype(int).tolist()})
        return [(name, point, more) for point in points for more in (0, 1)]

    def run(self, names: list[str], seconds: float, seed: int) -> None:
        """All operations in turns, the allocations of each in any order; until the time is over."""
        until = time.monotonic() + seconds
        rng = Random(f"{self.info.name} {seed}")
        orders = [rng.sample(points, len(points)) for points in map(self.points, names)]
        turns = [one for turn in zip_longest(*orders) for one in turn if one is not None]
        self.counts["points"] = len(turns)
        for name, point, more in turns:
            if time.monotonic() > until:
                break
            where = f"{self.info.name} {name} {point} of {self.tried[name]}, more={more}"
            self.journal.write_text(where)
            self.once(name, point, more, *self.kept[name])

    def once(
        self,
        name: str,
        point: int,
        more: int,
        made: dict[str, Any],
        value: Any,
        before: list[Row],
        after: list[Row],
    ) -> None:
        """One operation with one allocation that fails (or all from it on)."""
        stage = self.stage(made)
        ctx = stage.ctx
        raised: BaseException | None = None
        got = None
        FAULTS.faults_arm(point, more)
        try:
            got = OPERATIONS[name](stage)
        except (MemoryError, KvCacheError, OSError) as error:
            raised = error
        finally:
            FAULTS.faults_disarm()
        self.counts["runs"] += 1
        self.counts["raised"] += raised is not None
        where = f"{name} {point} more={more}: {raised!r}"
        if raised is None:
            assert got == value, where
        try:
            says = self.says(ctx)
        except KvCacheError as error:
            advice = ("clear", "remove", "encode")
            if not any(word in str(error) for word in advice):
                raise AssertionError(f"{where}; then {error!r}") from error
            self.counts["asked"] += 1
            wrong = raised is None
        else:
            wrong = False
            if same(says, after):
                self.counts["done"] += 1
            else:
                assert raised is not None, where
                whole = not (self.info.has_encoder and name == "encode")  # that one clears first
                assert not whole or same(says, before) or self.partly(name, says, value), (
                    f"{where}: neither"
                )
                self.counts["unchanged"] += 1
        assert not wrong, f"{where}: removal is asked for after a success"
        ctx.clear_kv_cache()
        fill(ctx, self.info)
        assert same(self.says(ctx), before), f"{where}: wrong after it was cleared"
        ctx.close()

    def partly(self, name: str, says: list[Row], value: Any) -> bool:
        """Whether the context holds the first of the tokens that the operation decodes."""
        decoded = {"append": NEXT.tolist(), "partial": [9]}
        if name == "generate":
            decoded[name] = [7, 8, *json.loads(value)]
        n = int(says[0][0]) + 1 - len(FIRST)
        if not 0 < n <= len(decoded.get(name, ())):
            return False
        stage = self.stage({})
        stage.ctx.decode(decoded[name][:n], seq_id=0)
        return same(self.says(stage.ctx), says)


def same(a: list[Row], b: list[Row]) -> bool:
    """Whether both contexts hold the same."""
    return len(a) == len(b) and all(np.abs(x - y).max() < RIGHT for x, y in zip(a, b, strict=True))


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--points", type=int)
    parser.add_argument("--only", default=",".join(OPERATIONS))
    parser.add_argument("--hidden", action="store_true", help="as if the cells lay on a device")
    parser.add_argument("--streams", action="store_true", help="each sequence has its own cells")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    lib.hide_host(asked.hidden)
    driver = Driver(asked.name, asked.folder, asked.journal, asked.points)
    driver.streams = asked.streams
    driver.run(asked.only.split(","), asked.seconds, asked.seed)
    print(json.dumps({**driver.counts, "tried": driver.tried}))


if __name__ == "__main__":
    main()
