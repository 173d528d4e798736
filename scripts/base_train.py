"""Pre-trains a GPT, on every chip of a TPU VM or on whatever is there:

    python3 -m scripts.base_train --depth=16 --num_iterations=50000 --device_batch_size=8 --max_seq_len=1024 --run=NAME

On a laptop, the same program over two XLA devices of its CPU:

    CPU_NUM_DEVICES=2 python3 -m scripts.base_train --depth=4 --num_iterations=100 --device_batch_size=4 \
        --max_seq_len=256 --total_batch_size=4096 --device_type=xla

On GPUs: torchrun --nproc_per_node=8 -m scripts.base_train … A run of a name that has a checkpoint goes on from it.
No line at module level touches the XLA runtime: xmp.spawn starts a process for each chip, and they start theirs.
"""
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from nanochat.common import BadInput, get_base_dir, require_writable_dir, run_script
from nanochat.data.lanes import NUM_LANES
from nanochat.data.loader import DataLoader, SyntheticLoader
from nanochat.data.shards import fingerprint, list_shards, open_shards
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device import tpu
from nanochat.device.collectives import thread_barrier
from nanochat.device.programs import one_program
from nanochat.device.ranks import (
    compute_cleanup,
    compute_init,
    prepare_xla_environment,
    print0,
    print_banner,
    resolve_device_type,
)
from nanochat.infer.engine import Engine
from nanochat.kernels.choose import get_kernels
from nanochat.model.flops import mfu
from nanochat.model.gpt import GPT
from nanochat.model.optim import MuonAdamW
from nanochat.record.goodput import Goodput
from nanochat.record.metrics import MetricsLogger
from nanochat.record.observe import Observer, Profile, describe_compiling, parse_profile_steps
from nanochat.run import checkpoint, checkpoint_files, watchdog
from nanochat.run import stopping as preemption
from nanochat.run.meta import Meta, load_meta, require_match, restore_rng, rng_state
from nanochat.run.mirror import Mirror
from nanochat.run.processes import (
    begin_as_rank,
    end_process_on_error,
    exclusive_use,
    expected_world_size,
    hosts,
    run_preflight,
)
from nanochat.train.flags import compute_dtype, is_sharded, optim_config, parse_args
from nanochat.train.loss_eval import bits_per_byte
from nanochat.train.nonfinite import BadSteps
from nanochat.train.plan import describe_plan, make_plan, peak_flops

# In the run's folder: see stopping.py and watchdog.py; the last is there once a run has come to its end.
REQUESTS_FILE, HEARTBEATS_FILE, FINISHED_FILE = ".requests", ".heartbeats", ".finished"
SAMPLE_PROMPTS = ("#include <", "template <typename T>\nclass", "int main(int argc, char** argv) {")


# -----------------------------------------------------------------------------
# The first program of a step; the other is MuonAdamW.update


def micro_step(model, rows, loss_sum, scale):
    """Forward and backward of rows (B, T + 1): adds to the gradients, and `scale` × the mean loss to `loss_sum`.

    `scale` is a tensor (): a Python number would be part of the program, and another one would compile it again.
    """
    loss = model(rows[:, :-1], rows[:, 1:], reduction="mean") * scale
    loss.backward()
    loss_sum += loss.detach()


# -----------------------------------------------------------------------------
# A run, in every rank


