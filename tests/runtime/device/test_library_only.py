"""What a program becomes where GPUs cannot read each other's memory."""

from __future__ import annotations

from llmc.program import StepOutput
from llmc.runtime.device.library_only import library_only
from llmc.runtime.device.program import plan_calls
from tests.codegen.triton.test_rank_programs import lowered, of


def test_the_library_serves_all_rows() -> None:
    program = lowered(8).program
    changed = library_only(program)
    plan_calls(changed)
    for function in ("reduce_rows_kernel", "gather_channels_kernel"):
        assert of(program.launches, function) and not of(changed.launches, function)

    def nodes(launches: object, tokens: int) -> list[tuple[str, ...]]:
        at = {"tokens": tokens, "logit_rows": 1, "wanted": StepOutput.LOGITS}
        runs = [launch.origin.nodes for launch in launches if launch.runs(**at)]  # type: ignore[attr-defined]
        return list(dict.fromkeys(runs))

    for tokens in (1, 16, 17, 2048):
        assert nodes(changed.launches, tokens) == nodes(program.launches, tokens)
