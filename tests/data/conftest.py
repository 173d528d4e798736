"""A user who may not read everything, for tests of what is said then."""
import os
import shutil
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534


@pytest.fixture
def as_nobody():
    """Yields a folder, and a function that calls another one as the owner of the folder, who may not read everything.

    The owner is nobody if root runs the tests, else the user who does.
    """
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0
    if is_root:
        os.chown(folder, NOBODY, NOBODY)

    def run(function):
        os.seteuid(NOBODY if is_root else os.geteuid())
        try:
            return function()
        finally:
            os.seteuid(os.getuid())
    yield folder, run
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)
    shutil.rmtree(folder)