class Trainer:
    """One rank's part of a run."""

    def __init__(self, args, dist, checkpoint_path=None):
        self.args, self.dist = args, dist
        self.tokenizer = load_tokenizer(args.tokenizer_dir)
        self.run_dir = require_writable_dir(get_run_dir(args))
        restored = checkpoint.load(checkpoint_path) if checkpoint_path else None
        meta = restored.meta if restored else None
        self.plan = make_plan(args, self.tokenizer.n_vocab, self.dist.world_size, meta)
        self.goodput = Goodput(meta.seconds, meta.time) if meta else Goodput()
        self.interruptions = meta.interruptions + 1 if meta else 0
        self.start_step = self.step = meta.step if meta else 0
        self.observer = Observer(dist)
        self.profile = Profile(parse_profile_steps(args.profile_steps, self.plan.num_iterations),
                               self.run_dir / "profile", dist)
        with self.goodput.span("load"):
            self.loader = self.open_loader(restored.lane_states if restored else None)  # reads while the model is made
            self.build_model(restored)
        self.engine = Engine(self.model, self.tokenizer, self.dist)
        self.last_batch = None  # knows where the lanes stand after it
        self.pending, self.window_start = [], time.monotonic()  # what steps since the last line of the log returned
        self.bad_steps = BadSteps(args.max_bad_steps, **(meta.nonfinite_steps if meta else {}))
        self.heartbeats, self.step_seconds = watchdog.Heartbeats(self.run_dir / HEARTBEATS_FILE), []
        self.requests = preemption.Requests(self.run_dir / REQUESTS_FILE, dist.rank, dist.world_size)
        self.saved_step, self.saved_at, self.save_is_asked = self.step, time.monotonic(), False
        self.logger = self.mirror = self.saver = None
        if self.dist.rank == 0:
            self.mirror = open_mirror(args)
            print_banner()
            print0("\n".join(describe_plan(self.plan, args, self.dist, self.model, self.tokenizer)))
            print0(f"resuming from {checkpoint_path}" if restored else f"a new run, in {self.run_dir}")
            self.logger = MetricsLogger(
                self.run_dir, args.run, vars(args), total_steps=self.plan.num_iterations,
                resume_step=self.step if restored else None, wandb_project=args.wandb_project,
                wandb_id=meta.wandb_id if meta else None)
            self.saver = checkpoint.Saver(
                self.run_dir, num_lanes=NUM_LANES, keep=args.keep_checkpoints, keep_every=args.keep_every,
                before_rename=self.logger.flush, on_saved=self.mirror.upload if self.mirror else lambda path: None,
                report=print0)

    def build_model(self, restored):
        args, dist = self.args, self.dist
        dtype = compute_dtype(args, dist.device_type)
        self.model = GPT(self.plan.config, get_kernels(args.kernel, dist.device_type), dtype,
                         args.activation_checkpointing)
        if restored:
            self.model.load_state_dict(restored.model_state)
            restore_rng(restored.meta.rng)
        else:
            self.model.init_weights(args.seed)
        self.model.to(dist.device)
        self.optimizer = MuonAdamW(self.model, optim_config(args), self.plan.total_batch_size,
                                   self.plan.num_iterations, dtype, dist, is_sharded(args, dist.device_type))
        if restored:
            self.optimizer.load_state_dict(restored.optimizer_state)
        self.loss_sum = torch.zeros((), device=dist.device)
        self.loss_scales = {n: torch.tensor(1 / (n * dist.world_size)).to(dist.device)
                            for n in {self.plan.accum_steps(step) for step, _ in self.plan.batch_schedule}}
        with one_program(dist, "initialise"):
            pass  # what was put on the device so far becomes plain buffers, the inputs of the programs of a step
        use_compile = dist.device_type == "cuda" and not args.no_compile
        self.compiled_model = torch.compile(self.model, dynamic=False) if use_compile else self.model

    def open_loader(self, lane_states=None, validation=False):
        args, dist = self.args, self.dist
        common = dict(batch_size=args.device_batch_size, seq_len=args.max_seq_len, rank=dist.rank,
                      world_size=dist.world_size, seed=args.seed + validation, state=lane_states)
        if args.synthetic_data:
            return SyntheticLoader(self.tokenizer.n_vocab, **common)
        shards = list_shards(args.val_dir, "val") if validation else list_shards(args.data_dir)
        return DataLoader(shards, self.tokenizer, threads=args.tokenizer_threads, skip_bad=args.skip_bad_shards,
                          **common)

    def run(self):
        """Trains to the end; returns the exit status: 0, preemption.EXIT_STATUS if it was asked to stop and its state
        is saved, or 1 after too many bad steps."""
        args, plan = self.args, self.plan
        while True:
            is_last = self.step == plan.num_iterations
            self.poll("step")
            saves = self.save_is_asked or is_due(self.step, args.save_every, is_last)
            evaluates = is_due(self.step, args.eval_every, is_last)
            samples = is_due(self.step, args.sample_every, is_last) and self.step > 0
            if saves or evaluates or samples or is_due(self.step, args.log_every, is_last) or \
                    self.step == self.start_step + 1:
                self.log()  # before the rest, whose time is no step's, and before a checkpoint that is past these steps
            if self.bad_steps.are_too_many:
                break
            if saves and (is_last or self.requests.is_stopping or not self.bad_steps.in_a_row):
                self.save()
            if evaluates and not self.requests.is_stopping:
                self.evaluate()
            if samples and not self.requests.is_stopping:
                self.sample()
            if is_last or self.requests.is_stopping:
                break
            if not self.pending:
                self.window_start = time.monotonic()
                self.observer.begin_window()
            self.beat("step")
            self.profile.before_step(self.step)
            with self.goodput.span("train"):
                self.pending.append(self.train_step())
            self.step += 1
            self.profile.after_step(self.step)
        self.profile.close()
        return self.finish()

    def finish(self):
        """Ends what runs in the background, and returns the exit status."""
        is_stopped, is_bad = self.requests.is_stopping, self.bad_steps.are_too_many
        self.beat("end")
        self.requests.finish()
        if is_bad:
            path = self.bad_steps.write_first_batch(self.run_dir, self.dist.rank)
            print0(f"error: {self.bad_steps.in_a_row} steps in a row had a loss or gradient that is not finite: the "
                   f"run ends at step {self.step}; the batch of the first is in {path}")
        elif is_stopped:
            self.save()
        self.loader.close()
        if self.saver:
            self.saver.finish()
        if self.mirror:
            self.mirror.finish(timeout_s=15 if is_stopped else 600)  # a preempted VM is gone after 30 s
        if self.logger:
            self.logger.close(timeout_s=5 if is_stopped else 60)
            if not is_bad and not is_stopped:
                (self.run_dir / FINISHED_FILE).touch()
        return 1 if is_bad else preemption.EXIT_STATUS if is_stopped else 0

    def beat(self, phase):
        """Tells the watchdog that this rank is alive, and what it does next."""
        if phase == "step" and self.step < self.start_step + 3:
            phase = "compile"
        step_s = statistics.median(self.step_seconds) if self.step_seconds else 0
        self.heartbeats.beat(self.dist.rank, phase, self.step, watchdog.limit_s(
            phase, self.args.step_timeout_s, step_s * self.args.log_every))  # one waits for the device for all of them

    def poll(self, phase):
        """Asks whether to stop or save; every rank calls it at the same points. Returns whether to stop."""
        self.beat(phase)
        if self.saver:
            self.saver.check()
        minutes = (time.monotonic() - self.saved_at) / 60
        if self.requests.agreed_action(wants_save=0 < self.args.save_every_minutes <= minutes):
            self.save_is_asked = True
        return self.requests.is_stopping

    def train_step(self):
        """One optimizer step; returns its loss and gradient norm, (2,), still on the device, and the rows (B, T + 1) of
        its micro-steps."""
        dist, plan, all_rows = self.dist, self.plan, []
        self.observer.begin_step()
        scale = self.loss_scales[plan.accum_steps(self.step)]
        for _ in range(plan.accum_steps(self.step)):
            with self.observer.data_wait():
                batch = next(self.loader)
            all_rows.append(batch.rows)
            rows = batch.rows.to(dist.device)
            with self.observer.program("micro_step", rows=rows, scale=scale):
                micro_step(self.compiled_model, rows, self.loss_sum, scale)
        self.last_batch = batch
        scheduled = self.optimizer.scheduled(self.step, plan.batch_growth(self.step)).to(dist.device)
        with self.observer.program("update", collective=True, scheduled=scheduled):
            result = self.optimizer.update(scheduled, self.loss_sum)
        return result, all_rows

    def log(self):
        """Fetches the results of the steps since the last line, which waits for the device, and logs them."""
        if not self.pending:
            return
        with self.goodput.span("train"):
            results = [result.tolist() for result, _ in self.pending]
        plan, first_step = self.plan, self.step - len(results) + 1
        for step, (loss, gradient_norm) in enumerate(results, first_step):
            if self.bad_steps.add(step, loss, gradient_norm, self.pending[step - first_step][1]):
                print0(f"warning: step {step} is left out, its loss is {loss} and its gradient's norm {gradient_norm} "
                       f"({self.bad_steps.in_a_row} in a row)")
        self.pending = []
        elapsed = time.monotonic() - self.window_start
        self.step_seconds = [*self.step_seconds, elapsed / len(results)][-100:]
        if not self.logger:
            return
        losses, gradient_norms = zip(*results, strict=True)
        for step, loss in enumerate(losses[:-1], first_step):
            self.logger.log(step, {"loss": loss}, quiet=True)
        tokens_per_s = plan.tokens(first_step - 1, self.step) / elapsed
        seconds = self.goodput.seconds()
        self.logger.log(self.step, {
            "loss": losses[-1],
            "grad_norm": gradient_norms[-1],
            "lr_multiplier": self.optimizer.scheduled(self.step - 1, plan.batch_growth(self.step - 1))[0].item(),
            "step_ms": 1000 * elapsed / len(losses),
            "tokens_per_s": tokens_per_s,
            "mfu": mfu(tokens_per_s, plan.flops_per_token, peak_flops(self.dist), plan.world_size),
            "tokens": self.loader.stats["rows"] * plan.world_size * self.args.max_seq_len,
            "time_left_s": plan.tokens(self.step, plan.num_iterations) / tokens_per_s,
            "epoch": self.loader.stats["epoch"],
            "bad_steps": self.bad_steps.total,
            "interruptions": self.interruptions,
            "goodput": self.goodput.fraction(),
            "seconds": sum(seconds.values()),
            **{f"seconds_{name}": value for name, value in seconds.items()},
            **self.observer.record(elapsed),
        })
        if first_step == self.start_step + 1 and self.dist.is_xla:
            print0(describe_compiling())

    def evaluate(self):
        """Bits per byte of the validation text; cut short if all are to stop: the run that goes on does it again."""
        rows = max(self.args.eval_tokens // self.args.max_seq_len, 1)
        with self.goodput.span("evaluate"), self.open_loader(validation=True) as loader:
            found = bits_per_byte(self.compiled_model, loader, rows, self.tokenizer.token_bytes(), self.dist,
                                  lambda: self.poll("evaluate"))
        if self.logger and found:
            self.logger.log(self.step, {"val_bpb": found[0], "val_bytes": found[1]})

    def sample(self):
        """Every rank samples, so that none waits for another; rank 0 shows it."""
        with self.goodput.span("sample"), torch.no_grad():
            for prompt in SAMPLE_PROMPTS:
                if self.poll("sample"):
                    return
                text = self.engine.complete(prompt, max_tokens=min(48, self.args.max_seq_len // 2), seed=self.step)
                print0(f"--- sample at step {self.step}\n{prompt}{text}\n---")

    def save(self):
        """Every rank hands over the state of its lanes; rank 0 copies the rest and has it written in the background."""
        self.beat("save")
        self.save_is_asked, self.saved_at = False, time.monotonic()
        if self.saved_step == self.step:
            return
        self.saved_step = self.step
        with self.goodput.span("save"):
            checkpoint.save_lane_states(self.run_dir, self.step, self.last_batch.state)
            state = self.optimizer.host_state()
            if self.dist.rank == 0:
                self.saver.save(*state, Meta(
                    step=self.step, config=asdict(self.plan.config), tokenizer_sha256=self.tokenizer.sha256,
                    data_fingerprint=self.loader.fingerprint, flags=vars(self.args),
                    batch_schedule=self.plan.batch_schedule, rng=rng_state(), wandb_id=self.logger.wandb_id,
                    interruptions=self.interruptions,
                    nonfinite_steps={"total": self.bad_steps.total, "in_a_row": self.bad_steps.in_a_row},
                    time=time.time(), seconds=self.goodput.seconds()))
            thread_barrier(self.dist)


def is_due(step, every, is_last):
    return every > 0 and (is_last or step % every == 0)


# -----------------------------------------------------------------------------
# The parent process


def get_run_dir(args):
    """Where the run's checkpoints and metrics lie."""
    if Path(args.run).name != args.run or args.run in ("", ".", ".."):
        raise BadInput(f"--run={args.run} is not a plain name: it becomes a folder's")
    return get_base_dir() / "checkpoints" / args.run


def open_mirror(args):
    if args.checkpoint_mirror:
        return Mirror(args.checkpoint_mirror, args.run, args.keep_checkpoints, args.keep_every)
    return None


def check(args, device_type):
    """Refuses what can be refused before a device is touched.

    Returns whether the run is finished already, and the path of the checkpoint that it goes on from, or None.
    """
    tokenizer = load_tokenizer(args.tokenizer_dir)
    plan = make_plan(args, tokenizer.n_vocab, expected_world_size(device_type))
    parse_profile_steps(args.profile_steps, plan.num_iterations)
    get_kernels(args.kernel, device_type)
    is_sharded(args, device_type)
    if args.save_every_minutes > 0 and hosts(device_type) > 1:
        raise BadInput(f"--save_every_minutes={args.save_every_minutes:g}: the hosts of a pod agree on steps, not on "
                       "the time: use --save_every")
    data_fingerprint = None
    if not args.synthetic_data:
        data_fingerprint = fingerprint(open_shards(list_shards(args.data_dir), args.skip_bad_shards))
        if args.eval_every > 0:
            open_shards(list_shards(args.val_dir, "val"), args.skip_bad_shards)
    run_dir = get_run_dir(args)
    checkpoint_files.clean_partial(run_dir)
    preemption.Requests(run_dir / REQUESTS_FILE, create=True)
    watchdog.Heartbeats(run_dir / HEARTBEATS_FILE, create=True)
    if args.resume == "never":
        checkpoint_files.set_aside_after(run_dir, -1)
    model = GPT.on_meta(plan.config)
    optimizer = MuonAdamW(model, optim_config(args), plan.total_batch_size, plan.num_iterations)
    if args.save_every > 0:
        checkpoint_files.check_disk_space(run_dir, checkpoint_files.state_bytes(optimizer.masters, optimizer.state))
    if open_mirror(args) and args.resume == "auto" and not checkpoint_files.list_checkpoints(run_dir):
        open_mirror(args).fetch(run_dir)
    path = checkpoint_files.latest_good(run_dir, report=lambda message: print(f"warning: {message}", flush=True))
    if path:
        meta = load_meta(path)
        require_match(path, meta, config=asdict(plan.config), tokenizer_sha256=tokenizer.sha256,
                      data_fingerprint=data_fingerprint)
        plan = make_plan(args, tokenizer.n_vocab, plan.world_size, meta)
        # what is not marked as finished may lack its last evaluation
        if meta.step >= plan.num_iterations and (run_dir / FINISHED_FILE).exists():
            print(f"run {args.run} has reached step {plan.num_iterations} ({path}): nothing left to do. Raise "
                  "--num_iterations, choose another --run, or start over with --resume=never")
            return True, path
    (run_dir / FINISHED_FILE).unlink(missing_ok=True)
    return False, path


def train(args, device_type, checkpoint_path):
    """What every rank runs; returns the exit status."""
    dist = compute_init(device_type)
    status = Trainer(args, dist, checkpoint_path).run()
    compute_cleanup(dist)
    return status


def train_without_parent(args, device_type):
    """The same on CUDA and cpu, where rank 0 does what the parent of XLA's processes does."""
    dist = compute_init(device_type)
    with exclusive_use(get_run_dir(args)) if dist.rank == 0 else nullcontext():
        found = [check(args, device_type) if dist.rank == 0 else None]
        if dist.world_size > 1:
            torch.distributed.broadcast_object_list(found)
        is_finished, checkpoint_path = found[0]
        if is_finished:
            return 0
        preemption.stop_on_signals(preemption.Requests(get_run_dir(args) / REQUESTS_FILE))
        heartbeats = watchdog.Heartbeats(get_run_dir(args) / HEARTBEATS_FILE)
        with watchdog.watching(heartbeats) if dist.rank == 0 else nullcontext():
            status = Trainer(args, dist, checkpoint_path).run()
    compute_cleanup(dist)
    return status


def _mp_fn(index, args, device_type, checkpoint_path, status_path):
    """Runs in every spawned process."""
    begin_as_rank(get_run_dir(args))
    if hosts(device_type) == 1:
        preemption.stop_on_signal_to_rank(preemption.Requests(get_run_dir(args) / REQUESTS_FILE))
    end_process_on_error(lambda: train(args, device_type, checkpoint_path), status_path)


def spawn(args, device_type, checkpoint_path):
    """Runs train() in a process for each chip, or in a thread for each XLA device of a CPU; returns the exit status."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    heartbeats = watchdog.Heartbeats(get_run_dir(args) / HEARTBEATS_FILE)
    with watchdog.watching(heartbeats) as has_reported, tempfile.TemporaryDirectory() as scratch:
        status_path = Path(scratch) / "status"
        status_path.write_text("0")
        try:
            xmp.spawn(_mp_fn, args=(args, device_type, checkpoint_path, str(status_path)), nprocs=None)
        except BrokenProcessPool:  # a rank ended its process; one that was killed could leave no status
            has_reported.wait(timeout=10)
            return int(status_path.read_text()) or 1
        return int(status_path.read_text())


def main(argv=None):
    args = parse_args(argv, __doc__)
    device_type = resolve_device_type(args.device_type)
    status = run_preflight(sys.argv[1:] if argv is None else argv) if args.preflight else 0
    if status:
        return status
    prepare_xla_environment(device_type)
    if device_type == "tpu" and tpu.detect_accelerator():
        os.environ["LIBTPU_INIT_ARGS"] = tpu.libtpu_init_args(tpu.parse_accelerator(tpu.detect_accelerator()).tpu)
    if device_type not in ("tpu", "xla"):
        return train_without_parent(args, device_type)
    with exclusive_use(get_run_dir(args)):
        is_finished, checkpoint_path = check(args, device_type)
        if is_finished:
            return 0
        if hosts(device_type) == 1:  # the hosts of a pod do not agree on a step: there a signal just ends the run
            requests = preemption.Requests(get_run_dir(args) / REQUESTS_FILE)
            preemption.stop_on_signals(requests)
            if device_type == "tpu":
                preemption.stop_on_preemption_notice(requests)
        return spawn(args, device_type, checkpoint_path)


if __name__ == "__main__":
    run_script(main)
