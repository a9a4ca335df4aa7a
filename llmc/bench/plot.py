"""Plots of a run: tokens per second over time, and the distribution of latencies."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from llmc.bench.request_record import RequestRecord
from llmc.bench.summary import LATENCIES
from llmc.errors import OptionError

_OUT, _IN = "#4f46e5", "#0d9488"


def require_plot_extra() -> None:
    """Raise OptionError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise OptionError(
            "a plot needs matplotlib, which is not installed", at="--plot", fix="pip install 'llmc-compiler[plot]'"
        )


def plot_run(records: Sequence[RequestRecord], path: Path, title: str) -> None:
    """Write the picture in the format of its suffix. Raises OptionError if it cannot be written."""
    require_plot_extra()
    from matplotlib.figure import Figure

    done = [r for r in records if r.error is None and r.pieces]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    start = min((r.sent for r in done), default=0.0)
    pieces = sorted(piece - start for r in done for piece in r.pieces)
    bins = max(1, min(120, int(pieces[-1] / 0.25) + 1)) if pieces else 1
    width = pieces[-1] / bins if pieces else 1.0
    scale = sum(r.output_tokens for r in done) / len(pieces) / width if pieces and width else 0.0
    left.hist(pieces, bins=bins, weights=[scale] * len(pieces), color=_OUT, alpha=0.85)
    left.set(xlabel="seconds", ylabel="output tokens per second", title="throughput")
    for name, color in (("ttft", _IN), ("tpot", _OUT), ("e2el", "#d97706")):
        ordered = sorted(1e3 * seconds for r in done for seconds in r.seconds(name))
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        right.step(ordered, shares, where="post", label=LATENCIES[name], color=color)
    right.set(xscale="log", xlabel="milliseconds", ylabel="share of requests", title="latency")
    right.set_ylim(0, 1.25)
    right.legend(frameon=False, ncols=3, loc="upper center")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise OptionError(f"the plot cannot be written: {error}", at=path, fix="name a .png, .svg or .pdf") from None
