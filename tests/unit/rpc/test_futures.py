"""A future is torch's to everyone who looks, keeps the types of exceptions, and can be awaited."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backhaul._rpc.futures import Future, Kept
from backhaul._rpc.several_futures import collect_all, wait_all
from backhaul.errors import RemoteError

FAILSAFE = 60.0


class Odd(Exception):
    """Has a type and fields of its own."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Awkward(Exception):
    """Cannot be made again of its ``args``."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class Drifting(Exception):
    """Says something else when it is made again of its ``args``."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}!")


class AwkwardFile(FileNotFoundError):
    """As ``Awkward``, with what ``OSError`` keeps beside its ``args``."""

    def __init__(self, *, name: str) -> None:
        super().__init__(2, "no such file", name)


class Slotted(Exception):
    """Has fields that are not in its ``__dict__``."""

    __slots__ = ("slot",)


class Unwritable(Exception):
    """Takes no attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Uncopied(Exception):
    """Cannot be copied."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    @property
    def args(self) -> Any:
        raise self.error

    def __str__(self) -> str:
        return "rigid"


def _slotted() -> Slotted:
    made = Slotted("text")
    made.slot = 5
    return made


COPIED: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: Odd(5),
    "awkward": lambda: Awkward("text", code=5),
    "drifting": lambda: Drifting("text"),
    "awkward file": lambda: AwkwardFile(name="here"),
    "slots": _slotted,
    "unwritable": lambda: Unwritable("text"),
    "file": lambda: FileNotFoundError(2, "no such file", "here", None, "there"),
    "key": lambda: KeyError("gone"),
    "stop": lambda: StopAsyncIteration(5),
    "group": lambda: ExceptionGroup("several", [ValueError(1), KeyError(2)]),
    "decoding": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "exit": lambda: SystemExit(5),
}


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], Any]], threading.Thread]]:
    """Runs functions on other threads, which have ended when the test has."""
    threads: list[threading.Thread] = []

    def run(function: Callable[[], Any]) -> threading.Thread:
        thread = threading.Thread(target=function)
        threads.append(thread)
        thread.start()
        return thread

    yield run
    for thread in threads:
        thread.join()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)  # type: ignore[arg-type]
    else:
        future.set_result(value)
    return future


class TestBeingTorchs:
    def test_is_one(self) -> None:
        assert isinstance(Future(), torch.futures.Future)
        assert isinstance(Future().then(lambda _: None), torch.futures.Future)
        assert isinstance(collect_all([]), torch.futures.Future)

    def test_done_and_value(self) -> None:
        future: Future[int] = Future()
        assert not future.done()
        future.set_result(5)
        assert future.done()
        assert future.value() == 5

    def test_torch_can_wait_for_it(self) -> None:
        futures = [done(1), done(torch.ones(2))]
        first, second = torch.futures.wait_all(futures)
        assert first == 1
        assert torch.equal(second, torch.ones(2))

    def test_torch_can_collect_it(self) -> None:
        first, second = Future[int](), Future[int]()
        both = torch.futures.collect_all([first, second])
        first.set_result(1)
        assert not both.done()
        second.set_result(2)
        assert [future.wait() for future in both.wait()] == [1, 2]

    @pytest.mark.parametrize("value", [None, 5, torch.ones(3), {"a": [torch.zeros(1)]}, lambda: 1])
    def test_any_value_is_handed_over_as_it_is(self, value: Any) -> None:
        assert done(value).wait() is value

    def test_is_completed_once(self) -> None:
        future = done(1)
        with pytest.raises(RuntimeError):
            future.set_result(2)
        assert future.wait() == 1

    def test_an_exception_that_comes_too_late_changes_nothing(self) -> None:
        future = done(1)
        with pytest.raises(RuntimeError):
            future.set_exception(Odd(1))  # type: ignore[arg-type]
        assert future.wait() == 1

    def test_a_result_that_comes_too_late_changes_nothing(self) -> None:
        future = done(Odd(3))
        with pytest.raises(RuntimeError):
            future.set_result(1)
        with pytest.raises(Odd):
            future.wait()


