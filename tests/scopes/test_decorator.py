"""What ``@releases_world`` decorates, and what it refuses, with the reason."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect

import pytest

from gpurelease import InvalidOption, ScopeMisuse, is_released, release_depth, releases_world


def test_with_and_without_parentheses(world):
    @releases_world
    def bare(a, b=2):
        return a, b, release_depth()

    @releases_world()
    def empty(a):
        return a, release_depth()

    @releases_world(keep=("sync",))
    def with_options(a):
        return a, world.options.keep

    assert bare(1) == (1, 2, 1)
    assert empty(1) == (1, 1)
    assert with_options(1) == (1, ("sync",))
    assert world.events == ["release", "restore"] * 3


def test_every_call_has_a_scope_of_its_own_and_an_error_goes_through(world):
    @releases_world
    def rollout(fails):
        if fails:
            raise ValueError("prompt")

    rollout(False)
    with pytest.raises(ValueError, match="prompt"):
        rollout(True)
    rollout(False)
    assert world.events == ["release", "restore", "release", "restore after an error", "release", "restore"]


def test_methods_classmethods_and_staticmethods(world):
    class Trainer:
        @releases_world
        def method(self, x):
            return self, x

        @classmethod
        @releases_world
        def of_class(cls, x):
            return cls, x

        @staticmethod
        @releases_world
        def static(x):
            return x

    trainer = Trainer()
    assert trainer.method(1) == (trainer, 1)
    assert Trainer.of_class(1) == (Trainer, 1)
    assert Trainer.static(1) == 1
    assert world.events == ["release", "restore"] * 3


def test_a_coroutine_function_holds_the_scope_across_its_awaits(world):
    """contextlib's decorator on ``async def`` closes the scope before the first await."""

    @releases_world
    async def rollout(x):
        world.events.append("before")
        await asyncio.sleep(0.01)
        world.events.append("after")
        return x

    assert inspect.iscoroutinefunction(rollout)
    assert asyncio.run(rollout(3)) == 3
    assert world.events == ["release", "before", "after", "restore"]


def test_a_partial_of_a_coroutine_function_is_awaited_inside(world):
    async def rollout(x):
        await asyncio.sleep(0)
        world.events.append("body")
        return x

    assert asyncio.run(releases_world(functools.partial(rollout, 3))()) == 3
    assert world.events == ["release", "body", "restore"]


def test_signature_and_docs_are_kept():
    def rollout(prompts: list[str], *, n: int = 1) -> int:
        """Roll out."""

    decorated = releases_world(rollout)
    assert inspect.signature(decorated) == inspect.signature(rollout)
    assert (decorated.__doc__, decorated.__name__, decorated.__wrapped__) == ("Roll out.", "rollout", rollout)


def generator():
    yield


async def async_generator():
    yield


class Rollout:
    pass


@pytest.mark.parametrize(
    "what, reason",
    [
        (generator, "does not decorate generators, and generator is one"),
        (async_generator, "does not decorate generators, and async_generator is one"),
        (Rollout, "does not decorate classes, and Rollout is one"),
        (classmethod(generator), "must stand below @classmethod"),
        (staticmethod(generator), "must stand below @staticmethod"),
        (3, "decorates functions, and got 3"),
    ],
)
def test_what_cannot_be_decorated_is_refused_at_decoration_with_the_reason(what, reason):
    with pytest.raises(ScopeMisuse, match=reason):
        releases_world(what)
    with pytest.raises(ScopeMisuse, match=reason):
        releases_world(timeout=3)(what)


async def work():
    await asyncio.sleep(0)


class Awaitable:
    def __await__(self):
        return work().__await__()


@pytest.mark.parametrize(
    "promise, kind",
    [
        (work, "coroutine"),
        (generator, "generator"),
        (async_generator, "async_generator"),
        (lambda: asyncio.ensure_future(work()), "Task"),
        (lambda: asyncio.get_running_loop().create_task(work()), "Task"),
        (lambda: asyncio.gather(work(), work()), "_GatheringFuture"),
        (lambda: asyncio.get_running_loop().create_future(), "Future"),
        (lambda: asyncio.get_running_loop().run_in_executor(None, int), "Future"),
        (concurrent.futures.Future, "Future"),
        (Awaitable, "Awaitable"),
    ],
)
def test_a_plain_function_that_returns_what_runs_later_is_refused_at_the_call(world, promise, kind):
    @releases_world
    def rollout():
        return promise()

    async def main():
        with pytest.raises(ScopeMisuse, match=f"returned a {kind}, whose work would go on after the scope"):
            rollout()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize("awaits", [lambda: asyncio.ensure_future(work()), lambda: asyncio.gather(work()), Awaitable])
def test_a_coroutine_function_that_awaits_it_is_held_until_it_is_done(world, awaits):
    @releases_world
    async def rollout():
        promise = awaits()
        assert is_released()
        await promise
        return is_released()

    assert asyncio.run(rollout())
    assert world.events == ["release", "restore"]


@pytest.mark.parametrize("result", [None, [1], {"a": 1}, iter([1]), range(3), "samples"])
def test_what_has_come_to_its_result_is_returned(world, result):
    assert releases_world(lambda: result)() is result
    assert world.events == ["release", "restore"]


def test_bad_options_are_told_where_they_are_written():
    with pytest.raises(InvalidOption, match="strategy='renew' is not known"):
        releases_world(strategy="renew")(lambda: None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kept'"):
        releases_world(kept=())(lambda: None)
