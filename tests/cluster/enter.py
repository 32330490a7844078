"""Runs a command in the network, mount and PID namespace of a process.

Run as a script: enter.py PID FOLDER COMMAND... Unlike nsenter it keeps the working folder, passes
signals on and takes the command along when it is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PASSED_ON = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


def main() -> None:
    """Enters, runs the command, and exits as it does."""
    target, folder, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(int(target)), _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWPID):
        sys.exit(f"entering the namespaces of {target}: {os.strerror(ctypes.get_errno())}")
    watched = _PASSED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            os.chdir(folder)
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]}: {error.strerror}\n")
            os._exit(127)
    while True:
        received = signal.sigwaitinfo(watched)
        if received.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                sys.exit(code if code >= 0 else 128 - code)
        elif received.si_code <= 0:
            # Sent by a process; what a terminal sends went to the command as well.
            os.kill(child, received.si_signo)


if __name__ == "__main__":
    main()
