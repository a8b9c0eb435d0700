"""Names of blocks: a hash chain over everything that a block's keys and values depend on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

__all__ = [
    "TOKEN_SIZE",
    "NameRoot",
    "NamedPrompt",
    "adapters_digest",
    "block_names",
    "common_tokens",
    "end_key",
    "is_on_path",
    "namespace_of",
    "root_name",
    "space_of",
    "split_space",
    "window_key",
]

#: Bytes of a token: tokens are little-endian 32-bit integers in a row.
TOKEN_SIZE: Final = 4

_FORMAT = b"pykvcache.block.1"


#: Returns the name that the blocks of a namespace begin with.
NameRoot: TypeAlias = Callable[[str], bytes]


def root_name(
    *,
    model: bytes,
    rope: bytes,
    layout: bytes,
    block_size: int,
    namespace: str = "",
    adapters: bytes = b"",
) -> bytes:
    """Return the name that a chain of blocks begins with.

    Blocks share memory only if they share a name, and so a root: another model, rotation of keys,
    layout of memory, block size, namespace or set of adapters has other names for the same tokens.

    Parameters
    ----------
    model, rope, layout
        SHA-256 digests, 32 bytes each: of the model (`LlamaModel.fingerprint`), of the rotation of
        every layer, and of the layout of a block's bytes.
    block_size
        Tokens per block.
    namespace
        Whose blocks they are: any text.
    adapters
        Digest of what else changes keys and values, as adapters and control vectors do; empty
        where nothing does.

    Returns
    -------
    bytes
        ``SHA256("pykvcache.block.1" | model | rope | layout | block_size | len(salt) | salt |
        adapters)``: numbers are little-endian, 4 bytes the block size and 8 the length; the salt
        is the namespace in UTF-8.
    """
    salt = namespace.encode("utf-8", "surrogatepass")
    head = struct.pack("<IQ", block_size, len(salt))
    return hashlib.sha256(_FORMAT + model + rope + layout + head + salt + adapters).digest()


def block_names(parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Return the names of full blocks in a row: SHA-256 of the name before, and the tokens.

    ``parent`` is the name of the block before the first, or of the root.
    """
    view = memoryview(tokens)
    sha256 = hashlib.sha256
    names = []
    for at in range(0, len(view) - block_bytes + 1, block_bytes):
        parent = sha256(parent + view[at : at + block_bytes]).digest()
        names.append(parent)
    return names


class NamedPrompt:
    """The tokens of a prompt, as bytes, and the names of its full blocks."""

    def __init__(self, root: bytes, tokens: bytes, block_size: int, namespace: str = "") -> None:
        self.root, self.tokens = root, tokens
        self.block_size, self.namespace = block_size, namespace
        self.names = block_names(root, tokens, block_size * TOKEN_SIZE)

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_SIZE

    def text(self, begin: int, end: int) -> bytes:
        """Return the tokens of ``[begin, end)``."""
        return self.tokens[begin * TOKEN_SIZE : end * TOKEN_SIZE]

    def end_key(self, n: int) -> bytes:
        """Return the key of what a memory holds after n tokens, at least a block of them."""
        at = n // self.block_size
        return end_key(self.names[at - 1], self.text(at * self.block_size, n))


def window_key(name: bytes) -> bytes:
    """Return the key of the window cells of a block."""
    return hashlib.sha256(b"pykvcache.window.1" + name).digest()


def end_key(name: bytes, tokens: bytes) -> bytes:
    """Return the key of what a memory holds some tokens after the block of that name."""
    return hashlib.sha256(b"pykvcache.end.1" + name + tokens).digest()


def is_on_path(tokens: bytes, other: bytes) -> bool:
    """Return whether tokens go on from others, or others from them."""
    return tokens.startswith(other) or other.startswith(tokens)


def common_tokens(text: bytes, tokens: bytes, at: int = 0) -> int:
    """Return how many leading tokens of a text stand in some tokens from byte ``at`` on."""
    n = min(len(text), len(tokens) - at) // TOKEN_SIZE
    if n <= 0:
        return 0
    one = np.frombuffer(text, "<u4", n)
    other = np.frombuffer(tokens, "<u4", n, at)
    differs = one != other
    first = int(differs.argmax())
    return first if differs[first] else n


# Spaces: a namespace, under the adapters that a context computes with.

_MARK, _SIZE = "\0", 64
_NO_ADAPTERS = "-" * _SIZE


def adapters_digest(names: Sequence[str]) -> bytes:
    """Return the digest of adapters with their scales; empty where there are none."""
    return hashlib.sha256("\n".join(names).encode()).digest() if names else b""


def space_of(namespace: str, adapters: bytes = b"") -> str:
    """Return what keys and values of a namespace under some adapters are kept under.

    Without adapters the namespace itself, unless it looks like a space with some.
    """
    if adapters:
        return f"{_MARK}{adapters.hex()}{namespace}"
    return f"{_MARK}{_NO_ADAPTERS}{namespace}" if namespace.startswith(_MARK) else namespace


def split_space(space: str) -> tuple[str, bytes]:
    """Return the namespace of a space, and the digest of its adapters."""
    if not space.startswith(_MARK):
        return space, b""
    digest, namespace = space[1 : 1 + _SIZE], space[1 + _SIZE :]
    return namespace, b"" if digest == _NO_ADAPTERS else bytes.fromhex(digest)


def namespace_of(space: str) -> str:
    """Return the namespace of a space."""
    return split_space(space)[0]
