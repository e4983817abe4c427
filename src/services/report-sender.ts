import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import {
  type LegReport,
  type Plan,
  PlanContextSchema,
  type ReportOutcomeRequest,
  ReportOutcomeRequestSchema,
  type RequestFacts,
  type Router,
} from '../../gen/baton/v1/router_pb.ts';
import { toDuration, toMs } from './durations.ts';
import { pause } from './pause.ts';

/** What a {@link ReportSender} works with; times in milliseconds. */
export interface ReportSenderOptions {
  readonly router: Client<typeof Router>;
  readonly now: () => number;
  /** Whether a failed call provably did nothing at the router. */
  readonly neverReached: (error: unknown) => boolean;
  /** Longest time for one try. Default 5,000. */
  readonly tryMs?: number;
  /** How long a final report is tried again while the router is away. Default 15,000. */
  readonly keepMs?: number;
  /** First wait between two tries, doubled each time. Default 100. */
  readonly waitMs?: number;
}

/** What a router that does not know the plan needs to be told, made only when it asks. */
export interface ReportContext {
  readonly plan: Plan;
  readonly facts: RequestFacts;
  /** All legs of the plan. */
  readonly legs: readonly LegReport[];
}

/** Final reports that may wait for a router at a time; each can hold the chain of a long conversation. */
const MAX_WAITING = 1024;
const LONGEST_WAIT_MS = 2000;

/**
 * Tells the router how plans went, off every client's path. A final report carries what the next turn needs, so it is
 * tried again while the router is away, and explained to a router that did not make the plan. The handle goes along as long
 * as no earlier try can have stored it: what was stored may have been taken since, and a store that lost its memory of the
 * first put would keep it a second time.
 */
export class ReportSender implements AsyncDisposable {
  readonly #options: ReportSenderOptions;
  readonly #pending = new Set<Promise<void>>();
  readonly #stop = new AbortController();

  constructor(options: ReportSenderOptions) {
    this.#options = options;
  }

  /** Sends a report with these headers; nobody waits for it, and a failure costs no more than the news. */
  send(message: ReportOutcomeRequest, headers: Readonly<Record<string, string>>, context: () => ReportContext): void {
    const mayRepeat = message.final && this.#pending.size < MAX_WAITING;
    const sending = this.#deliver(message, headers, context, mayRepeat).catch(() => undefined);
    this.#pending.add(sending);
    void sending.then(() => this.#pending.delete(sending));
  }

  /** Waits for the reports that are on their way, for one try's time at most. */
  async [Symbol.asyncDispose](): Promise<void> {
    const timer = setTimeout(() => this.#stop.abort(), this.#options.tryMs ?? 5000);
    await Promise.all(this.#pending);
    clearTimeout(timer);
    this.#stop.abort();
  }

  async #deliver(
    first: ReportOutcomeRequest,
    headers: Readonly<Record<string, string>>,
    context: () => ReportContext,
    mayRepeat: boolean,
  ): Promise<void> {
    const { router, now, neverReached, tryMs = 5000, keepMs = 15_000, waitMs = 100 } = this.#options;
    const { signal } = this.#stop;
    const begin = now();
    let explained = false;
    let mayStore = true;
    for (let wait = waitMs; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
      const lateMs = now() - begin;
      const message = messageOf(first, { lateMs, mayStore, context: explained ? context() : undefined });
      try {
        const { planUnknown } = await router.reportOutcome(message, { headers, timeoutMs: tryMs, signal });
        if (!planUnknown || explained) return;
        explained = true;
        continue;
      } catch (error) {
        if (!mayRepeat || signal.aborted || now() - begin + wait > keepMs) throw error;
        mayStore &&= neverReached(error);
      }
      await pause(wait, signal);
    }
  }
}

interface Variant {
  /** Since the first try: the owner's clock runs on. */
  readonly lateMs: number;
  readonly mayStore: boolean;
  readonly context: ReportContext | undefined;
}

function messageOf(first: ReportOutcomeRequest, { lateMs, mayStore, context }: Variant): ReportOutcomeRequest {
  const { handle, chain, ...rest } = first;
  return create(ReportOutcomeRequestSchema, {
    ...rest,
    paused: toDuration(toMs(first.paused) + lateMs),
    ...(mayStore && handle !== undefined ? { handle } : {}),
    ...(mayStore && chain !== undefined ? { chain } : {}),
    ...(context === undefined ? {} : explanation(context)),
  });
}

function explanation({ plan, facts, legs }: ReportContext): Pick<ReportOutcomeRequest, 'legs' | 'context'> {
  return { legs: [...legs], context: create(PlanContextSchema, { facts, plan: { ...plan, verdicts: [] } }) };
}
