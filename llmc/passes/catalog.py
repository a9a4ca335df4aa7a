"""The page docs/passes.md, generated from the passes' docstrings."""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby

from llmc.passes.pipeline import adapters, canonical, draft_heads, fusion, parallel, quantization, serving, speculative
from llmc.passes.rewrite import Pass, Rewrite

_NUMERICS = {
    "exact": "the same bits",
    "reorder": "the same mathematics in another order, or with less rounding",
    "lossy": "within a declared budget",
}
_HEAD = """\
# The passes

Generated from the passes' docstrings by `llmc passes --markdown`; do not edit. It describes every built-in pass in the
order of the pipeline. To see what they do to a model:

    llmc passes MODEL --rewrites

`a → b` or `a -> b` is the graph before and after a rewrite. *Must have* lists the conditions of a rewrite; a candidate
that does not meet them is not changed, and `llmc explain MODEL` gives the reason. `llmc diff MODEL` and
`llmc build --check-passes` check the numerics of a pass:

{numerics}

The last words about each pass are the verdict of `llmc prove`: whether its rewrites are exact over the reals. To add a
pass: [custom-passes.md](custom-passes.md).
"""
_GROUPS = (
    ("Canonical", "From aten, as torch.export returns it, to llmc:: ops over tokens.", canonical),
    ("Speculative", "Passes for drafting tokens, for `--speculative`.", speculative),
    (
        "Quantization",
        "Pruning, sparsity and codes, for `--prune`, `--sparsity` and `--quantize`.",
        quantization,
    ),
    (
        "Parallel",
        "Division of the weights or the layers among ranks, for `--tensor-parallel-size` and "
        "`--pipeline-parallel-size`.",
        parallel,
    ),
    ("Serving", "From one whole sequence to a step of many requests.", serving),
    ("Draft heads", "Draft heads in addition to the logits, for `--speculative`.", draft_heads),
    ("Fusion", "Fusions that reduce memory traffic.", fusion),
    ("Adapters", "Adapters that are loaded at run time, for `--enable-lora`.", adapters),
)


def passes_page(verdicts: Mapping[str, str]) -> str:
    """docs/passes.md: every built-in pass in order; passes that share a file share a section.

    verdicts: the verdicts of `llmc prove`, by the passes' names.
    """
    numerics = "\n".join(f"- **{name}**: {meaning}" for name, meaning in _NUMERICS.items())
    order = " → ".join(pass_.name for _, _, members in _GROUPS for pass_ in members())
    parts = [_HEAD.format(numerics=numerics), f"In order: {order}\n"]
    for title, summary, members in _GROUPS:
        parts.append(f"## {title}\n\n{summary}\n")
        parts += [section(list(group), verdicts) for _, group in groupby(members(), key=docstring)]
    return "\n".join(parts)


def docstring(graph_pass: Pass) -> str:
    """The docstring of the file that a pass is written in, or of its own function where the file has none."""
    function = graph_pass.replacement if isinstance(graph_pass, Rewrite) else graph_pass.run
    return (sys.modules[function.__module__].__doc__ or function.__doc__ or "").strip()


def section(passes: Sequence[Pass], verdicts: Mapping[str, str]) -> str:
    """Title, summary, before → after, numerics and verdicts of the passes of one file."""
    summary, _, rest = docstring(passes[0]).partition("\n")
    figures = "\n".join(
        f"- `{pass_.name}`: {'pattern' if isinstance(pass_, Rewrite) else 'whole graph'}, "
        f"numerics **{pass_.numerics.value}**, leaves stage {pass_.stage.value if pass_.stage else 'as it was'}; "
        f"{verdicts[pass_.name]}"
        for pass_ in passes
    )
    title = ", ".join(pass_.name for pass_ in passes)
    return "\n".join(part for part in (f"### {title}\n", f"{summary}\n", _body(rest), f"{figures}\n") if part)


def _body(text: str) -> str:
    """The rest of a docstring: what is indented in it is code, the lines of a paragraph stay together."""
    lines: list[str] = []
    for is_code, group in groupby(text.strip("\n").splitlines(), key=lambda line: line.startswith("    ")):
        block = [line.removeprefix("    ") if is_code else line for line in group]
        if is_code:
            lines += ["```text", *block, "```", ""]
        else:
            lines += [*_paragraphs(block), ""]
    return "\n".join(lines)


def _paragraphs(block: Sequence[str]) -> list[str]:
    """A line that begins with a name and a colon (Must have:, Numerics:, Source:) begins a paragraph."""
    lines: list[str] = []
    for line in block:
        head, colon, rest = line.partition(":")
        if colon and head in ("Must have", "Numerics", "Source", "Sources"):
            lines += ["", f"*{head}*:{rest}"]
        else:
            lines.append(line)
    return lines[1:] if lines and not lines[0] else lines
