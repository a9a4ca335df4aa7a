"""The table of quality of benchmarks/real_models.py: what each form of a real model loses on held-out text.

Every form is built into an engine for this CPU and reads the same windows as the unrounded one. Methods that look at
activations are calibrated on another text of the same kind. A file that holds rows of the same windows is gone on
with: forms that it has are not built again.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import llmc
from benchmarks.quality import build
from benchmarks.real_model_files import in_type
from llmc.debug.compare import Logits
from llmc.errors import OptionError
from llmc.frontends.gguf.container import files_of, read_model
from llmc.passes.parallel_map import one_thread

UNROUNDED = {"quantize": "none", "dtype": "float32"}
PLAIN = "unrounded, float32"


@dataclass(frozen=True)
class Form:
    """One row of the table.

    Args:
        name: what the row is called.
        options: of the build.
        is_of_file: whether the GGUF file itself is built, whose codes are kept, not the numbers that they stand for.
        type: the GGML type that the file's numbers are rounded to before it is built; None for the file itself.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    is_of_file: bool = False
    type: str | None = None

    def model(self, file: Path, numbers: Path, cache: Path) -> Path:
        """What is built: the GGUF file, one of another type, or the directory of the file's numbers."""
        if not self.is_of_file:
            return numbers
        return file if self.type is None else in_type(file, self.type, cache)


def _scheme(name: str) -> Form:
    return Form(name, {"quantize": name})


_SCHEMES = (
    *("int8", "w8a8:xrow", "w8a8:x32", "w8a8-smoothquant:xrow", "w8a8-smoothquant:x32"),
    *("fp8", "fp8-w8a8", "int6", "int6-gptq", "int5", "int5-gptq", "int4"),
    *("int4:g32", "int4:asym", "int4:g32:asym", "int4-gptq", "int4-gptq:g32:asym", "int4-awq"),
    *("w6a8:x32", "w5a8:x32", "w4a8:xrow", "w4a8:x32", "w4a8:g32:x32", "w4a8-gptq:x32", "w4a8-awq:x32"),
    *("nf4", "mxfp4"),
    *("q4_k,lm_head=q4_k", "q4_k,lm_head=q4_k-gptq", "q4_k-gptq,lm_head=q4_k-gptq", "q4_k,lm_head=q6_k"),
    *("q6_k", "q5_1", "q5_k", "q4_1", "iq4_nl", "iq4_xs", "q3_k", "q2_k"),
)
_SENSITIVE = (
    *("int8", "w8a8:xrow", "w8a8:x32", "int4:g32", "int4:g32:asym", "int4-gptq", "int4-gptq:g32:asym", "int4-awq"),
    *("nf4", "mxfp4", "q4_k,lm_head=q4_k", "q4_k,lm_head=q4_k-gptq", "q4_k-gptq,lm_head=q4_k-gptq"),
    "q4_k,lm_head=q6_k",
)
_ZEROS = ("magnitude:0.5", "wanda:0.5", "sparsegpt:0.5", "sparsegpt:2:4")
_FILE = Form("the file as it is", {}, is_of_file=True)
_KV = tuple(
    Form(f"KV {codes}", UNROUNDED | {"kv_cache": codes})
    for codes in (
        *("int8", "int8:rotated", "fp8", "int8/int4:rotated", "int4", "int4:rotated", "int4:head:rotated"),
        *("int4:rotated:recent=128", "int4:rotated:recent=64", "int8/int4:rotated:recent=128"),
    )
)
_MXFP4_FILE = Form("an MXFP4 file as it is", {}, is_of_file=True, type="MXFP4")
# Codes of more bits than the scheme's are rounded again.
_AGAIN = tuple(Form(f"the file as {scheme}", {"quantize": scheme}, is_of_file=True) for scheme in ("q4_k", "w4a8"))
_BFLOAT16 = Form("bfloat16, weights and KV", {"quantize": "none"})
# By model; what is compared with stands in every table.
FORMS: dict[str, tuple[Form, ...]] = {
    "smollm2": (
        *(_FILE, _BFLOAT16, *map(_scheme, _SCHEMES), _MXFP4_FILE, *_KV),
        *(Form(zeros, {"quantize": "none", "sparsity": zeros}) for zeros in _ZEROS),
        _scheme("auto:4.5"),
    ),
    "gemma3": (_FILE, _BFLOAT16, *map(_scheme, _SENSITIVE), *_AGAIN, *_KV),
}
# What llama.cpp makes of the same file's numbers; the first is the file.
LLAMA_CPP = ("", "Q8_0", "Q4_K_M", "Q4_0")


@dataclass(frozen=True)
class Row:
    """What one form makes of the windows.

    Args:
        form: its name.
        bits: per quantized weight, scales included; of a GGUF file, per weight of its matrices. None where no weight
            is quantized.
        perplexity: of the next token, over all windows.
        divergence: mean KL from the unrounded engine, in nats.
        same: share of positions whose likeliest next token is the unrounded engine's.
        seconds: processor time of the build, 0 if llmc did not build it.
        tokens: that were judged.
        date: of the measurement.
    """

    form: str
    bits: float | None
    perplexity: float
    divergence: float
    same: float
    seconds: float
    tokens: int
    date: str

    def line(self) -> str:
        """The row as Markdown."""
        bits = "" if self.bits is None else f"{self.bits:.2f}"
        seconds = f"{self.seconds:.0f}" if self.seconds else ""
        figures = f"{self.perplexity:.3f} | {self.divergence:.4f} | {self.same:.1%} | {seconds}"
        return f"| {self.form} | {bits} | {figures} |"


