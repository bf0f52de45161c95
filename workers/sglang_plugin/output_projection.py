"""o_proj of decode ranks, when the latent groups are added up before it and not behind it.

::

    behind    sum over k ranks of   W_O,heads of the rank (values from its slice)     g x weights
    before    values = sum over g ranks, then each keeps a g-th of its heads
              sum over k ranks of   W_O,own heads (values)                            1 x weights

Values from a slice are partial sums, linear in the slice, so both give the same. The second reads
and holds o_proj once instead of g times, for one more collective a layer.

Shape suffixes: T tokens, R values of the heads that the g ranks share, head by head.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import (
    GroupCoordinator,
    get_attn_tp_group,
    get_world_group,
    init_model_parallel_group,
)
from sglang.srt.layers.linear import RowParallelLinear

from tpla.core.latent_layout import RankShard


class ScatteredOutput(RowParallelLinear):
    """An ordinary head shard over all attention ranks, fed with partial sums of g of them.

    Decode steps are small, so the sum is an all-reduce: SGLang's one-shot kernel moves twice the
    bytes of a reduce-scatter, and takes less time than NCCL needs to begin one.

    Args:
        shard: this rank.
        arguments: of SGLang's class, whose ``tp_rank`` and ``tp_size`` are not used.
    """

    def __init__(self, shard: RankShard, *arguments: Any, **options: Any) -> None:
        options |= {"tp_rank": shard.tp_rank, "tp_size": shard.tp_size}
        super().__init__(*arguments, **options)
        self._group = _ranks_of_equal_heads(shard)
        start = shard.group * self.input_size_per_partition
        self._own = slice(start, start + self.input_size_per_partition)

    def forward(self, partial_TR: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Output as SGLang's; overwrites its input on some devices."""
        own_TR = self._group.all_reduce(partial_TR)[:, self._own]
        if self.quant_config is not None:  # quantised products read their input as it lies
            own_TR = own_TR.contiguous()
        return super().forward(own_TR, *arguments, **options)


def _ranks_of_equal_heads(shard: RankShard) -> GroupCoordinator:
    if shard.groups == shard.tp_size:
        return get_attn_tp_group()
    return _neighbours(shard.groups)


@functools.cache
def _neighbours(count: int) -> GroupCoordinator:
    """This rank's group of ``count`` that follow each other, as latent groups do."""
    world = get_world_group()
    ranks = [list(range(first, first + count)) for first in range(0, world.world_size, count)]
    backend = torch.distributed.get_backend(world.device_group)
    return init_model_parallel_group(ranks, world.local_rank, backend, group_name="tpla_latent")
