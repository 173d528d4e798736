"""The base of every script: one-line errors, the flags' parser, files, processes."""
import argparse
import ctypes
import difflib
import errno
import io
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from pathlib import Path
from stat import S_ISREG

SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".c++", ".h", ".hh", ".hpp", ".hxx", ".h++", ".inl", ".ipp", ".tcc", ".tpp",
            ".txx", ".ixx", ".cppm", ".cu", ".cuh")  # of C and C++
SOURCE = "source.zip"  # in a checkpoint: the files that came with its imported weights


def printable(text, keep=""):
    """Returns text in one line that a terminal shows and does not obey: unprintable characters, except those in `keep`,
    are escaped."""
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def say(text, file=None, keep=""):
    """Prints the `printable` text at once. It may hold names and contents of anybody's files."""
    print(printable(text, keep), file=file, flush=True)
    work.said()


SILENCE_S = 25
SAME_WORK_S = 1800  # then it is silent, because whoever watches the age of a log takes it for a hang


class Work:
    """What this process does. A thread says so whenever SILENCE_S pass without a line."""

    def __init__(self):
        self.what = ""
        self._begun = self._said = time.monotonic()
        self._thread = None

    def begin(self, what):
        """Notes that the process begins `what`, such as "reading the data"; "": that it waits for others."""
        if what != self.what:
            self._begun = time.monotonic()
        if not self.what:
            self._said = self._begun
        self.what = what
        if what and not self._thread:
            self._thread = threading.Thread(target=self._break_silence, name="work", daemon=True)
            self._thread.start()

    def said(self):
        """Notes that the process has printed a line."""
        self._said = time.monotonic()

    def _break_silence(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for other threads
        while True:
            time.sleep(min(1, SILENCE_S))
            what = self.what
            seconds = time.monotonic() - self._begun
            if what and time.monotonic() - self._said > SILENCE_S and seconds < SAME_WORK_S:
                with suppress(OSError):  # a closed pipe
                    say(f"still {what} ({seconds:.0f} s)", sys.stderr)


work = Work()


class BadInput(Exception):
    """An error that the user can correct, with status 2. Its line says what is wrong, the value, and what to do."""
    status = 2

    def __init__(self, message):
        super().__init__(printable(message))


class Failure(Exception):
    """An error that is no fault of the input, such as a compiler that times out, with exit status 1. Its message is one
    line: what happened, and what to do."""
    status = 1


class Outage(Failure):
    """A service that stayed unreachable until the wait timed out. The exit status is 75: start the same command again
    later."""
    status = 75


def run_script(main, what=""):
    """Runs main(), whose Work is `what`, and ends the process with the status that it returns (None: 0). BadInput,
    Failure, Outage, Ctrl-C and a full disk end it with one line on stderr and status 2, 1, 75, 130 and 1; a closed
    pipe, as behind `head`, silently with status 141, like SIGPIPE."""
    prepare_output()
    sys.unraisablehook = _unraisable
    work.begin(what)
    try:
        try:
            status = main()
        finally:
            # Here, where the errors of a closed pipe and a full disk are caught. The interpreter's own flush at its end
            # would complain, with status 120.
            sys.stdout.flush()
    except KeyboardInterrupt:
        say("stopped by Ctrl-C", sys.stderr)
        # At once: the interpreter's own end would wait for worker processes, which may not have heard of it.
        os._exit(130)
    except Exception as error:
        status = say_error(error)
        if status is None:
            raise
    sys.exit(status)


def _unraisable(found):
    """Takes an exception that Python cannot raise: one in a callback of the garbage collector, such as jax has, which
    runs at any moment. Ctrl-C comes again a moment later; others are printed as before."""
    if found.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(found)


class _Terminal(io.FileIO):
    """A terminal that may be closed while the process goes on, to save a checkpoint for example."""

    def write(self, data):
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def prepare_output():
    """Lets this process print to a closed output or terminal, and print é as \\xe9 if the terminal or log is ASCII."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # Python sets a stream to None if it was closed
        if stream.isatty():
            lines = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            stream = io.TextIOWrapper(lines, stream.encoding, line_buffering=True)
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def counted(number, noun):
    """Returns how many there are: "1 shard", "2 shards"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def say_error(error):
    """Prints run_script's line for an error, and returns the exit status; None for other errors."""
    if isinstance(error, BadInput | Failure):
        say(f"error: {error}", sys.stderr)
        return error.status
    if not isinstance(error, BrokenPipeError) and not is_disk_full(error):
        return None
    # The rest of the output goes nowhere: otherwise the end of the process fails to write it, too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_disk_full(error):
        say(f"error: the disk is full ({error}): free some space and run the same command again", sys.stderr)
        return 1
    return 141


def is_disk_full(error):
    """Returns whether the exception means a full disk, an exhausted quota or a file that is too large."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action):
        has_none = action.required or action.nargs == 0 or action.default in (None, "", ())
        return action.help if has_none else super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose `--help` shows every default. It reads `--batch-size` as `--batch_size`, and raises
    BadInput instead of printing the usage."""
    gone = {}  # {name of a flag that a script had: what to do instead}

    def __init__(self, **kwargs):
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        normalised = []
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("--") and len(arg) > 2:
                name, equals, value = arg.partition("=")
                if value == "--":  # argparse would drop it
                    self.error(f"{arg}: -- is not a value")
                # --batch-size becomes __batch_size, and then --batch_size.
                name = name.replace("-", "_").replace("__", "--", 1)
                arg = name + equals + value
                if name[2:] in self.gone:  # before argparse asks for flags that are missing
                    self._refuse(arg)
            normalised.append(arg)
        return super().parse_known_args(normalised, namespace)

    def parse_args(self, args=None, namespace=None):
        found, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            self._refuse(word)
        return found

    def require_flags(self, words):
        """Raises BadInput if one of the words --NAME=VALUE names no flag."""
        for word in words:
            if word.partition("=")[0] not in self._option_string_actions:
                self._refuse(word)

    def _refuse(self, word):
        if instead := self.gone.get(word.partition("=")[0].removeprefix("--")):
            self.error(f"{word} is gone: {instead}")
        near = self._near(word.partition("=")[0])
        advice = f"did you mean {near}?" if near else "--help lists all flags"
        self.error(f"{word if word.strip() else repr(word)} is not a flag: {advice}")

    def _near(self, name):
        """Returns the flags that may be meant by `name`, as text; "" if there is none."""
        # The end of a name comes before a similar one: --seq_len means --max_seq_len rather than --seq_len_ramp. If
        # several flags have this end, their help tells them apart.
        options = self._option_string_actions
        near = []
        if name.startswith("--"):  # every flag ends with an empty word
            near = [option for option in options if option.endswith(name.replace("--", "_", 1))]
        if not near:
            near = difflib.get_close_matches(name, options, 1)
        if len(near) > 1:
            near = [f"{option} ({options[option].help.partition(';')[0]})" for option in near]
        return " or ".join(near)

    def error(self, message):
        message = re.sub(r"ignored explicit argument (.*)", r"it takes no value, not \1: leave it out", message)
        raise BadInput(message.removeprefix("argument "))


def flag(default, help, *, of=None, at_least=-math.inf, above=-math.inf, at_most=math.inf, below=math.inf, unset=None,
         **options):
    """Returns a field for a data class of flags (see read_flags).

    help: what the flag does in at most 15 words; after a semicolon the meaning of its default and where to read more.
    of: a function of a text that makes the value; by default the type of `default`, str for None. A bool is False
    unless the flag is given. at_least, above, at_most, below: the range of a number, which must be finite; `unset`: a
    number outside of it that means "not given". options: those of argparse's add_argument, and `positional`, for an
    argument without a name.
    """
    limits = (at_least, above, at_most, below, unset)
    return field(default=default, metadata={"help": help, "of": of, "limits": limits, **options})


NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _reader(name, kind, at_least, above, at_most, below, unset):
    """Returns the function that makes an int or a float (`kind`) of the text after --name=."""
    limits = {"of at least": at_least, "above": above, "of at most": at_most, "below": below}
    limits = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]
    expected = "a whole number" if kind is int else "a number"
    if limits:
        expected += f" {' and '.join(limits)}"
    if unset is not None:
        expected += f", or {unset}"
    if kind is int:
        at_most = min(at_most, 2**63 - 1)  # the limit of PyTorch, NumPy and parquet

    def read(text):
        number = math.nan  # in no range
        if NUMBER.fullmatch(text):  # Python's own numbers may have _, other scripts' digits, and spaces around them
            with suppress(ValueError):
                number = kind(text)
        if number != unset and not (math.isfinite(number) and at_least <= number <= at_most and above < number < below):
            raise BadInput(f"--{name}={text} is not {expected}")
        return number
    return read


