"""A rank other than the first of an engine for GPUs, in its own process."""

import os
from functools import partial

from llmc.engine_format import EngineDirectory
from llmc.engine_format.reader import of_rank
from llmc.runtime.ranks.channel import Channel
from llmc.runtime.ranks.device_ranks import serve_device_rank
from llmc.runtime.ranks.rank_plan import RankPlan
from llmc.runtime.ranks.step_rows import StepRows


def work_on_device(engine: EngineDirectory, plan: RankPlan, channel: Channel, rows: StepRows) -> None:
    """Run steps on the GPU with the rank's number, or on the CPU as the first rank's kernels do. Raises LlmcError."""
    own = of_rank(engine, plan.rank)
    if plan.executor == "ptx":
        from llmc.runtime.executors.ptx import open_ptx_rank
        from llmc.runtime.ranks.interpreted_place import meet_interpreted

        open_executed = partial(open_ptx_rank, own, plan.blocks)
        return serve_device_rank(open_executed, meet_interpreted, channel, rows)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from llmc.runtime.executors.triton_interpreter import interpret_rank
        from llmc.runtime.ranks.interpreted_place import meet_interpreted

        open_own = partial(interpret_rank, own, plan.blocks)
        return serve_device_rank(open_own, meet_interpreted, channel, rows)
    from llmc.runtime.executors.cuda_opening import open_cuda_rank
    from llmc.runtime.ranks.gpu_place import meet_gpus

    open_gpu = partial(open_cuda_rank, own, plan.rank, plan.blocks)
    return serve_device_rank(open_gpu, meet_gpus, channel, rows)
