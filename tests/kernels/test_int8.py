"""Products of 8-bit integers: against exact sums, against products that are not rounded, and the layer by hand against
the definition."""
import functools

import pytest
import torch
import torch_xla

from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.kernels import int8
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.loss import full_mean_loss
from nanochat.kernels.sharded import Sharding
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.layers import IGNORE_INDEX
from nanochat.model.logit_cap import LogitCap
from nanochat.model.optim import MuonAdamW
from nanochat.model.rates import OptimConfig, gpt_rules
from nanochat.train.language import NEXT_TOKEN
from nanochat.train.step import TrainingStep
from tests.kernels.test_loss import Case

# 4 × 64 tokens and heads of 128 suit the Pallas kernels, too.
CONFIG = GPTConfig(n_layer=3, n_embd=128, n_head=1, n_kv_head=1, vocab_size=64, max_seq_len=64)
CAP = LogitCap(15.0)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1040, 4096])
def test_sums_of_products_are_exact(width):
    """In int32 on XLA, in fp32 on the CPU up to 1,040 terms."""
    x = torch.full((2, 3, width), 127, dtype=torch.int8)
    weight = int8.rounded(normal(5, width)).integers
    weight[0] = 127
    expected = (x.long() @ weight.long().t()).float()
    device = torch_xla.device()
    assert torch.equal(int8.product(x.to(device), weight.to(device), -1, 1).cpu(), expected)
    if width <= 1040:
        assert torch.equal(int8.product(x, weight, -1, 1), expected)


def test_products_and_gradients_are_near_those_in_fp64():
    x = normal(4, 64, 96).double()
    weight = normal(80, 96, seed=1).double()
    d = normal(4, 64, 80, seed=2).double() * torch.logspace(-3, 0, 64)[:, None]  # tokens differ in their gradients
    weight_rows = int8.rounded_weight(weight)
    d_rows = int8.rounded_gradient(d, weight_rows)
    found = {"product": int8.linear(int8.rounded(x), weight_rows),
             "of input": int8.gradient_of_input(d_rows, weight_rows),
             "of weight": int8.gradient_of_weight(d_rows, x, weight_rows),
             "by rows": int8.gradient_by_rows(d, int8.rounded(x))}
    of_weight = d.flatten(0, 1).t() @ x.flatten(0, 1)
    expected = {"product": x @ weight.t(), "of input": d @ weight, "of weight": of_weight, "by rows": of_weight}
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < 0.03 * tensor.norm(), name


def test_a_small_row_of_a_weight_gets_a_gradient_as_good_as_the_others():
    x = normal(256, 64)
    d = normal(256, 80, seed=2)
    weight = normal(80, 64, seed=1)
    weight[:40] *= 1e-9
    weight = int8.rounded_weight(weight)
    found = int8.gradient_of_weight(int8.rounded_gradient(d, weight), x, weight)
    expected = d.t() @ x
    assert (found - expected)[:40].norm() < 0.1 * expected[:40].norm()


def test_a_weight_with_nan_does_not_become_zeros():
    """Such a run would train on, and its loss would not show it."""
    weight = normal(80, 64)
    weight[3, 5] = float("nan")
    assert int8.rounded_weight(weight).value()[3].isnan().all()


def test_small_numbers_beside_a_large_one_keep_their_sum():
    x = torch.cat([torch.ones(1), 5e-4 * torch.rand(100_000, generator=torch.Generator().manual_seed(0))])
    assert int8.rounded(x).value().sum() == 1  # all others are 0
    assert int8.dithered(x, 0).value().sum() == pytest.approx(x.sum().item(), rel=0.03)


