"""The Pallas kernels of attention, run as plain XLA operations on the CPU, against attention in float64."""
from functools import partial

import jax
import numpy as np
import pytest
import torch

from nanochat.kernels import pallas_attention, plain
from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, list_tiles, num_scores, segment_of
from nanochat.kernels.xla import _pallas_attention, _pallas_tables
from nanochat.model.layers import apply_rotary, norm, rotary_tables, split_heads

DIM = 128


def in_float64(q, k, v, d_out, window):
    """Output and gradients of the same attention by autograd, from bfloat16 or fp32 numbers in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    rotary = [table.double() for table in rotary_tables(torch.arange(q.size(1)), DIM)]
    heads = [norm(apply_rotary(split_heads(x, DIM), *rotary)) for x in (q, k)]
    out = plain.attention(*heads, split_heads(v, DIM), window).transpose(1, 2).flatten(2)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())


def by_pallas(q, k, v, d_out, window, matrix_unit, **options):
    """The same by the kernels, from the second layer of a stack."""
    to_jax = jax.numpy.from_dlpack
    tables = [to_jax(table) for table in _pallas_tables(*rotary_tables(torch.arange(q.size(1)), DIM))]
    stacks = [to_jax(torch.stack([torch.full_like(x, torch.nan), x])) for x in (q, k, v)]
    options |= dict(windows=(window, q.size(1)) if window else (), matrix_unit=matrix_unit, interpret=True)
    place = jax.numpy.asarray([1, window or 0], "int32")
    out, log_sums = jax.jit(partial(pallas_attention.forward, **options))(place, *stacks, *tables)
    gradients = jax.jit(partial(pallas_attention.backward, **options))(
        place, *stacks, jax.numpy.stack([log_sums * jax.numpy.nan, log_sums]), to_jax(d_out), *tables)
    return [torch.from_dlpack(x).float() for x in (out, *gradients)]


def some_operands(length, heads, kv_heads, dtype):
    generator = torch.Generator().manual_seed(length)
    widths = [heads, kv_heads, kv_heads, heads]
    return [torch.randn(1, length, n * DIM, generator=generator).to(dtype) for n in widths]


slow = pytest.mark.slow


@pytest.mark.parametrize("length, size, heads, kv_heads, matrix_unit", [
    (12, 16, 2, 1, 128), (384, 128, 1, 1, 256), *(pytest.param(*shape, marks=slow) for shape in (
        (640, 64, 3, 1, 128), (768, 128, 2, 2, 128), (768, 64, 2, 1, 256)))])
def test_heads_of_any_size_without_a_norm_have_scores_of_any_size(length, size, heads, kv_heads, matrix_unit):
    generator = torch.Generator().manual_seed(length)
    q, k, v, d_out = (torch.randn(2, n, length, size, generator=generator) for n in (heads, kv_heads, kv_heads, heads))
    q *= 40  # exponentials of such scores are not finite in fp32
    k[:, :, 5] -= 3  # whose scores are all negative for some queries, and positive for others
    found = []
    for attention, dtype in ((_pallas_attention(True, matrix_unit, 4096, ()).of_heads, torch.float32),
                             (plain.attention, torch.float64)):
        inputs = [x.to("xla" if dtype == torch.float32 else "cpu", dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, None)
        found.append([out, *torch.autograd.grad(out, inputs, d_out.to(out))])
    for ours, theirs in zip(*found, strict=True):
        error = (ours.cpu() - theirs).norm() / theirs.norm()
        assert error < 1e-4, error


@pytest.mark.parametrize("length, heads, kv_heads, window, matrix_unit, max_whole", [
    (12, 2, 1, None, 128, 4096), (12, 1, 1, 6, 256, 4096), (384, 1, 1, None, 256, 4096), (512, 2, 1, None, 128, 256),
    *(pytest.param(*shape, marks=slow) for shape in (
        (640, 1, 1, None, 128, 4096), (640, 2, 1, 200, 256, 4096), (1280, 1, 1, 640, 128, 4096),
        (1536, 1, 1, 384, 256, 4096), (768, 2, 1, 600, 128, 512), (1024, 1, 1, 256, 256, 512),
        (768, 1, 1, 100, 128, 512)))])
def test_output_and_gradients_are_those_of_float64_whole_and_in_segments(
        monkeypatch, length, heads, kv_heads, window, matrix_unit, max_whole):
    used, run = [], pallas_attention.forward_in_segments

    def run_and_note(*args, segment, **options):
        used.append(segment)
        return run(*args, segment=segment, **options)

    monkeypatch.setattr(pallas_attention, "forward_in_segments", run_and_note)
    operands = some_operands(length, heads, kv_heads, torch.float32)
    found = by_pallas(*operands, window, matrix_unit, max_whole=max_whole)
    assert used == ([max_whole // 2] if length > max_whole else [])
    for tensor, exact in zip(found, in_float64(*operands, window), strict=True):
        torch.testing.assert_close(tensor.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("length, max_whole, segment", [
    (8192, 4096, 2048), (32768, 4096, 2048), (2048, 1024, 512), (1536, 1024, 512), (1152, 1024, 384)])
def test_segments_have_room_and_divide_the_sequence(length, max_whole, segment):
    assert segment_of(length, max_whole) == segment


def assert_covered_once(covered, window):
    """covered: how often each query (row) meets each key (column). Some meet that do not see one another."""
    distance = np.arange(len(covered))[:, None] - np.arange(len(covered))[None]
    visible = (distance >= 0) & (distance < (window or len(covered)))
    assert covered.max() == 1 and (covered[visible] == 1).all()


EVERY_TILING = pytest.mark.parametrize("tiles", [tiles_of[matrix_unit] for tiles_of in (FORWARD_TILES, BACKWARD_TILES)
                                                 for matrix_unit in (128, 256)])


@EVERY_TILING
@pytest.mark.parametrize("window", [None, 1, 130, 512, 600, 1024, 1100])
def test_pairs_of_segments_cover_what_queries_see_once(window, tiles):
    length, segment = 2048, 512
    covered = np.zeros((length, length), int)
    pairs = pallas_attention.list_pairs(length // segment, segment, window)
    for i, j in pairs:
        cases = pallas_attention.list_cases(pairs, segment, tiles, window)
        (tiles_of_pair,) = [found for first, last, found in cases if first <= i - j <= last]
        for tile in tiles_of_pair:
            covered[i * segment:][tile.queries, j * segment:(j + 1) * segment][:, tile.keys] += 1
    assert_covered_once(covered, window)


@pytest.mark.parametrize("matrix_unit", [128, pytest.param(256, marks=slow)])
def test_in_bfloat16_the_error_is_that_of_rounded_operands(matrix_unit):
    operands = some_operands(384, 1, 1, torch.bfloat16)
    for found, exact in zip(by_pallas(*operands, None, matrix_unit), in_float64(*operands, None), strict=True):
        assert (found - exact).norm() < 2**-8 * exact.norm()


@EVERY_TILING
@pytest.mark.parametrize("length, window", [
    (128, None), (1024, None), (1152, None), (2048, 1024), (2048, 512), (2048, 1), (896, 448), (640, 200)])
def test_tiles_cover_what_queries_see_once(length, window, tiles):
    covered = np.zeros((length, length), int)
    for tile in list_tiles(length, tiles, window):
        covered[tile.queries, tile.keys] += 1
    assert_covered_once(covered, window)


@pytest.mark.parametrize("length", [2048, 4096])
@EVERY_TILING
def test_windows_leave_tiles_out(length, tiles):
    """Of the positions that all queries see, windows of half and a quarter of the length leave 3/4 and 7/16."""
    whole, half, quarter = (num_scores(list_tiles(length, tiles, window))
                            for window in (None, length // 2, length // 4))
    assert half < 0.84 * whole and quarter < 0.6 * whole
