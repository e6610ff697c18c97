"""Objections to odd bodies, in the words that vLLM 0.32 was seen to use."""

import pytest

from workers.sim.bodies import Body, DetokenizeBody, Refused, check, decoded


@pytest.mark.parametrize(
    ("body", "param", "entries"),
    [
        (
            b'{"model":5}',
            "model",
            [("string_type", "Input should be a valid string", 5)],
        ),
        (
            b'{"n":"x"}',
            "n",
            [
                (
                    "int_parsing",
                    "Input should be a valid integer, unable to parse string as an integer",
                    "x",
                )
            ],
        ),
        (
            b'{"n":1.5}',
            "n",
            [("int_from_float", "Input should be a valid integer, got a number with a fractional part", 1.5)],
        ),
        (b'{"n":[1]}', "n", [("int_type", "Input should be a valid integer", "<list of 1 items>")]),
        (
            b'{"temperature":"x"}',
            "temperature",
            [
                (
                    "float_parsing",
                    "Input should be a valid number, unable to parse string as a number",
                    "x",
                )
            ],
        ),
        (
            b'{"stream":"x"}',
            "stream",
            [("bool_parsing", "Input should be a valid boolean, unable to interpret input", "x")],
        ),
        (
            b'{"stop":5}',
            "stop",
            [
                ("string_type", "Input should be a valid string", 5),
                ("list_type", "Input should be a valid list", 5),
            ],
        ),
    ],
)
def test_fields_of_odd_types(body: bytes, param: str, entries: list[tuple[str, str, object]]) -> None:
    with pytest.raises(Refused) as refused:
        decoded(body, Body)
    lines = [
        f"  {{'type': '{kind}', 'loc': 'body.{param}', 'msg': '{said}', 'input': {shown!r}}}"
        for kind, said, shown in entries
    ]
    many = "s" * (len(lines) > 1)
    assert str(refused.value) == "\n".join([f"{len(lines)} validation error{many}:", *lines])
    assert (refused.value.param, refused.value.status) == (f"body.{param}", 400)


def test_a_field_that_is_missing() -> None:
    with pytest.raises(Refused, match=r"'missing', 'loc': 'body.tokens', 'msg': 'Field required'"):
        decoded(b"{}", DetokenizeBody)


def test_what_stands_for_a_number_or_a_flag_is_taken() -> None:
    body = decoded(b'{"n":"2","max_tokens":1.0,"stream":"true","temperature":"0.5","seed":1e9}', Body)
    assert (body.n, body.max_tokens, body.stream, body.temperature, body.seed) == (2, 1, True, 0.5, 10**9)


@pytest.mark.parametrize(
    ("n", "said"),
    [
        (b"0", "n must be at least 1, got 0."),
        (
            b"1e9",
            "n must be at most 16384, got 1000000000. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable.",
        ),
    ],
)
def test_the_number_of_answers_is_bounded(n: bytes, said: str) -> None:
    with pytest.raises(Refused) as refused:
        check(decoded(b'{"n":' + n + b"}", Body), ["m"], 100)
    assert str(refused.value) == said
