"""Assemble the report: one HTML file with its style, its script and its data inside, that asks nothing of a network."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from llmc.files.typed_json import to_json
from llmc.prediction.rates import KindRates, Rates, gpu_rates
from llmc.report.contents import EngineContents
from llmc.report.explanation import explain_ranks
from llmc.report.machine_code import KernelBudgets
from llmc.report.measured_perplexity import MeasuredPerplexity
from llmc.report.page.graphs import graphs_data
from llmc.report.page.kernels import kernels_data
from llmc.report.page.memory import memory_data
from llmc.report.page.weights import pruning_data, quantization_data, sparsity_data
from llmc.report.profile import Profile
from llmc.targets import gpu_target

# In the order in which they use each other; the last one starts.
MODULES = (
    "dom",
    "units",
    "expression",
    "state",
    "cost",
    "highlight",
    "graph_rows",
    "controls",
    "overview",
    "pipeline",
    "pruning",
    "kernels",
    "roofline",
    "memory",
    "ranks",
    "quantization",
    "sparsity",
    "navigation",
    "main",
)
# The rates assumed for a CPU that has not been measured: a desktop with two memory channels.
_NOMINAL = Rates(bandwidth=50e9, kinds={"F32": KindRates(500e9), "BF16": KindRates(1000e9)}, launch=0.0, measured=False)
_ASSETS = Path(__file__).parent / "assets"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:const|function) (\w+)", re.MULTILINE)
_EXPORT_WORD = re.compile(r"^export (?=const |function )", re.MULTILINE)


def report_page(
    contents: EngineContents,
    rates: Rates | None = None,
    profile: Profile | None = None,
    perplexity: MeasuredPerplexity | None = None,
    budgets: KernelBudgets | None = None,
) -> str:
    """The page of an engine. rates: those of this machine; None takes the data sheet's or those of a nominal CPU, and
    the page says so. budgets: figures of GPU kernels' machine code; None if it was not read.

    The same contents give the same text.
    """
    data = {
        "engine": _engine(contents),
        "passes": contents.passes,
        "provenance": to_json(contents.provenance),
        **graphs_data(contents.graphs, contents.path),
        "pruning": pruning_data(contents),
        "kernels": kernels_data(contents, budgets),
        "memory": memory_data(contents.program),
        "ranks": _ranks(contents),
        "quantization": quantization_data(contents, perplexity),
        "sparsity": sparsity_data(contents),
        "rates": to_json(rates or _default_rates(contents)),
        "profile": None if profile is None else to_json(profile),
    }
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": escape(f"{contents.manifest.model.name} · llmc report", quote=False),
        "style": (_ASSETS / "style.css").read_text(encoding="utf-8"),
        "data": script_json(data),
        "script": script(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], page)


def script() -> str:
    """The modules as one script: each a function that is given what it imports and returns what it exports."""
    texts = (_as_function(name, (_ASSETS / f"{name}.js").read_text(encoding="utf-8")) for name in MODULES)
    return '(() => {\n"use strict";\n' + "\n".join(texts) + "\n})();"


def _as_function(name: str, text: str) -> str:
    imports = [f"const {{{names}}} = {module}_js;" for names, module in _IMPORT.findall(text)]
    exports = ", ".join(_EXPORT.findall(text))
    body = _EXPORT_WORD.sub("", _IMPORT.sub("", text))
    return f"const {name}_js = (() => {{\n" + "\n".join(imports) + f"\n{body}\nreturn {{{exports}}};\n}})();"


def script_json(data: Any) -> str:
    """JSON that is safe inside a <script> element: it cannot end the element or begin a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _engine(contents: EngineContents) -> dict[str, Any]:
    manifest = contents.manifest
    return {
        "model": to_json(manifest.model),
        "target": manifest.target.name,
        "kind": _kind(contents),
        "version": manifest.llmc_version,
        "options": manifest.options,
        "limits": to_json(manifest.limits),
        "memory": manifest.memory,
    }


def _ranks(contents: EngineContents) -> dict[str, Any] | None:
    """Beside Hugging Face's plan, as `llmc explain` says it."""
    explanation = explain_ranks(contents.placements, contents.stages, contents.manifest.model.family)
    return None if explanation is None else explanation.to_json()


def _kind(contents: EngineContents) -> str:
    if contents.program.kernels:
        return "gpu"
    return "cpu" if contents.program.launches else "reference"


def _default_rates(contents: EngineContents) -> Rates:
    if not contents.program.kernels:
        return _NOMINAL
    return gpu_rates(gpu_target(contents.manifest.target.name).compiled[0])
