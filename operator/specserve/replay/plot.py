"""The picture of a replay: load, acceptance against break-even, and what the engine was to do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specserve.replay.play import Moment

_ON, _OFF, _TEXT, _LIGHT = "#e07a1f", "#2b6cb0", "#2a2f36", "#e6e9ed"


def draw(moments: Sequence[Moment], start: float, title: str, file: Path) -> None:
    """Draw decisions as PNG; needs matplotlib, the extra `plot`.

    Args:
        moments: The decisions.
        start: Seconds on the trace's clock that the picture counts from.
        title: What stands above it.
        file: Where to.
    """
    import matplotlib as mpl  # noqa: PLC0415 - only for a picture

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    settings: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
    }
    with mpl.rc_context(settings):
        figure, (load, accept, mode) = plt.subplots(
            3,
            1,
            figsize=(9, 6),
            dpi=150,
            layout="constrained",
            sharex=True,
            height_ratios=(2, 2, 1),
        )
        at = [moment.at - start for moment in moments]
        load.step(at, [moment.load for moment in moments], where="post", color=_TEXT, lw=1)
        load.set_ylabel("in flight")
        load.set_title(title, loc="left", fontsize=11)
        known = [(m.at - start, m.accept) for m in moments if m.accept is not None]
        accept.plot([t for t, _ in known], [a for _, a in known], color=_ON, label="acceptance")
        needed = [(m.at - start, value) for m in moments if (value := _break_even(m)) is not None]
        accept.plot(
            [t for t, _ in needed], [r for _, r in needed], color=_OFF, ls="--", label="break-even"
        )
        accept.set_ylabel("tokens per round")
        if known or needed:
            accept.legend(frameon=False, loc="upper right")
        steps = [0 if m.verdict.mode != "On" else 1 for m in moments]
        mode.fill_between(at, steps, step="post", color=_ON, alpha=0.7, lw=0)
        mode.set_yticks([0, 1], ["off", "on"])
        mode.set_xlabel("seconds")
        for axes in (load, accept):
            axes.grid(axis="y", color=_LIGHT, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.set_ylim(bottom=0)
        figure.savefig(file, format="png", facecolor="white")
        plt.close(figure)


def _break_even(moment: Moment) -> float | None:
    """Break-even of the deepest step count weighed."""
    found = [value for name, value in moment.verdict.numbers if name.startswith("breakEven@")]
    return found[-1] if found else None
