"""LLM: a model, its context, a prefix cache and a batch generator in one object."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from pykvcache._arguments import TokenInput, as_int, as_token_array
from pykvcache._closing import Closing
from pykvcache._devices import default_layers
from pykvcache._embedder import Embedder
from pykvcache.chat_format import ChatFormat, ChatMessage, ToolCall, ToolChoice
from pykvcache.context import LlamaContext, open_context
from pykvcache.errors import ArgumentError
from pykvcache.generate import BatchGenerator
from pykvcache.generate.request import FinishReason, GenerationHandle
from pykvcache.model import LlamaModel
from pykvcache.openai_format import (
    ChatStream,
    finish_reason,
    head,
    message_of,
    parse_answer,
    schema_of,
    text_logprobs,
    usage_of,
)
from pykvcache.prefix.cache import PrefixCache
from pykvcache.prefix.policies import DEFAULT, Policy
from pykvcache.prefix.report import ReuseReport
from pykvcache.prefix.sequence import CachedSequence
from pykvcache.prefix.stores import FolderStore
from pykvcache.sampling import Sampler
from pykvcache.sequence.logprobs import prompt_logprobs
from pykvcache.sequence.sequence import LlamaSequence
from pykvcache.sequence.text import StopInput, TextStream

if TYPE_CHECKING:
    from typing import Literal

__all__ = ["LLM", "ChatCompletion", "Completion"]

#: A prompt: text, with the model's special tokens added, or token ids.
Prompt: TypeAlias = str | TokenInput

#: Messages for chat templates: ``role``, ``content`` and other keys that the template reads.
Messages: TypeAlias = Sequence[Mapping[str, Any]]

#: Functions in OpenAI's form.
Tools: TypeAlias = Sequence[Mapping[str, Any]]

#: Defaults. A cell takes 2 KiB (tiny models) to 128 KiB (8B) over all layers.
MOST_CELLS = 32_768
MOST_RAM_BYTES = 4 << 30
LEAST_RAM_BYTES = 64 << 20

#: Parameter names of the classes to which `LLM` passes options.
_PARAMETERS: dict[type, frozenset[str]] = {
    kind: frozenset(inspect.signature(kind).parameters) for kind in (LlamaContext, Sampler)
}


@dataclass(frozen=True)
class Completion:
    """A generated text.

    Attributes
    ----------
    text
        The text without a stop string.
    tokens
        Its token ids; int32, shape (n,).
    finish_reason
        ``"stop"``, ``"length"``, ``"full"`` (no free cells in the context) or ``"aborted"``.
    logprobs
        For each token, the log-probabilities of the likeliest tokens and of the chosen one, by
        token id. Empty unless ``logprobs`` was given.
    reuse
        How many prompt tokens came from the prefix cache, and why the others did not.
    """

    text: str
    tokens: npt.NDArray[np.int32] = field(repr=False)
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] = field(repr=False)
    reuse: ReuseReport

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's form, including ``prompt_tokens_details.cached_tokens``."""
        return usage_of(self.reuse, len(self.tokens))


@dataclass(frozen=True)
class ChatCompletion:
    """The assistant's answer to a chat.

    Attributes
    ----------
    message
        Content, reasoning and tool calls; use ``message.to_dict()`` in the next turn.
    completion
        The generation: tokens, ``finish_reason``, ``reuse``.
    """

    message: ChatMessage
    completion: Completion = field(repr=False)

    @property
    def content(self) -> str:
        """The content of the message."""
        return self.message.content

    @property
    def reasoning(self) -> str:
        """The model's reasoning; empty if none."""
        return self.message.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls, with arguments that match their schemas."""
        return self.message.tool_calls

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's form."""
        return self.completion.usage


