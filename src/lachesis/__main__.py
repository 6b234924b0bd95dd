"""`python -m lachesis` is the command line."""

from lachesis.services.cli import main

if __name__ == "__main__":  # worker processes import the main module again, under another name
    main()
