"""Format of a model's messages: content, reasoning and tool calls, by llama.cpp's parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from pykvcache._arguments import TokenInput, as_bool, as_token_array
from pykvcache._json_schema import as_schema, convertible, violation
from pykvcache.errors import ArgumentError, ChatParseError, ChatTemplateError, UnsupportedOperation

if TYPE_CHECKING:
    from pykvcache._native import chat_format, lib

__all__ = ["ChatFormat", "ChatMessage", "ToolCall", "ToolChoice"]

#: ``"auto"``, ``"none"``, ``"required"``, or one tool by name, as in OpenAI's API.
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]

TEXT_BYTES_MAX = 2**31 - 1
# What Cython raises for C++ exceptions.
_NATIVE_ERRORS = (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError)
# llama.cpp's grammars of required calls allow any text first, after which a small model never
# writes a call.
_ROOT = re.compile(r"^root ::= .*", re.MULTILINE)
_PREAMBLE = re.compile(r"\buntil-\d+\??( space)? (?=tool-calls?(-root)?\b)")
# Some formats allow several calls although parallel calls are off.
_SEVERAL_CALLS = re.compile(r"^tool-calls ::= \(tool-call\?? space\)\+$", re.MULTILINE)
_ANY = {"type": ["object", "array", "string", "number", "boolean", "null"]}
_USER = {"role": "user", "content": "Hello"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes
    ----------
    name
        The tool's name.
    arguments
        Arguments that match the tool's schema; ``None`` in a partial message.
    arguments_json
        The arguments as JSON text; possibly incomplete in a partial message.
    id
        The call's id, if the model writes one.
    """

    name: str
    arguments: dict[str, Any] | None
    arguments_json: str
    id: str | None = None


