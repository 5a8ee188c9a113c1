#!/usr/bin/env python3
"""Serves a reward model by OpenRLHF's protocol, for --reward http://HOST:5000/get_reward of train_llama or of OpenRLHF.

    scripts/serve_rm.py --model out/rm                           on this machine's CPU, or --device cuda
    scripts/serve_rm.py --model out/rm --host 0.0.0.0 --port 80  for other machines

A request is POST /get_reward with {"query": [text, ...]}, prompts with their answers and their special tokens; the answer is {"rewards": [number, ...]}, or
{"error": text} with status 400. One process of train_llama holds the model and answers one request after the other. --normalize makes of a score
(score - mean) / std, which the evaluation of the model's training has found. All other flags are those of train_llama eval.
"""

import argparse
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))

from encode_worker import encode  # noqa: E402
from errors import DataError  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402


class Scorer:
    """train_llama with the model, and what it takes to ask it."""

    def __init__(self, model, flags, normalize):
        self.tokenizer = Tokenizer(model)
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        if normalize and not ("mean" in config and "std" in config):
            raise DataError(f'--normalize: config.json of {model} has no "mean" and "std"', "train it with an evaluation, which finds them")
        self.mean, self.std = (config["mean"], config["std"]) if normalize else (0, 1)
        self.turn = threading.Lock()
        self.process = subprocess.Popen([ROOT / "train_llama", "eval", "--model", model, "--data", "-", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask([[0]])  # it has loaded the model when it answers

    def ask(self, ids):
        line = ""
        with self.turn, contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"ids": ids}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            raise DataError("train_llama has ended", "what it said above")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"], "shorter texts, or a larger --row_tokens")
        return answer["scores"]

    def __call__(self, texts):
        return [(score - self.mean) / self.std for score in self.ask(encode(self.tokenizer, texts))]


def handler(scorer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_POST(self):
            try:
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                texts = request["query"]
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                    raise TypeError
                self.answer(200, {"rewards": scorer(texts)})
            except DataError as error:
                self.answer(400, {"error": str(error)})
            except (ValueError, KeyError, TypeError):
                self.answer(400, {"error": 'a request is {"query": [text, ...]}'})

        def answer(self, status, body):
            body = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass  # a line for each request says nothing

    return Handler


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="0: any that is free")
    parser.add_argument("--normalize", action="store_true")
    options, flags = parser.parse_known_args()
    try:
        scorer = Scorer(options.model, flags, options.normalize)
        server = ThreadingHTTPServer((options.host, options.port), handler(scorer))
    except (DataError, OSError) as error:
        sys.exit(f"serve_rm.py: {error}")
    print(f"{options.model} at http://{options.host}:{server.server_port}/get_reward", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        scorer.process.stdin.close()  # ends it


if __name__ == "__main__":
    main()
