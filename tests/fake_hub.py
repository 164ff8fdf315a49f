"""A local HTTP server with those addresses of the Hugging Face hub that huggingface_hub uses."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class FakeHub:
    """Serves folders as repositories of a hub at `url`. repos: {"OWNER/NAME" or
    "datasets/OWNER/NAME": folder}. Attributes that tests read or set: log: [(name, first byte)] of
    the files sent; cuts: how many more downloads of over 1,000 bytes to interrupt halfway; wrong:
    {file name: bytes to send instead}."""

    def __init__(self, **repos):
        self.repos, self.log, self.cuts, self.wrong = repos, [], 0, {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                outer.answer(self, send=False)

            def do_GET(self):
                outer.answer(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, request, send=True):
        path = request.path.partition("?")[0].strip("/")
        if path.startswith("api/"):
            return self.describe(request, path)
        repo, _, rest = path.partition("/resolve/")
        file = self.repos.get(repo) and self.repos[repo] / rest.partition("/")[2]
        if not file or not file.is_file():
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound" if file else "RepoNotFound")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        content = self.wrong.get(file.name, file.read_bytes())
        asked = request.headers.get("Range")
        first = int(asked.split("=")[1].partition("-")[0]) if asked else 0
        request.send_response(206 if first else 200)
        request.send_header("Content-Length", str(len(content) - first))
        request.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        if first:
            request.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        request.end_headers()
        if send:
            self.log.append((file.name, first))
            end = len(content)
            if self.cuts and end - first > 1000:
                self.cuts, end = self.cuts - 1, first + (end - first) // 2
            request.wfile.write(content[first:end])

    def describe(self, request, path):
        """Answer `request` for the list of files of a repository. path: api/models/OWNER/NAME/...
        or api/datasets/OWNER/NAME/..."""
        _, kind, owner, name, what = path.split("/")[:5]
        repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
        if repo not in self.repos:
            request.send_response(404)
            request.send_header("X-Error-Code", "RepoNotFound")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        folder = self.repos[repo]
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        names = {p: p.relative_to(folder).as_posix() for p in files}
        info = dict(id=repo, sha=COMMIT, siblings=[dict(rfilename=names[p]) for p in files])
        if what == "tree":
            info = [dict(type="file", path=names[p], size=p.stat().st_size,
                         oid=hashlib.sha1(p.read_bytes()).hexdigest()) for p in files]
        content = json.dumps(info).encode()
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
