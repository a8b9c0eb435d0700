"""Errors of requests: the HTTP status, and the error object of each API."""

from __future__ import annotations

from typing import Any

from pykvcache.errors import (
    ArgumentError,
    ChatTemplateError,
    ClosedError,
    GrammarError,
    NoKvCacheSlot,
    OutOfRangeError,
    PositionError,
    UnsupportedOperation,
)

__all__ = ["ApiError", "as_api_error", "context_exceeded"]

_REFUSALS = (ArgumentError, ChatTemplateError, GrammarError, OutOfRangeError, UnsupportedOperation)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that is the answer to a request.

    Parameters
    ----------
    status
        HTTP status.
    message
        The fault, with the value and the limit.
    param
        The field of the request.
    code
        OpenAI's machine-readable code, such as ``"context_length_exceeded"``.
    type
        The kind of error; default: by status.
    retry_after
        Seconds for the header ``Retry-After``.
    **facts
        Further members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.type = type or _TYPES.get(status, default)
        self.retry_after = retry_after
        self.facts = facts

    def openai(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": {**error, **self.facts}}

    def anthropic(self) -> dict[str, Any]:
        """Return Anthropic's error object."""
        kind = {"exceed_context_size_error": "invalid_request_error", "server_error": "api_error"}
        error = {"type": kind.get(self.type, self.type), "message": str(self)}
        return {"type": "error", "error": error}


def context_exceeded(n_tokens: int, n_ctx: int, param: str) -> ApiError:
    """Return the error of a prompt that does not fit the context."""
    return ApiError(
        400,
        f"the prompt has {n_tokens} tokens, which exceeds the available context size of {n_ctx}",
        param=param,
        code="context_length_exceeded",
        type="exceed_context_size_error",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


def as_api_error(error: Exception) -> ApiError:
    """Return the answer to a request that raised an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoKvCacheSlot | PositionError):
        kind = "exceed_context_size_error"
        return ApiError(400, str(error), code="context_length_exceeded", type=kind)
    if isinstance(error, ClosedError):
        return ApiError(503, "the model was unloaded: try again", retry_after=1)
    if isinstance(error, RecursionError):
        return ApiError(400, "the request is nested too deeply")
    if isinstance(error, _REFUSALS):
        return ApiError(400, str(error), param=getattr(error, "what", None))
    return ApiError(500, f"{type(error).__name__}: {error}")
