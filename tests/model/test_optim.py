"""Schedules, the parts of Muon, and the optimizer's update."""
import math

import pytest
import torch

from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.optim import (
    MuonAdamW,
    cautious_weight_decay,
    equal_rows,
    normalise_neurons,
    orthogonalised,
    polar_express,
)
from nanochat.model.rates import (
    OptimConfig,
    Rules,
    batch_lr_scale,
    gpt_rules,
    lr_multiplier,
    muon_momentum,
    run_lr_scale,
    width_lr_scale,
)
from tests.model.test_gpt import PLAIN


def tiny_model():
    config = GPTConfig(n_layer=2, vocab_size=50, max_seq_len=8, n_embd=32, n_head=2, **PLAIN)
    return GPT(config, get_kernels("current", "cpu")).init_weights()


def make_optimizer(model, batch, steps, **config):
    return MuonAdamW(model, gpt_rules(OptimConfig(**config), batch, steps, model.config.n_embd))


def test_learning_rate_rises_stays_and_falls():
    config = OptimConfig(warmup_steps=10, warmdown_ratio=0.5, final_lr_frac=0.1)
    multipliers = [lr_multiplier(step, 100, config) for step in range(100)]
    assert multipliers[0] == pytest.approx(0.1) and multipliers[9] == 1.0
    assert set(multipliers[9:51]) == {1.0}
    assert all(a > b for a, b in zip(multipliers[50:], multipliers[51:], strict=False))
    assert multipliers[99] == pytest.approx(0.1 + 0.9 / 50)


@pytest.mark.parametrize("steps, rising", [(1, 1), (4, 1), (32, 6), (100, 20), (200, 40), (10_000, 40)])
def test_by_default_learning_rates_rise_in_a_fifth_of_a_short_run(steps, rising):
    multipliers = [lr_multiplier(step, steps, OptimConfig(warmdown_ratio=0)) for step in range(steps)]
    assert multipliers.index(1.0) == rising - 1
    assert lr_multiplier(0, 100, OptimConfig(warmup_steps=0)) == 1.0


def test_scales_are_one_where_the_rates_were_tuned():
    assert batch_lr_scale(2**19) == width_lr_scale(768) == 1
    assert batch_lr_scale(2**17) == 0.5
    assert width_lr_scale(768 * 4) == 0.5
    assert [run_lr_scale(2**power) for power in (10, 18, 28, 32, 40)] == pytest.approx(
        [2**4.48, 2**4.48, 2**1.28, 1, 1])
    assert [muon_momentum(step) for step in (0, 300, 9999)] == pytest.approx([0.85, 0.95, 0.95])


@pytest.mark.parametrize("batch, steps, width", [(2**10, 1, 128), (2**10, 100, 128), (2**19, 50_000, 1024)])
def test_matrices_decay_as_far_in_a_run_of_any_batch_length_and_width(batch, steps, width):
    rules = gpt_rules(OptimConfig(weight_decay=3), batch, steps, width)
    assert (1 - rules.matrix_lr * rules.matrix_weight_decay) ** steps == pytest.approx(math.exp(-3))
    for nothing in (0, 1e-40):
        assert gpt_rules(OptimConfig(matrix_lr=nothing), batch, steps, width).matrix_weight_decay == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("smallest", [1.0, 0.1, 0.005])
def test_polar_express_brings_every_singular_value_near_one(smallest, dtype):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(3, 16, 16, generator=generator))[0] for _ in range(2))
    stack = left * torch.linspace(smallest, 1, 16) @ right
    values = torch.linalg.svdvals(polar_express(stack.to(dtype)).float())
    assert values.min() > 0.8 and values.max() < 1.2


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 64, 16), (3, 16, 64)])
def test_rows_count_the_same_however_long_they_are(shape):
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(shape, generator=generator)
    longer = stack * torch.logspace(-1, 0, shape[1])[:, None]
    expected = orthogonalised({"w": stack}, torch.float32)["w"]
    torch.testing.assert_close(orthogonalised({"w": longer}, torch.float32)["w"], expected)
    assert torch.linalg.svdvals(equal_rows(longer)).max() <= 1
    longer[:, 1], longer[:, 2], longer[1], longer[2] = 0, 1e-25, 0, 1e-30
    result = orthogonalised({"w": longer}, torch.bfloat16)["w"]
    assert result.isfinite().all() and result[:, 1:3].abs().max() < 1e-3 and not result[1].any()
    updates = normalise_neurons(result, torch.zeros(3, shape[1], 1), beta2=0.95)[0]
    assert updates[2].abs().max() < 1e-6 < updates[0].abs().max()


