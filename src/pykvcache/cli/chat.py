"""``pykvcache chat``."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import click

from pykvcache._arguments import FileId, file_id
from pykvcache.cli.conversation import Conversation, TurnFigures
from pykvcache.cli.options import (
    context_options,
    make_sampler,
    model_option,
    number,
    option,
    read_file,
    sampling_options,
    stop_option,
    template_option,
)
from pykvcache.cli.terminal import is_terminal, load_model, note, one_line, open_from_options
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError
from pykvcache.sampling import Sampler
from pykvcache.sequence.pool import pool_of
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["Chat", "chat"]

_EPILOG = """
\b
Examples:
  pykvcache chat -m model.gguf
  pykvcache chat -m model.gguf --session chat.kv        continues a saved chat
  pykvcache chat -m model.gguf --system "Answer briefly."
\b
In the chat: /help lists the commands (/fork, /switch, /rewind, /save, ...). Ctrl-C ends an answer,
Ctrl-D the chat.
"""

_ENDS = "(Ctrl-D, or /exit, ends the chat)"

_HELP = """\
/rewind [N]      remove the last turn, or the last N
/fork [NAME]     continue in a copy, which shares the tokens; this branch stays as it is
/switch NAME     continue another branch; /branches lists them
/history         show the messages
/save FILE       save this branch to a file;  /load FILE  continues one
/stats           tokens, cells and bytes
/exit            end the chat (so does Ctrl-D)"""


@click.command(
    short_help="Chat with a model: branches, rewinds, saved chats.",
    epilog=_EPILOG,
    context_settings={"allow_extra_args": True},  # refused below, with a hint
)
@model_option
@option(
    "-s --session",
    "File that holds the chat: an existing chat continues, and every turn is saved.",
    type=click.Path(dir_okay=False),
)
@option("--system", "The system message of a new chat.")
@template_option
@option(
    "-n --max-tokens",
    "Tokens per answer, at most half of --n-ctx.",
    type=number(1, 2**20),
    default=256,
)
@stop_option("Text that ends an answer; may be given several times.")
@sampling_options
@context_options
def chat(
    model: str,
    session: str | None,
    system: str | None,
    template: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Chat with a model; each turn evaluates only the new tokens.

    A model with a chat template answers; one without continues the text, line by line.
    """
    if more := click.get_current_context().args:
        raise click.UsageError(
            f"unexpected argument {more[0]}: --session {more[0]} continues the chat in a file, "
            f"-m {more[0]} chats with a model"
        )
    if session is not None:
        _check_folder(session)
    text = None if template is None else read_file(template)
    with (
        load_model(model, options["n_gpu_layers"]) as loaded,
        open_from_options(loaded, options, n_seq_max=8) as ctx,
    ):
        sampler = make_sampler(options)
        one = Chat(ctx, system, session, text)
        one.begin()
        max_tokens = min(max_tokens, max(1, ctx.n_ctx_seq // 2))
        while not one.is_over and (line := _read()) is not None:
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    one.obey(line)
                else:
                    one.answer(line, max_tokens, sampler, stop)
            except KeyboardInterrupt:  # between two turns; `end` saves the chat
                click.echo()
                note(_ENDS)
        one.end()


def _check_folder(session: str) -> None:
    """Refuse a file that cannot be written, before the first turn."""
    folder = os.path.dirname(os.path.realpath(session))
    if not os.path.isdir(folder):
        raise click.UsageError(f"--session {session}: there is no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.ClickException(
            f"--session {session}: no file can be created in {folder} ({error.strerror})"
        ) from None


def _read() -> str | None:
    """Return a line; None at the end of the input."""
    if not is_terminal(sys.stdin):
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history for input())
    is_coloured = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    try:
        # \001 and \002 keep readline from counting the colour as columns.
        return input("\001\033[1m\002> \001\033[0m\002" if is_coloured else "> ")
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        note(_ENDS)
        return ""


# Files --------------------------------------------------------------------------------------------


class Files:
    """The contents of the files that a chat read and wrote, unless another program wrote them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[FileId | None, object]] = {}

    def add(self, path: str, identity: FileId | None, content: object) -> None:
        """Note the content of a file that has this identity."""
        self._known[os.path.realpath(path)] = identity, content

    def has(self, one: Conversation, path: str | None = None) -> bool:
        """Whether a file, or any file, holds this conversation with all of its turns."""
        paths = list(self._known) if path is None else [os.path.realpath(path)]
        now = ((self._known.get(each), (_id_of(each), one.snapshot())) for each in paths)
        return any(known == found and found[0] is not None for known, found in now)

    def save(self, one: Conversation, path: str) -> None:
        """Write a conversation, unless the file holds it or another program has changed it."""
        if self.has(one, path):
            return
        known, _ = self._known.get(os.path.realpath(path), (None, None))
        if _id_of(path) not in (None, known):
            raise FileExistsError(
                f"another program has written {path} since, so it was not overwritten: "
                "use /save OTHER to save this chat"
            )
        self.write(one, path)

    def write(self, one: Conversation, path: str) -> int:
        """Write a conversation, and return the file's size in bytes."""
        # A turn of the pool defers Ctrl-C: else it may look as if another program had written it.
        with pool_of(one.context):
            size = one.save(path)
            self.add(path, _id_of(path), one.snapshot())
        return size


def _id_of(path: str) -> FileId | None:
    """Return the identity of a file, which a write changes; None if the file does not exist."""
    with contextlib.suppress(OSError):
        return file_id(path)
    return None


# The chat -----------------------------------------------------------------------------------------


class Chat:
    """The branches of a chat, each a conversation, and the commands that work on them.

    The file `session` is continued and saved; `system` is the system message of a new chat.
    """

    def __init__(
        self,
        ctx: LlamaContext,
        system: str | None,
        session: str | None,
        template: str | None = None,
    ) -> None:
        self._ctx, self._system, self._template = ctx, system, template
        self._session, self._files = session, Files()
        self._branches: dict[str, Conversation] = {}
        self._name = "main"
        self._changed: Conversation | None = None  # the branch that changed last
        self.is_over = False

    @property
    def branch(self) -> Conversation:
        """The branch that is continued."""
        return self._branches[self._name]

    def begin(self) -> None:
        """Continue the session's file, or begin a new chat."""
        if self._session is not None:
            self._ctx.native.state_layout("save")  # raises if this memory has no states to save
            if os.path.exists(self._session):
                self._load(self._session)
                return
        new = Conversation(LlamaSequence(self._ctx), template=self._template)
        self._branches[self._name] = new
        if self._system is not None and new.has_template:
            new.messages.append({"role": "system", "content": self._system})
        if not new.has_template:
            note("(the model has no chat template: it continues your text, line by line)")
            if self._system is not None:
                note("(without a template there is no system message)")
        note("(/help lists the commands)")

    def end(self) -> None:
        """Save the branch if necessary, and report where the chat is."""
        if (session := self._session) is None:
            return
        # A branch that was only looked at does not replace the one that was continued.
        is_new = not os.path.exists(session)
        if self.branch.turns and (self._changed is self.branch or is_new):
            self._keep()
        held = [name for name, one in self._branches.items() if self._files.has(one, session)]
        if self._name in held:
            note(f"({session} holds this chat: the same command continues it)")
        elif held:
            note(f"({session} holds branch {held[0]}: the same command continues it)")
        elif os.path.exists(session):
            note(f"({session} holds a different chat)")
        branches = self._branches.items()
        lost = [name for name, one in branches if one.turns and not self._files.has(one)]
        if lost:
            note(f"(not saved: {'branch' if len(lost) == 1 else 'branches'} {', '.join(lost)})")

    def _keep(self) -> None:
        """Save the branch to the session's file, if there is one."""
        if self._session is None:
            return
        try:
            self._files.save(self.branch, self._session)
        except (OSError, KvCacheError) as error:  # the next turn may be saved
            if not self._files.has(self.branch):
                note(f"(this turn is not saved: {one_line(error)})")

    def answer(
        self, line: str, max_tokens: int, sampler: Sampler, stop: tuple[str, ...] = ()
    ) -> None:
        """Write the model's answer while it is generated; Ctrl-C ends it."""
        figures, self._changed = TurnFigures(), self.branch
        pieces = self.branch.say(line, max_tokens, sampler, figures, stop)
        try:
            with contextlib.closing(pieces):
                for piece in pieces:
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            figures.finish = "interrupted"
        except (KvCacheError, ValueError) as error:
            note(f"({error})")
            self._keep()
            return
        except BaseException:  # the output is closed, memory runs out: the turn is saved
            self._keep()
            raise
        self._keep()
        click.echo()
        self._report(figures)

    def _report(self, figures: TurnFigures) -> None:
        took = f"evaluated in {figures.evaluating * 1e3:.0f} ms"
        parts = [f"{figures.n_prompt} tokens: {figures.reused} reused, {figures.evaluated} {took}"]
        if figures.is_evaluated:
            parts.append(f"{figures.generated} generated")
            if figures.generated > 1 and figures.generating > 0:
                parts[-1] += f", {figures.generated / figures.generating:.0f} tokens/s"
        if figures.dropped:
            parts.append(f"no room for the answer: {_turns(figures.dropped)} dropped, the oldest")
        ends = {"length": "cut at --max-tokens or half of --n-ctx", "full": "the cache is full"}
        if (why := ends.get(figures.finish or "", figures.finish)) not in ("stop", None):
            parts.append(str(why))
        note(f"[{'; '.join(parts)}]")

    # Commands -------------------------------------------------------------------------------

    def obey(self, line: str) -> None:
        """Run a line that begins with a slash."""
        known: dict[str, Callable[[list[str]], None]] = {
            "help": lambda _: click.echo(_HELP),
            "rewind": self._rewind,
            "fork": self._fork,
            "switch": self._switch,
            "branches": self._list,
            "history": self._history,
            "save": self._save,
            "load": lambda words: self._load(_one(words, "/load FILE")),
            "stats": self._stats,
            "exit": self._exit,
            "quit": self._exit,
        }
        try:
            word, *rest = shlex.split(line[1:]) or [""]
            if word not in known:
                raise ValueError(f"there is no command /{word}: /help lists all commands")
            known[word](rest)
        except (KvCacheError, OSError, ValueError, click.ClickException) as error:
            note(f"({one_line(error)})")

    def _rewind(self, words: list[str]) -> None:
        try:
            n = int(_one(words, "/rewind N")) if words else 1
        except ValueError:
            raise ValueError("/rewind takes a number of turns") from None
        if n < 1:
            raise ValueError("/rewind removes at least 1 turn")
        if n > (there := len(self.branch.turns)):
            raise ValueError(f"the chat has only {_turns(there)}")
        self._changed = self.branch
        self.branch.rewind(n)
        note(f"({_turns(n)} removed: {self._size(self.branch, left=' left')})")
        self._keep()

    def _fork(self, words: list[str]) -> None:
        name = _one(words, "/fork NAME") if words else f"branch{len(self._branches)}"
        if name in self._branches:
            raise ValueError(f"there is a branch {name} already")
        self._branches[name] = self.branch.fork()
        left, self._name = self._name, name
        note(f"(this is {name} now: {len(self.branch.sequence)} tokens are shared with {left})")

    def _switch(self, words: list[str]) -> None:
        name = _one(words, "/switch NAME")
        if name not in self._branches:
            raise ValueError(f"there is no branch {name}: {', '.join(self._branches)}")
        self._name = name
        note(f"({name}: {self._size(self.branch)})")

    def _list(self, words: list[str]) -> None:
        for name, one in self._branches.items():
            click.echo(f"{'*' if name == self._name else ' '} {name}: {self._size(one)}")

    def _history(self, words: list[str]) -> None:
        for message in self.branch.messages:
            click.echo(f"{message['role']}: {message['content'].strip()}")

    def _save(self, words: list[str]) -> None:
        path = _one(words, "/save FILE")
        size = self._files.write(self.branch, path)
        note(f"({path}: {_turns(len(self.branch.turns))}, {size:,} bytes)")

    def _load(self, path: str) -> None:
        identity = _id_of(path)  # before it is read: another program may write it at any time
        one = Conversation.load(self._ctx, path, self._template)
        old = self._branches.get(self._name)
        self._branches[self._name] = one
        if old is not None:
            old.sequence.close()
        self._files.add(path, identity, one.snapshot())
        pending = len(one.sequence) - one.sequence.n_evaluated
        note(f"({path}: {self._size(one)}, {pending} not yet evaluated)")

    def _stats(self, words: list[str]) -> None:
        ctx = self._ctx
        size = sum(each.context for each in ctx.memory_breakdown().values())
        note(
            f"({len(self.branch.sequence)} tokens here; {ctx.n_cells_used} of {ctx.n_ctx} cells, "
            f"{size:,} bytes; {ctx.tokens_evaluated} tokens evaluated)"
        )

    def _exit(self, words: list[str]) -> None:
        self.is_over = True

    @staticmethod
    def _size(one: Conversation, left: str = "") -> str:
        return f"{_turns(len(one.turns))}{left}, {len(one.sequence)} tokens"


def _turns(n: int) -> str:
    return f"{n} turn" if n == 1 else f"{n} turns"


def _one(words: list[str], usage: str) -> str:
    if len(words) != 1:
        raise ValueError(f"usage: {usage}")
    return words[0]
