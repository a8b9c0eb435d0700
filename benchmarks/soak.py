"""Soak `pykvcache serve`: many clients, disconnects, kills and restarts over one folder.

    python -m benchmarks.soak --seconds 600

Clients request greedy completions of conversations with shared prefixes, streamed and whole, in all
three chat APIs, for two tenants. Some disconnect early. Periodically the server is killed (-9) or
terminated (SIGTERM), and restarted over the same folder. Fails if an answer differs from a fresh
model's, a cell is not freed, or memory exceeds its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from pykvcache import LLM, embedded_model_path

KEYS = {"key-of-ann-0001": "ann", "key-of-bob-0002": "bob"}
SUBJECTS = ("Lucy has a red kite.", "Tom is a baker.", "Ben works at the mill.")
QUESTIONS = ("What does Lucy have?", "Who is Tom?", "Where is Ben?", "Who lives by the sea?")
N_TOKENS = 12
OPTIONS = ["--n-ctx", "4096", "--ram", "16", "--tier-seconds", "2", "--parallel", "8"]


def conversations() -> list[list[dict[str, str]]]:
    """Return conversations of one to three turns with shared prefixes."""
    found = []
    for subject in SUBJECTS:
        turns = [{"role": "user", "content": f"{subject} " * 8}]
        for question in QUESTIONS:
            asked = [*turns, {"role": "assistant", "content": "Yes."}]
            found.append([*asked, {"role": "user", "content": question}])
            more = [*found[-1], {"role": "assistant", "content": "By the sea."}]
            found.append([*more, {"role": "user", "content": "And who else is there?"}])
    return found


def expected(chats: list[list[dict[str, str]]]) -> list[set[str]]:
    """Return a fresh model's answers: alone, and together with seven others.

    The last bits of logits depend on the number of tokens computed together, which may decide a
    near tie.
    """
    answers: list[set[str]] = [set() for _ in chats]
    for n_parallel in (1, 8):
        with LLM(embedded_model_path(), n_ctx=4096, n_parallel=n_parallel) as llm:
            for found, chat in zip(answers, chats, strict=True):
                found.add(llm.chat(chat, max_tokens=N_TOKENS).content.strip())
    return answers


class ServerProcess:
    """The server, which may be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self.starts = 0
        (folder / "keys.txt").write_text("\n".join(" ".join(pair) for pair in KEYS.items()))

    def start(self) -> None:
        """Start it on its previous port."""
        options = ["--port", str(self.port), "--cache", os.fspath(self._folder / "cache")]
        keys = ["--api-keys", os.fspath(self._folder / "keys.txt"), "--quiet"]
        command = [sys.executable, "-m", "pykvcache", "serve", *OPTIONS, *options, *keys]
        self._log = (self._folder / f"log-{self.starts}").open("w+")
        self.process = subprocess.Popen(command, stderr=self._log)
        self.starts += 1
        until = time.monotonic() + 60
        while " models:" not in (text := Path(self._log.name).read_text().replace("(", " ")):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start: {text}")
            time.sleep(0.05)
        self.port = int(text.split("http://", 1)[1].split()[0].rsplit(":", 1)[1])

    def end(self, sig: int) -> int:
        """Send a signal and wait."""
        self.process.send_signal(sig)
        return self.process.wait(60)

    def rss(self) -> int:
        """Return its memory in bytes."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return 1024 * int(line.split()[1])
        return 0


class Soak:
    """The clients and their observations."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.chats = conversations()
        self.answers = expected(self.chats)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.is_over = False

    async def client(self, seed: int) -> None:
        """Send requests until the end; errors from a server's end do not count."""
        rng = random.Random(seed)
        key = rng.choice(list(KEYS))
        async with httpx.AsyncClient(timeout=60, headers={"x-api-key": key}) as client:
            while not self.is_over:
                i = rng.randrange(len(self.chats))
                try:
                    await self._ask(client, rng, i)
                except httpx.TimeoutException:
                    self.counts["left"] += 1
                except httpx.TransportError:
                    self.counts["cut"] += 1
                    await asyncio.sleep(0.2)

    async def _ask(self, client: httpx.AsyncClient, rng: random.Random, i: int) -> None:
        body: dict[str, Any] = {"messages": self.chats[i], "model": "stories", "temperature": 0}
        leaves = rng.random() < 0.15
        kind = rng.choice(("chat", "stream", "messages", "responses"))
        body["max_tokens"] = 200 if leaves else N_TOKENS
        path = "/v1/chat/completions"
        if kind == "messages":
            path = "/v1/messages"
        elif kind == "responses":
            path = "/v1/responses"
            body["input"] = body.pop("messages")
            body["max_output_tokens"] = body.pop("max_tokens")
        elif kind == "stream":
            body["stream"] = True
        if leaves:
            timeout = rng.uniform(0.005, 0.2)
            await client.post(self.url + path, json=body, timeout=timeout)
            self.counts["whole after all"] += 1
            return
        answer = await client.post(self.url + path, json=body)
        if answer.status_code in (429, 503):
            self.counts["told to wait"] += 1
            await asyncio.sleep(0.1)
            return
        text = text_of(kind, answer) if answer.status_code == 200 else answer.text
        if answer.status_code == 200 and text is None:
            self.counts["cut"] += 1  # a stream cut off by the server's end
            return
        self.counts[kind] += 1
        if (text or "").strip() not in self.answers[i]:
            self.wrong.append(f"{answer.status_code} {kind} {i}: {text!r}, not {self.answers[i]}")


