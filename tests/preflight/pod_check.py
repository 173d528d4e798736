"""tpu_check on one of several "hosts" of this machine, without its longest checks. tests/run/pod_host.py says how their
runs exchange gradients."""
from dataclasses import replace

from nanochat.common import run_script
from scripts import tpu_check

check_all = tpu_check.check_all


def check_with_pod_host(setting, *others):
    return check_all(replace(setting, trainer="tests.run.pod_host"), *others)


if __name__ == "__main__":
    tpu_check.check_all = check_with_pod_host
    for name in ("kernels", "programs", "host", "attention"):
        del tpu_check.CHECKS[name]
    run_script(tpu_check.main)
