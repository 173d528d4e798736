"""Completes in editors that speak LSP 3.18 (textDocument/inlineCompletion), such as Neovim 0.12:

    python3 -m scripts.lsp --url=http://127.0.0.1:8012

The editor starts it (docs/editor.md), and it asks a scripts.serve that is running. Needs pip install '.[lsp]'.
"""
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nanochat.common import BadInput, flag, read_flags, run_script


@dataclass(frozen=True)
class LspFlags:
    url: str = flag("http://127.0.0.1:8012", "address of the running scripts.serve")


def main(argv=None):
    [flags] = read_flags(argv, __doc__, {LspFlags: "server"})
    try:
        from nanochat.serve.lsp import make_language_server
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[lsp]'") from None
    server = make_language_server(flags.url)
    if not sys.stdin or sys.stdin.isatty():  # None if it is closed
        raise BadInput("an editor starts this and talks to its standard input: docs/editor.md says how")
    run(server)


def run(server):
    """Talks to the editor until it ends."""
    # Messages of the first contain the user's text. The second prints a traceback for each answer to an editor that has
    # died.
    for name in ("pygls", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    output = open(os.dup(1), "wb")  # a copy, because pygls closes it
    # In a thread: pygls would heed Ctrl-C only once its input ends.
    ThreadPoolExecutor(1).submit(server.start_io, stdout=output).result()


if __name__ == "__main__":
    run_script(main)