def text_of(kind: str, answer: httpx.Response) -> str | None:
    """Return the model's text; None for a stream that was cut off."""
    if kind == "stream":
        lines = [one[6:] for one in answer.text.splitlines() if one.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            return None
        choices = [json.loads(line)["choices"] for line in lines[:-1]]
        return "".join(one[0]["delta"].get("content") or "" for one in choices if one)
    body = answer.json()
    if kind == "chat":
        return str(body["choices"][0]["message"]["content"])
    if kind == "messages":
        return str(body["content"][0]["text"])
    return str(body["output"][0]["content"][0]["text"])


async def idle(url: str) -> dict[str, Any]:
    """Wait until no request runs; return the cache's statistics."""
    async with httpx.AsyncClient(timeout=30, headers={"x-api-key": next(iter(KEYS))}) as client:
        for _ in range(200):
            facts = (await client.get(f"{url}/cache")).json()["models"].get("stories")
            if facts is None or not (facts["running"] or facts["waiting"]):
                return facts or {}
            await asyncio.sleep(0.1)
    raise AssertionError("requests of clients that are gone still run")


async def soak(seconds: float, n_clients: int, period: float, folder: Path) -> bool:
    """Run everything; return whether it succeeded."""
    server = ServerProcess(folder)
    server.start()
    run = Soak(server.port)
    until = time.monotonic() + seconds
    kills, memory, cells = Counter[str](), [], []
    failures: list[str] = []
    while time.monotonic() < until:
        run.is_over = False
        clients = [
            asyncio.ensure_future(run.client(random.randrange(2**32))) for _ in range(n_clients)
        ]
        begin = time.monotonic()
        while time.monotonic() < min(begin + period, until):
            await asyncio.sleep(1)
            memory.append(server.rss())
        how = random.choice(("idle", "kill", "term"))
        if how == "idle" or time.monotonic() >= until:
            run.is_over = True
            await asyncio.gather(*clients)
            facts = await idle(run.url)
            cells.append(facts.get("cells_used", 0))
            if facts.get("stats", {}).get("ram_bytes", 0) > 16 << 20:
                failures.append(f"the cache has {facts['stats']['ram_bytes']} bytes")
        else:
            code = server.end(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            if how == "term" and code not in (0, -signal.SIGTERM):
                failures.append(f"SIGTERM: the server ended with {code}")
            server.start()
            run.is_over = True
            await asyncio.gather(*clients)
        kills[how] += 1
    code = server.end(signal.SIGTERM)
    print(f"{seconds:.0f} s, {n_clients} clients: {dict(run.counts)}")
    print(f"periods that ended with: {dict(kills)}; the last end: {code}")
    print(
        f"memory: {min(memory) >> 20} to {max(memory) >> 20} MiB; cells in use when idle: {cells}"
    )
    if max(memory) > 600 << 20:
        failures.append(f"{max(memory) >> 20} MiB of memory")
    if any(cells):
        failures.append(f"cells in use when idle: {cells}")
    failures += run.wrong[:20]
    for failure in failures:
        print("WRONG:", failure)
    return not failures


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--period", type=float, default=20, help="seconds between ends")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(soak(options.seconds, options.clients, options.period, Path(folder)))
    sys.exit(0 if done else 1)


if __name__ == "__main__":
    main()
