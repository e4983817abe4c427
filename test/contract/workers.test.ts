import type { FastifyInstance } from 'fastify';
import { afterEach, describe, expect, it } from 'vitest';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../../src/core/errors.ts';
import { buildAdmin } from '../../src/http/admin.ts';
import { createLogger } from '../../src/obs/log.ts';
import { Metrics } from '../../src/obs/metrics.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';
import { setUp } from '../support/registry.ts';

let open: FastifyInstance | undefined;
afterEach(async () => {
  await open?.close();
  open = undefined;
});

type Callers = Readonly<Record<string, boolean>>;

/** The admin port over a registry; `tokens` are those of callers, true for an operator's. */
function setUpAdmin(ids: readonly string[], tokens?: Callers) {
  const world = setUp(ids);
  const callerOf = (authorization: string | undefined) => {
    if (tokens === undefined) return EVERYTHING;
    const isOperator = tokens[authorization?.replace('Bearer ', '') ?? ''];
    if (isOperator !== undefined) return { ...EVERYTHING, isOperator };
    return new BatonError({ reason: 'CREDENTIAL_REQUIRED', message: 'a token is needed' });
  };
  const gate = { callerOf, hasTokens: tokens !== undefined };
  const leftOut = [{ instance: 'd1', source: 'file', why: 'its URL is that of d:1' }];
  const reload = async () => ({ kind: 'ok' as const, applied: ['queue.max'], restart: [], leftOut });
  const app = buildAdmin(
    new Metrics({ version: 't' }),
    { ...gate, reload },
    {
      ...gate,
      registry: createDirectClient(PoolRegistry, world.registry),
      toBatonError: (error) => batonErrorFrom(error, 'INTERNAL'),
      connector: 'nixl',
    },
    {
      limits: { headerBytes: 32_768, headerMs: 30_000, connections: 10 },
      log: createLogger({ level: 'silent', format: 'json' }),
    },
  );
  open = app;
  const ask = async (
    method: 'GET' | 'POST' | 'DELETE',
    url: string,
    body?: unknown,
    more: { readonly token?: string; readonly from?: string; readonly headers?: Record<string, string> } = {},
  ) => {
    const reply = await app.inject({
      method,
      url,
      ...(body === undefined ? {} : { payload: typeof body === 'string' ? body : JSON.stringify(body) }),
      headers: {
        ...(body === undefined ? {} : { 'content-type': 'application/json' }),
        ...(more.token === undefined ? {} : { authorization: `Bearer ${more.token}` }),
        ...more.headers,
      },
      ...(more.from === undefined ? {} : { remoteAddress: more.from }),
    });
    return { status: reply.statusCode, body: reply.json(), headers: reply.headers };
  };
  return { ...world, ask };
}

