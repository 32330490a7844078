"""`python -m specserve.local`: the command where the package is on the path and not installed."""

import argparse
import sys
from collections.abc import Sequence

from specserve.local import command


def main(argv: Sequence[str]) -> int:
    """Run `specserve local` with these arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="specserve")
    command.add_parser(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(["local", *argv])
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
