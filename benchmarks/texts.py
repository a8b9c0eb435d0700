"""What the report says around its tables."""

from __future__ import annotations

from typing import Any

REPEAT = """    make bench                                  everything: this page, the JSON, the plots
    python -m benchmarks --only calls --quick   one group, few samples, into build/bench/out
    python -m benchmarks --only prefix --merge  one group again, the others as they were
    python -m benchmarks.report docs/benchmarks.json   page and plots from the JSON"""


def head(result: dict[str, Any]) -> str:
    """Write the beginning: what is compared, and on what."""
    machine = result["machine"]
    return f"""# Benchmarks

pykvcache beside plain C and beside other Python bindings of llama.cpp, on the same work: the same
GGUF files, the same tokens, the same number of threads, on {machine["cpus"]} cores ({machine["cpu"]}). This
page is written by `make bench` from [benchmarks.json](benchmarks.json), which holds every raw sample."""


def elsewhere(result: dict[str, Any]) -> str:
    """Return a line about the groups of earlier runs, which other machines may have made."""
    here = result["machine"]["cpu"], result["versions"]["commit"]
    there: dict[tuple[str, str], list[str]] = {}
    for name, group in result["groups"].items():
        of = group.get("cpu", here[0]), group.get("commit", here[1])
        if of != here:
            there.setdefault(of, []).append(name)
    texts = [
        f"{', '.join(names)} on {cpu}, commit {commit}" for (cpu, commit), names in there.items()
    ]
    return f"- Of earlier runs: {'; '.join(texts)}\n" if texts else ""


def details(result: dict[str, Any]) -> str:
    """Write how it was measured, on what, and how to read the tables that follow."""
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
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["setup_seconds"].items())
    first = result["first_setup_seconds"]
    costs = ", ".join(f"{name} {seconds} s" for name, seconds in first.items()) or "not recorded"
    run = sum(group["seconds"] for group in result["groups"].values())
    return f"""## How it was measured

{REPEAT}

Measuring took {run / 60:.1f} minutes, and making the contestants: {took}. The first time
it takes minutes more, because llama-cpp-python is built from source; what was built is kept under `build/bench/`.
First times here: {costs}; less where pip has kept an earlier build.

## What it was measured on

- {machine["cpu"]}, {machine["cpus"]} cores, {machine["memory"]}, {machine["system"]}
{elsewhere(result)}- Load average by group, before and after (a benchmark alone makes 1 to 2): {loads}.
  What is above that is other programs, and shows in the spread.
- `OMP_WAIT_POLICY`: {machine["OMP_WAIT_POLICY"] or "not set"}
- Python {versions["python"]}, {versions["compiler"]}, commit {versions["commit"]},
  llama.cpp: {versions["llama.cpp"]}
{peers}
- Models: the embedded story model ({models["stories"]["bytes"]:,} bytes), and a llama of
  {models["30M"]["parameters"]:,} random f16 weights ({models["30M"]["what"]}). The tests' tiny llama
  serves for the overhead of a decode alone.

## How to read it

- Contestants are processes that take turns, A B C, B C A, C A B, one round of warm-up before. Figures are medians
  of {result["samples"]} samples ({result["samples_of_what_takes_seconds"]} of what takes seconds) with the
  lowest and the highest; a sample of something short is the best of several slices, and the calls of the
  first table get new processes for each sample. Ratios are taken pair by pair, within a round.
  A dash is explained below its table.
- On equal terms: {equal(result)}
- C is `benchmarks/c/`, linked with the static llama.cpp of our own build. llama-cpp-python is
  built from its source distribution, which holds the same llama.cpp. cyllama and xllamacpp are wheels:
  other versions of llama.cpp, built for any x86-64 processor, so their compute speed says how
  their builds differ from a native one, not how the bindings do.
- For memory operations llama-cpp-python is called through its ctypes functions, which is its fastest way.
- *thin* is `benchmarks/c/bench_thin.pyx`: the same call of llama.h from a Cython method without a single
  check or lock, on the same static libraries: C and the call of a method, measured as one.
- An empty method is one of a Cython class compiled for the purpose that takes as many arguments and
  does nothing: what no binding can be faster than."""


