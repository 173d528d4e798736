"""Runs the TPU compiler, libtpu, in a process that compile.py starts for each program.

libtpu tolerates no other XLA client beside it. This process needs neither PyTorch nor a TPU.
"""
import functools
import json
import os
import re
import time
from pathlib import Path

from nanochat.preflight.source_lines import IN_MLIR, IN_SCOPE, REPOSITORY


def compile_folder(folder):
    """Compiles the program `folder`/traced.pb with the options in `folder`/request.json.

    `folder` is an absolute path. It becomes the working directory, because an option of libtpu cannot hold a path with
    a space. Writes `folder`/compiled.json, which has the fields of compile.CompiledProgram, and
    `folder`/optimised.hlo, which is empty if the program does not fit into the chip's memory.
    """
    import numpy as np
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies
    from jaxlib import xla_client

    folder = Path(folder)
    os.chdir(folder)
    request = json.loads((folder / "request.json").read_text())
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["topology_options"]).devices
    # Each chip is a replica, and no program is divided (one computation each): what was traced is what every chip runs,
    # and its collectives count replicas. The assignment is (replicas, 1).
    options = xla_client.CompileOptions()
    options.num_replicas = len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(-1, 1))
    module = _load(folder / "traced.pb", set(request["donated"]))
    started = time.monotonic()
    try:
        executable = devices[0].client.compile(
            module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=options)
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _write(folder, "", seconds=time.monotonic() - started, out_of_memory=str(error))
        return
    seconds = time.monotonic() - started
    memory = executable.get_compiled_memory_stats()
    costs = executable.cost_analysis()
    _write(folder, executable.hlo_modules()[0].to_string(), seconds=seconds,
           argument_bytes=memory.argument_size_in_bytes, output_bytes=memory.output_size_in_bytes,
           alias_bytes=memory.alias_size_in_bytes, temp_bytes=memory.temp_size_in_bytes,
           code_bytes=memory.generated_code_size_in_bytes,
           costs={key: costs[key] for key in ("flops", "bytes accessed", "transcendentals") if key in costs})


def _write(folder, hlo_text, **fields):
    (folder / "optimised.hlo").write_text(hlo_text)
    (folder / "compiled.json").write_text(json.dumps(fields))


def _load(path, donated):
    """Reads a HloModuleProto and returns it as MLIR bytecode.

    The arguments whose indices are in `donated` are marked. The name of each operation begins with the line of this
    repository that it comes from, because the compiler keeps names only.
    """
    from jax._src.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    proto = with_lines_in_loops(path.read_bytes())
    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(proto))
    with mlir.make_ir_context():
        module = ir.Module.parse(with_source_lines(text))
        main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
        # The compiler may put any output into a donor's memory, as torch_xla's donated buffers allow it in a run.
        # Without the mark each updated weight would need its memory twice.
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([
            ir.DictAttr.get({"jax.buffer_donor": ir.BoolAttr.get(True)} if index in donated else {})
            for index in range(len(main.type.inputs))])
        return mlir.module_to_bytecode(module)


def with_lines_in_loops(proto):
    """Returns the HloModuleProto with the line of each operation outside the entry computation added to its name, in
    the spelling source_lines.IN_SCOPE.

    The call stacks of these operations are removed. Loop bodies were lowered as modules of their own, so that their
    numbers of call stacks denote other stacks in this module.
    """
    # The fields, from xla/service/hlo.proto and xla/xla_data.proto: of a module 3 is a computation and 6 the entry's
    # id; of a computation 2 is an instruction and 5 its id; of an instruction 7 is its OpMetadata; of that 2, 3, 4 and
    # 15 are name, file, line and stack_frame_id.
    def with_line(metadata):
        fields = {number: value for number, value, _ in _fields(metadata)}
        scopes, _, name = fields.get(2, b"").decode().rpartition("/")
        path = fields.get(3, b"").decode()
        if path.startswith(f"{REPOSITORY}/"):
            scopes += f"/{path.removeprefix(f'{REPOSITORY}/')}_{fields.get(4, 0)}"
        name = f"{scopes}/{name}".strip("/").encode()
        # The new name comes last: a reader takes a message's fields in any order.
        others = b"".join(field for number, _, field in _fields(metadata) if number not in (2, 15))
        return others + _varint(2 << 3 | 2) + _varint(len(name)) + name

    def with_lines(computation):
        if (5, entry) in (field[:2] for field in _fields(computation)):
            return computation
        return _rewritten(computation, 2, lambda instruction: _rewritten(instruction, 7, with_line))

    entry = next(value for number, value, _ in _fields(proto) if number == 6)
    return _rewritten(proto, 3, with_lines)


# A protocol buffer is a row of fields. Each begins with a varint, number of the field × 8 + kind, and its content is a
# varint (kind 0), or bytes: 8 of them (kind 1), 4 (kind 5), or as many as a varint before them says (kind 2: texts,
# messages). A varint has 7 bits of a number in each byte, the lowest first; the highest bit says that more follow.


def _rewritten(message, number, rewrite):
    """Returns a protocol buffer with `rewrite` applied to the content of every field `number`."""
    result = []
    for found, value, field in _fields(message):
        if found == number:
            value = rewrite(value)
            field = _varint(number << 3 | 2) + _varint(len(value)) + value
        result.append(field)
    return b"".join(result)


def _fields(message):
    """Yields (number, value, all its bytes) of each field of a protocol buffer. A value is an int, or bytes for every
    other type."""
    at = 0

    def read_varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        begin = at
        number, kind = divmod(read_varint(), 8)
        if kind == 0:
            value = read_varint()
        else:
            length = read_varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value = message[at:at + length]
            at += length
        yield number, value, message[begin:at]


def _varint(value):
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def with_source_lines(text):
    """Returns the MLIR text with each operation's source line in front of its name: the location
    `"aten__mm"(call stack)` becomes `"nanochat/model/gpt.py:166 aten__mm"(call stack)`."""
    locations = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))

    @functools.cache
    def line(location):
        """Returns the innermost line of this repository in a location, or "". A location is a line of a file,
        `"name"(location)` or `callsite(callee at caller)`."""
        found = IN_MLIR.match(location)
        if found:
            return f"{found[1]}:{found[2]}"
        # The callee stands first in a call site, so the first line that is found is the innermost.
        return next(filter(None, (line(locations[name]) for name in re.findall(r"#loc\d+", location))), "")

    def with_line(match):
        name, rest = match[2], match[3]
        scopes = IN_SCOPE.findall(name)
        # The call stack is asked first. Two kinds of operations have no useful one, and say their line in a scope of
        # the name: those in a loop's body (with_lines_in_loops), and those of the backward pass, which C++ calls
        # (trace.py).
        source = line(rest) or (scopes and "{}:{}".format(*scopes[-1]))
        parts = [source, "backward" if any(scope[2] for scope in scopes) else "", name.rsplit("/", 1)[-1]]
        return match[1] + " ".join(filter(None, parts)) + rest

    return re.sub(r'^(#loc\d+ = loc\(")([^"]*)("(?:\(#loc\d+\))?\))$', with_line, text, flags=re.MULTILINE)
