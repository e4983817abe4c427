"""A prefill/decode router of one's own that reuses KV between turns, safely, by baton's KVCacheStore.

    python router.py --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --store 127.0.0.1:50051

Conversations are named by the header x-session-id. It serves POST /v1/chat/completions, streamed or not.
"""

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gen"))
from store import Claim, Store  # noqa: E402

# Members that cannot change the prompt, or that the engine's /tokenize renders as its chat route does.
PROVEN = {"model", "messages", "max_tokens", "max_completion_tokens", "stream", "stream_options", "temperature", "top_p"}
PROVEN |= {"seed", "stop", "n", "user", "ignore_eos", "tools", "chat_template_kwargs"}


def post(url, body, request_id, timeout=1800):
    headers = {"content-type": "application/json", "x-request-id": request_id}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=timeout)


def never_sent(error):
    """Only a refused connection proves that no engine has seen the handle."""
    return isinstance(getattr(error, "reason", None), ConnectionRefusedError)


class Router:
    def __init__(self, prefill, decode, store):
        self.prefill, self.decode, self.store = prefill, decode, store
        with urllib.request.urlopen(f"{decode}/metrics", timeout=10) as reply:
            self.block_size = int(re.search(r'block_size="(\d+)"', reply.read().decode())[1])

    def tokenize(self, body):
        members = ("model", "messages", "tools", "chat_template_kwargs")
        question = {key: body[key] for key in members if key in body}
        with post(f"{self.prefill}/tokenize", question, str(uuid.uuid4()), timeout=5) as reply:
            return json.load(reply)["tokens"]

    def prefill_leg(self, body, ids, handle):
        """P's handle for D; raises where P failed or used other tokens than those that were compared."""
        leg = {**body, "stream": False, "max_tokens": 1, "return_token_ids": True}
        leg["kv_transfer_params"] = handle or {"do_remote_decode": True}
        leg.pop("stream_options", None)
        if "max_completion_tokens" in leg:
            leg["max_completion_tokens"] = 1
        with post(f"{self.prefill}/v1/chat/completions", leg, str(uuid.uuid4())) as reply:
            answer = json.load(reply)
        if handle and answer.get("prompt_token_ids") != ids:
            raise RuntimeError("prefill rendered another prompt than the one that was compared")
        return answer["kv_transfer_params"]

    def run(self, body, session):
        """The reply of D, what the turn was worth, and the prompt's ids where the turn can be stored."""
        if not session or set(body) - PROVEN:
            why = "UNSUPPORTED" if session else "UNNAMED"
            return self.decode_leg(body, self.prefill_leg(body, None, None), False), why, None
        ids = self.tokenize(body)
        found = self.store.take(body["model"], session, ids)
        outcome, params = found, None
        if isinstance(found, Claim):
            with found as claim:
                try:
                    params, outcome = self.prefill_leg(body, ids, claim.handle), f"HIT {claim.matched}"
                except (OSError, RuntimeError, KeyError) as error:
                    if never_sent(error):
                        claim.release()
                    outcome = "WARM_FAILED"
        params = params or self.prefill_leg(body, ids, None)
        return self.decode_leg(body, params, True), outcome, ids

    def decode_leg(self, body, params, capture):
        extra = {"return_token_ids": True} if capture else {}
        return post(f"{self.decode}/v1/chat/completions", {**body, **extra, "kv_transfer_params": params}, str(uuid.uuid4()))

    def keep(self, body, session, ids, chunks):
        """Stores D's handle with the tokens it holds: all of them, or nothing."""
        prompt, reply, handle = None, [], None
        for chunk in chunks:
            prompt = chunk.get("prompt_token_ids") or prompt
            handle = chunk.get("kv_transfer_params") or handle
            for choice in chunk.get("choices", []):
                reply += choice.get("token_ids") or []
        if handle and prompt == ids and reply and handle.get("remote_num_tokens"):
            self.store.put(body["model"], session, self.decode, handle, prompt + reply, self.block_size)


class Handler(BaseHTTPRequestHandler):
    router = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("x-session-id", "")
        try:
            reply, outcome, ids = self.router.run(body, session)
        except urllib.error.HTTPError as error:
            return self.answer(error.code, error.headers.get_content_type(), error.read())
        with reply:
            lines, chunks = [], []
            if not body.get("stream"):
                lines = [reply.read()]
                chunks = [json.loads(lines[0])]
            self.answer(200, reply.headers.get_content_type(), b"".join(lines), outcome, done=bool(lines))
            for line in reply if body.get("stream") else []:
                self.wfile.write(line)
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
        if ids is not None:
            self.router.keep(body, session, ids, chunks)

    def answer(self, status, kind, data, outcome=None, done=True):
        self.send_response(status)
        self.send_header("content-type", kind)
        if outcome:
            self.send_header("x-reuse", outcome)
        if done:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag in ("--prefill", "--decode", "--store"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--token", default=None)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    Handler.router = Router(args.prefill, args.decode, Store(args.store, args.token))
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    print(f"listening on {server.server_port}", flush=True)
    server.serve_forever()
