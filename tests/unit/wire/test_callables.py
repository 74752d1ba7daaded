"""A callable with a name is found under it, and a callable without one gets none."""

from __future__ import annotations

import functools
import gc
import math
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backhaul._wire import callables
from backhaul._wire.callables import label_of, name_of, resolve
from backhaul.errors import FunctionNotFoundError


def plain(x: int) -> int:
    return x


@functools.wraps(plain)
def disguised(x: int) -> int:
    return -x


@functools.lru_cache
def cached(x: int) -> int:
    return x


class Base:
    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def made(cls) -> str:
        return cls.__name__

    class Inner:
        @staticmethod
        def deep() -> str:
            return "deep"

    def __call__(self) -> str:
        return "called"


class Derived(Base):
    pass


instance = Base()
anonymous = lambda: 1  # noqa: E731


NAMED: dict[str, Any] = {
    "function": plain,
    "class": Base,
    "inner class": Base.Inner,
    "method of a class": Base.method,
    "static method": Base.static,
    "static method of an inner class": Base.Inner.deep,
    "class method": Base.made,
    "inherited class method": Derived.made,
    "inherited method": Derived.method,
    "cached": cached,
    "len": len,
    "int": int,
    "math.sin": math.sin,
    "operator.add": operator.add,
    "str.upper": str.upper,
    "dict.fromkeys": dict.fromkeys,
    "int.from_bytes": int.from_bytes,
    "torch.add": torch.add,
    "torch.ones": torch.ones,
    "torch.tensor": torch.tensor,
    "torch.nn.functional.conv2d": torch.nn.functional.conv2d,
    "torch.nn.functional.relu": torch.nn.functional.relu,
    "torch.nn.functional.gelu": torch.nn.functional.gelu,
    "torch.linalg.norm": torch.linalg.norm,
    "torch.fft.fft": torch.fft.fft,
    "torch.Tensor.add": torch.Tensor.add,
    "torch.Tensor.__add__": torch.Tensor.__add__,
    "torch.Tensor.backward": torch.Tensor.backward,
    "torch.nn.Linear": torch.nn.Linear,
    "torch.nn.Linear.forward": torch.nn.Linear.forward,
    "overload": torch.ops.aten.add.Tensor,
    "default overload": torch.ops.aten.relu.default,
    "overload of out": torch.ops.aten.add.out,
    "packet": torch.ops.aten.add,
    "ufunc": np.add,
    "numpy function": np.sum,
    "numpy scalar type": np.float32,
}


@pytest.mark.parametrize("which", NAMED)
def test_a_name_leads_back(which: str) -> None:
    function = NAMED[which]
    name = name_of(function)
    assert name is not None
    assert ":" in name
    assert resolve(name) == function
    assert name_of(function) == name  # also from the cache


def test_a_class_method_is_of_the_class_it_was_taken_from() -> None:
    name = name_of(Derived.made)
    assert name is not None
    assert resolve(name)() == "Derived"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_functions() -> None:
    function = torch.jit.script(_scripted)
    name = name_of(function)
    assert name is not None
    assert torch.equal(resolve(name)(torch.ones(2)), torch.full((2,), 3.0))


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def _closure() -> Callable[[], int]:
    x = 1
    return lambda: x


def _local() -> type:
    class Local(Base):
        pass

    return Local


def _nested_function() -> Callable[[], None]:
    def nested() -> None: ...

    return nested


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> None: ...


def _elsewhere() -> Callable[[], None]:
    function = types.FunctionType(plain.__code__, {})
    function.__module__ = "no.such.module"
    return function


UNNAMED: dict[str, Any] = {
    "lambda": lambda: 1,
    "lambda in a variable": anonymous,
    "closure": _closure(),
    "nested function": _nested_function(),
    "local class": _local(),
    "class method of a local class": _local().made,
    "partial": functools.partial(plain, 1),
    "bound method": instance.method,
    "bound method of a list": [1].append,
    "bound method of a tensor": torch.ones(1).add,
    "callable object": instance,
    "unhashable object": Unhashable(),
    "module": torch.nn.Linear(1, 1),
    "one that takes another's name": disguised,
    "of an unknown module": _elsewhere(),
    "itemgetter": operator.itemgetter(0),
}


@pytest.mark.parametrize("which", UNNAMED)
def test_what_cannot_be_found_has_no_name(which: str) -> None:
    assert name_of(UNNAMED[which]) is None
    assert name_of(UNNAMED[which]) is None


