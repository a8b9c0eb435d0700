"""ObjectStore: blocks as objects in S3, GCS, Azure or a folder, by URL."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from pykvcache._integers import as_int
from pykvcache.errors import StoreError
from pykvcache.prefix.stores._arguments import (
    KEY_SIZE,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    check_text,
    writable,
)
from pykvcache.prefix.stores._breaker import Breaker
from pykvcache.prefix.stores.base import BlockStore, StoreEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObjectStore"]

_T = TypeVar("_T")
_R = TypeVar("_R")


class ObjectStore(BlockStore):
    """Keep blocks as objects in a bucket. Needs the extra ``obstore``.

    A request is made for each block, several at once; nothing is ever listed by `contains`,
    `get_into`, `put` and `touch`. What is there is never replaced: objects are created under
    the condition that there is none. `touch` does nothing, so `trim` and a lifecycle rule of
    the bucket go by when a block was written. There are no leases.

    In a forked child everything is a miss: make the store anew there.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder``, ``memory:///`` and what
        else obstore knows. Credentials come from the environment, or from ``options``.
    timeout : float
        How long one request may take, in seconds; after as long a run that is read ends.
    n_parallel : int
        How many requests are made at once.
    **options
        Passed on to ``obstore.store.from_url``, such as ``region=`` or ``endpoint=``.

    Raises
    ------
    StoreError
        obstore cannot use the URL or the options.
    ImportError
        obstore is not installed.
    """

    def __init__(
        self, url: str, *, timeout: float = 5.0, n_parallel: int = 8, **options: Any
    ) -> None:
        self._timeout = timeout = check_seconds(timeout, "timeout")
        n_parallel = as_int(n_parallel, "n_parallel", 1, 256, StoreError)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            raise ImportError(
                f"ObjectStore needs obstore: pip install 'pykvcache[obstore]' ({error})"
            ) from error
        self._obstore: Any = obstore
        seconds = datetime.timedelta(seconds=timeout)
        if not check_text(url, "url").startswith(("file:", "memory:")):
            connect = min(timeout, 2.0)
            client = {"timeout": _duration(timeout), "connect_timeout": _duration(connect)}
            options["client_options"] = client | (options.get("client_options") or {})
            # One more try for what fails at once, within the same time.
            options.setdefault("retry_config", {"max_retries": 1, "retry_timeout": seconds})
        elif url.startswith("file:"):
            options.setdefault("mkdir", True)
        try:
            self._store = from_url(url, **options)
        except (obstore.exceptions.BaseError, ValueError, TypeError, OSError) as error:
            scheme = url.partition("://")[0]
            raise StoreError(f"obstore cannot use the URL: {error}", value=scheme) from error
        self._breaker = Breaker()
        self._n_parallel = n_parallel
        self._closed = False
        self._pid = os.getpid()  # the threads of obstore do not exist in a forked child

    def __repr__(self) -> str:
        return f"ObjectStore({self._store!r})"

    @staticmethod
    def _path(key: bytes) -> str:
        # S3 spreads its load over what names begin with.
        name = key.hex()
        return f"{name[:2]}/{name}"

    # The five methods -------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are there; see `BlockStore.contains`."""
        return sum(1 for _ in self._leading(self._has, check_keys(keys)))

    def _has(self, key: bytes) -> bool | None:
        return self._ask(lambda: bool(self._obstore.head(self._store, self._path(key))))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is there, several at once; see `BlockStore.present`."""
        keys = check_keys(keys)
        there: list[bool] = []
        end = time.monotonic() + self._timeout
        for wave in _waves(keys, self._n_parallel):
            if time.monotonic() > end:
                self.counters.add(timed_out=1)
                break
            there += map(bool, self._map(self._has, wave))
        return there + [False] * (len(keys) - len(there))

    @property
    def n_probes(self) -> int:
        """As many as requests run in parallel."""
        return self._n_parallel

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, several at once; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        sizes = list(self._leading(self._read, pairs))
        done = len(sizes)
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=sum(sizes) - done)
        return done

    def _read(self, pair: tuple[bytes, memoryview]) -> int | None:
        """Return one more than the size of the block that was read."""
        key, view = pair

        def read() -> int | None:
            found = self._obstore.get(self._store, self._path(key))
            if found.meta["size"] > len(view):
                self.counters.add(too_large=1)
                return None
            data = memoryview(found.bytes())
            view[: len(data)] = data
            return len(data) + 1

        return self._ask(read)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Create objects that are not there yet, several at once; see `BlockStore.put`."""
        stored = 0
        for wave in _waves(check_items(items), self._n_parallel):
            results = self._map(self._write, wave)
            stored += sum(1 for result in results if result)
            if not results or None in results:
                break
        return stored

    def _write(self, item: tuple[bytes, memoryview]) -> bool | None:
        key, view = item

        def write() -> bool:
            try:
                self._obstore.put(
                    self._store, self._path(key), view, mode="create", use_multipart=False
                )
            except self._obstore.exceptions.AlreadyExistsError:
                self.counters.add(known=1)
                return False
            except (self._obstore.exceptions.NotFoundError, FileNotFoundError) as error:
                raise OSError("there is no such bucket") from error
            self.counters.add(written=1, bytes_written=len(view))
            return True

        return self._ask(write)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: an object's time changes only when it is written anew."""
        check_keys(keys)

    # For tools: these list the bucket ----------------------------------------------------

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, oldest first; lists the whole bucket, so it is a tool's work."""
        check_max_bytes(max_bytes)
        found = sorted(self.entries(), key=lambda entry: entry.used)
        total = sum(entry.size for entry in found)
        removed = []
        for entry in found:
            if total <= max_bytes:
                break
            if self.discard([entry.key]):
                removed.append(entry.key)
                total -= entry.size
        return removed

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""
        removed = 0
        for key in check_keys(keys):
            if not self._closed and self._has(key):
                removed += self._delete(key)
        self.counters.add(removed=removed)
        return removed

    def _delete(self, key: bytes) -> bool:
        def delete() -> bool:
            self._obstore.delete(self._store, self._path(key))
            return True

        return bool(self._ask(delete))

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block; lists the bucket."""
        if self._closed:
            return
        pages = iter(self._obstore.list(self._store))
        while page := self._ask(lambda: next(pages, None)):
            for entry in page:
                with contextlib.suppress(ValueError):
                    key = bytes.fromhex(entry["path"].rpartition("/")[2])
                    if len(key) == KEY_SIZE:
                        yield StoreEntry(key, entry["size"], entry["last_modified"].timestamp())

    # Requests ---------------------------------------------------------------------------

    def _leading(self, work: Callable[[_T], _R | None], things: list[_T]) -> Iterator[_R]:
        """Yield the results up to the first that is nothing, made in parallel, wave by wave."""
        end = time.monotonic() + self._timeout
        for wave in _waves(things, self._n_parallel):
            if time.monotonic() > end:
                self.counters.add(timed_out=1)
                return
            results = self._map(work, wave)
            for result in results:
                if not result:
                    return
                yield result
            if len(results) < len(wave):
                return

    def _map(self, work: Callable[[_T], _R], wave: list[_T]) -> list[_R]:
        """Work on one wave in parallel; nothing once the store is closed."""
        if self._closed or os.getpid() != self._pid:
            return []
        if len(wave) == 1:
            return [work(wave[0])]
        with ThreadPoolExecutor(len(wave), "pykvcache-objects") as threads:
            return list(threads.map(work, wave))

    def _ask(self, work: Callable[[], _R]) -> _R | None:
        """Make a request; whatever goes wrong is counted and ends here, as None."""
        errors = self._obstore.exceptions
        if self._closed or os.getpid() != self._pid or not self._breaker.allow():
            self.counters.add(skipped=1)
            return None
        try:
            result = work()
        except (errors.NotFoundError, FileNotFoundError):
            self._breaker.succeeded()
            return None
        except (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            PermissionError,
        ) as error:
            self.counters.add(denied=1, error=error)
        except (errors.BaseError, OSError, ValueError, RuntimeError) as error:
            text = str(error).lower()
            if "no space" in text or "storage full" in text:
                self.counters.add(full=1, error=error)
                return None
            late = "timed out" in text or "timedout" in text
            self.counters.add(**{"timed_out" if late else "failed": 1}, error=error)
        else:
            self._breaker.succeeded()
            return result
        self._breaker.failed()
        return None

    def close(self) -> None:
        """Let later calls be misses; the requests that run end as ever."""
        self._closed = True


def _duration(seconds: float) -> str:
    """Return a time as every version of obstore reads it."""
    return f"{max(1, round(seconds * 1000))}ms"


def _waves(things: Sequence[_T], n: int) -> Iterator[list[_T]]:
    """Split a sequence into lists of ``n``."""
    iterator = iter(things)
    return iter(lambda: list(itertools.islice(iterator, n)), [])
