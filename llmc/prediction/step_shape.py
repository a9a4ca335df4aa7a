"""How large a step is: what cost expressions are evaluated for. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """The numbers of one step: tokens, logit rows, requests, cached rows read and query-key pairs scored."""

    tokens: int
    logit_rows: int
    requests: int
    context: int
    pairs: int

    @staticmethod
    def decode(requests: int, context: int) -> "StepShape":
        """Return the shape of a decode step: one token per request, and `context` cached positions each."""
        return StepShape(requests, requests, requests, requests * context, requests * context)

    @staticmethod
    def prefill(tokens: int) -> "StepShape":
        """The whole prompt of one request, which needs the last token's logits."""
        return StepShape(tokens, 1, 1, tokens, tokens * (tokens + 1) // 2)

    def values(self) -> dict[str, float]:
        """The sizes by symbol, for `evaluate_expression`."""
        return {"T": self.tokens, "L": self.logit_rows, "R": self.requests, "C": self.context, "A": self.pairs}
