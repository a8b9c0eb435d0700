"""Code blocks of a document, run from top to bottom, and the output that stands after them.

In ``tests``, ``python -m support.doc_blocks FILE ...`` writes the outputs anew.
"""

from __future__ import annotations

import doctest
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.forks import run_forked

__all__ = ["Block", "agrees", "outputs", "read_blocks"]

# A block of Python, and its output in the block of text that follows directly.
PATTERN = re.compile(
    r"^(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```\n"
    r"(?:\n?(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```\n)?",
    re.M | re.S,
)
RUNNER = """
import contextlib, io, json, sys
names, found = {"__name__": "__main__"}, []
for number, code in enumerate(json.load(sys.stdin)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"block {number}", "exec"), names)
    found.append(out.getvalue())
sys.stdout.write(json.dumps(found))
"""


@dataclass
class Block:
    """A block of code, and the output that the document shows; None where it shows none."""

    code: str
    output: str | None


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a document."""
    return [
        Block(_dedent(m["code"], m["indent"]), m["output"] and _dedent(m["output"], m["indent"]))
        for m in PATTERN.finditer(text)
    ]


def outputs(blocks: list[Block]) -> list[str]:
    """Run blocks in one process, in an empty folder; return what each prints."""
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps([block.code for block in blocks])
        done = run_forked(["-c", RUNNER], stdin=given, cwd=folder, package=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def agrees(block: Block, output: str) -> bool:
    """Tell whether what a block prints is what the document says; ``...`` stands for anything."""
    checker = doctest.OutputChecker()
    return block.output is None or checker.check_output(block.output, output, doctest.ELLIPSIS)


def _dedent(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def _write(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = iter(zip(read_blocks(text), outputs(read_blocks(text)), strict=True))

    def filled(match: re.Match[str]) -> str:
        block, output = next(found)
        if block.output is None or agrees(block, output):
            return match[0]
        indent = match["indent"]
        shown = "".join(indent + line for line in output.splitlines(keepends=True))
        begin, end = (at - match.start() for at in match.span("output"))
        return match[0][:begin] + shown + match[0][end:]

    path.write_text(PATTERN.sub(filled, text), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        _write(Path(name))
