"""How ranks of another library become ranks of a communicator."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Optional

from ._native import unique_id
from .errors import WrongValue

if TYPE_CHECKING:
    from ._native import Communicator


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
    ids: list[Optional[str]] = [None] * size
    distributed.all_gather_object(ids, unique_id() if rank == 0 else None, group=group)
    first = ids[0]
    assert first is not None, "rank 0 has made one"
    if device is None and torch.cuda.is_initialized():
        device = f"cuda:{torch.cuda.current_device()}"
    return kind.create(first, rank, size, device=device, timeout=timeout)
