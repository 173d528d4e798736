"""What happens between two steps, for any horizon, any flags and any moment at which a run is stopped and resumed."""
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat.checkpoint.meta import Meta
from nanochat.common import BadInput
from nanochat.device.mesh import Mesh
from nanochat.device.ranks import Dist
from nanochat.infer import loss_eval
from nanochat.infer.loss_eval import Evaluation
from nanochat.model.rates import OptimConfig, lr_multiplier
from nanochat.train import evaluation, language
from nanochat.train.flags import Flags, LanguageRecordFlags, parse_flags
from nanochat.train.language import LanguageTask
from nanochat.train.plan import make_plan
from nanochat.train.trainer import events_due
from tests.conftest import last_of_each

EVERY = st.one_of(st.just(-1), st.integers(1, 60))
FRACTION = st.floats(0, 1)
OPTIM = st.builds(OptimConfig, warmup_steps=st.integers(0, 100), warmdown_ratio=FRACTION, final_lr_frac=FRACTION)


@given(st.integers(0, 500), st.integers(1, 300), OPTIM)
@example(171, 10, OptimConfig())  # which was -30.35
def test_no_learning_rate_is_negative_or_above_its_own(step, num_iterations, config):
    assert 0 <= lr_multiplier(step, num_iterations, config) <= 1
    assert lr_multiplier(num_iterations + step, num_iterations, config) == lr_multiplier(num_iterations, num_iterations,
                                                                                       config)


@given(record=st.builds(LanguageRecordFlags, save_every=EVERY, eval_every=EVERY, sample_every=EVERY,
                        log_every=EVERY),
       first_step=st.integers(0, 250), horizons=st.lists(st.integers(1, 200), min_size=1, max_size=4),
       stop_after=st.integers(0, 120))
@settings(max_examples=300)
def test_every_process_ends_at_its_horizon_and_saves_what_it_has_trained(record, first_step, horizons, stop_after):
    """Each horizon is that of another process, which resumes the one before; the last of them is not told to stop."""
    saved = step = first_step
    plan = SimpleNamespace(mesh=Mesh())
    events = LanguageTask(Flags(record=record), plan, None, None, None).events()
    for number, horizon in enumerate(horizons):
        begun_at = step = saved
        for _ in range(1000):
            is_stopping = number < len(horizons) - 1 and step == begun_at + stop_after
            due = events_due(events, record, step, begun_at, horizon, is_stopping=is_stopping)
            assert due.log or not (due.save or due.events)
            saved = step if due.save else saved
            if due.end:
                break
            step += 1
        assert due.end and step <= max(begun_at, horizon), "it trains past its horizon"
        assert saved == step or record.save_every == -1
        if not is_stopping:
            assert step == max(begun_at, horizon)
            assert (events[0] in due.events) == (record.eval_every > 0)
            assert events[1] not in due.events or step > 0


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8)), st.integers(1, 8),
       st.one_of(st.just(-1), st.integers(1, 40).map(lambda n: 256 * n)), st.one_of(st.just(-1), st.integers(1, 500)),
       st.integers(1, 600))
@settings(max_examples=100, deadline=None)
def test_a_plan_has_whole_steps_and_a_resumed_run_keeps_its_batches_and_its_end(
        world_size, later_world_size, device_batch_size, total_batch_size, num_iterations, step):
    argv = ["--depth=1", "--model_dim=64", "--num_heads=1", "--max_seq_len=32",
            f"--device_batch_size={device_batch_size}", f"--total_batch_size={total_batch_size}",
            f"--num_iterations={num_iterations}"]
    flags = parse_flags(argv)
    try:
        plan = make_plan(flags, 256, "cpu", world_size)
        meta = Meta(step, asdict(plan.config), "", "", flags.as_dict(), "",
                    total_batch_size=plan.total_batch_size)
        later = make_plan(flags, 256, "cpu", later_world_size, meta)
    except BadInput as error:
        assert "\n" not in str(error)
        return
    assert plan.num_iterations >= 1 and (num_iterations < 0 or plan.num_iterations == num_iterations)
    assert (later.num_iterations, later.total_batch_size) == (plan.num_iterations, plan.total_batch_size)
    for one in (plan, later):
        micro = one.device_batch_size * 32 * one.world_size
        assert one.micro_steps * micro == one.total_batch_size > 0
    assert plan.tokens(0, step) + plan.tokens(step, plan.num_iterations + step) == \
        plan.tokens(0, plan.num_iterations + step)


@pytest.fixture
def small_task(tiny, tmp_path):
    """Makes the LanguageTask of a tiny run with rows of 64 tokens and other flags."""
    return lambda *flags: language.make_task(parse_flags(last_of_each(
        "--run=x", *tiny, "--max_seq_len=64", "--total_batch_size=128", *flags)), "cpu", 1, tmp_path)


@pytest.mark.parametrize("iterations, tokens", [
    (50, 2**16), (50_000, 50_000 * 128 // 20), (10_000_000, 10 * 2**20)])
def test_an_evaluation_has_a_twentieth_of_the_tokens_of_its_run_within_limits(small_task, iterations, tokens):
    task = small_task(f"--num_iterations={iterations}", "--eval_tokens=-1")
    assert task.flags.record.eval_tokens == tokens


@pytest.mark.parametrize("last", [2, 9])
def test_an_evaluation_ends_with_the_batch_after_which_the_run_is_told_to_stop(small_task, last):
    """Of the text, whose batches are 8, or of the middles."""
    batches = []

    def model(ids, targets):
        batches.append(ids)
        return ids.new_ones(ids.shape)

    task = small_task("--fim_rate=0.5", "--eval_tokens=1280")
    found = evaluation.evaluate(task, SimpleNamespace(compiled_model=model), Dist("cpu", torch.device("cpu")), 0,
                                is_cut_short=lambda: len(batches) == last)
    assert found == {} and len(batches) == last


@pytest.mark.parametrize("eval_tokens, sets, tokens, of_middles, batches", [
    (1, "a", 64, 64, {" of a": 1, " of the middles": 1}),
    (6400, "ab", 5632, 704, {" of a": 22, " of b": 22, " of the middles": 6})])
def test_all_sets_and_middles_share_the_tokens_and_each_counts_its_own_batches(
        monkeypatch, capsys, small_task, corpus_dir, eval_tokens, sets, tokens, of_middles, batches):
    def read_all(model, loader, token_bytes, dist, is_cut_short, view, copies):
        assert not any(is_cut_short() for _ in loader)
        return Evaluation(1.0, 1, is_whole_text=False)

    monkeypatch.setattr(evaluation, "bits_per_byte", read_all)
    monkeypatch.setattr(loss_eval, "PROGRESS_S", -1)
    places = ",".join(f"{name}={corpus_dir}/val" for name in sets)
    task = small_task("--fim_rate=0.5", f"--eval_tokens={eval_tokens}", f"--val_dir={places}")
    evaluation.evaluate(task, SimpleNamespace(compiled_model=None), Dist("cpu", None), 0, is_cut_short=lambda: False)
    lines = [f"evaluated {done} of {count} batches{what}" for what, count in batches.items() for done in range(count)]
    assert capsys.readouterr().out.splitlines() == [
        f"evaluating {tokens:,} tokens of the validation text, and {of_middles:,} as fill-in-the-middle", *lines]
