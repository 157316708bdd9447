"""What this machine can do, each thing tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ._native import VERSION, findings
from .errors import WrongValue

__all__ = ["BackendReport", "Capability", "DeviceReport", "Report", "doctor"]


@dataclass(frozen=True)
class Capability:
    """Something that was tried."""

    name: str
    ok: bool
    reason: Optional[str]


@dataclass(frozen=True)
class DeviceReport:
    """A device, and what was tried on it."""

    id: int
    name: str
    memory_bytes: int
    capabilities: tuple[Capability, ...]

    def can(self, name: str) -> bool:
        """Whether something works."""
        return any(tried.ok for tried in self.capabilities if tried.name == name)


@dataclass(frozen=True)
class BackendReport:
    """A backend, its devices, or the reason why it is not available."""

    name: str
    available: bool
    reason: Optional[str]
    devices: tuple[DeviceReport, ...]


@dataclass(frozen=True)
class Report:
    """What was found out; ``dataclasses.asdict`` of it is what ``wholemem doctor --json`` prints."""

    version: str
    backends: tuple[BackendReport, ...]

    def backend(self, name: str) -> BackendReport:
        """The backend of a name: ``host`` or ``cuda``."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        there = ", ".join(f"`{backend.name}`" for backend in self.backends)
        raise WrongValue(f"there is no backend `{name}`", hint=f"there are {there}")


def doctor() -> Report:
    """Tries what this machine can do.

    >>> doctor().backend("host").devices[0].can("create")
    True
    """
    return Report(
        VERSION,
        tuple(
            BackendReport(
                name,
                reason is None,
                reason,
                tuple(
                    DeviceReport(id, called, memory, tuple(Capability(*tried) for tried in tries))
                    for id, called, memory, tries in devices
                ),
            )
            for name, reason, devices in findings()
        ),
    )
