"""What every script needs: one-line errors, the flags' parser, the base directory."""
import argparse
import ctypes
import difflib
import errno
import io
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import field, fields
from functools import partial
from pathlib import Path


class BadInput(Exception):
    """An error that the user can correct. Its message is one line: what is wrong, the value, and what to do. The exit
    status is 2. What cannot be printed, such as a line's end in the value of a flag, is written as \\n."""

    def __init__(self, message):
        super().__init__("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))


class Failure(Exception):
    """What went wrong and is no fault of the input, such as a compiler that takes too long. Its message is one line:
    what happened, and what to do. The exit status is 1."""
    status = 1


class Outage(Failure):
    """A service that could not be reached for as long as it was waited for, and that may be reached later. The exit
    status is 75, as that of a run that is to be started again."""
    status = 75


def run_script(main):
    """Runs main() and ends the process with the status that it returns (None: 0). What the terminal or log cannot show,
    such as é in ASCII, is printed as \\xe9.

    BadInput, Failure, Outage, Ctrl-C and a full disk end it with one line on stderr and status 2, 1, 75, 130 and 1. If
    whoever reads the output has ended, as `head` does, it ends without a word and with status 141, as a program that
    SIGPIPE ends.
    """
    prepare_output()
    try:
        try:
            status = main()
        finally:
            # What is left to print is printed here, where a closed pipe and a full disk are errors that are known
            # below. Left to the interpreter, they would be a complaint at its end, and status 120.
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = _say("stopped by Ctrl-C", 130)
    except Exception as error:
        status = say_error(error)
        if status is None:
            raise
    sys.exit(status)


def prepare_output():
    """Lets this process print where the output is closed, or has no sign for a letter."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # None: closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say_error(error):
    """Prints what run_script says of an error that ends a process, and returns the status; None for other errors."""
    if isinstance(error, BadInput):
        return _say(f"error: {error}", 2)
    if isinstance(error, Failure):
        return _say(f"error: {error}", error.status)
    if not isinstance(error, BrokenPipeError) and not is_disk_full(error):
        return None
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the end of the process fails to write, too
    return 141 if isinstance(error, BrokenPipeError) else _say(
        f"error: the disk is full ({error}): free some space and run the same command again", 1)


def is_disk_full(error):
    """Returns whether the exception says that the disk, or the user's quota, is full, or a file too large."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _say(line, status):
    print(line, file=sys.stderr, flush=True)
    return status


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        is_given = action.required or action.default in (None, "", ())  # there is no default to show
        return action.help if is_given else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose `--help` shows every default, and which reads `--batch-size` as `--batch_size`.

    It raises BadInput where argparse would print the usage of the whole script.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=_HelpFormatter, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        normalised = []
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("--") and len(arg) > 2:
                name, equals, value = arg.partition("=")
                if value == "--":  # argparse would take it for no value at all
                    self.error(f"{arg}: -- is not a value")
                # --batch-size becomes __batch_size, and then --batch_size.
                arg = name.replace("-", "_").replace("__", "--", 1) + equals + value
            normalised.append(arg)
        return super().parse_known_args(normalised, namespace)

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            self.error(f"{word} is not a flag: " + (f"did you mean {near[0]}?" if near else "--help lists all flags"))
        return found

    def error(self, message):
        message = re.sub(r"ignored explicit argument (.*)", r"it takes no value, and \1 is given", message)
        raise BadInput(message.removeprefix("argument "))


def flag(default, help, *, of=None, at_least=-math.inf, above=-math.inf, at_most=math.inf, below=math.inf, unset=None,
         **options):
    """Returns a field for a data class of flags (see read_flags).

    Its type is `of`, a function of a text, or else that of the default: str for None; a bool is False unless the flag
    is given. at_least, above, at_most, below: the range of a number, which must always be finite; `unset` is a number
    outside of it that stands for "not given". options: those of argparse's add_argument, and `positional`, for an
    argument without a name.
    """
    limits = (at_least, above, at_most, below, unset)
    return field(default=default, metadata={"help": help, "of": of, "limits": limits, **options})


def _reader(name, kind, at_least, above, at_most, below, unset):
    """Returns the function that makes an int or a float (`kind`) of the text after --name=."""
    limits = [f"{word} {limit}" for word, limit in (
        ("of at least", at_least), ("above", above), ("of at most", at_most), ("below", below)) if math.isfinite(limit)]
    wanted = f"{'a whole number' if kind is int else 'a number'} {' and '.join(limits)}".strip()
    wanted += "" if unset is None else f", or {unset}"
    if kind is int:
        at_most = min(at_most, 2**63 - 1)  # what PyTorch, NumPy and parquet can hold

    def read(text):
        try:
            number = kind(text)
        except ValueError:
            # No range has nan in it, so it is refused below.
            number = math.nan
        if number != unset and not (math.isfinite(number) and at_least <= number <= at_most and above < number < below):
            raise BadInput(f"--{name}={text} is not {wanted}")
        return number
    return read


def _named(name, kind):
    """Returns the function `kind` of a text, whose BadInput then begins with the flag."""
    def read(text):
        try:
            return kind(text)
        except BadInput as error:
            raise BadInput(f"--{name}={text}: {error}") from None
    return read


class _Once(argparse.Action):
    """Stores a flag's value. If it is given twice, two equal values are one, and stderr says so; two others are
    refused, because nobody sees in a long command line that the last one would count."""
    given = None  # [value], when there was one

    def __call__(self, parser, namespace, value, option_string=None):
        value, name = True if self.nargs == 0 else value, f"--{self.dest}"
        if self.given and self.given[0] != value:
            both = " and ".join(f"{name}={_shown(each)}" for each in (self.given[0], value))
            parser.error(f"{name} is given twice, with two values: {both}: leave one of them out")
        if self.given:
            print(f"{name} is given twice, with the same value", file=sys.stderr)
        self.given = [value]
        setattr(namespace, self.dest, value)


def _shown(value):
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _add_flag(group, name, default, options):
    options = dict(options)
    limits, kind = options.pop("limits"), options.pop("of") or (str if default is None else type(default))
    option = name if options.pop("positional", False) else f"--{name}"
    if kind is bool:
        group.add_argument(option, action=_Once, nargs=0, default=False, help=options["help"])
    else:
        group.add_argument(option, default=default, **{"action": _Once} | options,
                           type=_reader(name, kind, *limits) if kind in (int, float) else _named(name, kind))


def read_flags(argv, description, titles):
    """Returns an object of each data class in `titles`, {data class: title of its flags in --help}, whose fields are
    made with flag(). argv: the arguments; None: those of this process. Raises BadInput, also if a flag is given twice
    with different values."""
    parser = ArgumentParser(prog=f"python3 -m scripts.{Path(sys.argv[0]).stem}", description=description)
    for data_class, title in titles.items():
        group = parser.add_argument_group(title)
        for field_ in fields(data_class):
            _add_flag(group, field_.name, field_.default, field_.metadata)
    found = parser.parse_args(argv)
    return tuple(data_class(**{field_.name: getattr(found, field_.name) for field_ in fields(data_class)})
                 for data_class in titles)


def expand_path(text):
    """Returns the Path that a flag names; ~ is the home directory, which shells do not see in --flag=~/folder. Raises
    BadInput if there is none, and for what no path can be."""
    text = os.fspath(text)
    if not text:
        raise BadInput("a path is needed: an empty one names nothing")
    if text.startswith("gs:/"):
        raise BadInput(f"{text} is in a bucket, and a path on this machine is needed: copy it here with gcloud storage "
                       "cp -r")
    if len(text) > 4000 or any(len(part.encode(errors="surrogatepass")) > 255 for part in text.split("/")):
        raise BadInput(f"{text[:40]}… is too long for a path")
    try:
        if re.match("~(/|$)", text) and os.environ.get("HOME") == "":  # it would be a folder in /
            raise RuntimeError
        return Path(text).expanduser()
    except RuntimeError:
        raise BadInput(f"there is no home directory for {text}: write the path in full, or set HOME") from None


def get_base_dir():
    """Returns the folder of data, checkpoints and downloads: `$NANOCHAT_BASE_DIR`, else `~/.cache/nanochat`."""
    return expand_path(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat")


def require_writable_dir(path):
    """Creates the directory `path` if it does not exist, and returns it. Raises BadInput if it is not writable."""
    path = Path(path)
    if not os.fsencode(path).decode("utf-8", "replace") == str(path):
        raise BadInput(f"cannot write to {path}, because its name is not UTF-8: choose another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Several ranks may try at once, as processes or as threads of one.
        probe = path / f".write_test_{os.getpid()}_{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BadInput(f"cannot write to {path} ({error.strerror}): choose a writable directory, with the flag that "
                       "names it or with NANOCHAT_BASE_DIR") from None
    return path


@contextmanager
def written_whole(path):
    """Yields the path of an unfinished file, which replaces the file `path` when the block ends without an error. A
    process that is killed, or a machine that fails, leaves either the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# Packages are imported inside these two, because deploy/ imports this module where none is installed.
@contextmanager
def locked(lock_file, refusal):
    """Holds a lock on the file for the block. Raises BadInput(refusal) if another process holds it."""
    from filelock import FileLock, Timeout
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BadInput(refusal) from None
    with lock:
        yield


class Progress:
    """Shows progress on stderr: a bar on a terminal, otherwise a line every ten seconds at most. A context manager."""

    def __init__(self, label, total, unit="B"):
        from tqdm import tqdm
        self._meter = partial(tqdm.format_meter, total=total, ncols=0, prefix=label, unit=unit, unit_scale=True)
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._printed = self._begun
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def update(self, amount):
        """Adds an amount to what is done."""
        self._done += amount
        if self._bar:
            self._bar.update(amount)
        elif self._done < self._total and time.monotonic() - self._printed > 10:
            self._print()

    def close(self):
        """Shows the final state."""
        if self._bar:
            self._bar.close()
        else:
            self._print()

    def _print(self):
        self._printed = time.monotonic()
        print(self._meter(self._done, elapsed=self._printed - self._begun), file=sys.stderr, flush=True)


# Loaded here, because end_with_parent runs between fork and exec, where a lock that another thread had stays locked:
# nothing may be imported or loaded there.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent, how=signal.SIGKILL):
    """Makes Linux send this process the signal `how` when its parent, whose process id is `parent`, ends, even by
    `kill -9`. The thread of the parent that has started this process must live as long as the parent does.

    For subprocess: preexec_fn=partial(end_with_parent, os.getpid()).
    """
    _LIBC.prctl(1, how)  # PR_SET_PDEATHSIG
    # A parent that has ended before that call sends nothing any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def run_module(module, *flags, env=None):
    """Prints the command that runs a script of this project, and runs it in a process of its own, which gets SIGTERM
    when this one ends. env: its environment; None: that of this process. Raises BadInput if it fails."""
    command = ["-m", module, *flags]
    print(f"$ {shlex.join(['python3', *command])}", flush=True)
    status = subprocess.run([sys.executable, *command], env=env, stdin=subprocess.DEVNULL,
                            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM)).returncode
    if status:
        raise BadInput(f"{module} ended with status {status}: see above")
