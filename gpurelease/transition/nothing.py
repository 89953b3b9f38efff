"""Why there was nothing to release."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpurelease.options import ScopeOptions
from gpurelease.report import GroupReport
from gpurelease.transition.world import World

logger = logging.getLogger(__name__)


def why_nothing(world: World, options: ScopeOptions, groups: Sequence[GroupReport]) -> str:
    """Return why no rank had anything to release.

    Warns once, on rank 0, if that is for what the user asked for: without a wish, it is as it should be.

    Args:
        world: Where this rank stands.
        options: With what the world was to be released.
        groups: What has become of each group of this rank.
    """
    reason = "no rank has a process group to release"
    if any(group.reason == "keep=" for group in groups):
        reason += ", but for those in keep="
    elif options.backends is not None:
        reason += f" that has a backend of {', '.join(options.backends)}"
    else:
        return reason
    is_new, world.has_warned_of_nothing = not world.has_warned_of_nothing, True
    logger.log(logging.WARNING if is_new and world.rank == 0 else logging.DEBUG, "nothing is released: %s", reason)
    return reason
