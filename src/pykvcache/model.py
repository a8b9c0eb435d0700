"""LlamaModel: a loaded GGUF model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, SupportsIndex

from pykvcache._arguments import (
    IntArray,
    TokenInput,
    as_bool,
    as_float,
    as_int,
    as_path,
    as_token_array,
    choose,
)
from pykvcache._closing import Closing
from pykvcache._devices import chosen, endpoints, shares, takes_layers
from pykvcache._model_file import file_ids, model_fingerprint, readable_path
from pykvcache._native import lib
from pykvcache.adapters import ControlVector, LoraAdapter
from pykvcache.chat_format import ChatFormat, ChatMessage, ToolChoice, make_chat_format
from pykvcache.enums import LoadMode, LoadModeName, RopeType, SplitMode, SplitModeName
from pykvcache.errors import ArgumentError, ModelLoadError

__all__ = ["LlamaModel"]

TEXT_BYTES_MAX = 2**31 - 1


class LlamaModel(Closing):
    """Weights and vocabulary of a GGUF file (``llama_model_load_from_file``).

    A model is read-only; any number of contexts and threads may share it. It is freed when it
    is closed (or collected) *and* its last context is closed.

    Parameters
    ----------
    path
        The file; for a split model its first part.
    n_gpu_layers
        Layers to keep in GPU memory; negative means all. Without a GPU, or without GPU support in
        the build, it only causes a `UserWarning`. Default: none; with `rpc` all.
    load_mode
        ``"auto"``, ``"none"``, ``"mmap"``, ``"mlock"``, ``"mmap_mlock"`` or ``"direct_io"``. Files
        are mapped by default. Do not overwrite a mapped file in place; rename a new one over it.
    devices
        Names of the devices that share these layers, from `pykvcache.devices`; empty to use only
        the CPU. Default: all GPUs, or the integrated ones.
    split_mode
        How they share: ``"layer"``, ``"row"``, ``"tensor"``, or ``"none"`` for one device.
    main_gpu
        With ``"none"``: index of the device, from 0.
    tensor_split
        Share of each of `devices`, in any unit; with `rpc` the servers' devices come first.
        Default: by free memory.
    rpc
        Servers that take layers and their cells: ``["host:port", ...]``, each a ``pykvcache
        rpc-server``. Not available on Windows. Connections are neither encrypted nor authenticated.
    rpc_timeout
        Seconds without a reply after which a server is lost. Must exceed the longest decode of
        `n_batch` tokens.
    vocab_only
        Load only the vocabulary: tokenizing works, contexts cannot be created.
    check_tensors
        Let llama.cpp validate the tensor data while loading.
    use_extra_bufts
        Let backends repack weights for speed.
    progress
        Called with a fraction in [0, 1]; returning ``False`` cancels the load.

    Raises
    ------
    ModelLoadError
        The file is missing, unreadable, damaged or not a GGUF, or the load was cancelled.
    ValueError
        A device does not exist or takes no layers, or shares are not positive numbers.
    DeviceLost
        An RPC server is unreachable, or failed during the load.
    UnsupportedOperation
        `rpc` is given, but this build does not support it.

    Examples
    --------
    >>> from pykvcache import LlamaModel, embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model:
    ...     model.rope_type.name
    'NORM'
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        load_mode: LoadModeName | LoadMode = "auto",
        devices: Sequence[str] | None = None,
        split_mode: SplitModeName | SplitMode = "layer",
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        rpc: Sequence[str] | None = None,
        rpc_timeout: float = 60.0,
        vocab_only: bool = False,
        check_tensors: bool = False,
        use_extra_bufts: bool = True,
        progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        remote = endpoints(rpc)
        names = chosen(devices, is_remote=bool(remote))
        timeout = as_float(rpc_timeout, "rpc_timeout", 0.01, 1e6)
        if n_gpu_layers is None:
            n_gpu_layers = -1 if remote else 0
        params: dict[str, Any] = {
            "n_gpu_layers": as_int(n_gpu_layers, "n_gpu_layers", -(2**31), 2**31 - 1),
            "load_mode": choose(load_mode, LoadMode, "load_mode"),
            "split_mode": choose(split_mode, SplitMode, "split_mode"),
            "main_gpu": as_int(
                main_gpu, "main_gpu", 0, len(names) - 1 if names and not remote else 255
            ),
            "devices": names,
            "vocab_only": as_bool(vocab_only, "vocab_only"),
            "check_tensors": as_bool(check_tensors, "check_tensors"),
            "use_extra_bufts": as_bool(use_extra_bufts, "use_extra_bufts"),
        }
        if params["n_gpu_layers"] and names is None and not takes_layers():
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} has no effect: this build of pykvcache has no GPU "
                "backend, or found no GPU (see pykvcache.devices() and docs/how-to/gpu.md)",
                UserWarning,
                stacklevel=2,
            )
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be callable, not {type(progress).__name__}")
        if remote and params["split_mode"] not in (SplitMode.LAYER, SplitMode.NONE):
            raise ArgumentError(
                f"split_mode is {split_mode!r}: with rpc it is 'layer' or 'none'",
                "split_mode",
                split_mode,
            )
        self._path = as_path(path)
        readable = readable_path(self._path)
        self._files = file_ids(self._path)
        servers = params["servers"] = [lib.Server(one, timeout) for one in remote]
        n_devices = sum(server.n_devices for server in servers) + len(names or ())
        params["tensor_split"] = shares(tensor_split, n_devices)
        self._native = lib.Model(readable, params, progress)

    # Facts of the file ------------------------------------------------------------------

    @property
    def native(self) -> lib.Model:
        """The object of the compiled layer."""
        return self._native

    @property
    def path(self) -> str:
        """Path of the model's file."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal that identifies this model.

        Covers the file's metadata, tensor table and samples of every tensor's data, so that another
        quantisation or a fine-tune differs. Computed from the file at first use.

        Raises
        ------
        ModelLoadError
            The file was removed, or changed since it was loaded.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return model_fingerprint(self._files, self.metadata)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that share its layers; empty if only the CPU is used."""
        return self._native.devices

    @property
    def n_vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._native.n_vocab

    @property
    def n_ctx_train(self) -> int:
        """Context length that the model was trained with, in tokens."""
        return self._native.n_ctx_train

    @property
    def n_embd(self) -> int:
        """Width of the hidden state."""
        return self._native.n_embd

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return self._native.n_layer

    @property
    def n_head(self) -> int:
        """Number of query heads (of the first layer, if layers differ)."""
        return self._native.n_head

    @property
    def n_head_kv(self) -> int:
        """Number of key/value heads (of the first layer, if layers differ)."""
        return self._native.n_head_kv

    @property
    def n_swa(self) -> int:
        """Sliding window in tokens; 0 for none."""
        return self._native.n_swa

    @property
    def rope_type(self) -> RopeType:
        """Kind of rotary embedding."""
        return RopeType(self._native.rope_type)

    @property
    def is_recurrent(self) -> bool:
        """Whether the memory is a recurrent state (Mamba, RWKV)."""
        return self._native.is_recurrent

    @property
    def is_hybrid(self) -> bool:
        """Whether attention and recurrent layers are mixed (Jamba, Granite 4)."""
        return self._native.is_hybrid

    @property
    def has_encoder(self) -> bool:
        """Whether ``encode()`` must run first (T5)."""
        return self._native.has_encoder

    @property
    def has_decoder(self) -> bool:
        """Whether the model can decode."""
        return self._native.has_decoder

    @property
    def vocab_only(self) -> bool:
        """Whether only the vocabulary was loaded."""
        return self._native.vocab_only

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return self._native.size

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return self._native.n_params

    @property
    def description(self) -> str:
        """llama.cpp's short description, such as ``"llama 7B Q4_0"``."""
        return self._native.description

    @property
    def metadata(self) -> Mapping[str, str]:
        """The GGUF's scalar metadata as text (read-only)."""
        return MappingProxyType(self._native.metadata)

    @property
    def chat_template(self) -> str | None:
        """The Jinja chat template of the file, if it has one."""
        return self._native.chat_template

    # Adapters --------------------------------------------------------------------------

    def load_adapter(self, path: str | os.PathLike[str]) -> LoraAdapter:
        """Load a LoRA adapter of this model (``llama_adapter_lora_init``).

        Decodes of this model's contexts wait for the load.

        Parameters
        ----------
        path
            A GGUF file made by llama.cpp's ``convert_lora_to_gguf.py``.

        Raises
        ------
        ModelLoadError
            The file is missing, damaged, not an adapter, or for another model.
        UnsupportedOperation
            The model has no weights, or has layers on RPC servers.
        """
        return LoraAdapter(self, path)

    def load_control_vector(self, path: str | os.PathLike[str]) -> ControlVector:
        """Load a control vector of this model, from llama.cpp's ``cvector-generator``.

        Parameters
        ----------
        path
            A GGUF file with tensors ``direction.1``, ``direction.2``, ... of type F32.

        Raises
        ------
        ModelLoadError
            The file is missing, damaged, or for another model.
        """
        self._native.adds_special()  # raises ClosedError
        name = as_path(path)
        if not os.path.isfile(name):
            raise ModelLoadError.of(name, "there is no such file")
        native = self._native
        found = lib.control_vector(os.fsencode(name), native.n_layer, native.n_embd)
        try:
            return ControlVector(found)
        except ArgumentError as error:
            raise ModelLoadError.of(name, str(error)) from None

    # Special tokens --------------------------------------------------------------------

    def _special(self, place: int) -> int | None:
        token = self._native.special_tokens()[place]
        return None if token < 0 else token

    @property
    def token_bos(self) -> int | None:
        """Beginning of sequence; ``None`` if the vocabulary has none."""
        return self._special(0)

    @property
    def token_eos(self) -> int | None:
        """End of sequence."""
        return self._special(1)

    @property
    def token_eot(self) -> int | None:
        """End of turn."""
        return self._special(2)

    @property
    def token_sep(self) -> int | None:
        """Separator."""
        return self._special(3)

    @property
    def token_nl(self) -> int | None:
        """New line."""
        return self._special(4)

    @property
    def token_pad(self) -> int | None:
        """Padding."""
        return self._special(5)

    @property
    def token_mask(self) -> int | None:
        """Mask."""
        return self._special(6)

    @property
    def token_decoder_start(self) -> int | None:
        """First token of an encoder-decoder model's decoder."""
        return self._special(7)

    @property
    def add_bos(self) -> bool:
        """Whether ``tokenize(add_special=True)`` adds a BOS."""
        return self._native.adds_special()[0]

    @property
    def add_eos(self) -> bool:
        """Whether ``tokenize(add_special=True)`` adds an EOS."""
        return self._native.adds_special()[1]

    def is_eog(self, token: SupportsIndex) -> bool:
        """Return whether a token ends generation (EOS, EOT, ...)."""
        return self._native.is_eog(token)

    # Text ------------------------------------------------------------------------------

    def tokenize(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> IntArray:
        """Convert text of any length to tokens (``llama_tokenize``); thread-safe.

        Parameters
        ----------
        text
            Text, or UTF-8 bytes.
        add_special
            Add BOS and EOS as the model requires.
        parse_special
            Parse special tokens such as ``</s>`` in the text.

        Returns
        -------
        ndarray of int32, shape (n,)

        Raises
        ------
        UnsupportedOperation
            The vocabulary is missing, or lacks a token that the text or `add_special` needs.
        """
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        elif not isinstance(text, bytes):
            raise TypeError(f"text must be str or bytes, not {type(text).__name__}")
        return self._native.tokenize(
            text, as_bool(add_special, "add_special"), as_bool(parse_special, "parse_special")
        )

    def detokenize(self, tokens: TokenInput, *, special: bool = False) -> str:
        """Convert tokens to text of up to 2 GiB (``llama_detokenize``).

        Parameters
        ----------
        tokens
            Token ids.
        special
            Write special tokens out instead of omitting them.

        Returns
        -------
        str
            Invalid UTF-8, such as half a character, becomes U+FFFD.
        """
        special = as_bool(special, "special")
        flags = (not special, special, TEXT_BYTES_MAX)
        return self._native.detokenize(as_token_array(tokens), *flags).decode("utf-8", "replace")

    def token_to_piece(self, token: SupportsIndex, *, special: bool = False) -> bytes:
        """Return the bytes of one token (``llama_token_to_piece``)."""
        return self._native.token_to_piece(token, as_bool(special, "special"))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """Render messages with the model's chat template (needs Jinja2: the extra ``chat``).

        The text equals that of transformers' ``apply_chat_template``; tokenize it with
        ``add_special=False, parse_special=True``. Templates come with downloaded files, so they run
        in Jinja2's sandbox, on copies of the arguments. The sandbox does not limit time and memory.

        Parameters
        ----------
        messages
            Mappings with ``role`` and ``content`` or ``tool_calls``, and other keys that the
            template reads, such as ``reasoning_content``: texts, numbers, lists, mappings. Keys
            with the value None count as missing.
        tools, documents
            JSON schemas of functions; mappings with ``title`` and ``text``.
        add_generation_prompt
            End with the start of an assistant message.
        template
            A Jinja template in place of the model's.
        **variables
            Other variables that the template reads, such as ``enable_thinking=False``.

        Raises
        ------
        ChatTemplateError
            The template refused the messages, or failed (a ValueError).
        ArgumentError
            A message has no ``role``, or neither ``content`` nor ``tool_calls``; or the model has
            no template (a ValueError).
        TypeError
            An argument is not plain data, or a ``role`` is not text.
        ImportError
            Jinja2 is missing.
        """
        from pykvcache.chat import render, special_token_texts

        source = self._template(template)
        given = {"messages": messages, "tools": tools, "documents": documents}
        tokens = special_token_texts(self._native)
        return render(source, given, {**tokens, **variables}, add_generation_prompt)

    def _template(self, given: str | None) -> str:
        source = given if given is not None else self.chat_template
        if source is None:
            raise ArgumentError("the model has no chat template: pass template=...", "template")
        if not isinstance(source, str):
            raise TypeError(f"template must be text, not {type(source).__name__}")
        return source

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        """Return the texts of end-of-generation tokens, longest first."""
        native = self._native
        ends = (t for t in range(native.n_vocab) if native.is_eog(t))
        texts = {native.token_to_piece(t, True).decode("utf-8", "replace") for t in ends}
        return tuple(sorted(texts - {""}, key=len, reverse=True))

    def chat_format(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        json_schema: Mapping[str, Any] | str | None = None,
        strict: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> ChatFormat:
        """Return the format of the model's answers (needs Jinja2: the extra ``chat``).

        Pass the same arguments as to `apply_chat_template`. The format parses the model's output,
        and ``Sampler(chat_format=...)`` enforces it.

        Parameters
        ----------
        tools
            Functions as ``{"type": "function", "function": {"name", "description",
            "parameters"}}``; the parameters are a JSON schema.
        tool_choice
            ``"auto"``: the model decides, and its calls follow the tools' schemas. ``"required"``:
            it calls a tool. ``"none"``: it calls none. ``{"type": "function", "function":
            {"name": ...}}``: it calls this one.
        parallel_tool_calls
            Whether an answer may have several calls.
        json_schema
            Schema of the content, for answers without tools. Reasoning may precede it.
        strict
            Refuse a `json_schema` with keywords that a grammar cannot enforce; see `Sampler`.
        template, **variables
            As in `apply_chat_template`.

        Raises
        ------
        ArgumentError
            A tool has no name, or the same name as another one, `tool_choice` is invalid, or the
            model has no template (a ValueError).
        GrammarError
            A schema cannot become a grammar (a ValueError).
        ChatTemplateError
            The template failed (a ValueError).
        UnsupportedOperation
            A tool is required, but the template has no tool calls.
        """
        return make_chat_format(
            self._native,
            self._template(template),
            tools,
            tool_choice,
            json_schema,
            variables,
            parallel=parallel_tool_calls,
            strict=as_bool(strict, "strict"),
            ends=self._end_texts,
        )

    def parse_chat(
        self,
        text: str | TokenInput,
        *,
        partial: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> ChatMessage:
        """Parse the model's output into a message: content, reasoning and tool calls.

        Equals `ChatFormat.parse` of `chat_format` with these arguments.

        Parameters
        ----------
        text, partial
            As in `ChatFormat.parse`.
        tools, template, **variables
            The arguments of `apply_chat_template`.

        Raises
        ------
        ChatParseError
            As in `ChatFormat.parse` (a ValueError).

        Examples
        --------
        >>> from pykvcache import LlamaModel, embedded_model_path
        >>> with LlamaModel(embedded_model_path()) as model:
        ...     model.parse_chat("The baker is Tom.").content
        'The baker is Tom.'
        """
        form = self.chat_format(tools=tools, template=template, **variables)
        return form.parse(text, partial=partial)

    # Lifetime --------------------------------------------------------------------------

    def close(self) -> None:
        """Release the model. Its contexts keep working. Idempotent."""
        self._native.close()

    @property
    def is_closed(self) -> bool:
        """Whether the model is closed, or was inherited through ``os.fork()``."""
        return self._native.is_closed

    def __repr__(self) -> str:
        state = " (closed)" if self.is_closed else ""
        return f"<LlamaModel {self._path!r}: {self.description}{state}>"
