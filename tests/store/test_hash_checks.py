"""B052, B054: a target that hashes otherwise than expected is told of, with what it does if that is found."""

import pytest

from store.events import BlockStored
from store.hash_checks import HashChecks
from store.hashing import HashScheme, chain

SIZE = 32
TOKENS = list(range(1000, 1000 + 3 * SIZE))


def announced_by(scheme: HashScheme) -> BlockStored:
    keys = list(chain(TOKENS, scheme).keys)
    return BlockStored(keys, None, token_ids=TOKENS, block_size=SIZE, tier="gpu", group=0)


def expecting(scheme: HashScheme, *, fixed: bool = True) -> HashChecks:
    checks = HashChecks()
    assert checks.expect("w", scheme, fixed=fixed)
    return checks


def test_b054_the_expected_scheme_is_confirmed() -> None:
    scheme = HashScheme("sha256_cbor", SIZE, "0")
    checks = expecting(scheme)
    checks.check("w", announced_by(scheme))
    assert checks.mismatches == {}


@pytest.mark.parametrize(
    ("expected", "real", "said"),
    [
        (
            HashScheme("sha256_cbor", SIZE, "0"),
            HashScheme("sha256", SIZE, None),
            "expected sha256_cbor with PYTHONHASHSEED '0', the worker uses sha256 with PYTHONHASHSEED unset",
        ),
        (
            HashScheme("xxhash", SIZE, None),  # cannot be computed without a seed
            HashScheme("xxhash_cbor", SIZE, "0"),
            "expected xxhash with PYTHONHASHSEED unset, the worker uses xxhash_cbor with PYTHONHASHSEED '0'",
        ),
        (
            HashScheme("sha256", SIZE, None),
            HashScheme("sha256", SIZE, "secret"),
            "expected sha256 with PYTHONHASHSEED unset, the worker uses none of the known ways",
        ),
        (
            HashScheme("sha256", 16),
            HashScheme("sha256", SIZE),
            "events have blocks of 32 tokens, expected 16",
        ),
    ],
    ids=["another-way", "no-seed", "nobodys", "block-size"],
)
def test_b052_b054_a_difference_is_told_until_the_hashes_fit(
    expected: HashScheme, real: HashScheme, said: str
) -> None:
    checks = expecting(expected)
    checks.check("w", announced_by(real))
    assert checks.mismatches == {"w": said}
    checks.expect("w", real, fixed=True)
    checks.check("w", announced_by(real))
    assert checks.mismatches == {}


def test_b054_a_later_fit_ends_a_difference() -> None:
    scheme = HashScheme("sha256", SIZE)
    checks = expecting(scheme)
    checks.check("w", announced_by(HashScheme("sha256", SIZE, "secret")))
    assert list(checks.mismatches) == ["w"]
    checks.check("w", announced_by(scheme))
    assert checks.mismatches == {}


def test_b054_a_seed_that_was_only_assumed_gives_way_to_the_one_that_fits() -> None:
    assumed, real = HashScheme("sha256_cbor", SIZE, None), HashScheme("sha256_cbor", SIZE, "0")
    checks = expecting(assumed, fixed=False)
    assert checks.scheme("w") == assumed
    checks.check("w", announced_by(real))
    assert (checks.scheme("w"), checks.mismatches) == (real, {})
    assert not checks.expect("w", assumed, fixed=False)
    assert checks.scheme("w") == real
    checks.drop("w")
    assert checks.scheme("w") is None


def test_b009_a_fit_is_not_looked_at_again_before_the_next_life() -> None:
    scheme, other = HashScheme("sha256", SIZE), HashScheme("sha256", SIZE, "0")
    checks = expecting(scheme)
    checks.check("w", announced_by(scheme))
    checks.check("w", announced_by(other))
    assert checks.mismatches == {}
    checks.again("w")
    checks.check("w", announced_by(other))
    assert list(checks.mismatches) == ["w"]
