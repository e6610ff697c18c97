"""Where a body would go, and why: the way of a turn up to the decision, without acting on it."""

import time
import uuid
from collections.abc import Sequence

from gateway.api.aliases import Aliases, alias_of
from gateway.api.parse import parse
from gateway.auth import NO_KEY, ClientKeys
from gateway.errors import InvalidRequest
from gateway.proxy.stored import StoredResponses
from gateway.routing.breaks import PrefixBreaks
from gateway.routing.decisions import DecisionRecord
from gateway.routing.router import Router
from gateway.routing.sight import Client


class Explainer:
    """Takes no lease, counts nothing, records nothing."""

    def __init__(
        self,
        router: Router,
        breaks: PrefixBreaks,
        aliases: Aliases,
        responses: StoredResponses,
        keys: ClientKeys,
    ) -> None:
        self._keys = keys
        self._router = router
        self._breaks = breaks
        self._aliases = aliases
        self._responses = responses

    async def explain(
        self, path: str, body: bytes, key: str = "", headers: Sequence[str] = ()
    ) -> DecisionRecord:
        """The decision for `body` posted to `path` now.

        key: the name of the key it comes with, if there is one. headers: `NAME: VALUE` each, which the
        session and the policy's rules may go by. Raises errors.ApiError.
        """
        fields = _fields(headers)
        found = self._keys.named(key) if key else NO_KEY
        if found is None:
            raise InvalidRequest("no key has that name (auth.api_keys_file)", param="key")
        asked = parse("POST", path, body)
        parsed, body = self._aliases.resolved(asked, body, b"")
        only = await self._responses.find(parsed.response_id) if parsed.response_id else ""
        earlier = self._responses.session(parsed.response_id)
        client = Client(fields, alias_of(asked, parsed), found.name, found.tenant, earlier)
        sight = await self._router.look(parsed, path, body, only, client)
        return DecisionRecord(
            f"explain-{uuid.uuid4().hex}",
            time.time(),
            parsed.api,
            parsed.model,
            sight.prompt_tokens,
            sight.block_size,
            self._router.decide(sight),
            {"look": sight.seconds * 1e3},
            sight.understood.unknown,
            prefix=await self._breaks.explain(parsed, sight),
            session=sight.session,
            turn=sight.turn(0),
            facts=sight.facts,
        )


def _fields(headers: Sequence[str]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not (colon and name.strip() and header.isascii()):
            raise InvalidRequest(f"no header of the form NAME: VALUE: {header[:100]!r}", param="header")
        fields.setdefault(name.strip().lower().encode(), value.strip().encode())
    return fields
