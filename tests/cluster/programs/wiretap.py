"""Records every packet that its host sends or receives: ``wiretap.py <recording> <file that ends it>``. Needs root."""

from __future__ import annotations

import pathlib
import socket
import sys
import time

_ALL_PROTOCOLS = 3  # ETH_P_ALL
_MOST_SECONDS = 90.0
_SO_RCVBUFFORCE = 33  # as SO_RCVBUF, but beyond what the host allows: a full buffer would lose packets


def main(recording: pathlib.Path, end: pathlib.Path) -> None:
    deadline = time.monotonic() + _MOST_SECONDS
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap,
        recording.open("wb") as file,
    ):
        tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 25)
        tap.settimeout(0.1)
        recording.with_suffix(".ready").touch()
        while time.monotonic() < deadline:
            try:
                file.write(tap.recv(1 << 18))
            except TimeoutError:
                if end.exists():
                    return


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
