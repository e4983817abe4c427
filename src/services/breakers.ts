import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { Leg, LegEnding, type LegReport } from '../../gen/baton/v1/router_pb.ts';
import { Breaker, type BreakerRules, type CallOutcome } from '../core/breaker.ts';
import type { InstanceView } from './instance-view.ts';

/** Settings of {@link Breakers}, read when they are used; 0 failures: no breaker of that kind. */
export interface BreakerSettings {
  /** Failed legs in a row that open the breaker of an instance. */
  readonly failures: number;
  /** The same of a pair that hands KV over. */
  readonly pairFailures: number;
  /** Milliseconds before the first trial, doubled with each one that fails, up to eight times as long. */
  readonly openMs: number;
}

/**
 * Whose breaker it is: an instance's for the legs it is sent, an instance's for what others make of its KV (`transfer`), or
 * a pair's for what the one makes of the other's.
 */
export type BreakerOwner =
  | { readonly scope: 'instance' | 'transfer'; readonly instanceId: string }
  | { readonly scope: 'pair'; readonly prefillId: string; readonly decodeId: string };

/** Told of each breaker that opens or closes. */
export type ObserveBreaker = (owner: BreakerOwner, to: 'open' | 'closed') => void;

/** What a plan tried although its breaker was open; must be ended. */
export interface Trials {
  /** What has told nothing by now will not: somebody else may try. */
  readonly end: () => void;
}

interface Entry {
  readonly owner: BreakerOwner;
  readonly breaker: Breaker;
  /** The lives that the failures are of, by instance id. */
  readonly lives: ReadonlyMap<string, number>;
}

/**
 * The breakers of a router, fed by what is reported of legs: transport errors, deadlines and 5xx, never a 4xx. They move
 * legs elsewhere and refuse none: where everything is open, the instances are used as if nothing were. Only what failed
 * is remembered, and nothing of an earlier life.
 */
export class Breakers {
  readonly #view: InstanceView;
  readonly #settings: BreakerSettings;
  readonly #observe: ObserveBreaker;
  readonly #now: () => number;
  readonly #entries = new Map<string, Entry>();
  #seen: readonly Instance[] | undefined;

  constructor(view: InstanceView, settings: BreakerSettings, observe: ObserveBreaker, now: () => number) {
    this.#view = view;
    this.#settings = settings;
    this.#observe = observe;
    this.#now = now;
  }

