"""The tokenizer: each word of the grammar is one token, anything else falls apart into bytes.

In GGUF terms it is byte-level BPE ("gpt2") with the "llama-bpe" pre-tokenizer, for which
llama.cpp takes a whole pre-token from the vocabulary before it tries merges. So words need no
merges, and only the few marks of punctuation that may stand in longer runs have one.
"""

from __future__ import annotations

import re
from functools import lru_cache

import grammar as g

BOS, EOS = "<s>", "</s>"
MERGES = ((".", '"'), (",", '"'), ("?", '"'))
# The "llama-bpe" pre-tokenizer; [^\W\d_] is a letter, and the grammar has no digits.
_PRETOKEN = re.compile(
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
    r"|[^\r\n\w]?[^\W\d_]+|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache(maxsize=1)
def _byte_letters() -> list[str]:
    """Return the letters by which GPT-2's byte-level BPE writes the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(rest)})
    return [letters[byte] for byte in range(256)]


def to_letters(text: str) -> str:
    """Write a text as GGUF vocabularies do."""
    letters = _byte_letters()
    return "".join(letters[byte] for byte in text.encode())


def from_letters(token: str) -> bytes:
    """Return the bytes of a token of the vocabulary."""
    back = {letter: byte for byte, letter in enumerate(_byte_letters())}
    return bytes(back[letter] for letter in token)


def grammar_pieces() -> list[str]:
    """Return every token that the grammar can produce, in a fixed order."""
    pieces: dict[str, None] = {"\n": None}
    for template in g.all_templates():
        for position, item in enumerate(g.parse(template)):
            words = (item.word,)
            if item.slot:
                words = g.LISTS[g.SLOT_LIST[item.slot]]
                if item.rule:
                    words = tuple(dict.fromkeys(map(g.AGREEMENT[item.rule], words)))
            for word in words:
                pieces[item.space + word] = None
                # Capitalised words may begin a line, and then have no space before them.
                if position == 0 or word[0].isupper():
                    pieces[word] = None
                    pieces[" " + word] = None
    return list(pieces)


class Tokenizer:
    """Text to token ids and back, exactly as llama.cpp does it with the exported vocabulary."""

    def __init__(self) -> None:
        letters = _byte_letters()
        words = [piece for piece in map(to_letters, grammar_pieces()) if piece not in letters]
        self.vocabulary = [BOS, EOS, *letters, *words]
        self.ids = {token: i for i, token in enumerate(self.vocabulary)}
        self.bos, self.eos = 0, 1

    def __len__(self) -> int:
        return len(self.vocabulary)

    @lru_cache(maxsize=4096)  # noqa: B019  (tokenizers live as long as the process)
    def piece_ids(self, piece: str) -> tuple[int, ...]:
        """Return the ids of one pre-token: one, if it is in the vocabulary."""
        token = to_letters(piece)
        if token in self.ids:
            return (self.ids[token],)
        symbols = list(token)
        for pair in MERGES:
            for i in range(len(symbols) - 2, -1, -1):
                if (symbols[i], symbols[i + 1]) == pair:
                    symbols[i : i + 2] = ["".join(pair)]
        return tuple(self.ids[symbol] for symbol in symbols)

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Tokenize a text."""
        ids = [self.bos] if add_bos else []
        for piece in _PRETOKEN.findall(text):
            ids += self.piece_ids(piece)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of these tokens; control tokens have none."""
        tokens = (self.vocabulary[i] for i in ids if i > self.eos)
        return b"".join(map(from_letters, tokens)).decode(errors="replace")
