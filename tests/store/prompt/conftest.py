from collections.abc import Callable
from pathlib import Path

import pytest

from store.prompt.local import LocalPrompts
from tests.store.prompt.families import make_family


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directory of a family, made once."""
    root = tmp_path_factory.mktemp("families")
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = make_family(name, root / name)
        return made[name]

    return directory


@pytest.fixture(scope="session")
def load(family: Callable[[str], Path]) -> Callable[..., LocalPrompts]:
    """A fresh LocalPrompts of a family, with an empty cache."""

    def loaded(name: str, cache_bytes: int = 64 << 20) -> LocalPrompts:
        return LocalPrompts.load(str(family(name)), cache_bytes=cache_bytes)

    return loaded
