"""What can be wrong with a model's file, with a context's parameters, and with where it lies."""

from __future__ import annotations

from pykvcache.errors._base import DetailedError, KvCacheError

__all__ = ["ContextCreateError", "DeviceLost", "ModelLoadError"]


class ModelLoadError(KvCacheError, OSError):
    """A file is not a model that llama.cpp can load.

    Attributes
    ----------
    path : str or None
        The file, as it was given.
    reason : str or None
        What is wrong with it; of what the system refused, ``errno`` and ``strerror`` tell.
    """

    def __init__(self, *facts: object, path: str | None = None, reason: str | None = None) -> None:
        super().__init__(*facts)
        self.path = self.filename if path is None else path
        self.reason = reason if reason is not None else self.strerror

    @classmethod
    def of(cls, path: str, reason: str) -> ModelLoadError:
        """Return the error that names a file and what is wrong with it."""
        return cls(f"cannot load {path!r}: {reason}", path=path, reason=reason)


class ContextCreateError(DetailedError, RuntimeError):
    """A context cannot have these parameters, or not with this model.

    `what` is the parameter that stands in the way, where it is one; `value` what it is, and
    `limit` what it may be: the most, the least, or the one word.
    """

    @property
    def parameter(self) -> str | None:
        """The parameter that stands in the way: `what`."""
        return self.what


class DeviceLost(KvCacheError, ConnectionError):
    """A server of a model failed, froze, answered what cannot be true, or cannot be reached.

    It stays lost: every later call of the contexts that lie on it raises this, but ``close()``.
    Load the model again to go on; what was saved before can be put back.

    Attributes
    ----------
    endpoint : str
        The server, ``"host:port"``.
    operation : str
        What was asked for: ``"connect"``, ``"load"``, ``"create"``, ``"decode"``, ...
    reason : str
        What happened, and during which message.
    """

    def __init__(self, endpoint: str, operation: str, reason: str) -> None:
        super().__init__(f"{operation}: the RPC server {endpoint} is lost: {reason}")
        self.endpoint = endpoint
        self.operation = operation
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.endpoint, self.operation, self.reason)
