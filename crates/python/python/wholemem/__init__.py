"""One memory over many GPUs, processes and threads.

Importing this touches no driver and starts nothing. Every rank joins a :class:`Communicator`; through it, ranks make a
:class:`WholeTensor`, whose rows are divided among them and gathered by all, or a :class:`Window`, which every rank has,
and through which they reduce and exchange. All memory is an :class:`Array` to Python, which numpy, torch, CuPy and JAX
take and give without a copy. Arrays that are to outlive the process that made them, and to be had by others, are put into
a :mod:`~wholemem.store`.

Threads can be ranks too, as here:

>>> import numpy, threading, wholemem
>>> def run(comm):
...     with comm:
...         table = wholemem.WholeTensor.create(comm, (100, 4), "float32")
...         table.local().numpy()[:] = comm.rank
...         comm.barrier()
...         rows = table.gather(numpy.array([0, 99]))
...         total = comm.all_reduce(rows)
...         if comm.rank == 0:
...             print(rows[:, 0], total[:, 0])
>>> ranks = wholemem.Communicator.local(2, device="cpu")
>>> threads = [threading.Thread(target=run, args=(comm,)) for comm in ranks]
>>> for thread in threads: thread.start()
>>> for thread in threads: thread.join()
[0. 1.] [0. 2.]
"""

from __future__ import annotations

from . import errors, store
from ._native import VERSION as __version__
from ._native import Array, Communicator, WholeTensor, Window, asarray, unique_id, zeros
from .chunked import ChunkedTensor
from .diagnosis import doctor
from .errors import Error
from .headers import include

__all__ = [
    "Array",
    "ChunkedTensor",
    "Communicator",
    "Error",
    "WholeTensor",
    "Window",
    "__version__",
    "asarray",
    "doctor",
    "errors",
    "include",
    "store",
    "unique_id",
    "zeros",
]
