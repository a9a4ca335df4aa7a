"""Reports on builds and engines: coverage, placements, the explanation, and the page of `llmc report`."""
