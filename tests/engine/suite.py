"""The contract suite, run against an engine that is up already."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from tests.engine.install import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.client import Address

SECONDS = 300


async def contract(address: Address, report: Path, *extra_paths: Path) -> dict[str, object]:
    """Run the suite on an engine.

    Args:
        address: The engine.
        report: Where pytest writes what became of each case; an absolute path.
        extra_paths: Folders with packages that this interpreter lacks.

    Returns:
        How many cases passed and failed, and the names of the latter.

    Raises:
        RuntimeError: The suite itself did not run.
    """
    paths = [REPOSITORY / "images/engine", REPOSITORY / "images/sim", REPOSITORY, *extra_paths]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
        "tests/contract/test_directives.py",
        f"--junitxml={report}",
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Plugins that happen to be installed on a host need not suit this pytest.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "SPECSERVE_ENGINE_URL": address.admin_url,
            "SPECSERVE_ENGINE_TOKEN": address.token,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except FileNotFoundError:
        text = output.decode(errors="replace")[-3000:]
        raise RuntimeError(f"the suite did not run:\n{text}") from None
    failed = [
        case.attrib["name"]
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"passed": len(cases) - len(failed), "failed": len(failed), "names": failed}
