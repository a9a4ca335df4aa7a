"""Train Medusa heads for an engine: on what its own model writes, and on its own hidden states.

Prompts are cut from a text and continued by the engine. The model then reads all of it once more, for its hidden
states. Training stops when the loss on held-out sequences no longer falls, and the best heads are kept. On bard-6m's
greedy text, heads trained on tokens are right in 0.58, 0.49 and 0.44 of cases; heads trained on the model's
distribution reach 0.45, 0.36 and 0.29 after the same number of epochs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmc.api.build_stages import Progress, Stages
from llmc.engine_format import ModelRecord, read_engine
from llmc.engine_format.path_argument import path_argument
from llmc.errors import OptionError
from llmc.frontends.checkpoints.directory_files import read_json
from llmc.runtime.loading import load
from llmc.runtime.threads import thread_count
from llmc.training.engine_states import Rows, StateReader, is_enough, output_matrix
from llmc.training.fit_heads import HeadAcceptance, Samples, acceptance, fit
from llmc.training.medusa_heads import MedusaHeads
from llmc.training.written import Written, begun, written

_KEPT_APART = 0.1


@dataclass(frozen=True)
class TrainedHeads:
    """The outcome of `train_medusa`.

    Attributes:
        path: The file of the heads.
        tokens: Number of tokens that they were trained on.
        epochs: Number of epochs until the loss on held-out sequences stopped falling.
        losses: Losses on held-out sequences, before training and after each epoch.
        heads: The acceptance of each head, in order.
        seconds: Times by stage.
    """

    path: Path
    tokens: int
    epochs: int
    losses: tuple[float, ...]
    heads: tuple[HeadAcceptance, ...]
    seconds: dict[str, float]


def train_medusa(
    engine: str | Path,
    text: str | Path,
    output: str | Path,
    *,
    heads: int = 3,
    layers: int = 1,
    tokens: int = 50_000,
    temperature: float = 0.0,
    chat: bool = False,
    epochs: int = 5,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> TrainedHeads:
    """Train Medusa heads for the model of a CPU engine, and write them with a config.json.

    The same arguments give the same heads on one machine.

    Args:
        engine: The engine directory.
        text: A UTF-8 file from which prompts are cut.
        output: A .safetensors file, for `llmc build --speculative`.
        heads: Number of tokens to draft after the next one.
        layers: Number of layers of each head.
        tokens: Number of tokens that the engine generates for training.
        temperature: Temperature of this generation; 0 is greedy.
        chat: Use prompts as user messages in the model's chat template, and train on the answers only.
        epochs: Maximum number of epochs.
        seed: Seed of prompts, generation and training.
        threads: Threads; default as in `llmc.load`.
        progress: Receives the stages of the training.

    Returns:
        The path of the heads, the losses, and the acceptance of each head on held-out sequences.

    Raises:
        LlmcError: For wrong arguments, or an engine that cannot be used.
    """
    place, source, file = path_argument("output", output), path_argument("text", text), path_argument("engine", engine)
    for name, value in (("heads", heads), ("layers", layers), ("tokens", tokens), ("epochs", epochs)):
        if type(value) is not int or value < 1:
            raise OptionError(f"{name} cannot be {value!r:.80}", at=name, fix="give a whole number from 1 on")
    check_place(place)
    stages = Stages(progress)
    directory = read_engine(file, check_weights=False)
    reader = StateReader(directory, thread_count(threads))
    with load(file, threads=threads) as opened:
        prompts = begun(opened, directory.program.limits, _text_of(source), tokens, seed, chat=chat)
        with stages("write", len(prompts)):
            sequences = written(opened, prompts, temperature, seed, stages.advance)
    with stages("read", len(sequences)):
        rows, matrix = _read(reader, sequences, stages.advance, chat=chat)
    reader.close()
    count = max(1, round(_KEPT_APART * len(rows)))
    apart, rest = Samples.of(rows[:count], heads), Samples.of(rows[count:], heads)
    trained = MedusaHeads(matrix.shape[1], heads, layers, torch.Generator().manual_seed(seed))
    with stages("train", epochs * rest.batches):
        losses = fit(trained, matrix, rest, apart, epochs, seed, stages.advance)
    with stages("judge", heads):
        hits = []
        for head in range(heads):
            hits.append(acceptance(trained, matrix, apart, head))
            stages.advance(1)
    write_heads(place, trained, directory.manifest.model, matrix.shape)
    return TrainedHeads(place, len(rest.states), len(losses) - 1, losses, tuple(hits), stages.seconds)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the text cannot be read: {error}", at=path, fix="give a UTF-8 text file") from None


def _read(
    reader: StateReader, sequences: Sequence[Written], advance: Callable[[int], None], *, chat: bool
) -> tuple[list[Rows], Tensor]:
    """States of every sequence (of a chat, only those of answers), and the output matrix. Logits are kept until it is
    found."""
    rows, with_logits = list[Rows](), list[Rows]()
    for sequence in sequences:
        read = reader.read(sequence.tokens)
        if not is_enough(with_logits):
            with_logits.append(read)
        rows.append((read.after(sequence.prompt) if chat else read).without_logits())
        advance(1)
    return rows, output_matrix(with_logits)


_CONFIG = "config.json"


def check_place(path: Path) -> None:
    """Raise OptionError where heads cannot be written, or where a config.json of something else would be lost."""
    if path.suffix != ".safetensors":
        raise OptionError(f"{path} is not a .safetensors file", at="-o", fix=f"name one: {path}/heads.safetensors")
    config = path.parent / _CONFIG
    if config.exists() and "medusa_num_heads" not in read_json(config):
        raise OptionError(
            "the directory has a config.json that is not of Medusa heads",
            at=config,
            fix="use an empty directory for the heads",
        )


def write_heads(path: Path, heads: MedusaHeads, model: ModelRecord, output_shape: tuple[int, ...]) -> None:
    """Write the heads, and a config.json with the keys of Medusa and of vLLM."""
    vocabulary, channels = output_shape
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in heads.tensors().items()}, path)
        config = {
            "model_type": "medusa",
            "base_model_name_or_path": model.name,
            "medusa_num_heads": heads.heads,
            "medusa_num_layers": heads.layers,
            "num_heads": heads.heads,
            "num_hidden_layers": heads.layers,
            "hidden_size": channels,
            "vocab_size": vocabulary,
            "truncated_vocab_size": vocabulary,
            "medusa_fc_bias": True,
            "original_lm_head": True,
        }
        (path.parent / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"the heads cannot be written: {error.strerror}", at=path, fix="name another place") from None
