"""ONNX files of tiny models as others write them, and what onnxruntime computes with them.

By onnxruntime-genai's builder, by torch.onnx.export as optimum calls it (plain operators, past_key_values), and by
transformers' own exporter.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.tiny_models import tiny_checkpoint, tiny_model

Array = NDArray[Any]
_HEAD_DIM = 32  # onnxruntime's GroupQueryAttention takes multiples of 16.
_WINDOW = 6  # of tiny models


def overrides(family: str) -> dict[str, Any]:
    """So that a family's heads are as wide as onnxruntime asks."""
    return {"head_dim": _HEAD_DIM} if family in ("qwen3", "gemma", "gemma2") else {}


def genai_model(family: str, folder: Path, precision: str = "fp32", **more: Any) -> Path:
    """The directory that onnxruntime-genai's builder writes for the CPU, with a tokenizer of single bytes."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    checkpoint, output = folder / "checkpoint", folder / f"genai-{family}-{precision}"
    with _quiet():
        tiny_checkpoint(family, checkpoint, **(overrides(family) | more))
        byte_tokenizer(checkpoint)
        cache = str(folder / "cache")
        options = parse_extra_options("", str(checkpoint), str(output), precision, "cpu", cache, ["hf_token=false"])
        create_model("", str(checkpoint), str(output), precision, "cpu", cache, **options)
    return output


def byte_tokenizer(folder: Path) -> None:
    """One token a byte, of those that 160 tokens have room for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:157]
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{letter: 3 + i for i, letter in enumerate(letters)}}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


class _WithCache(nn.Module):
    """A transformers model as optimum exports it: ids, a mask, positions and past_key_values to logits and present."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(past):
            cache.update(keys, values, layer)
        result = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return result.logits, [(layer.keys, layer.values) for layer in result.past_key_values.layers]


def optimum_model(family: str, folder: Path, **more: Any) -> Path:
    """model.onnx of plain operators, with external data, and config.json beside it."""
    model = tiny_model(family, **more)
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    past = [(torch.randn(2, heads, 5, width),) * 2 for _ in range(config.num_hidden_layers)]
    ids = torch.ones(2, 3, dtype=torch.int64)
    auto: Any = torch.export.Dim.AUTO
    named = [f"{layer}.{part}" for layer in range(len(past)) for part in ("key", "value")]
    with _quiet():
        exported: Any = torch.onnx.export(
            _WithCache(model).eval(),
            (ids, torch.ones(2, 8, dtype=torch.int64), torch.arange(5, 8).expand(2, 3), past),
            dynamo=True,
            dynamic_shapes=({0: auto, 1: auto},) * 3 + ([({0: auto, 2: auto},) * 2] * len(past),),
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{n}" for n in named)],
            output_names=["logits", *(f"present.{n}" for n in named)],
        )
    output = folder / f"optimum-{family}"
    output.mkdir()
    exported.save(str(output / "model.onnx"), external_data=True)
    config.save_pretrained(output)
    return output


def transformers_model(family: str, folder: Path, **more: Any) -> Path:
    """What transformers' own exporter saves."""
    from transformers.exporters import exporter_onnx

    package: Any = exporter_onnx
    output = folder / f"transformers-{family}"
    ids = torch.ones(2, 3, dtype=torch.int64)
    with _quiet():
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        config = package.OnnxConfig(dynamic=True)
        exported = package.OnnxExporter().export(tiny_model(family, **more), inputs, config=config)
        exported.save_pretrained(str(output))
    return output


def dequantized(file: Path, folder: Path) -> Path:
    """The same model with the numbers that the codes of MatMulNBits (int4, no zeros) stand for.

    onnxruntime itself multiplies with tokens of 8 bits where accuracy_level is 4.
    """
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(str(file))
    stored = {initializer.name: numpy_helper.to_array(initializer) for initializer in model.graph.initializer}
    nodes = list(model.graph.node)
    for index, node in enumerate(nodes):
        if node.op_type != "MatMulNBits":
            continue
        rows, columns = (next(a.i for a in node.attribute if a.name == name) for name in "NK")
        packed, scales = stored[node.input[1]], stored[node.input[2]].reshape(rows, -1, 1)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, scales.shape[1], -1) - 8.0
        weight = np.ascontiguousarray((codes * scales).reshape(rows, -1)[:, :columns].T.astype(np.float32))
        model.graph.initializer.append(numpy_helper.from_array(weight, f"{node.name}.weight"))
        nodes[index] = helper.make_node("MatMul", [node.input[0], f"{node.name}.weight"], node.output, name=node.name)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    folder.mkdir()
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


class OnnxruntimeModel:
    """A session on the CPU."""

    def __init__(self, file: Path, head_dim: int = 16) -> None:
        quiet = onnxruntime.SessionOptions()
        quiet.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(file), quiet, providers=["CPUExecutionProvider"])
        self._head_dim = head_dim

    def logits(self, tokens: list[int]) -> Array:
        """[tokens, vocabulary], with nothing in the cache."""
        feeds: dict[str, Array] = {}
        for input_ in self._session.get_inputs():
            if input_.name == "attention_mask":
                feeds[input_.name] = np.ones((1, len(tokens)), np.int64)
            elif input_.name == "position_ids":
                feeds[input_.name] = np.arange(len(tokens))[None]
            elif len(input_.shape) == 4:
                width = input_.shape[3] if isinstance(input_.shape[3], int) else self._head_dim
                length = _WINDOW if input_.shape[2] == "past_sliding_length" else 0
                feeds[input_.name] = np.zeros((1, input_.shape[1], length, width), np.float32)
            else:
                feeds[input_.name] = np.asarray([tokens])
        logits: Array = self._session.run([self._session.get_outputs()[0].name], feeds)[0][0]
        return logits

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The ids that follow."""
        ids = list(tokens)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(tokens) :]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
