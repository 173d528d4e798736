# ruff: noqa: E501  the lines are as the compiler writes them
"""Checks what hlo.py and ops.py read, on short programs in the compiler's own notation."""
from fractions import Fraction

import pytest

from nanochat.preflight import hlo
from nanochat.preflight.ops import ops_of
from nanochat.preflight.timeline import count_collectives

PROGRAM = '''HloModule IrToHlo.1, is_scheduled=true, entry_computation_layout={(f32[8,1024,1024]{2,1,0:T(8,128)})->f32[]}

%fused_slice (param_0: f32[8,1024,1024], param_1: s32[]) -> f32[1,1024,1024] {
  %param_0 = f32[8,1024,1024]{2,1,0:T(8,128)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  ROOT %dynamic-slice.1 = f32[1,1024,1024]{2,1,0:T(8,128)S(1)} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,1024,1024}
}

%fused_outer (param_2: f32[8,1024,1024], param_3: s32[]) -> f32[1,1024,1024] {
  %param_2 = f32[8,1024,1024]{2,1,0:T(8,128)} parameter(0)
  %param_3 = s32[]{:T(128)} parameter(1)
  ROOT %fusion.2 = f32[1,1024,1024]{2,1,0:T(8,128)S(1)} fusion(%param_2, %param_3), kind=kLoop, calls=%fused_slice
}

%inner_condition (p: (s32[])) -> pred[] {
  %p = (s32[]{:T(128)}) parameter(0)
  %get.1 = s32[]{:T(128)} get-tuple-element(%p), index=0
  %bound.1 = s32[]{:T(128)} constant(3)
  ROOT %compare.1 = pred[]{:T(512)} compare(%get.1, %bound.1), direction=LT
}

%inner_body (q: (s32[])) -> (s32[]) {
  %q = (s32[]{:T(128)}) parameter(0)
  %get.2 = s32[]{:T(128)} get-tuple-element(%q), index=0
  %twice = s32[]{:T(128)} add(%get.2, %get.2), backend_config={"window_config":{"estimated_cycles":"5"},
}, metadata={op_name="nanochat/model/gpt.py:7 aten__add"}
  ROOT %tuple.1 = (s32[]{:T(128)}) tuple(%twice)
}

%condition (r: (s32[], f32[8,1024,1024])) -> pred[] {
  %r = (s32[]{:T(128)}, f32[8,1024,1024]{2,1,0:T(8,128)}) parameter(0)
  %get.3 = s32[]{:T(128)} get-tuple-element(%r), index=0
  %bound.2 = s32[]{:T(128)} constant(8)
  ROOT %compare.2 = pred[]{:T(512)} compare(%get.3, %bound.2), direction=LT
}

%body (s: (s32[], f32[8,1024,1024])) -> (s32[], f32[8,1024,1024]) {
  %s = (s32[]{:T(128)}, f32[8,1024,1024]{2,1,0:T(8,128)}) parameter(0)
  %get.4 = s32[]{:T(128)} get-tuple-element(%s), index=0
  %get.5 = f32[8,1024,1024]{2,1,0:T(8,128)} get-tuple-element(%s), index=1
  %fusion.1 = f32[1,1024,1024]{2,1,0:T(8,128)S(1)} fusion(%get.5, %get.4), kind=kLoop, calls=%fused_outer, metadata={op_name="nanochat/model/gpt.py:9 xla__select"}, backend_config={"window_config":{"estimated_cycles":"100"}}
  %all-reduce.1 = f32[1,1024,1024]{2,1,0:T(8,128)S(1)} all-reduce(%fusion.1), replica_groups={}, to_apply=%add
  %tuple.2 = (s32[]{:T(128)}) tuple(%get.4)
  %while.1 = (s32[]{:T(128)}) while(%tuple.2), condition=%inner_condition, body=%inner_body
  ROOT %tuple.3 = (s32[]{:T(128)}, /*index=1*/f32[8,1024,1024]{2,1,0:T(8,128)}) tuple(%get.4, %get.5)
}

ENTRY %main (Arg_0: f32[8,1024,1024]) -> f32[] {
  %Arg_0 = f32[8,1024,1024]{2,1,0:T(8,128)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %copy.1 = f32[8,1024,1024]{2,1,0:T(8,128)} copy(%Arg_0), backend_config={"window_config":{"estimated_cycles":"1000"}}
  %tuple.4 = (s32[]{:T(128)}, f32[8,1024,1024]{2,1,0:T(8,128)}) tuple(%zero, %copy.1)
  ROOT %while.2 = (s32[]{:T(128)}, f32[8,1024,1024]{2,1,0:T(8,128)}) while(%tuple.4), condition=%condition, body=%body
}
'''


