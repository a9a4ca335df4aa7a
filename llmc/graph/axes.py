"""Which axes of an op's arguments and result belong together, in letters: what cutting a model into ranks needs.

    x[* i] weight[o i] bias[o] -> [* o]          a product: i is summed over, o is the weight's and the result's
    x[* c!] weight[c!] -> [* c!]                 a norm: it needs all of c
    x[* c~] weight[c] -> [* c]                   one whose sum of squares over c can be put together from parts
    q[t g*h d!] k[t g d!] v[t g e!] -> [t g*h e!]  attention: each of the g KV heads is read by h query heads, in order
    x[i] weight[e:o i] -> [o]                    a product with those of many weights that lie one after the other

A letter is one axis, the same wherever it stands. `!`: the op needs the whole axis, and no part of it alone. `g*h`:
an axis of g runs of h. `e:o`: an axis of e runs, each of which is o. `*`: any axes in front, the same of arguments and
result. Others have none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TENSOR = re.compile(r"(\w*)\[([^\]]*)\]")


@dataclass(frozen=True)
class Axis:
    """letter: of the axis, or of the runs that it is made of. run: whether it is `g*h`. repeats: whether it is `e:o`,
    whose letter is o. whole, squares: `!`, `~`."""

    letter: str
    run: bool = False
    repeats: bool = False
    whole: bool = False
    squares: bool = False


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
    """The rule of a text as above."""
    before, _, after = text.partition("->")
    found: list[tuple[str, str]] = _TENSOR.findall(before)
    ((_, result),) = _TENSOR.findall(after)
    leading = tuple(name for name, inside in found if inside.startswith("*"))
    return AxisRule({name: _axes(inside) for name, inside in found}, _axes(result), leading)


def _axes(text: str) -> tuple[Axis, ...]:
    words = [word for word in text.split() if word != "*"]
    return tuple(
        Axis(
            word.rstrip("!~").partition("*")[0].rpartition(":")[2],
            "*" in word,
            ":" in word,
            word.endswith("!"),
            word.endswith("~"),
        )
        for word in reversed(words)
    )
