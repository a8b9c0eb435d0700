"""``pykvcache demo``: its acts, its table, and its look in a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_streams import one_line, run
from support.models import make_model

pytest.importorskip("pykvcache._native.lib", reason="not built", exc_type=ImportError)
pytest.importorskip("click", reason="pip install '.[cli]'")

import pykvcache
from pykvcache.cli import main

QUICK = ("demo", "--quick", "--plain", "--threads", "1", "--n-ctx", "256")


def summary(stdout: str) -> str:
    """Return the table at the end, without the lines that ASCII draws."""
    return stdout.partition("Summary")[2].replace("|", " ")


def verdicts(stdout: str) -> dict[str, str]:
    """Return the last column of the table at the end by the words that the rows begin with."""
    table = summary(stdout)
    rows = {}
    for line in table.splitlines():
        match = re.match(r"\s*(\w.*?)  .*(yes|NO|refused)", line)
        if match:
            rows[match[1].split(",")[0]] = match[2]
    return rows


def evaluated(stdout: str, operation: str) -> tuple[int, int]:
    """Return the tokens that an operation evaluated, and a fresh run."""
    match = re.search(rf"{operation}.*?  (\d+) +(\d+) ", summary(stdout))
    assert match, stdout
    return int(match[1]), int(match[2])


def test_demo_on_the_embedded_model() -> None:
    """Through a pipe, and where only ASCII can be shown."""
    result = run("demo", "--quick", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout, "no colour outside a terminal"
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = verdicts(result.stdout)
    assert set(found.values()) == {"yes"}
    assert len(found) == 8
    forks, anew = evaluated(result.stdout, "4 forks")
    assert forks * 5 < anew, "the story was evaluated once"
    assert evaluated(result.stdout, "full")[0] == 2, "the last token again, and a new one"


@pytest.mark.parametrize(
    ("name", "refused"),
    [("gemma3", set()), ("lfm2", set()), ("glm5_next", {"move all by 64"})],
)
def test_demo_on_every_kind_of_memory(
    name: str, refused: set[str], model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--model", str(make_model(name, model_folder))]) == 0
    shown = capsys.readouterr().out
    found = verdicts(shown)
    if name == "lfm2":  # what cannot be shifted is evaluated again
        assert "evaluated the rest again" in " ".join(shown.split())
    assert {row for row, verdict in found.items() if verdict == "refused"} == refused
    assert "NO" not in found.values()
    assert found["prompt and story"] == found["4 forks"] == "yes"


@pytest.mark.parametrize("name", ["bert", "t5", "llama_none"])
def test_demo_refuses_models_without_text_generation(
    name: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--model", str(make_model(name, model_folder))]) == 1
    one_line(capsys.readouterr().err)


def test_demo_detects_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rewind that leaves one token too much shows in the table and in the exit code."""
    remove = pykvcache.LlamaSequence.truncate

    def too_little(self: pykvcache.LlamaSequence, n: int) -> None:
        remove(self, n + 1)

    monkeypatch.setattr(pykvcache.LlamaSequence, "truncate", too_little)
    assert main(QUICK) == 1
    wrong = [row for row, found in verdicts(capsys.readouterr().out).items() if found == "NO"]
    assert wrong[0].startswith("rewind")


# What the demo writes with: the pieces whose look goes by the terminal.
SHOW = """
from pykvcache.demo import Screen
screen = Screen()
screen.legend()
screen.given("fork", "Lucy has", "a kite")
screen.table(("a", "b", "c"), [("rewind", "1", "yes, exactly")])
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
@pytest.mark.parametrize("no_color", ["", "1"])
def test_demo_in_a_terminal(no_color: str) -> None:
    ours, theirs = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SHOW],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "NO_COLOR": no_color},
    )
    os.close(theirs)
    shown = b""
    # At the end of the child Linux says EIO, others give nothing.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert child.wait(timeout=60) == 0
    for green in (b"\x1b[32ma kite", b"\x1b[32myes, exactly"):
        assert (green in shown) != bool(no_color), "green, unless asked not to"
    assert (b"[brackets]" in shown) == (b"[a kite]" in shown) == bool(no_color)


def test_a_closed_pipe_prints_no_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "pykvcache", *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) in (0, 1)
    assert "Traceback" not in said
