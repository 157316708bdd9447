"""Shares memory among many GPUs, processes and threads: as tables, windows and objects of a store.

Importing the package loads no driver, and starts no thread unless ``WHOLEMEM_LOG`` is set. Every rank joins a
:class:`Communicator`. Through it, ranks create a :class:`WholeTensor`, whose rows are divided among the ranks and gathered by all of
them, or a :class:`Window`, of which every rank has a part and over which collectives run. Memory is an :class:`Array` in Python, which
numpy, torch, CuPy and JAX import and export without a copy. Arrays that other processes use, or that outlive the process that created
them, are put into a :mod:`~wholemem.store`.

In this example the ranks are threads; without ``threads=True``, :func:`run` starts a process for each rank:

>>> import numpy, wholemem
>>> def work(comm):
...     table = wholemem.WholeTensor.create(comm, (100, 4), "float32")
...     table.local().numpy()[:] = comm.rank
...     comm.barrier()
...     rows = table.gather(numpy.array([0, 99]))
...     return rows[:, 0], comm.all_reduce(rows)[:, 0]
>>> wholemem.run(work, ranks=2, device="cpu", threads=True)[0]
(array([0., 1.], dtype=float32), array([0., 2.], dtype=float32))
"""

from __future__ import annotations

from . import _native, errors, store
from ._native import VERSION as __version__
from ._native import Array, Communicator, WholeTensor, Window, asarray, unique_id, zeros
from .chunked import ChunkedTensor
from .diagnosis import doctor
from .errors import Error
from .headers import include
from .launching import run

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
    "run",
    "store",
    "unique_id",
    "zeros",
]

_level = _native.start_logging()
if _level is not None:
    from . import _logging

    _logging.configure(_level)
