import { randomUUID } from 'node:crypto';
import type { Client } from '@connectrpc/connect';
import { type Instance, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import type { KVCacheStore, TakenEntry } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { compatGroup } from '../core/compat.ts';
import { checkHandle } from '../core/handle-check.ts';
import { releaseHandle } from '../core/handle-edit.ts';
import { encodeKvTransferParams } from '../core/kv-transfer.ts';
import { PROVEN_VERSIONS } from '../core/prompt-members.ts';
import { type RemoteHostRule, usableRemoteHost } from '../core/remote-host.ts';
import { toDuration } from './durations.ts';
import type { InstanceView } from './instance-view.ts';
import { type OneTokenDeps, runOneTokenLeg } from './one-token-leg.ts';
import type { PinWatch } from './pin-watch.ts';

/** What a release came to. */
export type ReleaseResult = 'sent' | 'failed' | 'unusable';

/** What a {@link ReleaseWorker} works with. */
export interface ReleaseDeps extends OneTokenDeps {
  readonly store: Client<typeof KVCacheStore>;
  readonly view: InstanceView;
  readonly remoteHost: () => RemoteHostRule;
  /** Says where live handles too are given back, because they pin too much; the queues go first. */
  readonly pins: Pick<PinWatch, 'mayRelease' | 'noteReleased'>;
  readonly observe: (result: ReleaseResult) => void;
  /** How often the queues are looked at without being told that they grew, milliseconds; a store elsewhere tells nothing. */
  readonly lookMs: number;
}

/** Longest time for one release; it is a request for one token. */
const RELEASE_MS = 10_000;
/** Conversations that had a hit so lately are given up last. */
const SPARE = toDuration(300_000);
/** Longest wait for an answer of the store, also at a stop. */
const STORE_MS = 5000;
/** Longest time between two looks while the store is away. */
const LONGEST_LOOK_MS = 30_000;

/**
 * Frees blocks of decode engines that nobody will read: sends their handles with a count of 0 on requests of its own, one
 * at a time for each prefill instance. No client waits for it, and what it cannot send the engines' own limit frees.
 * Several may work on one store: each handle is claimed by one of them.
 */
export class ReleaseWorker implements AsyncDisposable {
  readonly #deps: ReleaseDeps;
  readonly #stop = new AbortController();
  readonly #busy = new Map<string, Promise<void>>();
  /** Lives of prefill instances of which a release was to find out whether they read. */
  readonly #tried = new Map<string, number>();
  /** Decode instances whose queues are still to be looked at. */
  readonly #due = new Set<string>();
  #lookMs: number;
  #isAway = false;
  #timer: NodeJS.Timeout;

  constructor(deps: ReleaseDeps) {
    this.#deps = deps;
    this.#lookMs = deps.lookMs;
    this.#timer = this.#lookLater();
  }

  /** Looks at the queues at once. */
  wake(): void {
    for (const { id, role } of this.#deps.view.snapshot()) if (role === Role.DECODE) this.#due.add(id);
    this.#next();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    clearTimeout(this.#timer);
    this.#stop.abort();
    await Promise.all(this.#busy.values());
  }

  /** Processes that share a store do not all ask it at once. */
  #lookLater(): NodeJS.Timeout {
    const timer = setTimeout(
      () => {
        const { lookMs } = this.#deps;
        this.#lookMs = this.#isAway ? Math.min(2 * this.#lookMs, LONGEST_LOOK_MS) : lookMs;
        this.#isAway = false;
        this.wake();
        this.#timer = this.#lookLater();
      },
      this.#lookMs * (0.75 + Math.random() / 2),
    );
    timer.unref();
    return timer;
  }

  /** Each queue that is due and has a carrier; the others have their turn when a carrier is free again. */
  #next(): void {
    if (this.#stop.signal.aborted) return;
    for (const owner of this.#deps.view.snapshot()) {
      if (!this.#due.has(owner.id)) continue;
      const carrier = this.#carrierFor(owner);
      if (carrier === undefined) continue;
      this.#due.delete(owner.id);
      this.#busy.set(carrier.id, this.#work(owner, carrier));
    }
  }

  /**
   * An idle prefill instance that is known to read from decode instances like this one. Where too much is pinned and none is
   * known, one that was never asked: clients that never come back would fill the decode instance, and nobody found out.
   */
  #carrierFor(owner: Instance): Instance | undefined {
    const group = compatGroup(owner);
    if (group === '' || !PROVEN_VERSIONS.test(owner.engine?.version ?? '')) return undefined;
    const like = this.#deps.view
      .snapshot()
      .filter(({ role, state, kv }) => role === Role.PREFILL && state === InstanceState.READY && kv !== undefined)
      .filter((instance) => compatGroup(instance) === group);
    const readers = like.filter(({ kv }) => kv?.bidirectional === 'on');
    const carriers =
      readers.length > 0 || !this.#deps.pins.mayRelease(owner.id)
        ? readers
        : like.filter(
            ({ id, kv, incarnation }) =>
              kv?.bidirectional === 'auto' &&
              kv.loadFailurePolicy !== 'recompute' &&
              this.#tried.get(id) !== incarnation?.generation,
          );
    return carriers.find(({ id }) => !this.#busy.has(id));
  }

  async #work(owner: Instance, carrier: Instance): Promise<void> {
    await this.#empty(owner, carrier);
    this.#busy.delete(carrier.id);
    this.#next();
  }

  async #empty(owner: Instance, carrier: Instance): Promise<void> {
    while (!this.#stop.signal.aborted) {
      let taken: TakenEntry | undefined;
      try {
        const message = {
          idempotencyKey: randomUUID(),
          instanceId: owner.id,
          max: 1,
          queuedOnly: !this.#deps.pins.mayRelease(owner.id),
          spareAfterHit: SPARE,
        };
        const options = { timeoutMs: STORE_MS, signal: this.#stop.signal };
        [taken] = (await this.#deps.store.takeForRelease(message, options)).taken;
      } catch {
        // Away, or it does not let this process do that: asked less and less often.
        this.#isAway = true;
        this.#due.clear();
        return;
      }
      if (taken === undefined) return;
      const isTrial = carrier.kv?.bidirectional === 'auto';
      if (isTrial) this.#tried.set(carrier.id, carrier.incarnation?.generation ?? 0);
      const result = await this.#send(taken, owner, carrier);
      if (isTrial && result === 'sent') this.#deps.view.noteBidirectional(carrier.id, 'on');
      this.#deps.observe(result);
      this.#deps.pins.noteReleased(owner.id, taken.handle?.remoteBlockIds?.groups[0]?.ids.length ?? 0);
      // Whatever came of it: it may have reached the engine.
      const options = { timeoutMs: STORE_MS };
      await this.#deps.store.commitClaim({ claimId: taken.claimId }, options).catch(() => undefined);
      if (result === 'failed' || (isTrial && result === 'unusable')) return;
    }
  }

  async #send({ entry, handle }: TakenEntry, owner: Instance, carrier: Instance): Promise<ReleaseResult> {
    if (entry === undefined || handle === undefined) return 'unusable';
    const check = checkHandle(handle, { flag: 'do_remote_decode', blockSize: entry.engineBlockSize });
    const release = check.ok ? releaseHandle(handle) : undefined;
    const host = usableRemoteHost(handle.remoteHost ?? '', this.#deps.remoteHost(), owner.url, carrier.url);
    if (release === undefined || host === undefined) return 'unusable';
    const params = new TextDecoder().decode(encodeKvTransferParams({ ...release, remoteHost: host }));
    const model = JSON.stringify(entry.key?.model ?? '');
    const body = `{"model":${model},"prompt":[1],"max_tokens":1,"stream":false,"kv_transfer_params":${params}}`;
    const isSent = await runOneTokenLeg(this.#deps, {
      instanceId: carrier.id,
      url: carrier.url,
      authorization: undefined,
      name: 'baton-release',
      body: new TextEncoder().encode(body),
      timeoutMs: RELEASE_MS,
      signal: this.#stop.signal,
    });
    return isSent ? 'sent' : 'failed';
  }
}
