"""Tests the fast path that bypasses torch's dispatcher: it is used if there are no observers, and gives observers the same
results.
"""

from __future__ import annotations

import copy
import functools
import inspect
import mmap
import pickle
import platform
import pydoc
import weakref
from typing import Any, Callable

import pytest
from torch_world import device, limit, quiet, reset_compiler, torch
from launcher import run

import wholemem.torch as wm
from wholemem import Communicator, WholeTensor, errors
from wholemem.torch import ops
from wholemem.torch.shortcut import SHORTCUT

__all__ = ["device", "reset_compiler", "limit"]
pytestmark = [quiet, pytest.mark.skipif(SHORTCUT is None, reason="torch does not tell how to look at tensors")]


class NoOperators:
    """A substitute for torch's operators that fails if an operator is called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called by the operator")


@pytest.fixture
def table(device: str) -> WholeTensor:
    (comm,) = Communicator.local(1, device=device)
    table = WholeTensor.create(comm, (20, 3), "float32")
    table.write(0, torch.arange(60.0, device=device).reshape(20, 3))
    comm.barrier()
    return table


def whole(device: str) -> Any:
    return torch.arange(60.0, device=device).reshape(20, 3)


def test_the_fast_path_bypasses_the_dispatcher(
    table: WholeTensor, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "OPS", NoOperators())
    for indices in ([3, 1], [[5, 5, 7]], 4, []):
        requested = torch.tensor(indices, dtype=torch.int64, device=device)
        for kind in (requested, requested.int()):
            assert torch.equal(wm.gather(table, kind), whole(device)[requested])
            out = torch.full((*requested.shape, 3), 7.0, device=device)
            assert wm.gather(table, kind, out=out) is out and torch.equal(out, whole(device)[requested])
    one = WholeTensor.create(Communicator.local(1, device=device)[0], (4,), "int32")
    assert wm.gather(one, torch.tensor(2, device=device)).shape == ()
    # Mismatched arguments go to the torch operator, which raises the error.
    for bad in (torch.zeros(2, 4, device=device), torch.zeros(3, 3, device=device), torch.zeros(2, device=device)):
        with pytest.raises(AssertionError, match="gather_into"):
            wm.gather(table, torch.tensor([1, 2], device=device), out=bad)
    for bad in (torch.tensor([1.0], device=device), torch.arange(6, device=device)[::2]):
        with pytest.raises(AssertionError, match="gather was"):
            wm.gather(table, bad)


def test_modes_profilers_and_tracers_see_operators(table: WholeTensor, device: str) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []
    indices, out = torch.tensor([2, 3], device=device), torch.zeros(2, 3, device=device)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in (Functions, Operators):
        for operand, name in ((None, "gather"), (out, "gather_into")):
            seen.clear()
            with mode():
                assert torch.equal(wm.gather(table, indices, out=operand), whole(device)[indices])
            reported = [word for word in seen if word.split(".")[:2] == ["wholemem", name]]
            assert len(reported) == 1, (mode, name, seen)

    with torch.autograd.profiler.profile() as profile:
        wm.gather(table, indices)
    assert [event.name for event in profile.function_events].count("wholemem::gather") == 1
    traced = torch.jit.trace(lambda requested: wm.gather(table, requested), (indices,))
    assert torch.equal(traced(indices + 5), whole(device)[indices + 5])


def test_tensor_subclasses_use_the_dispatcher(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([[2, 3], [5, 2]], device=device)
    for dim, requested in enumerate((indices, indices.T)):
        rows = torch.vmap(lambda requested: wm.gather(table, requested), in_dims=dim)(indices)
        assert torch.equal(rows, whole(device)[requested])
    both = torch.vmap(torch.vmap(lambda requested: wm.gather(table, requested, dtype=torch.float64), in_dims=1))(indices[None])
    assert torch.equal(both[0], whole(device)[indices.T].double())
    scale = torch.ones(3, device=device)
    grad = torch.func.grad(lambda scale: (wm.gather(table, indices) * scale).sum())(scale)
    assert torch.equal(grad, whole(device)[indices].sum((0, 1)))
    same: Callable[[Any], Any] = torch.func.functionalize(lambda requested: wm.gather(table, requested))
    assert torch.equal(same(indices), whole(device)[indices])
    # The tensor is a view with an offset into a storage without memory.
    zeros = torch._efficientzerotensor((9,), dtype=torch.int64, device=device)[4:]
    with wm.FastAllreduce(0, 1, device=device) as fast:
        assert not SHORTCUT.all_reduce(fast.comm, zeros, torch.ones_like(zeros))


def test_vmap_gathers_with_one_call(table: WholeTensor, device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func).split(".")[0])
            return func(*args, **(kwargs or {}))

    with Operators() as mode:
        torch.vmap(lambda requested: wm.gather(table, requested))(torch.arange(12, device=device).reshape(4, 3))
    assert mode.seen.count("wholemem") == 1


def test_the_wrapper_behaves_like_the_wrapped_function(table: WholeTensor, device: str) -> None:
    function: Any = inspect.unwrap(wm.gather)
    assert inspect.isfunction(function) and inspect.signature(wm.gather) == inspect.signature(function)
    assert (wm.gather.__name__, wm.gather.__module__) == ("gather", ops.__name__)
    assert wm.gather.__doc__ == function.__doc__ and repr(wm.gather).startswith("<function gather at ")
    assert function.__doc__.splitlines()[0] in pydoc.render_doc(wm.gather)
    assert pickle.loads(pickle.dumps(wm.gather)) is wm.gather and copy.deepcopy(wm.gather) is wm.gather
    assert weakref.ref(wm.gather)() is wm.gather and inspect.getsource(wm.gather) == inspect.getsource(function)
    assert (wm.gather.__code__, wm.gather.__kwdefaults__) == (function.__code__, function.__kwdefaults__)
    assert not hasattr(wm.gather, "rows")

    class Table:
        rows = wm.gather

    indices = torch.tensor([4, 2], device=device)
    with pytest.raises(errors.WrongType, match="the table"):
        Table().rows(indices)
    assert Table.rows is wm.gather and torch.equal(Table.rows(table, indices), whole(device)[indices])
    for arguments, named in (((table,), {}), ((table, indices, None), {}), ((table, indices), {"rows": 1})):
        with pytest.raises(TypeError, match=r"^gather\(\) .*argument"):
            wm.gather(*arguments, **named)
    operand = {"table": table, "indices": indices, "out": None, "dtype": None}
    assert torch.equal(wm.gather(**operand), whole(device)[indices])


def test_the_wrapper_can_be_compiled(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([4, 2], device=device)
    for call in (wm.gather, lambda table, requested: wm.gather(table, requested), functools.partial(wm.gather)):
        compiled = torch.compile(call, fullgraph=True, backend="eager")
        assert torch.equal(compiled(table, indices), whole(device)[indices])
    assert torch._dynamo.explain(lambda requested: wm.gather(table, requested))(indices).graph_break_count == 0


def test_functions_that_wrap_the_wrapper_can_be_compiled(table: WholeTensor, device: str) -> None:
    @functools.wraps(wm.gather)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return wm.gather(*args, **kwargs) * 10

    class Halved:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)
            self.function = function

        def __call__(self, *args: Any) -> Any:
            return self.function(*args) / 2

    indices = torch.tensor([4, 2], device=device)
    for call, factor in ((scaled, 10), (Halved(wm.gather), 0.5), (Halved(scaled), 5), (functools.partial(scaled), 10)):
        assert torch.equal(call(table, indices), whole(device)[indices] * factor)
        compiled = torch.compile(lambda requested: call(table, requested), fullgraph=True, backend="eager")
        assert torch.equal(compiled(indices), whole(device)[indices] * factor)
        torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        disabled = torch.compiler.disable(wm.gather)
        torch.compile(lambda requested: disabled(table, requested), fullgraph=True, backend="eager")(indices)


def test_importing_loads_no_compiler() -> None:
    text = "import sys, wholemem.torch as wm; print('torch._dynamo' in sys.modules, type(wm.gather).__name__)"
    ended = run(text)
    assert (ended.stdout, ended.stderr) == ("False ShortGather\n", "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 maps low addresses on request")
def test_cpu_memory_below_4_gib_is_accepted() -> None:
    """Tests memory below 4 GiB, where an interpreter without a position-independent executable has its heap, and MAP_32BIT maps
    memory.
    """
    map_32bit = 0x40
    low = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_32bit)
    numbers, floats = torch.frombuffer(low, dtype=torch.int64)[:2], torch.frombuffer(low, dtype=torch.float32)[100:106]
    assert 0 < numbers.data_ptr() < floats.data_ptr() < 1 << 32
    numbers[:], rows = torch.tensor([19, 2]), floats.reshape(2, 3)
    (comm,) = Communicator.local(1, device="cpu")
    table = WholeTensor.create(comm, (20, 3), "float32")
    table.write(0, torch.arange(60.0).reshape(20, 3))
    for requested in (numbers, torch.tensor([19, 2])):
        rows.zero_()
        assert wm.gather(table, requested, out=rows) is rows and rows.tolist() == [[57, 58, 59], [6, 7, 8]]
    with wm.FastAllreduce(0, 1, device="cpu") as fast:
        assert torch.equal(fast.all_reduce(floats), floats)
    assert torch.equal(wm.all_reduce(comm, floats), floats)


def test_a_tensor_with_freed_storage_is_rejected(table: WholeTensor, device: str) -> None:
    numbers = torch.arange(10, device=device)
    part, floats = numbers[4:8], torch.zeros(9, device=device)
    numbers.untyped_storage().resize_(0)
    rows, rest = floats[:6].reshape(2, 3), floats[3:]
    floats.untyped_storage().resize_(0)
    requested = torch.tensor([1, 2], device=device)
    calls = [
        lambda: wm.gather(table, part),
        lambda: wm.gather(table, requested, out=rows),
        lambda: wm.scatter(table, requested, rows),
        lambda: wm.all_reduce(Communicator.local(1, device=device)[0], rest),
    ]
    for call in calls:
        with pytest.raises(errors.WrongValue, match="has no memory") as caught:
            call()
        assert caught.value.hint == "pass a tensor whose storage was not freed"
    with wm.FastAllreduce(0, 1, device=device) as fast, pytest.raises(errors.WrongValue, match="has no memory"):
        fast.all_reduce(rest)


def test_lazily_negated_views_are_resolved_or_rejected(table: WholeTensor, device: str) -> None:
    complexes = WholeTensor.create(Communicator.local(1, device=device)[0], (4,), "complex64")
    one = torch.ones(1, dtype=torch.complex64, device=device) * 3j
    negative = one.conj().imag
    assert negative.is_neg() and negative.is_contiguous() and negative.item() == -3
    indices = torch.tensor([2], device=device)
    with wm.FastAllreduce(0, 1, device=device) as fast:
        assert fast.all_reduce(negative).item() == -3
        for tensor in (torch.ones(1, device=device), negative):
            with pytest.raises(errors.WrongValue, match="the output is a lazily negated view of its memory") as caught:
                fast.all_reduce(tensor, negative)
            assert caught.value.hint == "pass a tensor that is not such a view"
    numbers = WholeTensor.create(Communicator.local(1, device=device)[0], (4,), "float32")
    numbers.write(0, torch.ones(4, device=device))
    version = negative._version
    with pytest.raises(errors.WrongValue, match="the output is a lazily negated view"):
        wm.gather(numbers, indices, out=negative)
    assert negative.item() == -3 and negative._version == version
    # Two lazily negated outputs: a contiguous one that is built by hand, and one with gaps, as torch creates them.
    many = torch.zeros(3, dtype=torch.complex64, device=device).conj().imag
    for out in (many.as_strided((1, 3), (3, 1), 0), many[None]):
        assert out.is_neg() and out.is_contiguous() == (out.stride(1) == 1)
        with pytest.raises(errors.WrongValue, match="the output is a lazily negated view"):
            wm.gather(table, indices, out=out)
    with pytest.raises(errors.WrongValue, match="the output is a lazily conjugated view"):
        wm.gather(complexes, indices, out=one.conj())
    assert wm.gather(complexes, indices, out=one).item() == 0


def test_forward_ad_tangents_of_outputs_are_replaced(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([1, 2], device=device)
    start = torch.zeros(2, 3, device=device), torch.ones(2, 3, device=device)

    def filled(x: Any) -> Any:
        return wm.gather(table, indices, out=x * 2)

    rows, tangent = torch.func.jvp(filled, start[:1], start[1:])
    assert torch.equal(rows, whole(device)[indices]) and not tangent.any()


def test_rejected_calls_do_not_bump_tensor_versions(table: WholeTensor, device: str) -> None:
    out, factor = torch.ones(4, 3, device=device), torch.ones(4, 3, device=device, requires_grad=True)
    product = (factor * out).sum()
    with pytest.raises(errors.WrongValue, match="must have the shape"):
        wm.gather(table, torch.tensor([1, 2], device=device), out=out)
    product.backward()
    assert torch.equal(factor.grad, out)


def test_invalid_indices_allocate_no_output(table: WholeTensor, device: str) -> None:
    with pytest.raises(errors.WrongType, match="indices must be int32 or int64"):
        wm.gather(table, torch.zeros(1, device=device).expand(1 << 40))


def test_wrong_argument_types_are_rejected(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([1, 2], device=device)
    for other in (torch.ones(3, 3), table.local(), 7):
        with pytest.raises(errors.WrongType, match=f"the table is a `{type(other).__name__}`") as caught:
            wm.gather(other, indices)  # type: ignore[arg-type]
        assert caught.value.hint == "pass a `wholemem.WholeTensor`"
    with pytest.raises(errors.WrongType, match="the communicator is a `WholeTensor`"):
        wm.all_reduce(table, torch.ones(3))  # type: ignore[arg-type]
    rows = torch.ones(2, 3, device=device)
    calls: list[Callable[[], Any]] = [
        lambda: wm.gather(table, [1, 2]),  # type: ignore[arg-type]
        lambda: wm.gather(table, indices, out=[1]),  # type: ignore[arg-type]
        lambda: wm.gather(table, [1, 2], out=rows),  # type: ignore[arg-type]
        lambda: wm.scatter(table, [1, 2], rows),  # type: ignore[arg-type]
        lambda: wm.scatter_add(table, indices, [[1]]),  # type: ignore[arg-type]
        lambda: wm.all_reduce(Communicator.local(1, device=device)[0], [1]),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(errors.WrongType, match="is a `list`") as caught:
            call()
        assert caught.value.hint == "pass a tensor: `torch.as_tensor(...)`"
    with pytest.raises(errors.WrongDevice, match="is on cpu, but the other tensor is on meta"):
        wm.gather(table, indices.to("meta"), out=torch.zeros(2, 3))


def test_function_modes_see_a_call_with_an_output(table: WholeTensor, device: str) -> None:
    from torch import fx

    class Filling(torch.nn.Module):  # type: ignore[misc]
        def forward(self, indices: Any, out: Any) -> Any:
            return wm.gather(table, indices, out=out)

    graph = fx.symbolic_trace(Filling())
    assert any("gather_into" in str(node.target) for node in graph.graph.nodes)
    indices, out = torch.tensor([1, 2], device=device), torch.zeros(2, 3, device=device)
    assert torch.equal(graph(indices, out), whole(device)[indices])


def test_an_output_overlapping_its_indices_is_rejected(device: str) -> None:
    numbers = WholeTensor.create(Communicator.local(1, device=device)[0], (9,), "int64")
    numbers.write(0, torch.arange(9, device=device) * 10)
    both = torch.tensor([3, 1, 2, 5], device=device)
    with pytest.raises(errors.WrongValue, match="overlap the output") as caught:
        wm.gather(numbers, both[:3], out=both[1:])
    assert caught.value.hint == "use a separate output buffer"
    assert both.tolist() == [3, 1, 2, 5]
    assert wm.gather(numbers, both, out=both).tolist() == [30, 10, 20, 50]
    # An observer that is active during a gather must see it once, because a gather that overwrote its indices cannot be repeated.
    with torch.autograd.forward_ad.dual_level():
        again = torch.tensor([0, 3], device=device)
        numbers.write(0, torch.arange(1, 10, device=device) % 9)
        assert wm.gather(numbers, again, out=again).tolist() == [1, 4]


def test_writes_to_outputs_bump_tensor_versions(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([1, 2], device=device)
    for direct in (True, False):
        out = torch.ones(2, 3, device=device)
        product = (torch.ones(2, 3, device=device, requires_grad=True) * out).sum()
        if direct:
            wm.gather(table, indices, out=out)
        else:
            torch.ops.wholemem.gather_into(table._handle, indices, out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_an_output_that_requires_a_gradient_is_rejected(table: WholeTensor, device: str) -> None:
    indices = torch.tensor([1, 2], device=device)
    weight = torch.nn.Parameter(torch.zeros(2, 3, device=device))
    for out in (weight, weight * 2):
        with pytest.raises(errors.Unsupported, match="the output requires a gradient") as caught:
            wm.gather(table, indices, out=out)
        assert caught.value.hint == "pass `tensor.detach()`, or use `torch.no_grad()`"
    with torch.no_grad():
        assert torch.equal(wm.gather(table, indices, out=weight), whole(device)[indices])
    weight.detach().zero_()
    wm.gather(table, indices, out=weight.detach())
    assert torch.equal(weight, whole(device)[indices])
    with torch.inference_mode():
        out = torch.zeros(2, 3, device=device)
        assert torch.equal(wm.gather(table, indices, out=out), whole(device)[indices])
