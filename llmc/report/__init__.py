"""What a build did and what its engine costs: coverage, placements, the explanation, and the page of `llmc report`."""