def _named(name, kind):
    """Returns the function `kind`, with the flag's name and value before its BadInput."""
    def read(text):
        try:
            return kind(text)
        except BadInput as error:
            raise BadInput(f"--{name}={text}: {error}") from None
    return read


def _add_flag(group, field_):
    name = field_.name
    # argparse would read "" with `type`, as if it had been given.
    options = {"default": argparse.SUPPRESS if field_.default == "" else field_.default, **field_.metadata}
    limits = options.pop("limits")
    kind = options.pop("of") or (str if field_.default is None else type(field_.default))
    if kind is bool:
        options["action"] = "store_true"
    elif kind in (int, float):
        options["type"] = _reader(name, kind, *limits)
    else:
        options["type"] = _named(name, kind)
    is_positional = options.pop("positional", False)
    group.add_argument(name if is_positional else f"--{name}", **options)


def read_flags(argv, description, titles, first=(), gone=None):
    """Returns an object of each data class in `titles`, {data class: title of its flags in --help}, whose fields are
    made with flag(). argv: the arguments; None: those of this process. Of a flag that is given twice, the last value
    counts. first: names of flags that --help shows first. gone: see ArgumentParser. --config=FILE gives flags that
    `argv` lacks. Raises BadInput."""
    script = Path(sys.argv[0])
    folder = "dev" if script.parent.name == "dev" else "scripts"
    parser = ArgumentParser(prog=f"python3 -m {folder}.{script.stem}", description=description,
                            usage="%(prog)s [--flag=value …]" if first else None, add_help=False)
    parser.gone = gone or {}
    by_name = {field_.name: field_ for data_class in titles for field_ in fields(data_class)}
    if first:
        group = parser.add_argument_group("the flags to begin with")
        for name in first:
            _add_flag(group, by_name[name])
    for data_class, title in titles.items():
        group = parser.add_argument_group(title)
        for field_ in fields(data_class):
            if field_.metadata and field_.name not in first:
                _add_flag(group, field_)
    group = parser.add_argument_group("help")
    group.add_argument("-h", "--help", action="help", help="show this text")
    group.add_argument("--config", metavar="FILE",
                       help="TOML file of flags, such as depth = 16; those of the command line win")
    argv = sys.argv[1:] if argv is None else list(argv)
    found = parser.parse_args([*_from_config(argv, parser), *argv])
    return tuple(data_class(**{each.name: getattr(found, each.name, each.default) for each in fields(data_class)})
                 for data_class in titles)


