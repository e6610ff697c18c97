"""Where a body would go, and why: the way of a turn up to the decision, without acting on it."""

import time
import uuid

from gateway.api.aliases import Aliases
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

    async def explain(self, path: str, body: bytes, key: str = "") -> DecisionRecord:
        """The decision for `body` posted to `path` now, with the key that is called `key` if there is a name.

        Raises errors.ApiError.
        """
        found = self._keys.named(key) if key else NO_KEY
        if found is None:
            raise InvalidRequest("no key has that name (auth.api_keys_file)", param="key")
        parsed, body = self._aliases.resolved(parse("POST", path, body), body, b"")
        only = await self._responses.find(parsed.response_id) if parsed.response_id else ""
        earlier = self._responses.session(parsed.response_id)
        client = Client(key=found.name, tenant=found.tenant, earlier=earlier)
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
