"""What the chat does with a line: an answer, or one of its /commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import closing

import click

from pykvcache._arguments import FileId
from pykvcache.cli.session import Session, facts_of
from pykvcache.cli.talk import Figures, Talk
from pykvcache.cli.talk_files import load_talk
from pykvcache.cli.terminal import note, one_line
from pykvcache.context import LlamaContext
from pykvcache.errors import KvCacheError
from pykvcache.sampling import Sampler
from pykvcache.sequence.sequence import LlamaSequence

__all__ = ["Commands"]

HELP = """\
/rewind [N]      take back the last turn, or the last N
/fork [NAME]     go on in a copy; the talk as it is now stays (its tokens are shared)
/switch NAME     go to another branch; /branches lists them
/history         show the talk
/save FILE       keep this branch in a file;  /load FILE  goes on with one
/stats           tokens, cells and bytes
/exit            end (Ctrl-D does, too)"""


class Commands:
    """The branches of a chat, and what can be done with them."""

    def __init__(
        self,
        ctx: LlamaContext,
        system: str | None,
        session: str | None,
        template: str | None = None,
    ) -> None:
        self._ctx, self._system, self._template = ctx, system, template
        self._session = None if session is None else Session(session)
        self._branches: dict[str, Talk] = {}
        self._name = "main"
        self._saved: list[Session] = []  # where /save and /load have been
        self._changed: Talk | None = None  # the one in which something was last said or taken back
        self.is_over = False

    @property
    def talk(self) -> Talk:
        """The branch that goes on."""
        return self._branches[self._name]

    def begin(self) -> None:
        """Go on with the session's file, or begin a talk.

        Raises
        ------
        KvCacheError
            The file is no talk, or this model's memory has no states that could be saved.
        """
        if self._session is not None:
            self._ctx.native.state_layout("save")
            if self._session.exists:
                self._load(self._session.path)
                return
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._branches[self._name] = Talk(
            LlamaSequence(self._ctx), messages, template=self._template
        )
        if not self.talk.has_template:
            note("(the model has no chat template: it goes on with your text, line by line)")
            if self._system is not None:
                note("(without a template there is no system message)")
        note("(/help lists the commands)")

    def end(self) -> None:
        """Keep what is not kept yet, and say where the talk is."""
        session, talk = self._session, self.talk
        if session is None:
            return
        # A branch that was only looked at does not take the place of the one that went on.
        if talk.turns and (self._changed is talk or not session.exists):
            self._keep()
        held = [name for name, one in self._branches.items() if session.holds(one)]
        if self._name in held:
            note(f"({session.path} holds this talk: the same command goes on with it)")
        elif held:
            note(f"({session.path} holds branch {held[0]}: the same command goes on with it)")
        elif session.exists:
            note(f"({session.path} holds another talk than this one)")
        files = [session, *self._saved]
        lost = [
            name
            for name, one in self._branches.items()
            if one.turns and not any(file.holds(one) for file in files)
        ]
        if lost:
            note(f"(not kept: {'branch' if len(lost) == 1 else 'branches'} {', '.join(lost)})")

    def _was_kept(self, path: str, facts: FileId | None) -> None:
        if self._session is not None and self._session.is_at(path):
            self._session.was_read(self.talk, facts)
        else:
            self._saved.append(Session(path))
            self._saved[-1].was_read(self.talk, facts)

    def _keep(self) -> None:
        """Write the talk to the session's file, if there is one, where that differs."""
        if self._session is None:
            return
        try:
            self._session.save(self.talk)
        except (OSError, KvCacheError) as error:  # the talk goes on; the next turn may be kept
            note(f"(this turn is not kept: {one_line(error)})")

    # Turns ----------------------------------------------------------------------------------

    def answer(
        self, line: str, max_tokens: int, sampler: Sampler, stop: tuple[str, ...] = ()
    ) -> None:
        """Let the model answer, as it generates; Ctrl-C ends the answer."""
        figures, self._changed = Figures(), self.talk
        try:
            with closing(self.talk.say(line, max_tokens, sampler, figures, stop)) as pieces:
                for piece in pieces:
                    click.echo(piece, nl=False)
        except KeyboardInterrupt:
            figures.finish = "interrupted"
        except (KvCacheError, ValueError) as error:
            note(f"({error})")
            self._keep()
            return
        except BaseException:  # nobody reads it, memory runs out: what was said is kept
            self._keep()
            raise
        self._keep()
        click.echo()
        self._report(figures)

    def _report(self, figures: Figures) -> None:
        rate = figures.generated / figures.generating if figures.generating > 0 else 0.0
        took = f"evaluated in {figures.evaluating * 1e3:.0f} ms"
        parts = [f"{figures.n_prompt} tokens: {figures.reused} reused, {figures.evaluated} {took}"]
        if figures.is_evaluated:
            parts.append(f"{figures.generated} generated, {rate:.0f} tokens/s")
        if figures.forgotten:
            parts.append(f"the cache is full: {_turns(figures.forgotten)} dropped, the oldest")
        ends = {"length": "cut at --max-tokens", "full": "the cache is full"}
        if (why := ends.get(figures.finish or "", figures.finish)) not in ("stop", None):
            parts.append(str(why))
        note(f"[{'; '.join(parts)}]")

    # Commands -------------------------------------------------------------------------------

    def obey(self, line: str) -> None:
        """Do what a line that begins with a slash asks for."""
        known: dict[str, Callable[[list[str]], None]] = {
            "help": lambda _: click.echo(HELP),
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
                raise ValueError(f"there is no /{word}: /help lists what there is")
            known[word](rest)
        except (KvCacheError, OSError, ValueError, click.ClickException) as error:
            note(f"({one_line(error)})")

    def _rewind(self, words: list[str]) -> None:
        try:
            n = int(_one(words, "/rewind N")) if words else 1
        except ValueError:
            raise ValueError("/rewind takes a number of turns") from None
        if n < 1:
            raise ValueError("/rewind takes back at least 1 turn")
        if n > (there := len(self.talk.turns)):
            raise ValueError(f"there {'is' if there == 1 else 'are'} {_turns(there)} to take back")
        self._changed = self.talk
        gone = self.talk.rewind(n)
        note(
            f"({_turns(gone)} taken back: {_turns(len(self.talk.turns))} left, "
            f"{len(self.talk.sequence)} tokens)"
        )
        self._keep()

    def _fork(self, words: list[str]) -> None:
        number = len(self._branches)
        name = _one(words, "/fork NAME") if words else f"branch{number}"
        if name in self._branches:
            raise ValueError(f"there is a branch {name} already")
        self._branches[name] = self.talk.fork()
        left, self._name = self._name, name
        note(f"(this is {name} now: {len(self.talk.sequence)} tokens are shared with {left})")

    def _switch(self, words: list[str]) -> None:
        name = _one(words, "/switch NAME")
        if name not in self._branches:
            raise ValueError(f"there is no branch {name}: {', '.join(self._branches)}")
        self._name = name
        note(f"({name}: {_turns(len(self.talk.turns))}, {len(self.talk.sequence)} tokens)")

    def _list(self, words: list[str]) -> None:
        for name, talk in self._branches.items():
            mark = "*" if name == self._name else " "
            click.echo(f"{mark} {name}: {_turns(len(talk.turns))}, {len(talk.sequence)} tokens")

    def _history(self, words: list[str]) -> None:
        for message in self.talk.messages:
            click.echo(f"{message['role']}: {message['content'].strip()}")

    def _save(self, words: list[str]) -> None:
        path = _one(words, "/save FILE")
        size = self.talk.save(path)
        self._was_kept(path, facts_of(path))
        note(f"({path}: {_turns(len(self.talk.turns))}, {size:,} bytes)")

    def _load(self, path: str) -> None:
        facts = facts_of(path)  # another program may write it meanwhile
        talk = load_talk(self._ctx, path, self._template)
        old = self._branches.get(self._name)
        self._branches[self._name] = talk
        if old is not None:
            old.sequence.close()
        self._was_kept(path, facts)
        n, pending = len(talk.sequence), len(talk.sequence) - talk.sequence.n_evaluated
        note(f"({path}: {_turns(len(talk.turns))}, {n} tokens, {pending} of them to evaluate)")

    def _stats(self, words: list[str]) -> None:
        ctx = self._ctx
        size = sum(each.context for each in ctx.memory_breakdown().values())
        note(
            f"({len(self.talk.sequence)} tokens here; {ctx.n_cells_used} of {ctx.n_ctx} cells, "
            f"{size:,} bytes; {ctx.tokens_evaluated} tokens evaluated)"
        )

    def _exit(self, words: list[str]) -> None:
        self.is_over = True


def _turns(n: int) -> str:
    return f"{n} turn" if n == 1 else f"{n} turns"


def _one(words: list[str], usage: str) -> str:
    if len(words) != 1:
        raise ValueError(f"it is: {usage}")
    return words[0]
