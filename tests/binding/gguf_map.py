"""Offsets of the fields of a GGUF file, for damaging them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf


@dataclass(frozen=True)
class Place:
    """One field of the file: a length, a type, a number, a name."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Map:
    """The fields in the order of the file, and where the weights begin and end."""

    places: tuple[Place, ...]
    data: int
    end: int

    @property
    def boundaries(self) -> list[int]:
        """Offsets at which one field ends and the next begins."""
        return sorted({place.offset for place in self.thinned()} | {self.data})

    def thinned(self, keep: int = 6) -> list[Place]:
        """Return only the first and last few fields of an array."""
        by_name: dict[str, list[Place]] = {}
        for place in self.places:
            by_name.setdefault(place.name, []).append(place)
        return [
            place
            for group in by_name.values()
            for place in (group if len(group) <= 2 * keep else group[:keep] + group[-keep:])
        ]


def read_map(path: Path) -> Map:
    """Take a GGUF apart."""
    reader = gguf.GGUFReader(path)
    places = [Place("magic", 0, 4), Place("version", 4, 4)]
    places += [Place("number of tensors", 8, 8), Place("number of keys", 16, 8)]
    fields = [f for name, f in reader.fields.items() if not name.startswith("GGUF.")]
    for field in fields + [tensor.field for tensor in reader.tensors]:
        at = field.offset
        for part in field.parts:
            places.append(Place(field.name, at, part.nbytes))
            at += part.nbytes
    end = max(int(tensor.data_offset + tensor.n_bytes) for tensor in reader.tensors)
    return Map(tuple(places), reader.data_offset, end)
