"""Path of the embedded model."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

__all__ = ["embedded_model_path"]

NAME = "stories.gguf"


def embedded_model_path() -> str:
    """Return the path of the small trained model that ships with the package.

    Raises
    ------
    FileNotFoundError
        The package was built without it.
    """
    # An editable install has the code in the source tree and built files elsewhere.
    spec = importlib.util.find_spec("pykvcache")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "data" / NAME
        if path.is_file():
            return os.fspath(path)
    raise FileNotFoundError(f"the embedded model {NAME} is missing from this installation")