def equal(result: dict[str, Any]) -> str:
    """Write what every context is opened with, and who reported what of it."""
    settings = result.get("settings")
    if settings is None:
        return "not recorded."
    same = ", ".join(f"{name} {value}" for name, value in settings["same"].items())
    reported: dict[str, list[str]] = {}
    for who, names in settings["reported"].items():
        if names:
            reported.setdefault(", ".join(names), []).append(who)
    said = "; ".join(f"{', '.join(who)}: {names}" for names, who in reported.items())
    return (
        f"every context is opened with {same} (flash attention 1 is on, type 1 is f16; `n_batch` no longer than "
        "the context), one pool of cells for all sequences, and the same cells, sequences and threads "
        "(`benchmarks/settings.py`). What contexts report after opening is compared with that, and who "
        f"differs is not measured. Reported and equal: {said}. xllamacpp and flash attention and types of the "
        "other bindings: their parameters, read back."
    )


GROUPS = {
    "calls": (
        "Story model, 256 cells, 64 sequences, 16 tokens in sequence 0; 63 calls in a row, one on each of the "
        "other sequences. `decode1` is one token by itself, at the end of 16. cyllama's batches take lists: its rows of an array "
        "are `batch.set_batch(array.tolist(), 0, False)`. Its `get_logits()` looks for an attribute that its model class lacks; "
        "a subclass gives it, and the row is a new list."
    ),
    "throughput": (
        "Tokens per second. Decode: one token for each sequence, after 32 tokens each, the fastest of 8 to 32 steps. "
        "Prefill: one batch of 512 tokens (128 on the 30M model) cut among the sequences. "
        "xllamacpp is a server: the same prompts, given as completions that run at once; a step is the time between two tokens "
        "by its own clock while all of them run, sampling and queueing included, and a prefill ends with the first token of the last."
    ),
    "generate": (
        "Story model, 2 threads: 8 samples of a prompt of 32 tokens, 16 prompts of 32, 64 new tokens each, and 48 requests of 8 to "
        "64 and 16 to 96 tokens, one more every second step, at most 16 at once. Whole requests: prompts, sampling "
        "(temperature 0.8 of the 40 likeliest, never the end of a text) and the copies of the prompt. C is `benchmarks/c/bench_many.c`, which makes the same "
        "batches and samples with llama.cpp's chain. *one by one* is `LlamaSequence.generate`, request after request; llama-cpp-python's "
        "`Llama` has no other way. xllamacpp is its server with as many slots: its clients come when a slot is free, not by steps. "
        "A sample is the fastest of three runs in new processes.\n\n"
        "A step of a `BatchGenerator` (greedy, one thread) is the fastest of 32, beside C's fastest decode of the same batch without "
        "choosing a token; six times as many samples, in new processes each: where a model happens to lie in memory changes a decode "
        "by more than a step costs. The rest is ours alone, one thread: a busy sequence that lies above 8,000 cells of 16 idle ones, in its first 8 steps and "
        "after they were parked and its cells moved down by themselves (medians of steps); edits of a `LlamaSequence`, the best of 7."
    ),
    "tiers": (
        "30M model, 2 threads, ours alone. First token: from the prompt to the logits after it, where all of it but the last token "
        "lies in a tier: in the cache's own memory, in a folder whose pages the system holds or has dropped (POSIX_FADV_DONTNEED), "
        "in Redis on loopback. Its memory is emptied each time, and what the blocks leave is used again, as in a cache that "
        "has got memory in advance; it knows how long evaluating takes. Its own memory is the floor of all tiers: placing the "
        "blocks, and decoding the last token over 4,096 cells. "
        "*beside evaluating alone*: a folder that waits before each answer, and for each byte, against no tier. "
        "*a file of llama.cpp's own*: C reads a session file (`llama_state_seq_load_file`), xllamacpp's server restores its slot; "
        "both hold one prompt, whole, and have to be told which file it is."
    ),
    "prefix": (
        "30M model, 2 threads, a prompt that shares its first tokens with an earlier one, and 16 of "
        "its own. First token: from the request to the likeliest next token. *cold* evaluates all; "
        "*fork* copies the sequence; *memory* and *file* restore its state; *own prefix match* is "
        "what a binding does by itself when the last prompt began alike (ours: the fork); *RAM cache* is "
        "llama-cpp-python's `LlamaRAMCache` and the cache of xllamacpp's server against our state in memory. The last two are measured "
        "through llama-cpp-python's class `Llama`. cyllama's first token comes from its greedy sampler, and its files hold no "
        "tokens, because it writes none above 255. xllamacpp's file is that of its slot, restored over HTTP."
    ),
    "state": (
        "GB/s on one sequence of the story model, in contexts of two threads: ours copies states of 512 KiB and more with both, everybody else and *memcpy* with one. Rows of 32 KiB per cell are those of a model with 16 layers of 4 heads of 128, as one of some billions of parameters has. *save* writes into a buffer that is "
        "there, *save_new* into a new object (in C: malloc and free); *memcpy* and *memcpy_new* copy as many bytes in the same "
        "process; *load* is into an empty sequence, *load_over* into one that holds as much. *file_save* replaces a "
        "file, *file_make* makes one, *file_load* loads it into nothing, *file_write* is one bare write(2) of as many bytes, without waiting for the disk: "
        "llama.cpp's own files, in C and through the others, beside ours, which have checksums and are replaced as a whole. xllamacpp's times are its server's.\n\n"
        "Then how far another thread counts while the main thread works, on the largest state: the GIL. *hashing* holds no lock and touches next to no memory "
        "(PBKDF2, about as long as a save), *memcpy* holds none either and copies as many bytes; *copying* makes a `bytes` of them and holds the lock. "
        "All take turns within a round. After each call the main thread waits up to 5 ms for its turn, so that counting goes on a little there too."
    ),
    "arrays": (
        f"Microseconds; {8192:,} tokens, 8 heads of 128, float32. Naive NumPy: an assignment "
        "to a place, `np.concatenate`, a comparison, and quantisation to a byte per value without "
        "packing or checks."
    ),
    "footprint": (
        "30M model. Resident KiB of a process that has imported the binding; what a context of 4,096 "
        "cells adds; what one more cell takes (6 KiB are keys and values); what a decoded token adds "
        "beside its cell. Then import times in ms, in fresh interpreters, and wheel sizes in KiB."
    ),
    "growth": (
        "Story model, one thread. By cells, a half of them is held by one sequence; *decode* is `decode1` read as a rate. By sequences, there are 8,192 cells: "
        "calls on sequences of 16 tokens, then states, and first tokens with all sequences on the same 256 cells, then decode and prefill. "
        "What leaves things as they were (or is taken back, as a shift by 1 is) is called 64 times or so in a row, also where there are few sequences. "
        "A copy or a removal cannot: there a few sequences make a few calls, with the clock's own cost. "
        "*first call after a decode* is that one call alone, with caches full of the decode."
    ),
    "reuse": (
        "Story model, 4,096 cells, 4 slots, 2 threads. *chat*: 16 sessions of 6 turns, each in its turn: 198 tokens that all "
        "begin with, questions of 45 or 46 tokens, answers of 39 (greedy). *tree*: an agent's steps, 3 levels of 4 branches: 800 tokens, "
        "40 more per step, one token of answer. Counted are the tokens of prompts that are evaluated; *new* is what no cache can know: a "
        "contestant's own answers make its prompts, so that it differs a little. llama-cpp-python counts what its cache holds "
        "with the scores in it; xllamacpp is llama-server with `cache_ram_mib`. Then ours alone: 24 prompts of 450 tokens "
        "that share nothing (4 for a model of SmolLM2-135M's sizes, with random weights; 6 of 2,000 tokens), each with a cache and without, right after each other, answers of 16, what making and closing the sequence "
        "takes of that, and copying its blocks by itself: milliseconds per token of the answer, as answers may end early. A *new* cache grows, and writes to memory that the process never had, as the copies beside it; a *full* one "
        "(8 MiB, 32 for 2,000 tokens, 64 for the larger models) evicts as much as comes, and uses that memory again. Then putting 4,096 tokens of the 30M model "
        "back from 64 blocks and from one state, and "
        "finding 4,096 tokens among 100,000 blocks of 64."
    ),
    "portable": (
        "The wheel of `make wheel` (ggml's CPU code once per instruction set, the best chosen at import) beside the one that was compiled "
        "for this processor: one thread, 30M model, one token behind 32 others and a prompt of 128, by the thread's own time. "
        "*native again* is the native one in another process: what lies between the two is the machine's. "
        "Then a model on two servers of ggml's RPC on loopback, a thread each, beside the same build without them, by the clock."
    ),
}

