"""Interface of a contestant: the operations of its binding. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

Answer = dict[str, Any]
Rows = list[tuple[int, int, int]]


class NotThereError(Exception):
    """The binding lacks the operation; the message is shown in the report."""

    def __init__(self, why: str = "it has no such call"):
        super().__init__(why)


class Primitives:
    """Operations of a binding, untimed unless requested."""

    #: Timed statements: for every `s` in `seqs`, or for one pass.
    STATEMENTS: ClassVar[dict[str, str]] = {}
    #: Names for these statements.
    names: dict[str, Any]

    def __init__(self) -> None:
        self.n_vocab = 0
        self.n_seq_max = 1
        self.n_batch = 512
        self.depth = 16  # tokens of sequence 0
        self.state_bytes = 0  # size of the kept state
        self.names = {}

    def facts(self) -> Answer:
        """Return versions."""
        raise NotThereError

    def open(self, model: str | None, **options: Any) -> None:
        """Load a model (None: keep it) and create a context."""
        raise NotThereError

    def reported(self) -> Answer:
        """Return the context's settings by request name."""
        return {}

    def end(self, seq: int) -> int:
        """Return the position after the last token of a sequence."""
        raise NotThereError

    def decode_rows(self, rows: Rows) -> None:
        """Decode one batch of (first position, length, sequence), logits for the last of each."""
        self.step(rows)()

    def step(self, rows: Rows) -> Callable[[], object]:
        """Return a function that fills a batch with rows as in `decode_rows` and decodes it."""
        raise NotThereError

    def remove(self, seq: int) -> None:
        """Empty a sequence."""
        raise NotThereError

    def cut(self, seq: int, length: int) -> None:
        """Truncate a sequence."""
        raise NotThereError

    def copy(self, src: int, dst: int) -> None:
        """Copy a whole sequence."""
        raise NotThereError

    def clear(self) -> None:
        """Empty everything."""
        raise NotThereError

    def first_token(self) -> int:
        """Return the likeliest next token after the last decode."""
        raise NotThereError

    def restore(self, how: str, path: str) -> None:
        """Restore the state of `keep_state` into sequence 1, from ``memory`` or a ``file``."""
        raise NotThereError

    def keep_state(self, n: int, path: str) -> int:
        """Keep the state of sequence 0 in memory and in a file; return its size."""
        raise NotThereError

    def load_blob(self, blob: bytes) -> None:
        """Restore a raw sequence state into sequence 0, and keep it for `state_call`."""
        raise NotThereError

    def state_call(self, what: str) -> Callable[[], object]:
        """Return a function that saves, loads or copies the state of `load_blob` once."""
        raise NotThereError

    def file_call(self, what: str, path: str, n: int) -> Callable[[], object]:
        """Return a function that saves sequence 0 with n tokens to a file, or loads it."""
        raise NotThereError

    def sequences(self) -> dict[int, int]:
        """Return the number of cells of each sequence."""
        raise NotThereError

    # Common to all bindings ---------------------------------------------------------------

    def extend(self, seq: int, n: int) -> None:
        """Append n tokens to a sequence, with logits for the last."""
        start = self.end(seq)
        for at in range(start, start + n, self.n_batch):
            self.decode_rows([(at, min(self.n_batch, start + n - at), seq)])

    def token_at(self, i: int) -> int:
        """Return the token for a place in a sequence, equal for all contestants."""
        return 3 + i * 7919 % (self.n_vocab - 3)

    def tokens(self, start: int, n: int) -> list[int]:
        """Return the tokens for the places ``[start, start + n)``."""
        return [self.token_at(i) for i in range(start, start + n)]

    def places(self, rows: Rows) -> list[tuple[int, int, int, bool]]:
        """Return (token, position, sequence, whether it has logits) of rows."""
        return [
            (self.token_at(i), i, seq, i == start + n - 1)
            for start, n, seq in rows
            for i in range(start, start + n)
        ]


def apply(params: Any, options: dict[str, Any]) -> Any:
    """Set the fields of llama.h's context parameters, and return them."""
    params.n_threads = params.n_threads_batch = options["threads"]
    params.kv_unified = params.swa_full = True
    params.flash_attn_type = options["flash_attn"]
    for name in ("n_ctx", "n_seq_max", "n_batch", "n_ubatch", "type_k", "type_v"):
        setattr(params, name, options[name])
    return params
