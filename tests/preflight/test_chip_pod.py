"""The check of a TPU with several hosts: two processes of this machine."""
import json
import sys

import pytest

from tests.deploy.conftest import eventually
from tests.run.life import Life

pytestmark = pytest.mark.slow
SMALL = ("--device_type=xla", "--depth=1", "--model_dim=128", "--num_heads=1", "--max_seq_len=64",
         "--device_batch_size=1")


@pytest.fixture
def start(tmp_path, byte_tokenizer_dir):
    """Starts the check on two hosts and returns their Lives."""
    lives = []

    def run(*flags, port="7790", **of_second):
        for index in (0, 1):
            lives.append(Life(
                [sys.executable, "-m", "tests.preflight.pod_check", *SMALL, f"--tokenizer_dir={byte_tokenizer_dir}",
                 *flags],
                {"NANOCHAT_HOSTS": "127.0.0.1,127.0.0.2", "NANOCHAT_HOST_INDEX": str(index),
                 "NANOCHAT_POD_PORT": port, "NANOCHAT_HOST_NAME": f"w{index}", "CPU_NUM_DEVICES": "1",
                 "NANOCHAT_BASE_DIR": str(tmp_path / f"w{index}"), **(of_second if index else {})}, 600))
        return lives

    yield run
    for life in lives:
        life.kill()


def test_hosts_check_together_and_what_fails_on_one_is_in_the_table_of_all(start, tmp_path):
    lives = start(f"--checkpoint_mirror={tmp_path}/mirror", "--minutes=30", TPU_ODD="1")
    reports = []
    for index, life in enumerate(lives):
        assert life.end() == 1, "\n".join(each.text[-4000:] for each in lives)
        reports.append(json.loads((tmp_path / f"w{index}/check/check.json").read_text())["checks"])
    assert reports[0] == reports[1] and len(reports[0]) == 4
    found = {each["what"]: each for findings in reports[0].values() for each in findings}
    assert {"flash trains", "with the same bits", "a killed rank is named"} <= found.keys()
    foreign = ["no foreign variables", "host 1: no foreign variables"]  # both have some of the tests
    wrong = [what for what, each in found.items() if not each["holds"]]
    assert [what for what in wrong if "free memory" not in what] == foreign  # other tests may need the memory
    assert ["TPU_ODD" in found[what]["figure"] for what in foreign] == [False, True]
    assert not list((tmp_path / "mirror").glob("*"))


def test_what_the_runs_have_copied_is_deleted_if_a_host_dies(start, tmp_path):
    first, second = start(f"--checkpoint_mirror={tmp_path}/mirror", "--minutes=30")
    eventually(lambda: list((tmp_path / "mirror").glob("tpu_check_*/current/*")), 300)
    second.kill()
    assert first.end() == 1 and "host w1 has ended" in first.text
    assert not list((tmp_path / "mirror").glob("*"))


@pytest.mark.parametrize("flags, port, words", [
    ((), "7790", "need --checkpoint_mirror"), (("--checkpoint_mirror=/nowhere",), "65535", "leaves no port 65537")])
def test_a_pod_without_a_mirror_or_a_port_is_refused(start, flags, port, words):
    for life in start(*flags, port=port):
        assert life.end() == 2 and words in life.text
