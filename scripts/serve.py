"""Serves completions of C++ from a checkpoint to editors on this machine:

    python3 -m scripts.serve --checkpoint=RUN --quantize=int8

Then open the address that it prints in a browser, or set up your editor as docs/editor.md says. Needs the packages of
pip install '.[serve]'. No text of a user is logged.
"""
import ipaddress
import logging
import socket
import sys
from dataclasses import dataclass

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.engine import Engine
from nanochat.infer.load import ModelFlags, load_model, resolve_inference_device_type
from nanochat.serve.infill import Infiller, Options

MAX_CONNECTIONS = 100
KEEP_ALIVE_S = 75  # after a person's pause, an editor's next request shall not meet a connection that is being closed


@dataclass(frozen=True)
class ServerFlags:
    host: str = flag("127.0.0.1", "address to listen on; another one than this machine's own needs --api_key")
    port: int = flag(8012, "port to listen on: llama.vim asks this one; 0: a free one", at_least=0, at_most=65535)
    api_key: str | None = flag(None, "what clients must send as a bearer token; none: nothing")


@dataclass(frozen=True)
class LimitFlags:
    max_tokens: int = flag(256, "most tokens of a completion, at most half of the context", at_least=1)
    timeout_s: float = flag(30.0, "most seconds for a request: it then gets what is there", above=0, at_most=3600)
    extra_tokens: int = flag(0, "most tokens of other files, which editors send, that stand before the prefix where it "
                                "leaves room", at_least=0)


def main(argv=None):
    of_model, of_server, limits = read_flags(argv, __doc__, {
        ModelFlags: "model", ServerFlags: "server", LimitFlags: "limits of each request"})
    try:
        import uvicorn

        from nanochat.serve.connections import TimedConnection
        from nanochat.serve.server import Server, make_app
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[serve]'") from None
    with listen(of_server) as listening:
        device_type = resolve_inference_device_type(of_model.device_type)
        prepare_xla_environment(device_type)
        path = find_checkpoint(of_model.checkpoint)
        dist = compute_init(device_type)
        model, tokenizer, meta = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir,
                                            quantize=of_model.quantize)
        infiller = Infiller(Engine(model, tokenizer, dist), meta.flags.get("fim_rate", 0) > 0, limits.extra_tokens)
        if not infiller.fim:
            print(f"{path} was trained without --fim_rate: completions follow from the text before the cursor alone",
                  file=sys.stderr)
        infiller.complete("int main() {\n", "}\n", [], Options(max_tokens=1))  # compiles what is compiled
        server = Server(infiller, name=f"{path.resolve().parent.name}/{path.name}", device=str(dist.device),
                        max_tokens=limits.max_tokens, timeout_s=limits.timeout_s)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        host, port = listening.getsockname()[:2]
        print(f"{path}: step {meta.step}, on {dist.device}. Open http://{f'[{host}]' if ':' in host else host}:{port}/",
              file=sys.stderr, flush=True)
        # uvicorn's log of requests would show queries; the server logs what happens to each completion by itself.
        config = uvicorn.Config(make_app(server, api_key=of_server.api_key), log_config=None, access_log=False,
                                log_level="warning", http=TimedConnection, ws="none", limit_concurrency=MAX_CONNECTIONS,
                                timeout_graceful_shutdown=2, timeout_keep_alive=KEEP_ALIVE_S)
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            return 130
        finally:
            compute_cleanup(dist)


def listen(flags):
    """Returns a socket that listens at --host and --port. Raises BadInput."""
    key = flags.api_key
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise BadInput("--api_key must be printable ASCII, not empty, without white space at its ends")
    try:
        address = ipaddress.ip_address("127.0.0.1" if flags.host == "localhost" else flags.host)
    except ValueError:
        raise BadInput(f"--host={flags.host} is not an IP address: give 127.0.0.1 or ::1 for this machine alone, or "
                       "0.0.0.0 for all its addresses") from None
    if not address.is_loopback and key is None:
        raise BadInput(f"--host={flags.host} can be reached from other machines: give an --api_key that clients must "
                       "send, or leave --host out")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # With the protocol named, asyncio sends each answer at once (TCP_NODELAY); else some wait 40 ms for the client.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((str(address), flags.port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise BadInput(f"cannot listen at --host={flags.host} --port={flags.port} ({error.strerror}): choose another "
                       "port, or 0 for a free one") from None
    return listening


if __name__ == "__main__":
    run_script(main)
