"""Profiles: what one instance is and how fast, every number with where it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec

from workers.sim.engine import Limits, Rates

# Figures that a profile may leave out.
_OPTIONAL: Final = ("prefill_growth", "dram_bytes")
# Counts. With less than one of these nothing could run.
_WHOLE: Final = ("gpus", "block_size", "max_model_len", "hbm_tokens", "step_tokens", "max_seqs")
# Those that decode alone goes by: with P/D it has its own.
_OF_DECODE: Final = ("decode_seq_s",)


class BadProfile(ValueError):
    """No such profile, or its file is not one; the message says which key is wrong."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    source: str


class DecodeFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decode on instances of its own (P/D): it gets the prompt's KV over the network."""

    hbm_tokens: Figure
    step_s: Figure
    decode_seq_s: Figure
    max_seqs: Figure
    network_bytes_s: Figure


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instance. Sizes in tokens or bytes, times in seconds, rates per second.

    hbm_tokens: KV cache that requests can get. overhead_s: what a first token takes beyond queue, pull and
    prefill. segment_bytes: DRAM given to the pool. network_bytes_s: from other segments, one way;
    host_bytes_s: from its own. lookup_s, lookup_block_s: what the master takes for a prompt, and each block.
    events_s: until the router knows what the instance has stored. saves_decode: whether answers go into the
    pool. prefill_growth: by which share each token of context before it makes a prompt token dearer.
    dram_bytes: host memory into which it saves what it computes for itself alone (vLLM's CPU offloading).
    decode: None where the instance decodes itself.
    """

    description: str
    gpus: Figure
    block_size: Figure
    block_bytes: Figure
    max_model_len: Figure
    hbm_tokens: Figure
    prefill_tok_s: Figure
    step_tokens: Figure
    step_s: Figure
    decode_seq_s: Figure
    max_seqs: Figure
    overhead_s: Figure
    segment_bytes: Figure
    network_bytes_s: Figure
    host_bytes_s: Figure
    pull_setup_s: Figure
    lookup_s: Figure
    lookup_block_s: Figure
    events_s: Figure
    saves_decode: Figure
    prefill_growth: Figure = Figure(0.0, "none: the rate is that of the lengths it was measured at")
    dram_bytes: Figure = Figure(0.0, "none: host memory is given to the pool")
    decode: DecodeFigures | None = None

    @property
    def blocks_of_tokens(self) -> int:
        return int(self.block_size.value)

    @property
    def longest_turn(self) -> tuple[int, str]:
        """Tokens of prompt and answer that an instance can take at most, and the figure that says so."""
        size = self.blocks_of_tokens
        found = [(int(self.max_model_len.value), f"max_model_len = {self.max_model_len.value:,.0f}")]
        for holder, prefix in ((self, ""), (self.decode, "decode.")):
            if holder is not None:
                tokens = int(holder.hbm_tokens.value)
                whole = tokens // size * size
                more = f", {whole:,} of them in whole blocks" if whole < tokens else ""
                found.append((whole, f"{prefix}hbm_tokens = {tokens:,}{more}"))
        return min(found)

    @property
    def segment_blocks(self) -> int:
        return int(self.segment_bytes.value / self.block_bytes.value)

    @property
    def dram_blocks(self) -> int:
        return int(self.dram_bytes.value / self.block_bytes.value)

    def limits(self, stride: int) -> Limits:
        size = self.blocks_of_tokens
        return Limits(
            int(self.hbm_tokens.value) // size,
            size,
            int(self.max_seqs.value),
            int(self.step_tokens.value),
            stride,
        )

    def rates(self) -> Rates:
        return Rates(
            self.prefill_tok_s.value, self.step_s.value, self.decode_seq_s.value, self.prefill_growth_s
        )

    @property
    def prefill_growth_s(self) -> float:
        """Seconds that a token of context adds to a prompt token after it."""
        return self.prefill_growth.value / self.prefill_tok_s.value

    def decode_limits(self, stride: int) -> Limits:
        assert self.decode is not None
        size = self.blocks_of_tokens
        blocks = int(self.decode.hbm_tokens.value) // size
        return Limits(blocks, size, int(self.decode.max_seqs.value), int(self.step_tokens.value), stride)

    def decode_rates(self) -> Rates:
        assert self.decode is not None
        step_s, seq_s = self.decode.step_s.value, self.decode.decode_seq_s.value
        return Rates(self.prefill_tok_s.value, step_s, seq_s, self.prefill_growth_s)


def names() -> list[str]:
    shipped = resources.files("replay").joinpath("profiles")
    return sorted(
        each.name.removesuffix(".toml") for each in shipped.iterdir() if each.name.endswith(".toml")
    )


def load(name: str, changes: Mapping[str, float] | None = None) -> Profile:
    """A shipped profile by its name, or one in a TOML file by its path. Raises BadProfile.

    changes: other values for some of its figures, by key (`hbm_tokens`, `decode.step_s`).
    """
    if name in names():
        text = resources.files("replay").joinpath("profiles", f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as wrong:
            raise BadProfile(f"profile {name}: {wrong.strerror}") from None
        except UnicodeDecodeError as wrong:
            raise BadProfile(f"profile {name}: not UTF-8: {wrong.reason} at byte {wrong.start}") from None
    else:
        raise BadProfile(f"no profile is called {name!r}; there are {', '.join(names())}, or a .toml file")
    try:
        tree: dict[str, Any] = tomllib.loads(text)
        for key, value in (changes or {}).items():
            _change(tree, key, value)
        found = msgspec.convert(tree, Profile, strict=False)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as wrong:
        raise BadProfile(f"profile {name}: {wrong}") from None
    _check(name, found)
    return found


def _change(tree: dict[str, Any], key: str, value: float) -> None:
    if key in _OPTIONAL:
        tree.setdefault(key, {"value": value, "source": ""})
    section, _, inner = key.rpartition(".")
    place: Any = tree.get(section) if section else tree
    figure: Any = place.get(inner) if isinstance(place, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not isinstance(figure, dict) or "value" not in figure:
        keys = [*_keys(tree), *(each for each in _OPTIONAL if each not in tree)]
        keys += [f"decode.{each}" for each in _keys(tree.get("decode", {}))]
        raise BadProfile(f"the profile has no figure {key!r}; there are {', '.join(keys)}")
    if key in _OF_DECODE and "decode" in tree:
        raise BadProfile(f"{key} has no effect where decode has instances of its own: change decode.{key}")
    figure["value"], figure["source"] = value, "the command line"


def _keys(tree: Mapping[str, Any]) -> list[str]:
    return [each for each, got in tree.items() if isinstance(got, dict) and "value" in got]


def _check(name: str, profile: Profile) -> None:
    may_be_zero = {"overhead_s", "decode_seq_s", "pull_setup_s", "lookup_s", "lookup_block_s", "events_s"}
    may_be_zero |= {"saves_decode", "segment_bytes", *_OPTIONAL}
    for holder, prefix in ((profile, ""), (profile.decode, "decode.")):
        for key in holder.__struct_fields__ if holder is not None else ():
            figure = getattr(holder, key)
            if not isinstance(figure, Figure):
                continue
            value = figure.value
            if not isfinite(value):
                raise BadProfile(f"profile {name}: {prefix}{key} must be a finite number, not {value:g}")
            if value < 0 or (value == 0 and key not in may_be_zero):
                raise BadProfile(f"profile {name}: {prefix}{key} must be above 0, not {value:g}")
            if key in _WHOLE and not value.is_integer():
                raise BadProfile(f"profile {name}: {prefix}{key} must be a whole number, not {value:g}")
            if key == "hbm_tokens" and value < profile.block_size.value:
                raise BadProfile(f"profile {name}: {prefix}{key} must be at least a block, not {value:g}")
            if key == "saves_decode" and value not in (0, 1):
                raise BadProfile(f"profile {name}: saves_decode must be 0 or 1, not {value:g}")
            if not figure.source:
                raise BadProfile(f"profile {name}: {prefix}{key} has no source")
