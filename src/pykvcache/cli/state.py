"""``pykvcache state``: files with a saved sequence or context."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from pykvcache.cli.options import CACHE_TYPES, json_option, model_option, number, option
from pykvcache.cli.terminal import load_model, table
from pykvcache.state.container import naming

__all__ = ["state"]

#: Most characters of a value in the table.
LONG = 200

FILE = click.argument("file", type=click.Path())
OUT = click.argument("out", type=click.Path())


@click.group(short_help="Look at, check, cut and convert saved states.")
def state() -> None:
    """Look at, check, cut and convert saved states.

    These are files of LlamaSequence.save, LlamaContext.save_sequence and save_context, llama.cpp's
    own files, and slots that llama-server saved.
    """


@state.command()
@FILE
@json_option("Write a JSON object.")
def info(file: str, as_json: bool) -> None:
    """Show the header of a file, without checking the rest.

    It reads llama.cpp's own files, too.
    """
    with naming(file):
        facts = _llama_facts(file) or _facts(file)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        table([(name.replace("_", " "), _text(value)) for name, value in facts.items()])


@state.command()
@FILE
@model_option
@click.option("--restore", is_flag=True, help="Also restore it into a context of the model.")
def verify(file: str, model: str, restore: bool) -> None:
    """Check every byte of a file.

    The exit code is 1 if the file is damaged, or if --restore is given and the model does not fit
    it. llama.cpp's own files have no checksum: only their structure is checked.
    """
    from pykvcache.state import LlamaStateFile

    with naming(file):
        if _llama_facts(file) is not None:
            LlamaStateFile.load(file)
            what = "well formed (llama.cpp's files have no checksum)"
        else:
            _load(file)
            what = "intact"
        if restore:
            _restored(file, model).close()
            what += ", and fits the model"
    click.echo(f"{file}: {what}")


@state.command()
@FILE
@OUT
@option(
    "-n --tokens",
    "Number of tokens to keep, from the first.",
    type=number(0, 2**31 - 1),
    required=True,
)
def cut(file: str, out: str, tokens: int) -> None:
    """Write the first tokens of a state to OUT.

    For example: pykvcache state cut story.kv start.kv -n 100

    A recurrent state cannot be cut: it is one state for all of its tokens.
    """
    from pykvcache import SequenceState

    with naming(file):
        sequence = SequenceState.load(file, mapped=False)
    if tokens > len(sequence):
        raise click.UsageError(f"{tokens} tokens asked for: the file holds {len(sequence)}")
    with naming(file):
        part = sequence[:tokens]
    size = part.save(out)
    click.echo(f"{out}: {tokens} of {len(sequence)} tokens, {size:,} bytes")


@state.command()
@FILE
@OUT
@model_option
@option(
    "--to",
    "Format of OUT; llama-server restores llama.cpp's as a slot.",
    type=click.Choice(["pykvcache", "llama.cpp"]),
    default="pykvcache",
)
@option(
    "--type-k",
    "Type in which OUT stores keys. Default: that of FILE.",
    type=click.Choice(CACHE_TYPES),
)
@option(
    "--type-v",
    "Type in which OUT stores values. Default: that of FILE.",
    type=click.Choice(CACHE_TYPES),
)
def convert(
    file: str, out: str, model: str, to: str, type_k: str | None, type_v: str | None
) -> None:
    """Write a state with other types, or in another format.

    For example: pykvcache state convert -m model.gguf chat.kv small.kv --type-k q8_0 --type-v q8_0

    --to, --type-k and --type-v are the changes; without them a file of llama.cpp becomes one of
    pykvcache. It needs the model of the state: a context of it restores the state and writes it.
    """
    import os

    if os.path.exists(out) and os.path.samefile(file, out):
        raise click.UsageError("OUT is FILE: give it another name")
    with naming(file):
        if to == "pykvcache" and _has_types(file, type_k, type_v):
            raise click.UsageError(
                f"{file} would stay as it is: say what to change by --to, --type-k or --type-v"
            )
        ctx = _restored(file, model, type_k, type_v)
    with ctx:
        tokens, metadata = _user_data(file)
        if to == "llama.cpp":
            size = ctx.save_llama_file(out, 0, tokens)
        else:
            size = ctx.save_sequence(out, 0, tokens, metadata)
    click.echo(f"{out}: {to}, {size:,} bytes")


def _facts(file: str) -> dict[str, Any]:
    from pykvcache import describe_state

    found = describe_state(file)
    facts = {
        "file": file,
        "kind": found.kind,
        "tokens": found.n_tokens,
        "token_ids": found.has_tokens,
        "types": ", ".join(f"{k} {v}" for k, v in found.types.items()),
        "checksum": found.checksum,
        "bytes": found.n_bytes,
        "metadata": dict(found.metadata),
    }
    for name, value in dataclasses.asdict(found.fingerprint).items():
        facts[f"fingerprint_{name}"] = value
    return facts


def _llama_facts(file: str) -> dict[str, Any] | None:
    """Return the facts of a file of llama.cpp; None of any other."""
    from pykvcache.errors import StateFormatError
    from pykvcache.state import LlamaStateFile

    try:
        found = LlamaStateFile.load(file)
    except StateFormatError:
        return None
    return {
        "file": file,
        "kind": f"{found.kind} of llama.cpp, version {found.version}",
        "tokens": len(found.tokens),
        "token_ids": len(found.tokens) > 0,
        "state_bytes": len(found.state),
    }


def _has_types(file: str, type_k: str | None, type_v: str | None) -> bool:
    """Whether a file is one of pykvcache, with these types of keys and values."""
    from pykvcache import describe_state

    if _llama_facts(file) is not None:
        return False
    types = describe_state(file).types
    return all(wanted in (None, types.get(part)) for part, wanted in (("k", type_k), ("v", type_v)))


def _load(file: str) -> Any:
    from pykvcache import SequenceState, describe_state
    from pykvcache.state import ContextState

    whole = describe_state(file).kind == "context"
    return ContextState.load(file) if whole else SequenceState.load(file)


def _user_data(file: str) -> tuple[Any, Any]:
    """Return the token ids and the metadata that go with a sequence."""
    from pykvcache.state import LlamaStateFile

    if _llama_facts(file) is not None:
        tokens = LlamaStateFile.load(file).tokens
        return (tokens if len(tokens) else None), None
    found = _load(file)
    return found.tokens, found.metadata


def _restored(file: str, model: str, type_k: str | None = None, type_v: str | None = None) -> Any:
    """Return a context with the file's state in sequence 0."""
    from pykvcache import LlamaContext, describe_state

    theirs = _llama_facts(file)
    options: dict[str, Any] = {}
    whole = False
    if theirs is None:
        found = describe_state(file)
        whole = found.kind == "context"
        options = {f"type_{part}": kind for part, kind in found.types.items() if part in "kv"}
        n_tokens = found.n_tokens
    else:
        n_tokens = theirs["tokens"]
        whole = theirs["kind"].startswith("context")
    if whole:
        raise click.UsageError(f"{file} holds a whole context: load it with ctx.load_context")
    if type_k is not None:
        options["type_k"] = type_k
    if type_v is not None:
        options["type_v"] = type_v
    with load_model(model) as loaded:
        ctx = LlamaContext(loaded, n_ctx=max(256, n_tokens), n_seq_max=1, **options)
        try:
            if theirs is None:
                ctx.load_sequence(file, 0, convert=True)
            else:
                ctx.load_llama_file(file, 0)
        except BaseException:
            ctx.close()
            raise
        return ctx


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (dict, list)):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= LONG else f"{text[:LONG]}... (--json shows all)"
    return str(value)
