"""The one reader of what a VM says. It runs ssh, and lets through only what has the form that was asked for.

    python3 deploy/lib/from_vm.py BEGIN LOG HOW … -- ssh …

What comes before the line BEGIN, such as a greeting in .bashrc, is left out. HOW is one of these:

    lines               text, with control characters as escapes
    only FORM           the lines of this form
    fields              the NAME=VALUE lines of on_vm.sh's probe, each of its own form
    files FOLDER NAMES  these files and folders, which are put into the new FOLDER

What the VM writes to stderr, and ssh's own LOG, are lines. The exit status is that of ssh, or 1 for a refused answer.
"""
import codecs
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

TEXT, RUN, STEP, NUMBER = r"[^\n]{0,300}", r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", r"step_[0-9]{1,12}", r"[0-9]{1,15}"
FORMS = {"run": RUN, "checkpoints": rf"{STEP} [0-9]{{1,40}}"}  # of `only`: a checkpoint has a checksum
FIELDS = {
    "state": "none|running|ended|killed|orphans", "run": RUN, "exit": "[0-9]{1,3}", "code": TEXT,
    "steps": "[0-9]{1,12}/[0-9]{1,12}", "checkpoint": STEP, "checkpoint_age": NUMBER, "checkpoint_bytes": NUMBER,
    "mirror": TEXT, "mirrored": STEP, "mirror_error": TEXT, "mirror_behind_s": NUMBER, "log_age_s": NUMBER,
    "disk": NUMBER, "error": TEXT,
}
OF_RECORD = ("step", "loss", "tokens_per_s", "mfu", "time_left_s")  # numbers of the newest line of metrics.jsonl
LARGEST = 1e15  # no number here is larger
FILE = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
ANSWER_BYTES = 1_000_000  # an answer of fields or names is shorter, and so is a greeting
MOST_FILES = 10_000  # of one answer
SPARE_BYTES = 50_000_000  # that stay free on the disk, on which the budget is counted


class Refused(Exception):
    """Why an answer is refused."""


def printable(text):
    """Returns the text with escapes for all characters that would steer a terminal; lines and tabs stay."""
    def escape(match):
        return match[0] if match[0].isprintable() else match[0].encode("unicode_escape").decode()

    return re.sub(r"[^\n\t -~]", escape, text)


def leave_out(name, value):
    print(f"the VM's {name} is left out, because it has not the form of one: {printable(value)[:80]}", file=sys.stderr)


def read_fields(text):
    """Returns {name: value} of the lines that are fields, each of its form, and the numbers of `record`. What cannot be
    used is left out."""
    fields = {}
    for line in text.split("\n"):
        name, _, value = line.partition("=")
        if name == "record":
            fields.update(read_record(value))
        elif name in FIELDS and value:
            if not re.fullmatch(FIELDS[name], value):
                leave_out(name, value)
            else:
                fields[name] = str(int(value)) if FIELDS[name] == NUMBER else printable(value)
    return fields


def read_record(text):
    try:
        record = dict(json.loads(text or "{}"))
    except (ValueError, TypeError, RecursionError):
        leave_out("record", text)
        return {}
    numbers = {name: record[name] for name in OF_RECORD if type(record.get(name)) in (int, float)}
    return {name: f"{float(value):.10g}" for name, value in numbers.items() if 0 <= value < LARGEST}


def receive(stream, folder, names):
    """Puts the files that the VM sends into a new folder. Each begins with a line, its size and its path; the last line
    is `end`. There are no links and no modes."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    files = 0
    while (line := stream.readline(1000)) != b"end\n":
        match = re.fullmatch(rf"({NUMBER}) (.+)\n", line.decode("utf-8", "backslashreplace"))
        if not match:
            raise Refused(f"it is not whole, or no list of files: {printable(repr(line[:80]))}")
        size, parts = int(match[1]), match[2].split("/")
        is_in_folder = bool(re.fullmatch(STEP, parts[0]))
        if parts[0] not in names or len(parts) > 3 or is_in_folder == (len(parts) == 1) \
                or not all(re.fullmatch(FILE, part) for part in parts):
            raise Refused(f"it sends {printable(match[2])[:80]}, which was not asked for")
        files += 1
        if files > MOST_FILES:
            raise Refused(f"it sends more than {MOST_FILES} files")
        if size + SPARE_BYTES > shutil.disk_usage(folder).free:
            raise Refused(f"{match[2]} has {size} bytes, and {folder} has no room for them")
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            while size:
                if not (content := stream.read(min(size, 1 << 20))):
                    raise Refused(f"{match[2]} is not whole")
                file.write(content)
                size -= len(content)


def copy_lines(stream, to):
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while content := stream.read1(65536):
        to.write(printable(decoder.decode(content)))
        to.flush()


def read(stream, how, what):
    """Reads the VM's answer and prints what is wanted of it."""
    if how == "lines":
        copy_lines(stream, sys.stdout)
    elif how == "files":
        receive(stream, what[0], what[1:])
    else:
        content = stream.read(ANSWER_BYTES + 1)
        if len(content) > ANSWER_BYTES:
            raise Refused(f"it has more than {ANSWER_BYTES} bytes")
        text = content.decode("utf-8", "backslashreplace")
        if how == "fields":
            for name, value in read_fields(text).items():
                print(f"{name}={value}")
        for line in text.split("\n")[:-1] if how == "only" else ():
            if re.fullmatch(FORMS[what[0]], line):
                print(line)
            else:
                leave_out(what[0], line)


def main():
    for name in (signal.SIGINT, signal.SIGPIPE):  # as for cat
        if signal.getsignal(name) != signal.SIG_IGN or name == signal.SIGPIPE:
            signal.signal(name, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    end = sys.argv.index("--")
    begin, log, how, *what = sys.argv[1:end]
    ssh = subprocess.Popen(sys.argv[end + 1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    errors = threading.Thread(target=copy_lines, args=(ssh.stderr, sys.stderr), daemon=True)
    errors.start()
    refused, greeting = "", 0
    try:
        while (line := ssh.stdout.readline(65536)) not in (b"", f"{begin}\n".encode()):
            greeting += len(line)
            if greeting > ANSWER_BYTES:
                raise Refused(f"its greeting has more than {ANSWER_BYTES} bytes")
        if line:
            read(ssh.stdout, how, what)
    except (Refused, OSError) as error:
        refused = str(error)
        ssh.kill()  # it may wait for more that never comes
    status = ssh.wait()
    errors.join(timeout=1)  # ssh may leave a process behind that keeps the connection, and stderr, open
    with suppress(OSError):
        Path(log).write_text(printable(Path(log).read_text(errors="backslashreplace")))
    if refused:
        print(f"error: the VM's answer is refused: {refused}", file=sys.stderr)
    return 1 if refused else status


if __name__ == "__main__":
    sys.exit(main())
