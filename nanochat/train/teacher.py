"""Distillation: the model also learns from the predictions of a trained one, base_train --teacher=RUN."""
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from nanochat.checkpoint.on_disk import MODEL, find_checkpoint, find_problem
from nanochat.checkpoint.pieces import load_tensors
from nanochat.common import BadInput
from nanochat.kernels.attention_tiles import require_shapes
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.loss import TeacherTerms, Teaching
from nanochat.kernels.sharded import Sharding
from nanochat.model.parts import Parts, require_parts
from nanochat.model.weights import shapes
from nanochat.train.start import other_model


class Teacher(NamedTuple):
    """A trained model, and how a run learns from it."""
    path: Path  # of its checkpoint
    config: object  # see model/models.py
    weight: float  # of the teacher in the loss
    temperature: float

    def describe(self):
        return (f"    teacher  {self.path}: depth {self.config.n_layer}, width {self.config.n_embd}, weight "
                f"{self.weight:g} at temperature {self.temperature:g}")


def find_teacher(flags, plan, tokenizer, directory):
    """Returns the Teacher of base_train's Flags and Plan, or None without --teacher. Raises BadInput if it cannot teach
    this model. tokenizer, directory: of the run that learns."""
    taught = flags.distillation
    if not taught.teacher:
        for each in fields(taught):
            value = getattr(taught, each.name)
            if value != each.default:
                raise BadInput(f"--{each.name}={value:g} needs a teacher: give --teacher=RUN too, or leave "
                               f"--{each.name} out")
        return None
    path = find_checkpoint(taught.teacher)
    what = f"--teacher={taught.teacher} ({path})"
    meta, config = other_model(what, path, directory)
    if meta.tokenizer_sha256 != tokenizer.sha256:
        raise BadInput(f"{what} has another tokenizer ({meta.tokenizer_sha256[:12]}) than this run "
                       f"({tokenizer.sha256[:12]}): train with the teacher's --tokenizer_dir")
    rows = plan.config.vocab_size
    if config.vocab_size < rows:
        raise BadInput(f"{what} has a vocabulary of {config.vocab_size}, and this model one of {rows}: give another "
                       "teacher")
    try:
        # Rows of the vocabulary beyond the student's are of no token.
        config = replace(config, vocab_size=rows).with_rows(plan.config.max_seq_len)
        if config.max_seq_len < plan.config.max_seq_len:
            raise BadInput(f"it sees {config.max_seq_len} positions: give --max_seq_len of at most that, not "
                           f"{plan.config.max_seq_len}")
        require_shapes(plan.kernel, config, plan.device_type)
        require_parts(plan.mesh, config)
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    problem = find_problem(path, weights_only=True)
    if problem:
        raise BadInput(f"{what} is damaged ({problem}): use another checkpoint")
    return Teacher(path, config, taught.kd_weight, taught.kd_temperature)


def make_teacher(teacher, plan, dist, weights=None):
    """Returns the teacher's model on torch's default device, with the student's kernels and this rank's parts of
    `weights`, {name: whole weight}; without them its weights are meaningless."""
    sharding = Sharding.of_mesh(plan.mesh, teacher.config.vocab_size)
    kernels = get_kernels(plan.kernel, plan.device_type, sharding)
    model = teacher.config.new_model(kernels, plan.dtype).requires_grad_(False).to(plan.dtype)
    if weights:
        shape_of = shapes(teacher.config)
        model.load_state_dict({name: weight[:shape_of[name][0]] for name, weight in weights.items()})
    parts = Parts(dist, plan.mesh)
    for name, weight in model.named_parameters():
        if plan.mesh.divides_weights:
            # A copy: a view would keep the whole weight in memory.
            weight.data = parts.of_model(name, weight).clone()
    return model


def load_teacher(teacher, plan, dist):
    """Returns the teacher's model with its weights, or this rank's parts of them, on its device."""
    return make_teacher(teacher, plan, dist, load_tensors(teacher.path, MODEL)).to(dist.device)


class DistillationLoss:
    """The mean loss of rows (B, T + 1) for a student: see kernels/loss.py."""

    def __init__(self, teacher, model):
        """teacher: a Teacher; model: its model, on the device."""
        self.model = model
        self.terms = TeacherTerms(model.logit_cap, teacher.weight, teacher.temperature)

    def __call__(self, student, carry, rows):
        ids = rows[:, :-1]  # (B, T)
        with torch.no_grad():
            hidden = self.model.hidden(ids).flatten(0, 1)  # (B × T, C_teacher)
        # Hidden states and not logits: the loss makes both models' logits for a chunk of tokens at a time, so all of
        # them, (B × T, V), never exist at once.
        teaching = Teaching(hidden, self.model.head, self.terms)
        return {"loss": student(ids, rows[:, 1:], reduction="mean", teaching=teaching)}, carry
