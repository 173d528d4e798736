"""A server that completes code in editors: their protocols over HTTP, one thread that runs the model, and a page to try
it. scripts/serve.py runs it."""
