import { type Instance, InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';
import { PlanMode } from '../../gen/baton/v1/router_pb.ts';
import type { Policy } from './policy.ts';

/** What planning needs to know about a request. */
export interface PlanFacts {
  /** Empty: any model. */
  readonly model: string;
  readonly bodyBytes: number;
  readonly localReasons: readonly string[];
}

/** The pools as they are at this moment. */
export interface PlanView {
  readonly instances: readonly Instance[];
  readonly excluded: ReadonlySet<string>;
  /** Instances that refused a connection a moment ago: tried last. */
  readonly cooling: ReadonlySet<string>;
  readonly inFlight: (instanceId: string) => number;
}

/** The part of the configuration that planning follows. */
export interface PlanRules {
  readonly connector: string;
  readonly prefillPolicy: Policy;
  readonly decodePolicy: Policy;
  /** Below this estimate of uncached prompt tokens D works alone; 0: always prefill and decode. */
  readonly minUncachedTokens: number;
  /** Picks so far, one counter a pool. */
  readonly turns: { readonly prefill: number; readonly decode: number };
}

/** Why an instance was not chosen. */
export interface Verdict {
  readonly instanceId: string;
  readonly role: Role;
  readonly reason: string;
}

export type Decision =
  | {
      readonly kind: 'plan';
      readonly mode: PlanMode;
      readonly reason: string;
      /** Best first; empty for modes with one leg. */
      readonly prefill: readonly Instance[];
      /** Best first; never empty. */
      readonly decode: readonly Instance[];
      readonly verdicts: readonly Verdict[];
    }
  /** Nothing can take it at this moment. */
  | { readonly kind: 'no-route'; readonly verdicts: readonly Verdict[] }
  /** Every instance told its models, and none has this one. */
  | { readonly kind: 'unknown-model' };

/** Bytes of JSON per prompt token, as a rough estimate. */
const BYTES_PER_TOKEN = 4;

/** Decides mode and instances. Pure: the same view gives the same decision. */
export function decide(facts: PlanFacts, view: PlanView, rules: PlanRules): Decision {
  const { instances } = view;
  if (facts.model !== '' && isUnknownModel(facts.model, instances)) return { kind: 'unknown-model' };
  const verdicts: Verdict[] = [];
  const usable = (role: Role) =>
    instances.filter((instance) => {
      if (instance.role !== role) return false;
      const reason = whyNot(instance, facts.model, view, rules);
      if (reason !== undefined) verdicts.push({ instanceId: instance.id, role, reason });
      return reason === undefined;
    });
  const disaggregated = isDisaggregated(instances);
  const decodeRole = disaggregated ? Role.DECODE : Role.BOTH;
  const decode = rank(usable(decodeRole), rules.decodePolicy, rules.turns.decode, view);
  if (decode.length === 0) return { kind: 'no-route', verdicts };
  const { mode, reason } = chooseMode(facts, rules, disaggregated);
  if (mode !== PlanMode.PREFILL_DECODE) return { kind: 'plan', mode, reason, prefill: [], decode, verdicts };
  const prefill = rank(usable(Role.PREFILL), rules.prefillPolicy, rules.turns.prefill, view);
  if (prefill.length === 0) return { kind: 'no-route', verdicts };
  return { kind: 'plan', mode, reason, prefill, decode, verdicts };
}

/** Whether a request could be routed at all: what readiness reports. */
export function isRoutable(instances: readonly Instance[]): boolean {
  const ready = (role: Role) => instances.some((i) => i.role === role && i.state === InstanceState.READY);
  return isDisaggregated(instances) ? ready(Role.PREFILL) && ready(Role.DECODE) : ready(Role.BOTH);
}

/** Aggregated instances take requests only where there are no others. */
function isDisaggregated(instances: readonly Instance[]): boolean {
  return instances.some(({ role }) => role === Role.PREFILL || role === Role.DECODE);
}

function chooseMode(facts: PlanFacts, rules: PlanRules, disaggregated: boolean): { mode: PlanMode; reason: string } {
  if (!disaggregated) return { mode: PlanMode.AGGREGATED, reason: 'aggregated_pool' };
  const [local] = facts.localReasons;
  if (local !== undefined) return { mode: PlanMode.DECODE_LOCAL, reason: local };
  if (facts.bodyBytes / BYTES_PER_TOKEN < rules.minUncachedTokens) {
    return { mode: PlanMode.DECODE_LOCAL, reason: 'short_prompt' };
  }
  return { mode: PlanMode.PREFILL_DECODE, reason: 'disaggregated' };
}

const STATE_REASONS: Readonly<Record<number, string>> = {
  [InstanceState.STARTING]: 'starting',
  [InstanceState.SUSPECT]: 'suspect',
  [InstanceState.DRAINING]: 'draining',
  [InstanceState.GONE]: 'gone',
};

function whyNot(instance: Instance, model: string, view: PlanView, rules: PlanRules): string | undefined {
  if (instance.state !== InstanceState.READY) return STATE_REASONS[instance.state] ?? 'not_ready';
  if (view.excluded.has(instance.id)) return 'excluded';
  if (instance.role !== Role.BOTH && instance.connector !== rules.connector) return 'connector';
  if (model !== '' && instance.modelsKnown && !hasModel(instance, model)) return 'model';
  return undefined;
}

function hasModel(instance: Instance, model: string): boolean {
  return instance.models.some(({ id }) => id === model);
}

/** Only when every instance has told its models can a name be called unknown. */
function isUnknownModel(model: string, instances: readonly Instance[]): boolean {
  const living = instances.filter(({ state }) => state !== InstanceState.GONE);
  return living.length > 0 && living.every((i) => i.modelsKnown && !hasModel(i, model));
}

function rank(usable: readonly Instance[], policy: Policy, turn: number, view: PlanView): readonly Instance[] {
  const candidates = usable.map(({ id }) => ({ id, inFlight: view.inFlight(id) }));
  const byId = new Map(usable.map((instance) => [instance.id, instance]));
  const ranked = policy.rank({ candidates, turn }).flatMap(({ id }) => byId.get(id) ?? []);
  return [...ranked.filter(({ id }) => !view.cooling.has(id)), ...ranked.filter(({ id }) => view.cooling.has(id))];
}
