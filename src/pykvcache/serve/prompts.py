"""From messages to a job: the rendered chat, its boundaries and breakpoints, its sampler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.model import LlamaModel
from pykvcache.openai_format import schema_of
from pykvcache.sampling import SETTINGS, Sampler
from pykvcache.sequence.ledger import common_prefix
from pykvcache.serve.engine import Breakpoint, Engine, Job
from pykvcache.serve.errors import ApiError
from pykvcache.serve.schemas import ChatRequest, Sampling, seconds

__all__ = ["ChatPrompt", "chat_job", "chat_prompt", "prompts_of", "sampler_of"]

#: Maximum number of breakpoints per request; only the last ones are used.
MOST_BREAKPOINTS = 4
#: How many of the latest message ends become boundaries, in addition to the first one.
MOST_BOUNDARIES = 16
#: Seconds for which a breakpoint without a ttl is kept: OpenAI's default.
DEFAULT_TTL = 1800.0

# Arguments of `apply_chat_template` and `chat_format`, which no variable may replace.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "template", "tool_choice"}
_RESERVED |= {"parallel_tool_calls", "json_schema", "strict", "self"}

# Fields that are arguments of `Sampler` by the same names.
_SAMPLING = (*SETTINGS, "dry_sequence_breakers", "grammar", "json_schema")
# Fields for which -1 means the whole context, llama-server's names first.
_LAST_N = {
    "repeat_last_n": "penalty_last_n",
    "dry_penalty_last_n": "dry_last_n",
    "penalty_last_n": "penalty_last_n",
    "dry_last_n": "dry_last_n",
}
# Other names in ``samplers``; None is ignored: adaptive-p always runs last, infill is missing.
_STAGES = {"typ_p": "typical_p", "adaptive_p": None, "infill": None}
# Fields that a negative number turns off in llama-server.
_OFF = {"adaptive_target": None, "top_n_sigma": 0.0}

_TEXTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True)
class ChatPrompt:
    """The tokens of a conversation.

    Attributes
    ----------
    text
        The rendered text.
    tokens
        int32, shape (n,).
    ends
        Numbers of tokens after which each message ends.
    breakpoints
        Prefixes to keep.
    """

    text: str
    tokens: npt.NDArray[np.int32]
    ends: tuple[int, ...]
    breakpoints: tuple[Breakpoint, ...]

    @property
    def boundaries(self) -> set[int]:
        """Where other prompts are likely to diverge: after the first and the latest messages."""
        return {
            *self.ends[:1],
            *self.ends[-MOST_BOUNDARIES:],
            *(p.n_tokens for p in self.breakpoints),
        }


def chat_prompt(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    ttl: float | None = None,
    continues: bool = False,
    answers: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Render a conversation and find where its messages end.

    Parameters
    ----------
    engine
        Has the template and the tokenizer.
    messages
        In OpenAI's form.
    tools
        In OpenAI's form.
    ttl
        Seconds for breakpoints that name none.
    continues
        Whether the answer continues the last message, which must be the assistant's.
    answers
        Whether the prompt ends with the beginning of an answer.
    variables
        Variables of the template, such as ``enable_thinking``.
    """
    if not messages:
        raise ApiError(400, "messages is empty", param="messages")
    given = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if continues and [message["role"] == "assistant" for message in given[-2:]][-2:] not in (
        [True],
        [False, True],
    ):
        told = "the messages must end with exactly one assistant message, which is continued"
        raise ApiError(400, told, param="messages")
    variables = _variables(variables, engine)
    model = engine.llm.model
    text = model.apply_chat_template(
        given,
        tools=tools,
        add_generation_prompt=answers and not continues,
        template=engine.defaults.template,
        **variables,
    )
    ends = _ends(text, [message["content"] for message in given])
    if continues:
        text = text[: ends[-1]]
    tokens = model.tokenize(text, add_special=False, parse_special=True)
    after = _counter(model, text, tokens)
    places = [
        Breakpoint(after(at), kept)
        for at, kept in _breakpoints(text, ends, messages, DEFAULT_TTL if ttl is None else ttl)
    ]
    places = [place for place in places if place.n_tokens][-MOST_BREAKPOINTS:]
    return ChatPrompt(text, tokens, tuple(map(after, ends)), tuple(places))


