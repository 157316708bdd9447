"""How ranks of another library become ranks of a communicator."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ._native import unique_id
from .errors import BadEnvironment, WrongValue

if TYPE_CHECKING:
    from ._native import Communicator


def _boot_id() -> str:
    """What differs between the kernels of two nodes; nothing where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def through_torch(
    kind: type[Communicator], group: Any, device: Optional[str], timeout: Optional[float]
) -> Communicator:
    """The ranks of a group of ``torch.distributed``, whichever backend it has.

    Its first rank makes the id, and the group passes it on: nothing else goes through torch. A rank that has begun to use a
    GPU has that one.
    """
    torch: Any = import_module("torch")
    distributed: Any = import_module("torch.distributed")
    try:
        rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        hint = "call `torch.distributed.init_process_group` first, and give one of torch's groups"
        raise WrongValue(f"torch knows no such group of ranks: {error}", hint=hint) from error
    if rank < 0:
        raise WrongValue("this process is no rank of the group", hint="call it on the ranks of the group only")
    told: list[tuple[Optional[str], str]] = [(None, "")] * size
    distributed.all_gather_object(told, (unique_id() if rank == 0 else None, _boot_id()), group=group)
    if any(boot_id != told[0][1] for _, boot_id in told):
        raise BadEnvironment(
            f"the {size} ranks are on several nodes, which is not supported yet",
            hint="give a group whose ranks are all on one node",
        )
    first = told[0][0]
    assert first is not None, "rank 0 has made one"
    if device is None and torch.cuda.is_initialized():
        device = f"cuda:{torch.cuda.current_device()}"
    return kind.create(first, rank, size, device=device, timeout=timeout)
