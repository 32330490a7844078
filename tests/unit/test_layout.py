"""The shape of the repository that other things lean on."""

from pathlib import Path

from specserve import names, schema

ROOT = Path(__file__).parents[2]


def test_the_operator_folder_is_no_package():
    """It would shadow the standard library's `operator`, and Python would not start here."""
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert (ROOT / "operator" / "specserve" / "__init__.py").exists()


def test_the_crd_is_what_the_models_say(capsys):
    path = ROOT / "crds" / f"{names.GROUP}_{names.PLURAL}.yaml"
    assert schema.main(["--check", "--output", str(path)]) == 0, capsys.readouterr().out


def test_nothing_else_lies_beside_the_crd():
    """`kubectl apply -f crds/` must install exactly this."""
    assert [path.name for path in (ROOT / "crds").iterdir()] == [
        f"{names.GROUP}_{names.PLURAL}.yaml"
    ]
