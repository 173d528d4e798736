"""Operations that PyTorch/XLA lacks: a loop inside the program, slices of a stack by index, a kernel written in JAX.

Each is built once for each set of shapes and kept, so that tracing it in later steps costs one dictionary lookup.
torch_xla and jax are imported inside the functions only. JAX translates kernels; torch_xla alone owns the TPU.
"""
import os
from functools import partial
from itertools import chain

import torch

_computations = {}  # key -> XLA computation


def _shapes(tensors):
    return tuple((tuple(t.shape), t.dtype) for t in tensors)


def loop(body, carry, read, write, constants=(), reverse=False):
    """Runs `body` once for each index of the stacks' first dimension, as one loop of the XLA program. Returns
    (carry, write) after the last iteration. There is no gradient.

    body(index, carry, read, write, constants) -> (carry, write): index is an int32 scalar, the others are tuples of
        tensors. It gets slice `index` of each stack of `read` and `write`, and the slices that it returns replace those
        of `write`. It must be the same object, or an equal one, at every call, and use no tensor but its arguments.
    carry: tensors that go from one iteration to the next and keep their shapes. read, write: stacks, (n, …) each.
    reverse: from the last index to the first.
    """
    import torch_xla
    device = read[0].device
    arguments = [torch.zeros((), dtype=torch.int32, device=device), *carry, *read, *write, *constants]
    # The device counts: the scalars that are kept with the computation are tensors on it.
    key = (body, reverse, device, len(carry), len(read), len(write), _shapes(arguments))
    if key not in _computations:
        use_device_of(arguments[0])
        _computations[key] = _build_loop(body, carry, read, write, constants, reverse)
    computation, scalars = _computations[key]
    results = torch_xla._XLAC._xla_user_computation("nanochat::loop", arguments + scalars, computation)
    first_write = 1 + len(carry) + len(read)
    return tuple(results[1:1 + len(carry)]), tuple(results[first_write:first_write + len(write)])


def use_device_of(tensor):
    """Makes this thread create tensors and run collectives on the device of `tensor`.

    Autograd calls backward passes in threads of its own, which begin with the first device. With several devices in a
    process, all collectives would run on that device, and its program would wait for ever for the other ranks.
    """
    import torch_xla
    torch_xla._XLAC._xla_set_default_device(str(tensor.device))


def _build_loop(body, carry, read, write, constants, reverse):
    """Returns the loop's computation, and the scalars that it takes after the tensors."""
    import torch_xla
    from torch_xla.core import xla_builder as xb
    from torch_xla.experimental.scan import dynamic_slice, dynamic_update_slice

    body_computation, arguments_of_body, scalars = _trace_body(body, carry, read, write, constants)
    # The loop's state is [index, *carry, *read, *write, *constants, *scalars]. An XLA loop has no other memory, so its
    # state also holds, unchanged, what it only reads.
    first_read = 1 + len(carry)
    first_write = first_read + len(read)
    first_constant = first_write + len(write)
    length = (*read, *write)[0].shape[0]

    def condition(index, *rest):
        return index < xb.Op.scalar(index.builder(), length, dtype=xb.Type.S32)

    def iterate(index, *rest):
        def scalar(value):
            return xb.Op.scalar(index.builder(), value, dtype=xb.Type.S32)

        # The index counts up in both directions. The body gets `used`: `at`, and of each stack the slice there.
        arguments = [index, *rest]
        at = scalar(length - 1) - index if reverse else index
        used = [at, *rest]
        for number in range(first_read, first_constant):
            used[number] = dynamic_slice(arguments[number], at)
        result = xb.Op.call(body_computation, [used[number] for number in arguments_of_body])
        arguments[0] = index + scalar(1)
        for i in range(len(carry)):
            arguments[1 + i] = result.get_tuple_element(i)
        for i in range(len(write)):
            new = result.get_tuple_element(len(carry) + i)
            arguments[first_write + i] = dynamic_update_slice(arguments[first_write + i], new, at)
        return tuple(arguments)

    index = torch.zeros((), dtype=torch.int32, device=torch_xla.device())
    parameters = _parameters("loop", [index, *carry, *read, *write, *constants, *scalars])
    return xb.Op.mkwhile(tuple(parameters), condition, iterate).build("loop"), scalars


def _parameters(name, tensors):
    """Returns the parameters of a new computation, an xla_builder.Op for each tensor."""
    from torch_xla.core import xla_builder as xb
    builder = xb.create_builder(name)
    return [xb.mkparam(builder, number, xb.tensor_shape(tensor)) for number, tensor in enumerate(tensors)]


