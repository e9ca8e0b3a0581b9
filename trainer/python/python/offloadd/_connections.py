"""Connections between rank 0 and the ranks of other nodes, by which each side knows that the other's process is there.

A call that holds the interpreter's lock keeps every thread of Python from telling that its rank is alive; safetensors before 0.8 writes a whole
file so. Nothing is sent over these connections after their beginning: the kernels of both machines look after each other, and end a
connection with its process.

    rank 0       listens at the store's address   store: port and token
    other node   connects, sends token and rank   store: whether it has; rank 0: one byte
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
import weakref
from typing import Any, Optional

from ._console import say

# Time to connect; and in which one who has connected must say who it is.
_CONNECT_S = 5.0

# Between two looks at those that connect.
_PAUSE_S = 1e-3

# Seconds without traffic until a kernel asks the other one, the same between two questions, and questions without an answer that end a connection.
_IDLE_S, _AGAIN_S, _ASKED = 1, 1, 3

_TOKEN_BYTES = 32
_RANK = struct.Struct("<I")
_WELCOME = b"\1"


class Connections:
    """Those of this rank. One thread at a time uses them."""

    def __init__(self, store: Any, key: str, rank: int, beyond: set[int]) -> None:
        """`beyond` are the ranks of other nodes than rank 0's."""
        # Ranks whose processes are there: for rank 0 those beyond, for them rank 0.
        self.ranks: set[int] = set()
        self._rank, self._awaited = rank, beyond
        self._sockets: dict[int, socket.socket] = {}
        # Those that have connected and not said who they are, with the time until which they may.
        self._strangers: list[tuple[socket.socket, float]] = []
        self._server: Optional[socket.socket] = None
        self._store, self._key = store, key
        self._token, host = "", _host(store)
        if host is not None and (rank == 0 or rank in beyond):
            _open.add(self)
            try:
                self._listen(host) if rank == 0 else self._connect(host)
            except OSError as error:
                self._without(f"cannot {'listen' if rank == 0 else 'connect to rank 0'} at {host}: {error}")

    def _listen(self, host: str) -> None:
        port = 0
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._server = socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
            self._server.setblocking(False)
            port, self._token = self._server.getsockname()[1], secrets.token_hex(_TOKEN_BYTES // 2)
        finally:
            self._store.set(f"{self._key}/connect", json.dumps([port, self._token]))

    def _connect(self, host: str) -> None:
        try:
            port, token = json.loads(self._store.get(f"{self._key}/connect"))
            # Otherwise rank 0 has said why.
            if port != 0:
                made = _watched(socket.create_connection((host, port), timeout=_CONNECT_S))
                made.sendall(token.encode() + _RANK.pack(self._rank))
                self._sockets[0] = made
        finally:
            self._store.set(f"{self._key}/connect/{self._rank}", json.dumps(0 in self._sockets))

    def complete(self) -> None:
        """Returns when rank 0 has let in all that have connected, and when it has let this rank in. All ranks have made theirs, and rank 0's have
        returned from here before the others' call it."""
        connected = {rank for rank in self._awaited if self._server is not None and json.loads(self._store.get(f"{self._key}/connect/{rank}"))}
        until = time.monotonic() + _CONNECT_S
        while (connected & self._awaited if self._rank == 0 else self._sockets.keys() - self.ranks) and time.monotonic() < until:
            self.check()
            time.sleep(_PAUSE_S)

    def check(self) -> None:
        """Lets those in that wait, and leaves out those whose connection has ended."""
        if self._server is not None:
            self._let_in()
        for rank, made in list(self._sockets.items()):
            if not _readable(made):
                continue
            if _received(made, 1) == _WELCOME and self._rank != 0:
                self.ranks.add(0)
                continue
            if rank not in self.ranks:
                self._without("rank 0 has refused a connection")
            self.ranks.discard(rank)
            self._sockets.pop(rank).close()

    def _let_in(self) -> None:
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while len(self._strangers) < len(self._awaited):
                self._strangers.append((self._server.accept()[0], now + _CONNECT_S))
        for one in list(self._strangers):
            made, until = one
            if not _readable(made) and now < until:
                continue
            self._strangers.remove(one)
            rank = self._rank_of(made) if _readable(made) else None
            if rank is None:
                made.close()
                continue
            self._awaited.discard(rank)
            self._sockets[rank] = _watched(made)
            self.ranks.add(rank)
            # Whether it is still there is seen at the next look.
            with contextlib.suppress(OSError):
                made.sendall(_WELCOME)
        if not self._awaited:
            self._server.close()
            self._server = None

    def _rank_of(self, made: socket.socket) -> Optional[int]:
        """The rank that has sent the token; None for anybody else."""
        said = _received(made, _TOKEN_BYTES + _RANK.size)
        token, rank = said[:_TOKEN_BYTES], said[_TOKEN_BYTES:]
        if len(rank) != _RANK.size or not hmac.compare_digest(token, self._token.encode()):
            return None
        return number if (number := _RANK.unpack(rank)[0]) in self._awaited else None

    def _without(self, why: str) -> None:
        say(f"{why}. Therefore a call that holds Python's interpreter lock for 5 s is taken for the end of its rank", self._rank)

    def close(self) -> None:
        """Ends all of them."""
        strangers = [made for made, _ in self._strangers]
        for made in (*self._sockets.values(), *strangers, *([self._server] if self._server is not None else [])):
            made.close()
        self._server = None
        self._sockets.clear()
        self._strangers.clear()
        self.ranks.clear()


# Those of this process, which a fork would keep after its end.
_open: weakref.WeakSet[Connections] = weakref.WeakSet()


def _close_in_fork() -> None:
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _host(store: Any) -> Optional[str]:
    """Where rank 0 is, as torch.distributed's store knows it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _watched(made: socket.socket) -> socket.socket:
    """Lets the kernel find out whether the other machine is there."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, _IDLE_S), (socket.TCP_KEEPINTVL, _AGAIN_S), (socket.TCP_KEEPCNT, _ASKED)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    # It does not ask while it waits for the other one to acknowledge what was sent.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _ASKED * _AGAIN_S))
    return made


def _readable(made: socket.socket) -> bool:
    poll = select.poll()
    poll.register(made, select.POLLIN)
    return bool(poll.poll(0))


def _received(made: socket.socket, count: int) -> bytes:
    """What a readable connection has received; empty at its end."""
    try:
        return made.recv(count)
    except OSError:
        return b""
