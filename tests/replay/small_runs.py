"""Small traces and a small profile, so that a run takes milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from replay.experiment import Experiment

# So little that no instance keeps the sessions of all that come to it.
HBM = {"hbm_tokens": 19_200}
SMALL = {**HBM, "segment_bytes": 16_777_216 * 2_000}


def codex(tmp_path: Path, sessions: int = 22, turns: int = 12) -> str:
    """Sessions that begin with 1,024 common tokens and grow by some 700 a turn."""
    rows = [
        {
            "sid": f"s{number}",
            "shared": 1024,
            "first": 2048,
            "turns": [[2048, 100, 0.0], *[[600 + 7 * number, 100, 4.0]] * (turns - 1)],
        }
        for number in range(sessions)
    ]
    return written(tmp_path / "codex.jsonl", rows)


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def experiment(file: str, *policies: str, **more: Any) -> Experiment:
    settings: dict[str, Any] = {
        "file": file,
        "format": "codex_like",
        "profile": "qwen3-32b-2xh100",
        "instances": 3,
        "pool": True,
        "policies": policies or ("round_robin",),
        "figures": SMALL if more.get("pool", True) else HBM,
        "active": 7,
        "warmup": 0.0,
        "ramp_s": 3.0,
    }
    return Experiment(**(settings | more))
