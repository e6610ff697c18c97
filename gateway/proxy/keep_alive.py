"""Comments in an event stream that is silent for long, so that nobody on the way takes it for dead."""

import asyncio

from gateway.api.usage import AnswerTail
from gateway.proxy.exchange import Exchange

# No empty line after it: that would make openai-python dispatch an event without data once the stream had an
# `id:` line, and counts towards the lines without data that go-openai bears.
_COMMENT = b": keep-alive\n"
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")


async def keep_alive(exchange: Exchange, tail: AnswerTail, every_s: float) -> None:
    """Send a comment whenever nothing was sent for `every_s` seconds, until cancelled.

    tail: what the worker said so far; within an event of its nothing is sent.
    """
    loop = asyncio.get_running_loop()
    wait_s = every_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = exchange.sent_at + every_s - loop.time()
        if wait_s <= 0:
            # One that waited for the client to read would come in between whatever is written then.
            if not (exchange.full or exchange.is_sending) and (
                not tail or tail.content().endswith(_EVENT_ENDS)
            ):
                await exchange.send(_COMMENT)
            wait_s = every_s
