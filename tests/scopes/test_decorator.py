"""What ``@releases_world`` and ``@released_world`` decorate, and what they refuse, with the reason."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect

import pytest

from gpurelease import (
    InvalidOption,
    ScopeMisuse,
    is_released,
    release_depth,
    released_world,
    releases_world,
    restored_world,
)


@pytest.fixture(params=[releases_world, released_world], ids=lambda decorator: decorator.__name__)
def decorator(request):
    return request.param


def test_with_and_without_parentheses(world, decorator):
    @decorator
    def bare(a, b=2):
        return a, b, release_depth()

    @decorator()
    def empty(a):
        return a, release_depth()

    @decorator(keep=("sync",))
    def with_options(a):
        return a, world.options.keep

    assert bare(1) == (1, 2, 1)
    assert empty(1) == (1, 1)
    assert with_options(1) == (1, ("sync",))
    assert world.events == ["release", "restore"] * 3


def test_every_call_has_a_scope_of_its_own_and_an_error_goes_through(world, decorator):
    @decorator
    def rollout(fails):
        if fails:
            raise ValueError("prompt")

    rollout(False)
    with pytest.raises(ValueError, match="prompt"):
        rollout(True)
    rollout(False)
    assert world.events == ["release", "restore", "release", "restore after an error", "release", "restore"]


def test_methods_classmethods_and_staticmethods(world, decorator):
    class Trainer:
        @decorator
        def method(self, x):
            return self, x

        @classmethod
        @decorator
        def of_class(cls, x):
            return cls, x

        @staticmethod
        @decorator
        def static(x):
            return x

    trainer = Trainer()
    assert trainer.method(1) == (trainer, 1)
    assert Trainer.of_class(1) == (Trainer, 1)
    assert Trainer.static(1) == 1
    assert world.events == ["release", "restore"] * 3


def test_a_coroutine_function_holds_the_scope_across_its_awaits(world, decorator):
    """contextlib's decorator on ``async def`` closes the scope before the first await."""

    @decorator
    async def rollout(x):
        world.events.append("before")
        await asyncio.sleep(0.01)
        world.events.append("after")
        return x

    assert inspect.iscoroutinefunction(rollout)
    assert asyncio.run(rollout(3)) == 3
    assert world.events == ["release", "before", "after", "restore"]


def test_a_partial_of_a_coroutine_function_is_awaited_inside(world, decorator):
    async def rollout(x):
        await asyncio.sleep(0)
        world.events.append("body")
        return x

    assert asyncio.run(decorator(functools.partial(rollout, 3))()) == 3
    assert world.events == ["release", "body", "restore"]


def test_signature_and_docs_are_kept(decorator):
    def rollout(prompts: list[str], *, n: int = 1) -> int:
        """Roll out."""

    decorated = decorator(rollout)
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
def test_what_cannot_be_decorated_is_refused_at_decoration_with_the_reason(decorator, what, reason):
    with pytest.raises(ScopeMisuse, match=f"^@{decorator.__name__} {reason}"):
        decorator(what)
    with pytest.raises(ScopeMisuse, match=f"^@{decorator.__name__} {reason}"):
        decorator(timeout=3)(what)


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


@pytest.mark.parametrize("bare", [True, False])
def test_the_inverse_decorates_too(world, bare):
    @(restored_world if bare else restored_world())
    def sync_weights():
        return is_released()

    with released_world():
        assert sync_weights() is False and is_released()
    assert world.events == ["release", "restore", "release", "restore"]


def test_a_scope_that_decorates_is_opened_anew_by_each_call(world):
    scope = released_world(timeout=7)

    @scope
    def rollout(depth):
        return release_depth() if depth == 0 else rollout(depth - 1)

    assert (rollout(2), rollout(0)) == (3, 1)
    assert not scope.report.transitions, "it was not entered itself"
    assert [options.timeout for options in world.released_with] == [7, 7]


def test_without_parentheses_there_is_no_block(world):
    with pytest.raises((TypeError, AttributeError)), released_world:
        pass
    assert world.events == []


def test_what_has_released_the_world_is_what_the_user_wrote(world, decorator):
    class Trainer:
        @decorator
        def rollout(self):
            """Roll out."""

    Trainer().rollout()
    with released_world(), released_world(), restored_world():
        pass
    names = [options.spelled for options in world.released_with]
    qualified = f"{test_what_has_released_the_world_is_what_the_user_wrote.__qualname__}.<locals>.Trainer.rollout"
    assert names == [f"@{decorator.__name__} on {qualified}()", "released_world()", "released_world()"]
