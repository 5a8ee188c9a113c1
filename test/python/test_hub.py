"""Models and data sets that are fetched from a hub: a local server with the part of the protocol that huggingface_hub uses."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_front_door import call, home_with_a_model

COMMITS = {"main": "0123456789abcdef0123456789abcdef01234567", "v2": "76543210fedcba9876543210fedcba9876543210"}


class Hub(BaseHTTPRequestHandler):
    """GET /api/models/NAME/revision/REVISION returns the commit, and .../tree/COMMIT its files; HEAD and GET /NAME/resolve/COMMIT/FILE return
    one file. Paths of data sets begin with /api/datasets and /datasets."""

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", **headers):
        self.server.asked.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.answer(status, X_Error_Code=code, X_Error_Message=f"this is {code}")

    def do_GET(self):
        path = self.path.partition("?")[0].removeprefix("/api").removeprefix("/models").removeprefix("/datasets")
        name = next((name for name in self.server.files if path.startswith(f"/{name}/") or path == f"/{name}"), None)
        if name is None:
            return self.refuse(401, "RepoNotFound")
        kind, _, rest = path[len(name) + 2:].partition("/")
        revision, _, file = rest.partition("/")
        revision = next((branch for branch, commit in COMMITS.items() if revision in (branch, commit)), revision if kind else "main")
        if revision not in COMMITS:
            return self.refuse(404, "RevisionNotFound")
        files, commit = self.server.files[name], COMMITS[revision]
        if kind == "tree":
            entries = [{"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()} for file, body in files.items()]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        if kind != "resolve":
            names = [{"rfilename": file} for file in files]
            return self.answer(200, json.dumps({"id": name, "sha": commit, "siblings": names}).encode(), Content_Type="application/json")
        if name == "someone/gated":
            return self.refuse(403, "GatedRepo")
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
        return self.answer(200, files[file], ETag=etag, X_Repo_Commit=commit, Accept_Ranges="bytes")

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return home_with_a_model(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def hub(home):
    files = {path.name: path.read_bytes() for path in (home / "first").iterdir() if path.is_file() and path.name != "log.jsonl"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {"someone/tiny": {**files, "pytorch_model.bin": b"not wanted"}, "someone/gated": files,
                    "someone/pickles": {"config.json": files["config.json"], "pytorch_model.bin": b"x"}}
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def fetch(home, hub, cache, *words, **environment):
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    return call(home, words, **{"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", **environment})


STEP = ("sft", "--max_steps", "1", "--device", "cpu", "--overwrite", "--output_dir", "out")
TRAIN = (*STEP, "--data", "chats.jsonl", "--model")


def test_a_model_is_fetched_once(home, hub, tmp_path):
    result = fetch(home, hub, tmp_path, *TRAIN, "someone/tiny")
    assert result.returncode == 0, result.stderr
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / COMMITS["main"]
    assert f"note: someone/tiny is {snapshot}" in result.stdout
    assert (snapshot / "model.safetensors").read_bytes() == hub.files["someone/tiny"]["model.safetensors"]
    assert not (snapshot / "pytorch_model.bin").exists()
    hub.asked.clear()
    assert fetch(home, hub, tmp_path, *TRAIN, "someone/tiny").returncode == 0
    assert hub.asked == []
    assert f"snapshots/{COMMITS['v2']}" in fetch(home, hub, tmp_path, *STEP, "--plan", "--model", "someone/tiny@v2").stdout
    assert (tmp_path / "models--someone--tiny/refs/v2").read_text() == COMMITS["v2"]


@pytest.mark.parametrize("name, parts", [
    ("someone/gated", ["the model is gated: its owner requires a login",
                       "fix: accept the terms at https://huggingface.co/someone/gated, then: hf auth login"]),
    ("someone/tiny@v9", ["it has no revision 'v9' on the hub", "fix: see https://huggingface.co/someone/tiny/commits/main"]),
    ("someone/absent", ["there is no such directory, and the hub has no such model, or it is private",
                        "fix: check the name; for a private model: hf auth login"]),
    ("someone/pickles", ["the hub has no model.safetensors of that model", "fix: use a model with weights in safetensors"]),
])
def test_a_model_that_cannot_be_fetched(home, hub, tmp_path, name, parts):
    result = fetch(home, hub, tmp_path, *TRAIN, name)
    assert result.returncode == 1 and result.stderr.count("  fix: ") == 1 and "Traceback" not in result.stderr, result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.mark.parametrize("status, body", [(500, b""), (200, b"<html>log in first</html>"), (200, b"{}"), (None, b"")])
def test_a_server_that_fails(home, hub, tmp_path, status, body):
    """The last case has no server."""
    def answer(self):
        self.answer(status, body)

    hub.RequestHandlerClass = type("Broken", (Hub,), {"do_GET": answer, "do_HEAD": answer})
    result = fetch(home, hub, tmp_path, *TRAIN, "someone/tiny", **({} if status else {"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert result.returncode == 1 and result.stderr.count("  fix: ") == 1, result.stderr
    assert "the hub cannot be reached" in result.stderr and "hf download someone/tiny --local-dir DIR, and give DIR" in result.stderr


def test_a_data_set_is_fetched(home, hub, tmp_path):
    """The samples equal those of a file with the same records; a split is chosen by name."""
    hub.files["someone/chats"] = {"train.jsonl": (home / "chats.jsonl").read_bytes(),
                                  "test.jsonl": (home / "chats.jsonl").read_bytes().splitlines(True)[0]}
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    words = (*STEP, "--model", "tiny", "--data")
    result = fetch(home, hub, tmp_path / "cache", *words, "someone/chats,someone/chats[test]", **cache)
    assert result.returncode == 0, result.stderr
    assert "4 samples" in result.stdout, result.stdout  # 3 to train, 1 to test
    assert any(path.startswith("/datasets/someone/chats/resolve/") for _, path, _ in hub.asked)
    missing = fetch(home, hub, tmp_path / "cache", *words, "someone/nothing", **cache)
    assert missing.returncode == 1 and "someone/nothing: there is no such file, and neither the hub nor its cache has that data set" in missing.stderr