class TestWait:
    def test_returns_what_another_thread_sets(self, elsewhere: Callable[..., Any]) -> None:
        future: Future[str] = Future()
        elsewhere(lambda: future.set_result("there"))
        assert future.wait() == "there"

    @pytest.mark.parametrize("timeout", [None, FAILSAFE, float("inf")])
    def test_many_may_wait(self, elsewhere: Callable[..., Any], timeout: float | None) -> None:
        future: Future[int] = Future()
        got: list[int] = []
        threads = [elsewhere(lambda: got.append(future.wait(timeout))) for _ in range(8)]
        future.set_result(5)
        for thread in threads:
            thread.join()
        assert got == [5] * 8

    @pytest.mark.parametrize("timeout", [0, 0.0, -1, 1e-6])
    def test_gives_up_after_the_timeout_but_the_future_goes_on(self, timeout: float) -> None:
        future: Future[int] = Future()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                future.wait(timeout)
        assert not future.done()
        future.set_result(1)
        assert future.wait(timeout) == 1

    def test_raises_the_exception_itself(self) -> None:
        error = Odd(7)
        future = done(error)
        for _ in range(2):
            with pytest.raises(Odd) as caught:
                future.wait()
            assert caught.value is error

    def test_raises_in_every_waiting_thread(self, elsewhere: Callable[..., Any]) -> None:
        future: Future[int] = Future()
        codes: list[int] = []

        def wait() -> None:
            try:
                future.wait()
            except Odd as error:
                codes.append(error.code)

        threads = [elsewhere(wait) for _ in range(4)]
        future.set_exception(Odd(7))  # type: ignore[arg-type]
        for thread in threads:
            thread.join()
        assert codes == [7] * 4

    def test_a_timeout_error_as_the_outcome_is_an_outcome(self) -> None:
        error = TimeoutError("the call's own")
        with pytest.raises(TimeoutError) as caught:
            done(error).wait(0)
        assert caught.value is error


class TestThen:
    def test_is_called_with_the_future_when_done(self) -> None:
        future: Future[int] = Future()
        seen: list[Any] = []

        def double(it: Future[int]) -> int:
            seen.append(it)
            return it.value() * 2

        doubled = future.then(double)
        assert not doubled.done()
        future.set_result(21)
        assert doubled.wait() == 42
        assert seen == [future]
        assert seen[0] is future

    def test_is_called_at_once_if_done_already(self) -> None:
        assert done(1).then(lambda it: it.wait() + 1).value() == 2

    def test_is_called_on_the_thread_that_completes(self, elsewhere: Callable[..., Any]) -> None:
        future: Future[int] = Future()
        where = future.then(lambda _: threading.current_thread())
        thread = elsewhere(lambda: future.set_result(1))
        assert where.wait() is thread

    def test_is_called_on_failure_too(self) -> None:
        def recover_call(it: Future[int]) -> int:
            with pytest.raises(Odd) as caught:
                it.wait()
            return caught.value.code

        assert done(Odd(4)).then(recover_call).wait() == 4

    def test_chains(self) -> None:
        future: Future[int] = Future()
        chain: Future[int] = future
        for _ in range(50):
            chain = chain.then(lambda it: it.wait() + 1)
        future.set_result(0)
        assert chain.wait() == 50

    def test_what_it_raises_is_the_outcome(self) -> None:
        error = Odd(5)

        def fail(_: Any) -> None:
            raise error

        with pytest.raises(Odd) as caught:
            done(1).then(fail).wait()
        assert caught.value is error

    def test_a_failure_passes_through_a_chain(self) -> None:
        last = done(Odd(6)).then(lambda it: it.wait()).then(lambda it: it.value())
        with pytest.raises(Odd) as caught:
            last.wait()
        assert caught.value.code == 6

    @pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
    def test_whatever_it_raises_the_future_is_done(self, error: BaseException) -> None:
        def leave(_: Any) -> None:
            raise error

        future: Future[int] = Future()
        after = future.then(leave)
        with contextlib.suppress(type(error)):
            future.set_result(1)
        assert after.done()
        with pytest.raises(RemoteError) as caught:
            after.wait()
        assert caught.value.type_name == f"{type(error).__module__}.{type(error).__qualname__}"

    @pytest.mark.parametrize("callback", [None, 5, "f"])
    def test_takes_only_callables(self, callback: Any) -> None:
        with pytest.raises(TypeError):
            Future().then(callback)
        with pytest.raises(TypeError):
            Future().add_done_callback(callback)