#: Groups with a plot of their own.
PLOTS = ("calls", "throughput", "prefix", "state", "growth")

#: Why a target is missed; shown only when it is.
REASONS: dict[str, str] = {
    "memory_cost": "the Python method around the compiled one takes 28 ns, lock and checks 20 to 40; a round in which "
    "ours and C meet the processor at different speeds adds to that, which the lowest samples do not have",
    "memory_peer": "a copy makes a tree node per cell in llama.cpp's lists of cells, in C as here; what is left to save beside "
    "that and the call is too little",
    "decode_cost": "converting the tokens, the checks and the lock; where a decode fills the processor's caches, the "
    "interpreter's code and objects have to come back into them: 2 to 4 us on the story model",
    "throughput": "on the story model the interpreter's code and objects leave the processor's caches between two decodes "
    "of 0.2 ms, and fetching them again takes 4 to 5 us of each step; the 1 to 2 % of other rows are not explained. "
    "llama-cpp-python has both, too, and single rows of the very same C program are as far apart",
    "together": "steps take what the line about a step says, a request that joins, is forked or ends takes about 0.1 ms once; where a "
    "decode takes a millisecond both are some percent",
    "server": "the C loop that makes the same batches is no further ahead of it: nearly all of a step is llama.cpp's arithmetic, "
    "which both have",
    "step": "the interpreter's code and objects leave the processor's caches during a decode, and choosing a token is part of a step",
    "tier_folder": "decoding the one token that is new, over 4,096 cells, is llama.cpp's, and is no 300 times faster by itself; copying 24 "
    "MiB into the cells comes on top in the cache's own memory, and in a folder copying them out of the system's page cache, their "
    "checksums and a look at their values",
    "tier_writing": "on two processors the thread that writes takes one of them from the decode: 7 ms in all for 4 MiB, at 0.5 % of its "
    "time",
    "reuse_alone": "short prompts on the story model alone miss it (of 2,000 tokens they do not): they take 40 ms, and beginning and closing 0.7 to 1.1 ms more than without a "
    "cache, as on any model. A new cache writes 0.9 MiB of keys and values to memory that the process never had, of which the "
    "system clears every page: copies alone are below 0.99 there. A full one copies in 0.2 ms. The rest is what is known, names, the "
    "tree, events and what leaves: some hundred calls, which take three times as long after decodes that have emptied the "
    "processor's caches as one after the other; compiled with Cython they take longer. The medians of pairs differ by 1.5 points from "
    "one run of this benchmark to the next, for 28 and 42 pairs by more",
    "fork": "llama.cpp keeps a tree node per cell and sequence; making 4,096 of them is what C takes too",
    "copies": "1 MiB stays in the processor's caches, where finding the cells counts; a load into an empty sequence makes "
    "two tree nodes per cell in llama.cpp's lists of cells (50 ns each): for cells of 2 KiB as long as copying them, which the second "
    "thread does meanwhile, for 32 KiB next to nothing. `load_over` needs none: it overwrites what is there. memcpy itself of "
    "16 MiB runs at 9 or at 18 GB/s from one round to the next.",
    "files": "the system takes most of the time: a bare write(2) of bytes that are there already is no 5 times faster "
    "than llama.cpp's new file. Ours is one more copy, so that the context is free while the file is written, and the checksum",
}

TAIL = """## What these figures do not show

- GPUs, other operating systems, large models: with a model of gigabytes every overhead here vanishes in
  the time of a decode.
- Quality of output: peers decode the same tokens, and their logits are not compared here (the tests
  compare ours with references).
- Guards: llama-cpp-python and cyllama call llama.cpp without checks, so a bad argument there ends the process.
- A machine at rest, unless the load above says so."""
