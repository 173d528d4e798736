"""The documents say what is true: their commands parse, and the files, flags, targets and sections they name exist.

Nothing that a document names is executed: of a command only the script's own argument parser runs.
"""
import contextlib
import fnmatch
import functools
import importlib
import io
import os
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from nanochat.common import ArgumentParser, BadInput
from nanochat.device.tpu import parse_accelerator
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from scripts import tpu_preflight
from scripts.bench import __main__ as bench

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tokenizer/README.md", "dev/DECISIONS.md",
             *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
LOGS = sorted(f"dev/log/{path.name}" for path in (ROOT / "dev" / "log").glob("*.md"))
WITHOUT_COMMANDS = ("CHANGELOG.md", "docs/design.md", "scripts/demo.py")  # the demo's text names a target of make
SCRIPTS = [f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("[a-z]*.py"))]
SCRIPTS += [f"scripts/bench/{name}.py" for name in bench.NAMES]
SCRIPTS += sorted(f"dev/{path.name}" for path in (ROOT / "dev").glob("bench_*.py"))
HELPS = [*SCRIPTS,
         *sorted(f"deploy/{path.name}" for path in (ROOT / "deploy").glob("*.sh"))]
# Programs that are not of this project: their arguments are not checked.
OTHER_PROGRAMS = {"ray", "$EDITOR", "apt-get", "cp", "diff", "export", "gcloud", "head", "llama-server", "source"}
WRAPPERS = {"nohup", "python3"}


class Parsed(BaseException):
    """Raised in place of what a script does after it has parsed its arguments."""


def stop_after_parsing(self, args=None, namespace=None, original=ArgumentParser.parse_args):
    original(self, args, namespace)
    raise Parsed


@contextlib.contextmanager
def only_parsing():
    with mock.patch.object(ArgumentParser, "parse_args", stop_after_parsing):
        yield


# -----------------------------------------------------------------------------
# Reading a document


def fenced_blocks(text):
    """[(language, text)] of the fenced code blocks of a Markdown text."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def code_spans(text):
    """The inline `code` of a Markdown text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text):
    """All simple commands of a document, each a list of words, from its sh blocks and from its inline code."""
    lines = [line for language, block in fenced_blocks(text) if language == "sh"
             for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in code_spans(text) if re.match(r"(python3?|make|deploy/\w+\.sh|nohup) ", span)]
    return [command for line in lines for command in simple_commands(line)]


