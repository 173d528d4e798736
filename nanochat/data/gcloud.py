"""Runs Google's command `gcloud`, whose login all of the project uses: for the mirror, and for data in a bucket."""
import os
import re
import signal
import subprocess

# What gcloud's error line says when trying again does not help: no permission, no such bucket, not logged in, not a
# bucket's name. Whatever else it says may be an outage.
_REFUSALS = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|HTTPError 40[0134]|does not have (permission|storage\.)|"
    r"not found: 404|bucket does not exist|invalid bucket|InvalidUrl|active account|(valid|invalid) credentials|"
    r"anonymous caller|reauthentication|invalid_grant|authentication scopes|billing", re.IGNORECASE)

_processes = set()  # that run now


def gcloud(*arguments, timeout_s):
    """Returns exit status, standard output and standard error of `gcloud …`. Raises OSError if it cannot be started,
    and TimeoutError if it has not ended after `timeout_s` seconds."""
    # In a session of its own: so its helpers can be ended with it, and Ctrl-C is for the script alone.
    process = subprocess.Popen(["gcloud", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    _processes.add(process)
    try:
        output, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"gcloud {' '.join(arguments[:2])} has not ended after {timeout_s} s") from None
    finally:
        _processes.discard(process)
        _kill(process)
    return process.returncode, output, said


def problem_in(said, status):
    """Returns what went wrong, of gcloud's standard error, and whether trying again cannot help."""
    problem = next((line for line in reversed(said.splitlines()) if "ERROR" in line), said.strip()[-200:])
    problem = problem.removeprefix("ERROR: ").removesuffix(".") or f"gcloud ended with status {status}"
    return problem, bool(_REFUSALS.search(problem))


def _kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_all():
    """Ends every gcloud that this process has started and that still runs."""
    for process in list(_processes):
        _kill(process)