describe('/workers', () => {
  it('lists the pools in the shape of the peers', async () => {
    const { clock, ask } = setUpAdmin(['p:1', 'd:1', 'b:1']);
    await clock.pass(0);
    const { status, body } = await ask('GET', '/workers');
    expect([status, body.total, body.stats]).toEqual([200, 3, { prefill_count: 1, decode_count: 1, regular_count: 1 }]);
    expect(body.workers[1]).toEqual({
      id: 'd:1',
      url: 'http://d:1',
      worker_type: 'decode',
      connector: 'nixl',
      state: 'ready',
      state_reason: 'probe_ok',
      is_healthy: true,
      model_id: 'm',
      models: ['m'],
      labels: { zone: 'd:1' },
      generation: 1,
      engine: { kind: 'vllm', version: '0.33.0' },
      load: 4,
      kv_cache_usage: 0,
      load_age_seconds: 0,
    });
    expect((await ask('GET', '/workers/d%3A1')).body).toEqual(body.workers[1]);
  });

  it('adds, drains, resumes and removes', async () => {
    const { clock, ask, registry } = setUpAdmin([]);
    const worker = { url: 'http://e:1/pre', worker_type: 'prefill', labels: { zone: 'a' } };
    const added = await ask('POST', '/workers', worker, { headers: { 'idempotency-key': 'k' } });
    expect(added).toMatchObject({
      status: 202,
      body: { status: 'accepted', worker_id: 'e:1/pre', worker: { state: 'starting', labels: { zone: 'a' } } },
    });
    const path = String(added.headers['location']);
    expect(path).toBe('/workers/e%3A1%2Fpre');
    await ask('POST', '/workers', worker, { headers: { 'idempotency-key': 'k' } });
    await clock.pass(3_600_000);
    expect((await ask('GET', path)).body).toMatchObject({ is_healthy: true, generation: 1 });
    expect((await ask('POST', `${path}/drain`, { reason: 'update' })).body).toMatchObject({
      state: 'draining',
      state_reason: 'update',
    });
    expect((await ask('POST', `${path}/resume`)).body.state).toBe('suspect');
    expect((await ask('DELETE', path)).body).toEqual({ status: 'removed', worker_id: 'e:1/pre' });
    expect(registry.snapshot()[0]?.stateReason).toBe('operator');
    expect(await ask('DELETE', path)).toMatchObject({ status: 404, body: { error: { code: 'instance_not_found' } } });
    const lease = { url: 'http://e:2', role: 'both', lease_seconds: 10 };
    expect((await ask('POST', '/workers', lease)).body.worker.worker_type).toBe('regular');
    await clock.pass(10_000);
    expect((await ask('GET', '/workers/e:2')).body.state_reason).toBe('lease_expired');
  });

  it.each([
    ['no JSON', '{', 'body_invalid_json', null],
    ['a list', [], 'body_not_object', null],
    ['nothing', {}, 'invalid_argument', 'worker_type'],
    ['no URL', { worker_type: 'decode' }, 'invalid_argument', 'url'],
    ['a URL of nothing', { worker_type: 'decode', url: 'nonsense' }, 'invalid_argument', 'url'],
    ['a role of nobody', { worker_type: 'cook', url: 'http://e:1' }, 'invalid_argument', 'worker_type'],
    ['an unknown member', { role: 'both', url: 'http://e:1', colour: 'red' }, 'invalid_argument', 'colour'],
    ['an unknown connector', { role: 'both', url: 'http://e:1', connector: 'x' }, 'invalid_argument', 'connector'],
    ['labels of numbers', { role: 'both', url: 'http://e:1', labels: { a: 1 } }, 'invalid_argument', 'labels'],
    ['a lease of no length', { role: 'both', url: 'http://e:1', lease_seconds: 0 }, 'invalid_argument', 'lease'],
  ])('refuses %s with a sentence', async (_, body, code, param) => {
    const { ask, registry } = setUpAdmin([]);
    const reply = await ask('POST', '/workers', body);
    expect(reply).toMatchObject({ status: 400, body: { error: { code, param } } });
    expect(reply.body.error.message).toMatch(/^[a-z_]+ \S+/);
    expect(registry.snapshot()).toEqual([]);
  });

  it('wants tokens where callers have some, and an operator for changes', async () => {
    const { ask } = setUpAdmin(['d:1'], { reader: false, operator: true });
    const status = async (...args: Parameters<typeof ask>) => (await ask(...args)).status;
    expect(await status('GET', '/workers')).toBe(401);
    expect(await status('GET', '/workers', undefined, { token: 'reader' })).toBe(200);
    for (const [method, path] of [
      ['POST', '/workers'],
      ['POST', '/workers/d:1/drain'],
      ['POST', '/workers/d:1/resume'],
      ['DELETE', '/workers/d:1'],
      ['POST', '/-/reload'],
    ] as const) {
      expect(await status(method, path, undefined, { token: 'reader' }), path).toBe(403);
      expect(await status(method, path), path).toBe(401);
    }
    expect(await status('DELETE', '/workers/d:1', undefined, { token: 'operator', from: '10.0.0.9' })).toBe(200);
    expect(await status('POST', '/-/reload', {}, { token: 'operator', from: '10.0.0.9' })).toBe(200);
  });

  it('without tokens takes changes from this machine alone, and none that a page of another site sends', async () => {
    const { ask } = setUpAdmin(['d:1']);
    const drain = (more: Parameters<typeof ask>[3]) => ask('POST', '/workers/d:1/drain', undefined, more);
    expect((await drain({ from: '10.0.0.9' })).status).toBe(403);
    expect((await ask('GET', '/workers', undefined, { from: '10.0.0.9' })).status).toBe(200);
    expect((await drain({ headers: { origin: 'http://evil.example', host: '127.0.0.1:29000' } })).status).toBe(403);
    expect((await drain({ headers: { origin: 'http://evil.example', host: 'evil.example' } })).status).toBe(403);
    expect((await drain({ headers: { origin: 'http://127.0.0.1:29000', host: '127.0.0.1:29000' } })).status).toBe(200);
    expect((await drain({ from: '::ffff:127.0.0.1' })).status).toBe(200);
    expect((await ask('POST', '/-/reload', undefined, { from: '10.0.0.9' })).status).toBe(403);
    expect((await ask('POST', '/-/reload')).body).toEqual({
      applied: ['queue.max'],
      needs_restart: [],
      left_out: [{ instance: 'd1', source: 'file', why: 'its URL is that of d:1' }],
    });
  });
});

it('whatever is refused there has one form', async () => {
  const { ask } = setUpAdmin(['d:1']);
  for (const [method, url, body, status, code] of [
    ['GET', '/nowhere', undefined, 404, 'route_not_found'],
    ['POST', '/nowhere', '<xml/>', 404, 'route_not_found'],
    ['GET', '/workers/%zz', undefined, 404, 'route_not_found'],
    ['GET', '/workers/nobody', undefined, 404, 'instance_not_found'],
    ['POST', '/workers', '{', 400, 'body_invalid_json'],
  ] as const) {
    const reply = await ask(method, url, body, { headers: { 'content-type': 'text/xml' } });
    expect([reply.status, reply.body.error?.code], url).toEqual([status, code]);
    expect(Object.keys(reply.body)).toEqual(['error']);
  }
});