@dataclass(frozen=True)
class ChatMessage:
    """A message of a model.

    Attributes
    ----------
    content
        Text for the reader.
    reasoning
        The model's reasoning; empty if none.
    tool_calls
        Tool calls.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the message for `LlamaModel.apply_chat_template`, with OpenAI's keys."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    **({} if call.id is None else {"id": call.id}),
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments_json
                        if call.arguments is None
                        else call.arguments,
                    },
                }
                for call in self.tool_calls
            ]
        return message


class ChatFormat:
    """Format of a model's messages with given tools; made by `LlamaModel.chat_format`.

    Derived from the chat template, which takes some 50 ms the first time, and cached. Threads may
    share it. ``Sampler(chat_format=...)`` makes the model write a message of this format.

    Attributes
    ----------
    grammar : str or None
        GBNF of a message or of its tool calls; None if the text is not constrained.
    triggers : tuple of str or None
        Regular expressions; the grammar begins where one of them matches. None: from the start.
    generation_prompt : str
        Start of an answer, written by the template. The grammar covers it.
    stop : tuple of str
        Texts that end an answer, in addition to end-of-generation tokens.
    supports_reasoning : bool
        Whether reasoning is separated from content.
    """

    def __init__(
        self,
        native: chat_format.ChatFormat,
        model: lib.Model,
        schemas: Mapping[str, Any],
        stop: Sequence[str],
        grammar: str,
        parallel: bool,
    ) -> None:
        facts = json.loads(native.facts())
        self._native = native
        self._model = model
        self._schemas = schemas
        self._ends = tuple(stop)
        self._is_parallel = parallel
        self.grammar: str | None = grammar or None
        self.triggers: tuple[str, ...] | None = tuple(facts["triggers"]) if facts["lazy"] else None
        self.generation_prompt: str = facts["generation_prompt"]
        self.stop: tuple[str, ...] = tuple(facts["stop"])
        self.supports_reasoning: bool = facts["thinking"]

    def parse(self, text: str | TokenInput, *, partial: bool = False) -> ChatMessage:
        """Parse a text into a message.

        Parameters
        ----------
        text
            The model's output: tokens, or text with special tokens written out
            (``detokenize(tokens, special=True)``). May end with an end-of-generation token.
        partial
            Parse the beginning of a message and return what is final of it. Arguments are not
            checked. Never fails.

        Raises
        ------
        ChatParseError
            It is not a message of this format, or a tool's arguments do not match its schema. The
            exception's ``text`` has it.
        """
        if not isinstance(text, str):
            flags = (False, True, TEXT_BYTES_MAX)
            tokens = as_token_array(text)
            text = self._model.detokenize(tokens, *flags).decode("utf-8", "replace")
        for end in self._ends:
            if text.endswith(end):
                text = text[: -len(end)]
                break
        partial = as_bool(partial, "partial")
        try:
            found = json.loads(self._native.parse(text.encode("utf-8", "surrogatepass"), partial))
        except _NATIVE_ERRORS as error:
            raise ChatParseError(
                f"the text is not a message of this model: {error}", text
            ) from None
        # Not every grammar can forbid a second call.
        given = found["tool_calls"][: None if self._is_parallel else 1]
        calls = tuple(self._call(one, text, partial=partial) for one in given)
        return ChatMessage(found["content"], found["reasoning"], calls)

    def _call(self, found: dict[str, str], text: str, *, partial: bool) -> ToolCall:
        name, given = found["name"], found["arguments"]
        arguments = None
        if not partial:
            arguments = _arguments(name, given, text)
            why = violation(arguments, self._schemas.get(name, True))
            if why is not None:
                raise ChatParseError(
                    f"the arguments of {name} do not fit its schema: {why}", text, name
                )
        return ToolCall(name, arguments, given, found["id"] or None)

    def __repr__(self) -> str:
        kind = "free" if self.grammar is None else "at once" if self.triggers is None else "lazy"
        return f"<ChatFormat: {len(self._schemas)} tools, grammar {kind}>"


def _arguments(name: str, given: str, text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError) as error:
        raise ChatParseError(f"the arguments of {name} are not JSON: {error}", text, name) from None
    if not isinstance(arguments, dict):
        raise ChatParseError(f"the arguments of {name} are not a JSON object", text, name)
    return arguments


def make_chat_format(
    model: lib.Model,
    template: str,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: ToolChoice,
    json_schema: object,
    variables: Mapping[str, Any],
    *,
    parallel: bool,
    strict: bool,
    ends: Sequence[str],
) -> ChatFormat:
    """Determine the format of a template's messages with these tools.

    `ends` are the texts of the tokens that end generation.
    """
    parallel = as_bool(parallel, "parallel_tool_calls")
    given, schemas = _tools(tools)
    choice = _choice(tool_choice, given)
    if choice not in ("auto", "none", "required"):
        given = [one for one in given if one["function"]["name"] == choice]
        choice, parallel = "required", False
    if choice == "required" and not given:
        raise ArgumentError("tool_choice asks for a tool, but there are no tools", "tool_choice")
    schema = None
    if json_schema is not None:
        if given and choice != "none":
            raise ArgumentError(
                "json_schema is for answers without tools: pass tool_choice='none'", "json_schema"
            )
        wanted = as_schema(json_schema, "json_schema")
        if wanted in ({}, True):
            wanted = _ANY  # llama.cpp would take an empty schema for none
        schema = convertible(wanted, strict=strict, what="json_schema")
    request = {
        "tools": given,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "json_schema": schema,
    }
    native = _analysed(model, template, request, variables)
    facts = json.loads(native.facts())
    if choice == "required" and not facts["grammar"]:
        raise UnsupportedOperation("chat_format", "this chat template has no tool calls")
    known = {} if choice == "none" else {name: schemas[name] for name in _names(given)}
    grammar = facts["grammar"]
    if choice == "required":
        grammar = _ROOT.sub(lambda rule: _PREAMBLE.sub("", rule.group()), grammar)
    if not parallel:
        grammar = _SEVERAL_CALLS.sub("tool-calls ::= tool-call space", grammar)
    return ChatFormat(native, model, known, (*ends, *facts["stop"]), grammar, parallel)


def _names(tools: list[dict[str, Any]]) -> list[str]:
    return [one["function"]["name"] for one in tools]


def _tools(
    tools: Sequence[Mapping[str, Any]] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return tools for llama.cpp's analysis, and their schemas by name."""
    given: list[dict[str, Any]] = []
    schemas: dict[str, Any] = {}
    for i, one in enumerate(tools or ()):
        what = f"tools[{i}]"
        function = one.get("function") if isinstance(one, Mapping) else None
        if not isinstance(function, Mapping) or one.get("type", "function") != "function":
            raise ArgumentError(
                f"{what} must be {{'type': 'function', 'function': {{'name': ...}}}}", what
            )
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{what} has no 'name'", what, name)
        if name in schemas:
            raise ArgumentError(f"{what}: there are two tools named {name!r}", what, name)
        schema = schemas[name] = as_schema(function.get("parameters") or {}, f"{what} ({name})")
        parameters = convertible(schema, strict=False, what=f"{what} ({name})")
        description = str(function.get("description") or "")
        given.append(
            {
                "type": "function",
                "function": {"name": name, "description": description, "parameters": parameters},
            }
        )
    return given, schemas


