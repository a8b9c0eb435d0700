"""The file of ``pykvcache chat --session`` holds the branch that the chat says it holds."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")
pytest.importorskip("jinja2", reason="pip install '.[cli]'")


from cli.test_chat import PLAIN, Templated
from pykvcache import (
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    Sampler,
    describe_state,
    embedded_model_path,
)
from pykvcache.cli import main
from pykvcache.cli.chat import Chat
from pykvcache.cli.conversation import FORMAT, Conversation
from pykvcache.errors import StateError, UnsupportedOperation
from support.models import EXACT, make_model
from support.odd_models import make_breaking

GREEDY = Sampler(temperature=0)
Logits = NDArray[np.float32]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of files are written, and none needs to survive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def ctx() -> Iterator[LlamaContext]:
    with (
        Templated(embedded_model_path()) as model,
        LlamaContext(model, n_ctx=512, n_seq_max=8, n_threads=1) as context,
    ):
        yield context


def run(ctx: LlamaContext, path: Path, *lines: str, max_tokens: int = 6) -> Chat:
    """Give a chat some lines, as `pykvcache chat` does."""
    chat = Chat(ctx, None, str(path))
    chat.begin()
    for line in lines:
        if line.startswith("/"):
            chat.obey(line)
        else:
            chat.answer(line, max_tokens, GREEDY)
    chat.end()
    return chat


def assert_is_of_its_messages(one: Conversation) -> None:
    """The text is the template's, but for the last answer, which may be trimmed later."""
    whole = one.context.model.apply_chat_template(one.messages, add_generation_prompt=False)
    held = one.context.model.detokenize(one.sequence.tokens)
    for text in (whole, held):  # spaces between tokens are the tokenizer's
        assert "".join(text.split()) == "".join(one.text.split())
    assert len(one.turns) == sum(m["role"] == "user" for m in one.messages)


def said_in(ctx: LlamaContext, path: Path) -> list[str]:
    one = Conversation.load(ctx, str(path))
    found = [message["content"] for message in one.messages if message["role"] == "user"]
    assert len(one.turns) == len(found)
    one.sequence.close()
    return found


