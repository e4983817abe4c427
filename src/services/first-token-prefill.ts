import { randomUUID } from 'node:crypto';
import { Leg, LegEnding, type Target } from '../../gen/baton/v1/router_pb.ts';
import { type FirstToken, readFirstToken } from '../core/first-token.ts';
import type { Receiver } from '../core/receiver.ts';
import type { ClientSink } from './client-sink.ts';
import type { Transfer } from './drains.ts';
import type { FirstTokenDeps } from './first-token-deps.ts';
import type { GenerateRequest, HandOverDeps } from './hand-over.ts';
import {
  classifyStatus,
  type FailedLeg,
  type GoneLeg,
  type Refusal,
  refusalOf,
  runWholeLeg,
  type WholeReply,
} from './leg.ts';
import type { LegBook } from './leg-book.ts';
import { isHopeless, NO_PREFILL } from './prefill-phase.ts';
import { awakeFirst } from './silence-watch.ts';

/** Both legs are completions, whatever the client asked for. */
export const COMPLETIONS_PATH = '/v1/completions';

/** What the prefill legs of a request came to. */
export type FirstTokenOutcome =
  | { readonly kind: 'first'; readonly first: FirstToken; readonly transfer: Transfer }
  /** P answered and named no first token: D has to start from the prompt. */
  | { readonly kind: 'none' }
  | { readonly kind: 'stop'; readonly ending: 'refused' | 'failed'; readonly refusal: Refusal }
  | { readonly kind: 'gone' };

/** Where a transfer goes. */
export interface Destination {
  readonly decode: Target;
  readonly receiver: Receiver;
  readonly promptTokenIds: readonly number[];
  /** Takes a share of the room in D's buffer; the room is free when every share has been given back. */
  readonly hold: () => () => void;
}

/** Asks prefill instances in turn until one has generated the first token; each attempt is a transfer of its own. */
export class FirstTokenPrefill {
  readonly #deps: HandOverDeps;
  readonly #own: FirstTokenDeps;
  readonly #request: GenerateRequest;
  readonly #sink: ClientSink;
  readonly #book: LegBook;

  constructor(deps: HandOverDeps, own: FirstTokenDeps, request: GenerateRequest, sink: ClientSink, book: LegBook) {
    this.#deps = deps;
    this.#own = own;
    this.#request = request;
    this.#sink = sink;
    this.#book = book;
  }

  async run(candidates: readonly Target[], destination: Destination): Promise<FirstTokenOutcome> {
    let last: Refusal | undefined;
    let fresh = false;
    let queue = [...candidates];
    for (let target = queue.shift(); target !== undefined; target = queue.shift()) {
      const outcome = await this.#ask(target, destination, fresh);
      if (outcome.kind !== 'failed') return outcome;
      last = outcome.refusal;
      queue = awakeFirst(queue, this.#deps.silences);
      if (outcome.cause === 'not_sent') continue;
      const again = outcome.cause === 'stale' && !fresh;
      if (!again && queue.length === 0) break;
      if (!this.#book.mayRetry(outcome.cause)) break;
      if (outcome.cause !== 'status') fresh = true;
      if (again) queue = [target, ...queue];
    }
    return { kind: 'stop', ending: 'failed', refusal: last ?? refusalOf(NO_PREFILL) };
  }

  async #ask(target: Target, destination: Destination, fresh: boolean): Promise<FirstTokenOutcome | FailedLeg> {
    const { engines, limits, now } = this.#deps;
    const { drains, notices, connector } = this.#own;
    const { decode, receiver, promptTokenIds } = destination;
    // A counter would start anew with the process, and the notices of the one before may still be on their way.
    const transferId = randomUUID();
    const count = this.#own.noticesOf(target.instanceId) ?? receiver.initPorts.length;
    let firstToken = promptTokenIds.at(-1) ?? 0;
    let answered = false;
    const transfer: Transfer = {
      waiter: notices.expect(transferId, count),
      decode,
      request: this.#request,
      drainEdits: () => connector.drain(this.#request, promptTokenIds, firstToken),
      isAnswered: () => answered,
      release: destination.hold(),
    };
    const startedAt = now();
    const edits = connector.prefill(this.#request, promptTokenIds, transferId, receiver);
    this.#request.timeline.enter('prefill');
    const { request, auth } = this.#book.makeRequest(Leg.PREFILL, target, edits, fresh, COMPLETIONS_PATH);
    // Not the client's signal: a prefill that is cut off leaves in D's buffer what nobody is told of.
    const leg = runWholeLeg(engines, request, {
      timeoutMs: limits.prefillColdMs,
      signal: drains.signal,
      isHopeless: () => isHopeless(this.#deps, target.instanceId, target),
      now,
    }).then((result) => {
      const first = result.kind === 'reply' && result.status === 200 ? readFirstToken(result.body) : undefined;
      firstToken = first?.tokenId ?? firstToken;
      answered = first !== undefined;
      return { result, first };
    });
    const ended = await untilGone(leg, this.#sink.signal);
    if (ended === 'gone') {
      drains.free(transfer, leg);
      this.#book.note(Leg.PREFILL, target, LegEnding.ABORTED, startedAt);
      return { kind: 'gone' };
    }
    const { result, first } = ended;
    const problem = problemOf(result, auth);
    if (problem !== undefined) return this.#fail(target, transfer, problem, startedAt);
    if (result.kind !== 'reply') return { kind: 'gone' };
    this.#book.notePrefilled(startedAt);
    const ending = first === undefined ? LegEnding.NO_HANDLE : LegEnding.OK;
    this.#book.note(Leg.PREFILL, target, ending, startedAt, { httpStatus: result.status });
    // P is free for others while D generates.
    this.#book.report(false, 0, undefined);
    if (first !== undefined) return { kind: 'first', first, transfer };
    drains.free(transfer);
    return { kind: 'none' };
  }

  #fail(
    target: Target,
    transfer: Transfer,
    problem: Exclude<ReturnType<typeof classifyStatus>, undefined>,
    startedAt: number,
  ): FirstTokenOutcome | FailedLeg {
    const { drains } = this.#own;
    if (problem.kind === 'refused') {
      drains.settle(transfer);
      const httpStatus = problem.refusal.status;
      this.#book.note(Leg.PREFILL, target, LegEnding.CLIENT_ERROR, startedAt, { httpStatus });
      return { kind: 'stop', ending: 'refused', refusal: problem.refusal };
    }
    this.#book.noteFailure(Leg.PREFILL, target, problem, startedAt);
    if (problem.cause === 'not_sent') drains.settle(transfer);
    else drains.free(transfer);
    return problem;
  }
}

function problemOf(
  result: WholeReply | FailedLeg | GoneLeg,
  auth: Parameters<typeof classifyStatus>[3],
): ReturnType<typeof classifyStatus> {
  if (result.kind === 'reply') return classifyStatus(result.status, result.headers, result.body, auth);
  return result.kind === 'failed' ? result : undefined;
}

/** The value, or `gone` as soon as the signal aborts. */
export function untilGone<T>(value: Promise<T>, signal: AbortSignal): Promise<T | 'gone'> {
  return new Promise((resolve, reject) => {
    const leave = () => resolve('gone');
    if (signal.aborted) return leave();
    signal.addEventListener('abort', leave, { once: true });
    value.then(
      (result) => {
        signal.removeEventListener('abort', leave);
        resolve(result);
      },
      (error: unknown) => {
        signal.removeEventListener('abort', leave);
        reject(error instanceof Error ? error : new Error(String(error)));
      },
    );
  });
}
