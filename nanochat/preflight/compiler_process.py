"""Runs the TPU compiler, libtpu, in a process that compile.py starts for each program. It needs neither PyTorch nor a
TPU."""
import functools
import json
import os
import re
import time
from pathlib import Path

from nanochat.preflight.hlo import LINE_IN_MLIR, LINE_IN_SCOPE, REPOSITORY


def compile_folder(folder, donated, topology, topology_options):
    """Compiles the program `folder`/traced.pb. Writes `folder`/compiled.json, the fields of compile.CompiledProgram,
    and `folder`/optimised.hlo, which is empty if the program does not fit. folder: an absolute path. donated: indices
    of arguments, as in trace.TracedProgram."""
    import numpy as np
    from jax.errors import JaxRuntimeError
    from jax.experimental import topologies
    from jaxlib import xla_client

    folder = Path(folder)
    os.chdir(folder)  # an option of libtpu cannot hold a path with a space
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **topology_options).devices
    # Each chip is a replica and runs the traced program as it is, undivided; its collectives count replicas. The
    # assignment is (replicas, 1).
    options = xla_client.CompileOptions()
    options.num_replicas = len(devices)
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(len(devices)).reshape(-1, 1))
    module = _load(folder / "traced.pb", donated)
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
    _write(folder, executable.hlo_modules()[0].to_string(), seconds=seconds,
           argument_bytes=memory.argument_size_in_bytes, output_bytes=memory.output_size_in_bytes,
           alias_bytes=memory.alias_size_in_bytes, temp_bytes=memory.temp_size_in_bytes,
           code_bytes=memory.generated_code_size_in_bytes)


def _write(folder, hlo_text, **fields):
    (folder / "optimised.hlo").write_text(hlo_text)
    (folder / "compiled.json").write_text(json.dumps(fields))


def _load(path, donated):
    """Returns a HloModuleProto as MLIR bytecode, with the arguments whose indices are in `donated` marked, and with the
    source line of each operation in its name, because the compiler keeps names only."""
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
        marks = []
        for index in range(len(main.type.inputs)):
            mark = {"jax.buffer_donor": ir.BoolAttr.get(True)} if index in donated else {}
            marks.append(ir.DictAttr.get(mark))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(marks)
        return mlir.module_to_bytecode(module)


# The parts of a HloModuleProto that are read or changed (xla/service/hlo.proto, xla/xla_data.proto). All others stay as
# they are: a reader of protocol buffers passes on the fields that it does not know.
_PROTO = """name: "hlo" syntax: "proto2"
message_type { name: "Module"
  field { name: "computations" number: 3 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Computation" }
  field { name: "entry" number: 6 label: LABEL_OPTIONAL type: TYPE_INT64 } }
message_type { name: "Computation"
  field { name: "instructions" number: 2 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Instruction" }
  field { name: "id" number: 5 label: LABEL_OPTIONAL type: TYPE_INT64 } }
message_type { name: "Instruction"
  field { name: "metadata" number: 7 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Metadata" } }
message_type { name: "Metadata"
  field { name: "name" number: 2 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "file" number: 3 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "line" number: 4 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "call_stack" number: 15 label: LABEL_OPTIONAL type: TYPE_INT32 } }"""


def with_lines_in_loops(proto):
    """Returns the HloModuleProto with the line of each operation outside the entry computation added to its name, in
    the spelling hlo.LINE_IN_SCOPE, and its call stack removed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    module = message_factory.GetMessageClass(pool.FindMessageTypeByName("Module")).FromString(proto)
    # Loop bodies were lowered as modules of their own, so the numbers of their call stacks denote other stacks here.
    for computation in module.computations:
        if computation.id == module.entry:
            continue
        for instruction in computation.instructions:
            metadata = instruction.metadata
            scopes, _, name = metadata.name.rpartition("/")
            if metadata.file.startswith(f"{REPOSITORY}/"):
                scopes += f"/{metadata.file.removeprefix(f'{REPOSITORY}/')}_{metadata.line}"
            metadata.name = f"{scopes}/{name}".strip("/")
            metadata.ClearField("call_stack")
    return module.SerializeToString()


# A traced operation has a location `"aten__mm"(call stack)`. A call stack is a line of a file, `"name"(location)`, or
# `callsite(callee at caller)`. The compiler keeps the name alone.
def with_source_lines(text):
    """Returns the MLIR text with each operation's source line in front of its name:
    `"nanochat/model/gpt.py:166 aten__mm"(call stack)`."""
    locations = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))

    @functools.cache
    def line(location):
        """Returns the innermost line of this repository in a location, or ""."""
        found = LINE_IN_MLIR.match(location)
        if found:
            return f"{found[1]}:{found[2]}"
        # The callee stands first in a call site, so the first line that is found is the innermost.
        for inner in re.findall(r"#loc\d+", location):
            if line(locations[inner]):
                return line(locations[inner])
        return ""

    def with_line(match):
        begin, name, rest = match.groups()
        source = line(rest)
        # The call stack comes first. Two kinds of operations have none, but a scope in the name: those in a loop's body
        # (with_lines_in_loops), and those of the backward pass, which C++ calls (trace.py).
        scopes = LINE_IN_SCOPE.findall(name)
        if scopes and not source:
            source = "{}:{}".format(*scopes[-1])
        words = name.rsplit("/", 1)[-1]
        if any(backward for _, _, backward in scopes):
            words = f"backward {words}"
        return begin + f"{source} {words}".strip() + rest

    return re.sub(r'^(#loc\d+ = loc\(")([^"]*)("(?:\(#loc\d+\))?\))$', with_line, text, flags=re.MULTILINE)
