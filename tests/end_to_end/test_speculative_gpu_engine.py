"""An engine with a draft for a GPU, built without one: both have their kernels, which draft in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc import SamplingParams, load
from llmc.compiler import build
from llmc.engine_format import read_engine
from tests import draft_checkpoints as drafts
from tests.tiny_models import tiny_checkpoint, tiny_tokens

PROMPT, PARAMS = tiny_tokens(5), SamplingParams(max_tokens=5, temperature=0.0)
# Trees, of which the draft reads two nodes at once.
SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3, "tree_width": 2}
RUN = """
import sys
from llmc import load
from llmc.runtime.speculation import opening
from tests.end_to_end.test_speculative_gpu_engine import PARAMS, PROMPT, SPECULATION
from tests.runtime.speculation.guesses import Open

class Once(Open):
    def drafts(self, requests, room):
        count, self.most = super().drafts(requests, room), 0
        return count

opening.Gate = Once
with load(sys.argv[1], executor="triton_interpreter", speculation=SPECULATION) as engine:
    print(list(engine.generate(PROMPT, PARAMS)[0].choices[0].token_ids), engine.loop.speculation.stats.draft_tokens)
"""


@pytest.mark.slow
def test_kernels_are_compiled_offline_and_draft_in_the_interpreter(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False)
    draft = drafts.eagle3(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    path = tmp_path / "engine.llmc"
    limits: dict[str, Any] = {"max_model_len": 64, "max_batch_tokens": 8, "max_sequences": 2, "max_logit_rows": 4}
    build(model, path, target="h100", dtype="float32", speculative=draft, **limits)
    for place in (path, path / "draft"):
        engine = read_engine(place, check_machine=False)
        assert engine.program.launched_kernels()
        for kernel in engine.program.launched_kernels():
            assert (engine.path / kernel.binaries["sm_90"].file).read_bytes().startswith(b"\x7fELF")
    assert engine.program.hidden_width == drafts.WIDTH
    with load(path, executor="reference") as plain:
        expected = list(plain.generate(PROMPT, PARAMS)[0].choices[0].token_ids)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", RUN, str(path)]
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1].rsplit(" ", 1)[0] == str(expected)
    assert int(ran.stdout.split()[-1]) > 0
