"""A chat request as a job of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvcache.chat_format import ChatFormat
from pykvcache.openai_format import schema_of
from pykvcache.serve.answers import sampler_of
from pykvcache.serve.engine import Engine, Job
from pykvcache.serve.errors import ApiError
from pykvcache.serve.prompts import chat_prompt
from pykvcache.serve.schemas import ChatRequest

__all__ = ["ChatJob", "chat_job"]


@dataclass(frozen=True)
class ChatJob:
    """A chat that is ready to run, and how its output is read.

    Attributes
    ----------
    job
        For the engine.
    format
        How the model writes reasoning and tool calls.
    """

    job: Job
    format: ChatFormat


def chat_job(request: ChatRequest, engine: Engine, tenant: str) -> ChatJob:
    """Return what the engine runs for a chat request.

    Raises
    ------
    ApiError
        400: the messages, tools or formats are not what they should be.
    """
    if request.add_generation_prompt and request.continue_final_message:
        raise ApiError(400, "add_generation_prompt and continue_final_message exclude each other")
    model = engine.llm.model
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    tools = None if request.tool_choice == "none" else request.tools
    continues = request.continue_final_message or (
        request.add_generation_prompt is None
        and request.messages[-1:] != []
        and request.messages[-1].get("role") == "assistant"
    )
    prompt = chat_prompt(
        model,
        request.messages,
        tools=tools,
        ttl=request.cache_ttl,
        continues=continues,
        variables=variables,
    )
    schema = schema_of(request.response_format)
    given: Any = request.json_schema
    form = model.chat_format(
        tools=tools,
        tool_choice=request.tool_choice or "auto",  # type: ignore[arg-type]
        parallel_tool_calls=request.parallel_tool_calls,
        json_schema=given if schema is None else schema,
        strict=False,
        **variables,
    )
    request.json_schema = None  # the format has it
    more = {} if form.grammar is None or request.grammar is not None else {"chat_format": form}
    job = Job(
        tokens=prompt.tokens,
        max_tokens=request.limit,
        sampler=sampler_of(request, model, **more),
        n=request.n,
        stop=(*request.stops, *form.stop),
        logprobs=max(request.top_logprobs or 0, 1) if request.logprobs else 0,
        namespace=tenant,
        use_cache=request.cache_prompt,
        boundaries=prompt.boundaries,
        breakpoints=prompt.breakpoints,
    )
    return ChatJob(job, form)