class LLM(Closing):
    """A model that generates, chats and embeds, and reuses evaluated prefixes.

    Its parts are `model`, `context`, `cache` and `generator`. Any number of threads and tasks may
    call its methods; their requests are batched, one decode per step.

    Parameters
    ----------
    model
        Path of a GGUF file, or a `LlamaModel`, which is not closed with this object.
    cache
        Where evaluated prefixes are stored beyond this process: a folder, an address such as
        ``"redis://host"``, a store, or a list of them, fastest first. Default: RAM only. Prefixes
        shorter than one block (64 tokens) stay in RAM.
    folder_bytes
        Largest size of each folder in `cache` that is given by its path. Default: 10 GiB.
    n_ctx
        Number of cells over all sequences. Default: `n_parallel` times the model's trained length,
        at most 32,768, and no more than fit into a quarter of the machine's free memory.
    n_parallel
        Number of sequences generated at once.
    n_gpu_layers
        Number of layers on GPUs, if `model` is a path; negative: all. Default: all, if this build
        supports a GPU and the machine has one (see `pykvcache.devices`).
    ram_bytes
        Bytes of RAM for the prefix cache. Default: an eighth of the machine's free memory,
        at least 64 MiB and at most 4 GiB.
    policy
        Eviction policy of the prefix cache, as in `PrefixCache`.
    namespace
        Namespace of the prefixes; namespaces share nothing.
    secret
        At least 16 bytes; encrypts blocks outside this process (needs the extra ``crypto``).
    tier_seconds
        Longest time that a request waits for `cache`, in seconds. Default: a tenth of the estimated
        evaluation time.
    **options
        Other parameters of `LlamaContext`, such as ``type_k="q8_0"``, ``n_threads=4``.

    Raises
    ------
    ModelLoadError, ContextCreateError
        The file is not a model, or the context does not fit.
    ArgumentError, TypeError
        A parameter is invalid.

    Examples
    --------
    >>> from pykvcache import LLM, Sampler, embedded_model_path
    >>> with LLM(embedded_model_path()) as llm:
    ...     one = llm.generate("Lucy has a red kite. Tom", max_tokens=8)
    ...     two = llm.generate("Lucy has a red kite. Lucy", max_tokens=8)
    ...     two.reuse.evaluated < two.reuse.n_tokens
    True
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LlamaModel,
        *,
        cache: Any = None,
        folder_bytes: int | None = None,
        n_ctx: int | None = None,
        n_parallel: SupportsIndex = 8,
        n_gpu_layers: SupportsIndex | None = None,
        ram_bytes: SupportsIndex | None = None,
        policy: str | Policy = DEFAULT,
        namespace: str = "",
        secret: bytes | str | None = None,
        tier_seconds: float | None = None,
        **options: Any,
    ) -> None:
        _check_options(options, LlamaContext, "LLM")
        n_seq_max = as_int(n_parallel, "n_parallel", 1, 256)
        self._owns_model = not isinstance(model, LlamaModel)
        if isinstance(model, LlamaModel):
            if n_gpu_layers is not None:
                raise ArgumentError(
                    "n_gpu_layers needs a path: this LlamaModel is already loaded", "n_gpu_layers"
                )
            self._model = model
        else:
            layers: Any = default_layers() if n_gpu_layers is None else n_gpu_layers
            self._model = LlamaModel(os.path.expanduser(model), n_gpu_layers=layers)
        self._embedder = Embedder(self._model)
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_model)
            free = free_memory()
            if n_ctx is None:
                n_ctx = default_cells(self._model, n_seq_max, free // 4, options)
            self._ctx = open_context(self._model, n_ctx=n_ctx, n_seq_max=n_seq_max, **options)
            undo.callback(self._ctx.close)
            if ram_bytes is None:
                ram_bytes = min(max(free // 8, LEAST_RAM_BYTES), MOST_RAM_BYTES)
            self._cache = PrefixCache(
                self._ctx,
                ram_bytes=ram_bytes,
                policy=policy,
                namespace=namespace,
                tiers=as_tiers(cache, folder_bytes),
                secret=secret,
                tier_seconds=tier_seconds,
            )
            self._generator = BatchGenerator(self._cache)
            undo.pop_all()

    # Parts --------------------------------------------------------------------------------------

    @property
    def model(self) -> LlamaModel:
        """The model."""
        return self._model

    @property
    def context(self) -> LlamaContext:
        """The context for generation."""
        return self._ctx

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache of the context."""
        return self._cache

    @property
    def generator(self) -> BatchGenerator:
        """The generator that serves all callers."""
        return self._generator

    # Text ---------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        *,
        n: Literal[1] = 1,
        max_tokens: SupportsIndex | None = ...,
        sampler: Sampler | None = ...,
        stop: StopInput = ...,
        logprobs: SupportsIndex = ...,
        progress: bool | None = ...,
    ) -> Completion: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str,
        *,
        n: int,
        max_tokens: SupportsIndex | None = ...,
        sampler: Sampler | None = ...,
        stop: StopInput = ...,
        logprobs: SupportsIndex = ...,
        progress: bool | None = ...,
    ) -> list[Completion]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Sequence[Prompt],
        *,
        n: Literal[1] = 1,
        max_tokens: SupportsIndex | None = ...,
        sampler: Sampler | None = ...,
        stop: StopInput = ...,
        logprobs: SupportsIndex = ...,
        progress: bool | None = ...,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        max_tokens: SupportsIndex | None = ...,
        sampler: Sampler | None = ...,
        stop: StopInput = ...,
        logprobs: SupportsIndex = ...,
        progress: bool | None = ...,
    ) -> list[list[Completion]]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        n: int = 1,
        max_tokens: SupportsIndex | None = 128,
        sampler: Sampler | None = None,
        stop: StopInput = (),
        logprobs: SupportsIndex = 0,
        progress: bool | None = None,
    ) -> Any:
        """Generate a text for each prompt, in one batch.

        Parameters
        ----------
        prompts
            A text, or a list of texts and token ids.
        n
            Samples per prompt. They share the evaluation of the prompt.
        max_tokens
            Maximum number of new tokens; None: until the text ends or the context is full.
        sampler
            Copied for each sample. Default: greedy.
        stop
            Strings and token ids that end a text.
        logprobs
            Number of likeliest tokens per position whose log-probabilities are returned.
        progress
            Show a progress bar. Default: on a terminal, if rich is installed.

        Returns
        -------
        Completion
            One object for a text, a list for a list of prompts; with `n` above 1, a list of `n`
            objects for each prompt.
        """
        is_one = isinstance(prompts, str)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        handles = [
            self._submit(text, max_tokens, sampler, n=n, stop=stop, logprobs=logprobs)
            for text in texts
        ]
        try:
            self._generator.run(progress=progress)
            found = [[_completion(handle.wait()) for handle in group] for group in handles]
        except BaseException:
            for group in handles:
                for handle in group:
                    handle.abort()
            raise
        results = [group[0] for group in found] if n == 1 else found
        return results[0] if is_one else results

    def _submit(
        self,
        prompt: Prompt,
        max_tokens: SupportsIndex | None,
        sampler: Sampler | None,
        **options: Any,
    ) -> list[GenerationHandle]:
        found = self._generator.submit(prompt, max_tokens, sampler, **options)
        return found if isinstance(found, list) else [found]

    # Chat ---------------------------------------------------------------------------------------

    def chat_tokens(self, messages: Messages, **template: Any) -> npt.NDArray[np.int32]:
        """Return the tokens of a chat up to the start of the assistant's answer.

        Parameters
        ----------
        messages
            The conversation so far.
        **template
            As in `LlamaModel.apply_chat_template`: ``tools``, ``template``, and variables.
        """
        text = self._model.apply_chat_template(messages, **template)
        return self._model.tokenize(text, add_special=False, parse_special=True)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice = "auto",
        json_schema: Mapping[str, Any] | str | None = None,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        stop: StopInput = (),
        **template: Any,
    ) -> ChatCompletion:
        """Return the assistant's answer to a conversation.

        Parameters
        ----------
        messages
            The conversation so far, in OpenAI's form.
        tools, tool_choice
            As in `LlamaModel.chat_format`.
        json_schema
            Schema of the content.
        max_tokens, sampler, stop
            As in `generate`.
        **template
            As in `LlamaModel.apply_chat_template`.

        Raises
        ------
        ChatParseError
            The model's output is not a message in its format; the error's ``text`` has it.
        """
        form, handle, written = self._submit_chat(
            messages, tools, tool_choice, json_schema, max_tokens, sampler, stop, template
        )
        with _aborting(handle):
            completion = _completion(handle.wait())
        pieces = [self._piece(written, token) for token in completion.tokens.tolist()]
        return ChatCompletion(form.parse("".join(pieces) + written.finish()), completion)

    async def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice = "auto",
        json_schema: Mapping[str, Any] | str | None = None,
        max_tokens: SupportsIndex | None = None,
        sampler: Sampler | None = None,
        stop: StopInput = (),
        **template: Any,
    ) -> AsyncIterator[str]:
        """Yield the content of the assistant's answer as it is generated; parameters as in `chat`.

        Leaving the loop ends the generation.
        """
        form, handle, written = self._submit_chat(
            messages, tools, tool_choice, json_schema, max_tokens, sampler, stop, template
        )
        stream = ChatStream(form)
        with _aborting(handle):
            async for token in handle:
                for delta in stream.feed(self._piece(written, token)):
                    if delta.content:
                        yield delta.content
            for delta in stream.feed(written.finish(), is_end=True):
                if delta.content:
                    yield delta.content

    def _submit_chat(
        self,
        messages: Messages,
        tools: Tools | None,
        tool_choice: ToolChoice,
        json_schema: Mapping[str, Any] | str | None,
        max_tokens: SupportsIndex | None,
        sampler: Sampler | None,
        stop: StopInput,
        template: dict[str, Any],
    ) -> tuple[ChatFormat, GenerationHandle, TextStream]:
        """Submit a chat; return its format, the request, and the decoder of its tokens."""
        shown = None if tool_choice == "none" else tools
        tokens = self.chat_tokens(messages, tools=shown, **template)
        form = self._model.chat_format(
            tools=shown, tool_choice=tool_choice, json_schema=json_schema, **template
        )
        if form.grammar is not None:
            base = Sampler(temperature=0) if sampler is None else sampler
            sampler = base.with_format(form, self._model)
        given = [stop] if isinstance(stop, str) or hasattr(stop, "__index__") else list(stop or ())
        stops = [*given, *form.stop]
        (handle,) = self._submit(tokens, max_tokens, sampler, stop=stops)
        return form, handle, TextStream([one for one in stops if isinstance(one, str)])

    def _piece(self, written: TextStream, token: int) -> str:
        """Return the text that a token adds, with special tokens written out."""
        return written.feed(self._model.token_to_piece(token, special=True))

    # Embeddings ---------------------------------------------------------------------------------

    def embed(self, texts: str | Sequence[Prompt]) -> npt.NDArray[np.float32]:
        """Return embeddings of unit length; float32, shape (n, n_embd).

        Uses the model's pooling, or the mean over the tokens if it has none. The first call
        creates a separate context.

        Parameters
        ----------
        texts
            A text (one row), or a list of texts and token ids.

        Raises
        ------
        ArgumentError
            A text has no tokens, or more than fit the context for embeddings.
        """
        given = [texts] if isinstance(texts, str) else list(texts)
        return self._embedder.embed([self.tokens_of(text) for text in given])

    def tokens_of(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        """Return the tokens of a prompt: a text with the model's special tokens, or ids."""
        if isinstance(prompt, str):
            return self._model.tokenize(prompt)
        return as_token_array(prompt)

    # As in llama-cpp-python ---------------------------------------------------------------------

    def create_completion(
        self,
        prompt: Prompt,
        *,
        max_tokens: SupportsIndex | None = 16,
        stop: StopInput = (),
        logprobs: SupportsIndex = 0,
        echo: bool = False,
        stream: bool = False,
        **sampling: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Return OpenAI's text completion as a dict, or with `stream` an iterator of chunks.

        Parameters
        ----------
        prompt, max_tokens, stop, logprobs
            As in `generate`.
        echo
            Whether the text begins with the prompt. With `logprobs`, and without `stream`, its
            tokens have log-probabilities, too; such a prompt does not use the cache.
        stream
            Yield chunks as the text is generated.
        **sampling
            As for `Sampler`: ``temperature``, ``top_p``, ``seed``...
        """
        _check_options(sampling, Sampler, "create_completion")
        sampler = Sampler(model=self._model, **sampling)
        start = head("cmpl-", "text_completion", self._name)
        tokens = self.tokens_of(prompt)
        n = as_int(logprobs, "logprobs", 0, self._model.n_vocab)
        given: Any = tokens
        scores: list[dict[int, float]] = []
        if is_scored := echo and n > 0 and not stream:
            given = LlamaSequence(self._ctx, tokens)
            scores = prompt_logprobs(given, n)
        (handle,) = self._submit(given, max_tokens, sampler, stop=stop, logprobs=n)
        before = self._model.detokenize(tokens) if echo else ""

        def choice(text: str, reason: str | None) -> dict[str, Any]:
            made: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
            return {**made, "finish_reason": finish_reason(reason)}

        if stream:
            return self._chunks(handle, start, choice, before)
        with _aborting(handle):
            found = _completion(handle.wait())
        made = choice(before + found.text, found.finish_reason)
        if is_scored or found.logprobs:
            shown = tokens.tolist() if is_scored else []
            made["logprobs"] = text_logprobs(
                self._model,
                shown + found.tokens.tolist(),
                scores + found.logprobs,
                len(before),
                n,
                len(shown),
            )
        return {**start, "choices": [made], "usage": found.usage}

    def __call__(self, prompt: Prompt, **options: Any) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Call `create_completion`, as in llama-cpp-python."""
        return self.create_completion(prompt, **options)

    @staticmethod
    def _chunks(
        handle: GenerationHandle,
        start: dict[str, Any],
        choice: Callable[[str, str | None], dict[str, Any]],
        shown: str,
    ) -> Iterator[dict[str, Any]]:
        if shown:
            yield {**start, "choices": [choice(shown, None)]}
        n = 0
        with _aborting(handle):
            for _ in handle:
                text = handle.text
                if len(text) > n:
                    yield {**start, "choices": [choice(text[n:], None)]}
                    n = len(text)
        yield {**start, "choices": [choice(handle.text[n:], handle.finish_reason)]}

    def create_chat_completion(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice = "auto",
        response_format: Mapping[str, Any] | None = None,
        max_tokens: SupportsIndex | None = None,
        stop: StopInput = (),
        stream: bool = False,
        template: str | None = None,
        **sampling: Any,
    ) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """Return OpenAI's chat completion as a dict, or with `stream` an iterator of chunks.

        Parameters
        ----------
        messages, tools, tool_choice, max_tokens, stop
            As in `chat`.
        response_format
            ``{"type": "json_object"}``, optionally with a ``schema``, or OpenAI's ``json_schema``.
        stream
            Yield chunks as the answer is generated.
        template
            A chat template in place of the model's.
        **sampling
            As for `Sampler`: ``temperature``, ``top_p``, ``seed``... ``strict`` also applies to
            ``response_format``.
        """
        schema = schema_of(response_format)
        own: dict[str, Any] = {} if template is None else {"template": template}
        if "strict" in sampling:
            own["strict"] = sampling["strict"]
        _check_options(sampling, Sampler, "create_chat_completion")
        sampler = Sampler(model=self._model, **sampling)
        form, handle, written = self._submit_chat(
            messages, tools, tool_choice, schema, max_tokens, sampler, stop, own
        )
        if stream:
            start = head("chatcmpl-", "chat.completion.chunk", self._name)
            return self._chat_chunks(form, handle, written, start)
        with _aborting(handle):
            found = _completion(handle.wait())
        pieces = [self._piece(written, token) for token in found.tokens.tolist()]
        message = parse_answer(form, "".join(pieces) + written.finish())
        reason = finish_reason(found.finish_reason, has_calls=bool(message.tool_calls))
        choice = {"index": 0, "message": message_of(message), "finish_reason": reason}
        start = head("chatcmpl-", "chat.completion", self._name)
        return {**start, "choices": [{**choice, "logprobs": None}], "usage": found.usage}

    def _chat_chunks(
        self,
        form: ChatFormat,
        handle: GenerationHandle,
        written: TextStream,
        start: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            return {**start, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        stream = ChatStream(form)
        with _aborting(handle):
            for token in handle:
                for delta in stream.feed(self._piece(written, token)):
                    yield chunk(delta.as_dict())
            for delta in stream.feed(written.finish(), is_end=True):
                yield chunk(delta.as_dict())
        yield chunk({}, finish_reason(handle.finish_reason, has_calls=stream.has_calls))

    def create_embedding(self, input: str | Sequence[Prompt]) -> dict[str, Any]:
        """Return OpenAI's list of embeddings as a dict."""
        rows = self.embed(input)
        texts = [input] if isinstance(input, str) else list(input)
        n = sum(len(self.tokens_of(text)) for text in texts)
        data = [
            {"object": "embedding", "index": i, "embedding": row.tolist()}
            for i, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": n, "total_tokens": n}
        return {"object": "list", "model": self._name, "data": data, "usage": usage}

    # Lifetime -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Write pending blocks to the tiers, and free everything. Idempotent."""
        self._generator.close()
        self._cache.close()
        self._ctx.close()
        self._embedder.close()
        self._close_model()

    def _close_model(self) -> None:
        if self._owns_model:
            self._model.close()

    @property
    def _name(self) -> str:
        return Path(self._model.path).name

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._ctx.is_closed

    def __repr__(self) -> str:
        return f"<LLM {self._name}: {self._ctx!r}, {self._cache!r}>"


def _completion(handle: GenerationHandle) -> Completion:
    sequence = handle.sequence
    if isinstance(sequence, CachedSequence):
        reuse = sequence.reuse
    else:
        n = len(sequence) - len(handle.tokens)
        reuse = ReuseReport(n, evaluated=n, unshared=n)
    reason = handle.finish_reason
    assert reason is not None, "the request has ended"
    return Completion(handle.text, handle.tokens, reason, handle.logprobs, reuse)


@contextlib.contextmanager
def _aborting(handle: GenerationHandle) -> Iterator[None]:
    """Abort a request if the loop over it is left early."""
    try:
        yield
    finally:
        if handle.finish_reason is None:
            handle.abort()


def _check_options(given: Iterable[str], kind: type, caller: str) -> None:
    """Raise TypeError for options that `kind`, to which they are passed, does not have."""
    for name in given:
        if name not in _PARAMETERS[kind]:
            raise TypeError(f"neither {caller} nor {kind.__name__} has a parameter {name!r}")


def as_tiers(cache: Any, folder_bytes: int | None = None) -> list[Any]:
    """Return the tiers of ``LLM(cache=...)`` as a list; expand ``~`` and limit folders."""
    if cache is None:
        return []
    tiers = []
    for one in cache if isinstance(cache, list | tuple) else [cache]:
        tier = os.path.expanduser(one) if isinstance(one, str | os.PathLike) else one
        if folder_bytes is not None and is_folder(tier):
            tier = FolderStore(tier, folder_bytes)
        tiers.append(tier)
    return tiers


def is_folder(tier: object) -> bool:
    """Whether a tier is given as the path of a folder."""
    return isinstance(tier, str | bytes | os.PathLike) and "://" not in os.fsdecode(tier)


def default_cells(
    model: LlamaModel, n_parallel: int, most_bytes: int, options: dict[str, Any]
) -> int:
    """Return the default number of cells of a context."""
    wanted = min(model.n_ctx_train * n_parallel, MOST_CELLS)
    # A small context is enough to learn the size of a cell.
    types = {name: options[name] for name in ("type_k", "type_v", "devices") if name in options}
    with LlamaContext(model, n_ctx=256, n_batch=1, n_ubatch=1, n_seq_max=1, **types) as ctx:
        cell = ctx.memory_info.bytes_per_token
    fits = most_bytes // cell if cell else wanted
    return max(256, min(wanted, fits))


def free_memory() -> int:
    """Return the bytes of memory that this process may still allocate."""
    free = 8 << 30
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024 * int(line.split()[1])
    with contextlib.suppress(OSError, ValueError):  # a container's limit ("max" for none)
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((folder / "memory.current").read_text(encoding="ascii")))
    return max(free, 0)
