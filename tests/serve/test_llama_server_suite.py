"""llama-server's own tests, run against this server.

They come with the pinned sources of llama.cpp, and are fetched, not kept here. Their models are on
a hub: the embedded one stands in, so what they say of its words and of its numbers of tokens is not
looked at. `PASSING` is what passes. What is left out has a reason in `REASONS`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

SHIM = Path(__file__).with_name("llama_server_shim.py")
FOLDER = "vendor/llama.cpp/tools/server/tests"

#: Files that are about what this server does not do.
REASONS = {
    "test_compat_gcp": "Google's prediction form",
    "test_infill": "fill-in-the-middle prompts: /v1/completions takes them ready made",
    "test_lora": "adapters",
    "test_mcp_servers": "tools that the server itself runs",
    "test_proxy": "a proxy for web pages",
    "test_rerank": "rerankers",
    "test_router": "a process per model; ours holds them in one",
    "test_sleep": "--idle unloads instead, and /props does not say so",
    "test_slot_save": "slots to files: the cache's tiers do that for all prompts",
    "test_speculative": "drafts",
    "test_stream": "answers that go on without their client",
    "test_tools_builtin": "tools that the server itself runs",
    "test_vision_api": "images",
}

CONFTEST = """
import os, sys
import pytest
import utils
utils.match_regex = lambda *_: True   # another model has other words
from utils import *

@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(server_instances):
        server.stop()
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tests."""
    for name in ("requests", "openai"):
        pytest.importorskip(name)
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "vendor" / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    target = tmp_path_factory.mktemp("suite")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = fetch.download(ROOT / "vendor" / "llama.cpp.lock", Path(folder))
        except fetch.FetchError as error:
            pytest.skip(f"no sources: {error}")
        with tarfile.open(path) as archive:
            for member in archive:
                inside = member.name.partition("/")[2]
                if member.isfile() and inside.startswith(FOLDER):
                    place = target / inside.removeprefix(FOLDER).lstrip("/")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    data = archive.extractfile(member)
                    assert data is not None
                    place.write_bytes(data.read())
    (target / "conftest.py").write_text(CONFTEST)
    (target / "wget.py").write_text("")
    server = target / "llama-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SHIM}" "$@"\n')
    server.chmod(0o755)
    return target


def run(suite: Path, files: list[str], port: int) -> dict[str, str]:
    """Return outcomes by the names of tests."""
    report = suite / "report.xml"
    environment = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(suite / "llama-server"),
        "LLAMA_TEMPLATES": str(ROOT / "vendor/llama.cpp/models/templates"),
        "PYTHONPATH": str(suite),
        "PORT": str(port),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x" if False else "-q", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "-c", "pytest.ini"]
    command += [f"unit/{name}.py" for name in files]
    subprocess.run(command, cwd=suite, env=environment, capture_output=True, check=False)
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        bad = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        name = case.get("classname", "").rpartition(".")[2] + "::" + case.get("name", "")
        found[name] = bad[0] if bad else "passed"
    return found
