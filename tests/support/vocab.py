"""Small vocabularies of every tokenizer kind that the test models need.

Each vocabulary has unique tokens and can encode any text (the WordPiece one maps what it
does not know to ``[UNK]``). Sizes: SPM 320, BPE 261, WPM 57.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_lowercase

import gguf
from gguf import TokenType

SPM_PIECES = (
    # Every merge needs its two halves as pieces.
    *("▁", *"etaoinshrdlucmwfgypbvkHW.,x"),
    *("he", "▁t", "▁the", "in", "er", "an", "▁a", "re", "on", "▁s", "▁w", "▁h"),
    *("el", "ll", "ell", "ello", "Hello", "▁Hello", "or", "ld", "wor", "▁wor", "▁world"),
    *("at", "en", "nd", "and", "▁and", "▁o", "▁b", "▁c", "▁f", "st"),
)
"""The 61 pieces beside the specials and bytes, best first."""

BPE_SPECIALS = ("<|start|>", "<|end|>")
BPE_MERGES = ("H e", "l l", "o r")


@dataclass(frozen=True)
class Vocab:
    """Tokens with what the GGUF keys ``tokenizer.ggml.*`` say about them."""

    kind: str
    """``tokenizer.ggml.model``."""
    tokens: tuple[bytes, ...]
    types: tuple[TokenType, ...] = ()
    pre: str | None = None
    merges: tuple[str, ...] = ()
    special: tuple[tuple[str, int], ...] = ()
    """Pairs such as ``("bos", 1)``."""
    n_token_types: int = 0
    add_bos: bool | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Add the tokenizer keys to `writer`."""
        writer.add_tokenizer_model(self.kind)
        if self.kind == "none":
            # Without a tokenizer the loader learns the size from a key of the architecture.
            writer.add_vocab_size(len(self.tokens))
            return
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_scores([-float(i) for i in range(len(self.tokens))])
        if self.types:
            writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.n_token_types:
            writer.add_token_type_count(self.n_token_types)
        if self.add_bos is not None:
            writer.add_add_bos_token(self.add_bos)
        for name, token in self.special:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)


def spm() -> Vocab:
    """SentencePiece-style: 3 specials, 256 byte tokens, 61 pieces."""
    tokens = [b"<unk>", b"<s>", b"</s>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    tokens += [f"<0x{byte:02X}>".encode() for byte in range(256)]
    types += [TokenType.BYTE] * 256
    tokens += [piece.encode() for piece in SPM_PIECES]
    types += [TokenType.NORMAL] * len(SPM_PIECES)
    special = (("unknown", 0), ("bos", 1), ("eos", 2))
    return Vocab("llama", tuple(tokens), tuple(types), special=special, add_bos=True)


def bpe(pre: str = "gpt-2") -> Vocab:
    """Byte-level BPE: 256 bytes, 3 merges, 2 specials."""
    tokens = [_byte_as_text(byte) for byte in range(256)]
    tokens += [merge.replace(" ", "") for merge in BPE_MERGES]
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(BPE_SPECIALS)
    special = (("bos", len(tokens)), ("eos", len(tokens) + 1))
    tokens += BPE_SPECIALS
    encoded = tuple(token.encode() for token in tokens)
    return Vocab("gpt2", encoded, tuple(types), pre=pre, merges=BPE_MERGES, special=special)


def wpm() -> Vocab:
    """WordPiece: 5 specials, then each letter as a word start and as a continuation."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    types = [TokenType.CONTROL, TokenType.UNKNOWN] + [TokenType.CONTROL] * 3
    tokens += [f"▁{letter}" for letter in ascii_lowercase] + list(ascii_lowercase)
    types += [TokenType.NORMAL] * 52
    special = (
        ("padding", 0),
        ("unknown", 1),
        ("bos", 2),
        ("cls", 2),
        ("seperator", 3),  # the key is spelled like this in the format
        ("mask", 4),
    )
    encoded = tuple(token.encode() for token in tokens)
    return Vocab("bert", encoded, tuple(types), special=special, n_token_types=2)


def without_tokenizer(n_vocab: int = 320) -> Vocab:
    """Token ids only: text can be neither encoded nor decoded."""
    return Vocab("none", tuple(b"" for _ in range(n_vocab)))


def dummy(n_vocab: int = 320) -> Vocab:
    """Tokens for the built-in dummy tokenizer that llama.cpp calls ``test``."""
    tokens = tuple(f"t{i}".encode() for i in range(n_vocab))
    return Vocab("test", tokens, tuple([TokenType.NORMAL] * n_vocab))


def ugm() -> Vocab:
    """Unigram: padding, end, unknown, and 61 pieces."""
    tokens = [b"<pad>", b"</s>", b"<unk>"]
    types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN]
    tokens += [piece.encode() for piece in SPM_PIECES]
    types += [TokenType.NORMAL] * len(SPM_PIECES)
    special = (("padding", 0), ("eos", 1), ("unknown", 2))
    return Vocab("t5", tuple(tokens), tuple(types), special=special)


def rwkv() -> Vocab:
    """RWKV's: one special, each byte, and some longer ones; bytes that are no ASCII are escaped."""
    tokens = [b"<s>"] + [b"\\x%02x" % byte for byte in range(256)]
    tokens += [b"the", b" the", b"hello", b"\\n\\n"]
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (len(tokens) - 1)
    return Vocab("rwkv", tuple(tokens), tuple(types))


def plamo2() -> Vocab:
    """PLaMo 2's: 4 specials, 256 byte tokens, 61 pieces."""
    tokens = [b"<|plamo:unk|>", b"<|plamo:bos|>", b"<|plamo:eos|>", b"<|plamo:pad|>"]
    types = [TokenType.UNKNOWN] + [TokenType.CONTROL] * 3
    tokens += [f"<0x{byte:02X}>".encode() for byte in range(256)]
    types += [TokenType.BYTE] * 256
    tokens += [piece.encode() for piece in SPM_PIECES]
    types += [TokenType.NORMAL] * len(SPM_PIECES)
    special = (("unknown", 0), ("bos", 1), ("eos", 2), ("padding", 3))
    return Vocab("plamo2", tuple(tokens), tuple(types), special=special)


def _byte_as_text(byte: int) -> str:
    # GPT-2 shows a byte as itself where that prints, and moves the others past U+0100 in order.
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in shown:
        return chr(byte)
    hidden = [other for other in range(256) if other not in shown]
    return chr(0x100 + hidden.index(byte))


VOCABS = {
    "spm": spm,
    "bpe": bpe,
    "wpm": wpm,
    "ugm": ugm,
    "rwkv": rwkv,
    "plamo2": plamo2,
    "none": without_tokenizer,
    "test": dummy,
}
