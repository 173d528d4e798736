"""A server that completes code in editors: HTTP in the protocols that they speak, one thread that has the model, and a
page to try it. scripts/serve.py runs it."""
