import { readFile } from 'node:fs/promises';
import { MissReason } from '../../../gen/baton/v1/kv_cache_store_pb.ts';
import { BatonError } from '../../core/errors.ts';
import { AgingMap } from '../aging-map.ts';
import { type Choice, chooseSlot } from '../choose-entry.ts';
import { passesFilter, sizeOf } from '../entry.ts';
import { FilteredCounts } from '../filtered-counts.ts';
import { MEMORY_BOUNDS } from '../memory/store.ts';
import { reasonOf } from '../miss-reason.ts';
import {
  claimNotFound,
  claimSpent,
  entryClaimed,
  entryExists,
  idempotencyKeyReused,
  limitExceeded,
  pageTokenInvalid,
  quotaExceeded,
  revisionMismatch,
  storeUnavailable,
} from '../refusals.ts';
import type {
  CallId,
  ChangeListener,
  ClaimGuard,
  DeleteCall,
  EntryView,
  GetResult,
  GetSelector,
  InvalidateCall,
  KvStore,
  ListCall,
  ListPage,
  PutCall,
  PutResult,
  ReleasableListener,
  ReleaseCall,
  StoreFilter,
  StoreOptions,
  StoreStats,
  TakeCall,
  Taken,
  TakeResult,
} from '../store.ts';
import { Changes } from './changes.ts';
import { encodeChain, encodeFacts, keyName, replayName } from './codec.ts';
import { Link } from './link.ts';
import type { Reply } from './reply.ts';
import { candidateOf, type LiveRow, rowOf, takenOf, viewOf } from './rows.ts';
import type { Argument } from './script-call.ts';
import type { ScriptName } from './scripts.ts';
import { readCounts, readOwners } from './stats.ts';
import { choose, claimArguments, takeAnswer } from './takes.ts';

/** Looks after which a take gives up against others who take from the same key. */
const MAX_LOOKS = 16;
/** Entries that one step looks at. */
const PAGE = 500;
const NO_BYTES = Buffer.alloc(0);
/** Claims made here whose owners are remembered, which saves a step at their end. */
const KNOWN_CLAIMS = { lifetimeMs: 3_600_000, maxCount: 10_000 };
/** Entries stored here that no take has asked for, which saves it a step; without their handles. */
const STORED = { lifetimeMs: 3_600_000, maxCount: 100_000, maxBytes: 32 * 1024 * 1024 };
/** How often entries of earlier runs are deleted, {@link PAGE} of each kind at a time; milliseconds. */
const CLEAR_EVERY_MS = 1000;

/** Opens the store on a Redis or Valkey server; one that is away is waited for in the background. */
export async function openValkey(options: StoreOptions, bounds = MEMORY_BOUNDS): Promise<ValkeyStore> {
  const { valkey: settings } = options;
  if (settings === undefined) throw new BatonError({ reason: 'INVALID_ARGUMENT', message: 'store.valkey is not set' });
  const [password, ca] = await Promise.all([readOptional(settings.passwordFile), readOptional(settings.caFile)]);
  const link = new Link({
    settings,
    password: password?.trimEnd(),
    ca,
    queueEntries: bounds.queueEntries,
    queueBytes: bounds.queueBytes,
    onNotice: options.onNotice ?? (() => {}),
  });
  await link.open();
  if (link.refusal !== undefined) {
    link.close();
    throw link.refusal;
  }
  return new ValkeyStore(options, link);
}

async function readOptional(file: string | undefined): Promise<string | undefined> {
  return file === undefined ? undefined : readFile(file, 'utf8');
}

/** The store on a server that several store processes share. Each step is one script; see prelude.ts for the data. */
export class ValkeyStore implements KvStore {
  readonly #link: Link;
  readonly #options: StoreOptions;
  readonly #changes: Changes;
  readonly #clearing: NodeJS.Timeout;
  readonly #cleared = new Set<string>();
  readonly #stored = new AgingMap<string, LiveRow>(STORED);
  readonly #claims = new AgingMap<string, Parameters<ClaimGuard>[0]>(KNOWN_CLAIMS);

  constructor(options: StoreOptions, link: Link) {
    this.#options = options;
    this.#link = link;
    this.#changes = new Changes(link);
    this.#changes.start();
    this.#clearing = setInterval(() => void this.#clearEarlier().catch(() => {}), CLEAR_EVERY_MS).unref();
  }

  get runId(): string {
    return this.#link.run;
  }

