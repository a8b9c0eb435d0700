"""The stores of this package, for the tests that hold for each of them: a new one is one line."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pykvcache.prefix import stores
from pykvcache.prefix.stores import BlockStore
from stores.servers import PATIENT, redis_server

NOWHERE = "redis://127.0.0.1:1"


@dataclasses.dataclass(frozen=True)
class Kind:
    address: str = ""
    make: str = "open_store({address!r}, **{options!r})"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    package: str = "numpy"

    def at(self, folder: Path, server: str = NOWHERE) -> Kind:
        pytest.importorskip(self.package, reason=f"pip install '.[{self.package}]'")
        address = self.address.format(folder=folder, server=server)
        return dataclasses.replace(self, address=address)

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[Kind]:
        if "{server}" not in self.address:
            yield self.at(folder)
            return
        with redis_server(folder) as server:
            yield self.at(folder, server.url)

    @property
    def code(self) -> str:
        return self.make.format(address=self.address, options=self.options)

    def open(self) -> BlockStore:
        store: BlockStore = eval(self.code, dict(vars(stores)))
        return store


STORES: dict[str, Kind] = {
    "memory": Kind(make="MemoryStore()"),
    "sealed": Kind(make="SealedStore(MemoryStore(), Envelope(model='m', layout='l'))"),
    "folder": Kind("{folder}/blocks"),
    "redis": Kind("{server}", options=PATIENT, package="redis"),
    "objects": Kind("file://{folder}/objects", package="obstore"),
}
#: Those that other processes can open.
SHARED = [name for name, kind in STORES.items() if kind.address]
