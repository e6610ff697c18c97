"""Policies that packages bring, put on the path as pip would."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[[str, str], None]


def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one policy on the path: its name, and the source of a module with `make`."""

    def put(name: str, source: str) -> None:
        module = f"installed_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[moongate.policies]\n{name} = {module}:make\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(str(tmp_path))
    return put
