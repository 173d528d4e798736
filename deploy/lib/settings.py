"""The settings of deploy/: their names and forms, config.env, and flags.

    python3 deploy/lib/settings.py "MORE SETTINGS" FLAGS …

prints, as assignments for the shell, what config.env and the flags of a script set. ARGS gets the other words, FLAGS
all words after --, GIVEN the names that were given as flags, NAMES those of all settings of the script. config.env is
read, and never run.
"""
import difflib
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

NUMBER = r"[0-9]{1,9}(\.[0-9]{1,9})?", "a number of 0 or more with at most 9 digits"
WHOLE = r"[0-9]{1,9}", "a whole number with at most 9 digits"
YES_NO = r"(?i:1|yes|true|on|0|no|false|off)", "1 for yes or 0 for no"
ZONES = r"[a-z][a-z0-9-]*-[a-z](,[a-z][a-z0-9-]*-[a-z])*", "a list of zones, such as us-west4-a,us-west4-b"
WORD, PATH, URL = (r"[^\s\"\\]+", "one word"), (r"[^\n\0]+", "a path"), (r"https?://[^\s\"\\]+", "https://…")
COMMON = {  # of all scripts
    "PROJECT": (r"([a-z0-9.-]+:)?[a-z][a-z0-9-]*", "a project's ID: small letters, digits and -"),
    "ACCOUNT": (r"[A-Za-z0-9@._+-]+", "an account that gcloud auth list names"),
    "ZONES": ZONES,
    "NAME": (r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "a VM's name: small letters, digits and -, 63 at most"),
    "TYPE": (r"[a-z0-9]+-[0-9]{1,5}", "a TPU type, such as v5litepod-8 or v6e-4"),
    "BUCKET": (r"gs://[^\s\"\\]+", "gs://…"),
    "SSH_USER": (r"[A-Za-z0-9_][A-Za-z0-9_.-]*", "a user's name"),
    "SSH_KEY": PATH,
    "WANDB_PROJECT": WORD,
    "WANDB_KEY_FILE": PATH,
    "ON_DEMAND": YES_NO,
    "USD_PER_HOUR": NUMBER,
    "WORKER": (r"all|[0-9]{1,4}", "all, or a worker's number"),
    "WAIT_S": WHOLE,
    "POLL_S": NUMBER,
    "SSH_TIMEOUT_S": WHOLE,
    "INTERNAL_IPS": YES_NO,
}
OWN = {  # of one script or of some
    "AGAIN": YES_NO, "ALL": YES_NO, "DRY_RUN": YES_NO, "KILL": YES_NO, "NO_CHECKPOINTS": YES_NO,
    "NO_TOKENIZER": YES_NO, "YES": YES_NO,
    "MARGIN_S": WHOLE, "MIN_FREE_GB": WHOLE, "PATIENCE": WHOLE, "STALL_S": WHOLE, "TAIL": WHOLE,
    "MAX_HOURS": NUMBER, "MAX_USD": NUMBER,
    "TO": PATH,
    "VM_ID": (r"[A-Za-z0-9_-]+", "a VM's id"), "VM_IPS": WORD, "WHAT": WORD,
}
CONFIG_ONLY = {"WEBHOOK": URL}  # it may be secret
FORMS = {**COMMON, **OWN, **CONFIG_ONLY}
NOT_PASSED_ON = ("NAME", "WORKER", "WAIT_S", "POLL_S")  # settings that each script has for itself


class Refused(Exception):
    """What is wrong, in one line."""


# ----------------------------------------------------------------------
# Reading


def near(name, names):
    """Returns a question that names the nearest of these names, or ""."""
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def read_value(name, text, given):
    """Returns the value that this text is for a setting; `given` is how the user wrote it. "" is no value."""
    form, words = FORMS[name]
    if FORMS[name] is PATH:
        text = os.path.expanduser(text)
    elif FORMS[name] is ZONES:
        text = ",".join(re.split(r"[\s,]+", text.strip(" ,")))
    if text and not re.fullmatch(form, text):
        raise Refused(f"{given}: {name} must be {words}")
    if FORMS[name] is YES_NO:
        return "1" if text.lower() in ("1", "yes", "true", "on") else ""
    return text


