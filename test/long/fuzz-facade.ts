import { expect } from 'vitest';
import { post } from '../support/harness.ts';
import { STUB_MODEL, startStubbed } from '../support/stub-engine.ts';
import { drawJson, MEMBERS, mutate } from './fuzz-bytes.ts';
import { runFuzz, sendAnyhow } from './fuzz-run.ts';
import type { Draw } from './property-requests.ts';

const BODIES: readonly [string, ...string[]] = [
  `{"model":"${STUB_MODEL}","messages":[{"role":"user","content":"hi"}]}`,
  `{"model":"${STUB_MODEL}","stream":true,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}],"conversation_id":"c-1"}`,
  `{"model":"${STUB_MODEL}","prompt":[1,2,3],"n":2,"logprobs":1}`,
];

/** A request that would be right, or one with a body of any members. */
function drawRequest(draw: Draw): Buffer {
  if (draw.chance(0.2)) {
    const path = draw.pick(['/v1/models', '/health', '/metrics', '/readiness', '/nowhere', '/v1/chat/completions']);
    return Buffer.from(`${draw.pick(['GET', 'HEAD', 'OPTIONS', 'DELETE'])} ${path} HTTP/1.1\r\nhost: x\r\n\r\n`);
  }
  const odd = () => `{${JSON.stringify(draw.pick(MEMBERS))}:${drawJson(draw)},"model":"${STUB_MODEL}"}`;
  const body = Buffer.from(draw.chance(0.5) ? draw.pick(BODIES) : odd());
  const changed = draw.chance(0.3) ? mutate(draw, body) : body;
  const more = draw.pick([
    '',
    'x-session-id: s\r\nx-baton-debug: 1\r\n',
    'authorization: Bearer k\r\nx-request-id: r-1\r\nx-forwarded-for: 1.2.3.4\r\n',
    'content-encoding: gzip\r\n',
    'expect: 100-continue\r\n',
    `${Array.from({ length: draw.int(1, 250) }, (_, i) => `x-${i}: ${i}\r\n`).join('')}`,
    `x-large: ${'a'.repeat(draw.int(1, 40_000))}\r\n`,
  ]);
  const isChunked = draw.chance(0.2);
  const length = draw.chance(0.05) ? draw.int(0, 100_000) : changed.length;
  const framing = isChunked ? 'transfer-encoding: chunked\r\n' : `content-length: ${length}\r\n`;
  const path = draw.pick(['/v1/chat/completions', '/v1/completions', '/v1/chat/completions/?a=%zz']);
  const head = Buffer.from(`POST ${path} HTTP/1.1\r\nhost: x\r\n${more}${framing}\r\n`);
  if (!isChunked) return Buffer.concat([head, changed]);
  return Buffer.concat([
    head,
    Buffer.from(`${changed.length.toString(16)}\r\n`),
    changed,
    Buffer.from('\r\n0\r\n\r\n'),
  ]);
}

/** Sends requests, right ones and changed ones, to the facade of a baton in this process. */
export async function fuzzFacade(seconds: number, seed: number): Promise<number> {
  const yaml = 'facade: {body_limit: 64KiB, header_timeout: 1s}\ntimeouts: {client_stall: 1s}\n';
  await using stubbed = await startStubbed({ yaml });
  const statuses = new Map<number, number>();
  const sent = await runFuzz(seconds, seed, {
    async once(draw) {
      const whole = Array.from({ length: draw.pick([1, 1, 1, 3]) }, () => drawRequest(draw));
      const request = Buffer.concat(whole);
      const bytes = draw.chance(0.6) ? mutate(draw, request) : request;
      const answer = (await sendAnyhow(draw, stubbed.port, bytes)).toString('latin1');
      for (const [, status] of answer.matchAll(/^HTTP\/1\.1 (\d{3}) /gm)) {
        statuses.set(Number(status), (statuses.get(Number(status)) ?? 0) + 1);
        if (Number(status) >= 500) return `${answer}\n<- ${JSON.stringify(bytes.toString('latin1'))}`;
      }
      return undefined;
    },
    async check() {
      const inFlight = async () => {
        const metrics = await (await fetch(`${stubbed.adminUrl}/metrics`)).text();
        const values = [...metrics.matchAll(/^baton_requests_in_flight\{.*\} (\d+)$/gm)].map(([, value]) =>
          Number(value),
        );
        return values.reduce((sum, value) => sum + value, 0);
      };
      await expect.poll(inFlight, { timeout: 20_000 }).toBe(0);
      for (const body of BODIES) expect((await post(`${stubbed.url}/v1/completions`, body)).status).toBe(200);
      // Whatever clients send is no fault of baton.
      expect(stubbed.log.filter(({ level }) => level === 'error' || level === 'fatal')).toEqual([]);
      stubbed.reset();
      stubbed.forgetLog();
    },
  });
  // It went deep enough: right requests, wrong ones, and what is no HTTP.
  for (const status of [200, 400, 404, 405, 413, 415, 431]) expect([...statuses.keys()]).toContain(status);
  return sent;
}
