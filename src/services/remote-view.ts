import type { Client } from '@connectrpc/connect';
import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import type { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import type { InstanceView } from './instance-view.ts';
import { OwnChecks, type OwnChecksOptions } from './own-checks.ts';
import { pause } from './pause.ts';

/** Waits between attempts to watch a registry that is away, milliseconds. */
const FIRST_RETRY_MS = 250;
const LAST_RETRY_MS = 5000;
/** What is told to a registry that is away is told again so often: for a minute and a half. */
const MOST_TRIES = 20;

/**
 * The pools as a registry elsewhere tells them. While it is away the last view stays, and `stale` says so: engines do
 * not stop working because nobody watches them. Whether they work is then looked at from here.
 */
export class RemoteView implements InstanceView, AsyncDisposable {
  readonly #client: Client<typeof PoolRegistry>;
  readonly #stop = new AbortController();
  readonly #listeners = new Set<() => void>();
  readonly #byId = new Map<string, Instance>();
  /** Whether instances read from decode instances in a life of theirs, where that was found out here. */
  readonly #read = new Map<string, { readonly generation: number; readonly state: 'on' | 'off' }>();
  readonly #running: Promise<void>;
  readonly #note: (error: unknown) => void;
  readonly #checks: OwnChecks | undefined;
  #snapshot: readonly Instance[] = [];
  #resumeToken = '';
  #fresh = false;

  /**
   * @param note told whenever a watch breaks off, and of each message, with undefined
   * @param checks how engines are looked at while the registry is away; without it the last view stays as it is
   */
  constructor(
    client: Client<typeof PoolRegistry>,
    note: (error: unknown) => void,
    checks?: Omit<OwnChecksOptions, 'onChange'>,
  ) {
    this.#client = client;
    this.#note = note;
    this.#checks = checks && new OwnChecks({ ...checks, onChange: () => this.#publish() });
    this.#running = this.#watch();
  }

  /** True while the registry cannot be reached. */
  get stale(): boolean {
    return !this.#fresh;
  }

  readonly snapshot = (): readonly Instance[] => this.#snapshot;

  readonly onChange = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  };

  /** The router that planned tells its own registry; a facade has nothing to add. */
  readonly notePassive = (): void => {};

  /** No registry elsewhere is told: each process that sees legs finds out for itself, and goes by it. */
  readonly noteBidirectional = (instanceId: string, state: 'on' | 'off'): void => {
    const generation = this.#byId.get(instanceId)?.incarnation?.generation;
    const known = this.#read.get(instanceId);
    if (generation === undefined || (known?.generation === generation && known.state === state)) return;
    this.#read.set(instanceId, { generation, state });
    this.#publish();
  };

  readonly noteLearnt = (): void => {};

  readonly drain = (instanceId: string, reason: string): void => {
    const known = this.#byId.get(instanceId);
    if (known !== undefined && known.state !== InstanceState.GONE) {
      // No plan of this process may name it while the registry is still being told.
      this.#byId.set(instanceId, { ...known, state: InstanceState.DRAINING, stateReason: reason });
      this.#publish();
    }
    void this.#tellDrain(instanceId, reason);
  };

  async [Symbol.asyncDispose](): Promise<void> {
    this.#stop.abort();
    this.#checks?.stop();
    this.#listeners.clear();
    await this.#running;
  }

  /** Until the registry has heard it: what does harm must not come back because a call was lost. */
  async #tellDrain(instanceId: string, reason: string): Promise<void> {
    const { signal } = this.#stop;
    let waitMs = FIRST_RETRY_MS;
    for (let tries = 0; tries < MOST_TRIES && !signal.aborted && this.#byId.has(instanceId); tries += 1) {
      try {
        await this.#client.drainInstance({ instanceId, reason }, { signal });
        return;
      } catch {
        // Away, or it does not let this process drain: that shows in its log.
      }
      await pause(waitMs, signal);
      waitMs = Math.min(2 * waitMs, LAST_RETRY_MS);
    }
  }

  async #watch(): Promise<void> {
    const { signal } = this.#stop;
    for (let waitMs = FIRST_RETRY_MS; !signal.aborted; waitMs = Math.min(2 * waitMs, LAST_RETRY_MS)) {
      try {
        await this.#readStream(signal, () => {
          waitMs = FIRST_RETRY_MS;
          this.#note(undefined);
        });
      } catch (error) {
        // Away, or the token is not its own any more: a watch without one starts from a snapshot.
        this.#resumeToken = '';
        if (!signal.aborted) this.#note(error);
      }
      this.#fresh = false;
      if (!signal.aborted) this.#checks?.start(() => [...this.#byId.values()]);
      await pause(waitMs, signal);
    }
  }

  async #readStream(signal: AbortSignal, onMessage: () => void): Promise<void> {
    let named: Set<string> | undefined = this.#resumeToken === '' ? new Set() : undefined;
    for await (const message of this.#client.watchInstances({ resumeToken: this.#resumeToken }, { signal })) {
      onMessage();
      this.#fresh = true;
      if (message.resumeToken !== '') this.#resumeToken = message.resumeToken;
      const { event } = message;
      if (event.case === 'upserted') {
        named?.add(event.value.id);
        this.#byId.set(event.value.id, event.value);
      } else if (event.case === 'removed') {
        this.#byId.delete(event.value.instanceId);
      } else if (event.case === 'reset') {
        named = new Set();
      } else if (event.case === 'snapshotComplete' && named !== undefined) {
        for (const id of [...this.#byId.keys()]) if (!named.has(id)) this.#byId.delete(id);
        named = undefined;
      } else if (this.#checks?.isRunning !== true) {
        continue;
      }
      // Within a snapshot the old view stays whole.
      if (named !== undefined) continue;
      this.#checks?.stop();
      this.#publish();
    }
  }

  #withRead(instance: Instance): Instance {
    const { id, kv, incarnation } = instance;
    const found = this.#read.get(id);
    if (found === undefined || kv?.bidirectional !== 'auto' || found.generation !== incarnation?.generation)
      return instance;
    return { ...instance, kv: { ...kv, bidirectional: found.state } };
  }

  #publish(): void {
    for (const id of this.#read.keys()) if (!this.#byId.has(id)) this.#read.delete(id);
    const all = [...this.#byId.values()].map((instance) => this.#withRead(instance));
    this.#snapshot = this.#checks === undefined ? all : all.map((instance) => this.#checks?.seen(instance) ?? instance);
    for (const listener of [...this.#listeners]) listener();
  }
}
