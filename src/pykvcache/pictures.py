"""Pictures of a context's cells: now, and over time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from pykvcache._drawing import draw_cells, draw_history, figure_svg, table_html
from pykvcache.enums import MemoryPart
from pykvcache.errors import UnsupportedOperation, how_to_install
from pykvcache.introspection import IntrospectionMethods

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CellHistory", "PictureMethods"]


class PictureMethods(IntrospectionMethods):
    """The plotting methods of `LlamaContext`; a base class."""

    def plot(self, part: MemoryPart | None = None) -> Figure:
        """Draw cells by sequence and position, and in memory order (needs the extra ``plot``).

        Parameters
        ----------
        part
            As in `cells`.

        Returns
        -------
        matplotlib.figure.Figure
            Not registered with pyplot. Save it with ``figure.savefig("cells.svg")``; notebooks
            display it.

        Raises
        ------
        UnsupportedOperation
            The model has no memory, or no such part.
        ImportError
            matplotlib is not installed.
        """
        info, table = self.memory_info, self.cells(part)
        if info.kind == "none":
            raise UnsupportedOperation("plot", "this model keeps no memory")
        n_cells = int(table.cell.max(initial=-1)) + 1
        if part is None:
            n_cells = max(info.n_cells, n_cells)
        title = f"{len(table)} cells of {len(self.sequences())} sequences"
        return draw_cells(table, info.n_streams, n_cells, title)

    def _repr_html_(self) -> str:
        if self._native.is_closed:
            return table_html("LlamaContext (closed)", [])
        info = self.memory_info
        held = self.sequences()
        rows = [
            ("memory", info.kind),
            ("cells", f"{self._native.n_cells_used:,} of {info.n_cells * info.n_streams:,} in use"),
            ("bytes", f"{info.bytes_total:,} (K {info.type_k.name}, V {info.type_v.name})".lower()),
            *(
                (f"sequence {seq_id}", f"positions {each.pos_min} to {each.pos_max}")
                for seq_id, each in list(held.items())[:16]
            ),
        ]
        picture = ""
        if info.kind != "none":
            try:
                picture = figure_svg(self.plot())
            except ImportError:
                rows.append(("picture", f"needs matplotlib: {how_to_install('plot')}"))
        return table_html("LlamaContext", rows, picture)


class CellHistory:
    """Records the number of used cells over time: call it after each step, then `plot`.

    Parameters
    ----------
    context
        A `LlamaContext`.

    Examples
    --------
    >>> from pykvcache import BatchGenerator, CellHistory, LlamaContext, LlamaModel
    >>> from pykvcache import embedded_model_path
    >>> with LlamaModel(embedded_model_path()) as model, LlamaContext(model, n_ctx=512) as ctx:
    ...     history, generator = CellHistory(ctx), BatchGenerator(ctx)
    ...     handle = generator.submit("Once upon a time", 8)
    ...     while generator.step():
    ...         history()
    >>> len(history) > 0
    True
    """

    def __init__(self, context: PictureMethods) -> None:
        self._context = context
        self._start = time.perf_counter()
        self.seconds: list[float] = []
        self.own: list[dict[int, int]] = []
        self.shared: list[int] = []

    def __call__(self) -> None:
        """Record the number of used cells now; takes the context's lock."""
        members = self._context.cells().members
        shares = members.sum(axis=1)
        alone = members[shares == 1].sum(axis=0)
        self.seconds.append(time.perf_counter() - self._start)
        self.own.append({int(s): int(alone[s]) for s in np.flatnonzero(alone)})
        self.shared.append(int((shares > 1).sum()))

    def __len__(self) -> int:
        return len(self.seconds)

    def plot(self) -> Figure:
        """Draw the cells of each sequence, shared and free cells over time.

        Raises
        ------
        ImportError
            matplotlib is not installed (extra ``plot``).
        """
        info = self._context.memory_info
        return draw_history(self.seconds, self.own, self.shared, info.n_cells * info.n_streams)

    def _repr_svg_(self) -> str | None:
        try:
            return figure_svg(self.plot())
        except ImportError:
            return None
