"""How a target's load, rates and prefix come to policies."""

import msgspec

from policies.candidates import Prefix, Standing, candidate
from policies.ledger import Load
from policies.types import Candidate, Rates

RENAMED = {
    "local": "local_tokens",
    "pool": "pool_tokens",
    "own_segment": "own_segment_tokens",
    "disk": "disk_tokens",
    "coming": "coming_tokens",
}


def test_every_figure_comes_to_its_own_field() -> None:
    numbers = iter(range(1, 100))
    load = Load(*(next(numbers) for _ in Load.__struct_fields__))
    prefix = Prefix(*(next(numbers) for _ in Prefix.__struct_fields__))
    standing = Standing(1.5, 2.5, 3000, 0.5, "decode", 4, 2.0)
    found = candidate("w@4", load, Rates(prefill_s=7.0), standing, prefix, "down")
    shown = {"target": "w@4", "excluded": "down", "rates": Rates(prefill_s=7.0)}
    for each in (load, standing):
        shown |= msgspec.structs.asdict(each)
    # How fast its cache fills is a matter of `pressure`.
    del shown["recent_pulled"]
    shown |= {RENAMED[name]: value for name, value in msgspec.structs.asdict(prefix).items()}
    assert msgspec.structs.asdict(found) == shown
    assert set(shown) == set(Candidate.__struct_fields__)
