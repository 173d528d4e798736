"""base_train whose --code_eval_every judges six problems. It runs in the warm processes of warm.py."""
from unittest import mock

from nanochat.judge import code_eval
from nanochat.judge.problems import read_problems
from scripts import base_train


def main(argv):
    some = read_problems()[:6]
    with mock.patch.object(code_eval, "read_problems", lambda: some):
        return base_train.main(argv)
