"""The models of a server: loaded when a request names them, unloaded when idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pykvcache.errors import ContextCreateError, ModelLoadError
from pykvcache.llm import LLM
from pykvcache.serve.engine import Defaults, Engine
from pykvcache.serve.errors import ApiError

__all__ = ["Models", "find_models"]


def find_models(paths: Sequence[str], alias: str | None = None) -> dict[str, str]:
    """Return the paths of GGUF files by model name: the file name without ``.gguf``.

    Parameters
    ----------
    paths
        Files, and folders; all GGUF files of a folder are served.
    alias
        Name of the model, if there is one file only.

    Raises
    ------
    FileNotFoundError
        A path does not exist, or a folder holds no GGUF.
    ValueError
        Two files have the same name, an alias is given for several files, or it has a comma.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(os.path.expanduser(given))
        found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if not found or not all(one.is_file() for one in found):
            raise FileNotFoundError(f"no GGUF file at {path}")
        files += found
    names = [file.name.removesuffix(".gguf") for file in files]
    if alias is not None:
        if len(files) != 1:
            raise ValueError(f"--alias names a single model, not {len(files)}")
        if "," in alias:
            raise ValueError(f"--alias {alias}: a model has one name here")
        names = [alias]
    if len(set(names)) != len(names):
        raise ValueError("two models have the same file name: rename one, or run two servers")
    return dict(zip(names, map(os.fspath, files), strict=True))


class Models:
    """Loads models by name, and unloads unused ones.

    A model that is loaded again starts warm: its blocks are in the tiers.

    Parameters
    ----------
    files
        Paths by name; the first is the default.
    options
        Arguments of `LLM`.
    max_models
        Models that are loaded at the same time; the least recently used one is unloaded first.
    idle
        Seconds after which an unused model is unloaded; None: never.
    max_waiting, timeout, defaults
        Arguments of `Engine`.
    """

    def __init__(
        self,
        files: dict[str, str],
        options: dict[str, Any],
        *,
        max_models: int = 1,
        idle: float | None = None,
        max_waiting: int = 64,
        timeout: float | None = None,
        defaults: Defaults | None = None,
    ) -> None:
        self.files = files
        self._options = options
        self._max_models = max_models
        self._idle = idle
        self._engine_options = max_waiting, timeout, defaults
        self._engines: dict[str, Engine] = {}
        self._changing = asyncio.Lock()
        self.started = int(time.time())

    @property
    def loaded(self) -> dict[str, Engine]:
        """The engines of loaded models, by name."""
        return dict(self._engines)

    def resolve(self, name: str | None) -> str:
        """Return the name of a model that is served.

        A server with one model accepts any name: clients often send the name of a hosted model.

        Raises
        ------
        ApiError
            404: several models are served, and none has this name.
        """
        if name in self.files:
            return str(name)
        if name is None or len(self.files) == 1:
            return next(iter(self.files))
        raise ApiError(
            404,
            f"the model {name!r} does not exist: this server has {', '.join(self.files)}",
            param="model",
            code="model_not_found",
        )

    @contextlib.asynccontextmanager
    async def engine(self, name: str | None) -> AsyncIterator[Engine]:
        """Yield the engine of a model, loaded if necessary; it stays loaded in the block."""
        name = self.resolve(name)
        engine = self._engines.get(name)
        if engine is None:
            async with self._changing:
                engine = self._engines.get(name) or await self._load(name)
        with engine.using():
            yield engine

    def preload(self) -> None:
        """Load the default model, so that a wrong file or adapter is an error at the start."""
        name = next(iter(self.files))
        self._add(name, LLM(self.files[name], **self._options))

    def _add(self, name: str, llm: LLM) -> Engine:
        engine = self._engines[name] = Engine(name, llm, *self._engine_options)
        return engine

    async def _load(self, name: str) -> Engine:
        while len(self._engines) >= self._max_models:
            if not await self._unload_oldest():
                raise ApiError(503, "all loaded models are busy", retry_after=5)
        while True:
            try:
                llm = await asyncio.to_thread(LLM, self.files[name], **self._options)
                break
            except (ContextCreateError, MemoryError, ModelLoadError):
                if not await self._unload_oldest():
                    raise
        return self._add(name, llm)

    async def _unload_oldest(self) -> bool:
        """Unload the least recently used model; return False if all are in use."""
        unused = [name for name, engine in self._engines.items() if not engine.n_active]
        if unused:
            await self._unload(min(unused, key=lambda name: self._engines[name].last_used))
        return bool(unused)

    async def _unload(self, name: str) -> None:
        await asyncio.to_thread(self._engines.pop(name).close)

    async def watch_idle(self) -> None:
        """Unload models that are unused for `idle` seconds; runs until it is cancelled."""
        while self._idle is not None:
            await asyncio.sleep(min(self._idle / 4, 5.0))
            async with self._changing:
                for name, engine in list(self._engines.items()):
                    if not engine.n_active and time.monotonic() - engine.last_used > self._idle:
                        await self._unload(name)

    async def close(self) -> None:
        """Unload all models; blocks that are queued for the tiers are written."""
        async with self._changing:
            for name in list(self._engines):
                await self._unload(name)
