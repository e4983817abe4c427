import { beforeEach, describe, expect, test } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { STORES } from '../../src/stores/index.ts';
import type { ClaimGuard, KvStore, PutCall, StoreKey, TakeCall, Taken, TakeResult } from '../../src/stores/store.ts';
import { callId, type EntryParts, ids, KEY, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';
import { needsRedis } from '../support/redis.ts';
import { sharedBackends } from '../support/store-backends.ts';
import { reasonName } from '../support/store-messages.ts';

const ANYONE: ClaimGuard = () => true;

const backends = sharedBackends();

describe.each(Object.keys(STORES))('store %s', (name) => {
  beforeEach((context) => {
    if (name === 'valkey') needsRedis(context);
  });

  async function opened(some: Parameters<typeof limits>[0] = {}) {
    const time: TestTime = { now: 1_000_000 };
    const store = await backends().of(name)({ now: () => time.now, limits: limits(some), runId: 'run1' });
    return { time, store, ...verbs(store) };
  }

  describe('at most once', () => {
    test('a claim is exclusive, and spent by its commit', async () => {
      const { store, put, take, taken } = await opened();
      const { entry } = await put();
      const first = await taken();
      expect(first.entry.entryId).toBe(entry.entryId);
      expect(first.entry.claimed).toBe(true);
      expect(first.claimRemainingMs).toBe(120_000);
      expect([...first.handle]).toEqual([1, 2, 3]);
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      await store.commit(first.claimId, ANYONE);
      await store.commit(first.claimId, ANYONE);
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      await refused(store.release(first.claimId, ANYONE), 'CLAIM_SPENT');
    });

    test('a released entry can be taken again, to its old deadline', async () => {
      const { time, store, put, taken, take } = await opened();
      await put();
      const first = await taken();
      time.now += 100_000;
      const back = await store.release(first.claimId, ANYONE);
      expect(back).toMatchObject({ entryId: first.entry.entryId, claimed: false, remainingMs: 350_000 });
      expect(back?.revision).toBeGreaterThan(first.entry.revision);
      expect((await store.release(first.claimId, ANYONE))?.entryId).toBe(first.entry.entryId);
      const second = await taken();
      expect(second.claimId).not.toBe(first.claimId);
      // The first claim ended; it gives no right to end the second.
      expect(await store.release(first.claimId, ANYONE)).toBeUndefined();
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      await refused(store.commit(first.claimId, ANYONE), 'CLAIM_NOT_FOUND');
      await store.release(second.claimId, ANYONE);
      time.now += 349_999;
      const third = await taken();
      await store.release(third.claimId, ANYONE);
      time.now += 1;
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
      expect(await store.stats({})).toMatchObject({ entries: 0, expirations: 1 });
    });

    test('a claim past its deadline counts as committed', async () => {
      const { time, store, put, taken, take } = await opened();
      await put();
      const { claimId } = await taken({ deadlineMs: 5000 });
      time.now += 4999;
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      time.now += 1;
      await refused(store.release(claimId, ANYONE), 'CLAIM_SPENT');
      await store.commit(claimId, ANYONE);
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      expect(await store.stats({})).toMatchObject({ entries: 0, claims: 0, bytes: 0 });
    });

    test('claims past their deadline count as committed, also where many are due before one of them is looked at', async () => {
      const { time, store, put, taken, key } = await opened();
      for (let index = 0; index < 50; index++) {
        await put(key(`${index}`));
        await taken({ ...key(`${index}`), deadlineMs: 5000 + index });
      }
      time.now += 6000;
      // The first call after it tells of the one that is due last.
      const last = { kind: 'key' as const, key: { ...KEY, conversationId: '49' } };
      expect(await store.get(last)).toEqual({ entries: [], miss: MissReason.TAKEN });
    });

    test('an entry whose claim was due after it is expired', async () => {
      const { time, put, taken, take } = await opened();
      await put({ ttlMs: 50_000 });
      await taken({ deadlineMs: 60_000 });
      time.now += 60_000;
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
    });

    test('an entry that expires while it is claimed does not come back', async () => {
      const { time, store, put, taken, take } = await opened();
      await put({ ttlMs: 50_000 });
      const { claimId } = await taken();
      time.now += 50_000;
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
      expect(await store.release(claimId, ANYONE)).toBeUndefined();
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
    });

    test('a replayed take gives the same claim, also after its commit, and never one that was put back', async () => {
      const { time, store, put, take } = await opened();
      await put();
      const call: TakeCall = { ...takeCall(), id: callId('k', 'r') };
      const first = await store.take(call);
      time.now += 10_000;
      const again = await store.take(call);
      expect(takenOf(again)).toEqual({
        ...takenOf(first),
        claimRemainingMs: 110_000,
        entry: { ...takenOf(first).entry, ageMs: 10_000, remainingMs: 440_000 },
      });
      await store.commit(takenOf(first).claimId, ANYONE);
      expect(takenOf(await store.take(call)).claimId).toBe(takenOf(first).claimId);
      await refused(store.take({ ...call, id: callId('k', 'other') }), 'IDEMPOTENCY_KEY_REUSED');
      time.now += 590_000;
      expect(await store.take(call)).toEqual(miss(MissReason.TAKEN));
      expect((await store.stats({})).takes).toBe(1);

      await put();
      const second: TakeCall = { ...takeCall(), id: callId('k2', 'r') };
      await store.release(takenOf(await store.take(second)).claimId, ANYONE);
      expect((await take()).kind).toBe('taken');
      expect(await store.take(second)).toEqual(miss(MissReason.TAKEN));
    });

    test('a claim is there for its own tenant alone', async () => {
      const { store, put, taken } = await opened();
      await put();
      const { claimId } = await taken();
      const other: ClaimGuard = ({ tenant }) => tenant === 'u';
      await refused(store.commit(claimId, other), 'CLAIM_NOT_FOUND');
      await refused(store.release(claimId, other), 'CLAIM_NOT_FOUND');
      await refused(store.commit('c-run1-zz', ANYONE), 'CLAIM_NOT_FOUND');
      expect(await store.release(claimId, ({ tenant }) => tenant === 't')).toBeDefined();
    });

    test('a replayed put stores once', async () => {
      const { time, store } = await opened();
      const call: PutCall = { id: callId('p', 1), entry: newEntry(), derivedKey: false };
      const { entry } = await store.put(call);
      time.now += 1000;
      expect((await store.put(call)).entry).toEqual({ ...entry, ageMs: 1000, remainingMs: 449_000 });
      expect(await store.stats({})).toMatchObject({ entries: 1, puts: 1 });
      await refused(store.put({ ...call, id: callId('p', 2) }), 'IDEMPOTENCY_KEY_REUSED');
      // Another scope is another caller.
      await store.put({ ...call, id: callId('p', 2, 'other') });
      expect((await store.stats({})).entries).toBe(2);
    });
  });

  describe('which entry', () => {
    test('the longest proven prefix of several entries', async () => {
      const { put, taken, take } = await opened();
      const short = await put({ tokens: ids(128) });
      const long = await put({ tokens: ids(300) });
      const other = await put({ tokens: ids(200, 5000) });
      expect(await taken({ prompt: ids(400) })).toMatchObject({
        matchedTokens: 300,
        entry: { entryId: long.entry.entryId },
      });
      expect(await taken({ prompt: ids(400) })).toMatchObject({
        matchedTokens: 128,
        entry: { entryId: short.entry.entryId },
      });
      // What was given left the entry alone that did not match.
      expect(await taken({ prompt: ids(250, 5000) })).toMatchObject({
        matchedTokens: 200,
        entry: { entryId: other.entry.entryId },
      });
      expect(await take({ prompt: ids(400) })).toEqual(miss(MissReason.TAKEN));
    });

    test('of equal proofs the entry that goes least beyond it, then the newest', async () => {
      const { put, taken } = await opened();
      const whole = await put({ tokens: ids(128) });
      const newer = await put({ tokens: ids(128) });
      await put({ tokens: [...ids(128), ...ids(128, 9000)] });
      const first = await taken({ prompt: ids(300) });
      const second = await taken({ prompt: ids(300) });
      expect([first.entry.entryId, second.entry.entryId]).toEqual([newer.entry.entryId, whole.entry.entryId]);
      expect(await taken({ prompt: ids(300) })).toMatchObject({ matchedTokens: 128, entry: { storedTokens: 256 } });
    });

    test('a part of one, from min_tokens on', async () => {
      const { put, taken, take } = await opened();
      await put({ tokens: [...ids(100), ...ids(100, 7000)] });
      expect(await taken({ prompt: ids(300) })).toMatchObject({ matchedTokens: 64, entry: { storedTokens: 200 } });
      await put({ tokens: ids(200) });
      expect(await take({ prompt: ids(190), minTokens: 191 })).toEqual(miss(MissReason.PREFIX_MISMATCH, 128));
    });

    test('never more than the chain covers, nor than the handle names', async () => {
      const { put, taken } = await opened();
      await put({ tokens: ids(200), storedTokens: 205 });
      expect((await taken({ prompt: ids(300) })).matchedTokens).toBe(200);
      await put({ tokens: ids(200), storedTokens: 199 });
      expect((await taken({ prompt: ids(300) })).matchedTokens).toBe(199);
    });

    test('entries that were compared and differ go to the release queue; small ones stay', async () => {
      const { store, put, take, taken } = await opened();
      await put({ tokens: ids(40) });
      await put({ tokens: ids(200, 5000) });
      await put({ tokens: [...ids(30), ...ids(200, 6000)] });
      expect(await take({ prompt: ids(300), minTokens: 41 })).toEqual(miss(MissReason.PREFIX_MISMATCH));
      expect(await store.stats({})).toMatchObject({ entries: 1, releaseQueue: 2, evictions: 0 });
      expect(await take({ prompt: ids(300), minTokens: 41 })).toEqual(miss(MissReason.RELEASED));
      expect(await taken({ prompt: ids(300), minTokens: 40 })).toMatchObject({ matchedTokens: 40 });
    });

    test('with keep_tokens, those with as many equal tokens stay', async () => {
      const { store, put, take, taken } = await opened();
      await put({ tokens: [...ids(100), ...ids(100, 7000)] });
      await put({ tokens: ids(200, 5000) });
      const shared = { prompt: ids(300), minTokens: 128, keepTokens: 0 };
      expect(await take(shared)).toEqual(miss(MissReason.PREFIX_MISMATCH, 64));
      expect(await store.stats({})).toMatchObject({ entries: 2, releaseQueue: 0 });
      expect(await take({ ...shared, keepTokens: 64 })).toEqual(miss(MissReason.PREFIX_MISMATCH, 64));
      expect(await store.stats({})).toMatchObject({ entries: 1, releaseQueue: 1 });
      expect(await taken({ prompt: ids(300) })).toMatchObject({ matchedTokens: 64 });
    });

    test('a small entry is TOO_SMALL while it is the newest', async () => {
      const { store, put, take, taken } = await opened();
      await put({ tokens: ids(50) });
      expect(await take()).toEqual(miss(MissReason.TOO_SMALL));
      await put();
      await store.commit((await taken()).claimId, ANYONE);
      expect(await take()).toEqual(miss(MissReason.TAKEN));
    });

    test('without a prompt the newest, chain or none; with one only entries with a chain', async () => {
      const { put, take, taken } = await opened();
      await put();
      const bare = await put({ tokens: null });
      expect(bare.entry).toMatchObject({ chainTokens: 0, hasChain: false });
      const first = await taken({ prompt: null });
      expect(first).toMatchObject({ matchedTokens: 0, entry: { entryId: bare.entry.entryId } });
      expect((await taken({ prompt: null })).entry.chainTokens).toBe(200);
      await put({ key: { conversationId: 'bare' }, tokens: null });
      expect(await take({ key: { conversationId: 'bare' } })).toEqual(miss(MissReason.NEVER_STORED));
      expect(await take({ key: { conversationId: 'bare' }, prompt: null, minTokens: 201 })).toEqual(
        miss(MissReason.TOO_SMALL),
      );
    });

    test('only of the compat group that is asked for', async () => {
      const { put, take, taken } = await opened();
      await put({ compatGroup: 'a' });
      expect(await take({ compatGroup: 'b' })).toEqual(miss(MissReason.NEVER_STORED));
      expect((await taken({ compatGroup: 'a' })).entry.owner.compatGroup).toBe('a');
      await put({ compatGroup: 'a' });
      expect((await taken()).entry.owner.compatGroup).toBe('a');
      await put();
      expect((await taken({ compatGroup: 'b' })).entry.owner.compatGroup).toBe('');
    });

    test('only the entry of the precondition', async () => {
      const { store, put, take, taken } = await opened();
      const a = (await put()).entry;
      const b = (await put({ tokens: ids(250) })).entry;
      expect((await taken({ precondition: a })).entry.entryId).toBe(a.entryId);
      await refused(take({ precondition: a }), 'REVISION_MISMATCH');
      await refused(take({ precondition: { ...b, revision: b.revision + 1n } }), 'REVISION_MISMATCH');
      await refused(take({ precondition: { entryId: 'e-run1-000000zzz', revision: 1n } }), 'REVISION_MISMATCH');
      await refused(take({ key: { conversationId: 'else' }, precondition: b }), 'REVISION_MISMATCH');
      const both = (await put({ tokens: ids(200, 5000) })).entry;
      expect(await take({ precondition: both })).toEqual(miss(MissReason.PREFIX_MISMATCH));
      expect((await store.stats({})).releaseQueue).toBe(1);
      expect((await taken()).entry.entryId).toBe(b.entryId);
    });

    test('of its own key, whatever the parts look like', async () => {
      const { put, take } = await opened();
      await put({ key: { tenant: 'a', model: 'b1:c' } });
      await put({ key: { tenant: 'x', conversationId: 'é' } });
      const never = miss(MissReason.NEVER_STORED);
      for (const key of [
        { tenant: 'a1:b', model: 'c' },
        { tenant: 'a', model: 'b1', adapter: 'c' },
        { tenant: 'ab', model: '1:c' },
        { tenant: '', model: 'b1:c' },
        { tenant: 'x', conversationId: 'e\u0301' },
        { tenant: 'X', conversationId: 'é' },
        { tenant: 'x', conversationId: 'é', cacheSalt: 's' },
        { tenant: 'x', conversationId: 'é', adapter: 'a' },
      ]) {
        expect(await take({ key, prompt: null })).toEqual(never);
      }
    });
  });

  describe('put', () => {
    test('adds, and over the limit of the key the oldest unclaimed goes to the release queue', async () => {
      const { store, put, taken } = await opened();
      const puts = [];
      for (let index = 0; index < 3; index++) puts.push(await put({ tokens: ids(100 + index) }));
      const claimed = await taken({ precondition: puts[0]!.entry });
      for (let index = 3; index < 8; index++) expect((await put({ tokens: ids(100 + index) })).displaced).toEqual([]);
      expect((await put()).displaced).toEqual([puts[1]!.entry.entryId]);
      expect((await store.get({ kind: 'key', key: KEY })).entries.map(({ storedTokens }) => storedTokens)).toEqual([
        200, 107, 106, 105, 104, 103, 102, 100,
      ]);
      expect(await store.get({ kind: 'entry', entryId: puts[1]!.entry.entryId, tenant: 't' })).toEqual({
        entries: [],
        miss: MissReason.RELEASED,
      });
      expect(await store.stats({})).toMatchObject({ entries: 8, claims: 1, releaseQueue: 1, evictions: 1 });
      await store.release(claimed.claimId, ANYONE);
    });

    test('allows a derived key 64', async () => {
      const { store, put } = await opened();
      for (let index = 0; index < 64; index++) expect((await put({}, { derivedKey: true })).displaced).toEqual([]);
      expect((await put({}, { derivedKey: true })).displaced).toHaveLength(1);
      expect((await put()).displaced).toHaveLength(57);
      expect(await store.stats({})).toMatchObject({ entries: 8, releaseQueue: 58 });
    });

    test('is refused where every entry of the key is claimed, and loses nothing', async () => {
      const { store, put, taken } = await opened({ entriesPerKey: 2 });
      await put();
      await put();
      await taken();
      const second = await taken();
      await refused(put(), 'LIMIT_EXCEEDED', { limit: 'entries_per_key', max: '2' });
      expect(await store.stats({})).toMatchObject({ entries: 2, claims: 2, puts: 2 });
      await store.release(second.claimId, ANYONE);
      expect((await put()).displaced).toEqual([second.entry.entryId]);
    });

    test('heeds its preconditions', async () => {
      const { store, put, taken } = await opened();
      const first = await put({}, { precondition: 'absent' });
      await refused(put({}, { precondition: 'absent' }), 'ENTRY_EXISTS', { entry_id: first.entry.entryId });
      const second = await put({ tokens: ids(250) }, { precondition: first.entry });
      expect(second.displaced).toEqual([first.entry.entryId]);
      await refused(put({}, { precondition: first.entry }), 'REVISION_MISMATCH');
      const claim = await taken();
      await refused(put({}, { precondition: second.entry }), 'REVISION_MISMATCH');
      await refused(put({}, { precondition: claim.entry }), 'REVISION_MISMATCH');
      await refused(put({}, { precondition: 'absent' }), 'ENTRY_EXISTS');
      await store.commit(claim.claimId, ANYONE);
      await put({}, { precondition: 'absent' });
      expect(await store.stats({})).toMatchObject({ entries: 1, releaseQueue: 1, evictions: 0 });
    });

    test('over the global bound evicts what expires next, and counts it', async () => {
      const handle = new Uint8Array(10_000);
      const one = (await (await opened()).storedBytes({ handle })) as number;
      const { time, store, put, take, taken, key } = await opened({ totalBytes: 3 * one });
      await put({ ...key('a'), handle, ttlMs: 300_000 });
      const soon = await put({ ...key('b'), handle, ttlMs: 100_000 });
      await put({ ...key('c'), handle, ttlMs: 200_000 });
      expect((await put({ ...key('d'), handle })).displaced).toEqual([soon.entry.entryId]);
      expect(await take(key('b'))).toEqual(miss(MissReason.RELEASED));
      expect(await store.stats({})).toMatchObject({ entries: 3, bytes: 3 * one, releaseQueue: 1, evictions: 1 });
      // Another tenant's entry goes as well, but its id is not told.
      expect((await put({ key: { tenant: 'u', conversationId: 'c' }, handle })).displaced).toEqual([]);
      expect(await take(key('c'))).toEqual(miss(MissReason.RELEASED));
      expect((await put({ key: { tenant: 'u', conversationId: 'e' }, handle })).displaced).toEqual([]);
      expect(await take(key('a'))).toEqual(miss(MissReason.RELEASED));
      // Claimed ones are out of reach.
      await taken(key('d'));
      await taken({ key: { tenant: 'u', conversationId: 'c' } });
      await taken({ key: { tenant: 'u', conversationId: 'e' } });
      await refused(put({ ...key('f'), handle }), 'LIMIT_EXCEEDED', { limit: 'total_bytes', max: String(3 * one) });
      time.now += 120_000;
      expect((await put({ ...key('f'), handle })).displaced).toEqual([]);
    });

    test('is refused over the share of its tenant, and loses nothing', async () => {
      const { time, store, put, taken } = await opened({ tenantEntries: 2 });
      const of = (conversationId: string, tenant = 't') => put({ key: { tenant, conversationId } });
      await of('a');
      await put({ key: { conversationId: 'b' }, ttlMs: 1000 });
      await refused(of('c'), 'QUOTA_EXCEEDED');
      await of('c', 'other');
      expect(await store.stats({ tenant: 't' })).toMatchObject({ entries: 2, releaseQueue: 0 });
      // What is over by itself counts no more; what is claimed does.
      time.now += 1000;
      const { claimId } = await taken({ key: { ...KEY, conversationId: 'a' } });
      await of('c');
      await refused(of('d'), 'QUOTA_EXCEEDED');
      await store.commit(claimId, ANYONE);
      const { entry } = await of('d');
      // An entry that is replaced makes its own room.
      const precondition = { entryId: entry.entryId, revision: entry.revision };
      await put({ key: { conversationId: 'd' } }, { precondition });
      await refused(of('e'), 'QUOTA_EXCEEDED');
      await store.delete({
        id: callId(),
        entryId: (await of('c', 'other')).entry.entryId,
        tenant: undefined,
        revision: undefined,
      });
      await refused(of('e'), 'QUOTA_EXCEEDED');
    });

    test('is refused over the bytes of its tenant', async () => {
      const { store, put } = await opened({ tenantBytes: 22_000 });
      const big = (conversationId: string) => put({ key: { conversationId }, handle: new Uint8Array(8000) });
      await big('a');
      await big('b');
      await refused(big('c'), 'QUOTA_EXCEEDED');
      expect(await store.stats({})).toMatchObject({ entries: 2 });
      await put({ key: { tenant: 'other' }, handle: new Uint8Array(8000) });
    });

    test('is refused over the size of an entry', async () => {
      const { put } = await opened();
      await put({ handle: new Uint8Array(4 * 1024 * 1024 - 5000) });
      await refused(put({ handle: new Uint8Array(4 * 1024 * 1024) }), 'LIMIT_EXCEEDED', {
        limit: 'entry_bytes',
        max: '4194304',
      });
    });
  });

  describe('misses', () => {
    test('tell the reason of the newest dead entry', async () => {
      const { time, store, put, take, taken } = await opened();
      expect(await take()).toEqual(miss(MissReason.NEVER_STORED));
      await put({ ttlMs: 1000 });
      time.now += 1000;
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
      const old = await put();
      await put({ tokens: ids(250) });
      await store.commit((await taken({ prompt: ids(250) })).claimId, ANYONE);
      // The older one dies later, and is not the newest for that.
      await store.delete({ id: callId(), entryId: old.entry.entryId, tenant: 't', revision: undefined });
      expect(await take()).toEqual(miss(MissReason.TAKEN));
      expect(await store.get({ kind: 'key', key: KEY })).toEqual({ entries: [], miss: MissReason.TAKEN });
      expect(Object.fromEntries((await store.stats({})).misses)).toEqual({
        [MissReason.NEVER_STORED]: 1,
        [MissReason.EXPIRED]: 1,
        [MissReason.TAKEN]: 1,
      });
    });

    test('are forgotten after a while', async () => {
      const { time, put, take } = await opened();
      await put({ ttlMs: 1000 });
      time.now += 1000;
      expect(await take()).toEqual(miss(MissReason.EXPIRED));
      time.now += 24 * 3_600_000;
      expect(await take()).toEqual(miss(MissReason.NEVER_STORED));
    });
  });

  describe('release', () => {
    test('takes what is queued, then the oldest idle; later takers get RELEASED', async () => {
      const { store, put, take, taken, release, key } = await opened();
      const a = await put(key('a'));
      const b = await put(key('b'));
      const c = await put(key('c'));
      await put({ ...key('d'), instanceId: 'other' });
      await taken(key('a'));
      const queued = await put(key('e'));
      await store.delete({ id: callId(), entryId: queued.entry.entryId, tenant: 't', revision: undefined });
      const got = await release({ max: 2 });
      expect(got.map(({ entry }) => entry.entryId)).toEqual([b.entry.entryId, queued.entry.entryId]);
      expect(got.map(({ matchedTokens, handle }) => [matchedTokens, ...handle])).toEqual([
        [0, 1, 2, 3],
        [0, 1, 2, 3],
      ]);
      expect(await take(key('b'))).toEqual(miss(MissReason.RELEASED));
      expect((await release({ max: 100 })).map(({ entry }) => entry.entryId)).toEqual([c.entry.entryId]);
      expect(await release({ max: 100 })).toEqual([]);
      expect((await store.get({ kind: 'key', key: { ...KEY, conversationId: 'a' } })).entries[0]).toMatchObject({
        entryId: a.entry.entryId,
        claimed: true,
      });
    });

    test('can be kept to what is queued', async () => {
      const { put, take, release, key } = await opened();
      await put(key('a'));
      await put(key('b'));
      await take({ ...key('b'), prompt: ids(300, 5000) });
      const got = await release({ max: 100, queuedOnly: true });
      expect(got.map(({ entry }) => entry.key.conversationId)).toEqual(['b']);
      expect((await take(key('a'))).kind).toBe('taken');
    });

    test('spares conversations that go on, as long as they are young and there are others', async () => {
      const { time, put, taken, store, release, key } = await opened();
      const named = async (spareAfterHitMs: number, max = 1) =>
        (await release({ max, spareAfterHitMs })).map(({ entry }) => entry.key.conversationId);
      for (const name of ['old', 'older', 'young']) {
        await put({ ...key(name), afterHit: name !== 'older' });
        time.now += 1000;
      }
      await put(key('one-turn'));
      await put({ ...key('last'), afterHit: true });
      // Ages: 3000, 2000, 1000, 0, 0.
      expect(await named(3000)).toEqual(['old']);
      expect(await named(1500)).toEqual(['older']);
      // Given and put back it is what it was.
      const { claimId, entry } = await taken(key('young'));
      expect(entry.afterHit).toBe(true);
      await store.release(claimId, ANYONE);
      expect(await named(1001)).toEqual(['one-turn']);
      await put(key('two-turn'));
      expect(await named(60_000, 2)).toEqual(['young', 'two-turn']);
      expect(await named(60_000, 2)).toEqual(['last']);
    });

    test('put back waits in the queue, committed is gone', async () => {
      const { time, store, put, take, release } = await opened();
      await put();
      const [first] = await release();
      expect(await store.release(first!.claimId, ANYONE)).toMatchObject({ claimed: false });
      expect(await take()).toEqual(miss(MissReason.RELEASED));
      expect(await store.stats({})).toMatchObject({ entries: 0, releaseQueue: 1 });
      const call = { id: callId('x'), instanceId: 'd', max: 1, queuedOnly: false, deadlineMs: 1000 };
      const [second] = await store.takeForRelease(call);
      expect((await store.takeForRelease(call))[0]?.claimId).toBe(second?.claimId);
      time.now += 1000;
      await refused(store.release(second!.claimId, ANYONE), 'CLAIM_SPENT');
      expect(await release()).toEqual([]);
      expect(await store.stats({})).toMatchObject({ entries: 0, claims: 0, releaseQueue: 0, owners: [] });
    });

    test('tells listeners of queues that grew', async () => {
      const { store, put, take, release, key } = await opened();
      const heard: [string, number][] = [];
      const stop = store.onReleasable((instanceId, queued) => void heard.push([instanceId, queued]));
      await put(key('a'));
      await put({ ...key('a'), tokens: ids(100) });
      await put({ ...key('b'), instanceId: 'd2' });
      expect(heard).toEqual([]);
      await take({ ...key('a'), prompt: ids(300, 5000) });
      await take({ ...key('b'), prompt: ids(300, 5000) });
      expect(heard).toEqual([
        ['d', 2],
        ['d2', 1],
      ]);
      const [taken] = await release();
      await store.release(taken!.claimId, ANYONE);
      expect(heard.at(-1)).toEqual(['d', 2]);
      stop();
      await put({ ...key('c') });
      await take({ ...key('c'), prompt: ids(300, 5000) });
      expect(heard).toHaveLength(3);
    });

    test('queues nothing past its time', async () => {
      const { time, put, take, release } = await opened();
      await put({ ttlMs: 1000 });
      await take({ prompt: ids(300, 5000) });
      time.now += 1000;
      expect(await release()).toEqual([]);
      expect(await take()).toEqual(miss(MissReason.RELEASED));
    });
  });

  describe('changes', () => {
    async function watched() {
      const run = await opened();
      const seen: string[] = [];
      let newest = 0n;
      const stop = run.store.onChange((change) => {
        expect(change.revision).toBeGreaterThan(newest);
        newest = change.revision;
        if (change.kind === 'upserted') {
          expect(change.entry.revision).toBe(change.revision);
          seen.push(`${change.entry.key.conversationId} ${change.entry.claimed ? 'claimed' : 'idle'}`);
        } else if (change.kind === 'removed') {
          seen.push(`${change.conversationId} ${reasonName(change.reason)}`);
        }
      });
      return { ...run, stop, seen };
    }
    const of = (conversationId: string) => ({ key: { ...KEY, conversationId } });

    test('are told in order: stored, claimed, put back, taken, released, expired, lost', async () => {
      const { store, time, put, take, taken, stop, seen } = await watched();
      await put(of('a'));
      const first = await taken(of('a'));
      await store.release(first.claimId, ANYONE);
      await store.commit((await taken(of('a'))).claimId, ANYONE);
      const { entry } = await put(of('b'));
      await store.delete({ id: callId(), entryId: entry.entryId, tenant: undefined, revision: undefined });
      await put({ ...of('c'), ttlMs: 1000 });
      time.now += 1000;
      await take(of('c'));
      await put({ ...of('e'), instanceId: 'gone' });
      await store.invalidateOwner({ id: callId(), instanceId: 'gone', keep: () => false });
      await put(of('f'));
      await store.takeForRelease({ id: callId(), instanceId: 'd', max: 9, queuedOnly: false, deadlineMs: 1000 });
      await expect
        .poll(() => seen)
        .toEqual([
          ...['a idle', 'a claimed', 'a idle', 'a claimed', 'a TAKEN'],
          ...['b idle', 'b RELEASED', 'c idle', 'c EXPIRED', 'e idle', 'e OWNER_GONE', 'f idle', 'f RELEASED'],
        ]);
      stop();
      await put(of('g'));
      expect(seen.at(-1)).toBe('f RELEASED');
      await store[Symbol.asyncDispose]();
    });

    test('tell what is over by itself, without a call', async () => {
      const { store, time, put, seen } = await watched();
      await put({ ...of('a'), ttlMs: 1000 });
      time.now += 1000;
      await expect.poll(() => seen, { timeout: 10_000 }).toEqual(['a idle', 'a EXPIRED']);
      await store[Symbol.asyncDispose]();
    });
  });

  describe('owners', () => {
    const drop = (store: KvStore, keep: number | undefined, id = callId()) =>
      store.invalidateOwner({ id, instanceId: 'd', keep: ({ generation }) => generation === keep });

    test('entries of other lives are dropped, their claims with them, and nothing is queued', async () => {
      const { store, put, take, taken, release, key } = await opened();
      await put(key('a'));
      await put(key('b'));
      await put({ ...key('c'), generation: 2 });
      await put({ ...key('d'), instanceId: 'other' });
      await put(key('e'));
      await take({ ...key('e'), prompt: ids(300, 5000) });
      const { claimId } = await taken(key('a'));
      const id = callId();
      expect(await drop(store, 2, id)).toEqual({ droppedEntries: 1, droppedClaims: 1 });
      expect(await drop(store, 2, id)).toEqual({ droppedEntries: 1, droppedClaims: 1 });
      expect(await drop(store, 2)).toEqual({ droppedEntries: 0, droppedClaims: 0 });
      expect(await take(key('a'))).toEqual(miss(MissReason.OWNER_GONE));
      expect(await take(key('b'))).toEqual(miss(MissReason.OWNER_GONE));
      expect(await release({ max: 100, queuedOnly: true })).toEqual([]);
      expect(await store.release(claimId, ANYONE)).toBeUndefined();
      await store.commit(claimId, ANYONE);
      expect(await take(key('a'))).toEqual(miss(MissReason.OWNER_GONE));
      expect((await take(key('c'))).kind).toBe('taken');
      expect((await take(key('d'))).kind).toBe('taken');
    });

    test('all lives of a gone one', async () => {
      const { store, put } = await opened();
      await put();
      await put({ generation: 2 });
      expect(await drop(store, undefined)).toEqual({ droppedEntries: 2, droppedClaims: 0 });
      expect(await store.stats({})).toMatchObject({ entries: 0, bytes: 0, releaseQueue: 0, owners: [] });
    });
  });

  describe('looking', () => {
    test('claims nothing, and shows a tenant its own', async () => {
      const { store, put, taken } = await opened();
      const { entry } = await put();
      expect(await store.get({ kind: 'key', key: KEY })).toEqual({ entries: [entry], miss: undefined });
      expect((await store.get({ kind: 'entry', entryId: entry.entryId, tenant: undefined })).entries).toEqual([entry]);
      const foreign = await store.get({ kind: 'entry', entryId: entry.entryId, tenant: 'u' });
      expect(foreign).toEqual({ entries: [], miss: MissReason.NEVER_STORED });
      expect((await taken()).entry.entryId).toBe(entry.entryId);
    });

    test('lists pages in the order of ids', async () => {
      const { time, store, put, taken } = await opened();
      for (let index = 0; index < 25; index++) {
        const tenant = index % 2 === 0 ? 't' : 'u';
        await put({ key: { tenant, conversationId: `c${index % 3}` }, ttlMs: index === 4 ? 10 : 1000 });
      }
      await taken({ key: { conversationId: 'c0' } });
      time.now += 10;
      const seen: string[] = [];
      let after: string | undefined;
      do {
        const page = await store.list({ filter: { tenant: 't' }, after, size: 5 });
        expect(page.entries.length).toBeLessThanOrEqual(5);
        expect(page.entries.every(({ key }) => key.tenant === 't')).toBe(true);
        seen.push(...page.entries.map(({ entryId }) => entryId));
        after = page.next;
      } while (after !== undefined);
      expect(seen).toHaveLength(12);
      expect(seen).toEqual([...seen].sort());
      const all = await store.list({ filter: {}, after: undefined, size: 1000 });
      expect(all.entries.filter(({ claimed }) => claimed)).toHaveLength(1);
      expect(all.next).toBeUndefined();
      const some = { tenant: 'u', instanceId: 'd', conversationId: 'c1' };
      expect((await store.list({ filter: some, after: undefined, size: 1000 })).entries).toHaveLength(4);
      expect((await store.stats(some)).entries).toBe(4);
      await refused(store.list({ filter: {}, after: 'e-run2-000000001', size: 5 }), 'PAGE_TOKEN_INVALID');
    });

    test('counts by owner what the entries pin', async () => {
      const { store, put, taken, take, key } = await opened();
      await put({ ...key('a'), storedTokens: 100 });
      await put({ ...key('b'), storedTokens: 17, tokens: ids(64) });
      await put({ ...key('c'), instanceId: 'd2', storedTokens: 32, tokens: ids(64) });
      await put({ key: { tenant: 'u' }, instanceId: 'd2', storedTokens: 16, tokens: ids(64) });
      await taken(key('a'));
      await take({ ...key('b'), prompt: ids(64, 900), minTokens: 1 });
      const owners = [
        { instanceId: 'd', entries: 1, pinnedBlocks: 9 },
        { instanceId: 'd2', entries: 2, pinnedBlocks: 3 },
      ];
      expect(await store.stats({})).toMatchObject({ entries: 3, claims: 1, releaseQueue: 1, owners });
      expect(await store.stats({ tenant: 't' })).toMatchObject({
        entries: 2,
        claims: 1,
        releaseQueue: 1,
        puts: 3,
        takes: 1,
        owners: [owners[0], { instanceId: 'd2', entries: 1, pinnedBlocks: 2 }],
      });
      expect(await store.stats({ instanceId: 'd' })).toMatchObject({ entries: 1, owners: [owners[0]] });
      expect(await store.stats({ tenant: 'v' })).toMatchObject({ entries: 0, puts: 0, owners: [] });
    });

    test('deletes into the release queue, what is idle and its own', async () => {
      const { store, put, taken, take } = await opened();
      const { entryId, revision } = (await put()).entry;
      const call = { id: callId(), entryId, tenant: 't', revision: undefined };
      expect(await store.delete({ ...call, tenant: 'u' })).toBe(false);
      await refused(store.delete({ ...call, id: callId(), revision: revision + 1n }), 'REVISION_MISMATCH');
      const claim = await taken();
      await refused(store.delete({ ...call, id: callId() }), 'ENTRY_CLAIMED');
      await store.release(claim.claimId, ANYONE);
      const last = { ...call, id: callId() };
      expect(await store.delete(last)).toBe(true);
      expect(await store.delete(last)).toBe(true);
      expect(await store.delete({ ...last, id: callId() })).toBe(false);
      expect(await take()).toEqual(miss(MissReason.RELEASED));
      expect((await store.stats({})).releaseQueue).toBe(1);
    });
  });
});

interface TakeParts
  extends Partial<Pick<TakeCall, 'minTokens' | 'keepTokens' | 'compatGroup' | 'deadlineMs' | 'precondition'>> {
  readonly key?: Partial<StoreKey>;
  /** Null: unverified. */
  readonly prompt?: readonly number[] | null;
}

function takeCall({ key, prompt = ids(300), ...rest }: TakeParts = {}): TakeCall {
  const full = { ...KEY, ...key };
  const prove = prompt === null ? {} : { prove: proofOf(prompt, full) };
  return { id: callId(), key: full, minTokens: 64, compatGroup: '', deadlineMs: 120_000, ...prove, ...rest };
}

function verbs(store: KvStore) {
  const put = (parts: EntryParts = {}, rest: Partial<PutCall> = {}) =>
    store.put({ id: callId(), entry: newEntry(parts), derivedKey: false, ...rest });
  const take = (parts: TakeParts = {}) => store.take(takeCall(parts));
  return {
    put,
    take,
    taken: async (parts: TakeParts = {}) => takenOf(await take(parts)),
    release: (rest: { max?: number; queuedOnly?: boolean; spareAfterHitMs?: number } = {}) =>
      store.takeForRelease({ id: callId(), instanceId: 'd', max: 1, queuedOnly: false, deadlineMs: 1000, ...rest }),
    key: (conversationId: string) => ({ key: { conversationId } }),
    storedBytes: async (parts: EntryParts) => {
      await put(parts);
      return (await store.stats({})).bytes;
    },
  };
}

function takenOf(result: TakeResult): Taken {
  if (result.kind === 'miss') throw new Error(`a miss: ${result.reason}`);
  return result.taken;
}

function miss(reason: MissReason, matchedTokens = 0): TakeResult {
  return { kind: 'miss', reason, matchedTokens };
}

async function refused(promise: Promise<unknown>, reason: string, metadata: object = {}): Promise<void> {
  await expect(promise).rejects.toMatchObject({ reason, metadata });
}
