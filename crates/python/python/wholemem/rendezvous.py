"""How ranks of another library become ranks of a communicator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ._native import unique_id

if TYPE_CHECKING:
    from ._native import Communicator


def through_torch(
    kind: type[Communicator], group: Any, device: Optional[str], timeout: Optional[float]
) -> Communicator:
    """The ranks of a group of ``torch.distributed``, whichever backend it has.

    Its first rank makes the id, and the group passes it on: nothing else goes through torch.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ids: list[Optional[str]] = [None] * size
    dist.all_gather_object(ids, unique_id() if rank == 0 else None, group=group)
    first = ids[0]
    assert first is not None, "rank 0 has made one"
    return kind.create(first, rank, size, device=device, timeout=timeout)
