"""A check of a chip, from its file to the preflight's verdict."""
import json
from types import SimpleNamespace

import pytest

from nanochat.common import BadInput
from nanochat.device.tpu import parse_accelerator
from nanochat.preflight import estimate, measured
from nanochat.preflight.chip import Finding
from nanochat.preflight.describe import describe_measured
from nanochat.preflight.measured import corrected, find_checks, measurements, split

PLAN = SimpleNamespace(config=SimpleNamespace(n_layer=16), mesh=SimpleNamespace(fsdp=1, tensor=1), micro_steps=2)
PARTS = {"products": 0.08, "attention": 0.01, "collectives": 0.01}
PROGRAMS = {"micro_step": {"name": "micro_step", "runs_per_step": 2, "estimated_s": 0.1, "low_s": 0.05, "high_s": 0.15,
                           "parts_s": PARTS},
            "update": {"name": "update", "runs_per_step": 1, "estimated_s": 0.1, "low_s": 0.1, "high_s": 0.1}}
# What a chip could have found: products take a tenth longer than estimated, attention as long, collectives and the
# update half as long again
FOUND = {"micro_step": 0.088 + 0.01 + 0.015, "long rows": 0.088 + 0.02 + 0.015, "update": 1.5, "collectives": 1.5,
         "memory": 1.125, "host": 1.0, "tokens/s": None}
FOUND |= {"micro_step": FOUND["micro_step"] / 0.1, "long rows": FOUND["long rows"] / 0.11}
PARTS_OF = {"micro_step": PARTS, "long rows": PARTS | {"attention": 0.02}}
FACTORS = {"products": 1.1, "attention": 1.0, "collectives": 1.5, "update": 1.5, "memory": 1.125, "host": 1.0}


@pytest.fixture(autouse=True)
def needs_libtpu():
    pytest.importorskip("libtpu")


def write(path, plan=PLAN, accelerator="v5litepod-8", date="2026-12-01", **factors):
    findings = [Finding(name, True, factor=factor, parts=PARTS_OF.get(name))
                for name, factor in (FOUND | factors).items()]
    found = measurements({"programs": findings}, plan, accelerator)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"version": 1, "date": date, "measured": found}))
    return path


def read(path=None, plan=PLAN, accelerator="v5litepod-4"):
    return find_checks(path, plan, parse_accelerator(accelerator))


def step_of(programs):
    plan = SimpleNamespace(units=lambda first, last: 1000 * (last - first), flops=lambda first, last: 1e12)
    return estimate.report_stage(*programs.values(), 0, 1, plan, parse_accelerator("v5litepod-4"))


def test_a_measured_chip_corrects_the_estimates_by_category_and_narrows_the_bar(tmp_path):
    checks = read(write(tmp_path / "check.json"))
    assert checks == [("2026-12-01", pytest.approx(FACTORS))]
    before, after = step_of(PROGRAMS), step_of(corrected(PROGRAMS, checks))
    assert before["step_s"] == pytest.approx(0.3) and after["step_s"] == pytest.approx(2 * 0.113 + 0.15)
    assert after["step_low_s"] == pytest.approx(2 * 0.9 * 0.113 + 0.15)
    assert after["step_high_s"] == pytest.approx(2 * 1.1 * 0.113 + 0.15)
    line = describe_measured({"checks": checks, "by_compiler": before}, after)
    assert "by the compiler 300 ms (200 to 400); by your check of 2026-12-01 × 1.25 (" in line
    assert "products × 1.10, attention × 1.00" in line


@pytest.mark.parametrize("totals, parts, same", [
    ([1.2], [PARTS], 1.2), ([1.2, 1.3], [PARTS, PARTS | {"attention": 0.5}], None),
    ([1.2, 0.3], [PARTS, PARTS | {"attention": 0.5}], 1.2),  # attention would take less than no time
    ([1.2, 1.2], [PARTS | {"attention": 0}] * 2, 1.2)])
def test_one_shape_tells_products_and_attention_not_apart(totals, parts, same):
    found = split([Finding("", True, factor=factor, parts=of_it) for factor, of_it in zip(totals, parts, strict=True)],
                  totals[0])
    assert (found["attention"] == found["products"]) == (same is not None)
    assert same is None or found["products"] == pytest.approx(same)


def test_loaders_that_do_not_feed_the_chips_make_a_step_longer(tmp_path):
    slow = step_of(corrected(PROGRAMS, read(write(tmp_path / "check.json", host=2.0))))
    assert slow["step_s"] == pytest.approx(2 * (2 * 0.113 + 0.15))


def test_all_known_checks_of_a_kind_of_chip_correct_a_run_by_themselves(tmp_path, base_dir, monkeypatch):
    """Another depth is no matter, what is of one model is left out, and other kinds of chips teach nothing."""
    base_dir.mkdir()
    monkeypatch.setattr(measured, "CHIPS", tmp_path / "chips")
    assert read() == []
    other = SimpleNamespace(config=SimpleNamespace(n_layer=12), mesh=PLAN.mesh)
    write(tmp_path / "chips" / "a.json", plan=other, host=2.0)
    assert [factors for _, factors in read()] == [pytest.approx({name: FACTORS[name] for name in (
        "products", "attention", "collectives", "update")})]
    write(base_dir / "chips" / "nano-1.json", date="2026-12-09", update=0.5)
    write(tmp_path / "chips" / "b.json", accelerator="v6e-8", update=2.9)
    (tmp_path / "chips" / "c.json").write_text("{}")
    update = corrected(PROGRAMS, read())["update"]
    assert [update[name] for name in ("low_s", "estimated_s", "high_s")] == pytest.approx([0.05, 0.1, 0.15])
    line = describe_measured({"checks": read(), "by_compiler": step_of(PROGRAMS)}, step_of(PROGRAMS))
    assert "by 2 checks until 2026-12-09" in line and "update × 1.00" in line


@pytest.mark.parametrize("given, what", [
    ({"plan": SimpleNamespace(config=SimpleNamespace(n_layer=12), mesh=PLAN.mesh)}, "depth 12"),
    ({"plan": SimpleNamespace(config=PLAN.config, mesh=SimpleNamespace(fsdp=8, tensor=1))}, "mesh_fsdp 8"),
    ({"accelerator": "v6e-8"}, "v6e"), ({"update": 4.0}, "4 for update"), ({"collectives": 0.3}, "0.3 for collec"),
    ({"update": None}, "lacks the time")])
def test_a_file_of_something_else_is_refused_with_the_reason(given, what, tmp_path):
    with pytest.raises(BadInput, match=f"--measured=.*{what}.*tpu_check"):
        read(write(tmp_path / "check.json", **given))


def test_a_file_of_another_libtpu_or_of_no_check_is_refused(tmp_path):
    path = write(tmp_path / "check.json")
    path.write_text(path.read_text().replace('"libtpu": "', '"libtpu": "9.'))
    with pytest.raises(BadInput, match="of libtpu 9."):
        read(path)
    for text in ("", "[]", "{}", '{"date": "x", "measured": null}'):
        path.write_text(text)
        with pytest.raises(BadInput, match="no measurements"):
            read(path)
