"""Serves completions of C++ from a checkpoint to editors on this machine:

    python3 -m scripts.serve --checkpoint=RUN --quantize=int8

Then open the printed address in a browser, or set up your editor (docs/editor.md). Needs pip install '.[serve]'. Logs
no text of a user.
"""
import logging
import sys
from dataclasses import dataclass

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.engine import Engine
from nanochat.infer.load import ModelFlags, load_model, resolve_inference_device_type
from nanochat.infer.sample import Sampling
from nanochat.serve.completer import Completer, Options


@dataclass(frozen=True)
class ServerFlags:
    host: str = flag("127.0.0.1", "address to listen on; any other than this machine's own needs --api_key")
    port: int = flag(8012, "port to listen on: the default is llama.vim's; 0: a free one", at_least=0, at_most=65535)
    api_key: str | None = flag(None, "bearer token that clients must send; none: no token")


@dataclass(frozen=True)
class LimitFlags:
    max_tokens: int = flag(256, "most tokens of a completion, at most half of the context", at_least=1)
    timeout_s: float = flag(30.0, "most seconds for a request: then it gets the text so far", above=0, at_most=3600)
    extra_tokens: int = flag(0, "most tokens of other files before the prefix, if it leaves room", at_least=0)


def main(argv=None):
    of_model, of_server, limits = read_flags(argv, __doc__, {
        ModelFlags: "model", ServerFlags: "server", LimitFlags: "limits of each request"})
    try:
        from nanochat.serve.connections import listen, make_runner
        from nanochat.serve.server import Server, make_app
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[serve]'") from None
    # The port is opened first, so that a used one is refused before the model is loaded. Early connections wait.
    with listen(of_server.host, of_server.port, of_server.api_key) as listening:
        device_type = resolve_inference_device_type(of_model.device_type)
        prepare_xla_environment(device_type)
        path = find_checkpoint(of_model.checkpoint)
        dist = compute_init(device_type)
        model, tokenizer, meta = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir,
                                            quantize=of_model.quantize)
        completer = Completer(Engine(model, tokenizer, dist), meta.flags.get("fim_rate", 0) > 0, limits.extra_tokens)
        if not completer.fim:
            print(f"{path} was trained without --fim_rate: completions ignore the text after the cursor",
                  file=sys.stderr)
        warm_up = Options(Sampling(max_tokens=1, temperature=0))
        completer.complete("int main() {\n", "}\n", [], warm_up)  # compiles the programs
        server = Server(completer, name=f"{path.resolve().parent.name}/{path.name}", device=str(dist.device),
                        max_tokens=limits.max_tokens, timeout_s=limits.timeout_s)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        host, port = listening.getsockname()[:2]
        if ":" in host:
            host = f"[{host}]"
        print(f"{path}: step {meta.step}, on {dist.device}. Open http://{host}:{port}/", file=sys.stderr, flush=True)
        try:
            make_runner(make_app(server, api_key=of_server.api_key)).run(sockets=[listening])
        except KeyboardInterrupt:
            return 130
        finally:
            compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
