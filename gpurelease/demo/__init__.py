"""The main job on real work, in about a minute on two cores: ``python -m gpurelease.demo``.

A few processes train a small policy with GRPO on FSDP2 and tensor parallelism. Every rollout runs inside
``@releases_world``, and the weight sync in its middle inside ``restored_world()``.

From the job outwards: ``rollout`` (where gpurelease is used), ``trainer`` and ``engine`` (the two that take turns on
a device), ``policy`` and ``task`` (what is learned), ``rank`` (one process of the job), ``launcher`` (all of them),
``meter`` and ``record`` (what is measured), ``table`` and ``picture`` (how it is shown).
"""
