"""What tests of several files use."""

from typing import Iterator

import pytest

from served import Served
from wholemem import store


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
