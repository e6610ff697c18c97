"""The command: its errors are one line and end with 2, its output is what a user pastes on."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from gateway.cli.main import main

PROJECT = Path(__file__).parents[3]


def moongate(
    *words: str, env: dict[str, str] | None = None, cwd: Path | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONGATE_")}
    environment["PYTHONPATH"] = str(PROJECT)
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words],
        env=environment | (env or {}),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@dataclass
class Done:
    """What the command did, in this process: a process of its own for each takes a second of a core."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command with nothing but the words it is given, in a directory of its own."""

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["moongate", *words])
        monkeypatch.chdir(tmp_path)
        for name in [name for name in os.environ if name.startswith("MOONGATE_")]:
            monkeypatch.delenv(name)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Done(int(ended.value.code or 0), said.out, said.err)

    return run


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    before = os.times()
    done = moongate("--help")
    after = os.times()
    assert after.children_user + after.children_system < before.children_user + before.children_system + 2
    assert done.returncode == 0
    for command in ("serve", "up", "worker", "explain", "doctor"):
        assert f"\n  {command} " in done.stdout
    assert moongate().stdout == done.stdout
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            "import gateway.cli.main, sys; print('fastapi' in sys.modules, 'httpx' in sys.modules)",
        ],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "False False\n"


def test_the_flags_of_serve_are_those_of_the_design() -> None:
    shown = moongate("serve", "--help").stdout
    for flag in (
        "--config",
        "--worker",
        "--mooncake-master",
        "--mooncake-http-port",
        "--policy",
        "--host",
        "--port",
        "--admin-token",
        "--api-keys",
        "--print-config",
    ):
        assert flag in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--colour"], "No such option: --colour"),
        (["serv"], "No such command 'serv'"),
        (["serve", "--port", "many"], "--port"),
        (["serve", "--port", "70000"], "server.port"),
        (["serve", "--config", "gone.toml"], "gone.toml: No such file"),
        (["serve", "extra"], "extra"),
        (["up", "--engine", "steam"], "steam"),
        (["up", "--workers", "0"], "--workers"),
        (["explain"], "file"),
        (["explain", "gone.json"], "gone.json: No such file"),
    ],
)
def test_errors_of_usage_are_one_line_and_end_with_2(words: list[str], said: str, here: Run) -> None:
    done = here(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("moongate: ")
    assert said in done.stderr


def test_unknown_settings_are_errors_of_usage(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[server]\nprot = 1\n", "utf-8")
    for done in (
        moongate("serve", "--config", str(file)),
        moongate("serve", env={"MOONGATE_SERVER__PROT": "1"}),
    ):
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert "nearest" in done.stderr


def test_print_config_shows_the_effective_settings_masked(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[server]\nport = 1\nhost = '::1'\n", "utf-8")
    done = moongate(
        *("serve", "--config", str(file), "--worker", "http://a:1", "--worker", "http://b:2"),
        *(
            "--mooncake-master",
            "m:50051",
            "--mooncake-http-port",
            "8010",
            "--policy",
            "random",
            "--admin-token",
            "SENTINEL",
            "--print-config",
        ),
        env={"MOONGATE_SERVER__PORT": "2"},
    )
    shown = tomllib.loads(done.stdout)
    assert shown["server"] == {"host": "::1", "port": 2, "log_level": "info"}
    assert shown["workers"]["urls"] == ["http://a:1", "http://b:2"]
    assert (shown["mooncake"]["master"], shown["mooncake"]["http_port"]) == ("m:50051", 8010)
    assert shown["routing"]["policy"] == "random"
    assert shown["admin"]["token"] == "***"  # noqa: S105
    assert "SENTINEL" not in done.stdout + done.stderr


def test_the_version() -> None:
    done = moongate("--version")
    assert (done.returncode, done.stdout) == (0, f"moongate {version('moongate')}\n")


def test_explain_and_doctor_without_a_gateway_say_so(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text("{}", "utf-8")
    explained = moongate("explain", str(body), "--url", "http://127.0.0.1:21599")
    assert (explained.returncode, explained.stdout) == (1, "")
    assert "no gateway answers at http://127.0.0.1:21599" in explained.stderr
    assert "--url" in explained.stderr
    examined = moongate("doctor", "--url", "127.0.0.1:21599/v1")
    assert examined.returncode == 1
    assert examined.stdout.startswith("fail  gateway: no gateway answers")


def test_worker_dry_run_prints_a_command_that_a_shell_understands(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    model.mkdir()
    model.joinpath("config.json").write_text("{}", "utf-8")
    done = moongate(
        *("worker", "--model", str(model), "--port", "21510", "--mooncake", "127.0.0.1:50051"),
        *("--python", sys.executable, "--dry-run", "--", "--max-num-seqs=3"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    write, run = done.stdout.split("\n", 1)
    subprocess.run(write, shell=True, check=True, cwd=tmp_path)
    config = json.loads((tmp_path / ".moongate/worker-21510/mooncake.json").read_text("utf-8"))
    assert config["master_server_address"] == "127.0.0.1:50051"
    assert config["global_segment_size"] == 4 << 30
    words = shlex.split(run.replace("\\\n", " "))
    assert words[0] == "env"
    assert words[1:3] == ["-u", "PYTHONHASHSEED"]
    assert f"--model={model}" in words
    assert "--served-model-name=a model" in words
    assert words[-1] == "--max-num-seqs=3"
    assert any(word.startswith("MOONCAKE_CONFIG_PATH=") for word in words)


def test_worker_dry_run_needs_neither_the_model_nor_the_engine_here(tmp_path: Path) -> None:
    done = moongate("worker", "--model", "/models/name", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--model=/models/name" in done.stdout
    # Sizes of the demonstration, and what makes it small, are not for a model of one's own.
    for word in ("--num-gpu-blocks-override", "--enforce-eager", "--max-num-seqs", "OMP_NUM_THREADS"):
        assert word not in done.stdout
    assert "--served-model-name=name" in done.stdout
    assert moongate("worker", "--model", "/models/name", cwd=tmp_path).returncode == 2


async def test_serve_runs_and_ends_on_sigterm(tmp_path: Path) -> None:
    """On a free port, without any worker: alive, not ready, admin with the announced token."""
    import httpx

    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOONGATE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", "--port", "0"),
        env=environment | {"PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    assert process.stderr
    try:
        announced = (await asyncio.wait_for(process.stderr.readline(), 60)).decode().strip()
        listening = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        url, token = listening[3].rstrip(","), announced.rsplit(" ", 1)[1]
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/admin/v1/workers")).status_code == 401
            opened = await http.get("/admin/v1/workers", headers={"authorization": f"Bearer {token}"})
            assert opened.json() == {"workers": [], "refusals": []}
            assert "server" not in opened.headers
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        assert token not in log.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_serve_says_when_its_port_is_taken(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = moongate("serve", "--port", str(port), "--admin-token", "t", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"moongate: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_a_gateway_is_not_started_as_a_worker_of_its_own(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    done = moongate(
        *("serve", "--port", port, "--admin-token", "t", "--worker", f"http://localhost:{port}"), cwd=tmp_path
    )
    assert done.returncode == 2
    assert f"workers.urls: http://localhost:{port} is the gateway's own URL" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "nearest"], "no policy is called 'nearest'"),
        (["--worker", "ftp://x"], "workers.urls"),
        (["--api-keys", "gone"], "auth.api_keys_file: gone"),
        (["--config", "strangers.toml"], "workers.ca_file: gone.pem: No such file or directory"),
        (["--config", "m.toml"], "margin_tokens"),
    ],
)
def test_settings_that_do_not_fit_end_serve_with_one_line(
    words: list[str], said: str, here: Run, tmp_path: Path
) -> None:
    tmp_path.joinpath("strangers.toml").write_text('[workers]\nca_file = "gone.pem"\n', "utf-8")
    tmp_path.joinpath("m.toml").write_text("[routing]\noptions = {margin_tokens = 4096}\n", "utf-8")
    serve = ("serve", "--port", "0", "--admin-token", "t", *words)
    # Serving sets up the log of its process; what prints the settings does nothing to it.
    for done in (moongate(*serve, cwd=tmp_path), here(*serve, "--print-config")):
        assert done.stdout == ""
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_lookup_by_a_client_that_is_not_installed_ends_serve_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    env = {
        "MOONGATE_MOONCAKE__LOOKUP": "rpc",
        "MOONGATE_MOONCAKE__MASTER": "127.0.0.1:1",
        "PYTHONPATH": f"{tmp_path}:{PROJECT}",
    }
    done = moongate("serve", "--port", "0", "--admin-token", "t", env=env, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "mooncake.lookup" in done.stderr
