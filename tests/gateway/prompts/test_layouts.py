"""How a model's blocks lie in the pool, by what is known of its workers."""

from gateway.prompts.layouts import Groups, Layouts
from gateway.settings import ModelSettings
from store.groups import NEVER
from store.keys import KeyLayout
from workers.fleet import Fleet
from workers.worker import EngineReport, KvEndpoint, ModelCard, Worker

HYBRID: Groups = {0: 2, 1: None}
BASE, ADAPTER = ModelCard("base", "/models/base"), ModelCard("adapter", "/adapters/a", "base")


class Site:
    """Workers and what their events have shown."""

    def __init__(self, **models: ModelSettings) -> None:
        self.fleet = Fleet()
        self.groups: dict[str, Groups] = {}
        self.layouts = Layouts(self.fleet, models, lambda target: self.groups.get(target, {}))

    def add(self, name: str, *cards: ModelCard, ranks: int = 0) -> Worker:
        worker = self.fleet.add(f"http://{name}", name)
        endpoints = tuple(KvEndpoint(rank, f"tcp://{name}:{rank}", None) for rank in range(ranks))
        self.fleet.mark_up(worker, EngineReport(), cards, endpoints)
        return worker


def test_b061_a_model_of_which_nothing_is_shown_has_one_group() -> None:
    site = Site(base=ModelSettings(cache_prefix="team"))
    layout = site.layouts.of(site.add("w1", BASE), BASE)
    assert layout == KeyLayout("/models/base", cache_prefix="team")


def test_b060_groups_are_those_that_events_have_shown_of_it_or_of_others_of_its_model() -> None:
    site = Site()
    new, old = site.add("new", BASE), site.add("old", BASE)
    site.add("other", ModelCard("other", "/models/other"))
    site.groups = {"old": HYBRID, "other": {0: None, 1: None}}
    hybrid = KeyLayout("/models/base", groups=(0, 1), windows=((0, 2),))
    assert site.layouts.of(old, BASE) == site.layouts.of(new, BASE) == hybrid
    site.groups["new"] = {0: None}
    assert site.layouts.of(new, BASE) == KeyLayout("/models/base")


def test_b061_what_is_set_of_a_models_keys_overrides_what_is_learned() -> None:
    namespace = "@store_tp:4@store_pp:1@store_format:v1"
    site = Site(
        base=ModelSettings(
            block_size=32,
            pool_namespace=namespace,
            pool_ranks={"tp": 4, "dcp": 2},
            pool_groups={"0": 65, "2": 0},
        )
    )
    worker = site.add("w1", BASE, ADAPTER)
    site.groups = {"w1": {0: None, 1: NEVER}}
    layout = site.layouts.of(worker, BASE)
    assert layout == KeyLayout(
        "/models/base",
        namespace=namespace,
        tp_ranks=4,
        dcp_ranks=2,
        groups=(0, 2),
        windows=((0, 2),),
        given=True,
    )
    assert site.layouts.of(worker, ADAPTER) == layout
    assert layout.prefixes()[1] == f"base{namespace}@tp_rank:1@pcp0@dcp1@pp_rank:0@group:0@"


def test_blocks_of_an_adapter_lie_under_its_base_models_name() -> None:
    site = Site()
    worker = site.add("w1", BASE, ADAPTER)
    assert site.layouts.of(worker, ADAPTER) == site.layouts.of(worker, BASE)


def test_b052_nothing_is_known_of_a_model_with_a_group_that_hits_in_an_unknown_way() -> None:
    site = Site()
    worker = site.add("w1", BASE)
    site.groups = {"w1": {0: None, 1: NEVER}}
    assert site.layouts.of(worker, BASE) is None


def test_b067_what_any_rank_announces_is_of_its_workers_model() -> None:
    site = Site()
    site.add("w1", ADAPTER, BASE, ranks=2)
    assert site.layouts.of_target("w1@1") == KeyLayout("/models/base")
    assert site.layouts.of_target("gone") is None
    assert site.layouts.of_target("gone@0") is None


def test_b061_workers_of_one_model_with_different_groups_are_named() -> None:
    site = Site()
    for name in ("w1", "w2", "silent"):
        site.add(name, BASE)
    site.groups = {"w1": HYBRID, "w2": HYBRID}
    assert site.layouts.disagreements() == []
    site.groups["w2"] = {0: None}
    (found,) = site.layouts.disagreements()
    assert "base" in found
    assert "w1, w2" in found
