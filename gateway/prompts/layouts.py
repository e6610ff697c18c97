"""How each model's blocks lie in the pool: as settings, workers' events and stored blocks have it."""

from collections.abc import Callable, Mapping

from gateway.settings import ModelSettings
from store.groups import NEVER, blocks_needed
from store.keys import KeyLayout
from workers.fleet import Fleet, UnknownWorker
from workers.worker import ModelCard, Worker

Groups = Mapping[int, int | None]
"""KV groups of a target, and the blocks that each must hold before the end of a prefix; None: every block."""


class Layouts:
    """But for ranks, unless they are set: no worker says how many it has, so the pool view reads them off
    stored blocks.
    """

    def __init__(
        self, fleet: Fleet, models: Mapping[str, ModelSettings], groups: Callable[[str], Groups]
    ) -> None:
        """`groups`: of a target, as far as its events have shown them."""
        self._fleet = fleet
        self._models = models
        self._groups = groups

    def of(self, worker: Worker, card: ModelCard) -> KeyLayout | None:
        """Of the blocks of `card` on `worker`; None where it is not known how prefixes hit.

        A worker that has announced nothing yet is taken to be as others of its model are, and where nobody
        has, to have one group.
        """
        base = worker.card(card.parent) or card
        settings = self._models.get(card.id) or self._models.get(base.id) or ModelSettings()
        groups = (
            _configured(settings, worker.report.block_size)
            or self._shown(worker)
            or self._shown_by_others(base)
            or {0: None}
        )
        if NEVER in groups.values():
            return None
        ranks = settings.pool_ranks
        return KeyLayout(
            model=base.root,
            cache_prefix=settings.cache_prefix,
            namespace=settings.pool_namespace,
            tp_ranks=ranks.get("tp", 1),
            pp_ranks=ranks.get("pp", 1),
            pcp_ranks=ranks.get("pcp", 1),
            dcp_ranks=ranks.get("dcp", 1),
            given=bool(ranks),
            groups=tuple(sorted(groups)),
            windows=tuple((group, need) for group, need in sorted(groups.items()) if need is not None),
        )

    def of_target(self, target: str) -> KeyLayout | None:
        """Of the blocks that `target` puts into the pool; None for one that is not registered."""
        try:
            worker = self._fleet.get(target.partition("@")[0])
        except UnknownWorker:
            return None
        return next((self.of(worker, card) for card in worker.models if not card.parent), None)

    def disagreements(self) -> list[str]:
        """Models whose workers have different KV groups: they can't read each other's blocks in the pool."""
        ways: dict[str, dict[KeyLayout, str]] = {}
        for worker in self._fleet.workers():
            for card in worker.models:
                layout = self.of(worker, card) if self._shown(worker) else None
                if layout is not None:
                    ways.setdefault(card.id, {}).setdefault(layout, worker.name)
        return [
            f"workers of {model} have different KV groups, see {', '.join(found.values())}: they must not "
            "share a pool without cache_prefix"
            for model, found in ways.items()
            if len(found) > 1
        ]

    def _shown(self, worker: Worker) -> Groups | None:
        return next((groups for each in worker.targets if (groups := self._groups(each.name))), None)

    def _shown_by_others(self, base: ModelCard) -> Groups | None:
        same = (w for w in self._fleet.workers() if any(card.root == base.root for card in w.models))
        return next((groups for worker in same if (groups := self._shown(worker))), None)


def _configured(settings: ModelSettings, reported_block_size: int) -> Groups:
    block_size = settings.block_size or reported_block_size
    return {
        int(group): blocks_needed("sliding_window", window, block_size) if window else None
        for group, window in settings.pool_groups.items()
    }