# Tokens whose form tells what they are. Each begins with fixed bytes, for which re looks at 1 GB/s or more; all of
# detect-secrets' detectors together read 0.07 MB/s.
SECRET_FORMS = (
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[^-]{0,200}?[A-Za-z0-9+/]{40}",
    rb"A(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}(?![0-9A-Z])", rb"gh[pousr]_[A-Za-z0-9]{36}", rb"github_pat_\w{60}",
    rb"glpat-[\w-]{20}", rb"xox[abposr]-[\w-]{20}", rb"hooks\.slack\.com/services/T\w{1,20}/B\w{1,20}/\w{20}",
    rb"[rs]k_live_\w{24}", rb"AIza[\w-]{35}", rb"SG\.[\w-]{22}\.[\w-]{43}", rb"npm_[A-Za-z0-9]{36}",
    rb"pypi-AgE[\w-]{50}", rb"sk-[\w-]{20,200}T3BlbkFJ", rb"hf_[A-Za-z]{34}",
    rb"eyJ[\w-]{10,500}\.eyJ[\w-]{10,2000}\.[\w-]{20}", rb"AccountKey=[A-Za-z0-9+/=]{80}")
PASSWORD_IN_ADDRESS = rb"://[^/\s:]*:[^/\s@]+@"


def _from_config(argv, parser):
    """Returns the flags in the file that --config names, as arguments, but for those that `argv` gives, and says which
    they are. Raises BadInput."""
    finder = ArgumentParser(add_help=False)
    finder.add_argument("--config", type=expand_path)
    path = finder.parse_known_args(argv)[0].config
    if path is None:
        return []
    words = []
    replaced = []
    given = {word.partition("=")[0].replace("-", "_").lstrip("_") for word in argv if word.startswith("--")}
    table = read_toml(path)
    try:
        for name, value in table.items():
            is_secret = any(re.search(form, str(value).encode()) for form in (*SECRET_FORMS, PASSWORD_IN_ADDRESS))
            if is_secret or re.search("(?i)(key|token|secret|password)$", name):
                raise BadInput(f"{name} looks like a secret, and files are copied: set it in the environment")
            (word,) = to_flags({name.replace("-", "_"): value})
            parser.require_flags([word])
            (replaced if name.replace("-", "_") in given else words).append(word)
    except BadInput as error:
        raise BadInput(f"--config={path}: {error}") from None
    but = f"; the command line replaces its {' '.join(replaced)}" if replaced else ""
    say(f"{path} gives {' '.join(words) or 'nothing'}{but}", sys.stderr)
    return words