@pytest.mark.parametrize(
    ("lines", "kept", "what"),
    [
        (["one", "two"], ["one", "two"], "holds this chat"),
        (["one", "two", "/rewind"], ["one"], "holds this chat"),
        (["one", "/rewind"], [], "holds this chat"),
        (["one", "two", "/fork b", "/switch main", "/rewind"], ["one"], "holds this chat"),
        (["one", "two", "/rewind", "/fork b", "/switch main"], ["one"], "holds this chat"),
        (["one", "/fork b", "two", "/switch main"], ["one", "two"], "not saved: branch main"),
        (["one", "/fork b", "two", "/switch main", "three"], ["one", "three"], "branch b"),
        (["one", "/save {a}", "/fork b", "two", "/save {a}"], ["one", "two"], "branch main"),
        (["one", "/load {other}"], ["one"], "holds a different chat"),
        (["one", "/load {other}", "two"], ["elsewhere", "two"], "holds this chat"),
        (["one", "/save {session}"], ["one"], "holds this chat"),
    ],
)
def test_the_end_reports_what_the_file_holds(
    lines: list[str],
    kept: list[str],
    what: str,
    ctx: LlamaContext,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other, session = tmp_path / "other.kv", tmp_path / "session.kv"
    run(ctx, other, "elsewhere")
    capsys.readouterr()
    run(
        ctx,
        session,
        *(line.format(other=other, session=session, a=tmp_path / "a") for line in lines),
    )
    assert said_in(ctx, session) == kept
    assert what in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows handles it as Python does")
def test_ctrl_c_loses_no_turn(ctx: LlamaContext, tmp_path: Path) -> None:
    """Ctrl-C ends the answer or removes the turn; the file holds the rest."""
    path = tmp_path / "chat.kv"
    chat = run(ctx, path, "one")
    lines = ["a long message about nothing", "/rewind", "another one", f"/save {path}.more"]

    def say(line: str, timer: threading.Timer) -> None:
        try:
            timer.start()
            chat.obey(line) if line.startswith("/") else chat.answer(line, 30, GREEDY)
            timer.finished.wait(60)
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for i in range(40):
            say(lines[i % 4], threading.Timer(i % 9 / 99, os.kill, (os.getpid(), signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    chat.answer("the last", 3, GREEDY)
    assert_is_of_its_messages(chat.branch)
    chat.end()
    users = [m["content"] for m in chat.branch.messages if m["role"] == "user"]
    assert said_in(ctx, path) == users
    assert users[-1] == "the last"


def test_a_file_that_another_chat_wrote_is_not_overwritten(
    ctx: LlamaContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.kv"
    run(ctx, path, "one")
    first, second = Chat(ctx, None, str(path)), Chat(ctx, None, str(path))
    first.begin()
    second.begin()
    first.answer("of the first", 3, GREEDY)
    capsys.readouterr()
    second.answer("of the second", 3, GREEDY)
    assert "another program has written" in capsys.readouterr().err
    second.end()
    assert "holds a different chat" in capsys.readouterr().err
    assert said_in(ctx, path) == ["one", "of the first"]
    second.obey(f"/save {tmp_path / 'second.kv'}")
    assert said_in(ctx, tmp_path / "second.kv") == ["one", "of the second"]
    second.end()
    assert "not saved" not in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 10])
def test_a_truncated_session_is_rebuilt_from_its_messages(
    n: int, ctx: LlamaContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole.kv", tmp_path / "cut.kv"
    run(ctx, whole, "Tom is a baker.", "Sam has a dog.")
    assert main(["state", "cut", str(whole), str(cut), "-n", str(n)]) == 0
    one = Conversation.load(ctx, str(cut))
    text = ctx.model.apply_chat_template(one.messages, add_generation_prompt=False)
    tokens = ctx.model.tokenize(text, add_special=False, parse_special=True)
    assert one.sequence.tokens.tolist() == tokens.tolist()
    assert len(one.turns) == 2
    # A model without a template cannot say how its messages are put together.
    with make_plain() as plain, LlamaContext(plain, n_ctx=512) as other:
        run(other, tmp_path / "plain.kv", "Tom is a baker.", "Sam has a dog.")
        main(["state", "cut", str(tmp_path / "plain.kv"), str(cut), "-n", str(n)])
        with pytest.raises(StateError, match="its tokens are not those of its messages"):
            Conversation.load(other, str(cut))


def make_plain() -> LlamaModel:
    class Plain(LlamaModel):
        @property
        def chat_template(self) -> str | None:
            return None

    return Plain(embedded_model_path())


def test_two_messages_of_the_user_in_a_row_are_two_turns(ctx: LlamaContext, tmp_path: Path) -> None:
    """As an agent's file has them, whose turns are dropped when the cache is full."""
    path, roles = tmp_path / "chat.kv", ["user", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"This is message {i}."} for i, role in enumerate(roles)]
    with LlamaSequence(ctx, "x") as one:
        one.save(path, {"messages": messages})
    chat = Chat(ctx, None, str(path))
    chat.begin()
    for i in range(12):
        chat.answer(f"This is turn {i} of a long talk about nothing at all.", 24, GREEDY)
        users = [m for m in chat.branch.messages if m["role"] == "user"]
        assert len(users) == len(chat.branch.turns)
        assert chat.branch.messages[0]["role"] == "user"
    n = len(chat.branch.turns)
    assert n < 15  # some were dropped
    chat.obey(f"/rewind {n}")
    assert chat.branch.messages == []


FORGED: list[Callable[[dict[str, Any]], object]] = [
    lambda note: note.update(messages=[{"role": "user", "content": 1}]),
    lambda note: note.update(text=None),
]
ODD: list[Callable[[dict[str, Any]], object]] = [
    lambda note: note.update(n_tokens=3),
    lambda note: note.update(text="three"),
    lambda note: note.update(text=""),
    lambda note: note.pop("n_tokens"),
    lambda note: note.update(turns=[[0, 10**400]]),  # an earlier version wrote them
]


def save_forged(ctx: LlamaContext, path: Path, forge: Callable[[dict[str, Any]], object]) -> None:
    run(ctx, path, "one", "two")
    metadata: Any = json.loads(json.dumps(describe_state(path).metadata["metadata"]))
    forge(metadata[FORMAT])
    with LlamaSequence.load(ctx, path) as one:
        one.save(path, metadata)


@pytest.mark.parametrize("forge", FORGED)
def test_forged_metadata_is_refused(
    forge: Callable[[dict[str, Any]], object], ctx: LlamaContext, tmp_path: Path
) -> None:
    path = tmp_path / "chat.kv"
    save_forged(ctx, path, forge)
    with pytest.raises(StateError, match="neither a chat"):
        Conversation.load(ctx, str(path))


@pytest.mark.parametrize("forge", ODD)
def test_a_saved_text_that_does_not_match_its_messages_is_rendered_again(
    forge: Callable[[dict[str, Any]], object], ctx: LlamaContext, tmp_path: Path
) -> None:
    path = tmp_path / "chat.kv"
    save_forged(ctx, path, forge)
    assert said_in(ctx, path) == ["one", "two"]
    chat = run(ctx, path, "/rewind", "three")
    assert_is_of_its_messages(chat.branch)
    assert said_in(ctx, path) == ["one", "three"]


def test_a_memory_without_states_refuses_a_session(make_context: Any, tmp_path: Path) -> None:
    chat = Chat(make_context("deepseek4"), None, str(tmp_path / "chat.kv"))
    with pytest.raises(UnsupportedOperation, match="save"):
        chat.begin()


@pytest.mark.not_on_a_device(reason="there the server fails, and is lost")
def test_a_turn_that_cannot_be_evaluated_is_removed(tmp_path: Path) -> None:
    with LlamaModel(make_breaking(tmp_path, [30])) as model, LlamaContext(model, n_ctx=256) as ctx:
        chat = Chat(ctx, None, None)
        chat.begin()
        chat.answer("hello", 3, GREEDY)
        before = chat.branch.snapshot()
        chat.answer("hello " + model.token_to_piece(30).decode(), 3, GREEDY)
        assert chat.branch.snapshot() == before
        assert isinstance(chat.branch, Conversation)


SHORTENED = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content[:6] if m.role == 'assistant' and not loop.last else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("template", [PLAIN, SHORTENED, None])
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_text_and_tokens_match_the_messages_after_random_commands(
    name: str, template: str | None, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    rng, saved = random.Random(3), tmp_path / "saved.kv"
    with (
        LlamaModel(make_model(name, model_folder)) as model,
        LlamaContext(model, n_ctx=256, n_seq_max=8, n_threads=1, **EXACT) as ctx,
    ):
        chat = Chat(ctx, "Be kind.", str(tmp_path / "chat.kv"), template)
        chat.begin()
        branches, is_shifted = ["main"], False
        for i in range(40):
            command = rng.choice(["say", "say", "say", "say", "rewind", "fork", "switch", "save"])
            if command == "say":
                chat.answer(f"message {i} {'x' * rng.randrange(30)}", rng.randrange(1, 20), GREEDY)
            elif command == "rewind":
                chat.obey(f"/rewind {rng.randrange(1, 3)}")
            elif command == "fork" and len(branches) < 4:
                branches.append(f"branch{i}")
                chat.obey(f"/fork {branches[-1]}")
            elif command == "switch":
                chat.obey(f"/switch {rng.choice(branches)}")
            elif command == "save":
                chat.obey(f"/save {saved}")
                chat.obey(f"/load {saved}")
            one = chat.branch
            # A template may end with a line break that the answer does not have.
            assert "".join(one.render(one.messages).split()) == "".join(one.text.split())
            held = model.detokenize(one.sequence.tokens)
            assert "".join(held.split()) == "".join(one.text.split())
            # Tokens after a dropped turn were computed with it in view.
            is_shifted |= "dropped, the oldest" in capsys.readouterr().err
            if len(one.sequence) and not is_shifted:
                with LlamaSequence(ctx, one.sequence.tokens) as fresh:
                    assert np.allclose(one.sequence.logits(), fresh.logits(), atol=1e-3)
        assert is_shifted
        chat.end()
