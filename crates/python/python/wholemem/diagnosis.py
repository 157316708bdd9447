"""Reports the capabilities (optional features) of the devices of each backend on this machine: GPUs, and host devices (processor
and memory). Each capability is tested by using it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ._native import VERSION, findings
from .errors import WrongValue

__all__ = ["BackendReport", "Capability", "DeviceReport", "Report", "doctor"]


@dataclass(frozen=True)
class Capability:
    """A capability (an optional feature of a device) and whether it works.

    Attributes:
        name: The name of the capability.
        ok: Whether it works.
        reason: The reason if it does not work.
    """

    name: str
    ok: bool
    reason: Optional[str]


@dataclass(frozen=True)
class DeviceReport:
    """A device of this machine and its tested capabilities.

    Attributes:
        id: The number of the device.
        name: The name of the device.
        memory_bytes: The size of its memory.
        capabilities: The tested capabilities.
    """

    id: int
    name: str
    memory_bytes: int
    capabilities: tuple[Capability, ...]

    def can(self, name: str) -> bool:
        """Returns true if a capability (an optional feature) of this device works.

        Args:
            name: The name of the capability.
        """
        return any(capability.ok for capability in self.capabilities if capability.name == name)


@dataclass(frozen=True)
class BackendReport:
    """A backend (``host`` or ``cuda``) and its devices.

    Attributes:
        name: ``host`` or ``cuda``.
        available: Whether it can be used.
        reason: The reason if it cannot be used.
        devices: The devices.
    """

    name: str
    available: bool
    reason: Optional[str]
    devices: tuple[DeviceReport, ...]


@dataclass(frozen=True)
class Report:
    """The tested capabilities of this machine. ``dataclasses.asdict(report)`` has the content of ``wholemem doctor --json``.

    Attributes:
        version: The version of wholemem.
        backends: The backends.
    """

    version: str
    backends: tuple[BackendReport, ...]

    def backend(self, name: str) -> BackendReport:
        """Returns the part of the report that describes one backend.

        Args:
            name: ``host`` or ``cuda``.

        Raises:
            WrongValue: The backend does not exist.
        """
        for backend in self.backends:
            if backend.name == name:
                return backend
        names = ", ".join(f"`{backend.name}`" for backend in self.backends)
        raise WrongValue(f"the backend `{name}` does not exist", hint=f"the backends are {names}")


def doctor() -> Report:
    """Tests the capabilities (optional features) of this machine's devices and reports them.

    Returns:
        The report.

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
                    DeviceReport(id, device_name, memory, tuple(Capability(*capability) for capability in capabilities))
                    for id, device_name, memory, capabilities in devices
                ),
            )
            for name, reason, devices in findings()
        ),
    )
