import { once } from 'node:events';
import { connect } from 'node:net';
import { setImmediate } from 'node:timers/promises';
import { afterEach, expect, test } from 'vitest';
import type { Authentication } from '../../src/http/authenticate.ts';
import { buildFacade, type FacadeService } from '../../src/http/facade.ts';
import { trustedPeers } from '../../src/http/tenant-header.ts';
import { createLogger } from '../../src/obs/log.ts';
import { Metrics } from '../../src/obs/metrics.ts';
import { Life } from '../../src/services/life.ts';
import { TenantLimits } from '../../src/services/tenant-limits.ts';

// A client may be gone before it is known whose its request is: while the process starts, or a token is checked.

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

async function start() {
  const life = new Life<FacadeService>();
  const asked = Promise.withResolvers<void>();
  const result = Promise.withResolvers<Authentication>();
  const tenantLimits = new TenantLimits(
    () => ({ requestsPerMinute: 0, tokensPerMinute: 0, concurrency: 1 }),
    () => 0,
  );
  let served = 0;
  const service: FacadeService = {
    authenticate: () => {
      asked.resolve();
      return result.promise;
    },
    proxies: () => ({ header: undefined, trusted: trustedPeers([]) }),
    tenantLimits,
    serve: async () => void served++,
    modelCards: () => [],
    health: async () => ({ conversations: 0, expired: 0, instances: {} }),
    obstacle: () => undefined,
  };
  const app = buildFacade({
    life,
    metrics: new Metrics({ version: 't' }),
    log: createLogger({ level: 'silent', format: 'json' }),
    version: 't',
    clientStallMs: () => 0,
    bodyLimitBytes: 1000,
    limits: { headerBytes: 16_384, headerMs: 0, connections: 10 },
    headerCount: 100,
    tls: undefined,
    exposeMetrics: false,
  });
  stack.defer(() => app.close());
  await app.listen({ port: 0, host: '127.0.0.1' });
  const [request] = [once(app.server, 'request')];
  const { port } = app.server.address() as { readonly port: number };
  const client = connect(port, '127.0.0.1');
  client.write('POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}');
  const [, response] = await request;
  const leave = async () => {
    const left = once(response, 'close');
    client.resetAndDestroy();
    await left;
  };
  return { life, service, asked: asked.promise, result, tenantLimits, leave, served: () => served };
}

const ADMITTED = expect.objectContaining({ leave: expect.any(Function) });

test('a client that goes while its token is checked keeps no place of its tenant, and is not served', async () => {
  const { life, service, asked, result, tenantLimits, leave, served } = await start();
  life.run(service);
  await asked;
  await leave();
  result.resolve({ kind: 'ok', tenant: 't' });
  for (let turn = 0; turn < 10; turn++) await setImmediate();
  expect(tenantLimits.admit('t')).toEqual(ADMITTED);
  expect(served()).toBe(0);
});

test('neither does one that goes while the process starts', async () => {
  const { life, service, result, tenantLimits, leave, served } = await start();
  await leave();
  result.resolve({ kind: 'ok', tenant: 't' });
  life.run(service);
  for (let turn = 0; turn < 10; turn++) await setImmediate();
  expect(tenantLimits.admit('t')).toEqual(ADMITTED);
  expect(served()).toBe(0);
});
