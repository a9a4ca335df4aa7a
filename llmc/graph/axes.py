"""The axes of an op's arguments and result by name: one notation for ops' records and for tables of kernels.

    x[* i] weight[o i] bias[o] -> [* o]          a product: i is summed over, o is the weight's and the result's
    x[* c!] weight[c!] -> [* c!]                 a norm: it needs all of c
    x[* c~] weight[c] -> [* c]                   one whose sum of squares over c can be put together from parts
    q[t g*h d!] k[t g d!] v[t g e!] -> [t g*h e!]  attention: each of the g KV heads is read by h query heads, in order
    x[i] weight[e:o i] -> [o]                    a product with one of e weights stored consecutively
    x[tokens | groups? channels] cos[_ | half]   a kernel: rows of two axes or one, and what it calls their sizes

The same name is the same axis everywhere in a rule. `!`: the op needs the whole axis and cannot work on a part. `g*h`:
an axis of g runs of h; `g*s*i`: one of g runs of s runs of i. `e:o`: an axis of e runs, each with the axis o. `*`
alone: any leading axes, equal in arguments and result. `|`: the axis in front of it counts rows, whose number depends
on the step. `?`: the axis is optional. `c*`: all remaining axes together. `_`: an axis without a constraint.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TENSOR = re.compile(r"(\w*)\[([^\]]*)\]")


@dataclass(frozen=True)
class Axis:
    """An axis in an op's rule. letter: the name of the axis, or of the runs that it is made of. inner: what the runs
    are made of, from the outer to the inner one: `h` of `g*h`. repeats: whether it is `e:o`, whose letter is o. whole,
    squares, optional, rest, rows: `!`, `~`, `?`, `c*`, `|`."""

    letter: str
    inner: tuple[str, ...] = ()
    repeats: bool = False
    whole: bool = False
    squares: bool = False
    optional: bool = False
    rest: bool = False
    rows: bool = False

    @property
    def levels(self) -> tuple[str, ...]:
        """The letters of the axis from the outer to the inner one."""
        return (self.letter, *self.inner)


@dataclass(frozen=True)
class AxisRule:
    """By argument name the axes from the last one backwards, as far as they are named, and those of the result.

    leading: the arguments whose axes in front are the result's.
    """

    arguments: Mapping[str, tuple[Axis, ...]]
    result: tuple[Axis, ...]
    leading: tuple[str, ...]

    def is_summed(self, letter: str) -> bool:
        """Whether the result is a sum over parts of that axis."""
        return letter not in {axis.letter for axis in self.result}


def axis_rule(text: str) -> AxisRule:
    """The rule of an op: which axes belong together, as cutting a model into ranks needs it."""
    before, _, after = text.partition("->")
    ((_, result),) = _TENSOR.findall(after)
    leading = tuple(name for name, inside in _TENSOR.findall(before) if inside.startswith("*"))
    backwards = {name: axes[::-1] for name, axes in tensor_axes(before).items()}
    return AxisRule(backwards, _axes(result)[::-1], leading)


def tensor_axes(text: str) -> Mapping[str, tuple[Axis, ...]]:
    """The named axes of each tensor, in order."""
    return {name: _axes(inside) for name, inside in _TENSOR.findall(text)}


def ranks_of(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    """Return the numbers of axes that a tensor may have; with `c*` as the last also more."""
    return tuple(range(sum(not axis.optional for axis in axes), len(axes) + 1))


def fits(rank: int, axes: tuple[Axis, ...]) -> bool:
    """Whether a tensor of this rank matches."""
    return rank in ranks_of(axes) or (rank > len(axes) and axes[-1].rest)


def _axes(text: str) -> tuple[Axis, ...]:
    before, mark, after = text.rpartition("|")
    words = [(word, bool(mark)) for word in before.split()] + [(word, False) for word in after.split() if word != "*"]
    return tuple(
        Axis(
            word.rstrip("!~?").partition("*")[0].rpartition(":")[2],
            inner=tuple(word.rstrip("!~?*").split("*")[1:]),
            repeats=":" in word,
            whole=word.endswith("!"),
            squares=word.endswith("~"),
            optional=word.endswith("?"),
            rest=word.endswith("*"),
            rows=is_rows,
        )
        for word, is_rows in words
    )
