"""Certificates are renewed while the gateway runs: what verifies them is read again when its file changes."""

import asyncio
import logging

from workers.connecting import Authorities, BadAuthorities

logger = logging.getLogger(__name__)


class AuthorityWatch:
    """Owns the task that looks at the file, if there is one."""

    def __init__(self, authorities: Authorities, every_s: float = 5.0) -> None:
        self._authorities = authorities
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._authorities.file:
            self._task = asyncio.create_task(self._run(), name="authorities")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                if await asyncio.to_thread(self._authorities.renew):
                    logger.info("workers.ca_file: %s has changed and is read", self._authorities.file)
            except BadAuthorities as error:
                logger.warning("workers.ca_file: %s; those read before stay", error)
