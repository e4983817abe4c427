import { describe, expect, test } from 'vitest';
import { MissReason } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import { sizeOf } from '../../src/stores/entry.ts';
import { MEMORY_BOUNDS, MemoryStore } from '../../src/stores/memory/store.ts';
import type { NewEntry, StoreKey, Taken } from '../../src/stores/store.ts';
import { callId, ids, limits, newEntry, proofOf, type TestTime } from '../support/kv-store.ts';
import { seeded, weighted } from '../support/seeded.ts';

const LIMITS = limits({ entriesPerKey: 3, entriesPerDerivedKey: 6, totalBytes: 9_000 });
const QUEUE = 6;
const RUNS = 24;
const REPLAY_MS = 600_000;

type State = 'idle' | 'claimed' | 'queued' | 'releasing' | 'dead';

interface ModelEntry {
  readonly id: string;
  readonly key: string;
  readonly entry: NewEntry;
  readonly tokens: readonly number[] | null;
  readonly bytes: number;
  readonly expires: number;
  readonly storedAt: number;
  state: State;
  claim: ModelClaim | undefined;
  reason: MissReason;
}

interface ModelClaim {
  readonly id: string;
  readonly handle: number;
  readonly entry: ModelEntry;
  readonly forRelease: boolean;
  readonly deadline: number;
  state: 'open' | 'committed' | 'released' | 'dropped';
}

/** The store as one would say it: a list of all entries there ever were, looked through from end to end. */
class Model {
  readonly entries: ModelEntry[] = [];
  readonly claims = new Map<string, ModelClaim>();
  evictions = 0;

  settle(now: number): void {
    for (const claim of this.claims.values()) {
      const { entry } = claim;
      const holds = entry.claim === claim;
      if (claim.state === 'open' && claim.deadline <= now && !(holds && entry.expires < claim.deadline)) {
        this.commit(claim);
      }
    }
    for (const entry of this.entries) {
      if (entry.state !== 'dead' && entry.expires <= now) this.kill(entry, MissReason.EXPIRED);
    }
    for (const claim of this.claims.values()) if (claim.state === 'open' && claim.deadline <= now) this.commit(claim);
  }

  kill(entry: ModelEntry, reason: MissReason): void {
    if (isLive(entry)) entry.reason = reason;
    entry.state = 'dead';
    entry.claim = undefined;
  }

  commit(claim: ModelClaim): void {
    claim.state = 'committed';
    if (claim.entry.claim === claim) this.kill(claim.entry, MissReason.TAKEN);
  }

  queue(entry: ModelEntry): void {
    if (isLive(entry)) entry.reason = MissReason.RELEASED;
    entry.state = 'queued';
    entry.claim = undefined;
    const queued = this.entries.filter(({ state }) => state === 'queued');
    if (queued.length > QUEUE) this.kill(queued.reduce(sooner), MissReason.RELEASED);
  }

  live(key?: string): ModelEntry[] {
    return this.entries.filter((entry) => isLive(entry) && (key === undefined || entry.key === key));
  }

  bytes(states: readonly State[]): number {
    return this.entries.reduce((sum, { state, bytes }) => sum + (states.includes(state) ? bytes : 0), 0);
  }

  /** Ids of displaced entries of the tenant, or the reason of the refusal. */
  put(entry: NewEntry, derived: boolean, replaced: ModelEntry | undefined, absent: boolean): string[] | string {
    const live = this.live(keyText(entry.key));
    if (absent && live.length > 0) return 'ENTRY_EXISTS';
    const most = derived ? LIMITS.entriesPerDerivedKey : LIMITS.entriesPerKey;
    const rest = live.filter((other) => other !== replaced);
    const idle = rest.filter(({ state }) => state === 'idle');
    if (rest.length - idle.length >= most) return 'LIMIT_EXCEEDED';
    const bytes = sizeOf(entry);
    if (this.bytes(['claimed']) + bytes > LIMITS.totalBytes) return 'LIMIT_EXCEEDED';
    const gone: ModelEntry[] = replaced === undefined ? [] : [replaced];
    if (replaced !== undefined) this.queue(replaced);
    for (let left = rest.length; left >= most; left--) {
      const oldest = idle.shift();
      if (oldest === undefined) break;
      gone.push(oldest);
      this.evictions += 1;
      this.queue(oldest);
    }
    while (this.bytes(['idle', 'claimed']) + bytes > LIMITS.totalBytes) {
      const next = this.entries.filter(({ state }) => state === 'idle').reduce(sooner);
      gone.push(next);
      this.evictions += 1;
      this.queue(next);
    }
    return gone.filter((other) => other.entry.key.tenant === entry.key.tenant).map(({ id }) => id);
  }

