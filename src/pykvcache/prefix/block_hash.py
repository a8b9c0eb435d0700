"""Block hashes, called names here: a hash chain over all that a block's values depend on."""

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
    "is_on_path",
    "root_name",
    "space_of",
    "split_space",
    "window_key",
]

#: Bytes of a token: token strings are consecutive little-endian 32-bit integers.
TOKEN_SIZE: Final = 4

_FORMAT = b"pykvcache.block.1"


#: Returns the hash of a space's root, from which the chain of its blocks starts.
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
    """Return the hash from which a chain of blocks starts.

    Blocks with equal hashes are interchangeable. So a different model, key rotation, memory layout,
    block size, namespace or set of adapters gives different hashes for the same tokens.

    Parameters
    ----------
    model, rope, layout
        SHA-256 digests, 32 bytes each: of the model (`LlamaModel.fingerprint`), of every layer's
        RoPE settings, and of the layout of a block's bytes.
    block_size
        Tokens per block.
    namespace
        Namespace of the blocks: any text.
    adapters
        Digest of the adapters and control vectors in use; empty if there are none.

    Returns
    -------
    bytes
        ``SHA256("pykvcache.block.1" | model | rope | layout | block_size | len(salt) | salt |
        adapters)``. Numbers are little-endian: the block size takes 4 bytes, the length 8. The salt
        is the namespace in UTF-8.
    """
    salt = namespace.encode("utf-8", "surrogatepass")
    head = struct.pack("<IQ", block_size, len(salt))
    return hashlib.sha256(_FORMAT + model + rope + layout + head + salt + adapters).digest()


def block_names(parent: bytes, tokens: bytes, block_bytes: int) -> list[bytes]:
    """Return the hashes of consecutive full blocks: SHA-256 of the hash before, and the tokens.

    ``parent`` is the hash of the block before the first, or of the root.
    """
    view = memoryview(tokens)
    sha256 = hashlib.sha256
    names = []
    for at in range(0, len(view) - block_bytes + 1, block_bytes):
        parent = sha256(parent + view[at : at + block_bytes]).digest()
        names.append(parent)
    return names


class NamedPrompt:
    """The tokens of a prompt, as bytes, and the hashes of its full blocks (``names``)."""

    def __init__(self, root: bytes, tokens: bytes, block_size: int, space: str = "") -> None:
        self.root, self.tokens = root, tokens
        self.block_size, self.space = block_size, space
        self.names = block_names(root, tokens, block_size * TOKEN_SIZE)

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_SIZE

    def text(self, begin: int, end: int) -> bytes:
        """Return the tokens of ``[begin, end)``."""
        return self.tokens[begin * TOKEN_SIZE : end * TOKEN_SIZE]

    def tail_key(self, n: int) -> bytes:
        """Return the key of the tail record after n tokens; n must be at least the block size."""
        at = n // self.block_size
        text = self.text(at * self.block_size, n)
        return hashlib.sha256(b"pykvcache.end.1" + self.names[at - 1] + text).digest()


def window_key(name: bytes) -> bytes:
    """Return the key of the window cells of a block."""
    return hashlib.sha256(b"pykvcache.window.1" + name).digest()


def is_on_path(tokens: bytes, other: bytes) -> bool:
    """Return whether one of two token strings is a prefix of the other."""
    return tokens.startswith(other) or other.startswith(tokens)


def common_tokens(text: bytes, tokens: bytes, at: int = 0) -> int:
    """Return the length of the common prefix of ``text`` and ``tokens[at:]``, in tokens."""
    n = min(len(text), len(tokens) - at) // TOKEN_SIZE
    if n <= 0:
        return 0
    one = np.frombuffer(text, "<u4", n)
    other = np.frombuffer(tokens, "<u4", n, at)
    differs = one != other
    first = int(differs.argmax())
    return first if differs[first] else n


# A space is a namespace with a set of adapters: the key under which a cache keeps tokens.

_MARK, _SIZE = "\0", 64
_NO_ADAPTERS = "-" * _SIZE


def adapters_digest(names: Sequence[str]) -> bytes:
    """Return the digest of adapters with their scales; empty if there are none."""
    return hashlib.sha256("\n".join(names).encode()).digest() if names else b""


def space_of(namespace: str, adapters: bytes = b"") -> str:
    """Return the space of a namespace: itself without adapters, unless it looks like a space."""
    if adapters:
        return f"{_MARK}{adapters.hex()}{namespace}"
    return f"{_MARK}{_NO_ADAPTERS}{namespace}" if namespace.startswith(_MARK) else namespace


def split_space(space: str) -> tuple[str, bytes]:
    """Return the namespace of a space, and the digest of its adapters."""
    if not space.startswith(_MARK):
        return space, b""
    digest, namespace = space[1 : 1 + _SIZE], space[1 + _SIZE :]
    return namespace, b"" if digest == _NO_ADAPTERS else bytes.fromhex(digest)
