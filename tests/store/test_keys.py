import itertools
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from store.keys import KeyLayout, PoolKey, observed_layouts, parse_key

DIGEST = bytes.fromhex("4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e")
HEX = DIGEST.hex()

# Written by the PoolKey of vLLM 0.32.0 (kv_connector/v1/mooncake/store/data.py).
GOLDEN = [
    (KeyLayout("tiny"), [f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}"]),
    (
        KeyLayout("/models/org/tiny-qwen/", tp_ranks=2),
        [f"tiny-qwen@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@{HEX}" for rank in (0, 1)],
    ),
    (
        KeyLayout("org/tiny", cache_prefix="team-a"),
        [f"team-a@tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}"],
    ),
    (
        KeyLayout("we@ird", groups=(0, 1), pp_ranks=2),
        [
            f"we@ird@tp_rank:0@pcp0@dcp0@pp_rank:{pp}@group:{group}@{HEX}"
            for group, pp in itertools.product((0, 1), (0, 1))
        ],
    ),
    (
        KeyLayout("tiny", tp_ranks=4, dcp_ranks=2),
        [f"tiny@tp_rank:{tp}@pcp0@dcp{tp % 2}@pp_rank:0@group:0@{HEX}" for tp in range(4)],
    ),
    (
        KeyLayout("tiny", tp_ranks=2, pcp_ranks=2),
        [
            f"tiny@tp_rank:{tp}@pcp{pcp}@dcp0@pp_rank:0@group:0@{HEX}"
            for pcp, tp in itertools.product((0, 1), (0, 1))
        ],
    ),
    (
        KeyLayout("tiny", tp_ranks=2, namespace="@store_tp:2@store_pp:1@store_format:tp_shared_lbhnc"),
        [
            f"tiny@store_tp:2@store_pp:1@store_format:tp_shared_lbhnc"
            f"@tp_rank:{tp}@pcp0@dcp0@pp_rank:0@group:0@{HEX}"
            for tp in (0, 1)
        ],
    ),
]


@pytest.mark.parametrize(("layout", "keys"), GOLDEN)
def test_b061_keys_are_those_of_vllm(layout: KeyLayout, keys: list[str]) -> None:
    assert layout.keys(DIGEST) == keys


@pytest.mark.parametrize(("layout", "keys"), GOLDEN)
def test_b061_a_layout_knows_its_own_keys_and_no_others(layout: KeyLayout, keys: list[str]) -> None:
    for key in keys:
        parsed = parse_key(key)
        assert parsed is not None
        assert parsed.digest == DIGEST
        assert (parsed.name, parsed.namespace) == (layout.name, layout.namespace)
        owners = [other for other, its in GOLDEN if parsed.prefix in other.prefixes()]
        assert layout in owners
        # A layout with fewer ranks of the same model reads a part of the keys; another model never does.
        assert {owner.name + owner.namespace for owner in owners} == {layout.name + layout.namespace}


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "whatever",
        HEX,
        f"@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}",
        f"tiny@tp_rank:0@pcp:0@dcp:0@pp_rank:0@group:0@{HEX}",
        f"tiny@tp_rank:00@pcp0@dcp0@pp_rank:0@group:0@{HEX}",
        f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@{HEX}",
        f"tiny@pcp0@dcp0@head_or_tp_rank:0@pp_rank:0@{HEX}",
        f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX[:-2]}",
        f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX.upper()}",
        f"tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{HEX}\n",
        f"tiny@tp_rank:-1@pcp0@dcp0@pp_rank:0@group:0@{HEX}",
        f"tiny@tp_rank:٣@pcp0@dcp0@pp_rank:0@group:0@{HEX}",
    ],
)
def test_b061_foreign_keys_are_rejected(foreign: str) -> None:
    assert parse_key(foreign) is None


def test_b061_two_cache_prefixes_never_share_a_key() -> None:
    layouts = [KeyLayout("tiny", cache_prefix=prefix) for prefix in ("", "a", "b")]
    keys = [key for layout in layouts for key in layout.keys(DIGEST)]
    assert len(set(keys)) == 3


names = st.text(string.ascii_letters + string.digits + "@:._- ", min_size=1, max_size=20)


layouts = st.builds(
    KeyLayout,
    model=names,
    tp_ranks=st.integers(1, 4),
    pp_ranks=st.integers(1, 3),
    groups=st.sets(st.integers(0, 5), min_size=1, max_size=3).map(lambda found: tuple(sorted(found))),
    cache_prefix=st.one_of(st.just(""), names),
    namespace=st.sampled_from(["", "@store_pp:2@store_format:rank_local_tp2_layout_LBHNC"]),
    pcp_ranks=st.integers(1, 2),
    dcp_ranks=st.integers(1, 2),
)


@given(layouts, st.one_of(st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16)))
def test_every_key_of_every_layout_parses_back(layout: KeyLayout, digest: bytes) -> None:
    keys = layout.keys(digest)
    assert len(keys) == len(set(keys)) == len(layout.prefixes())
    for key in keys:
        parsed = parse_key(key)
        assert parsed is not None
        assert parsed.digest == digest
        assert parsed.prefix + digest.hex() == key
        assert parsed.prefix in layout.prefixes()


@given(layouts, st.binary(min_size=32, max_size=32))
def test_b061_the_layout_of_a_stored_block_can_be_read_off_its_keys(layout: KeyLayout, digest: bytes) -> None:
    assume(layout.name != "another")
    foreign = ["other", *KeyLayout("another").keys(digest)[:1]]
    observed = observed_layouts([*layout.keys(digest), *foreign])
    mine = [each for each in observed if each.name == layout.name]
    assert len(mine) == 1
    assert mine[0].prefixes() == layout.prefixes()


def test_parsed_fields_are_the_ranks() -> None:
    assert parse_key(f"p@m@tp_rank:3@pcp1@dcp1@pp_rank:2@group:5@{HEX}") == PoolKey(
        name="p@m", namespace="", tp_rank=3, pcp_rank=1, dcp_rank=1, pp_rank=2, group=5, digest=DIGEST
    )
