"""What every script needs: one-line errors, the flags' parser, the base directory."""
import argparse
import os
import sys
import threading
from dataclasses import field, fields
from pathlib import Path


class BadInput(Exception):
    """An error that the user can correct. Its message is one line: what is wrong, the value, and what to do. The exit
    status is 2."""


def run_script(main):
    """Runs main() and ends the process with the status that it returns (None: 0). For BadInput, prints one line to
    stderr and ends with status 2."""
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose `--help` shows every default, and which reads `--batch-size` as `--batch_size`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=_HelpFormatter, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        normalised = []
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("--") and len(arg) > 2:
                name, equals, value = arg.partition("=")
                arg = name.replace("-", "_").replace("__", "--", 1) + equals + value
            normalised.append(arg)
        return super().parse_known_args(normalised, namespace)


def flag(default, help, choices=None):
    """Returns a field for a data class of flags. Its type is that of the default: str for None, and a bool is False
    unless the flag is given."""
    return field(default=default, metadata={"help": help, "choices": choices})


def add_flags(parser, title, data_class):
    """Adds a group of flags to the parser: one for each field of `data_class` (see flag)."""
    group = parser.add_argument_group(title)
    for field_ in fields(data_class):
        name, default, options = f"--{field_.name}", field_.default, dict(field_.metadata)
        if isinstance(default, bool):
            group.add_argument(name, action="store_true", help=options["help"])
        else:
            group.add_argument(name, type=str if default is None else type(default), default=default, **options)


def from_flags(data_class, namespace):
    """Returns the `data_class` with the values that the parser found."""
    return data_class(**{field_.name: getattr(namespace, field_.name) for field_ in fields(data_class)})



def get_base_dir():
    """Returns the folder of data, checkpoints and downloads: `$NANOCHAT_BASE_DIR`, else `~/.cache/nanochat`."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


def require_writable_dir(path):
    """Creates the directory `path` if it does not exist, and returns it. Raises BadInput if it is not writable."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write_test_{os.getpid()}_{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BadInput(f"cannot write to {path} ({error.strerror}): "
                       "set NANOCHAT_BASE_DIR to a writable directory") from None
    return path
