"""A cache policy from outside whose tables hold what nobody can compute again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tests.cache_policies.every_other_block import EveryOtherBlock


@dataclass(frozen=True)
class OneWay(EveryOtherBlock):
    """EveryOtherBlock, as if what leaves had been chosen by what a step alone has seen."""

    NAME: ClassVar[str] = "one_way"

    @property
    def recomputes(self) -> bool:
        return False
