"""Every registered target as policies see it where nothing is known of a prompt.

Between two events that is the same for all turns: a candidate is made anew when a turn came or went there, or
the fleet changed, and all are now and then, for what changes with time alone.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.routing.eligibility import why_not
from policies.candidates import EVERY_S, NOTHING, Standing, candidate, pressure
from policies.ledger import Ledger
from policies.sessions import Sessions
from policies.types import Candidate
from store.knowledge import Knowledge
from workers.fleet import Fleet
from workers.worker import Target

# What a target did lately is forgotten by half in a minute, and its worker's report is a second old.
_ANEW_S: Final = 0.1
# Models of which candidates are kept; a client can name any where no worker has said what it serves.
_MODELS: Final = 64


class _Shown:
    """For turns of one model. at: when all were made. stale: those that are made anew for the next turn;
    doubted: of these, those whose breaker says whether they may be chosen.

    standings: what does not change with turns, by target.
    """

    __slots__ = ("at", "candidates", "doubted", "stale", "standings")

    def __init__(self, at: float, standings: Mapping[str, Standing]) -> None:
        self.at = at
        self.standings = standings
        self.candidates: tuple[Candidate, ...] = ()
        self.stale: set[str] = set()
        self.doubted: set[str] = set()


class Roster:
    """places: where each target stands among the candidates, by name."""

    def __init__(self, fleet: Fleet, ledger: Ledger, knowledge: Knowledge, sessions: Sessions) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._knowledge = knowledge
        self._sessions = sessions
        self.targets: Sequence[Target] = ()
        self.places: dict[str, int] = {}
        # Whether some only compute prompts, or only decode: who decodes goes by load.
        self._apart = False
        self._version = -1
        self._shown: dict[str, _Shown] = {}
        # By target: tokens that its cache holds at most, and what making room there costs others.
        self._full: dict[str, tuple[int, float]] = {}
        self._full_at = 0.0

    def shown(self, model: str, now: float, *, loads: bool = True) -> tuple[Candidate, ...]:
        """All targets, in the order of `targets`, for a turn of `model`.

        loads: whether it matters what they were given to do; else that may be as old as what they report.
        """
        if now - self._full_at >= EVERY_S:
            self._full_at, self._full = now, self._fullness(now)
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self.targets = tuple(self._fleet.targets())
            self.places = {target.name: place for place, target in enumerate(self.targets)}
            self._apart = any(target.worker.role != "both" for target in self.targets)
            self._shown.clear()
        touched = self._ledger.touched()
        for each in self._shown.values():
            each.stale |= touched
        shown = self._shown.get(model)
        if shown is None or now - shown.at >= _ANEW_S:
            if len(self._shown) >= _MODELS:
                self._shown.clear()
            standings = {target.name: self._standing(target) for target in self.targets}
            shown = self._shown[model] = _Shown(now, standings)
            shown.candidates = tuple([self._made(shown, target, model, now) for target in self.targets])
        elif anew := (shown.stale if loads or self._apart else shown.doubted):
            shown.stale = shown.stale - anew
            shown.doubted = set()
            found, places = list(shown.candidates), self.places
            for name in anew:
                # One that left may have had turns.
                if name in places:
                    place = places[name]
                    found[place] = self._made(shown, self.targets[place], model, now)
            shown.candidates = tuple(found)
        return shown.candidates

    def _made(self, shown: _Shown, target: Target, model: str, now: float) -> Candidate:
        worker, name = target.worker, target.name
        made = candidate(
            name,
            self._ledger.load(name, now),
            self._ledger.rates(name, now, model),
            shown.standings[name],
            NOTHING,
            why_not(self._fleet, worker, model, ()),
        )
        # How long the first one has waited, and whether a breaker is to be tried, changes from turn to turn.
        if not worker.breaker.closed:
            shown.doubted.add(name)
            shown.stale.add(name)
        elif made.queued_turns:
            shown.stale.add(name)
        return made

    def _standing(self, target: Target) -> Standing:
        worker = target.worker
        report, ranks = worker.report, len(worker.targets)
        capacity, pressed = self._full.get(target.name, (0, 0.0))
        return Standing(
            report.waiting / ranks,
            report.running / ranks,
            capacity,
            pressed,
            worker.role,
            target.rank,
            worker.weight,
        )

    def _fullness(self, now: float) -> dict[str, tuple[int, float]]:
        sizes = self._knowledge.index.sizes()
        found: dict[str, tuple[int, float]] = {}
        for target in self._fleet.targets():
            name, report = target.name, target.worker.report
            capacity = report.blocks * report.block_size
            ranks = len(target.worker.targets)
            requests = (report.running + report.waiting) / ranks
            self._ledger.reported(name, int(report.kv_usage * capacity), requests)
            if not capacity:
                continue
            found[name] = (
                capacity,
                pressure(
                    name,
                    self._ledger.load(name, now),
                    self._sessions,
                    now,
                    capacity_tokens=capacity,
                    held_tokens=sizes.get((name, "gpu"), 0) * report.block_size,
                ),
            )
        return found
