"""Starts gcloud faster: one process imports the installed SDK once, and a fork of it answers each call.

`start(folder)` starts that process and writes the program `folder/gcloud`. It takes the place of the real one: the same
code runs with the caller's arguments, environment, folder and open files, and ends when the caller is killed. Most of
a call's time is the import: `describe` took 0.4 s instead of 1.3 s on a busy machine.
"""
import importlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

CLIENT = """\
#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [request], [0, 1, 2])
sys.exit(int(server.recv(16) or 1))
"""


def start(folder):
    """Returns the process that answers; closing its standard input ends it."""
    sdk = Path(shutil.which("gcloud")).resolve().parents[1]
    bundled = sdk / "platform/bundledpythonunix/bin/python3"
    server = subprocess.Popen([bundled if bundled.exists() else "python3", __file__, sdk / "lib", folder / "socket"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("gcloud could not be imported")
    (folder / "gcloud").write_text(CLIENT.format(python=sys.executable, address=str(folder / "socket")))
    (folder / "gcloud").chmod(0o755)
    return server


def run(arguments):
    """Runs gcloud in this process and returns its exit status."""
    sys.argv[:] = ["gcloud", *arguments]
    try:
        importlib.import_module("googlecloudsdk.gcloud_main").main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class NothingThere(BaseHTTPRequestHandler):
    """Answers every request with status 404."""

    def do_GET(self):
        self.send_error(404)

    do_POST = do_DELETE = do_GET

    def log_message(self, *_):
        pass


def import_all(folder):
    """Imports the modules that calls import. The calls run in a fork, so that they leave no other state here."""
    names = folder / "modules"
    if (child := os.fork()) == 0:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        server = HTTPServer(("127.0.0.1", 0), NothingThere)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ.update({"CLOUDSDK_CONFIG": str(folder / "config"), "CLOUDSDK_AUTH_ACCESS_TOKEN": "x",
                           "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"http://127.0.0.1:{server.server_port}/"})
        for verb in ("describe", "create", "delete", "list"):
            run(["compute", "tpus", "tpu-vm", verb, *(["x"] if verb != "list" else []), "--zone=x", "--project=x",
                 "--quiet", *(["--accelerator-type=x", "--version=x"] if verb == "create" else [])])
        names.write_text("\n".join(sys.modules))
        os._exit(0)
    os.waitpid(child, 0)
    for name in names.read_text().splitlines():
        try:
            importlib.import_module(name)
        except Exception:  # then each call imports it for itself
            continue


def answer(connection):
    """Answers one call in this process, and exits."""
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    arguments, environment, folder = json.loads(request)
    for fd, file in enumerate(files):
        os.dup2(file, fd)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # recv returns when the caller is killed
    threading.Thread(target=lambda: connection.recv(1) or os._exit(143), daemon=True).start()
    status = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(str(status).encode())
    os._exit(status)


def serve(library, address):
    sys.path[:0] = [str(library / "third_party"), str(library)]
    import_all(address.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen(64)
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            if os.fork() == 0:  # a grandchild, which nobody has to wait for
                listener.close()
                answer(connection)
            os._exit(0)
        connection.close()
        os.wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
