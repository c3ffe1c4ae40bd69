"""One end of the line between the ranks: `python -m benchmarks.line FD RANK ADDRESS STORE` exchanges bytes over TCP.

What the line carries and what moving bytes costs are measured without torch, so that they bound every library.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

CHUNK = 2**20  # bytes handed to the kernel at once


def serve(connection: Connection, peer: socket.socket) -> None:
    """Answer each `Exchange` with the seconds it took, until the other end of the pipe closes."""
    buffer = bytearray(CHUNK)
    while True:
        nbytes = connection.recv().nbytes
        peer.sendall(b"!")  # both are here
        peer.recv(1)
        started = time.perf_counter()
        sender = threading.Thread(target=send, args=(peer, nbytes))
        sender.start()
        receive(peer, nbytes, buffer)
        sender.join()
        connection.send(time.perf_counter() - started)


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


def main() -> None:
    descriptor, rank, address, store = sys.argv[1:]
    connection = Connection(int(descriptor))
    try:
        with connect(int(rank), address, Path(store)) as peer:
            serve(connection, peer)
    except EOFError:
        return


if __name__ == "__main__":
    main()