def trained(kernel, device, products, recompute="none"):
    """Returns the loss and {weight: gradient} of a tiny GPT."""
    model = GPT(CONFIG, get_kernels(kernel, device, products=products), activation_checkpointing=recompute)
    model.init_weights()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p += 0.02 * normal(*p.shape, seed=number)  # some begin at 0
    ids = torch.randint(0, 64, (4, 65), generator=torch.Generator().manual_seed(0))
    model.to("cpu" if device == "cpu" else torch_xla.device())
    model.create_main_grads()
    model.after_update()
    ids = ids.to(model.wte.device)
    loss = model(ids[:, :-1], ids[:, 1:], reduction="mean")
    loss.backward()
    torch_xla.sync()
    return loss.item(), {name: p.main_grad.cpu() for name, p in model.named_parameters()}


@functools.cache
def by_definition(products):
    return trained("current", "xla", products)


@pytest.mark.parametrize("kernel, accelerator, recompute", [
    pytest.param("chunked", "", "none", marks=pytest.mark.slow),
    pytest.param("chunked", "", "all", marks=pytest.mark.slow),
    pytest.param("flash", "v5litepod-8", "none", marks=pytest.mark.slow),
    pytest.param("flash", "v6e-4", "none", marks=pytest.mark.slow), ("flash", "v6e-4", "all")])
def test_the_layer_by_hand_is_the_definition(monkeypatch, kernel, accelerator, recompute):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    # Before the CPU's: autograd starts its threads once, for the devices that exist, and XLA's come later.
    loss, gradients = trained(kernel, "xla", "int8", recompute)
    expected_loss, expected = by_definition("int8")
    plain_loss, plain = by_definition("bfloat16")
    is_v6e = accelerator == "v6e-4"  # its attention and its loss are not rounded
    assert loss == pytest.approx(expected_loss, abs=1e-3 if is_v6e else 1e-4) and loss != plain_loss
    assert loss == pytest.approx(plain_loss, abs=1e-3)
    for name, gradient in gradients.items():
        # Other last bits, another dither: so the two differ by about as much as each from the plain gradient.
        assert (gradient - expected[name]).norm() < 0.1 * gradient.norm(), name
        assert (gradient - plain[name]).norm() < 0.1 * gradient.norm(), name


def test_the_same_micro_batch_has_the_same_gradients_to_the_bit():
    first, second = (trained("chunked", "xla", "int8") for _ in range(2))
    assert first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_the_rounded_weights_of_the_loop_follow_each_update():
    model = GPT(CONFIG, get_kernels("chunked", "xla", products="int8")).init_weights()
    dist = Dist("xla", torch_xla.device())
    optimizer = MuonAdamW(model.to(dist.device), gpt_rules(OptimConfig(), 128, 10, CONFIG.n_embd), dist)
    training = TrainingStep(model, optimizer, NEXT_TOKEN, dist)
    rows = torch.randint(0, 64, (4, 65), generator=torch.Generator().manual_seed(0))
    before = model.attn_q.rounded.integers.cpu()
    for step in range(2):
        training.run(iter([{"rows": rows}]), optimizer.scheduled(step))
    rounded = int8.rounded_weight(model.mlp_out)
    assert torch.equal(model.mlp_out.rounded.integers, rounded.integers) and rounded.integers.any()
    assert torch.equal(model.mlp_out.rounded.scale, rounded.scale)
    assert not torch.equal(model.attn_q.rounded.integers.cpu(), before)


@torch.no_grad()
def test_only_training_rounds():
    ids = torch.arange(64)[None]
    hidden = []
    for products in ("bfloat16", "int8"):
        hidden.append(GPT(CONFIG, get_kernels("chunked", "cpu", products=products)).init_weights().hidden(ids))
    assert torch.equal(*hidden)


def test_weights_divided_along_tensor_are_refused():
    with pytest.raises(BadInput, match="--products=int8.*--mesh_tensor=1"):
        get_kernels("chunked", "xla", Sharding(tensor_groups=((0, 1),)), products="int8")


def targets():
    """Returns those of 96 tokens, two of which have none."""
    found = torch.randint(80, (96,), generator=torch.Generator().manual_seed(2))
    found[5:7] = IGNORE_INDEX
    return found


