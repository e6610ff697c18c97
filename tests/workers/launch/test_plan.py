import json
import sys
from pathlib import Path

import pytest

from workers.launch.model import LocalModel
from workers.launch.plan import LocalFleet, Plan, with_one_token
from workers.launch.server import Server

MODEL = LocalModel(path="/models/m", name="m", load_format="dummy", offline=True, max_positions=4096)
BASE = 21_470


def plan(fleet: LocalFleet, tmp_path: Path) -> Plan:
    return Plan.make(fleet, MODEL, tmp_path, logs=tmp_path / "logs", cache=tmp_path / "cache")


def all_ports(plan: Plan) -> list[int]:
    ports = [port for w in plan.worker_ports for port in (w.http, w.events, w.replay, w.segment)]
    return [*ports, int((plan.pool or ":0").rpartition(":")[2]), plan.pool_http_port]


def options(server: Server, name: str) -> list[str]:
    return [value for option, value in zip(server.argv, server.argv[1:], strict=False) if option == name]


def test_no_port_is_given_out_twice(tmp_path: Path) -> None:
    ports = all_ports(plan(LocalFleet(workers=3, port=BASE), tmp_path))
    assert len(set(ports)) == len(ports)
    assert min(ports) > BASE


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:8000"), ("::", "http://127.0.0.1:8000"), ("10.0.0.1", "http://10.0.0.1:8000")],
)
def test_an_ipv6_address_is_in_brackets_where_a_url_is_made_of_it(host: str, url: str) -> None:
    assert LocalFleet(host=host, port=8000).url == url


def test_the_gateway_is_told_of_the_workers_and_the_pool(tmp_path: Path) -> None:
    made = plan(LocalFleet(workers=2, port=BASE, gateway_args=("--policy", "x")), tmp_path)
    gateway = made.gateway("secret")
    assert options(gateway, "--worker") == [f"http://127.0.0.1:{w.http}" for w in made.worker_ports]
    assert options(gateway, "--mooncake-master") == [made.pool]
    assert gateway.env["MOONGATE_MOONCAKE__HTTP_PORT"] == str(made.pool_http_port)
    assert json.loads(gateway.env["MOONGATE_WORKERS__SEGMENTS"]) == {
        f"http://127.0.0.1:{w.http}": f"127.0.0.1:{w.segment}" for w in made.worker_ports
    }
    assert list(gateway.argv[-2:]) == ["--policy", "x"]


def test_the_admin_token_is_not_on_the_command_line(tmp_path: Path) -> None:
    gateway = plan(LocalFleet(port=BASE), tmp_path).gateway("secret")
    assert "secret" not in gateway.argv
    assert gateway.env["MOONGATE_ADMIN__TOKEN"] == "secret"  # noqa: S105 (a test's)


@pytest.mark.parametrize(
    ("words", "token", "rest"),
    [
        ("--admin-token sesame --policy x", "sesame", "--policy x"),
        ("--policy x --admin-token=se=same", "se=same", "--policy x"),
        ("--admin-token a --admin-token b", "b", ""),
        ("--policy x", "of-up", "--policy x"),
        ("--admin-token=", "of-up", ""),
        ("--policy x --admin-token", "of-up", "--policy x --admin-token"),
    ],
)
def test_the_gateway_has_one_admin_token_whoever_gives_it(words: str, token: str, rest: str) -> None:
    fleet = with_one_token(LocalFleet(gateway_args=tuple(words.split()), admin_token="of-up"))  # noqa: S106
    assert (fleet.admin_token, fleet.gateway_args) == (token, tuple(rest.split()))


def test_a_token_that_nobody_gives_is_made() -> None:
    assert len(with_one_token(LocalFleet()).admin_token) > 20


def test_without_a_pool_nobody_is_told_of_one(tmp_path: Path) -> None:
    made = plan(LocalFleet(port=BASE, mooncake="off"), tmp_path)
    assert made.pool is None
    assert options(made.gateway("t"), "--mooncake-master") == []
    assert not [word for worker in made.workers() for word in worker.argv if "mooncake" in word]


def test_a_running_master_is_used(tmp_path: Path) -> None:
    fleet = LocalFleet(port=BASE, mooncake="10.0.0.7:50051", mooncake_http_port=9999)
    gateway = plan(fleet, tmp_path).gateway("t")
    assert options(gateway, "--mooncake-master") == ["10.0.0.7:50051"]
    assert gateway.env["MOONGATE_MOONCAKE__HTTP_PORT"] == "9999"


def test_vllm_workers_have_a_directory_of_their_own_and_fit_the_model(tmp_path: Path) -> None:
    fleet = LocalFleet(engine="vllm", port=BASE, vllm_python=Path(sys.executable))
    first, second = plan(fleet, tmp_path).workers()
    assert first.cwd != second.cwd
    assert (first.cwd / "mooncake.json").exists()
    assert "--max-model-len=4096" in first.argv


def test_without_its_environment_vllm_is_a_clear_error(tmp_path: Path) -> None:
    fleet = LocalFleet(engine="vllm", port=BASE, vllm_python=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="make setup-vllm"):
        plan(fleet, tmp_path).workers()


def test_a_hash_seed_of_the_users_shell_reaches_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    for worker in plan(LocalFleet(port=BASE), tmp_path).workers():
        assert "PYTHONHASHSEED" not in worker.env


def test_logs_are_those_of_this_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    old = tmp_path / "logs" / "gateway.log"
    old.write_text("of the run before")
    plan(LocalFleet(port=BASE), tmp_path).gateway("t")
    assert not old.exists()
