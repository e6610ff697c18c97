"""Keys of blocks in many small dicts: as one dict would have them, and never all of them moved at once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.slots import Slots

KEYS = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.tuples(st.booleans(), st.sets(KEYS, max_size=8), st.integers(0, 9)), max_size=20))
def test_as_one_dict(steps: list[tuple[bool, set[int], int]]) -> None:
    slots, model = Slots(), dict[int, int]()
    for put, keys, number in steps:
        known = [key for key in keys if key in model]
        assert slots.disjoint(keys) == (not known)
        if put:
            slots.move(known, number)
            slots.put([key for key in keys if key not in model], number)
            model |= dict.fromkeys(keys, number)
        else:
            slots.forget(known)
            for key in known:
                del model[key]
        slots.shrink()
        assert len(slots) == len(model)
        assert {key: slots.get(key) for key in keys} == {key: model.get(key) for key in keys}


@pytest.mark.parametrize("bit_by_bit", [True, False])
def test_no_dict_has_more_than_a_small_part_and_their_room_is_given_back(bit_by_bit: bool) -> None:
    slots, draws = Slots(), random.Random(1)
    empty = slots.bytes()
    keys = [draws.getrandbits(64) for _ in range(200_000)]
    slots.put(keys, 1)
    full = slots.bytes()
    parts = slots._parts  # pyright: ignore[reportPrivateUsage]
    assert max(map(len, parts)) < len(keys) // 32
    at_once = 100 if bit_by_bit else len(keys)
    for start in range(0, len(keys), at_once):
        slots.forget(keys[start : start + at_once])
        slots.shrink()
    assert len(slots) == 0
    assert full > 5_000_000
    assert slots.bytes() == empty
