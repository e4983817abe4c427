#!/usr/bin/env python3
"""Keeps the engine beside it in baton's pool: registers it, renews its lease, takes it out when told to stop."""
import json, os, signal, sys, time, urllib.error, urllib.request, uuid

REGISTRY = os.environ.get("BATON_REGISTRY_URL", "http://127.0.0.1:50051")
TOKEN = os.environ.get("BATON_RPC_TOKEN", "")
LEASE = float(os.environ.get("LEASE_SECONDS", "15"))
if len(sys.argv) != 3 or sys.argv[2] not in ("prefill", "decode", "both"):
    sys.exit("usage: register.py ENGINE_URL prefill|decode|both")
ENGINE = {"url": sys.argv[1], "role": f"ROLE_{sys.argv[2].upper()}", "connector": os.environ.get("CONNECTOR", "nixl")}
# Of these codes the registry would say the same again, whatever time passes.
FINAL = {"invalid_argument", "unauthenticated", "permission_denied", "unimplemented"}


def call(method, body):
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {TOKEN}"} if TOKEN else {})}
    url = f"{REGISTRY}/baton.v1.PoolRegistry/{method}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LEASE / 3) as reply:
        return json.load(reply)


def life_of(instance):
    return {"instanceId": instance["id"], "incarnation": {"generation": instance["incarnation"]["generation"]}}


def read_error(error):
    text = error.read().decode(errors="replace")
    try:
        return {"code": "", "message": text, **json.loads(text)}
    except (TypeError, ValueError):
        return {"code": "unimplemented" if error.code in (404, 405) else "", "message": f"{error}: no baton registry?"}


signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
me = None
try:
    while True:
        try:
            if me is None:
                body = {"idempotencyKey": str(uuid.uuid4()), "instance": ENGINE, "lease": f"{LEASE:g}s"}
                me = call("RegisterInstance", body)["instance"]
                print(f"registered {me['id']}, generation {me['incarnation']['generation']}", flush=True)
            call("RenewLease", life_of(me))
        except urllib.error.HTTPError as error:
            told = read_error(error)
            if told["code"] in FINAL:
                sys.exit(f"{REGISTRY} does not take {ENGINE['url']}: {told['message']}")
            print(f"refused: {told['code']}: {told['message']}", file=sys.stderr, flush=True)
            me = None  # the registry does not know this life: register again
        except OSError as error:
            print(f"no registry: {error}", file=sys.stderr, flush=True)
        time.sleep(LEASE / 3)
finally:
    try:
        if me is not None:
            call("DeregisterInstance", {**life_of(me), "reason": "shutdown"})
    except OSError as error:
        print(f"not taken out, the lease will end: {error}", file=sys.stderr, flush=True)
