"""What can go wrong while a cluster is prepared, started or used."""

from __future__ import annotations


class ClusterError(RuntimeError):
    """A step failed; says which, and what the user can do about it.

    Attributes:
        step: the step that failed, as in "building the Kubernetes binaries".
        remedy: what to install, set or look at; may be empty.
    """

    def __init__(self, step: str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{step}: {problem}" + (f"\n{remedy}" if remedy else ""))
        self.step = step
        self.remedy = remedy


class CommandError(ClusterError):
    """A command that had to succeed did not; carries its exit status and output."""

    def __init__(self, argv: list[str], returncode: int, stdout: str, stderr: str) -> None:
        output = (stderr or stdout).strip()[-4000:]
        super().__init__(" ".join(argv)[:300], f"exit status {returncode}", output)
        self.argv = argv
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
