"""A header and a check around each block, so that damaged and foreign ones are rejected.

::

    header, 128 bytes                       content           check, 16 bytes
    magic version kind length               plain, or         XXH3-128 or SHA-256 of all before,
    key model layout nonce zeros            AES-256-GCM       or the tag of AES-256-GCM

Little-endian. The check covers the header and the content, so it detects any flipped bit, and a
block under another key. Without xxhash, SHA-256 truncated to 16 bytes replaces XXH3, which is
several times slower.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from pykvcache.errors import StoreError, how_to_install
from pykvcache.prefix.stores.base import (
    BlockStore,
    StoreEntry,
    check_items,
    check_keys,
    flat,
    writable,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Envelope", "Rejection", "SealedStore", "fresh"]

_MAGIC = b"pkvb"
_VERSION = 1
# magic, version, kind, zero, length of the content, key, model, layout, nonce, zeros
_HEADER = struct.Struct("<4sHBBQ32s16s16s12s36s")
_CHECK = 16
_NO_MODEL = hashlib.sha256(b"").digest()[:16]
_XXH3, _SHA256, _ENCRYPTED, _SIGNED = 1, 2, 3, 4

#: The largest content in bytes: the limit of the AES-GCM implementation.
MAX_CONTENT = (1 << 31) - 1 - _HEADER.size - _CHECK
#: The shortest secret in bytes.
MIN_SECRET = 16


class Rejection(enum.Enum):
    """Why a block is rejected."""

    TRUNCATED = "truncated"
    """Shorter or longer than its header says."""
    DAMAGED = "damaged"
    """Not of this format, or its check fails."""
    FOREIGN = "foreign"
    """Intact, but of another key, model or layout."""
    FORGED = "forged"
    """Not written with the secret."""
    LOCKED = "locked"
    """Written with a secret, and this reader has none."""
    UNVERIFIABLE = "unverifiable"
    """Checked with XXH3, and xxhash is not installed."""


class Envelope:
    """Seals blocks of one model and layout, and opens only those.

    Parameters
    ----------
    model, layout : bytes or str
        Must be equal for writers and readers, usually digests. An empty model is for records that
        are not blocks of a model.
    secret : bytes or str, optional
        At least 16 bytes that only trusted writers and readers know; 32 random ones are best.
        Blocks are then encrypted with AES-256-GCM (with the key as associated data), and stored
        under the HMAC of their keys. Needs ``cryptography``.
    encrypt : bool
        False with a secret: contents are authenticated, but stay readable.
    memory : callable, optional
        Returns a buffer of a given size for a sealed block; new memory by default.

    Attributes
    ----------
    overhead : int
        Bytes that a sealed block is longer than its content.
    check : str
        The check in use: ``"xxh3-128"``, ``"sha256"``, ``"aes-256-gcm"`` or ``"aes-256-gmac"``.

    Raises
    ------
    StoreError
        The secret is shorter than 16 bytes.
    """

    overhead = _HEADER.size + _CHECK

    def __init__(
        self,
        *,
        model: bytes | str,
        layout: bytes | str,
        secret: bytes | str | None = None,
        encrypt: bool = True,
        memory: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.memory = fresh if memory is None else memory
        self._model = hashlib.sha256(_bytes(model, "model")).digest()[:16]
        self._layout = hashlib.sha256(_bytes(layout, "layout")).digest()[:16]
        self._xxh3: Callable[[], Any] | None = None
        with contextlib.suppress(ImportError):
            import xxhash

            self._xxh3 = xxhash.xxh3_128
        self._secret = b""
        if secret is None:
            self._kind = _SHA256 if self._xxh3 is None else _XXH3
        else:
            secret = _bytes(secret, "secret")
            if len(secret) < MIN_SECRET:
                raise StoreError(
                    f"a secret must have at least {MIN_SECRET} bytes, not {len(secret)}",
                    what="secret",
                    value=len(secret),
                    limit=MIN_SECRET,
                )
            try:
                from cryptography.exceptions import InvalidTag
                from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            except ImportError as error:
                text = f"a secret needs cryptography: {how_to_install('crypto')} ({error})"
                raise ImportError(text) from error
            self._aes: Any = AESGCM
            self._invalid: type[Exception] = InvalidTag
            self._secret = secret
            self._kind = _ENCRYPTED if encrypt else _SIGNED
        self.check = {1: "xxh3-128", 2: "sha256", 3: "aes-256-gcm", 4: "aes-256-gmac"}[self._kind]

    def __repr__(self) -> str:
        return f"Envelope(check={self.check!r})"

    def name(self, key: bytes) -> bytes:
        """Return the key under which a block is stored: with a secret, the HMAC of its key.

        Otherwise anyone who can list a store could find out which prompts are cached.
        """
        check_keys([key])
        if not self._secret:
            return key
        return hmac.digest(self._secret, b"pykvcache.name.1" + key, "sha256")

    def seal(self, key: bytes, content: Buffer) -> memoryview:
        """Return a sealed block, given its key (not its `name`) and a content below 2 GiB."""
        view = flat(content)
        if len(view) > MAX_CONTENT:
            raise StoreError(
                f"a block must have at most {MAX_CONTENT} bytes, not {len(view)}",
                value=len(view),
                limit=MAX_CONTENT,
            )
        name = self.name(key)
        nonce = os.urandom(12) if self._secret else bytes(12)
        header = _HEADER.pack(
            *(_MAGIC, _VERSION, self._kind, 0, len(view)),
            *(name, self._model, self._layout, nonce, bytes(36)),
        )
        sealed = self.memory(self.overhead + len(view))
        sealed[: _HEADER.size] = header
        end = _HEADER.size + len(view)
        if self._kind == _ENCRYPTED:
            sealed[_HEADER.size :] = self._cipher(name, _ENCRYPTED).encrypt(nonce, view, header)
            return sealed
        sealed[_HEADER.size : end] = view
        if self._kind == _SIGNED:
            sealed[end:] = self._cipher(name, _SIGNED).encrypt(nonce, b"", sealed[:end])
        else:
            sealed[end:] = self._checksum(self._kind, sealed[:end])
        return sealed

    def open(self, key: bytes, sealed: Buffer) -> memoryview | Rejection:
        """Return the content of the block of a key, or why it is rejected; never raises.

        Other bytes may follow the sealed block. The content is a view of ``sealed``, or of new
        memory if it was encrypted.
        """
        return self.open_named(self.name(key), sealed)

    def open_named(self, name: bytes, sealed: Buffer) -> memoryview | Rejection:
        """Do as `open`, given the name under which the block is stored."""
        view = flat(sealed)
        if len(view) < self.overhead:
            return Rejection.TRUNCATED
        fields = _HEADER.unpack_from(view)
        magic, version, kind, zero, length, of_key, model, layout, nonce, zeros = fields
        if (magic, version, zero, zeros) != (_MAGIC, _VERSION, 0, bytes(36)):
            return Rejection.DAMAGED
        end = _HEADER.size + length
        if end + _CHECK > len(view):
            return Rejection.TRUNCATED
        header, check = view[: _HEADER.size], view[end : end + _CHECK]
        content: memoryview = view[_HEADER.size : end]
        if not self._secret:
            if kind in (_ENCRYPTED, _SIGNED):
                return Rejection.LOCKED
            if kind == _XXH3 and self._xxh3 is None:
                return Rejection.UNVERIFIABLE
            if kind not in (_XXH3, _SHA256) or self._checksum(kind, view[:end]) != check:
                return Rejection.DAMAGED
        if of_key != name:
            return Rejection.FOREIGN
        if self._secret:
            if kind not in (_ENCRYPTED, _SIGNED):  # anyone can compute a plain checksum
                return Rejection.FORGED
            try:
                cipher = self._cipher(name, kind)
                if kind == _ENCRYPTED:
                    sealed_content = view[_HEADER.size : end + _CHECK]
                    content = memoryview(cipher.decrypt(nonce, sealed_content, header))
                else:
                    cipher.decrypt(nonce, check, view[:end])
            except (self._invalid, ValueError, OverflowError):
                return Rejection.FORGED
        return content if (model, layout) == (self._model, self._layout) else Rejection.FOREIGN

    def difference(self, sealed: Buffer) -> str | None:
        """Return how the writer of a block differs from this envelope, as a text; or ``""``.

        None for a record that is not a block of a model.
        """
        view = flat(sealed)
        if len(view) < _HEADER.size:
            return ""
        magic, _, kind, _, _, _, model, layout, _, _ = _HEADER.unpack_from(view)
        if magic != _MAGIC:
            return ""
        if model == _NO_MODEL:
            return None
        if (kind in (_ENCRYPTED, _SIGNED)) != bool(self._secret):
            return "written without the secret" if self._secret else "written with a secret"
        if model != self._model:
            return "of another model"
        # The layout depends on the model, too.
        is_other = layout != self._layout
        return "of another layout: types of K and V, or flash attention" if is_other else ""

    def _cipher(self, name: bytes, kind: int) -> Any:
        """Return AES-GCM with a key of this block and kind, which is used for few nonces."""
        label = b"pykvcache.block.1" + bytes([kind])
        return self._aes(hmac.digest(self._secret, label + name, "sha256"))

    def _checksum(self, kind: int, data: memoryview) -> bytes:
        state = self._xxh3() if kind == _XXH3 and self._xxh3 is not None else hashlib.sha256()
        state.update(data)
        digest: bytes = state.digest()
        return digest[:_CHECK]


def fresh(size: int) -> memoryview:
    """Return uninitialized memory; clearing a bytearray would take longer than its use."""
    return np.empty(size, np.uint8).data


def _bytes(value: bytes | str, what: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            # Without the value, which may be a secret.
            raise StoreError(f"{what} is not Unicode text", what, None, error.start) from None
    if not isinstance(value, bytes):
        raise TypeError(f"{what} is bytes or str, not {type(value).__name__}")
    return value


# Readers with the right extras or secret can read them, so they are not removed.
_READABLE_BY_OTHERS = {Rejection.LOCKED, Rejection.UNVERIFIABLE}


class SealedStore(BlockStore):
    """Seals blocks on their way into a store, and checks them on their way out.

    A block that is damaged, truncated, forged or of another model ends the run. It is counted and
    removed from the store, so that it can be written again.

    ``rejections`` counts rejected blocks by reason.
    """

    def __init__(self, store: BlockStore, envelope: Envelope) -> None:
        self.store = store
        self.envelope = envelope
        self.counters = store.counters
        self.medium, self.n_probes = store.medium, store.n_probes
        self.rejections: Counter[Rejection] = Counter()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored, without checking the blocks."""
        return self.store.contains(self._names(keys))

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is stored, without checking the block."""
        return self.store.present(self._names(keys))

    def get(
        self, keys: Sequence[bytes], sizes: Sequence[int], *, exact: bool = False
    ) -> list[memoryview]:
        """Return the contents of the leading run of intact blocks, without a second copy.

        ``sizes`` are upper bounds in bytes. If they are exact, a longer block is damaged.
        """
        names = self._names(keys)
        # Reused memory may still hold this very block, which would complete a truncated one.
        if exact:
            buffers = [self.envelope.memory(size + self.envelope.overhead) for size in sizes]
            for buffer in buffers:
                buffer[:16] = buffer[-16:] = bytes(16)
        else:  # it may end anywhere
            buffers = [memoryview(bytearray(size + self.envelope.overhead)) for size in sizes]
        too_large = self.counters.too_large
        n_read = self.store.get_into(names, buffers)
        next_one = names[n_read : n_read + 1]
        # All threads share the counter: a missing block was not too large.
        if exact and self.counters.too_large > too_large and True in self.store.present(next_one):
            self._reject(next_one[0], Rejection.TRUNCATED)
        found: list[memoryview] = []
        for key, name, buffer in zip(keys, names, buffers[:n_read], strict=False):
            content = self.envelope.open(key, buffer)
            if isinstance(content, Rejection):
                self._reject(name, content)
                break
            found.append(content)
        return found

    def differences(self, n: int) -> set[str]:
        """Return how the writers of up to n blocks differ from this reader, as texts."""
        found = set[str]()
        left = n
        for entry in islice(self.store.entries(), 100 * n):
            buffer = bytearray(entry.size)
            if self.store.get_into([entry.key], [buffer]):
                told = self.envelope.difference(buffer)
                if told is not None:
                    found.add(told)
                    left -= 1
            if not left:
                break
        return found

    def _reject(self, name: bytes, why: Rejection) -> None:
        self.rejections[why] += 1
        self.counters.add(rejected=1)
        if why not in _READABLE_BY_OTHERS:
            self.store.discard([name])

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> int:
        """Copy the contents of the leading run of intact blocks into the buffers."""
        check_keys(keys, buffers)
        views = [writable(buffer) for buffer in buffers]
        found = self.get(keys, [len(view) for view in views])
        for view, content in zip(views, found, strict=False):
            view[: len(content)] = content
        return len(found)

    def put(self, items: Iterable[tuple[bytes, Buffer]]) -> int:
        """Seal and store missing blocks."""
        found = check_items(items)
        return self.store.put(
            (self.envelope.name(key), self.envelope.seal(key, data)) for key, data in found
        )

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now."""
        self.store.touch(self._names(keys))

    def trim(self, max_bytes: int) -> list[bytes]:
        """Remove blocks, least recently used first; the keys are the store's own."""
        return self.store.trim(max_bytes)

    def discard(self, keys: Sequence[bytes]) -> int:
        """Remove blocks."""
        return self.store.discard(self._names(keys))

    def entries(self) -> Iterator[StoreEntry]:
        """Yield every block; the keys are the store's own."""
        return self.store.entries()

    def close(self) -> None:
        """Close the underlying store."""
        self.store.close()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self.envelope.name(key) for key in check_keys(keys)]
