"""Serves completions of C++ from a checkpoint to editors on this machine:

    python3 -m scripts.serve --checkpoint=RUN --quantize=int8

Then open the printed address in a browser, or set up your editor (docs/editor.md). Needs pip install '.[serve]'. Logs
no text of a user.
"""
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, read_flags, read_named, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.infer.sample import checked_max_tokens


@dataclass(frozen=True)
class ServerFlags:
    host: str = flag("127.0.0.1", "address to listen on; any other than this machine's own needs --api_key")
    port: int = flag(8012, "port to listen on: the default is llama.vim's; 0: a free one", at_least=0, at_most=65535)
    api_key: str | None = flag(None, "bearer token that clients must send; default: $NANOCHAT_API_KEY, or no token")
    api_key_file: Path | None = flag(None, "file with the token, which other users cannot see in ps", of=expand_path)

    def read_key(self):
        """Returns the token, or None. Raises BadInput if its file cannot be read."""
        if self.api_key_file is None:
            return os.environ.get("NANOCHAT_API_KEY") if self.api_key is None else self.api_key
        if self.api_key is not None:
            raise BadInput("--api_key and --api_key_file are both given: leave one out")
        return read_named("api_key_file", self.api_key_file).decode(errors="replace").strip()


@dataclass(frozen=True)
class LimitFlags:
    max_tokens: int = flag(-1, "most tokens of a completion; -1: 256, at most half of the context", at_least=1,
                           unset=-1)
    timeout_s: float = flag(30.0, "most seconds for a request: then it gets the text so far", above=0, at_most=3600)
    extra_tokens: int = flag(0, "most tokens of other files, at most a quarter of the context", at_least=0)
    no_copies: bool = flag(False, "never complete with a copy of text that stands elsewhere in the file")


def main(argv=None):
    of_model, of_server, limits = read_flags(argv, __doc__, {
        ModelFlags: "model", ServerFlags: "server", LimitFlags: "limits of each request"})
    from nanochat.infer.load import load_language_meta
    from nanochat.serve.completer import load_completer
    try:
        from nanochat.serve.connections import listen, make_runner
        from nanochat.serve.server import Server, make_app
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[serve]'") from None
    api_key = of_server.read_key()
    # The port is opened first, so that a used one is refused before the model is loaded. Early connections wait.
    with listen(of_server.host, of_server.port, api_key) as listening:
        device_type = resolve_inference_device_type(of_model.device_type)
        prepare_xla_environment(device_type)
        path = find_checkpoint(of_model.checkpoint)
        meta = load_language_meta(path)
        max_tokens = checked_max_tokens(limits.max_tokens, meta.config["max_seq_len"])
        print(f"loading {path}, step {meta.step}", file=sys.stderr, flush=True)
        dist = compute_init(device_type)
        completer = load_completer(of_model, path, limits.extra_tokens, dist)
        completer.copies = not limits.no_copies
        server = Server(completer, name=f"{path.resolve().parent.name}/{path.name}", max_tokens=max_tokens,
                        timeout_s=limits.timeout_s)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        host, port = listening.getsockname()[:2]
        if ":" in host:
            host = f"[{host}]"
        print(f"on {dist.device}, completions of at most {max_tokens} tokens. Open http://{host}:{port}/",
              file=sys.stderr, flush=True)
        try:
            make_runner(make_app(server, api_key), api_key).run(sockets=[listening])
        except KeyboardInterrupt:
            return 130
        finally:
            server.thread.stop()
            compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
