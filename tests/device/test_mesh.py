"""Meshes: where ranks stand, which of them form groups, and what is refused."""
import pytest

from nanochat.common import BadInput
from nanochat.device.mesh import AXES, Mesh, make_mesh, require_divisible


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(8), Mesh(1, 8), Mesh(2, 4), Mesh(2, 2, 2), Mesh(3, 1, 2)])
def test_groups_of_an_axis_hold_every_rank_once_in_the_order_of_their_places(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.chips)]
    assert len(set(places)) == mesh.chips and places == sorted(places)
    for number, axis in enumerate(AXES):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.chips))
        for group in groups:
            assert [places[rank][number] for rank in group] == list(range(getattr(mesh, axis)))
            assert len({(*places[rank][:number], *places[rank][number + 1:]) for rank in group}) == 1
    # Ranks along tensor read the same rows.
    readers = [{mesh.reader(rank) for rank in group} for group in mesh.groups("tensor")]
    assert sorted(reader for [reader] in readers) == list(range(mesh.readers))


def test_data_is_what_the_other_axes_leave():
    assert make_mesh(1, 1, 8) == Mesh(8, 1)
    assert make_mesh(4, 1, 8) == Mesh(2, 4)


@pytest.mark.parametrize("flags, words", [
    ((3, 1), "--mesh_fsdp=3.* do not divide the number of chips, 8: use 2 or 4 along fsdp.*CPU_NUM_DEVICES"),
    ((16, 1), "8: use 8 along fsdp"), ((3, 2), "8: use 2 or 4 along fsdp"), ((1, 3), "8: use 2 or 4 along tensor")])
def test_a_mesh_that_does_not_match_is_refused_with_what_works(flags, words):
    with pytest.raises(BadInput, match=words):
        make_mesh(*flags, 8)


def test_a_size_that_an_axis_does_not_divide_is_named_with_what_works():
    require_divisible(Mesh(1, 4), "fsdp", {"the width": 64})
    with pytest.raises(BadInput, match="4 chips along fsdp .* width, 66: use 2 along fsdp$"):
        require_divisible(Mesh(1, 4), "fsdp", {"the width": 66})
    with pytest.raises(BadInput, match="1 data × 2 fsdp × 4 tensor: 4 .* the heads, 6: use 1 along tensor$"):
        require_divisible(Mesh(1, 2, 4), "tensor", {"the heads": 6, "the other heads": 3})
