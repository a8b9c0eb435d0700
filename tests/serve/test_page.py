"""The page that shows the cache, in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")

from serve.conftest import KEYS  # noqa: E402

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
STORY = "Lucy has a red kite & Tom is <b>a baker</b>. "


def dom(address: str, folder: Path) -> str:
    """Return the page after its scripts ran for a while."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000"]
    command = [BROWSER, *options, f"--user-data-dir={folder}", "--dump-dom", f"{address}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Uncaught" not in done.stderr
    return done.stdout


@pytest.mark.skipif(not BROWSER, reason="no browser")
def test_the_page_shows_what_was_reused(serve: Callable[..., str], tmp_path: Path) -> None:
    address = serve()
    for question in ("Where is Ben?", "Who is Tom?"):
        messages = [{"role": "user", "content": STORY * 8 + question}]
        httpx.post(
            f"{address}/v1/chat/completions", json={"messages": messages, "max_tokens": 2}
        ).raise_for_status()
    found = dom(address, tmp_path)
    assert "stories" in found
    assert len(re.findall(r'title="[^"]* of [^"]* tokens"', found)) == 2, "two bars"
    assert len(re.findall("<tr>", found)) == 2
    assert "<b>a baker</b>" not in found, "prompts are shown as text, never as markup"
    assert "a baker" in found, "the tree is shown"


@pytest.mark.skipif(not BROWSER, reason="no browser")
def test_the_page_asks_for_a_key(serve: Callable[..., str], tmp_path: Path) -> None:
    found = dom(serve(keys=KEYS), tmp_path)
    assert "the API key is missing or wrong" in found
    assert re.search('<form id="keyform">', found), "the form is not hidden"
