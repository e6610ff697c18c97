"""What a placed turn is charged: the lease on its target, and its entry in the ledger that policies read."""

import time

from policies.ledger import Ticket
from workers.leases import Lease


class Charge:
    """Both are given back together, from any exit path."""

    __slots__ = ("_lease", "_ticket")

    def __init__(self, lease: Lease, ticket: Ticket) -> None:
        self._lease = lease
        self._ticket = ticket

    def first_token(self, *, answered: bool) -> None:
        """The prefill is over. `answered`: with a token, not with an error."""
        self._lease.first_token()
        self._ticket.first_token(time.monotonic(), answered=answered)

    def release(self) -> None:
        self._lease.release()
        self._ticket.ended(time.monotonic())

    def __enter__(self) -> "Charge":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
