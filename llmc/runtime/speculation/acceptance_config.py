"""The part of --speculative-config that selects which drafts are accepted."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from llmc.errors import OptionError
from llmc.runtime.speculation.config_values import OPTION, check_value, number

# The one draft_sample_method.
_DRAWN = "probabilistic"


class AcceptanceMethod(Enum):
    """INVARIANT: drafts that would have been drawn, so that answers do not depend on drafts. REJECTION: exact in
    distribution. TYPICAL: lossy."""

    INVARIANT = "invariant"
    REJECTION = "rejection"
    TYPICAL = "typical"


@dataclass(frozen=True, kw_only=True)
class AcceptanceConfig:
    """The rule by which drafts are accepted. method: `rejection_sample_method`. posterior_threshold, posterior_alpha:
    for TYPICAL, as in Medusa."""

    method: AcceptanceMethod = AcceptanceMethod.INVARIANT
    posterior_threshold: float = number(0, 1, 0.09)
    posterior_alpha: float = number(0, 1000, 0.3)


def take_acceptance(values: dict[str, Any]) -> AcceptanceConfig:
    """Remove the keys for acceptance from the values and parse them. Raises OptionError."""
    _check_draft_sample_method(values)
    name = values.pop("rejection_sample_method", AcceptanceMethod.INVARIANT.value)
    names = [method.value for method in AcceptanceMethod]
    if name not in names:
        raise OptionError(
            f"rejection_sample_method cannot be {name!r:.80}", at=OPTION, fix=f"give one of {', '.join(names)}"
        )
    settings: dict[str, Any] = {}
    for field in fields(AcceptanceConfig):
        if field.metadata and field.name in values:
            settings[field.name] = values.pop(field.name)
            check_value(field, settings[field.name])
            if name != AcceptanceMethod.TYPICAL.value:
                raise OptionError(
                    f"{field.name} applies to the rejection_sample_method 'typical', not to {name!r}",
                    at=OPTION,
                    fix='add "rejection_sample_method": "typical", which changes answers, or leave it out',
                )
    return AcceptanceConfig(method=AcceptanceMethod(name), **settings)


def check_reproducible(config: AcceptanceConfig) -> None:
    """Raises OptionError if the draws of a seed depend on load, for callers that cache such answers."""
    if config.method is not AcceptanceMethod.INVARIANT:
        raise OptionError(
            f"answers to seeds depend on load with the rejection_sample_method {config.method.value!r}, and "
            "output_cache_bytes keeps them",
            at=OPTION,
            fix="leave out rejection_sample_method, which is then 'invariant', or output_cache_bytes",
        )


def _check_draft_sample_method(values: dict[str, Any]) -> None:
    """Models draw as requests do, which vLLM calls probabilistic."""
    chosen = values.pop("draft_sample_method", _DRAWN)
    if chosen != _DRAWN:
        raise OptionError(
            f"draft_sample_method cannot be {chosen!r:.80}",
            at=OPTION,
            fix=f"set {_DRAWN!r} or leave it out: drafts are drawn with the request's own parameters and noise",
        )
