"""The training step of a tiny model: what it adds up, carries, rehearses and restores."""
import pytest
import torch

from nanochat.device.ranks import Dist
from nanochat.model.optim import MuonAdamW
from nanochat.model.rates import AdamW, OptimConfig, Rules
from nanochat.train.step import Objective, TrainingStep

CPU = Dist("cpu", torch.device("cpu"))


class Line(torch.nn.Module):
    training_dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(1))

    def create_main_grads(self):
        self.slope.main_grad = self.slope.grad = torch.zeros(1)

    def after_update(self):
        self.known = self.slope.item()


def loss_and_count(model, carry, x):
    """The loss has the gradient `x`; `seen` counts micro-steps."""
    return {"loss": (model.slope * x).mean(), "other": x.mean() * 10}, {"seen": carry["seen"] + 1}


def make_training(micro_steps):
    rules = Rules({"slope": AdamW(0.1)}, 0.0, 0.0, OptimConfig(warmup_steps=0, warmdown_ratio=0), 10, average_decay=0.5)
    model = Line()
    return TrainingStep(model, MuonAdamW(model, rules, CPU), Objective(loss_and_count, ("loss", "other")), CPU,
                        micro_steps, carry={"seen": torch.zeros(3)})


@pytest.fixture
def training():
    return make_training(micro_steps=1)


def batches(*values):
    return iter([{"x": torch.tensor([float(value)])} for value in values])


def test_a_step_measures_the_means_over_its_micro_steps_by_name_and_begins_anew():
    training = make_training(micro_steps=2)
    measured = training.run(batches(1, 3), training.optimizer.scheduled(0))
    assert measured.fetch() == {"loss": 2.0, "other": 20.0, "grad_norm": 2.0}
    assert training.model.slope.item() == training.model.known == pytest.approx(1 - 0.1)
    assert training.carry["seen"].tolist() == [2, 2, 2]
    assert not any(total.any() for total in training.sums.values()) and not training.model.slope.main_grad.any()


def test_a_rehearsal_adds_nothing(training):
    training.rehearse({"micro_step": next(batches(5))})
    assert training.run(batches(1), training.optimizer.scheduled(0)).fetch()["loss"] == 1


def test_the_state_is_all_that_stays_and_comes_back_from_the_host(training):
    training.run(batches(1), training.optimizer.scheduled(0))
    assert {"slope", "slope.main_grad", "slope.momentum", "slope.average", "loss_sum", "other_sum", "loss_scale",
            "carry.seen"} <= training.state().keys()
    weights, state = training.host_state()
    weights_bytes, state_bytes = training.sizes()
    assert {name: tensor.nbytes for name, tensor in weights.items()} == weights_bytes
    assert {name: tensor.nbytes for name, tensor in state.items()} == state_bytes
    assert training.host_state({"carry.seen"})[1].keys() == {"carry.seen"}
    before = {name: tensor.clone() for name, tensor in (weights | state).items()}
    training.run(batches(1), training.optimizer.scheduled(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in (weights | state).items())
    training.load_state(state)
    assert training.carry["seen"].tolist() == [1, 1, 1]
    assert torch.equal(training.optimizer.state["slope.momentum"], state["slope.momentum"])
    with training.optimizer.averaged_weights():
        assert training.model.slope.item() == pytest.approx((1 + 0.9) / 2)
