"""The flags of scripts/solve.py, and the methods, budgets and writers that follow from them."""
import sys
from dataclasses import dataclass

from nanochat.common import BadInput, flag
from nanochat.device.ranks import compute_init
from nanochat.infer.load import load_model
from nanochat.judge.search import METHODS, Budget
from nanochat.judge.writer import Writer, WriterFlags

DEFAULT_METHOD = "tree"
DEFAULT_BUDGET = 512
BUDGETS = (256, 512, 1024)  # of a comparison
TOKENS_PER_CALL = 4


def methods_of(text):
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in METHODS:
            raise BadInput(f"there is no method {name or '(empty)'}: choose of {', '.join(METHODS)}")
    return found


def budgets_of(text):
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 16 or found[-1] > 1_000_000:
        raise BadInput("it must be whole numbers from 16 to 1,000,000, separated by commas")
    return found


@dataclass(frozen=True)
class SearchFlags(WriterFlags):
    method: list | None = flag(None, f"{', '.join(METHODS)}; several for --problems, separated by commas; default: "
                                f"{DEFAULT_METHOD}, and all for --problems", of=methods_of)
    budget: list | None = flag(None, "tokens to draw; several for --problems, separated by commas; default: "
                               f"{DEFAULT_BUDGET}, and {', '.join(map(str, BUDGETS))} for --problems", of=budgets_of)
    compiler_calls: int = flag(-1, f"calls of g++ in a search; -1: one for {TOKENS_PER_CALL} tokens", at_least=1,
                               unset=-1)

    def methods_and_budgets(self, is_comparison):
        """Returns the names of the methods and the Budgets. Raises BadInput for several without a comparison."""
        if is_comparison:
            methods = self.method or list(METHODS)
            tokens_of_budgets = self.budget or BUDGETS
        else:
            methods = self.method or [DEFAULT_METHOD]
            tokens_of_budgets = self.budget or [DEFAULT_BUDGET]
            if len(methods) > 1 or len(tokens_of_budgets) > 1:
                raise BadInput("several of --method and --budget are for --problems: give one of each")
        budgets = []
        for tokens in tokens_of_budgets:
            calls = tokens // TOKENS_PER_CALL if self.compiler_calls == -1 else self.compiler_calls
            budgets.append(Budget(tokens, calls))
        return methods, budgets


def fitting(methods, meta, is_comparison):
    """Returns the methods that the model of a checkpoint can run. Raises BadInput if none is left."""
    if "repair" not in methods or meta.flags.get("fim_rate", 0) > 0:
        return methods
    message = "--method=repair needs a model that was trained with --fim_rate"
    if not is_comparison or methods == ["repair"]:
        raise BadInput(f"{message}: choose another method, or another --checkpoint")
    print(f"{message}: it is left out", file=sys.stderr)
    return [method for method in methods if method != "repair"]


def load_writers(flags, path, device_type, sampling, number, weights=None):
    """Returns `number` Writers of one model, each with its own engine; on an accelerator, one. flags: ModelFlags;
    weights: see load_model."""
    dist = compute_init(device_type)
    model, tokenizer, _ = load_model(path, dist, tokenizer_dir=flags.tokenizer_dir, quantize=flags.quantize,
                                     weights=weights)
    if dist.device_type != "cpu":
        number = 1
    return [Writer(model, tokenizer, dist, sampling) for _ in range(number)]
