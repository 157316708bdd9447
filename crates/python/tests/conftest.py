"""Fixtures of pytest that several test files use."""

from __future__ import annotations

import os
import signal
from typing import Any, Iterator, Optional

import pytest

from store_server import StoreServer
from wholemem import store

# The timeout of a GPU test in seconds. A test that hangs is interrupted, and the next test runs.
LIMIT = 60

# The reasons for which a test may be skipped in a run that requires torch.
EXCUSES = ("no GPU", "needs cuda", "has nothing of torch", "needs transformers")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and PyTorch to fill it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests if there is no GPU, unless the run requires one."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = reason_without_gpu() if on_gpu and "WHOLEMEM_REQUIRE_CUDA" not in os.environ else None
    for item in on_gpu if missing else []:
        item.add_marker(pytest.mark.skip(reason=missing))


def reason_without_gpu() -> Optional[str]:
    """Returns the reason why GPU tests cannot run on this machine; ``None`` if they can."""
    import torch

    return None if torch.cuda.is_available() else "there is no GPU that PyTorch can use"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that requires torch if a test was skipped for another reason than a missing GPU."""
    if "WHOLEMEM_REQUIRE_TORCH" not in os.environ:
        return
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    for path, line, reason in sorted({report.longrepr for report in reporter.stats.get("skipped", [])}):
        if not any(excuse in reason for excuse in EXCUSES):
            reporter.write_line(f"error: {path}:{line}: {reason}, although WHOLEMEM_REQUIRE_TORCH is set")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Interrupts a GPU test that exceeds its time limit."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return

    def on_alarm(*_: Any) -> None:
        raise TimeoutError(f"the test has taken {LIMIT} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def served() -> Iterator[StoreServer]:
    """A store that the tests of a file share."""
    with StoreServer() as served:
        yield served


@pytest.fixture
def client(served: StoreServer) -> Iterator[store.Client]:
    """A client that is connected to the shared store of a test file."""
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def store_of_examples() -> Iterator[None]:
    """A store that is served at the default socket, for the examples in docstrings."""
    with StoreServer() as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHOLEMEM_SOCKET", served.socket)
        yield
