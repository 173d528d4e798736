"""The checkpoints of a running run: every rank hands over its part, and rank 0 writes them in the background.
The trainer (trainer.py) says when."""
from nanochat.checkpoint import saver
from nanochat.checkpoint.pieces import Layout
from nanochat.checkpoint.uploader import Uploader
from nanochat.device.collectives import thread_barrier
from nanochat.run.transfer import send_lanes


class Saves:
    """One rank's part in the run's checkpoints, on disk and in the mirror."""

    def __init__(self, run, dist, step, log):
        """run: a Run; step: the step of the newest checkpoint, or 0; log: the StepLog, flushed before a
        checkpoint gets its name."""
        record = run.flags.record
        self._run_dir = run.directory
        self._dist = dist
        self._saved_step = step
        self._log = log
        self._num_lanes = run.task.num_lanes
        self._link = None
        self._saver = None
        self._uploader = None
        # Three roles. Ranks of other hosts only send the positions of their lanes to the first host, which writes the
        # checkpoints. Its ranks write their share of the tensors. Rank 0 also assembles the checkpoint and hands it to
        # the mirror, as well as the one it resumes from: the process before may have been killed during the copy.
        if run.link and not run.link.host.is_first:
            self._link = run.link
        elif dist.rank > 0:
            self._saver = saver.Saver(run.directory)
        else:
            if run.mirror:
                self._uploader = Uploader(run.mirror, run.directory)
                if run.checkpoint:
                    self._uploader.upload(run.checkpoint)
            options = saver.SaveOptions(record.keep_checkpoints)
            # Read now: the checkpoint that holds it may be deleted when there are newer ones.
            source = run.task.source_zip.read_bytes() if run.task.source_zip else None
            self._saver = saver.Saver(run.directory, self._num_lanes, options, step, self._uploader, log, source)

    def check(self):
        """Raises the error of the last checkpoint in the background, if there is one."""
        if self._saver:
            self._saver.check()

    # The loop waits for one thing only, the copy of the state from the chips to the hosts' memory (5.6 s for 3.2 GB on
    # two CPU cores, dev/log). Files, checksums and the mirror follow in threads, from that copy, which nobody changes.
    def save(self, step, lane_states, training, meta):
        """Begins to save `step`, once. Every rank must call it.

        lane_states: of this rank's lanes; training: the TrainingStep; meta: the Meta, on rank 0.
        """
        if step == self._saved_step:
            return
        self._saved_step = step
        # Every rank computes the same layout from the same sizes. Files and lane states meet in step_….tmp (saver.py).
        layout = Layout.of(*training.sizes())
        mine = layout.tensors_of(self._dist.local_rank, self._dist.num_local) if self._saver else ()
        state = training.host_state(mine)  # every rank must call it: it gathers the tensors from all
        if self._link:  # rank 0 is on another host
            send_lanes(self._link, step, lane_states)
        else:
            saver.save_lane_states(self._run_dir, step, lane_states)
        if self._dist.rank == 0:
            self._saver.save(*state, meta, layout)
        elif state[0] or state[1]:  # this rank writes some of the tensors
            self._saver.save_part(step, layout, *state)
        # Ranks that are threads wait for the slowest copy: an all-reduce on the CPU times out after some 15 s.
        thread_barrier(self._dist)

    def finish(self, is_told_to_end):
        """Waits until the last checkpoint, or this rank's part of it, is on disk; on a full disk, until
        is_told_to_end(). Returns whether the state of the last `save` is on disk; other ranks than 0 return True."""
        if self._saver:
            self._saver.finish(is_told_to_end)
        return self._dist.rank > 0 or self._saver.saved_step == self._saved_step

    def finish_mirror(self, is_told_to_end):
        """Waits until the last checkpoint is in the mirror (Uploader.finish). Returns whether it is, or none is set."""
        return not self._uploader or self._uploader.finish(is_told_to_end)
