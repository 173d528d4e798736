"""The notebook for free TPUs: its commands are those of the scripts, and it runs, is killed, and goes on."""
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pyarrow as pa
import pytest

from scripts import tpu_check
from tests.conftest import QUICK_START
from tests.test_documents import problem_of_module

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "start.ipynb"
SETTINGS, MACHINE, INSTALL, PREFLIGHT, CORPUS, TRAIN, COMPLETION, REPORT, PICTURE = range(1, 10)  # 0 is text
STUB = "#!/bin/sh\nprintf '%s\\0' \"$@\" >> \"$CALLS\"\nprintf '\\n\\0' >> \"$CALLS\"\n"


def sources():
    """Returns the text of each cell."""
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]


def in_folder(source, folder):
    """Returns a cell that uses `folder` instead of the folders of the sites."""
    for place in ("/tmp/nanochat", "/kaggle/working", "/content/drive/MyDrive"):
        source = source.replace(place, f"{folder}{place}")
    return source.replace("~/.nanochat_notebook", f"{folder}/settings")


def test_the_notebook_is_small_has_no_output_and_no_logic():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 10 and NOTEBOOK.stat().st_size <= 25_000
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    *shell, picture = [cell.source for cell in code]
    assert all(source.startswith("%%bash\nset -euo pipefail\n") for source in shell)
    assert "torch" not in picture and len(picture.splitlines()) <= 4
    assert all(f"\n# {number}. " in f"\n{source}" for number, source in enumerate([*shell, picture]))
    words = {word for source in shell for line in source.splitlines() for word in line.partition("#")[0].split()}
    # set -e lets all but the last command of `a && b` fail.
    assert not words & {"if", "for", "while", "case", "function", "&&"}


@pytest.mark.parametrize("site", ["kaggle", "colab"])
def test_every_command_of_the_notebook_is_accepted_by_its_parser(tmp_path, site):
    """bash runs the cells; in place of the programs it finds one that notes how it was called."""
    (tmp_path / "bin").mkdir()
    for name in ("python3", "pip", "uv", "git", "cp", "mv", "free"):
        (tmp_path / "bin" / name).write_text(STUB if name == "python3" else "#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "CALLS": str(tmp_path / "calls"), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    for source in sources()[SETTINGS:PICTURE]:
        if site == "colab":
            source = source.replace("# ACCELERATOR", "ACCELERATOR").replace("# MODEL", "MODEL")
        script = in_folder(source.removeprefix("%%bash\n"), tmp_path)
        subprocess.run(["bash"], input=script, text=True, env=env, check=True, capture_output=True, timeout=60)
    calls = [call.split("\0")[:-1] for call in (tmp_path / "calls").read_text().split("\n\0")[:-1]]
    modules = [call for call in calls if call[0] == "-m"]
    assert [call[1] for call in modules] == [f"scripts.{name}" for name in (
        "tpu_check", "tpu_preflight", "prepare_data", "base_train", "generate", "report")]
    assert f"--accelerator={'v5e-1' if site == 'colab' else 'v5e-8'}" in modules[1]
    assert ("/drive/" in str(modules[3])) == (site == "colab")
    (config,) = {word for call in modules for word in call if word.startswith("--config=")}
    Path(config.removeprefix("--config=")).write_text('kernel = "chunked"')  # as the check would, if flash failed
    assert not [problem for _, module, *arguments in modules if (problem := problem_of_module(module, *arguments))]


@pytest.mark.slow
def test_the_notebook_runs_and_a_new_session_goes_on_from_the_newest_checkpoint(tmp_path, byte_tokenizer_dir):
    def execute(last, num_iterations):
        """Runs the cells up to `last` in a new kernel, with a small model and on two XLA devices of this CPU. All
        commands find the small tokenizer in the base directory, because 65,536 tokens take most of the time. The first
        session, whose check takes minutes, has no preflight, and the second takes the check of the first."""
        shutil.copytree(byte_tokenizer_dir, tmp_path / "tmp" / "nanochat" / "tokenizer")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        for cell, source in zip(notebook.cells, sources(), strict=True):
            cell.source = in_folder(source, tmp_path)
        notebook.cells[SETTINGS].source = with_settings(notebook.cells[SETTINGS].source, num_iterations)
        notebook.cells[INSTALL].source = "%%bash\ntrue"
        check, comment, preflight = notebook.cells[PREFLIGHT].source.partition("# Does the run fit")
        check = check.replace("tpu_check $MODEL", "tpu_check $MODEL --minutes=60")
        notebook.cells[PREFLIGHT].source = check + (comment + preflight if last == PICTURE else "")
        notebook.cells = notebook.cells[:last + 1]
        nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
        return ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells], \
            notebook.cells[-1].get("outputs", [])

    text, _ = execute(TRAIN, 2)
    kept = tmp_path / "kaggle" / "working" / "nanochat"
    check = (kept / "check.json").read_text()
    report = json.loads(check)
    failed = {each["what"] for findings in report["checks"].values() for each in findings if not each["holds"]}
    # XLA_FLAGS is of these tests, and other tests may take the memory.
    assert failed - {"free memory of the host"} == {"no foreign variables"}, text[PREFLIGHT]
    assert report["checks"].keys() == tpu_check.CHECKS.keys() and len(check) < 64_000
    assert not [name for name in (socket.gethostname(), str(tmp_path)) if name in check]
    assert "check.toml gives" in text[TRAIN] and "step 00002/00002" in text[TRAIN]
    shutil.rmtree(tmp_path / "tmp" / "nanochat")  # the session ends, and with it all but the folder that is kept
    text, (picture,) = execute(PICTURE, 4)
    assert "step 00003/00004" in text[TRAIN] and "step 00004/00004" in text[TRAIN]
    assert "step 00001/" not in text[TRAIN]
    assert "Recommendations for start:" in text[REPORT]
    assert "#include <vector>\n\nnamespace" in text[COMPLETION]
    assert len(picture["data"]["image/png"]) > 10_000


def with_settings(source, num_iterations):
    """Returns the cell of settings with lines at its end for a small model on this machine."""
    headers = pa.get_include()
    lines = f"""ACCELERATOR=v5e-1 PROJECTS= CORPUS="--source={headers}/arrow,{headers}/parquet --val_projects=parquet"
MODEL="--depth=1 --model_dim=128 --num_heads=1 --max_seq_len=128 --device_batch_size=1 --total_batch_size=256"
MODEL="$MODEL --device_type=xla --log_every=1"
HORIZON="--num_iterations={num_iterations} --eval_tokens=2048"
export CPU_NUM_DEVICES=2 PYTHONPATH={ROOT}:{QUICK_START} PATH={Path(sys.executable).parent}:$PATH
unset PJRT_DEVICE
"""
    return source.replace("\nEND\n", f"\n{lines}END\n")