  /** The entry to give, or the reason of the miss and the tokens that match. */
  choose(
    key: string,
    prompt: readonly number[] | null,
    min: number,
    group: string,
    only: ModelEntry | undefined,
  ): { given: ModelEntry; matched: number } | { reason: MissReason; matched: number } {
    const seen = this.live(key)
      .filter((entry) => only === undefined || entry === only)
      .filter(({ entry }) => group === '' || ['', group].includes(entry.owner.compatGroup))
      .filter(({ tokens }) => prompt === null || tokens !== null);
    const size = ({ entry, tokens }: ModelEntry) =>
      prompt === null ? entry.storedTokens : Math.min(entry.storedTokens, tokens?.length ?? 0);
    const compared = seen
      .filter((entry) => entry.state === 'idle' && size(entry) >= min)
      .map((entry) => ({
        given: entry,
        matched: prompt === null ? 0 : proven(entry.tokens ?? [], prompt, size(entry)),
      }));
    const good = prompt === null ? compared.slice(-1) : compared.filter(({ matched }) => matched >= min);
    if (good.length > 0) {
      return good.reduce((best, other) => {
        const [a, b] = [best.given.entry.storedTokens, other.given.entry.storedTokens];
        return other.matched > best.matched || (other.matched === best.matched && b <= a) ? other : best;
      });
    }
    if (compared.length > 0) {
      for (const { given } of compared.toReversed()) this.queue(given);
      return { reason: MissReason.PREFIX_MISMATCH, matched: Math.max(...compared.map(({ matched }) => matched)) };
    }
    const known = this.entries.filter((entry) => entry.key === key && (!isLive(entry) || seen.includes(entry))).at(-1);
    if (known === undefined) return { reason: MissReason.NEVER_STORED, matched: 0 };
    if (!isLive(known)) return { reason: known.reason, matched: 0 };
    return { reason: known.state === 'claimed' ? MissReason.TAKEN : MissReason.TOO_SMALL, matched: 0 };
  }

  forRelease(instanceId: string, max: number, queuedOnly: boolean, isSpared: (entry: ModelEntry) => boolean) {
    const of = (state: State) =>
      this.entries.filter((entry) => entry.state === state && entry.entry.owner.instanceId === instanceId);
    const idle = queuedOnly ? [] : of('idle');
    const chosen = [...of('queued'), ...idle.filter((entry) => !isSpared(entry)), ...idle.filter(isSpared)].slice(
      0,
      max,
    );
    return this.entries.filter((entry) => chosen.includes(entry));
  }

  claim(entry: ModelEntry, id: string, deadline: number, forRelease: boolean): void {
    if (forRelease && isLive(entry)) entry.reason = MissReason.RELEASED;
    entry.state = forRelease ? 'releasing' : 'claimed';
    const claim: ModelClaim = { id, handle: handleOf(entry.entry.handle), entry, forRelease, deadline, state: 'open' };
    entry.claim = claim;
    this.claims.set(id, claim);
  }
}

/** Who was given each handle: whatever the model says, nobody gets one that another claim still holds or has used. */
class Watchdog {
  readonly #holder = new Map<number, string>();

  given(taken: Taken): void {
    const handle = handleOf(taken.handle);
    const holder = this.#holder.get(handle);
    if (holder !== undefined && holder !== taken.claimId) {
      throw new Error(`handle ${handle} was given to ${holder} and to ${taken.claimId}`);
    }
    this.#holder.set(handle, taken.claimId);
  }

