"""Accept what is rendered now: `python -m tests.golden.update`, then read the diff in git."""

from tests.golden.render import EXPECTED, cases, rendered

if __name__ == "__main__":
    EXPECTED.mkdir(exist_ok=True)
    known = cases()
    for stale in {path.stem for path in EXPECTED.glob("*.yaml")} - known.keys():
        (EXPECTED / f"{stale}.yaml").unlink()
    for name, path in known.items():
        (EXPECTED / f"{name}.yaml").write_text(rendered(path), encoding="utf-8")
