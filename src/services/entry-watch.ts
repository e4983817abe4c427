import { create } from '@bufbuild/protobuf';
import {
  EntryRemovedSchema,
  type WatchEntriesResponse,
  WatchEntriesResponseSchema,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { BatonError } from '../core/errors.ts';
import type { EntryView, KvStore, ListPage, StoreChange, StoreFilter } from '../stores/store.ts';
import { overLimit } from './call-arguments.ts';
import { SYSTEM_CLOCK } from './clock.ts';
import { entryMessage } from './kv-store-messages.ts';
import { type WatchEvent, WatchHub } from './watch-hub.ts';
import { frameOf } from './watch-messages.ts';

/** One watch as the service asks for it. */
export interface EntryWatchRequest {
  /** Who watches: the limit counts by it. */
  readonly caller: string;
  readonly token: string;
  readonly filter: StoreFilter;
  readonly checkpointMs: number;
  readonly signal: AbortSignal;
}

type Known = { readonly change: StoreChange; readonly at: number };

/** Changes kept for readers that resume or lag. */
const HISTORY = 8192;
/** Entries of a snapshot that are in memory at a time. */
const PAGE = 256;

/**
 * Watches over the entries of a store. Until the first one is opened nothing is kept. Readers share one bounded history,
 * so one that does not read costs no memory and gets a new snapshot when it reads again.
 */
export class EntryWatch implements Disposable {
  readonly #store: KvStore;
  readonly #maxWatches: number;
  readonly #open = new Map<string, number>();
  #hub: Promise<WatchHub<Known>> | undefined;
  #stopListening: (() => void) | undefined;
  #closed = false;

  /** @param maxWatches open at a time, for each caller */
  constructor(store: KvStore, maxWatches: number) {
    this.#store = store;
    this.#maxWatches = maxWatches;
  }

  /** Open watches of a caller, or of all. */
  openWatches(caller?: string): number {
    if (caller !== undefined) return this.#open.get(caller) ?? 0;
    return [...this.#open.values()].reduce((sum, count) => sum + count, 0);
  }

  /** Streams responses until the signal aborts. Throws LIMIT_EXCEEDED, RESUME_TOKEN_INVALID or SHUTTING_DOWN. */
  async *watch(request: EntryWatchRequest): AsyncGenerator<WatchEntriesResponse, undefined> {
    const { caller, token, filter, checkpointMs, signal } = request;
    const count = this.openWatches(caller);
    if (count >= this.#maxWatches) throw overLimit('tenant_watches', this.#maxWatches);
    this.#open.set(caller, count + 1);
    try {
      const hub = await this.#shared();
      const snapshot = () => this.#snapshot(filter);
      const wants = ({ change }: Known) => passes(change, filter);
      for await (const event of hub.watch({ token, snapshot, wants, checkpointMs, signal })) yield responseOf(event);
    } finally {
      const left = this.openWatches(caller) - 1;
      if (left > 0) this.#open.set(caller, left);
      else this.#open.delete(caller);
    }
    return undefined;
  }

  /** Ends all watches, and every later one, with SHUTTING_DOWN. */
  [Symbol.dispose](): void {
    this.#closed = true;
    this.#stopListening?.();
    this.#hub?.then((hub) => hub.close()).catch(() => {});
  }

  /** The hub of all watches; one that cannot be opened, because its store is away, is opened by the next watch. */
  async #shared(): Promise<WatchHub<Known>> {
    this.#hub ??= this.#openHub();
    const hub = this.#hub;
    try {
      return await hub;
    } catch (error) {
      // Another watch that waited for it may have opened the next one.
      if (this.#hub === hub) {
        this.#hub = undefined;
        this.#stopListening?.();
      }
      throw error;
    }
  }

  async #openHub(): Promise<WatchHub<Known>> {
    let hub: WatchHub<Known> | undefined;
    const early: Parameters<Parameters<KvStore['onChange']>[0]>[0][] = [];
    const take = (change: (typeof early)[number]) => {
      if (hub === undefined) early.push(change);
      else if (change.kind === 'gap') hub.begin(this.#store.runId, change.revision);
      else if (change.revision > hub.revision) hub.publishAt(change.revision, { change, at: performance.now() });
    };
    this.#stopListening = this.#store.onChange(take);
    const { revision } = await this.#store.list({ filter: {}, after: undefined, size: 1 });
    hub = new WatchHub({ clock: SYSTEM_CLOCK, epoch: this.#store.runId, historyLimit: HISTORY, revision });
    for (const change of early) take(change);
    if (this.#closed) hub.close();
    return hub;
  }

  async *#snapshot(filter: StoreFilter): AsyncGenerator<Known> {
    for (let after: string | undefined; ; ) {
      const page = await this.#page(filter, after);
      for (const entry of page.entries) {
        yield { change: { kind: 'upserted', revision: entry.revision, entry }, at: performance.now() };
      }
      if (page.next === undefined) return;
      after = page.next;
    }
  }

  /** A page, and the first one where the store is another run by now: it tells of a gap, and RESET follows. */
  async #page(filter: StoreFilter, after: string | undefined): Promise<ListPage> {
    try {
      return await this.#store.list({ filter, after, size: PAGE });
    } catch (error) {
      if (!(error instanceof BatonError) || error.reason !== 'PAGE_TOKEN_INVALID') throw error;
      return this.#store.list({ filter, after: undefined, size: PAGE });
    }
  }
}

function passes(change: StoreChange, filter: StoreFilter): boolean {
  const { tenant, instanceId, conversationId } = change.kind === 'removed' ? change : namesOf(change.entry);
  if (filter.tenant !== undefined && filter.tenant !== tenant) return false;
  if (filter.instanceId !== undefined && filter.instanceId !== instanceId) return false;
  return filter.conversationId === undefined || filter.conversationId === conversationId;
}

function namesOf({ key, owner }: EntryView) {
  return { tenant: key.tenant, instanceId: owner.instanceId, conversationId: key.conversationId };
}

function responseOf(event: WatchEvent<Known>): WatchEntriesResponse {
  const { token: resumeToken, revision } = event;
  return create(WatchEntriesResponseSchema, { event: bodyOf(event), resumeToken, revision });
}

function bodyOf(event: WatchEvent<Known>): WatchEntriesResponse['event'] {
  switch (event.kind) {
    case 'snapshot-item':
    case 'delta': {
      const { change, at } = event.value;
      if (change.kind === 'removed') {
        const { entryId, reason } = change;
        return { case: 'removed', value: create(EntryRemovedSchema, { entryId, reason }) };
      }
      // A change can wait for its reader, and durations are told as they are when they are told.
      const late = performance.now() - at;
      const { entry } = change;
      const remainingMs = Math.max(0, entry.remainingMs - late);
      return { case: 'upserted', value: entryMessage({ ...entry, remainingMs, ageMs: entry.ageMs + late }) };
    }
    default:
      return frameOf(event);
  }
}