  putBack(claim: ModelClaim): void {
    if (this.#holder.get(claim.handle) === claim.id) this.#holder.delete(claim.handle);
  }
}

describe('memory store against the model', () => {
  const reached = { runs: 0, puts: 0, takes: 0, evictions: 0, words: new Set<MissReason | string>() };

  // Many short runs: the model goes through all entries there ever were, so a long one costs with its square.
  test.each(Array.from({ length: RUNS }, (_, index) => index + 1))(
    'answers the same, seed %i',
    { timeout: 60_000 },
    async (seed) => {
      const counts = await run(seed, 1000);
      reached.runs += 1;
      reached.puts += counts.puts;
      reached.takes += counts.takes;
      reached.evictions += counts.evictions;
      for (const word of [...counts.reasons.keys(), ...counts.refusals]) reached.words.add(word);
    },
  );

  test('the runs got somewhere', ({ skip }) => {
    if (reached.runs < RUNS) skip('only some runs were chosen');
    expect(reached.puts).toBeGreaterThan(4000);
    expect(reached.takes).toBeGreaterThan(1000);
    expect(reached.evictions).toBeGreaterThan(500);
    const { NEVER_STORED, EXPIRED, TAKEN, RELEASED, PREFIX_MISMATCH, OWNER_GONE, TOO_SMALL } = MissReason;
    const refusals = ['ENTRY_EXISTS', 'REVISION_MISMATCH', 'LIMIT_EXCEEDED', 'CLAIM_SPENT', 'CLAIM_NOT_FOUND'];
    const all = [NEVER_STORED, EXPIRED, TAKEN, RELEASED, PREFIX_MISMATCH, OWNER_GONE, TOO_SMALL, ...refusals];
    expect(reached.words).toEqual(new Set([...all, 'ENTRY_CLAIMED', 'IDEMPOTENCY_KEY_REUSED']));
  });
});

async function run(seed: number, steps: number) {
  const random = seeded(seed);
  const pick = <T>(list: readonly T[]): T => list[Math.floor(random() * list.length)] as T;
  const chance = (share: number) => random() < share;
  const time: TestTime = { now: 0 };
  const bounds = {
    ...MEMORY_BOUNDS,
    queueEntries: QUEUE,
    tombstoneMs: Number.POSITIVE_INFINITY,
    endedClaimMs: Number.POSITIVE_INFINITY,
    // Nothing is cleared away but what a call looks at, so that every answer has to see past what is due.
    sweep: 0,
  };
  const store = new MemoryStore({ now: () => time.now, limits: LIMITS, runId: `s${seed}` }, bounds);
  const model = new Model();
  const watchdog = new Watchdog();
  const answers: { at: number; again: () => Promise<void>; other: () => Promise<unknown> }[] = [];
  const counts = {
    puts: 0,
    takes: 0,
    evictions: 0,
    reasons: new Map<MissReason, number>(),
    refusals: new Set<string>(),
  };
  let lastHandle = 0;
  let step = 0;

  const keyOf = (): StoreKey => ({
    tenant: pick(['t', 'u']),
    model: 'm',
    adapter: '',
    cacheSalt: '',
    conversationId: pick(['a', 'b', 'c']),
  });
  /** A list out of a small tree: all begin alike, and branch at one of a few places. */
  const tokensOf = (): number[] => {
    const branch = pick([0, 0, 0, 1, 2]);
    const at = pick([0, 3, 64, 70, 130]);
    return ids(pick([0, 20, 64, 100, 128, 190, 192, 250])).map((id) =>
      branch > 0 && id >= at ? id + 1000 * branch : id,
    );
  };
  const outcome = async <T>(promise: Promise<T>): Promise<T | string> => {
    try {
      return await promise;
    } catch (error) {
      if (!(error instanceof BatonError)) throw error;
      counts.refusals.add(error.reason);
      return error.reason;
    }
  };
  /** A real or made-up precondition on an entry of the key, and whether the store must refuse it. */
  const preconditionOf = async (key: string) => {
    const known = model.entries.filter((entry) => entry.key === key).slice(-6);
    if (known.length === 0 || chance(0.8)) return undefined;
    const entry = pick(known);
    const seen = (await store.get({ kind: 'entry', entryId: entry.id, tenant: undefined })).entries[0];
    expect(seen === undefined).toBe(!isLive(entry));
    const right = chance(0.7) && seen !== undefined;
    const at = { entryId: entry.id, revision: right ? seen.revision : 999_999_999n };
    return { at, entry, refused: !right || entry.state !== 'idle' };
  };

  const operations: readonly [number, () => Promise<void>][] = [
    [
      30,
      async () => {
        const tokens = chance(0.1) ? null : tokensOf();
        const key = keyOf();
        lastHandle += 1;
        const entry = newEntry({
          key,
          tokens,
          storedTokens: Math.max(1, (tokens?.length ?? 100) + pick([-1, 0, 0, 2])),
          instanceId: pick(['d1', 'd2', 'd3']),
          generation: pick([1, 1, 2]),
          compatGroup: pick(['', '', 'x', 'y']),
          handle: new Uint8Array(Uint32Array.of(lastHandle).buffer),
          // The fraction makes every expiry a different one, so that "next to expire" is one entry.
          ttlMs: pick([1000, 20_000, 90_000, 450_000]) + step / 65_536,
          afterHit: chance(0.4),
        });
        const absent = chance(0.1);
        const condition = absent ? undefined : await preconditionOf(keyText(key));
        const derived = chance(0.2);
        const id = callId();
        const precondition = absent ? ('absent' as const) : condition?.at;
        const call = { id, entry, derivedKey: derived, ...(precondition === undefined ? {} : { precondition }) };
        const got = await outcome(store.put(call));
        const want = condition?.refused ? 'REVISION_MISMATCH' : model.put(entry, derived, condition?.entry, absent);
        if (typeof got === 'string' || typeof want === 'string') {
          expect(got).toBe(want);
          return;
        }
        expect(got.displaced).toEqual(want);
        expect(got.entry).toMatchObject({ remainingMs: entry.ttlMs, ageMs: 0, claimed: false, key });
        counts.puts += 1;
        model.entries.push({
          id: got.entry.entryId,
          key: keyText(key),
          entry,
          tokens,
          bytes: sizeOf(entry),
          expires: time.now + entry.ttlMs,
          storedAt: time.now,
          state: 'idle',
          claim: undefined,
          reason: MissReason.UNSPECIFIED,
        });
        answers.push({
          at: time.now,
          again: async () => expect((await store.put(call)).entry.entryId).toBe(got.entry.entryId),
          other: () => store.put({ ...call, id: callId(id.key, 'other') }),
        });
      },
    ],
    [
      30,
      async () => {
        const key = keyOf();
        const prompt = chance(0.1) ? null : tokensOf();
        const condition = await preconditionOf(keyText(key));
        const [minTokens, compatGroup, deadlineMs] = [
          pick([1, 64, 64, 100]),
          pick(['', '', 'x']),
          pick([500, 30_000, 200_000]),
        ];
        const id = callId();
        const call = {
          id,
          key,
          ...(prompt === null ? {} : { prove: proofOf(prompt, key) }),
          minTokens,
          compatGroup,
          deadlineMs,
          ...(condition === undefined ? {} : { precondition: condition.at }),
        };
        const got = await outcome(store.take(call));
        if (condition?.refused || typeof got === 'string') {
          expect(got).toBe(condition?.refused ? 'REVISION_MISMATCH' : '');
          return;
        }
        const want = model.choose(keyText(key), prompt, minTokens, compatGroup, condition?.entry);
        if (got.kind === 'miss' || 'reason' in want) {
          expect(got).toEqual(
            'reason' in want ? { kind: 'miss', reason: want.reason, matchedTokens: want.matched } : want.given.id,
          );
          if (got.kind === 'miss') counts.reasons.set(got.reason, (counts.reasons.get(got.reason) ?? 0) + 1);
        } else {
          const { taken } = got;
          expect([taken.entry.entryId, taken.matchedTokens]).toEqual([want.given.id, want.matched]);
          watchdog.given(taken);
          counts.takes += 1;
          model.claim(want.given, taken.claimId, time.now + deadlineMs, false);
        }
        answers.push({
          at: time.now,
          again: async () => {
            const again = await store.take(call);
            const claim = got.kind === 'taken' ? model.claims.get(got.taken.claimId) : undefined;
            if (got.kind === 'miss') expect(again).toEqual(got);
            else if (claim?.state === 'released')
              expect(again).toMatchObject({ kind: 'miss', reason: MissReason.TAKEN });
            else if (again.kind === 'taken') {
              expect(again.taken.claimId).toBe(got.taken.claimId);
              watchdog.given(again.taken);
            } else throw new Error('a replayed take gave another answer');
          },
          other: () => store.take({ ...call, id: callId(id.key, 'other') }),
        });
      },
    ],
    [
      25,
      async () => {
        const claims = [...model.claims.values()];
        if (claims.length === 0) return;
        const claim = chance(0.7) ? pick(claims.slice(-8)) : pick(claims);
        const mine = chance(0.95);
        const guard = () => mine;
        const done = claim.state;
        if (chance(0.5)) {
          const got = (await outcome(store.commit(claim.id, guard))) ?? 'done';
          expect(got).toBe(!mine || done === 'released' ? 'CLAIM_NOT_FOUND' : 'done');
          if (mine && done === 'open') model.commit(claim);
          return;
        }
        const got = await outcome(store.release(claim.id, guard));
        if (!mine) expect(got).toBe('CLAIM_NOT_FOUND');
        else if (done === 'committed' || (done === 'dropped' && claim.deadline <= time.now)) {
          expect(got).toBe('CLAIM_SPENT');
        } else {
          const { entry } = claim;
          if (done === 'open') {
            claim.state = 'released';
            watchdog.putBack(claim);
            if (entry.claim === claim) {
              entry.claim = undefined;
              if (claim.forRelease) model.queue(entry);
              else entry.state = 'idle';
            }
          }
          const back = entry.state === 'idle' || entry.state === 'queued' ? entry.id : undefined;
          expect(typeof got === 'string' ? got : got?.entryId).toBe(back);
        }
      },
    ],
    [
      5,
      async () => {
        const [instanceId, max, queuedOnly, deadlineMs] = [pick(['d1', 'd2']), pick([1, 3]), chance(0.5), 20_000];
        const spareAfterHitMs = pick([0, 1000, 30_000]);
        const call = { id: callId(), instanceId, max, queuedOnly, spareAfterHitMs, deadlineMs };
        const got = await store.takeForRelease(call);
        const isSpared = ({ entry, storedAt }: ModelEntry) =>
          entry.afterHit === true && time.now - storedAt < spareAfterHitMs;
        const want = model.forRelease(instanceId, max, queuedOnly, isSpared);
        expect(got.map(({ entry }) => entry.entryId)).toEqual(want.map(({ id }) => id));
        for (const [index, taken] of got.entries()) {
          watchdog.given(taken);
          const entry = want[index];
          if (entry !== undefined) model.claim(entry, taken.claimId, time.now + deadlineMs, true);
        }
      },
    ],
    [
      5,
      async () => {
        if (model.entries.length === 0) return;
        const entry = chance(0.5) ? pick(model.entries.slice(-10)) : pick(model.entries);
        const tenant = pick([undefined, 't', 'u']);
        const got = await outcome(store.delete({ id: callId(), entryId: entry.id, tenant, revision: undefined }));
        const there = isLive(entry) && (tenant === undefined || tenant === entry.entry.key.tenant);
        expect(got).toBe(there && entry.claim !== undefined ? 'ENTRY_CLAIMED' : there);
        if (got === true) model.queue(entry);
      },
    ],
    [
      1,
      async () => {
        const [instanceId, current] = [pick(['d1', 'd2', 'd3']), pick([1, 1, 2, undefined])];
        const got = await store.invalidateOwner({
          id: callId(),
          instanceId,
          keep: ({ generation }) => generation === current,
        });
        const gone = model.entries.filter(
          ({ state, entry: { owner } }) =>
            state !== 'dead' && owner.instanceId === instanceId && owner.life.generation !== current,
        );
        expect(got).toEqual({
          droppedEntries: gone.filter(({ state }) => state === 'idle').length,
          droppedClaims: gone.filter(({ claim }) => claim !== undefined).length,
        });
        for (const entry of gone) {
          if (entry.claim !== undefined) entry.claim.state = 'dropped';
          model.kill(entry, MissReason.OWNER_GONE);
        }
      },
    ],
    [
      4,
      async () => {
        const tenant = pick(['t', 'u']);
        const page = await store.list({ filter: { tenant }, after: undefined, size: 1000 });
        const want = model.live().filter(({ entry }) => entry.key.tenant === tenant);
        expect(page.entries.map(({ entryId, claimed }) => [entryId, claimed])).toEqual(
          want.map(({ id, claim }) => [id, claim !== undefined]),
        );
        const some = await store.stats({ tenant });
        expect([some.entries, some.bytes]).toEqual([want.length, want.reduce((sum, { bytes }) => sum + bytes, 0)]);
        bounds.sweep = 64;
        const all = await store.stats({});
        bounds.sweep = 0;
        expect(all).toMatchObject({
          entries: model.live().length,
          claims: [...model.claims.values()].filter(({ state }) => state === 'open').length,
          bytes: model.bytes(['idle', 'claimed']),
          releaseQueue: model.entries.filter(({ state }) => state === 'queued').length,
          puts: counts.puts,
          takes: counts.takes,
          evictions: model.evictions,
        });
        expect(all.misses).toEqual(counts.reasons);
        const pinned = model.entries.filter(({ state }) => state !== 'dead');
        expect(all.owners.reduce((sum, owner) => sum + owner.pinnedBlocks, 0)).toBe(
          pinned.reduce((sum, { entry }) => sum + entry.blocks, 0),
        );
      },
    ],
    [
      4,
      async () => {
        if (answers.length === 0) return;
        const { at, again, other } = chance(0.7) ? pick(answers.slice(-20)) : pick(answers);
        if (time.now - at >= REPLAY_MS) return;
        await again();
        if (chance(0.5)) expect(await outcome(other())).toBe('IDEMPOTENCY_KEY_REUSED');
      },
    ],
    [
      8,
      async () => {
        time.now += pick([1, 400, 1000, 10_000, 60_000]);
      },
    ],
  ];

  const draw = weighted(random, operations);
  for (step = 1; step <= steps; step++) {
    model.settle(time.now);
    try {
      await draw()();
    } catch (error) {
      throw new Error(`seed ${seed}, step ${step}: ${error instanceof Error ? error.message : error}`, {
        cause: error,
      });
    }
  }
  counts.evictions = model.evictions;
  return counts;
}

function isLive({ state }: ModelEntry): boolean {
  return state === 'idle' || state === 'claimed';
}

function sooner(a: ModelEntry, b: ModelEntry): ModelEntry {
  return b.expires < a.expires ? b : a;
}

function keyText(key: StoreKey): string {
  return JSON.stringify([key.tenant, key.conversationId]);
}

function handleOf(bytes: Uint8Array): number {
  return new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
}

/** Equal whole blocks of 64, then equal ids of the stored tail. */
function proven(stored: readonly number[], prompt: readonly number[], limit: number): number {
  const blocks = Math.floor(stored.length / 64) * 64;
  let equal = 0;
  while (equal < blocks && String(stored.slice(equal, equal + 64)) === String(prompt.slice(equal, equal + 64)))
    equal += 64;
  if (equal === blocks) while (equal < stored.length && stored[equal] === prompt[equal]) equal++;
  return Math.min(equal, limit);
}
