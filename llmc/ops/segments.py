"""llmc::segments — which text of a pair each token belongs to; llmc::segments_of_texts does this for a step's pairs.

    segments(ids)[t] = min(number of separators before t, count - 1)
BERT's `[CLS] a [SEP] b [SEP]` has the segments 0 0 0 1 1: the segments that tokenizers return follow from the ids.
"""

from itertools import pairwise

from torch import Tensor

from llmc.ops.registry import FROM_SERVING, UNTIL_SERVING, like, op, per_element


def _of_pair(ids: Tensor, separator: int, count: int) -> Tensor:
    ends = ids == separator
    return (ends.cumsum(0) - ends.long()).clamp(max=count - 1).to(ids.dtype)


@op(fake=like("ids"), stages=UNTIL_SERVING, flops=per_element(1))
def segments(ids: Tensor, separator: int, count: int) -> Tensor:
    """The segments of one pair. ids: [tokens], whole numbers; separator: a token id. Returns [tokens] in the dtype of
    ids."""
    return _of_pair(ids, separator, count)


@op(fake=like("ids"), stages=FROM_SERVING, flops=per_element(1))
def segments_of_texts(ids: Tensor, query_starts: Tensor, separator: int, count: int) -> Tensor:
    """The segments of concatenated pairs: the tokens of pair r are query_starts[r]:query_starts[r + 1], int32."""
    out = ids.new_zeros(ids.shape)
    for begin, end in pairwise(query_starts.tolist()):
        out[begin:end] = _of_pair(ids[begin:end], separator, count)
    return out
