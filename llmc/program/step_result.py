"""The shape of a step's result: logits, or the rows that a pipeline stage hands over to the next one; fp32."""

from llmc.program.program import Program


def result_columns(program: Program) -> int:
    """Return the number of columns of a step's result.

    Args:
        program: The program of a stage.

    Returns:
        The width of the rows for the next stage, or the size of the vocabulary.
    """
    return program.hands_over or program.vocab_size


def result_rows(program: Program, tokens: int, logit_rows: int) -> int:
    """Return the number of rows of a step's result.

    Args:
        program: The program of a stage.
        tokens: Number of the step's tokens.
        logit_rows: Number of rows that the step needs logits of.

    Returns:
        One row per token for the next stage, or `logit_rows`.
    """
    return tokens if program.hands_over else logit_rows


def largest_result(program: Program) -> tuple[int, int]:
    """Return the shape of the result of the largest step.

    Args:
        program: The program of a stage.

    Returns:
        Numbers of rows and columns.
    """
    limits = program.limits
    return result_rows(program, limits.max_batch_tokens, limits.max_logit_rows), result_columns(program)


def result_in_words(program: Program) -> str:
    """Return what a step's result is, for errors: "logits" or "rows for the next stage"."""
    return "rows for the next stage" if program.hands_over else "logits"
