"""The micro-batches of a training step, and the position in the data after each. A task makes a RowFeed (language.py),
and a step iterates it (step.py)."""


# The loader prefetches up to a block of rows for each lane. A checkpoint must hold the positions after the last
# micro-batch that training took, so they come from that batch and not from the loader. Rows become longer here, between
# two batches, because only this counts the micro-steps that were taken.
class RowFeed:
    """Iterates over this rank's micro-batches, {"rows": int32 (B, T + 1)}."""

    def __init__(self, loader, plan, step, rank):
        """loader: a DataLoader with the rows of `step`, the next one; rank: of this process."""
        self.loader = loader
        self._plan = plan
        self._saves_lanes = rank % plan.mesh.tensor == 0  # the other ranks of its tensor group read the same
        self._last = None
        self._step = step  # the step that takes micro-batches
        self._left = plan.micro_steps  # until its end

    def __iter__(self):
        return self

    def __next__(self):
        self._last = next(self.loader)
        self._left -= 1
        if not self._left:
            self._step += 1
            self._left = self._plan.micro_steps
            if self._step in self._plan.switches:  # at once, so that it prefetches while the device updates
                self.loader.change_rows(self._plan.rows(self._step), self._plan.seq_len(self._step))
        return {"rows": self._last.rows}

    @property
    def state(self):
        """{lane: JSON value} of this rank's lanes after the last micro-batch; {} before the first, and if another rank
        saves them."""
        return self._last.state if self._last and self._saves_lanes else {}

    @property
    def fingerprint(self):
        return self.loader.fingerprint

    def metrics(self):
        """Returns the metrics of the data up to the last micro-batch."""
        # If rows become longer, the loader's count of rows does not give the tokens, but the plan does.
        plan = self._plan
        stats = self.loader.stats
        metrics = {"tokens": stats["rows"] * plan.mesh.readers * plan.config.max_seq_len, "epoch": stats["epoch"]}
        if plan.switches:
            metrics |= {"tokens": plan.tokens(0, self._step), "seq_len": plan.seq_len(max(self._step - 1, 0))}
        for name, (tokens, epoch) in stats.get("sources", {}).items():
            metrics |= {f"tokens_{name}": tokens, f"epoch_{name}": epoch}
        return metrics

    def close(self):
        self.loader.close()
