"""A plugin of pytest: before the tests, docs/passes.md is made anew beside the package that they look at.

As `llmc passes --markdown` makes it, but for verdicts that the page has already.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.codegen.package_copy import ROOT

PAGE = Path("docs") / "passes.md"


def pytest_sessionstart() -> None:
    """The pass that is new is proved."""
    # What imports Triton comes after conftest.py.
    import llmc
    from llmc.debug.prove.verdict import prove
    from llmc.passes.catalog import passes_page
    from llmc.passes.pipeline import built_in

    known = dict(re.findall(r"^- `(\w+)`: .*?; (.*)$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE))
    own = Path(llmc.__file__).parent.parent / PAGE
    own.parent.mkdir(exist_ok=True)
    verdicts = {pass_.name: known.get(pass_.name) or str(prove(pass_)) for pass_ in built_in()}
    own.write_text(passes_page(verdicts), encoding="utf-8")
