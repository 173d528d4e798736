"""A check of a chip, from its file to the preflight's verdict."""
import json
from types import SimpleNamespace

import pytest

from nanochat.common import BadInput
from nanochat.device.tpu import parse_accelerator
from nanochat.preflight import estimate
from nanochat.preflight.chip import Finding
from nanochat.preflight.describe import describe_measured
from nanochat.preflight.measured import corrected, measurements, read_measured

PLAN = SimpleNamespace(config=SimpleNamespace(n_layer=16), mesh=SimpleNamespace(fsdp=1, tensor=1), micro_steps=2)
# What a chip could have found: micro-steps take a tenth longer than estimated, updates a fifth less
FACTORS = {"micro_step": 1.1, "update": 0.8, "memory": 1.125, "tokens/s": None}
PROGRAMS = {"micro_step": {"name": "micro_step", "runs_per_step": 2, "estimated_s": 0.2, "low_s": 0.1, "high_s": 0.3},
            "update": {"name": "update", "runs_per_step": 1, "estimated_s": 0.1, "low_s": 0.1, "high_s": 0.1}}


def write(path, plan=PLAN, accelerator="v5litepod-8", **factors):
    findings = [Finding(name, True, factor=factor) for name, factor in (FACTORS | factors).items()]
    measured = measurements({"programs": findings}, plan, accelerator)
    path.write_text(json.dumps({"version": 1, "date": "2026-12-01", "measured": measured}))
    return path


def read(path, plan=PLAN, accelerator="v5litepod-4"):
    return read_measured(path, plan, parse_accelerator(accelerator))


def test_a_measured_chip_corrects_the_estimates_of_its_kind(tmp_path):
    pytest.importorskip("libtpu")
    date, factors = read(write(tmp_path / "check.json"))
    assert factors == pytest.approx({"micro_step": 1.1, "update": 0.8, "memory": 1.125})
    plan = SimpleNamespace(units=lambda first, last: 1000 * (last - first), flops=lambda first, last: 1e12)
    tpu_slice = parse_accelerator("v5litepod-4")
    before, after = (estimate.report_stage(list(programs.values()), 0, 1, plan, tpu_slice)
                     for programs in (PROGRAMS, corrected(PROGRAMS, factors)))
    assert before["step_s"] == pytest.approx(0.5) and after["step_s"] == pytest.approx(2 * 0.22 + 0.08)
    assert after["step_high_s"] == pytest.approx(2 * 0.33 + 0.08)
    line = describe_measured({"date": date, "factors": factors, "by_compiler": before}, after)
    assert "by the compiler 500 ms (300 to 700)" in line and "2026-12-01 × 1.04" in line


@pytest.mark.parametrize("given, what", [
    ({"plan": SimpleNamespace(config=SimpleNamespace(n_layer=12), mesh=PLAN.mesh)}, "depth 12"),
    ({"plan": SimpleNamespace(config=PLAN.config, mesh=SimpleNamespace(fsdp=8, tensor=1))}, "mesh_fsdp 8"),
    ({"accelerator": "v6e-8"}, "v6e"), ({"update": 4.0}, "4 for update"), ({"micro_step": 0.3}, "0.3 for micro"),
    ({"update": None}, "lacks the time")])
def test_a_file_of_something_else_is_refused_with_the_reason(given, what, tmp_path):
    pytest.importorskip("libtpu")
    with pytest.raises(BadInput, match=f"--measured=.*{what}.*tpu_check"):
        read(write(tmp_path / "check.json", **given))


def test_a_file_of_another_libtpu_or_of_no_check_is_refused(tmp_path):
    pytest.importorskip("libtpu")
    path = write(tmp_path / "check.json")
    path.write_text(path.read_text().replace('"libtpu": "', '"libtpu": "9.'))
    with pytest.raises(BadInput, match="of libtpu 9."):
        read(path)
    for text in ("", "[]", "{}", '{"date": "x", "measured": null}'):
        path.write_text(text)
        with pytest.raises(BadInput, match="no measurements"):
            read(path)