def simple_commands(line):
    """The commands of a line of shell, without what they are connected by, their redirections and their variables."""
    lexer = shlex.shlex(re.sub(r"\d?>&\d", "", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found, words, is_file = [], [], False
    for word in lexer:
        if set(word) <= set("|&;"):
            found, words = found + [words], []
        elif set(word) <= set("<>"):
            is_file = True
        elif is_file or not words and re.match(r"\w+=", word):
            is_file = False
        else:
            words.append(word)
    return [command for command in [*found, words] if command]


def commands_in(place):
    """The commands of a document or of the help text of a script."""
    return commands((ROOT / place).read_text()) if place.endswith(".md") else help_commands(help_text(place))


def help_commands(text):
    """The commands of a help text, each a list of words: its indented lines that begin with one. What stands behind
    several spaces is a remark."""
    lines = re.findall(r"^ {2,4}((?:\w+=\S+ )?(?:python3?|head|nohup|deploy/\w+\.sh)\b.*)$",
                       re.sub(r"\s*\\\n\s*", " ", text), re.MULTILINE)
    return [words for line in lines for words in simple_commands(re.split(" {2,}", line)[0])]


def help_text(path):
    """The help text of a script: its docstring, or the comment with which it begins."""
    text = (ROOT / path).read_text()
    if path.endswith(".py"):
        return importlib.import_module(path.removesuffix(".py").replace("/", ".")).__doc__
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.partition("\n\n")[0].splitlines()
                     if line.startswith("#"))


# -----------------------------------------------------------------------------
# Checking: each function returns what is wrong in a line, or None


def problem_of_command(words):
    program = words[0]
    if program == "make":
        return next((f"no make target {word}" for word in words[1:] if "=" not in word and word not in make_targets()),
                    None)
    scripts = [i for i, word in enumerate(words) if re.fullmatch(r"(\./)?deploy/\w+\.sh", word)]
    if scripts and words[:scripts[0]] in ([], ["nohup"]):
        return problem_of_deploy(*words[scripts[0]:])
    if "-m" in words and program in WRAPPERS:
        return problem_of_module(*words[words.index("-m") + 1:])
    return None if program in OTHER_PROGRAMS else f"{program} is a program that this test does not know"


def problem_of_module(module, *arguments):
    if not module.startswith(("scripts.", "tests.", "dev.bench_")):
        return None if module == "pytest" else f"no module {module}"
    if module == "scripts.bench":
        module = "scripts.bench.__main__"
    if not (ROOT / f"{module.replace('.', '/')}.py").exists():
        return f"no module {module}"
    return parse(module, *arguments)


def parse(module, *arguments):
    """None if the module's main accepts these arguments, else the parser's complaint."""
    main, output = importlib.import_module(module).main, io.StringIO()
    command = [module, *arguments]
    with (only_parsing(), mock.patch("sys.argv", command), contextlib.redirect_stderr(output),
          contextlib.redirect_stdout(io.StringIO())):
        try:
            main(list(arguments)) if main.__code__.co_argcount else main()
        except Parsed:
            return None
        except SystemExit as error:  # 0: the command is one for --help
            return f"{shlex.join(command)}: {output.getvalue().strip().splitlines()[-1]}" if error.code else None
        except BadInput as error:
            return f"{shlex.join(command)}: {error}"
    return f"{module} does not parse its arguments"


@functools.cache
def problem_of_deploy(script, *arguments):
    """The script's own parser reads the arguments until it meets --help; base_train's reads what follows `--`."""
    if not (ROOT / script).exists():
        return f"no script {script}"
    own = arguments[:arguments.index("--")] if "--" in arguments else arguments
    result = run(ROOT / script, *own, "--help")
    if result.returncode:
        return f"{script}: {result.stderr.strip()}"
    rest = arguments[len(own) + 1:]
    return parse("scripts.base_train", *rest) if rest else None


def problem_of_run(words):
    """Whether base_train would refuse the flags of a command that trains, or whose run is compiled, because they do not
    fit together: on eight chips, or what the command says."""
    arguments, chips, device_type = words[words.index("--") + 1:] if "--" in words else [], 8, "tpu"
    if "scripts.base_train" in words:
        arguments = words[words.index("scripts.base_train") + 1:]
    if "scripts.tpu_preflight" in words:
        own, flags = tpu_preflight.read_preflight_flags(words[words.index("scripts.tpu_preflight") + 1:])
        chips = parse_accelerator(own.accelerator).chips
    elif arguments and "--help" not in arguments:
        flags = parse_flags(arguments)
        if flags.devices.device_type in ("xla", "cpu"):
            chips, device_type = 1, flags.devices.device_type
    else:
        return None
    try:
        make_plan(flags, 65536, device_type, chips)
    except BadInput as error:
        return str(error)


def run(*command):
    env = {**os.environ, "NANOCHAT_DEPLOY_CONFIG": "/nonexistent"}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=env, timeout=60)


@functools.cache
def make_targets():
    return {target for line in re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
            for target in line.split()}


def printed_help(script):
    """What a script prints for --help."""
    main, output = importlib.import_module(script.removesuffix(".py").replace("/", ".")).main, io.StringIO()
    with (contextlib.redirect_stdout(output), contextlib.suppress(SystemExit),
          mock.patch("sys.argv", [script, "--help"])):
        main(["--help"]) if main.__code__.co_argcount else main()
    return output.getvalue()


@functools.cache
def known_flags():
    """All flags of the scripts and of deploy/, as their --help says."""
    texts = [(ROOT / "deploy" / "config.env.example").read_text().lower().replace("#", " --").replace("=", " ")]
    texts += [run(path, "--help").stdout for path in sorted((ROOT / "deploy").glob("*.sh"))
              if os.access(path, os.X_OK)]
    for path in [*SCRIPTS, "tests/run/chaos.py"]:
        texts.append(printed_help(path))
    return {flag for text in texts for flag in re.findall(r"--[a-z]\w*", text)}


def problem_of_span(span):
    """Whether inline code names a flag or a file of this project that is not there."""
    if re.match(r"--[a-z]", span):
        flags = re.findall(r"--[a-z][\w-]*", span)
        return next((f"no flag {flag}" for flag in flags if flag.replace("-", "_").replace("__", "--", 1)
                     not in known_flags() and not flag.startswith("--xla_")), None)
    if re.match(rf"({'|'.join(top_folders())})/[^ ]*$", span):
        return None if exists(span) else f"no file {span}"
    if re.fullmatch(r"[\w.-]+\.(py|sh|md|toml|service|example)", span):
        return None if any(Path(path).name == span for path in files()) else f"no file of the name {span}"
    return None


@functools.cache
def files():
    """Paths of all files of the project that are tracked, or new and not ignored."""
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    if listed.returncode:  # no git checkout: a release on a VM, say
        return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]


@functools.cache
def top_folders():
    return sorted({path.split("/")[0] for path in files() if "/" in path and not path.startswith(".")})


