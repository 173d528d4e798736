"""An emulator of Google Cloud for the real gcloud: the TPU API v2 and Cloud Storage, over http on loopback.

A test chooses the faults: `cloud.faults["us-a"] = ["stockout", "quota"]` lets the next two creations in us-a fail.
"""
import base64
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

NODE = r"/v2/(projects/[^/]+/locations/([^/]+))/nodes"


class Failure(Exception):
    def __init__(self, code, status, message):
        super().__init__(message)
        self.code, self.body = code, {"error": {"code": code, "status": status, "message": message}}


class Cloud:
    """Keeps nodes by full name and objects by (bucket, name). boot(node_id, index) starts a VM and returns its IP."""

    def __init__(self, boot=lambda node, index: f"192.0.2.{index + 1}", shut_down=lambda node: None):
        self.boot, self.shut_down = boot, shut_down
        self.nodes, self.operations, self.objects, self.uploads, self.requests = {}, {}, {}, {}, []
        self.faults = {}  # zone: the faults of its next creations: stockout, quota, unhealthy or stuck
        self.broken = None  # (code, status, message): the answer to every request
        self.vanishing = False  # whether a deletion finds that the node has just been deleted
        self.undeletable = 0  # how many of the next deletions fail
        self.hidden = 0  # how many of the next requests for an existing node are answered NOT_FOUND
        self.refusals = []  # the statuses with which the VMs' next requests for a deletion are answered
        self.permissions = ["tpu.nodes.delete"]  # of the VMs' service account
        self.held = False  # while set, no creation ends: new nodes are NOT_FOUND and the operations not done
        self.hosts = {"v5litepod-16": 4, "v4-32": 4}
        self._ids, self._lock = 1000, threading.RLock()
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    with cloud._lock:
                        headers, answer = cloud.handle(self.command, self.path, body, self.headers)
                    code = 200
                except Failure as failure:
                    code, headers, answer = failure.code, {}, failure.body
                if isinstance(answer, dict):
                    answer, headers = json.dumps(answer).encode(), {"Content-Type": "application/json", **headers}
                self.send_response(headers.pop(":code", code))
                for name, value in {**headers, "Content-Length": str(len(answer))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_DELETE = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def env(self, config_dir):
        """Returns the environment variables with which the real gcloud talks to this cloud and to nothing else."""
        return {"CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": self.url, "CLOUDSDK_AUTH_ACCESS_TOKEN": "ya29.a-token",
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": self.url + "storage/v1/", "CLOUDSDK_CONFIG": str(config_dir),
                "CLOUDSDK_CORE_PROJECT": "p", "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
                "CLOUDSDK_CORE_DISABLE_PROMPTS": "1", "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
                "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1"}

    def vm_env(self):
        """Returns the environment variables with which a VM talks to this cloud."""
        return {"GCE_METADATA_HOST": urlsplit(self.url).netloc, "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": self.url,
                "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": self.url}

    def startup_script(self, node_id):
        [node] = [node for node in self.nodes.values() if node["id"] == node_id]
        return node.get("metadata", {}).get("startup-script", "")

    def node(self, name, zone=None):
        found = [node for path, node in self.nodes.items() if path.endswith(f"/{name}") and (zone or "") in path]
        return found[0] if found else None

    def handle(self, method, path, body, headers):
        url = urlsplit(path)
        self.requests.append(f"{method} {path}")
        if self.broken:
            raise Failure(*self.broken)
        if match := re.fullmatch(r"/computeMetadata/v1/instance/(.*)", url.path):
            if match[1] != "service-accounts/default/token" or headers["Metadata-Flavor"] != "Google":
                raise Failure(404, "NOT_FOUND", "no such value")
            return {}, {"access_token": "ya29.of-the-vm", "expires_in": 3599, "token_type": "Bearer"}
        if headers.get("Authorization") == "Bearer ya29.of-the-vm":
            if url.path == "/v1/projects/p:testIamPermissions":
                asked = json.loads(body)["permissions"]
                held = [each for each in asked if each in self.permissions]
                return {}, {"permissions": held} if held else {}
            if "tpu.nodes.delete" not in self.permissions:
                raise Failure(403, "PERMISSION_DENIED", "Permission 'tpu.nodes.delete' denied")
            if self.refusals:
                raise Failure(self.refusals.pop(0), "REFUSED", "not now")
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/v2/"):
            return {}, self.tpu(method, url.path, query, json.loads(body or b"{}"))
        return self.storage(method, url.path, query, body, headers)

    # ------------------------------------------------------------------
    # TPU API v2

    def tpu(self, method, path, query, body):
        if path[4:] in self.operations:
            operation = self.operations[path[4:]]
            return {**operation, "done": False} if self.held else operation
        if path.endswith("/operations"):
            return {"operations": [each for name, each in self.operations.items() if name.startswith(path[4:])]}
        if match := re.fullmatch(NODE, path):
            parent, zone = match.groups()
            if method == "GET":
                return {"nodes": [node for name, node in self.nodes.items() if zone == "-" or
                                  name.startswith(parent + "/")]}
            return self.create(parent, zone, query["nodeId"], body)
        match = re.fullmatch(NODE + r"/([^/:]+)(:\w+)?", path)
        name = f"{match[1]}/nodes/{match[3]}"
        if self.hidden and name in self.nodes:
            self.hidden -= 1
            raise Failure(404, "NOT_FOUND", f"Resource '{name}' was not found")
        if name not in self.nodes or self.held and self.nodes[name]["state"] == "CREATING":
            raise Failure(404, "NOT_FOUND", f"Resource '{name}' was not found")
        node = self.nodes[name]
        if method == "DELETE" and self.undeletable:
            self.undeletable -= 1
            raise Failure(400, "FAILED_PRECONDITION", "The node is busy")
        if method == "DELETE":
            self.shut_down(node["id"])
            del self.nodes[name]
            if self.vanishing:
                raise Failure(404, "NOT_FOUND", f"Resource '{name}' was not found")
        else:
            return self.grow(node)
        return self.operation(match[1], node, verb=method.lower())

    def create(self, parent, zone, name, body):
        fault = self.faults[zone].pop(0) if self.faults.get(zone) else None
        path = f"{parent}/nodes/{name}"
        if fault == "quota":
            raise Failure(429, "RESOURCE_EXHAUSTED", "Quota limit 'TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI' "
                          "has been exceeded. Limit: 0 in zone " + zone)
        if path in self.nodes:
            raise Failure(409, "ALREADY_EXISTS", f"Resource '{path}' already exists")
        if fault == "stockout":
            message = f'There is no more capacity in the zone "{zone}"; you can try in another zone'
            return self.operation(parent, None, {"code": 8, "message": message})
        self._ids += 1
        node = {**body, "name": path, "id": str(self._ids), "state": "CREATING", "createTime": time.strftime(
            "%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime()), "fault": fault}
        self.nodes[path] = node
        return self.operation(parent, node)

    def grow(self, node):
        """Advances a node by one state each time it is described."""
        if node["state"] == "CREATING" and node["fault"] != "stuck":
            node["state"] = "READY"
            self.connect(node)
        elif node["state"] == "READY" and not node.get("health"):
            node["health"] = "UNHEALTHY_TENSORFLOW" if node["fault"] == "unhealthy" else "HEALTHY"
        return node

    def connect(self, node):
        ips = [self.boot(node["id"], index) for index in range(self.hosts.get(node["acceleratorType"], 1))]
        node["networkEndpoints"] = [{"ipAddress": ip, "port": 8470, "accessConfig": {"externalIp": ip}} for ip in ips]

    def operation(self, parent, node, error=None, verb="post"):
        name = f"{parent}/operations/op{len(self.operations)}"
        operation = {"name": name, "done": True, "metadata": {
            "@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata", "verb": verb,
            "target": node["name"] if node else parent,
            "endTime": time.strftime("%Y-%m-%dT%H:%M:%S.5Z", time.gmtime())}}
        operation |= {"error": error} if error else {
            "response": {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", "name": node["name"]}}
        self.operations[name] = operation
        return {"name": name, "metadata": operation["metadata"]}

    # ------------------------------------------------------------------
    # Cloud Storage, as far as gcloud storage ls and cp go

    def put(self, bucket, name, content):
        self.objects[bucket, name] = content

    def described(self, bucket, name):
        content = self.objects[bucket, name]
        return {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(content)), "generation": "1",
                "metageneration": "1", "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
                "id": f"{bucket}/{name}/1", "storageClass": "STANDARD", "timeCreated": "2026-01-01T00:00:00.000Z",
                "updated": "2026-01-01T00:00:00.000Z", "contentType": "application/octet-stream",
                "mediaLink": f"{self.url}download/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media"}

    def storage(self, method, path, query, body, headers):
        if path.startswith("/upload/") or path.startswith("/resumable/upload/"):
            return self.upload(method, path, query, body, headers)
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path)
        bucket, name = match[1], unquote(match[2]) if match[2] else None
        if name is None and "/o" not in path:
            return {}, {"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "US"}
        if name is None:
            return {}, self.list_objects(bucket, query)
        if (bucket, name) not in self.objects:
            raise Failure(404, "NOT_FOUND", f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del self.objects[bucket, name]
            return {":code": 204}, b""
        if query.get("alt") != "media":
            return {}, self.described(bucket, name)
        content = self.objects[bucket, name]
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", "")):
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            part = content[start:end + 1]
            return {":code": 206, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}, part
        return {"Content-Type": "application/octet-stream"}, content

    def list_objects(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names, prefixes = [], set()
        for name in sorted(name for owner, name in self.objects if owner == bucket and name.startswith(prefix)):
            rest = name[len(prefix):]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                names.append(name)
        return {"kind": "storage#objects", "prefixes": sorted(prefixes),
                "items": [self.described(bucket, name) for name in names]}

    def upload(self, method, path, query, body, headers):
        bucket = path.split("/b/")[1].split("/")[0]
        if query.get("uploadType") == "multipart":
            boundary = re.search(r"boundary=['\"]?([^'\";]+)", headers["Content-Type"])[1].encode()
            _, description, content, _ = body.split(b"--" + boundary)
            name = json.loads(description.split(b"\n\n" if b"\n\n" in description else b"\r\n\r\n", 1)[1])["name"]
            content = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
            self.put(bucket, name, re.sub(rb"\r?\n\Z", b"", content))
            return {}, self.described(bucket, name)
        if method == "POST":  # a resumable upload begins
            key = str(len(self.uploads))
            self.uploads[key] = (query.get("name") or json.loads(body)["name"], b"")
            return {"Location": f"{self.url}upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"}, b""
        name, content = self.uploads[query["upload_id"]]
        content += body
        self.uploads[query["upload_id"]] = (name, content)
        total = headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdigit() and len(content) < int(total):
            return {":code": 308, "Range": f"bytes=0-{len(content) - 1}"}, b""
        self.put(bucket, name, content)
        return {}, self.described(bucket, name)
