import { create } from '@bufbuild/protobuf';
import { Leg, type Plan, PlanMode, PlanSchema, type Target } from '../../gen/baton/v1/router_pb.ts';
import { BatonError } from '../core/errors.ts';
import {
  type Composition,
  endedStream,
  endedUsage,
  endedWhole,
  type FirstToken,
  headEvents,
  reshapeEvent,
  reshapeWhole,
  whyNotSplit,
} from '../core/first-token.ts';
import { findMember, scanArray, scanObject, spliceObject } from '../core/json-scan.ts';
import { DONE_EVENT, errorEvent } from '../core/openai-error.ts';
import type { ClientSink } from './client-sink.ts';
import { type DecodeResult, runDecodeLeg } from './decode-leg.ts';
import type { Transfer } from './drains.ts';
import type { FirstTokenDeps } from './first-token-deps.ts';
import { COMPLETIONS_PATH, type Destination, FirstTokenPrefill, untilGone } from './first-token-prefill.ts';
import type { GenerateRequest, HandOverDeps, HandOverReport } from './hand-over.ts';
import { type Refusal, refusalOf } from './leg.ts';
import { LegBook } from './leg-book.ts';
import { isHopeless } from './prefill-phase.ts';
import type { ReplyFacts } from './reply-facts.ts';
import { awakeFirst } from './silence-watch.ts';
import { StartedSink } from './started-sink.ts';
import { type TokenizedPrompt, tokenize } from './tokenize.ts';

/** Runs a plan with one leg: D answers from the client's own body. */
type RunAlone = (plan: Plan) => Promise<HandOverReport>;

/** Without the prompt's tokens there is no hand-over: their limit is not the one that reuse can do without. */
const TOKENIZE_MS = 10_000;

/**
 * Serves one request where P generates the first token and writes its KV into D's buffer. The client gets that token at
 * once; D is asked when P's notices are there, or, when they stay away, to compute the prompt itself.
 */
export function handOverFirstToken(
  deps: HandOverDeps,
  own: FirstTokenDeps,
  request: GenerateRequest,
  sink: ClientSink,
  plan: Plan,
  runAlone: RunAlone,
): Promise<HandOverReport> {
  return new FirstTokenHandOver(deps, own, request, sink, plan, runAlone).run();
}

class FirstTokenHandOver {
  readonly #deps: HandOverDeps;
  readonly #own: FirstTokenDeps;
  readonly #request: GenerateRequest;
  readonly #sink: ClientSink;
  readonly #plan: Plan;
  readonly #book: LegBook;
  readonly #prefill: FirstTokenPrefill;
  readonly #runAlone: RunAlone;
  /** When the client got the first token, on the caller's clock; 0: not yet. */
  #shownAt = 0;

  constructor(
    deps: HandOverDeps,
    own: FirstTokenDeps,
    request: GenerateRequest,
    sink: ClientSink,
    plan: Plan,
    runAlone: RunAlone,
  ) {
    this.#deps = deps;
    this.#own = own;
    this.#request = request;
    this.#sink = sink;
    this.#plan = plan;
    this.#book = new LegBook(deps, request, plan);
    this.#prefill = new FirstTokenPrefill(deps, own, request, sink, this.#book);
    this.#runAlone = runAlone;
  }

  run(): Promise<HandOverReport> {
    return this.#book.close(() => this.#runPlan());
  }

