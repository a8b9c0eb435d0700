"""``pykvcache chat``: turns, branches, saved chats, and what each turn evaluates."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")
pytest.importorskip("jinja2", reason="pip install '.[cli]'")

from pykvcache import (
    LlamaContext,
    LlamaModel,
    LlamaSequence,
    Sampler,
    describe_state,
    embedded_model_path,
)
from pykvcache.cli import main
from pykvcache.cli.conversation import Conversation, TurnFigures
from pykvcache.errors import NoKvCacheSlot, StateError

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Templated(LlamaModel):
    """The story model, with a template in which an answer stands as it was given."""

    @property
    def chat_template(self) -> str | None:
        return PLAIN

    def apply_chat_template(self, messages, **more):  # type: ignore[no-untyped-def]
        return super().apply_chat_template(messages, template=PLAIN, **more)


@pytest.fixture
def ctx() -> Iterator[LlamaContext]:
    with (
        Templated(embedded_model_path()) as model,
        LlamaContext(
            model, n_ctx=512, n_seq_max=4, type_k="f32", type_v="f32", flash_attn="disabled"
        ) as context,
    ):
        yield context


def turn(one: Conversation, text: str, n: int = 12) -> TurnFigures:
    figures = TurnFigures()
    said = "".join(one.say(text, n, Sampler(temperature=0), figures))
    assert one.messages[-1]["content"].strip() == said.strip()
    return figures


def assert_right(one: Conversation) -> None:
    """The logits are those of a fresh run over the tokens (float16 weights round)."""
    ctx = one.context
    with LlamaSequence(ctx, one.sequence.tokens) as fresh:
        assert np.allclose(one.sequence.logits(), fresh.logits(), atol=0.02)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_a_full_chat_drops_turn_after_turn_by_shifts(
    ctx: LlamaContext, system: list[dict[str, str]], tmp_path: Path
) -> None:
    one = Conversation(LlamaSequence(ctx), system)
    figures, path = [], str(tmp_path / "chat.kv")
    for i in range(40):
        if i % 4 == 3:  # also after a restart
            one.save(path)
            one.sequence.close()
            one = Conversation.load(ctx, path)
        figures.append(turn(one, f"Tom has {i} dogs."))
    assert sum(each.dropped > 0 for each in figures) > 5
    assert max(each.evaluated for each in figures) < 150
    n = len(one.turns)
    assert one.rewind(n) == n
    assert one.text == one.render(one.messages)
    turn(one, "Lucy has a kite.")
    assert one.text.startswith(one.render(one.messages[:-1]))


def test_an_interrupted_answer_keeps_its_text_so_far(ctx: LlamaContext) -> None:
    one = Conversation(LlamaSequence(ctx))
    figures = TurnFigures()
    answer = one.say("Lucy has a kite.", 40, Sampler(temperature=0), figures)
    for _ in range(5):
        next(answer)
    answer.close()
    assert figures.finish == "interrupted"
    assert figures.generated >= 5
    turn(one, "Go on.")
    assert_right(one)


def test_a_sequence_with_messages_in_its_metadata_is_a_chat(
    ctx: LlamaContext, tmp_path: Path
) -> None:
    """As docs/how-to/chat.md saves one, with the model's own template."""
    path = str(tmp_path / "chat.kv")
    with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as own:
        one, messages = LlamaSequence(own), list[dict[str, str]]()
        for text in ("Lucy has a red kite. Tom is a baker. Who is the baker?", "Who is Tom?"):
            messages.append({"role": "user", "content": text})
            prompt = model.apply_chat_template(messages)
            one.sync(model.tokenize(prompt, add_special=False, parse_special=True))
            answer = "".join(one.stream(30, stop=['"', "\n"]))
            messages.append({"role": "assistant", "content": answer})
        one.save(path, {"messages": messages, "title": "Tom"})
        before = own.tokens_evaluated
        back = Conversation.load(own, path)
        assert own.tokens_evaluated == before
        assert back.messages == messages
        assert len(back.sequence) - back.sequence.n_evaluated <= 1, "nothing is evaluated again"
        assert back.text == model.apply_chat_template(messages, add_generation_prompt=False)
        assert model.detokenize(back.sequence.tokens).strip() == back.text
        assert turn(back, "Who has the red kite?", 40).reused >= len(one) - 2
        assert back.rewind(2) == 2
        back.save(path)
        metadata = describe_state(path).metadata["metadata"]
        assert (metadata["messages"], metadata["title"]) == (messages[:2], "Tom")
        for wrong in (
            [{"role": "user"}],
            [{"role": "user", "content": "Hi", "tool": 1}],
            [1],
            5,
            [],
        ):
            one.save(path, {"messages": wrong})
            with pytest.raises(StateError, match=r"chat\.kv: "):
                Conversation.load(own, path)


def test_damage_is_reported_first(ctx: LlamaContext, tmp_path: Path) -> None:
    path = tmp_path / "other.kv"
    with LlamaSequence(ctx, "no chat") as plain:
        plain.evaluate()
        plain.save(path)
    sound = path.read_bytes()
    for data in (sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:], sound[:-1], b"short"):
        path.write_bytes(data)
        with pytest.raises(StateError, match=r"other\.kv: (?!neither a chat)"):
            Conversation.load(ctx, str(path))
    ctx.save_context(path)
    with pytest.raises(StateError, match=r"other\.kv: neither a chat"):
        Conversation.load(ctx, str(path))


def test_the_figures_of_a_turn_are_those_of_evaluation(ctx: LlamaContext) -> None:
    """The first turn of a process imports Jinja2; and no token is evaluated twice."""
    one = Conversation(LlamaSequence(ctx))
    figures = turn(one, "Lucy has a kite.")
    assert ctx.tokens_evaluated == len(one.sequence) - 1
    assert figures.evaluating > 0
    assert figures.generating > 0


