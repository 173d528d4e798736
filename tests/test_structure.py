"""The order of the folders, read from the imports, and what a wheel of the project contains."""
import ast
import importlib
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from nanochat.data.tokenizer import SHIPPED_DIR, load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
# As in README.md: an import goes down this list, never up.
CORE = ["train", "infer", "run", "checkpoint", "kernels", "model", "record", "data", "device", "common"]
# What a person may ignore until they need it: a room imports the core and no other room, and the core imports no room.
ROOMS = ["corpus", "export", "judge", "preflight", "puzzles", "serve"]
SOURCES = sorted(path.relative_to(ROOT) for folder in ("nanochat", "scripts") for path in (ROOT / folder).rglob("*.py"))
MAX_LINES = 600
MOST_LINES = 28_943  # of nanochat/ and scripts/. Raise it only in a commit that says what the lines buy.
FOR_TRANSFORMERS = "nanochat.export.modeling_nanochat_scaled"  # copied into exports: the program never imports it


def module_name(path):
    """Returns the name of the module in this file: nanochat.data for nanochat/data/__init__.py."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def folder_of(module):
    """Returns the name of the folder of nanochat/ that a module belongs to, or "scripts"."""
    first, *rest = module.split(".")
    return rest[0] if first == "nanochat" and rest else first


def imports_of(path):
    """Returns the names of the modules that a file imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            # `from nanochat.run import checkpoint` imports a module, `from nanochat.common import flag` does not.
            found |= {name if (name := f"{node.module}.{alias.name}") in MODULES else node.module
                      for alias in node.names}
    return found


@pytest.fixture(scope="module")
def imports():
    """{module: names of the modules that it imports}. Not at the top: every process of the tests imports this file."""
    return {module: imports_of(path) for module, path in MODULES.items()}


def test_imports_go_down_the_list_of_folders_and_never_up(imports):
    assert not imports["nanochat"]
    order = {module: CORE.index(folder_of(module)) for module in MODULES if folder_of(module) in CORE}
    upward = [f"{module} imports {name}" for module in order for name in imports[module] & order.keys()
              if order[name] < order[module]]
    assert not upward


def test_the_core_imports_no_room_and_rooms_do_not_import_each_other(imports):
    found = [f"{module} imports {name}" for module in MODULES for name in imports[module] & MODULES.keys()
             if folder_of(name) in ROOMS and folder_of(module) not in (folder_of(name), "scripts")]
    assert not found


def test_nothing_imports_a_script_but_scripts(imports):
    assert not [module for module in MODULES if folder_of(module) != "scripts"
                and any(folder_of(name) == "scripts" for name in imports[module] & MODULES.keys())]


def starts_of_python(path):
    """Yields each call in a file that starts another Python, and the names of its keyword arguments."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("subprocess.run", "subprocess.Popen"):
            if "sys.executable" in ast.unparse(node.args[0]) or ast.unparse(node.args[0]) == "command":
                yield ast.unparse(node), {keyword.arg for keyword in node.keywords}


def test_a_process_of_the_project_ends_with_its_parent_or_has_a_time_limit():
    starts = [(path, *start) for path in SOURCES for start in starts_of_python(path)]
    assert len(starts) >= 5
    assert not [(path, call) for path, call, keywords in starts
                if "timeout" not in keywords and "end_with_parent" not in call
                and path.name != "sandbox.py"]  # which asks bubblewrap and setpriv


def test_no_modules_import_each_other_in_a_circle(imports):
    graph = {module: names & MODULES.keys() for module, names in imports.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_every_folder_is_in_the_list():
    assert {folder_of(module) for module in MODULES if module != "nanochat"} == {"scripts", *CORE, *ROOMS}


def test_only_a_few_folders_know_torch_xla(imports):
    """The others are ordinary PyTorch."""
    users = {module for module, names in imports.items() if any(name.split(".")[0] == "torch_xla" for name in names)}
    assert {folder_of(module) for module in users} == {"device", "kernels", "preflight"}


def test_the_library_neither_runs_a_script_nor_reads_the_command_line():
    texts = {path: (ROOT / path).read_text() for path in SOURCES if path.parts[0] == "nanochat"}
    assert not [path for path, text in texts.items() if re.search(r"""["']-m["'],\s*["']scripts\.""", text)]
    readers = [path for path, text in texts.items() if "sys.argv" in text]
    assert readers == [Path("nanochat/common.py")]  # whose parser does


def test_a_run_prints_by_say_alone_which_escapes_what_a_terminal_would_obey():
    texts = {path: (ROOT / path).read_text() for path in SOURCES}
    core = [path for path in texts if path.parts[1] in ("checkpoint", "train", "record", "run")]
    assert core and not [path for path in core if re.search(r"\bprint\(|warnings\.warn|console=print", texts[path])]


def test_a_script_reads_its_flags_without_torch_which_takes_seconds_to_import():
    """So --help comes at once."""
    names = sorted(path.stem for path in (ROOT / "scripts").glob("[a-z]*.py"))
    program = f"import importlib, sys; print([name for name in {names} if " \
              "importlib.import_module(f'scripts.{name}') and 'torch' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert len(names) > 10 and done.stdout == "[]\n", done.stdout + done.stderr


def test_the_programs_of_dev_find_what_they_import():
    for path in (ROOT / "dev").glob("*.py"):
        importlib.import_module(f"dev.{path.stem}")


def test_no_python_file_is_longer_than_600_lines():
    lines = {path: len((ROOT / path).read_text().splitlines())
             for path in [*SOURCES, *(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py"))]}
    assert not {path: count for path, count in lines.items() if count > MAX_LINES}


def test_the_tests_of_a_group_run_in_one_process(request):
    """pytest-xdist 3.8.0 sends them anywhere under pytest 9.2.0, and each process makes their fixtures again."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("make test runs groups of tests")
    assert request.node.nodeid.endswith("@tests/test_structure.py")


def test_the_program_grows_only_on_purpose():
    assert sum(len((ROOT / path).read_text().splitlines()) for path in SOURCES) <= MOST_LINES


@pytest.mark.slow
def test_what_is_installed_has_all_modules_and_works_outside_of_a_checkout(tmp_path):
    """Builds the packages that a wheel contains. The shipped tokenizer is among them."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    for name in ("nanochat", "scripts", "tokenizer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py",
                    f"--build-lib={installed}"], cwd=source, check=True, timeout=100)
    assert sorted(path.relative_to(installed) for path in installed.rglob("*.py")) == SOURCES
    for path in ("device/prices.csv", "serve/page.html"):
        assert (installed / "nanochat" / path).exists()
    assert len(list((installed / "nanochat/judge/problem_set").glob("*.cpp"))) >= 40
    program = """
import importlib, sys
for module in sys.argv[1:]:
    assert importlib.import_module(module).__file__.startswith(sys.path[0]), module
from nanochat.data.tokenizer import load_tokenizer
print(load_tokenizer().sha256)
"""
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{program}",
         *(MODULES.keys() - {FOR_TRANSFORMERS})],
        cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == load_tokenizer(SHIPPED_DIR).sha256
