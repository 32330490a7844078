"""The regret benchmark: what each strategy loses against the better arm held; see `__main__`."""

from tests.bench.regret.draw import plot
from tests.bench.regret.show import TITLE, render, tables

__all__ = ["TITLE", "plot", "render", "tables"]
