import type { MessageInitShape } from '@bufbuild/protobuf';
import type { CallOptions } from '@connectrpc/connect';
import { expect } from 'vitest';
import type {
  Entry,
  WatchEntriesRequest,
  WatchEntriesRequestSchema,
  WatchEntriesResponse,
} from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { ids } from './kv-store.ts';
import { reasonName } from './store-messages.ts';
import { listed, type StoreWorld } from './store-world.ts';

/** For what a loaded machine may delay. */
const SLOW = { timeout: 20_000, interval: 20 };

type WatchParts = Exclude<MessageInitShape<typeof WatchEntriesRequestSchema>, WatchEntriesRequest>;

/** Reads a watch one message at a time. */
export class Watch {
  token = '';
  readonly #messages: AsyncIterator<WatchEntriesResponse>;
  readonly #stop = new AbortController();
  readonly #prefix: string;

  constructor(world: StoreWorld, request: WatchParts = {}, options: CallOptions = {}) {
    const filter = { instanceId: world.names.instanceId };
    const call = { ...options, signal: this.#stop.signal };
    this.#messages = world.client.watchEntries({ filter, ...request }, call)[Symbol.asyncIterator]();
    this.#prefix = world.names.key.conversationId;
  }

  /** The next message; undefined at the end. */
  async read(): Promise<WatchEntriesResponse | undefined> {
    const result = await this.#messages.next();
    if (result.done === true) return undefined;
    if (result.value.resumeToken !== '') this.token = result.value.resumeToken;
    return result.value;
  }

  /** The next message in a word; that nothing changed is no news. */
  async next(): Promise<string> {
    const message = await this.read();
    if (message === undefined) return 'end';
    const { event } = message;
    switch (event.case) {
      case 'upserted': {
        const name = event.value.key?.conversationId.replace(this.#prefix, '') ?? '';
        return `${name} ${event.value.claimed ? 'claimed' : 'idle'}`;
      }
      case 'removed':
        return reasonName(event.value.reason) ?? `reason ${event.value.reason}`;
      case 'reset':
        return `reset ${event.value.reason}`;
      case 'snapshotComplete':
        return `all ${event.value.count}`;
      case 'checkpoint':
        return this.next();
      default:
        return 'unknown';
    }
  }

  async take(count: number): Promise<string[]> {
    const seen: string[] = [];
    while (seen.length < count) seen.push(await this.next());
    return seen;
  }

  /** Goes away, as a client does that has enough. */
  async end(): Promise<void> {
    this.#stop.abort();
    await this.#messages.next().catch(() => {});
  }
}

/** Key of a conversation that belongs to the test. */
export function keyOf(world: StoreWorld, name: string) {
  return { ...world.names.key, conversationId: `${world.names.key.conversationId}${name}` };
}

/** Stores an entry of a conversation that belongs to the test; resolves with its id. */
export async function putEntry(world: StoreWorld, name: string, options: CallOptions = {}): Promise<string> {
  const { entry } = await world.client.putEntry(world.putRequest({ key: keyOf(world, name) }), options);
  return entry?.entryId ?? '';
}

/** One of the things that can happen to the entries of a conversation. */
export async function change(run: StoreWorld, name: string, random: () => number): Promise<void> {
  const kind = Math.floor(random() * 6);
  if (kind <= 1) {
    await putEntry(run, name);
    return;
  }
  // Also prompts that no entry equals, and claims that stay open.
  const prompt = kind === 2 ? ids(300, 9000) : ids(300);
  const { result } = await run.client.takeEntry(run.takeRequest({ key: keyOf(run, name) }, prompt));
  if (result.case !== 'taken') return;
  const { claimId } = result.value;
  if (kind === 3) await run.client.releaseClaim({ claimId, reason: 'not_sent' });
  else if (kind === 4) await run.client.commitClaim({ claimId });
}

const lineOf = ({ entryId, claimed, revision }: Entry): string => `${entryId} ${claimed} ${revision}`;

/** What a client knows that heeds what watch.proto says. */
export class View {
  #entries = new Map<string, string>();
  /** The snapshot that is under way. */
  #next: Map<string, string> | undefined = new Map();

  get text(): string {
    return [...this.#entries.values()].toSorted().join('\n');
  }

  hear({ event }: WatchEntriesResponse): void {
    const into = this.#next ?? this.#entries;
    if (event.case === 'upserted') into.set(event.value.entryId, lineOf(event.value));
    else if (event.case === 'removed') into.delete(event.value.entryId);
    else if (event.case === 'reset') this.#next = new Map();
    else if (event.case === 'snapshotComplete') {
      expect(into.size).toBe(event.value.count);
      this.#entries = into;
      this.#next = undefined;
    }
  }
}

/** Keeps a view up to date over any number of connections, to one of the worlds after the other. */
export function follow(view: View, ...worlds: readonly StoreWorld[]) {
  let turn = 0;
  const begin = (request: WatchParts = {}): Watch => {
    const world = worlds[turn++ % worlds.length];
    if (world === undefined) throw new Error('nothing to watch');
    return new Watch(world, request);
  };
  let watch = begin();
  let running = loop();
  async function loop() {
    // One that is ended by its reader ends with CANCELED.
    for (let message = await watch.read(); message !== undefined; message = await watch.read().catch(() => undefined)) {
      view.hear(message);
    }
  }
  const end = async () => {
    await expect.poll(() => watch.token, SLOW).not.toBe('');
    await watch.end();
    await running;
  };
  return {
    end,
    async reconnect() {
      const before = watch;
      await end();
      watch = begin({ resumeToken: before.token });
      running = loop();
    },
  };
}

/** The view comes to be what is listed. */
export async function expectSame(view: View, run: StoreWorld): Promise<void> {
  await expect.poll(async () => [view.text, await linesOf(run)], SLOW).toSatisfy(([seen, there]) => seen === there);
}

/** The lines of all entries that belong to the test. */
async function linesOf(run: StoreWorld): Promise<string> {
  const entries = await listed(run, { instanceId: run.names.instanceId });
  return entries.map(lineOf).toSorted().join('\n');
}
