"""KV groups of hybrid models: what each kind must hold for a prefix to count (vLLM 0.32, facts part 2)."""

from collections.abc import Container, Sequence
from typing import Final

_WINDOWS: Final = frozenset(("sliding_window", "sliding_window_mla"))
# Nothing is established of how these hit: they are treated as window groups that never hold their end, so a
# target that has one gets no credit. Every other kind hits like full attention.
UNPROVEN: Final = frozenset(("mamba", "chunked_local_attention", "encoder_only_attention", "cross_attention"))
NEVER: Final = 1 << 30  # blocks that such a group is said to need: nobody holds so many
TOO_MANY: Final = -1  # stands for the groups of a target that has more of them than any model


def blocks_needed(kind: str | None, window: int | None, block_size: int) -> int | None:
    """Blocks that a group of this kind needs right before the end of a prefix; None: all of it."""
    if kind in UNPROVEN:
        return NEVER
    if kind in _WINDOWS and window and block_size:
        return -(-(window - 1) // block_size)
    return None


def window_hit(held: Container[int], keys: Sequence[int], end: int, need: int) -> int:
    """The longest prefix of at most `end` blocks whose last `need` blocks (or all, if fewer) are held."""
    found = 0
    at = end
    while at and found < need:
        at -= 1
        if keys[at] in held:
            found += 1
        else:
            end, found = at, 0
    return end
