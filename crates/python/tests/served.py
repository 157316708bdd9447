"""Stores for tests, served as a user serves them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from types import TracebackType
from typing import Any, Optional

from wholemem import store
from world import PROGRAM


class Served:
    """A store with a folder of its own, which ends with the test, or with the process of the tests."""

    def __init__(
        self, size: str = "256MiB", *, device_size: Optional[str] = None, env: Optional[dict[str, str]] = None
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.socket = os.path.join(self.folder.name, "socket")
        command = [PROGRAM, "serve", "--listen", self.socket, "--size", size, "--parent", str(os.getpid())]
        if device_size is not None:
            command += ["--backend", "cuda", "--device-size", device_size]
        self.keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.keeper.stdout and self.keeper.stdout.readline() == f"serving {self.socket}\n"

    def client(self) -> store.Client:
        return store.Client(self.socket)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What the program does with this store."""
        environment = {**os.environ, "WHOLEMEM_SOCKET": self.socket}
        return subprocess.run([PROGRAM, *arguments], env=environment, check=True, capture_output=True, text=True)

    def server(self) -> int:
        """The number of the server's process; the keeper has started it."""
        with open(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children") as file:
            (server,) = file.read().split()
        return int(server)

    def kill_server(self) -> None:
        os.kill(self.server(), signal.SIGKILL)

    def kill(self) -> None:
        """Kills all of it: the keeper stands still meanwhile, since either would start the other again."""
        os.kill(self.keeper.pid, signal.SIGSTOP)
        self.kill_server()
        self.keeper.kill()
        self.keeper.wait()
        self.close()

    def close(self) -> None:
        self.keeper.terminate()
        self.keeper.wait()
        if self.keeper.stdout:
            self.keeper.stdout.close()
        self.folder.cleanup()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


def map_of(address: int) -> tuple[str, str]:
    """The access and the inode of the map that an address lies in: equal inodes are the same memory, in any process."""
    with open("/proc/self/maps") as file:
        for line in file:
            place, access, _, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in place.split("-"))
            if start <= address < end:
                return access, inode
    raise AssertionError(f"nothing is mapped at {address:#x}")


def address(array: Any) -> int:
    """Where numpy says that an array is."""
    return int(array.__array_interface__["data"][0])
