"""One end of the line between the ranks, which exchanges bytes over TCP.

What the line carries and what moving bytes costs are measured without torch, so that they bound every library.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

CHUNK = 2**20  # bytes handed to the kernel at once


class Line:
    """One end."""

    def __init__(self, address: str, store: Path) -> None:
        self.buffer = bytearray(CHUNK)
        self.peer = connect(int(os.environ["RANK"]), address, store)

    def exchange(self, nbytes: int) -> float:
        """Send this many bytes to the other end and receive as many, both at once; gives the seconds."""
        self.peer.sendall(b"!")  # both are here
        self.peer.recv(1)
        started = time.perf_counter()
        sender = threading.Thread(target=send, args=(self.peer, nbytes))
        sender.start()
        receive(self.peer, nbytes, self.buffer)
        sender.join()
        return time.perf_counter() - started


def send(peer: socket.socket, nbytes: int) -> None:
    data = memoryview(bytes(CHUNK))
    for start in range(0, nbytes, CHUNK):
        peer.sendall(data[: nbytes - start])


def receive(peer: socket.socket, nbytes: int, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while nbytes:
        got = peer.recv_into(view[:nbytes])
        if not got:
            raise ConnectionError("the other end of the line went away")
        nbytes -= got


def connect(rank: int, address: str, store: Path) -> socket.socket:
    """Rank 0 listens and writes its port to `store`, rank 1 calls."""
    if rank == 0:
        with socket.create_server((address, 0)) as server:
            whole = store.with_suffix(".new")
            whole.write_text(str(server.getsockname()[1]))
            whole.rename(store)
            return server.accept()[0]
    while not store.exists():
        time.sleep(0.01)
    return socket.create_connection((address, int(store.read_text())))
