"""Each piece of advice names a measurement, a flag and its value; the largest loss of time comes first."""
import json

import pytest

from scripts.tpu_advice import main
from tests.checkpoint.states import make_meta

# Written by base_train on two XLA devices of a CPU: the first line of a process, and two in the middle of it.
RECORDED = [json.loads(line) for line in """\
{"step": 1, "time": 1795257657.186, "loss": 5.598400115966797, "grad_norm": 2.42625, "lr_multiplier": 0.025, \
"step_ms": 14220.868, "tokens_per_s": 36.0, "mfu": null, "tokens": 512, "time_left_s": 5674.1, "epoch": 0.0002, \
"goodput": 0.0138, "seconds": 28.145945219999447, "data_wait": 1.5197172900739596e-05, "compilations": 6, \
"compile_s": 26.087703733, "host_dispatch": 0.003590231390092964}
{"step": 185, "time": 1795257796.33, "loss": 2.2024729251861572, "grad_norm": 5.10643, "lr_multiplier": 1.0, \
"step_ms": 299.9811284000316, "tokens_per_s": 1706.7740318558856, "mfu": null, "tokens": 94720, "time_left_s": 64.4, \
"epoch": 0.0022, "goodput": 0.4193, "seconds": 137.61448107899963, "data_wait": 0.0018761686874130962, \
"compilations": 6, "compile_s": 39.843916632, "host_dispatch": 0.39961658601347866}
{"step": 195, "time": 1795257799.194, "loss": 2.2886805534362793, "grad_norm": 7.45588, "lr_multiplier": 1.0, \
"step_ms": 295.67089040010615, "tokens_per_s": 1731.65508213255, "mfu": null, "tokens": 99840, "time_left_s": 60.6, \
"epoch": 0.0022, "goodput": 0.4311, "seconds": 140.47840557199964, "data_wait": 0.0028692652112377493, \
"compilations": 6, "compile_s": 39.843916632, "host_dispatch": 0.42633903198725914}
""".splitlines()]
FLAGS = {"depth": 2, "max_seq_len": 64, "kernel": "auto", "device_batch_size": 4, "tokenizer_threads": 2,
         "eval_every": 25, "eval_tokens": 8192, "save_every": 60, "sample_every": 200, "log_every": 5}


@pytest.fixture
def advise(tmp_path, capsys):
    """Returns the lines of advice for the recorded metrics, with the given values in the last two records."""

    def run(flags=FLAGS, **measured):
        records = [RECORDED[0], *({**record, **measured} for record in RECORDED[1:])]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if flags:
            (tmp_path / "step_000100").mkdir(exist_ok=True)
            (tmp_path / "step_000100" / "meta.json").write_text(json.dumps(make_meta(100, flags=flags).to_json()))
        main([str(tmp_path)])
        return capsys.readouterr().out.splitlines()[1:]

    return run


def test_where_nothing_is_wrong_nothing_is_advised(advise):
    assert advise() == ["nothing to advise: the measurements show nothing wrong"]
    seconds = {"seconds_train": 1000.0, "seconds_evaluate": 40.0, "seconds_save": 10.0, "seconds_compile": 120.0}
    memory = {"device_memory_peak_bytes": 15e9, "device_memory_limit_bytes": 16.9e9}
    assert advise(data_wait=0.03, host_dispatch=0.7, mfu=0.4, **seconds, **memory)[0].startswith("nothing to advise")


