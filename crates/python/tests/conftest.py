"""What tests of several files use."""

from __future__ import annotations

import os
import signal
from typing import Any, Iterator, Optional

import pytest

from served import Served
from wholemem import store

# How long a test on a GPU may take, in seconds: whatever hangs there is interrupted, and the next one begins.
LIMIT = 60

# Why a test may be skipped in a run that must have torch.
EXCUSES = ("no GPU", "needs cuda", "has nothing of torch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU, and PyTorch to fill it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, unless one must be there."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = why_no_gpu() if on_gpu and "WHOLEMEM_REQUIRE_CUDA" not in os.environ else None
    for item in on_gpu if missing else []:
        item.add_marker(pytest.mark.skip(reason=missing))


def why_no_gpu() -> Optional[str]:
    """Why tests cannot run on a GPU here, if so."""
    import torch

    return None if torch.cuda.is_available() else "there is no GPU that PyTorch can use"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run that must have torch if a test was skipped, unless for lack of a GPU."""
    if "WHOLEMEM_REQUIRE_TORCH" not in os.environ:
        return
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    for path, line, reason in sorted({report.longrepr for report in reporter.stats.get("skipped", [])}):
        if not any(excuse in reason for excuse in EXCUSES):
            reporter.write_line(f"error: {path}:{line}: {reason}, although WHOLEMEM_REQUIRE_TORCH is set")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def within_the_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bounds how long a test on a GPU takes."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"the test has taken {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A store that the tests of a file share."""
    with Served() as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[store.Client]:
    """A connection to it."""
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def store_of_examples() -> Iterator[None]:
    """A store where clients find one that name no socket."""
    with Served() as served, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHOLEMEM_SOCKET", served.socket)
        yield
