"""The shape of a step's result: logits, or the rows that a pipeline stage hands over to the next one; fp32."""

from llmc.program.program import Program


def result_columns(program: Program) -> int:
    """Return the number of columns of a step's result."""
    return program.hands_over or program.vocab_size


def result_rows(program: Program, tokens: int, logit_rows: int) -> int:
    """Return the number of rows of the result of a step with these counts."""
    return tokens if program.hands_over else logit_rows


def largest_result(program: Program) -> tuple[int, int]:
    """Return the rows and columns of the result of the largest step."""
    limits = program.limits
    return result_rows(program, limits.max_batch_tokens, limits.max_logit_rows), result_columns(program)
