"""The checkpoints of a running run: every rank hands over its part, rank 0 writes them in the background."""
import time

from nanochat.checkpoint import checkpoint
from nanochat.checkpoint.pieces import Layout
from nanochat.checkpoint.saver import PartSaver, Saver
from nanochat.checkpoint.uploader import Uploader
from nanochat.device.collectives import thread_barrier
from nanochat.device.ranks import print0
from nanochat.run.agreement import send_lanes


class Saves:
    def __init__(self, run, dist, step, before_rename):
        """run: a Run; step: the step of the newest checkpoint, or 0; before_rename: see checkpoint.save."""
        self._link = None if run.link is None or run.link.host.is_first else run.link
        self._run_dir, self._dist, self._every_minutes = run.directory, dist, run.flags.record.save_every_minutes
        self._saved_step, self._saved_at = step, time.monotonic()
        self._saver = self._uploader = None
        self._piece_bytes = round(run.flags.record.checkpoint_piece_gb * 1e9)
        if self._link:  # the first host writes the checkpoints
            return
        if dist.rank > 0:
            self._saver = PartSaver(run.directory)
            return
        if run.mirror:
            self._uploader = Uploader(run.mirror, run.directory, run.starts_over, report=print0)
            if run.checkpoint:
                self._uploader.upload(run.checkpoint)
        self._saver = Saver(
            run.directory, num_lanes=run.task.num_lanes, keep=run.flags.record.keep_checkpoints, saved_step=step,
            keep_every=run.flags.record.keep_every, before_rename=before_rename,
            on_saved=self._uploader.upload if self._uploader else lambda path: None, report=print0)

    def wants_save(self):
        """Whether --save_every_minutes have passed since the last checkpoint, by this rank's clock."""
        return 0 < self._every_minutes <= (time.monotonic() - self._saved_at) / 60

    def check(self):
        """Raises what went wrong with the last checkpoint in the background, if anything did."""
        if self._saver:
            self._saver.check()

    def save(self, step, lane_states, training, make_meta):
        """Begins to save `step`, unless that is done already. Every rank must call it.

        lane_states: of this rank's lanes; training: the TrainingStep; make_meta() returns the Meta, and is called on
        rank 0 only.
        """
        self._saved_at = time.monotonic()
        if self._saved_step == step:
            return
        self._saved_step = step
        if self._link:  # rank 0 is on another host
            send_lanes(self._link, step, lane_states)
        else:
            checkpoint.save_lane_states(self._run_dir, step, lane_states)
        layout, dist = Layout.of(*training.sizes(), self._piece_bytes), self._dist
        mine = layout.tensors_of(dist.local_rank, dist.num_local) if self._saver else ()
        state = training.host_state(mine)
        if dist.rank == 0:
            self._saver.save(*state, make_meta(), layout)
        elif mine:
            self._saver.save(step, layout, *state)
        thread_barrier(dist)

    def mirror_behind_s(self):
        """Returns for how many seconds the mirror has lacked the newest checkpoint, or None without a mirror."""
        return self._uploader.behind_s() if self._uploader else None

    def finish(self, is_told_to_end):
        """Waits until the last checkpoint, or this rank's part of it, is on disk; if the disk is full, until
        is_told_to_end(). Returns whether the last state that `save` was given is there, on rank 0."""
        if self._saver:
            self._saver.finish(is_told_to_end)
        return self._dist.rank > 0 or self._saver.saved_step == self._saved_step

    def finish_mirror(self, is_told_to_end):
        """Waits until the last checkpoint is in the mirror, see Uploader.finish. Returns whether the mirror lacks
        nothing."""
        return not self._uploader or self._uploader.finish(is_told_to_end)
