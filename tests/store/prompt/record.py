"""Record what a real vLLM makes of the corpus, the server having been started with `--enable-scale-out`:

    python -m tests.store.prompt.record URL FAMILY

Adds the family's answers to golden.json.gz: per body the digest of its token ids, null where vLLM refuses it.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import httpx

from tests.store.prompt.corpus import bodies, digest

GOLDEN = Path(__file__).with_name("golden.json.gz")


def read() -> dict[str, list[str | None]]:
    return json.loads(gzip.decompress(GOLDEN.read_bytes())) if GOLDEN.exists() else {}


def record(url: str) -> list[str | None]:
    found: list[str | None] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for path, body in bodies():
            answer = client.post(f"{path}/render", json={"model": model, **body})
            rendered = answer.json()
            if answer.status_code != 200:
                found.append(None)
            else:
                found.append(digest((rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]))
    return found


if __name__ == "__main__":
    golden = read() | {sys.argv[2]: record(sys.argv[1])}
    GOLDEN.write_bytes(gzip.compress(json.dumps(golden, sort_keys=True).encode(), mtime=0))
