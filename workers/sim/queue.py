"""A queue linked through its own members, so that one can leave it from anywhere.

Its head is a member, too, that stands for no other: newer than it is the oldest of them, older the newest.
"""

from __future__ import annotations

from typing import Any, Protocol


class Member(Protocol):
    """Its neighbours are members of the same queue; its own self, where it is in none."""

    older: Any
    newer: Any


def insert(member: Member, after: Member) -> None:
    """Puts `member`, which is in no queue, behind `after`."""
    member.older, member.newer = after, after.newer
    after.newer.older = member
    after.newer = member


def unlink(member: Member) -> None:
    """Takes it out of its queue."""
    member.older.newer, member.newer.older = member.newer, member.older
    member.older = member.newer = member