def test_bodies_of_loops_count_as_often_as_they_run_nested_ones_and_collectives_too():
    ops = ops_of(hlo.parse(PROGRAM))
    by_name = {op.instruction.name: op for op in ops}
    assert [by_name[name].times for name in ("copy.1", "fusion.1", "twice")] == [1, 8, 24]
    assert sum(op.times * op.cycles for op in ops) == 1000 + 8 * 100 + 24 * 5
    assert count_collectives(ops, chips=8) == {"all-reduce": [8, 8 * 4 * 1024 * 1024, 0]}
    # An instruction that spans lines, one of which begins with a brace
    assert by_name["twice"].instruction.source == "nanochat/model/gpt.py:7 aten__add"


def test_a_loop_that_counts_by_two_runs_half_as_often():
    counted = PROGRAM.replace("  ROOT %tuple.3 =", "  %two = s32[]{:T(128)} constant(2)\n"
                              "  %next = s32[]{:T(128)} add(%get.4, %two)\n  ROOT %tuple.3 =")
    counted = counted.replace("tuple(%get.4, %get.5)", "tuple(%next, %get.5)")
    by_name = {op.instruction.name: op for op in ops_of(hlo.parse(counted))}
    assert [by_name[name].times for name in ("copy.1", "fusion.1", "twice")] == [1, 4, 12]


BRANCHES = """
%short (t: (s32[])) -> s32[] {
  %t = (s32[]{:T(128)}) parameter(0)
  ROOT %short.1 = s32[]{:T(128)} custom-call(%t), custom_call_target="tpu_custom_call"
}

%long (u: (s32[])) -> s32[] {
  %u = (s32[]{:T(128)}) parameter(0)
  ROOT %long.1 = s32[]{:T(128)} custom-call(%u), custom_call_target="tpu_custom_call"
}

%body (s:"""
BY_NUMBER, BY_TRUTH = "branch_computations={%short, %long}", "true_computation=%short, false_computation=%long"


@pytest.mark.parametrize("chosen_by, shares, short, long", [
    (BY_NUMBER, {}, 8, 8), (BY_NUMBER, {"branch_computations": (Fraction(3, 4), Fraction(1, 4))}, 6, 2),
    (BY_NUMBER, {"branch_computations": (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))}, 8, 8),
    (BY_NUMBER, {"true_computation": (Fraction(3, 4), Fraction(1, 4))}, 8, 8),
    (BY_TRUTH, {"true_computation": (Fraction(3, 4), Fraction(1, 4))}, 6, 2)])
def test_branches_count_by_their_shares(chosen_by, shares, short, long):
    conditional = f"  %which = s32[]{{:T(128)}} conditional(%get.4, %tuple.2, %tuple.2), {chosen_by}\n  %while.1 ="
    program = PROGRAM.replace("%body (s:", BRANCHES.lstrip(), 1).replace("  %while.1 =", conditional, 1)
    ops = {op.instruction.name: op for op in ops_of(hlo.parse(program), shares)}
    assert (ops["short.1"].times, ops["long.1"].times) == (short, long)


def test_of_a_stack_that_a_loop_takes_slices_of_the_slice_counts_and_vmem_does_not():
    layer = 4 * 1024 * 1024
    ops = {op.instruction.name: op for op in ops_of(hlo.parse(PROGRAM))}
    assert ops["copy.1"].hbm_bytes == 2 * 8 * layer
    assert ops["fusion.1"].hbm_bytes == pytest.approx(layer + 4)  # read from HBM, written to VMEM; the index


def op_of_fusion(result, body, others="", **parameters):
    """Returns the Op of a fusion with this result, of the instructions `body`. others: what they call; parameters:
    {name: shape}."""
    given = "\n".join(f"  %{name} = {shape} parameter({number})" for number, (name, shape) in enumerate(
        parameters.items()))
    names = ", ".join(f"%{name}" for name in parameters)
    (op,) = ops_of(hlo.parse(f"""HloModule m, is_scheduled=true
{others}
%fused (a: f32[]) -> f32[] {{
{given}{body}
}}

ENTRY %main (a: f32[]) -> f32[] {{
{given}
  ROOT %fusion.1 = {result} fusion({names}), kind=kCustom, calls=%fused
}}
"""))
    return op


def test_of_a_stack_that_is_read_in_another_tiling_the_slice_counts():
    op = op_of_fusion("s8[1,64,128]{2,1,0:T(8,128)(4,1)}", """
  %fusion.2 = s8[16,64,128]{2,1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion
  ROOT %dynamic-slice.1 = s8[1,64,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%fusion.2, %index), dynamic_slice_sizes={1,64,128}""", """
%copy_fusion (input: s8[16,64,128]) -> s8[16,64,128] {
  %input = s8[16,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[16,64,128]{2,1,0:T(8,128)(4,1)} copy(%input)
}
""", stack="s8[16,64,128]{2,1,0:T(32,128)(4,1)}", index="s32[]{:T(128)}")
    assert op.hbm_bytes == 2 * 64 * 128 + 4  # read and written; the index


