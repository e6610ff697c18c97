"""Settings: the order of the sources, and errors that name the key and what was probably meant."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.settings import Settings, SettingsError, keys, load, render


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "moongate.toml"
    file.write_text(text, "utf-8")
    return file


def test_defaults_need_nothing() -> None:
    settings = load(None, {}, {})
    assert settings == Settings()
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[server]\nport = 1\nhost = "a"\nlog_level = "debug"\n[timeouts]\nconnect_s = 5\n')
    env = {"MOONGATE_SERVER__PORT": "2", "moongate_server__host": "b", "PATH": "/bin"}
    settings = load(file, env, {"server.port": 3, "server.host": None, "workers.urls": ["http://w:1"]})
    assert settings.server.port == 3
    assert settings.server.host == "b"
    assert settings.server.log_level == "debug"
    assert settings.timeouts.connect_s == 5.0
    assert settings.workers.urls == ["http://w:1"]


_TEXTS = {"mooncake.master": "m:50051", "mooncake.events": "tcp://m:5557"}


def test_every_key_has_a_working_environment_variable() -> None:
    for key in keys():
        if not key.env:
            assert key.name.startswith("models.*.")
            continue
        text = {bool: "false", list: "http://a:1,http://b:2", dict: '{"x": "y"}'}.get(type(key.default))
        text = text or (str(key.default) if key.default != "" else _TEXTS.get(key.name, "x"))
        assert isinstance(load(None, {key.env: text}, {}), Settings), key.name


def test_lists_and_tables_from_the_environment() -> None:
    env = {
        "MOONGATE_WORKERS__URLS": " http://a:1 , http://b:2 ",
        "MOONGATE_ROUTING__OPTIONS": '{"pull_cost": 0.2}',
        "MOONGATE_ROUTING__OPTIONS__MARGIN_TOKENS": "99",
    }
    settings = load(None, env, {})
    assert settings.workers.urls == ["http://a:1", "http://b:2"]
    assert settings.routing.options == {"pull_cost": 0.2, "margin_tokens": 99}
    assert load(None, {"MOONGATE_WORKERS__URLS": '["http://c:3"]'}, {}).workers.urls == ["http://c:3"]


def test_models_by_name(tmp_path: Path) -> None:
    file = write(tmp_path, '[models."org/name.v1"]\nhash_algo = "sha256_cbor"\nblock_size = 16\n')
    assert load(file, {}, {}).models["org/name.v1"].block_size == 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1\n", ["server.prot", "nearest: server.port"]),
        ("[sevrer]\nport = 1\n", ["such setting: sevrer; nearest: server\n"]),
        ("[sever]\nport = 1\n", ["such setting: sever; nearest: server\n"]),
        ("[server]\nfirst_byte_s = 1\n", ["server.first_byte_s", "nearest: timeouts.first_byte_s"]),
        ('[models.m]\ntokeniser = "x"\n', ["models.m.tokeniser", "nearest: models.*.tokenizer"]),
        ('[server]\nport = "abc"\n', ["server.port", "allowed: integer >= 0 and <= 65535"]),
        ("[server]\nport = 70000\n", ["server.port", "<= 65535"]),
        ('[server]\nlog_level = "loud"\n', ["server.log_level", "debug, info, warning, error"]),
        ("[workers]\nurls = [1]\n", ["workers.urls", "list of text"]),
        ('[models.m]\nhash_algo = "md5"\n', ["hash_algo", "sha256_cbor"]),
        ("server = 1\n", ["server"]),
        ("[server\n", ["not valid TOML", "line 1"]),
    ],
)
def test_faults_in_the_file_name_file_key_and_what_is_allowed(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load(file, {}, {})
    for part in [str(file), *said]:
        assert part in f"{caught.value}\n"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MOONGATE_SERVER__PROT", "1", "nearest: MOONGATE_SERVER__PORT"),
        ("MOONGATE_SERVER__PORT", "abc", "allowed: integer"),
        ("MOONGATE_SERVER__PORT", "", "allowed: integer"),
        ("MOONGATE_WORKERS__KV_EVENTS", "perhaps", "allowed: true or false"),
        ("MOONGATE_SERVER_PORT", "8000", "did you mean MOONGATE_SERVER__PORT"),
        ("MOONGATE_MODELS__M__TOKENIZER", "x", "models are set in the file"),
    ],
)
def test_faults_in_the_environment_name_the_variable(variable: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=variable) as caught:
        load(None, {variable: value}, {})
    assert said in str(caught.value)


def test_kubernetes_service_links_are_no_settings() -> None:
    env = {
        "MOONGATE_PORT": "tcp://10.0.0.1:8000",
        "MOONGATE_SERVICE_HOST": "10.0.0.1",
        "MOONGATE_SERVER_PORT": "tcp://10.0.0.2:80",
        "MOONGATE_SERVER_PORT_80_TCP_ADDR": "10.0.0.2",
    }
    assert load(None, env, {}) == Settings()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml: No such file"):
        load(tmp_path / "gone.toml", {}, {})


def test_b105_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    env = {"MOONGATE_ADMIN__TOKEN": "SENTINEL-1", "MOONGATE_WORKERS__API_KEY": "SENTINEL-2"}
    settings = load(None, env, {})
    assert settings.admin.token == env["MOONGATE_ADMIN__TOKEN"]
    for text in (render(settings), repr(settings), repr(settings.admin), str(settings.workers)):
        assert "SENTINEL" not in text
        assert "***" in text
    file = write(tmp_path, '[admin]\ntoken = ["SENTINEL-3"]\n')
    with pytest.raises(SettingsError, match=r"admin\.token") as caught:
        load(file, {}, {})
    assert "SENTINEL" not in str(caught.value)


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@example("", '\x7f\x00"\\\n', 0.0, [])
@given(names, names, st.floats(0, 1e9), st.lists(names, max_size=3))
def test_render_is_toml_that_loads_to_the_same_settings(
    model: str, text: str, number: float, urls: list[str]
) -> None:
    flags = {
        "server.host": text,
        "timeouts.total_s": number,
        "workers.urls": urls,
        "models": {model: {"cache_prefix": text}},
        "routing.options": {"a": {text: [number, True]}},
    }
    settings = load(None, {}, flags)
    assert load(None, {}, tomllib.loads(render(settings))) == settings


@pytest.mark.parametrize("master", ["master", "http://m:50051", "m:", ":1", "m:50051/", "m:1 "])
def test_what_is_no_place_of_a_master_is_refused(master: str) -> None:
    with pytest.raises(SettingsError, match=r"mooncake\.master"):
        load(None, {}, {"mooncake.master": master})
    assert load(None, {}, {"mooncake.master": "[::1]:50051"}).mooncake.master


@pytest.mark.parametrize("events", ["master:5557", "tcp://master", "ipc:///run/x", "tcp://m:1\n"])
def test_a_place_that_events_can_not_be_had_from_is_refused(events: str) -> None:
    with pytest.raises(SettingsError, match=r"mooncake\.events"):
        load(None, {}, {"mooncake.events": events})
    assert load(None, {}, {"mooncake.events": "tcp://[::1]:5557"}).mooncake.events


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pool_ranks", {"xp": 2}),
        ("pool_ranks", {"tp": 0}),
        ("pool_groups", {"first": 0}),
        ("pool_groups", {"0": -1}),
        ("pool_namespace", "store_tp:4"),
    ],
)
def test_key_layouts_that_no_engine_has_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"models.*{key}"):
        load(None, {}, {"models": {"m": {key: value}}})


def test_the_documented_table_is_the_real_one() -> None:
    documented = Path(__file__).parents[2].joinpath("docs", "configuration.md").read_text("utf-8")
    for key in keys():
        row = next((line for line in documented.splitlines() if line.startswith(f"| `{key.name}` |")), "")
        assert key.allowed in row, key.name
        assert key.description in row, key.name
