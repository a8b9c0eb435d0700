"""llama.cpp's own state files, as ``llama_state_seq_save_file`` and llama-server write them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import ByteArray, TokenInput, as_bool, as_bytes, as_path, as_token_array
from pykvcache._native import lib
from pykvcache.errors import (
    StateDamaged,
    StateFormatError,
    StateTruncated,
    StateVersionError,
)
from pykvcache.state.atomic import write_atomically
from pykvcache.state.container import naming, open_file
from pykvcache.state.layout import IntArray
from pykvcache.state.saved import Path

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LlamaStateFile"]

_KINDS = {0x67677371: "sequence", 0x6767736E: "context"}
_MAGICS = {kind: magic for magic, kind in _KINDS.items()}
# The last version is written: that of the llama.cpp in this build. Versions 2 and 3 of sequence
# files do not differ in the fields read here; llama-server packs tokens in both.
_OF_SEQUENCES, _OF_CONTEXTS = lib.state_file_versions
_VERSIONS: Mapping[str, tuple[int, ...]] = {
    "sequence": (2, 3) if _OF_SEQUENCES == 3 else (_OF_SEQUENCES,),
    "context": (_OF_CONTEXTS,),
}
_START = 12
# An in-memory sequence state starts with 8 bytes that the file omits.
_HEAD = np.frombuffer(lib.sequence_state_head, np.uint8)
_NO_TOKEN = -1


class LlamaStateFile:
    """Content of one of llama.cpp's own state files: a raw state and token ids.

    Built from a raw state, or by `load` from a file of ``llama_state_seq_save_file``,
    ``llama_state_save_file`` or llama-server (``/slots/ID?action=save``). Immutable.

    Such a file has no checksum and does not identify its model; a file of
    `SequenceState.save` has a checksum and identifies its model. The format also changes between
    llama.cpp versions.

    Parameters
    ----------
    state
        From `LlamaContext.get_state`, for a sequence or a whole context; not copied.
    tokens
        Token ids. Without them, llama-server treats a slot as empty.

    Raises
    ------
    StateFormatError
        ``state`` does not start like a raw state.
    TypeError, ValueError
        As for the tokens of a batch.
    """

    def __init__(self, state: Buffer | npt.NDArray[Any], tokens: TokenInput = ()) -> None:
        data = as_bytes(state, "state")
        if data[:4].tobytes() == _HEAD[:4].tobytes():
            kind, payload = "sequence", data[8:]
        elif 4 < len(data) >= 4 + int.from_bytes(data[:4].tobytes(), "little"):
            kind, payload = "context", data
        else:
            raise StateFormatError("not a raw state: pass the bytes of LlamaContext.get_state")
        self._set(kind, _VERSIONS[kind][-1], as_token_array(tokens), 0, payload)

    def _set(
        self, kind: str, version: int, tokens: IntArray, n_media: int, data: ByteArray
    ) -> None:
        self._kind, self._version, self._n_media, self._data = kind, version, n_media, data
        self._tokens: IntArray = tokens.copy()
        self._tokens.flags.writeable = False

    @property
    def kind(self) -> str:
        """``"sequence"`` or ``"context"``."""
        return self._kind

    @property
    def version(self) -> int:
        """Version of the file's format, as in its header."""
        return self._version

    @property
    def tokens(self) -> IntArray:
        """Token ids as written, shape (n,); int32, read-only. -1 marks image or audio tokens."""
        return self._tokens

    @property
    def n_media(self) -> int:
        """Number of images and sounds that llama-server recorded among the tokens."""
        return self._n_media

    @property
    def state(self) -> ByteArray:
        """The raw state, as `LlamaContext.set_state` takes it; uint8, a copy."""
        whole: ByteArray = np.concatenate(self._pieces)
        return whole

    @property
    def _pieces(self) -> list[ByteArray]:
        return [self._data] if self._kind == "context" else [_HEAD, self._data]

    def __repr__(self) -> str:
        return (
            f"<LlamaStateFile: {self._kind}, version {self._version}, "
            f"{len(self._tokens)} tokens, {len(self._data)} bytes>"
        )

    # Files --------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path, *, mapped: bool = True) -> LlamaStateFile:
        """Read a file's header and tokens; `load_llama_file` checks the state when restoring it.

        Parameters
        ----------
        path, mapped
            As for `SequenceState.load`.

        Raises
        ------
        StateFileError
            The file cannot be read; `StateFileNotFound` if it does not exist.
        StateFormatError
            The file is not a state file of llama.cpp.
        StateVersionError
            The file's version is not supported.
        StateTruncated, StateDamaged
            The file ends within its tokens, or the tokens are invalid.
        """
        name, mapped = as_path(path), as_bool(mapped, "mapped")
        with naming(name):
            return cls._parsed(open_file(name, mapped=mapped))

    @classmethod
    def from_bytes(cls, data: Buffer | npt.NDArray[Any]) -> LlamaStateFile:
        """Parse the output of `to_bytes` or a file's content; errors as for `load`."""
        given = as_bytes(data, "data")
        return cls._parsed(given.copy() if given.flags.writeable else given)

    @classmethod
    def _parsed(cls, data: ByteArray) -> LlamaStateFile:
        if not len(data):
            raise StateFormatError("the file is empty")
        words = np.frombuffer(data[: min(len(data), _START) // 4 * 4].tobytes(), "<u4").tolist()
        if not words or words[0] not in _KINDS:
            message = (
                "not a state file of llama.cpp: it does not start with ggsq or ggsn; "
                "load files of save_sequence and save_context with load_sequence and load_context"
            )
            raise StateFormatError(message)
        kind = _KINDS[words[0]]
        if len(words) > 1 and words[1] not in _VERSIONS[kind]:
            known = " and ".join(map(str, _VERSIONS[kind]))
            message = f"the file of a {kind} has version {words[1]}: this build reads {known}"
            raise StateVersionError(message, "version", words[1], _VERSIONS[kind])
        if len(words) < 3:
            message = f"the file ends after {len(data)} bytes, within its header"
            raise StateTruncated(message, "bytes", len(data), _START)
        end = _START + 4 * words[2]
        if end > len(data):
            message = f"the file ends after {len(data)} bytes, within its {words[2]} tokens"
            raise StateTruncated(message, f"bytes of {words[2]} tokens", len(data), end)
        packed = np.frombuffer(data[_START:end].tobytes(), "<i4").astype(np.int32)
        tokens, n_media = _unpacked(packed) if kind == "sequence" else (packed, 0)
        made = cls.__new__(cls)
        made._set(kind, words[1], tokens, n_media, data[end:])
        return made

    def _file(self) -> list[memoryview]:
        head = struct.pack("<III", _MAGICS[self._kind], self._version, len(self._tokens))
        return [
            memoryview(head),
            memoryview(self._tokens.astype("<i4").tobytes()),
            np.ascontiguousarray(self._data).data,
        ]

    def to_bytes(self) -> bytes:
        """Return the file that `save` writes."""
        return b"".join(self._file())

    def save(self, path: Path, *, sync: bool = True) -> int:
        """Write the file of llama.cpp's own function, atomically, and return its size in bytes.

        Images and sounds among the tokens are written only as -1, which llama-server refuses.

        Parameters
        ----------
        path, sync
            As for `SequenceState.save`.

        Raises
        ------
        StateFileError
            As for `SequenceState.save`.
        """
        return write_atomically(as_path(path), self._file(), sync=as_bool(sync, "sync"))


def _unpacked(packed: IntArray) -> tuple[IntArray, int]:
    """Return the tokens that llama-server packed, and the number of media; or plain tokens.

    Format: -1, 1, number of tokens, tokens, number of media, the token index of each; then for
    each medium its size in bytes and its bytes; zero padding to a multiple of 4.
    """
    if not len(packed) or packed[0] != _NO_TOKEN:
        return packed, 0
    data = packed.astype("<i4").tobytes()
    at = 4

    def skipped(n_bytes: int, within: str, what: str | None = None) -> bytes:
        nonlocal at
        if n_bytes > len(data) - at:
            message = f"llama-server's tokens end within {within}"
            raise StateDamaged(message, what or within, len(data))
        at += n_bytes
        return data[at - n_bytes : at]

    def number() -> int:
        return int.from_bytes(skipped(4, "a number", "tokens"), "little")

    version = number()
    if version != 1:
        message = f"llama-server's tokens have version {version}: only 1 is supported"
        raise StateVersionError(message, "version", version, 1)
    tokens = np.frombuffer(skipped(4 * number(), "the tokens"), "<i4").astype(np.int32)
    n_media = number()
    keys = np.frombuffer(skipped(4 * n_media, "the places of media"), "<u4")
    if (keys >= len(tokens)).any() or (tokens[keys.astype(np.int64)] != _NO_TOKEN).any():
        raise StateDamaged("llama-server's tokens place media at a text token", what="media")
    for _ in range(n_media):
        skipped(number(), "a medium")
    if len(data) - at >= 4:
        message = f"llama-server's tokens have {len(data) - at} trailing bytes"
        raise StateDamaged(message, "tokens", len(data), at)
    if not n_media and (tokens == _NO_TOKEN).any():
        raise StateDamaged(
            "llama-server's tokens have a placeholder without its medium", what="media"
        )
    return tokens, n_media
