"""`llmc report`: what a build did and what its engine costs, as one HTML page that needs nothing else."""
