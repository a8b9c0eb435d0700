"""The methods of `LlamaContext` for llama.cpp's own state files."""

from __future__ import annotations

from typing import SupportsIndex

from pykvcache._arguments import TokenInput, as_path
from pykvcache.errors import (
    ArgumentError,
    StateFormatError,
    StateLayoutMismatch,
    StateModelMismatch,
)
from pykvcache.state.llama_files import LlamaStateFile
from pykvcache.state.methods import StateMethods
from pykvcache.state.naming import naming
from pykvcache.state.saved import Path

__all__ = ["LlamaFileMethods"]


class LlamaFileMethods(StateMethods):
    """Exchange files with llama.cpp and llama-server; not made by itself."""

    def save_llama_file(
        self,
        path: Path,
        seq_id: SupportsIndex | None = None,
        tokens: TokenInput | None = None,
        *,
        sync: bool = True,
    ) -> int:
        """Save a sequence, or the whole context, as llama.cpp's own functions do.

        The file that ``llama_state_seq_save_file`` would write, byte for byte, or with ``None``
        that of ``llama_state_save_file``; llama-server restores the first as a slot. Nothing in
        it proves that it is undamaged or tells the model: `save_sequence` does that.

        Parameters
        ----------
        path, sync
            As for `SequenceState.save`.
        seq_id
            Sequence id; ``None`` for the whole context.
        tokens
            The token ids, one per position that the sequence holds; of a context, any. ``None``
            writes none, and llama-server takes such a slot for empty.

        Returns
        -------
        int
            Size of the file in bytes.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        ValueError, TypeError
            The tokens are not as many as the positions, or no tokens.
        UnsupportedOperation
            As for `get_state`.
        StateFileError
            The system refused; an older file of that name is as it was.
        """
        self._check_open()
        name = as_path(path, order="save_llama_file(path, seq_id)")
        state, firsts = self._native.take_state(seq_id)
        file = LlamaStateFile(state, () if tokens is None else tokens)
        if seq_id is not None and tokens is not None:
            part = self._split(state, whole=False)[0][0]
            held = len(part)
            if part.layout.part == "recurrent" and held:
                held = int(part.positions[0]) - firsts[0][1] + 1
            if len(file.tokens) != held:
                raise ArgumentError(
                    f"{len(file.tokens)} tokens given: the sequence holds {held}",
                    "tokens",
                    len(file.tokens),
                    held,
                )
        return file.save(name, sync=sync)

    def load_llama_file(
        self, path: Path, seq_id: SupportsIndex | None = None, *, mapped: bool = True
    ) -> LlamaStateFile:
        """Restore a sequence, or the whole context, from one of llama.cpp's own files.

        Files of ``llama_state_seq_save_file`` and of llama-server's slots go into a sequence,
        those of ``llama_state_save_file`` into the whole context. Everything that the file says
        is checked as in `set_state` before anything is changed. What it does not say, nobody can
        check: it has to be this model's, computed under the same settings, and undamaged.

        Parameters
        ----------
        path, mapped
            As for `SequenceState.load`.
        seq_id
            Sequence id, which need not be that of the source; ``None`` for the whole context.

        Returns
        -------
        LlamaStateFile
            What was loaded, with its ``tokens``: as many as its writer gave, which need not be
            as many as the sequence holds.

        Raises
        ------
        SequenceIdError
            ``seq_id`` is not in ``[0, n_seq_max)``.
        StateFileError, StateFormatError, StateVersionError, StateTruncated, StateDamaged
            As for `LlamaStateFile.load`; or the state in the file is not one whole state.
        StateFormatError
            It is the file of a context, and a sequence was asked for, or the reverse.
        StateModelMismatch
            A token is not in the vocabulary of this model.
        StateLayoutMismatch
            It is the state of another memory; or an old file (version 2) of quantised keys, which
            newer versions of llama.cpp store rotated.
        StateTrailingBytes, NoKvCacheSlot, PositionError, UnsupportedOperation
            As for `set_state`.
        """
        self._check_open()
        name = as_path(path, order="load_llama_file(path, seq_id)")
        file = LlamaStateFile.load(name, mapped=mapped)
        with naming(name):
            self._put(file, seq_id)
        return file

    def _put(self, file: LlamaStateFile, seq_id: SupportsIndex | None) -> None:
        if (file.kind == "context") != (seq_id is None):
            hint = "pass no seq_id" if file.kind == "context" else "pass its new seq_id"
            raise StateFormatError(
                f"the file holds a {file.kind}: {hint}", what="kind", value=file.kind
            )
        foreign = file.tokens[file.tokens >= max(self._model.n_vocab, 1)]
        if foreign.size or (file.tokens < (-1 if file.n_media else 0)).any():
            worst = foreign[0] if foreign.size else file.tokens.min()
            raise StateModelMismatch(
                f"the file has token {worst}: this model's vocabulary has {self._model.n_vocab}",
                what="tokens",
                value=int(worst),
                limit=self._model.n_vocab - 1,
            )
        if file.version == 2 and any(rows.rotation for part in self._layouts for rows in part.rows):
            raise StateLayoutMismatch(
                "the file has version 2, which cannot say whether quantised keys and values are "
                "rotated as this context's are",
                what="version",
                value=2,
            )
        self._native.set_state(seq_id, file._pieces, None)
