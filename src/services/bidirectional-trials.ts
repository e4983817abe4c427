import type { Instance } from '../../gen/baton/v1/instance_pb.ts';

/** Whether a prefill leg may carry a handle: `trial` may, alone and with a short deadline. */
export type Admission = 'go' | 'trial' | 'no';

/** What came of a leg with a handle. */
export type WarmEnding = 'ok' | 'hung' | 'other';

/** What a hung pull has led to. */
export type HungVerdict = 'switched_off' | 'pair_barred' | 'drain';

/**
 * Finds out which prefill instances can read from decode instances. An engine whose bidirectional transfer is off hangs
 * on a handle and leaks its blocks, and it does not tell over HTTP; so where the setting is `auto`, the first leg with a
 * handle runs alone, and an instance that hangs on it gets no more.
 */
export class BidirectionalTrials {
  /** By instance and life. */
  readonly #states = new Map<string, State>();
  readonly #barredPairs = new Set<string>();

  /** What `admit` would answer. */
  mayAdmit(prefill: Instance, decodeId: string): boolean {
    return this.#answer(prefill, decodeId) !== 'no';
  }

  /** Whether a leg with a handle needs no trial: what may stand in for another instance must be known to read. */
  isProven(prefill: Instance, decodeId: string): boolean {
    return this.#answer(prefill, decodeId) === 'go';
  }

  /** Whether the instance has hung on a handle of that decode instance. */
  isBarred(prefill: Instance, decodeId: string): boolean {
    return this.#barredPairs.has(pairKey(prefill, decodeId));
  }

  /** Asks for a leg with a handle from `decodeId`; a `trial` is open until `settle`. */
  admit(prefill: Instance, decodeId: string): Admission {
    const answer = this.#answer(prefill, decodeId);
    if (answer === 'trial') this.#state(prefill).trying = true;
    return answer;
  }

  #answer(prefill: Instance, decodeId: string): Admission {
    const setting = prefill.kv?.bidirectional ?? 'auto';
    if (setting === 'off' || prefill.kv?.loadFailurePolicy === 'recompute') return 'no';
    if (this.isBarred(prefill, decodeId)) return 'no';
    const state = this.#state(prefill);
    if (state.known === 'off' && setting !== 'on') return 'no';
    if (setting === 'on' || state.known === 'on') return 'go';
    return state.trying ? 'no' : 'trial';
  }

  /** Takes the ending of an admitted leg. */
  settle(prefill: Instance, decodeId: string, ending: WarmEnding): HungVerdict | undefined {
    const state = this.#state(prefill);
    state.trying = false;
    if (ending === 'ok') state.known = 'on';
    if (ending !== 'hung') return undefined;
    state.hung += 1;
    this.#barredPairs.add(pairKey(prefill, decodeId));
    if (state.hung >= MAX_HUNG) return 'drain';
    if (state.known === 'on') return 'pair_barred';
    state.known = 'off';
    return 'switched_off';
  }

  /** What is known of an instance in its current life. */
  known(prefill: Instance): 'on' | 'off' | undefined {
    return this.#state(prefill).known;
  }

  #state(prefill: Instance): State {
    const key = lifeKey(prefill);
    let state = this.#states.get(key);
    if (state === undefined) {
      // Instances come and go: what is known of earlier lives is not needed any more.
      for (const old of this.#states.keys()) if (old.startsWith(`${prefill.id}\n`)) this.#states.delete(old);
      state = { known: undefined, trying: false, hung: 0 };
      this.#states.set(key, state);
    }
    return state;
  }
}

/** Hung pulls after which an instance leaks too much to stay. */
const MAX_HUNG = 2;

interface State {
  known: 'on' | 'off' | undefined;
  trying: boolean;
  hung: number;
}

function lifeKey(instance: Instance): string {
  return `${instance.id}\n${instance.incarnation?.generation ?? 0}`;
}

function pairKey(prefill: Instance, decodeId: string): string {
  return `${lifeKey(prefill)}\n${decodeId}`;
}
