"""A small Hub on loopback, as huggingface_hub's client sees it through HF_ENDPOINT. A test lets it fail."""
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class Refusal(Exception):
    """(status, headers) of an answer."""


class Hub(ThreadingHTTPServer):
    """`commits`: {(kind/ORG/NAME, commit): {path: bytes}}; `branches`: {(kind/ORG/NAME, branch): commit}; `gated`: the
    token that may read, None for everybody. `failures`: (status, headers) of the next answers; `cuts`: after how many
    bytes the next contents end with their connection; `stall`: an Event for which contents wait."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits, self.branches, self.gated = {}, {}, None
        self.failures, self.cuts, self.stall, self.page_size = [], [], None, 1000
        self.tokens, self.asked = set(), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def env(self):
        return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HUB_DISABLE_XET": "1",
                "HF_TOKEN": "hf_secret"}

    def push(self, repo, files, branch="main"):
        """Makes a commit of {path: bytes} the newest of a branch of "models/ORG/NAME" or "datasets/…", and returns
        it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[repo, commit] = files
        self.branches[repo, branch] = commit
        return commit

    def push_folder(self, repo, folder):
        return self.push(repo, {str(path.relative_to(folder)): path.read_bytes()
                                for path in folder.rglob("*") if path.is_file()})

    def close(self):
        self.shutdown()
        self.server_close()

    def files_at(self, repo, revision):
        if not any(repo == known for known, _ in self.commits):
            raise Refusal(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        commit = self.branches.get((repo, unquote(revision)), revision)
        if (repo, commit) not in self.commits:
            raise Refusal(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return commit, self.commits[repo, commit]

    def answer(self, path, query):
        """Returns the body of the answer and its headers."""
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            repo, revision, folder = found.groups()
            commit, files = self.files_at(repo, revision)
            inside = sorted(name for name in files if not folder or name.startswith(f"{unquote(folder)}/"))
            if not inside:
                raise Refusal(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": f"{folder} does not exist"})
            begin = int(query.get("cursor", ["0"])[0])
            items = [{"type": "file", "path": name, "size": len(files[name]),
                      "oid": hashlib.sha1(files[name]).hexdigest()} for name in inside[begin:begin + self.page_size]]
            following = f'<{self.env["HF_ENDPOINT"]}{path}?recursive=true&cursor={begin + self.page_size}>; rel="next"'
            return json.dumps(items).encode(), {"Link": following} if len(inside) > begin + self.page_size else {}
        if found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            commit, _ = self.files_at(found[1], found[2] or "main")
            return json.dumps({"id": found[1].partition("/")[2], "sha": commit, "siblings": []}).encode(), {}
        found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        commit, files = self.files_at((found[1] or "models/") + found[2], found[3])
        name = unquote(found[4])
        if name not in files:
            raise Refusal(404, {"X-Error-Code": "EntryNotFound"})
        return files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"', "X-Repo-Commit": commit}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        hub, url = self.server, urlsplit(self.path)
        token = self.headers.get("Authorization")
        hub.tokens.add(token)
        hub.asked.append(self.path)
        status, body = 200, b""
        try:
            if hub.failures:
                raise Refusal(*hub.failures.pop(0))
            if hub.gated and token != f"Bearer {hub.gated}":
                raise Refusal(403 if token else 401, {
                    "X-Error-Code": "GatedRepo", "X-Error-Message": f"Access is restricted, also for {token}"})
            body, headers = hub.answer(url.path, parse_qs(url.query))
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                status, begin, whole = 206, int(span[1]), len(body)
                body = body[begin:int(span[2] or whole) + 1]
                headers["Content-Range"] = f"bytes {begin}-{begin + len(body) - 1}/{whole}"
        except Refusal as refusal:
            status, headers = refusal.args
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            if status == 206 and hub.stall:
                hub.stall.wait(60)
            if status == 206 and hub.cuts:
                body = body[:hub.cuts.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass
