"""The constructions that docs.check_english holds at zero: a pattern, an example and a replacement for each."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RATED = (
    r"(?:tokens?|bytes?|steps?|bits?|blocks?|(?<!whose )(?<!a )rows?|launch(?:es)?|requests?|texts?|[kMGT]i?B|"
    r"seconds?|ms|µs|times?|values?|instructions?|operations?|scales?|codes?|one|once|twice|pages?|heads?|sums?|flops|weights?|kernels?)"
)
_RATE = (
    r"(?:second|minute|day|token|layer|step|request|row|block|rank|engine|code|weight|kernel|SM|group|head|sequence|launch|"
    r"byte|core|thread|model|file|call|channel|column|site|replica|GPU|device|processor|matrix|tile|line|draft|position|"
    r"batch|bucket|chunk|expert|stage|worker|process)"
)

_NOT_A_SHARE = "(?<!`x` )" + "".join(
    f"(?<!{share} )" for share in ("each", "one", "two", "both", "all", "some", "most", "none", "half")
)


@dataclass(frozen=True)
class EnglishPattern:
    """A construction that reads as a translation.

    Args:
        name: The short name that the checker prints.
        pattern: Matches the construction within one paragraph of prose.
        example: A sentence that the pattern catches.
        instead: What to write instead.
        allowed: A sentence that looks like it and is plain English, which the pattern must not catch.
        only_functions: Whether the pattern is for the beginning of functions' docstrings only.
        only_docstrings: Whether the pattern is for docstrings only, except those of kernels' folders.
    """

    name: str
    pattern: re.Pattern[str]
    example: str
    instead: str
    allowed: str | None = None
    only_functions: bool = False
    only_docstrings: bool = False


def _pattern(
    name: str,
    pattern: str,
    example: str,
    instead: str,
    allowed: str | None = None,
    *,
    only_functions: bool = False,
    only_docstrings: bool = False,
) -> EnglishPattern:
    return EnglishPattern(name, re.compile(pattern), example, instead, allowed, only_functions, only_docstrings)


PATTERNS = (
    _pattern(
        "sentence without a subject",
        r"(?:^|(?<=[.:!?] ))(?:Of|What|Who|Those|Whoever|Whose)\b(?![^.?]*\?)",
        "What no later token looks at is given back.",
        "name the thing: The scheduler frees blocks behind the window.",
    ),
    _pattern(
        "clause in place of a noun",
        r"\b(?:of|from|for|by|with|than|after|before|beside|without|into) (?:what|whom|those of which)\b"
        r"(?! (?:order|extent))",
        "the sum of what is left",
        "name the thing: the sum of the remaining bytes",
    ),
    _pattern(
        "of which",
        rf"{_NOT_A_SHARE}\bof (?:which|whom)\b",
        "a matrix of which the rows are codes",
        "whose, or two sentences",
    ),
    _pattern("so far", r"\bso far\b(?! (?:apart|from|away|as)\b)", "is not supported so far", "yet, until now"),
    _pattern(
        "is no",
        r"(?<!there )(?<!There )\b(?:is|are|was|were|be) no "
        r"(?!longer\b|more\b|less\b|worse\b|better\b|slower\b|faster\b|larger\b|smaller\b|different\b)",
        "a path that is no socket",
        "is not a socket",
    ),
    _pattern(
        "too, at the end",
        r", too\b(?! (?:few|many|much|large|small|long|short)\b)",
        "Windows work, too.",
        "also",
        allowed="more stalls, too few bytes in flight",
    ),
    _pattern("but for", r"\bbut for\b", "equal but for one element", "except"),
    _pattern(
        "as many",
        r"(?<!half )(?<!twice )(?<!times )\b[Aa]s many\b",
        "as many blocks as there are rows",
        "name the number: one block per row, at most `count` blocks",
    ),
    _pattern("so many", r"\b(?:in )?so many\b", "so many bytes at an address", "`count` bytes, this many bytes"),
    _pattern(
        "beside", r"\bbeside\b(?!:)", "llmc beside its peers", "alongside, next to, compared with, in addition to"
    ),
    _pattern("in turn", r"\bin turn\b", "measured in turn", "alternately, interleaved, one at a time"),
    _pattern("by hand", r"\bby hand\b", "measured by hand", "manually"),
    _pattern("one after the other", r"\bone after the other\b", "one after the other", "consecutively, sequentially"),
    _pattern("rate", rf"(?!once a rank)\b{_RATED} an? {_RATE}\b", "40 tokens a second", "per: 40 tokens per second"),
    _pattern(
        "code as a person",
        r"\b(?:[Nn]obody|[Ss]omebody|[Ww]hoever|[Aa]nybody|[Ww]ho (?:asks|waits|wants|needs|reads))\b|"
        r"\b(?:[Ff]or|to|of|by|from|with|[Aa]gainst) who\b",
        "Nobody asks for this block.",
        "name the caller: no request uses this block",
    ),
    _pattern("dear", r"\bdear(?:er|est|ly)?\b", "waking an event loop is dear", "expensive"),
    _pattern(
        "stands",
        r"\b(?:stands?|stood) (?:in|there|here|at|on|once|beside|before|behind|under|above|below|"
        r"still|between|apart|alone|around|somewhere|back|among|side)\b",
        "the figure stands in the table",
        "is, is listed, is stored, exists",
    ),
    _pattern("told", r"\b(?:is|are|be|was|were|been) told\b", "the rank is told of it", "is notified, is reported"),
    _pattern(
        "has not",
        r"\b(?:has|have|had) not (?:the|an?|its|their|what|enough|any|all|as|that|one|this)\b",
        "instructions that this processor has not the unit for",
        "lacks, does not have",
    ),
    _pattern(
        "superlative clause",
        r"\bat its (?:least|most)\b|\bat the most\b|\bthe (?:most|least|fewest) that\b",
        "8,192 tokens, the most that are taken",
        "maximum, minimum, limit",
    ),
    _pattern(
        "literal verb",
        r"\btaken? away\b|\bgoes? before\b|\bno such thing\b|\bis the matter\b|\bcomes? of\b|\bmend(?:s|ed)\b|"
        r"\banew\b|\bc[oa]mes? true\b|\b(?:kept|held) apart\b|\bgiven back\b|\breckon",
        "the 1 is taken away, and the draft came true",
        "subtract, take precedence, not one, the problem, result from, fix, again, accepted, held-out, freed, estimate",
    ),
    _pattern(
        "of its own",
        r"\bof (?:its|their|one's) own\b(?! \w)",
        "It runs in a process of its own.",
        "its own process, a separate process",
        allowed="a buffer of its own size",
    ),
    _pattern(
        "asked for",
        r"\b(?:is|are|was|were|be|been) asked for\b|\bas asked\b|\bas the option \S+ asks\b|\bkeeps? as asked\b",
        "only the rows that were asked for",
        "requested, needed, for the option `x`",
    ),
    _pattern(
        "wants",
        r"\b(?:kernel|graph|model|step|request|rank|op|cache|engine|template|backend|launch|that|which|one|tile)s? "
        r"wants?\b",
        "a step that wants logits",
        "needs, requires, expects",
    ),
    _pattern(
        "knows of",
        r"\b(?:have|has|had) heard\b|\bknows? (?:nothing )?of\b|\btaken for\b",
        "Columns of a state do not know of each other.",
        "are independent, is notified, counts as",
    ),
    _pattern(
        "goes on",
        r"\bgo(?:es)? on (?:from|in|with|at|where|behind)\b",
        "The request goes on with its rows.",
        "continues with, continues from",
    ),
    _pattern("thousand million", r"\bthousand millions?\b", "1.3 thousand million weights", "billion"),
    _pattern(
        "plural of one",
        r"(?<![\d.,])(?<!of )(?<!layer )(?<!\+ )\b1 (?:tokens|launches|rows|bytes|blocks|requests|weights|layers|"
        r"near-misses|ranks|steps|passes|files|processes|sequences|texts|columns|rewrites|nodes|kernels|engines|replicas)\b",
        "the prompt has 1 tokens",
        "1 token",
        allowed="the attention of layer 1 passes its own mask, for k + 1 rows",
    ),
    _pattern(
        "fragment in place of a function",
        r"^(?:How|By|In|Why|At|As|With|Without|Where|Which|Into|For|Until|Copied|Both|Another|Nothing|None|Never)\b",
        "How many blocks the cache gets.",
        "say what the function returns or does: Return the number of blocks of the cache.",
        allowed="Whether the request may start. None if it may.",
        only_functions=True,
    ),
    _pattern(
        "behind, for after",
        r"\b(?:tokens?|rows?|blocks?|caches|groups?|ones|begins?|starts?|queued|right|each|keys?|axes|nodes?|ops?|"
        r"bytes?|bits?|stages?|norms?) behind (?!the window\b|masks?\b)",
        "the groups of caches behind the first",
        "after",
        allowed="blocks behind the window are freed",
    ),
    _pattern(
        "none of",
        r"\b(?:is|are) none (?:of (?!that name\b)|that\b)",
        "a tensor that is none of this architecture's",
        "is not one of, does not belong to, no tensor that",
        allowed="CheckpointError if there is none of that name",
    ),
    _pattern("None where", r"\bNone where\b", "the directory; None where there is no cache", "None if"),
    _pattern("not there", r"\b(?:is|was|were) not there\b", "if the file is not there", "does not exist, is missing"),
    _pattern(
        "looked at",
        r"\b(?:is|are|was|were|be|been) looked at\b|(?:^|(?<=[.:!?] ))Looked at\b|"
        r"\b[Ll]ooks? at (?:its?|them|their|some|inputs)\b",
        "The next candidate is looked at.",
        "is examined, is checked, is read",
    ),
    _pattern(
        "vague verb",
        r"\b(?:can|may|could) be had\b|\blets? go of\b|\bof no use\b|\band the like\b",
        "a rank that is of no use any more, and the like",
        "is available, releases, is not needed, and similar ones",
    ),
    _pattern(
        "argument without a noun",
        r"\b\w+: [Oo]f\b",
        "Gather rows. rows: of the table.",
        "name the noun: rows: rows of the table",
        allowed="rows: rows of the table. The result: one of them.",
        only_docstrings=True,
    ),
    _pattern(
        "the same of",
        r"\bthe same of\b",
        "logit_rows: [L], the same of the wanted rows.",
        "the same for",
        allowed="The same holds for the wanted rows; all are of the same type.",
        only_docstrings=True,
    ),
    _pattern(
        "as of",
        r"\b[Aa]s of (?!(?:the|an?|its|this|that|today|now|version)\b|\d)",
        "Arguments as of sum_attention.",
        "The arguments are those of sum_attention; see sum_attention",
        allowed="Restore the states as of the end of the last block.",
        only_docstrings=True,
    ),
)
