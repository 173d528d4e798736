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


def test_data_is_what_the_other_axes_leave():
    assert make_mesh(1, 1, 8, {}) == Mesh(8, 1)
    assert make_mesh(4, 1, 8, {}) == Mesh(2, 4)


def test_the_environment_names_a_mesh_where_no_flag_does():
    environment = {"TPU_MESH_CONFIG": "2,4", "TPU_AXIS_NAMES": "fsdp,data"}
    assert make_mesh(1, 1, 8, environment) == Mesh(4, 2)
    assert make_mesh(8, 1, 8, environment) == Mesh(1, 8)
    assert make_mesh(1, 1, 8, {"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "data,model"}) == Mesh(4, 1, 2)
    assert make_mesh(1, 1, 8, {"TPU_MESH_CONFIG": "2,2,2"}) == Mesh(2, 2, 2)
    assert make_mesh(1, 1, 8, {"TPU_MESH_CONFIG": "(2, 4)"}) == Mesh(2, 4)


@pytest.mark.parametrize("flags, environment, words", [
    ((3, 1), {}, r"--mesh_fsdp=3.* are \? × 3 × 1 chips .*there are 8: use 2 or 4 along fsdp.*CPU_NUM_DEVICES"),
    ((16, 1), {}, "there are 8: use 8 along fsdp"),
    ((3, 2), {}, r"are \? × 3 × 2 chips .* there are 8: use 2 or 4 along fsdp"),
    ((1, 3), {}, "there are 8: use 2 or 4 along tensor"),
    ((1, 1), {"TPU_MESH_CONFIG": "4,4"}, "TPU_MESH_CONFIG=4,4 with TPU_AXIS_NAMES=data,fsdp,tensor are 4 × 4 .* "
     "there are 8: use 2 or 4 along fsdp, and the others along data"),
    ((1, 1), {"TPU_MESH_CONFIG": "2,2,4", "TPU_AXIS_NAMES": "data,model,fsdp"},
     "TPU_MESH_CONFIG=2,2,4 .* are 2 × 4 × 2 .*: use 2 or 4 along fsdp"),
    ((1, 1), {"TPU_MESH_CONFIG": "two"}, "TPU_MESH_CONFIG=two .* is no mesh"),
    ((1, 1), {"TPU_MESH_CONFIG": "9" * 5000}, "is no mesh"),
    ((1, 1), {"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "data,width"}, "TPU_AXIS_NAMES=data,width is no mesh"),
    ((1, 1), {"TPU_MESH_CONFIG": "4,2", "TPU_AXIS_NAMES": "data,data"}, "is no mesh"),
])
def test_a_mesh_that_does_not_match_is_refused_with_what_works(flags, environment, words):
    with pytest.raises(BadInput, match=words) as refusal:
        make_mesh(*flags, 8, environment)
    assert not environment or "--mesh" not in str(refusal.value)  # a flag that nobody gave


def test_a_size_that_an_axis_does_not_divide_is_named_with_what_works():
    require_divisible(Mesh(1, 4), "fsdp", {"the width": 64})
    with pytest.raises(BadInput, match="4 chips along fsdp .* width, 66: use 2 along fsdp$"):
        require_divisible(Mesh(1, 4), "fsdp", {"the width": 66})
    with pytest.raises(BadInput, match="1 data × 2 fsdp × 4 tensor: 4 .* the heads, 6: use 1 along tensor$"):
        require_divisible(Mesh(1, 2, 4), "tensor", {"the heads": 6, "the other heads": 3})


def test_ranks_along_tensor_read_the_same_rows():
    mesh = Mesh(2, 2, 2)
    assert [mesh.reader(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3] and mesh.readers == 4
    for group in mesh.groups("tensor"):
        assert len({mesh.reader(rank) for rank in group}) == 1