def test_a_neuron_without_gradients_comes_to_rest():
    class Neurons(torch.nn.Module):
        training_dtype = torch.float32

        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1, 64, 16))

        def create_main_grads(self):
            self.w.main_grad = torch.zeros_like(self.w)

    model, generator = Neurons(), torch.Generator().manual_seed(0)
    optimizer = MuonAdamW(model, Rules({}, 1.0, 0.0, OptimConfig(warmup_steps=0), 1000))
    lengths = []
    for step in range(400):
        model.w.main_grad.copy_(torch.randn(model.w.shape, generator=generator))
        if step >= 100:
            model.w.main_grad[:, 0] = 0
        before = model.w.detach().clone()
        optimizer.update(optimizer.scheduled(step), {"loss": torch.zeros(())})
        lengths.append((model.w - before).detach().norm(dim=-1)[0, :2])
    moved, other = torch.stack(lengths).unbind(1)
    assert moved[:100].mean() == pytest.approx(other[:100].mean().item(), rel=0.1)
    assert moved[-100:].max() < 0.1 * other[-100:].min()


def test_matrices_of_one_shape_are_orthogonalised_together_as_each_alone():
    generator, shapes = torch.Generator().manual_seed(0), {"a": (3, 16, 16), "tall": (2, 64, 16), "b": (1, 16, 16),
                                                            "wide": (3, 16, 64)}
    stacks = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    together = orthogonalised(stacks, torch.float32)
    assert together.keys() == stacks.keys()
    for name, stack in stacks.items():
        for matrix, result in zip(stack, together[name], strict=True):
            alone = orthogonalised({name: matrix[None]}, torch.float32)[name][0]
            torch.testing.assert_close(result, alone, atol=1e-4, rtol=1e-4)


def test_normalised_neurons_have_equal_size_and_the_norm_of_an_orthogonal_matrix():
    update = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 8)[:, None]
    second_moment = torch.zeros(2, 8, 1)
    result, second_moment = normalise_neurons(update, second_moment, beta2=0.9)
    rows = result.norm(dim=-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))
    torch.testing.assert_close(second_moment, 0.1 * update.square().mean(-1, keepdim=True))
    assert not normalise_neurons(torch.zeros(1, 4, 4), torch.zeros(1, 4, 1), beta2=0.9)[0].any()


def test_weights_decay_only_where_the_update_shrinks_them():
    weights, update = torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.tensor([0.5, 0.5, -0.5, -0.5])
    assert cautious_weight_decay(weights, update).tolist() == [1.0, 0.0, 0.0, -2.0]


def test_adam_group_equals_pytorchs_adam():
    model = tiny_model()
    optimizer = make_optimizer(model, 2**19, 100, warmup_steps=0, warmdown_ratio=0)
    expected = model.wte.detach().clone().requires_grad_()
    reference = torch.optim.Adam([expected], lr=optimizer.rules.adam["wte"].lr, betas=(0.8, 0.95), eps=1e-10)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        gradient = torch.randn(expected.shape, generator=generator)
        expected.grad = gradient.clone()
        model.wte.main_grad.copy_(gradient)
        reference.step()
        optimizer.update(optimizer.scheduled(step), {"loss": torch.zeros(())})
        assert model.wte.main_grad.abs().max() == 0
    torch.testing.assert_close(model.wte, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("clip_norm", [-1.0, 1.0])
def test_a_step_that_is_not_good_changes_nothing(clip_norm, value):
    model = tiny_model()
    optimizer = make_optimizer(model, 2**19, 60, clip_norm=clip_norm)
    before = [tensor.clone() for tensor in (*model.parameters(), *optimizer.state.values())]
    model.wte.main_grad[0, 0] = value
    optimizer.update(optimizer.scheduled(0), {"loss": torch.zeros(())})
    for expected, found in zip(before, (*model.parameters(), *optimizer.state.values()), strict=True):
        assert torch.equal(expected, found)
    assert all(p.main_grad.abs().max() == 0 for p in model.parameters())


def test_gradients_above_clip_norm_are_scaled_down_to_it():
    def after(*factors, clip_norm):
        model = tiny_model()
        optimizer = make_optimizer(model, 2**19, 60, clip_norm=clip_norm)
        random = torch.Generator().manual_seed(1)
        for step, factor in enumerate(factors):
            for p in model.parameters():
                p.main_grad += factor * torch.randn(p.shape, generator=random)
            measured = optimizer.update(optimizer.scheduled(step), {"loss": torch.zeros(())})
        return list(model.parameters()), measured.fetch()["grad_norm"]

    whole, norm = after(0.01, 1, clip_norm=-1.0)
    below, _ = after(0.01, 1, clip_norm=2 * norm)
    clipped, logged = after(0.01, 1, clip_norm=norm / 8)
    scaled, _ = after(0.01, 1 / 8, clip_norm=-1.0)
    assert logged == norm
    for one, other in zip(whole, below, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(clipped, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(one, other, rtol=1e-3) for one, other in zip(whole, clipped, strict=True))
