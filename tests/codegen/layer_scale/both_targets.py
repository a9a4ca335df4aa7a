"""Run where llmc has layer_scale: a CPU's and a GPU's step have it in the place of a product, and compute the same."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import llmc
from llmc.codegen.triton.lowering import lower_device
from llmc.engine_format import read_engine
from llmc.frontends.capture import capture
from llmc.graph.execute import Chunk, run_steps
from llmc.options import BuildOptions
from llmc.passes.pipeline import default
from llmc.passes.runner import run_pipeline
from llmc.targets import gpu_target
from tests.codegen.triton.device_harness import interpret_steps

VOCABULARY, CHANNELS = 61, 40


class ScaledDecoder(nn.Module):
    """Token by token: a feed-forward layer whose channels are scaled before they join the residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, CHANNELS)
        self.feed = nn.Linear(CHANNELS, CHANNELS)
        self.gamma = nn.Parameter(torch.empty(CHANNELS))
        self.head = nn.Linear(CHANNELS, VOCABULARY, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [1, tokens]; returns logits [1, tokens, VOCABULARY]."""
        x = self.wte(ids)
        logits: Tensor = self.head(x + self.gamma * torch.relu(self.feed(x)))
        return logits


def main() -> None:
    torch.manual_seed(5)
    model, tokens = ScaledDecoder(), [3, 1, 60, 7, 7, 0]
    wanted = model(torch.tensor([tokens]))[0].detach()
    with llmc.compile(model, target="cpu", max_model_len=64) as engine:
        assert [x.family for x in read_engine(engine.path).program.launches].count("layer_scale") == 1
        torch.testing.assert_close(torch.from_numpy(engine.logits(tokens).copy()), wanted)
    print("cpu")
    captured = capture(model, BuildOptions(max_model_len=64))
    graph = run_pipeline(captured.graph, default(), BuildOptions(max_model_len=64)).graph
    lowered = lower_device(graph, gpu_target("h100"), BuildOptions(max_model_len=64))
    assert [x.family for x in lowered.program.launches].count("layer_scale_kernel") == 1
    steps = ((Chunk(0, 0, tuple(tokens)),),)
    with tempfile.TemporaryDirectory() as folder:
        got = interpret_steps(lowered, captured.source, steps, Path(folder))
    torch.testing.assert_close(got[0][0], wanted)
    torch.testing.assert_close(run_steps(graph, captured.source, steps)[0][0], wanted)
    print("h100")


if __name__ == "__main__":
    main()
