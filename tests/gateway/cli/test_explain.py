"""`moongate explain` against the real admin app."""

import asyncio
import sys
from pathlib import Path

from tests.gateway.cli.site import Site, serving


async def test_explain_ends_with_1_when_a_body_goes_nowhere(site: Site, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"messages": []}', "utf-8")
    async with serving(site.app()) as url:
        words = ("-m", "gateway.cli", "explain", str(body), "--url", f"{url}/v1", "--admin-token", "right")
        words += ("--key", "ci-1", "--header", "x-session-id: a", "--header", "x-queue: batch")
        for target, code, error in (("w1", 0, b""), (None, 1, b"moongate: no worker is registered\n")):
            site.explained.target = target
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            shown, told = await process.communicate()
            assert (process.returncode, told) == (code, error)
            assert b"policy longest_prefix" in shown
            assert site.explained.key == "ci-1"
            assert site.explained.headers == ["x-session-id: a", "x-queue: batch"]
