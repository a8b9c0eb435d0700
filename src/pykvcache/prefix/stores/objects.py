"""ObjectStore: blocks as objects in S3, GCS, Azure or a folder, by URL."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pykvcache._arguments import as_int, as_text
from pykvcache.errors import StoreError, how_to_install
from pykvcache.prefix.stores.base import (
    KEY_SIZE,
    StoreEntry,
    check_items,
    check_keys,
    check_max_bytes,
    check_seconds,
    writable,
)
from pykvcache.prefix.stores.remote import RemoteStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ObjectStore"]

# The first process to use obstore: requests of its forked children would never end.
_processes: dict[str, int] = {}

_T = TypeVar("_T")
_R = TypeVar("_R")

# Folder of the recorded uses, seconds between records, and format of a use: key, Unix time in ns.
_USES, _RECORD_SECONDS, _USE = "uses", 60.0, struct.Struct("<32sq")
# Errors of S3, GCS and Azure if the bucket is missing, rather than the object.
_NO_BUCKET = ("NoSuchBucket", "bucket does not exist", "ContainerNotFound")


class ObjectStore(RemoteStore):
    """Keeps blocks as objects in a bucket. Needs the extra ``obstore``.

    Each block takes one request, and several run at once; only `trim` and `entries` list the
    bucket. Objects are created on the condition that they do not exist, so none is ever replaced.
    Uses are recorded in separate objects, at most one a minute, which only `trim` and `entries`
    read; a lifecycle rule of the bucket looks only at the time of writing.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///folder``, ``memory:///`` and other
        addresses that obstore supports. Credentials come from the environment or ``options``.
    timeout : float
        Seconds that one request may take. Reading a run of blocks also stops after this time.
    n_parallel : int
        Number of requests that run at once.
    **options
        Passed to ``obstore.store.from_url``, such as ``region=`` or ``endpoint=``.

    Raises
    ------
    StoreError
        obstore cannot use the URL or the options, the bucket does not exist, or these credentials
        may not read it; or this is a forked child of a process that has used obstore. A server
        that does not answer only causes a warning.
    """

    schemes: ClassVar[frozenset[str]] = frozenset(
        {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https"}
        | {"file", "memory"}
    )

    def __init__(
        self, url: str, *, timeout: float = 5.0, n_parallel: int = 8, **options: Any
    ) -> None:
        self._timeout = timeout = check_seconds(timeout, "timeout")
        self._n_parallel = self.n_probes = as_int(n_parallel, "n_parallel", 1, 256, StoreError)
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            text = f"ObjectStore needs obstore: {how_to_install('obstore')} ({error})"
            raise ImportError(text) from error
        self._obstore: Any = obstore
        if os.getpid() != _processes.setdefault("first", os.getpid()):
            raise StoreError("obstore has threads, and does not work in a forked child", value=url)
        is_local = as_text(url, "url", StoreError).startswith(("file:", "memory:"))
        if not is_local:
            times = {"timeout": timeout, "connect_timeout": min(timeout, 2.0)}
            client = {name: f"{max(1, round(1000 * seconds))}ms" for name, seconds in times.items()}
            options["client_options"] = client | (options.get("client_options") or {})
            # One retry, within the same timeout.
            retry = {"max_retries": 1, "retry_timeout": datetime.timedelta(seconds=timeout)}
            options.setdefault("retry_config", retry)
        elif url.startswith("file:"):
            options.setdefault("mkdir", True)
        try:
            self._store = from_url(url, **options)
        except (obstore.exceptions.BaseError, ValueError, TypeError, OSError) as error:
            scheme = url.partition("://")[0]
            raise StoreError(f"obstore cannot use the URL: {error}", value=scheme) from error
        self._lock = threading.Lock()
        self._uses: dict[bytes, int] = {}  # unrecorded uses: times in nanoseconds
        self._now = 0
        self._record_at = 0.0
        super().__init__(repr(self._store), self._n_parallel)
        if not is_local:
            self._check_server(lambda: obstore.get(self._store, _path(bytes(KEY_SIZE))))

    @classmethod
    def exists(cls, address: str) -> bool:
        """Return whether the folder of a ``file://`` URL exists; see `BlockStore.exists`."""
        from urllib.request import url2pathname  # a slow import

        url = urlsplit(address)
        return url.scheme != "file" or os.path.isdir(url2pathname(url.path))

    def _kind_of(self, error: Exception) -> str:
        errors, text = self._obstore.exceptions, str(error)
        if isinstance(error, (errors.NotFoundError, FileNotFoundError)):
            return "refused" if any(one in text for one in _NO_BUCKET) else "missing"
        denied = (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)
        if isinstance(error, denied):
            return "denied"
        text = text.lower()
        if "no space" in text or "storage full" in text:
            return "full"
        return "timed_out" if "timed out" in text or "timedout" in text else "failed"

    # The five methods -------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored; see `BlockStore.contains`."""
        return sum(1 for _ in self._leading(self._has, check_keys(keys)))

    def _has(self, key: bytes) -> bool | None:
        return self._ask(lambda: bool(self._obstore.head(self._store, _path(key))))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored, several at once; see `BlockStore.present`."""
        keys = check_keys(keys)
        there: list[bool] = []
        for wave in self._waves(keys):
            there += map(bool, self._map(self._has, wave))
        return there + [False] * (len(keys) - len(there))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Read the leading run of blocks, several at once; see `BlockStore.get_into`."""
        pairs = list(zip(check_keys(keys, buffers), map(writable, buffers), strict=True))
        sizes = [size for (size,) in self._leading(self._read, pairs)]
        done = len(sizes)
        self.counters.add(hits=done, misses=done < len(pairs), bytes_read=sum(sizes))
        return done

    def _read(self, pair: tuple[bytes, memoryview]) -> tuple[int] | None:
        """Read a block; return its size in a tuple."""
        key, view = pair

        def read() -> tuple[int] | None:
            found = self._obstore.get(self._store, _path(key))
            if found.meta["size"] > len(view):
                self.counters.add(too_large=1)
                return None
            data = memoryview(found.bytes())
            view[: len(data)] = data
            return (len(data),)

        return self._ask(read)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Create objects that do not exist yet, several at once; see `BlockStore.put`."""
        stored = 0
        found = check_items(items)
        for begin in range(0, len(found), self._n_parallel):
            results = self._map(self._write, found[begin : begin + self._n_parallel])
            stored += sum(1 for result in results if result)
            if not results or None in results:
                break
        return stored

    def _write(self, item: tuple[bytes, memoryview]) -> bool | None:
        """Create an object; return whether it is new, or None after a failure."""
        key, view = item

        def write() -> bool:
            try:
                self._obstore.put(self._store, _path(key), view, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                self.counters.add(known=1)
                return False
            self.counters.add(written=1, bytes_written=len(view))
            return True

        return self._ask(write, is_write=True)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now; uses are recorded within a minute, or by `close`."""
        keys = list(dict.fromkeys(check_keys(keys)))
        with self._lock:
            self._now = max(time.time_ns(), self._now + len(keys))
            self._uses.update((key, self._now - i) for i, key in enumerate(keys))
        if time.monotonic() > self._record_at:
            self._record()

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove the least recently used blocks; lists the whole bucket."""
        check_max_bytes(max_bytes)
        self._record()
        uses, records = self._recorded()
        found = sorted(self._blocks(uses), key=lambda block: block[2])
        total = sum(size for _, size, _ in found)
        removed: list[bytes] = []
        for key, size, _ in found:
            if total <= max_bytes:
                break
            total -= size
            removed.append(key)
        self.discard(removed)
        left = {key for key, _, _ in found}.difference(removed)
        with self._lock:
            self._uses = {key: used for key, used in uses.items() if key in left} | self._uses
        self._record()
        self._map(self._delete, records)
        return removed

    # Optional methods -------------------------------------------------------------------

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks; see `BlockStore.discard`."""

        def remove(key: bytes) -> bool:
            return bool(self._has(key) and self._delete(_path(key)))

        removed = sum(self._map(remove, check_keys(keys)))
        self.counters.add(removed=removed)
        return removed

    def _delete(self, path: str) -> bool | None:
        def delete() -> bool:
            self._obstore.delete(self._store, path)
            return True

        return self._ask(delete, is_write=True)

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block; lists the bucket."""
        uses, _ = self._recorded()
        for key, size, used in self._blocks(uses):
            yield StoreEntry(key, size, used / 1e9)

    def _blocks(self, uses: dict[bytes, int]) -> Iterator[tuple[bytes, int, int]]:
        for entry in self._list():
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(entry["path"].rpartition("/")[2])
                if len(key) == KEY_SIZE:
                    written = int(entry["last_modified"].timestamp() * 1e9)
                    yield key, entry["size"], max(written, uses.get(key, 0))

    def _list(self, folder: str | None = None) -> Iterator[Any]:
        pages = iter(self._obstore.list(self._store, folder))
        while page := self._ask(lambda: next(pages, None)):
            yield from page

    # Uses -------------------------------------------------------------------------------

    def _record(self) -> None:
        """Write the unrecorded uses as one object."""
        with self._lock:
            uses, self._uses = self._uses, {}
            self._record_at = time.monotonic() + _RECORD_SECONDS
        path = f"{_USES}/{time.time_ns()}-{secrets.token_hex(4)}"
        content = b"".join(_USE.pack(key, used) for key, used in uses.items())
        if uses:
            self._ask(lambda: self._obstore.put(self._store, path, content), is_write=True)

    def _recorded(self) -> tuple[dict[bytes, int], list[str]]:
        """Return the last recorded use of each block, and the paths of the records."""
        paths = [entry["path"] for entry in self._list(_USES)]
        uses: dict[bytes, int] = {}

        def read(path: str) -> memoryview | None:
            return self._ask(lambda: memoryview(self._obstore.get(self._store, path).bytes()))

        for record in self._map(read, paths):
            whole = 0 if record is None else len(record) // _USE.size * _USE.size
            for key, used in _USE.iter_unpack((record or b"")[:whole]):
                uses[key] = max(used, uses.get(key, 0))
        return uses, paths

    def _finish(self) -> None:
        self._record()

    # Parallel requests ------------------------------------------------------------------

    def _leading(self, work: Callable[[_T], _R | None], things: list[_T]) -> Iterator[_R]:
        """Yield the results of a function for each thing, up to the first that is false."""
        for wave in self._waves(things):
            results = self._map(work, wave)
            for result in results:
                if not result:
                    return
                yield result
            if len(results) < len(wave):
                return

    def _waves(self, things: list[_T]) -> Iterator[list[_T]]:
        """Yield parts of a list, one per batch of parallel requests, until the timeout."""
        end = time.monotonic() + self._timeout
        for begin in range(0, len(things), self._n_parallel):
            if time.monotonic() > end:
                self.counters.add(timed_out=1)
                return
            yield things[begin : begin + self._n_parallel]


def _path(key: bytes) -> str:
    # S3 spreads its load over prefixes.
    name = key.hex()
    return f"{name[:2]}/{name}"
