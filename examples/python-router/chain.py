"""Chain c1: proves which token ids an engine holds, without telling them (proto/baton/v1/tokens.proto)."""

import hashlib
import struct


def chain(token_ids, model, adapter="", cache_salt=""):
    """Digests of the full blocks of 64 ids, 16 bytes each, and the ids after the last one."""
    seed = b"baton.c1"
    for part in (model, adapter, cache_salt):
        data = part.encode()
        seed += struct.pack("<I", len(data)) + data
    digest, digests = hashlib.sha256(seed).digest(), []
    full = len(token_ids) // 64 * 64
    for start in range(0, full, 64):
        digest = hashlib.sha256(digest + struct.pack("<64I", *token_ids[start : start + 64])).digest()
        digests.append(digest[:16])
    return digests, list(token_ids[full:])
