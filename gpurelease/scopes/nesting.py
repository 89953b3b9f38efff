"""Whether one more scope can be opened beside those that are open: if not, that is said before anything is done."""

from __future__ import annotations

from gpurelease.errors import ScopeMisuse
from gpurelease.groups.plan import keeps
from gpurelease.options import ScopeOptions
from gpurelease.scopes.book import others_than_around
from gpurelease.scopes.frame import Frame
from gpurelease.transition.world import Phase, World


def check(frame: Frame, frames: list[Frame]) -> None:
    """Refuse a scope that contradicts those that are open.

    Args:
        frame: The scope.
        frames: The open scopes of its WORLD, in the order in which they were opened.

    Raises:
        ScopeMisuse: It contradicts one.
    """
    for other in others_than_around(frame, frames):
        if other.wants is not frame.wants:
            want = {Phase.ARMED: "restored", Phase.RELEASED: "released"}
            raise ScopeMisuse(
                f"{frame} wants the world {want[frame.wants]}, and {other}, which is not around it, wants it "
                f"{want[other.wants]}: enter it where no other task or thread is inside such a scope (a thread that is "
                "to count as inside a scope runs in its context: contextvars.copy_context().run)"
            )
    outer = frames[-1] if frames else None
    world = frame.world
    if world is None or outer is None or not world.is_released or Phase.ARMED in (frame.wants, outer.wants):
        return
    found = _contradictions(frame.options, world)
    if found:
        raise ScopeMisuse(f"{frame} is nested in {outer} and contradicts it: {'; '.join(found)}")


def _contradictions(options: ScopeOptions, world: World) -> list[str]:
    """Say what a scope asks for that was not done when the world was released.

    An option left at its default asks for nothing, and what it is called does not count, but what it comes to. The
    time-out of an inner scope is never used.
    """
    found = []
    if options.strategy == "suspend" and world.strategy.name != "suspend":
        found.append(f"strategy='suspend' here, and the world was released by {world.strategy.name!r}")
    if options.backends is not None:
        names = world.options.backends or {name for each in world.released for name in each.backend_names}
        more = [name for name in options.backends if name not in names]
        if more:
            found.append(f"backends={tuple(more)!r} here, and the world was released with {tuple(sorted(names))!r}")
    if options.keep:
        lost = [str(each) for each in world.released if keeps(options, each.group)]
        if lost:
            found.append(f"keep= here has {', '.join(lost)}, which the outer scope has released")
    return found