  async put(call: PutCall): Promise<PutResult> {
    const { entry, precondition } = call;
    const { limits } = this.#options;
    const bytes = sizeOf(entry);
    if (bytes > limits.entryBytes) throw limitExceeded('entry_bytes', limits.entryBytes);
    const { key, owner, chain } = entry;
    const facts = encodeFacts(entry);
    const name = keyName(key);
    const perKey = call.derivedKey
      ? [limits.entriesPerDerivedKey, 'entries_per_derived_key']
      : [limits.entriesPerKey, 'entries_per_key'];
    const reply = await this.#change('put', replayName('put', call.id), [
      call.id.fingerprint,
      name,
      key.tenant,
      owner.instanceId,
      bytes,
      entry.blocks,
      entry.handle.byteLength,
      Math.ceil(entry.ttlMs),
      ...perKey,
      limits.totalBytes,
      limits.tenantEntries,
      limits.tenantBytes,
      ...preconditionArguments(precondition),
      facts,
      entry.handle,
      chain === undefined ? NO_BYTES : encodeChain(chain),
      entry.afterHit === true ? 1 : 0,
    ]);
    const refusal = putRefusal(reply, call);
    if (refusal !== undefined) throw refusal;
    const [entryId = '', revision = '0', storedAt, expiresAt, displaced = ''] = reply.text(3).split('|');
    const { handle, chain: _chain, ttlMs: _ttl, ...about } = entry;
    const row = {
      entryId,
      revision: BigInt(revision),
      storedAt: Number(storedAt),
      expiresAt: Number(expiresAt),
      claimed: false,
      state: 'i',
      // Only compared among the entries of a key, and where there are several a take looks.
      seq: 0,
      bytes,
      facts: { ...about, chainTokens: chain?.tokenCount ?? 0, hasChain: chain !== undefined },
    };
    this.#stored.set(name, { ...candidateOf(row), chain }, this.#options.now(), bytes - handle.byteLength);
    return { entry: viewOf(row, reply.number(1)), displaced: displaced === '' ? [] : displaced.split(',') };
  }

  async take(call: TakeCall): Promise<TakeResult> {
    const replay = replayName('take', call.id);
    const { fingerprint } = call.id;
    const name = keyName(call.key);
    const chains = call.prove === undefined ? 0 : 1;
    let guess = this.#guess(call, name);
    let choice = guess;
    for (let step = 0; step < 2 * MAX_LOOKS; step++) {
      const reply =
        choice === undefined
          ? await this.#change('look', replay, [fingerprint, name, chains])
          : await this.#change('claim', replay, [
              fingerprint,
              call.key.tenant,
              Math.ceil(call.deadlineMs),
              ...claimArguments(choice, guess === undefined ? ['', ''] : [name, chains]),
            ]);
      guess = undefined;
      const answer = takeAnswer(reply, call.id, choice);
      if (answer?.kind === 'taken') {
        const known = { tenant: call.key.tenant, forRelease: false };
        this.#claims.set(answer.taken.claimId, known, this.#options.now());
      }
      if (answer !== undefined) return answer;
      choice = reply.text(0) === 'look' ? choose(call, reply) : undefined;
    }
    throw storeUnavailable('too many others take from this key');
  }

  /**
   * What a look would lead to if the entry stored here last is the only one of its key, as it mostly is. The claim sees
   * whether it is, so that one step does for both.
   */
  #guess(call: TakeCall, name: string): Choice<LiveRow> | undefined {
    const stored = this.#stored.get(name, this.#options.now());
    if (stored === undefined || call.precondition !== undefined) return undefined;
    this.#stored.delete(name);
    const choice = chooseSlot([stored], call, undefined, ({ chain }) => chain);
    return choice.kind === 'given' ? choice : undefined;
  }

  async commit(claimId: string, mayEnd: ClaimGuard): Promise<void> {
    await this.#finish(claimId, 'commit', mayEnd);
  }

  async release(claimId: string, mayEnd: ClaimGuard): Promise<EntryView | undefined> {
    const reply = await this.#finish(claimId, 'release', mayEnd);
    if (reply.text(0) === 'spent') throw claimSpent(claimId);
    return reply.length > 3 ? viewOf(rowOf(reply.list(3)), reply.number(1)) : undefined;
  }

  async #finish(claimId: string, how: 'commit' | 'release', mayEnd: ClaimGuard): Promise<Reply> {
    // Whose a claim is never changes, so nothing can come between the two steps.
    const known = this.#claims.get(claimId, this.#options.now()) ?? (await this.#whoseClaim(claimId));
    if (known === undefined || !mayEnd(known)) throw claimNotFound(claimId);
    const reply = await this.#change('finish', undefined, [claimId, how]);
    if (reply.text(0) === 'none') throw claimNotFound(claimId);
    return reply;
  }

  async #whoseClaim(claimId: string): Promise<Parameters<ClaimGuard>[0] | undefined> {
    const who = await this.#change('finish', undefined, [claimId, 'who']);
    return who.text(0) === 'none' ? undefined : { tenant: who.text(3), forRelease: who.text(4) === '1' };
  }

  async takeForRelease(call: ReleaseCall): Promise<readonly Taken[]> {
    const reply = await this.#change('free', replayName('free', call.id), [
      call.id.fingerprint,
      call.instanceId,
      call.max,
      call.queuedOnly ? 1 : 0,
      Math.ceil(call.deadlineMs),
      Math.ceil(call.spareAfterHitMs ?? 0),
    ]);
    if (reply.text(0) === 'reused') throw idempotencyKeyReused(call.id.key);
    const now = reply.number(1);
    return reply
      .list(3)
      .lists()
      .map((claim) => takenOf(claim, now));
  }

  async get(selector: GetSelector): Promise<GetResult> {
    const reply =
      selector.kind === 'key'
        ? await this.#change('key', undefined, [keyName(selector.key)])
        : await this.#change('entry', undefined, [selector.entryId, ...optional(selector.tenant)]);
    const now = reply.number(1);
    const rows = reply.list(3).lists().map(rowOf);
    if (rows.length > 0) return { entries: rows.toReversed().map((row) => viewOf(row, now)), miss: undefined };
    const why = reply.list(4);
    return { entries: [], miss: why.length === 0 ? MissReason.NEVER_STORED : reasonOf(why.number(1)) };
  }

  async list(call: ListCall): Promise<ListPage> {
    const entries: EntryView[] = [];
    let after = call.after === undefined ? 0 : this.#seqOf(call.after);
    const limit = Math.max(call.size, PAGE);
    const { run } = this.#link;
    const reply = await this.#change('list', undefined, [after, limit]);
    // Ages of one run say nothing in another.
    if (call.after !== undefined && this.#link.run !== run) throw pageTokenInvalid();
    const now = reply.number(1);
    const revision = BigInt(reply.text(3));
    let last: string | undefined;
    for (const item of reply.list(5).lists()) {
      if (entries.length === call.size) return { entries, next: last, revision };
      last = item.text(0);
      after = item.number(6);
      if (!isLiveState(item.text(5))) continue;
      const row = rowOf(item);
      if (passesFilter(row.facts, call.filter)) entries.push(viewOf(row, now));
    }
    return { entries, next: reply.number(4) < limit ? undefined : last, revision };
  }

  async delete(call: DeleteCall): Promise<boolean> {
    const reply = await this.#change('delete', replayName('delete', call.id), [
      call.id.fingerprint,
      call.entryId,
      ...optional(call.tenant),
      ...optional(call.revision?.toString()),
    ]);
    const kind = reply.text(0);
    if (kind === 'reused') throw idempotencyKeyReused(call.id.key);
    if (kind === 'revision') throw revisionMismatch(call.entryId, BigInt(reply.text(3)));
    if (kind === 'claimed') throw entryClaimed(call.entryId);
    return reply.number(3) === 1;
  }

  async invalidateOwner(
    call: InvalidateCall,
  ): Promise<{ readonly droppedEntries: number; readonly droppedClaims: number }> {
    const replay = replayName('invalidate', call.id);
    const fingerprint = call.id.fingerprint;
    let [after, droppedEntries, droppedClaims] = [0, 0, 0];
    for (;;) {
      const page = await this.#change('members', replay, [fingerprint, call.instanceId, after, PAGE]);
      if (page.text(0) !== 'members') return droppedAnswer(page, call.id);
      const rows = page.list(3).lists().map(rowOf);
      const leaving = rows.filter(({ facts }) => !call.keep(facts.owner.life)).map(({ entryId }) => entryId);
      if (leaving.length > 0) {
        const dropped = await this.#change('drop', undefined, leaving);
        droppedEntries += dropped.number(3);
        droppedClaims += dropped.number(4);
      }
      after = rows.at(-1)?.seq ?? after;
      if (rows.length < PAGE) break;
    }
    const reply = await this.#change('record', replay, [fingerprint, `${droppedEntries}|${droppedClaims}`]);
    return droppedAnswer(reply, call.id);
  }

  async stats(filter: StoreFilter): Promise<StoreStats> {
    let reply: Reply;
    // What is due is cleared away first, but not for ever.
    let rounds = 0;
    do reply = await this.#change('stats', undefined, optional(filter.tenant));
    while (reply.number(9) === 1 && ++rounds < 16);
    const counted = readCounts(reply.list(3).pairs());
    if (filter.tenant === undefined && filter.instanceId === undefined && filter.conversationId === undefined) {
      const [claims, releaseQueue] = [reply.number(4), reply.number(5)];
      return { ...counted, claims, releaseQueue, owners: readOwners(reply.list(6), reply.list(7), reply.list(8)) };
    }
    return { ...counted, ...(await this.#countRows(filter)) };
  }

  async #countRows(filter: StoreFilter): Promise<FilteredCounts['counts']> {
    const counted = new FilteredCounts();
    let after = 0;
    for (let more = true; more; ) {
      const reply = await this.#change('list', undefined, [after, PAGE]);
      more = reply.number(4) === PAGE;
      for (const item of reply.list(5).lists()) {
        after = item.number(6);
        if (item.text(5) === 'x') continue;
        const row = rowOf(item);
        if (!passesFilter(row.facts, filter)) continue;
        const { facts, state, bytes, claimed } = row;
        counted.add({ ...facts, bytes, claimed, queued: state === 'q', live: isLiveState(state) });
      }
    }
    return counted.counts;
  }

  readonly onChange = (listener: ChangeListener): (() => void) => this.#changes.onChange(listener);

  readonly onReleasable = (listener: ReleasableListener): (() => void) => this.#changes.onReleasable(listener);

  async [Symbol.asyncDispose](): Promise<void> {
    clearInterval(this.#clearing);
    this.#changes.close();
    this.#link.close();
  }

  /** Nothing of an earlier run is ever given, so only its space is left to free. */
  async #clearEarlier(): Promise<void> {
    const run = this.#link.earlier.find((earlier) => !this.#cleared.has(earlier));
    if (run === undefined) return;
    const reply = await this.#link.step('clear', [PAGE, run]);
    if (reply.number(3) === 0) this.#cleared.add(run);
  }

  /** One step, and what listeners here should hear of it before its caller does. */
  async #change(name: ScriptName, replay: string | undefined, args: readonly Argument[]): Promise<Reply> {
    const reply = await this.#link.step(name, args, replay);
    this.#changes.grew(reply.list(2));
    if (this.#changes.isWatched) await this.#changes.pull();
    return reply;
  }

  #seqOf(entryId: string): number {
    const digits = new RegExp(`^e-${this.#link.run}-([0-9a-f]{12})$`).exec(entryId)?.[1];
    if (digits === undefined) throw pageTokenInvalid();
    return Number.parseInt(digits, 16);
  }
}