class TestChangedModules:
    @pytest.fixture
    def module(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        module = types.ModuleType("changing")
        exec("def f():\n    return 'first'", module.__dict__)
        monkeypatch.setitem(sys.modules, "changing", module)
        return module

    def test_a_function_that_was_replaced_has_no_name(self, module: types.ModuleType) -> None:
        old = module.f
        assert name_of(old) == "changing:f"
        exec("def f():\n    return 'second'", module.__dict__)
        assert name_of(module.f) == "changing:f"
        assert name_of(old) is None

    def test_a_function_that_was_put_back_has_its_name(self, module: types.ModuleType) -> None:
        old = module.f
        del module.f
        assert name_of(old) is None
        module.f = old
        assert name_of(old) == "changing:f"

    def test_functions_are_not_kept_alive(self, module: types.ModuleType) -> None:
        gone = weakref.ref(module.f)
        assert name_of(module.f) == "changing:f"
        del module.f
        gc.collect()
        assert gone() is None

    def test_a_name_leads_to_what_has_it_now(self, module: types.ModuleType) -> None:
        assert resolve("changing:f") is module.f
        exec("def f():\n    return 'second'", module.__dict__)
        assert resolve("changing:f")() == "second"
        del module.f
        for _ in range(2):
            with pytest.raises(FunctionNotFoundError, match="changing:f"):
                resolve("changing:f")
        exec("f = 3", module.__dict__)
        with pytest.raises(FunctionNotFoundError, match="not callable"):
            resolve("changing:f")
        exec("def f():\n    return 'third'", module.__dict__)
        assert resolve("changing:f")() == "third"

    def test_a_module_that_was_loaded_again(self, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        old = module.f
        assert name_of(old) == "changing:f"
        assert resolve("changing:f") is old
        again = types.ModuleType("changing")
        exec("def f():\n    return 'again'", again.__dict__)
        monkeypatch.setitem(sys.modules, "changing", again)
        assert resolve("changing:f") is again.f
        assert name_of(again.f) == "changing:f"
        assert name_of(old) is None
        monkeypatch.delitem(sys.modules, "changing")
        assert name_of(again.f) is None
        with pytest.raises(FunctionNotFoundError):
            resolve("changing:f")

    def test_a_class_that_was_replaced(self, module: types.ModuleType) -> None:
        exec("class C:\n    @staticmethod\n    def m(): return 1", module.__dict__)
        old = module.C.m
        assert name_of(old) == "changing:C.m"
        assert resolve("changing:C.m")() == 1
        exec("class C:\n    @staticmethod\n    def m(): return 2", module.__dict__)
        assert name_of(old) is None
        assert resolve("changing:C.m")() == 2

    def test_what_was_resolved_is_not_kept_alive(self, module: types.ModuleType) -> None:
        gone = weakref.ref(resolve("changing:f"))
        del module.f
        gc.collect()
        assert gone() is None

    def test_not_all_names_are_remembered(self, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(callables, "_of_name", {})
        monkeypatch.setattr(callables, "_MAX_CACHED_NAMES", 3)
        for number in range(6):
            exec(f"def g{number}(): return {number}", module.__dict__)
        for _ in range(2):
            assert [resolve(f"changing:g{number}")() for number in range(6)] == list(range(6))
        assert len(callables._of_name) == 3

    def test_by_many_threads_while_it_changes(self, module: types.ModuleType) -> None:
        versions = []
        for version in range(4):
            exec(f"def f():\n    return {version}", module.__dict__)
            versions.append(module.f)
        problems: list[BaseException] = []
        over = threading.Event()

        def look() -> None:
            try:
                while not over.is_set():
                    assert resolve("changing:f") in versions
                    assert all(name_of(version) in ("changing:f", None) for version in versions)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(2000):
            module.f = versions[number % 4]
        over.set()
        for thread in threads:
            thread.join()
        assert not problems
        assert [name_of(version) for version in versions] == [None, None, None, "changing:f"]


class TestMain:
    @pytest.fixture
    def main(self, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        module = types.ModuleType("__main__")
        exec("def f():\n    return 1\nclass C:\n    def m(self): ...", module.__dict__)
        monkeypatch.setitem(sys.modules, "__main__", module)
        return module

    def test_has_names_only_where_it_is_shared(self, main: types.ModuleType) -> None:
        for function, name in ((main.f, "__main__:f"), (main.C, "__main__:C"), (main.C.m, "__main__:C.m")):
            assert name_of(function) is None
            assert name_of(function, main_shared=True) == name
            assert name_of(function) is None
            assert resolve(name) is function


MISSING = {
    "no module": "no_such_module_anywhere:f",
    "no submodule": "torch.no_such_module:f",
    "no function": "math:nonesuch",
    "no method": "builtins:str.nonesuch",
    "no class": "builtins:nonesuch.upper",
    "not callable": "math:pi",
    "a module": "os:path",
    "no qualname": "math:",
    "no colon": "math",
    "no script": "torchscript:__torch__.nonesuch",
    "no operator": "torch:ops.aten.nonesuch.default",
    "no overload": "torch:ops.aten.add.nonesuch",
    "no namespace": "torch:ops.nonesuch.add",
    "empty": "",
    "only a colon": ":",
    "no module part": ":f",
    "relative": ".sibling:f",
    "spaces": "  :f",
    "dots": "math:sin..x",
}


@pytest.mark.parametrize("which", MISSING)
def test_what_is_not_there_is_not_found(which: str) -> None:
    with pytest.raises(FunctionNotFoundError) as caught:
        resolve(MISSING[which])
    assert caught.value.function == MISSING[which]
    assert repr(MISSING[which]) in str(caught.value)


def test_resolving_imports_what_is_not_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    function = resolve("colorsys:rgb_to_hls")
    assert function is sys.modules["colorsys"].rgb_to_hls


@pytest.mark.parametrize(
    ("function", "label"),
    [
        (plain, "plain"),
        (Base.method, "Base.method"),
        (Base.Inner.deep, "Base.Inner.deep"),
        (_nested_function(), "nested"),
        (_local(), "Local"),
        (lambda: 1, "<lambda>"),
        (instance, "Base"),
        (functools.partial(plain), "partial"),
        (len, "len"),
    ],
)
def test_labels(function: Any, label: str) -> None:
    assert label_of(function) == label


def test_a_function_in_c_is_known_again_and_one_that_belongs_to_an_object_is_not_kept() -> None:
    for function in (math.sin, torch.neg, len):
        first = name_of(function)
        assert first is not None
        assert name_of(function) == first
        assert resolve(first) == function

    class Owner(list[int]):
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    assert name_of(owner.append) is None
    del owner
    assert gone() is None


def test_a_function_whose_name_means_another_by_now_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    function = shadowed
    assert name_of(function) == f"{__name__}:shadowed"
    monkeypatch.setitem(globals(), "shadowed", lambda: None)
    assert name_of(function) is None


def shadowed() -> None: ...
