"""The generated models and the NumPy ledger are what the other tests take them for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from support import vocab
from support.models import MODELS, make_model, shared_folder
from support.numpy_llama import END, LedgerLlama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


@pytest.mark.parametrize("name", MODELS)
def test_file_holds_finite_f32_tensors_of_the_named_architecture(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    reader = gguf.GGUFReader(path)
    arch = reader.get_field("general.architecture")
    assert arch is not None
    assert arch.contents() == MODELS[name].arch
    for tensor in reader.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert np.isfinite(tensor.data).all()
        assert np.std(tensor.data) > 0
    assert path.stat().st_size < 3 << 20


@pytest.mark.parametrize(
    ("words", "size"),
    [(vocab.spm(), 320), (vocab.bpe(), 261), (vocab.wpm(), 57), (vocab.dummy(), 320)],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_vocabularies_have_their_size_and_no_token_twice(words: vocab.Vocab, size: int) -> None:
    assert len(words) == size
    assert len(set(words.tokens)) == size
    assert len(words.types) == size


def test_every_merge_has_its_parts_and_its_result_in_the_vocabulary() -> None:
    pieces = set(vocab.SPM_PIECES)
    for piece in pieces:
        assert len(piece) == 1 or any({piece[:i], piece[i:]} <= pieces for i in range(len(piece)))
    tokens = set(vocab.bpe().tokens)
    for merge in vocab.BPE_MERGES:
        assert {part.encode() for part in [*merge.split(), merge.replace(" ", "")]} <= tokens


def test_a_file_is_written_once_and_depends_on_seed_and_sizes(tmp_path: Path) -> None:
    first = make_model("llama", tmp_path)
    written = first.stat().st_mtime_ns
    assert make_model("llama", tmp_path) == first
    assert first.stat().st_mtime_ns == written
    others = [
        make_model("llama", tmp_path, seed=1),
        make_model("llama", tmp_path, n_layer=3),
        make_model("llama", tmp_path, n_ctx_train=4096),
        make_model("llama3l", tmp_path),
    ]
    contents = {path.read_bytes() for path in [first, *others]}
    # `llama` with three layers has the very weights of `llama3l`.
    assert others[1].read_bytes() == others[3].read_bytes()
    assert len(contents) == len(others)
    assert make_model("llama", tmp_path / "again").read_bytes() == first.read_bytes()


def test_writers_racing_for_one_file_leave_it_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: make_model("mamba", tmp_path), range(8)))
    assert [*tmp_path.iterdir()] == [*paths]
    assert paths.pop().read_bytes() == make_model("mamba", tmp_path / "alone").read_bytes()


def test_an_unknown_size_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="n_layers"):
        make_model("llama", tmp_path, n_layers=3)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def ledger(folder: Path) -> LedgerLlama:
    return LedgerLlama(make_model("llama", folder))


TOKENS = np.random.default_rng(7).integers(3, 320, 40)


def test_ledger_gives_the_same_logits_in_one_batch_and_token_by_token(ledger: LedgerLlama) -> None:
    at_once = ledger.decode(0, TOKENS)
    one_by_one = np.concatenate([ledger.decode(1, [token]) for token in TOKENS])
    np.testing.assert_allclose(one_by_one, at_once, atol=1e-10)
    np.testing.assert_array_equal(ledger.logits, one_by_one[-1])


def test_ledger_shifted_as_a_whole_is_unchanged_and_in_part_is_not(ledger: LedgerLlama) -> None:
    expected = ledger.decode(0, TOKENS)[-1]
    for p0, same in [(0, True), (20, False)]:
        ledger.clear()
        ledger.decode(0, TOKENS[:-1])
        ledger.add(0, p0, END, 5)
        assert ledger.pos_max(0) == len(TOKENS) - 2 + 5
        difference = np.abs(ledger.decode(0, TOKENS[-1:])[-1] - expected).max()
        assert difference < 1e-10 if same else difference > 0.05


def test_ledger_operations_leave_the_cells_and_positions_they_name(ledger: LedgerLlama) -> None:
    ledger.decode(0, TOKENS[:10])
    ledger.decode(2, TOKENS[:3])
    ledger.copy(0, 1, 2, 8)
    ledger.remove(1, 4, 6)
    assert ledger.cells(1).pos.tolist() == [2, 3, 6, 7]
    assert ledger.cells(1).tokens.tolist() == TOKENS[[2, 3, 6, 7]].tolist()
    ledger.div(1, 6, END, 2)
    assert ledger.cells(1).pos.tolist() == [2, 3, 3, 3]
    assert ledger.cells(0).pos.tolist() == [*range(10)]
    ledger.copy(1, 2)
    assert ledger.cells(2).pos.tolist() == [2, 3, 3, 3]
    ledger.copy(1, 0, 5, 5)
    assert ledger.pos_max(0) == 9
    ledger.keep(2)
    assert [ledger.pos_max(seq) for seq in range(3)] == [-1, -1, 3]
    ledger.copy(0, 2)
    assert ledger.pos_max(2) == -1
