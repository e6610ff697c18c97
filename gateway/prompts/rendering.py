"""Asking a worker how it renders a body: for what can't be reproduced here, and to check what can."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
import numpy.typing as npt

from store.hashing import Media
from workers.pages import PageTooLong, read_page

Ids = npt.NDArray[np.uint32]

# Of an answer; a million ids have 8 MB.
_ANSWER_BYTES = 16 << 20


class NotRendered(Exception):
    """The worker gave no tokens. `reason`: disabled, refused, unreachable, slow or unreadable."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rendered:
    """The ids of a prompt, shape (n,), placeholders of media included, and the media in order of offset."""

    tokens: Ids
    media: Sequence[Media]


class _Range(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    """By modality, item by item."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Range]]


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


_DECODER = msgspec.json.Decoder(_Rendered | list[_Rendered])


class WorkerRenderer:
    """POSTs bodies to `PATH/render`, which vLLM serves with --enable-scale-out (403 without).

    Each takes `timeout_s` at most.
    """

    def __init__(self, api_key: str, tls: ssl.SSLContext, *, timeout_s: float = 5.0) -> None:
        """tls: what https:// workers are verified by."""
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, headers=headers, verify=tls, trust_env=False)

    async def tokens(self, worker_url: str, path: str, body: bytes) -> Ids:
        """The ids of the body's (first) prompt, shape (n,). Raises NotRendered, also for one with media."""
        rendered = await self.rendered(worker_url, path, body)
        if rendered.media:
            raise NotRendered("multimodal")
        return rendered.tokens

    async def rendered(self, worker_url: str, path: str, body: bytes) -> Rendered:
        """The body's (first) prompt. Raises NotRendered."""
        # Of media only the hashes are wanted, not what their processor made of them: megabytes.
        body = body.replace(b"{", b'{"mm_payload": "none", ', 1)
        try:
            status, answer = await read_page(
                self._client,
                "POST",
                f"{worker_url}{path}/render",
                timeout_s=self._timeout_s,
                limit=_ANSWER_BYTES,
                content=body,
            )
        except TimeoutError:
            raise NotRendered("slow") from None
        except PageTooLong:
            raise NotRendered("unreadable") from None
        except httpx.HTTPError:
            raise NotRendered("unreachable") from None
        if status in (403, 404, 405):
            raise NotRendered("disabled")
        if not httpx.codes.is_success(status):
            raise NotRendered("refused")
        try:
            rendered = _DECODER.decode(answer)
        except msgspec.MsgspecError:
            raise NotRendered("unreadable") from None
        first = rendered[0] if isinstance(rendered, list) and rendered else rendered
        if isinstance(first, list):
            raise NotRendered("unreadable")
        return Rendered(np.asarray(first.token_ids, dtype=np.uint32), _media(first.features))

    async def close(self) -> None:
        await self._client.aclose()


def _media(features: _Features | None) -> list[Media]:
    """Raises NotRendered where an item lacks its hash or its place."""
    if features is None:
        return []
    found: list[Media] = []
    for modality, hashes in features.mm_hashes.items():
        places = features.mm_placeholders.get(modality, [])
        if len(places) != len(hashes):
            raise NotRendered("unreadable")
        found += [Media(name, at.offset, at.length) for name, at in zip(hashes, places, strict=True)]
    return sorted(found, key=lambda item: item.offset)
