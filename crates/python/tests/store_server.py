"""Starts stores for tests with the program ``wholemem serve``."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from types import TracebackType
from typing import Any, Optional

from wholemem import store
from launcher import PROGRAM


class StoreServer:
    """A store that is served in its own folder. The store ends with the test or with the test process."""

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
        """Runs a command of the program ``wholemem`` on this store."""
        environment = {**os.environ, "WHOLEMEM_SOCKET": self.socket}
        return subprocess.run([PROGRAM, *arguments], env=environment, check=True, capture_output=True, text=True)

    def server(self) -> int:
        """Returns the process id of the store's server, which is a child of the keeper process."""
        with open(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children") as file:
            (server,) = file.read().split()
        return int(server)

    def kill_server(self) -> None:
        os.kill(self.server(), signal.SIGKILL)

    def kill(self) -> None:
        """Kills the store's server and its keeper process. The keeper is suspended (SIGSTOP) first, because it would restart the
        server.
        """
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

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


def map_of(address: int) -> tuple[str, str]:
    """Returns the access rights and the inode of the map at an address. Equal inodes are the same memory in any process."""
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, access, _, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in addresses.split("-"))
            if start <= address < end:
                return access, inode
    raise AssertionError(f"nothing is mapped at {address:#x}")


def address(array: Any) -> int:
    """Returns the address of an array according to numpy."""
    return int(array.__array_interface__["data"][0])
