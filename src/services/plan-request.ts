import { randomUUID } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import {
  type Plan,
  type PlanRouteRequest,
  PlanRouteRequestSchema,
  type PlanRouteResponse,
} from '../../gen/baton/v1/router_pb.ts';
import { PromptTokensSchema } from '../../gen/baton/v1/tokens_pb.ts';
import { BatonError, type ErrorReasonName } from '../core/errors.ts';
import { toDuration, toMs } from './durations.ts';
import type { GenerateRequest, HandOverDeps, HandOverReport } from './hand-over.ts';
import { refusalOf } from './leg.ts';
import { pause } from './pause.ts';
import { routeFacts } from './route-facts.ts';
import { tokenizePrompt } from './tokenize.ts';

/** What came of it: a plan with the prompt's tokens, where they were asked for, or the end of the request. */
type RequestedPlan =
  | { readonly kind: 'plan'; readonly plan: Plan; readonly prompt: KnownPrompt }
  | ({ readonly kind: 'ended' } & Pick<HandOverReport, 'ending' | 'refusal'>);

/** The prompt's token ids, where an engine has told them, and the instances that would render the same. */
export interface KnownPrompt {
  readonly tokenIds: readonly number[];
  readonly instanceIds: ReadonlySet<string>;
}

export const UNKNOWN_PROMPT: KnownPrompt = { tokenIds: [], instanceIds: new Set() };

/** Asks the router; where it wants the prompt's tokens, asks the engine it names for them and then the router again. */
export async function requestPlan(
  deps: HandOverDeps,
  request: GenerateRequest,
  signal: AbortSignal,
): Promise<RequestedPlan> {
  const { engines, limits, toBatonError, engineHeaders } = deps;
  const { api, body, scan, authorization, timeline } = request;
  const message = create(PlanRouteRequestSchema, {
    planKey: randomUUID(),
    facts: routeFacts(request, deps.streamsOnly),
    maxWait: toDuration(limits.queueMs),
  });
  let prompt = UNKNOWN_PROMPT;
  try {
    let { result } = await askRouter(deps, message, request, signal);
    if (result.case === 'needPromptTokens') {
      timeline.enter('tokenize');
      const { instanceId, url, fallbacks } = result.value;
      const asked = [{ instanceId, url }, ...fallbacks];
      const targets = asked.map((target) => {
        const { headers } = engineHeaders(target.instanceId, authorization);
        return { url: target.url, headers: { ...headers, ...timeline.headers } };
      });
      const timeoutMs = limits.tokenizeMs;
      const tokenIds = await tokenizePrompt(engines, targets, { api, body, scan, timeoutMs, signal });
      prompt = { tokenIds, instanceIds: new Set(asked.map((target) => target.instanceId)) };
      message.prompt = create(PromptTokensSchema, { instanceId, tokenIds: [...tokenIds] });
      timeline.enter('plan');
      ({ result } = await askRouter(deps, message, request, signal));
    }
    if (result.case === 'plan') {
      timeline.queued(toMs(result.value.queued));
      return { kind: 'plan', plan: result.value, prompt };
    }
    throw new BatonError({ reason: 'INTERNAL', message: 'The router gave no plan.' });
  } catch (error) {
    if (signal.aborted) return { kind: 'ended', ending: 'gone', refusal: undefined };
    const known = toBatonError(error);
    return { kind: 'ended', ending: known.httpStatus < 500 ? 'refused' : 'failed', refusal: refusalOf(known) };
  }
}

/** First wait for a router that is away, milliseconds; doubled each time. */
const FIRST_WAIT_MS = 50;
const LONGEST_WAIT_MS = 1000;

/** Asks again while the router is away, as it is for a moment whenever it is replaced; the key makes that one planning. */
async function askRouter(
  deps: HandOverDeps,
  message: PlanRouteRequest,
  { timeline }: GenerateRequest,
  signal: AbortSignal,
): Promise<PlanRouteResponse> {
  const { router, limits, toBatonError, now } = deps;
  const until = now() + limits.routerMs;
  for (let waitMs = FIRST_WAIT_MS; ; waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS)) {
    using silent = watchSilence(deps, now());
    try {
      return await router.planRoute(message, {
        headers: timeline.headers,
        signal: silent === undefined ? signal : AbortSignal.any([signal, silent.signal]),
      });
    } catch (error) {
      if (!signal.aborted) deps.routerCheck?.askNow();
      if (silent?.signal.aborted === true && !signal.aborted) throw ROUTER_SILENT;
      // A connection that ends takes its calls along, as canceled ones.
      if (signal.aborted || !AWAY.has(toBatonError(error).reason) || now() + waitMs > until) throw error;
    }
    await pause(waitMs, signal);
  }
}

const ROUTER_SILENT = new BatonError({
  reason: 'ROUTER_UNAVAILABLE',
  message: 'The router does not answer.',
  retryAfterMs: 1000,
});

/** How often it is looked whether a router that is waited for has answered anybody. */
const SILENCE_LOOK_MS = 250;

/** A call may wait in the router's queue for as long as the router answers others; one that is stopped answers nobody. */
function watchSilence(
  { limits, now, routerCheck }: HandOverDeps,
  since: number,
): (Disposable & { readonly signal: AbortSignal }) | undefined {
  if (routerCheck === undefined || limits.routerMs === 0) return undefined;
  const silent = new AbortController();
  const timer = setInterval(() => {
    if (now() - Math.max(since, routerCheck.answeredAt) >= limits.routerMs) silent.abort();
  }, SILENCE_LOOK_MS);
  return { signal: silent.signal, [Symbol.dispose]: () => clearInterval(timer) };
}

const AWAY: ReadonlySet<ErrorReasonName> = new Set(['ROUTER_UNAVAILABLE', 'SHUTTING_DOWN', 'CLIENT_GONE']);
