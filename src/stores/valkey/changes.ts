import { reasonOf } from '../miss-reason.ts';
import type { ChangeListener, ReleasableListener, StoreChange } from '../store.ts';
import { decodeFacts } from './codec.ts';
import type { Link } from './link.ts';
import type { Reply } from './reply.ts';
import { viewOf } from './rows.ts';

/** How often the server is asked, milliseconds; with listeners and without, when it only clears what is due. */
const POLL_MS = 200;
const IDLE_MS = 1000;
const PAGE = 1000;

/**
 * What other store processes did, and what this one did. The stream is read in steps that also tell whether it is whole,
 * so that no change is missed in silence; a call of this process is followed by a read, so its own changes come at once.
 */
export class Changes {
  readonly #link: Link;
  readonly #listeners = new Set<ChangeListener>();
  readonly #releasable = new Set<ReleasableListener>();
  /** Growth of a queue that listeners know, by owner, behind {@link #grown}. */
  readonly #told = new Map<string, number>();
  #run = '';
  /** Last change that was told; undefined before the first read. */
  #read: number | undefined;
  #grown = 0;
  /** Whether a first read failed: what happened until the next one is not known. */
  #missed = false;
  #reading: Promise<void> = Promise.resolve();
  #timer: NodeJS.Timeout | undefined;
  #closed = false;

  constructor(link: Link) {
    this.#link = link;
  }

  get isWatched(): boolean {
    return this.#listeners.size > 0;
  }

  start(): void {
    if (this.#closed) return;
    clearTimeout(this.#timer);
    const busy = this.isWatched || this.#releasable.size > 0;
    this.#timer = setTimeout(() => void this.pull().finally(() => this.start()), busy ? POLL_MS : IDLE_MS);
    this.#timer.unref();
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#listeners.clear();
    this.#releasable.clear();
  }

  onChange(listener: ChangeListener): () => void {
    const isFirst = !this.isWatched;
    this.#listeners.add(listener);
    if (isFirst) {
      this.#read = undefined;
      // Sent in this turn: what the caller does next is behind it.
      this.#reading = Promise.all([this.#reading, this.#pullOrNote()]).then(() => {});
    }
    this.start();
    return () => void this.#listeners.delete(listener);
  }

  onReleasable(listener: ReleasableListener): () => void {
    this.#releasable.add(listener);
    this.start();
    return () => void this.#releasable.delete(listener);
  }

  /** Tells of queues that a call of this process made grow: owner, entries in it, revision. */
  grew(queues: Reply): void {
    for (const queue of queues.lists()) {
      this.#told.set(queue.text(0), queue.number(2));
      this.#tellQueue(queue.text(0), queue.number(1));
    }
  }

  /** Reads what is new; resolves when it was told. A server that does not answer is asked again later. */
  pull(): Promise<void> {
    this.#reading = this.#reading.then(() => this.#pullOrNote());
    return this.#reading;
  }

  async #pullOrNote(): Promise<void> {
    await this.#pullAll().catch(() => {
      this.#missed ||= this.isWatched && this.#read === undefined;
    });
  }

  async #pullAll(): Promise<void> {
    let more = true;
    while (more && !this.#closed) more = await this.#pullPage();
  }

  async #pullPage(): Promise<boolean> {
    const watched = this.isWatched;
    const reply = await this.#link.step('tail', [this.#read ?? '', PAGE, this.#grown, watched ? 1 : 0]);
    const [now, revision] = [reply.number(1), reply.number(3)];
    // The revisions of another run say nothing here, and neither does an answer to the old ones.
    const isNewRun = this.#run !== '' && this.#run !== this.#link.run;
    this.#run = this.#link.run;
    if (isNewRun) {
      this.#grown = 0;
      this.#told.clear();
    } else this.#tellQueues(reply.list(5));
    if (!watched) return false;
    const isGap = isNewRun || reply.number(4) === 1;
    const isFirst = this.#read === undefined;
    if (isFirst || isGap) {
      this.#read = revision;
      const isTold = isFirst ? this.#missed : isGap;
      this.#missed = false;
      if (isTold) this.#tell({ kind: 'gap', revision: BigInt(revision) });
      return false;
    }
    const changes = reply.list(6).lists();
    for (const change of changes) {
      const at = Number(change.text(0).split('-')[0]);
      this.#read = at;
      this.#tell(changeOf(BigInt(at), change.list(1).pairs(), now));
    }
    return changes.length === PAGE;
  }

  #tellQueues(queues: Reply): void {
    for (const queue of queues.lists()) {
      const [owner, queued, at] = [queue.text(0), queue.number(1), queue.number(2)];
      this.#grown = Math.max(this.#grown, at);
      if ((this.#told.get(owner) ?? -1) < at) this.#tellQueue(owner, queued);
    }
    for (const [owner, at] of this.#told) if (at <= this.#grown) this.#told.delete(owner);
  }

  #tellQueue(owner: string, queued: number): void {
    if (queued > 0) for (const listener of [...this.#releasable]) listener(owner, queued);
  }

  #tell(change: Parameters<ChangeListener>[0]): void {
    for (const listener of [...this.#listeners]) listener(change);
  }
}

function changeOf(revision: bigint, fields: ReadonlyMap<string, Buffer>, now: number): StoreChange {
  const bytes = (name: string): Buffer => fields.get(name) ?? Buffer.alloc(0);
  const number = (name: string): number => Number(bytes(name).toString());
  const entryId = bytes('i').toString();
  const facts = decodeFacts(bytes('m'));
  const reason = number('y');
  if (reason !== 0) {
    const { tenant, conversationId } = facts.key;
    const { instanceId } = facts.owner;
    return { kind: 'removed', revision, entryId, reason: reasonOf(reason), tenant, instanceId, conversationId };
  }
  const row = { entryId, revision, storedAt: number('a'), expiresAt: number('x'), claimed: number('c') === 1, facts };
  return { kind: 'upserted', revision, entry: viewOf(row, now) };
}
