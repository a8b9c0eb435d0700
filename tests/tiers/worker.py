"""One long prompt in a process of its own: ``python -m tiers.worker MODEL TIERS SEED N MORE``.

TIERS are separated by commas, MORE is JSON for the cache; JSON is printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from memory.kit import words
from pykvcache import LlamaContext, LlamaModel, PrefixCache
from pykvcache.prefix.stores import open_store
from support.models import EXACT

TESTS = Path(__file__).parents[1]


def spawn(model: Path, tiers: str, seed: int, n: int, **options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tiers.worker", str(model), tiers, str(seed), str(n)]
    command.append(json.dumps(options))
    env = os.environ | {"PYTHONPATH": str(TESTS), "GGML_NO_BACKTRACE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out)
    return found


def main(model: str, tiers: str, seed: str, n: str, options: str) -> None:
    """Evaluate the prompt; the cache is not closed: the end of the script has to do."""
    context = LlamaContext(LlamaModel(model), n_ctx=2048, n_threads=1, **EXACT)
    # A server may be as slow as a busy machine makes it.
    patience = {"timeout": 30, "connect_timeout": 30}
    stores = [
        open_store(one, **(patience if one.startswith("redis") else {})) for one in tiers.split(",")
    ]
    cache = PrefixCache(context, block_size=8, tier_seconds=20, tiers=stores, **json.loads(options))
    sequence = cache.sequence(words(int(seed), int(n)))
    report, row = sequence.reuse, sequence.logits()
    facts = {"evaluated": context.tokens_evaluated, "disk": report.disk, "remote": report.remote}
    print(json.dumps(facts | {"row": row[:8].tolist()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