def _trace_body(body, carry, read, write, constants):
    """Returns the computation of the loop's body; for each of its parameters the number of the loop's argument; and
    scalars, which are further arguments of the loop."""
    import torch_xla
    from torch_xla.core import xla_builder as xb

    def placeholders(tensors, dims=slice(None)):
        return tuple(xb.create_placeholder_tensor(tuple(t.shape[dims]), t.dtype) for t in tensors)

    per_layer = slice(1, None)
    index = xb.create_placeholder_tensor((), torch.int32)
    groups = placeholders(carry), placeholders(read, per_layer), placeholders(write, per_layer), placeholders(constants)
    with torch.no_grad():
        new_carry, new_write = body(index, *groups)
    for name, old, new in (("carry", groups[0], new_carry), ("write", groups[2], new_write)):
        assert _shapes(old) == _shapes(new), f"{name}: the loop's body turned {_shapes(old)} into {_shapes(new)}"
    # The lowered body has a parameter for each tensor that it reads, in torch_xla's own order. The placeholders tell
    # which argument of the loop each is. An argument that the body does not read is no parameter.
    context = torch_xla._XLAC.lowering.LoweringContext("LoopBody")
    context.set_name_string("loop_body")
    context.build([*new_carry, *new_write])
    computation = xb.computation_from_module_proto("loop_body", context.hlo())
    of_parameters = {}  # parameter of the body -> number of the loop's argument
    arguments = [index, *chain(*groups)]
    for number, tensor in enumerate(arguments):
        if (parameter := context.tensor_parameter_id(tensor)) != -1:
            of_parameters[parameter] = number
    # Numbers in the body's code have become scalars on the device: they become arguments, too.
    scalars = []
    for parameter, tensor in context.device_parameter_id_tensor_mapping().items():
        if parameter not in of_parameters:
            assert tensor.dim() == 0, "the loop's body uses a tensor that is not one of its arguments"
            of_parameters[parameter] = len(arguments) + len(scalars)
            scalars.append(tensor.to((*read, *write)[0].device))
    return computation, [of_parameters[i] for i in range(len(of_parameters))], scalars


def without_token(collective, tensor):
    """Returns collective(tensor): a function of torch_xla's that makes one tensor of one. Use the same object at every
    call.

    torch_xla orders collectives by a token that it adds to their operands: a zero that is an argument of the program.
    XLA does not know its value, and writes the sum to memory. Here the token is a constant.
    """
    import torch_xla
    key = (collective, tensor.device, _shapes([tensor]))
    # Building removes the token. So every call does, and the operations that follow are the same program in all steps.
    torch_xla._XLAC._set_all_reduce_token(str(tensor.device), None)
    if key not in _computations:
        use_device_of(tensor)
        _computations[key] = _build_without_token(collective, tensor)
    return torch_xla._XLAC._xla_user_computation("nanochat::collective", [tensor], _computations[key])[0]


def _build_without_token(collective, tensor):
    import torch_xla
    from torch_xla.core import xla_builder as xb
    placeholder = xb.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)
    context = torch_xla._XLAC.lowering.LoweringContext("Collective")
    context.set_name_string("collective")
    context.build([collective(placeholder)])
    torch_xla._XLAC._set_all_reduce_token(str(tensor.device), None)
    operand = _parameters("collective", [tensor])[0]
    # The computation's other parameter is the token, before or after the tensor.
    zero = xb.Op.scalar(operand.builder(), 0.0, dtype=xb.Type.F32)
    number = len(context.device_parameter_id_tensor_mapping())
    place = context.tensor_parameter_id(placeholder)
    computation = xb.computation_from_module_proto("collective", context.hlo())
    return xb.Op.call(computation, [operand if i == place else zero for i in range(number)]).build("collective")


def take(stack, index):
    """Returns stack[index]. index: int32 scalar."""
    if stack.device.type == "cpu":
        return stack[index]

    def build(stack, index):
        from torch_xla.experimental.scan import dynamic_slice
        return dynamic_slice(stack, index)

    return _call("take", build, stack, index)


def put(stack, index, value, use_from_memory=False):
    """Returns `stack` with `value` as its slice `index`.

    use_from_memory: all uses of the value must read it from the result, so that the operation that computes the value
        writes it there. Otherwise XLA may keep it as a tensor of its own and copy it into the stack.
    """
    if stack.device.type == "cpu":
        return stack.index_copy(0, index[None].long(), value[None])

    def build(stack, index, value):
        from torch_xla.experimental.scan import dynamic_update_slice
        return dynamic_update_slice(stack, value, index)

    result = _call("put", build, stack, index, value)
    if use_from_memory:
        import torch_xla.core.xla_model as xm
        xm.optimization_barrier_([result])
    return result


