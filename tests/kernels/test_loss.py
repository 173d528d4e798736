"""The loss of every kernel, against one that is written with PyTorch's own functions, in fp64."""
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_xla

from nanochat.kernels.choose import get_kernels
from nanochat.kernels.loss import TeacherTerms, Teaching, chunked_mean_loss
from nanochat.model.layers import IGNORE_INDEX
from nanochat.model.logit_cap import LogitCap

WIDTH, TEACHER_WIDTH = 16, 24
KERNELS = ["current", "chunked", "chunked on cuda", "chunked on xla"]


@dataclass
class Case:
    """A model's last hidden states and head, on a device, with a teacher's or without."""
    hidden: torch.Tensor
    head: torch.Tensor
    targets: torch.Tensor
    cap: LogitCap
    teaching: Teaching | None = None

    def to(self, device):
        taught = self.teaching
        if taught is not None:
            taught = taught._replace(hidden=taught.hidden.to(device), head=taught.head.to(device))
        return Case(self.hidden.to(device), self.head.to(device), self.targets.to(device), self.cap, taught)

    def mean_and_gradients(self, mean_loss):
        """Returns the mean loss, and three times its gradients of hidden and head."""
        hidden = self.hidden.detach().requires_grad_()
        head = self.head.detach().requires_grad_()
        head.main_grad = torch.zeros_like(head)
        loss = mean_loss(hidden, head, self.targets, self.cap, self.teaching)
        (3 * loss).backward()
        d_head = head.main_grad if head.grad is None else head.grad
        return loss, hidden.grad, d_head


def some_case(cap, terms=None, tokens=96, vocabulary=50):
    generator = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    targets = torch.randint(vocabulary, (tokens,), generator=generator, dtype=torch.int32)
    targets[5] = IGNORE_INDEX
    case = Case(some(tokens, WIDTH), some(vocabulary, WIDTH), targets, cap)
    if terms is not None:
        case.teaching = Teaching(some(tokens, TEACHER_WIDTH), some(vocabulary, TEACHER_WIDTH), terms)
    return case


def reference(hidden, head, targets, cap, teaching):
    logits = cap(F.linear(hidden, head))
    counts = targets != IGNORE_INDEX
    cross_entropy = F.cross_entropy(logits[counts], targets[counts].long(), reduction="sum")
    if teaching is None:
        return cross_entropy / len(hidden)
    weight, temperature = teaching.terms.weight, teaching.terms.temperature
    taught = teaching.terms.cap(F.linear(teaching.hidden.double(), teaching.head.double()))
    by_student, by_teacher = (F.log_softmax(x[counts] / temperature, -1) for x in (logits, taught))
    divergence = F.kl_div(by_student, by_teacher, log_target=True, reduction="sum")
    return ((1 - weight) * cross_entropy + weight * temperature**2 * divergence) / len(hidden)


def mean_loss_of(name):
    """Returns mean_loss of a kernel, in several chunks, and its device."""
    if name == "chunked on xla":
        return get_kernels("chunked", "xla", chunk_tokens=64).mean_loss, torch_xla.device()  # chunks of 48, or 32
    if name == "chunked on cuda":
        return partial(chunked_mean_loss, 40), "cpu"  # chunks of 40, 40 and 16, which run on a CPU, too
    return get_kernels(name, "cpu", chunk_tokens=40).mean_loss, "cpu"


def check(name, case):
    exact_case = Case(case.hidden.double(), case.head.double(), case.targets, case.cap, case.teaching)
    exact, *exact_gradients = exact_case.mean_and_gradients(reference)
    mean_loss, device = mean_loss_of(name)
    found, *gradients = case.to(device).mean_and_gradients(mean_loss)
    assert found.item() == pytest.approx(exact.item(), rel=1e-5)
    for ours, truth in zip(gradients, exact_gradients, strict=True):
        largest = float(truth.abs().max())
        torch.testing.assert_close(ours.cpu().double(), truth, atol=1e-5 * largest, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 70.0, 1e4])
@pytest.mark.parametrize("name", KERNELS)
def test_the_loss_and_its_gradients_are_exact_at_every_cap(name, softcap):
    check(name, some_case(LogitCap(softcap)))


@pytest.mark.parametrize("softcap, terms", [
    (15.0, TeacherTerms(LogitCap(15.0), weight=0.5, temperature=1.0)),
    (15.0, TeacherTerms(LogitCap(0.0), weight=0.9, temperature=2.0)),
    (0.0, TeacherTerms(LogitCap(10.0), weight=1.0, temperature=0.7))])
@pytest.mark.parametrize("name", KERNELS)
def test_the_loss_of_a_student_and_its_gradients_are_exact(name, softcap, terms):
    check(name, some_case(LogitCap(softcap), terms))


@pytest.mark.parametrize("tokens, vocabulary", [(2100, 600), (150, 20_000)])
def test_many_chunks_and_many_blocks_on_a_cpu_are_exact(tokens, vocabulary):
    check("chunked", some_case(LogitCap(15.0), tokens=tokens, vocabulary=vocabulary))


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 100.0, 1e4])
def test_exponentials_are_summed_without_a_maximum_where_fp32_holds_them(softcap):
    cap = LogitCap(softcap)
    sum_of_largest = torch.exp(cap(torch.tensor(1e6))) * 2**20
    assert cap.needs_maximum or sum_of_largest.isfinite()
    assert not LogitCap(15.0).needs_maximum


def test_auto_takes_chunks_on_a_tpu_without_jax(monkeypatch):
    assert [get_kernels("auto", device).name for device in ("tpu", "cpu", "cuda")] == ["flash", "current", "current"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert get_kernels("auto", "tpu").name == "chunked"
