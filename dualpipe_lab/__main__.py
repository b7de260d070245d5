"""The command line: `python -m dualpipe_lab --help`."""

from dualpipe_lab.cli.app import main

if __name__ == "__main__":
    main()
