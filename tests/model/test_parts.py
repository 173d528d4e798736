"""The parts of the ranks of a mesh."""
import pytest
import torch

from nanochat.device.mesh import Mesh
from nanochat.device.ranks import Dist
from nanochat.model.config import GPTConfig
from nanochat.model.decoder import initial_weights
from nanochat.model.gpt import GPT
from nanochat.model.models import DIVIDED_BY_INPUTS, UNDIVIDED
from nanochat.model.parts import Parts

CONFIG = GPTConfig(vocab_size=47, max_seq_len=8, n_layer=3, n_embd=32, n_head=4, n_kv_head=2, layer_gates=True)


@pytest.mark.parametrize("mesh", [
    Mesh(1, 2), Mesh(2, 2), Mesh(2, 4), Mesh(1, 8), Mesh(1, 1, 2), Mesh(2, 1, 2), Mesh(1, 2, 2), Mesh(2, 2, 2)])
def test_weights_in_slices_give_the_parts_of_whole_weights_and_those_hold_everything_once(mesh):
    model = GPT(CONFIG, None).init_weights(3)
    whole = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1 and name not in UNDIVIDED}
    shapes = {name: p.shape for name, p in whole.items()}
    ranks = [Parts(Dist("xla", torch.device("cpu"), rank, mesh.chips), mesh) for rank in range(mesh.chips)]
    found = [parts.collect(initial_weights(CONFIG, 3), shapes, torch.float32) for parts in ranks]
    for parts, (of_model, of_optimizer) in zip(ranks, found, strict=True):
        assert of_optimizer.keys() == shapes.keys()
        assert all(torch.equal(of_model[name], p) for name, p in model.named_parameters() if name not in shapes)
        for name, weight in whole.items():
            assert torch.equal(of_model[name], parts.of_model(name, weight))
            assert torch.equal(of_optimizer[name], parts.of_optimizer(weight))
    for name, weight in whole.items():
        for data in range(mesh.data):
            first, along_tensor = data * mesh.fsdp * mesh.tensor, []
            for place in range(mesh.tensor):  # what fsdp divides is put together first, as the layers do it
                ranks_along_fsdp = range(first + place, first + mesh.fsdp * mesh.tensor, mesh.tensor)
                along_tensor.append(torch.cat([found[rank][0][name] for rank in ranks_along_fsdp], -2))
            found_whole = torch.cat(along_tensor, -1 if name in DIVIDED_BY_INPUTS else -2)
            assert torch.equal(found_whole[:len(weight)], weight) and not found_whole[len(weight):].any()
    kept = sum(part.square().sum() for _, of_optimizer in found for part in of_optimizer.values())
    assert float(kept) == pytest.approx(float(sum(weight.square().sum() for weight in whole.values())), rel=1e-5)
