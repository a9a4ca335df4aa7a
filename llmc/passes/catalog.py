"""The page docs/passes.md, generated from the passes' docstrings."""

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby

from llmc.passes.pipeline import adapters, canonical, draft_heads, fusion, parallel, quantization, serving, speculative
from llmc.passes.rewrite import Pass, Rewrite

_NUMERICS = {
    "exact": "the same bits",
    "reorder": "the same mathematics in another order, or rounded fewer times",
    "lossy": "within a declared budget",
}
_HEAD = """\
# The passes

Generated from the passes' docstrings by `llmc passes --markdown`; do not edit. `a → b` or `a -> b` is what stands in
the graph before and after. *Must have* is what is checked before a rewrite; a candidate that lacks it is left alone,
and `llmc explain MODEL` says why. Numerics: {numerics}. What a class allows is checked by `llmc diff MODEL` and
`llmc build --check-passes`. The last words about each pass are the verdict of `llmc prove`: whether what it rewrites is
the same over the reals. How to add one: [custom-passes.md](custom-passes.md).
"""
_GROUPS = (
    ("Canonical", "From aten, as torch.export returns it, to llmc:: ops over tokens.", canonical),
    ("Speculative", "Passes for drafting tokens, as `--speculative` asks.", speculative),
    (
        "Quantization",
        "Less of a model, zeros, codes: as `--prune`, `--sparsity`, `--quantize` ask.",
        quantization,
    ),
    (
        "Parallel",
        "A part of the weights or of the layers for each rank, as `--tensor-parallel-size` and "
        "`--pipeline-parallel-size` ask.",
        parallel,
    ),
    ("Serving", "From one whole sequence to a step of many requests.", serving),
    ("Draft heads", "Draft heads in addition to the logits, as `--speculative` asks.", draft_heads),
    ("Fusion", "Fewer trips to memory.", fusion),
    ("Adapters", "Adapters loaded at run time, as `--enable-lora` asks.", adapters),
)


def passes_page(verdicts: Mapping[str, str]) -> str:
    """docs/passes.md: every built-in pass in order; passes that share a file share a section.

    verdicts: of `llmc prove`, by the passes' names.
    """
    numerics = "; ".join(f"**{name}**, {meaning}" for name, meaning in _NUMERICS.items())
    order = " → ".join(each.name for _, _, members in _GROUPS for each in members())
    parts = [_HEAD.format(numerics=numerics), f"In order: {order}\n"]
    for title, summary, members in _GROUPS:
        parts.append(f"## {title}\n\n{summary}\n")
        parts += [section(list(group), verdicts) for _, group in groupby(members(), key=docstring)]
    return "\n".join(parts)


def docstring(each: Pass) -> str:
    """The docstring of the file that a pass is written in, or of its own function where the file has none."""
    function = each.replacement if isinstance(each, Rewrite) else each.run
    return (sys.modules[function.__module__].__doc__ or function.__doc__ or "").strip()


def section(passes: Sequence[Pass], verdicts: Mapping[str, str]) -> str:
    """Title, summary, before → after, numerics and verdicts of the passes of one file."""
    summary, _, rest = docstring(passes[0]).partition("\n")
    figures = "\n".join(
        f"- `{each.name}`: {'pattern' if isinstance(each, Rewrite) else 'whole graph'}, "
        f"numerics **{each.numerics.value}**, leaves stage {each.stage.value if each.stage else 'as it was'}; "
        f"{verdicts[each.name]}"
        for each in passes
    )
    title = ", ".join(each.name for each in passes)
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
    found: list[str] = []
    for line in block:
        head, colon, rest = line.partition(":")
        if colon and head in ("Must have", "Numerics", "Source", "Sources"):
            found += ["", f"*{head}*:{rest}"]
        else:
            found.append(line)
    return found[1:] if found and not found[0] else found
