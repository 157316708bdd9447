"""Creates a communicator of the ranks that another library, such as torch, has joined."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ._native import unique_id
from .errors import BadEnvironment, WrongValue

if TYPE_CHECKING:
    from ._native import Communicator


def _boot_id() -> str:
    """Returns the boot id of the Linux kernel, which differs between nodes, or an empty string if the id cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def through_torch(
    kind: type[Communicator], group: Any, device: Optional[str], timeout: Optional[float]
) -> Communicator:
    """Creates a communicator of the ranks of a ``torch.distributed`` process group, which may have any backend.

    Rank 0 creates the unique id, and the process group distributes it; torch is used for nothing else.

    Args:
        kind: The class of the communicator.
        group: The process group; ``None`` is the default group.
        device: The device. ``None`` is torch's current GPU if CUDA is initialized, else the default.
        timeout: Seconds to wait for other ranks.

    Returns:
        The communicator of this rank.

    Raises:
        BadEnvironment: The ranks are on several nodes.
        WrongValue: The process group is invalid, or this process is not in it.
    """
    torch: Any = import_module("torch")
    distributed: Any = import_module("torch.distributed")
    try:
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        hint = "call `torch.distributed.init_process_group` first, and pass a process group of torch"
        raise WrongValue(f"the process group is not valid: {error}", hint=hint) from error
    if rank < 0:
        raise WrongValue("this process is not a rank of the group", hint="call it only on the ranks of the group")
    infos: list[tuple[Optional[str], str]] = [(None, "")] * size
    distributed.all_gather_object(infos, (unique_id() if rank == 0 else None, _boot_id()), group=group)
    if any(boot_id != infos[0][1] for _, boot_id in infos):
        raise BadEnvironment(
            f"the {size} ranks are on several nodes, which is not supported yet",
            hint="pass a group whose ranks are all on one node",
        )
    first = infos[0][0]
    assert first is not None, "rank 0 sent a unique id"
    if device is None and torch.cuda.is_initialized():
        device = f"cuda:{torch.cuda.current_device()}"
    return kind.create(first, rank, size, device=device, timeout=timeout)
