"""A KVCacheStore client: claims with `with`, and a miss whenever the store does not answer."""

import contextlib
import json
import uuid

import grpc
from google.protobuf.duration_pb2 import Duration

from baton.v1 import kv_cache_store_pb2 as pb
from baton.v1 import kv_cache_store_pb2_grpc as rpc
from baton.v1.kv_transfer_pb2 import KvBlockGroup, KvTransferParams
from chain import chain

BUDGET_S = 0.05  # a request waits no longer for the store
PATIENT_S = 2.0  # what nobody waits for


def to_message(handle):
    """An engine's kv_transfer_params as the contract carries them; what does not fit a field travels as JSON."""
    message, fields = KvTransferParams(member_order=list(handle)), KvTransferParams.DESCRIPTOR.fields_by_name
    for key, value in handle.items():
        if value is None and key in fields:
            message.null_members.append(key)
        elif key == "remote_block_ids" and value and all(isinstance(group, list) for group in value):
            message.remote_block_ids.groups.extend(KvBlockGroup(ids=group) for group in value)
        elif key in fields and type(value) in (bool, str, int):
            setattr(message, key, value)
        else:
            message.extra.add(key=json.dumps(key)[1:-1], json=json.dumps(value))
    return message


def from_message(message):
    """The engine's object again."""
    handle = {field.name: value for field, value in message.ListFields()}
    for inner in ("null_members", "extra", "member_order"):
        handle.pop(inner, None)
    if "remote_block_ids" in handle:
        handle["remote_block_ids"] = [list(group.ids) for group in message.remote_block_ids.groups]
    handle.update((key, None) for key in message.null_members)
    handle.update((json.loads(f'"{member.key}"'), json.loads(member.json)) for member in message.extra)
    return {**{key: handle[key] for key in message.member_order if key in handle}, **handle}


class Claim:
    """The right to use a handle once. Leaving `with` commits it, unless `release` said that no engine has seen it."""

    def __init__(self, stub, metadata, taken):
        self.handle, self.matched = from_message(taken.handle), taken.matched_tokens
        if self.matched < taken.entry.stored_tokens:  # cut count and blocks together: the count alone reads wrong blocks
            blocks = -(-self.matched // taken.entry.engine_block_size)
            self.handle["remote_num_tokens"] = self.matched
            self.handle["remote_block_ids"] = [self.handle["remote_block_ids"][0][:blocks]]
        self._stub, self._metadata, self._id, self._ended = stub, metadata, taken.claim_id, False

    def release(self, reason="not_sent"):
        self._end(self._stub.ReleaseClaim, pb.ReleaseClaimRequest(claim_id=self._id, reason=reason))

    def _end(self, call, request):
        if self._ended:
            return
        self._ended = True
        try:
            call(request, timeout=PATIENT_S, metadata=self._metadata)
        except grpc.RpcError:
            pass  # a claim whose end is not heard counts as committed at its deadline

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end(self._stub.CommitClaim, pb.CommitClaimRequest(claim_id=self._id))


class Store:
    def __init__(self, target, token=None):
        channel = grpc.insecure_channel(target)
        with contextlib.suppress(grpc.FutureTimeoutError):  # connecting is not to eat up the first request's budget
            grpc.channel_ready_future(channel).result(timeout=PATIENT_S)
        self._stub = rpc.KVCacheStoreStub(channel)
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def take(self, model, conversation, token_ids):
        """A Claim, or the reason why there is none."""
        request = pb.TakeEntryRequest(
            idempotency_key=str(uuid.uuid4()),
            key=pb.EntryKey(model=model, conversation_id=conversation),
            token_ids=pb.TokenIds(token_ids=token_ids),
        )
        try:
            answer = self._stub.TakeEntry(request, timeout=BUDGET_S, metadata=self._metadata)
        except grpc.RpcError as error:
            return f"STORE_{error.code().name}"
        if answer.WhichOneof("result") == "miss":
            return pb.MissReason.Name(answer.miss.reason).removeprefix("MISS_REASON_")
        return Claim(self._stub, self._metadata, answer.taken)

    def put(self, model, conversation, instance, handle, token_ids, block_size, ttl_s=450):
        """Keeps what a finished turn left at its decode engine."""
        digests, tail = chain(token_ids, model)
        engine = handle["remote_engine_id"]
        request = pb.PutEntryRequest(
            idempotency_key=str(uuid.uuid4()),
            key=pb.EntryKey(model=model, conversation_id=conversation),
            owner=pb.EntryOwner(instance_id=instance, engine_id=engine),
            connector="nixl",
            handle=to_message(handle),
            stored_tokens=handle["remote_num_tokens"],
            engine_block_size=block_size,
            remaining_ttl=Duration(seconds=ttl_s),
        )
        request.owner.incarnation.engine_id = engine.split("_dp")[0]
        request.chain.algorithm, request.chain.token_count = "c1", len(token_ids)
        request.chain.digests.extend(digests)
        request.chain.tail_token_ids.extend(tail)
        try:
            self._stub.PutEntry(request, timeout=PATIENT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            print("not stored:", error.code().name, flush=True)