def _choice(given: object, tools: list[dict[str, Any]]) -> str:
    """Return "auto", "none", "required" or the name of a tool."""
    if isinstance(given, str) and given in ("auto", "none", "required"):
        return given
    name = given
    if isinstance(given, Mapping):
        function = given.get("function", given)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name in _names(tools):
            return name
    raise ArgumentError(
        f"tool_choice is {name!r}: it must be 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': ...}} with the name of a tool",
        "tool_choice",
        name,
        ("auto", "none", "required", *_names(tools)),
    )


def _analysed(
    model: lib.Model, template: str, request: dict[str, Any], variables: Mapping[str, Any]
) -> chat_format.ChatFormat:
    """Analyse a template for answers with these variables.

    The variable that turns thinking on has many names and different defaults. So the start of the
    answer, rendered by Jinja2, decides which of llama.cpp's two analyses applies.
    """
    from pykvcache.chat import plain, render, special_token_texts

    tokens = special_token_texts(model)
    shown = {"messages": [_USER], "tools": request["tools"] or None, "documents": None}
    try:
        begun, closed = (render(template, shown, {**tokens, **variables}, g) for g in (True, False))
    except ChatTemplateError as error:
        # llama.cpp's engine has no limits, so a template that fails or hangs must do so here.
        if error.reason != "refused":
            raise
        begun = closed = ""  # the template requires other messages
    n = len(commonprefix([begun, closed]))  # noqa: RUF071 - on characters
    begun = begun[n:]
    values = plain(dict(variables), "a variable")
    wanted = values.get("enable_thinking")
    found = [
        _analyse(
            template,
            tokens.get("bos_token", ""),
            tokens.get("eos_token", ""),
            json.dumps({**request, "enable_thinking": thinks, "variables": values}),
        )
        for thinks in ([wanted] if isinstance(wanted, bool) else [True, False])
    ]
    for one in found:
        if json.loads(one.facts())["generation_prompt"] == begun:
            return one
    return found[0]


def _first_analysis(template: str, bos: str, eos: str, request: str) -> chat_format.ChatFormat:
    from pykvcache._native import chat_format

    # Mistral's [CALL_ID] template ends calls with EOS, which the analysis would take for a part.
    eos = "" if "[CALL_ID]" in template else eos
    whole = json.dumps({**json.loads(request), "messages": [_USER]})
    texts = (one.encode("utf-8", "surrogatepass") for one in (template, bos, eos, whole))
    try:
        return chat_format.ChatFormat(*texts)
    except _NATIVE_ERRORS as error:
        raise ChatTemplateError(
            "error", f"llama.cpp finds no format of messages in the chat template: {error}"
        ) from None


_analyse = lru_cache(maxsize=32)(_first_analysis)
