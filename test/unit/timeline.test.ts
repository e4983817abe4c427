import { create } from '@bufbuild/protobuf';
import { durationFromMs } from '@bufbuild/protobuf/wkt';
import { expect, test } from 'vitest';
import {
  PlanMode,
  PlanRouteResponseSchema,
  PlanSchema,
  ReportOutcomeResponseSchema,
  Router,
} from '../../gen/baton/v1/router_pb.ts';
import { EngineClient, type LegControl, type LegHandler, type LegRequest } from '../../src/engine/client.ts';
import type { TtftParts } from '../../src/obs/metrics.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { handOver } from '../../src/services/hand-over.ts';
import { Timeline } from '../../src/services/timeline.ts';
import { generateRequest, handOverDeps, silentSink } from '../support/lone-hand-over.ts';

const HANDLE = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[1]],
  remote_engine_id: 'p',
  remote_request_id: 'r',
  remote_host: '10.0.0.1',
  remote_port: 5600,
  tp_size: 1,
};
const REPLY = { choices: [{ index: 0, text: '', finish_reason: 'length' }], kv_transfer_params: HANDLE };
const PIECES = ['a', 'b'].map((text) => `data: ${JSON.stringify({ choices: [{ index: 0, text }] })}\n\n`);
const bytes = (text: string) => new TextEncoder().encode(text);

/** Engines that need so long for each step of a leg, on the clock of the test. */
class TimedEngines extends EngineClient {
  readonly #pass: (ms: number) => void;
  #failures: number;

  constructor(pass: (ms: number) => void, failures: number) {
    super({ connectMs: 0, keepAliveMs: 0 });
    this.#pass = pass;
    this.#failures = failures;
  }

  override send({ url, path, onConnected }: LegRequest, handler: LegHandler): LegControl {
    const steps: Readonly<Record<string, () => void>> = {
      'http://p/tokenize': () => {
        this.#pass(11);
        handler.head(200, {});
        handler.data(bytes(JSON.stringify({ tokens: [1, 2, 3] })));
        handler.end();
      },
      'http://p/v1/completions': () => {
        this.#pass(100);
        handler.head(200, {});
        handler.data(bytes(JSON.stringify(REPLY)));
        handler.end();
      },
      'http://d/v1/completions': () => {
        this.#pass(5);
        onConnected?.();
        this.#pass(40);
        if (this.#failures-- > 0) {
          return handler.fail({ kind: 'reset', reused: false, replied: false, cause: new Error('reset') });
        }
        handler.head(200, { 'content-type': 'text/event-stream' });
        this.#pass(20);
        handler.data(bytes(PIECES[0] ?? ''));
        this.#pass(7);
        handler.data(bytes(PIECES[1] ?? ''));
        this.#pass(9);
        handler.data(bytes('data: [DONE]\n\n'));
        handler.end();
      },
    };
    queueMicrotask(() => steps[url + path]?.());
    return { pause: () => undefined, resume: () => undefined, abort: () => undefined };
  }
}

/** One request whose planning takes 30 ms, 13 of them in the queue, before and after `/tokenize`. */
async function run(failures: number) {
  let clock = 1000;
  const now = () => clock;
  const pass = (ms: number) => {
    clock += ms;
  };
  const [prefill, decode, other] = ['p', 'd', 'd'].map((id) => ({ instanceId: id, url: `http://${id}` }));
  let asked = 0;
  const router = createDirectClient(Router, {
    planRoute: async () => {
      pass(15);
      asked += 1;
      if (asked === 1) {
        return create(PlanRouteResponseSchema, { result: { case: 'needPromptTokens', value: { ...prefill } } });
      }
      const value = create(PlanSchema, {
        mode: PlanMode.PREFILL_DECODE,
        connector: 'nixl',
        queued: durationFromMs(13),
        ...(prefill === undefined ? {} : { prefill }),
        ...(decode === undefined ? {} : { decode }),
        ...(other === undefined ? {} : { decodeFallbacks: [other] }),
      });
      return create(PlanRouteResponseSchema, { result: { case: 'plan', value } });
    },
    reportOutcome: async () => create(ReportOutcomeResponseSchema),
  });
  const gaps: number[] = [];
  const deps = handOverDeps(new TimedEngines(pass, failures), router, now, {
    gapsOf: () => ({ observe: (ms) => gaps.push(ms) }),
  });
  const request = generateRequest({ prompt: 'x', stream: true }, now);
  pass(2);
  const report = await handOver(deps, request, silentSink(new AbortController().signal));
  const contentAt = report.reply?.contentAt ?? 0;
  request.timeline.stop(contentAt);
  return { ending: report.ending, parts: request.timeline.parts, ttftMs: contentAt - request.timeline.startedAt, gaps };
}

const sumOf = (parts: TtftParts) => Object.values(parts).reduce((sum, part) => sum + part, 0);

test('every moment before the first content is in one phase', async () => {
  const { ending, parts, ttftMs, gaps } = await run(0);
  expect(ending).toBe('ok');
  expect(parts).toEqual({
    queue: 13,
    plan: 2 + 30 - 13,
    tokenize: 11,
    prefill: 100,
    hand_over: 5,
    decode_wait: 40,
    first_byte: 20,
  });
  expect(ttftMs).toBe(208);
  expect(sumOf(parts)).toBe(ttftMs);
  // The pieces after the first.
  expect(gaps).toEqual([7, 9]);
});

test('a repeat after a failure adds to the same phases', async () => {
  const { parts, ttftMs } = await run(1);
  expect(parts).toMatchObject({ prefill: 200, hand_over: 10, decode_wait: 80, first_byte: 20 });
  expect(sumOf(parts)).toBe(ttftMs);
});

test('what comes after the first content is in no phase, and no wait is longer than the planning', () => {
  let clock = 0;
  const timeline = new Timeline(() => clock, 0, undefined);
  clock = 5;
  timeline.enter('prefill');
  timeline.queued(9);
  clock = 7;
  timeline.stop(7);
  clock = 100;
  timeline.enter('decode_wait');
  timeline.stop(100);
  expect(timeline.parts).toEqual({ plan: 0, queue: 5, prefill: 2 });
});
