"""The loss of a student, against one that is written with PyTorch's own functions, in fp64."""
import pytest
import torch
import torch.nn.functional as F
import torch_xla

from nanochat.kernels import plain, xla_loss
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.distillation import Teaching
from nanochat.model.layers import IGNORE_INDEX

TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 96, 16, 24, 50


def reference(hidden, head, targets, softcap, teaching):
    logits = F.linear(hidden, head)
    taught = F.linear(teaching.hidden.double(), teaching.head.double())
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    taught = teaching.softcap * torch.tanh(taught / teaching.softcap) if teaching.softcap else taught
    temperature = teaching.temperature
    counts = targets != IGNORE_INDEX
    by_text = F.cross_entropy(logits[counts], targets[counts].long(), reduction="sum")
    by_student, by_teacher = (F.log_softmax(x[counts] / temperature, -1) for x in (logits, taught))
    divergence = F.kl_div(by_student, by_teacher, log_target=True, reduction="sum")
    return ((1 - teaching.weight) * by_text + teaching.weight * temperature**2 * divergence) / len(hidden)


@pytest.mark.parametrize("weight, temperature, softcap, teacher_softcap", [
    (0.5, 1.0, 15.0, 15.0), (0.9, 2.0, 15.0, 0.0), (1.0, 0.7, 0.0, 10.0)])
@pytest.mark.parametrize("name", ["current", "chunked", "xla"])
def test_loss_and_gradients_are_those_of_a_plain_reference(name, weight, temperature, softcap, teacher_softcap,
                                                          monkeypatch):
    monkeypatch.setattr(plain, "CHUNK_TOKENS", 40)  # 40, 40, 16
    monkeypatch.setattr(xla_loss, "CHUNK_TOKENS", 64)  # three chunks of 32
    generator = torch.Generator().manual_seed(1)
    hidden, head, teacher_hidden, teacher_head = (torch.randn(*shape, generator=generator) for shape in (
        (TOKENS, WIDTH), (VOCABULARY, WIDTH), (TOKENS, TEACHER_WIDTH), (VOCABULARY, TEACHER_WIDTH)))
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator, dtype=torch.int32)
    targets[5] = IGNORE_INDEX
    teaching = Teaching(teacher_hidden, teacher_head, teacher_softcap, weight, temperature)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    loss = reference(*exact, targets, softcap, teaching)
    (3 * loss).backward()

    kernels, device = (get_kernels("chunked", "xla"), torch_xla.device()) if name == "xla" else \
        (get_kernels(name, "cpu"), "cpu")
    hidden, head, targets = (x.to(device) for x in (hidden, head, targets))
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    head.main_grad = torch.zeros_like(head)
    found = kernels.mean_distillation(hidden, head, targets, softcap, teaching._replace(
        hidden=teacher_hidden.to(device), head=teacher_head.to(device)))
    (3 * found).backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    d_head = head.main_grad if name == "xla" else head.grad
    for gradient, x in ((hidden.grad, exact[0]), (d_head, exact[1])):
        torch.testing.assert_close(gradient.cpu().double(), x.grad, atol=1e-5 * float(x.grad.abs().max()), rtol=1e-5)
