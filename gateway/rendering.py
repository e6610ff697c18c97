"""Asking a worker how it renders a body: for what can't be reproduced here, and to check what can."""

from typing import Any

import httpx
import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]


class NotRendered(Exception):
    """The worker gave no tokens. `reason`: disabled, refused, unreachable, slow or unreadable."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: Any = None


_DECODER = msgspec.json.Decoder(_Rendered | list[_Rendered])


class WorkerRenderer:
    """POSTs bodies to `PATH/render`, which vLLM serves with --enable-scale-out (403 without)."""

    def __init__(self, api_key: str, *, timeout_s: float = 5.0) -> None:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers, trust_env=False)

    async def tokens(self, worker_url: str, path: str, body: bytes) -> Ids:
        """The ids of the body's (first) prompt, shape (n,). Raises NotRendered.

        A body with media has ids, too, but its block hashes need what only `features` tells: not rendered.
        """
        try:
            response = await self._client.post(f"{worker_url}{path}/render", content=body)
        except httpx.TimeoutException:
            raise NotRendered("slow") from None
        except httpx.HTTPError:
            raise NotRendered("unreachable") from None
        if response.status_code in (403, 404, 405):
            raise NotRendered("disabled")
        if not response.is_success:
            raise NotRendered("refused")
        try:
            rendered = _DECODER.decode(response.content)
        except msgspec.MsgspecError:
            raise NotRendered("unreadable") from None
        first = rendered[0] if isinstance(rendered, list) and rendered else rendered
        if isinstance(first, list):
            raise NotRendered("unreadable")
        if first.features:
            raise NotRendered("multimodal")
        return np.asarray(first.token_ids, dtype=np.uint32)

    async def close(self) -> None:
        await self._client.aclose()
