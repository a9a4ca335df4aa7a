"""`python -m llmc` is the `llmc` command."""

from llmc.cli.app import run_process

if __name__ == "__main__":
    run_process()
