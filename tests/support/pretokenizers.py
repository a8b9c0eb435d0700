"""The patterns with which llama.cpp cuts text into words, read from its sources."""

from __future__ import annotations

import ast
import os
import random
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

KINDS = [
    *("abcxyz", "ABC", "aB1", "0123456789", " ", "  \t\n\r", "\n", "\r\n ", "漢字一龥", "ひらカナ"),
    *(
        "'sS'tT'reRE'veVE'mM'llLL'dD",
        "가힣ㄱ",
        "éàÖøǄ",
        "ªº²³½Ⅷ",
        "٠١٢",
        "😀🎉",
        "\u0301\u0300\u0bbe",
    ),
    *("!?.,;:-_", "+<=>^~|`$", "…。\uff0c、\u06d4،", "\u00a0\u2003\u3000\u0085\u200b\ufeff"),
    *("\0\x01\x1f\x7f\x1c", "Ꭰꭰ𐐀𞤀", "<sentinel:0>", "IMGIMGABZ", "/\\[]{}()", "ไทยក"),
    *("ﬀＡａ\uff01", "\ue000\U000f0000\ufffd"),
]
"""Characters that patterns tell apart."""


def source() -> Path | None:
    """Return llama.cpp's ``llama-vocab.cpp``, if its sources are there."""
    tree = Path(os.environ.get("LLAMA_CPP_SOURCE_DIR") or ROOT / "vendor" / "llama.cpp")
    path = tree / "src" / "llama-vocab.cpp"
    return path if path.exists() else None


@cache
def patterns() -> list[list[bytes]]:
    """All lists of patterns, one after the other, that a vocabulary can ask for."""
    path = source()
    if path is None:
        return []
    text = path.read_text(encoding="utf-8")
    text = text[
        text.index("struct llm_tokenizer_bpe :") : text.index("struct llm_tokenizer_bpe_session")
    ]
    found = []
    for block in re.findall(r"regex_exprs = \{(.*?)\n\s*\};", text, re.DOTALL):
        lines = [line for line in block.splitlines() if not line.strip().startswith("//")]
        strings = re.findall(r'"(?:\\.|[^"\\])*"', "\n".join(lines))
        found.append([str(ast.literal_eval(string)).encode() for string in strings])
    return [list(one) for one in dict.fromkeys(tuple(one) for one in found)]


@cache
def names() -> list[str]:
    """All values of ``tokenizer.ggml.pre`` that llama.cpp knows."""
    path = source()
    text = path.read_text(encoding="utf-8") if path else ""
    return sorted(set(re.findall(r'tokenizer_pre == "([^"]+)"', text)))


def random_text(rng: random.Random, size: int = 120) -> bytes:
    """Text of a few kinds of characters, in runs and mixed, sometimes with bytes that are none."""
    kinds = rng.sample(KINDS, rng.choice([1, 1, 2, 2, 3, 5, len(KINDS)]))
    parts = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.choice(kinds)
        how = rng.random()
        if how < 0.3:
            parts.append(kind)
        elif how < 0.6:
            parts.append(rng.choice(kind) * rng.randint(1, rng.choice([3, 9, 40])))
        else:
            parts.append("".join(rng.choice(kind) for _ in range(rng.randint(1, 10))))
        parts.append(rng.choice(["", "", " "]))
    text = bytearray("".join(parts)[:size].encode())
    for _ in range(rng.choice([0] * 9 + [2])):
        text[rng.randrange(len(text))] = rng.randrange(0x80, 0xF5)
    return bytes(text)
