"""The GPU of each rank: the one with the rank's number, or the one that LLMC_RANK_DEVICES names."""

from pathlib import Path

from llmc.errors import OptionError, TargetError
from llmc.plural import counted
from llmc.program import RankLayout
from llmc.settings import settings


def rank_devices(engine: Path, layout: RankLayout, count: int) -> tuple[int, ...]:
    """Return the index of each rank's GPU.

    Args:
        engine: The engine's path, for errors.
        layout: The engine's ranks.
        count: Number of GPUs that this process sees.

    Returns:
        An index for each rank. Ranks of different stages may have the same GPU, but only by LLMC_RANK_DEVICES.

    Raises:
        TargetError: There are fewer GPUs than ranks, or fewer than LLMC_RANK_DEVICES names.
        OptionError: LLMC_RANK_DEVICES does not name one GPU per rank, or names one twice in a stage.
    """
    named = settings().rank_devices
    if named is None:
        if layout.ranks > count:
            raise TargetError(
                f"the engine was built for {_gpus(layout)}, and this process sees {count}",
                at=engine,
                fix=f"run it on a machine that has them, check CUDA_VISIBLE_DEVICES, {_smaller(layout, count)}",
            )
        return tuple(range(layout.ranks))
    at = f"LLMC_RANK_DEVICES={','.join(map(str, named))}"
    if len(named) != layout.ranks:
        raise OptionError(
            f"{at} names the GPUs of {counted(len(named), 'rank')}, and the engine was built for {_gpus(layout)}",
            at=at,
            fix=f"name {counted(layout.ranks, 'GPU')}, or unset it: each rank then has the GPU of its number",
        )
    if max(named) >= count:
        raise TargetError(
            f"{at} names GPU {max(named)}, and this process sees {count}",
            at=engine,
            fix="name GPUs from 0, as torch numbers them; check CUDA_VISIBLE_DEVICES",
        )
    for stage in range(layout.pipeline):
        own = named[layout.rank_of(stage, 0) : layout.rank_of(stage + 1, 0)]
        if len(set(own)) < len(own):
            raise OptionError(
                f"{at} names one GPU twice among the {counted(layout.tensor, 'rank')} of stage {stage}",
                at=at,
                fix="only ranks of different stages can share a GPU",
            )
    return named


def most_ranks_per_device(devices: tuple[int, ...]) -> int:
    """Return the number of ranks on the GPU that has the most, which divide its memory. devices: Each rank's GPU."""
    return max(map(devices.count, devices))


def _gpus(layout: RankLayout) -> str:
    """`4 GPUs`, or `4 GPUs: 2 stages of 2 ranks`."""
    stages = f": {layout.pipeline} stages of {counted(layout.tensor, 'rank')}" if layout.pipeline > 1 else ""
    return f"{counted(layout.ranks, 'GPU')}{stages}"


def _smaller(layout: RankLayout, count: int) -> str:
    if layout.pipeline == 1:
        return f"or build it again with a tensor_parallel_size of {count}"
    if layout.tensor > count:
        return f"or build it again for {count} ranks: each rank of a stage needs its own GPU"
    shared = ",".join(str(rank % layout.tensor) for rank in range(layout.ranks))
    fewer = f"build it again with a pipeline_parallel_size of {count // layout.tensor}"
    return f"{fewer}, or let stages share GPUs: LLMC_RANK_DEVICES={shared}"