@pytest.mark.parametrize("measured, words", [
    ({"data_wait": 0.3}, ["waits for data for 30%", "--tokenizer_threads=4 (now 2)"]),
    ({"host_dispatch": 0.9},
     ["dispatching programs for 90%", "--device_batch_size=8 (now 4)", "--log_every=10 (now 5)"]),
    ({"recompiled": ["micro_step: rows is int32 (2, 17) and was int32 (2, 33)"]},
     ["compiled again 2 times", "for 13s", "rows is int32 (2, 17) and was int32 (2, 33)"]),
    ({"seconds_train": 75.0, "seconds_evaluate": 20.0, "seconds_save": 5.0},
     ["20% of the time goes into evaluating", "--eval_every=125 (now 25)", "--eval_tokens (now 8192)"]),
    ({"seconds_train": 70.0, "seconds_save": 30.0}, ["30% of the time goes into saving: --save_every=540 (now 60)"]),
    ({"seconds_train": 70.0, "seconds_lost": 30.0, "interruptions": 2, "compile_s": 1.0},
     ["30% of the time was lost to 2 interruptions (", "smaller --save_every (now 60)"]),
    ({"device_memory_peak_bytes": 7e9, "device_memory_limit_bytes": 16.9e9},
     ["peaks at 41% of 15.7 GiB", "--device_batch_size=8 (now 4) fits"]),
    ({"device_memory_peak_bytes": 9.3e9, "device_memory_limit_bytes": 16.9e9},
     ["peaks at 55% of 15.7 GiB", "--device_batch_size=8 (now 4) may fit",
      "--find_batch --depth=2 --max_seq_len=64 --kernel=auto"]),
])
def test_each_loss_is_named_with_its_measure_and_the_flag(advise, measured, words):
    said = advise(**measured)
    assert len(said) == 1 and said[0].startswith("1. ")
    for word in words:
        assert word in said[0]


@pytest.mark.parametrize("lost, saving, wanted", [
    (30.0, 10.0, "a smaller --save_every"), (10.0, 30.0, "--save_every=")])
def test_one_advice_at_most_says_how_often_to_save(advise, lost, saving, wanted):
    said = advise(seconds_train=60.0, seconds_lost=lost, seconds_save=saving, interruptions=2, compile_s=1.0)
    of_saving = [line for line in said if "--save_every" in line]
    assert len(of_saving) == 1 and wanted in of_saving[0]
    assert "lost to 2 interruptions" in "".join(said) and "replaced sooner" in "".join(said)


def test_events_that_are_off_or_follow_the_clock_get_no_impossible_flag(advise):
    (said,) = advise(flags=FLAGS | {"eval_every": -1}, seconds_train=75.0, seconds_evaluate=25.0)
    assert "evaluating: a larger --eval_every," in said
    (said,) = advise(flags=FLAGS | {"save_every_minutes": 2.5}, seconds_train=70.0, seconds_save=30.0)
    assert said.endswith("saving: --save_every_minutes=22.5 (now 2.5)")
    (said,) = advise(flags=FLAGS | {"save_every": -1}, seconds_train=70.0, seconds_lost=30.0, interruptions=1,
                     compile_s=1.0)
    assert "checkpoints (--save_every is off)" in said and "smaller" not in said
    (said,) = advise(seconds_train=0.0, seconds_sample=10.0)
    assert said.endswith("100% of the time goes into sampling: a larger --sample_every")


def test_every_interruption_counts_as_a_start_that_compiles(advise):
    said = advise(seconds_train=60.0, seconds_lost=20.0, seconds_compile=20.0, interruptions=5, compile_s=1.0)
    assert "lost to 5 interruptions" in "".join(said) and "at each of 6 starts" in "".join(said)


def test_the_largest_loss_comes_first_also_without_a_checkpoint(advise):
    said = advise(flags=None, data_wait=0.1, seconds_train=60.0, seconds_evaluate=30.0, seconds_sample=10.0,
                  device_memory_peak_bytes=7e9, device_memory_limit_bytes=16.9e9)
    assert [line.split()[0] for line in said[:4]] == ["1.", "2.", "3.", "4."]
    assert "30% of the time goes into evaluating: a larger --eval_every" in said[0]
    assert {"data" in said[1], "sampling" in said[2]} == {True} and "Device memory" in said[3]
    assert said[4] == "(no checkpoint next to the metrics, so the values of its flags are unknown)"


def test_flags_are_read_from_a_checkpoint_and_a_damaged_one_is_passed_over(advise, tmp_path):
    for step, meta in ((200, make_meta(200, flags=FLAGS).to_json()), (300, None)):
        (tmp_path / f"step_{step:06d}").mkdir()
        (tmp_path / f"step_{step:06d}" / "meta.json").write_text(json.dumps(meta))
    assert "--tokenizer_threads=4 (now 2)" in advise(flags=None, data_wait=0.3)[0]


def test_processes_that_were_started_again_after_a_pause_are_no_interruptions(advise):
    assert advise(seconds_train=90.0, seconds_compile=10.0, interruptions=0, compile_s=1.0)[0].startswith("nothing to")