def test_a_kernel_in_a_fusion_costs_what_it_declares():
    op = op_of_fusion("bf16[16,1024]{1,0:T(8,128)(2,1)}", """
  %kernel.1 = bf16[1,1024]{1,0:T(8,128)(2,1)} custom-call(%a), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate": {"bytes_accessed": 4096, "flops": 12, "transcendentals": 3}}}
  ROOT %update.1 = bf16[16,1024]{1,0:T(8,128)(2,1)} dynamic-update-slice(%a, %kernel.1)""",
                      a="bf16[16,1024]{1,0:T(8,128)(2,1)}")
    assert op.kernel.declared_cost == {"flops": 12, "transcendentals": 3, "bytes_accessed": 4096}
    assert op.instruction.name == "fusion.1" and op.hbm_bytes == 4096


def test_of_a_table_to_whose_rows_a_fusion_adds_the_rows_count():
    op = op_of_fusion("f32[4096,128]{1,0:T(8,128)}", """
  ROOT %scatter.1 = f32[4096,128]{1,0:T(8,128)} scatter(%table, %rows, %new), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add""", """
%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[]{:T(128)} parameter(0)
  %q = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%p, %q)
}
""", table="f32[4096,128]{1,0:T(8,128)}", rows="u32[8]{0:T(128)}", new="f32[8,128]{1,0:T(8,128)}")
    assert op.hbm_bytes == 3 * 8 * 128 * 4 + 8 * 4  # what is added; the rows, read and written; their numbers


OVERLAPPED = '''HloModule IrToHlo.2, is_scheduled=true, entry_computation_layout={(bf16[1,8,128]{2,1,0})->bf16[2,8,128]{2,1,0}}

%start (param_0: bf16[1,8,128]) -> (bf16[1,8,128], bf16[2,8,128], u32[]) {
  %param_0 = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[2,8,128]{2,1,0:T(8,128)(2,1)} all-gather(%param_0), replica_groups={{0,1}}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %custom-call.1 = (bf16[1,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%step (param_1: bf16[1,8,128], param_2: bf16[2,8,128], param_3: u32[], param_4: f32[8,128]) -> (f32[8,128], bf16[1,8,128], bf16[2,8,128], u32[]) {
  %param_1 = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_2 = bf16[2,8,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %param_3 = u32[]{:S(2)} parameter(2)
  %param_4 = f32[8,128]{1,0:T(8,128)} parameter(3)
  %add.1 = f32[8,128]{1,0:T(8,128)} add(%param_4, %param_4)
  %all-gather.2 = bf16[2,8,128]{2,1,0:T(8,128)(2,1)} all-gather(%param_1), replica_groups={{0,1}}, dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %tuple.1 = (f32[8,128]{1,0}, bf16[1,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, u32[]{:S(2)}) tuple(%add.1, %param_1, %param_2, %all-gather.2, %param_3)
}

ENTRY %main (Arg_0: bf16[1,8,128], Arg_1: f32[8,128]) -> f32[8,128] {
  %Arg_0 = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %Arg_1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %fusion.1 = (bf16[1,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, u32[]{:S(2)}) fusion(%Arg_0), kind=kCustom, calls=%start
  %get.1 = bf16[1,8,128]{2,1,0} get-tuple-element(%fusion.1), index=0
  %get.2 = bf16[2,8,128]{2,1,0} get-tuple-element(%fusion.1), index=1
  %get.3 = u32[]{:S(2)} get-tuple-element(%fusion.1), index=2
  %fusion.2 = (f32[8,128]{1,0}, bf16[1,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, bf16[2,8,128]{2,1,0}, u32[]{:S(2)}) fusion(%get.1, %get.2, %get.3, %Arg_1), kind=kOutput, calls=%step
  ROOT %get.4 = f32[8,128]{1,0} get-tuple-element(%fusion.2), index=0
}
'''


def test_a_collective_in_steps_counts_once_and_as_running_beside_other_work():
    ops = ops_of(hlo.parse(OVERLAPPED))
    whole, part, added = 2 * 8 * 128 * 2, 8 * 128 * 2, 8 * 128 * 4
    assert count_collectives(ops, chips=2) == {"all-gather": [1, whole, whole]}
    assert sum(op.hbm_bytes for op in ops) == whole + part + 2 * added


def test_of_a_collective_that_begins_only_the_results_count():
    program = '''HloModule m, is_scheduled=true

ENTRY %main (Arg_0: bf16[8,128]) -> bf16[8,128] {
  %Arg_0 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %start = ((bf16[8,128]{1,0}), bf16[8,128]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) all-to-all-start(%Arg_0), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %done = bf16[8,128]{1,0} all-to-all-done(%start)
}
'''
    whole = 8 * 128 * 2
    assert count_collectives(ops_of(hlo.parse(program)), chips=4) == {"all-to-all": [1, whole, whole]}
