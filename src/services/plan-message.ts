import { create } from '@bufbuild/protobuf';
import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import {
  type CandidateVerdict,
  CandidateVerdictSchema,
  LegEnding,
  type Plan,
  PlanMode,
  PlanSchema,
  ReuseOutcome,
  type Target,
  TargetSchema,
} from '../../gen/baton/v1/router_pb.ts';
import type { Decision } from '../core/plan.ts';
import type { Verdict } from '../core/pools.ts';

/** Limit of the contract. */
const MAX_VERDICTS = 256;

/** A decision as callers of the router get it; `rankOf` chooses the data parallel rank where there is one to choose. */
export function toPlan(
  decision: Extract<Decision, { kind: 'plan' }>,
  connector: string,
  planId: string,
  rankOf: (instance: Instance) => number | undefined,
): Plan {
  const targetOf = (instance: Instance): Target => {
    const target = toTarget(instance);
    const dataParallelRank = rankOf(instance);
    return dataParallelRank === undefined ? target : { ...target, dataParallelRank };
  };
  const [prefill, ...prefillFallbacks] = decision.prefill.map(targetOf);
  const [decode, ...decodeFallbacks] = decision.decode.map(targetOf);
  return create(PlanSchema, {
    planId,
    mode: decision.mode,
    reason: decision.reason,
    connector: prefill === undefined ? '' : connector,
    prefillFallbacks,
    decodeFallbacks,
    verdicts: verdictsOf(decision.verdicts),
    ...(prefill === undefined ? {} : { prefill }),
    ...(decode === undefined ? {} : { decode }),
  });
}

/** Messages are made once and shared: most plans name the same few instances. */
const TARGETS = new WeakMap<Instance, Target>();
const VERDICTS = new WeakMap<readonly Verdict[], CandidateVerdict[]>();

function toTarget(instance: Instance): Target {
  const known = TARGETS.get(instance);
  if (known !== undefined) return known;
  const { id, url, incarnation, engine, kv } = instance;
  const target = create(TargetSchema, {
    instanceId: id,
    url,
    ...(incarnation === undefined ? {} : { incarnation }),
    ...(engine === undefined ? {} : { engine }),
    ...(kv === undefined ? {} : { kv }),
  });
  TARGETS.set(instance, target);
  return target;
}

function verdictsOf(verdicts: readonly Verdict[]): CandidateVerdict[] {
  const known = VERDICTS.get(verdicts);
  if (known !== undefined) return known;
  const messages = verdicts.slice(0, MAX_VERDICTS).map((verdict) => create(CandidateVerdictSchema, verdict));
  VERDICTS.set(verdicts, messages);
  return messages;
}

/** Name of a mode as logs, metrics and headers write it. */
export function modeName(mode: PlanMode): string {
  return MODE_NAMES[mode] ?? 'unknown';
}

const MODE_NAMES: Readonly<Record<number, string>> = {
  [PlanMode.PREFILL_DECODE]: 'prefill_decode',
  [PlanMode.PREFILL_DECODE_REUSE]: 'prefill_decode_reuse',
  [PlanMode.DECODE_LOCAL]: 'decode_local',
  [PlanMode.AGGREGATED]: 'aggregated',
};

/** Name of a reuse outcome as logs, metrics and headers write it; `none` for turns that had nothing to reuse. */
export function outcomeName(outcome: ReuseOutcome): string {
  return OUTCOME_NAMES[outcome] ?? 'none';
}

/** Name of how a leg ended as logs, metrics and traces write it. */
export function endingName(ending: LegEnding): string {
  return ENDING_NAMES[ending] ?? 'unknown';
}

/** Values of an enum by number, in lower case; its 0 is no value. */
function namesOf(values: Readonly<Record<string, number>>): Readonly<Record<number, string>> {
  const named = Object.entries(values).filter(([, value]) => value !== 0);
  return Object.fromEntries(named.map(([name, value]) => [value, name.toLowerCase()]));
}

const OUTCOME_NAMES = namesOf(ReuseOutcome);
const ENDING_NAMES = namesOf(LegEnding);
