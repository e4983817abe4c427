import { type Instance, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import { type PairTraits, pairMismatch, pairTraits } from './compat.ts';
import { stateWord } from './instance-words.ts';
import type { Candidate } from './policy.ts';

/** A candidate with its instance as it was last described. */
export interface Seated extends Candidate {
  readonly instance: Instance;
}

/** Why an instance was not chosen. */
export interface Verdict {
  readonly instanceId: string;
  readonly role: Role;
  /** A snake_case word. */
  readonly reason: string;
  /** What it rests on, for people; empty unless somebody asked for an explanation. */
  readonly detail: string;
}

/** What pools are made for. */
export interface PoolQuestion {
  /** Empty: any model. */
  readonly model: string;
  readonly connector: string;
  /** Instances that must not be chosen, with the reason. */
  readonly barred: ReadonlyMap<string, string>;
}

/** Instances that are alike in all that pairs depend on. */
interface Kind {
  readonly traits: PairTraits;
  readonly prefill: Seated[];
  readonly decode: Seated[];
}

/** The instances that could take the legs of a request for one model: the filter's result, made once for many plans. */
export interface Pools {
  /** There are instances for two legs; else those for whole requests are used. */
  readonly disaggregated: boolean;
  /** Every instance has told its models, and none has this one. */
  readonly unknownModel: boolean;
  /** Those that can serve a request alone. */
  readonly alone: readonly Seated[];
  /** Decode instances with at least one prefill instance that they can take KV from. */
  readonly paired: readonly Seated[];
  /** All of `paired` are of one kind. */
  readonly uniform: boolean;
  /** Prefill instances that could take a leg, whatever decode instance follows. */
  readonly prefill: readonly Seated[];
  /** Prefill instances that pair with this decode instance. */
  readonly prefillFor: (decode: Seated) => readonly Seated[];
  /** Those of `paired` that pair with the same prefill instances as this one. */
  readonly decodeLike: (decode: Seated) => readonly Seated[];
  /** Why each of the others is in none of these. */
  readonly verdicts: readonly Verdict[];
}

/** Filters the instances by role, state, connector, model and what they can be paired with. */
export function buildPools(seats: readonly Seated[], question: PoolQuestion): Pools {
  const disaggregated = seats.some(({ instance: { role } }) => role === Role.PREFILL || role === Role.DECODE);
  const verdicts: Verdict[] = [];
  const alone: Seated[] = [];
  const prefill: Seated[] = [];
  const kinds = new Map<string, Kind>();
  const kindOf = new Map<string, Kind>();
  for (const seat of seats) {
    const { id, instance } = seat;
    const { role } = instance;
    if (disaggregated ? role !== Role.PREFILL && role !== Role.DECODE : role !== Role.BOTH) continue;
    const reason = whyNot(instance, question);
    if (reason !== undefined) {
      verdicts.push({ instanceId: id, role, reason, detail: '' });
      continue;
    }
    if (role !== Role.PREFILL) alone.push(seat);
    else prefill.push(seat);
    if (!disaggregated) continue;
    const traits = pairTraits(instance, question.model);
    const key = JSON.stringify(traits);
    const kind = kinds.get(key) ?? { traits, prefill: [], decode: [] };
    kinds.set(key, kind);
    kindOf.set(id, kind);
    (role === Role.PREFILL ? kind.prefill : kind.decode).push(seat);
  }
  const prefillOf = pairUp(seats, kinds, kindOf);
  const mates = (seat: Seated) => prefillOf.get(kindOf.get(seat.id)) ?? [];
  const paired = alone.filter((seat) => mates(seat).length > 0);
  const of = kindOf.get(paired[0]?.id ?? '');
  return {
    disaggregated,
    unknownModel: question.model !== '' && isUnknownModel(question.model, seats),
    alone,
    paired,
    uniform: paired.every(({ id }) => kindOf.get(id) === of),
    prefill,
    prefillFor: mates,
    decodeLike: (seat) => kindOf.get(seat.id)?.decode ?? [],
    verdicts,
  };
}

/** For each kind with decode instances, the prefill instances that they can take KV from, in the order of the pool. */
function pairUp(
  seats: readonly Seated[],
  kinds: ReadonlyMap<string, Kind>,
  kindOf: ReadonlyMap<string, Kind>,
): ReadonlyMap<Kind | undefined, readonly Seated[]> {
  const result = new Map<Kind | undefined, readonly Seated[]>();
  const withPrefill = [...kinds.values()].filter(({ prefill }) => prefill.length > 0);
  for (const kind of kinds.values()) {
    if (kind.decode.length === 0) continue;
    const fits = withPrefill.filter(({ traits }) => pairMismatch(traits, kind.traits) === undefined);
    const [only] = fits;
    if (only === undefined) continue;
    const isMate = (seat: Seated) =>
      seat.instance.role === Role.PREFILL && fits.some((fit) => fit === kindOf.get(seat.id));
    result.set(kind, fits.length === 1 ? only.prefill : seats.filter(isMate));
  }
  return result;
}

/** Whether a request for some model could be routed at all: what readiness reports. */
export function isRoutable(instances: readonly Instance[], connector: string): boolean {
  const seats = instances.map((instance) => ({ ...IDLE, id: instance.id, instance }));
  const models = new Set(['', ...instances.flatMap((instance) => instance.models.map(({ id }) => id))]);
  for (const model of models) {
    const pools = buildPools(seats, { model, connector, barred: NOBODY });
    if ((pools.disaggregated ? pools.paired : pools.alone).length > 0) return true;
  }
  return false;
}

const IDLE = { hash: 0, inFlight: 0, lastPick: 0, weight: 1, reading: undefined };
const NOBODY: ReadonlyMap<string, string> = new Map();

function whyNot(instance: Instance, { model, connector, barred }: PoolQuestion): string | undefined {
  if (instance.state !== InstanceState.READY) return stateWord(instance.state);
  const bar = barred.get(instance.id);
  if (bar !== undefined) return bar;
  if (instance.role !== Role.BOTH && instance.connector !== connector) return 'connector';
  if (model !== '' && instance.modelsKnown && !hasModel(instance, model)) return 'model';
  return undefined;
}

function hasModel(instance: Instance, model: string): boolean {
  return instance.models.some(({ id }) => id === model);
}

/** Only when every instance has told its models can a name be called unknown. */
function isUnknownModel(model: string, seats: readonly Seated[]): boolean {
  const living = seats.filter(({ instance }) => instance.state !== InstanceState.GONE);
  return living.length > 0 && living.every(({ instance: i }) => i.modelsKnown && !hasModel(i, model));
}
