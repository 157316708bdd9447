"""Sends functions to other processes, also those that cannot be imported there: of ``__main__``, of notebooks, lambdas and local functions.

A function of an importable module is sent by its name. Any other function is sent as its code, with the variables that it refers to.
What a function uses of ``__main__`` is defined in ``__main__`` of the receiving process: functions as code, classes as source, and
variables by value. The receiving process has the same interpreter and the same ``sys.path``.
"""

from __future__ import annotations

import ast
import dis
import importlib
import io
import linecache
import marshal
import pickle
import sys
import textwrap
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Dict, List, Optional, Set, Tuple

from .errors import WrongType

__all__ = ["dumps", "loads"]

_HINT = "define it in a module that the ranks can import, create it in the function, or pass `threads=True`"

# The instructions by which code accesses variables of its module.
_ACCESSES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}

# A definition in `__main__` of the receiving process: its kind, its name, and the source of a class or the pickled value.
_Definition = Tuple[str, str, Any]


def dumps(value: Any) -> bytes:
    """Pickles a value, with the functions and classes that it refers to.

    Args:
        value: The value.

    Returns:
        Bytes for :func:`loads`.

    Raises:
        WrongType: A part of the value cannot be sent.
    """
    sender = _Sender()
    pickled = sender.pickle(value, "the function and its arguments")
    return pickle.dumps((sender.definitions, pickled))


def loads(data: bytes) -> Any:
    """Restores a value from :func:`dumps`, and defines in ``__main__`` what it refers to.

    Args:
        data: The bytes.

    Returns:
        The value.
    """
    definitions, pickled = pickle.loads(data)
    main = sys.modules["__main__"].__dict__
    for kind, name, content in definitions:
        if kind == "class":
            exec(compile(content, f"<class {name}>", "exec"), main)
        else:
            main[name] = pickle.loads(content)
    return pickle.loads(pickled)


def _names(code: CodeType) -> Set[str]:
    """Returns the names of module variables that code and the functions in it access."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _ACCESSES}
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return names.union(*map(_names, nested))


def _is_importable(function: Any) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function and function.__module__ != "__main__"


class _Sender:
    """Pickles values, and collects the definitions that they need in ``__main__``, each after those that it needs itself."""

    def __init__(self) -> None:
        self.definitions: List[_Definition] = []
        self._defined: Set[str] = set()

    def pickle(self, value: Any, what: str) -> bytes:
        file = io.BytesIO()
        try:
            _Pickler(file, self).dump(value)
        except WrongType:
            raise
        # Objects that cannot be pickled raise different exceptions.
        except Exception as error:
            raise WrongType(f"{what} cannot be sent to another process: {error}", hint=_HINT) from error
        return file.getvalue()

    def define(self, name: str) -> None:
        """Adds the definition of a variable of ``__main__``, unless it is defined, or is not a variable of ``__main__``."""
        main = sys.modules["__main__"]
        if name in self._defined or name not in main.__dict__ or name.startswith("__"):
            return
        self._defined.add(name)
        value = main.__dict__[name]
        if isinstance(value, type) and value.__module__ == "__main__" and value.__name__ == name:
            source = _source_of(value)
            self.define_all(compile(source, name, "exec"))
            self.definitions.append(("class", name, source))
        elif isinstance(value, FunctionType) and not _is_importable(value):
            # By value also if another function refers to it by its name.
            pickled = self.pickle(_ByValue(value), f"the function `{name}` of `__main__`")
            self.definitions.append(("value", name, pickled))
        else:
            pickled = self.pickle(value, f"the variable `{name}` of `__main__`, which the function uses,")
            self.definitions.append(("value", name, pickled))

    def define_all(self, code: CodeType) -> None:
        for name in sorted(_names(code)):
            self.define(name)


class _ByValue:
    """A function that is sent as its code although it has a name in ``__main__``."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, sender: _Sender) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._sender = sender

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _ByValue):
            return self._code_of(value.function)
        if isinstance(value, ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, FunctionType) and not _is_importable(value):
            if vars(sys.modules["__main__"]).get(value.__name__) is value:
                self._sender.define(value.__name__)
                return _of_main, (value.__name__,)
            return self._code_of(value)
        if isinstance(value, type) and value.__module__ == "__main__":
            self._sender.define(value.__qualname__.split(".")[0])
            return _of_main, (value.__qualname__,)
        return NotImplemented

    def _code_of(self, function: FunctionType) -> Any:
        if function.__globals__ is vars(sys.modules["__main__"]):
            self._sender.define_all(function.__code__)
        cells = [_content_of(cell) for cell in function.__closure__ or ()]
        named = (function.__name__, function.__qualname__, function.__doc__, function.__annotations__)
        state = (function.__defaults__, function.__kwdefaults__, cells, named, function.__dict__)
        module = function.__globals__.get("__name__", "__main__")
        # The state is pickled after the function, so a local function may refer to itself.
        created = (module, marshal.dumps(function.__code__), len(cells))
        return _create_function, created, state, None, None, _fill_function


def _content_of(cell: CellType) -> Optional[Tuple[Any]]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return None  # the local variable is not assigned yet


def _of_main(name: str) -> Any:
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _create_function(module: str, code: bytes, cells: int) -> FunctionType:
    variables = vars(sys.modules["__main__"] if module == "__main__" else importlib.import_module(module))
    return FunctionType(marshal.loads(code), variables, None, None, tuple(CellType() for _ in range(cells)))


def _fill_function(function: FunctionType, state: Tuple[Any, Any, Any, Any, Dict[str, Any]]) -> None:
    function.__defaults__, function.__kwdefaults__, cells, named, attributes = state
    function.__name__, function.__qualname__, function.__doc__, function.__annotations__ = named
    function.__dict__.update(attributes)
    for cell, content in zip(function.__closure__ or (), cells):
        if content is not None:
            (cell.cell_contents,) = content


def _source_of(kind: type) -> str:
    """Returns the source of a class of ``__main__``, which is a script, or the cells of a notebook."""
    codes = (getattr(value, "__code__", None) for value in vars(kind).values())
    files = [code.co_filename for code in codes if code is not None]
    files += [getattr(sys.modules["__main__"], "__file__", None) or "", *reversed(list(linecache.cache))]
    for file in dict.fromkeys(files):
        text = "".join(linecache.getlines(file))
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue  # a cell with commands of IPython, or not Python
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        if found:
            node = found[-1]
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return textwrap.dedent("".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno]))
    raise WrongType(f"the class `{kind.__name__}` cannot be sent to another process: its source is not known", hint=_HINT)
