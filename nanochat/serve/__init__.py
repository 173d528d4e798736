"""Serves completions to editors: their protocols over HTTP, one thread that runs the model, a page to try it, and a
language server. scripts/serve.py and scripts/lsp.py run it."""
