"""Profiles: which figures there are, and which of them `--set` may change."""

import re
from pathlib import Path

import pytest

from replay import profile as profiles
from replay.profile import BadProfile, DecodeFigures, Figure, Profile

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"


def test_a_figure_that_decode_has_of_its_own_is_named_where_the_other_would_have_no_effect() -> None:
    with pytest.raises(BadProfile, match=r"decode_seq_s has no effect .* change decode\.decode_seq_s"):
        profiles.load("kimi-k2.5-gb200", {"decode_seq_s": 0.01})
    changed = profiles.load("kimi-k2.5-gb200", {"decode.decode_seq_s": 0.01})
    assert changed.decode is not None
    assert changed.decode.decode_seq_s == Figure(0.01, "the command line")
    assert profiles.load("qwen3-32b-2xh100", {"decode_seq_s": 0.01}).decode_seq_s.value == 0.01


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("step_s", float("nan"), "step_s must be a finite number, not nan"),
        ("network_bytes_s", float("inf"), "network_bytes_s must be a finite number, not inf"),
        ("block_size", 63.7, "block_size must be a whole number, not 63.7"),
        ("max_seqs", 0.5, "max_seqs must be a whole number, not 0.5"),
        ("decode.max_seqs", 0.5, r"decode\.max_seqs must be a whole number, not 0.5"),
        ("hbm_tokens", 63, "hbm_tokens must be at least a block, not 63"),
        ("decode.hbm_tokens", 63, r"decode\.hbm_tokens must be at least a block, not 63"),
        ("saves_decode", 7, "saves_decode must be 0 or 1, not 7"),
    ],
)
def test_figures_that_cannot_be_are_refused(key: str, value: float, says: str) -> None:
    with pytest.raises(BadProfile, match=says):
        profiles.load("kimi-k2.5-gb200", {key: value})


def test_a_profile_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_bytes('description = "Qwén"'.encode("latin-1"))
    with pytest.raises(BadProfile, match=r"p\.toml: not UTF-8: invalid continuation byte at byte 17"):
        profiles.load(str(file))


@pytest.mark.parametrize(("name", "decodes"), [("kimi-k2.5-gb200", True), ("qwen3-32b-2xh100", False)])
def test_a_figure_that_is_not_there_is_answered_with_all_that_are(name: str, decodes: bool) -> None:
    for key in ("speed", "decode.speed", "decode"):
        with pytest.raises(BadProfile, match=f"no figure '{key}'; there are") as wrong:
            profiles.load(name, {key: 1.0})
        named = set(re.split(r"there are |, ", str(wrong.value))[1:])
        own = {f"decode.{each}" for each in DecodeFigures.__struct_fields__}
        assert (own <= named) is decodes
        assert {"hbm_tokens", "dram_bytes"} <= named


def test_every_figure_of_a_profile_is_in_the_documentation() -> None:
    section = PAGE.read_text().split("### Figures of a profile\n", 1)[1].split("\n### ", 1)[0]
    listed = re.findall(r"^\| `([a-z_.]+)` \|", section, re.MULTILINE)
    figures = [each for each in Profile.__struct_fields__ if each not in ("description", "decode")]
    assert listed == [*figures, *(f"decode.{each}" for each in DecodeFigures.__struct_fields__)]
