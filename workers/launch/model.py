"""What a local fleet needs to know about the model it is to serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from workers.launch.tiny_model import make_tiny_model

TINY = "moongate-tiny"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`path` is a directory or, with `offline` False, a name that vLLM resolves on a hub.

    `max_positions` is the longest context the model is made for, 0 = not known before it is loaded.
    """

    path: str
    name: str
    load_format: str
    offline: bool
    max_positions: int = 0


def local_model(model: str, directory: Path, *, elsewhere: bool = False) -> LocalModel:
    """The model named by a path or a hub name; an empty name makes the tiny one below `directory` (1 s).

    A directory without weight files is served with random ones: enough to route, cache and measure.
    elsewhere: it will be served on another machine or in a container, where an absolute path may exist that
    does not here.
    Raises FileNotFoundError for a path that is not a model directory.
    """
    if not model:
        path = make_tiny_model(directory / TINY)
    else:
        path = Path(model).expanduser()
        if not path.exists() and not _looks_like_path(model):
            return LocalModel(path=model, name=model, load_format="auto", offline=False)
        if elsewhere and path.is_absolute() and not path.exists():
            return LocalModel(path=model, name=path.name, load_format="auto", offline=True)
        path = path.resolve()
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path} is not a model directory: it has no config.json") from None
    weights = any(next(path.glob(pattern), None) for pattern in _WEIGHTS)
    return LocalModel(
        path=str(path),
        name=path.name,
        load_format="auto" if weights else "dummy",
        offline=True,
        max_positions=_max_positions(config),
    )


def _looks_like_path(model: str) -> bool:
    # A hub name is NAME or OWNER/NAME.
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def _max_positions(config: object) -> int:
    if not isinstance(config, dict):
        return 0
    table = cast("dict[str, Any]", config)
    value = table.get("max_position_embeddings") or _max_positions(table.get("text_config"))
    return value if isinstance(value, int) else 0
