"""`python -m llmc` is the `llmc` command."""

from llmc.cli.app import main

if __name__ == "__main__":
    main()
