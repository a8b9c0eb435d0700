"""The story model that ships: its size, its metadata, its vocabulary."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from story import tell
from tokenizer import MERGES, Tokenizer, grammar_pieces, to_letters

PATH = Path(__file__).resolve().parents[2] / "models" / "stories.gguf"


@pytest.fixture(scope="module")
def reader():
    return GGUFReader(PATH)


@pytest.fixture(scope="module")
def metadata(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


def test_file_is_small_enough_to_ship():
    assert PATH.stat().st_size <= 6_000_000


DOCUMENTED = {
    "general.architecture": "llama",
    "general.license": "MIT",
    "llama.context_length": 1024,
    "llama.embedding_length": 256,
    "llama.block_count": 4,
    "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": False,
}


def test_metadata_is_as_documented(metadata):
    assert {key: metadata[key] for key in DOCUMENTED} == DOCUMENTED


def test_vocabulary_is_that_of_the_training_tokenizer(metadata):
    tokenizer = Tokenizer()
    assert metadata["tokenizer.ggml.tokens"] == tokenizer.vocabulary
    assert metadata["tokenizer.ggml.merges"] == [" ".join(pair) for pair in MERGES]
    assert metadata["llama.vocab_size"] == len(tokenizer)


def test_every_piece_of_the_grammar_is_one_token(metadata):
    vocabulary = set(metadata["tokenizer.ggml.tokens"])
    assert {to_letters(piece) for piece in grammar_pieces()} <= vocabulary


def test_stories_are_read_token_by_token_as_they_were_written():
    tokenizer = Tokenizer()
    for seed in range(5):
        passage = tell(f"test {seed}", 300)
        ids = tokenizer.encode(passage.text, add_bos=False)
        assert [tokenizer.vocabulary[i] for i in ids] == [to_letters(p) for p in passage.pieces]


def test_demo_prompts_hold_no_unknown_words(metadata):
    tokenizer = Tokenizer()
    assert len(metadata["pykvcache.prompts"]) == 3
    n_bytes = 256
    for prompt in metadata["pykvcache.prompts"]:
        tokens = [tokenizer.vocabulary[i] for i in tokenizer.encode(prompt, add_bos=False)]
        letters = [t for t in tokens if 2 <= tokenizer.ids[t] < 2 + n_bytes and t.isalpha()]
        assert [t for t in letters if t not in ("a", "Ċ")] == []


def test_chat_template_asks_in_the_words_of_the_stories(metadata):
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(metadata["tokenizer.chat_template"])
    statement = {"role": "user", "content": "Mara has a red kite."}
    asked = {"role": "user", "content": "Who has the red kite?"}
    replied = {"role": "assistant", "content": "The red kite belongs to Mara."}
    assert template.render(messages=[statement]) == "Mara has a red kite."
    assert template.render(messages=[statement, asked], add_generation_prompt=True) == (
        'Mara has a red kite. The reader asks, "Who has the red kite?" The story says, "'
    )
    assert template.render(messages=[statement, asked, replied]) == (
        'Mara has a red kite. The reader asks, "Who has the red kite?" '
        'The story says, "The red kite belongs to Mara."'
    )


def test_weights_are_finite_and_of_the_documented_types(reader):
    for tensor in reader.tensors:
        expected = np.float16 if len(tensor.shape) == 2 else np.float32
        assert tensor.data.dtype == expected, tensor.name
        assert np.isfinite(tensor.data).all(), tensor.name
    assert len(reader.tensors) == 4 * 9 + 2
