import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { hasRealEngines, type RealEngines, realEngines } from '../support/real-engines.ts';
import { RealLog } from '../support/real-log.ts';
import {
  chatBody,
  compareTurn,
  type Message,
  metric,
  metricsOf,
  post,
  said,
  startRealBaton,
  usageOf,
  words,
} from '../support/real-turns.ts';

// Conversations that nobody continues pin the blocks of a real decode engine until baton gives them back.

const TTL_SECONDS = 480;
const LIVE = 4;
/** Share of the engine's blocks that one-turn conversations are to pin. */
const FULL = 0.6;
const WATERMARK = 0.3;
const MOST = 600;
const OUTPUT = 40;

describe.runIf(hasRealEngines())('vLLM 0.33, bytes tokens', () => {
  const log = new RealLog('Pinned KV, vLLM 0.33 (CPU), 1P1D');
  let engines: RealEngines;
  beforeAll(async () => {
    engines = await realEngines({ version: '0.33', tokens: 'bytes', prefill: 1, decoderTtlSeconds: TTL_SECONDS });
  });
  afterAll(async () => {
    await engines?.[Symbol.asyncDispose]();
    log.write();
  });

  test('above the watermark the blocks of idle handles come back long before their time, and no live conversation loses its own', async () => {
    await using baton = await startRealBaton(engines, [], 'reuse: { pin_watermark: 0, min_saved_tokens: 0 }\n');
    const startedAt = performance.now();
    const seconds = () => Math.round((performance.now() - startedAt) / 1000);
    const live = Array.from({ length: LIVE }, (_, i) => ({
      id: `live-${i}`,
      messages: [said('user', words(30, i + 1))],
    }));
    const goOn = async (talk: { readonly id: string; messages: Message[] }) => {
      const body = chatBody(talk.messages, OUTPUT);
      const { text, numbers } = await compareTurn(engines, baton, body, { stream: true, conversation_id: talk.id });
      talk.messages = [...talk.messages, said('assistant', text), said('user', 'And then?')];
      return numbers.outcome;
    };
    for (const talk of live) await goOn(talk);
    for (const talk of live) expect(await goOn(talk)).toBe('hit');

    let asked = 0;
    const askOnce = async () => {
      while (asked < MOST && (await usageOf(engines.decode)) < FULL) {
        const body = chatBody([said('user', `${asked++} ${words(40, asked + 1000)}`)], 2);
        expect((await post(`${baton.url}/v1/chat/completions`, body)).status).toBe(200);
      }
    };
    await Promise.all(Array.from({ length: 4 }, askOnce));
    const full = await usageOf(engines.decode);
    expect(full).toBeGreaterThanOrEqual(FULL);
    log.push(
      `${asked} one-turn conversations beside ${LIVE} live ones: kv_cache_usage_perc ${full.toFixed(3)} after ${seconds()} s`,
    );

    // Left alone, the engine keeps them.
    await new Promise((next) => setTimeout(next, 15_000));
    expect(await usageOf(engines.decode)).toBeGreaterThan(full - 0.05);
    log.push(`without a watermark: ${(await usageOf(engines.decode)).toFixed(3)} after ${seconds()} s`);

    baton.configure(`reuse: { pin_watermark: ${WATERMARK}, min_saved_tokens: 0 }\n`);
    await expect.poll(() => usageOf(engines.decode), { timeout: 120_000, interval: 250 }).toBeLessThan(WATERMARK);
    const took = seconds();
    expect(took, 'seconds since the first handle').toBeLessThan(TTL_SECONDS / 2);
    const batonMetrics = await metricsOf(baton.adminUrl);
    const sent = metric(batonMetrics, 'baton_releases_total{result="sent"}');
    expect(sent).toBeGreaterThan(0);
    await expect
      .poll(async () => metric(await metricsOf(baton.adminUrl), 'baton_pin_events_total{event="effective"}'), {
        timeout: 60_000,
      })
      .toBeGreaterThan(0);
    log.push(
      `watermark ${WATERMARK}: ${(await usageOf(engines.decode)).toFixed(3)} after ${took} s, ${sent} handles given back; decoder_kv_blocks_ttl ${TTL_SECONDS} s`,
    );

    const outcomes: string[] = [];
    for (const talk of live) outcomes.push(await goOn(talk));
    expect(outcomes).toEqual(live.map(() => 'hit'));
    log.push(`the live conversations then: ${outcomes.join(', ')}`);
  });
});