  async #runPlan(): Promise<HandOverReport> {
    const { connector, uncarried, receiverOf, admission } = this.#own;
    const obstacle = connector.uncarried(this.#request);
    if (obstacle !== undefined && uncarried === 'refuse') return this.#book.end('refused', refuse(obstacle));
    const { prefill, prefillFallbacks, decode } = this.#plan;
    if (this.#plan.mode === PlanMode.DECODE_LOCAL || prefill === undefined || decode === undefined) {
      this.#book.handOn();
      return this.#runAlone(this.#plan);
    }
    if (obstacle !== undefined) return this.#alone('not_carried');
    if (connector.unproven(this.#request)) return this.#alone('unproven_member');
    const limits = connector.readLimits(this.#request);
    if (limits.kind === 'odd') return this.#alone('odd_limit');
    const receiver = receiverOf(decode.instanceId);
    if (receiver === undefined) return this.#alone('no_receiver');
    const { timeline } = this.#request;
    timeline.enter('tokenize');
    const prompt = await this.#tokenize([prefill, decode]);
    if (prompt === 'gone') return this.#book.end('gone');
    if (prompt === undefined || prompt.ids.length === 0) return this.#alone('no_tokens');
    const max = limits.max ?? (prompt.maxModelLen === undefined ? undefined : prompt.maxModelLen - prompt.ids.length);
    if (max === undefined || max < 1) return this.#alone('odd_limit');

    const { queueMs } = this.#deps.limits;
    timeline.enter('queue');
    const ticket = await admission.take(decode.instanceId, prompt.ids.length, this.#sink.signal, queueMs);
    if (ticket.kind === 'gone') return this.#book.end('gone');
    if (ticket.kind !== 'taken') return this.#alone(`buffer_${ticket.kind}`);
    const { hold, done } = shares(ticket.release);
    try {
      const destination = { decode, receiver, promptTokenIds: prompt.ids, hold };
      return await this.#handOver([prefill, ...prefillFallbacks], destination, max);
    } finally {
      done();
    }
  }

  async #handOver(prefills: readonly Target[], destination: Destination, max: number): Promise<HandOverReport> {
    const outcome = await this.#prefill.run(prefills, destination);
    if (outcome.kind === 'gone') return this.#book.end('gone');
    if (outcome.kind === 'stop') return this.#book.end(outcome.ending, outcome.refusal);
    if (outcome.kind === 'none') return this.#alone('no_first_token');
    const { first, transfer } = outcome;
    const composition = this.#compose(first, destination);
    const { drains, connector } = this.#own;
    if (first.finishReason !== 'length' || max === 1) {
      drains.free(transfer);
      return this.#answerEnded(composition);
    }
    const obstacle = whyNotSplit(first.text, connector.stops(this.#request));
    if (obstacle !== undefined) {
      drains.free(transfer);
      return this.#alone(obstacle);
    }
    return this.#goOn(composition, transfer, max);
  }

  /** The reply ends with P's token: D has nothing to do. */
  #answerEnded(composition: Composition): HandOverReport {
    const { first } = composition;
    const reply: ReplyFacts = { ...NO_FACTS, usage: endedUsage(composition), contentAt: this.#deps.now() };
    if (this.#request.facts.stream) {
      this.#sink.start(200, { ...this.#streamHeaders() });
      this.#sink.write(endedStream(composition, first.finishReason));
    } else {
      const body = endedWhole(composition, first.finishReason);
      const length = String(body.byteLength);
      this.#sink.start(200, {
        ...this.#book.replyHeaders(),
        'content-type': 'application/json',
        'content-length': length,
      });
      this.#sink.write(body);
    }
    this.#sink.end();
    return this.#book.end('ok', undefined, reply);
  }

  async #goOn(composition: Composition, transfer: Transfer, max: number): Promise<HandOverReport> {
    const { drains, noticeMs } = this.#own;
    if (this.#request.facts.stream) {
      this.#sink.start(200, this.#streamHeaders());
      this.#sink.write(headEvents(composition));
      this.#shownAt = this.#deps.now();
      this.#request.timeline.stop(this.#shownAt);
    }
    this.#request.timeline.enter('hand_over');
    const waited = await untilGone(within(transfer.waiter.arrived, noticeMs), this.#sink.signal);
    if (waited === 'gone') {
      drains.free(transfer);
      return this.#book.end('gone');
    }
    if (!transfer.waiter.isComplete) this.#book.noHandle = 'notice_timeout';
    const settle = once((how: 'settle' | 'free' | 'freeLate') => drains[how](transfer));
    try {
      return await this.#decodeInTurn(composition, transfer, max, settle);
    } finally {
      settle('free');
    }
  }

  /** D, and when it fails before it said anything, another one once: that computes the prompt itself. */
  async #decodeInTurn(
    composition: Composition,
    transfer: Transfer,
    max: number,
    settle: (how: 'settle' | 'free' | 'freeLate') => void,
  ): Promise<HandOverReport> {
    let queue = [transfer.decode, ...this.#plan.decodeFallbacks];
    let fresh = false;
    let moved = false;
    for (;;) {
      const [decode, ...rest] = queue;
      if (decode === undefined) throw new BatonError({ reason: 'INTERNAL', message: 'No decode instance is left.' });
      const wasThere = transfer.waiter.isComplete;
      const peer = wasThere && decode === transfer.decode ? this.#book.prefillId : undefined;
      const { result, wrote } = await this.#decode(decode, composition, max, fresh, peer ?? '');
      const onSame = result.kind === 'failed' && result.cause === 'stale' && !fresh;
      const hasRead = wrote || result.kind === 'relayed' || result.kind === 'broken';
      const goesOnHere = onSame && this.#book.mayRetry('stale');
      if (!goesOnHere) settle(!hasRead ? 'free' : wasThere ? 'settle' : 'freeLate');
      if (result.kind === 'gone') return this.#book.end('gone');
      if (result.kind === 'relayed') return this.#book.end('ok', undefined, this.#factsOf(result.facts));
      if (result.kind === 'broken') return this.#book.end('broken', undefined, this.#factsOf(result.facts));
      if (result.kind === 'refused') return this.#fail('refused', result.refusal);
      const { cause, refusal } = result;
      const others = awakeFirst(rest, this.#deps.silences);
      if (cause === 'not_sent' || cause === 'late') {
        if (others.length === 0) return this.#fail('failed', refusal);
        queue = others;
        continue;
      }
      fresh = true;
      if (goesOnHere) continue;
      const isLast = onSame || cause === 'started' || moved || others.length === 0;
      if (isLast || !this.#book.mayRetry(cause)) return this.#fail('failed', refusal);
      queue = others;
      moved = true;
    }
  }

  async #decode(
    target: Target,
    composition: Composition,
    max: number,
    fresh: boolean,
    peerId: string,
  ): Promise<{ readonly result: DecodeResult; readonly wrote: boolean }> {
    const { engines, now } = this.#deps;
    const { facts, timeline } = this.#request;
    timeline.enter('hand_over');
    const { promptTokenIds, first } = composition;
    const edits = this.#own.connector.decode(this.#request, promptTokenIds, first.tokenId, max);
    const { request, auth } = this.#book.makeRequest(Leg.DECODE, target, edits, fresh, COMPLETIONS_PATH);
    const sink = new StartedSink(this.#sink, facts.stream);
    const startedAt = now();
    const result = await runDecodeLeg(engines, { ...request, onConnected: () => timeline.enter('decode_wait') }, sink, {
      ...this.#book.decodeOptions(target),
      auth,
      reshape: {
        event: (event) => reshapeEvent(composition, event),
        whole: (body) => reshapeWhole(composition, body),
      },
      captureTokens: false,
      streamed: facts.stream,
      severalChoices: false,
      isHopeless: () => isHopeless(this.#deps, target.instanceId, target),
    });
    this.#book.noteDecode(target, result, startedAt, peerId);
    return { result, wrote: sink.wrote };
  }

  /** The engines' word for the prompt, from the first that gives it. */
  async #tokenize(engines: readonly Target[]): Promise<TokenizedPrompt | undefined | 'gone'> {
    const { engineHeaders, limits } = this.#deps;
    const { api, authorization, timeline } = this.#request;
    const { signal } = this.#sink;
    const timeoutMs = limits.tokenizeMs === 0 ? 0 : Math.max(limits.tokenizeMs, TOKENIZE_MS);
    const prompt = withBarePrompt(this.#request);
    for (const { instanceId, url } of engines) {
      const headers = { ...engineHeaders(instanceId, authorization).headers, ...timeline.headers };
      const found = await tokenize(this.#deps.engines, { url, headers }, { ...prompt, api, timeoutMs, signal });
      if (signal.aborted) return 'gone';
      if (found !== undefined) return found;
    }
    return undefined;
  }

  #compose(first: FirstToken, { promptTokenIds }: Destination): Composition {
    const { api, facts, body, scan } = this.#request;
    const member = findMember(scan, 'stream_options');
    const options = member?.type === 'object' ? scanObject(body, member.valueStart, member.valueEnd) : undefined;
    const asked = (key: string) => options?.kind === 'object' && findMember(options, key)?.type === 'true';
    return {
      api,
      first,
      promptTokenIds,
      showTokenIds: facts.returnTokenIds,
      topLogprobs: this.#own.connector.topLogprobs(this.#request),
      includeUsage: asked('include_usage'),
      continuousUsage: asked('include_usage') && asked('continuous_usage_stats'),
    };
  }

  /** D does it all; the legs before it are told under the same plan. */
  async #alone(reason: string): Promise<HandOverReport> {
    this.#book.report(false, 0, undefined);
    this.#book.handOn();
    const report = await this.#runAlone(create(PlanSchema, { ...this.#plan, mode: PlanMode.DECODE_LOCAL, reason }));
    const { prefillId, prefillMs, legs, retries } = this.#book.end(report.ending);
    return {
      ...report,
      prefillId,
      prefillMs,
      noHandle: reason,
      legs: [...legs, ...report.legs],
      retries: [...retries, ...report.retries],
    };
  }

  /** After the first token was shown a failure can only be told in the stream. */
  #fail(ending: 'refused' | 'failed', refusal: Refusal): HandOverReport {
    if (this.#shownAt === 0) return this.#book.end(ending, refusal);
    this.#sink.write(errorEvent(refusal.error));
    this.#sink.write(DONE_EVENT);
    this.#sink.end();
    return this.#book.end('broken', undefined, { ...NO_FACTS, contentAt: this.#shownAt });
  }

  #factsOf(facts: ReplyFacts): ReplyFacts {
    return { ...facts, contentAt: this.#shownAt === 0 ? facts.contentAt : this.#shownAt };
  }

  #streamHeaders(): Record<string, string> {
    return {
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache',
      'x-accel-buffering': 'no',
      ...this.#book.replyHeaders(),
    };
  }
}

const NO_FACTS: ReplyFacts = {
  status: 200,
  usage: undefined,
  kvTransferParams: undefined,
  contentAt: 0,
  promptTokenIds: undefined,
  tokenIds: [],
  pausedMs: 0,
};

function refuse({ param, message }: { readonly param: string; readonly message: string }): Refusal {
  const text = `\`${param}\` cannot be served here with this value: ${message}.`;
  return refusalOf(new BatonError({ reason: 'INVALID_ARGUMENT', message: text, param }));
}

/** Something that several may hold; it is let go when all of them and its owner (`done`) have. */
function shares(release: () => void): { readonly hold: () => () => void; readonly done: () => void } {
  let holders = 0;
  const hold = () => {
    let held = true;
    holders += 1;
    return () => {
      if (!held) return;
      held = false;
      holders -= 1;
      if (holders === 0) release();
    };
  };
  return { hold, done: hold() };
}

/** The first call counts. */
function once<T>(act: (value: T) => void): (value: T) => void {
  let done = false;
  return (value) => {
    if (done) return;
    done = true;
    act(value);
  };
}

/** Resolves with the promise or after the time, 0 = no limit. */
function within(arrived: Promise<void>, ms: number): Promise<void> {
  if (ms === 0) return arrived;
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    // The client may have left meanwhile; that must not keep the process.
    timer.unref();
    void arrived.then(() => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** One text in a list is a prompt to the completions API and none to `/tokenize`. */
function withBarePrompt({ body, scan }: GenerateRequest): Pick<GenerateRequest, 'body' | 'scan'> {
  const prompt = findMember(scan, 'prompt');
  // A list of token ids may be long, and is none of texts.
  const isList = prompt?.type === 'array' && body[prompt.valueEnd - 2] === 0x22;
  const items = isList ? scanArray(body, prompt.valueStart, prompt.valueEnd) : undefined;
  const [only] = items ?? [];
  if (items?.length !== 1 || only?.type !== 'string') return { body, scan };
  const text = body.subarray(only.valueStart, only.valueEnd);
  const bare = spliceObject(body, scan, { set: new Map([['prompt', text]]), drop: new Set() });
  const again = scanObject(bare);
  return again.kind === 'object' ? { body: bare, scan: again } : { body, scan };
}