def test_a_turn_that_cannot_fit_changes_nothing(ctx: LlamaContext) -> None:
    one = Conversation(LlamaSequence(ctx), [{"role": "system", "content": "Be kind."}])
    turn(one, "Lucy has a kite.")
    turn(one, "Tom has a dog.")
    before = one.sequence.tokens.tolist(), list(one.messages), list(one.turns), one.text
    with pytest.raises(NoKvCacheSlot, match="room for 512, so it was not added: start the chat"):
        turn(one, "Lucy has a kite. " * 200)
    now = one.sequence.tokens.tolist(), one.messages, one.turns, one.text
    assert now == before
    assert turn(one, "Who has the kite?").reused > 0
    assert_right(one)


def test_an_answer_ends_with_the_quote_that_the_template_opened() -> None:
    """The embedded model's template: the next turn finds all of the chat, and no quote twice."""
    with (
        LlamaModel(embedded_model_path()) as model,
        LlamaContext(model, n_ctx=512, type_k="f32", type_v="f32", flash_attn="disabled") as ctx,
    ):
        one = Conversation(LlamaSequence(ctx))
        assert (
            turn(one, "Lucy has a red kite. Tom is a baker. Who is the baker?", 40).finish == "stop"
        )
        assert one.messages[-1]["content"] == "The baker is Tom."
        before = len(one.sequence)
        assert turn(one, "Who has the red kite?", 40).reused >= before - 1
        assert one.messages[-1]["content"] == "The red kite belongs to Lucy."
        assert one.text == model.apply_chat_template(one.messages, add_generation_prompt=False)
        assert_right(one)


def chat(*args: str, lines: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvcache", "chat", "-t", "0", "-n", "16", *args]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)


def test_a_chat_survives_a_restart(tmp_path: Path) -> None:
    """As docs/how-to/chat.md shows it, but for the times."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "chat.md").read_text("utf-8")
    session = str(tmp_path / "chat.kv")
    runs = [run.splitlines() for run in page.split("$ pykvcache chat -t 0 --session chat.kv\n")[1:]]
    runs[-1] = runs[-1][: runs[-1].index("```")]
    assert len(runs) == 2
    for shown in runs:
        said = [line.removeprefix("> ") for line in shown if line.startswith("> ")]
        done = chat("-s", session, lines="\n".join(said))
        assert done.returncode == 0, done.stderr
        printed = (done.stdout + done.stderr).replace(str(tmp_path) + "/", "")
        for line in shown:
            if not line.startswith("> "):
                begin, _, rest = line.partition(" evaluated in ")
                assert begin in printed
                assert rest.partition(";")[2].partition(",")[0] in printed
    last = chat("-s", session, lines="/history\n")
    assert "2 turns," in last.stderr
    assert f"user: {said[0]}" in last.stdout


def test_commands_of_the_chat() -> None:
    lines = (
        "Lucy has a kite.\n/fork there\nTom has a dog.\n/branches\n/switch main\n/rewind\n"
        "/stats\n/nothing\n/save\n/switch nowhere\n/fork there\n/rewind x\n/rewind 9\n"
        "/load nofile\n/help\n/exit\nnot said\n"
    )
    done = chat(lines=lines)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\* there: 2 turns", done.stdout, re.M)
    assert "1 turn removed: 0 turns left" in done.stderr
    wrongs = ["/nothing", "/save FILE", "nowhere", "there already", "a number of turns"]
    wrongs += ["the chat has only 0 turns", "(No such file or directory: nofile)"]
    for wrong in wrongs:
        assert wrong in done.stderr
    assert "/rewind [N]" in done.stdout
    assert "not said" not in done.stdout


def test_a_file_that_is_not_a_chat_ends_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("neither a chat")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main(["chat", "-s", str(tmp_path / "text")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "text: " in error
    assert (tmp_path / "text").read_text() == "neither a chat"


def test_a_session_with_other_types_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, converted = str(tmp_path / "chat.kv"), str(tmp_path / "converted.kv")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Lucy has a kite.\n"))
    assert main(["chat", "-n", "8", "-s", one]) == 0
    assert main(["chat", "-s", one, "--type-k", "q8_0"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "saved with --type-k f16 --type-v f16" in error
    command = error.partition("pykvcache state convert ")[2].replace("OUT", converted)
    assert main(["state", "convert", *command.split()]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "-s", converted, "--type-k", "q8_0"]) == 0
    assert "1 turn," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["chat.kv"], 2, "--session chat.kv"),
        (["-s", "/none/chat.kv"], 2, "there is no folder"),
        (["-s", "/proc/chat.kv"], 1, "no file can be created in /proc"),
    ],
)
def test_a_session_that_cannot_be_saved_is_refused_before_the_first_turn(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "/proc/chat.kv" in words and not Path("/proc/self").exists():
        pytest.skip("needs a folder that cannot be written")
    assert main(["chat", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_turn_that_cannot_be_saved_does_not_end_the_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    lines = iter(["Lucy has a kite.\n", "Tom has a dog.\n", ""])

    class Typing(io.StringIO):
        def readline(self, *_: int) -> str:  # type: ignore[override]
            line = next(lines)
            folder.rmdir() if line.startswith("Lucy") else folder.mkdir(exist_ok=True)
            return line

    monkeypatch.setattr(sys, "stdin", Typing())
    assert main(["chat", "-t", "0", "-n", "8", "-s", str(folder / "chat.kv")]) == 0
    assert capsys.readouterr().err.count("this turn is not saved: there is no folder") == 1
    assert (folder / "chat.kv").exists()
