"""The page of `llmc report`: one HTML file that needs nothing else."""
