"""Start ``pykvcache serve`` where llama-server's tests start llama-server.

Options of llama-server become ours; those that we lack are left out. Models that the tests would
download are replaced by the embedded one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

NAMES = {"llama3": "meta-llama-Llama-3.1-8B-Instruct", "chatml": "Qwen-Qwen2.5-7B-Instruct"}


def main() -> None:
    """Translate the options and become the server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--port", "--host", "--alias", "--api-key", "--ctx-size", "--threads", "-ctk"):
        parser.add_argument(name)
    for name in ("--chat-template", "--chat-template-file", "-ctv", "--cors-origins"):
        parser.add_argument(name)
    for name in ("--temp", "--seed", "--reasoning"):
        parser.add_argument(name)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--kv-unified", action="store_true")
    given, _ = parser.parse_known_args()
    cells = int(given.ctx_size or 2048)
    options = {
        "--port": given.port,
        "--host": given.host,
        "--alias": given.alias or "tinyllama-2",
        "--api-key": given.api_key,
        "--threads": given.threads,
        "--parallel": str(given.parallel),
        # A slot of llama-server has its share of the cells.
        "--n-ctx": str(cells if given.kv_unified else max(cells // given.parallel, 256)),
        "--type-k": given.ctk,
        "--type-v": given.ctv,
        "--chat-template": template(given.chat_template, given.chat_template_file),
        "--temperature": given.temp,
        "--seed": given.seed,
        "--chat-template-kwargs": {
            "on": '{"enable_thinking": true}',
            "off": '{"enable_thinking": false}',
        }.get(given.reasoning or ""),
        "--cors-origin": "*" if given.cors_origins is None else None,
    }
    found = [part for name, value in options.items() if value for part in (name, value)]
    os.execv(sys.executable, [sys.executable, "-m", "pykvcache", "serve", *found])


def template(given: str | None, path: str | None) -> str | None:
    """Return the file of a template: of one by name, by its text, or by a path of llama.cpp's."""
    folder = Path(os.environ["LLAMA_TEMPLATES"])
    if path is not None:
        return str(folder / Path(path).name)
    if given is None or given in NAMES:
        return None if given is None else str(folder / f"{NAMES[given]}.jinja")
    file = tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False)  # noqa: SIM115
    with file:
        file.write(given)
    return file.name


if __name__ == "__main__":
    main()