HEAD = (
    "| form | bits per weight | perplexity | KL | same first choice | build, processor s |",
    "|---|--:|--:|--:|--:|--:|",
)


class Windows:
    """Windows of token ids, and the unrounded engine's log-probabilities of each, in files: they are large."""

    def __init__(self, plain: Path, pieces: Sequence[list[int]], directory: Path, threads: int) -> None:
        self.pieces, self._directory = pieces, directory
        with llmc.load(plain, threads=threads) as engine:
            for number, piece in enumerate(pieces):
                np.save(self._file(number), torch.from_numpy(engine.logits(piece)).log_softmax(-1).numpy())

    def row(self, form: str, logits: Iterable[Logits], bits: float | None = None, seconds: float = 0.0) -> Row:
        """What a form's logits of each window come to."""
        lost = divergence = 0.0
        same = count = predicted = 0
        for number, (piece, found) in enumerate(zip(self.pieces, logits, strict=True)):
            with one_thread():
                expected = torch.from_numpy(np.load(self._file(number), allow_pickle=False))
                given = torch.from_numpy(found).log_softmax(-1)
                same += int((expected.argmax(-1) == given.argmax(-1)).sum())
                lost -= float(given[:-1].gather(1, torch.tensor(piece[1:])[:, None]).double().sum())
                divergence += float((expected.exp() * (expected - given)).sum(-1).double().sum())
            count, predicted = count + len(piece), predicted + len(piece) - 1
        today = date.today().isoformat()
        return Row(form, bits, math.exp(lost / predicted), divergence / count, same / count, seconds, count, today)

    def unrounded(self) -> Row:
        """Of the engine that others are compared with."""
        files = map(self._file, range(len(self.pieces)))
        return self.row(PLAIN, (np.load(file, allow_pickle=False) for file in files))

    def _file(self, number: int) -> Path:
        return self._directory / f"window-{number}.npy"


def of_form(form: Form, model: Path, windows: Windows, calibration: Path, threads: int) -> Row:
    """Build one form of a model and let it read."""
    with tempfile.TemporaryDirectory() as directory:
        path, begun = Path(directory) / "engine.llmc", time.process_time()
        report = build(model, path, "cpu", {**form.options, "calibration": str(calibration)})
        seconds = time.process_time() - begun
        elements = sum(weight.rows * weight.columns for weight in report.quantized)
        spent = sum(weight.bits * weight.rows * weight.columns for weight in report.quantized)
        with llmc.load(path, threads=threads) as engine:
            bits = spent / elements if elements else None
            return windows.row(form.name, map(engine.logits, windows.pieces), bits, seconds)


_LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, pieces, output, threads = sys.argv[1:]
model = Llama(path, n_ctx=1024, n_batch=1024, logits_all=True, verbose=False, n_threads=int(threads))
for number, piece in enumerate(json.load(open(pieces))):
    model.reset()
    model.eval(piece)
    np.save(f"{output}/{number}.npy", np.array(model.scores[: len(piece)], dtype=np.float32))
"""


def of_llama_cpp(python: str, file: Path, kind: str, windows: Windows, threads: int) -> Row:
    """llama.cpp on a GGUF file, or on what it quantizes the file's numbers to, in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        read = file
        if kind:
            read = Path(directory) / f"{kind}.gguf"
            subprocess.run([python, "-m", "benchmarks.quantize_gguf", str(file), kind, str(read)], check=True)
        listed = Path(directory) / "pieces.json"
        listed.write_text(json.dumps(windows.pieces))
        subprocess.run([python, "-c", _LLAMA_CPP, str(read), str(listed), directory, str(threads)], check=True)
        files = (Path(directory) / f"{number}.npy" for number in range(len(windows.pieces)))
        logits = (np.load(each, allow_pickle=False) for each in files)
        return windows.row(llama_cpp_name(kind), logits, bits_of_file(read))


def bits_of_file(path: Path) -> float:
    """Mean number of bits per weight of a GGUF file's matrices, scales and minima included."""
    matrices = [each for each in read_model(files_of(path)).tensors.values() if len(each.shape) > 1]
    return 8 * sum(each.nbytes for each in matrices) / sum(math.prod(each.shape) for each in matrices)


def llama_cpp_name(kind: str) -> str:
    """Of a row."""
    return f"llama.cpp, {kind or 'the file as it is'}"


@dataclass(frozen=True)
class Record:
    """Rows of the same windows of one model on one machine, kept in a JSON file where one is named."""

    file: Path | None
    about: dict[str, str | int | None]
    rows: list[Row]

    @staticmethod
    def at(file: Path | None, about: dict[str, str | int | None]) -> Record:
        """With the rows that the file has. Raises OptionError for a file about another model, text or machine."""
        if file is None or not file.exists():
            return Record(file, about, [])
        kept = json.loads(file.read_text(encoding="utf-8"))
        others = {name: kept.get(name) for name, value in about.items() if kept.get(name) != value}
        if others:
            raise OptionError(
                f"the file is about {others}, and this run is about { {name: about[name] for name in others} }",
                at=str(file),
                fix="name another file in --json",
            )
        return Record(file, about, [Row(**row) for row in kept["rows"]])

    def has(self, form: str) -> bool:
        """Whether there is a row of that name."""
        return any(row.form == form for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row, and show it."""
        self.rows.append(row)
        Console(stderr=True).print(row.line(), markup=False, soft_wrap=True)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            content = self.about | {"rows": [asdict(each) for each in self.rows]}
            self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """The table as Markdown."""
        tokens = self.rows[0].tokens
        yield f"{tokens:,} tokens of {self.about['text']} in windows of {self.about['length']}"
        yield from HEAD
        yield from (row.line() for row in self.rows)
