"""Connections between rank 0 and the ranks of other nodes, over loopback and between network namespaces."""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

from offloadd import _connections, _nodes  # noqa: E402
from offloadd._connections import Connections  # noqa: E402


class Store(dict):
    def __init__(self, host="127.0.0.1"):
        self.host = host
        self.set, self.get = self.__setitem__, self.__getitem__


def check_until(*connections, until):
    """Lets connections look for as long as it takes; returns the time."""
    began = time.monotonic()
    while not until() and time.monotonic() < began + 20:
        for one in connections:
            one.check()
        time.sleep(0.01)
    assert until()
    return time.monotonic() - began


def of_ranks(store, *ranks):
    return [Connections(store, "run", rank, {2, 3}) for rank in ranks]


def test_each_side_knows_that_the_other_is_there_until_it_ends():
    beside, first, second, third = *of_ranks(Store(), 1), *of_ranks(store := Store(), 0, 2, 3)
    check_until(first, second, third, until=lambda: first.ranks == {2, 3} and second.ranks == third.ranks == {0} and not beside.ranks)
    second.close()
    check_until(first, third, until=lambda: first.ranks == {3})
    assert third.ranks == {0}
    first.close()
    check_until(third, until=lambda: not third.ranks)
    # Nobody listens any more.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((store.host, json.loads(store.get("run/connect"))[0]))


def test_a_rank_goes_on_to_look_where_the_first_one_ends_before_it_knows_who_is_connected(monkeypatch):
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setattr(_nodes, "_CONNECTED_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (_nodes.Link(store, "run", _nodes.Topology(rank, 2, (0, 1), ("one", "two"))) for rank in range(2))
    began = time.monotonic()
    second.start()
    assert time.monotonic() - began < 10
    second.close(False)
    first._connections.close()


def test_a_start_waits_for_those_that_have_connected_and_for_no_others(capsys):
    first, second, beside = *of_ranks(store := Store(), 0, 2), *of_ranks(store, 1)
    # Rank 3 finds nobody at this port.
    port, token = json.loads(store.get("run/connect"))
    store.set("run/connect", json.dumps([1, token]))
    (third,) = of_ranks(store, 3)
    began = time.monotonic()
    for one in (first, second, third, beside):
        one.complete()
    assert (first.ranks, second.ranks, third.ranks, beside.ranks) == ({2}, {0}, set(), set())
    # Rank 0 ends before it lets in one that has connected.
    store.set("run/connect", json.dumps([port, token]))
    (third,) = of_ranks(store, 3)
    first.close()
    third.complete()
    assert third.ranks == set() and time.monotonic() - began < _connections._CONNECT_S
    said = capsys.readouterr().err
    assert "rank 3: cannot connect to rank 0" in said and "rank 3: rank 0 has refused a connection" in said, said


def test_a_stranger_neither_gets_in_nor_keeps_others_out(monkeypatch):
    monkeypatch.setattr(_connections, "_CONNECT_S", 0.3)
    (first,) = of_ranks(store := Store(), 0)
    port, token = json.loads(store.get("run/connect"))
    says = (b"", b"x" * 36, token.encode() + b"\7\0\0\0", token.encode() + b"\1\0\0\0", token.encode()[:31] + b"-\2\0\0\0")
    strangers = [socket.create_connection((store.host, port)) for _ in says]
    for stranger, said in zip(strangers, says):
        stranger.sendall(said)
    second, third = of_ranks(store, 2, 3)
    check_until(first, second, third, until=lambda: first.ranks == {2, 3} and second.ranks == third.ranks == {0})
    for stranger in strangers:
        stranger.settimeout(1)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_without_a_connection_it_says_so(capsys):
    store = Store("192.0.2.1")
    first, second = of_ranks(store, 0, 2)
    said = capsys.readouterr().err
    assert said.startswith("offloadd: rank 0: cannot listen at 192.0.2.1: ") and said.count("\n") == 1, said
    assert not first.ranks and not second.ranks
    store.set("run/connect", json.dumps([1, "0" * 32]))
    store.host = "127.0.0.1"
    of_ranks(store, 3)
    assert "rank 3: cannot connect to rank 0 at 127.0.0.1" in capsys.readouterr().err
    store.__delattr__("host")
    assert [one.ranks for one in of_ranks(store, 0, 2)] == [set(), set()] and capsys.readouterr().err == ""


def test_a_fork_keeps_no_connection():
    first, second = of_ranks(Store(), 0, 2)
    check_until(first, second, until=lambda: first.ranks == {2} and second.ranks == {0})
    fork = os.fork()
    if fork == 0:
        signal.pause()
    try:
        second.close()
        check_until(first, until=lambda: not first.ranks)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


@pytest.fixture
def namespaces():
    """Two network namespaces, 10.79.0.1 and 10.79.0.2."""
    names = [f"offloadd-connections-{os.getpid()}-{node}" for node in (0, 1)]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        lines = [f"ip netns add {names[1]}", f"ip -n {names[0]} link add eth0 type veth peer name eth0 netns {names[1]}"]
        for node, name in enumerate(names):
            lines += [f"ip -n {name} address add 10.79.0.{node + 1}/24 dev eth0", f"ip -n {name} link set eth0 up"]
        for line in lines:
            subprocess.run(line.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextlib.contextmanager
def inside(name):
    """Sockets that this thread makes belong to a network namespace."""
    libc, own = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    assert libc.setns(there, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.setns(own, 0) == 0
        os.close(own), os.close(there)


def test_a_machine_that_no_longer_answers_is_noticed(namespaces):
    store = Store("10.79.0.1")
    with inside(namespaces[0]):
        (first,) = of_ranks(store, 0)
    with inside(namespaces[1]):
        (second,) = of_ranks(store, 2)
        check_until(first, second, until=lambda: first.ranks == {2} and second.ranks == {0})
        time.sleep(2)
        for one in (first, second):
            one.check()
        assert first.ranks == {2} and second.ranks == {0}
        (third,) = of_ranks(store, 3)
    subprocess.run(["ip", "-n", namespaces[1], "link", "set", "eth0", "down"], check=True)
    # What it sends to rank 3 is never acknowledged.
    first.check()
    assert first.ranks == {2, 3}
    assert check_until(first, second, until=lambda: not first.ranks and not second.ranks) < 8
    assert not third.ranks
