"""Names of KV-block objects in the Mooncake pool, as vLLM's MooncakeStoreConnector builds them.

One block is one object per rank that holds a part of it, and per KV-cache group:

    [cache_prefix@]<model>[namespace]@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<digest in hex>

The block can be reused only when every one of them exists. Nothing in the name tells hash algorithm, dtype,
block size or salt: the first three must be agreed on, the last is in the digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

_KEY: Final = re.compile(
    r"(?P<name>.+?)(?P<namespace>(?:@store_tp:\d+)?@store_pp:\d+@store_format:[^@]+)?"
    r"@tp_rank:(?P<tp>\d+)@pcp(?P<pcp>\d+)@dcp(?P<dcp>\d+)@pp_rank:(?P<pp>\d+)"
    r"@group:(?P<group>\d+)@(?P<digest>[0-9a-f]{64}|[0-9a-f]{32})",
    re.ASCII,
)

# Ranks that are looked for: more KV heads than 32, and so more ranks with bytes of their own, are rare.
_MOST_TP: Final = 32
_MOST_PCP: Final = 8
_MOST_PP: Final = 16
_DCP: Final = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Which objects one worker needs for a block. Workers with equal layouts read each other's blocks.

    model: the worker's `--model` (its last path component is in the keys), not the served name.
    tp_ranks: tensor-parallel ranks that hold different bytes: min(ranks, KV heads), 1 for MLA; with a
    `store_tp` namespace the number of shards.
    groups: numbers of the KV-cache groups; windows: of those with a sliding window, how many blocks each must
    hold right before the end of a prefix, where all others must hold every block.
    namespace: `@store_pp:...` text of the opt-in shared layouts, verbatim.
    dcp_ranks: decode-context ranks; above 1 they are a subdivision of the tensor-parallel ranks.
    given: the ranks are those of the configuration, not to be read off stored blocks.
    """

    model: str
    tp_ranks: int = 1
    pp_ranks: int = 1
    groups: tuple[int, ...] = (0,)
    cache_prefix: str = ""
    namespace: str = ""
    pcp_ranks: int = 1
    dcp_ranks: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    given: bool = False

    @property
    def name(self) -> str:
        """The part of a key in front of namespace and ranks."""
        model = self.model.rstrip("/").rsplit("/", 1)[-1]
        return f"{self.cache_prefix}@{model}" if self.cache_prefix else model

    def prefixes(self) -> tuple[str, ...]:
        """All that comes before the digest, with the `@`; one for each object a block is made of."""
        return _prefixes(self)

    def keys(self, digest: bytes) -> list[str]:
        """Every key that must exist for the block."""
        text = digest.hex()
        return [prefix + text for prefix in _prefixes(self)]

    def by_group(self) -> Iterator[tuple[KeyLayout, int | None]]:
        """Each group alone, and the blocks it must hold before the end of a prefix; None: every block."""
        needs = dict(self.windows)
        for group in self.groups:
            yield replace(self, groups=(group,), windows=()), needs.get(group)

    def probes(self) -> tuple[str, ...]:
        """Prefixes that tell, by which of a block's objects are there, over how many ranks it is spread."""
        name, group = self.name + self.namespace, min(set(self.groups) - {group for group, _ in self.windows})
        ranks = [(tp, 0, dcp, 0) for tp in range(_MOST_TP) for dcp in sorted({tp % n for n in _DCP})]
        ranks += [(0, pcp, 0, 0) for pcp in range(1, _MOST_PCP)]
        ranks += [(0, 0, 0, pp) for pp in range(1, _MOST_PP)]
        return tuple(_prefix(name, *each, group) for each in ranks)


@dataclass(frozen=True, slots=True)
class PoolKey:
    """A key taken apart. `name` is `[cache_prefix@]model`, unsplit: both may contain an `@` themselves."""

    name: str
    namespace: str
    tp_rank: int
    pcp_rank: int
    dcp_rank: int
    pp_rank: int
    group: int
    digest: bytes

    @property
    def prefix(self) -> str:
        return _prefix(
            self.name + self.namespace, self.tp_rank, self.pcp_rank, self.dcp_rank, self.pp_rank, self.group
        )


def parse_key(key: str) -> PoolKey | None:
    """None for an object that is no KV block of vLLM: other users of the pool, other versions."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    tp, pcp, dcp, pp, group = (int(found[part]) for part in ("tp", "pcp", "dcp", "pp", "group"))
    parsed = PoolKey(
        found["name"], found["namespace"] or "", tp, pcp, dcp, pp, group, bytes.fromhex(found["digest"])
    )
    # Leading zeros parse, but the engine never writes them: such a key would never be asked for again.
    return parsed if parsed.prefix + found["digest"] == key else None


def observed_layouts(keys: Iterable[str]) -> list[KeyLayout]:
    """The layouts under which these objects were stored, one for each name and namespace, most objects first.

    Exact when the keys have at least one whole block of each layout. Foreign keys are passed over. `model` is
    then the whole name, a cache prefix included: it cannot be told where one ends.
    """
    found: dict[tuple[str, str], list[PoolKey]] = {}
    for parsed in map(parse_key, keys):
        if parsed is not None:
            found.setdefault((parsed.name, parsed.namespace), []).append(parsed)
    return [
        KeyLayout(
            model=name,
            tp_ranks=1 + max(each.tp_rank for each in objects),
            pp_ranks=1 + max(each.pp_rank for each in objects),
            groups=tuple(sorted({each.group for each in objects})),
            namespace=namespace,
            pcp_ranks=1 + max(each.pcp_rank for each in objects),
            dcp_ranks=1 + max(each.dcp_rank for each in objects),
        )
        for (name, namespace), objects in sorted(found.items(), key=lambda item: -len(item[1]))
    ]


@lru_cache(maxsize=1024)
def _prefixes(layout: KeyLayout) -> tuple[str, ...]:
    return tuple(
        _prefix(layout.name + layout.namespace, tp, pcp, tp % layout.dcp_ranks, pp, group)
        for group in layout.groups
        for pcp in range(layout.pcp_ranks)
        for tp in range(layout.tp_ranks)
        for pp in range(layout.pp_ranks)
    )


def _prefix(name: str, tp: int, pcp: int, dcp: int, pp: int, group: int) -> str:
    return f"{name}@tp_rank:{tp}@pcp{pcp}@dcp{dcp}@pp_rank:{pp}@group:{group}@"
