"""A gateway in front of two simulated workers, as clients of another environment see it."""

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv/bin/python"
ADMIN = {"authorization": "Bearer t"}
MODEL = "moongate-tiny"
# Faults are for turns alone, not for the gateway's own questions below these paths, nor for probes.
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def ask(url: str, body: object = None, headers: dict[str, str] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers or {}), timeout=60) as answer:
        return json.loads(answer.read() or b"null")


@dataclass(frozen=True)
class Fleet:
    """`url` is the gateway's."""

    url: str
    workers: list[str]

    def fault(self, **faults: Any) -> None:
        """Of both workers, instead of what was set before; none ends them."""
        for worker in self.workers:
            ask(f"{worker}/sim/faults", faults)

    def hang(self, path: str) -> None:
        self.fault(hang={"path": path})

    def refuse_once(self, path: str) -> None:
        """Each worker is full once: the gateway has nobody else to ask, the client has to come again."""
        self.fault(status={"path": path, "status": 503, "times": 1, "headers": {"retry-after": "0"}})
