"""A plot of the divisions of ranks: tokens per second against the waiting time of users."""

from pathlib import Path

from llmc.bench.plot import require_plot_extra
from llmc.errors import OptionError
from llmc.simulation.compare import Comparison

_BEST, _OTHER, _TTFT, _TPOT = "#4f46e5", "#a5b4fc", "#0d9488", "#d97706"


def plot_comparison(comparison: Comparison, path: Path, title: str) -> None:
    """Write the picture in the format of its suffix. Raises OptionError if it cannot be written."""
    require_plot_extra()
    from matplotlib.figure import Figure

    served, best = comparison.served, comparison.best
    names = [str(outcome.division) for outcome in served]
    places = range(len(served))
    figure = Figure(figsize=(11, 1.4 + 0.42 * max(3, len(served))), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    throughputs = [outcome.summary.output_throughput for outcome in served]
    left.barh(places, throughputs, color=[_BEST if outcome is best else _OTHER for outcome in served])
    for place, value in zip(places, throughputs, strict=True):
        left.text(value, place, f" {value:.0f}", va="center", fontsize=8)
    left.set(xlabel="output tokens per second", yticks=list(places), yticklabels=names, title="throughput")
    left.margins(x=0.12)
    left.invert_yaxis()
    for offset, (name, label, color) in enumerate(
        (("ttft", "time to first token", _TTFT), ("tpot", "time per output token", _TPOT))
    ):
        at = [place - 0.15 + 0.3 * offset for place in places]
        median, late = ([outcome.percentile(name, share) for outcome in served] for share in (0.5, 0.99))
        right.hlines(at, median, late, color=color, lw=2, alpha=0.6)
        right.scatter(median, at, color=color, s=24, label=f"{label}: median to 99th percentile")
    right.set(xscale="log", xlabel="milliseconds", title="latency")
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise OptionError(f"the plot cannot be written: {error}", at=path, fix="name a .png, .svg or .pdf") from None