function isLiveState(state: string): boolean {
  return state === 'i' || state === 'c';
}

function optional(text: string | undefined): readonly [string, string] {
  return text === undefined ? ['', ''] : ['1', text];
}

function preconditionArguments(precondition: PutCall['precondition']): readonly string[] {
  if (precondition === undefined) return ['', '', ''];
  if (precondition === 'absent') return ['absent', '', ''];
  return ['revision', precondition.entryId, String(precondition.revision)];
}

function putRefusal(reply: Reply, { id, precondition }: PutCall): BatonError | undefined {
  switch (reply.text(0)) {
    case 'put':
      return undefined;
    case 'reused':
      return idempotencyKeyReused(id.key);
    case 'exists':
      return entryExists(reply.text(3));
    case 'revision': {
      const entryId = typeof precondition === 'object' ? precondition.entryId : '';
      return revisionMismatch(entryId, reply.text(3) === '' ? undefined : BigInt(reply.text(3)));
    }
    case 'quota':
      return quotaExceeded(reply.text(3), reply.number(4));
    default:
      return limitExceeded(reply.text(3), reply.number(4));
  }
}

function droppedAnswer(reply: Reply, id: CallId): { readonly droppedEntries: number; readonly droppedClaims: number } {
  if (reply.text(0) === 'reused') throw idempotencyKeyReused(id.key);
  const [entries, claims] = reply.text(3).split('|');
  return { droppedEntries: Number(entries), droppedClaims: Number(claims) };
}