class TestCallbacks:
    def test_all_are_called_once_in_order(self) -> None:
        future: Future[int] = Future()
        calls: list[tuple[int, Any]] = []
        for number in range(5):
            future.add_done_callback(lambda it, number=number: calls.append((number, it)))
        assert calls == []
        future.set_result(1)
        assert calls == [(number, future) for number in range(5)]
        future.add_done_callback(lambda it: calls.append((5, it)))
        assert len(calls) == 6

    @pytest.mark.parametrize("error", [ValueError("in a callback"), Odd(1)])
    def test_what_they_raise_stops_nothing(self, error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
        def fail(_: Any) -> None:
            raise error

        future: Future[int] = Future()
        called: list[int] = []
        future.add_done_callback(fail)
        future.add_done_callback(lambda _: called.append(1))
        future.set_result(1)
        assert called == [1]
        assert future.wait() == 1
        assert type(error).__name__ in capfd.readouterr().err

    def test_have_the_context_in_which_they_were_added(self, elsewhere: Callable[..., Any]) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
        future: Future[int] = Future()
        seen: list[str] = []
        variable.set("first")
        future.add_done_callback(lambda _: seen.append(variable.get()))
        variable.set("second")
        then = future.then(lambda _: variable.get())
        variable.set("third")
        elsewhere(lambda: future.set_result(1)).join()
        assert seen == ["first"]
        assert then.wait() == "second"
        assert variable.get() == "third"

    def test_do_not_change_the_context_of_others(self) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
        future: Future[int] = Future()
        future.add_done_callback(lambda _: variable.set("changed"))
        seen = future.then(lambda _: variable.get())
        future.set_result(1)
        assert seen.wait() == "unset"
        assert variable.get() == "unset"

    def test_may_add_callbacks_and_wait_for_others(self) -> None:
        future: Future[int] = Future()
        seen: list[int] = []
        other = done(5)
        future.add_done_callback(lambda it: it.add_done_callback(lambda _: seen.append(other.wait(0))))
        future.set_result(1)
        assert seen == [5]

    def test_are_let_go_when_done(self) -> None:
        class Thing:
            pass

        thing = Thing()
        gone = weakref.ref(thing)
        future: Future[int] = Future()
        future.add_done_callback(lambda _, thing=thing: None)
        then = future.then(lambda _, thing=thing: 1)
        del thing
        assert gone() is not None
        future.set_result(1)
        gc.collect()
        assert gone() is None
        assert then.wait() == 1


class TestCollectAll:
    def test_waits_for_all(self) -> None:
        futures: list[Future[int]] = [Future() for _ in range(3)]
        together = collect_all(futures)
        for number, future in enumerate(reversed(futures)):
            assert not together.done()
            future.set_result(number)
        assert together.wait() == futures
        assert [future.wait() for future in together.wait()] == [2, 1, 0]

    def test_of_nothing_is_done(self) -> None:
        assert collect_all([]).wait(0) == []
        assert wait_all([]) == []

    def test_of_the_same_twice(self) -> None:
        future: Future[int] = Future()
        together = collect_all([future, future])
        future.set_result(1)
        assert together.wait(0) == [future, future]

    def test_a_failure_waits_for_the_rest(self) -> None:
        first, second = Future[int](), Future[int]()
        together = collect_all([first, second])
        second.set_exception(Odd(2))  # type: ignore[arg-type]
        assert not together.done()
        first.set_result(1)
        with pytest.raises(Odd):
            together.wait(0)

    def test_the_first_failure_in_the_list_counts(self) -> None:
        futures: list[Future[int]] = [Future() for _ in range(3)]
        together = collect_all(futures)
        futures[2].set_exception(KeyError("later in the list"))  # type: ignore[arg-type]
        futures[1].set_exception(Odd(1))  # type: ignore[arg-type]
        futures[0].set_result(0)
        with pytest.raises(Odd):
            together.wait(0)
        with pytest.raises(Odd):
            wait_all(futures)

    def test_takes_torchs_own_futures(self) -> None:
        theirs: torch.futures.Future[int] = torch.futures.Future()
        ours: Future[int] = Future()
        together = collect_all([theirs, ours])
        theirs.set_result(1)
        ours.set_result(2)
        assert together.wait(0) == [theirs, ours]
        assert wait_all([theirs, ours]) == [1, 2]

    def test_the_list_may_be_changed_meanwhile(self) -> None:
        futures: list[Future[int]] = [Future()]
        together = collect_all(futures)
        first = futures.pop()
        first.set_result(1)
        assert together.wait(0) == [first]

    def test_many_threads_complete_them(self, elsewhere: Callable[..., Any]) -> None:
        futures: list[Future[int]] = [Future() for _ in range(100)]
        together = collect_all(futures)
        for start in range(4):
            part = list(enumerate(futures))[start::4]
            elsewhere(lambda part=part: [future.set_result(number) for number, future in part])
        assert [future.wait() for future in together.wait(FAILSAFE)] == list(range(100))

    def test_wait_all_waits(self, elsewhere: Callable[..., Any]) -> None:
        futures: list[Future[int]] = [Future() for _ in range(3)]
        elsewhere(lambda: [future.set_result(number) for number, future in enumerate(futures)])
        assert wait_all(futures) == [0, 1, 2]


class TestAwait:
    def test_a_value_that_is_there(self) -> None:
        async def main() -> int:
            return await done(5)

        assert asyncio.run(main()) == 5

    def test_a_value_to_come_from_a_thread(self, elsewhere: Callable[..., Any]) -> None:
        async def main() -> int:
            future: Future[int] = Future()
            elsewhere(lambda: future.set_result(5))
            return await future

        assert asyncio.run(main()) == 5

    def test_the_loop_goes_on_meanwhile(self) -> None:
        async def main() -> list[Any]:
            future: Future[int] = Future()
            seen: list[Any] = []

            async def wait() -> None:
                seen.append(("got", await future))

            task = asyncio.create_task(wait())
            for number in range(3):
                await asyncio.sleep(0)
                seen.append(number)
            future.set_result(5)
            await task
            return seen

        assert asyncio.run(main()) == [0, 1, 2, ("got", 5)]

    def test_an_exception_keeps_its_type(self, elsewhere: Callable[..., Any]) -> None:
        error = Odd(3)

        async def main() -> None:
            future: Future[int] = Future()
            elsewhere(lambda: future.set_exception(error))  # type: ignore[arg-type]
            await future

        with pytest.raises(Odd) as caught:
            asyncio.run(main())
        assert caught.value is error

    def test_many_tasks_of_many_loops(self, elsewhere: Callable[..., Any]) -> None:
        future: Future[int] = Future()
        started = threading.Semaphore(0)
        got: list[list[int]] = []

        async def main() -> list[int]:
            tasks = [asyncio.ensure_future(_await(future)) for _ in range(5)]
            await asyncio.sleep(0)
            started.release()
            return await asyncio.gather(*tasks)

        threads = [elsewhere(lambda: got.append(asyncio.run(main()))) for _ in range(3)]
        for _ in threads:
            assert started.acquire(timeout=FAILSAFE)
        future.set_result(5)
        for thread in threads:
            thread.join()
        assert got == [[5] * 5] * 3

    def test_a_cancelled_await_leaves_the_future_alone(self) -> None:
        async def main() -> int:
            future: Future[int] = Future()
            task = asyncio.ensure_future(_await(future))
            other = asyncio.ensure_future(_await(future))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not future.done()
            future.set_result(5)
            return await other

        assert asyncio.run(main()) == 5

    def test_an_await_cancelled_as_the_value_comes_does_no_harm(self) -> None:
        troubles: list[Any] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, trouble: troubles.append(trouble))
            future: Future[int] = Future()
            task = asyncio.ensure_future(_await(future))
            await asyncio.sleep(0)
            future.set_result(5)  # the loop is told, but has not acted on it
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run(main())
        assert troubles == []

    def test_wait_for_gives_up(self, capfd: pytest.CaptureFixture[str]) -> None:
        async def main() -> Future[int]:
            future: Future[int] = Future()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, timeout=0.001)
            return future

        future = asyncio.run(main())
        assert not future.done()
        future.set_result(1)  # the loop that waited is closed
        assert future.wait() == 1
        assert capfd.readouterr().err == ""

    def test_needs_a_loop(self) -> None:
        with pytest.raises(RuntimeError):
            next(Future().__await__())

    def test_gather(self) -> None:
        async def main() -> list[int]:
            futures: list[Future[int]] = [Future() for _ in range(3)]
            asyncio.get_running_loop().call_soon(
                lambda: [future.set_result(number) for number, future in enumerate(futures)]
            )
            return await asyncio.gather(*futures)

        assert asyncio.run(main()) == [0, 1, 2]

    def test_then_and_collect_all_can_be_awaited(self) -> None:
        async def main() -> tuple[int, list[Any]]:
            return await done(1).then(lambda it: it.wait() + 1), await collect_all([done(3)])

        value, (future,) = asyncio.run(main())
        assert value == 2
        assert future.wait() == 3