def _variables(given: Mapping[str, Any] | None, engine: Engine) -> dict[str, Any]:
    """Return the variables of a template; refuse those that the server sets."""
    found = {**engine.defaults.variables, **(given or {})}
    if names := sorted(_RESERVED & found.keys()):
        told = f"chat_template_kwargs sets {', '.join(names)}"
        raise ApiError(400, told, param="chat_template_kwargs")
    return found


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a message in the form of templates: content as text, arguments as objects."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where} has no role", param=f"{where}.role")
    if content is None and not message.get("tool_calls") and not message.get("reasoning_content"):
        raise ApiError(400, f"{where} has no content", param=f"{where}.content")
    marks = ("cache_control", "prompt_cache_breakpoint")
    new = {key: value for key, value in message.items() if key not in marks}
    new["role"] = "system" if role == "developer" else role
    new["content"] = "\n\n".join(_texts(content, f"{where}.content"))
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, f"{where}.tool_calls is not a list", param=where)
        new["tool_calls"] = [_call(call, where) for call in calls]
    return new


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a message's content, which is a string or a list of parts."""
    if isinstance(content, str) or content is None:
        return [content or ""]
    if not isinstance(content, list):
        told = f"{where} is {type(content).__name__}: it must be text, or a list of parts"
        raise ApiError(400, told, param=where)
    found = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(text, str):
            what = "image input is not supported: " if "image" in str(kind) else ""
            told = f"{what}{where} has a part of type {kind!r}, but this server reads only text"
            raise ApiError(400, told, param=where)
        found.append(text)
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        told = f"{where}.tool_calls: each must have a function with a name"
        raise ApiError(400, told, param=where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


# Places in the text -------------------------------------------------------------------------------


def _ends(text: str, contents: Sequence[str]) -> list[int]:
    """Return where each content ends in the rendered text.

    Templates may trim a content or leave it out: then it ends where the one before ends.
    """
    found, at = [], 0
    for content in contents:
        content = content.strip()
        begin = text.find(content, at)
        at = begin + len(content) if begin >= 0 else at
        found.append(at)
    return found


def _breakpoints(
    text: str, ends: Sequence[int], messages: Sequence[Mapping[str, Any]], ttl: float
) -> Iterator[tuple[int, float]]:
    """Yield where breakpoints are, and how many seconds each is kept."""
    for i, message in enumerate(messages):
        content = message.get("content")
        at = ends[i - 1] if i else 0
        for part in content if isinstance(content, list) else []:
            part_text = part["text"].strip() if isinstance(part.get("text"), str) else ""
            begin = text.find(part_text, at, ends[i])
            at = begin + len(part_text) if begin >= 0 else at
            if (kept := _ttl(part, i, ttl)) is not None:
                yield at, kept
        if (kept := _ttl(message, i, ttl)) is not None:
            yield ends[i], kept


def _ttl(thing: Mapping[str, Any], i: int, default: float) -> float | None:
    """Return the ttl of a message's or part's breakpoint in seconds; None without one."""
    wish = thing.get("prompt_cache_breakpoint") or thing.get("cache_control")
    if wish is None:
        return None
    if not isinstance(wish, Mapping):
        raise ApiError(400, "a breakpoint must be an object", param=f"messages[{i}]")
    return seconds(wish["ttl"]) if wish.get("ttl") is not None else default


def _counter(model: LlamaModel, text: str, tokens: npt.NDArray[np.int32]) -> Callable[[int], int]:
    """Return a function that counts the tokens before an index of the text.

    A token that spans the index is not counted.
    """
    sizes = [len(model.token_to_piece(token, special=True)) for token in tokens.tolist()]
    ends = np.array(list(accumulate(sizes)), np.int64)
    more = int(ends[-1]) - len(text.encode("utf-8", "surrogatepass")) if len(ends) else 0
    if 0 <= more <= 1:  # some tokenizers put a space in front

        def count(at: int) -> int:
            n_bytes = len(text[:at].encode("utf-8", "surrogatepass"))
            return int(np.searchsorted(ends, n_bytes + more, side="right"))

        return count

    def tokenize(at: int) -> int:
        before = model.tokenize(text[:at], add_special=False, parse_special=True)
        return common_prefix(before, tokens)

    return tokenize


# Jobs ---------------------------------------------------------------------------------------------


def chat_job(request: ChatRequest, tenant: str, engine: Engine) -> Job:
    """Return the job of a chat.

    Raises
    ------
    ApiError
        400: the messages, tools or formats are not valid.
    """
    if request.add_generation_prompt and request.continue_final_message:
        raise ApiError(400, "add_generation_prompt and continue_final_message exclude each other")
    variables = _variables(request.chat_template_kwargs, engine)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    tools = None if request.tool_choice == "none" else request.tools or None
    is_last_ours = request.messages[-1:] != [] and request.messages[-1].get("role") == "assistant"
    continues = request.continue_final_message or (
        request.add_generation_prompt is None and is_last_ours
    )
    prompt = chat_prompt(
        engine,
        request.messages,
        tools=tools,
        ttl=request.cache_ttl,
        continues=continues,
        answers=request.add_generation_prompt is not False,
        variables=variables,
    )
    n, places, keep = len(prompt.tokens), prompt.breakpoints, None
    if request.is_explicit:
        keep = max((place.n_tokens for place in places), default=0)
    elif request.cache_ttl is not None and (not places or places[-1].n_tokens < n):
        places = (*places[1 - MOST_BREAKPOINTS :], Breakpoint(n, request.cache_ttl))
    schema: Any = schema_of(request.response_format)
    allowed, choice = _allowed(tools, request.tool_choice)
    form = engine.llm.model.chat_format(
        tools=allowed,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        json_schema=request.json_schema if schema is None else schema,  # type: ignore[arg-type]
        strict=False,
        template=engine.defaults.template,
        **variables,
    )
    request.json_schema = None  # the chat format includes the schema
    if keep is None and form.supports_reasoning and not tools:
        keep = n  # templates leave out earlier reasoning, unless tools are called
    held = {} if form.grammar is None or request.grammar is not None else {"chat_format": form}
    return Job(
        prompts=(prompt.tokens,),
        max_tokens=request.limit,
        sampler=sampler_of(request, engine, **held),
        n=request.n,
        stop=(*request.stops, *form.stop, *engine.defaults.stop),
        logprobs=max(request.top_logprobs or 0, 1) if request.logprobs else 0,
        namespace=tenant,
        use_cache=request.cache_prompt and keep != 0,
        boundaries=tuple(sorted(prompt.boundaries - {0, n})),
        breakpoints=places,
        keep=keep,
        format=form,
    )


def _allowed(tools: list[dict[str, Any]] | None, choice: Any) -> tuple[Any, Any]:
    """Return the tools that may be called, and the choice among them.

    ``allowed_tools`` selects some: the prompt keeps all, so that its prefix stays cached.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice or "auto"
    wish = choice.get("allowed_tools", choice)  # in the Responses API, the members are its own
    try:
        mode, named = wish["mode"], [one for one in wish["tools"] if one["type"] == "function"]
        names = [one.get("function", one)["name"] for one in named]
    except (TypeError, KeyError, AttributeError):
        mode, names = None, []
    known = {one["function"]["name"]: one for one in tools or ()}
    if mode not in ("auto", "required") or not known.keys() >= set(names):
        told = "allowed_tools must have a mode, 'auto' or 'required', and functions of the request"
        raise ApiError(400, told, param="tool_choice")
    return [one for name, one in known.items() if name in names], mode


def sampler_of(request: Sampling, engine: Engine, **more: Any) -> Sampler:
    """Return the sampler of a request.

    Parameters
    ----------
    request
        Fields that are None stand for the server's defaults, or `Sampler`'s.
    engine
        Has the defaults and the vocabulary.
    **more
        Further arguments of `Sampler`, such as ``chat_format``.
    """
    model, options = engine.llm.model, dict(engine.defaults.sampling)
    asked = {name: getattr(request, name) for name in _SAMPLING}
    options.update({name: value for name, value in asked.items() if value is not None})
    if request.top_k is not None:
        options["top_k"] = max(request.top_k, 0)  # -1 is vLLM's "all"
    for theirs, ours in _LAST_N.items():
        if (n := getattr(request, theirs)) is not None:
            most = min(engine.llm.context.n_ctx_seq, SETTINGS[ours].high)
            options[ours] = most if n < 0 else n
    if request.samplers is not None:
        names = (_STAGES.get(name, name) for name in request.samplers)
        options["stages"] = [name for name in names if name is not None]
    for name, off in _OFF.items():
        if (value := asked[name]) is not None and value < 0:
            options[name] = off
    if request.seed is not None and request.seed >= 0:
        options["seed"] = request.seed % (2**32 - 1)
    biases = _biases(request.logit_bias, model) if request.logit_bias else {}
    if request.ignore_eos:
        biases.update(dict.fromkeys(engine.end_tokens, -math.inf))
    if biases:
        options["logit_bias"] = biases
    if "grammar" in options and "json_schema" in options:
        raise ApiError(400, "grammar and a JSON schema exclude each other", param="grammar")
    return Sampler(model=model, **options, **more)


def _biases(given: Any, model: LlamaModel) -> dict[int, float]:
    """Return biases by token id, from OpenAI's mapping or llama-server's pairs with text."""
    found: dict[int, float] = {}
    for key, value in given.items() if isinstance(given, dict) else given:
        bias = -math.inf if value is False else float(value)
        if isinstance(key, str) and not key.lstrip("-").isdecimal():
            ids = model.tokenize(key, add_special=False).tolist()
        else:
            ids = [int(key)]
        found.update(dict.fromkeys(ids, -math.inf if bias <= -100 else bias))
    return found


def prompts_of(given: Any, *, depth: int = 0) -> list[list[str | list[int]]]:
    """Return the prompts of a completion, each as texts and runs of token ids in their order.

    Raises
    ------
    ApiError
        400: it holds something else, or more than 2,048 prompts.
    """
    if isinstance(given, str):
        return [[given]]
    if isinstance(given, dict):
        text = given.get("prompt_string")
        if not isinstance(text, str) or given.get("multimodal_data"):
            raise ApiError(400, "prompt: this server reads text and token ids only", param="prompt")
        return [[text]]
    if isinstance(given, list) and given and depth < 2:
        if any(isinstance(one, int) and not isinstance(one, bool) for one in given):
            return [_mixed(given)]
        if len(given) > 2048:
            raise ApiError(400, f"{len(given)} prompts were given: at most 2048", param="prompt")
        return [prompt for one in given for prompt in prompts_of(one, depth=depth + 1)]
    raise ApiError(
        400, "prompt must be text, token ids, or a non-empty list of prompts", param="prompt"
    )


def _mixed(given: list[Any]) -> list[str | list[int]]:
    parts: list[str | list[int]] = []
    for one in given:
        if isinstance(one, str):
            parts.append(one)
        elif isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31:
            if not parts or isinstance(parts[-1], str):
                parts.append([])
            parts[-1].append(one)  # type: ignore[union-attr]
        else:
            raise ApiError(
                400, "prompt holds something that is neither text nor a token id", param="prompt"
            )
    return parts
