"""What a placed turn is charged: the lease on its target, and its entries in what policies read."""

import time

from policies.ledger import Ticket
from policies.sessions import Stay
from workers.leases import Lease


class Charge:
    """All are given back together, from any exit path."""

    __slots__ = ("_lease", "_stay", "_ticket")

    def __init__(self, lease: Lease, ticket: Ticket, stay: Stay) -> None:
        self._lease = lease
        self._ticket = ticket
        self._stay = stay

    def first_token(self, *, answered: bool) -> None:
        """The prefill is over. `answered`: with a token, not with an error."""
        self._lease.first_token()
        self._ticket.first_token(time.monotonic(), answered=answered)

    def release(self) -> None:
        self._lease.release()
        now = time.monotonic()
        self._ticket.ended(now)
        self._stay.ended(now)

    def __enter__(self) -> "Charge":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