def to_flags(values):
    """Returns {"depth": 4, "no_compile": True} as ["--depth=4", "--no_compile"]. Raises BadInput."""
    argv = []
    for name, value in values.items():
        if not re.fullmatch(r"[a-z][\w-]*", name):
            raise BadInput(f"{name} is not the name of a flag: write it as in depth = 16")
        if value is False or not isinstance(value, (bool, int, float, str)):
            raise BadInput(f"{name} = {value} is no value of a flag: write it as in --{name}=VALUE, or leave "
                           "it out")
        argv.append(f"--{name}" if value is True else f"--{name}={value}")
    return argv


# A package is imported inside, because deploy/ imports this module where none is installed.
def read_toml(path):
    """Returns the table of a TOML file. Raises BadInput."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        require_file(path)
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as a table of TOML: {' '.join(str(error).split())}") from None


def not_empty(text):
    """Returns the text of a flag. Raises BadInput if it is empty, as that of --flag=$UNSET is."""
    if not text.strip():
        raise BadInput("it is empty: give a value, or leave the flag out")
    return text


def expand_path(text):
    """Returns the Path that a flag names, with ~ as the home directory: shells do not expand --flag=~/folder. Raises
    BadInput without a home directory, and for impossible paths."""
    text = os.fspath(text)
    if not text:
        raise BadInput("the path is empty: give one")
    if text.startswith(("gs:/", "hf:/")):
        raise BadInput(f"{text} is not on this machine, and the flag takes a path on it: copy it here with gcloud "
                       "storage cp -r or hf download")
    if len(text) > 4000 or any(len(part.encode(errors="surrogatepass")) > 255 for part in text.split("/")):
        raise BadInput(f"{text[:40]}… is too long for a path")
    try:
        if re.match("~(/|$)", text) and os.environ.get("HOME") == "":  # ~ would be /
            raise RuntimeError
        return Path(text).expanduser()
    except RuntimeError:
        raise BadInput(f"{text} has no home directory: write the path in full, or set HOME") from None


def get_base_dir():
    """Returns the folder of data, checkpoints and downloads: `$NANOCHAT_BASE_DIR`, else `~/.cache/nanochat`."""
    return expand_path(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat")


def require_file(path):
    """Raises OSError unless `path` is an ordinary file: a read of a pipe or of /dev/zero would never end."""
    if not S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))


def read_named(name, path):
    """Returns the bytes of the file at `path`, which the flag `name` names. Raises BadInput."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"--{name}={path} cannot be read: {error.strerror}") from None


def require_writable_dir(path):
    """Creates the directory `path` if it does not exist, and returns it. Raises BadInput if it is not writable."""
    path = Path(path)
    if not os.fsencode(path).decode("utf-8", "replace") == str(path):
        raise BadInput(f"cannot write to {path}: its name is not UTF-8, choose another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Several ranks may probe at once, as processes or threads.
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


def move_aside(path):
    """Renames a file or folder, if it exists, to NAME.aside, or NAME.aside2, … if there is one already."""
    number = ""
    while (aside := path.with_name(f"{path.name}.aside{number}")).exists():
        number = int(number or 1) + 1
    with suppress(FileNotFoundError):
        path.rename(aside)


# A package is imported inside, because deploy/ imports this module where none is installed.
@contextmanager
def locked(lock_file, refusal):
    """Holds a lock on the file for the block. Raises BadInput(refusal) if another process holds it, and BadInput if its
    file system has no locks."""
    from filelock import FileLock, Timeout
    try:
        # Without the fallback: a kill would leave the lock that it makes instead.
        held = FileLock(lock_file, fallback_to_soft=False).acquire(timeout=0)
    except Timeout:
        raise BadInput(refusal) from None
    except OSError as error:
        raise BadInput(f"{lock_file} cannot be locked ({error.strerror}): choose a disk of this machine, with the "
                       "folder's flag or with NANOCHAT_BASE_DIR") from None
    with held:  # releases it once; `with FileLock(…)` would acquire it a second time
        yield


# Loaded here, because end_with_parent runs between fork and exec. There, locks of other threads stay locked, so nothing
# may be imported or loaded.
_LIBC = ctypes.CDLL(None)


def end_with_parent(parent, how=signal.SIGKILL):
    """Makes Linux send this process the signal `how` when its parent (process id `parent`) ends, even by `kill -9`. The
    parent's thread that started this process must live as long as the parent. For subprocess:
    preexec_fn=partial(end_with_parent, os.getpid())."""
    _LIBC.prctl(1, how)  # PR_SET_PDEATHSIG
    # If the parent ended before that call, no signal comes.
    if os.getppid() != parent:
        os.kill(os.getpid(), how)
