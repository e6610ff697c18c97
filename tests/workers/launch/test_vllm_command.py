import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.ports import ports
from workers.launch.vllm import VllmWorkerSpec, command, mooncake_config

SPEC = VllmWorkerSpec(
    python=Path("/env/bin/python"),
    model="/models/tiny",
    directory=Path("/run/w0"),
    cache=Path("/cache"),
    port=8101,
    events_port=8102,
    replay_port=8103,
    segment_port=8104,
    mooncake="127.0.0.1:50051",
)


def option(argv: list[str], name: str) -> str:
    (value,) = [word.removeprefix(f"--{name}=") for word in argv if word.startswith(f"--{name}=")]
    return value


def config(spec: VllmWorkerSpec, name: str) -> dict[str, Any]:
    return json.loads(option(command(spec)[0], name))


def test_blocks_stay_in_the_segment_of_the_worker_that_computed_them() -> None:
    extra = config(SPEC, "kv-transfer-config")["kv_connector_extra_config"]
    assert extra["preferred_segment"] == SPEC.segment == "127.0.0.1:8104"
    assert command(SPEC)[1]["MOONCAKE_REQUESTER_LOCAL_HOSTNAME"] == SPEC.segment


def test_workers_of_one_host_share_no_socket_name_and_no_directory() -> None:
    other = replace(SPEC, port=8201, directory=Path("/run/w1"))
    names = [
        config(spec, "kv-transfer-config")["kv_connector_extra_config"]["lookup_rpc_port"]
        for spec in (SPEC, other)
    ]
    assert names[0] != names[1]
    assert command(SPEC)[1]["TMPDIR"] != command(other)[1]["TMPDIR"]


def test_the_lookup_socket_path_stays_short_however_deep_the_run_directory_is() -> None:
    deep = replace(SPEC, directory=Path("/" + "deep/" * 40))
    assert len(command(deep)[1]["VLLM_RPC_BASE_PATH"]) < 40


def test_a_lost_block_is_recomputed_not_an_error() -> None:
    assert config(SPEC, "kv-transfer-config")["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "worker-1", "::1"])  # noqa: S104 (not bound)
def test_the_events_publisher_binds(host: str) -> None:
    endpoint = config(replace(SPEC, host=host), "kv-events-config")["endpoint"]
    assert "*" in endpoint or "::" in endpoint  # vLLM connects out to anything else
    if host == "::1":
        assert endpoint == "tcp://[::1]:8102"
        assert replace(SPEC, host=host).url == "http://[::1]:8101"


def test_events_of_a_local_worker_are_not_for_the_network() -> None:
    events = config(SPEC, "kv-events-config")
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, context.socket(zmq.SUB) as follower:
        port = next(ports(above=21_490))
        endpoint = events["endpoint"].replace(":8102", f":{port}")
        publisher.bind(endpoint)
        assert publisher.getsockopt(zmq.LAST_ENDPOINT) == f"tcp://127.0.0.1:{port}".encode()
        follower.connect(endpoint)  # as published: what the gateway reads from /kv_event_sources
        follower.subscribe(b"")
        while not follower.poll(10):  # bounded by the test's timeout
            publisher.send(b"batch")
    assert events["replay_endpoint"] == "tcp://[::ffff:127.0.0.1]:8103"


def test_a_prompt_of_the_maximum_length_fits_the_cache() -> None:
    for blocks in (65, 512, 4224, 100_000):
        spec = replace(SPEC, blocks=blocks)
        longest = int(option(command(spec)[0], "max-model-len"))
        assert longest <= (blocks - 1) * spec.block_size
        assert longest <= 131_072
    assert option(command(replace(SPEC, max_model_len=2048))[0], "max-model-len") == "2048"


def test_without_a_pool_there_is_no_connector() -> None:
    argv, env = command(replace(SPEC, mooncake=None))
    assert not [word for word in argv if "kv-transfer" in word]
    assert "MOONCAKE_CONFIG_PATH" not in env


def test_the_pool_configuration_names_the_master_and_the_sizes() -> None:
    written = mooncake_config(replace(SPEC, segment_bytes=16 << 20))
    assert written["master_server_address"] == "127.0.0.1:50051"
    assert written["global_segment_size"] == 16 << 20
    assert written["protocol"] == "tcp"


def test_the_hash_seed_is_set_only_when_asked_for() -> None:
    assert "PYTHONHASHSEED" not in command(SPEC)[1]
    assert command(replace(SPEC, hash_seed="7"))[1]["PYTHONHASHSEED"] == "7"


def test_the_served_name_defaults_to_the_model_directory() -> None:
    assert option(command(SPEC)[0], "served-model-name") == "tiny"
    assert option(command(replace(SPEC, served_model_name="agent"))[0], "served-model-name") == "agent"


def test_extra_arguments_come_last_so_that_they_win() -> None:
    argv, _ = command(replace(SPEC, extra_args=("--max-num-seqs=2",)))
    assert argv[-1] == "--max-num-seqs=2"