  /** Those that are open at this moment, for metrics. */
  open(): readonly BreakerOwner[] {
    this.#forget();
    return [...this.#entries.values()].filter(({ breaker }) => breaker.isOpen).map(({ owner }) => owner);
  }

  /** Instances that are left alone for the moment. One whose trial is due is not among them. */
  avoided(): ReadonlySet<string> {
    this.#forget();
    if (this.#entries.size === 0) return NONE;
    const ids = [...this.#entries.values()].flatMap(({ owner, breaker }) =>
      owner.scope !== 'pair' && this.#isAvoided(breaker) ? [owner.instanceId] : [],
    );
    return new Set(ids);
  }

  /** Whether KV is not to be handed over between the two for the moment. */
  isPairAvoided(prefillId: string, decodeId: string): boolean {
    const entry = this.#entries.get(keyOf({ scope: 'pair', prefillId, decodeId }));
    return entry !== undefined && this.#isAvoided(entry.breaker);
  }

  /** Whether any pair is avoided: mostly none is, and nothing has to be looked at. */
  get hasPairs(): boolean {
    this.#forget();
    return [...this.#entries.values()].some(({ owner, breaker }) => owner.scope === 'pair' && this.#isAvoided(breaker));
  }

  /** A plan uses these instances: where a breaker is open, that is its trial. */
  begin(prefillId: string | undefined, decodeId: string | undefined): Trials | undefined {
    if (this.#entries.size === 0) return undefined;
    const owners: BreakerOwner[] = [prefillId, decodeId].flatMap((instanceId) =>
      instanceId === undefined ? [] : SCOPES.map((scope) => ({ scope, instanceId })),
    );
    if (prefillId !== undefined && decodeId !== undefined) owners.push({ scope: 'pair', prefillId, decodeId });
    const now = this.#now();
    const tried = owners.flatMap((owner) => {
      const breaker = this.#entries.get(keyOf(owner))?.breaker;
      if (breaker?.isOpen !== true) return [];
      if (!breaker.admit(now)) breaker.force(now);
      return [breaker];
    });
    if (tried.length === 0) return undefined;
    return {
      end: () => {
        for (const breaker of tried) breaker.note('neither', this.#now());
      },
    };
  }

  /** Takes how a leg went; `peerId` is the instance whose KV it was to read. */
  note(leg: LegReport, peerId: string): void {
    const outcome = outcomeOf(leg);
    if (outcome === 'neither') return;
    const { instanceId } = leg;
    this.#note({ scope: 'instance', instanceId }, outcome);
    const transfer = transferOutcome(leg, outcome);
    if (peerId === '' || transfer === 'neither') return;
    const [prefillId, decodeId] = leg.leg === Leg.PREFILL ? [instanceId, peerId] : [peerId, instanceId];
    this.#note({ scope: 'pair', prefillId, decodeId }, transfer);
    // One whose KV is of no use to anybody is found by that, although the legs that it is sent end well.
    this.#note({ scope: 'transfer', instanceId: peerId }, transfer);
  }

  #note(owner: BreakerOwner, outcome: CallOutcome): void {
    this.#forget();
    const key = keyOf(owner);
    const known = this.#entries.get(key);
    if (known === undefined && outcome !== 'failed') return;
    const entry = known ?? this.#add(key, owner);
    const change = entry?.breaker.note(outcome, this.#now());
    if (entry?.breaker.isClear === true) this.#entries.delete(key);
    if (change !== undefined) this.#observe(owner, change === 'opened' ? 'open' : 'closed');
  }

  #add(key: string, owner: BreakerOwner): Entry | undefined {
    const settings = this.#settings;
    const isPair = owner.scope === 'pair';
    const ids = isPair ? [owner.prefillId, owner.decodeId] : [owner.instanceId];
    const instances = this.#view.snapshot().filter(({ id }) => ids.includes(id));
    const rules: BreakerRules = {
      get failures() {
        return isPair ? settings.pairFailures : settings.failures;
      },
      get openMs() {
        return settings.openMs;
      },
    };
    if (instances.length < ids.length || rules.failures === 0) return undefined;
    const entry: Entry = {
      owner,
      breaker: new Breaker(rules),
      lives: new Map(instances.map((instance) => [instance.id, lifeOf(instance)])),
    };
    this.#entries.set(key, entry);
    return entry;
  }

  #isAvoided(breaker: Breaker): boolean {
    const state = breaker.state(this.#now());
    return state === 'open' || state === 'trying';
  }

  /** Drops what is known of instances that left or began a new life. */
  #forget(): void {
    if (this.#entries.size === 0) return;
    const snapshot = this.#view.snapshot();
    if (snapshot === this.#seen) return;
    this.#seen = snapshot;
    const lives = new Map(snapshot.map((instance) => [instance.id, lifeOf(instance)]));
    for (const [key, entry] of this.#entries) {
      if ([...entry.lives].every(([id, life]) => lives.get(id) === life)) continue;
      this.#entries.delete(key);
      if (entry.breaker.isOpen) this.#observe(entry.owner, 'closed');
    }
  }
}

const NONE: ReadonlySet<string> = new Set();

const SCOPES = ['instance', 'transfer'] as const;

/** Ids hold no line break. */
function keyOf(owner: BreakerOwner): string {
  return owner.scope === 'pair' ? `pair\n${owner.prefillId}\n${owner.decodeId}` : `${owner.scope}\n${owner.instanceId}`;
}

function lifeOf(instance: Instance): number {
  return instance.incarnation?.generation ?? 0;
}

const OUTCOMES: Readonly<Record<number, CallOutcome>> = {
  [LegEnding.OK]: 'answered',
  [LegEnding.NO_HANDLE]: 'answered',
  [LegEnding.SERVER_ERROR]: 'failed',
  [LegEnding.NOT_SENT]: 'failed',
  [LegEnding.RESET]: 'failed',
  [LegEnding.TIMEOUT]: 'failed',
};

/** A request's own fault says nothing of the engine, and 429 is what a sound one says when it is busy. */
function outcomeOf({ ending, httpStatus }: LegReport): CallOutcome {
  if (ending === LegEnding.BUSY && httpStatus === 503) return 'failed';
  return OUTCOMES[ending] ?? 'neither';
}

/** What the leg says of the transfer: nothing where it was not begun, and no ill once content has come of it. */
function transferOutcome({ ending, contentShown }: LegReport, outcome: CallOutcome): CallOutcome {
  if (contentShown) return 'answered';
  return ending === LegEnding.NOT_SENT || ending === LegEnding.BUSY ? 'neither' : outcome;
}
