"""Every Python process of the tests runs this as it starts: tests/conftest.py adds this folder to PYTHONPATH. On the
machines of tests/deploy/ Python starts without it.

Importing torch_xla makes a million objects that stay. By default Python looks through them for garbage again and again,
and twice more at its end: that takes 40% of what a process that only imports torch_xla computes. Half of the rest is
for PyTorch's compilers, which torch_xla imports for functions that this project does not call.
"""
import atexit
import gc
import importlib
import sys
import threading
from functools import partial
from importlib.machinery import PathFinder
from types import ModuleType

gc.set_threshold(50_000, 10, 10)
atexit.register(gc.freeze)  # what is frozen is not looked through

LATER = {"functorch.compile", "torch._dynamo", "torch.quantization", "torch_xla.stablehlo"}
ALONE = "torch._dynamo.config"  # the one part of them that torch_xla needs as it is imported
_loading = threading.RLock()


class Later(ModuleType):
    """A module whose code runs when one of its functions is called for the first time, or a part of it is imported."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" == ALONE:
            return importlib.import_module(ALONE)
        return partial(self.call, name)

    def call(self, name, *args, **kwargs):
        if name == "disable" and args and type(self) is Later:
            return args[0]  # torch._dynamo shall not compile this function: it compiles none
        return getattr(loaded(self), name)(*args, **kwargs)


def loaded(module):
    with _loading:
        if type(module) is Later:
            module.__class__ = ModuleType
            module.__spec__.loader.run(module)
    return module


class Loader:
    """Makes a Later of a module that is in LATER, and leaves one alone that is there already."""

    def __init__(self, loader):
        self.run = loader.exec_module

    def create_module(self, spec):
        return sys.modules.get(spec.name) or Later(spec.name)

    def exec_module(self, module):
        pass


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        parent = sys.modules.get(name.rpartition(".")[0])
        if type(parent) is Later and name != ALONE:
            loaded(parent)
        elif name not in LATER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec and (name in LATER or name in sys.modules):
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder)
