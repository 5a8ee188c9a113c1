#!/usr/bin/env python3
"""Serves a reward model with OpenRLHF's protocol, for --reward http://HOST:5000/get_reward of train_llama or of OpenRLHF.

    scripts/serve_rm.py --model out/rm                           on this machine's CPU, or --device cuda
    scripts/serve_rm.py --model out/rm --host 0.0.0.0 --port 80  for other machines

A request is POST /get_reward with {"query": [text, ...]}, prompts with their answers and their special tokens; the answer is {"rewards": [number,
...]}, or {"error": text}: with status 400 if the request is wrong, 503 if the model has died, which also ends the server. One process of train_llama
has the model and answers one request after another; up to 500 clients can be connected, and further clients wait. --normalize returns (score - mean)
/ std, with the figures of the evaluation in the model's training. All other flags are passed on to train_llama eval. Nothing is encrypted, and any
client that reaches the port can ask.
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from http import HTTPStatus

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data"))

from encode_worker import encode  # noqa: E402
from errors import DataError  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

MOST_BYTES = 64 << 20  # of a request
LIMITS = {"connection_limit": 500, "channel_timeout": 30, "cleanup_interval": 5, "max_request_body_size": MOST_BYTES, "channel_request_lookahead": 1}


class ModelEnded(Exception):
    def __str__(self):
        return "train_llama has ended\n  fix: see its message in the server's standard error"


class ClientGone(Exception):
    """The client no longer waits for the answer."""


class Scorer:
    """A train_llama process with the model, and its pipes."""

    def __init__(self, model, flags, normalize):
        self.tokenizer = Tokenizer(model)
        config = json.loads((pathlib.Path(model) / "config.json").read_text())
        if normalize and not ("mean" in config and "std" in config):
            raise DataError(f'--normalize: config.json of {model} has no "mean" and "std"', "train it with an evaluation, which finds them")
        self.mean, self.std = (config["mean"], config["std"]) if normalize else (0, 1)
        self.turn = threading.Lock()
        self.process = subprocess.Popen([ROOT / "train_llama", "eval", "--model", model, "--data", "-", *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, start_new_session=True)  # a separate session: Ctrl-C is for the server
        self.ask([[0]])  # the answer shows that the model is loaded

    def ask(self, ids, gone=lambda: False):
        line = ""
        with self.turn:
            if gone():
                raise ClientGone
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps({"ids": ids}) + "\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise ModelEnded
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"], "shorten the texts, or raise --row_tokens")
        return answer["scores"]

    def __call__(self, texts, gone):
        scores = self.ask(encode(self.tokenizer, texts), gone)
        if None in scores:  # a NaN in JSON
            raise DataError(f"the score of text {scores.index(None)} is not a number", "use a fully trained model")
        return [(score - self.mean) / self.std for score in scores]


def texts_of(body):
    texts = json.loads(body)["query"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    "".join(texts).encode()  # half of a surrogate pair is not text
    return texts


def answer(scorer, request):
    """Returns status and content of the answer to a WSGI request."""
    if request["PATH_INFO"] != "/get_reward":
        return 404, {"error": f"there is no {request['PATH_INFO']}\n  fix: /get_reward"}
    if request["REQUEST_METHOD"] != "POST":
        return 405, {"error": f"{request['REQUEST_METHOD']} is not a reward request\n  fix: POST"}
    try:
        texts = texts_of(request["wsgi.input"].read())
    except (ValueError, KeyError, TypeError, RecursionError):
        return 400, {"error": 'a request is {"query": [text, ...]}'}
    try:
        return 200, {"rewards": scorer(texts, request["waitress.client_disconnected"])}
    except ModelEnded as error:
        return 503, {"error": str(error)}
    except (DataError, ClientGone) as error:
        return 400, {"error": str(error)}


def application(scorer):
    def respond(request, start_response):
        status, content = answer(scorer, request)
        body = json.dumps(content).encode()
        allow = [("Allow", "POST")] if status == 405 else []
        start_response(f"{status} {HTTPStatus(status).phrase}", [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *allow])
        return [body]

    return respond


def end_with(process):
    """Ends the server after the model, as SIGTERM does, when all waiting clients have received status 503."""
    process.wait()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def serve(options, flags):
    try:
        import waitress
    except ImportError:
        sys.exit(f"serve_rm.py: there is no waitress, the HTTP server, for {sys.executable}\n  fix: make deps")
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # waiting requests are normal
    if not os.path.isdir(options.model):
        sys.exit(f"serve_rm.py: --model {options.model}: there is no such directory\n  fix: give the --output_dir of a trained reward model")
    try:
        listener = socket.create_server((options.host, options.port), family=socket.AF_INET6 if ":" in options.host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        sys.exit(f"serve_rm.py: cannot listen at {options.host}, port {options.port}: {error}\n  fix: give an address of this machine and a free --port")
    try:
        scorer = Scorer(options.model, flags, options.normalize)
    except (DataError, ModelEnded, OSError) as error:
        sys.exit(f"serve_rm.py: {error}")
    server = waitress.create_server(application(scorer), sockets=[listener], asyncore_use_poll=True, **LIMITS)
    threading.Thread(target=end_with, args=[scorer.process], daemon=True).start()
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"{options.model} at http://{host}:{listener.getsockname()[1]}/get_reward", flush=True)
    server.run()
    if scorer.process.poll() is not None:
        sys.exit(f"serve_rm.py: {ModelEnded()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000, help="0: any free port")
    parser.add_argument("--normalize", action="store_true")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server as Ctrl-C does; the model ends with its standard input
    with contextlib.suppress(KeyboardInterrupt):
        serve(*parser.parse_known_args())


if __name__ == "__main__":
    main()
