"""What watch.sh does next: a function of what it knows and of what it has just seen. Nothing is done here."""
import re
from dataclasses import replace
from typing import NamedTuple

GONE = ("PREEMPTED", "TERMINATED", "STOPPED")  # states in which nobody can reach the VM's disk any more
MIRROR_BEHIND_S = 600  # a mirror that is behind for longer is reported


class Seen(NamedTuple):
    """One look at the VM."""
    state: str  # the API's, "absent", or "unknown" for the reason `error`
    health: str = ""
    type: str = ""
    is_spot: bool = True
    run: dict | None = None  # what the VM itself says of its newest run; None: no answer, for the reason `error`
    error: str = ""
    is_permanent: bool = False  # no waiting mends the error
    is_ours: bool = True  # False: this machine has no memory of its creation


def decide(settings, state, seen):
    """Returns the Tries that follow, and what is to be done: methods of Loop, each as (name, arguments …)."""
    tries, vm = replace(state.tries), state.vm
    if seen.state == "unknown":
        return tries, _unsure(settings, state, tries, seen)
    if text := not_asked_for(settings, seen):
        return tries, [("end", 2, text)]
    tries.refusals = 0
    actions = [("condition", "lookup", "")]
    if seen.state == "absent":
        actions += _without_vm(tries)
    elif seen.state == "READY":
        tries.settling = tries.pending = 0
        actions += _with_vm(settings, vm, tries, seen)
    elif seen.state == "STOPPED" and not settings.spot:
        actions += [("end", 1, f"giving up: somebody stopped {settings.name}. It is kept: delete.sh {settings.name}")]
    elif seen.state in GONE:
        actions += [("replace", seen.state)]
    else:
        tries.pending += 1
        if tries.pending >= 3 * settings.patience:
            actions += [("replace", f"{seen.state} for {3 * settings.patience} polls")]
    return tries, actions


def not_asked_for(settings, seen):
    """Returns why a VM of this name is not the one that is asked for, or ""."""
    if not seen.is_ours:
        return (f"{settings.name} exists, and was not created from this machine: it may be somebody else's. Give "
                f"another name, or, if it is yours, delete.sh {settings.name}")
    if seen.state in ("absent", "unknown") or (seen.type, seen.is_spot) == (settings.type, settings.spot):
        return ""
    return (f"{settings.name} exists as {seen.type}, spot: {seen.is_spot}. Give its --type and --on_demand, or another "
            "name")


def _unsure(settings, state, tries, seen):
    """gcloud gave no answer. The run may go on nevertheless."""
    if seen.is_permanent and not state.vm.exists and not state.creating:
        tries.refusals += 1
        if tries.refusals >= 2:
            return [("end", 1, f"giving up: {seen.error}")]
    mirror = _mirror(state.vm, seen.run) if seen.run else []
    return [("condition", "lookup", f"cannot tell the state of {settings.name}; waiting: {seen.error}"), *mirror]


def _without_vm(tries):
    if tries.settling:
        tries.settling -= 1
        return [("note", f"a creation was interrupted; waiting whether it made a VM ({tries.settling} more checks)")]
    if tries.hold > 0:
        tries.hold -= 1
        return []
    return [("create",)]


def _with_vm(settings, vm, tries, seen):
    """The run counts for more than what gcloud says of the VM's health."""
    unhealthy = "" if seen.health == "HEALTHY" else f"unhealthy: {seen.health}"
    if seen.run is None:
        return [("trouble", unhealthy or f"no answer from the VM: {seen.error}")]
    state, steps = seen.run["state"], seen.run.get("steps") or "none"
    if seen.run.get("run") != settings.run:
        if state == "running":
            return [("condition", "other run", f"another run is running: {seen.run.get('run')}")]
        state = "none"
    is_stuck = state == "running" and number(seen.run.get("log_age_s")) >= settings.stall_s
    if unhealthy and (is_stuck or state not in ("running", "ended")):
        return [("trouble", unhealthy)]
    actions = [("condition", "health", f"{unhealthy}, but the run goes on" if unhealthy else ""),
               ("condition", "kept", ""), *_mirror(vm, seen.run)]
    if is_stuck:
        return actions + _crashed(f"hangs: no line in its log for {seen.run['log_age_s']} s,", tries, seen.run)
    if state == "running":
        tries.troubles = tries.futile = 0
        actions += [("show", f"running, step {steps}")]
        return actions if vm.has_limit else [*actions, ("set_limit",)]
    if state == "none":
        return actions + [("prepare",)]
    if state == "orphans":
        return actions + [("note", "the run has ended, but some of its processes still run"), ("end_processes",)]
    if state != "ended":
        return actions + _crashed(state, tries, seen.run)
    status = seen.run.get("exit", "")
    if status == "0":
        return actions + [("condition", "finished", f"finished: step {steps}"), ("finish",)]
    if status == "2":
        return actions + [("give_up", f"the run does not accept its flags{_because(seen.run)}")]
    if unhealthy:
        return actions + [("trouble", unhealthy)]
    if status == "75":
        return actions + [("note", f"the run saved its state and ended at step {steps}: starting it again"),
                          ("restart",)]
    return actions + _crashed(f"ended {status}", tries, seen.run)


def _crashed(how, tries, run):
    """The run is started again, unless it ended three times without getting further."""
    steps = run.get("steps", "")
    step = number(steps.partition("/")[0])
    if step > tries.furthest:
        tries.furthest, tries.crashes = step, 0
    tries.crashes += 1
    note = ("note", f"the run {how} at step {steps or 'none'} ({tries.crashes} of 3){_because(run)}")
    if tries.crashes >= 3:
        return [note, ("give_up", f"it ended three times and got no further than step {tries.furthest}")]
    return [note, ("restart",)]


def _mirror(vm, run):
    """Until a mirror that is behind has caught up, the newest checkpoint is on the VM's disk alone."""
    error, text = run.get("mirror_error", ""), ""
    if vm.checkpoint and (error or is_behind(run)):
        text = (f"the mirror is behind: it has {vm.mirrored or 'no checkpoint'}, the VM's disk alone has "
                f"{vm.checkpoint}{error and f' ({error})'}")
    return [("condition", "mirror", text)]


def is_behind(run):
    """Returns whether the mirror is behind for long, by what the VM says of its run."""
    return number(run.get("mirror_behind_s")) >= MIRROR_BEHIND_S


def number(text):
    """Returns the whole number of at most 15 digits that a text is, or 0."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text or "") else 0


def _because(run):
    """Returns the last error in the run's log, as the end of a line, or ""."""
    return f": {run['error']}" if run.get("error") else ""