def exists(pattern):
    """Whether `pattern` is a file or folder of the project, or matches one."""
    return any(path == pattern or path.startswith(pattern.rstrip("/") + "/") or fnmatch.fnmatch(path, pattern)
               for path in files())


def problem_of_link(document, target):
    """Whether a link leads to no file, or to no section of it."""
    if re.match(r"\w+:", target):
        return None
    name, _, anchor = target.partition("#")
    path = (ROOT / document).parent / name if name else ROOT / document
    if not path.exists():
        return f"no file {target}"
    return None if not anchor or anchor in anchors(path.read_text()) else f"no section {target}"


def anchors(text):
    """What GitHub makes of the headings of a Markdown text."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)}


def links(text):
    """The targets of all links and pictures of a Markdown text."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))


# -----------------------------------------------------------------------------
# The tests


@pytest.mark.parametrize("place", [*DOCUMENTS, *HELPS])
def test_every_command_is_accepted_by_its_parser(place):
    found = commands_in(place)
    problems = [f"{shlex.join(words)}: {problem}" for words in found if (problem := problem_of_command(words))]
    assert not problems, "\n".join(problems)
    assert found or place in WITHOUT_COMMANDS


def test_the_usage_names_the_command_of_the_script():
    scripts = [path for path in SCRIPTS if "/bench/" not in path]  # scripts.bench runs those by its own name
    commands_of = {path: path.removesuffix(".py").replace("/", ".") for path in scripts}
    assert not [path for path, name in commands_of.items()
                if not printed_help(path).startswith(f"usage: python3 -m {name} ")]


def test_the_runs_that_the_documents_start_can_be_planned():
    pytest.importorskip("jax")  # which --kernel=flash needs
    problems = [f"{place}: {shlex.join(words)}: {problem}" for place in [*DOCUMENTS, *HELPS]
                for words in commands_in(place) if (problem := problem_of_run(words))]
    assert not problems, "\n".join(problems)


def test_every_group_of_packages_that_is_named_is_there():
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().partition(
        "[project.optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE))
    texts = {path: (ROOT / path).read_text() for path in files()
             if path.endswith((".md", ".py", ".sh", ".yaml", ".ipynb", "Makefile")) and not path.startswith("dev/log/")}
    unknown = [f"{path}: {name}" for path, text in texts.items() for names in re.findall(r"'\.\[([\w,]+)\]'", text)
               for name in names.split(",") if name not in known]
    assert "serve" in known and not unknown, "\n".join(unknown)


@pytest.mark.parametrize("document", [*DOCUMENTS, *LOGS])
def test_every_flag_file_and_link_in_the_text_is_there(document):
    text = (ROOT / document).read_text()
    spans = code_spans(text) if document in DOCUMENTS else []
    problems = [*map(problem_of_span, spans), *(problem_of_link(document, target) for target in links(text))]
    assert not any(problems), "\n".join(filter(None, problems))


def test_the_folders_in_the_diagram_are_those_of_the_library():
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Where things are"):].split("\n## ")[0]
    shown = [name for _, block in fenced_blocks(section) for name in re.findall(r"^ *([\w.]+)/? ", block, re.MULTILINE)]
    library = sorted({path.split("/")[1] for path in files()
                      if re.fullmatch(r"nanochat/\w+(/.*)?\.py", path) and not path.endswith("nanochat/__init__.py")})
    assert sorted(name for name in shown if name not in ("scripts", "nanochat", "deploy", "tokenizer")) == library


def test_all_documents_are_reached_from_the_readme():
    reached, new = set(), ["README.md"]
    while new:
        document = new.pop()
        reached.add(document)
        for target in links((ROOT / document).read_text()):
            path = os.path.relpath((ROOT / document).parent / target.partition("#")[0], ROOT)
            if path.endswith(".md") and path not in reached and (ROOT / path).exists():
                new.append(path)
    assert set(DOCUMENTS) <= reached


def test_the_documents_stay_short():
    paths = [path for path in DOCUMENTS if not path.startswith(("tokenizer/", "dev/"))]
    assert sum(len((ROOT / path).read_text().split()) for path in paths) <= 22_000


def test_the_sections_that_help_texts_and_errors_name_exist():
    found = {(path, target) for path in files() if path.startswith(("nanochat/", "scripts/")) and path.endswith(".py")
             for target in re.findall(r"docs/[\w/]+\.md(?:#[\w-]+)?", (ROOT / path).read_text())}
    problems = [f"{path}: {problem}" for path, target in found if (problem := problem_of_link("README.md", target))]
    assert ("nanochat/train/flags.py", "docs/training.md#kernels") in found
    assert not problems, "\n".join(problems)
