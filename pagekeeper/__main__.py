"""`python -m pagekeeper` is the `pagekeeper` command."""

from pagekeeper.cli.main import main

if __name__ == "__main__":
    main()
