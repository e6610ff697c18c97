"""docker-compose.yml repeats the launcher's flags by hand; these tests keep the two from drifting apart."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.launch.vllm import VllmWorkerSpec, command, mooncake_config

ROOT = Path(__file__).parents[3]
PER_CONTAINER = {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "MOONCAKE_CONFIG_PATH", "TMPDIR", "VLLM_CACHE_ROOT"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.fixture(scope="module")
def launched() -> tuple[dict[str, str], dict[str, str]]:
    spec = VllmWorkerSpec(
        python=Path("python"),
        model="/models/moongate-tiny",
        directory=Path("/run"),
        cache=Path("/cache"),
        port=8000,
        events_port=5557,
        replay_port=5558,
        segment_port=5559,
        host="0.0.0.0",  # noqa: S104 (inside a container)
        mooncake="172.30.0.10:50051",
    )
    argv, env = command(spec)
    return flags(argv[3:]), env


def flags(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


@pytest.mark.parametrize("worker", ["worker-1", "worker-2"])
def test_workers_in_containers_get_the_launchers_flags(
    worker: str, services: dict[str, Any], launched: tuple[dict[str, str], dict[str, str]]
) -> None:
    written, wanted = flags(services[worker]["command"]), dict(launched[0])
    for name in ("--kv-events-config", "--kv-transfer-config"):
        ours, theirs = json.loads(wanted.pop(name)), json.loads(written.pop(name))
        if extra := ours.get("kv_connector_extra_config"):
            # One worker a container: no socket to share. The segment comes from the environment.
            del extra["lookup_rpc_port"], extra["preferred_segment"]
        assert theirs == ours
    assert {name: without_default(value) for name, value in written.items()} == wanted


@pytest.mark.parametrize("worker", ["worker-1", "worker-2"])
def test_workers_in_containers_keep_their_blocks_in_their_own_segment(
    worker: str, services: dict[str, Any], launched: tuple[dict[str, str], dict[str, str]]
) -> None:
    environment = services[worker]["environment"]
    address = services[worker]["networks"]["fleet"]["ipv4_address"]
    assert environment["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"].startswith(f"{address}:")
    assert environment["MOONCAKE_PREFERRED_SEGMENT"] == environment["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"]
    for name, value in launched[1].items():
        if name not in PER_CONTAINER | {"VLLM_RPC_BASE_PATH"}:
            assert environment[name] == value


def test_the_pool_configuration_is_the_launchers(services: dict[str, Any]) -> None:
    address = services["mooncake"]["networks"]["fleet"]["ipv4_address"]
    spec = VllmWorkerSpec(Path(), "", Path(), Path(), 1, 2, 3, 4, mooncake=f"{address}:50051")
    assert json.loads((ROOT / "deploy/mooncake.json").read_text()) == mooncake_config(spec)


def test_the_gateway_is_told_of_every_worker(services: dict[str, Any]) -> None:
    named = {word for word in services["gateway"]["command"] if word.startswith("--worker=")}
    addresses = {services[name]["networks"]["fleet"]["ipv4_address"] for name in ("worker-1", "worker-2")}
    assert named == {f"--worker=http://{address}:8000" for address in addresses}


def test_the_image_has_every_package_that_the_command_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = {pattern.rstrip("*") for pattern in project["include"]}
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE))
    sent = set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert packages == copied
    assert packages <= sent


def without_default(value: str) -> str:
    """`a${NAME:-b}` as compose fills it in when NAME is not set."""
    head, opened, rest = value.partition("${")
    if not opened:
        return value
    inside, _, tail = rest.partition("}")
    return head + inside.partition(":-")[2] + without_default(tail)