def loss_and_gradients(mean_loss, device, dtype=torch.float32, scales=1.0, num_tokens=96):
    """Returns the mean loss, and its gradients of hidden states and head, whose rows have `scales`."""
    hidden = normal(num_tokens, 64).to(dtype)
    head = (scales * normal(80, 64, seed=1)).to(dtype)
    case = Case(hidden, head, targets()[:num_tokens], CAP).to(device)
    return [x.cpu() for x in case.mean_and_gradients(mean_loss)]


@pytest.mark.parametrize("kernel, device_type, num_tokens", [
    *(("current", "cpu", tokens) for tokens in (96, 95, 1)),  # in two chunks, in unequal ones, in one
    ("chunked", "xla", 96), ("current", "xla", 96)])
def test_the_loss_is_exact_of_rounded_logits_and_its_gradients_are_near_those_in_fp64(kernel, device_type, num_tokens):
    mean_loss = get_kernels(kernel, device_type, products="int8").mean_loss
    device = "cpu" if device_type == "cpu" else torch_xla.device()
    loss, *gradients = loss_and_gradients(mean_loss, device, num_tokens=num_tokens)
    exact_loss, *exact = loss_and_gradients(full_mean_loss, "cpu", torch.float64, num_tokens=num_tokens)

    def of_rounded(hidden, head, *others):
        return full_mean_loss(int8.rounded(hidden).value(), int8.rounded_weight(head).value(), *others)

    with torch.no_grad():
        expected = of_rounded(normal(num_tokens, 64), normal(80, 64, seed=1), targets()[:num_tokens], CAP)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and loss.item() != exact_loss.item()
    for found, tensor in zip(gradients, exact, strict=True):
        assert (found - tensor).norm() < 0.1 * tensor.norm()


@pytest.mark.parametrize("small", [0.0, 1e-4])
def test_small_rows_of_the_head_have_gradients_as_good_as_large_ones(small):
    """Their logits are all about 0, so many probabilities are equal."""
    scales = torch.where(torch.arange(80) < 60, small, 1.0)[:, None]
    mean_loss = get_kernels("current", "cpu", products="int8").mean_loss
    *_, found = loss_and_gradients(mean_loss, "cpu", scales=scales)
    *_, exact = loss_and_gradients(full_mean_loss, "cpu", torch.float64, scales)
    assert (found - exact)[:60].norm() < 0.1 * exact[:60].norm()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_heads_gradient_is_as_good_in_four_chunks_as_in_one(device):
    """Hidden states are alike, so errors of the same places in all chunks would add up."""
    hidden = normal(1, 128, seed=2) + 0.3 * normal(64, 128)
    chunked = get_kernels("chunked", device, products="int8", chunk_tokens=16).mean_loss
    gradients = []
    for mean_loss, where in ((full_mean_loss, "cpu"), (chunked, "cpu" if device == "cpu" else torch_xla.device())):
        case = Case(hidden, 0.01 * normal(1024, 128, seed=1), 16 * torch.arange(64), CAP).to(where)
        gradients.append(case.mean_and_gradients(mean_loss)[2].cpu())
    exact, found = gradients
    assert (found - exact).norm() < 0.08 * exact.norm()


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_small_numbers_dithered_by_place_keep_their_sums_wherever_they_stand(device):
    if device == "xla":
        device = torch_xla.device()
    share = 1e-3  # of a step between integers
    x = torch.full((64, 65_536), share / int8.LARGEST, device=device)
    found = int8.dithered_by_place(x, torch.ones(64, 1, device=device)).integers.cpu().float()
    for part in found.chunk(8, dim=1):  # of the vocabulary
        assert part.sum().item() == pytest.approx(share * part.numel(), rel=0.05)
    assert found.sum(1).sub(share * 65_536).abs().max() < 5  # of each token: 65.5