def read_config(path):
    """Returns {name: value} of a config.env. Each line has NAME=VALUE, or several, quoted as for a shell; $NAME in it
    is a variable of the environment."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")  # an editor of Windows may begin the file with a mark
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from None
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        line = re.split(r"(?:^|\s)#", line)[0].strip().removeprefix("export ")  # a # within a word begins no comment
        try:
            words = shlex.split(line)
        except ValueError:
            raise Refused(f"{where}: {line[:60]} lacks a quotation mark") from None
        for word in words:
            name, is_assignment, value = word.partition("=")
            if not is_assignment:
                raise Refused(f"{where}: {line[:60]} is not NAME=VALUE; a value with a blank needs quotation marks")
            if name not in FORMS:
                raise Refused(f"{where}: {name} is no setting{near(name.upper(), FORMS)}")
            value = os.path.expandvars(value)
            if re.search(r"[$`]", value):
                raise Refused(f"{where}: {name}={value} is a command or has an unknown name, and this file is not run: "
                              "write its value")
            values[name] = read_value(name, value, f"{where}: {name}={value}")
    return values


def read_flags(words, own):
    """Returns the settings, the other words, and the words after --. `own` are the settings of this script alone."""
    values, others, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("--"):
            others.append(word)
            continue
        flag, has_value, text = word.partition("=")
        name = flag[2:].upper().replace("-", "_")
        name = "ZONES" if name == "ZONE" else name
        if name not in COMMON and name not in own:
            known = sorted(f"--{name.lower()}" for name in [*COMMON, *own])
            raise Refused(f"unknown flag {flag}{near(flag, known)}; --help lists the flags")
        if FORMS[name] is YES_NO:
            text = text if has_value else "1"
        elif not has_value:
            if not words:
                raise Refused(f"{flag} needs a value")
            text = words.pop(0)
        if not text and FORMS[name] in (NUMBER, WHOLE):
            raise Refused(f"{flag} is given without a number")
        values[name] = read_value(name, text, f"{flag}={text}")
    return values, others, words


def main():
    own = sys.argv[1].split()
    names = [*COMMON, *CONFIG_ONLY, *own]
    config = read_config(os.environ.get("NANOCHAT_DEPLOY_CONFIG") or Path(__file__).parents[1] / "config.env")
    flags, others, run_flags = read_flags(sys.argv[2:], own)
    lines = [f"{name}={shlex.quote(value)}" for name, value in config.items() if name in names and value]
    lines.append("config_type=$TYPE")
    lines += [f"{name}={shlex.quote(value)}" for name, value in flags.items()]
    for name, words in (("ARGS", others), ("FLAGS", run_flags)):
        lines.append(f"{name}=({' '.join(shlex.quote(word) for word in words)})")
    lines.append(f"NAMES='{' '.join(names)}'")
    lines.append(f"GIVEN={shlex.quote(' '.join(['', *flags, '']))}")
    sys.stdout.buffer.write(os.fsencode("\n".join(lines) + "\n"))


# ----------------------------------------------------------------------
# watch.sh


class Settings(SimpleNamespace):
    """Every setting, in small letters, as a text, a number, a bool or a Path; `zones`, a tuple; `spot`; `flags` of the
    run; and `passed_on`, the flags that every other script gets."""

    @property
    def run(self):
        """The run's name. base_train refuses two different ones."""
        return self.flag("__run") or "dummy"

    @property
    def mirror(self):
        """Where the run's mirror is, or ""."""
        return self.flag("__checkpoint_mirror")

    def flag(self, name):
        """Returns the value of a flag of the run, as base_train reads it: --run=NAME or --run NAME."""
        text = ""
        for flag, following in zip(self.flags, [*self.flags[1:], ""], strict=True):
            word, has_value, value = flag.partition("=")
            if word.replace("-", "_") == name:
                text = value if has_value else following
        return text


def read_settings(flags):
    """Returns the Settings that watch.sh has put into the environment. `flags` are those of the run."""
    texts = {name: os.environ.get(f"WATCH_{name}", "") for name in FORMS}
    read = {YES_NO: bool, NUMBER: float, WHOLE: int, PATH: Path, ZONES: lambda text: tuple(text.split(","))}
    values = {name.lower(): read.get(FORMS[name], str)(text) if text else None for name, text in texts.items()}
    passed_on = [f"--{name.lower()}={texts[name]}" for name in COMMON if texts[name] and name not in NOT_PASSED_ON]
    state = Path.home() / ".local/state/nanochat" / values["name"]  # one for each name, and so one watch
    return Settings(**values, state=state, spot=not values["on_demand"], flags=tuple(flags), passed_on=passed_on)


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
