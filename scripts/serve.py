"""Serves completions of C++ from a checkpoint to editors on this machine:

    python3 -m scripts.serve --checkpoint=RUN --quantize=int8

Then open the printed address in a browser, or set up your editor (docs/editor.md). Needs pip install '.[serve]'. Logs
no text of a user.
"""
import logging
import sys
from dataclasses import dataclass

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.infer.sample import checked_max_tokens


@dataclass(frozen=True)
class ServerFlags:
    port: int = flag(8012, "port to listen on: the default is llama.vim's; 0: a free one", at_least=0, at_most=65535)
    max_tokens: int = flag(-1, "most tokens of a completion; -1: 256, at most half of the context", at_least=1,
                           unset=-1)
    timeout_s: float = flag(30.0, "most seconds for a request: then it gets the text so far", above=0, at_most=3600)
    extra_tokens: int = flag(0, "most tokens of other files, at most a quarter of the context", at_least=0)
    no_copies: bool = flag(False, "never complete with a copy of text that stands elsewhere in the file")


def main(argv=None):
    of_model, flags = read_flags(argv, __doc__, {ModelFlags: "model", ServerFlags: "server"}, gone=dict.fromkeys(
        ("host", "api_key", "api_key_file"), "other machines reach the server by an ssh tunnel: docs/editor.md"))
    from nanochat.infer.load import load_language_meta
    from nanochat.serve.completer import load_completer
    try:
        from nanochat.serve.server import Server, listen, make_runner
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[serve]'") from None
    # The port is opened first, so that a used one is refused before the model is loaded. Early connections wait.
    with listen(flags.port) as listening:
        device_type = resolve_inference_device_type(of_model.device_type)
        prepare_xla_environment(device_type)
        path = find_checkpoint(of_model.checkpoint)
        meta = load_language_meta(path)
        max_tokens = checked_max_tokens(flags.max_tokens, meta.model_config.context)
        print(f"loading {path}, step {meta.step}", file=sys.stderr, flush=True)
        dist = compute_init(device_type)
        completer = load_completer(of_model, path, flags.extra_tokens, dist)
        completer.copies = not flags.no_copies
        server = Server(completer, name=f"{path.resolve().parent.name}/{path.name}", max_tokens=max_tokens,
                        timeout_s=flags.timeout_s)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        print(f"on {dist.device}, completions of at most {max_tokens} tokens. Open "
              f"http://127.0.0.1:{listening.getsockname()[1]}/", file=sys.stderr, flush=True)
        try:
            make_runner(server).run(sockets=[listening])
        except KeyboardInterrupt:
            return 130
        finally:
            server.thread.stop()
            compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
