import socket
from itertools import islice

import pytest

from tests.ports import ports
from workers.launch.ports import PortTaken, claimed, free_ports, require_free


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_port_with_a_listener_is_taken_and_named() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_free_ports_skip_those_with_a_listener_on_any_address() -> None:
    above = next(ports(above=21_480))
    first, second = islice(free_ports(above), 2)
    with socket.create_server(("127.0.0.1", first)):
        assert next(free_ports(above)) == second


def test_free_ports_stay_out_of_the_range_of_outgoing_connections() -> None:
    assert next(free_ports(above=60_000)) < 32_768


def test_a_port_is_kept_for_a_fleet_before_it_listens_there() -> None:
    one, other = islice(ports(above=21_480), 2)
    with claimed(one), claimed(other):
        with pytest.raises(PortTaken, match="another fleet is starting or running"), claimed(one):
            pass
        require_free("127.0.0.1", one)
    with claimed(one):
        pass


def test_ports_of_tests_are_for_one_of_them() -> None:
    found = [port for _ in range(3) for port in islice(ports(above=21_480), 30)]
    assert len(set(found)) == len(found)
