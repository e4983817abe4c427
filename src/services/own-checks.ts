import { type Instance, InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { pause } from './pause.ts';
import { SignsOfLife } from './signs-of-life.ts';

/** What a look at an engine showed; `refused` needs no second look. */
export type OwnLook = 'ok' | 'refused' | 'failed';

/** How engines are looked at; times in milliseconds. */
export interface OwnChecksOptions {
  readonly look: (instance: Instance, signal: AbortSignal) => Promise<OwnLook>;
  /** Time between two looks, 0: never; failed looks in a row that make an engine SUSPECT. Read each time. */
  readonly health: { readonly intervalMs: number; readonly failures: number };
  /** Told when something was learnt. */
  readonly onChange: () => void;
  readonly now: () => number;
}

interface Seen {
  readonly signs: SignsOfLife;
  failures: number;
  /** Undefined until enough is known. */
  isUp: boolean | undefined;
}

/** The looks at engines that a process takes itself while the registry that does so otherwise is away. */
export class OwnChecks {
  readonly #options: OwnChecksOptions;
  readonly #seen = new Map<string, Seen>();
  #running: AbortController | undefined;

  constructor(options: OwnChecksOptions) {
    this.#options = options;
  }

  get isRunning(): boolean {
    return this.#running !== undefined;
  }

  /** Begins to look at the instances there are, in turns; a second call changes nothing. */
  start(instances: () => readonly Instance[]): void {
    if (this.#running !== undefined || this.#options.health.intervalMs === 0) return;
    this.#running = new AbortController();
    void this.#run(instances, this.#running.signal);
  }

  /** The registry is back: what was seen here counts no more. */
  stop(): void {
    this.#running?.abort();
    this.#running = undefined;
    this.#seen.clear();
  }

  /** An instance as the registry told it last, with what was seen since. */
  seen(instance: Instance): Instance {
    const seen = this.#seen.get(instance.id);
    if (seen?.isUp === undefined) return instance;
    const { state } = instance;
    const silence = seen.signs.toMessage();
    const told = silence === undefined ? instance : { ...instance, silence };
    if (seen.isUp && state === InstanceState.SUSPECT) {
      return { ...told, state: InstanceState.READY, stateReason: 'own_check_ok' };
    }
    if (!seen.isUp && state === InstanceState.READY) {
      return { ...told, state: InstanceState.SUSPECT, stateReason: 'own_check_failed' };
    }
    return told;
  }

  async #run(instances: () => readonly Instance[], signal: AbortSignal): Promise<void> {
    const { health } = this.#options;
    while (!signal.aborted) {
      const watched = instances().filter(({ state }) => WATCHED.has(state));
      await Promise.all(watched.map((instance) => this.#look(instance, signal)));
      await pause(health.intervalMs || LEAST_PAUSE_MS, signal);
    }
  }

  async #look(instance: Instance, signal: AbortSignal): Promise<void> {
    const { health, look, now, onChange } = this.#options;
    const result = await look(instance, signal).catch(() => 'failed' as const);
    if (signal.aborted) return;
    const seen = this.#seenOf(instance);
    const wasUp = seen.isUp;
    seen.failures = result === 'ok' ? 0 : seen.failures + 1;
    if (result === 'ok') seen.signs.heard(now());
    else seen.signs.missed(now());
    if (result === 'ok') seen.isUp = true;
    else if (result === 'refused' || seen.failures >= health.failures) seen.isUp = false;
    if (seen.isUp !== wasUp) onChange();
  }

  #seenOf({ id, silence }: Instance): Seen {
    let seen = this.#seen.get(id);
    if (seen === undefined) {
      // Looks come late where one hangs, so a gap between two of them says nothing.
      seen = { signs: new SignsOfLife(() => Number.POSITIVE_INFINITY), failures: 0, isUp: undefined };
      if (silence?.ended !== false) seen.signs.heard(this.#options.now());
      this.#seen.set(id, seen);
    }
    return seen;
  }
}

/** Where the interval was set to 0 meanwhile. */
const LEAST_PAUSE_MS = 1000;

const WATCHED: ReadonlySet<InstanceState> = new Set([InstanceState.READY, InstanceState.SUSPECT]);