def add_if(condition, x, value):
    """Returns x + value, or x itself if the int32 scalar `condition` is 0. The program decides: if it adds nothing, it
    neither reads nor writes x."""
    def build(condition, x, value):
        from torch_xla.core import xla_builder as xb

        # Without the conditional, layers that add no value would also read and write the sum: 60.4 GB of HBM traffic a
        # micro-step on v6e at depth 16, with it 58.6 GB. A loop of one turn or none is slower, 87.0 Mcycles instead of
        # 84.5, because the compiler copies the sum to VMEM and back.
        adds = xb.Op.scalar(condition.builder(), 0, dtype=xb.Type.S32) < condition
        return adds.mkconditional((x, value), lambda x, value: x + value, lambda x, value: x)

    return _call("add if", build, condition, x, value)


def _call(name, build, *tensors):
    import torch_xla
    key = (name, _shapes(tensors))
    if key not in _computations:
        _computations[key] = build(*_parameters(name, tensors)).build(name)
    return torch_xla._XLAC._xla_user_computation(f"nanochat::{name}", list(tensors), _computations[key])[0]


def jax_call(function, *tensors):
    """Calls a JAX function on XLA tensors, as part of the program, and returns a list of tensors.

    function: a functools.partial, the same object at every call, lowered for the TPU, or for the CPU if it has the
        keyword interpret=True.
    """
    import torch_xla
    key = (function, _shapes(tensors))
    if key not in _computations:
        _computations[key] = _lower(function, tensors)
    return torch_xla._XLAC._xla_user_computation("nanochat::jax", list(tensors), _computations[key])


def row_major_matmul(x, weight):
    """Returns x @ weight, (B, T, out), for (B, T, in) and (in, out), in this order in memory. Needs jax; TPU only. By
    itself, the compiler chooses an order that suits this product, and copies the result for the others."""
    return jax_call(_row_major_matmul, x, weight)[0]


@partial
def _row_major_matmul(x, weight):
    # One product in three dimensions: PyTorch flattens x to (B × T, in), and a constraint on the reshaped result does
    # not reach the product.
    import jax
    from jax.experimental.layout import Layout, with_layout_constraint
    product = jax.lax.dot_general(x, weight, (((2,), (0,)), ((), ())))
    return with_layout_constraint(product, Layout(major_to_minor=(0, 1, 2)))


def import_jax():
    """Returns the module jax, on the CPU, without touching this machine's TPU. Call it before any other import of jax.

    On a TPU VM the import of jax changes three things (jax/_src/cloud_tpu_init.py), which this reverts:
    - JAX would start the TPU that torch_xla owns.
    - Before it writes a Pallas kernel, it would ask its runtime for the date of libtpu. The CPU's has none, which JAX
      takes for too old, although the pinned libtpu reads what the pinned JAX writes.
    - It adds an option for libtpu to the environment, and so to the environment of the ranks: chips that run different
      programs, as ranks may, would then wait for each other for ever (pytorch/xla issue 9084).
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    libtpu_options = os.environ.get("LIBTPU_INIT_ARGS", "")
    import jax
    from jax._src import cloud_tpu_init, tpu_custom_call
    os.environ["LIBTPU_INIT_ARGS"] = libtpu_options
    jax.config.update("jax_platforms", "cpu")  # if it was imported before
    cloud_tpu_init.running_in_cloud_tpu_vm = False
    # jaxlib 0.7.1 writes Pallas kernels in Mosaic version 8, libtpu 0.0.21 reads 7 (pytorch/xla issue 9614).
    tpu_custom_call.get_ir_version = lambda *args, **kwargs: 7
    return jax


def _lower(function, tensors):
    jax = import_jax()
    from torch_xla.core import xla_builder as xb
    arguments = [jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
    platform = "cpu" if function.keywords.get("interpret") else "tpu"
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,))
    proto = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return xb.computation_from_module_proto(getattr(function, "__name__", "jax"), proto)


def wait_for(first, tensors):
    """Makes the program compute `first` before anything that uses `tensors`, a list. Changes all of them in place: pass
    no views."""
    import torch_xla.core.xla_model as xm
    xm.optimization_barrier_([first, *tensors])