async def _await(future: Future[int]) -> int:
    return await future


class TestFailures:
    def test_waiting_in_vain_leaves_nothing_behind(self) -> None:
        """An exception refers to the frames that it went through; with them goes what they hold."""

        class Thing:
            pass

        def wait_for(future: Future[None], thing: Thing) -> weakref.ref[Thing]:
            for way in (future.wait, future.value, future.then(lambda done: done.value()).wait):
                with contextlib.suppress(KeyError):
                    way()
            return weakref.ref(thing)

        failed: Future[None] = Future()
        failed.set_exception(KeyError("gone"))
        thing = wait_for(failed, Thing())
        del failed
        gc.collect()
        assert thing() is None

    def test_one_that_is_kept_keeps_nobody_who_asks(self) -> None:
        class Thing:
            pass

        def wait_for(future: Future[None], thing: Thing) -> weakref.ref[Thing]:
            both = collect_all([future, future])
            for way in (future.wait, future.value, future.then(lambda done: done.value()).wait, both.wait):
                with pytest.raises(KeyError, match="gone") as caught:
                    way()
                assert caught.value is not error
                assert caught.value.__cause__ is cause
            return weakref.ref(thing)

        error, cause = KeyError("gone"), ValueError("why")
        error.__cause__ = cause
        failed: Future[None] = Kept()
        failed.set_exception(error)
        thing = wait_for(failed, Thing())
        gc.collect()
        assert thing() is None
        assert error.__traceback__ is None

    @pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
    def test_a_copy_is_of_the_same_type_and_says_the_same(self, make: Callable[[], BaseException]) -> None:
        error = make()
        with contextlib.suppress(AttributeError):
            error.add_note("noted")
        kept: Future[None] = Kept()
        kept.set_exception(error)
        for _ in range(2):  # a copy does not change what is copied
            with pytest.raises(type(error)) as caught:
                kept.wait()
            made = caught.value
            assert made is not error
            assert (made.args, str(made)) == (error.args, str(error))
            assert getattr(made, "__notes__", None) == getattr(error, "__notes__", None)
            for name in ("code", "errno", "filename", "filename2", "exceptions", "value", "object", "slot"):
                assert getattr(made, name, None) == getattr(error, name, None)
            with contextlib.suppress(AttributeError):
                made.add_note("the copy's own")

    @pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit(), ValueError()], ids=repr)
    def test_what_cannot_be_copied_is_described(self, error: BaseException) -> None:
        kept: Future[None] = Kept()
        kept.set_exception(Uncopied(error))
        with pytest.raises(RemoteError, match="rigid") as caught:
            kept.wait()
        assert (caught.value.type_name, caught.value.worker) == (f"{__name__}.Uncopied", None)

    def test_torch_sees_the_exception(self) -> None:
        failed: Future[None] = Future()
        failed.set_exception(KeyError("gone"))
        with pytest.raises(KeyError, match="gone"):
            torch.futures.wait_all([failed])

    def test_only_exceptions_are_exceptions(self) -> None:
        future: Future[None] = Future()
        with pytest.raises(TypeError):
            future.set_exception("gone")
        assert not future.done()
